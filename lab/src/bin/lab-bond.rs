//! Tests a box whose ports are bonds, on this machine: all-reduces while slaves fail, and bonds
//! that cannot be ports. Runs in a virtual machine of the lab, whose kernel has bonds.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use netsum_lab::cluster::{Cluster, Group, JobSpec, TIMEOUT, one_on_each_host};
use netsum_lab::netns::{self, Netns};
use netsum_lab::{Host, LabSpec};

/// The bonds between hosts and box; one more host has a port without a bond.
const MODES: [&str; 3] = [
    "active-backup",
    "802.3ad lacp_rate fast xmit_hash_policy layer3+4",
    "balance-xor xmit_hash_policy layer2+3",
];
const RANKS: u32 = MODES.len() as u32 + 1;
const MTU: u32 = 1024;
/// Takes seconds with a window of one message.
const LEN: usize = 400_000;

fn main() -> Result<()> {
    // Soft-RoCE's device is visible in all namespaces, and ranks would use it.
    netns::output(Command::new("rdma").args(["link", "delete", "rxe0"]))?;
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(RANKS as usize))?;
    for (host, mode) in MODES.iter().enumerate() {
        bond(&cluster, host, mode).with_context(|| (*mode).to_owned())?;
    }
    cluster.start_daemon()?;
    let ports = cluster.netsum(&["port", "show"])?;
    let is_there = |host| ports.contains(&format!("bond{host}"));
    ensure!((0..MODES.len()).all(is_there), "{ports}\n{}", cluster.daemon_log());

    let patient = Duration::from_secs(60);
    let job = JobSpec {
        mtu: MTU,
        window: 1,
        timeout: patient,
        connect_timeout: patient,
        ..JobSpec::new("train", RANKS)
    };
    let token = cluster.create_job(&job)?;
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(RANKS))?;
    sum(&cluster, &mut group, None)?;
    for counter in ["wrong_port", "spoofed"] {
        let count = cluster.counter(None, counter)? + cluster.counter(Some("train"), counter)?;
        ensure!(count == 0, "{counter}: {count}\n{}", cluster.netsum(&["stats"])?);
    }
    let box_ = cluster.lab().box_();
    for (host, mode) in MODES.iter().enumerate() {
        sum(&cluster, &mut group, Some(&format!("port{host}")))?;
        eprintln!("{mode}: right to the bit without its first slave");
    }
    // The slave that is added while the daemon runs is then the only one.
    ip(box_, "link set port0 nomaster")?;
    ip(box_, "link set port0 master bond0")?;
    sum(&cluster, &mut group, Some("port0b"))?;
    eprintln!("right to the bit by a slave that has come later");

    ip(box_, "link add cast type bond mode broadcast")?;
    refused(&cluster, "cast", "a bond whose mode has no native XDP: broadcast", true)?;
    ip(box_, "link add tagged link port3 type vlan id 9")?;
    ip(box_, "link add poor type bond mode active-backup")?;
    ip(box_, "link set tagged master poor")?;
    // Linux tells since 6.3 what drivers can do; before, only an attempt shows it.
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    refused(&cluster, "poor", "slave tagged", !release.starts_with("6.1."))?;
    sum(&cluster, &mut group, None)
}

/// Checks that all ranks get the right sum from the box, also if the interface `down` goes down in
/// the middle.
fn sum(cluster: &Cluster, group: &mut Group, down: Option<&str>) -> Result<()> {
    let released = || cluster.counter(Some("train"), "released");
    let len = if down.is_some() { LEN } else { LEN / 10 };
    let (before, start) = (released()?, Instant::now());
    let files = group.order_all_reduce("i32", len, 1)?;
    if let Some(slave) = down {
        let all = len as u64 * 4 / u64::from(MTU);
        let mut done = 0;
        while done < 100 {
            ensure!(start.elapsed() < TIMEOUT, "nothing is summed");
            // Each query starts a process, which competes with the sums for the CPUs.
            std::thread::sleep(Duration::from_millis(100));
            done = released()? - before;
        }
        cluster.lab().box_().set_link(slave, false)?;
        ensure!(done < all / 4 * 3, "{done} of {all}: over before {slave} went down");
    }
    let outcomes = group
        .check_all_reduce("i32", len, 1, &files)
        .with_context(|| format!("{down:?} down\n{}\n{}", group.log(), cluster.daemon_log()))?;
    let right = outcomes.iter().all(|o| o.mode == "box" && o.wrong == 0 && o.fallbacks == 0);
    ensure!(right, "{down:?} down: {outcomes:?}\n{}", cluster.daemon_log());
    down.map_or(Ok(()), |slave| cluster.lab().box_().set_link(slave, true))
}

/// Replaces the link between a host and the box by a bond of two veths at either end.
fn bond(cluster: &Cluster, host: usize, mode: &str) -> Result<()> {
    let (box_, host) = (cluster.lab().box_(), cluster.lab().host(host));
    let (i, ip_of_host) = (host.number(), host.ip(0));
    let (box_ns, peer): (&Netns, _) = (box_, host.name());
    let host_ns: &Netns = host;
    let kind = format!("type bond mode {mode} miimon 20");
    ip(box_, &format!("link add port{i}b type veth peer name eth1 netns {peer}"))?;
    for (node, interface) in [(box_ns, format!("port{i}b")), (host_ns, "eth1".to_owned())] {
        let words = ["-K", &interface, "gro", "on", "tso", "off"];
        netns::output(node.command("ethtool").args(words))?;
    }
    ip(box_, &format!("link add bond{i} {kind}"))?;
    ip(host, &format!("link add bond0 {kind}"))?;
    ip(host, &format!("address del {ip_of_host}/16 dev {}", Host::INTERFACE))?;
    for (node, bond, slaves) in [
        (box_ns, format!("bond{i}"), [format!("port{i}"), format!("port{i}b")]),
        (host_ns, "bond0".to_owned(), [Host::INTERFACE.to_owned(), "eth1".to_owned()]),
    ] {
        for slave in slaves {
            ip(node, &format!("link set {slave} nomaster"))?;
            ip(node, &format!("link set {slave} down"))?;
            ip(node, &format!("link set {slave} master {bond}"))?;
        }
        ip(node, &format!("link set {bond} up"))?;
    }
    ip(box_, &format!("link set bond{i} master br0"))?;
    ip(host, &format!("address add {ip_of_host}/16 dev bond0"))
}

/// Checks that the daemon, and `netsum check` if it can know, refuse a bond added to the bridge,
/// and say why.
fn refused(cluster: &Cluster, bond: &str, why: &str, is_known: bool) -> Result<()> {
    ip(cluster.lab().box_(), &format!("link set {bond} master br0"))?;
    let start = Instant::now();
    let logged = |text: &str| text.lines().any(|l| l.contains(bond) && l.contains(why));
    while !logged(&cluster.daemon_log()) {
        ensure!(start.elapsed() < TIMEOUT, "{bond}: {}", cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
    if is_known {
        let check = cluster.netsum(&["check", "--bridge", "br0"]).err();
        let check = check.context("check is content")?;
        ensure!(logged(&check.to_string()), "{bond}: {check}");
    }
    let ports = cluster.netsum(&["port", "show"])?;
    ensure!(!ports.contains(bond), "{ports}");
    ip(cluster.lab().box_(), &format!("link delete {bond}"))
}

/// Runs `ip` with these words.
fn ip(node: &Netns, words: &str) -> Result<()> {
    netns::output(node.command("ip").args(words.split(' '))).map(drop)
}
