//! `netsum fabric topology`: boxes, and the hosts below them, for people and for schedulers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write;

use netsum_api::v1 as api;
use netsum_plan::draw;
use netsum_plan::topology::{Network, Topology as Planned};
use schemars::JsonSchema;
use serde::Serialize;

use super::args::TopologyArgs;
use super::fabric::links;
use super::failure::{Failure, Kind, Result};
use super::format::Format;
use super::layout::{self, Entry, FAIR, plain, styled};
use super::print::name;

/// A fabric with its hosts.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Topology {
    pub boxes: Vec<Node>,
    /// Links between them.
    pub links: Vec<api::FabricLink>,
}

/// A box.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Node {
    pub name: String,
    /// Boxes that it has a link to, in the order of the links.
    pub above: Vec<String>,
    pub hosts: Vec<Host>,
}

/// A host, as its box has seen it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Host {
    /// Its name in the file of --ethers; null if it has none there.
    pub name: Option<String>,
    /// Its MAC address.
    pub mac: String,
    pub port: String,
}

/// Names by MAC address, in the format of ethers(5): `02:00:00:00:00:01 host0`.
fn ethers(text: &str) -> BTreeMap<String, String> {
    let line = |line: &str| {
        let mut words = line.split('#').next()?.split_whitespace();
        // Each byte may have one digit.
        let bytes = words
            .next()?
            .split(':')
            .map(|b| u8::from_str_radix(b, 16))
            .collect::<std::result::Result<Vec<_>, _>>();
        let mac: Vec<String> = bytes.ok()?.iter().map(|b| format!("{b:02x}")).collect();
        Some((mac.join(":"), words.next()?.to_owned()))
    };
    text.lines().filter_map(line).collect()
}

impl Topology {
    fn new(fabric: api::Fabric, names: &BTreeMap<String, String>) -> Self {
        let mut above: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for link in &fabric.links {
            let (below, up) =
                (above.entry(box_of(&link.below).to_owned()).or_default(), box_of(&link.above));
            if below.iter().all(|of| of != up) {
                below.push(up.to_owned());
            }
        }
        let host = |h: api::FabricHost| Host {
            name: names.get(&h.mac).cloned(),
            mac: h.mac,
            port: h.port,
        };
        let node = |b: api::FabricBox| Node {
            above: above.remove(&b.name).unwrap_or_default(),
            name: b.name,
            hosts: b.hosts.into_iter().map(host).collect(),
        };
        let links = fabric.links;
        Self { boxes: fabric.boxes.into_iter().map(node).collect(), links }
    }

    /// The boxes as a tree: if a leaf has several boxes above it, the one that is above most
    /// leaves.
    fn tree(&self) -> BTreeMap<&str, Vec<&Node>> {
        let mut below: BTreeMap<&str, usize> = BTreeMap::new();
        self.boxes.iter().flat_map(|b| &b.above).for_each(|of| *below.entry(of).or_default() += 1);
        let mut tree: BTreeMap<&str, Vec<&Node>> = BTreeMap::new();
        for node in &self.boxes {
            // The first of several equal ones.
            if let Some(of) = node.above.iter().rev().max_by_key(|of| below[of.as_str()]) {
                tree.entry(of).or_default().push(node);
            }
        }
        tree
    }

    fn named(node: &Node) -> Vec<&str> {
        let names: BTreeSet<&str> = node.hosts.iter().filter_map(|h| h.name.as_deref()).collect();
        names.into_iter().collect()
    }

    /// A comment with the unnamed hosts: a scheduler knows hosts only by name.
    fn nameless(&self) -> String {
        let all = self.boxes.iter().flat_map(|b| b.hosts.iter().map(move |h| (b, h)));
        let nameless = all.filter(|(_, h)| h.name.is_none());
        nameless
            .map(|(b, h)| format!("# without a name: {} at {}/{}\n", h.mac, b.name, h.port))
            .collect()
    }

    /// For Graphviz.
    fn dot(&self) -> String {
        let mut text = String::from("graph fabric {\n");
        for node in &self.boxes {
            let _ = writeln!(text, "  {:?} [shape=box];", node.name);
            for of in &node.above {
                let _ = writeln!(text, "  {of:?} -- {:?};", node.name);
            }
            for host in &node.hosts {
                let label = host.name.as_ref().unwrap_or(&host.mac);
                let _ = writeln!(text, "  {:?} -- {label:?} [label={:?}];", node.name, host.port);
            }
        }
        text + "}\n"
    }

