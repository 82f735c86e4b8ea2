//! Paths of flows: the shortest ones, chosen by one of four rules.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use netsum_plan::flows::{spread, without};
use netsum_plan::topology::{Edge, Network, Node, Resource};

use crate::fluid::Flow;

/// A sender, a receiver and a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    pub from: Node,
    pub to: Node,
    pub bytes: f64,
}

/// How flows are spread over equally short paths. All rules avoid failed links, as after routing
/// has converged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balance {
    /// Each flow has one path, by a hash.
    Ecmp { seed: u64 },
    /// Each packet has its own: all paths carry the same.
    Spray,
    /// As REPS does: less loaded paths are used again, until none has more load than necessary.
    Reps,
    /// Ethereal: all paths carry the same, and the fewest flows are cut; see `netsum_plan::flows`.
    Ethereal,
}

/// The number of links from each node to `to`. Hosts do not forward. None: not reachable.
fn distances(network: &Network, failed: &BTreeSet<Edge>, to: Node) -> Vec<Option<u32>> {
    let mut far = vec![None; network.nodes()];
    let mut queue = VecDeque::from([(to, 0)]);
    far[to] = Some(0);
    while let Some((node, distance)) = queue.pop_front() {
        if node != to && network.is_host(node) && !network.sums(node) {
            continue;
        }
        for &edge in network.out(node) {
            let next = network.ends(edge).1;
            if far[next].is_none() && !failed.contains(&(edge ^ 1)) {
                far[next] = Some(distance + 1);
                queue.push_back((next, distance + 1));
            }
        }
    }
    far
}

/// The shortest paths from one node to that from which `far` was measured.
fn shortest(
    network: &Network,
    failed: &BTreeSet<Edge>,
    from: Node,
    far: &[Option<u32>],
) -> Vec<Vec<Edge>> {
    let Some(distance) = far[from] else { return Vec::new() };
    let mut paths = vec![(from, Vec::new())];
    for left in (0..distance).rev() {
        let nearer = |(node, path): (Node, Vec<Edge>)| {
            let edges = network.out(node).iter().map(|&edge| (network.ends(edge).1, edge));
            let edges =
                edges.filter(|(next, edge)| far[*next] == Some(left) && !failed.contains(edge));
            edges
                .map(|(next, edge)| (next, path.iter().copied().chain([edge]).collect()))
                .collect::<Vec<_>>()
        };
        paths = paths.into_iter().flat_map(nearer).collect();
    }
    paths.into_iter().map(|(_, path)| path).collect()
}

/// The shortest paths from one node to another, without failed links. Hosts do not forward.
pub fn paths(network: &Network, failed: &BTreeSet<Edge>, from: Node, to: Node) -> Vec<Vec<Edge>> {
    shortest(network, failed, from, &distances(network, failed, to))
}

