//! Interfaces as found on real machines: odd names, renamed ones, and some that cannot be ports.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::time::{Duration, Instant};

use std::os::fd::AsRawFd as _;

use netsum_dataplane::{BpfDataPlane, DataPlane as _};
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, TIMEOUT, one_on_each_host};
use netsum_lab::group::Group;
use netsum_lab::netns::output;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};

/// `caf\u{e9}` in Latin-1, and how it is shown.
const LATIN: &[u8] = b"caf\xe9";
const SHOWN: &str = "caf\u{fffd}";

/// Runs `ip` in the box, with these words and optionally one that is not UTF-8.
fn ip(cluster: &Cluster, words: &str, last: &[u8]) {
    let words =
        words.split(' ').map(OsStr::new).chain((!last.is_empty()).then(|| OsStr::from_bytes(last)));
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
        assert!(start.elapsed() < TIMEOUT, "{:?}: {}", ports(cluster), cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn sum(group: &mut Group) {
    for outcome in group.all_reduce("i32", 50_000, 1).unwrap() {
        assert_eq!(
            (outcome.mode.as_str(), outcome.fallbacks, outcome.wrong),
            ("box", 0, 0),
            "{outcome:?}"
        );
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn renaming_an_interface_ends_no_job() {
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
    // From here on the bridge is known by its alternative names, because its own name is not UTF-8.
    ip(&cluster, "link property del dev port1 altname", LATIN);
    ip(&cluster, "link set port1 name", LATIN);
    wait_for_ports(&cluster, &["first", SHOWN]);
    sum(&mut group);
    let log = cluster.daemon_log();
    assert!(!log.contains("removed") && !log.contains("ERROR"), "{log}");
    assert!(log.lines().all(|line| line.len() < 1000), "{log}");

    // The next daemon finds the bridge by its alternative name, and all ports.
    cluster.kill_daemon().unwrap();
    cluster.start_daemon().unwrap();
    let log = cluster.daemon_log();
    assert!(log.contains("took over from the previous daemon: 2 ports, 1 jobs"), "{log}");
    sum(&mut group);
    let check = cluster.netsum(&["check", "--bridge", "box"]).unwrap();
    assert!(check.contains("port first") && check.contains(&format!("port {SHOWN}")), "{check}");
}

/// Waits until the daemon has logged, in one line, why an interface cannot be a port.
fn wait_for_line(cluster: &Cluster, name: &str, why: &str) {
    let start = Instant::now();
    let logged = || {
        let log = cluster.daemon_log();
        log.lines()
            .filter(|l| l.contains(&format!("port {name} cannot be used")))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    while logged().is_empty() {
        assert!(start.elapsed() < TIMEOUT, "{name}: {}", cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(logged().len() == 1 && logged()[0].contains(why), "{name}: {}", cluster.daemon_log());
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn an_interface_that_cannot_be_a_port_is_named_and_the_others_serve() {
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
        let mut plane = BpfDataPlane::load(&[0]).unwrap();
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
        refused
            .as_ref()
            .is_some_and(|e| e.contains("behind port2, which is not a port of netsum's")),
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

/// Makes nftables drop all packets that bridges forward in this network namespace:
/// `nft add table bridge f`,
/// `nft add chain bridge f c { type filter hook forward priority 0; policy drop; }`
/// (include/uapi/linux/netfilter/nf_tables.h, nfnetlink.h).
pub(crate) fn drop_what_is_forwarded() {
    let attribute = |kind: u16, value: &[u8]| {
        let mut bytes = [(value.len() as u16 + 4).to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    };
    // The flags are a request that creates, and NLM_F_ACK for the last message of the batch.
    let message = |kind: u16, flags: u16, family: u8, resource: u8, attributes: &[u8]| {
        let mut bytes = (20 + attributes.len() as u32).to_ne_bytes().to_vec();
        bytes.extend([kind.to_ne_bytes(), flags.to_ne_bytes()].concat());
        bytes.extend([0, 0, 0, 0, 0, 0, 0, 0, family, 0, 0, resource]);
        bytes.extend(attributes);
        bytes
    };
    let (forward, policy) = (2u32.to_be_bytes(), 0u32.to_be_bytes());
    let hook = [attribute(1, &forward), attribute(2, &[0; 4])].concat();
    let chain =
        [(1, &b"f\0"[..]), (3, b"c\0"), (4 | 1 << 15, &hook), (5, &policy), (7, b"filter\0")];
    let batch = [
        message(0x10, 1, 0, 10, &[]),
        message(0xa00, 0x401, 7, 0, &attribute(1, b"f\0")),
        message(0xa03, 0x405, 7, 0, &chain.map(|(kind, value)| attribute(kind, value)).concat()),
        message(0x11, 1, 0, 10, &[]),
    ];
    let (family, kind) = (AddressFamily::Netlink, SockType::Raw);
    let socket =
        socket(family, kind, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkNetFilter).unwrap();
    sendto(socket.as_raw_fd(), &batch.concat(), &NetlinkAddr::new(0, 0), MsgFlags::empty())
        .unwrap();
    let mut answer = [0; 512];
    recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()).unwrap();
    assert_eq!(answer[16..20], [0; 4], "nftables refuses");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn obstacles_in_the_bridge_are_named() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    cluster.start_daemon().unwrap();
    let job = JobSpec { connect_timeout: Duration::from_secs(5), ..JobSpec::new("train", 2) };
    let token = cluster.create_job(&job).unwrap();
    let isolate = |how: &str| {
        for port in ["port0", "port1"] {
            ip(&cluster, &format!("link set {port} type bridge_slave isolated {how}"), b"");
        }
    };
    let refused =
        || format!("{:#}", cluster.ranks(&job, &token, &one_on_each_host(2)).err().unwrap());
    isolate("on");
    let why = refused();
    assert!(why.contains("port0 and rank 1 behind port port1, which are isolated"), "{why}");
    isolate("off");
    ip(&cluster, "link set port1 type bridge_slave state 1", b"");
    let diagnosis = || cluster.netsum(&["diagnose", "train", "--watch", "100ms"]).unwrap();
    let found = diagnosis();
    assert!(
        found.contains("has not joined") && found.contains("spanning tree state is listening"),
        "{found}"
    );
    ip(&cluster, "link set port1 type bridge_slave state 3", b"");

    // The same in mid-job.
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    sum(&mut group);
    assert!(diagnosis().contains("nothing is pending"), "{}", diagnosis());
    isolate("on");
    assert!(diagnosis().contains("ports port0 and port1 are isolated"), "{}", diagnosis());
    isolate("off");
    cluster.lab().box_().enter(drop_what_is_forwarded);
    let found = diagnosis();
    let words = "chain bridge f c filters forwarded packets, policy drop";
    assert!(found.contains(words), "{found}");
}
