//! `netsum fabric job show`: a job's planned trees, and the load of their links.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use netsum_api::v1 as api;
use netsum_core::rate::Rate;
use netsum_plan::bound::bound;
use netsum_plan::incremental::{Incremental, incremental, rated};
use netsum_plan::topology::{Error, Network, Node, Resource, Topology};
use netsum_plan::tree::{self as planned, Collective, load};
use schemars::JsonSchema;
use serde::Serialize;

use super::failure::{Failure, Kind, Result};
use super::format::Format;
use super::layout::{self, Entry, FAIR, attribute, plain, styled};
use super::plan::{abbreviated, shape};
use super::print::name;
use super::print::speed;
use super::topology::{add_box, box_of, known};

/// A job of a fabric, its trees, and the plan for all current jobs.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Job {
    pub name: String,
    pub ranks: u32,
    /// null if no plan is possible.
    pub plan: Option<Plan>,
    /// Why no plan is possible.
    pub no_plan: Option<String>,
    /// As ordered from the boxes.
    pub trees: Vec<Tree>,
}

/// Rates of the job next to the others.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Plan {
    /// Its fair share in bytes per second.
    pub share: f64,
    /// Bound of the links, without other jobs.
    pub bound: f64,
    /// Bottlenecks among the links and CPUs of its trees.
    pub full: Vec<String>,
}

/// A tree.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Tree {
    /// The box that sums all ranks.
    pub root: String,
    /// How many of the job's rings use it.
    pub rings: u32,
    /// Its part of the job's bytes.
    pub part: f64,
    /// The part by the plan; null without a plan.
    pub planned: Option<f64>,
    /// From the boxes of its ranks to the root.
    pub links: Vec<Link>,
}

/// A link of a tree, with the traffic of all jobs.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Link {
    pub below: String,
    pub above: String,
    /// Bits per second; 0 if unknown.
    pub rate: u64,
    /// Bytes per second, between the manager's last two polls.
    pub up: u64,
    pub down: u64,
}

/// The port of each rank.
fn ports(job: &api::Job) -> BTreeMap<u32, &str> {
    job.flows.iter().map(|flow| (flow.rank, &*flow.port)).collect()
}

/// The network of all jobs' ranks.
fn network(fabric: &api::Fabric, jobs: &[api::Job]) -> Result<Network> {
    let mut topology = Topology::default();
    // A box that gets no rings is in no tree. Rings use only one of several links between two
    // boxes.
    let usable: BTreeSet<&str> =
        fabric.boxes.iter().filter(|b| b.answers && b.drain.is_none()).map(|b| &*b.name).collect();
    fabric.boxes.iter().for_each(|b| add_box(&mut topology, b));
    let mut links = BTreeMap::new();
    for link in fabric.links.iter().filter(|link| link.up) {
        let ends = [box_of(&link.below), box_of(&link.above)];
        if ends.iter().all(|of| usable.contains(of)) && !links.contains_key(&ends) {
            links
                .insert(ends, known(&format!("link {} to {}", link.below, link.above), link.rate)?);
        }
    }
    links.into_iter().for_each(|([below, above], rate)| topology.link(below, above, rate));
    // Ranks of several jobs on one port are one host: they share its link.
    let at: BTreeSet<&str> = jobs.iter().flat_map(|job| ports(job).into_values()).collect();
    for &end in &at {
        let rate = fabric.ports.iter().find(|port| port.port == end).map_or(0, |port| port.rate);
        if rate == 0 {
            return Err(Failure::new(Kind::Failed, format!("port {end}: its rate is not known")));
        }
        topology.host(end);
        topology.link(end, box_of(end), rate as f64);
    }
    Network::new(&topology).map_err(|e| Failure::new(Kind::Failed, e.to_string()))
}

/// The tree of a job's ranks below a box.
fn tree_at(network: &Network, job: &api::Job, root: &str, rings: u32) -> Option<planned::Tree> {
    let ends = ports(job);
    let boxes: BTreeSet<&str> =
        ends.values().map(|end| box_of(end)).filter(|of| *of != root).collect();
    let hosts = ends.values().map(|end| (*end, box_of(end)));
    let hop = |(child, parent): (&str, &str)| {
        let (child, parent) = (network.node(child)?, network.node(parent)?);
        network.edge(child, parent)?;
        Some(planned::Hop { child, parent, via: None })
    };
    let hops = hosts.chain(boxes.iter().map(|of| (*of, root))).map(hop).collect::<Option<_>>()?;
    Some(planned::Tree { root: network.node(root)?, hops, rate: rings.into(), rings })
}

