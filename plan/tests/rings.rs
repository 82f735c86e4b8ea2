//! Rings of plans: no CPU exceeds its aggregation rate, slot pools and links are large enough, and
//! there are as many rings as needed.

use std::collections::BTreeMap;

use netsum_plan::generate;
use netsum_plan::plan::{Job, Plan, plan};
use netsum_plan::topology::{Network, Node, Resource, Shape, Topology};
use netsum_plan::tree::Collective;
use proptest::prelude::*;

/// The shape of `job create`'s rings by default at path MTU 1024: 1024 slots of slightly more than
/// 1024 bytes, and 112 bytes more for each member.
const DEFAULT_RINGS: Shape = Shape {
    wire: 1.08,
    added: 1.001,
    window: 524_288.0,
    slots: 1_064_960.0,
    slots_per_member: 114_688.0,
    rings: 255,
    members: 64,
};

fn job(name: &str, members: impl IntoIterator<Item = Node>) -> Job {
    let members = members.into_iter().collect();
    Job { name: name.into(), members, priority: 0, collective: Collective::AllReduce }
}

/// A real box: a new ring is served by the CPU with the fewest rings, and takes slots of a pool.
#[derive(Default)]
struct BoxLoad {
    cpus: Vec<(usize, f64)>,
    slots: f64,
}

/// Creates all jobs, in this order, and compares the resources with their needs.
fn check(network: &Network, plans: &[&Plan]) {
    let mut boxes: BTreeMap<Node, BoxLoad> = BTreeMap::new();
    let mut edges: BTreeMap<Resource, f64> = BTreeMap::new();
    for plan in plans {
        for tree in &plan.trees {
            assert!(tree.rings > 0 && tree.rate > 0.0, "{tree:?}");
            let each = tree.rate / f64::from(tree.rings);
            let first = &plan.trees[0];
            let other = first.rate / f64::from(first.rings);
            assert!((each / other - 1.0).abs() < 1e-9, "rings of a job: {each} and {other}");
            let window = network.shape().window;
            assert!(each * tree.round_trip(network) <= window * (1.0 + 1e-9), "{tree:?}: window");
            for _ in 0..tree.rings {
                for (node, members) in tree.members(network) {
                    let cpus = vec![(0, 0.0); network.cpus(node) as usize];
                    let at = boxes.entry(node).or_insert(BoxLoad { cpus, slots: 0.0 });
                    at.slots += network.shape().slots_of(members);
                    let cpu = at.cpus.iter_mut().min_by_key(|cpu| cpu.0).unwrap();
                    *cpu = (cpu.0 + 1, cpu.1 + members as f64 * each);
                }
            }
            for (resource, amount) in tree.uses(network, Collective::AllReduce) {
                *edges.entry(resource).or_default() += amount * tree.rate;
            }
        }
        assert!(plan.rate() <= plan.bound * (1.0 + 1e-6), "{} of {}", plan.rate(), plan.bound);
    }
    for (node, at) in boxes {
        let name = network.name(node);
        assert!(
            at.slots <= network.capacity(Resource::Slots(node)),
            "{name}: {} B of slots",
            at.slots
        );
        for (rings, adds) in at.cpus {
            let most = network.cpu_rate(node);
            assert!(
                adds <= most * (1.0 + 1e-6),
                "{name}: a CPU with {rings} rings adds {adds} of {most}"
            );
        }
    }
    for (resource, used) in edges {
        let most = network.capacity(resource);
        assert!(used <= most * (1.0 + 1e-6), "{}: {used} of {most}", network.describe(resource));
    }
}

