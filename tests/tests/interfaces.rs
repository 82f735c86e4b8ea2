//! Interfaces as they are found: with odd names and other ones later, and some that cannot be
//! ports.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::time::{Duration, Instant};

use netsum_dataplane::{BpfDataPlane, DataPlane as _, LoadOptions};
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, PATIENCE, one_on_each_host};
use netsum_lab::group::Group;
use netsum_lab::netns::output;

/// What `caf\u{e9}` is in Latin-1, and how it is shown.
const LATIN: &[u8] = b"caf\xe9";
const SHOWN: &str = "caf\u{fffd}";

/// `ip` in the box, with these words and perhaps one that is not UTF-8.
fn ip(cluster: &Cluster, words: &str, last: &[u8]) {
    let words = words.split(' ').map(OsStr::new).chain((!last.is_empty()).then(|| OsStr::from_bytes(last)));
    output(cluster.lab().box_().command("ip").args(words)).unwrap();
}

/// Names of the daemon's ports.
fn ports(cluster: &Cluster) -> Vec<String> {
    let ports = cluster.netsum_json(&["port", "show"]).unwrap();
    ports.as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap().to_owned()).collect()
}

fn wait_for_ports(cluster: &Cluster, expected: &[&str]) {
    let start = Instant::now();
    while ports(cluster) != expected {
        assert!(start.elapsed() < PATIENCE, "{:?}: {}", ports(cluster), cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn sum(group: &mut Group) {
    for outcome in group.all_reduce("i32", 50_000, 1).unwrap() {
        assert_eq!((outcome.mode.as_str(), outcome.fall_backs, outcome.wrong), ("box", 0, 0), "{outcome:?}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn names_and_aliases_end_no_job_whatever_they_are_and_become() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    cluster.pin();
    cluster.start_daemon().unwrap();
    let job = JobSpec::new("train", 2);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    sum(&mut group);

    ip(&cluster, "link add other type veth peer name other1", b"");
    for interface in ["other", "br0", "port0", "port1"] {
        ip(&cluster, &format!("link set {interface} alias"), LATIN);
    }
    ip(&cluster, "link property add dev br0 altname box", b"");
    ip(&cluster, "link property add dev port1 altname", LATIN);
    ip(&cluster, "link set port0 name first", b"");
    wait_for_ports(&cluster, &["first", "port1"]);
    ip(&cluster, "link set br0 name", b"\xe9");
    ip(&cluster, "link property add dev box altname br0", b"");
    // By its other name: its own is the one that is not UTF-8.
    ip(&cluster, "link property del dev port1 altname", LATIN);
    ip(&cluster, "link set port1 name", LATIN);
    wait_for_ports(&cluster, &["first", SHOWN]);
    sum(&mut group);
    let log = cluster.daemon_log();
    assert!(!log.contains("gone") && !log.contains("ERROR"), "{log}");
    assert!(log.lines().all(|line| line.len() < 1000), "{log}");

    // The next daemon finds the bridge by its other name, and all ports.
    cluster.kill_daemon().unwrap();
    cluster.start_daemon().unwrap();
    let log = cluster.daemon_log();
    assert!(log.contains("taken over from the daemon before: 2 ports, 1 jobs"), "{log}");
    sum(&mut group);
    let check = cluster.netsum(&["check", "--bridge", "box"]).unwrap();
    assert!(check.contains("port first") && check.contains(&format!("port {SHOWN}")), "{check}");
}

/// Waits until the daemon has said of an interface, in one line, why it is no port.
fn wait_for_line(cluster: &Cluster, name: &str, why: &str) {
    let start = Instant::now();
    let said = || {
        let log = cluster.daemon_log();
        log.lines()
            .filter(|l| l.contains(&format!("port {name} does")))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    while said().is_empty() {
        assert!(start.elapsed() < PATIENCE, "{name}: {}", cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(said().len() == 1 && said()[0].contains(why), "{name}: {}", cluster.daemon_log());
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn an_interface_that_cannot_be_a_port_is_named_and_the_others_serve_at_the_start_as_later() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(4)).unwrap();
    cluster.pin();
    ip(&cluster, "link set port2 nomaster", b"");
    cluster.start_daemon().unwrap();
    let job = JobSpec::new("train", 2);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    sum(&mut group);

    let port2 = cluster.lab().box_().ifindex("port2").unwrap();
    let _foreign = cluster.lab().box_().enter(|| {
        let options = LoadOptions { cpus: vec![0], cpu_queue: 64, inline: true };
        let mut plane = BpfDataPlane::load(&options).unwrap();
        plane.attach(port2).unwrap();
        plane
    });
    ip(&cluster, "link add vx0 type vxlan id 7 dstport 4789", b"");
    ip(&cluster, "link add below type veth peer name below1", b"");
    ip(&cluster, "link add of0 link below type macvlan", b"");
    for interface in ["port2", "vx0", "of0"] {
        ip(&cluster, &format!("link set {interface} master br0"), b"");
    }
    let are_named = |cluster: &Cluster| {
        wait_for_line(cluster, "port2", "somebody else");
        wait_for_line(cluster, "vx0", "no native XDP");
        wait_for_line(cluster, "of0", "a macvlan of a card: packets come in at the card");
        assert_eq!(ports(cluster), ["port0", "port1", "port3"]);
    };
    are_named(&cluster);
    sum(&mut group);
    let late = JobSpec { connect_timeout: Duration::from_secs(2), ..JobSpec::new("late", 2) };
    let token = cluster.create_job(&late).unwrap();
    let refused = cluster.ranks(&late, &token, &[(2, 0), (3, 0)]).err().map(|e| format!("{e:#}"));
    assert!(
        refused.as_ref().is_some_and(|e| e.contains("behind port2, which is none of netsum's ports")),
        "{refused:?}"
    );
    let check = cluster.netsum(&["check", "--bridge", "br0"]).unwrap_err().to_string();
    assert!(check.contains("of0") && check.contains("make the card the port"), "{check}");

    cluster.kill_daemon().unwrap();
    cluster.start_daemon().unwrap();
    are_named(&cluster);
    sum(&mut group);
    drop(group);
    cluster.stop_daemon().unwrap();
    cluster.start_daemon().unwrap();
    are_named(&cluster);
}
