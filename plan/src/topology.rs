//! A network as data: what is in its file, checked, and numbered.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

/// What is wrong with a topology, or with what is asked of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The file, by field.
    #[error("{0}")]
    Topology(String),
    /// The job, by name.
    #[error("job {job}: {why}")]
    Job { job: String, why: String },
    /// The solver gave up; it should not.
    #[error("the linear program has no solution: {0}")]
    Solver(String),
}

/// Hosts, boxes and cables.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    #[serde(default, rename = "host", skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<Host>,
    #[serde(default, rename = "box", skip_serializing_if = "Vec::is_empty")]
    pub boxes: Vec<Box_>,
    #[serde(default, rename = "link", skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
}

/// What has data to sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Host {
    pub name: String,
    /// It adds up what others send and passes it on, as a GPU does for its neighbours.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub relays: bool,
}

/// What forwards packets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Box_ {
    pub name: String,
    /// Bytes that its CPUs add in a second, over all members; 0 is a plain switch. Not given: it
    /// keeps up with its links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adds: Option<f64>,
    /// How many CPUs these are, equally fast; each ring is served by one. Not given: one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// Bytes of its slots. Not given: enough.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<f64>,
}

/// A cable. Parallel ones are one with the sum of their rates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Link {
    pub from: String,
    pub to: String,
    /// Bits in a second.
    pub bits: f64,
    /// The same from `to` to `from`, where it differs.
    #[serde(skip_serializing_if = "Option::is_none")]
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
    /// Reads a file's text.
    ///
    /// # Errors
    /// What is wrong with it.
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
        self.boxes.push(Box_ { name: name.into(), adds: None, cpus: None, slots: None });
    }

    /// A cable that is as fast in both directions.
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
pub type Way = usize;

/// What only so much can be had of; trees share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// Bytes in a second that a box adds.
    Adds(Node),
    /// Bytes of a box's slots. Whole rings take them, whatever their rates.
    Slots(Node),
    /// Bytes in a second that a link carries in one direction.
    Way(Way),
    /// Rings of a job, by its number among those that are planned beside each other.
    Rings(usize),
}

/// What a ring of a job takes, beside its rate. The planner depends on nothing of netsum's, so it
/// has no formula for these: `netsum_core::Job` computes them from what boxes and packets are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Bytes that a link carries for each byte of a vector: with headers, and with check lanes.
    pub wire: f64,
    /// Bytes that a box adds for each byte of a vector: with check lanes.
    pub added: f64,
    /// Bytes of a vector that may be on their way in a ring.
    pub window: f64,
    /// Bytes of slots that a ring takes at a box, without any members and more for each.
    pub slots: f64,
    pub slots_per_member: f64,
    /// So many rings a box can have, and a ring so many members there.
    pub rings: u32,
    pub members: usize,
}

impl Shape {
    /// Rings that take nothing: vectors are all that links carry.
    pub const IDEAL: Self = Self {
        wire: 1.0,
        added: 1.0,
        window: f64::INFINITY,
        slots: 0.0,
        slots_per_member: 0.0,
        rings: 255,
        members: usize::MAX,
    };

    /// Bytes of slots that a ring with so many members takes at a box.
    pub fn slots_of(&self, members: usize) -> f64 {
        self.slots + members as f64 * self.slots_per_member
    }
}

/// A topology that has been checked, with numbers for names, and bytes for bits.
#[derive(Clone, Debug)]
pub struct Network {
    names: Vec<String>,
    numbers: BTreeMap<String, Node>,
    hosts: usize,
    relays: Vec<bool>,
    adds: Vec<f64>,
    cpus: Vec<u32>,
    slots: Vec<f64>,
    shape: Shape,
    /// Of each directed link.
    ends: Vec<(Node, Node)>,
    rates: Vec<f64>,
    seconds: Vec<f64>,
    ways: HashMap<(Node, Node), Way>,
    next: Vec<Vec<Node>>,
    /// The links to those, in the same order.
    out: Vec<Vec<Way>>,
}

