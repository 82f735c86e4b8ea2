//! Incremental plans: what a job gets among others that keep their trees is feasible, fair, and the
//! same each time.

use netsum_plan::incremental::{Incremental, incremental};
use netsum_plan::topology::{Network, Topology};
use netsum_plan::tree::{Collective, Hop, Tree, load};
use proptest::prelude::*;

/// Leaves with two hosts each, all linked to all spines.
#[derive(Clone, Debug)]
struct Fabric {
    leaves: usize,
    spines: usize,
    network: Network,
}

/// Link rates in GB/s: those of hosts, and by leaf and spine those between boxes.
fn fabric(host: f64, links: &[Vec<f64>], aggregation_rate: Option<f64>) -> Fabric {
    let (leaves, spines) = (links.len(), links[0].len());
    let mut t = Topology::default();
    (0..leaves).for_each(|leaf| t.box_(format!("leaf{leaf}")));
    (0..spines).for_each(|spine| t.box_(format!("spine{spine}")));
    t.boxes.iter_mut().for_each(|b| {
        b.aggregation_rate = aggregation_rate.map(|aggregation_rate| aggregation_rate * 1e9)
    });
    for h in 0..2 * leaves {
        t.host(format!("h{h}"));
        t.link(format!("h{h}"), format!("leaf{}", h / 2), host * 8e9);
    }
    for (leaf, spine) in (0..leaves).flat_map(|leaf| (0..spines).map(move |spine| (leaf, spine))) {
        t.link(format!("leaf{leaf}"), format!("spine{spine}"), links[leaf][spine] * 8e9);
    }
    Fabric { leaves, spines, network: Network::new(&t).unwrap() }
}

impl Fabric {
    /// A tree of the host with this number below each of these leaves.
    fn tree(&self, leaves: &[usize], host: usize, spine: usize, rate: f64) -> Tree {
        let leaf = |leaf: usize| 2 * self.leaves + leaf;
        let root = 3 * self.leaves + spine;
        let up = |&l: &usize| {
            let hop = |child, parent| Hop { child, parent, via: None };
            [hop(2 * l + host, leaf(l)), hop(leaf(l), root)]
        };
        Tree { root, hops: leaves.iter().flat_map(up).collect(), rate, rings: 1 }
    }

    fn trees(&self, leaves: &[usize], host: usize) -> Vec<Tree> {
        (0..self.spines).map(|spine| self.tree(leaves, host, spine, 1.0)).collect()
    }

    fn incremental(&self, others: &[Vec<Tree>], leaves: &[usize], host: usize) -> Incremental {
        incremental(&self.network, others, &self.trees(leaves, host), 1).unwrap()
    }
}

fn near(value: f64, expected: f64) {
    assert!((value / 1e9 - expected).abs() < 1e-3, "{value}, not {expected} GB/s");
}

#[test]
fn a_job_alone_gets_the_rate_of_the_links() {
    let fabric = fabric(100.0, &[vec![1.0, 2.0, 4.0], vec![1.0, 2.0, 3.0]], None);
    let Incremental { share, residual, .. } = fabric.incremental(&[], &[0, 1], 0);
    near(share, 6.0);
    residual.into_iter().zip([1.0, 2.0, 3.0]).for_each(|(room, expected)| near(room, expected));
}

#[test]
fn links_that_others_use_are_avoided_unless_the_others_cannot_fill_them() {
    let fabric = fabric(100.0, &[vec![4.0, 4.0], vec![4.0, 4.0]], None);
    let other = vec![fabric.tree(&[0, 1], 0, 0, 1.0)];
    let Incremental { share, residual, .. } = fabric.incremental(&[other], &[0, 1], 1);
    near(share, 4.0);
    near(residual[0], 0.0);
    near(residual[1], 4.0);

    // Here the other job's hosts are slow.
    let mut slow = self::fabric(1.0, &[vec![4.0, 4.0], vec![4.0, 4.0]], None);
    let other = vec![slow.tree(&[0, 1], 0, 0, 1.0)];
    let Incremental { share, residual, .. } =
        slow.incremental(std::slice::from_ref(&other), &[0, 1], 1);
    near(share, 1.0);
    near(residual[0], 3.0);
    near(residual[1], 4.0);
    // Two jobs at the same ports have half of the rate each.
    near(slow.incremental(&[other], &[0, 1], 0).share, 0.5);

    // A CPU aggregation_rate 3 GB/s; two jobs with two members each have 0.75 GB/s.
    slow = self::fabric(100.0, &[vec![4.0], vec![4.0]], Some(3.0));
    let other = vec![slow.tree(&[0, 1], 0, 0, 1.0)];
    near(slow.incremental(&[other], &[0, 1], 1).share, 0.75);
}

/// Rates of links; and for each job its leaves, the host below each, and its rings at each spine.
type FabricWithJobs = (Vec<Vec<f64>>, f64, Vec<(Vec<usize>, usize, Vec<f64>)>);

