//! How many of a job's rings use which parent: its share by the plan for all jobs. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use netsum_plan::incremental::incremental;
use netsum_plan::topology::{Error, Network, Node, Topology};
use netsum_plan::tree::{Hop, Tree};

use crate::config::{End, Link};

/// A change of a link's rate below this is noise (Blink, MLSys 2020).
const NOISE: f64 = 0.1;
/// Rate of a port whose rate is unknown: it is never a bottleneck.
const FAST: f64 = 1e15;
/// Residual capacities are compared in these parts of the largest: rounding of the solver decides
/// nothing.
const PARTS: f64 = 1000.0;

/// A job that boxes sum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlacedJob {
    /// Its ranks' ports.
    pub ends: Vec<End>,
    /// Boxes at the top of its trees, and how many of its rings each has.
    pub trees: Vec<(String, u32)>,
}

/// A box that can be above all others of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub name: String,
    /// Bits per second of the slowest link to it; 0 if none is known.
    pub rate: u64,
    /// At least one ring must use it.
    pub is_needed: bool,
}

/// Rates that boxes report.
pub trait ReportedRates {
    /// Bits per second of a port; 0 if unknown.
    fn rate(&self, port: &End) -> u64;
    /// Aggregation rate of a box in bytes per second and its number of CPUs, if known.
    fn aggregation_rate(&self, of: &str) -> Option<(u64, u32)>;
}

/// How rings are shared out.
#[derive(Clone, Copy)]
pub enum Share<'a> {
    /// As they are, if possible; otherwise by the links.
    Kept(&'a [(String, u32)]),
    /// By the residual capacity that these jobs leave.
    Incremental(&'a [PlacedJob], &'a dyn ReportedRates),
    /// By the links alone.
    Links,
}

impl Share<'_> {
    /// The rings of each candidate.
    pub fn rings(
        &self,
        rings: u32,
        candidates: &[Candidate],
        ends: &[End],
        links: &[&Link],
    ) -> Vec<u32> {
        let weights = match self {
            Self::Kept(trees) => {
                let kept = |c: &Candidate| {
                    trees.iter().find(|(of, _)| *of == c.name).map_or(0, |(_, n)| *n)
                };
                let kept: Vec<u32> = candidates.iter().map(kept).collect();
                let is_whole = kept.iter().sum::<u32>() == rings
                    && candidates.iter().zip(&kept).all(|(c, rings)| !c.is_needed || *rings > 0);
                if is_whole {
                    return kept;
                }
                by_links(candidates)
            }
            Self::Incremental(others, rates) if links.iter().any(|link| link.rate.is_some()) => {
                residual_capacities(others, *rates, candidates, ends, links, rings).unwrap_or_else(
                    |e| {
                        log::warn!(
                            "cannot plan: {e}; rings are shared out by the rates of links alone"
                        );
                        by_links(candidates)
                    },
                )
            }
            Self::Incremental(..) | Self::Links => by_links(candidates),
        };
        let weights: Vec<_> =
            candidates.iter().zip(weights).map(|(c, room)| (c.is_needed, room)).collect();
        spread(&weights, rings)
    }
}

/// An unknown rate counts as the smallest known one.
fn by_links(candidates: &[Candidate]) -> Vec<u64> {
    let least = candidates.iter().map(|c| c.rate).filter(|rate| *rate > 0).min().unwrap_or(1);
    candidates.iter().map(|c| c.rate.max(least)).collect()
}

/// The boxes and ports of jobs, by their numbers in a network.
struct Numbers<'a> {
    hosts: BTreeMap<&'a End, Node>,
    boxes: BTreeMap<&'a str, Node>,
}

impl Numbers<'_> {
    /// The tree that sums ranks at these ports.
    fn tree(&self, ends: &[End], root: &str, rings: u32) -> Tree {
        let root = self.boxes[root];
        let host = |end: &End| (self.hosts[end], self.boxes[&*end.of]);
        let below: BTreeSet<Node> =
            ends.iter().map(|end| host(end).1).filter(|of| *of != root).collect();
        let hosts = ends.iter().map(host).chain(below.into_iter().map(|of| (of, root)));
        let hops = hosts.map(|(child, parent)| Hop { child, parent, via: None }).collect();
        Tree { root, hops, rate: f64::from(rings), rings }
    }
}

