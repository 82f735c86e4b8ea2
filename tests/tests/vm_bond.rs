//! Bonds as ports of the box: in a virtual machine, because this machine's kernel may lack bonding.

use std::time::Duration;

use netsum_lab::cluster::program;
use netsum_lab::process::Running;
use netsum_lab::vm::parts::Kernel;
use netsum_lab::{Lab, LabSpec};

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn a_job_survives_slave_loss_and_unfit_bonds_are_named() {
    bonds(Kernel::V6_12);
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test --all"]
fn bonds_of_linux_6_1() {
    bonds(Kernel::V6_1);
}

fn bonds(kernel: Kernel) {
    let lab = Lab::new(LabSpec { vm_cpus: 2, ..LabSpec::vms(1, kernel) }).unwrap();
    let machine = lab.host(0).vm().unwrap();
    for name in ["netsum", "netsum-rank"] {
        machine.put(&program(name).unwrap(), &format!("/lab/{name}")).unwrap();
    }
    let mut command = lab.host(0).command(program("lab-bond").unwrap());
    let done = Running::start("lab-bond", &mut command).unwrap().success(Duration::from_secs(300));
    done.unwrap_or_else(|error| panic!("{kernel}: {error:#}\n{}", machine.console()));
}
