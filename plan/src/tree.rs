//! A tree, the resources that it uses, and its part of the data.

use std::collections::{BTreeMap, BTreeSet};

use crate::topology::{Edge, Network, Node, Resource};

/// The purpose of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Sums go up, and results come down.
    AllReduce,
    /// The root's data goes down.
    Broadcast,
}

/// The step from a member or a box to its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hop {
    pub child: Node,
    pub parent: Node,
    /// A plain switch between them.
    pub via: Option<Node>,
}

impl Hop {
    /// The directed links of the hop, down or up.
    pub fn edges(self, network: &Network, up: bool) -> impl Iterator<Item = Edge> {
        let links = match self.via {
            None => [Some((self.parent, self.child)), None],
            Some(via) => [Some((self.parent, via)), Some((via, self.child))],
        };
        // Hops are made of existing links.
        let edge = move |(above, below)| {
            if up { network.edge(below, above) } else { network.edge(above, below) }
        };
        links.into_iter().flatten().filter_map(edge)
    }
}

/// A tree, and the bytes per second that it sums.
#[derive(Clone, Debug, PartialEq)]
pub struct Tree {
    pub root: Node,
    /// Sorted by child.
    pub hops: Vec<Hop>,
    pub rate: f64,
    /// The number of rings that use it. All rings of a job carry the same number of its bytes.
    pub rings: u32,
}

/// The resources that one byte per second over these hops uses.
pub fn uses(network: &Network, collective: Collective, hops: &[Hop]) -> BTreeMap<Resource, f64> {
    let mut uses = BTreeMap::new();
    let mut add = |resource, amount| *uses.entry(resource).or_insert(0.0) += amount;
    for hop in hops {
        hop.edges(network, false).for_each(|edge| add(Resource::Edge(edge), 1.0));
        if collective == Collective::AllReduce {
            hop.edges(network, true).for_each(|edge| add(Resource::Edge(edge), 1.0));
            // A box's link to its parent counts as a member, too.
            add(Resource::Aggregation(hop.parent), 1.0);
            if !network.is_host(hop.child) {
                add(Resource::Aggregation(hop.child), 1.0);
            }
        }
    }
    // Unlimited resources are not constraints.
    uses.retain(|&resource, _| network.capacity(resource).is_finite());
    uses
}

impl Tree {
    pub fn uses(&self, network: &Network, collective: Collective) -> BTreeMap<Resource, f64> {
        uses(network, collective, &self.hops)
    }

    /// For each box that sums in it, the members of a ring there, including the parent.
    pub fn members(&self, network: &Network) -> BTreeMap<Node, usize> {
        let mut members = BTreeMap::new();
        for node in self.hops.iter().flat_map(|hop| [hop.child, hop.parent]) {
            if !network.is_host(node) {
                *members.entry(node).or_insert(0) += 1;
            }
        }
        members
    }

    /// Seconds from the farthest leaf of the tree to its root and back.
    pub fn round_trip(&self, network: &Network) -> f64 {
        let above: BTreeMap<Node, Hop> = self.hops.iter().map(|&hop| (hop.child, hop)).collect();
        let seconds = |start: Node| {
            let (mut node, mut sum) = (start, 0.0);
            while let Some(&hop) = above.get(&node) {
                sum += hop.edges(network, true).map(|edge| network.latency(edge)).sum::<f64>();
                node = hop.parent;
            }
            sum
        };
        2.0 * self.hops.iter().map(|hop| seconds(hop.child)).fold(0.0, f64::max)
    }

    /// The most that one of its rings sums per second: one CPU of a box adds for all its members,
    /// and at most a window is in flight.
    pub fn ring_rate(&self, network: &Network) -> f64 {
        let window = network.shape().window / self.round_trip(network);
        let cpu_rates =
            self.members(network).into_iter().map(|(b, n)| network.cpu_rate(b) / n as f64);
        cpu_rates.fold(window, f64::min)
    }

    /// Checks that it is a tree of these members.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self, network: &Network, members: &[Node]) -> Result<(), String> {
        let name = |node| network.name(node);
        let above: BTreeMap<Node, Node> =
            self.hops.iter().map(|hop| (hop.child, hop.parent)).collect();
        if above.len() != self.hops.len() || above.contains_key(&self.root) {
            return Err("a node has two parents, or the root has one".into());
        }
        for hop in &self.hops {
            let links = hop.edges(network, true).count();
            if links != 1 + usize::from(hop.via.is_some())
                || hop.via.is_some_and(|via| !network.is_switch(via))
            {
                return Err(format!(
                    "{} and {} have no such link",
                    name(hop.child),
                    name(hop.parent)
                ));
            }
            if !network.sums(hop.parent) {
                return Err(format!("{} does not sum", name(hop.parent)));
            }
        }
        for &node in above.keys().chain(members) {
            let mut seen = BTreeSet::new();
            let mut at = node;
            while let Some(&parent) = above.get(&at) {
                if !seen.insert(at) {
                    return Err(format!("a cycle at {}", name(at)));
                }
                at = parent;
            }
            if at != self.root {
                return Err(format!("{} does not reach the root", name(node)));
            }
        }
        Ok(())
    }
}

