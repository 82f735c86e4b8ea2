//! Plans jobs: their trees and rates.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::bound::bound;
use crate::levels::{Levels, levels};
use crate::model::{Floor, Model, Program, Var};
use crate::pack::pack;
use crate::rings::Rings;
use crate::topology::{Error, Network, Node, Resource};
use crate::tree::{Collective, Tree, load};

/// The part of its share that a job keeps in exchange for fewer trees (Blink, section 3.2.1), with
/// a margin for rounding.
const MIN_SHARE: f64 = 0.95 + 1e-9;
/// This many sets of trees are tried one by one; then the least useful tree is left out each time.
const SETS: usize = 300;

/// A job that wants to sum.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    pub name: String,
    pub members: Vec<Node>,
    /// Jobs with a higher number are served first.
    pub priority: u32,
    pub collective: Collective,
}

/// A job's result.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub trees: Vec<Tree>,
    /// Its fair share of links and CPUs, which more trees and rings would reach, in bytes per
    /// second. 0 if jobs of a higher priority need everything.
    pub share: f64,
    /// The rate that the links alone would allow without other jobs.
    pub bound: f64,
    /// The resources that its trees use and that are full, CPUs first. If it has no trees, the
    /// resources that one would need.
    pub full: Vec<Resource>,
}

impl Plan {
    /// Bytes per second.
    pub fn rate(&self) -> f64 {
        self.trees.iter().map(|tree| tree.rate).fold(0.0, |sum, rate| sum + rate)
    }
}

/// The trees that a job may have.
enum Choice {
    Levels(Levels),
    /// Each tree has a variable; their sum cannot exceed the second value.
    Trees(Vec<(Var, Tree)>, f64),
}

impl Choice {
    fn new(model: &mut Model, network: &Network, job: &Job, bound: f64) -> Result<Self, Error> {
        let wrong = |why: String| Err(Error::Job { job: job.name.clone(), why });
        let mut seen = std::collections::BTreeSet::new();
        for &member in &job.members {
            if !network.is_host(member) || !seen.insert(member) {
                return wrong(format!("{} is not a host, or is named twice", network.name(member)));
            }
        }
        if job.members.len() < 2 {
            return wrong("a job needs at least two members".into());
        }
        if job.collective == Collective::AllReduce
            && let Some(levels) = levels(model, network, &job.members)
        {
            return Ok(Self::Levels(levels));
        }
        let Some(packing) = pack(network, job.collective, &job.members, bound) else {
            let single = |m: Node| matches!(network.next(m), [up] if network.sums(*up));
            return match job.members.iter().find(|&&m| !network.sums(m) && !single(m)) {
                Some(&m) => wrong(format!(
                    "{} must have exactly one link, to a box that sums, or relay",
                    network.name(m)
                )),
                None => wrong("no tree reaches all members".into()),
            };
        };
        let tree = |tree: Tree| (model.var(tree.uses(network, job.collective)), tree);
        Ok(Self::Trees(packing.trees.into_iter().map(tree).collect(), packing.bound))
    }

    fn vars(&self) -> Vec<Var> {
        match self {
            Self::Levels(levels) => levels.vars(),
            Self::Trees(trees, _) => trees.iter().map(|(var, _)| *var).collect(),
        }
    }

    fn trees(&self, solution: &[f64]) -> Vec<Tree> {
        match self {
            Self::Levels(levels) => levels.trees(solution),
            Self::Trees(trees, _) => {
                let all: f64 = trees.iter().map(|(var, _)| solution[*var]).sum();
                let used = trees.iter().filter(|(var, _)| solution[*var] > all * 1e-9);
                used.map(|(var, tree)| Tree { rate: solution[*var], ..tree.clone() }).collect()
            }
        }
    }
}

