//! Trees in any network, after Blink (MLSys 2020, section 3): multiplicative weights over spanning
//! arborescences.
//!
//! Each resource has a price. The cheapest tree is used as much as its narrowest resource allows,
//! and the resources that it uses become more expensive (Garg and Koenemann, "Faster and simpler
//! algorithms for multicommodity flow", 1998). Prices also give an upper bound for all trees: all
//! capacity, at its price, divided by the price of the cheapest tree. The weights find good trees
//! soon, but take long to find the last per cents; the prices of a linear program over the trees
//! found so far lead to those.

use std::collections::{BTreeMap, BTreeSet};

use microlp::{ComparisonOp, OptimizationDirection, Problem};

use crate::arborescence::{Arc, cheapest};
use crate::topology::{Network, Node, Resource};
use crate::tree::{Collective, Hop, Tree, uses};

/// How much the price of a resource rises when a tree uses all of it.
const STEP: f64 = 0.1;
/// The search ends when the trees reach this much of the bound.
const NEAR: f64 = 0.98;
/// The search also ends after this many trees of each kind.
const ROUNDS: usize = 300;

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Packing {
    /// All different, and without rates.
    pub trees: Vec<Tree>,
    /// An upper bound: trees of this kind cannot reach more.
    pub bound: f64,
}

/// The graph of the nodes at which trees branch.
struct Graph {
    nodes: Vec<Node>,
    /// Directed from the upper node to the lower: their numbers in `nodes`, and the hop.
    arcs: Vec<(usize, usize, Hop)>,
    /// Members below one of the nodes.
    hanging: Vec<Hop>,
    /// For each of `nodes`: whether it is a member or has members below it.
    needed: Vec<bool>,
}

fn graph(network: &Network, members: &[Node]) -> Option<Graph> {
    let mut hanging = Vec::new();
    let mut needed = BTreeSet::new();
    for &child in members {
        if network.sums(child) {
            needed.insert(child);
            continue;
        }
        let [parent] = *network.next(child) else { return None };
        if !network.sums(parent) {
            return None;
        }
        hanging.push(Hop { child, parent, via: None });
        needed.insert(parent);
    }
    // The root is first.
    let root = members.first().map(|&m| if network.sums(m) { m } else { hanging[0].parent })?;
    let others = needed.iter().copied().filter(|&n| n != root);
    let boxes = network.boxes().filter(|&b| network.sums(b) && !needed.contains(&b));
    let mut nodes: Vec<Node> = [root].into_iter().chain(others).chain(boxes).collect();
    loop {
        let number: BTreeMap<Node, usize> = nodes.iter().copied().zip(0..).collect();
        let mut arcs = Vec::new();
        for (from, &parent) in nodes.iter().enumerate() {
            for &next in network.next(parent) {
                if let Some(&to) = number.get(&next) {
                    arcs.push((from, to, Hop { child: next, parent, via: None }));
                }
                if network.is_switch(next) {
                    let beyond = network.next(next).iter().filter(|&&n| n != parent);
                    let beyond = beyond.filter_map(|&child| Some((child, *number.get(&child)?)));
                    arcs.extend(
                        beyond
                            .map(|(child, to)| (from, to, Hop { child, parent, via: Some(next) })),
                    );
                }
            }
        }
        // A box without a way in would make every tree impossible; one without a way out is
        // useless.
        let links = |n: usize| arcs.iter().filter(|(from, to, _)| *from != *to && *to == n).count();
        let dead: BTreeSet<Node> = nodes
            .iter()
            .enumerate()
            .filter(|(n, node)| !needed.contains(node) && links(*n) < 2)
            .map(|(_, &node)| node)
            .collect();
        if dead.is_empty() {
            let needed = nodes.iter().map(|node| needed.contains(node)).collect();
            return Some(Graph { nodes, arcs, hanging, needed });
        }
        nodes.retain(|node| !dead.contains(node));
    }
}

impl Graph {
    /// The chosen arcs, without boxes that have nothing below them.
    fn prune(&self, chosen: &[usize]) -> Vec<usize> {
        let mut kept: Vec<usize> = chosen.to_vec();
        loop {
            let parents: BTreeSet<usize> = kept.iter().map(|&i| self.arcs[i].0).collect();
            let before = kept.len();
            kept.retain(|&i| self.needed[self.arcs[i].1] || parents.contains(&self.arcs[i].1));
            if kept.len() == before {
                kept.sort_unstable();
                return kept;
            }
        }
    }

    fn tree(&self, chosen: &[usize]) -> Tree {
        let mut hops: Vec<Hop> =
            chosen.iter().map(|&i| self.arcs[i].2).chain(self.hanging.iter().copied()).collect();
        hops.sort_unstable();
        Tree { root: self.nodes[0], hops, rate: 0.0, rings: 1 }
    }
}

/// Prices, capacities, and the trees that were found.
struct Market<'a> {
    graph: &'a Graph,
    /// The capacity of each resource.
    rooms: Vec<f64>,
    /// The amounts that each arc uses, and those that all trees have in common.
    arcs: Vec<Vec<(usize, f64)>>,
    always: Vec<(usize, f64)>,
    /// Trees as sets of arcs, and the amounts that they use.
    found: BTreeMap<Vec<usize>, BTreeMap<usize, f64>>,
    bound: f64,
}

