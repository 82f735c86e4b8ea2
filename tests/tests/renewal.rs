//! Ranks that connect anew while their job is at work: every sum stays right.

use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Answer, Cluster, DaemonOptions, Group, JobSpec, Outcome, PATIENCE};

const RANKS: u32 = 3;
const SECOND: Duration = Duration::from_secs(1);
const JOB: &str = "anew";

/// A job at work, which outlives the daemon.
fn start(timeout: Duration) -> (Cluster, Group) {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(RANKS as usize)).unwrap();
    cluster.pin();
    start_daemon(&mut cluster);
    let job = JobSpec { message_size: 4096, timeout, ..JobSpec::new(JOB, RANKS) };
    let token = cluster.create_job(&job).unwrap();
    let places: Vec<_> = (0..RANKS as usize).map(|host| (host, 0)).collect();
    let mut group = cluster.ranks(&job, &token, &places).unwrap();
    work(&mut group, 1);
    assert_eq!(epoch(&cluster), 1);
    (cluster, group)
}

fn start_daemon(cluster: &mut Cluster) {
    let listen = "[heartbeat]\ninterval-ms = 100\ntimeout-ms = 5000\n".to_owned();
    cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
}

fn ask_to_renew(cluster: &Cluster) {
    cluster.netsum(&["job", "renew", JOB]).unwrap();
}

fn epoch(cluster: &Cluster) -> u64 {
    cluster.netsum_json(&["job", "show", JOB]).unwrap()["epoch"].as_u64().unwrap()
}

/// A few sums, right and by the box; what the ranks say of the last.
fn work(group: &mut Group, seed: u64) -> Vec<Outcome> {
    let mut all = Vec::new();
    for (dtype, len) in [("f32", 30_000), ("i32", 100), ("i32", 50_000)] {
        all = group.all_reduce(dtype, len, seed).unwrap();
        for (rank, o) in all.iter().enumerate() {
            assert_eq!(
                (&*o.mode, o.wrong, o.fall_backs),
                ("box", 0, 0),
                "rank {rank}: {o:?}\n{}",
                group.log()
            );
        }
    }
    all
}

/// Works until the ranks have connected anew for the n-th time.
fn work_until(cluster: &Cluster, group: &mut Group, renewals: u64) {
    let begun = Instant::now();
    for seed in 0.. {
        if work(group, seed).iter().all(|o| o.renewals == renewals) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{}\n{}", group.log(), cluster.daemon_log());
    }
    assert_eq!(epoch(cluster), renewals + 1);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_connect_anew_when_they_are_asked_to_and_every_sum_is_right() {
    let (cluster, mut group) = start(10 * SECOND);
    for renewals in 1..=3 {
        ask_to_renew(&cluster);
        work_until(&cluster, &mut group, renewals);
    }
    // Once for each time that they were asked.
    for seed in 10..14 {
        assert!(work(&mut group, seed).iter().all(|o| o.renewals == 3));
    }
    let shown = cluster.netsum_json(&["job", "show", JOB]).unwrap();
    assert_eq!((&shown["state"], &shown["epoch"]), (&"active".into(), &4.into()));
    assert_eq!(cluster.counter(None, "credit_violation").unwrap(), 0);
    drop(group);
    let begun = Instant::now();
    while cluster.netsum_json(&["job", "show", JOB]).unwrap()["state"] == "active" {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::sleep(SECOND / 20);
    }
    let why = format!("{:#}", cluster.netsum(&["job", "renew", JOB]).unwrap_err());
    assert!(why.contains("no ranks that have joined it are at work"), "{why}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_connect_anew_while_operations_are_in_flight() {
    const OPERATIONS: [(&str, usize); 7] =
        [("f32", 20_000), ("i32", 100), ("f32", 10), ("i32", 30_000), ("f32", 500), ("i32", 1), ("f32", 1)];
    let (cluster, mut group) = start(10 * SECOND);
    ask_to_renew(&cluster);
    let (begun, mut after) = (Instant::now(), 0);
    // A few more over the new connections.
    for seed in 0.. {
        let outcomes = group.in_flight(&OPERATIONS, 100 * seed).unwrap();
        for (rank, o) in outcomes.iter().enumerate() {
            assert_eq!((&*o.mode, o.wrong, o.fall_backs), ("box", 0, 0), "rank {rank}: {o:?}");
            assert!(after == 0 || o.renewals == 1, "rank {rank}: {o:?}");
        }
        after += u32::from(outcomes.iter().all(|o| o.renewals == 1));
        if after > 2 {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{}", cluster.daemon_log());
    }
    assert_eq!(cluster.counter(None, "credit_violation").unwrap(), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_daemon_that_is_killed_before_the_ranks_have_connected_anew_still_has_them_do_so() {
    let (mut cluster, mut group) = start(10 * SECOND);
    ask_to_renew(&cluster);
    cluster.kill_daemon().unwrap();
    start_daemon(&mut cluster);
    work_until(&cluster, &mut group, 1);
    ask_to_renew(&cluster);
    // Rank 0 hears of it.
    std::thread::sleep(SECOND / 2);
    let files = group.order_all_reduce("i32", 50_000, 3).unwrap();
    cluster.kill_daemon().unwrap();
    std::thread::sleep(SECOND);
    start_daemon(&mut cluster);
    group.check_all_reduce("i32", 50_000, 3, &files).unwrap();
    work_until(&cluster, &mut group, 2);
    assert_eq!(cluster.counter(None, "credit_violation").unwrap(), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_that_dies_while_all_connect_anew_is_named() {
    // Each in a lab of its own, and all at once: they wait for time-outs.
    std::thread::scope(|scope| {
        for delay in [0, 20, 60, 120, 300] {
            scope.spawn(move || dies_after(Duration::from_millis(delay)));
        }
    });
}

/// A rank dies so long after the operation with which they connect anew has begun.
fn dies_after(delay: Duration) {
    let (cluster, mut group) = start(2 * SECOND);
    ask_to_renew(&cluster);
    std::thread::sleep(SECOND / 2);
    group.order_all_reduce("i32", 1000, 3).unwrap();
    std::thread::sleep(delay);
    group.kill(1).unwrap();
    let begin = Instant::now();
    let first = group.answers(PATIENCE).unwrap();
    group.order_all_reduce("i32", 1000, 4).unwrap();
    let second = group.answers(PATIENCE).unwrap();
    assert!(begin.elapsed() < 10 * SECOND, "{:?}", begin.elapsed());
    for ((rank, first), (_, second)) in first.into_iter().zip(second) {
        // The sums of the operation after which they connect anew are there, or not.
        let Answer::Error(error) = (if matches!(first, Answer::Error(_)) { first } else { second }) else {
            panic!("rank {rank}: no error")
        };
        println!("killed after {delay:?}, rank {rank} in {:.1?}: {error}", begin.elapsed());
        // Whose time was over a moment before is missing, too.
        let missing = error.split("missing: ").nth(1).is_some_and(|who| who.contains('1'));
        assert!(error.contains("rank 1") || missing, "rank {rank}: {error}");
    }
}