impl Plan {
    /// Computes the job's share if it reconnected next to the others as they are, and the part of
    /// it at each box.
    fn new(
        fabric: &api::Fabric,
        jobs: &[api::Job],
        mine: &api::Job,
    ) -> Result<(Self, BTreeMap<String, f64>)> {
        let known_job = |of: &api::Job| fabric.jobs.iter().find(|job| job.name == of.name);
        let jobs: Vec<api::Job> =
            jobs.iter().filter(|job| known_job(job).is_some()).cloned().collect();
        let network = network(fabric, &jobs)?;
        let network = network.with_rings(shape(mine.mtu, mine.message_size, mine.window)?);
        let others = jobs.iter().filter(|job| job.name != mine.name).map(|job| {
            let trees = known_job(job).into_iter().flat_map(|job| &job.trees);
            trees.filter_map(|t| tree_at(&network, job, &t.root, t.rings)).collect::<Vec<_>>()
        });
        let mut all: Vec<Vec<planned::Tree>> = others.filter(|trees| !trees.is_empty()).collect();
        let boxes: BTreeSet<&str> = ports(mine).into_values().map(box_of).collect();
        let roots = fabric.boxes.iter().filter(|b| boxes.len() > 1 || boxes.contains(&*b.name));
        let mut trees: Vec<planned::Tree> =
            roots.filter_map(|b| tree_at(&network, mine, &b.name, 1)).collect();
        if trees.is_empty() {
            return Err(Failure::new(Kind::Failed, "no box is above all of its ranks'"));
        }
        let refused = |e: Error| Failure::new(Kind::Failed, e.to_string());
        let rings: u32 =
            known_job(mine).into_iter().flat_map(|job| &job.trees).map(|tree| tree.rings).sum();
        let found = incremental(&network, &all, &trees, rings).map_err(refused)?;
        let Incremental { share, others, residual, needs_rings } = found;
        let one = trees.len() == 1;
        trees
            .iter_mut()
            .zip(&residual)
            .for_each(|(tree, room)| tree.rate = if one { 1.0 } else { *room });
        let parts =
            rated(&trees, 1.0).iter().map(|t| (network.name(t.root).to_owned(), t.rate)).collect();
        all.push(trees);
        let shares = others.into_iter().chain([share]);
        let rated: Vec<_> =
            all.iter().zip(shares).flat_map(|(trees, share)| rated(trees, share)).collect();
        let rated: Vec<_> = rated.iter().map(|tree| (Collective::AllReduce, tree)).collect();
        let mut full: Vec<Resource> = load(&network, &rated)
            .into_iter()
            .take_while(|(_, load)| *load > 1.0 - 1e-6)
            .map(|(resource, _)| resource)
            .collect();
        full.sort_unstable();
        let uses: BTreeSet<Resource> = all
            .last()
            .into_iter()
            .flatten()
            .filter(|tree| tree.rate > 0.0)
            .flat_map(|tree| tree.uses(&network, Collective::AllReduce).into_keys())
            .collect();
        let full = full.into_iter().filter(|resource| uses.contains(resource));
        let members: Vec<Node> = network
            .hosts()
            .filter(|&host| ports(mine).values().any(|end| *end == network.name(host)))
            .collect();
        let rings = needs_rings.then(|| format!("the CPUs of {rings} rings"));
        let plan = Self {
            share,
            bound: bound(&network, Collective::AllReduce, &members),
            full: full.map(|resource| network.describe(resource)).chain(rings).collect(),
        };
        Ok((plan, parts))
    }
}

impl Job {
    fn new(fabric: &api::Fabric, jobs: &[api::Job], wanted: &str) -> Result<Self> {
        let missing = || Failure::new(Kind::NotFound, format!("job `{wanted}` does not exist"));
        let mine = jobs.iter().find(|job| job.name == wanted).ok_or_else(missing)?;
        let job = fabric.jobs.iter().find(|job| job.name == wanted);
        let trees = job.map_or(&[][..], |job| &job.trees);
        let planned = if trees.is_empty() {
            Err(Failure::new(
                Kind::Failed,
                "no boxes sum it: its ranks have not joined, or sum over the hosts' ring",
            ))
        } else {
            Plan::new(fabric, jobs, mine)
        };
        let rings: u32 = trees.iter().map(|tree| tree.rings).sum();
        let boxes: BTreeSet<&str> = ports(mine).into_values().map(box_of).collect();
        let tree = |tree: &api::FabricTree| Tree {
            root: tree.root.clone(),
            rings: tree.rings,
            part: f64::from(tree.rings) / f64::from(rings.max(1)),
            planned: planned
                .as_ref()
                .ok()
                .map(|(_, parts)| parts.get(&tree.root).copied().unwrap_or(0.0)),
            links: boxes.iter().filter_map(|of| link(fabric, of, &tree.root)).collect(),
        };
        let trees = trees.iter().map(tree).collect();
        let (plan, no_plan) = match planned {
            Ok((plan, _)) => (Some(plan), None),
            Err(why) => (None, Some(why.message)),
        };
        Ok(Self { name: wanted.to_owned(), ranks: mine.ranks, plan, no_plan, trees })
    }
}