/// Plans jobs together. Each gets its max-min fair share of links and CPUs, jobs of a higher
/// priority first. It then gets the fewest trees found that keep 95 % of that share with whole
/// rings, or as much as rings can reach where slots or CPUs do not suffice.
///
/// # Errors
/// The job that cannot be planned, and why.
pub fn plan(network: &Network, jobs: &[Job]) -> Result<Vec<Plan>, Error> {
    let mut model = Model::new(network);
    let bounds: Vec<f64> =
        jobs.iter().map(|job| bound(network, job.collective, &job.members)).collect();
    let choices =
        jobs.iter().zip(&bounds).map(|(job, bound)| Choice::new(&mut model, network, job, *bound));
    let choices = choices.collect::<Result<Vec<_>, _>>()?;
    let vars: Vec<Vec<Var>> = choices.iter().map(Choice::vars).collect();
    let priorities: Vec<u32> = jobs.iter().map(|job| job.priority).collect();
    let (mut shares, solution) = shares(&model.program(&BTreeMap::new()), &priorities, &vars)?;
    let mut trees: Vec<Vec<Tree>> = choices.iter().map(|choice| choice.trees(&solution)).collect();
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by_key(|&n| Reverse(priorities[n]));
    // Less than the solver's rounding error counts as 0.
    for n in 0..jobs.len() {
        if shares[n] <= bounds[n] * 1e-6 {
            shares[n] = 0.0;
            trees[n].clear();
        }
    }
    for (job, trees) in
        jobs.iter().zip(&mut trees).filter(|(job, _)| job.collective == Collective::AllReduce)
    {
        let limit = network.shape().members;
        let crowded =
            |tree: &Tree| tree.members(network).into_iter().find(|(_, members)| *members > limit);
        let found = trees.iter().find_map(crowded);
        trees.retain(|tree| crowded(tree).is_none());
        if let Some((node, members)) = found.filter(|_| trees.is_empty()) {
            let name = network.name(node);
            let why =
                format!("a ring would have {members} members at {name}, but {limit} are the most");
            return Err(Error::Job { job: job.name.clone(), why });
        }
    }
    let wanted = trees.clone();
    // A ring is reserved for each job while the others choose theirs.
    let mut rings: Vec<Vec<Tree>> = vec![Vec::new(); jobs.len()];
    for &n in order.iter().filter(|&&n| jobs[n].collective == Collective::AllReduce) {
        let widest = trees[n].iter().max_by(|a, b| a.rate.total_cmp(&b.rate));
        let Some(rate) = widest.map(|tree| tree.rate) else { continue };
        let kept = Rings::new(network, rings.iter().flatten());
        let mut kept =
            kept.lay_out(widest.cloned().into_iter().collect(), &BTreeMap::new(), 1, rate);
        kept.iter_mut().for_each(|tree| tree.rate = tree.rate.min(rate));
        rings[n] = kept;
    }
    for n in order {
        let job = &jobs[n];
        if trees[n].is_empty() {
            continue;
        }
        // The capacity that the other jobs leave.
        let others = jobs.iter().zip(&trees).enumerate().filter(|(other, _)| *other != n);
        let others: Vec<(Collective, &Tree)> = others
            .flat_map(|(_, (job, trees))| trees.iter().map(|tree| (job.collective, tree)))
            .collect();
        let used = load(network, &others);
        let free: BTreeMap<Resource, f64> = used
            .into_iter()
            .map(|(r, part)| (r, network.capacity(r) * (1.0 - part).max(0.0)))
            .collect();
        // Packed trees are already below the optimum.
        let optimum = match &choices[n] {
            Choice::Trees(_, bound) if jobs.len() == 1 => bound.min(bounds[n]),
            _ => shares[n],
        };
        let least = (optimum * MIN_SHARE).min(shares[n] * (1.0 - 1e-9));
        rings[n].clear();
        let others = Rings::new(network, rings.iter().flatten());
        let lay_out = |trees| match job.collective {
            Collective::AllReduce => others.lay_out(trees, &free, network.shape().rings, least),
            Collective::Broadcast => trees,
        };
        trees[n] = fewest(network, job.collective, &trees[n], &free, least, &lay_out)?;
        if job.collective == Collective::AllReduce {
            rings[n].clone_from(&trees[n]);
        }
    }
    let laid = Rings::new(network, rings.iter().flatten());
    let all =
        jobs.iter().zip(&trees).flat_map(|(job, trees)| trees.iter().map(|t| (job.collective, t)));
    let mut full: Vec<Resource> = load(network, &all.collect::<Vec<_>>())
        .into_iter()
        .take_while(|(_, load)| *load > 1.0 - 1e-6)
        .map(|(resource, _)| resource)
        .collect();
    full.retain(|resource| !matches!(resource, Resource::Aggregation(_)));
    let of = |(n, trees): (usize, Vec<Tree>)| {
        let job = &jobs[n];
        let wants = if trees.is_empty() { &wanted[n] } else { &trees };
        let takes: BTreeMap<_, _> =
            wants.iter().flat_map(|tree| tree.uses(network, job.collective)).collect();
        let mut full: Vec<Resource> =
            full.iter().copied().filter(|resource| takes.contains_key(resource)).collect();
        if job.collective == Collective::AllReduce {
            full.extend(laid.full(wants, usize::from(trees.is_empty())));
        }
        full.sort_unstable();
        full.dedup();
        Plan {
            // Both values are computed, and rounded.
            share: shares[n].min(bounds[n]),
            bound: bounds[n],
            full,
            trees,
        }
    };
    Ok(trees.into_iter().enumerate().map(of).collect())
}

