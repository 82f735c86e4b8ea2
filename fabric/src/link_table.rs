//! Links between boxes: those configured in the manager's file, combined with the LLDP neighbours
//! of the ports. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use netsum_api::v1 as api;
use netsum_core::rate::Rate;
use netsum_core::saved::Measured;

use crate::config::{End, Link, LinkTrust, Pattern};
use crate::probe_results::{Capacity, settle};

/// A box that has just started has received nothing yet, and one frame may be lost.
const GRACE: Duration = Duration::from_secs(3);

/// A box's report of its ports.
#[derive(Clone, Debug, Default)]
pub struct BoxReport {
    pub ports: Vec<api::Port>,
    /// It sends and receives LLDP.
    pub lldp: bool,
    /// Its LLDP chassis id.
    pub chassis_id: String,
    /// MAC addresses of its interfaces.
    pub macs: Vec<String>,
}

/// A link, as far as known.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkState {
    pub link: Link,
    /// Both directions carry traffic.
    pub carries: bool,
    /// It is not used: it was found between boxes of one level, is unconfirmed, or has hosts behind
    /// one of its ends.
    pub is_unused: bool,
    /// Fault, as text.
    pub problem: Option<String>,
    /// Bits per second by the file or by drivers.
    pub nominal: Option<Rate>,
    /// Rate at the last measurement, or why it is unknown.
    pub measured: Option<Result<u64, String>>,
}

/// State of a link from poll to poll.
#[derive(Clone, Debug, Default)]
struct Memory {
    carries: bool,
    /// Since when a direction has been missing.
    missing: Option<Instant>,
    problem: Option<String>,
    /// Bits per second that replace the nominal rate, and the nominal rate at that time; 0 if
    /// unknown.
    rate: Option<(u64, u64)>,
    measured: Option<Result<u64, String>>,
    /// A measurement has been attempted since it appeared.
    tried: bool,
}

impl Memory {
    /// The measured rate, if the nominal rate has not changed since.
    fn counts(&self, nominal: Option<u64>) -> Option<u64> {
        self.rate.filter(|(_, then)| *then == nominal.unwrap_or(0)).map(|(rate, _)| rate)
    }
}

/// All links.
#[derive(Default)]
pub struct LinkTable {
    configured: Vec<Link>,
    levels: HashMap<String, u32>,
    /// Links that were found are used where they have one of these ends; or all of them.
    named: Vec<Pattern>,
    link_trust: LinkTrust,
    accepted: BTreeSet<End>,
    /// Ports behind which ranks of jobs were. They cannot be ends of found links.
    hosts: BTreeSet<End>,
    /// The last report of each box.
    reports: BTreeMap<String, BoxReport>,
    /// By both ends, the lower first.
    memory: BTreeMap<[End; 2], Memory>,
    /// Bytes per second that ports receive and send, and the time of each box's last poll.
    rates: HashMap<End, [u64; 2]>,
    polled_at: HashMap<String, Instant>,
    /// All their ends.
    ends: Arc<BTreeSet<End>>,
    /// The set of links has changed since the last query.
    changed: bool,
    /// Boxes with equal chassis ids, already logged.
    alike: BTreeSet<String>,
}

impl LinkTable {
    pub fn new(configured: Vec<Link>, levels: HashMap<String, u32>) -> Self {
        let ends = |link: &Link| [link.below.clone(), link.above.clone()];
        let carries = Memory { carries: true, ..Memory::default() };
        let memory: BTreeMap<_, _> =
            configured.iter().map(|link| (ends(link), carries.clone())).collect();
        let ends = Arc::new(memory.keys().flatten().cloned().collect());
        Self { configured, levels, memory, ends, ..Self::default() }
    }

    /// Uses found links with such an end.
    #[must_use]
    pub fn confirmed_by(self, named: Vec<Pattern>, link_trust: LinkTrust) -> Self {
        Self { named, link_trust, ..self }
    }

    /// Uses found links with this end, or stops using them, by an administrator's order.
    ///
    /// # Errors
    /// If there is nothing to accept or to take back.
    pub fn accept(&mut self, end: &End, revoke: bool) -> Result<(), String> {
        if !self.configured.is_empty() {
            return Err("the manager's file lists all links".to_owned());
        }
        if revoke {
            let was = self.accepted.remove(end);
            return was.then_some(()).ok_or_else(|| format!("{end} was not accepted"));
        }
        if !self.memory.keys().flatten().any(|known| known == end) {
            return Err(format!(
                "no link with the end {end} was found: `netsum fabric probe` shows what ports \
                 receive"
            ));
        }
        self.accepted.insert(end.clone());
        self.hosts.remove(end);
        Ok(())
    }

