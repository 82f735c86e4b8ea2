//! A network as data: read from its file, checked, and numbered.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

/// An error of a topology, or of a request for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A problem of the file, with the field's name.
    #[error("{0}")]
    Topology(String),
    /// A problem of a job, with its name.
    #[error("job {job}: {why}")]
    Job { job: String, why: String },
    /// The solver failed, which is a bug.
    #[error("the linear program has no solution: {0}")]
    Solver(String),
}

/// Hosts, boxes and links.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    #[serde(default, rename = "host", skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<Host>,
    #[serde(default, rename = "box", skip_serializing_if = "Vec::is_empty")]
    pub boxes: Vec<BoxNode>,
    #[serde(default, rename = "link", skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
}

/// A node that has data to sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Host {
    pub name: String,
    /// It adds up what others send and forwards the sum, as a GPU does for its neighbours.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub relays: bool,
}

/// A node that forwards packets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct BoxNode {
    pub name: String,
    /// Its aggregation rate: bytes that its CPUs add per second, over all members; 0 for a plain
    /// switch. Default: it keeps up with its links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aggregation_rate: Option<f64>,
    /// The number of these CPUs, equally fast; each ring is served by one. Default: one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// Bytes for its slots. Default: unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot_memory: Option<f64>,
}

/// A link. Parallel links are one, with the sum of their rates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Link {
    pub from: String,
    pub to: String,
    /// Bits per second.
    #[serde(rename = "rate")]
    pub bits: f64,
    /// The rate from `to` to `from`, if it differs.
    #[serde(rename = "rate-back", skip_serializing_if = "Option::is_none")]
    pub bits_back: Option<f64>,
    /// Microseconds from end to end.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub latency_us: f64,
}

fn one() -> f64 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_one(value: &f64) -> bool {
    *value == 1.0
}

impl Topology {
    /// Parses a file's text.
    ///
    /// # Errors
    /// The first error that is found.
    pub fn parse(text: &str) -> Result<Self, Error> {
        toml::from_str(text).map_err(|e| Error::Topology(e.to_string()))
    }

    /// The text of a file.
    pub fn text(&self) -> String {
        toml::to_string(self).unwrap_or_default()
    }

    pub fn host(&mut self, name: impl Into<String>) {
        self.hosts.push(Host { name: name.into(), relays: false });
    }

    /// A box that keeps up with its links.
    pub fn box_(&mut self, name: impl Into<String>) {
        self.boxes.push(BoxNode {
            name: name.into(),
            aggregation_rate: None,
            cpus: None,
            slot_memory: None,
        });
    }

    /// A link with the same rate in both directions.
    pub fn link(&mut self, from: impl Into<String>, to: impl Into<String>, bits: f64) {
        self.links.push(Link {
            from: from.into(),
            to: to.into(),
            bits,
            bits_back: None,
            latency_us: 1.0,
        });
    }
}

/// A node's number: hosts first, then boxes, as in the file.
pub type Node = usize;

/// A directed link's number: link l of the file has 2 l from `from` to `to` and 2 l + 1 back.
pub type Edge = usize;

/// A limited resource that trees share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// A box's aggregation rate: bytes that it adds per second.
    Aggregation(Node),
    /// Bytes of a box's slots. A whole ring takes them, whatever its rate.
    Slots(Node),
    /// Bytes per second that a link carries in one direction.
    Edge(Edge),
    /// Rings of a job, by its number among those that are planned together.
    Rings(usize),
}

/// The resources that a ring of a job takes besides its rate. The planner does not depend on
/// netsum's other crates, so it has no formula for these: `netsum_core::Job` computes them from the
/// properties of boxes and packets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Bytes that a link carries for each byte of a vector, with headers and check lanes.
    pub wire: f64,
    /// Bytes that a box adds for each byte of a vector, with check lanes.
    pub added: f64,
    /// Bytes of a vector that may be in flight in a ring.
    pub window: f64,
    /// Bytes of slots that a ring takes at a box: a fixed part, and more for each member.
    pub slots: f64,
    pub slots_per_member: f64,
    /// The most rings that a box can have, and the most members of a ring there.
    pub rings: u32,
    pub members: usize,
}

impl Shape {
    /// Rings without overhead: links carry only vectors.
    pub const IDEAL: Self = Self {
        wire: 1.0,
        added: 1.0,
        window: f64::INFINITY,
        slots: 0.0,
        slots_per_member: 0.0,
        rings: 255,
        members: usize::MAX,
    };

    /// Bytes of slots that a ring with this many members takes at a box.
    pub fn slots_of(&self, members: usize) -> f64 {
        self.slots + members as f64 * self.slots_per_member
    }
}

