//! Boxes that route between racks: results for the next rack have the headers that a router would
//! have given them.

use std::time::Duration;

use netsum_common::wire;
use netsum_lab::cluster::{Cluster, JobSpec, one_on_each_host};
use netsum_lab::faults::Faults;
use netsum_lab::netns::output;
use netsum_lab::tap::Tap;
use netsum_lab::{Host, LabSpec};

use crate::fabric::wait;

const JOB: &str = "routed";

fn fabric(spec: LabSpec) -> Cluster {
    let spec = LabSpec { mtu: 2300, ipv6: true, routes: true, ..spec };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    cluster
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn racks_sum_over_a_spine_that_routes() {
    let cluster = fabric(LabSpec { racks: 2, ..LabSpec::hosts(4) });
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec { rings: 2, ..JobSpec::new(JOB, 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    for (seed, dtype) in [(1, "i32"), (2, "f32")] {
        let outcomes = group.all_reduce(dtype, 100_000, seed).unwrap();
        assert!(
            outcomes.iter().all(|o| (&*o.mode, o.wrong, o.fallbacks) == ("box", 0, 0)),
            "{outcomes:?}\n{}\n{}",
            group.log(),
            cluster.daemon_log()
        );
    }
    // Rank 2 is the first of its rack: its packets were routed three times. Rank 1 is in the rack
    // of rank 0.
    for (rank, hops) in [(2, 3), (1, 0)] {
        let tap = Tap::open(cluster.lab().host(rank), Host::INTERFACE).unwrap();
        let frame = std::thread::scope(|s| {
            let work = s.spawn(|| group.all_reduce("i32", 50_000, 3).unwrap());
            let is_data = |f: &[u8]| wire::parse(f).is_ok_and(|f| f.bth.opcode.is_rc_data());
            let frame = tap.receive(Duration::from_secs(30), is_data).unwrap();
            work.join().unwrap();
            frame
        });
        let parsed = wire::parse(&frame[..]).unwrap();
        assert_eq!(frame[..6], [2, 0, 0, 0, 0, rank as u8 + 1], "rank {rank}: its own MAC address");
        assert_eq!(frame[parsed.ip + 8], 64 - hops, "rank {rank}: the TTL");
    }
}

/// Both ends of a link have link-local addresses that the other end has on another link.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn routers_with_one_link_local_address_on_all_links_find_each_other() {
    let cluster = fabric(LabSpec { racks: 2, ..LabSpec::hosts(4) });
    let ip = |arguments: &str| {
        let mut command = cluster.lab().box_().command("ip");
        output(command.arg("-6").args(arguments.split(' '))).unwrap()
    };
    ip("neigh flush dev rack0");
    ip("neigh replace fd01::1 dev rack0 nud none use");
    let found = || !ip("neigh show fd01::1 dev rack0 nud reachable").is_empty();
    wait("the spine finds the leaf", found);
    let stats = cluster.netsum_on(Some(0), &["-j", "stats"]).unwrap();
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    assert_eq!(stats["spoofed"].as_u64().unwrap_or(0), 0, "{stats}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn routed_racks_with_loss_over_ipv4_and_ipv6() {
    for v6 in [false, true] {
        let cluster = fabric(LabSpec { racks: 2, faulty_links: true, ..LabSpec::hosts(6) });
        let lab = cluster.lab();
        for host in lab.hosts() {
            host.set_faults(Faults::loss(0.01), Faults::loss(0.01), host.number() as u32).unwrap();
        }
        for rack in [0, 1] {
            lab.leaf(rack).set_faults(Faults::loss(0.01), Faults::loss(0.01), 77).unwrap();
        }
        let manager = cluster.start_manager().unwrap();
        let job = JobSpec::new(JOB, 6);
        let places = one_on_each_host(6);
        let group = if v6 {
            cluster.ranks_of_v6(&manager, &job, &places)
        } else {
            cluster.ranks_of(&manager, &job, &places)
        };
        let mut group = group.unwrap();
        for (seed, dtype) in [(1, "i32"), (2, "f32"), (3, "i32")] {
            let outcomes = group.all_reduce(dtype, 100_000, seed).unwrap();
            assert!(
                outcomes.iter().all(|o| (&*o.mode, o.wrong) == ("box", 0)),
                "{outcomes:?}\n{}",
                group.log()
            );
        }
    }
}
