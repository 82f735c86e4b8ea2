//! A job beside others that keep their trees, and how these share its bytes out.

use std::collections::BTreeMap;

use crate::model::{Model, Var};
use crate::plan::shares;
use crate::topology::{Error, Network, Resource};
use crate::tree::{Collective, Tree, load};

/// What a job can have.
#[derive(Clone, Debug, PartialEq)]
pub struct Beside {
    /// Its max-min fair share, if it used its trees as is best: bytes in a second.
    pub share: f64,
    /// The others' fair shares.
    pub others: Vec<f64>,
    /// Bytes in a second that the others' fair shares leave it at each of its trees, by what is not common to all of them.
    pub rooms: Vec<f64>,
}

/// What one byte in a second takes that is shared out over trees in proportion to their rates.
fn together(network: &Network, trees: &[Tree]) -> BTreeMap<Resource, f64> {
    let mut uses = BTreeMap::new();
    for tree in rated(trees, 1.0) {
        for (resource, amount) in tree.uses(network, Collective::AllReduce) {
            *uses.entry(resource).or_insert(0.0) += amount * tree.rate;
        }
    }
    uses
}

/// Trees that do so much together, in proportion to their rates.
pub fn rated(trees: &[Tree], rate: f64) -> Vec<Tree> {
    let all: f64 = trees.iter().map(|tree| tree.rate).sum();
    trees.iter().map(|tree| Tree { rate: rate * tree.rate / all, ..tree.clone() }).collect()
}

/// Plans a job that may have `trees`, beside others that cannot change the proportions of theirs.
///
/// # Errors
/// If the solver gives up.
pub fn beside(network: &Network, others: &[Vec<Tree>], trees: &[Tree]) -> Result<Beside, Error> {
    let mut model = Model::new(network);
    let uses: Vec<_> = trees.iter().map(|tree| tree.uses(network, Collective::AllReduce)).collect();
    let mut vars: Vec<Vec<Var>> =
        others.iter().map(|trees| vec![model.var(together(network, trees))]).collect();
    vars.push(uses.iter().map(|uses| model.var(uses.clone())).collect());
    let (mut shares, _) = shares(&model.program(&BTreeMap::new()), &vec![0; vars.len()], &vars)?;
    let share = shares.pop().unwrap_or_default();
    let mut taken: BTreeMap<Resource, f64> = BTreeMap::new();
    for (trees, share) in others.iter().zip(&shares) {
        let rated = rated(trees, *share);
        let rated: Vec<_> = rated.iter().map(|tree| (Collective::AllReduce, tree)).collect();
        for (resource, part) in load(network, &rated) {
            *taken.entry(resource).or_insert(0.0) += part;
        }
    }
    let own = |resource: &Resource| uses.len() == 1 || uses.iter().any(|uses| !uses.contains_key(resource));
    let room = |uses: &BTreeMap<Resource, f64>| {
        let left = uses.iter().filter(|(resource, _)| own(resource)).map(|(resource, amount)| {
            let part = 1.0 - taken.get(resource).copied().unwrap_or(0.0);
            network.capacity(*resource) * part.max(0.0) / amount
        });
        left.fold(f64::INFINITY, f64::min)
    };
    Ok(Beside { share, rooms: uses.iter().map(room).collect(), others: shares })
}