    /// Ends that administrators have accepted.
    pub fn accepted(&self) -> Vec<String> {
        self.accepted.iter().map(End::to_string).collect()
    }

    pub fn restore_accepted(&mut self, ends: impl Iterator<Item = End>) {
        self.accepted.extend(ends);
    }

    /// Records ports behind which ranks are at work.
    pub fn set_host_ports(&mut self, ends: impl Iterator<Item = End>) {
        self.hosts.extend(ends);
    }

    /// Why a found link is not used; `None` if it is.
    fn unconfirmed(&self, ends: &[End; 2]) -> Option<String> {
        if !self.configured.is_empty() {
            return None;
        }
        if let Some(end) = ends.iter().find(|end| self.hosts.contains(end)) {
            return Some(format!(
                "ranks of a job were behind {end}, so it is not an uplink: if it is now, `netsum \
                 fabric accept {end}`"
            ));
        }
        let is_named = |end: &End| {
            self.accepted.contains(end) || self.named.iter().any(|pattern| pattern.is(end))
        };
        let confirmed = self.link_trust == LinkTrust::Found || ends.iter().any(is_named);
        (!confirmed).then(|| {
            format!(
                "unconfirmed, and not used: hosts can forge LLDP. Name an end in `uplinks`, or \
                 `netsum fabric accept {}`",
                ends[0]
            )
        })
    }

    /// Restores the links that an earlier manager found. Their state will follow from LLDP.
    pub fn restore(&mut self, found: impl Iterator<Item = [End; 2]>) {
        if self.configured.is_empty() {
            self.memory
                .extend(found.map(|ends| (ends, Memory { carries: true, ..Memory::default() })));
            self.ends = Arc::new(self.memory.keys().flatten().cloned().collect());
        }
    }

    /// The discovered links.
    pub fn found(&self) -> Vec<[String; 2]> {
        let found = self.memory.keys().filter(|_| self.configured.is_empty());
        found.map(|ends| ends.clone().map(|end| end.to_string())).collect()
    }

    /// Whether the set of links has changed since the last call.
    pub fn has_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Stores the boxes' reports. Silent boxes keep their state, and so do the LLDP peers
    /// that others report.
    pub fn update(&mut self, fresh: HashMap<String, BoxReport>, now: Instant) {
        let reported = |of: &str| fresh.contains_key(of);
        let has_lldp = |of: &str| fresh.get(of).is_some_and(|report| report.lldp);
        let peers = lldp_peers(&fresh, &self.reports);
        self.measure(&fresh, now);
        self.reports.extend(fresh.clone());
        self.log_equal_chassis_ids();
        if self.configured.is_empty() {
            self.discover(&peers, now);
        }
        let configured = !self.configured.is_empty();
        for ([below, above], memory) in &mut self.memory {
            if !reported(&below.of) || !reported(&above.of) {
                memory.missing = None;
                continue;
            }
            let sees = |from: &End, to: &End| peers.get(from) == Some(&LldpPeer::Box(to.clone()));
            let [up, down] = [sees(above, below), sees(below, above)];
            let other =
                [(below, above), (above, below)].into_iter().find_map(|(end, configured)| {
                    let peer = peers
                        .get(end)
                        .filter(|peer| **peer != LldpPeer::Box(configured.clone()))?;
                    Some(format!(
                        "{end} is configured to {configured}, but receives LLDP from {peer}"
                    ))
                });
            let without_lldp = configured && (!has_lldp(&below.of) || !has_lldp(&above.of));
            let problem = match (up, down) {
                (true, true) => {
                    (memory.carries, memory.missing) = (true, None);
                    None
                }
                _ if configured && other.is_some() => other,
                // A medium without LLDP, or a box that does not use it.
                (false, false) if configured => memory.problem.take(),
                _ if without_lldp => None,
                _ if now - *memory.missing.get_or_insert(now) < GRACE => memory.problem.take(),
                (up, down) => {
                    memory.carries = false;
                    Some(match (up, down) {
                        (true, _) => format!("{below} receives no LLDP from {above}"),
                        (_, true) => format!("{above} receives no LLDP from {below}"),
                        _ => "neither end receives LLDP from the other".to_owned(),
                    })
                }
            };
            if problem != memory.problem {
                match &problem {
                    Some(why) => log::warn!("link {below} to {above}: {why}"),
                    None => log::info!("link {below} to {above}: LLDP works both ways"),
                }
            }
            memory.problem = problem;
        }
    }

