//! The whole of netsum under faults of the network: every result is compared bit by bit with a sum done in this process,
//! every cable must have done what it was told to, and the box's counters must tell the same story.

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, Group, JobSpec, Outcome, one_on_each_host};
use netsum_lab::faults::{Fault, Faults, WayCounts};
use serde_json::Value;

/// Where the cables meddle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
    Both,
}

impl Direction {
    const ALL: [Self; 3] = [Self::Up, Self::Down, Self::Both];

    fn up(self) -> bool {
        self != Self::Down
    }

    fn down(self) -> bool {
        self != Self::Up
    }
}

fn cluster(ranks: u32) -> Cluster {
    Cluster::start(LabSpec { mtu: 2300, cables: true, ..LabSpec::hosts(ranks as usize) }).unwrap()
}

fn start(cluster: &Cluster, job: &JobSpec) -> Group {
    let token = cluster.create_job(job).unwrap();
    cluster.ranks(job, &token, &one_on_each_host(job.ranks)).unwrap()
}

/// The same faults on all cables, each with a seed of its own.
fn set_faults(cluster: &Cluster, up: Faults, down: Faults, seed: u32) {
    for host in cluster.lab().hosts() {
        host.set_faults(up, down, seed * 64 + host.number() as u32).unwrap();
    }
}

/// What all cables have done, up and down.
fn counts(cluster: &Cluster) -> [WayCounts; 2] {
    let mut sum = [WayCounts::default(); 2];
    for host in cluster.lab().hosts() {
        let counts = host.cable().unwrap().counts().unwrap();
        for (sum, way) in sum.iter_mut().zip([counts.up, counts.down]) {
            sum.seen += way.seen;
            sum.lost += way.lost;
            sum.duplicated += way.duplicated;
            sum.reordered += way.reordered;
            sum.corrupted += way.corrupted;
        }
    }
    sum
}

/// The box's counters of a job.
struct Counters(Value);

impl Counters {
    fn of(cluster: &Cluster, job: &str) -> Self {
        Self(cluster.netsum_json(&["stats", job]).unwrap())
    }

    fn get(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("no counter {name} in {}", self.0))
    }

    /// How much a counter has grown since.
    fn since(&self, before: &Self, name: &str) -> u64 {
        self.get(name) - before.get(name)
    }
}

/// The box has summed, and every sum was right.
fn assert_box(outcomes: &[Outcome], what: &str) {
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.mode, "box", "{what}, rank {rank}: {outcome:?}");
        assert!(outcome.verified > 0, "{what}, rank {rank}: {outcome:?}");
        assert_eq!((outcome.wrong, outcome.fall_backs), (0, 0), "{what}, rank {rank}: {outcome:?}");
    }
}

/// What no fault of a network may lead to.
const NEVER: [&str; 7] = [
    "credit_violation",
    "internal_error",
    "redirect_failed",
    "steer_failed",
    "egress_no_slot",
    "length_mismatch",
    "inactive_ring",
];

fn assert_plausible(before: &Counters, after: &Counters, ranks: u32, what: &str) {
    let grown = |name| after.since(before, name);
    assert!(grown("released") > 0, "{what}");
    // Every contribution was added once, and every sum was released once, whatever came twice.
    assert_eq!(grown("fragments"), u64::from(ranks) * grown("released"), "{what}: {}", after.0);
    assert_eq!(grown("completed"), grown("released"), "{what}: {}", after.0);
    for name in NEVER {
        assert_eq!(grown(name), 0, "{what}: {name}");
    }
}

fn rate(fault: Fault) -> f64 {
    match fault {
        Fault::Loss | Fault::Corrupt | Fault::Reorder => 0.02,
        Fault::Duplicate => 0.05,
    }
}

fn matrix(ranks: u32) {
    let cluster = cluster(ranks);
    let job = JobSpec::new("matrix", ranks);
    let mut group = start(&cluster, &job);
    let mut cell = 0;
    for fault in Fault::ALL {
        for direction in Direction::ALL {
            cell += 1;
            let faults = Faults::of(fault, rate(fault));
            let up = if direction.up() { faults } else { Faults::NONE };
            let down = if direction.down() { faults } else { Faults::NONE };
            let before = Counters::of(&cluster, &job.name);
            set_faults(&cluster, up, down, cell);
            let start = std::time::Instant::now();
            let mut again = 0;
            for dtype in ["i32", "f32"] {
                let what = format!("{ranks} ranks, {fault:?} {direction:?}, {dtype}");
                let outcomes = group.all_reduce(dtype, 100_000, u64::from(cell)).unwrap_or_else(|e| {
                    panic!("{what}: {e:#}\n{}\n{}", group.log(), cluster.daemon_log())
                });
                assert_box(&outcomes, &what);
                again += outcomes.iter().map(|o| o.retransmissions).sum::<u64>();
            }
            let what = format!("{ranks} ranks, {fault:?} {direction:?}");
            let [up, down] = counts(&cluster);
            set_faults(&cluster, Faults::NONE, Faults::NONE, 0);
            let after = Counters::of(&cluster, &job.name);
            println!("{what}: {:?}, {again} sent again, {up:?}, {down:?}", start.elapsed());
            for (way, hit) in [(up, direction.up()), (down, direction.down())] {
                assert_eq!(way.of(fault) > 0, hit, "{what}: {way:?}");
                assert_eq!(way.faults(), way.of(fault), "{what}: {way:?}");
            }
            assert_plausible(&before, &after, ranks, &what);
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn every_fault_in_every_direction_with_two_ranks() {
    matrix(2);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn every_fault_in_every_direction_with_four_ranks() {
    matrix(4);
}
