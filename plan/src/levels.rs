//! Optimal trees in networks of levels: hosts below leaves, and leaves below a top, directly or by
//! one box between.
//!
//! Each box that can be above all leaves has a rate. Leaves that share boxes between form a pod. A
//! pod has options, namely the boxes between by which it goes up, and their rates add up to the
//! top's. That keeps the program small, and its optimum is the best that trees of this kind can
//! reach. A pod with more than `OPTIONS` ways to spread its leaves over boxes between is limited to
//! options that lead all leaves through one box.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Model, Var};
use crate::topology::{Network, Node};
use crate::tree::{Collective, Hop, Tree, uses};

const OPTIONS: usize = 256;

/// A box above all leaves, and the paths to it.
#[derive(Clone, Debug)]
struct Top {
    root: Node,
    rate: Var,
    /// The hops above leaves that all its trees have in common.
    base: Vec<Hop>,
    pods: Vec<Vec<(Var, Vec<Hop>)>>,
}

/// The trees that a job may have.
#[derive(Clone, Debug)]
pub struct Levels {
    hosts: Vec<Hop>,
    tops: Vec<Top>,
}

/// Adds a job's trees to a program. None if a member is not a host below a box that sums, or if no
/// box is above all members.
pub fn levels(model: &mut Model, network: &Network, members: &[Node]) -> Option<Levels> {
    let mut below: BTreeMap<Node, Vec<Hop>> = BTreeMap::new();
    for &child in members {
        match network.next(child) {
            [parent] if !network.is_host(*parent) && network.sums(*parent) => {
                below.entry(*parent).or_default().push(Hop { child, parent: *parent, via: None });
            }
            _ => return None,
        }
    }
    let leaves: Vec<Node> = below.keys().copied().collect();
    let hosts: Vec<Hop> = below.into_values().flatten().collect();
    let mut found = Vec::new();
    for root in network.boxes().filter(|&b| network.sums(b)) {
        // With one leaf, a tree with a spine is no better than the leaf alone.
        if leaves.len() == 1 && root != leaves[0] {
            continue;
        }
        let Some(pods) = pods_of(network, &leaves, root) else { continue };
        let (only, pods): (Vec<_>, Vec<_>) =
            pods.into_iter().partition(|options| options.len() == 1);
        found.push((root, only.into_iter().flatten().flatten().collect::<Vec<Hop>>(), pods));
    }
    if found.is_empty() {
        return None;
    }
    let mut tops = Vec::new();
    for (root, base, pods) in found {
        let take = |hops: &[Hop]| uses(network, Collective::AllReduce, hops);
        let rate = model.var(take(&base));
        let mut options = Vec::new();
        for pod in pods {
            let pod: Vec<(Var, Vec<Hop>)> =
                pod.into_iter().map(|hops| (model.var(take(&hops)), hops)).collect();
            model.parts(rate, pod.iter().map(|(var, _)| *var).collect());
            options.push(pod);
        }
        tops.push(Top { root, rate, base, pods: options });
    }
    // The hops below leaves are the same for all tops.
    let whole = model.var(uses(network, Collective::AllReduce, &hosts));
    model.parts(whole, tops.iter().map(|top| top.rate).collect());
    Some(Levels { hosts, tops })
}

/// The options of each pod below a top; None if a leaf cannot reach it.
fn pods_of(network: &Network, leaves: &[Node], top: Node) -> Option<Vec<Vec<Vec<Hop>>>> {
    let up = |child, parent| Hop { child, parent, via: None };
    let mut pods = Vec::new();
    // Leaves with the boxes between that they may use.
    let mut indirect: Vec<(BTreeSet<Node>, Vec<Node>)> = Vec::new();
    for &leaf in leaves.iter().filter(|&&leaf| leaf != top) {
        if network.edge(leaf, top).is_some() {
            pods.push(vec![vec![up(leaf, top)]]);
            continue;
        }
        let between = network.next(leaf).iter().copied();
        let between = between.filter(|&mid| {
            !network.is_host(mid)
                && network.sums(mid)
                && !leaves.contains(&mid)
                && network.edge(mid, top).is_some()
        });
        let mut pod = (between.collect::<BTreeSet<_>>(), vec![leaf]);
        if pod.0.is_empty() {
            return None;
        }
        let (others, apart) = indirect.into_iter().partition(|(mids, _)| !mids.is_disjoint(&pod.0));
        indirect = apart;
        for (mids, leaves) in others {
            pod.0.extend(mids);
            pod.1.extend(leaves);
        }
        indirect.push(pod);
    }
    for (mids, leaves) in indirect {
        let of: Vec<Vec<Node>> = leaves
            .iter()
            .map(|&leaf| {
                mids.iter().copied().filter(|&mid| network.edge(leaf, mid).is_some()).collect()
            })
            .collect();
        let count = of
            .iter()
            .try_fold(1usize, |count, mids| count.checked_mul(mids.len()))
            .unwrap_or(usize::MAX);
        let spread: Vec<Vec<Node>> = if count <= OPTIONS {
            of.iter().fold(vec![Vec::new()], |options, mids| {
                let with = |option: Vec<Node>| {
                    mids.iter()
                        .map(move |&mid| option.iter().copied().chain([mid]).collect::<Vec<_>>())
                };
                options.into_iter().flat_map(with).collect()
            })
        } else {
            mids.iter()
                .filter(|mid| of.iter().all(|mids| mids.contains(mid)))
                .map(|&mid| vec![mid; leaves.len()])
                .collect()
        };
        if spread.is_empty() {
            return None;
        }
        let option = |chosen: Vec<Node>| {
            let used: BTreeSet<Node> = chosen.iter().copied().collect();
            let first = leaves.iter().zip(&chosen).map(|(&leaf, &mid)| up(leaf, mid));
            first.chain(used.iter().map(|&mid| up(mid, top))).collect()
        };
        pods.push(spread.into_iter().map(option).collect());
    }
    Some(pods)
}

impl Levels {
    pub fn vars(&self) -> Vec<Var> {
        self.tops.iter().map(|top| top.rate).collect()
    }

    /// The trees of a solution: a top's rate is split wherever a pod changes from one option to the
    /// next.
    pub fn trees(&self, solution: &[f64]) -> Vec<Tree> {
        let least = self.tops.iter().map(|top| solution[top.rate]).sum::<f64>() * 1e-9;
        let mut trees = Vec::new();
        for top in &self.tops {
            let mut cuts = vec![0.0, solution[top.rate]];
            for pod in &top.pods {
                let mut sum = 0.0;
                cuts.extend(pod.iter().map(|(var, _)| {
                    sum += solution[*var];
                    f64::min(sum, solution[top.rate])
                }));
            }
            cuts.sort_by(f64::total_cmp);
            for cut in cuts.windows(2).filter(|cut| cut[1] - cut[0] > least) {
                let middle = f64::midpoint(cut[0], cut[1]);
                let mut hops = [&self.hosts[..], &top.base].concat();
                for pod in &top.pods {
                    let mut sum = 0.0;
                    let chosen = pod.iter().find(|(var, _)| {
                        sum += solution[*var];
                        sum > middle
                    });
                    hops.extend(
                        &chosen.or(pod.last()).map(|(_, hops)| hops.clone()).unwrap_or_default(),
                    );
                }
                hops.sort_unstable();
                trees.push(Tree { root: top.root, hops, rate: cut[1] - cut[0], rings: 1 });
            }
        }
        trees
    }
}