    /// Logs boxes with equal chassis ids: a machine that was cloned with a running daemon, or one
    /// that is in the file twice.
    fn log_equal_chassis_ids(&mut self) {
        let mut by_id: HashMap<&str, Vec<&str>> = HashMap::new();
        for (name, report) in
            self.reports.iter().filter(|(_, report)| !report.chassis_id.is_empty())
        {
            by_id.entry(&report.chassis_id).or_default().push(name);
        }
        let alike =
            by_id.into_values().filter(|names| names.len() > 1).map(|names| names.join(", "));
        let alike: BTreeSet<String> = alike.collect();
        for names in alike.difference(&self.alike) {
            log::error!(
                "boxes {names}: their daemons have the same LLDP chassis id, so their links cannot \
                 be distinguished; remove the box that is in the file twice, or restart `netsum \
                 run` on a cloned machine"
            );
        }
        self.alike = alike;
    }

    /// Rates of ports since the last poll.
    fn measure(&mut self, fresh: &HashMap<String, BoxReport>, now: Instant) {
        self.rates.retain(|end, _| fresh.contains_key(&end.of));
        self.polled_at.retain(|of, _| fresh.contains_key(of));
        for (of, report) in fresh {
            let since = self.polled_at.insert(of.clone(), now);
            let (Some(since), Some(before)) = (since, self.reports.get(of)) else { continue };
            let seconds = (now - since).as_secs_f64();
            for p in &report.ports {
                let Some(old) = before.ports.iter().find(|old| old.name == p.name) else {
                    continue;
                };
                let rate =
                    |now: u64, before: u64| (now.saturating_sub(before) as f64 / seconds) as u64;
                let rates = [rate(p.rx_bytes, old.rx_bytes), rate(p.tx_bytes, old.tx_bytes)];
                self.rates.insert(End { of: of.clone(), port: p.name.clone() }, rates);
            }
        }
    }

    /// Adds discovered links; removes those whose ends have been elsewhere for a while.
    fn discover(&mut self, peers: &HashMap<End, LldpPeer>, now: Instant) {
        let level = |end: &End| self.levels.get(&end.of).copied().unwrap_or_default();
        let elsewhere = |end: &End, other: &End| {
            peers.get(end).is_some_and(|h| *h != LldpPeer::Box(other.clone()))
        };
        self.memory.retain(|[a, b], memory| {
            let both = |end: &End| match peers.get(end) {
                Some(LldpPeer::Box(other)) => peers.get(other) == Some(&LldpPeer::Box(end.clone())),
                _ => false,
            };
            let [of_a, of_b] = [elsewhere(a, b), elsewhere(b, a)];
            let moved = of_a && both(a) || of_b && both(b);
            // The frame may be somebody else's.
            !moved && (!(of_a || of_b) || now - *memory.missing.get_or_insert(now) < GRACE)
        });
        for (end, peer) in peers {
            let LldpPeer::Box(other) = peer else { continue };
            // A single end may have received frames of a host that claims to be the other.
            if peers.get(other) != Some(&LldpPeer::Box(end.clone())) {
                continue;
            }
            let mut ends = [end.clone(), other.clone()];
            ends.sort_by_key(|end| (level(end), end.to_string()));
            self.memory.entry(ends).or_insert_with_key(|[below, above]| {
                log::info!("link {below} to {above}: found");
                Memory::default()
            });
        }
        // Hosts behind a port are found, whatever its LLDP peer is.
        let may_be = |ends: &&[End; 2]| !ends.iter().any(|end| self.hosts.contains(end));
        let ends: BTreeSet<End> = self.memory.keys().filter(may_be).flatten().cloned().collect();
        self.changed |= ends != *self.ends;
        self.ends = Arc::new(ends);
    }

    /// Restores an earlier manager's measurements.
    pub fn restore_measured(&mut self, before: &[Measured]) {
        for (ends, memory) in &mut self.memory {
            let ends = ends.clone().map(|end| end.to_string());
            let of = before.iter().find(|of| of.ends == ends);
            memory.rate = of.map(|of| (of.rate, of.nominal));
        }
    }

    /// Measured rates that replace nominal ones.
    pub fn measured(&self) -> Vec<Measured> {
        let of = |(ends, memory): (&[End; 2], &Memory)| {
            let (rate, nominal) = memory.rate?;
            Some(Measured { ends: ends.clone().map(|end| end.to_string()), rate, nominal })
        };
        self.memory.iter().filter_map(of).collect()
    }

