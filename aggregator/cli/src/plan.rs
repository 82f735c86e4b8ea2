//! `netsum plan`.

use std::io::Write;

use netsum_common::abi::Messages;
use netsum_core::cost::Cost;
use netsum_plan::draw;
use netsum_plan::plan::{Job, plan};
use netsum_plan::topology::{Error, Network, Shape, Topology};
use netsum_plan::tree::{self, Collective, Tree as Planned};
use schemars::JsonSchema;
use serde::Serialize;

use super::args::PlanArgs;
use super::failure::{Failure, Kind, Result};
use super::format::Format;
use super::layout::{Entry, attribute, plain};
use super::print::{name, speed};

/// The planned jobs.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Plans {
    pub jobs: Vec<Plan>,
}

/// A planned job.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Plan {
    pub name: String,
    /// How many hosts it has.
    pub hosts: usize,
    /// Bytes that it sums per second, over all trees.
    pub rate: f64,
    /// Rings of all its trees: `netsum job create --rings`.
    pub rings: u32,
    /// Its fair share of links and CPUs, which more trees and rings would reach.
    pub share: f64,
    /// Bound of the links, without other jobs and without CPUs.
    pub bound: f64,
    /// Seconds until all its bytes are summed; null if it gets nothing.
    pub seconds: Option<f64>,
    /// Bottlenecks among the links and CPUs of its trees; boxes first.
    pub full: Vec<String>,
    pub trees: Vec<Tree>,
}

/// A tree.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Tree {
    pub root: String,
    /// Bytes that it sums per second.
    pub rate: f64,
    /// How many of the job's rings use it.
    pub rings: u32,
    /// How many of the job's bytes use it.
    pub bytes: u64,
    pub hops: Vec<Hop>,
}

/// A hop of a tree.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Hop {
    pub from: String,
    /// The node above it.
    pub to: String,
    /// A plain switch between them.
    pub via: Option<String>,
}

pub fn run(args: &PlanArgs, format: Format, out: &mut impl Write) -> Result<()> {
    if (args.dot || args.svg) && format != Format::Text {
        return Err(Failure::new(Kind::Usage, "--dot and --svg do not print JSON"));
    }
    let file = args.topology.display();
    let text = std::fs::read_to_string(&args.topology)
        .map_err(|e| Failure::new(Kind::Failed, format!("cannot read {file}: {e}")))?;
    let refused = |e: Error| match e {
        Error::Topology(why) => Failure::new(Kind::Failed, format!("{file}: {why}")),
        e => Failure::new(Kind::Refused, e.to_string()),
    };
    let network = Topology::parse(&text).and_then(|t| Network::new(&t)).map_err(refused)?;
    let message_size = u32::try_from(args.message_size.0).unwrap_or(u32::MAX);
    let network = network.with_rings(shape(args.mtu, message_size, args.window)?);
    let whole = ["all=*".to_owned()];
    let wanted = if args.jobs.is_empty() { &whole[..] } else { &args.jobs };
    let jobs = wanted.iter().map(|text| job(&network, text)).collect::<Result<Vec<_>>>()?;
    let plans = plan(&network, &jobs).map_err(refused)?;
    if args.dot || args.svg {
        let trees: Vec<&Planned> = plans.iter().flat_map(|plan| &plan.trees).collect();
        let picture = if args.dot { draw::dot } else { draw::svg };
        return Ok(write!(out, "{}", picture(&network, &trees))?);
    }
    let view = |(job, plan): (&Job, &netsum_plan::plan::Plan)| {
        let rates: Vec<f64> = plan.trees.iter().map(|tree| tree.rate).collect();
        // All rings have equally many bytes, so all wait for those with the longest path.
        let late = plan.trees.iter().map(|tree| tree.round_trip(&network)).fold(0.0, f64::max);
        let (seconds, bytes) = tree::split(&rates, &vec![late; rates.len()], args.bytes.0 as f64);
        Plan {
            name: job.name.clone(),
            hosts: job.members.len(),
            rate: plan.rate(),
            rings: plan.trees.iter().map(|tree| tree.rings).sum(),
            share: plan.share,
            bound: plan.bound,
            seconds: seconds.is_finite().then_some(seconds),
            full: plan.full.iter().map(|resource| network.describe(*resource)).collect(),
            trees: plan
                .trees
                .iter()
                .zip(bytes)
                .map(|(tree, bytes)| view(&network, tree, bytes))
                .collect(),
        }
    };
    show(out, format, &Plans { jobs: jobs.iter().zip(&plans).map(view).collect() })
}

/// Demand of rings of jobs with these properties.
pub fn shape(mtu: u32, message_size: u32, window: u32) -> Result<Shape> {
    let cost = Cost::new(mtu, message_size, Messages(window));
    let Cost { wire, added, window, slots, slots_per_member, rings, members } =
        cost.map_err(|e| Failure::new(Kind::Refused, e.to_string()))?;
    let [slots, slots_per_member] = [slots, slots_per_member].map(|bytes| bytes as f64);
    Ok(Shape { wire, added, window, slots, slots_per_member, rings, members })
}

