//! All-reduces in flight through the box. Every sum is compared bit by bit, and every handle
//! completes.

use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, Group, JobSpec, RankReply, TIMEOUT, one_on_each_host};
use netsum_lab::faults::Faults;

const RANKS: u32 = 4;
/// Mixed types; lengths from less than a packet to more than the window.
const OPERATIONS: [(&str, usize); 12] = [
    ("f32", 100),
    ("i32", 1),
    ("f32", 60_000),
    ("i32", 5000),
    ("f32", 1),
    ("f32", 3),
    ("i32", 150_001),
    ("f32", 0),
    ("f32", 20_000),
    ("i32", 64),
    ("f32", 64),
    ("i32", 4096),
];

fn start(cluster: &Cluster, job: &JobSpec) -> Group {
    let token = cluster.create_job(job).unwrap();
    cluster.ranks(job, &token, &one_on_each_host(job.ranks)).unwrap()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn mixed_sizes_and_types_in_flight_with_and_without_loss() {
    let cluster =
        Cluster::start(LabSpec { faulty_links: true, ..LabSpec::hosts(RANKS as usize) }).unwrap();
    let mut group = start(&cluster, &JobSpec { rings: 2, ..JobSpec::new("flight", RANKS) });
    let mut check = |seed| {
        let outcomes = group.in_flight(&OPERATIONS, seed).unwrap_or_else(|e| {
            panic!("seed {seed}: {e:#}\n{}\n{}", group.log(), cluster.daemon_log())
        });
        for (rank, o) in outcomes.iter().enumerate() {
            assert_eq!(
                (&*o.mode, o.wrong, o.fallbacks),
                ("box", 0, 0),
                "seed {seed}, rank {rank}: {o:?}"
            );
        }
    };
    (0..4).for_each(|n| check(100 * n));
    for host in cluster.lab().hosts() {
        host.set_faults(Faults::loss(0.01), Faults::loss(0.01), host.number() as u32).unwrap();
    }
    (4..7).for_each(|n| check(100 * n));
    for counter in ["credit_violation", "internal_error"] {
        assert_eq!(cluster.counter(Some("flight"), counter).unwrap(), 0, "{counter}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn every_handle_names_a_rank_that_was_killed() {
    let cluster = Cluster::start(LabSpec::hosts(RANKS as usize)).unwrap();
    let job = JobSpec { timeout: Duration::from_secs(2), ..JobSpec::new("mortal", RANKS) };
    let mut group = start(&cluster, &job);
    group.in_flight(&OPERATIONS, 1).unwrap();
    let started = Instant::now();
    group.order_in_flight(&[("i32", 2_000_000); 6], 50).unwrap();
    group.kill(2).unwrap();
    let answers = group.answers(TIMEOUT).unwrap();
    assert_eq!(answers.len(), 3);
    for (rank, answer) in answers {
        let RankReply::Error(errors) = answer else { panic!("rank {rank}: {answer:?}") };
        assert_eq!(errors.lines().count(), 6, "rank {rank}: {errors}");
        assert!(errors.lines().all(|error| error.contains("rank 2")), "rank {rank}: {errors}");
    }
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
}
