//! The box on other kernels than this machine's, and with network cards: in virtual machines.

use std::time::Duration;

use netsum_lab::boxes;
use netsum_lab::cluster::program;
use netsum_lab::process::Running;
use netsum_lab::vm::Card;
use netsum_lab::vm::parts::Kernel;
use netsum_lab::{Lab, LabSpec};

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn every_kernel_takes_the_programs_and_sums_with_them() {
    for kernel in Kernel::ALL {
        let lab = Lab::new(LabSpec { vm_cpus: 2, ..LabSpec::vms(1, kernel) }).unwrap();
        let machine = lab.host(0).vm().unwrap();
        for name in ["netsum", "netsum-rank"] {
            machine.put(&program(name).unwrap(), &format!("/lab/{name}")).unwrap();
        }
        let mut command = lab.host(0).command(program("lab-box").unwrap());
        let printed =
            Running::start("lab-box", &mut command).unwrap().success(Duration::from_secs(400));
        let printed =
            printed.unwrap_or_else(|error| panic!("{kernel}: {error:#}\n{}", machine.console()));
        insta::assert_snapshot!(format!("verified_instructions_{kernel}"), printed);
    }
}

/// The hosts are outside, and the box's ports are cards with their own drivers.
/// `cargo xtask soak --boxes` tries each kernel with each card, and more.
#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn a_box_sums_between_network_cards() {
    let Ok(file) = std::env::var("NETSUM_SOAK_BOXES") else {
        println!("{:?}", boxes::try_all(Kernel::V6_1, Card::Igb).unwrap());
        return;
    };
    let every = Kernel::EVERY.into_iter().flat_map(|kernel| Card::ALL.map(|card| (kernel, card)));
    let (mut rows, mut errors) = (Vec::new(), Vec::new());
    for (kernel, card) in every {
        rows.push(match boxes::is_without_xdp(kernel, card) {
            true => boxes::refused(kernel, card).unwrap(),
            false => boxes::try_everything(kernel, card, &mut errors),
        });
        println!("{}", boxes::table(&rows));
    }
    std::fs::write(file, boxes::table(&rows)).unwrap();
    assert!(errors.is_empty(), "{}", errors.join("\n"));
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test --all"]
fn a_box_sums_between_virtio_cards() {
    println!("{:?}", boxes::try_all(Kernel::V6_12, Card::VirtioNet).unwrap());
}
