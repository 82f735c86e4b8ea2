//! Ranks whose packets bypass the kernel's network stack through AF_XDP sockets.

use std::process::Command;
use std::time::{Duration, Instant};

use netsum_lab::cluster::{
    Cluster, Group, JobSpec, Outcome, RankHost, TIMEOUT, one_on_each_host, program,
};
use netsum_lab::faults::Faults;
use netsum_lab::process::Running;
use netsum_lab::{Host, LabSpec, netns};

const XDP: &str = "AF_XDP, copy mode";
const UDP: &str = "UDP";

/// Asserts that the box summed, that the sums are right, and that the ranks used these transports.
fn assert_box(outcomes: &[Outcome], transports: &[&str]) {
    assert_eq!(outcomes.len(), transports.len());
    for (rank, (outcome, transport)) in outcomes.iter().zip(transports).enumerate() {
        assert_eq!(outcome.mode, "box", "rank {rank}: {outcome:?}");
        assert_eq!(outcome.transport, *transport, "rank {rank}: {outcome:?}");
        assert!(outcome.verified > 0, "rank {rank}: {outcome:?}");
        assert_eq!((outcome.wrong, outcome.fallbacks), (0, 0), "rank {rank}: {outcome:?}");
    }
}

fn reduce(
    cluster: &Cluster,
    group: &mut Group,
    dtype: &str,
    len: usize,
    seed: u64,
) -> Vec<Outcome> {
    let reduced = group.all_reduce(dtype, len, seed);
    reduced.unwrap_or_else(|e| {
        panic!("{dtype} x {len}: {e:#}\n{}\n{}", group.log(), cluster.daemon_log())
    })
}

fn start(cluster: &Cluster, job: &JobSpec, places: &[RankHost]) -> Group {
    let token = cluster.create_job(job).unwrap();
    cluster.ranks(job, &token, places).unwrap()
}

/// Whether an XDP program is on the host's interface.
fn has_program(host: &Host) -> bool {
    let mut ip = host.command("ip");
    netns::output(ip.args(["-details", "link", "show", Host::INTERFACE]))
        .unwrap()
        .contains("prog/xdp")
}

