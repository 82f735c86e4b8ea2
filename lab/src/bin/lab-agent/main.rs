//! The first process in a VM of the lab: prepares the machine, then runs the programs that the lab
//! requests.

mod disk;
mod serve;
mod start;

use std::process::Command;

use anyhow::{Context, Result, bail};
use nix::unistd::Pid;

/// Argument with which the first process starts the second, which waits for its own children.
const SERVE: &str = "serve";

fn main() -> Result<()> {
    if std::env::args().nth(1).is_some_and(|argument| argument == SERVE) {
        return serve::serve();
    }
    if std::process::id() != 1 {
        bail!("this is the first process of a VM in the lab, and no program to be run by hand");
    }
    // An error ends the first process, and so the VM; the lab shows its console.
    start::up()?;
    if let Some(disk) = std::env::var_os(disk::GIVEN) {
        disk::boot(disk.as_ref())?;
    }
    start::soft_roce()?;
    let agent = Command::new("/proc/self/exe").arg(SERVE).spawn().context("the agent")?;
    let agent = Pid::from_raw(agent.id() as i32);
    // The first process adopts orphaned processes, and must wait for them.
    loop {
        let status = nix::sys::wait::wait()?;
        if status.pid() == Some(agent) {
            bail!("the agent has ended: {status:?}");
        }
    }
}
