//! Stock hosts in the middle of a job that ends: no rank may take another's data for a sum, and
//! each must learn of the end from its own connection.

use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::Cluster;
use netsum_lab::netns;
use netsum_lab::verbs_ring::{self, JOB, Operation, Outcome, VerbsRing, VerbsRingSpec};
use netsum_lab::vm::parts::Kernel;

/// The silence after which an application gives up by itself: many times what its connections take.
const SILENCE: Duration = Duration::from_secs(30);
/// The time after which all ranks must have given up.
const BOUND: Duration = Duration::from_secs(90);

/// A ring that runs long enough to be ended in the middle. Its senders give up after seven times
/// 0.5 s.
fn spec() -> VerbsRingSpec {
    VerbsRingSpec {
        sizes: vec![64 << 10],
        timeout: 17,
        retry: 6,
        ..VerbsRingSpec::new(3, 1024, Operation::Send, 400)
    }
}

/// Starts a ring, and waits until some of its sums are released.
fn in_mid_run(cluster: &Cluster) -> VerbsRing {
    let ring = VerbsRing::start(cluster, &spec(), SILENCE).unwrap();
    let start = Instant::now();
    // Ten messages of 64 fragments.
    while cluster.counter(Some(JOB), "released").unwrap() < 640 {
        assert!(start.elapsed() < BOUND, "the ring does not begin");
        std::thread::sleep(Duration::from_millis(50));
    }
    ring
}

/// The outcomes of its ranks.
fn outcomes(cluster: &Cluster, mut ring: VerbsRing) -> Vec<Outcome> {
    let start = Instant::now();
    while !ring.is_over(Duration::from_millis(200)).unwrap() {
        assert!(start.elapsed() < BOUND, "ranks wait: {ring:?}");
    }
    ring.end(cluster).unwrap()
}

/// Deviations from what must happen when a job has ended in mid-run.
fn complaints(case: &str, outcomes: &[Outcome]) -> Vec<String> {
    let mut all = Vec::new();
    for (rank, Outcome { report, error }) in outcomes.iter().enumerate() {
        println!(
            "{case}: rank {rank}: {} messages, {} wrong lanes, {error:?}",
            report.messages, report.wrong
        );
        if report.wrong > 0 {
            all.push(format!(
                "{case}: rank {rank} has taken {} wrong lanes for sums",
                report.wrong
            ));
        }
        if error.is_none() {
            all.push(format!("{case}: rank {rank} has not been told"));
        }
    }
    let told = |outcome: &Outcome| {
        outcome.error.as_ref().is_some_and(|e| e.contains("retry counter exceeded"))
    };
    if !outcomes.iter().any(told) {
        all.push(format!("{case}: no connection has ended by itself"));
    }
    all
}

/// Runs a whole ring, every sum of which must be right.
fn a_whole_ring(cluster: &Cluster) {
    for report in
        verbs_ring::run(cluster, &VerbsRingSpec { messages: 20, ..spec() }, BOUND).unwrap()
    {
        assert_eq!((report.messages, report.wrong), (20, 0));
    }
    verbs_ring::forget(cluster).unwrap();
}

fn ip(cluster: &Cluster, words: &[&str]) -> String {
    netns::output(cluster.lab().box_().command("ip").args(words)).unwrap()
}

#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn no_stock_host_takes_data_for_sums_when_its_job_ends() {
    let mut cluster = Cluster::without_daemon(LabSpec::vms(3, Kernel::V6_1)).unwrap();
    cluster.pin();
    cluster.start_daemon().unwrap();
    let mut wrong = Vec::new();
    // Packets dropped because their job has ended.
    let ended = |cluster: &Cluster| cluster.counter(None, "job_ended").unwrap_or_default();

    let ring = in_mid_run(&cluster);
    cluster.netsum(&["job", "delete", JOB]).map(drop).unwrap();
    wrong.extend(complaints("job delete", &outcomes(&cluster, ring)));
    if ended(&cluster) == 0 {
        wrong.push("job delete: `job_ended` counts nothing".into());
    }

    let ring = in_mid_run(&cluster);
    let port = cluster.lab().box_().port(1);
    ip(&cluster, &["link", "set", "dev", &port, "nomaster"]);
    // The daemon probes the machine behind the port over the same port, so the port must return
    // before anything is known of its rank. By then all connections have given up, or must not
    // continue.
    std::thread::sleep(Duration::from_secs(8));
    ip(&cluster, &["link", "set", "dev", &port, "master", "br0"]);
    wrong.extend(complaints("a port leaves the bridge", &outcomes(&cluster, ring)));
    verbs_ring::forget(&cluster).unwrap();

    let ring = in_mid_run(&cluster);
    cluster.netsum(&["job", "restart", JOB]).unwrap();
    wrong.extend(complaints("job restart", &outcomes(&cluster, ring)));
    verbs_ring::forget(&cluster).unwrap();

    let ring = in_mid_run(&cluster);
    cluster.kill_daemon().unwrap();
    for (rank, Outcome { report, error }) in outcomes(&cluster, ring).into_iter().enumerate() {
        let outcome = (report.messages, report.wrong, error);
        assert_eq!(outcome, (400, 0, None), "rank {rank} while the daemon is killed");
    }
    cluster.start_daemon().unwrap();
    verbs_ring::forget(&cluster).unwrap();

    let ring = in_mid_run(&cluster);
    cluster.stop_daemon().unwrap();
    wrong.extend(complaints("SIGTERM", &outcomes(&cluster, ring)));
    if !ip(&cluster, &["link", "show", "dev", &port]).contains("prog/xdp") {
        wrong.push("SIGTERM: the port has no program any more".into());
    }
    // The next daemon does not know the last one's job, and takes its ports over.
    cluster.start_daemon().unwrap();
    a_whole_ring(&cluster);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
