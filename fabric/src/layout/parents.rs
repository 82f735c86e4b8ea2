//! Which boxes are above all of a job's ranks, and which of its rings each sums.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use netsum_common::abi::MTU_OVERHEAD;
use netsum_core::Job;
use netsum_core::members::RankRange;

use super::Paths;
use crate::config::{End, Link};
use crate::share::{Candidate, Share};

/// A box above all boxes with ranks: the link from each to it, and the rings that it sums.
pub(super) struct Parent<'a> {
    pub name: String,
    pub links: BTreeMap<String, &'a Link>,
    pub rings: Range<u32>,
}

/// The parents, each with its share of the rings, in the order of their links, and the other
/// candidates; empty if one box has all ranks.
pub(super) fn parents<'a>(
    groups: &[(String, RankRange)],
    ends: &[End],
    paths: &'a Paths,
    share: Share<'_>,
    job: &Job,
) -> Result<(Vec<Parent<'a>>, Vec<Candidate>), String> {
    let links = &paths.links;
    if groups.len() == 1 {
        return Ok((Vec::new(), Vec::new()));
    }
    let mut parents: Vec<Parent<'a>> = Vec::new();
    let mut missing = Vec::new();
    let mut first: BTreeMap<(&String, &String), &Link> = BTreeMap::new();
    for link in links {
        if let Some(why) = too_small(link, paths, job.mtu()) {
            missing.push(why);
            continue;
        }
        first.entry((&link.below.of, &link.above.of)).or_insert(link);
    }
    let mut tried = BTreeSet::new();
    for name in links.iter().map(|link| &link.above.of).filter(|name| tried.insert(*name)) {
        let link = |of: &String| first.get(&(of, name)).copied();
        let others = groups.iter().map(|(of, _)| of).filter(|of| *of != name);
        match others.clone().find(|of| link(of).is_none()) {
            None if paths.closed.contains_key(name) => {
                missing.push(format!("{name} {}", paths.closed[name]));
            }
            None => {
                let links = others.filter_map(|of| Some((of.clone(), link(of)?))).collect();
                parents.push(Parent { name: name.clone(), links, rings: 0..0 });
            }
            Some(of) => missing.push(format!("{of} has no link to {name}")),
        }
    }
    let firsts = groups.iter().filter_map(|(of, _)| paths.first.get(of));
    let firsts: Vec<&Link> =
        firsts.filter(|link| groups.iter().all(|(of, _)| *of != link.above.of)).collect();
    if let Some(link) =
        firsts.iter().find(|link| parents.iter().all(|parent| parent.name != link.above.of))
        && !parents.is_empty()
    {
        return Err(format!(
            "unsummed packets reach {} at {}, so some rings must use {}: {}",
            link.below.of,
            link.below,
            link.above.of,
            if missing.is_empty() { "the link is down".to_owned() } else { missing.join("; ") }
        ));
    }
    let candidate = |parent: &Parent<'_>| Candidate {
        name: parent.name.clone(),
        rate: parent.rate(),
        is_needed: firsts.iter().any(|link| link.above.of == parent.name),
    };
    let candidates: Vec<Candidate> = parents.iter().map(candidate).collect();
    // Other jobs may use links that this job cannot.
    for link in links {
        first.entry((&link.below.of, &link.above.of)).or_insert(link);
    }
    let all: Vec<&Link> = first.into_values().collect();
    let mut next = 0;
    for (parent, share) in
        parents.iter_mut().zip(share.rings(job.spec.rings, &candidates, ends, &all))
    {
        parent.rings = next..next + share;
        next += share;
    }
    parents.retain(|parent| !parent.rings.is_empty());
    if parents.is_empty() {
        let boxes: Vec<&str> = groups.iter().map(|(of, _)| &**of).collect();
        let why = if missing.is_empty() {
            "no box is above another".to_owned()
        } else {
            missing.join("; ")
        };
        return Err(format!("no box is above all of {}: {why}", boxes.join(", ")));
    }
    Ok((parents, candidates))
}

impl Parent<'_> {
    /// Bits per second of the slowest link; 0 if none is known.
    fn rate(&self) -> u64 {
        self.links.values().filter_map(|link| link.rate).map(|rate| rate.0).min().unwrap_or(0)
    }
}

/// Why a link does not fit a path MTU.
fn too_small(link: &Link, paths: &Paths, mtu: u32) -> Option<String> {
    let [below, above] = [&link.below, &link.above].map(|end| paths.mtus.get(end).copied());
    let [below, above] = [below.or(above)?, above.or(below)?];
    let needed = mtu + MTU_OVERHEAD;
    (below.min(above) < needed).then(|| {
        format!(
            "link {} (MTU {below}) to {} (MTU {above}): a path MTU of {mtu} needs {needed} at both \
             ends",
            link.below, link.above
        )
    })
}