impl<'a> Market<'a> {
    fn new(network: &'a Network, graph: &'a Graph, collective: Collective, bound: f64) -> Self {
        let mut numbers: BTreeMap<Resource, usize> = BTreeMap::new();
        let mut rooms = Vec::new();
        let mut take = |hops: &[Hop]| -> Vec<(usize, f64)> {
            let number = |(resource, amount)| {
                let number = *numbers.entry(resource).or_insert_with(|| {
                    rooms.push(network.capacity(resource));
                    rooms.len() - 1
                });
                (number, amount)
            };
            uses(network, collective, hops).into_iter().map(number).collect()
        };
        let always = take(&graph.hanging);
        let arcs = graph.arcs.iter().map(|(_, _, hop)| take(&[*hop])).collect();
        Self { graph, rooms, arcs, always, found: BTreeMap::new(), bound }
    }

    /// The cheapest tree at these prices: the amounts that it uses, and its price.
    fn cheapest(&mut self, prices: &[f64]) -> Option<(BTreeMap<usize, f64>, f64)> {
        let cost =
            |take: &[(usize, f64)]| take.iter().map(|&(r, amount)| prices[r] * amount).sum::<f64>();
        let arcs: Vec<Arc> = self
            .graph
            .arcs
            .iter()
            .zip(&self.arcs)
            .map(|(&(from, to, _), take)| (from, to, cost(take)))
            .collect();
        let chosen = self.graph.prune(&cheapest(self.graph.nodes.len(), 0, &arcs)?);
        let price = chosen.iter().map(|&i| arcs[i].2).sum::<f64>() + cost(&self.always);
        // A tree of all boxes is not a bound for trees that leave some out.
        if self.graph.needed.iter().all(|&needed| needed) && price > 0.0 {
            let all: f64 = prices.iter().zip(&self.rooms).map(|(price, room)| price * room).sum();
            self.bound = self.bound.min(all / price);
        }
        let mut takes = BTreeMap::new();
        for &(r, amount) in chosen.iter().flat_map(|&i| &self.arcs[i]).chain(&self.always) {
            *takes.entry(r).or_insert(0.0) += amount;
        }
        self.found.insert(chosen, takes.clone());
        Some((takes, price))
    }

    /// Multiplicative weights.
    fn weigh(&mut self) -> Option<Vec<f64>> {
        let mut prices: Vec<f64> = self.rooms.iter().map(|room| 1.0 / room).collect();
        let mut loads = vec![0.0; self.rooms.len()];
        let mut sum = 0.0;
        for _ in 0..ROUNDS {
            let (takes, _) = self.cheapest(&prices)?;
            let narrowest = takes
                .iter()
                .map(|(&r, amount)| self.rooms[r] / amount)
                .fold(f64::INFINITY, f64::min);
            if narrowest == f64::INFINITY {
                // No resource limits the tree.
                break;
            }
            sum += narrowest;
            for (r, amount) in takes {
                loads[r] += narrowest * amount / self.rooms[r];
                prices[r] *= 1.0 + STEP * narrowest * amount / self.rooms[r];
            }
            if sum / loads.iter().copied().fold(0.0, f64::max) >= NEAR * self.bound {
                break;
            }
        }
        Some(prices)
    }

    /// The prices at which the trees found so far are worth most: the dual of the linear program
    /// whose variables are their rates.
    fn prices(&self) -> Result<Vec<f64>, microlp::Error> {
        let unit = self.rooms.iter().copied().fold(f64::INFINITY, f64::min);
        let mut problem = Problem::new(OptimizationDirection::Minimize);
        let vars: Vec<_> =
            self.rooms.iter().map(|_| problem.add_var(1.0, (0.0, f64::INFINITY))).collect();
        for takes in self.found.values() {
            let terms: Vec<_> =
                takes.iter().map(|(&r, amount)| (vars[r], amount * unit / self.rooms[r])).collect();
            problem.add_constraint(&terms[..], ComparisonOp::Ge, 1.0);
        }
        let solution = problem.solve()?;
        Ok(vars
            .iter()
            .zip(&self.rooms)
            .map(|(var, room)| solution[*var].max(0.0) * unit / room)
            .collect())
    }

    /// Looks for trees that are cheaper at the best prices than all found so far, until the
    /// difference is small.
    fn polish(&mut self, mut steady: Vec<f64>) {
        for _ in 0..ROUNDS {
            // If the solver fails, only possibly better trees are lost.
            let Ok(prices) = self.prices() else { return };
            match self.cheapest(&prices) {
                Some((_, price)) if price < NEAR => {}
                _ => return,
            }
            // The best prices jump between corners; averaged prices converge faster.
            let scale: f64 = steady.iter().zip(&self.rooms).map(|(price, room)| price * room).sum();
            let worth: f64 = prices.iter().zip(&self.rooms).map(|(price, room)| price * room).sum();
            let middle =
                |(steady, price): (&f64, &f64)| f64::midpoint(steady / scale, price / worth);
            steady = steady.iter().zip(&prices).map(middle).collect();
            if self.cheapest(&steady).is_none() || worth >= NEAR * self.bound {
                return;
            }
        }
    }
}

/// Looks for trees of these members; a broadcast starts at the first. None if no tree reaches all
/// members, or if a member neither relays nor is below a single box that sums. `bound` is an upper
/// bound for all trees.
pub fn pack(
    network: &Network,
    collective: Collective,
    members: &[Node],
    bound: f64,
) -> Option<Packing> {
    let graph = graph(network, members)?;
    let mut market = Market::new(network, &graph, collective, bound);
    let prices = market.weigh()?;
    if !market.rooms.is_empty() {
        market.polish(prices);
    }
    let trees = market.found.keys().map(|chosen| market.graph.tree(chosen)).collect();
    Some(Packing { trees, bound: market.bound })
}