/// A checked topology, with numbers for names and bytes for bits.
#[derive(Clone, Debug)]
pub struct Network {
    names: Vec<String>,
    numbers: BTreeMap<String, Node>,
    hosts: usize,
    relays: Vec<bool>,
    aggregation_rate: Vec<f64>,
    cpus: Vec<u32>,
    slots: Vec<f64>,
    shape: Shape,
    /// The ends of each directed link.
    ends: Vec<(Node, Node)>,
    rates: Vec<f64>,
    seconds: Vec<f64>,
    edges: HashMap<(Node, Node), Edge>,
    next: Vec<Vec<Node>>,
    /// The links to those, in the same order.
    out: Vec<Vec<Edge>>,
}

impl Network {
    /// Checks a topology; its rings are ideal.
    ///
    /// # Errors
    /// The first error that is found.
    pub fn new(topology: &Topology) -> Result<Self, Error> {
        let wrong = |text: String| Err(Error::Topology(text));
        let names: Vec<String> = topology
            .hosts
            .iter()
            .map(|h| h.name.clone())
            .chain(topology.boxes.iter().map(|b| b.name.clone()))
            .collect();
        let numbers: BTreeMap<String, Node> = names.iter().cloned().zip(0..).collect();
        let mut seen = BTreeSet::new();
        for name in &names {
            if name.is_empty() || name.contains([',', '=', '@', '*', '"']) {
                return wrong(format!("name {name:?}: use one without , = @ * and \""));
            }
            if !seen.insert(name) {
                return wrong(format!("name {name:?} is used twice"));
            }
        }
        let positive = |what: &str, of: &str, value: f64, least: f64| {
            if value.is_finite() && value >= least && value <= 1e18 {
                Ok(value)
            } else {
                Err(Error::Topology(format!("{of}: {what} = {value} is out of range")))
            }
        };
        let hosts = topology.hosts.len();
        let (mut aggregation_rate, mut slots) =
            (vec![f64::INFINITY; names.len()], vec![f64::INFINITY; names.len()]);
        let mut cpus = vec![1; names.len()];
        for (b, node) in topology.boxes.iter().zip(hosts..) {
            cpus[node] = b.cpus.unwrap_or(1);
            if cpus[node] == 0 {
                return wrong(format!("{}: cpus = 0 is out of range", b.name));
            }
            for (value, name, to) in [
                (b.aggregation_rate, "aggregation-rate", &mut aggregation_rate),
                (b.slot_memory, "slot-memory", &mut slots),
            ] {
                if let Some(value) = value {
                    to[node] = positive(name, &b.name, value, 0.0)?;
                }
            }
        }
        let mut network = Self {
            hosts,
            relays: topology.hosts.iter().map(|h| h.relays).collect(),
            aggregation_rate,
            cpus,
            slots,
            shape: Shape::IDEAL,
            ends: Vec::new(),
            rates: Vec::new(),
            seconds: Vec::new(),
            edges: HashMap::new(),
            next: vec![Vec::new(); names.len()],
            out: vec![Vec::new(); names.len()],
            names,
            numbers,
        };
        for link in &topology.links {
            let of = format!("link {} {}", link.from, link.to);
            let end = |name: &String| match network.numbers.get(name) {
                Some(&node) => Ok(node),
                None => Err(Error::Topology(format!("{of}: {name:?} is not a host or a box"))),
            };
            let (from, to) = (end(&link.from)?, end(&link.to)?);
            if from == to || network.edges.contains_key(&(from, to)) {
                return wrong(format!(
                    "{of}: a link needs two different nodes that no other link joins; write \
                     parallel links as one with their sum"
                ));
            }
            // The bound counts whole bytes per second, so a link must carry at least one.
            let bits = positive("rate", &of, link.bits, 8.0)?;
            let back = positive("rate-back", &of, link.bits_back.unwrap_or(bits), 8.0)?;
            let seconds = positive("latency-us", &of, link.latency_us, 0.0)? / 1e6;
            for (from, to, bits) in [(from, to, bits), (to, from, back)] {
                network.edges.insert((from, to), network.ends.len());
                network.out[from].push(network.ends.len());
                network.ends.push((from, to));
                network.rates.push(bits / 8.0);
                network.seconds.push(seconds);
                network.next[from].push(to);
            }
        }
        Ok(network)
    }

    /// The same for jobs with rings of this shape: rates of links and CPUs are then counted in
    /// bytes of vectors.
    #[must_use]
    pub fn with_rings(mut self, shape: Shape) -> Self {
        self.rates.iter_mut().for_each(|rate| *rate *= self.shape.wire / shape.wire);
        self.aggregation_rate.iter_mut().for_each(|rate| *rate *= self.shape.added / shape.added);
        self.shape = shape;
        self
    }

    /// The same without some directed links; numbers do not change.
    #[must_use]
    pub fn without(&self, failed: &BTreeSet<Edge>) -> Self {
        let mut network = self.clone();
        for &edge in failed {
            let (from, to) = self.ends[edge];
            // A link that fails in one direction carries no sums in either.
            for (from, to) in [(from, to), (to, from)] {
                network.edges.remove(&(from, to));
                network.next[from].retain(|&node| node != to);
                network.out[from].retain(|&edge| self.ends[edge].1 != to);
            }
        }
        network
    }

