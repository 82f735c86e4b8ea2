//! The whole of netsum under network faults. Every result is compared bit by bit with a sum
//! computed in this process, every emulated link must have applied its faults, and the box's
//! counters must agree.

use netsum_common::counters::Counter;
use netsum_common::unmanaged::static_connection;
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, Group, JobSpec, Outcome, one_on_each_host};
use netsum_lab::faults::{DirectionCounts, Fault, Faults, Kind, LinkCounts, Nth};
use netsum_lab::plane::Plane;
use serde_json::Value;

/// The direction in which the links inject faults.
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
    Cluster::start(LabSpec { mtu: 2300, faulty_links: true, ..LabSpec::hosts(ranks as usize) })
        .unwrap()
}

fn start(cluster: &Cluster, job: &JobSpec) -> Group {
    let token = cluster.create_job(job).unwrap();
    cluster.ranks(job, &token, &one_on_each_host(job.ranks)).unwrap()
}

/// Sets the same faults on all links, each with its own seed.
fn set_faults(cluster: &Cluster, up: Faults, down: Faults, seed: u32) {
    for host in cluster.lab().hosts() {
        host.set_faults(up, down, seed * 64 + host.number() as u32).unwrap();
    }
}

/// The counts of all links, up and down.
fn counts(cluster: &Cluster) -> [DirectionCounts; 2] {
    let mut sum = [DirectionCounts::default(); 2];
    for host in cluster.lab().hosts() {
        let counts = host.fault_link().unwrap().counts().unwrap();
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

    /// How much a counter has grown since `before`.
    fn since(&self, before: &Self, name: &str) -> u64 {
        self.get(name) - before.get(name)
    }
}

/// The box has summed, and every sum was right.
fn assert_box(outcomes: &[Outcome], what: &str) {
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.mode, "box", "{what}, rank {rank}: {outcome:?}");
        assert!(outcome.verified > 0, "{what}, rank {rank}: {outcome:?}");
        assert_eq!((outcome.wrong, outcome.fallbacks), (0, 0), "{what}, rank {rank}: {outcome:?}");
    }
}

/// Counters that no network fault may raise.
const NEVER: [&str; 7] = [
    "credit_violation",
    "internal_error",
    "redirect_failed",
    "steer_failed",
    "egress_no_route",
    "length_mismatch",
    "inactive_ring",
];

fn assert_plausible(before: &Counters, after: &Counters, ranks: u32, what: &str) {
    let grown = |name| after.since(before, name);
    assert!(grown("released") > 0, "{what}");
    // Every contribution was added once, and every sum was released once, even if a packet arrived
    // twice.
    assert_eq!(grown("contributions"), u64::from(ranks) * grown("released"), "{what}: {}", after.0);
    assert_eq!(grown("completed"), grown("released"), "{what}: {}", after.0);
    for name in NEVER {
        assert_eq!(grown(name), 0, "{what}: {name}");
    }
}

fn rate(fault: Fault) -> f64 {
    match fault {
        Fault::Loss | Fault::Corrupt | Fault::Reorder => 0.02,
        Fault::Duplicate | Fault::Mark => 0.05,
    }
}

fn matrix(ranks: u32, order: &'static str) {
    let cluster = cluster(ranks);
    let job = JobSpec { order, ..JobSpec::new("matrix", ranks) };
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
                let outcomes =
                    group.all_reduce(dtype, 100_000, u64::from(cell)).unwrap_or_else(|e| {
                        panic!("{what}: {e:#}\n{}\n{}", group.log(), cluster.daemon_log())
                    });
                assert_box(&outcomes, &what);
                again += outcomes.iter().map(|o| o.retransmissions).sum::<u64>();
            }
            let what = format!("{ranks} ranks, {fault:?} {direction:?}");
            let [up, down] = counts(&cluster);
            set_faults(&cluster, Faults::NONE, Faults::NONE, 0);
            let after = Counters::of(&cluster, &job.name);
            let faults = up.faults() + down.faults();
            println!(
                "{what}: {faults} faults, {again} packets sent again, {:.0?}",
                start.elapsed()
            );
            for (way, hit) in [(up, direction.up()), (down, direction.down())] {
                assert_eq!(way.of(fault) > 0, hit, "{what}: {way:?}");
                assert_eq!(way.faults(), way.of(fault), "{what}: {way:?}");
            }
            assert_plausible(&before, &after, ranks, &what);
            let grown = |name| after.since(&before, name);
            if direction.up() {
                let seen = match fault {
                    // Whether a receiver asks for it as well depends on who comes first.
                    Fault::Loss | Fault::Reorder => grown("out_of_sequence"),
                    Fault::Duplicate => {
                        grown("duplicate_request") + grown("replays") + grown("stale")
                    }
                    Fault::Corrupt => grown("rx_icrc_encapsulated"),
                    Fault::Mark => grown("np_ecn_marked_roce_packets"),
                };
                assert!(seen > 0, "{what}: the box has seen nothing of it: {}", after.0);
            }
            // A receiver of sums also keeps packets that arrive early, if the missing one follows
            // before it asks.
            let is_harmless = matches!(fault, Fault::Duplicate | Fault::Reorder);
            if direction.down() && !is_harmless {
                assert!(
                    again > 0 && grown("replays") > 0,
                    "{what}: {again} sent again, {}",
                    after.0
                );
            }
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn every_fault_in_every_direction_with_two_ranks() {
    matrix(2, "in-order");
    matrix(2, "auto");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn every_fault_in_every_direction_with_four_ranks() {
    matrix(4, "in-order");
    matrix(4, "auto");
}

/// Faults on single packets of one host's link, in both directions.
struct Surgery<'a> {
    plane: Plane<'a>,
    group: Group,
    cluster: &'a Cluster,
    seed: u64,
}

