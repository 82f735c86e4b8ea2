//! The boxes: their state, their ports, and behind which of these a host is.

mod requests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use netsum_api::v1 as api;
use netsum_api::{PROTOCOL, RELEASE};
use netsum_core::saved::Measured;
use netsum_core::{PortInfo, Refusal};
use tonic::{Code, Status};

use crate::client::{self, CONNECT, Client, Election};
use crate::config::{BoxConfig, Config, End, Link};
use crate::hosts::Hosts;
use crate::layout::Paths;
use crate::link_table::{LinkState, LinkTable};
use crate::probe_results::Capacity;
use crate::share::ReportedRates;

/// All boxes of the fabric.
pub struct Boxes {
    all: Vec<(String, Client)>,
    addresses: Vec<String>,
    finder: Hosts,
    election: Election,
    state: Mutex<BoxesState>,
    /// Serialises measurements of links.
    pub(crate) measuring: tokio::sync::Mutex<()>,
}

/// Why a box does not answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NoAnswer {
    /// The connection is open: the box may still answer.
    Late,
    Unreachable,
}

/// The known state of the boxes.
#[derive(Default)]
struct BoxesState {
    link_table: LinkTable,
    /// Ports by their numbers here, from 1.
    ends: BTreeMap<u32, End>,
    numbers: HashMap<End, u32>,
    /// Ports without traffic.
    down: HashSet<End>,
    /// Boxes that did not answer their last request.
    silent: HashMap<String, NoAnswer>,
    /// Jobs that no boxes can sum at present.
    unplaced: HashSet<String>,
    /// Trees of the jobs that boxes were ordered to sum.
    trees: Vec<api::FabricJob>,
    /// Aggregation rate of each box in bytes per second, and its number of CPUs, as far as known.
    aggregation_rate: HashMap<String, (u64, u32)>,
    /// Jobs of each box.
    jobs: HashMap<String, Vec<String>>,
    /// Boxes that get no new rings.
    drains: BTreeMap<String, Drain>,
    /// Boxes of another version, with the reason as text.
    incompatible: BTreeMap<String, String>,
    /// Where hosts were, by MAC address.
    hosts: HashMap<[u8; 6], u32>,
    /// Boxes that follow a manager of a later election, with the reason as text.
    follows_other_manager: BTreeMap<String, String>,
}

struct Drain {
    reason: String,
    /// No rings are left.
    done: bool,
}

impl BoxesState {
    fn carries(&self, link_state: &LinkState) -> bool {
        carries(&self.down, link_state)
    }

    fn links(&self) -> Vec<Link> {
        self.link_table.all().into_iter().map(|link_state| link_state.link).collect()
    }

    fn check_version(&mut self, name: &str, protocol: u32, release: &str) {
        if protocol == PROTOCOL {
            self.incompatible.remove(name);
            return;
        }
        let theirs = if release.is_empty() { "of an older version" } else { release };
        let why = format!(
            "runs netsum {theirs} (protocol {protocol}), and the manager netsum {RELEASE} \
             (protocol {PROTOCOL})"
        );
        if self.incompatible.insert(name.to_owned(), why.clone()).is_none() {
            log::error!("box {name}: {why}: it gets no rings; install the same release on both");
        }
    }

    fn number(&mut self, end: &End) -> u32 {
        *self.numbers.entry(end.clone()).or_insert_with(|| {
            let number = self.ends.last_key_value().map_or(1, |(last, _)| last + 1);
            self.ends.insert(number, end.clone());
            number
        })
    }
}

/// Whether a link carries traffic in both directions, given the ports without traffic.
fn carries(down: &HashSet<End>, LinkState { link, carries, .. }: &LinkState) -> bool {
    *carries && !down.contains(&link.below) && !down.contains(&link.above)
}

/// State of a box at one poll.
pub struct Seen {
    pub jobs: Vec<api::Job>,
    pub ports: Vec<PortInfo>,
}

/// The ports of all boxes. Those of silent ones stay as they were before.
pub fn ports(seen: &HashMap<String, Seen>, before: &[PortInfo]) -> Vec<PortInfo> {
    let silent = |name: &str| name.split_once('/').is_some_and(|(of, _)| !seen.contains_key(of));
    let mut ports: Vec<_> = seen.values().flat_map(|s| s.ports.clone()).collect();
    ports.extend(before.iter().filter(|p| silent(&p.name)).cloned());
    ports.sort_unstable_by_key(|p| p.ifindex);
    ports
}

