//! The boxes: their state, their ports, and behind which of these a host is.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use netsum_api::v1 as api;
use netsum_api::{PROTOCOL, RELEASE};
use netsum_controller::message::{mac_from_text, mac_text};
use netsum_core::saved::Measured;
use netsum_core::{PortInfo, Refusal};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::{Code, Response, Status};

use crate::client::{self, CONNECT, Client, Election, ORDERS, PATIENCE};
use crate::config::{BoxConfig, Config, End, Link};
use crate::diagnosis::{self, Said};
use crate::hosts::{Hosts, TWICE};
use crate::layout::Paths;
use crate::link_table::{Answer, LinkState, LinkTable};
use crate::measured::Carries;
use crate::share::Speeds;

/// Limit of remembered hosts.
const MOST_HOSTS: usize = 1 << 16;

/// All boxes of the fabric.
pub struct Boxes {
    all: Vec<(String, Client)>,
    addresses: Vec<String>,
    finder: Hosts,
    election: Election,
    known: Mutex<Known>,
    /// Serialises measurements of links.
    pub(crate) measuring: tokio::sync::Mutex<()>,
}

/// The known state of the boxes.
#[derive(Default)]
struct Known {
    link_table: LinkTable,
    /// Ports by their numbers here, from 1.
    ends: BTreeMap<u32, End>,
    numbers: HashMap<End, u32>,
    /// Ports without traffic.
    down: HashSet<End>,
    /// Boxes that do not answer; true if there is not even a connection.
    silent: HashMap<String, bool>,
    /// Jobs that no boxes can sum at present.
    stuck: HashSet<String>,
    /// Trees of the jobs that boxes were ordered to sum.
    trees: Vec<api::FabricJob>,
    /// Aggregation rate of each box in bytes per second, and its number of CPUs, as far as known.
    aggregation_rate: HashMap<String, (u64, u32)>,
    /// Jobs of each box.
    jobs: HashMap<String, Vec<String>>,
    /// Boxes that get no new rings.
    drains: BTreeMap<String, Drain>,
    /// Boxes of another version, with the reason as text.
    strange: BTreeMap<String, String>,
    /// Where hosts were, by MAC address.
    hosts: HashMap<[u8; 6], u32>,
    /// Boxes that a manager of a later election has called, with the reason as text.
    ahead: BTreeMap<String, String>,
}

struct Drain {
    reason: String,
    /// No rings are left.
    done: bool,
}

impl Known {
    fn carries(&self, link_state: &LinkState) -> bool {
        carries(&self.down, link_state)
    }

    fn links(&self) -> Vec<Link> {
        self.link_table.all().into_iter().map(|link_state| link_state.link).collect()
    }

