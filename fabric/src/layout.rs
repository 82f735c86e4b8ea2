//! Computes which box adds up what: from a job's ranks and their places to the orders for each box.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use netsum_api::v1 as api;
use netsum_common::abi::ring_flags;
use netsum_core::members::Group;
use netsum_core::plane::FlowSpec;
use netsum_core::{HEADROOM, Job, Rank};

use crate::config::{End, Link};
use crate::share::{AtWork, Candidate, Share};

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
    pub at_work: AtWork,
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
    job.flows.iter().for_each(|flow| flows.entry(flow.rank).or_default().push(flow));
    let mut ends = Vec::new();
    for rank in &ring {
        let flow = flows
            .get(rank)
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
        let of_rings =
            flows[&ring[rank as usize]].iter().map(message).filter(|f| rings.contains(&f.ring));
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
    Ok(Layout { orders, at_work: AtWork { ends, trees }, candidates, addresses })
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
fn groups(ends: &[End]) -> Result<Vec<(String, Group)>, String> {
    let mut groups: Vec<(String, Group)> = Vec::new();
    for (rank, end) in (0..).zip(ends) {
        match groups.last_mut() {
            Some((of, group)) if *of == end.of => group.last = rank,
            _ => groups.push((end.of.clone(), Group { first: rank, last: rank })),
        }
    }
    let mut names = BTreeSet::new();
    match groups.iter().find(|(of, _)| !names.insert(of)) {
        None => Ok(groups),
        Some((of, group)) => Err(format!("box {of}: ranks {group} do not follow the others there")),
    }
}

/// A box above all boxes with ranks: the link from each to it, and the rings that it sums.
struct Parent<'a> {
    name: String,
    links: BTreeMap<String, &'a Link>,
    rings: Range<u32>,
}

/// The parents, each with its share of the rings, in the order of their links, and the other
/// candidates; empty if one box has all ranks.
fn parents<'a>(
    groups: &[(String, Group)],
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
        if let Some(why) = too_small(link, paths, job.spec.mtu) {
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
    let needed = mtu + HEADROOM;
    (below.min(above) < needed).then(|| {
        format!(
            "link {} (MTU {below}) to {} (MTU {above}): a path MTU of {mtu} needs {needed} at both \
             ends",
            link.below, link.above
        )
    })
}

/// Prefix of the tokens of a manager's jobs on boxes.
pub const OURS: &str = "fabric ";

/// The token of a job on a box. Ranks do not join there; the token identifies the owner.
pub fn token(job: &Job) -> String {
    OURS.to_owned() + job.spec.token.reveal()
}

