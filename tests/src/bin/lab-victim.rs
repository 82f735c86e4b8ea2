//! Builds a lab, with `--vm` one with a virtual machine, prints its name and waits to be killed:
//! for the tests of what is left behind then.

use netsum_lab::process::Running;
use netsum_lab::vm::parts::Kernel;
use netsum_lab::{Lab, LabSpec};
use nix::sys::signal::{SigHandler, Signal, signal};

fn main() -> anyhow::Result<()> {
    // Programs that are started in the background, as CI may be, ignore Ctrl-C.
    // SAFETY: no handler of ours is installed, only the default one.
    unsafe { signal(Signal::SIGINT, SigHandler::SigDfl) }?;
    let with_vm = std::env::args().nth(1).is_some_and(|argument| argument == "--vm");
    let vms = if with_vm { vec![Kernel::default()] } else { Vec::new() };
    let lab = Lab::new(LabSpec { vms, ..LabSpec::hosts(2) })?;
    let _sleeper = Running::start("sleep", lab.host(1).command("sleep").arg("1000"))?;
    println!("{}", lab.prefix());
    loop {
        std::thread::park();
    }
}