    /// Records a link's measured rate, or why it is unknown.
    pub fn record_measurement(&mut self, link: &Link, carries: Result<Capacity, String>) {
        let ends = [link.below.clone(), link.above.clone()];
        let link_state =
            self.all().into_iter().find(|link_state| link_state.link.below == link.below);
        let (Some(link_state), Some(memory)) = (link_state, self.memory.get_mut(&ends)) else {
            return;
        };
        let nominal = link_state.nominal.map(|rate| rate.0);
        let before = memory.counts(nominal);
        if let Ok(carries) = carries {
            let rate = settle(nominal, before, carries);
            memory.rate = rate.map(|rate| (rate, nominal.unwrap_or(0)));
        }
        let now = memory.counts(nominal);
        if now != before {
            let now = now.or(nominal).map_or_else(|| "?".to_owned(), |rate| Rate(rate).to_string());
            log::info!("link {} to {}: plans now use {now}", link.below, link.above);
            self.changed = true;
        }
        memory.measured = Some(match carries {
            Ok(Capacity::Exactly(rate)) => Ok(rate),
            Ok(Capacity::AtLeast(rate)) => Err(format!("carries {} or more", Rate(rate))),
            Err(why) => Err(why),
        });
    }

    /// Links with unknown rates, each once, that have not been measured since they appeared. A link
    /// is present if it carries traffic and both boxes report.
    pub fn unmeasured(
        &mut self,
        carries: impl Fn(&LinkState) -> bool,
        silent: impl Fn(&str) -> bool,
    ) -> Vec<Link> {
        let mut new = Vec::new();
        for link_state in self.all() {
            let ends = [link_state.link.below.clone(), link_state.link.above.clone()];
            if ends.iter().any(|end| silent(&end.of) || self.port(end).is_none()) {
                continue;
            }
            let is_there = carries(&link_state);
            let Some(memory) = self.memory.get_mut(&ends) else { continue };
            if !std::mem::replace(&mut memory.tried, is_there)
                && is_there
                && link_state.nominal.is_none()
            {
                new.push(link_state.link);
            }
        }
        new
    }

    /// Ports that are ends of links to other boxes.
    pub fn ends(&self) -> Arc<BTreeSet<End>> {
        self.ends.clone()
    }

    /// The box with an interface of this MAC address, where there is just one.
    pub fn with_mac(&self, mac: &str) -> Option<String> {
        let has = |report: &BoxReport| report.macs.iter().any(|of| of == mac);
        let mut of = self.reports.iter().filter(|(_, report)| has(report)).map(|(of, _)| of);
        of.next().filter(|_| of.next().is_none()).cloned()
    }

    fn port(&self, end: &End) -> Option<&api::Port> {
        self.reports.get(&end.of)?.ports.iter().find(|p| p.name == end.port)
    }

    /// Bits per second of a port; 0 if its driver does not know.
    pub fn rate(&self, end: &End) -> u64 {
        self.port(end).map_or(0, |p| p.rate)
    }

    /// The MTU of a port, if known.
    pub fn mtu(&self, end: &End) -> Option<u32> {
        self.port(end).map(|p| p.mtu).filter(|mtu| *mtu > 0)
    }

    /// All links, configured ones in the file's order. Among discovered ones, those that bridges
    /// use for unsummed packets come first.
    pub fn all(&self) -> Vec<LinkState> {
        let found = self.memory.keys().map(|[below, above]| Link {
            below: below.clone(),
            above: above.clone(),
            rate: None,
        });
        let mut links: Vec<Link> =
            if self.configured.is_empty() { found.collect() } else { self.configured.clone() };
        if self.configured.is_empty() {
            links.sort_by_key(|link| self.port(&link.below).is_some_and(|port| port.blocked));
        }
        links.into_iter().map(|link| self.link_state(link)).collect()
    }