/// `train=h0,h1@1`.
fn job(network: &Network, text: &str) -> Result<Job> {
    let usage = |why: String| Failure::new(Kind::Usage, format!("--job {text}: {why}"));
    let (job, rest) = text.split_once('=').ok_or_else(|| usage("must be JOB=HOST,..".into()))?;
    let (hosts, priority) = match rest.split_once('@') {
        Some((hosts, priority)) => (
            hosts,
            priority
                .parse()
                .map_err(|_| usage(format!("priority `{priority}` is not a number")))?,
        ),
        None => (rest, 0),
    };
    let members = if hosts == "*" {
        network.hosts().collect()
    } else {
        let node = |host| {
            let missing = || {
                Failure::new(
                    Kind::NotFound,
                    format!("--job {text}: `{host}` is not in the network"),
                )
            };
            network.node(host).ok_or_else(missing)
        };
        hosts.split(',').map(node).collect::<Result<_>>()?
    };
    Ok(Job { name: job.into(), members, priority, collective: Collective::AllReduce })
}

fn view(network: &Network, tree: &Planned, bytes: f64) -> Tree {
    let name = |node| network.name(node).to_owned();
    let hop = |hop: &tree::Hop| Hop {
        from: name(hop.child),
        to: name(hop.parent),
        via: hop.via.map(name),
    };
    Tree {
        root: name(tree.root),
        rate: tree.rate,
        rings: tree.rings,
        bytes: bytes.round() as u64,
        hops: tree.hops.iter().map(hop).collect(),
    }
}

/// The first few, and how many more there are.
pub fn abbreviated(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let more = names.len().saturating_sub(SHOWN);
    let first = names[..names.len() - more].join(", ");
    if more == 0 { first } else { format!("{first} and {more} more") }
}

fn show(out: &mut impl Write, format: Format, plans: &Plans) -> Result<()> {
    format.show(out, plans, &plans.jobs, |plan| {
        let gap = 100.0 * (1.0 - plan.rate / plan.bound);
        let mut entry = Entry::new(vec![
            name(&plan.name),
            attribute("hosts", plan.hosts),
            attribute("rings", plan.rings),
            attribute("rate", speed(plan.rate)),
            attribute("share", speed(plan.share)),
            plain(format!("links allow {}, gap {gap:.1} %", speed(plan.bound))),
        ]);
        match plan.seconds {
            Some(seconds) => entry.attributes(
                0,
                vec![
                    attribute("time", format!("{:.3} ms", seconds * 1e3)),
                    attribute("full", abbreviated(&plan.full)),
                ],
            ),
            None if plan.full.is_empty() => {
                entry.attributes(1, vec![plain("jobs of a higher priority leave it nothing")]);
            }
            None => entry.attributes(
                1,
                vec![plain("a ring does not fit"), attribute("full", abbreviated(&plan.full))],
            ),
        }
        for tree in &plan.trees {
            let bytes = netsum_common::size::Size(tree.bytes);
            entry.attributes(
                2,
                vec![
                    attribute("tree at", &tree.root),
                    attribute("rings", tree.rings),
                    attribute("rate", speed(tree.rate)),
                    attribute("bytes", bytes),
                ],
            );
            let mut parents: Vec<&str> = tree.hops.iter().map(|hop| &*hop.to).collect();
            parents.sort_unstable();
            parents.dedup();
            // From the root down, as far as there is something below.
            parents.sort_by_key(|parent| *parent != tree.root);
            for parent in parents {
                let below: Vec<String> = tree
                    .hops
                    .iter()
                    .filter(|hop| hop.to == parent)
                    .map(|hop| hop.from.clone())
                    .collect();
                entry.attributes(3, vec![plain(format!("{parent} sums {}", abbreviated(&below)))]);
            }
        }
        entry
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(jobs: &[&str], dot: bool) -> Result<String> {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../plan/examples/two-racks.toml");
        let jobs = jobs.iter().map(|&job| job.into()).collect();
        let bytes = netsum_common::size::Size(64 << 20);
        let (mtu, message_size, window) = (1024, netsum_common::size::Size(64 << 10), 8);
        let args = PlanArgs {
            topology: file.into(),
            jobs,
            mtu,
            message_size,
            window,
            bytes,
            dot,
            svg: false,
        };
        let mut out = anstream::StripStream::new(Vec::new());
        run(&args, Format::Text, &mut out)?;
        Ok(String::from_utf8(out.into_inner()).unwrap())
    }

    #[test]
    fn a_plan_as_text() {
        insta::assert_snapshot!(
            planned(&["train=a1,a2,b1,b2", "eval=a0,b0@1", "late=a0,a1"], false).unwrap()
        );
    }

    #[test]
    fn wrong_requests_are_refused() {
        for (job, kind, why) in [
            ("train", Kind::Usage, "must be JOB=HOST,.."),
            ("train=a0,b0@x", Kind::Usage, "priority `x`"),
            ("train=a0,c0", Kind::NotFound, "`c0` is not in the network"),
            ("train=a0", Kind::Refused, "two members"),
        ] {
            let failure = planned(&[job], false).unwrap_err();
            assert!(failure.kind == kind && failure.message.contains(why), "{job}: {failure}");
        }
        assert!(planned(&[], true).unwrap().starts_with("digraph"));
    }
}