/// A number that looks like chance (SplitMix64).
fn mixed(seed: u64, n: u64) -> u64 {
    let mut z = seed.wrapping_add(n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Gives each demand its path, or paths; all flows begin at 0. A pair of nodes that failed links
/// have disconnected is not expected.
pub fn flows(
    network: &Network,
    failed: &BTreeSet<Edge>,
    demands: &[Demand],
    balance: Balance,
) -> Vec<Flow> {
    let mut known: BTreeMap<(Node, Node), Vec<Vec<Edge>>> = BTreeMap::new();
    let healthy = BTreeSet::new();
    // Hosts with one link share the paths of their box.
    let edge = |node: Node| match network.next(node) {
        [only] if network.is_host(node) && !network.is_host(*only) => *only,
        _ => node,
    };
    let ends = |d: &Demand| (edge(d.from), edge(d.to));
    let none = if balance == Balance::Ethereal { &healthy } else { failed };
    let mut far: BTreeMap<Node, Vec<Option<u32>>> = BTreeMap::new();
    for demand in demands {
        known.entry(ends(demand)).or_insert_with_key(|&(from, to)| {
            let far = far.entry(to).or_insert_with(|| distances(network, none, to));
            shortest(network, none, from, far)
        });
    }
    let around = |d: &Demand| -> Vec<Edge> {
        let (from, to) = ends(d);
        let own = [(d.from, from), (to, d.to)].into_iter().filter(|(a, b)| a != b);
        own.filter_map(|(a, b)| network.edge(a, b)).collect()
    };
    let mut weights: BTreeMap<(Node, Node), Vec<f64>> = known
        .iter()
        .map(|(&ends, paths)| (ends, vec![1.0 / paths.len() as f64; paths.len()]))
        .collect();
    match balance {
        Balance::Reps => {
            settle(network, &known, demands.iter().map(|d| (ends(d), d.bytes)), &mut weights)
        }
        Balance::Ethereal => return pinned(failed, demands, &known, ends, around),
        Balance::Ecmp { .. } | Balance::Spray => {}
    }
    // The part that all flows between the same ends have in common.
    let spread = |(&ends, paths): (&(Node, Node), &Vec<Vec<Edge>>)| {
        let mut links: BTreeMap<Edge, f64> = BTreeMap::new();
        for (path, weight) in paths.iter().zip(&weights[&ends]).filter(|(_, weight)| **weight > 0.0)
        {
            path.iter().for_each(|&edge| *links.entry(edge).or_insert(0.0) += weight);
        }
        (ends, links.into_iter().collect())
    };
    let spread: BTreeMap<(Node, Node), Vec<(Edge, f64)>> = match balance {
        Balance::Ecmp { .. } => BTreeMap::new(),
        _ => known.iter().map(spread).collect(),
    };
    let flow = |(n, demand): (usize, &Demand)| {
        let ends = ends(demand);
        let mut links: Vec<(Edge, f64)> =
            around(demand).into_iter().map(|edge| (edge, 1.0)).collect();
        match (balance, &known[&ends]) {
            (Balance::Ecmp { seed }, paths) if !paths.is_empty() => {
                let chosen = mixed(seed, n as u64) % paths.len() as u64;
                links.extend(paths[chosen as usize].iter().map(|&edge| (edge, 1.0)));
            }
            (Balance::Ecmp { .. }, _) => {}
            _ => links.extend(&spread[&ends]),
        }
        Flow { bytes: demand.bytes, start: 0.0, links }
    };
    demands.iter().enumerate().map(flow).collect()
}

/// Moves weight from paths with a full link to others, as senders do that reuse paths without
/// congestion.
fn settle(
    network: &Network,
    known: &BTreeMap<(Node, Node), Vec<Vec<Edge>>>,
    demands: impl Iterator<Item = ((Node, Node), f64)>,
    weights: &mut BTreeMap<(Node, Node), Vec<f64>>,
) {
    let mut bytes: BTreeMap<(Node, Node), f64> = BTreeMap::new();
    demands.for_each(|(ends, amount)| *bytes.entry(ends).or_insert(0.0) += amount);
    for round in 0..40 {
        let mut loads = vec![0.0; network.edges()];
        for (ends, paths) in known {
            for (path, weight) in paths.iter().zip(&weights[ends]) {
                path.iter().for_each(|&edge| loads[edge] += weight * bytes[ends]);
            }
        }
        let full = |path: &[Edge]| {
            path.iter()
                .map(|&edge| loads[edge] / network.capacity(Resource::Edge(edge)))
                .fold(0.0, f64::max)
        };
        // Later steps are smaller, for it to converge.
        let power = 0.5 / (1.0 + f64::from(round) / 8.0);
        for (ends, paths) in known.iter().filter(|(_, paths)| paths.len() > 1) {
            let of = weights.entry(*ends).or_default();
            let mut sum = 0.0;
            for (weight, path) in of.iter_mut().zip(paths) {
                *weight /= full(path).powf(power);
                sum += *weight;
            }
            of.iter_mut().for_each(|weight| *weight /= sum);
        }
    }
}

/// Ethereal's paths: flows between two boxes take them round-robin. Flows of failed paths move, the
/// rest stay.
fn pinned(
    failed: &BTreeSet<Edge>,
    demands: &[Demand],
    known: &BTreeMap<(Node, Node), Vec<Vec<Edge>>>,
    ends: impl Fn(&Demand) -> (Node, Node),
    around: impl Fn(&Demand) -> Vec<Edge>,
) -> Vec<Flow> {
    let mut between: BTreeMap<(Node, Node), Vec<usize>> = BTreeMap::new();
    for (n, demand) in demands.iter().enumerate() {
        between.entry(ends(demand)).or_default().push(n);
    }
    let mut links: Vec<BTreeMap<Edge, f64>> = demands
        .iter()
        .map(|demand| around(demand).into_iter().map(|edge| (edge, 1.0)).collect())
        .collect();
    for (turn, (ends, of)) in between.iter().enumerate() {
        let paths = &known[ends];
        let dead: BTreeSet<usize> = (0..paths.len())
            .filter(|&path| paths[path].iter().any(|edge| failed.contains(edge)))
            .collect();
        let pieces = without(&spread(of.len(), paths.len(), turn), paths.len(), &dead);
        for piece in pieces {
            for &edge in &paths[piece.uplink] {
                *links[of[piece.flow]].entry(edge).or_insert(0.0) += 1.0 / piece.of as f64;
            }
        }
    }
    let flow = |(demand, links): (&Demand, BTreeMap<Edge, f64>)| Flow {
        bytes: demand.bytes,
        start: 0.0,
        links: links.into_iter().collect(),
    };
    demands.iter().zip(links).map(flow).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use netsum_plan::generate;

    fn network() -> Network {
        Network::new(&generate::leaf_spine(2, 4, 4, 8e9, 1.0)).unwrap()
    }

    fn across(n: usize) -> Vec<Demand> {
        (0..n).map(|n| Demand { from: n % 4, to: 4 + n % 4, bytes: 1.0 }).collect()
    }

    /// The load of leaf0's links to the spines.
    fn up(network: &Network, flows: &[Flow]) -> Vec<f64> {
        let leaf = network.node("leaf0").unwrap();
        let spines = (0..4).map(|spine| {
            network.edge(leaf, network.node(&format!("spine{spine}")).unwrap()).unwrap()
        });
        let carried = |edge| {
            flows
                .iter()
                .flat_map(|f| &f.links)
                .filter(|(w, _)| *w == edge)
                .map(|(_, part)| part)
                .sum()
        };
        spines.map(carried).collect()
    }

    #[test]
    fn all_shortest_ways_are_found() {
        let none = BTreeSet::new();
        let network = network();
        assert_eq!(paths(&network, &none, 0, 1).len(), 1);
        assert_eq!(paths(&network, &none, 0, 5).len(), 4);
        assert!(paths(&network, &none, 0, 5).iter().all(|path| path.len() == 4));
        let failed = BTreeSet::from([network
            .edge(network.node("spine2").unwrap(), network.node("leaf1").unwrap())
            .unwrap()]);
        assert_eq!(paths(&network, &failed, 0, 5).len(), 3);
        let fat = Network::new(&generate::fat_tree(4, 4, 1e9)).unwrap();
        assert_eq!(paths(&fat, &none, 0, 15).len(), 4);
        assert_eq!(paths(&fat, &none, 0, 2).len(), 2);
    }

    #[test]
    fn neighbours_take_their_own_links_alone() {
        let mut pair = generate::dgx_1p();
        pair.links.retain(|link| link.from == "gpu0" && link.to == "gpu1");
        for (topology, nodes) in [(pair, vec![0, 1]), (generate::rack(2, 8e9), vec![0, 2, 1])] {
            let network = Network::new(&topology).unwrap();
            let own: Vec<_> = nodes
                .windows(2)
                .map(|ends| (network.edge(ends[0], ends[1]).unwrap(), 1.0))
                .collect();
            let demand = Demand { from: 0, to: 1, bytes: 1.0 };
            for balance in
                [Balance::Spray, Balance::Reps, Balance::Ethereal, Balance::Ecmp { seed: 7 }]
            {
                let mut flow = flows(&network, &BTreeSet::new(), &[demand], balance).remove(0);
                flow.links.sort_by_key(|link| link.0);
                assert_eq!(flow.links, own, "{balance:?}");
            }
        }
    }

    #[test]
    fn each_rule_loads_uplinks_differently() {
        let network = network();
        let of = |n, balance| up(&network, &flows(&network, &BTreeSet::new(), &across(n), balance));
        for n in [4, 6] {
            for balance in [Balance::Spray, Balance::Reps, Balance::Ethereal] {
                assert_eq!(of(n, balance), [n as f64 / 4.0; 4], "{balance:?}");
            }
        }
        let hashed = of(40, Balance::Ecmp { seed: 1 });
        assert_eq!(hashed.iter().sum::<f64>(), 40.0);
        assert!(hashed.iter().any(|&carried| carried > 10.0), "{hashed:?}");
        // Whole flows are not cut.
        let whole = flows(&network, &BTreeSet::new(), &across(4), Balance::Ethereal);
        assert!(whole.iter().all(|flow| flow.links.len() == 4));
    }

    #[test]
    fn failed_links_are_not_used() {
        let network = network();
        let [leaf, spine] = ["leaf0", "spine1"].map(|name| network.node(name).unwrap());
        let failed = BTreeSet::from([
            network.edge(leaf, spine).unwrap(),
            network.edge(spine, leaf).unwrap(),
        ]);
        for balance in [Balance::Spray, Balance::Reps, Balance::Ethereal, Balance::Ecmp { seed: 7 }]
        {
            let carried = up(&network, &flows(&network, &failed, &across(8), balance));
            assert_eq!(
                (carried[1], carried.iter().sum::<f64>().round()),
                (0.0, 8.0),
                "{balance:?}"
            );
        }
    }
}
