//! Builds a lab, prints its name and waits to be killed: for the tests of what is left behind then.

use netsum_lab::process::Running;
use netsum_lab::{Lab, LabSpec};

fn main() -> anyhow::Result<()> {
    let lab = Lab::new(LabSpec::hosts(2))?;
    let _sleeper = Running::start("sleep", lab.host(0).command("sleep").arg("1000"))?;
    println!("{}", lab.prefix());
    loop {
        std::thread::park();
    }
}