impl<'a> Surgery<'a> {
    const RANKS: u32 = 3;
    /// 8 messages of 15 full fragments, and a shorter last fragment.
    const LEN: usize = 8 * (16_384 / 4 - 4) - 300;
    const MESSAGES: u32 = 8;

    fn new(cluster: &'a Cluster) -> Self {
        let (job, places) = (JobSpec::new("single", Self::RANKS), one_on_each_host(Self::RANKS));
        let mut plane = Plane::load(cluster.lab()).unwrap();
        plane.attach().unwrap();
        plane.add(&job, &places).unwrap();
        let group = cluster.ranks_alone(&job, &places).unwrap();
        Self { plane, group, cluster, seed: 0 }
    }

    /// Runs one all-reduce with faults on the link of host 0. Returns what the link did, and how
    /// much the counters grew.
    fn operate(
        &mut self,
        up: Faults,
        down: Faults,
    ) -> (LinkCounts, impl Fn(Counter) -> u64 + use<>) {
        let read = |plane: &Plane<'_>| -> Vec<u64> {
            Counter::ALL.iter().map(|&counter| plane.count(counter).unwrap()).collect()
        };
        let before = read(&self.plane);
        let host = self.cluster.lab().host(0);
        host.set_faults(up, down, 0).unwrap();
        self.seed += 1;
        let what = format!("up {up:?}, down {down:?}");
        let outcomes = self
            .group
            .all_reduce("i32", Self::LEN, self.seed)
            .unwrap_or_else(|e| panic!("{what}: {e:#}\n{}", self.group.log()));
        assert_box(&outcomes, &what);
        let counts = host.fault_link().unwrap().counts().unwrap();
        host.set_faults(Faults::NONE, Faults::NONE, 0).unwrap();
        let after = read(&self.plane);
        let grown = move |counter: Counter| after[counter as usize] - before[counter as usize];
        assert_eq!(
            grown(Counter::Contributions),
            u64::from(Self::RANKS) * grown(Counter::Released),
            "{what}"
        );
        (counts, grown)
    }
}