fn set_queues(host: &Host, rx: u32) {
    let mut ethtool = host.command("ethtool");
    netns::output(ethtool.args(["-L", Host::INTERFACE, "rx", &rx.to_string()])).unwrap();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_box_sums_for_ranks_over_af_xdp() {
    let cluster = Cluster::start(LabSpec { mtu: 3500, ..LabSpec::hosts(4) }).unwrap();
    for (mtu, rings) in [(1024, 1), (3328, 2)] {
        let name = format!("xdp{mtu}");
        let job = JobSpec { mtu, rings, xdp: vec![0, 1, 2, 3], ..JobSpec::new(&name, 4) };
        let mut group = start(&cluster, &job, &one_on_each_host(4));
        for (seed, (dtype, len)) in (1..).zip([("i32", 100_003), ("f32", 300_000), ("f32", 5)]) {
            let outcomes = reduce(&cluster, &mut group, dtype, len, seed);
            assert_box(&outcomes, &[XDP; 4]);
        }
        // All packets went through the sockets: packets in the kernel's stack would have had no
        // reader.
        assert!(cluster.lab().hosts().iter().all(has_program));
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_of_a_job_may_differ() {
    let cluster = Cluster::start(LabSpec { mtu: 2300, ipv6: true, ..LabSpec::hosts(3) }).unwrap();
    for v6 in [false, true] {
        mixed(&cluster, &one_on_each_host(3), v6);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_over_af_xdp_may_be_behind_a_router() {
    // Host 0 is the router, and hosts 4 and 5 are behind it. Every rank that receives packets from
    // the router also sends to it: that is how the lab's router learns IPv6 neighbours.
    let spec = LabSpec { mtu: 2300, ipv6: true, routed: 2, ..LabSpec::hosts(4) };
    let cluster = Cluster::start(spec).unwrap();
    for v6 in [false, true] {
        mixed(&cluster, &[(4, 0), (1, 0), (5, 0), (2, 0)], v6);
    }
}

/// Ranks 1 and 2 use AF_XDP, the others UDP.
fn mixed(cluster: &Cluster, places: &[RankHost], v6: bool) {
    let name = if v6 { "six" } else { "four" };
    let job = JobSpec { xdp: vec![1, 2], ..JobSpec::new(name, places.len() as u32) };
    let token = cluster.create_job(&job).unwrap();
    let group = if v6 {
        cluster.ranks_v6(&job, &token, places)
    } else {
        cluster.ranks(&job, &token, places)
    };
    let mut group = group.unwrap_or_else(|e| panic!("{name}: {e:#}"));
    assert_box(
        &reduce(cluster, &mut group, "f32", 200_000, 7),
        &[UDP, XDP, XDP, UDP][..places.len()],
    );
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn lost_packets_are_retransmitted_over_af_xdp() {
    let cluster =
        Cluster::start(LabSpec { mtu: 2300, faulty_links: true, ..LabSpec::hosts(3) }).unwrap();
    let job = JobSpec { xdp: vec![0, 2], ..JobSpec::new("lossy", 3) };
    let mut group = start(&cluster, &job, &one_on_each_host(3));
    for host in cluster.lab().hosts() {
        host.set_faults(Faults::loss(0.01), Faults::loss(0.01), host.number() as u32).unwrap();
    }
    for (seed, dtype) in [(1, "i32"), (2, "f32")] {
        let outcomes = reduce(&cluster, &mut group, dtype, 200_000, seed);
        assert_box(&outcomes, &[XDP, UDP, XDP]);
        assert!(outcomes.iter().any(|o| o.retransmissions > 0), "{outcomes:?}");
    }
    for host in cluster.lab().hosts() {
        let counts = host.fault_link().unwrap().counts().unwrap();
        assert!(counts.up.lost > 0 && counts.down.lost > 0, "{counts:?}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn packets_come_by_any_of_several_receive_queues() {
    let cluster = Cluster::start(LabSpec { mtu: 2300, ..LabSpec::hosts(3) }).unwrap();
    for host in cluster.lab().hosts() {
        set_queues(host, 2);
    }
    let job = JobSpec { rings: 2, xdp: vec![0, 1, 2], ..JobSpec::new("queues", 3) };
    let mut group = start(&cluster, &job, &one_on_each_host(3));
    for seed in 0..3 {
        let outcomes = reduce(&cluster, &mut group, "i32", 200_000, seed);
        assert_box(&outcomes, &[XDP; 3]);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_that_is_killed_leaves_no_program_behind() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let job =
        JobSpec { xdp: vec![0, 1], timeout: Duration::from_secs(2), ..JobSpec::new("killed", 2) };
    let mut group = start(&cluster, &job, &one_on_each_host(2));
    assert_box(&reduce(&cluster, &mut group, "i32", 1000, 1), &[XDP; 2]);
    let host = cluster.lab().host(1);
    assert!(has_program(host));
    group.kill(1).unwrap();
    let start = Instant::now();
    while has_program(host) {
        assert!(start.elapsed() < TIMEOUT, "the program is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
    // The queue is free for the next socket at once.
    drop(group);
    let next = JobSpec { xdp: vec![0, 1], ..JobSpec::new("next", 2) };
    let mut group = self::start(&cluster, &next, &one_on_each_host(2));
    assert_box(&reduce(&cluster, &mut group, "i32", 1000, 2), &[XDP; 2]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn an_interface_has_one_rank_over_af_xdp() {
    let cluster = Cluster::start(LabSpec { ips_per_host: 2, ..LabSpec::hosts(2) }).unwrap();
    let places = [(0, 0), (0, 1), (1, 0)];
    let job = JobSpec {
        xdp: vec![0, 1],
        connect_timeout: Duration::from_secs(3),
        ..JobSpec::new("crowd", 3)
    };
    let token = cluster.create_job(&job).unwrap();
    let error = cluster.ranks(&job, &token, &places).unwrap_err().to_string();
    assert!(error.contains("eth0 already has an XDP program"), "{error}");
}

/// Runs a rank of `netsum-perf` on the first host with only these capabilities, and returns its
/// output.
fn perf_with(cluster: &Cluster, capabilities: &str) -> String {
    let host = cluster.lab().host(0);
    let mut setpriv: Command = host.command("setpriv");
    setpriv
        .arg(format!("--bounding-set={capabilities}"))
        .arg(program("netsum-perf").unwrap())
        .args(
            "all_reduce -b 8 -e 8 --peers 10.0.0.1,10.0.0.2 --rank 0 --ranks 2 --ip 10.0.0.1"
                .split(' '),
        )
        .args(["--transport", "xdp", "--connect-timeout", "1"]);
    let ended = Running::start("netsum-perf", &mut setpriv).unwrap().end(TIMEOUT).unwrap();
    assert!(!ended.status.success(), "{}", ended.stdout);
    ended.stderr
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn capabilities_that_are_missing_are_named() {
    let cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    let printed = perf_with(&cluster, "-all");
    for word in ["CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF", "transport udp needs none"] {
        assert!(printed.contains(word), "{printed}");
    }
    let printed = perf_with(&cluster, "-all,+net_raw,+net_admin");
    assert!(printed.contains("lacks CAP_BPF"), "{printed}");
    assert!(!has_program(cluster.lab().host(0)));
    // No more capabilities are needed: only the other rank is missing.
    let printed = perf_with(&cluster, "-all,+net_raw,+net_admin,+bpf");
    assert!(printed.contains("did not answer"), "{printed}");
}
