//! The manager, as a process: `netsum fabric run`.

use std::fmt::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use netsum_lab::netns::output;
use nix::unistd::{SysconfVar, sysconf};

use super::Size;
use super::ranks::{TOKEN, job_name};

const START: Duration = Duration::from_secs(20);

/// The manager's process; dropping it kills it.
pub struct Manager {
    child: Child,
    netsum: PathBuf,
    folder: PathBuf,
    /// The address at which ranks join.
    pub workers: SocketAddr,
}

impl Manager {
    /// Starts the manager of these boxes, whose sockets are in `folder`; each leaf has a link to
    /// each spine.
    pub fn start(netsum: &Path, folder: &Path, boxes: &[&str], size: &Size) -> Result<Self> {
        let workers = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let path = |name: &str| folder.join(name).display().to_string();
        let mut text = format!(
            "workers = \"{workers}\"\nadmin = {:?}\nstate = {:?}\n",
            path("fabric.sock"),
            path("fabric.json")
        );
        for name in boxes {
            write!(
                text,
                "[[box]]\nname = \"{name}\"\naddress = \"unix:{}\"\n",
                path(&format!("{name}.sock"))
            )?;
        }
        for (leaf, spine) in
            (0..size.leaves).flat_map(|leaf| (0..size.spines).map(move |spine| (leaf, spine)))
        {
            write!(
                text,
                "[[link]]\nbelow = \"leaf{leaf}/link{spine}\"\nabove = \
                 \"spine{spine}/link{leaf}\"\n"
            )?;
        }
        std::fs::write(folder.join("fabric.toml"), text)?;
        Self::run(netsum.to_owned(), folder.to_owned(), workers)
    }

    fn run(netsum: PathBuf, folder: PathBuf, workers: SocketAddr) -> Result<Self> {
        let mut command = Command::new(&netsum);
        command.args(["fabric", "run", "--config"]).arg(folder.join("fabric.toml"));
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "error");
        }
        let child = command.spawn().with_context(|| netsum.display().to_string())?;
        let mut manager = Self { child, netsum, folder, workers };
        let begin = Instant::now();
        while std::net::TcpStream::connect(workers).is_err() {
            let ended = manager.child.try_wait()?;
            ensure!(
                ended.is_none() && begin.elapsed() < START,
                "the manager does not listen on {workers}: {ended:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(manager)
    }

    /// Kills it, and starts the next one.
    pub fn start_again(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        *self = Self::run(self.netsum.clone(), self.folder.clone(), self.workers)?;
        Ok(())
    }

    /// Creates the jobs through the administration API.
    pub fn create_jobs(&self, size: &Size) -> Result<()> {
        let (ranks, rings) = (size.ranks.to_string(), size.rings.to_string());
        for job in 0..size.jobs {
            let mut command = Command::new(&self.netsum);
            command.arg("--socket").arg(self.folder.join("fabric.sock"));
            command.args(["job", "create", &job_name(job), "--ranks", &ranks, "--rings", &rings]);
            command.args([
                "--mtu",
                "1024",
                "--message-size",
                "4096",
                "--window",
                "2",
                "--token",
                TOKEN,
            ]);
            output(&mut command)?;
        }
        Ok(())
    }

    /// CPU seconds so far.
    pub fn cpu(&self) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // utime and stime are fields 14 and 15, see proc_pid_stat(5); the name, field 2, ends at
        // the last `)`.
        let fields: Vec<&str> =
            stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |n: usize| {
            fields.get(n - 3).and_then(|f| f.parse::<f64>().ok()).context("/proc/PID/stat")
        };
        let per_second = sysconf(SysconfVar::CLK_TCK)?.context("no clock ticks")?;
        Ok((ticks(14)? + ticks(15)?) / per_second as f64)
    }

    /// Resident bytes.
    pub fn memory(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let kib = status.lines().find_map(|l| {
            l.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        });
        Ok(kib.context("/proc/PID/status has no VmRSS")? << 10)
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