fn lossy_lab() -> Cluster {
    let spec = LabSpec { mtu: 2300, faulty_links: true, ..LabSpec::hosts(Surgery::RANKS as usize) };
    Cluster::without_daemon(spec).unwrap()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn single_packets_of_each_kind() {
    let cluster = lossy_lab();
    let mut surgery = Surgery::new(&cluster);
    for fault in Fault::ALL {
        let data = [
            (Kind::First, 1),
            (Kind::Middle, 7),
            (Kind::Last, 3),
            (Kind::First, Surgery::MESSAGES),
        ];
        // No packet follows the very last one to reveal that it is missing.
        let data = data.into_iter().chain([
            (Kind::Last, Surgery::MESSAGES),
            (Kind::Ack, 1),
            (Kind::Ack, 2),
        ]);
        for (kind, n) in data {
            let nth = Faults::nth(kind, n, fault);
            let what = format!("{fault:?} of {kind:?} {n}");
            let (up, grown) = surgery.operate(nth, Faults::NONE);
            assert_eq!((up.up.of(fault), up.up.faults(), up.down.faults()), (1, 1, 0), "{what} up");
            // A late packet may be summed inline before the packets that overtook it leave the
            // queue. Then there is no gap.
            let mended = fault == Fault::Reorder && grown(Counter::Inline) > 0;
            let leaves_gap = matches!(fault, Fault::Loss | Fault::Reorder) && !mended;
            if leaves_gap && matches!(kind, Kind::First | Kind::Middle) {
                assert!(grown(Counter::OutOfSequence) > 0, "{what}: the box has seen the gap");
            }
            let (down, _) = surgery.operate(Faults::NONE, nth);
            assert_eq!(
                (down.down.of(fault), down.down.faults(), down.up.faults()),
                (1, 1, 0),
                "{what} down"
            );
        }
        // A lost contribution makes the next rank send a NAK, a lost result this one. On a busy
        // machine the sender's timer may fire before the rank sends its NAK, but not five times in
        // a row.
        let gap = Faults::nth(Kind::Middle, 20, Fault::Loss);
        let nak = Faults::nth(Kind::Nak, 1, fault);
        let on_the_way_down = (0..5).any(|_| {
            let (counts, _) = surgery.operate(gap, nak);
            assert_eq!((counts.up.lost, counts.up.faults()), (1, 1), "{fault:?} of a NAK down");
            counts.down.of(fault) == 1 && counts.down.faults() == 1
        });
        assert!(on_the_way_down, "no NAK came down");
        let on_the_way_up = (0..5).any(|_| {
            let (counts, _) = surgery.operate(nak, gap);
            assert_eq!((counts.down.lost, counts.down.faults()), (1, 1), "{fault:?} of a NAK up");
            counts.up.of(fault) == 1 && counts.up.faults() == 1
        });
        assert!(on_the_way_up, "no NAK went up");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_packet_is_lost_again_each_time_that_it_is_resent() {
    let cluster = lossy_lab();
    let mut surgery = Surgery::new(&cluster);
    // The operation has a single last message, and when its last packet is retransmitted, it is
    // sent alone.
    let nth = Nth { kind: Kind::Last, n: Surgery::MESSAGES, times: 3, what: Fault::Loss };
    let nth = Faults { nth: Some(nth), ..Faults::NONE };
    let (counts, _) = surgery.operate(nth, Faults::NONE);
    assert_eq!(counts.up.lost, 3);
    let (counts, _) = surgery.operate(Faults::NONE, nth);
    assert_eq!(counts.down.lost, 3);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn psns_wrap_within_a_message_and_packets_suffer_there() {
    // The n-th packet from 0 has PSN 0. It is in the middle of a message of 16 packets, of which 14
    // are neither first nor last.
    let wrap = |rank: u32| {
        let n = (1 << 24) - static_connection(rank, Some(0)).first_psn.get();
        let (message, fragment) = (n / 16, n % 16);
        assert!((4..12).contains(&fragment) && message < Surgery::MESSAGES, "PSN 0 is packet {n}");
        message * 14 + fragment
    };
    for fault in Fault::ALL {
        // PSNs 0xfffffe to 1, in what rank 0 sends and in what it receives. Received packets have
        // the PSNs of the previous rank.
        let around = |rank| Nth { kind: Kind::Middle, n: wrap(rank) - 2, times: 4, what: fault };
        let faults = |rank| Faults { nth: Some(around(rank)), ..Faults::NONE };
        // Each case has its own lab, because connections wrap only once.
        let cluster = lossy_lab();
        let mut surgery = Surgery::new(&cluster);
        let (counts, _) = surgery.operate(faults(0), faults(Surgery::RANKS - 1));
        assert_eq!((counts.up.of(fault), counts.down.of(fault)), (4, 4), "{fault:?}");
        // A rank that misread an acknowledgement behind the wrap has no window left by now.
        (0..2).for_each(|_| drop(surgery.operate(Faults::NONE, Faults::NONE)));
    }
}

/// Loss of 1 % on every link in both directions, until the box has released `fragments` sums.
fn long_run(ranks: u32, mtu: u32, fragments: u64) {
    let cluster = cluster(ranks);
    let job = JobSpec { mtu, ..JobSpec::new("long", ranks) };
    let mut group = start(&cluster, &job);
    set_faults(&cluster, Faults::loss(0.01), Faults::loss(0.01), 1);
    let before = Counters::of(&cluster, &job.name);
    let start = std::time::Instant::now();
    let len = (fragments * u64::from(mtu) / 4).min(2_000_000) as usize;
    let (mut seed, mut verified, mut again) = (0, 0, 0);
    let after = loop {
        let dtype = if seed % 2 == 0 { "i32" } else { "f32" };
        let outcomes = group.all_reduce(dtype, len, seed).unwrap_or_else(|e| {
            panic!("{dtype} {seed}: {e:#}\n{}\n{}", group.log(), cluster.daemon_log())
        });
        assert_box(&outcomes, &format!("{dtype} {seed}"));
        verified += outcomes.iter().map(|o| o.verified).sum::<u64>();
        again += outcomes.iter().map(|o| o.retransmissions).sum::<u64>();
        seed += 1;
        let after = Counters::of(&cluster, &job.name);
        if after.since(&before, "released") >= fragments {
            break after;
        }
    };
    assert_plausible(&before, &after, ranks, "long run");
    let [up, down] = counts(&cluster);
    for way in [up, down] {
        // Ten standard deviations of a binomial distribution are less than 3 per mille of more than
        // 30,000 packets.
        let share = way.lost as f64 / way.seen as f64;
        assert!((0.007..0.013).contains(&share), "{way:?}");
    }
    println!(
        "{ranks} ranks, path MTU {mtu}, 1% loss each way: {} sums released, {} contributions, {} \
         packets lost, {again} sent again, {verified} message sums verified, 0 wrong, {seed} \
         all-reduces in {:.1?}",
        after.since(&before, "released"),
        after.since(&before, "contributions"),
        up.lost + down.lost,
        start.elapsed()
    );
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_long_run_at_one_percent_loss() {
    // `cargo xtask soak` sets this variable.
    let fragments = std::env::var("NETSUM_SOAK_FRAGMENTS").map_or(20_000, |n| n.parse().unwrap());
    long_run(4, 1024, fragments);
}