/// The load of all resources by these trees together, as a fraction of the capacity; highest first.
pub fn load(network: &Network, trees: &[(Collective, &Tree)]) -> Vec<(Resource, f64)> {
    let mut sums = BTreeMap::new();
    for (collective, tree) in trees {
        for (resource, amount) in tree.uses(network, *collective) {
            *sums.entry(resource).or_insert(0.0) += amount * tree.rate;
        }
    }
    let mut load: Vec<(Resource, f64)> = sums
        .into_iter()
        .map(|(resource, sum)| (resource, sum / network.capacity(resource)))
        .collect();
    load.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    load
}

/// Seconds until all trees have finished `bytes` at the same time, and the bytes of each. Tree i
/// gives its first sums after `latencies[i]` seconds: t = (D + sum of w tau) / sum of w, and D_i =
/// w_i (t - tau_i). A tree that would begin too late gets 0 bytes.
pub fn split(rates: &[f64], latencies: &[f64], bytes: f64) -> (f64, Vec<f64>) {
    let mut order: Vec<usize> = (0..rates.len()).filter(|&i| rates[i] > 0.0).collect();
    order.sort_by(|&a, &b| latencies[a].total_cmp(&latencies[b]));
    let (mut rate, mut late, mut end) = (0.0, 0.0, f64::INFINITY);
    for i in order {
        if latencies[i] >= end {
            break;
        }
        rate += rates[i];
        late += rates[i] * latencies[i];
        end = (bytes + late) / rate;
    }
    let of =
        |(rate, latency): (&f64, &f64)| if *latency < end { rate * (end - latency) } else { 0.0 };
    (end, rates.iter().zip(latencies).map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate;
    use crate::topology::Shape;

    fn star() -> (Network, Tree) {
        let network = Network::new(&generate::rack(3, 8e9)).unwrap();
        let hops = (0..3).map(|child| Hop { child, parent: 3, via: None }).collect();
        (network, Tree { root: 3, hops, rate: 1e9, rings: 1 })
    }

    #[test]
    fn a_star_takes_each_link_once_in_each_direction() {
        let (network, tree) = star();
        assert_eq!(tree.check(&network, &[0, 1, 2]), Ok(()));
        let full = load(&network, &[(Collective::AllReduce, &tree)]);
        assert_eq!(full.len(), 6);
        assert!(full.iter().all(|(_, load)| *load == 1.0), "{full:?}");
        assert_eq!(load(&network, &[(Collective::Broadcast, &tree)]).len(), 3);
        assert_eq!(tree.round_trip(&network), 2e-6);
    }

    #[test]
    fn a_box_adds_all_its_members_and_its_parent() {
        let mut topology = generate::leaf_spine(2, 3, 1, 8e9, 1.0);
        topology.boxes.iter_mut().for_each(|b| (b.aggregation_rate, b.cpus) = (Some(1e9), Some(2)));
        let network = Network::new(&topology).unwrap();
        let [leaf, spine] = ["leaf0", "spine0"].map(|name| network.node(name).unwrap());
        let hosts = (0..6).map(|child| Hop { child, parent: leaf + child / 3, via: None });
        let hops = hosts
            .chain([leaf, leaf + 1].map(|child| Hop { child, parent: spine, via: None }))
            .collect();
        let tree = Tree { root: spine, hops, rate: 1.0, rings: 1 };
        let uses = tree.uses(&network, Collective::AllReduce);
        assert_eq!(
            (uses[&Resource::Aggregation(leaf)], uses[&Resource::Aggregation(spine)]),
            (4.0, 2.0)
        );
        assert_eq!(tree.members(&network), [(leaf, 4), (leaf + 1, 4), (spine, 2)].into());
        // One of two CPUs adds for four members; on a long path a window limits it.
        assert_eq!(tree.ring_rate(&network), 1.25e8);
        let network = network.with_rings(Shape { window: 400.0, ..Shape::IDEAL });
        assert_eq!(tree.ring_rate(&network), 400.0 / 4e-6);
    }

    #[test]
    fn a_graph_that_is_not_a_tree_is_refused() {
        let (network, tree) = star();
        let with = |change: &dyn Fn(&mut Tree)| {
            let mut tree = tree.clone();
            change(&mut tree);
            tree.check(&network, &[0, 1, 2]).unwrap_err()
        };
        assert!(with(&|t| t.hops.truncate(2)).contains("h2 does not reach the root"));
        assert!(with(&|t| t.hops[0].parent = 1).contains("h0 and h1 have no such link"));
        assert!(with(&|t| t.hops[0].child = 3).contains("the root has one"));
    }

    #[test]
    fn all_trees_end_together() {
        let (end, bytes) = split(&[1e9, 3e9], &[0.0, 1e-3], 1e9);
        assert_eq!((end, bytes.iter().sum::<f64>().round()), (0.25075, 1e9));
        // The second tree would begin after the first has done everything.
        assert_eq!(split(&[1e9, 3e9], &[0.0, 2.0], 1e9), (1.0, vec![1e9, 0.0]));
        assert_eq!(split(&[2e9, 0.0], &[0.0, 0.0], 1e9), (0.5, vec![1e9, 0.0]));
    }
}