/// A rate in the range that a plan accepts, whatever a box reports.
fn bits(rate: u64) -> f64 {
    (rate as f64).clamp(8.0, FAST)
}

/// Residual capacity at each candidate, next to the fair shares of the others.
fn residual_capacities(
    others: &[PlacedJob],
    rates: &dyn ReportedRates,
    candidates: &[Candidate],
    ends: &[End],
    links: &[&Link],
    rings: u32,
) -> Result<Vec<u64>, Error> {
    let hosts: BTreeSet<&End> = others.iter().flat_map(|job| &job.ends).chain(ends).collect();
    let tops = others.iter().flat_map(|job| job.trees.iter().map(|(name, _)| name));
    let boxes =
        hosts.iter().map(|end| &end.of).chain(candidates.iter().map(|c| &c.name)).chain(tops);
    let boxes: BTreeSet<&str> = boxes
        .chain(links.iter().flat_map(|link| [&link.below.of, &link.above.of]))
        .map(String::as_str)
        .collect();
    let mut topology = Topology::default();
    let numbers = Numbers {
        hosts: hosts.iter().copied().zip(0..).collect(),
        boxes: boxes.iter().copied().zip(hosts.len()..).collect(),
    };
    // Names of boxes are arbitrary; those of a network are restricted.
    for (of, n) in &numbers.boxes {
        topology.box_(n.to_string());
        let Some((aggregation_rate, cpus)) = rates.aggregation_rate(of) else { continue };
        let of = &mut topology.boxes[n - hosts.len()];
        (of.aggregation_rate, of.cpus) =
            (Some((aggregation_rate as f64).clamp(1.0, FAST)), Some(cpus));
    }
    for (end, n) in &numbers.hosts {
        let rate = match rates.rate(end) {
            0 => FAST,
            rate => bits(rate),
        };
        topology.host(n.to_string());
        topology.link(n.to_string(), numbers.boxes[&*end.of].to_string(), rate);
    }
    let rates = links.iter().filter_map(|link| link.rate).map(|rate| rate.0);
    let least = rates.filter(|rate| *rate > 0).min().unwrap_or(1);
    for link in links {
        let [below, above] =
            [&link.below, &link.above].map(|end| numbers.boxes[&*end.of].to_string());
        topology.link(below, above, bits(link.rate.map_or(least, |rate| rate.0)));
    }
    let network = Network::new(&topology)?;
    let of = |job: &PlacedJob| -> Vec<Tree> {
        job.trees.iter().map(|(root, rings)| numbers.tree(&job.ends, root, *rings)).collect()
    };
    let others: Vec<Vec<Tree>> = others.iter().map(of).collect();
    let trees: Vec<Tree> = candidates.iter().map(|c| numbers.tree(ends, &c.name, 1)).collect();
    let rooms = incremental(&network, &others, &trees, rings)?.residual;
    let most = rooms.iter().copied().fold(0.0, f64::max);
    Ok(rooms.iter().map(|room| (PARTS * room / most).round() as u64).collect())
}

/// Shares rings out by weights; equally if all are 0. With fewer rings than weights, the required
/// candidates get one each, then those with the largest weights.
fn spread(weights: &[(bool, u64)], rings: u32) -> Vec<u32> {
    let least = u128::from(weights.iter().all(|(_, weight)| *weight == 0));
    let weight = |n: usize| u128::from(weights[n].1).max(least);
    let mut of: Vec<usize> = (0..weights.len()).collect();
    of.sort_by_key(|n| Reverse((weights[*n].0, weight(*n))));
    of.truncate(rings as usize);
    let sum: u128 = of.iter().map(|n| weight(*n)).sum::<u128>().max(1);
    let mut shares = vec![0; weights.len()];
    for n in &of {
        shares[*n] = (weight(*n) * u128::from(rings) / sum) as u32;
    }
    // The largest remainders get the rest.
    let left = rings - shares.iter().sum::<u32>();
    of.sort_by_key(|n| Reverse((weight(*n) * u128::from(rings) % sum, *n)));
    of.iter().take(left as usize).for_each(|n| shares[*n] += 1);
    for n in of.into_iter().filter(|n| weights[*n].0) {
        let most = (0..weights.len()).max_by_key(|n| (shares[*n], Reverse(*n)));
        if let Some(most) = most.filter(|_| shares[n] == 0) {
            shares[most] -= 1;
            shares[n] += 1;
        }
    }
    shares
}

