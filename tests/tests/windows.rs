//! Windows that change while jobs are at work: every sum stays right, and the pool is never short of what it has given.

use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Answer, Cluster, DaemonOptions, Group, JobSpec, Outcome, PATIENCE, program};
use netsum_lab::process::Running;
use serde_json::Value;

const RANKS: u32 = 3;
const SECOND: Duration = Duration::from_secs(1);
/// Bytes on the box for a window of one message: 8 slots.
const ONE: u64 = 8 * (1024 + RANKS as u64 * 112 + 24);
/// Windows of all jobs together.
const ROOM: u64 = 8;

/// Two jobs can be at work, each on addresses of its own; they outlive the daemon.
fn start() -> Cluster {
    let spec = LabSpec { ips_per_host: 2, ..LabSpec::hosts(RANKS as usize) };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    cluster.pin();
    start_daemon(&mut cluster);
    cluster
}

fn start_daemon(cluster: &mut Cluster) {
    let listen =
        format!("[heartbeat]\ninterval-ms = 100\ntimeout-ms = 5000\n[pool]\nmemory = \"{}\"\n", ROOM * ONE);
    cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
}

fn job(name: &str, least: u32, most: u32) -> JobSpec {
    JobSpec { message_size: 4096, window: most, least_window: Some(least), ..JobSpec::new(name, RANKS) }
}

fn group(cluster: &Cluster, job: &JobSpec, token: &str, k: usize) -> Group {
    let places: Vec<_> = (0..RANKS as usize).map(|host| (host, k)).collect();
    cluster.ranks(job, token, &places).unwrap()
}

/// `job create --wait`, under way.
fn create(cluster: &Cluster, job: &JobSpec) -> Running {
    let mut command = cluster.lab().box_().command(program("netsum").unwrap());
    command.args(["--socket", &cluster.socket(), "-j"]).args(job.create_arguments()).arg("--wait");
    Running::start(&format!("job create {}", job.name), &mut command).unwrap()
}

fn show(cluster: &Cluster, job: &str) -> Value {
    let tenants = cluster.netsum_json(&["tenant", "show"]).unwrap();
    let used = tenants[0]["memory"]["used"].as_u64().unwrap();
    assert!(used <= ROOM * ONE, "{tenants}");
    cluster.netsum_json(&["job", "show", job]).unwrap()
}

