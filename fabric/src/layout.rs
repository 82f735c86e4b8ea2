//! Computes which box adds up what: from a job's ranks and their places to the orders for each box.

mod parents;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use netsum_api::v1 as api;
use netsum_common::abi::ring_flags;
use netsum_core::members::RankRange;
use netsum_core::plane::FlowSpec;
use netsum_core::{Job, Rank};

use self::parents::{Parent, parents};
use crate::config::{End, Link};
use crate::share::{Candidate, PlacedJob, Share};

/// An order to a box for a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    /// Name of the box.
    pub at: String,
    pub job: api::CreateJobRequest,
    pub flows: Vec<api::Flow>,
}

/// The links and boxes that rings can use.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    pub links: Vec<Link>,
    /// Each box's first uplink, idle or not. The box's bridge sends unsummed packets to it. A
    /// box accepts packets of ranks in other racks only at the port that their rings use, so some
    /// rings must use this one.
    pub first: HashMap<String, Link>,
    /// MTUs of the links' ends, as far as known.
    pub mtus: HashMap<End, u32>,
    /// Boxes that rings cannot use, with the reason as text that follows the name.
    pub closed: BTreeMap<String, String>,
}

/// How a job is laid out over the boxes.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    pub orders: Vec<Order>,
    pub placed: PlacedJob,
    /// The possible parents.
    pub candidates: Vec<Candidate>,
    /// Its ranks' IP and MAC addresses, and their ports.
    pub addresses: BTreeMap<String, End>,
}

impl Paths {
    /// The port at which a box's bridge sends to hosts below another box.
    pub fn towards(&self, at: &str, below: &str) -> Option<&str> {
        let up = |link: &&Link| self.first.get(&link.above.of);
        let mut links = std::iter::successors(self.first.get(below), up).take(self.first.len());
        let down = links.find(|link| link.above.of == at).map(|link| &*link.above.port);
        down.or_else(|| self.first.get(at).map(|link| &*link.below.port))
    }
}

/// Lays a job out over the boxes. `place` maps a port's number here to the port.
///
/// # Errors
/// Why no tree of boxes sums it.
pub fn lay_out(
    job: &Job,
    paths: &Paths,
    share: Share<'_>,
    place: impl Fn(u32) -> Option<End>,
) -> Result<Layout, String> {
    let ranks = job.spec.ranks;
    let ring =
        job.epoch.as_ref().map_or_else(|| Rank::all(ranks).collect(), |epoch| epoch.ring.clone());
    let mut flows: BTreeMap<Rank, Vec<&FlowSpec>> = BTreeMap::new();
    job.flows.iter().for_each(|flow| flows.entry(flow.member).or_default().push(flow));
    let mut ends = Vec::new();
    for (place_in_ring, rank) in Rank::all(ranks).zip(&ring) {
        let flow = flows
            .get(&place_in_ring)
            .and_then(|of| of.first())
            .ok_or_else(|| format!("rank {rank}: it has no flow"))?;
        ends.push(place(flow.ifindex).ok_or_else(|| format!("rank {rank}: its port was removed"))?);
    }
    let groups = groups(&ends)?;
    if let Some((name, group)) = groups.iter().find(|(name, _)| paths.closed.contains_key(name)) {
        return Err(format!("box {name}, which has ranks {group}, {}", paths.closed[name]));
    }
    let (parents, candidates) = parents(&groups, &ends, paths, share, job)?;
    let order = |at: &str| Order { at: at.to_owned(), job: request(job, &ring), flows: Vec::new() };
    // A box numbers the job's rings from 0.
    let flows_of = |rank: u32, rings: &Range<u32>, first: u32, port: &str| -> Vec<api::Flow> {
        let message = |flow: &&FlowSpec| flow_message(job, flow, port);
        let of_rings = flows[&Rank(rank)].iter().map(message).filter(|f| rings.contains(&f.ring));
        of_rings.map(|f| api::Flow { ring: f.ring - first, ..f }).collect()
    };
    let all = 0..job.spec.rings;
    let mut orders = Vec::new();
    for (name, group) in &groups {
        let before = (group.first + ranks - 1) % ranks;
        let mut leaf = order(name);
        leaf.flows.extend(
            (group.first..=group.last).flat_map(|r| flows_of(r, &all, 0, &ends[r as usize].port)),
        );
        let mut ups = Vec::new();
        for Parent { links, rings, .. } in &parents {
            let Some(link) = links.get(name) else { continue };
            ups.push((&*link.below.port, rings.len()));
            leaf.flows.extend(flows_of(before, rings, 0, &link.below.port));
        }
        if !ups.is_empty() {
            leaf.job.members = group.to_string();
            leaf.job.uplink = uplinks(&ups);
        }
        // A parent with ranks of its own has one order.
        if parents.iter().all(|parent| parent.name != *name) {
            orders.push(leaf);
        }
    }
    // Leaves come first: they must be ready before their parents.
    for Parent { name, links, rings } in &parents {
        let mut parent = order(name);
        let mut below = Vec::new();
        for (of, group) in &groups {
            if let Some(link) = links.get(of) {
                below.push(group.to_string());
                parent.flows.extend(flows_of(group.last, rings, rings.start, &link.above.port));
            } else {
                parent.job.members = group.to_string();
                let own = group.first..=group.last;
                parent.flows.extend(
                    own.flat_map(|r| flows_of(r, rings, rings.start, &ends[r as usize].port)),
                );
            }
        }
        (parent.job.rings, parent.job.groups) = (rings.len() as u32, below.join(","));
        orders.push(parent);
    }
    let tops = orders.iter().filter(|o| orders.len() == 1 || !o.job.groups.is_empty());
    let trees = tops.map(|o| (o.at.clone(), o.job.rings)).collect();
    let mut addresses = BTreeMap::new();
    for flow in &job.flows {
        let mac = flow.src_mac.map(netsum_controller::message::mac_text);
        for (address, end) in [flow.src.to_string()]
            .into_iter()
            .chain(mac)
            .zip(std::iter::repeat(place(flow.ifindex)))
        {
            end.map(|end| addresses.insert(address, end));
        }
    }
    Ok(Layout { orders, placed: PlacedJob { ends, trees }, candidates, addresses })
}

