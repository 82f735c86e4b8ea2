//! How long collectives take in the fluid network.
//!
//! Pipelined steps are one set of simultaneous flows, after the latency of all steps. Steps that
//! wait for each other, as in halving and doubling, run one after another.

use std::collections::BTreeSet;

use netsum_plan::plan::{Job, plan};
use netsum_plan::topology::{Edge, Error, Network, Node, Resource, Topology};
use netsum_plan::tree::{Collective as Kind, Tree, split};

use crate::fluid::{Flow, run};
use crate::routes::{Balance, Demand, flows};

/// A collective of all hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// An all-reduce by boxes, over the trees that `plan` finds.
    Netsum,
    /// By the hosts' ring.
    Ring,
    /// Two binary trees; each host is an inner node of at most one of them (Sanders, Speck, Traeff,
    /// "Two-tree algorithms", 2009; NCCL's).
    DoubleBinaryTree,
    /// Halving and doubling (Rabenseifner); the number of hosts must be a power of two.
    HalvingDoubling,
    /// Each host sends 1/N of its bytes to each host.
    AllToAll,
}

/// A network with failed links, and how its flows are balanced.
#[derive(Clone, Debug)]
pub struct Scene<'a> {
    pub network: &'a Network,
    pub failed: BTreeSet<Edge>,
    pub balance: Balance,
    /// Other jobs' flows, which are there all the time. `bytes` is the most that each sends per
    /// second; it shares links fairly with other flows.
    pub background: Vec<Demand>,
    /// See `fluid::run`.
    pub step: f64,
}

impl Scene<'_> {
    /// Seconds until all flows have ended.
    fn time(&self, demands: &[Demand]) -> f64 {
        let flows = |demands: &[Demand]| flows(self.network, &self.failed, demands, self.balance);
        let alone = self.last_end(flows(demands), &[], Vec::new());
        if self.background.is_empty() {
            return alone;
        }
        // A rule that considers the links' load is given the background flows with their rates.
        let others =
            self.background.iter().map(|other| Demand { bytes: other.bytes * alone, ..*other });
        let mut all = flows(&demands.iter().copied().chain(others).collect::<Vec<_>>());
        let others = all.split_off(demands.len());
        self.last_end(all, &[], others)
    }

    /// The end of the last flow, with other jobs' flows on the same links. `most` limits the rates
    /// of
    /// the first flows, in bytes per second.
    fn last_end(&self, mut flows: Vec<Flow>, most: &[f64], others: Vec<Flow>) -> f64 {
        let count = flows.len();
        let edges =
            (0..self.network.edges()).map(|edge| self.network.capacity(Resource::Edge(edge)));
        let mut capacities: Vec<f64> = edges.collect();
        let mut limit = |flow: &mut Flow, most| {
            flow.links.push((capacities.len(), 1.0));
            capacities.push(most);
        };
        flows.iter_mut().zip(most).for_each(|(flow, most)| limit(flow, *most));
        for (mut other, demand) in others.into_iter().zip(&self.background) {
            other.bytes = f64::INFINITY;
            limit(&mut other, demand.bytes);
            flows.push(other);
        }
        run(&capacities, &flows, self.step)[..count].iter().copied().fold(0.0, f64::max)
    }

    /// Seconds of a collective of all hosts, with `bytes` bytes at each.
    ///
    /// # Errors
    /// If trees cannot be planned.
    pub fn seconds(&self, collective: Collective, bytes: f64) -> Result<f64, Error> {
        let hosts: Vec<Node> = self.network.hosts().collect();
        let n = hosts.len();
        let demand =
            |from: usize, to: usize, bytes| Demand { from: hosts[from], to: hosts[to % n], bytes };
        let flowing = match collective {
            Collective::Netsum => self.netsum(&hosts, bytes)?,
            Collective::Ring => {
                let each = 2.0 * (n - 1) as f64 / n as f64 * bytes;
                self.time(&(0..n).map(|i| demand(i, i + 1, each)).collect::<Vec<_>>())
            }
            Collective::DoubleBinaryTree => {
                let one = binary_tree(n).into_iter();
                let two = binary_tree(n)
                    .into_iter()
                    .map(|(child, parent)| ((child + 1) % n, (parent + 1) % n));
                let both =
                    one.chain(two).flat_map(|(child, parent)| [(child, parent), (parent, child)]);
                self.time(&both.map(|(from, to)| demand(from, to, bytes / 2.0)).collect::<Vec<_>>())
            }
            Collective::HalvingDoubling => {
                let step = |log: u32| {
                    let distance = n >> log;
                    let part = bytes / f64::from(1u32 << log);
                    // Halving takes this time once, and doubling again.
                    2.0 * self
                        .time(&(0..n).map(|i| demand(i, i ^ distance, part)).collect::<Vec<_>>())
                };
                (1..=n.ilog2()).map(step).sum()
            }
            Collective::AllToAll => {
                let pairs = (0..n).flat_map(|from| (1..n).map(move |by| (from, from + by)));
                self.time(
                    &pairs.map(|(from, to)| demand(from, to, bytes / n as f64)).collect::<Vec<_>>(),
                )
            }
        };
        Ok(self.latency(collective) + flowing)
    }

    /// The latency of all steps in sequence, from the first host to the last. Times of trees
    /// include theirs.
    pub fn latency(&self, collective: Collective) -> f64 {
        let hosts: Vec<Node> = self.network.hosts().collect();
        let doublings = (hosts.len() as f64).log2().ceil();
        let steps = match collective {
            Collective::Netsum => return 0.0,
            Collective::Ring => 2.0 * (hosts.len() as f64 - 1.0),
            Collective::DoubleBinaryTree | Collective::HalvingDoubling => 2.0 * doublings,
            Collective::AllToAll => 1.0,
        };
        steps * self.longest(&hosts)
    }

    fn longest(&self, hosts: &[Node]) -> f64 {
        let (Some(&first), Some(&last)) = (hosts.first(), hosts.last()) else { return 0.0 };
        let paths = crate::routes::paths(self.network, &self.failed, first, last);
        paths.first().map_or(0.0, |path| path.iter().map(|&edge| self.network.latency(edge)).sum())
    }

    /// Plans trees around the failed links, as if other jobs were not there. A tree is a flow that
    /// uses all its links at once.
    fn netsum(&self, hosts: &[Node], bytes: f64) -> Result<f64, Error> {
        let job = Job {
            name: "all".into(),
            members: hosts.to_vec(),
            priority: 0,
            collective: Kind::AllReduce,
        };
        let network = &self.network.without(&self.failed);
        let trees = plan(network, &[job])?.remove(0).trees;
        let rates: Vec<f64> = trees.iter().map(|tree| tree.rate).collect();
        let late: Vec<f64> = trees.iter().map(|tree| tree.round_trip(network)).collect();
        let parts = split(&rates, &late, bytes).1;
        let flow = |((tree, start), bytes): ((&Tree, &f64), f64)| {
            let uses = tree.uses(network, Kind::AllReduce).into_iter();
            let edge = |(resource, part)| match resource {
                Resource::Edge(edge) => Some((edge, part)),
                _ => None,
            };
            Flow { bytes, start: *start, links: uses.filter_map(edge).collect() }
        };
        let others = flows(self.network, &self.failed, &self.background, self.balance);
        Ok(self.last_end(trees.iter().zip(&late).zip(parts).map(flow).collect(), &rates, others))
    }
}

