//! Builds a lab, with `--vm` one that has a virtual machine, prints its name and waits to be
//! killed, for tests that nothing is left behind.

use netsum_lab::process::Running;
use netsum_lab::vm::parts::Kernel;
use netsum_lab::{Lab, LabSpec};
use nix::sys::signal::{SigHandler, Signal, signal};

fn main() -> anyhow::Result<()> {
    // Programs started in the background, as by CI, may ignore Ctrl-C.
    // SAFETY: only the default handler is installed.
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