fn request(job: &Job, ring: &[Rank]) -> api::CreateJobRequest {
    let spec = &job.spec;
    // The joined ranks determine it.
    let relaxed = job.rings.first().is_some_and(|r| r.config.flags & ring_flags::RELAXED != 0);
    api::CreateJobRequest {
        name: spec.name.clone(),
        ranks: spec.ranks,
        mtu: spec.mtu,
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
        rank: flow.rank.0,
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
mod tests {
    use std::time::{Duration, Instant};

    use netsum_common::abi::RingNumber;
    use netsum_common::serial::{Psn, Qpn};
    use netsum_core::membership::Join;
    use netsum_core::rate::Rate;
    use netsum_core::{Connection, Controller, JobRing, PortInfo, RankAddress, State};

    use super::*;

    /// A job whose rank r is at port `ends[r]`, and has joined.
    fn joined(ends: &[&str], rings: usize) -> Controller {
        let mut controller = Controller::new(1 << 40, 2, Duration::from_secs(1));
        let port = |(i, name): (u32, &&str)| PortInfo {
            name: (*name).into(),
            ifindex: 1 + i,
            mtu: 1500,
            router: None,
        };
        controller.set_ports((0..).zip(ends).map(port).collect());
        let request = api::CreateJobRequest {
            name: "train".into(),
            ranks: ends.len() as u32,
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
        controller.create_job(netsum_controller::message::job_spec(request).unwrap()).unwrap();
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
                bypass: connection(200),
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

    fn orders_of(
        ends: &[&str],
        rings: usize,
        links: &[(&str, &str)],
    ) -> Result<Vec<Order>, String> {
        orders_without(&[], ends, rings, links)
    }

    fn orders_without(
        drained: &[&str],
        ends: &[&str],
        rings: usize,
        links: &[(&str, &str)],
    ) -> Result<Vec<Order>, String> {
        let controller = joined(ends, rings);
        let end = |text: &str| End::try_from(text.to_owned()).unwrap();
        let links = links
            .iter()
            .map(|(below, above)| Link { below: end(below), above: end(above), rate: None })
            .collect();
        let paths = Paths {
            links,
            first: HashMap::new(),
            mtus: HashMap::new(),
            closed: drained
                .iter()
                .map(|&name| (name.to_owned(), "is drained: new fan".to_owned()))
                .collect(),
        };
        let place = |port: u32| ends.get(port as usize - 1).map(|e| end(e));
        lay_out(controller.job("train").unwrap(), &paths, Share::Links, place)
            .map(|layout| layout.orders)
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
        assert_eq!(
            (&*crossing.src, &*crossing.dst, crossing.qpn),
            ("10.0.0.2", "10.0.0.3", 2 * 256 + 4)
        );
    }

    #[test]
    fn ranks_below_one_box_follow_each_other_in_the_ring_whatever_their_numbers() {
        let orders = orders_of(&["b/1", "a/1", "b/2", "a/2", "b/3"], 1, &TWO).unwrap();
        let said: Vec<_> = orders.iter().map(said).collect();
        // Ranks 0, 2, 4, 1, 3.
        let b = ("b", ["0-2", "", "up"], vec![(0, "1"), (2, "2"), (4, "3"), (3, "up")]);
        let a = ("a", ["3-4", "", "up"], vec![(1, "1"), (3, "2"), (4, "up")]);
        let s = ("s", ["", "0-2,3-4", ""], vec![(4, "2"), (3, "1")]);
        assert_eq!(said, [b, a, s]);
        assert!(orders.iter().all(|o| o.job.ring_order == "0,2,4,1,3"));
        let from_to: Vec<_> = orders[0].flows.iter().map(|f| (&*f.src, &*f.dst)).collect();
        let ip = |rank: usize| ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"][rank];
        assert_eq!(from_to, [(0, 2), (2, 4), (4, 1), (3, 0)].map(|(from, to)| (ip(from), ip(to))));
    }

    #[test]
    fn a_parent_may_have_ranks_itself() {
        let orders = orders_of(&["a/1", "a/2", "s/7", "b/1"], 1, &TWO).unwrap();
        let s = orders.iter().find(|o| o.at == "s").unwrap();
        assert_eq!(said(s), ("s", ["2", "0-1,3", ""], vec![(1, "1"), (2, "7"), (3, "2")]));
    }

    #[test]
    fn each_order_is_one_by_which_a_box_sums() {
        let places = [
            &["a/1", "a/2", "b/1"][..],
            &["b/1", "a/1"],
            &["a/1", "s/9", "b/1"],
            &["s/8", "b/1", "s/9"],
        ];
        for (ends, rings) in places.into_iter().flat_map(|ends| [(ends, 1), (ends, 3)]) {
            for order in orders_of(ends, rings, &FOUR).unwrap() {
                let mut box_ = Controller::new(1 << 40, 2, Duration::from_secs(1));
                let names: BTreeSet<&str> = order.flows.iter().map(|f| &*f.port).collect();
                let names: Vec<&str> = names.into_iter().collect();
                let port = |(i, name): (u32, &&str)| PortInfo {
                    name: (*name).into(),
                    ifindex: i,
                    mtu: 1500,
                    router: None,
                };
                box_.set_ports((1..).zip(&names).map(port).collect());
                let spec = netsum_controller::message::job_spec(order.job.clone()).unwrap();
                box_.create_job(spec).unwrap_or_else(|e| panic!("{order:?}: {e}"));
                for f in &order.flows {
                    let flow = FlowSpec {
                        ring: RingNumber::NONE,
                        rank: Rank(f.rank),
                        base_psn: Psn::new(f.psn),
                        ifindex: 1 + names.iter().position(|name| *name == f.port).unwrap() as u32,
                        src: f.src.parse().unwrap(),
                        dst: f.dst.parse().unwrap(),
                        qpn: Qpn::new(f.qpn),
                        src_mac: None,
                        group_mark: 0,
                    };
                    let added = box_.add_flow("train", JobRing(f.ring), flow);
                    added.unwrap_or_else(|e| panic!("{f:?} of {order:?}: {e}"));
                }
                assert_eq!(box_.job("train").unwrap().state, State::Active, "{order:?}");
            }
        }
    }

    #[test]
    fn what_no_tree_does_is_refused_with_the_reason() {
        for (ends, links, why) in [
            (&["a/1", "b/1"][..], &TWO[..1], "no box is above all of a, b: b has no link to s"),
            (&["a/1", "b/1"], &[], "no box is above another"),
        ] {
            let error = orders_of(ends, 1, links).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_box_that_is_drained_gets_nothing() {
        let at = |drained: &[_]| {
            let orders = orders_without(drained, &["a/1", "b/1"], 2, &FOUR)?;
            Ok::<_, String>(orders.into_iter().map(|o| (o.at, o.job.rings)).collect::<Vec<_>>())
        };
        let of = |name: &str, rings| (name.to_owned(), rings);
        assert_eq!(at(&["s"]).unwrap(), [of("a", 2), of("b", 2), of("t", 2)]);
        let why = "no box is above all of a, b: s is drained: new fan; t is drained: new fan";
        assert_eq!(at(&["s", "t"]).unwrap_err(), why);
        assert_eq!(at(&["b"]).unwrap_err(), "box b, which has ranks 1, is drained: new fan");
    }

    const FOUR: [(&str, &str); 4] =
        [("a/up", "s/1"), ("b/up", "s/2"), ("a/up2", "t/1"), ("b/up2", "t/2")];

    #[test]
    fn rings_spread_over_the_boxes_that_are_above_all() {
        let orders = orders_of(&["a/1", "b/1"], 3, &FOUR).unwrap();
        let jobs: Vec<_> = orders.iter().map(|o| (&*o.at, o.job.rings, &*o.job.uplink)).collect();
        assert_eq!(
            jobs,
            [("a", 3, "up=1,up2=2"), ("b", 3, "up=1,up2=2"), ("s", 1, ""), ("t", 2, "")]
        );
        // The second parent numbers the ranks' rings 1 and 2 from 0. Its flows are those that come
        // down its links.
        let of = |at: &str, port: &str| -> Vec<_> {
            let order = orders.iter().find(|o| o.at == at).unwrap();
            let flows = order.flows.iter().filter(|f| f.port == port);
            flows.map(|f| (f.ring, f.rank, f.qpn, f.psn)).collect()
        };
        assert_eq!(of("a", "up2"), [(1, 1, 6, 1), (2, 1, 8, 1)]);
        assert_eq!(of("t", "2"), [(0, 1, 6, 1), (1, 1, 8, 1)]);
        assert_eq!((of("a", "up"), of("s", "2")), (vec![(0, 1, 4, 1)], vec![(0, 1, 4, 1)]));
    }

    #[test]
    fn where_a_link_is_down_the_other_parents_have_all_rings() {
        let links = FOUR.map(|(below, above)| (below, above, 1));
        let above = |links: &[_]| above(&paths_of(links, &[]), 2).unwrap();
        let of = |name: &str, rings| (name.to_owned(), rings);
        assert_eq!(above(&links), [of("s", 1), of("t", 1)]);
        assert_eq!(above(&links[1..]), [of("t", 2)]);
        assert_eq!(above(&links[..3]), [of("s", 2)]);
    }

    fn paths_of(links: &[(&str, &str, u64)], mtus: &[(&str, u32)]) -> Paths {
        let end = |text: &str| End::try_from(text.to_owned()).unwrap();
        let link = |&(below, above, rate): &_| Link {
            below: end(below),
            above: end(above),
            rate: Some(Rate(rate)),
        };
        Paths {
            links: links.iter().map(link).collect(),
            first: HashMap::new(),
            mtus: mtus.iter().map(|(text, mtu)| (end(text), *mtu)).collect(),
            closed: BTreeMap::new(),
        }
    }

    fn above(paths: &Paths, rings: usize) -> Result<Vec<(String, u32)>, String> {
        let ends = ["a/1", "b/1"];
        let place = |port: u32| {
            ends.get(port as usize - 1).map(|e| End::try_from((*e).to_owned()).unwrap())
        };
        let layout =
            lay_out(joined(&ends, rings).job("train").unwrap(), paths, Share::Links, place)?;
        Ok(layout.at_work.trees)
    }

    #[test]
    fn a_parent_has_rings_by_its_slowest_link() {
        let links =
            [("a/up", "s/1", 40), ("b/up", "s/2", 10), ("a/up2", "t/1", 30), ("b/up2", "t/2", 30)];
        let above = above(&paths_of(&links, &[]), 4).unwrap();
        assert_eq!(above, [("s".to_owned(), 1), ("t".to_owned(), 3)]);
    }

    #[test]
    fn some_rings_go_by_the_link_that_a_bridge_uses() {
        let links =
            [("a/up", "s/1", 1), ("b/up", "s/2", 1), ("a/up2", "t/1", 9), ("b/up2", "t/2", 9)];
        let mut paths = paths_of(&links, &[]);
        let bridged: [Link; 2] = [paths.links[0].clone(), paths.links[1].clone()];
        paths.first = bridged.into_iter().map(|link| (link.below.of.clone(), link)).collect();
        assert_eq!(above(&paths, 1).unwrap(), [("s".to_owned(), 1)]);
        assert_eq!(above(&paths, 3).unwrap(), [("s".to_owned(), 1), ("t".to_owned(), 2)]);
        paths.closed.insert("s".into(), "does not answer".into());
        let why = "unsummed packets reach a at a/up, so some rings must use s: s does not answer";
        assert_eq!(above(&paths, 3).unwrap_err(), why);
        paths.links.drain(..2);
        assert!(above(&paths, 3).unwrap_err().ends_with("use s: the link is down"));
    }

    #[test]
    fn a_link_with_too_small_an_mtu_at_one_end_is_left_out_and_said_with_both() {
        let links =
            [("a/up", "s/1", 1), ("b/up", "s/2", 1), ("a/up2", "t/1", 1), ("b/up2", "t/2", 1)];
        let small = [("a/up", 9000), ("s/1", 1000)];
        assert_eq!(above(&paths_of(&links, &small), 2).unwrap(), [("t".to_owned(), 2)]);
        let error = above(&paths_of(&links[..2], &small), 2).unwrap_err();
        let why =
            "link a/up (MTU 9000) to s/1 (MTU 1000): a path MTU of 1024 needs 1108 at both ends";
        assert!(error.contains(why), "{error}");
    }
}
