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
            largest_mtu: 0,
            ports: [4791; 2],
        };
        let join = Join {
            job: "train".into(),
            token: "t".into(),
            address,
            ifindex: 1 + rank,
            mac,
            ranks: 0,
            epoch: 0,
            deadline: now + Duration::from_secs(1),
            waiter: rank.into(),
        };
        controller.join(join, now).unwrap();
    }
    controller
}

fn orders_of(ends: &[&str], rings: usize, links: &[(&str, &str)]) -> Result<Vec<Order>, String> {
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
fn summary(order: &Order) -> (&str, [&str; 3], Vec<(u32, &str)>) {
    let flows = order.flows.iter().filter(|f| f.ring == 0).map(|f| (f.rank, &*f.port));
    (&order.at, [&order.job.members, &order.job.groups, &order.job.uplink], flows.collect())
}

const TWO: [(&str, &str); 2] = [("a/up", "s/1"), ("b/up", "s/2")];

#[test]
fn a_box_that_has_all_ranks_needs_no_other() {
    let orders = orders_of(&["a/1", "a/2", "a/3"], 2, &TWO).unwrap();
    let [order] = &orders[..] else { panic!("{orders:?}") };
    assert_eq!(summary(order), ("a", [""; 3], vec![(0, "1"), (1, "2"), (2, "3")]));
    assert_eq!((order.flows.len(), &*order.job.order), (6, "relaxed"));
}

#[test]
fn leaves_have_their_ranks_and_a_parent_has_groups() {
    let orders = orders_of(&["a/1", "a/2", "b/1", "b/2", "b/3"], 1, &TWO).unwrap();
    let summaries: Vec<_> = orders.iter().map(summary).collect();
    let a = ("a", ["0-1", "", "up"], vec![(0, "1"), (1, "2"), (4, "up")]);
    let b = ("b", ["2-4", "", "up"], vec![(2, "1"), (3, "2"), (4, "3"), (1, "up")]);
    let s = ("s", ["", "0-1,2-4", ""], vec![(1, "1"), (4, "2")]);
    assert_eq!(summaries, [a, b, s]);
    let crossing = &orders[2].flows[0];
    assert_eq!(
        (&*crossing.src, &*crossing.dst, crossing.qpn),
        ("10.0.0.2", "10.0.0.3", 2 * 256 + 4)
    );
}

#[test]
fn ranks_below_one_box_are_neighbours_in_the_ring() {
    let orders = orders_of(&["b/1", "a/1", "b/2", "a/2", "b/3"], 1, &TWO).unwrap();
    let summaries: Vec<_> = orders.iter().map(summary).collect();
    // Ranks 0, 2, 4, 1, 3.
    let b = ("b", ["0-2", "", "up"], vec![(0, "1"), (2, "2"), (4, "3"), (3, "up")]);
    let a = ("a", ["3-4", "", "up"], vec![(1, "1"), (3, "2"), (4, "up")]);
    let s = ("s", ["", "0-2,3-4", ""], vec![(4, "2"), (3, "1")]);
    assert_eq!(summaries, [b, a, s]);
    assert!(orders.iter().all(|o| o.job.ring_order == "0,2,4,1,3"));
    let from_to: Vec<_> = orders[0].flows.iter().map(|f| (&*f.src, &*f.dst)).collect();
    let ip = |rank: usize| ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"][rank];
    assert_eq!(from_to, [(0, 2), (2, 4), (4, 1), (3, 0)].map(|(from, to)| (ip(from), ip(to))));
}

#[test]
fn a_parent_may_have_ranks_itself() {
    let orders = orders_of(&["a/1", "a/2", "s/7", "b/1"], 1, &TWO).unwrap();
    let s = orders.iter().find(|o| o.at == "s").unwrap();
    assert_eq!(summary(s), ("s", ["2", "0-1,3", ""], vec![(1, "1"), (2, "7"), (3, "2")]));
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
                    member: Rank(f.rank),
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
fn ranks_that_no_tree_joins_are_refused_with_the_reason() {
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
    assert_eq!(jobs, [("a", 3, "up=1,up2=2"), ("b", 3, "up=1,up2=2"), ("s", 1, ""), ("t", 2, "")]);
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
    let place =
        |port: u32| ends.get(port as usize - 1).map(|e| End::try_from((*e).to_owned()).unwrap());
    let layout = lay_out(joined(&ends, rings).job("train").unwrap(), paths, Share::Links, place)?;
    Ok(layout.placed.trees)
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
    let links = [("a/up", "s/1", 1), ("b/up", "s/2", 1), ("a/up2", "t/1", 9), ("b/up2", "t/2", 9)];
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
fn a_link_with_a_small_mtu_at_one_end_is_left_out() {
    let links = [("a/up", "s/1", 1), ("b/up", "s/2", 1), ("a/up2", "t/1", 1), ("b/up2", "t/2", 1)];
    let small = [("a/up", 9000), ("s/1", 1000)];
    assert_eq!(above(&paths_of(&links, &small), 2).unwrap(), [("t".to_owned(), 2)]);
    let error = above(&paths_of(&links[..2], &small), 2).unwrap_err();
    let why = "link a/up (MTU 9000) to s/1 (MTU 1000): a path MTU of 1024 needs 1108 at both ends";
    assert!(error.contains(why), "{error}");
}
