//! Ranks whose packets go past the kernel's network stack, over AF_XDP sockets.

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, Outcome, one_on_each_host};

/// Summed by the box, and right, over these transports.
fn assert_box(outcomes: &[Outcome], transports: &[&str]) {
    for (rank, (outcome, transport)) in outcomes.iter().zip(transports).enumerate() {
        assert_eq!(outcome.mode, "box", "rank {rank}: {outcome:?}");
        assert_eq!(outcome.transport, *transport, "rank {rank}: {outcome:?}");
        assert!(outcome.verified > 0, "rank {rank}: {outcome:?}");
        assert_eq!((outcome.wrong, outcome.fall_backs), (0, 0), "rank {rank}: {outcome:?}");
    }
}

const XDP: &str = "AF_XDP, copy mode";

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_box_sums_for_ranks_over_af_xdp() {
    let cluster = Cluster::start(LabSpec { mtu: 2300, ..LabSpec::hosts(4) }).unwrap();
    for (mtu, rings) in [(1024, 1), (2048, 2)] {
        let name = format!("xdp{mtu}");
        let job = JobSpec { mtu, rings, xdp: vec![0, 1, 2, 3], ..JobSpec::new(&name, 4) };
        let token = cluster.create_job(&job).unwrap();
        let mut group = cluster.ranks(&job, &token, &one_on_each_host(4)).unwrap();
        for (seed, (dtype, len)) in (1..).zip([("i32", 100_003), ("f32", 300_000), ("f32", 5)]) {
            let outcomes = group
                .all_reduce(dtype, len, seed)
                .unwrap_or_else(|e| panic!("{e:#}\n{}\n{}", group.log(), cluster.daemon_log()));
            assert_box(&outcomes, &[XDP; 4]);
        }
    }
}