/// (Child, parent) pairs of the in-order binary tree of 0..n, counted from 1: odd numbers are
/// leaves, and the parent of i differs from i in its lowest set bit and the next.
fn binary_tree(n: usize) -> Vec<(usize, usize)> {
    // Counted from 1, each number has a lowest set bit; the root has only its highest bit set.
    let root = 1 << (usize::BITS - 1 - n.leading_zeros());
    let parent = |i: usize| {
        let mut bit = i & i.wrapping_neg();
        let mut i = i;
        loop {
            i = (i & !bit) | (bit << 1);
            // In an incomplete tree the next existing ancestor is the parent.
            if i <= n {
                return i;
            }
            bit <<= 1;
        }
    };
    (1..=n).filter(|&i| i != root).map(|i| (i - 1, parent(i) - 1)).collect()
}

/// The same network with one host in place of all those below a leaf; its link has the sum of their
/// rates. If flows are spread evenly, all hosts of a leaf have equal times, and an all-to-all takes
/// as long as in the whole network.
pub fn leaves_as_hosts(topology: &Topology) -> Topology {
    let mut small =
        Topology { hosts: Vec::new(), boxes: topology.boxes.clone(), links: Vec::new() };
    let hosts: BTreeSet<&str> = topology.hosts.iter().map(|host| host.name.as_str()).collect();
    for link in &topology.links {
        if !hosts.contains(link.from.as_str()) {
            small.links.push(link.clone());
            continue;
        }
        match small.links.iter_mut().find(|l| l.to == link.to && l.from.starts_with("all-")) {
            Some(all) => all.bits += link.bits,
            None => {
                let name = format!("all-{}", link.to);
                small.host(&name);
                small.link(name, &link.to, link.bits);
            }
        }
    }
    small
}

/// Times of NetReduce's three ways to sum over machines with several GPUs (arXiv 2009.09736): P
/// machines, n GPUs in each, M bytes. Rates are in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machines {
    pub machines: f64,
    pub gpus: f64,
    pub intra: f64,
    pub inter: f64,
    pub latency: f64,
}