    fn link_state(&self, mut link: Link) -> LinkState {
        let ends = [link.below.clone(), link.above.clone()];
        let memory = self.memory.get(&ends).cloned().unwrap_or_default();
        let rates =
            ends.iter().filter_map(|end| self.port(end)).map(|p| p.rate).filter(|rate| *rate > 0);
        let nominal = link.rate.or(rates.min().map(Rate));
        link.rate = memory.counts(nominal.map(|rate| rate.0)).map(Rate).or(nominal);
        let level = |end: &End| self.levels.get(&end.of).copied().unwrap_or_default();
        let [below, above] = [level(&link.below), level(&link.above)];
        let flat = self.configured.is_empty() && below == above;
        let level = flat.then(|| format!("both boxes are of level {below}: it is not used"));
        let unconfirmed = self.unconfirmed(&ends);
        let is_unused = flat || unconfirmed.is_some();
        let mtus = match [self.mtu(&link.below), self.mtu(&link.above)] {
            [Some(a), Some(b)] if a != b => {
                Some(format!("MTU {a} at {} and {b} at {}", link.below, link.above))
            }
            _ => None,
        };
        let problems = [level, unconfirmed, memory.problem, mtus];
        let problems: Vec<String> = problems.into_iter().flatten().collect();
        LinkState {
            link,
            carries: memory.carries && !is_unused,
            is_unused,
            problem: (!problems.is_empty()).then(|| problems.join("; ")),
            nominal,
            measured: memory.measured,
        }
    }

    /// All ports with their neighbours.
    pub fn ports(&self) -> Vec<api::FabricPort> {
        let peers = lldp_peers(&HashMap::new(), &self.reports);
        let by: BTreeSet<(End, End)> = peers
            .iter()
            .filter_map(|(end, peer)| match peer {
                LldpPeer::Box(other) => Some((end.clone(), other.clone())),
                LldpPeer::ForeignHost(_) => None,
            })
            .collect();
        let mut ports = Vec::new();
        for (name, report) in &self.reports {
            for p in &report.ports {
                let end = End { of: name.clone(), port: p.name.clone() };
                // A port that receives LLDP from this one is also its neighbour.
                let by = by
                    .iter()
                    .find(|(_, peer)| *peer == end)
                    .map(|(by, _)| LldpPeer::Box(by.clone()));
                let peer = peers.get(&end).cloned();
                let neighbour = peer.clone().or(by.clone());
                let mtu = match &neighbour {
                    Some(LldpPeer::Box(other)) => self.mtu(other),
                    _ => None,
                };
                let [rx_rate, tx_rate] = self.rates.get(&end).copied().unwrap_or_default();
                ports.push(api::FabricPort {
                    rx_rate,
                    tx_rate,
                    port: end.to_string(),
                    up: p.up,
                    rate: p.rate,
                    mtu: p.mtu,
                    foreign: matches!(neighbour, Some(LldpPeer::ForeignHost(_))),
                    sees_neighbour: peer.is_some(),
                    seen_by_neighbour: by.is_some() && by == neighbour,
                    neighbour: neighbour.map(|n| n.to_string()).unwrap_or_default(),
                    neighbour_mtu: mtu.unwrap_or_default(),
                });
            }
        }
        ports
    }
}

/// A port's LLDP neighbour.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LldpPeer {
    Box(End),
    /// The name that it gives itself.
    ForeignHost(String),
}

impl std::fmt::Display for LldpPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Box(end) => write!(f, "{end}"),
            Self::ForeignHost(text) => f.write_str(text),
        }
    }
}

/// Each port's neighbour, by the neighbour's chassis and port: boxes of one image may have equal
/// MAC addresses.
fn lldp_peers(
    fresh: &HashMap<String, BoxReport>,
    older: &BTreeMap<String, BoxReport>,
) -> HashMap<End, LldpPeer> {
    let older = older.iter().filter(|(name, _)| !fresh.contains_key(*name));
    let mut all: Vec<(&String, &BoxReport)> = fresh.iter().chain(older).collect();
    // Sorted, so boxes with equal chassis ids always resolve to the same one.
    all.sort_unstable_by_key(|(name, _)| *name);
    let mut owners: HashMap<[&str; 2], Vec<End>> = HashMap::new();
    let mut named = Vec::new();
    for (name, report) in all {
        for port in &report.ports {
            let end = End { of: name.clone(), port: port.name.clone() };
            // A box without a chassis id cannot be recognised.
            if !report.chassis_id.is_empty() {
                owners.entry([&report.chassis_id, &port.name]).or_default().push(end.clone());
            }
            named.extend(port.neighbour.as_ref().map(|neighbour| (end, neighbour)));
        }
    }
    let peer_of = |(end, n): (End, &api::Neighbour)| {
        let mut of = owners.get(&[&*n.chassis_id, &*n.port]).into_iter().flatten();
        let other = of.find(|other| other.of != end.of);
        let foreign = || LldpPeer::ForeignHost(format!("{} {} ({})", n.chassis, n.port, n.mac));
        let peer = other.cloned().map_or_else(foreign, LldpPeer::Box);
        (end, peer)
    };
    named.into_iter().map(peer_of).collect()
}

#[cfg(test)]
mod tests;
