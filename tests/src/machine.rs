//! A node of the lab as a machine of its own: its own files too, over those of this machine, which
//! stay as they are. For what is installed, configured and removed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::netns::{self, Netns};
use crate::process::Running;

/// A machine. Its files are gone when it is dropped, or the program ends.
#[derive(Debug)]
pub struct Machine {
    netns: Netns,
    // It lives in the mount namespace, which goes with it, and has to end before the folder goes.
    holder: Running,
    folder: TempDir,
}

impl Machine {
    /// A machine on a node, with a copy-on-write view of this machine's root file system, and
    /// `/run` and bpffs of its own.
    ///
    /// # Errors
    /// If the kernel has no overlay file system, or something cannot be mounted.
    pub fn new(netns: &Netns) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("netsum-machine-").tempdir()?;
        let script = "cd \"$1\"; mkdir upper work root
            mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root; cd root
            mount --rbind /dev dev; mount -t proc proc proc; mount -t sysfs sysfs sys; mount -t bpf bpf sys/fs/bpf
            mount -t tmpfs tmpfs run; echo ready; exec cat";
        let mut unshare = netns.command("unshare");
        unshare
            .args(["--mount", "--propagation", "private", "sh", "-euc", script, "sh"])
            .arg(folder.path());
        let mut holder = Running::start("a machine", &mut unshare)?;
        holder
            .line(Duration::from_secs(10))
            .with_context(|| format!("a machine's files: {}", holder.stderr()))?;
        Ok(Self { netns: netns.clone(), holder, folder })
    }

    /// A shell script to be run in root's home, which ends at the first command that fails.
    pub fn script(&self, script: &str) -> Command {
        let mut command = self.netns.command("nsenter");
        command
            .args(["--target", &self.holder.pid().to_string(), "--mount", "chroot"])
            .arg(self.folder.path().join("root"));
        command.args(["sh", "-euc", &format!("cd /root\n{script}")]);
        command
    }

    /// Runs a script to its end and returns what it printed; an error holds what it said.
    pub fn run(&self, script: &str) -> Result<String> {
        netns::output(&mut self.script(script))
    }

    /// Where a file of this machine is seen from outside.
    pub fn path(&self, file: &str) -> PathBuf {
        let root = Path::new("/proc").join(self.holder.pid().to_string()).join("root");
        let inside = self.folder.path().join("root");
        root.join(inside.strip_prefix("/").unwrap_or(&inside)).join(file.trim_start_matches('/'))
    }
}
