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

/// What a manager's jobs on boxes are known by.
pub const OURS: &str = "fabric ";

/// The token of a job on a box. Nobody joins there; it tells whose the job is.
pub fn token(job: &Job) -> String {
    OURS.to_owned() + job.spec.token.reveal()
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
        token: token(job),
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use netsum_core::membership::Join;
    use netsum_core::{Connection, Controller, PortInfo, RankAddress};

    use super::*;

    /// A job whose rank r is at port `ends[r]`, and has joined.
    fn joined(ends: &[&str], rings: usize) -> Controller {
        let mut controller = Controller::new(1 << 40, 2, Duration::from_secs(1));
        let port = |(i, name): (u32, &&str)| PortInfo { name: (*name).into(), ifindex: 1 + i, mtu: 1500 };
        controller.set_ports((0..).zip(ends).map(port).collect());
        let request = api::CreateJobRequest {
            name: "train".into(),
            ranks: ends.len() as u32,
            dtype: "i32".into(),
            mtu: 1024,
            message_size: 4096,
            window: 2,
            rings: rings as u32,
            icrc: "verify".into(),
            order: "auto".into(),
            token: "t".into(),
            tenant: "default".into(),
            ..api::CreateJobRequest::default()
        };
        controller.create_job(netsum_daemon::message::job_spec(request).unwrap()).unwrap();
        let now = Instant::now();
        for rank in 0..ends.len() as u32 {
            let connection = |n: u32| Connection {
                receive_qpn: 256 * rank + n,
                send_qpn: 256 * rank + n + 1,
                first_psn: rank,
            };
            let mac = [2, 0, 0, 0, 0, rank as u8];
            let address = RankAddress {
                rank: Rank(rank),
                ip: [10, 0, 0, rank as u8 + 1].into(),
                mac,
                rings: (0..rings as u32).map(|ring| connection(4 + 2 * ring)).collect(),
                plain: connection(200),
                any_ip_id: false,
                selective: true,
            };
            let join = Join {
                job: "train".into(),
                token: "t".into(),
                address,
                ifindex: 1 + rank,
                mac,
                epoch: 0,
                deadline: now + Duration::from_secs(1),
                waiter: rank.into(),
            };
            controller.join(join, now).unwrap();
        }
        controller
    }

    fn orders_of(ends: &[&str], rings: usize, links: &[(&str, &str)]) -> Result<Vec<Order>, String> {
        let controller = joined(ends, rings);
        let end = |text: &str| End::try_from(text.to_owned()).unwrap();
        let links: Vec<_> =
            links.iter().map(|(below, above)| Link { below: end(below), above: end(above) }).collect();
        orders(controller.job("train").unwrap(), &links, |port| ends.get(port as usize - 1).map(|e| end(e)))
    }

    /// Box, members, groups, uplink, and of ring 0 each flow's rank and port.
    fn said(order: &Order) -> (&str, [&str; 3], Vec<(u32, &str)>) {
        let flows = order.flows.iter().filter(|f| f.ring == 0).map(|f| (f.rank, &*f.port));
        (&order.at, [&order.job.members, &order.job.groups, &order.job.uplink], flows.collect())
    }

    const TWO: [(&str, &str); 2] = [("a/up", "s/1"), ("b/up", "s/2")];

    #[test]
    fn a_box_that_has_all_ranks_needs_no_other() {
        let orders = orders_of(&["a/1", "a/2", "a/3"], 2, &TWO).unwrap();
        let [order] = &orders[..] else { panic!("{orders:?}") };
        assert_eq!(said(order), ("a", [""; 3], vec![(0, "1"), (1, "2"), (2, "3")]));
        assert_eq!((order.flows.len(), &*order.job.order), (6, "relaxed"));
    }

    #[test]
    fn leaves_have_their_ranks_and_a_parent_has_groups() {
        let orders = orders_of(&["a/1", "a/2", "b/1", "b/2", "b/3"], 1, &TWO).unwrap();
        let said: Vec<_> = orders.iter().map(said).collect();
        let a = ("a", ["0-1", "", "up"], vec![(0, "1"), (1, "2"), (4, "up")]);
        let b = ("b", ["2-4", "", "up"], vec![(2, "1"), (3, "2"), (4, "3"), (1, "up")]);
        let s = ("s", ["", "0-1,2-4", ""], vec![(1, "1"), (4, "2")]);
        assert_eq!(said, [a, b, s]);
        let crossing = &orders[2].flows[0];
        assert_eq!((&*crossing.src, &*crossing.dst, crossing.qpn), ("10.0.0.2", "10.0.0.3", 2 * 256 + 4));
    }

    #[test]
    fn a_parent_may_have_ranks_itself() {
        let orders = orders_of(&["a/1", "a/2", "s/7", "b/1"], 1, &TWO).unwrap();
        let s = orders.iter().find(|o| o.at == "s").unwrap();
        assert_eq!(said(s), ("s", ["2", "0-1,3", ""], vec![(1, "1"), (2, "7"), (3, "2")]));
    }

    #[test]
    fn each_order_is_one_that_a_box_takes() {
        for ends in
            [&["a/1", "a/2", "b/1"][..], &["b/1", "a/1"], &["a/1", "s/9", "b/1"], &["s/8", "s/9", "b/1"]]
        {
            for order in orders_of(ends, 1, &TWO).unwrap() {
                let mut box_ = Controller::new(1 << 40, 2, Duration::from_secs(1));
                let names: BTreeSet<&str> = order
                    .flows
                    .iter()
                    .map(|f| &*f.port)
                    .chain((!order.job.uplink.is_empty()).then_some(&*order.job.uplink))
                    .collect();
                let port = |(i, name): (u32, &str)| PortInfo { name: name.into(), ifindex: i, mtu: 1500 };
                box_.set_ports((1..).zip(names).map(port).collect());
                let spec = netsum_daemon::message::job_spec(order.job.clone()).unwrap();
                box_.create_job(spec).unwrap_or_else(|e| panic!("{order:?}: {e}"));
                let count = box_.job("train").unwrap().spec.member_count();
                assert_eq!(count as usize, order.flows.len(), "{order:?}");
            }
        }
    }

    #[test]
    fn what_no_tree_does_is_refused_with_the_reason() {
        for (ends, links, why) in [
            (
                &["a/1", "b/1", "a/2"][..],
                &TWO[..],
                "box a has ranks 0 and 2: those below one box must follow each other",
            ),
            (&["a/1", "b/1"], &TWO[..1], "no box is above all of a, b: b has no link to s"),
            (&["a/1", "b/1"], &[], "no box is above another"),
        ] {
            let error = orders_of(ends, 1, links).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn where_two_boxes_are_above_all_the_other_one_does_when_a_link_is_down() {
        let links = [("a/up", "s/1"), ("b/up", "s/2"), ("a/up2", "t/1"), ("b/up2", "t/2")];
        let above = |links: &[_]| orders_of(&["a/1", "b/1"], 1, links).unwrap().pop().unwrap().at;
        assert_eq!((above(&links), above(&links[1..])), ("s".to_owned(), "t".to_owned()));
    }
}