impl Network {
    /// Checks a topology; its rings are ideal.
    ///
    /// # Errors
    /// What is wrong with it.
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
                return wrong(format!("name {name:?}: one without , = @ * and \" is needed"));
            }
            if !seen.insert(name) {
                return wrong(format!("name {name:?}: two have it"));
            }
        }
        let positive = |what: &str, of: &str, value: f64, least: f64| {
            if value.is_finite() && value >= least && value <= 1e18 {
                Ok(value)
            } else {
                Err(Error::Topology(format!("{of}: {what} = {value} cannot be")))
            }
        };
        let hosts = topology.hosts.len();
        let (mut adds, mut slots) =
            (vec![f64::INFINITY; names.len()], vec![f64::INFINITY; names.len()]);
        let mut cpus = vec![1; names.len()];
        for (b, node) in topology.boxes.iter().zip(hosts..) {
            cpus[node] = b.cpus.unwrap_or(1);
            if cpus[node] == 0 {
                return wrong(format!("{}: cpus = 0 cannot be", b.name));
            }
            for (value, name, to) in [(b.adds, "adds", &mut adds), (b.slots, "slots", &mut slots)] {
                if let Some(value) = value {
                    to[node] = positive(name, &b.name, value, 0.0)?;
                }
            }
        }
        let mut network = Self {
            hosts,
            relays: topology.hosts.iter().map(|h| h.relays).collect(),
            adds,
            cpus,
            slots,
            shape: Shape::IDEAL,
            ends: Vec::new(),
            rates: Vec::new(),
            seconds: Vec::new(),
            ways: HashMap::new(),
            next: vec![Vec::new(); names.len()],
            out: vec![Vec::new(); names.len()],
            names,
            numbers,
        };
        for link in &topology.links {
            let of = format!("link {} {}", link.from, link.to);
            let end = |name: &String| match network.numbers.get(name) {
                Some(&node) => Ok(node),
                None => Err(Error::Topology(format!("{of}: nobody is called {name:?}"))),
            };
            let (from, to) = (end(&link.from)?, end(&link.to)?);
            if from == to || network.ways.contains_key(&(from, to)) {
                return wrong(format!(
                    "{of}: one link between two nodes is possible; parallel ones are one with their sum"
                ));
            }
            // Less than a byte in a second is no link: the bound counts whole ones.
            let bits = positive("bits", &of, link.bits, 8.0)?;
            let back = positive("bits-back", &of, link.bits_back.unwrap_or(bits), 8.0)?;
            let seconds = positive("latency-us", &of, link.latency_us, 0.0)? / 1e6;
            for (from, to, bits) in [(from, to, bits), (to, from, back)] {
                network.ways.insert((from, to), network.ends.len());
                network.out[from].push(network.ends.len());
                network.ends.push((from, to));
                network.rates.push(bits / 8.0);
                network.seconds.push(seconds);
                network.next[from].push(to);
            }
        }
        Ok(network)
    }

    /// The same for jobs whose rings are such: what links carry and CPUs add is counted in bytes of
    /// vectors from then on.
    #[must_use]
    pub fn with_rings(mut self, shape: Shape) -> Self {
        self.rates.iter_mut().for_each(|rate| *rate *= self.shape.wire / shape.wire);
        self.adds.iter_mut().for_each(|adds| *adds *= self.shape.added / shape.added);
        self.shape = shape;
        self
    }

    /// The same without some directed links; numbers stay.
    #[must_use]
    pub fn without(&self, failed: &BTreeSet<Way>) -> Self {
        let mut network = self.clone();
        for &way in failed {
            let (from, to) = self.ends[way];
            // A cable that fails in one direction carries no sums in either.
            for (from, to) in [(from, to), (to, from)] {
                network.ways.remove(&(from, to));
                network.next[from].retain(|&node| node != to);
                network.out[from].retain(|&way| self.ends[way].1 != to);
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

    pub fn ways(&self) -> usize {
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
        if self.is_host(node) { self.relays[node] } else { self.adds[node] > 0.0 }
    }

    /// A box that only forwards.
    pub fn is_switch(&self, node: Node) -> bool {
        !self.is_host(node) && self.adds[node] == 0.0
    }

    /// Those with a link to it.
    pub fn next(&self, node: Node) -> &[Node] {
        &self.next[node]
    }

    /// The directed links from it; `way ^ 1` leads back.
    pub fn out(&self, node: Node) -> &[Way] {
        &self.out[node]
    }

    pub fn way(&self, from: Node, to: Node) -> Option<Way> {
        self.ways.get(&(from, to)).copied()
    }

    pub fn ends(&self, way: Way) -> (Node, Node) {
        self.ends[way]
    }

    /// What rings take.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// CPUs of a box that serve rings.
    pub fn cpus(&self, node: Node) -> u32 {
        self.cpus[node]
    }

    /// Bytes in a second that one of them adds.
    pub fn cpu_adds(&self, node: Node) -> f64 {
        self.adds[node] / f64::from(self.cpus[node])
    }

    /// Seconds from end to end.
    pub fn latency(&self, way: Way) -> f64 {
        self.seconds[way]
    }

    /// What there is of a resource: bytes in a second, or bytes.
    pub fn capacity(&self, resource: Resource) -> f64 {
        match resource {
            Resource::Way(way) => self.rates[way],
            Resource::Adds(node) => self.adds[node],
            Resource::Slots(node) => self.slots[node],
            Resource::Rings(_) => f64::INFINITY,
        }
    }

    /// As people call it: "spine1's CPU".
    pub fn describe(&self, resource: Resource) -> String {
        match resource {
            Resource::Way(way) => {
                let (from, to) = self.ends[way];
                format!("the link from {} to {}", self.names[from], self.names[to])
            }
            Resource::Adds(node) => format!("{}'s CPU", self.names[node]),
            Resource::Slots(node) => format!("{}'s slots", self.names[node]),
            Resource::Rings(job) => format!("the rings of job {job}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "[[host]]\nname = \"h\"\n[[box]]\nname = \"leaf\"\nadds = 4e9\n[[link]]\nfrom = \"h\"\nto = \"leaf\"\nbits = 80e9\nbits-back = 8e9\n";

    #[test]
    fn a_file_is_read_and_written() {
        let topology = Topology::parse(GOOD).unwrap();
        assert_eq!(Topology::parse(&topology.text()).unwrap(), topology);
        let network = Network::new(&topology).unwrap();
        let up = network.way(0, 1).unwrap();
        assert_eq!(
            (network.capacity(Resource::Way(up)), network.capacity(Resource::Way(up + 1))),
            (1e10, 1e9)
        );
        assert_eq!(network.capacity(Resource::Slots(1)), f64::INFINITY);
        assert_eq!(network.describe(Resource::Adds(1)), "leaf's CPU");
        assert_eq!(network.describe(Resource::Way(up)), "the link from h to leaf");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, expected) in [
            ("[[host]]\nname = \"a,b\"", "name \"a,b\""),
            ("[[host]]\nname = \"a\"\n[[box]]\nname = \"a\"", "two have it"),
            (
                &format!("{GOOD}[[link]]\nfrom = \"leaf\"\nto = \"h\"\nbits = 9"),
                "one link between two nodes",
            ),
            (&GOOD.replace("80e9", "0"), "link h leaf: bits = 0"),
            (&GOOD.replace("80e9", "nan"), "bits = NaN"),
            (&GOOD.replace("4e9", "-1"), "leaf: adds = -1"),
            (&GOOD.replace("4e9", "4e9\ncpus = 0"), "leaf: cpus = 0"),
            (&GOOD.replace("to = \"leaf\"", "to = \"loaf\""), "nobody is called \"loaf\""),
            (&GOOD.replace("adds", "add"), "unknown field"),
        ] {
            let error = Topology::parse(text)
                .and_then(|t| Network::new(&t).map(drop))
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
