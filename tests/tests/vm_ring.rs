//! Hosts that are not ours: kernels' Soft-RoCE and libibverbs, through the box.

use std::time::Duration;

use netsum_lab::LabSpec;
use netsum_lab::cluster::Cluster;
use netsum_lab::faults::Faults;
use netsum_lab::ring::{self, JOB, Operation, RankReport, RingSpec, Stranger};
use netsum_lab::vm::image::Kernel;

/// How long a ring of `messages` may take: many times of what is usual without other work on the machine.
fn patience(messages: u32) -> Duration {
    Duration::from_secs(60) + messages * Duration::from_secs(2)
}

/// Counters that a responder or requester moves when a packet was lost, came twice or too early, or was answered so.
const TROUBLE: [&str; 5] =
    ["rcvd_seq_err", "out_of_seq_request", "duplicate_request", "completer_retry_err", "rcvd_rnr_err"];

/// Four machines, with cables before them, of both kernels in turn.
fn cluster(kernels: &[Kernel]) -> Cluster {
    let vms: Vec<Kernel> = kernels.iter().copied().cycle().take(4).collect();
    Cluster::start(LabSpec { vms, mtu: 2300, cables: true, ..LabSpec::hosts(4) }).unwrap()
}

/// Runs a ring, every sum of which must be right.
fn run(cluster: &Cluster, spec: &RingSpec) -> Vec<RankReport> {
    let reports =
        ring::run(cluster, spec, patience(spec.messages)).unwrap_or_else(|e| panic!("{spec:?}: {e:#}"));
    for (rank, report) in reports.iter().enumerate() {
        let outcome = (report.messages, report.wrong);
        assert_eq!(outcome, (spec.messages.into(), 0), "messages and wrong lanes of rank {rank}, {spec:?}");
    }
    reports
}

/// Runs a ring through the box without loss; no host may notice anything.
fn run_undisturbed(cluster: &Cluster, spec: &RingSpec) -> Vec<RankReport> {
    let reports = run(cluster, spec);
    for (rank, report) in reports.iter().enumerate() {
        for name in TROUBLE {
            assert_eq!(report.counter(name), 0, "{name} of rank {rank}: {report:?}");
        }
        assert_eq!(report.retransmitted, Some(0), "{report:?}");
    }
    if spec.summed {
        let packets = spec.packets();
        let ranks = spec.hosts.len() as u64;
        for (name, expected) in [
            ("fragments", ranks * packets),
            ("released", packets),
            ("results", ranks * packets),
            ("replay", 0),
            ("duplicate_request", 0),
            ("stale", 0),
        ] {
            assert_eq!(cluster.counter(Some(JOB), name).unwrap(), expected, "{name}");
        }
        ring::forget(cluster).unwrap();
    }
    reports
}

/// Runs a ring while every cable loses a share of the packets, each way.
fn run_with_loss(cluster: &Cluster, spec: &RingSpec, share: f64) -> Vec<RankReport> {
    for host in cluster.lab().hosts() {
        host.set_faults(Faults::loss(share), Faults::loss(share), 7 + host.number() as u32).unwrap();
    }
    // About 67 ms: nobody waits longer for what was lost last. It may go off for a slow neighbour, which costs packets only.
    let reports = run(cluster, &RingSpec { timeout: 14, ..spec.clone() });
    for host in cluster.lab().hosts() {
        host.set_faults(Faults::NONE, Faults::NONE, 0).unwrap();
    }
    if spec.summed {
        ring::forget(cluster).unwrap();
    }
    reports
}

fn retransmitted(reports: &[RankReport]) -> u64 {
    reports.iter().filter_map(|report| report.retransmitted).sum()
}

fn lost(cluster: &Cluster) -> u64 {
    let counts = cluster.lab().hosts().iter().map(|host| host.cable().unwrap().counts().unwrap());
    counts.map(|counts| counts.up.lost + counts.down.lost).sum()
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn kernels_sum_in_the_box_and_others_do_not_notice_it() {
    let cluster = cluster(&Kernel::ALL);
    for (ranks, mtu, operation) in [(3, 1024, Operation::Send), (4, 2048, Operation::Write)] {
        let spec = RingSpec::new(ranks, mtu, operation, 10);
        run_undisturbed(&cluster, &spec);
        run_undisturbed(&cluster, &RingSpec { summed: false, ..spec.clone() });
    }
}
