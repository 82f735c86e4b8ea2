//! Runs all of netsum in a lab: the daemon on the box, jobs, and ranks on the hosts.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use netsum_core::plane::FlowSpec;
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::group::Started;
pub use crate::group::{Group, Order, Outcome, RankReply, RankSpec, to_hex};
pub use crate::job::JobSpec;
use crate::lab::BoxNode;
use crate::process::Running;
pub use crate::process::{TIMEOUT, program};
use crate::{Lab, LabSpec, cleaner, netns};

/// TCP port of the workers' API on the box.
pub const WORKER_PORT: u16 = 4790;

/// Where a rank runs: the host's number, and the index of its address.
pub type RankHost = (usize, usize);

/// Rank r on host r.
pub fn one_on_each_host(ranks: u32) -> Vec<RankHost> {
    (0..ranks as usize).map(|host| (host, 0)).collect()
}

/// Special settings for starting a daemon.
#[derive(Clone, Debug, Default)]
pub struct DaemonOptions {
    /// Further lines of its configuration that are in no section.
    pub general: String,
    /// Further lines for the section `[listen]` of its configuration.
    pub listen: String,
    /// `RUST_LOG`.
    pub log: Option<String>,
    /// Further arguments to `netsum run`.
    pub arguments: Vec<String>,
    /// A program that starts it, with arguments.
    pub prefix: Vec<String>,
}

/// A lab, and a daemon on its box.
#[derive(Debug)]
pub struct Cluster {
    daemon: Option<Running>,
    /// The daemons on the other boxes, by the boxes' numbers.
    others: BTreeMap<usize, Running>,
    /// Whether jobs survive when the daemon is killed.
    pinned: bool,
    /// Whether its jobs are created again at every start.
    kept: bool,
    /// Whether the daemon listens on the box's IPv6 address.
    v6: bool,
    folder: TempDir,
    lab: Lab,
}

impl Cluster {
    /// Builds a lab and starts the daemon.
    pub fn start(spec: LabSpec) -> Result<Self> {
        let mut cluster = Self::without_daemon(spec)?;
        cluster.start_daemon()?;
        Ok(cluster)
    }

