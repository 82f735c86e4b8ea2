//! Makes a node of the lab a machine with files of its own, over those of this machine, which stay
//! unchanged. Serves tests that install, configure and remove software.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::netns::{self, Netns};
use crate::process::Running;

/// A machine. Its files are removed when it is dropped or the program ends.
#[derive(Debug)]
pub struct Machine {
    netns: Netns,
    // Holds the mount namespace, and must end before the folder is removed.
    holder: Running,
    folder: TempDir,
}

impl Machine {
    /// A machine on a node, with a copy-on-write view of this machine's root file system, and
    /// `/run` and bpffs of its own.
    ///
    /// # Errors
    /// If the kernel has no overlay file system, or a mount fails.
    pub fn new(netns: &Netns) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("netsum-machine-").tempdir()?;
        let script = "cd \"$1\"; mkdir upper work root
            mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root; cd root
            mount --rbind /dev dev; mount -t proc proc proc; mount -t sysfs sysfs sys; mount -t \
            bpf bpf sys/fs/bpf
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

    /// A shell script that runs in root's home, and ends at the first command that fails.
    pub fn script(&self, script: &str) -> Command {
        let mut command = self.netns.command("nsenter");
        command
            .args(["--target", &self.holder.pid().to_string(), "--mount", "chroot"])
            .arg(self.folder.path().join("root"));
        command.args(["sh", "-euc", &format!("cd /root\n{script}")]);
        command
    }

    /// Runs a script to its end and returns its output; an error contains its messages.
    pub fn run(&self, script: &str) -> Result<String> {
        netns::output(&mut self.script(script))
    }

    /// Path from outside to a file of this machine.
    pub fn path(&self, file: &str) -> PathBuf {
        let root = Path::new("/proc").join(self.holder.pid().to_string()).join("root");
        let inside = self.folder.path().join("root");
        root.join(inside.strip_prefix("/").unwrap_or(&inside)).join(file.trim_start_matches('/'))
    }
}
