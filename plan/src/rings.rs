//! Whole rings for trees: how many each tree gets, and the rate that they reach together.
//!
//! A ring is served by one CPU of each box, and takes slots there whatever its rate. All rings of a
//! job carry the same number of its bytes, so its trees carry bytes in proportion to their rings. A
//! box gives a new ring to the CPU with the fewest, so no CPU has more than its part, rounded up.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::iter::repeat_n;

use crate::topology::{Network, Node, Resource};
use crate::tree::{Collective, Tree};

/// Rings at a box.
#[derive(Clone, Debug, Default)]
struct AtBox {
    /// Bytes per second that each ring adds, largest first.
    loads: Vec<f64>,
    /// Bytes of their slots.
    slots: f64,
}

/// Rings that exist.
#[derive(Debug)]
pub struct Rings<'a> {
    network: &'a Network,
    boxes: BTreeMap<Node, AtBox>,
}

impl<'a> Rings<'a> {
    pub fn new<'t>(network: &'a Network, trees: impl IntoIterator<Item = &'t Tree>) -> Self {
        let mut boxes: BTreeMap<Node, AtBox> = BTreeMap::new();
        for tree in trees {
            let rings = f64::from(tree.rings);
            for (node, members) in tree.members(network) {
                let at = boxes.entry(node).or_default();
                let each = members as f64 * tree.rate / rings;
                at.loads.extend(repeat_n(each, tree.rings as usize));
                at.slots += rings * network.shape().slots_of(members);
            }
        }
        boxes.values_mut().for_each(|at| at.loads.sort_by(|a, b| b.total_cmp(a)));
        Self { network, boxes }
    }

    /// The rate, in bytes per second, that all rings with these numbers of members, largest first,
    /// can reach at a box.
    fn max_rate(&self, node: Node, own: &[usize]) -> f64 {
        let none = AtBox::default();
        let at = self.boxes.get(&node).unwrap_or(&none);
        let slots = own.iter().map(|&members| self.network.shape().slots_of(members)).sum::<f64>();
        let rings = at.loads.len() + own.len();
        if at.slots + slots > self.network.capacity(Resource::Slots(node))
            || rings > self.network.shape().rings as usize
        {
            return 0.0;
        }
        let cpu_rate = self.network.cpu_rate(node);
        if cpu_rate == f64::INFINITY {
            return cpu_rate;
        }
        // The fullest CPU may have any of the rings: at worst those that add most.
        let together = rings.div_ceil(self.network.cpus(node) as usize);
        let theirs = |count: usize| at.loads.iter().take(count).sum::<f64>();
        if theirs(together) > cpu_rate * (1.0 + 1e-9) {
            return 0.0;
        }
        let (mut rate, mut members) = (f64::INFINITY, 0);
        for (others, own) in (0..together).rev().zip(own) {
            members += own;
            rate = rate.min((cpu_rate - theirs(others)).max(0.0) / members as f64);
        }
        rate
    }

    /// Lays out the fewest rings, up to a limit, with which trees reach a rate in proportion to
    /// theirs; or those that reach most. `free` has what is left of partly used links and CPUs.
    /// Trees without boxes have no rings, and stay as they are.
    pub fn lay_out(
        &self,
        trees: Vec<Tree>,
        free: &BTreeMap<Resource, f64>,
        max_rings: u32,
        least: f64,
    ) -> Vec<Tree> {
        let members: Vec<_> = trees.iter().map(|tree| tree.members(self.network)).collect();
        if members.iter().all(BTreeMap::is_empty) {
            return trees;
        }
        let mut boxes: BTreeMap<Node, Vec<(usize, usize)>> = BTreeMap::new();
        for (n, (node, members)) in
            members.iter().enumerate().flat_map(|(n, all)| all.iter().map(move |at| (n, at)))
        {
            boxes.entry(*node).or_default().push((n, *members));
        }
        boxes.values_mut().for_each(|trees| trees.sort_by_key(|(_, members)| Reverse(*members)));
        // Resources with equal uses become one row.
        let mut uses: BTreeMap<Resource, Vec<f64>> = BTreeMap::new();
        for (n, tree) in trees.iter().enumerate() {
            for (resource, amount) in tree.uses(self.network, Collective::AllReduce) {
                uses.entry(resource).or_insert_with(|| vec![0.0; trees.len()])[n] = amount;
            }
        }
        let mut rows: BTreeMap<Vec<u64>, f64> = BTreeMap::new();
        for (resource, uses) in uses {
            let room =
                free.get(&resource).copied().unwrap_or_else(|| self.network.capacity(resource));
            let row = rows.entry(uses.into_iter().map(f64::to_bits).collect()).or_insert(room);
            *row = row.min(room);
        }
        let ring_rates: Vec<f64> = trees.iter().map(|tree| tree.ring_rate(self.network)).collect();
        let each = |rings: &[u32]| {
            let alone = rings.iter().zip(&ring_rates).filter(|(rings, _)| **rings > 0);
            let alone = alone.map(|(_, rate)| *rate).fold(f64::INFINITY, f64::min);
            let shared = rows.iter().map(|(row, room)| {
                let takes =
                    row.iter().zip(rings).map(|(use_, &n)| f64::from_bits(*use_) * f64::from(n));
                let takes = takes.sum::<f64>();
                if takes > 0.0 { room / takes } else { f64::INFINITY }
            });
            let shared = shared.fold(alone, f64::min);
            let at = boxes.iter().map(|(node, trees)| {
                let own = trees.iter().flat_map(|&(n, m)| repeat_n(m, rings[n] as usize));
                let own: Vec<usize> = own.collect();
                if own.is_empty() { f64::INFINITY } else { self.max_rate(*node, &own) }
            });
            at.fold(shared, f64::min)
        };
        let rates: Vec<f64> = trees.iter().map(|tree| tree.rate).collect();
        let (mut best, mut found) = (0.0, (0.0, vec![0; trees.len()]));
        for count in 1..=max_rings.min(self.network.shape().rings) {
            let rings = share_out(&rates, count);
            let each = each(&rings);
            let rate = f64::from(count) * each;
            if rate > best * (1.0 + 1e-9) {
                (best, found) = (rate, (each, rings));
            }
            if best >= least {
                break;
            }
        }
        let (each, rings) = found;
        let laid = trees.into_iter().zip(rings).filter(|(_, rings)| *rings > 0);
        laid.map(|(tree, rings)| Tree { rings, rate: f64::from(rings) * each, ..tree }).collect()
    }

    /// The resources that are full for such trees: CPUs that add all they can, or would with `more`
    /// further rings; and slots that cannot hold another ring.
    pub fn full(&self, trees: &[Tree], more: usize) -> Vec<Resource> {
        let none = AtBox::default();
        let mut full = Vec::new();
        for (node, members) in trees.iter().flat_map(|tree| tree.members(self.network)) {
            let at = self.boxes.get(&node).unwrap_or(&none);
            let together = (at.loads.len() + more).div_ceil(self.network.cpus(node) as usize);
            let fullest = at.loads.iter().take(together).sum::<f64>();
            if fullest > self.network.cpu_rate(node) * (1.0 - 1e-6) {
                full.push(Resource::Aggregation(node));
            }
            let slots = at.slots + self.network.shape().slots_of(members);
            if slots > self.network.capacity(Resource::Slots(node)) {
                full.push(Resource::Slots(node));
            }
        }
        full
    }
}

/// Distributes rings in proportion to rates, by largest remainder.
fn share_out(rates: &[f64], rings: u32) -> Vec<u32> {
    let all: f64 = rates.iter().sum();
    let parts: Vec<f64> = rates.iter().map(|rate| f64::from(rings) * rate / all).collect();
    let mut shares: Vec<u32> = parts.iter().map(|part| part.floor() as u32).collect();
    let mut order: Vec<usize> = (0..rates.len()).collect();
    order.sort_by(|&a, &b| parts[b].fract().total_cmp(&parts[a].fract()));
    let left = rings - shares.iter().sum::<u32>();
    order.into_iter().take(left as usize).for_each(|n| shares[n] += 1);
    shares
}
