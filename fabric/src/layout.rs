//! Which box adds up what: a job's ranks and where they are go in, what each box is to be told comes out.

use std::collections::{BTreeMap, BTreeSet};

use netsum_api::v1 as api;
use netsum_common::abi::ring_flags;
use netsum_core::members::Group;
use netsum_core::plane::FlowSpec;
use netsum_core::{Job, Rank};

use crate::config::{End, Link};

/// What a box is to do for a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    /// Name of the box.
    pub at: String,
    pub job: api::CreateJobRequest,
    pub flows: Vec<api::Flow>,
}

/// What a job needs of the boxes. `place` knows a port by its number here.
///
/// # Errors
/// Why no tree of boxes does.
pub fn orders(job: &Job, links: &[Link], place: impl Fn(u32) -> Option<End>) -> Result<Vec<Order>, String> {
    let ranks = job.spec.ranks;
    let first = job.rings.first().ok_or("no ring")?.id;
    let mut ends = Vec::new();
    for rank in Rank::all(ranks) {
        let flow = job.flows.iter().find(|f| f.ring == first && f.rank == rank);
        let flow = flow.ok_or_else(|| format!("rank {rank}: it has no flow"))?;
        ends.push(place(flow.ifindex).ok_or_else(|| format!("rank {rank}: its port is gone"))?);
    }
    let groups = groups(&ends)?;
    let parent = parent(&groups, links)?;
    let order = |at: &str| Order { at: at.to_owned(), job: request(job), flows: Vec::new() };
    let flows_of = |rank: u32, port: &str| {
        let flows = job.flows.iter().filter(move |f| f.rank.0 == rank);
        let port = port.to_owned();
        flows.map(move |flow| flow_message(job, flow, &port))
    };
    let mut orders = Vec::new();
    let mut above = parent.as_ref().map(|(at, _)| order(at));
    let mut below = Vec::new();
    for (name, group) in &groups {
        let own = || (group.first..=group.last).flat_map(|rank| flows_of(rank, &ends[rank as usize].port));
        let link = parent.as_ref().and_then(|(_, links)| links.get(name));
        match (&mut above, link) {
            (Some(parent), Some(link)) => {
                below.push(group.to_string());
                parent.flows.extend(flows_of(group.last, &link.above.port));
                let mut leaf = order(name);
                leaf.job.members = group.to_string();
                leaf.job.uplink.clone_from(&link.below.port);
                leaf.flows.extend(own());
                leaf.flows.extend(flows_of((group.first + ranks - 1) % ranks, &link.below.port));
                orders.push(leaf);
            }
            (Some(parent), None) => {
                parent.job.members = group.to_string();
                parent.flows.extend(own());
            }
            (None, _) => {
                let mut alone = order(name);
                alone.flows.extend(own());
                orders.push(alone);
            }
        }
    }
    // Its flows come last: leaves are ready before it is.
    orders.extend(above.map(|mut parent| {
        parent.job.groups = below.join(",");
        parent
    }));
    Ok(orders)
}

/// The ranks below each box, in their order.
fn groups(ends: &[End]) -> Result<Vec<(String, Group)>, String> {
    let mut groups: Vec<(String, Group)> = Vec::new();
    for (rank, end) in (0..).zip(ends) {
        match groups.last_mut() {
            Some((of, group)) if *of == end.of => group.last = rank,
            _ => groups.push((end.of.clone(), Group { first: rank, last: rank })),
        }
    }
    let names: BTreeSet<&String> = groups.iter().map(|(of, _)| of).collect();
    let twice = names.into_iter().find(|name| groups.iter().filter(|(of, _)| of == *name).count() > 1);
    match twice {
        None => Ok(groups),
        Some(name) => {
            let parts: Vec<String> =
                groups.iter().filter(|(of, _)| of == name).map(|(_, group)| group.to_string()).collect();
            Err(format!(
                "box {name} has ranks {}: those below one box must follow each other; start the ranks in the order of their racks",
                parts.join(" and ")
            ))
        }
    }
}

/// A box above all those that have ranks, and each one's link to it; `None` where one box has them all.
#[expect(clippy::type_complexity, reason = "one caller")]
fn parent<'a>(
    groups: &[(String, Group)],
    links: &'a [Link],
) -> Result<Option<(String, BTreeMap<String, &'a Link>)>, String> {
    if groups.len() == 1 {
        return Ok(None);
    }
    let names: BTreeSet<&String> = links.iter().map(|link| &link.above.of).collect();
    let mut missing = String::from("no box is above another");
    for name in names {
        let link = |of: &String| links.iter().find(|l| l.below.of == *of && l.above.of == *name);
        let others = groups.iter().map(|(of, _)| of).filter(|of| *of != name);
        match others.clone().find(|of| link(of).is_none()) {
            None => {
                let found = others.filter_map(|of| Some((of.clone(), link(of)?)));
                return Ok(Some((name.clone(), found.collect())));
            }
            Some(of) => missing = format!("{of} has no link to {name}"),
        }
    }
    let boxes: Vec<&str> = groups.iter().map(|(of, _)| &**of).collect();
    Err(format!("no box is above all of {}: {missing}", boxes.join(", ")))
}

fn request(job: &Job) -> api::CreateJobRequest {
    let spec = &job.spec;
    // The ranks that have joined decide it.
    let relaxed = job.rings.first().is_some_and(|r| r.config.flags & ring_flags::RELAXED != 0);
    api::CreateJobRequest {
        name: spec.name.clone(),
        ranks: spec.ranks,
        dtype: spec.dtype.clone(),
        mtu: spec.mtu,
        message_size: spec.message_size.into(),
        window: spec.window.0,
        rings: spec.rings,
        icrc: if spec.verify_icrc { "verify" } else { "ignore" }.into(),
        order: if relaxed { "relaxed" } else { "in-order" }.into(),
        tenant: spec.tenant.clone(),
        ..api::CreateJobRequest::default()
    }
}

fn flow_message(job: &Job, flow: &FlowSpec, port: &str) -> api::Flow {
    api::Flow {
        ring: job.job_ring(flow.ring).map_or(0, |ring| ring.0),
        rank: flow.rank.0,
        port: port.to_owned(),
        src: flow.src.to_string(),
        dst: flow.dst.to_string(),
        qpn: flow.qpn.get(),
        psn: flow.base_psn.get(),
        src_mac: flow.src_mac.map(netsum_daemon::message::mac_text).unwrap_or_default(),
        seen: None,
    }
}
