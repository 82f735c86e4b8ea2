//! A box that loses the CPU which serves its rings, and gets it back: in a virtual machine, because
//! a test must not take a CPU from its own machine.

use std::time::Duration;

use netsum_lab::cluster::program;
use netsum_lab::process::Running;
use netsum_lab::vm::parts::Kernel;
use netsum_lab::{Lab, LabSpec};

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn a_job_lives_through_the_loss_of_its_rings_cpu() {
    all_reduces_while_it_comes_and_goes(20);
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test --all"]
fn a_job_lives_through_many_losses_of_its_rings_cpu() {
    all_reduces_while_it_comes_and_goes(60);
}

fn all_reduces_while_it_comes_and_goes(number: u32) {
    // The box and its hosts are all inside the virtual machine.
    let lab = Lab::new(LabSpec { vm_cpus: 2, ..LabSpec::vms(1, Kernel::V6_12) }).unwrap();
    let machine = lab.host(0).vm().unwrap();
    for name in ["netsum", "netsum-rank"] {
        machine.put(&program(name).unwrap(), &format!("/lab/{name}")).unwrap();
    }
    let mut command = lab.host(0).command(program("lab-unplug").unwrap());
    let running = Running::start("lab-unplug", command.arg(number.to_string())).unwrap();
    let printed = running.success(Duration::from_secs(400));
    println!("{}", printed.unwrap_or_else(|error| panic!("{error:#}\n{}", machine.console())));
}
