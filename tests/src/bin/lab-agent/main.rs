//! The first process in a VM of the lab: gets the machine ready, then runs what the lab asks for.

mod disk;
mod serve;
mod start;

use std::process::Command;

use anyhow::{Context, Result, bail};
use nix::unistd::Pid;

/// How the first process starts the second, which has children that it waits for itself.
const SERVE: &str = "serve";

fn main() -> Result<()> {
    if std::env::args().nth(1).is_some_and(|argument| argument == SERVE) {
        return serve::serve();
    }
    if std::process::id() != 1 {
        bail!("this is the first process of a VM in the lab, and no program to be run by hand");
    }
    // An error ends the first process, hence the VM; the lab shows its console.
    start::up()?;
    if let Some(disk) = std::env::var_os(disk::GIVEN) {
        disk::boot(disk.as_ref())?;
    }
    start::soft_roce()?;
    let agent = Command::new("/proc/self/exe").arg(SERVE).spawn().context("the agent")?;
    let agent = Pid::from_raw(agent.id() as i32);
    // Whose parent has gone is the first process's child.
    loop {
        let status = nix::sys::wait::wait()?;
        if status.pid() == Some(agent) {
            bail!("the agent has ended: {status:?}");
        }
    }
}