/// Where the manager is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ManagerLocation {
    Behind(End),
    /// It runs on a box.
    On(String),
}

impl Boxes {
    /// Connects on first use.
    ///
    /// # Errors
    /// If a certificate, key or address cannot be used.
    pub fn new(config: &Config) -> Result<Self> {
        let election = Election::default();
        let client = |b: &BoxConfig| -> Result<_> {
            let client = client::connect(b, config.tls.as_ref(), election.clone());
            Ok((b.name.clone(), client.with_context(|| format!("box {}", b.name))?))
        };
        let all: Vec<_> = config.boxes.iter().map(client).collect::<Result<_>>()?;
        let addresses = config.boxes.iter().map(|b| b.address.clone()).collect();
        let finder = Hosts::new(all.clone(), CONNECT);
        let levels = config.boxes.iter().map(|b| (b.name.clone(), b.level)).collect();
        let link_table = LinkTable::new(config.links.clone(), levels)
            .confirmed_by(config.uplinks.clone(), config.link_trust);
        let state = BoxesState { link_table, ..BoxesState::default() };
        Ok(Self {
            all,
            addresses,
            finder,
            election,
            state: Mutex::new(state),
            measuring: tokio::sync::Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, BoxesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the election of all later requests to boxes.
    pub fn set_election(&self, election: u64) {
        self.election.set(election);
    }

    /// Records that a box refuses orders because of a manager of a later election.
    pub fn record_refusal(&self, name: &str, why: &Status) {
        self.state().follows_other_manager.insert(name.to_owned(), why.message().to_owned());
    }

    /// Whether any box refuses orders for that reason.
    pub fn is_superseded(&self) -> bool {
        !self.state().follows_other_manager.is_empty()
    }

    /// The manager of a later election, as text, if most boxes have been called by it. A single box
    /// may report a false election.
    pub fn successor(&self) -> Option<String> {
        let state = self.state();
        let mut follows_other_manager = state
            .follows_other_manager
            .iter()
            .filter(|(name, _)| !state.silent.contains_key(*name));
        let count = follows_other_manager.clone().count();
        follows_other_manager
            .next()
            .filter(|_| 2 * count > self.all.len())
            .map(|(name, why)| format!("box {name} {why}"))
    }

    /// Restores the port numbers of an earlier manager.
    pub fn restore_port_numbers(&self, ports: &[PortInfo]) {
        let mut state = self.state();
        for port in ports {
            let Ok(end) = End::try_from(port.name.clone()) else { continue };
            state.numbers.insert(end.clone(), port.ifindex);
            state.ends.insert(port.ifindex, end);
        }
    }

    /// Restores the links that an earlier manager found.
    pub fn restore_found_links(&self, found: &[[String; 2]]) {
        let ends = |[below, above]: &[String; 2]| {
            Some([End::try_from(below.clone()).ok()?, End::try_from(above.clone()).ok()?])
        };
        let is_there = |[below, above]: &[End; 2]| {
            [below, above].iter().all(|end| self.client(&end.of).is_some())
        };
        self.state().link_table.restore(found.iter().filter_map(ends).filter(is_there));
    }

    /// Ends of the discovered links.
    pub fn found(&self) -> Vec<[String; 2]> {
        self.state().link_table.found()
    }

    /// Whether the set of links has changed since the last call.
    pub fn links_changed(&self) -> bool {
        self.state().link_table.has_changed()
    }

    /// Uses found links with this end, or stops using them, by an administrator's order.
    ///
    /// # Errors
    /// If there is no such link.
    pub fn accept(&self, end: &str, revoke: bool) -> Result<(), Refusal> {
        let end = End::try_from(end.to_owned()).map_err(Refusal::Invalid)?;
        self.state().link_table.accept(&end, revoke).map_err(Refusal::NotNow)?;
        let what = if revoke { "acceptance revoked" } else { "accepted" };
        log::info!("links with end {end}: {what} by an administrator");
        Ok(())
    }

    /// Ends of links that administrators have accepted.
    pub fn accepted(&self) -> Vec<String> {
        self.state().link_table.accepted()
    }

    /// Restores what earlier managers were told to accept.
    pub fn restore_accepted(&self, ends: &[String]) {
        let ends = ends.iter().filter_map(|text| End::try_from(text.clone()).ok());
        self.state().link_table.restore_accepted(ends);
    }

    /// Records ports behind which ranks are at work, by their numbers here.
    pub fn set_host_ports(&self, ports: &HashSet<u32>) {
        let BoxesState { link_table, ends, .. } = &mut *self.state();
        link_table.set_host_ports(ports.iter().filter_map(|port| ends.get(port).cloned()));
    }

    /// Restores the rates that an earlier manager measured; the links must be known.
    pub fn restore_measured(&self, rates: &[Measured]) {
        self.state().link_table.restore_measured(rates);
    }

    /// Measured rates that replace nominal ones.
    pub fn measured(&self) -> Vec<Measured> {
        self.state().link_table.measured()
    }

    /// Records a link's measured rate, or why it is unknown.
    pub fn record_measurement(&self, link: &Link, carries: Result<Capacity, String>) {
        self.state().link_table.record_measurement(link, carries);
    }

    /// Links that have appeared since the last call and whose rate is unknown.
    pub fn unmeasured(&self) -> Vec<Link> {
        let BoxesState { link_table, down, silent, .. } = &mut *self.state();
        link_table
            .unmeasured(|link_state| carries(down, link_state), |name| silent.contains_key(name))
    }

    /// A port by its number here.
    pub fn end(&self, number: u32) -> Option<End> {
        self.state().ends.get(&number).cloned()
    }

    /// The links and boxes that rings can use, as far as known.
    pub fn paths(&self) -> Paths {
        let state = self.state();
        let link_table = state.link_table.all();
        let mut first = HashMap::new();
        for LinkState { link, .. } in link_table.iter().filter(|link_state| !link_state.is_unused) {
            first.entry(link.below.of.clone()).or_insert_with(|| link.clone());
        }
        let link_table = link_table.into_iter().filter(|link_state| state.carries(link_state));
        let links: Vec<Link> = link_table.map(|link_state| link_state.link).collect();
        let ends = links.iter().flat_map(|link| [&link.below, &link.above]);
        let mtus = ends.filter_map(|end| Some((end.clone(), state.link_table.mtu(end)?))).collect();
        let drained = state
            .drains
            .iter()
            .map(|(name, d)| (name.clone(), format!("is drained: {}", d.reason)));
        let incompatible = state.incompatible.iter().map(|(name, why)| (name.clone(), why.clone()));
        let follows_other_manager =
            state.follows_other_manager.iter().map(|(name, why)| (name.clone(), why.clone()));
        let silent = state.silent.keys().map(|name| (name.clone(), "does not answer".to_owned()));
        Paths {
            links,
            first,
            mtus,
            closed: silent
                .chain(follows_other_manager)
                .chain(drained)
                .chain(incompatible)
                .collect(),
        }
    }

    /// All links, including those without traffic.
    pub fn links(&self) -> Vec<Link> {
        self.state().links()
    }

    /// Whether a box did not answer its last request.
    pub fn is_silent(&self, name: &str) -> bool {
        self.state().silent.contains_key(name)
    }

    /// The same with an open connection: the box may still answer.
    pub fn is_late(&self, name: &str) -> bool {
        let state = self.state();
        let closed = [&state.incompatible, &state.follows_other_manager]
            .iter()
            .any(|why| why.contains_key(name));
        state.silent.get(name) == Some(&NoAnswer::Late)
            && !closed
            && !state.drains.contains_key(name)
    }

    /// Number of boxes without a connection.
    pub fn unreachable(&self) -> usize {
        self.state().silent.values().filter(|why| **why == NoAnswer::Unreachable).count()
    }

    /// Records that a box has not answered.
    pub fn record_no_answer(&self, name: &str, why: &Status) {
        let kind = match why.code() {
            Code::Unavailable => NoAnswer::Unreachable,
            _ => NoAnswer::Late,
        };
        if self.state().silent.insert(name.to_owned(), kind).is_none() {
            log::warn!("box {name}: does not answer: {}", why.message());
        }
    }

    /// Records the jobs that no boxes can sum at present. Jobs that were unplaced before stay so
    /// until all boxes answer, unless boxes are ordered to sum them.
    pub fn set_unplaced_jobs(&self, mut jobs: HashSet<String>, has_orders: impl Fn(&str) -> bool) {
        let mut state = self.state();
        if !state.silent.is_empty() {
            jobs.extend(state.unplaced.drain().filter(|name| !has_orders(name)));
        }
        state.unplaced = jobs;
    }

    /// Records the trees of all jobs.
    pub fn set_trees(&self, trees: Vec<api::FabricJob>) {
        self.state().trees = trees;
    }

    pub fn is_unplaced(&self, job: &str) -> bool {
        self.state().unplaced.contains(job)
    }

    /// Boxes that get no new rings, and why.
    pub fn drained(&self) -> BTreeMap<String, String> {
        self.state()
            .drains
            .iter()
            .map(|(name, drain)| (name.clone(), drain.reason.clone()))
            .collect()
    }

    /// Drains a box, for this reason; without a reason ends the drain.
    ///
    /// # Errors
    /// If the box does not exist, or is not drained.
    pub fn drain(&self, name: &str, reason: Option<String>) -> Result<(), Refusal> {
        if self.client(name).is_none() {
            let names: Vec<&str> = self.all.iter().map(|(name, _)| &**name).collect();
            return Err(Refusal::NotFound(format!(
                "box `{name}` does not exist: there are {}",
                names.join(", ")
            )));
        }
        let mut state = self.state();
        match reason {
            Some(reason) => {
                log::info!("box {name}: draining, gets no new rings: {reason}");
                state.drains.insert(name.to_owned(), Drain { reason, done: false });
            }
            None if state.drains.remove(name).is_none() => {
                return Err(Refusal::NotNow(format!("box `{name}` is not drained")));
            }
            None => log::info!("box {name}: drain ended, gets rings again"),
        }
        Ok(())
    }

    /// Records which boxes have no rings, at a moment when no rings are being set up there.
    pub fn update_drains(&self, is_empty: impl Fn(&str) -> bool) {
        for (name, drain) in &mut self.state().drains {
            let done = is_empty(name);
            if done && !std::mem::replace(&mut drain.done, done) {
                log::info!("box {name}: drained");
            }
            drain.done = done;
        }
    }

    /// The known state as a message.
    pub fn show(&self) -> api::Fabric {
        let state = self.state();
        let of = |(name, address): (&String, &String)| api::FabricBox {
            name: name.clone(),
            address: address.clone(),
            answers: state.jobs.contains_key(name) && !state.silent.contains_key(name),
            jobs: state.jobs.get(name).cloned().unwrap_or_default(),
            drain: state.drains.get(name).map(|drain| drain.reason.clone()),
            drained: state.drains.get(name).is_some_and(|drain| drain.done),
            hosts: Vec::new(),
            aggregation_rate: state
                .aggregation_rate
                .get(name)
                .map(|(aggregation_rate, _)| *aggregation_rate),
            cpus: state.aggregation_rate.get(name).map(|(_, cpus)| *cpus),
        };
        let link = |link_state: LinkState| api::FabricLink {
            up: state.carries(&link_state),
            below: link_state.link.below.to_string(),
            above: link_state.link.above.to_string(),
            problem: link_state.problem,
            rate: link_state.link.rate.map_or(0, |rate| rate.0),
            nominal: link_state.nominal.map_or(0, |rate| rate.0),
            measured: link_state.measured.iter().flatten().copied().next().unwrap_or_default(),
            unmeasured: link_state.measured.and_then(Result::err),
        };
        let boxes = self.all.iter().map(|(name, _)| name).zip(&self.addresses).map(of);
        let links = state.link_table.all().into_iter().map(link);
        api::Fabric {
            boxes: boxes.collect(),
            links: links.collect(),
            ports: state.link_table.ports(),
            jobs: state.trees.clone(),
        }
    }

    pub fn client(&self, name: &str) -> Option<Client> {
        self.all.iter().find(|(n, _)| n == name).map(|(_, client)| client.clone())
    }
}

impl ReportedRates for Boxes {
    fn rate(&self, port: &End) -> u64 {
        self.state().link_table.rate(port)
    }

    fn aggregation_rate(&self, of: &str) -> Option<(u64, u32)> {
        self.state().aggregation_rate.get(of).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_of_another_version_has_orders_with_both() {
        let mut state = BoxesState::default();
        state.check_version("a", PROTOCOL, RELEASE);
        assert!(state.incompatible.is_empty());
        state.check_version("a", PROTOCOL + 1, "9.0");
        let why = format!(
            "runs netsum 9.0 (protocol {}), and the manager netsum {RELEASE}",
            PROTOCOL + 1
        );
        assert!(state.incompatible["a"].starts_with(&why), "{}", state.incompatible["a"]);
        state.check_version("a", PROTOCOL, RELEASE);
        assert!(state.incompatible.is_empty(), "it was upgraded");
    }
}
