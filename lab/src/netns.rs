//! Runs programs and threads in a network namespace.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, setns};

/// Folder where `ip netns` keeps its names.
pub const RUN_NETNS: &str = "/run/netns";

/// A named network namespace.
#[derive(Clone, Debug)]
pub struct Netns {
    name: String,
    handle: Arc<File>,
}

impl Netns {
    /// Opens a namespace of `ip netns`. An error names it.
    pub fn open(name: &str) -> Result<Self> {
        let path = PathBuf::from(RUN_NETNS).join(name);
        let handle = File::open(&path).with_context(|| format!("network namespace {name}"))?;
        Ok(Self { name: name.to_owned(), handle: Arc::new(handle) })
    }

    /// The name, as in `ip netns exec NAME`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A command that runs inside. It dies with the thread that starts it, and so it does not
    /// survive its test.
    ///
    /// `/sys` still shows the devices of the namespace in which it was mounted; netlink and sockets
    /// show this one.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.prepare(program, true)
    }

    /// Like [`Netns::command`], but it may outlive the thread that starts it.
    pub fn free_command(&self, program: impl AsRef<OsStr>) -> Command {
        self.prepare(program, false)
    }

    fn prepare(&self, program: impl AsRef<OsStr>, die_with_parent: bool) -> Command {
        let handle = self.handle.clone();
        let mut command = Command::new(program);
        let enter = move || {
            setns(&*handle, CloneFlags::CLONE_NEWNET)?;
            if die_with_parent {
                nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
            }
            io::Result::Ok(())
        };
        // SAFETY: between fork and exec, `enter` only makes system calls: it does not allocate or
        // lock.
        unsafe { command.pre_exec(enter) };
        command
    }

    /// Runs `work` on a thread that is inside.
    ///
    /// # Panics
    /// If `work` panics, or if the kernel refuses to enter the namespace.
    pub fn enter<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let inside = || {
            setns(&*self.handle, CloneFlags::CLONE_NEWNET)
                .unwrap_or_else(|e| panic!("cannot enter network namespace {}: {e}", self.name));
            work()
        };
        match std::thread::scope(|s| s.spawn(inside).join()) {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Sets an interface inside up or down, as an administrator would.
    pub fn set_link(&self, interface: &str, up: bool) -> Result<()> {
        let state = if up { "up" } else { "down" };
        output(self.command("ip").args(["link", "set", interface, state])).map(drop)
    }

    /// Index of an interface inside.
    pub fn ifindex(&self, interface: &str) -> Result<u32> {
        self.enter(|| nix::net::if_::if_nametoindex(interface))
            .with_context(|| format!("interface {interface} in network namespace {}", self.name))
    }

    /// Raw descriptor, for callers that use `setns` themselves.
    pub fn raw_fd(&self) -> i32 {
        self.handle.as_raw_fd()
    }
}

/// Runs a command to its end and returns its output; an error contains the command and its
/// messages.
pub fn output(command: &mut Command) -> Result<String> {
    let out = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !out.status.success() {
        // `netsum -j` prints errors as JSON on standard output.
        let printed = if out.stderr.is_empty() { &out.stdout } else { &out.stderr };
        anyhow::bail!("{command:?}: {}: {}", out.status, String::from_utf8_lossy(printed).trim());
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}