    /// Slurm's topology.yaml, for its tree plugin.
    fn slurm(&self) -> String {
        let mut text = self.nameless();
        text += "- topology: netsum\n  cluster_default: true\n  tree:\n    switches:\n";
        let tree = self.tree();
        for node in &self.boxes {
            let children: Vec<&str> =
                tree.get(&*node.name).into_iter().flatten().map(|b| &*b.name).collect();
            let hosts = Self::named(node);
            // A Slurm switch has either switches or nodes, so the own hosts of a box with both are
            // below a second switch.
            if !children.is_empty() {
                let own =
                    if hosts.is_empty() { String::new() } else { format!(",{}_hosts", node.name) };
                let _ = writeln!(
                    text,
                    "      - switch: {}\n        children: {}{own}",
                    node.name,
                    children.join(",")
                );
            }
            if !hosts.is_empty() {
                let own = if children.is_empty() { "" } else { "_hosts" };
                let _ = writeln!(
                    text,
                    "      - switch: {}{own}\n        nodes: {}",
                    node.name,
                    hosts.join(",")
                );
            }
        }
        text
    }

    /// Node labels for Kueue's topology-aware scheduling, as commands.
    fn kueue(&self) -> String {
        let mut text = self.nameless();
        let tree = self.tree();
        for node in &self.boxes {
            let above = tree.iter().find(|(_, below)| below.iter().any(|b| b.name == node.name));
            // A box without a box above it is a block of its own.
            let block = above.map_or(&*node.name, |(of, _)| of);
            for host in Self::named(node) {
                let _ = writeln!(
                    text,
                    "kubectl label --overwrite node {host} netsum.dev/block={block} \
                     netsum.dev/rack={}",
                    node.name
                );
            }
        }
        text
    }
}

/// A rate that a plan needs.
pub fn known(what: &str, rate: u64) -> Result<f64> {
    match rate {
        0 => Err(Failure::new(
            Kind::Failed,
            format!("{what}: its rate is not known; give links a `rate` in the manager's file"),
        )),
        rate => Ok(rate as f64),
    }
}

/// A topology for `netsum plan`. Links without traffic are left out; several between two boxes
/// become one.
fn to_plan(fabric: &api::Fabric, names: &BTreeMap<String, String>) -> Result<Planned> {
    let mut plan = Planned::default();
    let mut links: BTreeMap<(&str, &str), f64> = BTreeMap::new();
    for link in fabric.links.iter().filter(|link| link.up) {
        let rate = known(&format!("link {} to {}", link.below, link.above), link.rate)?;
        *links.entry((box_of(&link.below), box_of(&link.above))).or_default() += rate;
    }
    for b in &fabric.boxes {
        add_box(&mut plan, b);
        for host in &b.hosts {
            let end = format!("{}/{}", b.name, host.port);
            let rate =
                fabric.ports.iter().find(|port| port.port == end).map_or(0, |port| port.rate);
            let name = names.get(&host.mac).unwrap_or(&host.mac);
            plan.host(name);
            plan.link(name, &b.name, known(&format!("port {end}"), rate)?);
        }
    }
    links.into_iter().for_each(|((below, above), rate)| plan.link(below, above, rate));
    Ok(plan)
}

/// Adds a box to a plan's network.
pub fn add_box(plan: &mut netsum_plan::topology::Topology, b: &api::FabricBox) {
    plan.boxes.push(netsum_plan::topology::BoxNode {
        name: b.name.clone(),
        aggregation_rate: b.aggregation_rate.map(|rate| rate as f64),
        cpus: b.cpus,
        slot_memory: None,
    });
}

/// The box of BOX/PORT.
pub fn box_of(end: &str) -> &str {
    end.split_once('/').map_or(end, |(of, _)| of)
}

/// Prints the topology in the requested form.
pub fn show(
    out: &mut impl Write,
    format: Format,
    args: &TopologyArgs,
    fabric: api::Fabric,
) -> Result<()> {
    let names = match std::fs::read_to_string(&args.ethers) {
        Ok(text) => ethers(&text),
        // The file is missing on most machines.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
        Err(e) => {
            return Err(Failure::new(
                Kind::Failed,
                format!("--ethers {}: {e}", args.ethers.display()),
            ));
        }
    };
    if args.plan {
        return Ok(out.write_all(to_plan(&fabric, &names)?.text().as_bytes())?);
    }
    if args.svg {
        let network = Network::new(&to_plan(&fabric, &names)?);
        let network = network.map_err(|e| Failure::new(Kind::Failed, e.to_string()))?;
        return Ok(out.write_all(draw::links(&network).as_bytes())?);
    }
    let topology = Topology::new(fabric, &names);
    if format.json(out, &topology)? {
        return Ok(());
    }
    let text = match (args.dot, args.slurm, args.kueue) {
        (true, ..) => topology.dot(),
        (_, true, _) => topology.slurm(),
        (.., true) => topology.kueue(),
        _ => return table(out, &topology),
    };
    Ok(out.write_all(text.as_bytes())?)
}

