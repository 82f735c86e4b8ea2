//! The lab's virtual machines: they boot, run programs, and leave nothing.

use std::time::Duration;

use netsum_lab::process::Running;
use netsum_lab::traffic::ping;
use netsum_lab::vm::image::Kernel;
use netsum_lab::{Lab, LabSpec};

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn a_vm_runs_programs_beside_a_namespace() {
    let lab = Lab::new(LabSpec { vms: vec![Kernel::V6_1, Kernel::V6_12], ..LabSpec::hosts(3) }).unwrap();
    for from in lab.hosts().iter().filter(|host| host.vm().is_none()) {
        for to in lab.hosts() {
            ping(from, to.ip(0), 2, PATIENCE).unwrap();
        }
    }
    for (host, release) in [(0, "6.1."), (1, "6.12.")] {
        let uname = Running::start("uname", lab.host(host).command("uname").arg("-r")).unwrap();
        let said = uname.success(PATIENCE).unwrap();
        assert!(said.starts_with(release), "{said}");
        let devices = Running::start("devices", &mut lab.host(host).command("ibv_devices")).unwrap();
        let said = devices.success(PATIENCE).unwrap();
        assert!(said.contains("rxe0"), "{said}");
    }
}