/// Whether a candidate is new, or its links have changed by more than noise.
pub fn has_changed(before: &[Candidate], now: &[Candidate]) -> bool {
    now.iter().any(|c| {
        let was = before.iter().find(|was| was.name == c.name);
        was.is_none_or(|was| was.rate.abs_diff(c.rate) as f64 > NOISE * was.rate as f64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_shared_out_by_weights() {
        for (weights, rings, expected) in [
            (&[1, 2, 4][..], 7, &[1, 2, 4][..]),
            (&[0, 0], 3, &[1, 2]),
            (&[0, 0, 0], 3, &[1, 1, 1]),
            (&[0, 9], 3, &[0, 3]),
            (&[10, 10, 40], 6, &[1, 1, 4]),
            (&[10, 10, 40], 1, &[0, 0, 1]),
            (&[10, 10], 1, &[1, 0]),
            (&[1, 100], 4, &[0, 4]),
            (&[u64::MAX, u64::MAX], 2, &[1, 1]),
            (&[], 2, &[]),
        ] {
            let weights: Vec<_> = weights.iter().map(|weight| (false, *weight)).collect();
            assert_eq!(spread(&weights, rings), expected, "{rings} over {weights:?}");
        }
        assert_eq!(spread(&[(true, 1), (false, 100)], 4), [1, 3]);
        assert_eq!(spread(&[(true, 0), (false, 100)], 4), [1, 3]);
        assert_eq!(spread(&[(true, 1), (false, 100)], 1), [1, 0]);
        assert_eq!(spread(&[(true, 0), (false, 0)], 1), [1, 0]);
        assert_eq!(spread(&[(false, 100), (true, 1), (true, 1)], 2), [0, 1, 1]);
    }

    use netsum_core::rate::Rate;
    use proptest::prelude::*;

    fn end(text: &str) -> End {
        End::try_from(text.to_owned()).unwrap()
    }

    /// Leaves a and b, and of each spine the rate of both links to it.
    fn spines(rates: &[Option<u64>]) -> (Vec<Link>, Vec<Candidate>) {
        let link = |leaf: &str, spine: usize, rate: Option<u64>| Link {
            below: end(&format!("{leaf}/up{spine}")),
            above: end(&format!("s{spine}/{leaf}")),
            rate: rate.map(Rate),
        };
        let all = || rates.iter().copied().enumerate();
        let links = all().flat_map(|(n, rate)| ["a", "b"].map(|leaf| link(leaf, n, rate)));
        let candidate = |(n, rate): (usize, Option<u64>)| Candidate {
            name: format!("s{n}"),
            rate: rate.unwrap_or(0),
            is_needed: n == 0,
        };
        (links.collect(), all().map(candidate).collect())
    }

    struct Unknown;

    impl ReportedRates for Unknown {
        fn rate(&self, _: &End) -> u64 {
            0
        }
        fn aggregation_rate(&self, _: &str) -> Option<(u64, u32)> {
            None
        }
    }

    fn rings_of(share: Share<'_>, rings: u32, rates: &[Option<u64>]) -> Vec<u32> {
        let (links, candidates) = spines(rates);
        let links: Vec<&Link> = links.iter().collect();
        share.rings(rings, &candidates, &[end("a/1"), end("b/1")], &links)
    }

    fn at(trees: &[u32]) -> PlacedJob {
        let trees = trees.iter().enumerate().filter(|(_, rings)| **rings > 0);
        let trees = trees.map(|(n, rings)| (format!("s{n}"), *rings)).collect();
        PlacedJob { ends: vec![end("a/2"), end("b/2")], trees }
    }

    #[test]
    fn shares_are_equal_where_no_rate_is_known() {
        let others = [at(&[4, 0])];
        assert_eq!(rings_of(Share::Incremental(&others, &Unknown), 4, &[None, None]), [2, 2]);
        assert_eq!(
            rings_of(Share::Incremental(&others, &Unknown), 4, &[Some(9000), Some(9000)]),
            [1, 3]
        );
        // An unknown rate counts as the smallest known one.
        assert_eq!(
            rings_of(Share::Incremental(&[], &Unknown), 5, &[Some(8000), Some(32_000)]),
            [1, 4]
        );
        assert_eq!(rings_of(Share::Incremental(&[], &Unknown), 6, &[None, Some(9000)]), [3, 3]);
    }

    /// Boxes with these aggregation rates, and ports that are never a bottleneck.
    struct Adds<'a>(&'a [(&'a str, u64)]);

    impl ReportedRates for Adds<'_> {
        fn rate(&self, _: &End) -> u64 {
            u64::MAX
        }
        fn aggregation_rate(&self, of: &str) -> Option<(u64, u32)> {
            self.0
                .iter()
                .find(|(name, _)| *name == of)
                .map(|(_, aggregation_rate)| (*aggregation_rate, 1))
        }
    }

    #[test]
    fn a_spine_that_adds_slowly_gets_fewer_rings_than_its_links_carry() {
        let of = |aggregation_rate: &[(&str, u64)], rates: &[Option<u64>]| {
            rings_of(Share::Incremental(&[], &Adds(aggregation_rate)), 6, rates)
        };
        let both = [Some(8000), Some(8000)];
        // Two leaves at 1000 bytes per second each.
        assert_eq!(of(&[("s0", 2000), ("s1", 9000)], &both), [3, 3]);
        assert_eq!(of(&[("s0", 1000), ("s1", 9000)], &both), [2, 4]);
        assert_eq!(of(&[("s0", 0), ("s1", u64::MAX)], &both), [1, 5], "one is needed there");
        // No number that a box can say is a reason to plan by links alone, which would give it all.
        assert_eq!(of(&[("s1", 1000)], &[Some(8000), Some(u64::MAX)]), [4, 2]);
    }

    #[test]
    fn noise_is_no_change_and_neither_is_a_spine_that_is_silent() {
        let of = |rates: &[Option<u64>]| spines(rates).1;
        let before = of(&[Some(100), Some(50), None]);
        assert!(!has_changed(&before, &of(&[Some(110), Some(45), None])));
        assert!(!has_changed(&before, &before[..2]));
        assert!(has_changed(&before, &of(&[Some(111), Some(50), None])));
        assert!(has_changed(&before, &of(&[Some(100), Some(44), None])));
        assert!(has_changed(&before, &of(&[Some(100), Some(50), Some(1)])));
        assert!(has_changed(&before[..2], &before));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

        #[test]
        fn all_rings_are_given_the_same_each_time_and_kept(
            rates in prop::collection::vec(prop::option::of(8u64..100_000), 1..5),
            before in prop::collection::vec(prop::collection::vec(0u32..4, 5), 0..4),
            rings in 1u32..12,
        ) {
            let mut others: Vec<PlacedJob> =
                before.iter().map(|trees| at(&trees[..rates.len()])).filter(|job| !job.trees.is_empty()).collect();
            let mine = rings_of(Share::Incremental(&others, &Unknown), rings, &rates);
            prop_assert_eq!(mine.iter().sum::<u32>(), rings);
            prop_assert!(mine[0] > 0, "one is needed there: {:?}", mine);
            others.reverse();
            prop_assert_eq!(&rings_of(Share::Incremental(&others, &Unknown), rings, &rates), &mine);
            // At work it keeps them, whoever is there and whatever links carry.
            let other: Vec<Option<u64>> = rates.iter().rev().copied().collect();
            prop_assert_eq!(&rings_of(Share::Kept(&at(&mine).trees), rings, &other), &mine);
        }
    }
}