    /// Builds a lab without a daemon; its box is a plain bridge.
    pub fn without_daemon(spec: LabSpec) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("netsum-lab-").tempdir()?;
        Ok(Self {
            daemon: None,
            others: BTreeMap::new(),
            pinned: false,
            kept: false,
            v6: false,
            folder,
            lab: Lab::new(spec)?,
        })
    }

    /// Makes jobs survive a killed daemon, from the next start on.
    pub fn pin(&mut self) {
        self.pinned = true;
    }

    /// Makes the daemon create its jobs again at every start, from the next one on.
    pub fn keep_jobs(&mut self) {
        self.kept = true;
    }

    /// Makes the daemon listen for workers over IPv6, from the next start on.
    pub fn listen_over_ipv6(&mut self) {
        self.v6 = true;
    }

    /// Address where the daemon listens for workers.
    pub fn workers(&self) -> SocketAddr {
        let box_ = self.lab.box_();
        SocketAddr::new(if self.v6 { box_.ipv6() } else { box_.ip() }, WORKER_PORT)
    }

    /// Folder for the daemon's pins. The cleaner removes it with the lab.
    pub fn pins(&self) -> PathBuf {
        PathBuf::from(cleaner::PINS).join(self.lab.prefix())
    }

    /// The state file of jobs that survive the daemon.
    pub fn state_file(&self) -> PathBuf {
        self.folder.path().join("state/state.json")
    }

    /// The file of jobs that are created again, in a folder of its own.
    pub fn jobs_file(&self) -> PathBuf {
        self.folder.path().join("kept/jobs.json")
    }

    /// The daemon's process ID; 0 if it does not run.
    pub fn daemon_pid(&self) -> u32 {
        self.daemon.as_ref().map_or(0, Running::pid)
    }

    /// Kills the daemon as `kill -9` does.
    pub fn kill_daemon(&mut self) -> Result<()> {
        ensure!(self.daemon.is_some(), "no daemon runs");
        self.kill_box(None)
    }

    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// Starts the daemon and waits until it answers.
    pub fn start_daemon(&mut self) -> Result<()> {
        self.start_daemon_as(&DaemonOptions::default())
    }

    /// Starts the daemon with further arguments to `netsum run`, and waits until it answers.
    pub fn start_daemon_with(&mut self, arguments: &[&str]) -> Result<()> {
        let arguments = arguments.iter().map(|&a| a.to_owned()).collect();
        self.start_daemon_as(&DaemonOptions { arguments, ..DaemonOptions::default() })
    }

    /// Starts the daemon with special settings, and waits until it answers.
    pub fn start_daemon_as(&mut self, options: &DaemonOptions) -> Result<()> {
        self.daemon = Some(self.run_daemon(None, options)?);
        Ok(())
    }

    /// Starts a daemon on each other box.
    pub fn start_leaves(&mut self) -> Result<()> {
        self.lab.spec().boxes().try_for_each(|number| self.start_box(Some(number)))
    }

    /// Starts a box's daemon, after killing the one that runs there.
    pub fn start_box(&mut self, number: Option<usize>) -> Result<()> {
        self.kill_box(number)?;
        let daemon = self.run_daemon(number, &DaemonOptions::default())?;
        match number {
            None => self.daemon = Some(daemon),
            Some(number) => drop(self.others.insert(number, daemon)),
        }
        Ok(())
    }

    /// Kills a box's daemon as `kill -9` does, if one runs there.
    pub fn kill_box(&mut self, number: Option<usize>) -> Result<()> {
        let daemon = match number {
            None => self.daemon.take(),
            Some(number) => self.others.remove(&number),
        };
        daemon.map_or(Ok(()), |daemon| {
            daemon.signal(Signal::SIGKILL)?;
            daemon.end(TIMEOUT).map(drop)
        })
    }

    /// Sends a signal to a box's daemon.
    pub fn signal_box(&self, number: Option<usize>, signal: Signal) -> Result<()> {
        let daemon = number.map_or(self.daemon.as_ref(), |number| self.others.get(&number));
        daemon.context("no daemon runs")?.signal(signal)
    }

    pub(crate) fn box_of(&self, rack: Option<usize>) -> &BoxNode {
        rack.map_or(self.lab.box_(), |rack| self.lab.leaf(rack))
    }

    fn run_daemon(&self, rack: Option<usize>, options: &DaemonOptions) -> Result<Running> {
        let node = self.box_of(rack);
        let config = self.file(rack, "netsum.toml");
        std::fs::write(&config, options.general.clone() + &self.config(rack) + &options.listen)?;
        if let Some(machine) = node.vm() {
            machine.put(&config, &config.display().to_string())?;
        }
        if self.pinned && self.lab.spec().racks > 0 {
            // Each box has a folder of its own in it, which must be in bpffs.
            std::fs::create_dir_all(self.pins())?;
        }
        let netsum = program("netsum")?;
        let mut command = match &*options.prefix {
            [] => node.command(netsum),
            [first, rest @ ..] => {
                let mut command = node.command(first);
                command.args(rest).arg(netsum);
                command
            }
        };
        let log = options.log.clone().unwrap_or_else(log_level);
        command
            .args(["run", "--config"])
            .arg(&config)
            .args(&options.arguments)
            .env("RUST_LOG", log);
        let mut daemon = Running::start("netsum run", &mut command)?;
        let start = Instant::now();
        while let Err(error) = self.netsum_on(rack, &["port", "show"]) {
            if !daemon.is_running() {
                bail!("the daemon has ended: {}", daemon.end(TIMEOUT)?.stderr);
            }
            ensure!(
                start.elapsed() < TIMEOUT,
                "the daemon does not answer: {error:#}\n{}",
                daemon.stderr()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(daemon)
    }

    /// Ends the daemon as an administrator would, and waits for its end.
    pub fn stop_daemon(&mut self) -> Result<()> {
        let daemon = self.daemon.take().context("no daemon runs")?;
        daemon.signal(Signal::SIGTERM)?;
        daemon.success(TIMEOUT).map(drop)
    }

    /// Ends the daemon as `systemctl restart` does: the next one continues its jobs.
    pub fn hand_over(&mut self) -> Result<()> {
        let daemon = self.daemon.take().context("no daemon runs")?;
        daemon.signal(Signal::SIGUSR1)?;
        daemon.success(TIMEOUT).map(drop)
    }

    /// The daemon's log so far.
    pub fn daemon_log(&self) -> String {
        self.daemon.as_ref().map(Running::stderr).unwrap_or_default()
    }

    /// Folder of the daemon's configuration and socket.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Path of the administration socket.
    pub fn socket(&self) -> String {
        self.file(None, "netsum.sock").display().to_string()
    }

    /// A file of the box's daemon, or of a rack's.
    pub(crate) fn file(&self, rack: Option<usize>, name: &str) -> PathBuf {
        let folder = self.folder.path();
        rack.map_or(folder.join(name), |rack| folder.join(format!("leaf{rack}-{name}")))
    }

    fn config(&self, rack: Option<usize>) -> String {
        let spec = self.lab.spec();
        let pins =
            if spec.racks == 0 { self.pins() } else { self.pins().join(spec.box_name(rack)) };
        let pin = if self.pinned { pins.to_str().unwrap_or_default() } else { "none" };
        let jobs = if self.kept { self.jobs_file() } else { "none".into() };
        let restart = format!(
            "[restart]\npin = {pin:?}\nstate = {:?}\njobs = {jobs:?}\n",
            self.file(rack, "state/state.json")
        );
        let spec = self.lab.spec();
        let ports: Vec<String> = match rack {
            Some(rack) => {
                let hosts = (0..spec.hosts).filter(|&host| spec.rack(host) == Some(rack));
                hosts
                    .map(|host| format!("port{host}"))
                    .chain((0..spec.spines).map(BoxNode::uplink))
                    .collect()
            }
            None => spec.below().map(|rack| self.lab.box_().rack_port(rack)).collect(),
        };
        let ports =
            if spec.routes { format!("ports = {ports:?}") } else { "bridge = \"br0\"".to_owned() };
        let uplinks: Vec<String> = (0..spec.spines).map(BoxNode::uplink).collect();
        let spread = match rack {
            Some(rack) if rack < spec.racks && spec.routes && spec.spines > 1 => {
                format!("spread = {uplinks:?}\n")
            }
            _ => String::new(),
        };
        format!(
            "{ports}\n{spread}{restart}[watch]\nstall-ms = 1000\n[listen]\nadmin = \
             \"{}\"\nworkers = \"{}\"\n",
            self.file(rack, "netsum.sock").display(),
            rack.map_or(self.workers(), |_| SocketAddr::new(self.box_of(rack).ip(), WORKER_PORT))
        )
    }

    /// Runs `netsum ARGUMENTS` on the box; returns its output.
    pub fn netsum(&self, arguments: &[&str]) -> Result<String> {
        self.netsum_on(None, arguments)
    }

    /// Runs `netsum ARGUMENTS` on a rack's box; returns its output.
    pub fn netsum_on(&self, rack: Option<usize>, arguments: &[&str]) -> Result<String> {
        let mut command = self.box_of(rack).command(program("netsum")?);
        netns::output(command.arg("--socket").arg(self.file(rack, "netsum.sock")).args(arguments))
    }

    /// Runs `netsum -j ARGUMENTS` on the box.
    pub fn netsum_json(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.netsum(&[&["-j"], arguments].concat())?;
        serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))
    }

    /// Creates a job with these numbers and further options; returns what `netsum` prints.
    pub fn create(&self, name: &str, numbers: &[(&str, u32)], more: &[&str]) -> Result<Value> {
        let numbers: Vec<_> = numbers.iter().map(|(option, n)| (*option, n.to_string())).collect();
        let mut arguments = vec!["job", "create", name];
        arguments.extend(numbers.iter().flat_map(|(option, n)| [*option, n]));
        self.netsum_json(&[&arguments, more].concat())
    }

    /// Creates a job; returns its token.
    pub fn create_job(&self, job: &JobSpec) -> Result<String> {
        let arguments = job.create_arguments();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let created = self.netsum_json(&arguments)?;
        let token = created["token"].as_str().with_context(|| format!("no token in {created}"))?;
        Ok(token.to_owned())
    }

    /// Registers a flow by hand, as an administrator does.
    pub fn add_flow(&self, job: &str, flow: &FlowSpec, port: &str) -> Result<String> {
        let FlowSpec { ring, member: rank, base_psn, src, dst, qpn, src_mac, .. } = flow;
        let numbers = [ring.0, rank.0, qpn.get(), base_psn.get()].map(|n| n.to_string());
        let [ring, rank, qpn, psn] = numbers.each_ref().map(String::as_str);
        let (src, dst) = (src.to_string(), dst.to_string());
        let mac = src_mac.map(|mac| mac.map(|b| format!("{b:02x}")).join(":")).unwrap_or_default();
        let mut arguments =
            vec!["flow", "add", job, "--ring", ring, "--rank", rank, "--port", port];
        arguments.extend(["--src", &src, "--dst", &dst, "--qpn", qpn, "--psn", psn]);
        if !mac.is_empty() {
            arguments.extend(["--src-mac", &mac]);
        }
        self.netsum(&arguments)
    }

    /// Starts the ranks of a job and waits until they are connected.
    pub fn ranks(&self, job: &JobSpec, token: &str, places: &[RankHost]) -> Result<Group> {
        let controller = self.workers().to_string();
        self.group(job, Some((controller, token)), places, false)
    }

    /// Starts the ranks of a job over IPv6 and waits until they are connected.
    pub fn ranks_v6(&self, job: &JobSpec, token: &str, places: &[RankHost]) -> Result<Group> {
        let controller = self.workers().to_string();
        self.group(job, Some((controller, token)), places, true)
    }

    /// Starts ranks that do not know of a daemon.
    pub fn ranks_alone(&self, job: &JobSpec, places: &[RankHost]) -> Result<Group> {
        self.group(job, None, places, false)
    }

    /// Starts ranks over IPv6 that do not know of a daemon.
    pub fn ranks_alone_v6(&self, job: &JobSpec, places: &[RankHost]) -> Result<Group> {
        self.group(job, None, places, true)
    }

    pub(crate) fn group(
        &self,
        job: &JobSpec,
        controller: Option<(String, &str)>,
        places: &[RankHost],
        v6: bool,
    ) -> Result<Group> {
        ensure!(
            places.len() == job.ranks as usize,
            "{} places for {} ranks",
            places.len(),
            job.ranks
        );
        let ip = |&(host, k): &RankHost| {
            if v6 { self.lab.host(host).ipv6(k) } else { self.lab.host(host).ip(k) }
        };
        let peers: Vec<_> = places.iter().map(ip).collect();
        let daemon = controller.as_ref().map(|(address, token)| (&**address, *token));
        let mut started = Vec::new();
        for (rank, place) in places.iter().enumerate() {
            let spec = RankSpec::new(job, rank, &peers, daemon);
            let running = self.rank(place.0, &spec)?;
            let elsewhere = self.lab.host(place.0).vm().is_some();
            started.push(Started { running, host: place.0, spec, elsewhere });
        }
        // The ranks' errors come first.
        Group::new(job, started).map_err(|e| anyhow!("{e:#}{}", self.daemon_log()))
    }

    /// Starts a killed rank again. It answers when all ranks have reconnected.
    pub fn start_again(&self, group: &mut Group, rank: usize) -> Result<()> {
        group.start_again(rank, |host, spec| self.rank(host, spec))
    }

    /// Starts a rank's process on a host.
    fn rank(&self, host: usize, spec: &RankSpec) -> Result<Running> {
        let mut command = self.lab.host(host).command(program("netsum-rank")?);
        command.arg(serde_json::to_string(spec)?).env("RUST_LOG", log_level());
        Running::start(&format!("{} rank {}", spec.job, spec.rank), &mut command)
    }

    /// A counter of the box, or of one job on it.
    pub fn counter(&self, job: Option<&str>, name: &str) -> Result<u64> {
        let mut arguments = vec!["stats"];
        arguments.extend(job);
        let stats = self.netsum_json(&arguments)?;
        stats[name].as_u64().with_context(|| format!("no counter {name} in {stats}"))
    }
}

/// `RUST_LOG` of the programs that tests start.
fn log_level() -> String {
    std::env::var("RUST_LOG").unwrap_or_else(|_| "info".into())
}
