//! The incremental plan: a job among others that keep their trees, and how its bytes are split.

use std::collections::BTreeMap;

use crate::model::{Model, Var};
use crate::plan::shares;
use crate::topology::{Error, Network, Resource};
use crate::tree::{Collective, Tree, load};

/// The rate that a job can get.
#[derive(Clone, Debug, PartialEq)]
pub struct Incremental {
    /// Its max-min fair share with the best use of its trees, in bytes per second.
    pub share: f64,
    /// The others' fair shares.
    pub others: Vec<f64>,
    /// The residual capacity of each of its trees after the others' fair shares, in bytes per
    /// second. Resources that all its trees use are left out.
    pub residual: Vec<f64>,
    /// More rings would increase its share.
    pub needs_rings: bool,
}

/// The resources that one byte per second uses, if it is split over trees in proportion to their
/// rates.
fn together(network: &Network, trees: &[Tree]) -> BTreeMap<Resource, f64> {
    let mut uses = BTreeMap::new();
    for tree in rated(trees, 1.0) {
        for (resource, amount) in tree.uses(network, Collective::AllReduce) {
            *uses.entry(resource).or_insert(0.0) += amount * tree.rate;
        }
    }
    uses
}

/// The same trees with rates that add up to `rate`, in the same proportions.
pub fn rated(trees: &[Tree], rate: f64) -> Vec<Tree> {
    let all: f64 = trees.iter().map(|tree| tree.rate).sum();
    trees.iter().map(|tree| Tree { rate: rate * tree.rate / all, ..tree.clone() }).collect()
}

/// Plans a job that may have `trees`, among others that cannot change the proportions of theirs.
/// Each of its rings uses one of the trees, and is limited by the rate of a ring there.
///
/// # Errors
/// If the solver fails.
pub fn incremental(
    network: &Network,
    others: &[Vec<Tree>],
    trees: &[Tree],
    rings: u32,
) -> Result<Incremental, Error> {
    let mut model = Model::new(network);
    let uses: Vec<_> = trees.iter().map(|tree| tree.uses(network, Collective::AllReduce)).collect();
    let mut free = BTreeMap::new();
    let mut vars: Vec<Vec<Var>> = Vec::new();
    for (job, trees) in others.iter().enumerate() {
        // All its rings have the rate of the slowest.
        let each = trees.iter().map(|tree| tree.ring_rate(network)).fold(f64::INFINITY, f64::min);
        free.insert(
            Resource::Rings(job),
            f64::from(trees.iter().map(|tree| tree.rings).sum::<u32>()),
        );
        let uses = together(network, trees)
            .into_iter()
            .chain([(Resource::Rings(job), 1.0 / each.max(1.0))]);
        vars.push(vec![model.var(uses)]);
    }
    let own = Resource::Rings(others.len());
    free.insert(own, f64::from(rings));
    // Rings for one byte per second; a box's aggregation rate may be 0.
    let parts: Vec<f64> = trees.iter().map(|tree| 1.0 / tree.ring_rate(network).max(1.0)).collect();
    let takes =
        uses.iter().zip(&parts).map(|(uses, part)| uses.clone().into_iter().chain([(own, *part)]));
    vars.push(takes.map(|takes| model.var(takes)).collect());
    let (mut shares, solution) = shares(&model.program(&free), &vec![0; vars.len()], &vars)?;
    let mine = vars.last().into_iter().flatten().zip(&parts);
    let busy: f64 = mine.map(|(var, part)| solution[*var] * part).sum();
    let needs_rings = busy > f64::from(rings) * (1.0 - 1e-6);
    let share = shares.pop().unwrap_or_default();
    let mut used: BTreeMap<Resource, f64> = BTreeMap::new();
    for (trees, share) in others.iter().zip(&shares) {
        let rated = rated(trees, *share);
        let rated: Vec<_> = rated.iter().map(|tree| (Collective::AllReduce, tree)).collect();
        for (resource, part) in load(network, &rated) {
            *used.entry(resource).or_insert(0.0) += part;
        }
    }
    let own = |resource: &Resource| {
        uses.len() == 1 || uses.iter().any(|uses| !uses.contains_key(resource))
    };
    let room = |uses: &BTreeMap<Resource, f64>| {
        let left = uses.iter().filter(|(resource, _)| own(resource)).map(|(resource, amount)| {
            let part = 1.0 - used.get(resource).copied().unwrap_or(0.0);
            network.capacity(*resource) * part.max(0.0) / amount
        });
        left.fold(f64::INFINITY, f64::min)
    };
    let residual = uses.iter().map(room).collect();
    Ok(Incremental { share, residual, others: shares, needs_rings })
}