/// Max-min fair rates by the jobs' priorities, and a solution that has them.
pub(crate) fn shares(
    program: &Program,
    of: &[u32],
    vars: &[Vec<Var>],
) -> Result<(Vec<f64>, Vec<f64>), Error> {
    let mut shares = vec![0.0; of.len()];
    let mut solution = Vec::new();
    let mut settled = vec![false; of.len()];
    let mut priorities = of.to_vec();
    priorities.sort_unstable();
    priorities.dedup();
    for priority in priorities.into_iter().rev() {
        let mut rising: Vec<usize> = (0..of.len()).filter(|&n| of[n] == priority).collect();
        while !rising.is_empty() {
            let floors = |lifted: &[usize], shares: &[f64]| -> Vec<Floor> {
                let floor = |n: usize| Floor {
                    vars: &vars[n],
                    least: if lifted.contains(&n) { 0.0 } else { shares[n] },
                    lifted: lifted.contains(&n),
                };
                (0..of.len()).map(floor).collect()
            };
            let level;
            (level, solution) = program.solve(&floors(&rising, &shares))?;
            rising.iter().for_each(|&n| shares[n] = level);
            if rising.len() == 1 {
                settled[rising[0]] = true;
                break;
            }
            // Find the jobs that cannot get more without another getting less.
            let mut stuck = Vec::new();
            let stopped = program.stopped(&solution);
            for &n in &rising {
                if vars[n].iter().all(|var| stopped.contains(var))
                    && program.solve(&floors(&[n], &shares))?.0 <= level * (1.0 + 1e-6)
                {
                    stuck.push(n);
                }
            }
            // At least one exists, except for rounding.
            if stuck.is_empty() {
                stuck.clone_from(&rising);
            }
            stuck.iter().for_each(|&n| settled[n] = true);
            rising.retain(|&n| !settled[n]);
        }
    }
    Ok((shares, solution))
}

/// The fewest of these trees that still reach a rate after their rings are laid out, or the trees
/// that reach most.
fn fewest(
    network: &Network,
    collective: Collective,
    trees: &[Tree],
    free: &BTreeMap<Resource, f64>,
    rate: f64,
    lay_out: &dyn Fn(Vec<Tree>) -> Vec<Tree>,
) -> Result<Vec<Tree>, Error> {
    let mut model = Model::new(network);
    for tree in trees {
        model.var(tree.uses(network, collective));
    }
    let program = model.program(free);
    let with = |solution: Vec<f64>| -> Vec<Tree> {
        let rated = trees.iter().zip(solution).filter(|(_, rate)| *rate > 0.0);
        lay_out(rated.map(|(tree, rate)| Tree { rate, ..tree.clone() }).collect())
    };
    let sum = |trees: &[Tree]| trees.iter().map(|tree| tree.rate).sum::<f64>();
    let mut fastest = Vec::new();
    // Fewer trees than this cannot reach it, even if they shared nothing.
    let alone = (0..trees.len())
        .map(|tree| Ok(program.max_sum(&[tree])?.0))
        .collect::<Result<Vec<f64>, Error>>()?;
    let mut best = alone.clone();
    best.sort_by(|a, b| b.total_cmp(a));
    let mut all = 0.0;
    let enough = best.iter().position(|reached| {
        all += reached;
        all >= rate
    });
    let mut tried = 0;
    for size in enough.map_or(trees.len(), |last| last + 1)..trees.len() {
        let mut set: Vec<usize> = (0..size).collect();
        loop {
            // Most sets cannot reach it, even if their trees shared nothing.
            if set.iter().map(|&tree| alone[tree]).sum::<f64>() >= rate {
                let (reached, solution) = program.max_sum(&set)?;
                if reached >= rate {
                    let laid = with(solution);
                    if sum(&laid) >= rate {
                        return Ok(laid);
                    }
                    if sum(&laid) > sum(&fastest) {
                        fastest = laid;
                    }
                }
            }
            tried += 1;
            if tried > SETS || !next(&mut set, trees.len()) {
                break;
            }
        }
    }
    let mut kept: Vec<usize> = (0..trees.len()).collect();
    let mut found = with(program.max_sum(&kept)?.1);
    if tried > SETS {
        kept.sort_by(|&a, &b| trees[a].rate.total_cmp(&trees[b].rate).then(a.cmp(&b)));
        for tree in kept.clone() {
            let without: Vec<usize> = kept.iter().copied().filter(|&i| i != tree).collect();
            let (reached, solution) = program.max_sum(&without)?;
            let laid = if reached >= rate { with(solution) } else { Vec::new() };
            if sum(&laid) >= rate {
                (kept, found) = (without, laid);
            }
        }
    }
    Ok(if sum(&fastest) > sum(&found) { fastest } else { found })
}

/// Advances to the next set of as many numbers below `of`, if there is one.
fn next(set: &mut [usize], of: usize) -> bool {
    let size = set.len();
    let Some(i) = (0..size).rev().find(|&i| set[i] < of - size + i) else { return false };
    set[i] += 1;
    (i + 1..size).for_each(|j| set[j] = set[j - 1] + 1);
    true
}