    fn look_at_version(&mut self, name: &str, protocol: u32, release: &str) {
        if protocol == PROTOCOL {
            self.strange.remove(name);
            return;
        }
        let theirs = if release.is_empty() { "of an older version" } else { release };
        let why = format!(
            "runs netsum {theirs} (protocol {protocol}), and the manager netsum {RELEASE} \
             (protocol {PROTOCOL})"
        );
        if self.strange.insert(name.to_owned(), why.clone()).is_none() {
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
pub enum Place {
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
            .confirmed_by(config.uplinks.clone(), config.found.trust);
        let known = Known { link_table, ..Known::default() };
        Ok(Self {
            all,
            addresses,
            finder,
            election,
            known: Mutex::new(known),
            measuring: tokio::sync::Mutex::default(),
        })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the election of all later requests to boxes.
    pub fn elect(&self, election: u64) {
        self.election.set(election);
    }

    /// Records that a box refuses orders because of a manager of a later election.
    pub fn is_followed(&self, name: &str, why: &Status) {
        self.known().ahead.insert(name.to_owned(), why.message().to_owned());
    }

    /// Whether any box refuses orders for that reason.
    pub fn is_ahead(&self) -> bool {
        !self.known().ahead.is_empty()
    }

    /// The manager of a later election, as text, if most boxes have been called by it. A single box
    /// may report a false election.
    pub fn follower(&self) -> Option<String> {
        let known = self.known();
        let mut ahead = known.ahead.iter().filter(|(name, _)| !known.silent.contains_key(*name));
        let count = ahead.clone().count();
        ahead
            .next()
            .filter(|_| 2 * count > self.all.len())
            .map(|(name, why)| format!("box {name} {why}"))
    }

    /// Restores the port numbers of an earlier manager.
    pub fn number_again(&self, ports: &[PortInfo]) {
        let mut known = self.known();
        for port in ports {
            let Ok(end) = End::try_from(port.name.clone()) else { continue };
            known.numbers.insert(end.clone(), port.ifindex);
            known.ends.insert(port.ifindex, end);
        }
    }

    /// Restores the links that an earlier manager found.
    pub fn find_again(&self, found: &[[String; 2]]) {
        let ends = |[below, above]: &[String; 2]| {
            Some([End::try_from(below.clone()).ok()?, End::try_from(above.clone()).ok()?])
        };
        let is_there = |[below, above]: &[End; 2]| {
            [below, above].iter().all(|end| self.client(&end.of).is_some())
        };
        self.known().link_table.restore(found.iter().filter_map(ends).filter(is_there));
    }

    /// Ends of the discovered links.
    pub fn found(&self) -> Vec<[String; 2]> {
        self.known().link_table.found()
    }

    /// Whether the set of links has changed since the last call.
    pub fn has_found(&self) -> bool {
        self.known().link_table.has_changed()
    }

    /// Uses found links with this end, or stops using them, by an administrator's order.
    ///
    /// # Errors
    /// If there is no such link.
    pub fn accept(&self, end: &str, revoke: bool) -> Result<(), Refusal> {
        let end = End::try_from(end.to_owned()).map_err(Refusal::Invalid)?;
        self.known().link_table.accept(&end, revoke).map_err(Refusal::NotNow)?;
        let not = if revoke { "not " } else { "" };
        log::info!("links with the end {end} are {not}accepted by an administrator");
        Ok(())
    }

    /// Ends of links that administrators have accepted.
    pub fn accepted(&self) -> Vec<String> {
        self.known().link_table.accepted()
    }

    /// Restores what earlier managers were told to accept.
    pub fn accepted_before(&self, ends: &[String]) {
        let ends = ends.iter().filter_map(|text| End::try_from(text.clone()).ok());
        self.known().link_table.accepted_before(ends);
    }

    /// Records ports behind which ranks are at work, by their numbers here.
    pub fn have_hosts(&self, ports: &HashSet<u32>) {
        let Known { link_table, ends, .. } = &mut *self.known();
        link_table.have_hosts(ports.iter().filter_map(|port| ends.get(port).cloned()));
    }

    /// Restores the rates that an earlier manager measured; the links must be known.
    pub fn measured_before(&self, rates: &[Measured]) {
        self.known().link_table.restore_measured(rates);
    }

    /// Measured rates that replace nominal ones.
    pub fn measured(&self) -> Vec<Measured> {
        self.known().link_table.measured()
    }

    /// Records a link's measured rate, or why it is unknown.
    pub fn have_measured(&self, link: &Link, carries: Result<Carries, String>) {
        self.known().link_table.have_measured(link, carries);
    }

    /// Links that have appeared since the last call and whose rate is unknown.
    pub fn unmeasured(&self) -> Vec<Link> {
        let Known { link_table, down, silent, .. } = &mut *self.known();
        link_table
            .unmeasured(|link_state| carries(down, link_state), |name| silent.contains_key(name))
    }

    /// A port by its number here.
    pub fn end(&self, number: u32) -> Option<End> {
        self.known().ends.get(&number).cloned()
    }

    /// The links and boxes that rings can use, as far as known.
    pub fn paths(&self) -> Paths {
        let known = self.known();
        let link_table = known.link_table.all();
        let mut first = HashMap::new();
        for LinkState { link, .. } in link_table.iter().filter(|link_state| !link_state.is_unused) {
            first.entry(link.below.of.clone()).or_insert_with(|| link.clone());
        }
        let link_table = link_table.into_iter().filter(|link_state| known.carries(link_state));
        let links: Vec<Link> = link_table.map(|link_state| link_state.link).collect();
        let ends = links.iter().flat_map(|link| [&link.below, &link.above]);
        let mtus = ends.filter_map(|end| Some((end.clone(), known.link_table.mtu(end)?))).collect();
        let drained = known
            .drains
            .iter()
            .map(|(name, d)| (name.clone(), format!("is drained: {}", d.reason)));
        let strange = known.strange.iter().map(|(name, why)| (name.clone(), why.clone()));
        let ahead = known.ahead.iter().map(|(name, why)| (name.clone(), why.clone()));
        let silent = known.silent.keys().map(|name| (name.clone(), "does not answer".to_owned()));
        Paths {
            links,
            first,
            mtus,
            closed: silent.chain(ahead).chain(drained).chain(strange).collect(),
        }
    }

    /// All links, including those without traffic.
    pub fn links(&self) -> Vec<Link> {
        self.known().links()
    }

    /// Whether a box did not answer its last request.
    pub fn is_silent(&self, name: &str) -> bool {
        self.known().silent.contains_key(name)
    }

    /// The same with an open connection: the box may still answer.
    pub fn is_late(&self, name: &str) -> bool {
        let known = self.known();
        let closed = [&known.strange, &known.ahead].iter().any(|why| why.contains_key(name));
        known.silent.get(name) == Some(&false) && !closed && !known.drains.contains_key(name)
    }

    /// Awaits a box's answer to an order, with a shorter timeout if the box has been silent.
    ///
    /// # Errors
    /// The box's error, or a timeout.
    pub async fn order<T>(
        &self,
        name: &str,
        answer: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<Response<T>, Status> {
        let patience = if self.is_silent(name) { PATIENCE } else { ORDERS };
        tokio::time::timeout(patience, answer).await.unwrap_or_else(|_| {
            let late = Status::deadline_exceeded(format!("no answer within {patience:?}"));
            self.was_silent(name, &late);
            Err(late)
        })
    }

    /// Number of boxes without a connection.
    pub fn unreachable(&self) -> usize {
        self.known().silent.values().filter(|unreachable| **unreachable).count()
    }

    /// Records that a box has not answered.
    pub fn was_silent(&self, name: &str, why: &Status) {
        let unreachable = why.code() == Code::Unavailable;
        if self.known().silent.insert(name.to_owned(), unreachable).is_none() {
            log::warn!("box {name}: does not answer: {}", why.message());
        }
    }

    /// Records the jobs that no boxes can sum at present. Jobs that were stuck before stay so until
    /// all boxes answer, unless boxes are ordered to sum them.
    pub fn are_stuck(&self, mut jobs: HashSet<String>, is_told: impl Fn(&str) -> bool) {
        let mut known = self.known();
        if !known.silent.is_empty() {
            jobs.extend(known.stuck.drain().filter(|name| !is_told(name)));
        }
        known.stuck = jobs;
    }

    /// Records the trees of all jobs.
    pub fn have_trees(&self, trees: Vec<api::FabricJob>) {
        self.known().trees = trees;
    }

    pub fn is_stuck(&self, job: &str) -> bool {
        self.known().stuck.contains(job)
    }

    /// Boxes that get no new rings, and why.
    pub fn drained(&self) -> BTreeMap<String, String> {
        self.known()
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
        let mut known = self.known();
        match reason {
            Some(reason) => {
                log::info!("box {name}: drained, gets no new rings: {reason}");
                known.drains.insert(name.to_owned(), Drain { reason, done: false });
            }
            None if known.drains.remove(name).is_none() => {
                return Err(Refusal::NotNow(format!("box `{name}` is not drained")));
            }
            None => log::info!("box {name}: drain ended, gets rings again"),
        }
        Ok(())
    }

    /// Records which boxes have no rings, at a moment when no rings are being set up there.
    pub fn are_empty(&self, is_empty: impl Fn(&str) -> bool) {
        for (name, drain) in &mut self.known().drains {
            let done = is_empty(name);
            if done && !std::mem::replace(&mut drain.done, done) {
                log::info!("box {name}: is drained");
            }
            drain.done = done;
        }
    }

    /// The known state as a message.
    pub fn show(&self) -> api::Fabric {
        let known = self.known();
        let of = |(name, address): (&String, &String)| api::FabricBox {
            name: name.clone(),
            address: address.clone(),
            answers: known.jobs.contains_key(name) && !known.silent.contains_key(name),
            jobs: known.jobs.get(name).cloned().unwrap_or_default(),
            drain: known.drains.get(name).map(|drain| drain.reason.clone()),
            drained: known.drains.get(name).is_some_and(|drain| drain.done),
            hosts: Vec::new(),
            aggregation_rate: known
                .aggregation_rate
                .get(name)
                .map(|(aggregation_rate, _)| *aggregation_rate),
            cpus: known.aggregation_rate.get(name).map(|(_, cpus)| *cpus),
        };
        let link = |link_state: LinkState| api::FabricLink {
            up: known.carries(&link_state),
            below: link_state.link.below.to_string(),
            above: link_state.link.above.to_string(),
            trouble: link_state.trouble,
            rate: link_state.link.rate.map_or(0, |rate| rate.0),
            nominal: link_state.nominal.map_or(0, |rate| rate.0),
            measured: link_state.measured.iter().flatten().copied().next().unwrap_or_default(),
            unmeasured: link_state.measured.and_then(Result::err),
        };
        let boxes = self.all.iter().map(|(name, _)| name).zip(&self.addresses).map(of);
        let links = known.link_table.all().into_iter().map(link);
        api::Fabric {
            boxes: boxes.collect(),
            links: links.collect(),
            ports: known.link_table.ports(),
            jobs: known.trees.clone(),
        }
    }

    pub fn client(&self, name: &str) -> Option<Client> {
        self.all.iter().find(|(n, _)| n == name).map(|(_, client)| client.clone())
    }

    /// Where a machine is that has this MAC address.
    pub async fn place_of(&self, mac: [u8; 6]) -> Option<Place> {
        let links = {
            let link_table = &self.known().link_table;
            if let Some(of) = link_table.with_mac(&mac_text(mac)) {
                return Some(Place::On(of));
            }
            link_table.ends()
        };
        let ends = self.finder.behind(mac_text(mac), None, links).await;
        // At two boxes: a link between these is not known yet.
        let mut ends = ends.into_iter();
        ends.next().filter(|_| ends.next().is_none()).map(Place::Behind)
    }

    fn is_link(&self, of: &str, port: &str) -> bool {
        self.known().link_table.ends().contains(&End { of: of.to_owned(), port: port.to_owned() })
    }

    /// Sends a request to all boxes at once.
    fn ask<T: Send + 'static, F: Future<Output = Result<Response<T>, Status>> + Send + 'static>(
        &self,
        patience: Duration,
        question: impl Fn(Client) -> F,
    ) -> JoinSet<(String, Result<T, Status>)> {
        let mut answers = JoinSet::new();
        for (name, client) in &self.all {
            let (name, answer) = (name.clone(), question(client.clone()));
            answers.spawn(async move {
                let late =
                    |_| Err(Status::deadline_exceeded(format!("no answer within {patience:?}")));
                let answer = tokio::time::timeout(patience, answer).await.unwrap_or_else(late);
                (name, answer.map(Response::into_inner))
            });
        }
        answers
    }

    /// Finds the ports of a host that no bridge has seen yet, or that is behind a router; also its
    /// packets' MAC address there, and the errors of boxes that do not know.
    async fn find_slowly(
        &self,
        mac: [u8; 6],
        ip: IpAddr,
        patience: Duration,
    ) -> (BTreeMap<End, [u8; 6]>, String) {
        let request = api::FindPortRequest { mac: mac_text(mac), ip: ip.to_string() };
        // A box that is busy with a large job answers late.
        let mut answers = self.ask(patience, move |mut c| {
            let request = request.clone();
            async move { c.agent.find_port(request).await }
        });
        let (mut why, mut found) = (String::new(), BTreeMap::new());
        let mut until = Instant::now() + patience;
        while let Ok(Some(Ok((name, answer)))) =
            tokio::time::timeout_at(until, answers.join_next()).await
        {
            match answer {
                // Other racks' hosts are behind the links.
                Ok(reply) if self.is_link(&name, &reply.port) => {}
                Ok(reply) => {
                    let there = mac_from_text(&reply.mac).unwrap_or(mac);
                    found.insert(End { of: name, port: reply.port }, there);
                    until = Instant::now() + TWICE;
                }
                Err(status) if status.code() == Code::NotFound => {}
                Err(status) => why += &format!("; box {name}: {}", status.message()),
            }
        }
        (found, why)
    }

    /// Polls all boxes; returns those that answer.
    pub async fn look(&self) -> HashMap<String, Seen> {
        let mut looks = JoinSet::new();
        for (name, client) in &self.all {
            let (name, mut client) = (name.clone(), client.clone());
            looks.spawn(async move {
                let both = async {
                    let ports = client
                        .agent
                        .list_ports(api::ListPortsRequest::default())
                        .await?
                        .into_inner();
                    let jobs =
                        client.jobs.list_jobs(api::ListJobsRequest {}).await?.into_inner().jobs;
                    Ok::<_, Status>((ports, jobs))
                };
                let late = |_| Err(Status::deadline_exceeded(format!("not within {PATIENCE:?}")));
                (name, tokio::time::timeout(PATIENCE, both).await.unwrap_or_else(late))
            });
        }
        let (mut seen, mut said) = (HashMap::new(), HashMap::new());
        while let Some(Ok((name, answer))) = looks.join_next().await {
            match answer {
                Ok((reply, jobs)) => {
                    let api::ListPortsReply {
                        ports,
                        protocol,
                        release,
                        election,
                        listens,
                        aggregation_rate,
                        cpus,
                        chassis_id,
                        macs,
                    } = reply;
                    let mut known = self.known();
                    let answer = Answer { ports: ports.clone(), listens, chassis_id, macs };
                    said.insert(name.clone(), answer);
                    known.look_at_version(&name, protocol, &release);
                    let ours = self.election.get();
                    if ours > 0 && election > ours {
                        let why = format!(
                            "follows a manager of election {election}, later than election {ours} \
                             of this one"
                        );
                        if known.ahead.insert(name.clone(), why.clone()).is_none() {
                            log::error!("box {name}: {why}: it gets no rings");
                        }
                    } else {
                        known.ahead.remove(&name);
                    }
                    if known.silent.remove(&name).is_some() {
                        log::info!("box {name}: answers again");
                    }
                    let cpus = cpus.unwrap_or(1).max(1);
                    aggregation_rate
                        .map(|rate| known.aggregation_rate.insert(name.clone(), (rate, cpus)));
                    let names = jobs.iter().map(|job| job.name.clone()).collect();
                    known.jobs.insert(name.clone(), names);
                    let is_there = |end: &End| ports.iter().any(|p| p.name == end.port);
                    let ends = known.links().into_iter().flat_map(|l| [l.below, l.above]);
                    known.down.extend(ends.filter(|e| e.of == name && !is_there(e)));
                    let info = |p: api::Port| {
                        let end = End { of: name.clone(), port: p.name };
                        let ifindex = known.number(&end);
                        let port =
                            PortInfo { name: end.to_string(), ifindex, mtu: p.mtu, router: None };
                        // Without its program a port sums nothing: the daemon attaches the program
                        // shortly after a port comes up.
                        let sums = p.up && !p.xdp.is_empty();
                        let changed =
                            if sums { known.down.remove(&end) } else { known.down.insert(end) };
                        if changed {
                            log::warn!(
                                "port {} is {}",
                                port.name,
                                if sums { "up again" } else { "down" }
                            );
                        }
                        port
                    };
                    let ports = ports.into_iter().map(info).collect();
                    seen.insert(name, Seen { jobs, ports });
                }
                Err(status) => {
                    if status.code() == Code::Unimplemented {
                        // A box before protocol 5 has no service of this name.
                        self.known().look_at_version(&name, 0, "");
                    }
                    self.was_silent(&name, &status);
                }
            }
        }
        self.known().link_table.look(said, Instant::now().into_std());
        seen
    }

    /// The port that a host is behind, and the MAC address that its packets have there. `patience`
    /// bounds the time that boxes take to answer.
    ///
    /// # Errors
    /// If it is behind no port, or behind several.
    pub async fn find(
        &self,
        rank: u32,
        mac: [u8; 6],
        ip: IpAddr,
        patience: Duration,
    ) -> Result<(u32, [u8; 6]), Status> {
        let (was, links) = {
            let known = self.known();
            (
                known.hosts.get(&mac).and_then(|port| known.ends.get(port)).cloned(),
                known.link_table.ends(),
            )
        };
        let ends = self.finder.behind(mac_text(mac), was, links).await;
        let mut found: BTreeMap<End, [u8; 6]> = ends.into_iter().map(|end| (end, mac)).collect();
        let mut why = String::new();
        if found.is_empty() {
            (found, why) = self.find_slowly(mac, ip, patience).await;
        }
        let refused = |why: String| Err(Status::failed_precondition(format!("rank {rank}: {why}")));
        let mac_of = format!("MAC address {} of {ip}", mac_text(mac));
        let mut ends = found.iter();
        match (ends.next(), ends.next()) {
            (None, _) => refused(format!("no box has seen {mac_of} on a port towards hosts{why}")),
            (Some((end, there)), None) => {
                let mut known = self.known();
                let number = known.number(end);
                if known.hosts.len() == MOST_HOSTS {
                    known.hosts.clear();
                }
                known.hosts.insert(mac, number);
                Ok((number, *there))
            }
            (Some((one, _)), Some((other, _))) => refused(format!(
                "{mac_of} is behind {one} and {other}: a host must be behind one port; list links \
                 between boxes in the manager's file",
            )),
        }
    }

    /// The boxes and the hosts below them.
    pub async fn topology(&self) -> api::Fabric {
        self.look().await;
        let mut fabric = self.show();
        let request = api::ListPortsRequest { hosts: true };
        let mut answers =
            self.ask(PATIENCE, move |mut c| async move { c.agent.list_ports(request).await });
        while let Some(Ok((name, answer))) = answers.join_next().await {
            let ports = answer.map(|reply| reply.ports).unwrap_or_default().into_iter();
            let hosts = ports.filter(|port| !self.is_link(&name, &port.name)).flat_map(|p| {
                let port = p.name;
                p.hosts.into_iter().map(move |mac| api::FabricHost { mac, port: port.clone() })
            });
            let hosts = hosts.collect();
            fabric
                .boxes
                .iter_mut()
                .filter(|b| b.name == name)
                .for_each(|b| b.hosts.clone_from(&hosts));
        }
        fabric
    }

    /// Measures the links that no job's rings use.
    pub async fn measure(&self) {
        let links = {
            let known = self.known();
            let carry =
                known.link_table.all().into_iter().filter(|link_state| known.carries(link_state));
            carry.map(|link_state| link_state.link).collect()
        };
        self.measure_links(links).await;
    }

    /// Why a job at work stands still; `heard` is the time since each rank's last heartbeat.
    pub async fn diagnose(
        &self,
        request: api::DiagnoseRequest,
        heard: Vec<Option<Duration>>,
    ) -> api::Diagnosis {
        let (job, ranks) = (request.job.clone(), heard.len() as u32);
        let at: HashSet<String> = {
            let known = self.known();
            let has = |(_, jobs): &(&String, &Vec<String>)| jobs.contains(&job);
            known.jobs.iter().filter(has).map(|(name, _)| name.clone()).collect()
        };
        let patience = PATIENCE + Duration::from_millis(request.watch_ms.into());
        let mut answers = self.ask(patience, move |mut c| {
            let request = request.clone();
            async move { c.jobs.diagnose(request).await }
        });
        let mut said: Vec<Said> = Vec::new();
        while let Some(Ok((name, answer))) = answers.join_next().await {
            if at.contains(&name) {
                said.push((name, answer.map_err(|status| status.message().to_owned())));
            }
        }
        let heard = |rank: u32| heard.get(rank as usize).copied().flatten();
        let state = api::JobState::Active.into();
        api::Diagnosis {
            job,
            ranks,
            state,
            ..diagnosis::merge(&said, &self.known().links(), heard)
        }
    }
}

impl Speeds for Boxes {
    fn rate(&self, port: &End) -> u64 {
        self.known().link_table.rate(port)
    }

    fn aggregation_rate(&self, of: &str) -> Option<(u64, u32)> {
        self.known().aggregation_rate.get(of).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_of_another_version_is_told_with_both() {
        let mut known = Known::default();
        known.look_at_version("a", PROTOCOL, RELEASE);
        assert!(known.strange.is_empty());
        known.look_at_version("a", PROTOCOL + 1, "9.0");
        let why = format!(
            "runs netsum 9.0 (protocol {}), and the manager netsum {RELEASE}",
            PROTOCOL + 1
        );
        assert!(known.strange["a"].starts_with(&why), "{}", known.strange["a"]);
        known.look_at_version("a", PROTOCOL, RELEASE);
        assert!(known.strange.is_empty(), "it was upgraded");
    }
}