fn any_fabric_with_jobs() -> impl Strategy<Value = FabricWithJobs> {
    (2usize..5, 1usize..4).prop_flat_map(|(leaves, spines)| {
        let gb = || (1u8..40).prop_map(f64::from);
        let links = prop::collection::vec(prop::collection::vec(gb(), spines), leaves);
        let all: Vec<usize> = (0..leaves).collect();
        let rings = prop::collection::vec((0u8..5).prop_map(f64::from), spines)
            .prop_filter("at least one ring", |rings| rings.iter().sum::<f64>() > 0.0);
        let job = (prop::sample::subsequence(all, 2..=leaves), 0usize..2, rings);
        (links, gb(), prop::collection::vec(job, 1..6))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn shares_are_feasible_fair_and_the_same_in_any_order((links, host, jobs) in any_fabric_with_jobs()) {
        let fabric = fabric(host, &links, None);
        let (last, others) = jobs.split_last().unwrap();
        let trees = |(leaves, host, rings): &(Vec<usize>, usize, Vec<f64>)| -> Vec<Tree> {
            let at = rings.iter().enumerate().filter(|(_, rings)| **rings > 0.0);
            at.map(|(spine, rings)| fabric.tree(leaves, *host, spine, *rings)).collect()
        };
        let mut others: Vec<Vec<Tree>> = others.iter().map(trees).collect();
        let Incremental { share, residual, .. } = fabric.incremental(&others, &last.0, last.1);
        prop_assert!(share > 0.0);
        // The residual capacities hold the share, if it is split in proportion to them.
        let all: f64 = residual.iter().sum();
        prop_assert!(all >= share * (1.0 - 1e-6), "{share} of {residual:?}");
        // Each job has at least a fair part of the narrowest link that any job uses: jobs that came
        // first do not push it aside.
        let narrowest = links.iter().flatten().copied().fold(host, f64::min) * 1e9;
        prop_assert!(
            share >= narrowest / jobs.len() as f64 * (1.0 - 1e-6),
            "{share} of {narrowest}"
        );
        // With its bytes split in this proportion, all jobs have their fair shares at once, and it
        // has the promised one.
        let mut all_jobs = others.clone();
        all_jobs.push(fabric.trees(&last.0, last.1).into_iter().zip(&residual)
            .map(|(tree, room)| Tree { rate: *room, ..tree }).collect());
        let filled = shares(&fabric.network, &all_jobs).pop().unwrap();
        prop_assert!(
            (filled - share).abs() <= 1e-5 * share,
            "{share} promised, {filled} reached, of {residual:?}"
        );
        others.reverse();
        let again = fabric.incremental(&others, &last.0, last.1);
        prop_assert!((again.share - share).abs() <= 1e-6 * share);
        for (room, before) in again.residual.iter().zip(&residual) {
            prop_assert!(
                (room - before).abs() <= 1e-5 * share.max(*before),
                "{:?} {residual:?}", again.residual
            );
        }
        // Without the others it has at least as much.
        prop_assert!(fabric.incremental(&[], &last.0, last.1).share >= share * (1.0 - 1e-6));
    }
}

/// Max-min fair shares of jobs that all keep their trees, by filling: all rise until one of their
/// resources is full.
fn shares(network: &Network, jobs: &[Vec<Tree>]) -> Vec<f64> {
    let unit = |trees: &Vec<Tree>| {
        let whole: f64 = trees.iter().map(|tree| tree.rate).sum();
        let one: Vec<Tree> =
            trees.iter().map(|t| Tree { rate: t.rate / whole, ..t.clone() }).collect();
        let one: Vec<_> = one.iter().map(|tree| (Collective::AllReduce, tree)).collect();
        let used = load(network, &one).into_iter().filter(|(_, part)| *part > 0.0);
        used.collect::<std::collections::BTreeMap<_, _>>()
    };
    let units: Vec<_> = jobs.iter().map(unit).collect();
    let (mut rates, mut rising) = (vec![0.0; jobs.len()], vec![true; jobs.len()]);
    while rising.contains(&true) {
        let resources: std::collections::BTreeSet<_> =
            units.iter().flat_map(|unit| unit.keys()).collect();
        let sum = |resource, of: &dyn Fn(usize) -> f64| -> f64 {
            units
                .iter()
                .enumerate()
                .map(|(n, unit)| unit.get(resource).unwrap_or(&0.0) * of(n))
                .sum()
        };
        let step = |resource| {
            let free = 1.0 - sum(resource, &|n| rates[n]);
            free.max(0.0) / sum(resource, &|n| f64::from(u8::from(rising[n])))
        };
        let least = resources.iter().map(|r| step(*r)).fold(f64::INFINITY, f64::min);
        (0..jobs.len()).filter(|&n| rising[n]).for_each(|n| rates[n] += least);
        for resource in resources {
            if sum(resource, &|n| rates[n]) > 1.0 - 1e-9 {
                (0..jobs.len())
                    .filter(|&n| units[n].contains_key(resource))
                    .for_each(|n| rising[n] = false);
            }
        }
    }
    rates
}

#[test]
#[ignore = "prints times; run it with --release"]
fn how_long_it_takes() {
    for (leaves, spines, jobs) in [(60, 4, 16), (64, 16, 16), (64, 16, 64)] {
        let links: Vec<Vec<f64>> = (0..leaves)
            .map(|leaf| {
                (0..spines).map(|spine| 10.0 + ((leaf * 7 + spine * 3) % 5) as f64).collect()
            })
            .collect();
        let fabric = fabric(25.0, &links, None);
        let mine = |job: usize| -> Vec<usize> {
            let mut leaves: Vec<usize> = (0..8).map(|n| (job * 5 + n * 3) % leaves).collect();
            leaves.sort_unstable();
            leaves.dedup();
            leaves
        };
        let mut others = Vec::new();
        let (mut longest, mut all) = (std::time::Duration::ZERO, std::time::Duration::ZERO);
        for job in 0..jobs {
            let begin = std::time::Instant::now();
            let found = fabric.incremental(&others, &mine(job), job % 2);
            longest = longest.max(begin.elapsed());
            all += begin.elapsed();
            let trees = fabric.trees(&mine(job), job % 2);
            let part = trees.into_iter().zip(found.residual);
            others
                .push(part.filter(|(_, r)| *r > 0.0).map(|(t, rate)| Tree { rate, ..t }).collect());
        }
        println!(
            "{leaves} leaves, {spines} spines: {jobs} jobs in {all:.1?}, one at most {longest:.1?}"
        );
    }
}