/// A job's trees, from an order to a box that has ranks of it: by the ports towards parents.
pub fn trees_by(at: &str, job: &api::Job, links: &[Link]) -> Option<Vec<(String, u32)>> {
    let tree = |part: &str| {
        let (port, rings) = part
            .split_once('=')
            .map_or((part, Some(job.rings)), |(port, n)| (port, n.parse().ok()));
        let link = links.iter().find(|link| link.below.of == at && link.below.port == port)?;
        Some((link.above.of.clone(), rings?))
    };
    job.uplink.split(',').map(tree).collect()
}

/// Ports towards parents; if there are several, each with its number of rings.
fn uplinks(ups: &[(&str, usize)]) -> String {
    match ups {
        [(port, _)] => (*port).to_owned(),
        ups => {
            ups.iter().map(|(port, rings)| format!("{port}={rings}")).collect::<Vec<_>>().join(",")
        }
    }
}

/// The ranks below each box, by their places in the ring.
fn groups(ends: &[End]) -> Result<Vec<(String, RankRange)>, String> {
    let mut groups: Vec<(String, RankRange)> = Vec::new();
    for (rank, end) in (0..).zip(ends) {
        match groups.last_mut() {
            Some((of, group)) if *of == end.of => group.last = rank,
            _ => groups.push((end.of.clone(), RankRange { first: rank, last: rank })),
        }
    }
    let mut names = BTreeSet::new();
    match groups.iter().find(|(of, _)| !names.insert(of)) {
        None => Ok(groups),
        Some((of, group)) => Err(format!("box {of}: ranks {group} do not follow the others there")),
    }
}

/// Prefix of the tokens of a manager's jobs on boxes.
pub const TOKEN_PREFIX: &str = "fabric ";

/// The token of a job on a box. Ranks do not join there; the token identifies the owner.
pub fn token(job: &Job) -> String {
    TOKEN_PREFIX.to_owned() + job.spec.token.reveal()
}

fn request(job: &Job, ring: &[Rank]) -> api::CreateJobRequest {
    let spec = &job.spec;
    // The joined ranks determine it.
    let relaxed = job.rings.first().is_some_and(|r| r.config.flags & ring_flags::RELAXED != 0);
    api::CreateJobRequest {
        name: spec.name.clone(),
        ranks: spec.ranks,
        mtu: job.mtu(),
        message_size: spec.message_size.into(),
        window: spec.window.0,
        rings: spec.rings,
        icrc: if spec.verify_icrc { "verify" } else { "ignore" }.into(),
        order: if relaxed { "relaxed" } else { "in-order" }.into(),
        tenant: spec.tenant.clone(),
        token: token(job),
        ring_order: if ring.is_sorted() {
            String::new()
        } else {
            ring.iter().map(Rank::to_string).collect::<Vec<_>>().join(",")
        },
        ..api::CreateJobRequest::default()
    }
}

fn flow_message(job: &Job, flow: &FlowSpec, port: &str) -> api::Flow {
    api::Flow {
        ring: job.job_ring(flow.ring).map_or(0, |ring| ring.0),
        rank: job.sender(flow.member).0,
        port: port.to_owned(),
        src: flow.src.to_string(),
        dst: flow.dst.to_string(),
        qpn: flow.qpn.get(),
        psn: flow.base_psn.get(),
        src_mac: flow.src_mac.map(netsum_controller::message::mac_text).unwrap_or_default(),
        seen: None,
    }
}

#[cfg(test)]
mod tests;
