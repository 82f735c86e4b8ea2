//! The lab's virtual machines: they boot, run programs, and leave nothing behind.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant};

use netsum_lab::cluster::program;
use netsum_lab::netns::{self, Netns, RUN_NETNS};
use netsum_lab::process::{Ended, Running};
use netsum_lab::traffic::ping;
use netsum_lab::vm::parts::Kernel;
use netsum_lab::{Host, Lab, LabSpec};
use nix::sys::signal::Signal;

const TIMEOUT: Duration = Duration::from_secs(60);

fn start(host: &Host, words: &[&str]) -> Running {
    Running::start(words[0], host.command(words[0]).args(&words[1..])).unwrap()
}

fn end(host: &Host, words: &[&str]) -> Ended {
    start(host, words).end(TIMEOUT).unwrap()
}

fn printed(host: &Host, words: &[&str]) -> String {
    start(host, words).success(TIMEOUT).unwrap()
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn vms_of_both_kernels_are_hosts_like_others() {
    let vms = vec![Kernel::V6_1, Kernel::V6_12];
    let lab =
        Lab::new(LabSpec { vms, ipv6: true, ips_per_host: 2, mtu: 2300, ..LabSpec::hosts(3) })
            .unwrap();
    addresses_devices_and_kernels(&lab);
    let vm = lab.host(0);
    input_outputs_and_exit_codes_come_through(vm);
    signals_come_through_and_nothing_outlives_its_stand_in(vm);
    files_are_copied_once_for_each_version(vm);
}

fn addresses_devices_and_kernels(lab: &Lab) {
    let namespace = lab.host(2);
    for (host, release) in [(lab.host(0), "6.1."), (lab.host(1), "6.12.")] {
        for ip in [host.ip(0), host.ip(1), host.ipv6(0), host.ipv6(1)] {
            ping(namespace, ip, 2, TIMEOUT).unwrap_or_else(|e| panic!("{ip}: {e:#}"));
        }
        let uname = printed(host, &["uname", "-r"]);
        assert!(uname.starts_with(release), "{uname}");
        let link = printed(host, &["ip", "link", "show", "eth0"]);
        assert!(link.contains("mtu 2300") && link.contains(&host.mac()), "{link}");
        // GID 1 is the IPv4 address; the MTU is the largest path MTU that fits into the link's.
        let device = printed(host, &["ibv_devinfo", "-v", "-d", "rxe0"]);
        let gid = format!("GID[  1]:\t\t::ffff:{}, RoCE v2", host.ip(0));
        assert!(device.contains(&gid) && device.contains("active_mtu:\t\t2048"), "{device}");
        assert!(printed(host, &["rdma", "link"]).contains("rxe0/1 state ACTIVE"));
    }
}

fn input_outputs_and_exit_codes_come_through(vm: &Host) {
    let mut cat = start(vm, &["cat"]);
    cat.send_line("one").unwrap();
    assert_eq!(cat.line(TIMEOUT).unwrap(), "one", "at once, and not at the end");
    cat.send_line("two").unwrap();
    assert_eq!(cat.success(TIMEOUT).unwrap(), "one\ntwo\n");
    let ended = end(vm, &["sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((ended.status.code(), &*ended.stdout, &*ended.stderr), (Some(7), "out\n", "err\n"));
    let ended = end(vm, &["no-such-program"]);
    assert_eq!(ended.status.code(), Some(125));
    assert!(ended.stderr.contains("cannot start no-such-program"), "{}", ended.stderr);
    // More than fits into any buffer on the way, and bytes that are not text.
    let out = vm.command("head").args(["-c", "5000000", "/dev/zero"]).output().unwrap();
    assert!(out.status.success() && out.stdout == vec![0; 5_000_000]);
    let env =
        Running::start("env", vm.command("env").env("NETSUM_X", "1").env("OTHER", "2")).unwrap();
    let env = env.success(TIMEOUT).unwrap();
    assert!(
        env.contains("NETSUM_X=1") && !env.contains("OTHER") && env.contains("PATH=/usr/bin:"),
        "{env}"
    );
}

fn signals_come_through_and_nothing_outlives_its_stand_in(vm: &Host) {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut shell = start(vm, &["sh", "-c", "echo up; exec sleep 1000"]);
        shell.line(TIMEOUT).unwrap();
        shell.signal(signal).unwrap();
        assert_eq!(shell.end(TIMEOUT).unwrap().status.signal(), Some(signal as i32));
    }
    let mut shell = start(vm, &["sh", "-c", "sleep 1000 & echo up; wait"]);
    shell.line(TIMEOUT).unwrap();
    let sleeps = || end(vm, &["pidof", "sleep"]).status.success();
    assert!(sleeps());
    shell.signal(Signal::SIGKILL).unwrap();
    assert_eq!(shell.end(TIMEOUT).unwrap().status.signal(), Some(Signal::SIGKILL as i32));
    wait_until("the program in the VM has been killed too", || !sleeps());
}

fn files_are_copied_once_for_each_version(vm: &Host) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x");
    let put = || vm.vm().unwrap().put(&file, "/data/x").unwrap();
    for contents in ["first\n", "the second\n"] {
        std::fs::write(&file, contents).unwrap();
        put();
        put();
        assert_eq!(printed(vm, &["cat", "/data/x"]), contents);
    }
    // A program of cargo's target folder, which runs there with the C library of the packages.
    let perf = program("netsum-perf").unwrap().display().to_string();
    let modified = |_| printed(vm, &["stat", "-c", "%i", "/lab/netsum-perf"]);
    let inodes = [(); 2].map(|()| printed(vm, &[&perf, "--help"])).map(modified);
    assert_eq!(inodes[0], inodes[1], "copied once");
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn a_vm_whose_owner_is_killed_while_it_boots_is_gone() {
    let victim =
        Running::start("victim", Command::new(program("lab-victim").unwrap()).arg("--vm")).unwrap();
    let prefix = format!("ns{}-0", victim.pid());
    let pids = || {
        let Ok(box_) = Netns::open(&format!("{prefix}-box")) else { return Vec::new() };
        let mut ip = Command::new("ip");
        let out = netns::output(ip.args(["netns", "pids", box_.name()])).unwrap_or_default();
        out.lines().filter_map(|pid| pid.parse::<u32>().ok()).collect()
    };
    let is_qemu = |pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.starts_with("qemu-system")
    };
    wait_until("QEMU runs", || pids().iter().any(is_qemu));
    let machines: Vec<u32> = pids().into_iter().filter(is_qemu).collect();
    victim.signal(Signal::SIGKILL).unwrap();
    let ended = victim.end(TIMEOUT).unwrap();
    assert_eq!(ended.status.signal(), Some(Signal::SIGKILL as i32));
    wait_until("QEMU is gone", || !machines.iter().any(is_qemu));
    let left = || {
        let entries = std::fs::read_dir(RUN_NETNS).unwrap();
        entries
            .filter_map(|e| e.ok()?.file_name().into_string().ok())
            .any(|name| name.starts_with(&prefix))
    };
    wait_until("the lab is gone", || !left());
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn impossible_vms_are_refused() {
    for (spec, word) in [
        (LabSpec { vms: vec![Kernel::V6_1; 2], ..LabSpec::hosts(1) }, "2 of 1 hosts are to be VMs"),
        (
            LabSpec { ips_per_host: 255, ..LabSpec::vms(1, Kernel::V6_1) },
            "too many addresses for a VM: 255",
        ),
    ] {
        let error = format!("{:#}", Lab::new(spec).unwrap_err());
        assert!(error.contains(word), "{error}");
    }
    assert!("6.2".parse::<Kernel>().unwrap_err().contains("6.1, 6.12 and newest"));
}