/// The link that a box's rings use towards another.
fn link(fabric: &api::Fabric, below: &str, above: &str) -> Option<Link> {
    let is_it = |link: &&api::FabricLink| {
        link.up && box_of(&link.below) == below && box_of(&link.above) == above
    };
    let link = fabric.links.iter().find(is_it)?;
    let port = fabric.ports.iter().find(|port| port.port == link.below);
    let [up, down] = port.map_or([0; 2], |port| [port.tx_rate, port.rx_rate]);
    Some(Link { below: link.below.clone(), above: link.above.clone(), rate: link.rate, up, down })
}

fn carried(bytes: u64, rate: u64) -> String {
    let part = if rate == 0 {
        String::new()
    } else {
        format!(" ({:.0} %)", 800.0 * bytes as f64 / rate as f64)
    };
    speed(bytes as f64) + &part
}

/// Prints a job.
pub fn show(
    out: &mut impl Write,
    format: Format,
    fabric: &api::Fabric,
    jobs: Vec<api::Job>,
    wanted: &str,
) -> Result<()> {
    let job = Job::new(fabric, &jobs, wanted)?;
    if format.json(out, &job)? {
        return Ok(());
    }
    let mut head = vec![name(&job.name), attribute("ranks", job.ranks)];
    let mut full = None;
    match (&job.plan, &job.no_plan) {
        (Some(plan), _) => {
            head.push(attribute("share", speed(plan.share)));
            head.push(plain(format!("links allow {}", speed(plan.bound))));
            full = (!plan.full.is_empty()).then(|| attribute("full", abbreviated(&plan.full)));
        }
        (None, Some(why)) => head.push(styled(format!("no plan: {why}"), FAIR)),
        (None, None) => {}
    }
    let mut entry = Entry::new(head);
    entry.attributes(0, full.into_iter().collect());
    for tree in &job.trees {
        let mut cells = vec![
            attribute("tree at", &tree.root),
            attribute("rings", tree.rings),
            plain(format!("{:.0} % of the bytes", 100.0 * tree.part)),
        ];
        cells.extend(tree.planned.map(|part| plain(format!("planned {:.0} %", 100.0 * part))));
        entry.attributes(1, cells);
        for link in &tree.links {
            let rate = if link.rate == 0 { "?".to_owned() } else { Rate(link.rate).to_string() };
            entry.attributes(
                2,
                vec![
                    plain(format!("{} to {}", link.below, link.above)),
                    attribute("rate", rate),
                    attribute("up", carried(link.up, link.rate)),
                    attribute("down", carried(link.down, link.rate)),
                ],
            );
        }
    }
    Ok(layout::print(out, &[entry])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes on a link for each of a vector: 64 packets with headers, and check lanes.
    const WIRE: f64 = 64.0 * 1106.0 / 65460.0;

    /// Two leaves with two ranks each, two spines, the second one with links that are three times
    /// as fast.
    fn fabric() -> api::Fabric {
        let port = |port: &str, rate: u64, carries: u64| api::FabricPort {
            port: port.into(),
            up: true,
            rate,
            tx_rate: carries,
            rx_rate: carries / 2,
            ..api::FabricPort::default()
        };
        let link = |below: &str, above: &str, rate| api::FabricLink {
            below: below.into(),
            above: above.into(),
            up: true,
            rate,
            ..api::FabricLink::default()
        };
        let tree = |root: &str, rings| api::FabricTree { root: root.into(), rings };
        let box_ = |name: &str| api::FabricBox {
            name: name.into(),
            answers: true,
            ..api::FabricBox::default()
        };
        let host = |n| port(&format!("leaf{}/p{}", n / 2, n % 2), 10_000_000_000, 0);
        api::Fabric {
            boxes: ["leaf0", "leaf1", "spine0", "spine1"].map(box_).into(),
            links: vec![
                link("leaf0/u", "spine0/0", 1_000_000_000),
                link("leaf0/v", "spine1/0", 3_000_000_000),
                link("leaf1/u", "spine0/1", 1_000_000_000),
                link("leaf1/v", "spine1/1", 3_000_000_000),
            ],
            ports: (0..4)
                .map(host)
                .chain([port("leaf0/u", 0, 120_000_000), port("leaf0/v", 0, 370_000_000)])
                .collect(),
            jobs: vec![api::FabricJob {
                name: "train".into(),
                trees: vec![tree("spine0", 1), tree("spine1", 3)],
            }],
        }
    }

    fn job(name: &str) -> api::Job {
        let flow = |rank: u32| api::Flow {
            rank,
            port: format!("leaf{}/p{}", rank / 2, rank % 2),
            ..api::Flow::default()
        };
        api::Job {
            name: name.into(),
            ranks: 4,
            mtu: 1024,
            message_size: 65536,
            window: 8,
            flows: (0..4).map(flow).collect(),
            ..api::Job::default()
        }
    }

    fn text(fabric: &api::Fabric, jobs: Vec<api::Job>) -> String {
        let mut out = anstream::StripStream::new(Vec::new());
        show(&mut out, Format::Text, fabric, jobs, "train").unwrap();
        String::from_utf8(out.into_inner()).unwrap()
    }

    #[test]
    fn a_job_with_its_trees_as_text() {
        insta::assert_snapshot!(text(&fabric(), vec![job("train"), job("waits")]));
    }

    #[test]
    fn another_job_takes_its_share() {
        let mut fabric = fabric();
        let alone = Job::new(&fabric, &[job("train")], "train").unwrap().plan.unwrap();
        assert!((alone.share * WIRE - 5e8).abs() < 1e3, "{alone:?}");
        fabric.jobs.push(api::FabricJob { name: "other".into(), ..fabric.jobs[0].clone() });
        let incremental =
            Job::new(&fabric, &[job("train"), job("other")], "train").unwrap().plan.unwrap();
        assert!((incremental.share * WIRE - 2.5e8).abs() < 1e3, "{incremental:?}");
    }

    #[test]
    fn links_and_boxes_that_rings_do_not_use_are_in_no_plan() {
        let mut fabric = fabric();
        let twice = api::FabricLink { below: "leaf0/w".into(), ..fabric.links[1].clone() };
        fabric.links.push(twice);
        let share = |fabric: &api::Fabric| {
            Job::new(fabric, &[job("train")], "train").unwrap().plan.unwrap().share
        };
        assert!((share(&fabric) * WIRE - 5e8).abs() < 1e3, "a second link between two boxes");
        fabric.boxes[3].drain = Some("new fan".into());
        assert!((share(&fabric) * WIRE - 1.25e8).abs() < 1e3, "without spine1");
    }

    #[test]
    fn a_box_that_adds_slowly_limits_the_plan() {
        let mut fabric = fabric();
        // spine1 adds up two leaves: 150 MB/s of each, where its links would carry 375.
        fabric.boxes[3].aggregation_rate = Some(300_000_000);
        let expected = 1.25e8 / WIRE + 1.5e8 * 65460.0 / 65536.0;
        let plan = Job::new(&fabric, &[job("train")], "train").unwrap().plan.unwrap();
        assert!((plan.share - expected).abs() < 1e3, "{plan:?}");
        assert!(plan.full.contains(&"spine1's CPU".into()), "{plan:?}");
        // One CPU of four serves a ring, whose leaves each bring 10 MB/s there; the job has four
        // rings.
        (fabric.boxes[3].aggregation_rate, fabric.boxes[3].cpus) = (Some(80_000_000), Some(4));
        fabric.boxes[2].answers = false;
        let plan = Job::new(&fabric, &[job("train")], "train").unwrap().plan.unwrap();
        assert!((plan.share - 4e7 * 65460.0 / 65536.0).abs() < 1e3, "{plan:?}");
        (fabric.jobs[0].trees[0].rings, fabric.jobs[0].trees[1].rings) = (1, 1);
        let plan = Job::new(&fabric, &[job("train")], "train").unwrap().plan.unwrap();
        assert!((plan.share - 2e7 * 65460.0 / 65536.0).abs() < 1e3, "{plan:?}");
        assert!(plan.full.contains(&"the CPUs of 2 rings".into()), "{plan:?}");
    }

    #[test]
    fn without_rates_or_ranks_it_says_why_there_is_no_plan() {
        let mut fabric = fabric();
        fabric.links[0].rate = 0;
        let shown = text(&fabric, vec![job("train")]);
        assert!(
            shown.contains("no plan: link leaf0/u to spine0/0: its rate is not known"),
            "{shown}"
        );
        assert!(shown.contains("spine1"), "trees are there all the same: {shown}");
        fabric.jobs.clear();
        let shown = text(&fabric, vec![job("train")]);
        assert!(shown.contains("no plan: no boxes sum it: its ranks have not joined"), "{shown}");
        let error = Job::new(&fabric, &[], "train").unwrap_err();
        assert_eq!(error.message, "job `train` does not exist");
    }
}
