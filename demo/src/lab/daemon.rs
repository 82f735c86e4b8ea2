//! `netsum run` on a box, and its job.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use netsum_demo::{LAYOUT, PATH_MTU};
use netsum_lab::lab::BoxNode;
use netsum_lab::netns::output;
use netsum_lab::process::Running;
use nix::sys::signal::Signal;
use serde::Deserialize;

use super::interrupt;

/// How long the daemon may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(15);
/// Port of the workers' API.
const PORT: u16 = 4790;

/// A job, as its ranks need to know it.
#[derive(Clone, Debug)]
pub struct Job {
    pub name: String,
    /// What its ranks prove themselves with.
    pub token: String,
    /// Where its ranks find the daemon.
    pub controller: String,
    /// Bytes on the box.
    pub memory: u64,
}

/// The daemon. It is told to end on drop, so that it takes its programs and maps along.
pub struct Daemon {
    process: Option<Running>,
    program: PathBuf,
    controller: String,
    socket: PathBuf,
}

impl Daemon {
    /// Starts it on a box and waits until it answers. Its files are in `folder`.
    pub fn start(node: &BoxNode, program: &Path, folder: &Path) -> Result<Self> {
        let controller = format!("{}:{PORT}", node.ip());
        let file = |kind: &str| folder.join(format!("{}.{kind}", node.name()));
        let (socket, config) = (file("sock"), file("toml"));
        let text = format!(
            "bridge = {:?}\n[restart]\npin = \"none\"\njobs = \"none\"\n[listen]\nworkers = {controller:?}\nadmin = {socket:?}\n",
            BoxNode::BRIDGE
        );
        std::fs::write(&config, text).with_context(|| config.display().to_string())?;
        let mut command = node.command(program);
        command.arg("run").arg("--config").arg(&config);
        // Ctrl-C is for this process, which ends the daemon last.
        command.process_group(0);
        let process = Some(Running::start("netsum run", &mut command)?);
        let mut daemon = Self { process, program: program.to_owned(), controller, socket };
        daemon.wait()?;
        Ok(daemon)
    }

    fn wait(&mut self) -> Result<()> {
        let start = Instant::now();
        while let Err(error) = output(self.command().args(["job", "list", "-j"])) {
            interrupt::check()?;
            self.check()?;
            if start.elapsed() > PATIENCE {
                bail!("netsum run does not answer: {error:#}{}", self.said());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Creates the job; `members` says which part of it this box has, if not all.
    pub fn create_job(&self, ranks: usize, members: &[&str]) -> Result<Job> {
        #[derive(Deserialize)]
        struct Created {
            name: String,
            token: String,
            memory: u64,
        }
        let said = output(
            self.command()
                .args(["job", "create", "digits", "--dtype", "i32", "-j", "--ranks", &ranks.to_string()])
                .args(["--mtu", &PATH_MTU.to_string(), "--message-size", &LAYOUT.message_size.to_string()])
                .args(["--window", &LAYOUT.window.to_string(), "--rings", &LAYOUT.rings.to_string()])
                .args(members),
        )?;
        let job: Created =
            serde_json::from_str(&said).with_context(|| format!("netsum job create said `{said}`"))?;
        Ok(Job { name: job.name, token: job.token, controller: self.controller.clone(), memory: job.memory })
    }

    /// Registers the connections of ranks that have no daemon to join by.
    pub fn register(&self, job: &Job, peers: &str, ports: &[String]) -> Result<()> {
        let ports = ports.join(",");
        output(self.command().args(["flow", "peers", &job.name, "--peers", peers, "--ports", &ports]))
            .map(drop)
    }

    pub fn delete_job(&self, job: &Job) -> Result<()> {
        output(self.command().args(["job", "delete", &job.name])).map(drop)
    }

    /// What the data plane has counted for a job.
    pub fn counters(&self, job: &Job) -> Result<BTreeMap<String, u64>> {
        let said = output(self.command().args(["stats", &job.name, "-j"]))?;
        parse_counters(&said).with_context(|| format!("netsum stats said `{said}`"))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--socket").arg(&self.socket);
        command
    }

    /// An error if it has ended.
    pub fn check(&mut self) -> Result<()> {
        if let Some(process) = &mut self.process
            && !process.is_running()
        {
            bail!("netsum run has ended:\n{}", process.stderr());
        }
        Ok(())
    }

    /// What it has logged, to be appended to an error.
    pub fn said(&self) -> String {
        match self.process.as_ref().map(Running::stderr) {
            Some(log) if !log.is_empty() => format!("\nthe box said:\n{}", log.trim_end()),
            _ => String::new(),
        }
    }

    /// Tells it to end, and waits until it has.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(process) = self.process.take() else { return Ok(()) };
        process.signal(Signal::SIGTERM)?;
        process.success(PATIENCE).map(drop)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            log::warn!("{error:#}");
        }
    }
}

/// The counters in what `netsum stats JOB -j` prints; the timing beside them is none.
fn parse_counters(stats: &str) -> Result<BTreeMap<String, u64>> {
    let all: BTreeMap<String, serde_json::Value> = serde_json::from_str(stats)?;
    Ok(all.into_iter().filter_map(|(name, value)| Some((name, value.as_u64()?))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_beside_the_timing() {
        let said = r#"{"completed":18040,"steered":3,"timing":{"sampled":64,"ranks":[]}}"#;
        let counters = parse_counters(said).unwrap();
        assert_eq!(counters, BTreeMap::from([("completed".to_owned(), 18040), ("steered".to_owned(), 3)]));
        assert!(parse_counters("error: no job").is_err());
    }
}