fn table(out: &mut impl Write, topology: &Topology) -> Result<()> {
    let entry = |node: &Node| {
        let above = match &*node.above.join(", ") {
            "" => "on top".to_owned(),
            above => format!("below {above}"),
        };
        let mut entry = Entry::new(vec![name(&node.name), plain(above)]);
        for host in &node.hosts {
            let label = host.name.as_ref().map_or_else(|| styled("?", FAIR), plain);
            entry.attributes(0, vec![plain(host.port.clone()), label, plain(host.mac.clone())]);
        }
        entry
    };
    let entries: Vec<_> = topology.boxes.iter().map(entry).chain(links(&topology.links)).collect();
    Ok(layout::print(out, &entries)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fabric() -> api::Fabric {
        let host = |n: u8, port: &str| api::FabricHost {
            mac: format!("02:00:00:00:00:{n:02x}"),
            port: port.into(),
        };
        let node = |name: &str, hosts: Vec<api::FabricHost>| api::FabricBox {
            name: name.into(),
            hosts,
            ..api::FabricBox::default()
        };
        let link = |below: &str, above: &str| api::FabricLink {
            below: below.into(),
            above: above.into(),
            up: true,
            ..api::FabricLink::default()
        };
        api::Fabric {
            boxes: vec![
                node("leaf0", vec![host(1, "p1"), host(2, "p2")]),
                node("leaf1", vec![host(3, "p1"), host(9, "p2")]),
                node("spine0", Vec::new()),
                node("spine1", vec![host(4, "p7")]),
            ],
            links: vec![
                link("leaf0/u", "spine0/1"),
                link("leaf0/v", "spine1/1"),
                link("leaf1/v", "spine1/2"),
            ],
            ..api::Fabric::default()
        }
    }

    fn names() -> BTreeMap<String, String> {
        ethers(
            "2:0:0:0:0:1 host0\n02:00:00:00:00:02 host1 # a\n\n02:00:00:00:00:03 \
             host2\n02:00:00:00:00:04 host3",
        )
    }

    fn example() -> Topology {
        Topology::new(fabric(), &names())
    }

    #[test]
    fn a_topology_for_a_plan_has_the_rates() {
        let mut fabric = fabric();
        let error = to_plan(&fabric, &names()).unwrap_err().message;
        assert!(error.starts_with("link leaf0/u to spine0/1: its rate is not known"), "{error}");
        fabric.links.iter_mut().for_each(|link| link.rate = 4_000_000_000);
        fabric.links.push(api::FabricLink {
            below: "leaf1/x".into(),
            above: "spine1/3".into(),
            ..fabric.links[0].clone()
        });
        for (n, (of, port)) in
            [("leaf0", "p1"), ("leaf0", "p2"), ("leaf1", "p1"), ("leaf1", "p2"), ("spine1", "p7")]
                .iter()
                .enumerate()
        {
            let rate = 1_000_000_000 * (n as u64 + 1);
            fabric.ports.push(api::FabricPort {
                port: format!("{of}/{port}"),
                rate,
                ..api::FabricPort::default()
            });
        }
        let plan = to_plan(&fabric, &names()).unwrap();
        assert!(draw::links(&Network::new(&plan).unwrap()).contains(">leaf0, 2 hosts<"));
        let rate = |from: &str, to: &str| {
            plan.links.iter().find(|l| l.from == from && l.to == to).map(|l| l.bits)
        };
        assert_eq!((plan.hosts.len(), plan.boxes.len()), (5, 4));
        assert_eq!(rate("host2", "leaf1"), Some(3e9));
        assert_eq!(rate("02:00:00:00:00:09", "leaf1"), Some(4e9));
        assert_eq!(rate("leaf1", "spine1"), Some(8e9), "two links are one");
    }

    #[test]
    fn a_topology_as_text() {
        let mut out = anstream::StripStream::new(Vec::new());
        table(&mut out, &example()).unwrap();
        insta::assert_snapshot!(String::from_utf8(out.into_inner()).unwrap());
    }

    #[test]
    fn a_topology_for_others() {
        let t = example();
        insta::assert_snapshot!([t.dot(), t.slurm(), t.kueue()].join("\n"));
    }
}
