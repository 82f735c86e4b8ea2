//! The lab itself: hosts reach each other, and nothing is left behind.

use std::net::IpAddr;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant};

use netsum_lab::cluster::program;
use netsum_lab::lab::{BoxNode, tear_down};
use netsum_lab::netns::{RUN_NETNS, output};
use netsum_lab::process::Running;
use netsum_lab::traffic::{ping, tcp_transfer};
use netsum_lab::{Lab, LabSpec, Rate, cleaner};
use nix::sys::signal::Signal;

use crate::parents::sent;

const SECOND: Duration = Duration::from_secs(1);

/// Namespaces whose names begin with this prefix.
fn namespaces(prefix: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(RUN_NETNS) else { return Vec::new() };
    entries
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter(|n| n.starts_with(prefix))
        .collect()
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < 10 * SECOND, "not within 10 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn every_host_reaches_every_other_and_the_box() {
    let lab = Lab::new(LabSpec { ipv6: true, ips_per_host: 2, ..LabSpec::hosts(3) }).unwrap();
    for from in lab.hosts() {
        let mut targets: Vec<IpAddr> = vec![lab.box_().ip(), lab.box_().ipv6()];
        for to in lab.hosts().iter().filter(|to| to.number() != from.number()) {
            targets.extend([to.ip(0), to.ip(1), to.ipv6(0), to.ipv6(1)]);
        }
        for to in targets {
            ping(from, to, 2, SECOND)
                .unwrap_or_else(|e| panic!("host {} to {to}: {e}", from.number()));
        }
    }
    let missing = "10.0.0.77".parse().unwrap();
    let error = ping(lab.host(0), missing, 1, Duration::from_millis(50)).unwrap_err();
    assert!(error.to_string().contains("no answer to ping 0 of 10.0.0.77"), "{error}");
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn tcp_goes_through_the_bridge_unharmed() {
    let lab = Lab::new(LabSpec { ipv6: true, ..LabSpec::hosts(2) }).unwrap();
    let [a, b] = [lab.host(0), lab.host(1)];
    for ip in [b.ip(0), b.ipv6(0)] {
        let rate = tcp_transfer(a, b, ip, 16 << 20, 5 * SECOND).unwrap();
        assert!(rate > 1e6, "{rate} bytes/s");
    }
    tcp_transfer(a, lab.box_(), lab.box_().ip(), 1 << 20, 5 * SECOND).unwrap();
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn links_have_the_mtu_asked_for_and_both_ends_poll() {
    let lab = Lab::new(LabSpec { mtu: 2300, ..LabSpec::hosts(2) }).unwrap();
    let link = output(lab.host(1).command("ip").args(["link", "show", "eth0"])).unwrap();
    assert!(link.contains("mtu 2300") && link.contains(&lab.host(1).mac()), "{link}");
    for (netns, interface) in [(&**lab.host(0), "eth0"), (&**lab.box_(), "port0")] {
        let features = output(netns.command("ethtool").args(["-k", interface])).unwrap();
        assert!(features.contains("generic-receive-offload: on"), "{features}");
    }
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn leaves_have_a_link_to_every_spine_and_nothing_circles() {
    let [rate, uplink] = ["1gbit", "2gbit"].map(|text| Some(text.parse::<Rate>().unwrap()));
    let lab =
        Lab::new(LabSpec { racks: 4, spines: 2, rate, uplink, ..LabSpec::hosts(16) }).unwrap();
    for to in [1, 4, 15] {
        ping(lab.host(0), lab.host(to).ip(0), 2, SECOND).unwrap();
    }
    // No host has that address, so every host is asked for it.
    ping(lab.host(0), "10.0.0.77".parse().unwrap(), 1, SECOND / 20).unwrap_err();
    let by = |spine| sent(lab.leaf(0), &BoxNode::uplink(spine));
    assert!((1..10_000).contains(&by(0)) && by(1) == 0, "{} {}", by(0), by(1));
    assert!(lab.spine(1).ifindex("rack3").is_ok());
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn labs_are_independent_of_each_other_and_gone_after_drop() {
    let [a, b] = [0, 1].map(|_| Lab::new(LabSpec::hosts(2)).unwrap());
    assert_ne!(a.prefix(), b.prefix());
    let prefix = a.prefix().to_owned();
    assert_eq!(namespaces(&prefix).len(), 3);
    // A process runs inside that no handle owns.
    let mut sleeper = a.host(0).free_command("sleep").arg("1000").spawn().unwrap();
    drop(a);
    assert_eq!(namespaces(&prefix), Vec::<String>::new());
    // The process gets SIGTERM before it would be killed.
    assert_eq!(sleeper.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
    ping(b.host(0), b.host(1).ip(0), 1, SECOND).unwrap();
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_panic_leaves_nothing() {
    let (send, receive) = std::sync::mpsc::channel();
    let panicked = std::thread::spawn(move || {
        let lab = Lab::new(LabSpec::hosts(2)).unwrap();
        send.send(lab.prefix().to_owned()).unwrap();
        std::panic::resume_unwind(Box::new("on purpose"));
    })
    .join();
    assert!(panicked.is_err());
    assert_eq!(namespaces(&receive.recv().unwrap()), Vec::<String>::new());
}

/// Starts a process that builds a lab, and returns it with the lab's prefix.
fn start_victim() -> (Running, String) {
    let mut victim =
        Running::start("victim", &mut Command::new(program("lab-victim").unwrap())).unwrap();
    let prefix = victim.line(10 * SECOND).unwrap();
    assert_eq!(namespaces(&prefix).len(), 3);
    (victim, prefix)
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn signals_leave_nothing_not_even_sigkill() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGKILL] {
        let (victim, prefix) = start_victim();
        victim.signal(signal).unwrap();
        let ended = victim.end(5 * SECOND).unwrap();
        assert_eq!(ended.status.signal(), Some(signal as i32));
        wait_until(&format!("lab gone after {signal}"), || namespaces(&prefix).is_empty());
    }
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_lab_whose_owner_and_cleaner_have_ended_is_removed_by_the_next() {
    // No process has such a large id: the kernel's limit is 2^22.
    let name = "ns99999999-7";
    let lab = Lab::new(LabSpec { name: Some(name.to_owned()), ..LabSpec::hosts(1) }).unwrap();
    assert_eq!(cleaner::owner(name), Some(99_999_999));
    lab.keep();
    assert_eq!(namespaces(name).len(), 2);
    drop(Lab::new(LabSpec::hosts(1)).unwrap());
    assert_eq!(namespaces(name), Vec::<String>::new());
    assert!(!tear_down(name).unwrap());
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_lab_that_cannot_be_built_says_why_and_leaves_nothing() {
    for (spec, word) in [
        (LabSpec::hosts(0), "0 hosts: 1 to 64"),
        (LabSpec { mtu: 100, ..LabSpec::hosts(2) }, "MTU 100: 576 to 65535"),
        (LabSpec { ips_per_host: 0, ..LabSpec::hosts(2) }, "0 addresses: 1 to 255"),
        (LabSpec { spines: 2, ..LabSpec::hosts(2) }, "2 spines: one is there, and more need racks"),
        (LabSpec { racks: 2, spines: 0, ..LabSpec::hosts(2) }, "0 spines"),
    ] {
        let error = Lab::new(spec).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}