fn window(shown: &Value) -> u64 {
    shown["window"].as_u64().unwrap()
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

/// Works until the job has that window, or for a while after another one has been wished for.
fn work_until(cluster: &Cluster, group: &mut Group, job: &str, expected: u64) {
    let start = Instant::now();
    for seed in 0.. {
        work(group, seed);
        if window(&show(cluster, job)) == expected {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{}\n{}", show(cluster, job), cluster.daemon_log());
    }
}

fn wait_for_wish(cluster: &Cluster, job: &str, wished: &Value) {
    let start = Instant::now();
    while show(cluster, job)["wished_window"] != *wished {
        assert!(start.elapsed() < PATIENCE, "{}\n{}", show(cluster, job), cluster.daemon_log());
        std::thread::sleep(SECOND / 50);
    }
}

/// `wide` is at work with all that there is, and `next` waits for some of it.
fn one_waits(cluster: &Cluster, timeout: Duration) -> (Group, Running) {
    let wide = JobSpec { timeout, ..job("wide", 1, ROOM as u32) };
    let token = cluster.create_job(&wide).unwrap();
    let mut group = group(cluster, &wide, &token, 0);
    work(&mut group, 1);
    assert_eq!(window(&show(cluster, "wide")), ROOM);
    let next = create(cluster, &job("next", 2, 4));
    wait_for_wish(cluster, "wide", &4.into());
    (group, next)
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_job_makes_room_for_another_and_takes_it_back_and_every_sum_is_right() {
    let cluster = start();
    let (mut wide, next) = one_waits(&cluster, 10 * SECOND);
    let text = cluster.netsum(&["job", "show", "wide"]).unwrap();
    assert!(text.contains("window 8 of 1..8, soon 4"), "{text}");
    // Nothing changes as long as its ranks do not work.
    assert_eq!(cluster.netsum_json(&["job", "show", "next"]).unwrap()["state"], "queued");
    work_until(&cluster, &mut wide, "wide", 4);
    let created: Value = serde_json::from_str(&next.success(PATIENCE).unwrap()).unwrap();
    let (spec, token) = (job("next", 2, 4), created["token"].as_str().unwrap().to_owned());
    assert_eq!(window(&created), 4, "{created}");
    {
        let mut next = group(&cluster, &spec, &token, 1);
        for seed in 10..14 {
            work(&mut wide, seed);
            work(&mut next, seed);
        }
        assert!(work(&mut wide, 14).iter().all(|o| o.renewals == 1));
        assert_eq!(cluster.counter(None, "credit_violation").unwrap(), 0);
    }
    cluster.netsum(&["job", "delete", "next"]).unwrap();
    work_until(&cluster, &mut wide, "wide", ROOM);
    let outcomes = work(&mut wide, 20);
    assert!(outcomes.iter().all(|o| o.renewals == 2), "{outcomes:?}");
    let shown = show(&cluster, "wide");
    assert_eq!(
        (&shown["state"], &shown["epoch"], shown.get("wished_window")),
        (&"active".into(), &3.into(), None)
    );
    assert_eq!(cluster.counter(None, "credit_violation").unwrap(), 0);
    for line in wide.log().lines().filter(|l| l.contains("anew")) {
        println!("{line}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_window_changes_while_operations_are_in_flight() {
    const OPERATIONS: [(&str, usize); 7] =
        [("f32", 20_000), ("i32", 100), ("f32", 10), ("i32", 30_000), ("f32", 500), ("i32", 1), ("f32", 1)];
    let cluster = start();
    let (mut wide, next) = one_waits(&cluster, 10 * SECOND);
    let (begun, mut changed) = (Instant::now(), 0);
    // A few more at the new window.
    for seed in 0.. {
        for (rank, o) in wide.in_flight(&OPERATIONS, 100 * seed).unwrap().iter().enumerate() {
            assert_eq!((&*o.mode, o.wrong, o.fall_backs), ("box", 0, 0), "rank {rank}: {o:?}");
            assert!(changed == 0 || o.renewals == 1, "rank {rank}: {o:?}");
        }
        changed += u32::from(window(&show(&cluster, "wide")) == 4);
        if changed > 2 {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{}\n{}", show(&cluster, "wide"), cluster.daemon_log());
    }
    next.success(PATIENCE).unwrap();
    assert_eq!(cluster.counter(None, "credit_violation").unwrap(), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_daemon_that_is_killed_while_a_change_is_pending() {
    let mut cluster = start();
    let (mut wide, next) = one_waits(&cluster, 10 * SECOND);
    // To become narrower: whoever waits comes back to the next daemon, which then wishes for the same.
    cluster.kill_daemon().unwrap();
    start_daemon(&mut cluster);
    work(&mut wide, 2);
    work_until(&cluster, &mut wide, "wide", 4);
    next.success(PATIENCE).unwrap();
    cluster.netsum(&["job", "delete", "next"]).unwrap();
    wait_for_wish(&cluster, "wide", &ROOM.into());
    // Rank 0 hears of it.
    std::thread::sleep(SECOND / 2);
    let files = wide.order_all_reduce("i32", 50_000, 3).unwrap();
    cluster.kill_daemon().unwrap();
    std::thread::sleep(SECOND);
    start_daemon(&mut cluster);
    wide.check_all_reduce("i32", 50_000, 3, &files).unwrap();
    work_until(&cluster, &mut wide, "wide", ROOM);
    work(&mut wide, 4);
    assert_eq!(cluster.counter(None, "credit_violation").unwrap(), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_that_dies_while_all_connect_anew_is_named() {
    for delay in [0, 20, 60, 120, 300] {
        let cluster = start();
        let (mut wide, next) = one_waits(&cluster, 2 * SECOND);
        std::thread::sleep(SECOND / 2);
        wide.order_all_reduce("i32", 1000, 3).unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        wide.kill(1).unwrap();
        let begin = Instant::now();
        let first = wide.answers(PATIENCE).unwrap();
        wide.order_all_reduce("i32", 1000, 4).unwrap();
        let second = wide.answers(PATIENCE).unwrap();
        assert!(begin.elapsed() < 10 * SECOND, "{:?}", begin.elapsed());
        for ((rank, first), (_, second)) in first.into_iter().zip(second) {
            // The sums of the operation after which they connect anew are there, or not.
            let Answer::Error(error) = (if matches!(first, Answer::Error(_)) { first } else { second })
            else {
                panic!("rank {rank}: no error")
            };
            println!("killed after {delay} ms, rank {rank} in {:.1?}: {error}", begin.elapsed());
            assert!(error.contains("rank 1") || error.contains("missing: 1"), "rank {rank}: {error}");
        }
        // With its last ranks the job has become narrower.
        drop(wide);
        next.success(PATIENCE).unwrap();
    }
}
