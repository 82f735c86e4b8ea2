//! Stands for a program in a VM of the lab: `lab-exec ADDRESS PROGRAM [ARGUMENTS]`, in the box's
//! network namespace.

use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use netsum_lab::vm::client::{self, Exit};
use netsum_lab::vm::name_inside;
use nix::sys::signal::{SigHandler, SigSet, Signal, raise, signal};

/// Exit code for failures that are not the program's own, as with `timeout`.
const FAILURE: u8 = 125;

fn main() -> ExitCode {
    match run() {
        Ok(Exit::Code(code)) => ExitCode::from(code as u8),
        Ok(Exit::Signal(number)) => die(number),
        Err(error) => {
            eprintln!("lab-exec: {error:#}");
            ExitCode::from(FAILURE)
        }
    }
}

fn run() -> Result<Exit> {
    // Blocked before other threads start, which inherit the mask.
    let signals = client::passed_on();
    signals.thread_block()?;
    let mut arguments = std::env::args().skip(1);
    let usage = "lab-exec ADDRESS PROGRAM [ARGUMENTS]";
    let ip: IpAddr = arguments.next().context(usage)?.parse().context(usage)?;
    let mut command: Vec<String> = arguments.collect();
    let given = command.first_mut().context(usage)?;
    let connect =
        || client::connect(ip, Duration::from_secs(10)).with_context(|| format!("the VM {ip}"));
    let (name, ours) = name_inside(given);
    if let Some(path) = ours {
        client::put(&connect()?, &path, &name)?;
    }
    *given = name;
    let env = std::env::vars()
        .filter(|(name, _)| name.starts_with("NETSUM_") || name.starts_with("RUST_"));
    client::run(connect()?, command, env.collect(), signals)
}

/// Ends as the program has ended.
fn die(number: i32) -> ExitCode {
    if let Ok(which) = Signal::try_from(number) {
        // SAFETY: only the default handler is installed.
        let _ = unsafe { signal(which, SigHandler::SigDfl) };
        let _ = SigSet::from(which).thread_unblock();
        let _ = raise(which);
    }
    // A shell's exit code for it.
    ExitCode::from(128u8.wrapping_add(number as u8))
}