fn example() -> Topology {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/two-racks.toml");
    Topology::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn the_example_promises_no_more_per_ring_than_a_core_adds() {
    /// 13.1 Gb/s of live contributions, path MTU 2048: BENCHMARKS.md, "Data plane".
    const MEASURED: f64 = 13.1e9 / 8.0;
    let network = Network::new(&example()).unwrap();
    let hosts =
        |names: &[&str]| names.iter().map(|name| network.node(name).unwrap()).collect::<Vec<_>>();
    let eval = Job { priority: 1, ..job("eval", hosts(&["a0", "b0"])) };
    let jobs =
        [job("train", hosts(&["a1", "a2", "b1", "b2"])), eval, job("late", hosts(&["a0", "a1"]))];
    for network in [network.clone(), network.with_rings(DEFAULT_RINGS)] {
        let plans = plan(&network, &jobs).unwrap();
        check(&network, &plans.iter().collect::<Vec<_>>());
        for tree in plans.iter().flat_map(|plan| &plan.trees) {
            for (node, members) in tree.members(&network) {
                let adds = members as f64 * tree.rate / f64::from(tree.rings);
                assert!(adds <= MEASURED, "{}: a ring of {tree:?} adds {adds}", network.name(node));
            }
        }
        // With one ring, one core of a tree would have to add 6.25 GB/s.
        assert!(plans[1].trees.iter().map(|tree| tree.rings).sum::<u32>() >= 4, "{:?}", plans[1]);
        assert!(plans[1].rate() >= 0.95 * plans[1].share, "{:?}", plans[1]);
    }
}

#[test]
fn a_tree_has_as_many_rings_as_it_needs_cpus() {
    let rack = |cpus, adds| {
        let mut t = generate::rack(4, 8e10);
        (t.boxes[0].cpus, t.boxes[0].aggregation_rate) = (Some(cpus), Some(adds));
        Network::new(&t).unwrap()
    };
    for (cpus, adds, rings, rate) in [
        // One CPU adds for four members at 0.41 GB/s each.
        (1, 1.64e9, 1, 0.41e9),
        (8, 8.0 * 1.64e9, 8, 8.0 * 0.41e9),
        // The links carry 10 GB/s: 25 rings reach it, and 24 keep 95 %.
        (100, 164e9, 24, 24.0 * 0.41e9),
        // Two CPUs, each fast enough for one and a half links.
        (2, 120e9, 1, 10e9),
    ] {
        let network = rack(cpus, adds);
        let plans = plan(&network, &[job("j", 0..4)]).unwrap();
        check(&network, &[&plans[0]]);
        assert_eq!(plans[0].trees[0].rings, rings, "{cpus} CPUs: {plans:?}");
        assert!(
            (plans[0].rate() / rate - 1.0).abs() < 1e-6,
            "{cpus} CPUs: {} of {rate}",
            plans[0].rate()
        );
    }
}

#[test]
fn a_plan_does_not_exceed_the_slot_pool() {
    let with = |slots: f64| {
        let mut t = generate::rack(4, 8e10);
        t.boxes[0] = netsum_plan::topology::BoxNode {
            name: "leaf0".into(),
            aggregation_rate: Some(8.0 * 1.64e9),
            cpus: Some(8),
            slot_memory: Some(slots),
        };
        let network = Network::new(&t).unwrap().with_rings(DEFAULT_RINGS);
        let plans = plan(&network, &[job("first", 0..4), job("second", 0..4)]).unwrap();
        check(&network, &plans.iter().collect::<Vec<_>>());
        (network, plans)
    };
    let ring = DEFAULT_RINGS.slots_of(4);
    let rings = |plan: &Plan| plan.trees.iter().map(|tree| tree.rings).sum::<u32>();
    let (_, plans) = with(8.0 * ring);
    assert_eq!(plans.iter().map(rings).collect::<Vec<_>>(), [4, 4]);
    // Both have a ring, whichever comes first.
    let (network, plans) = with(3.0 * ring);
    assert_eq!(plans.iter().map(rings).collect::<Vec<_>>(), [2, 1]);
    let slots = Resource::Slots(network.node("leaf0").unwrap());
    assert!(plans.iter().all(|plan| plan.full.contains(&slots)), "{plans:?}");
    let (_, plans) = with(2.0 * ring - 1.0);
    assert_eq!(plans.iter().map(rings).collect::<Vec<_>>(), [1, 0]);
    assert!(plans[1].rate() == 0.0 && plans[1].full.contains(&slots), "{plans:?}");
}

#[test]
fn links_carry_headers_and_a_window_takes_a_round_trip() {
    let mut t = generate::rack(2, 8e9);
    let rate = |t: &Topology| {
        let network = Network::new(t).unwrap().with_rings(DEFAULT_RINGS);
        let plan = plan(&network, &[job("j", 0..2)]).unwrap().remove(0);
        check(&network, &[&plan]);
        (plan.rate(), plan.trees[0].rings, plan.bound)
    };
    let (fast, rings, bound) = rate(&t);
    assert!((fast * 1.08 / 1e9 - 1.0).abs() < 1e-9 && rings == 1 && bound == fast, "{fast}");
    // 512 KiB in 2 ms are 262 MB/s.
    t.links.iter_mut().for_each(|link| link.latency_us = 1000.0);
    assert_eq!(rate(&t), (4.0f64.min(bound / 262_144_000.0) * 262_144_000.0, 4, bound));
}

#[test]
fn rings_are_in_proportion_to_the_rates_of_trees() {
    // Uplinks of 2 and 1 GB/s to two spines.
    let mut t = generate::leaf_spine(2, 2, 2, 8e10, 1.0);
    for link in &mut t.links {
        match &*link.to {
            "spine0" => link.bits = 16e9,
            "spine1" => link.bits = 8e9,
            _ => {}
        }
    }
    let network = Network::new(&t).unwrap();
    let plan = plan(&network, &[job("j", 0..4)]).unwrap().remove(0);
    check(&network, &[&plan]);
    assert_eq!(plan.trees.iter().map(|tree| tree.rings).collect::<Vec<_>>(), [2, 1]);
    assert!((plan.rate() / 3e9 - 1.0).abs() < 1e-9, "{plan:?}");
}

#[test]
fn a_ring_that_no_box_can_have_is_refused_by_name() {
    let network =
        |hosts| Network::new(&generate::rack(hosts, 8e9)).unwrap().with_rings(DEFAULT_RINGS);
    assert!(plan(&network(64), &[job("j", 0..64)]).is_ok());
    let error = plan(&network(65), &[job("j", 0..65)]).unwrap_err().to_string();
    assert_eq!(error, "job j: a ring would have 65 members at leaf0, but 64 are the most");
}

/// The best rate of one job's rings at one box, by trying all numbers of rings.
fn best(network: &Network, members: usize) -> f64 {
    let node = network.boxes().start;
    let (cpus, adds) = (network.cpus(node), network.cpu_rate(node));
    let pool = network.capacity(Resource::Slots(node)) / network.shape().slots_of(members);
    let rate = |rings: u32| {
        let together = rings.div_ceil(cpus);
        let each = adds / f64::from(together) / members as f64;
        (f64::from(rings) * each).min(network.capacity(Resource::Edge(0)))
    };
    (1..=255).filter(|&rings| f64::from(rings) <= pool).map(rate).fold(0.0, f64::max)
}

/// CPUs, the aggregation rate of each in GB/s, and how many rings with two members the pool holds.
type AnyBox = (u32, u8, u8);

fn any_box() -> impl Strategy<Value = AnyBox> {
    (1u32..9, 1u8..30, 0u8..30)
}

fn with_boxes(mut t: Topology, boxes: &[AnyBox]) -> Network {
    for (b, (cpus, adds, rings)) in t.boxes.iter_mut().zip(boxes) {
        b.cpus = Some(*cpus);
        b.aggregation_rate = Some(f64::from(*cpus) * f64::from(*adds) * 1e8);
        b.slot_memory = Some(f64::from(*rings) * DEFAULT_RINGS.slots_of(2));
    }
    Network::new(&t).unwrap().with_rings(DEFAULT_RINGS)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn one_box_reaches_the_rate_of_its_best_rings(
        of in any_box(),
        bits in 1u8..100,
        hosts in 2usize..6,
    ) {
        let network = with_boxes(generate::rack(hosts, f64::from(bits) * 1e9), &[of]);
        let plan = plan(&network, &[job("j", 0..hosts)]).unwrap().remove(0);
        check(&network, &[&plan]);
        let best = best(&network, hosts);
        prop_assert!(plan.rate() <= best * (1.0 + 1e-6), "{} of {best}", plan.rate());
        // The plan keeps what the fewest rings must keep, of what is possible.
        prop_assert!(
            plan.rate() >= best.min(0.95 * plan.share) * (1.0 - 1e-6),
            "{} of {best}", plan.rate()
        );
    }

    #[test]
    fn no_cpu_pool_or_link_is_overloaded(
        boxes in prop::collection::vec(any_box(), 5),
        up in 1u8..40,
        jobs in prop::collection::vec((prop::sample::subsequence((0..9).collect::<Vec<Node>>(),
            2..9), 0u32..3), 1..5),
        order in Just((0..5).collect::<Vec<usize>>()).prop_shuffle(),
    ) {
        let network = with_boxes(generate::leaf_spine(3, 3, 2, f64::from(up) * 1e9, 2.0), &boxes);
        let jobs: Vec<Job> = jobs
            .into_iter()
            .enumerate()
            .map(|(n, (members, priority))| Job { priority, ..job(&format!("j{n}"), members) })
            .collect();
        let plans = plan(&network, &jobs).unwrap();
        // The order of creation is arbitrary.
        let order = order.into_iter().filter_map(|n| plans.get(n));
        check(&network, &order.collect::<Vec<_>>());
        for plan in &plans {
            // A job that gets nothing has a reason.
            prop_assert!(
                plan.rate() > 0.0 || plan.share == 0.0 || !plan.full.is_empty(),
                "{:?}", plan
            );
        }
        prop_assert_eq!(plan(&network, &jobs).unwrap(), plans);
    }
}