    pub fn nodes(&self) -> usize {
        self.names.len()
    }

    pub fn hosts(&self) -> std::ops::Range<Node> {
        0..self.hosts
    }

    pub fn boxes(&self) -> std::ops::Range<Node> {
        self.hosts..self.names.len()
    }

    pub fn edges(&self) -> usize {
        self.ends.len()
    }

    pub fn name(&self, node: Node) -> &str {
        &self.names[node]
    }

    pub fn node(&self, name: &str) -> Option<Node> {
        self.numbers.get(name).copied()
    }

    pub fn is_host(&self, node: Node) -> bool {
        node < self.hosts
    }

    /// Whether a tree may branch there.
    pub fn sums(&self, node: Node) -> bool {
        if self.is_host(node) { self.relays[node] } else { self.aggregation_rate[node] > 0.0 }
    }

    /// A box that only forwards.
    pub fn is_switch(&self, node: Node) -> bool {
        !self.is_host(node) && self.aggregation_rate[node] == 0.0
    }

    /// The nodes with a link to it.
    pub fn next(&self, node: Node) -> &[Node] {
        &self.next[node]
    }

    /// The directed links from it; `way ^ 1` leads back.
    pub fn out(&self, node: Node) -> &[Edge] {
        &self.out[node]
    }

    pub fn edge(&self, from: Node, to: Node) -> Option<Edge> {
        self.edges.get(&(from, to)).copied()
    }

    pub fn ends(&self, edge: Edge) -> (Node, Node) {
        self.ends[edge]
    }

    /// The resources that rings take.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The number of a box's CPUs that serve rings.
    pub fn cpus(&self, node: Node) -> u32 {
        self.cpus[node]
    }

    /// The aggregation rate of one of them: bytes per second.
    pub fn cpu_rate(&self, node: Node) -> f64 {
        self.aggregation_rate[node] / f64::from(self.cpus[node])
    }

    /// Seconds from end to end.
    pub fn latency(&self, edge: Edge) -> f64 {
        self.seconds[edge]
    }

    /// The capacity of a resource: bytes per second, or bytes.
    pub fn capacity(&self, resource: Resource) -> f64 {
        match resource {
            Resource::Edge(edge) => self.rates[edge],
            Resource::Aggregation(node) => self.aggregation_rate[node],
            Resource::Slots(node) => self.slots[node],
            Resource::Rings(_) => f64::INFINITY,
        }
    }

    /// A resource's name in messages: "spine1's CPU".
    pub fn describe(&self, resource: Resource) -> String {
        match resource {
            Resource::Edge(edge) => {
                let (from, to) = self.ends[edge];
                format!("the link from {} to {}", self.names[from], self.names[to])
            }
            Resource::Aggregation(node) => format!("{}'s CPU", self.names[node]),
            Resource::Slots(node) => format!("{}'s slots", self.names[node]),
            Resource::Rings(job) => format!("the rings of job {job}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "[[host]]\nname = \"h\"\n[[box]]\nname = \"leaf\"\naggregation-rate = \
                        4e9\n[[link]]\nfrom = \"h\"\nto = \"leaf\"\nrate = 80e9\nrate-back = 8e9\n";

    #[test]
    fn a_file_is_read_and_written() {
        let topology = Topology::parse(GOOD).unwrap();
        assert_eq!(Topology::parse(&topology.text()).unwrap(), topology);
        let network = Network::new(&topology).unwrap();
        let up = network.edge(0, 1).unwrap();
        assert_eq!(
            (network.capacity(Resource::Edge(up)), network.capacity(Resource::Edge(up + 1))),
            (1e10, 1e9)
        );
        assert_eq!(network.capacity(Resource::Slots(1)), f64::INFINITY);
        assert_eq!(network.describe(Resource::Aggregation(1)), "leaf's CPU");
        assert_eq!(network.describe(Resource::Edge(up)), "the link from h to leaf");
    }

    #[test]
    fn a_wrong_topology_is_refused_by_name() {
        for (text, expected) in [
            ("[[host]]\nname = \"a,b\"", "name \"a,b\""),
            ("[[host]]\nname = \"a\"\n[[box]]\nname = \"a\"", "used twice"),
            (
                &format!("{GOOD}[[link]]\nfrom = \"leaf\"\nto = \"h\"\nrate = 9"),
                "two different nodes",
            ),
            (&GOOD.replace("80e9", "0"), "link h leaf: rate = 0"),
            (&GOOD.replace("80e9", "nan"), "rate = NaN"),
            (&GOOD.replace("4e9", "-1"), "leaf: aggregation-rate = -1"),
            (&GOOD.replace("4e9", "4e9\ncpus = 0"), "leaf: cpus = 0"),
            (&GOOD.replace("to = \"leaf\"", "to = \"loaf\""), "\"loaf\" is not a host"),
            (&GOOD.replace("aggregation-rate", "add"), "unknown field"),
        ] {
            let error = Topology::parse(text)
                .and_then(|t| Network::new(&t).map(drop))
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