impl Machines {
    /// Seconds of a ring of machines that carries all their bytes.
    pub fn flat_ring(&self, bytes: f64) -> f64 {
        let steps = 2.0 * (self.machines - 1.0);
        steps * (self.latency + bytes / self.machines / self.inter)
    }

    /// Seconds of a ring of all GPUs, with one link between neighbouring machines.
    pub fn ring_of_gpus(&self, bytes: f64) -> f64 {
        let all = self.machines * self.gpus;
        2.0 * (all - 1.0) * (self.latency + bytes / all / self.inter)
    }

    /// Seconds of a hierarchical sum: a machine's GPUs reduce and scatter, boxes sum between
    /// machines, and the GPUs gather. A box takes one step up and one down.
    pub fn hierarchical(&self, bytes: f64) -> f64 {
        let steps = 2.0 * (self.gpus - 1.0);
        steps * (self.latency + bytes / self.gpus / self.intra)
            + 2.0 * self.latency
            + bytes / self.inter
    }

    /// Hierarchical beats flat, if latency is ignored, where B_intra / B_inter is above this:
    /// 2 P (n - 1) / (n (P - 2)).
    pub fn threshold(&self) -> f64 {
        2.0 * self.machines * (self.gpus - 1.0) / (self.gpus * (self.machines - 2.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netsum_plan::generate;

    fn near(value: f64, expected: f64) {
        assert!((value / expected - 1.0).abs() < 1e-9, "{value}, not {expected}");
    }

    #[test]
    fn without_contention_collectives_take_their_bytes() {
        let mut topology = generate::leaf_spine(4, 4, 4, 8e9, 1.0);
        topology.links.iter_mut().for_each(|link| link.latency_us = 0.0);
        let network = Network::new(&topology).unwrap();
        let scene = Scene {
            network: &network,
            failed: BTreeSet::new(),
            balance: Balance::Spray,
            background: Vec::new(),
            step: 0.0,
        };
        let of = |collective| scene.seconds(collective, 1e9).unwrap();
        near(of(Collective::Ring), 2.0 * 15.0 / 16.0);
        near(of(Collective::HalvingDoubling), 2.0 * 15.0 / 16.0);
        near(of(Collective::AllToAll), 15.0 / 16.0);
        // An inner host of one tree receives two halves there and sends two; it is a leaf of the
        // other tree, and receives and sends one there.
        near(of(Collective::DoubleBinaryTree), 2.0);
        near(of(Collective::Netsum), 1.0);
    }

    #[test]
    fn other_jobs_leave_the_rest_of_the_link_or_half() {
        let mut topology = generate::leaf_spine(4, 4, 4, 8e9, 1.0);
        topology.links.iter_mut().for_each(|link| link.latency_us = 0.0);
        let network = Network::new(&topology).unwrap();
        let seconds = |collective, rate, balance| {
            // Each host sends to the one below the next leaf, so all host links and all uplinks
            // carry the same load.
            let other = |host| Demand { from: host, to: (host + 4) % 16, bytes: rate };
            let background = if rate > 0.0 { (0..16).map(other).collect() } else { Vec::new() };
            let scene = Scene {
                network: &network,
                failed: BTreeSet::new(),
                balance,
                background,
                step: 0.0,
            };
            scene.seconds(collective, 1e9).unwrap()
        };
        for balance in [Balance::Spray, Balance::Reps, Balance::Ethereal] {
            for collective in [Collective::Ring, Collective::Netsum, Collective::HalvingDoubling] {
                // The others take a quarter of 1 GB/s; or their fair half, if both want more than
                // half.
                for (rate, share) in [(0.0, 1.0), (0.25e9, 0.75), (0.5e9, 0.5), (0.9e9, 0.5)] {
                    let alone = seconds(collective, 0.0, balance);
                    near(seconds(collective, rate, balance), alone / share);
                }
            }
        }
        // A host's 15 flows share the link with one other flow that wants all of it: they get
        // 15/16.
        let alone = seconds(Collective::AllToAll, 0.0, Balance::Spray);
        near(seconds(Collective::AllToAll, 1e9, Balance::Spray), alone * 16.0 / 15.0);
    }

    #[test]
    fn a_coarse_step_leaves_the_last_end_of_hashed_flows_where_it_is() {
        let network = Network::new(&generate::leaf_spine(4, 8, 8, 8e9, 1.0)).unwrap();
        let [leaf, spine] = ["leaf0", "spine1"].map(|name| network.node(name).unwrap());
        let failed = BTreeSet::from([
            network.edge(leaf, spine).unwrap(),
            network.edge(spine, leaf).unwrap(),
        ]);
        for (seed, failed) in (0..8).zip([BTreeSet::new(), failed].iter().cycle()) {
            let seconds = |step| {
                let (failed, balance) = (failed.clone(), Balance::Ecmp { seed });
                let scene =
                    Scene { network: &network, failed, balance, background: Vec::new(), step };
                scene.seconds(Collective::AllToAll, 1e9).unwrap()
            };
            let (exact, near) = (seconds(0.0), seconds(0.01));
            assert!((near / exact - 1.0).abs() < 0.001, "seed {seed}: {near}, not {exact}");
        }
    }

    #[test]
    fn one_other_flow_holds_all_back() {
        let mut topology = generate::leaf_spine(2, 2, 1, 8e9, 1.0);
        topology.links.iter_mut().for_each(|link| link.latency_us = 0.0);
        let network = Network::new(&topology).unwrap();
        let seconds = |collective, bytes| {
            let (failed, balance) = (BTreeSet::new(), Balance::Spray);
            let background = vec![Demand { from: 0, to: 3, bytes }];
            let scene = Scene { network: &network, failed, balance, background, step: 0.0 };
            scene.seconds(collective, 1e9).unwrap()
        };
        // The uplink has capacity left; the links of hosts 0 and 3 do not.
        for collective in [Collective::Ring, Collective::Netsum] {
            near(seconds(collective, 0.1e9), seconds(collective, 0.0) / 0.9);
        }
    }

    #[test]
    fn two_trees_have_each_host_inside_once() {
        for n in 2..40 {
            let tree = binary_tree(n);
            assert_eq!(tree.len(), n - 1);
            let children = |parent: usize| tree.iter().filter(|(_, p)| *p == parent).count();
            // Hosts with even numbers (odd, counted from 1) are leaves.
            assert!(
                (0..n).all(|i| children(i) <= 2 && (i % 2 == 1 || children(i) == 0)),
                "{n}: {tree:?}"
            );
            let mut at = 0;
            for _ in 0..n {
                at = tree.iter().find(|(child, _)| *child == at).map_or(at, |(_, parent)| *parent);
            }
            assert!((0..n).all(|i| i == at || tree.iter().any(|(child, _)| *child == i)));
        }
    }

    #[test]
    fn a_failed_uplink_costs_netsum_only_its_own_share() {
        let network = Network::new(&generate::leaf_spine(4, 4, 4, 8e9, 1.0)).unwrap();
        let [leaf, spine] = ["leaf0", "spine1"].map(|name| network.node(name).unwrap());
        let failed = BTreeSet::from([
            network.edge(leaf, spine).unwrap(),
            network.edge(spine, leaf).unwrap(),
        ]);
        let scene = |failed| Scene {
            network: &network,
            failed,
            balance: Balance::Spray,
            background: Vec::new(),
            step: 0.0,
        };
        let [whole, hurt] = [BTreeSet::new(), failed]
            .map(|failed| scene(failed).seconds(Collective::Netsum, 1e9).unwrap());
        near(whole, hurt);
    }

    #[test]
    fn leaves_for_hosts_take_as_long() {
        let topology = generate::leaf_spine(4, 4, 4, 8e9, 1.0);
        let time = |topology: &Topology, bytes| {
            let network = Network::new(topology).unwrap();
            let leaf = network.node("leaf0").unwrap();
            let spine = network.node("spine1").unwrap();
            let failed = BTreeSet::from([
                network.edge(leaf, spine).unwrap(),
                network.edge(spine, leaf).unwrap(),
            ]);
            let scene = Scene {
                network: &network,
                failed,
                balance: Balance::Spray,
                background: Vec::new(),
                step: 0.0,
            };
            scene.seconds(Collective::AllToAll, bytes).unwrap()
        };
        // Three of a host's 16 parts stay below its leaf and use no uplink.
        let (hosts, leaves) = (time(&topology, 1e9), time(&leaves_as_hosts(&topology), 4e9));
        assert!((hosts / leaves - 1.0).abs() < 0.25, "{hosts} {leaves}");
    }

    #[test]
    fn the_papers_inequality_is_where_hierarchical_wins() {
        for machines in [4.0, 32.0, 1024.0] {
            let at = |ratio: f64| Machines {
                machines,
                gpus: 8.0,
                intra: 12.5e9 * ratio,
                inter: 12.5e9,
                latency: 0.0,
            };
            let threshold = at(1.0).threshold();
            for (factor, wins) in [(0.99, false), (1.01, true)] {
                let m = at(threshold * factor);
                assert_eq!(m.hierarchical(1e9) < m.flat_ring(1e9), wins, "{m:?}");
            }
        }
    }
}
