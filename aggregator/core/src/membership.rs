//! Ranks that join a job by themselves, live and leave.
//!
//! The ranks of a job form an *epoch* together: when all have joined, their flows are registered
//! and the rings start. Ranks that replace their connections join again for the next epoch, which
//! begins with empty rings when all have joined.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netsum_common::abi::FlowKey;
use netsum_common::serial::{self, Psn, Qpn};
use serde::{Deserialize, Serialize};

use super::ring_order::{Location, ring_order};
use super::{Action, Controller, Job, Rank, Refusal, State, Token};
use crate::plane::{FlowSpec, no_host};

/// One end of a rank's connections in a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// Queue pair that receives from the previous rank.
    pub receive_qpn: u32,
    /// Queue pair that sends to the next rank.
    pub send_qpn: u32,
    /// PSN of the first packet sent.
    pub first_psn: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankAddress {
    pub rank: Rank,
    pub ip: IpAddr,
    /// Its interface's MAC address.
    pub mac: [u8; 6],
    /// Its connections, by ring.
    pub rings: Vec<Connection>,
    /// Its bypass connections.
    pub bypass: Connection,
    /// Its packets have IPv4 identifications that count up, as those of a kernel or an adapter do.
    /// The other ranks are told.
    pub any_ip_id: bool,
    /// Its endpoint retransmits selectively, and accepts results in any order. The other ranks are
    /// told.
    pub selective: bool,
    /// It takes any path MTU up to this; 0: only the job's.
    pub largest_mtu: u32,
    /// The UDP ports that it sends from to the next and to the previous rank; 0 if they are not
    /// known. The other ranks are told.
    pub ports: [u32; 2],
}

/// A job's epoch: the ranks that joined together, and their state.
#[derive(Clone, Debug)]
pub struct Epoch {
    pub number: u32,
    /// All ranks, in order.
    pub ranks: Vec<RankAddress>,
    /// The ranks in the order of their connections: each sends to the next.
    pub ring: Vec<Rank>,
    /// Its ranks are asked to reconnect; a new epoch will follow.
    pub reconnect: bool,
    /// Its ranks have fallen back from the box, and sum over the hosts' ring until it
    /// ends.
    pub on_host_ring: bool,
    /// What each rank's heartbeats reported; `None` after a restart until the first.
    reports: Vec<Option<RankReport>>,
    /// The number of the last requested path test.
    pub path_test: u32,
    /// For each rank, the number of the last path test in which its packet was acknowledged.
    pub acknowledged: Vec<u32>,
    /// When each rank's last heartbeat arrived; `None` when it has left.
    last_seen: Vec<Option<Instant>>,
    /// When the connection of each rank's last heartbeat was closed at the rank's end.
    disconnected: Vec<Option<Instant>>,
}

/// What a heartbeat reports about its rank's sums.
#[derive(Clone, Copy, Default, Debug)]
pub struct RankReport {
    /// It seals them.
    pub is_sealed: bool,
    /// Its nonzero floats that became 0, since the epoch began.
    pub underflows: u64,
}

/// Waiting ranks are sent at most this many reasons why other ranks were refused.
const MOST_REASONS: usize = 3;

/// Ranks that wait for others.
#[derive(Clone, Debug)]
pub(super) struct Forming {
    /// Number of ranks when all have joined.
    size: u32,
    ranks: BTreeMap<Rank, Waiting>,
}

impl Forming {
    /// Two hosts with the same address. Ranks of one host may share it if its adapter tells them
    /// apart.
    fn one_address_twice(&self) -> Option<Refusal> {
        let mut known: BTreeMap<IpAddr, &RankAddress> = BTreeMap::new();
        self.ranks.values().find_map(|Waiting { address, .. }| {
            let first = *known.entry(address.ip).or_insert(address);
            (first.mac != address.mac).then(|| {
                Refusal::Exists(format!(
                    "rank {} and rank {} have one address, {}, on two hosts: set NETSUM_IP there \
                     to addresses of their own",
                    first.rank, address.rank, address.ip
                ))
            })
        })
    }

    /// Neighbours in the ring on one host, whose packets do not reach a box.
    fn own_neighbour(&self, order: &[Rank]) -> Option<Refusal> {
        let ip = |rank| self.ranks.get(rank).map(|waiting| waiting.address.ip);
        let mut pairs = order.iter().zip(order.iter().cycle().skip(1));
        let (rank, next) = pairs.find(|(rank, next)| ip(rank) == ip(next))?;
        Some(Refusal::NotNow(format!(
            "ranks {rank} and {next} have one address, {}, and what they send to each other does \
             not reach a box: at most half of the ranks behind one box may have one address. A job \
             of one box alone, created there, has no such limit",
            ip(rank)?
        )))
    }
}

#[derive(Clone, Debug)]
struct Waiting {
    address: RankAddress,
    ifindex: u32,
    mac: [u8; 6],
    waiter: u64,
    deadline: Instant,
}

/// A rank's request to join.
#[derive(Clone, Debug)]
pub struct Join {
    pub job: String,
    pub token: Token,
    pub address: RankAddress,
    /// The port that it is behind.
    pub ifindex: u32,
    /// The source MAC address of its packets there: its own, or its router's.
    pub mac: [u8; 6],
    /// How many ranks join together; 0: as many as the job has.
    pub ranks: u32,
    /// The last epoch that it knows; 0 if none.
    pub epoch: u32,
    /// When the rank stops waiting.
    pub deadline: Instant,
    /// Identifies the request in [`Action::Reply`].
    pub waiter: u64,
}

impl Controller {
    /// A rank joins. It is answered when all have joined.
    pub fn join(&mut self, join: Join, now: Instant) -> Result<Vec<Action>, Refusal> {
        self.job_for(&join.job, join.token.reveal())?;
        self.check_address(&join)?;
        let job = self.job_mut(&join.job)?;
        if job.spec.members.is_part() {
            let message = format!(
                "job `{}`: spans several boxes, so ranks cannot join: register its flows with \
                 `netsum flow add`",
                join.job
            );
            return Err(Refusal::NotNow(message));
        }
        if job.spec.in_band {
            let message = format!("job `{}`: is set up in band, ranks cannot join", join.job);
            return Err(Refusal::NotNow(message));
        }
        if job.spec.float_lsb.is_some() {
            let message = format!(
                "job `{}`: adds floats (--dtype f32), and ranks of netsum send integers, which \
                 they make of floats themselves: create it without --dtype",
                join.job
            );
            return Err(Refusal::NotNow(message));
        }
        if !job.flows.is_empty() && job.epoch.is_none() {
            let message =
                format!("job `{}`: its flows were added by hand, ranks cannot join", join.job);
            return Err(Refusal::NotNow(message));
        }
        let rank = join.address.rank;
        if let Some(epoch) = &job.epoch
            && join.epoch <= epoch.number
        {
            // A repeated request after a lost answer, or another process.
            return match epoch.ranks.get(rank.0 as usize) {
                Some(known) if *known == join.address => {
                    Ok(vec![Action::Reply { waiter: join.waiter, result: Ok(epoch.number) }])
                }
                Some(known) => Err(Refusal::Exists(format!(
                    "rank {rank}: has already joined from {}, and the job is running",
                    known.ip
                ))),
                None => Err(Refusal::Exists(format!(
                    "rank {rank}: the job is running with {} ranks",
                    epoch.ranks.len()
                ))),
            };
        }
        let size = job.spec.joining(join.ranks)?;
        let mut actions = Vec::new();
        if let Some(before) = job.forming.as_ref().map(|f| f.size).filter(|&before| before != size)
        {
            // The launcher began again, without a host or with one more.
            let message = format!("rank {rank} has joined as one of {size} ranks, not of {before}");
            actions.extend(job.dismiss_waiters(&Refusal::NotNow(message)));
        }
        let forming = job.forming.get_or_insert_with(|| Forming { size, ranks: BTreeMap::new() });
        if let Some(before) = forming.ranks.get(&rank) {
            if before.address != join.address {
                let message = format!(
                    "rank {rank}: {} is already waiting to join as this rank",
                    before.address.ip
                );
                return Err(Refusal::Exists(message));
            }
            let result = Err(Refusal::NotNow(format!(
                "rank {rank}: a later request to join replaced this one"
            )));
            actions.push(Action::Reply { waiter: before.waiter, result });
        }
        let Join { address, ifindex, mac, waiter, deadline, .. } = join;
        job.refused.remove(&rank);
        forming.ranks.insert(rank, Waiting { address, ifindex, mac, waiter, deadline });
        if forming.ranks.len() == size as usize {
            actions.extend(self.begin(&join.job, now));
        }
        Ok(actions)
    }

    /// Removes a rank whose process ended while it waited for others.
    pub fn withdraw(&mut self, name: &str, rank: Rank, waiter: u64) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        let Some(forming) = &mut job.forming else { return };
        if forming.ranks.get(&rank).is_some_and(|waiting| waiting.waiter == waiter) {
            forming.ranks.remove(&rank);
            job.forming.take_if(|forming| forming.ranks.is_empty());
        }
    }

    /// Records why a rank was refused, for the error of ranks that wait for it.
    pub fn note_refused(&mut self, name: &str, rank: Rank, why: &str) {
        if let Some(job) = self.jobs.get_mut(name).filter(|job| rank.0 < job.spec.max_members()) {
            job.refused.insert(rank, why.to_owned());
        }
    }

    fn check_address(&self, join: &Join) -> Result<(), Refusal> {
        let job = self.job(&join.job)?;
        let a = &join.address;
        let ranks = job.spec.joining(join.ranks)?;
        if a.rank.0 >= ranks {
            return Err(Refusal::Invalid(format!(
                "rank {}: the job has ranks 0 to {}",
                a.rank,
                ranks - 1
            )));
        }
        self.check_mtu(&format!("rank {}", a.rank), job.spec.mtu, join.ifindex)?;
        // Without rings in the box, ranks have the connections of one nevertheless.
        let rings = job.rings.len().max(1);
        // A group may have lost its rings since it was described.
        if a.rings.len() != rings && (a.rings.is_empty() || !job.rings.is_empty()) {
            return Err(Refusal::Invalid(format!(
                "rank {}: connections for {} rings, the job has {}",
                a.rank,
                a.rings.len(),
                rings
            )));
        }
        for c in a.rings.iter().chain([&a.bypass]) {
            for (what, value) in [
                ("receive_qpn", c.receive_qpn),
                ("send_qpn", c.send_qpn),
                ("first_psn", c.first_psn),
            ] {
                if value > serial::MASK {
                    return Err(Refusal::Invalid(format!(
                        "rank {}: {what} {value:#x}: more than 24 bits",
                        a.rank
                    )));
                }
            }
        }
        let mut qpns: Vec<u32> =
            a.rings.iter().chain([&a.bypass]).flat_map(|c| [c.receive_qpn, c.send_qpn]).collect();
        qpns.sort_unstable();
        if qpns.windows(2).any(|w| w[0] == w[1]) {
            return Err(Refusal::Invalid(format!(
                "rank {}: a queue pair number is used twice",
                a.rank
            )));
        }
        Ok(())
    }

    /// Begins an epoch: all ranks have joined.
    fn begin(&mut self, name: &str, now: Instant) -> Vec<Action> {
        let Some(job) = self.jobs.get(name) else { return Vec::new() };
        let Some(forming) = &job.forming else { return Vec::new() };
        let link = self.link_mtu();
        let mut flows = Vec::new();
        let order = self.ring_order(forming);
        let own_neighbour = forming.own_neighbour(&order).filter(|_| !job.rings.is_empty());
        if own_neighbour.is_some() && job.spec.is_group {
            // A group may be all ranks of one host.
            let mut actions = self.remove_rings(name);
            actions.extend(self.begin(name, now));
            return actions;
        }
        // A manager gives boxes orders for rings with all their flows, or for none.
        let is_manager = forming.ranks.values().any(|w| self.box_of(w.ifindex).is_some());
        let (refused, on_host_ring) =
            if is_manager { (own_neighbour, false) } else { (None, own_neighbour.is_some()) };
        for (r, ring) in job.rings.iter().enumerate() {
            let neighbours = order.iter().zip(order.iter().cycle().skip(1));
            for (member, (rank, next)) in (0..).map(Rank).zip(neighbours) {
                let [Some(w), Some(next)] = [rank, next].map(|rank| forming.ranks.get(rank)) else {
                    return Vec::new();
                };
                flows.push(FlowSpec {
                    ring: ring.id,
                    member,
                    base_psn: Psn::new(w.address.rings[r].first_psn),
                    ifindex: w.ifindex,
                    src: w.address.ip,
                    dst: next.address.ip,
                    qpn: Qpn::new(next.address.rings[r].receive_qpn),
                    src_mac: Some(w.mac),
                    group_mark: 0,
                });
            }
        }
        let sender = |member: Rank| order[member.0 as usize];
        let refusal = forming
            .one_address_twice()
            .or(refused)
            .or_else(|| self.kept_apart(&flows, sender))
            .or_else(|| self.contradiction(name, &flows, sender))
            .or_else(|| self.check_owners(name, &flows, sender).err());
        if on_host_ring {
            flows.clear();
        }
        if refusal.is_none() {
            self.take_over(&flows);
        }
        let Some(job) = self.jobs.get_mut(name) else { return Vec::new() };
        if let Some(refusal) = refusal {
            return job.dismiss_waiters(&refusal);
        }
        let Some(forming) = job.forming.take() else { return Vec::new() };
        job.spec.ranks = forming.size;
        // Rings start empty. A single rank with go-back-N requires all results in order.
        let in_order = forming.ranks.values().any(|w| !w.address.selective);
        let most = forming.ranks.values().map(|w| w.address.largest_mtu).min().unwrap_or(0);
        let mut actions = job.restart_for(in_order, job.spec.mtu_for(link, most));
        job.last_epoch += 1;
        let number = job.last_epoch;
        job.flows = flows.clone();
        actions.extend(flows.into_iter().map(Action::AddFlow));
        actions.extend(job.activate_if_complete());
        // Also where it has no flows.
        job.state = State::Active;
        let waiters: Vec<u64> = forming.ranks.values().map(|w| w.waiter).collect();
        job.idle_since = None;
        job.epoch = Some(Epoch {
            number,
            ring: order,
            reconnect: false,
            on_host_ring: job.flows.is_empty(),
            reports: vec![Some(RankReport::default()); forming.ranks.len()],
            path_test: 0,
            acknowledged: vec![0; forming.ranks.len()],
            last_seen: vec![Some(now); forming.ranks.len()],
            disconnected: vec![None; forming.ranks.len()],
            ranks: forming.ranks.into_values().map(|w| w.address).collect(),
        });
        actions
            .extend(waiters.into_iter().map(|waiter| Action::Reply { waiter, result: Ok(number) }));
        actions
    }

    /// At a manager, the box that has a port: its name there is BOX/PORT.
    fn box_of(&self, ifindex: u32) -> Option<&str> {
        let port = self.ports.iter().find(|p| p.ifindex == ifindex)?;
        port.name.split_once('/').map(|(of, _)| of)
    }

    /// The order of ranks in the ring.
    fn ring_order(&self, forming: &Forming) -> Vec<Rank> {
        let location = |(rank, w): (&Rank, &Waiting)| Location {
            rank: *rank,
            behind: self.box_of(w.ifindex),
            ip: w.address.ip,
        };
        ring_order(&forming.ranks.iter().map(location).collect::<Vec<_>>())
    }

    /// Why neighbours in a ring cannot reach each other over the bridge, if so. Routed connections
    /// do not use the bridge. `sender`: the rank that owns a member's connection.
    fn kept_apart(&self, flows: &[FlowSpec], sender: impl Fn(Rank) -> Rank) -> Option<Refusal> {
        let bridge = |flow: &FlowSpec| self.isolated.get(&flow.ifindex);
        let apart = |flow: &FlowSpec, next: &FlowSpec| {
            (flow.ring, flow.dst) == (next.ring, next.src)
                && flow.ifindex != next.ifindex
                && bridge(flow).is_some_and(|of| bridge(next) == Some(of))
        };
        let bridged = flows
            .iter()
            .filter(|flow| bridge(flow).is_some() && self.router(flow.ifindex).is_none());
        let (flow, next) = bridged
            .into_iter()
            .find_map(|flow| Some((flow, flows.iter().find(|next| apart(flow, next))?)))?;
        let [one, other] = [flow, next].map(|flow| self.port_name(flow.ifindex));
        Some(Refusal::NotNow(format!(
            "rank {} is behind port {one} and rank {} behind port {other}, which are isolated from \
             each other: run `bridge link set dev {one} isolated off`, and the same for {other}",
            sender(flow.member),
            sender(next.member)
        )))
    }

    /// Why flows cannot be registered for a job, if so. `sender`: the rank that owns a member's
    /// connection.
    pub(super) fn contradiction(
        &self,
        name: &str,
        flows: &[FlowSpec],
        sender: impl Fn(Rank) -> Rank,
    ) -> Option<Refusal> {
        let others: HashSet<FlowKey> = self
            .jobs
            .values()
            .filter(|j| j.spec.name != name)
            .flat_map(|j| &j.flows)
            .map(FlowSpec::key)
            .collect();
        let mut own = HashSet::new();
        flows.iter().find_map(|f| {
            let FlowSpec { src, dst, member, .. } = f;
            let qpn = f.qpn.get();
            if let Some(ip) = no_host([*src, *dst]) {
                let message =
                    format!("rank {}: {ip} is not the address of a host", sender(*member));
                return Some(Refusal::Invalid(message));
            }
            if src.is_ipv4() != dst.is_ipv4() {
                let message = format!(
                    "rank {}: its address {src} and the next rank's, {dst}, are not of one family",
                    sender(*member)
                );
                return Some(Refusal::Invalid(message));
            }
            if others.contains(&f.key()) {
                let message = format!(
                    "{dst}, queue pair {qpn:#x}: a flow of another job goes \
                    there already"
                );
                return Some(Refusal::Exists(message));
            }
            // Ranks of one host share an address.
            (!own.insert(f.key())).then(|| {
                Refusal::Exists(format!(
                    "{dst}, queue pair {qpn:#x}: two ranks of the job claim it"
                ))
            })
        })
    }

    /// A rank is alive. Returns its job.
    pub fn heartbeat(
        &mut self,
        name: &str,
        token: &str,
        rank: Rank,
        epoch: u32,
        on_host_ring: bool,
        now: Instant,
    ) -> Result<&Job, Refusal> {
        self.job_for(name, token)?;
        let job = self.job_mut(name)?;
        if let Some(current) = job.epoch.as_mut().filter(|e| e.number == epoch)
            && let Some(last_seen) = current.last_seen.get_mut(rank.0 as usize)
        {
            // The rank may have left to reconnect, failed, and stayed.
            let has_left = last_seen.replace(now).is_none();
            current.disconnected[rank.0 as usize] = None;
            // All ranks fall back together, so one report counts.
            if on_host_ring && !has_left && !std::mem::replace(&mut current.on_host_ring, true) {
                job.fallbacks += 1;
            }
        }
        Ok(job)
    }

    /// The connection of a rank's last heartbeat was closed at the rank's end, as when its process
    /// ends.
    pub fn disconnected(&mut self, name: &str, rank: Rank, epoch: u32, at: Instant) {
        let current = self.jobs.get_mut(name).and_then(|job| job.epoch.as_mut());
        if let Some(current) = current.filter(|e| e.number == epoch)
            // A later heartbeat came over another connection.
            && current.last_seen(rank).is_some_and(|last_seen| last_seen <= at)
        {
            current.disconnected[rank.0 as usize] = Some(at);
        }
    }

    /// Asks all ranks of an active job to test their path again. Returns the test's number; `None`
    /// if the job has no epoch of netsum's ranks.
    pub fn request_path_test(&mut self, name: &str) -> Option<u32> {
        let epoch = self.jobs.get_mut(name)?.epoch.as_mut()?;
        epoch.path_test += 1;
        Some(epoch.path_test)
    }

    /// A rank's packet of this path test was acknowledged.
    pub fn path_test_acknowledged(&mut self, name: &str, rank: Rank, epoch: u32, test: u32) {
        let current = self.jobs.get_mut(name).and_then(|job| job.epoch.as_mut());
        // A report above the last test is about one that an earlier daemon asked for.
        if let Some(current) = current.filter(|e| e.number == epoch && test <= e.path_test)
            && let Some(known) = current.acknowledged.get_mut(rank.0 as usize)
        {
            *known = test;
        }
    }

    /// Notes what a rank's heartbeat reports.
    pub fn set_report(&mut self, name: &str, rank: Rank, epoch: u32, report: RankReport) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        if let Some(current) = job.epoch.as_mut().filter(|e| e.number == epoch)
            && let Some(known) = current.reports.get_mut(rank.0 as usize)
        {
            // An earlier daemon has counted those before. Heartbeats may overtake each other.
            let before = known.map_or(report.underflows, |known| known.underflows);
            let underflows = before.max(report.underflows);
            job.underflows = job.underflows.saturating_add(underflows - before);
            *known = Some(RankReport { underflows, ..report });
        }
    }

    /// No box sums for the ranks of this epoch. Returns whether they may begin without one.
    pub fn set_on_host_ring(&mut self, name: &str, epoch: u32) -> bool {
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.spec.host_ring_fallback) else {
            return false;
        };
        let current = job.epoch.as_mut().filter(|current| current.number == epoch);
        current.map(|current| current.on_host_ring = true).is_some()
    }

    /// The daemon could not receive heartbeats of these jobs for this long, which does not count as
    /// silence.
    pub fn extend_heartbeats(&mut self, took: Duration, of: impl Fn(&str) -> bool) {
        let jobs = self.jobs.values_mut().filter(|job| of(&job.spec.name));
        for epoch in jobs.filter_map(|job| job.epoch.as_mut()) {
            let times = epoch.last_seen.iter_mut().chain(&mut epoch.disconnected);
            times.flatten().for_each(|time| *time += took);
        }
    }

    /// A rank leaves. When all have left, the job waits for others, and a group ends.
    pub fn leave(
        &mut self,
        name: &str,
        token: &str,
        rank: Rank,
        epoch: u32,
    ) -> Result<Vec<Action>, Refusal> {
        self.job_for(name, token)?;
        let job = self.job_mut(name)?;
        let Some(current) = job.epoch.as_mut().filter(|e| e.number == epoch) else {
            return Ok(Vec::new());
        };
        if let Some(last_seen) = current.last_seen.get_mut(rank.0 as usize) {
            *last_seen = None;
        }
        if current.last_seen.iter().any(Option::is_some) {
            return Ok(Vec::new());
        }
        let reconnects = current.reconnect || job.idle_since.is_some() || job.has_waiters();
        job.epoch = None;
        job.state = State::Waiting;
        let flows = job.flows.iter().map(FlowSpec::key).collect();
        let mut actions =
            if job.spec.is_group && !reconnects { self.delete_job(name)? } else { job.restart() };
        // Ranks that have left send no more data.
        actions.push(Action::ForgetEnded(flows));
        Ok(actions)
    }

    /// A rank gives up, and its epoch ends with an error.
    pub fn abort(
        &mut self,
        name: &str,
        token: &str,
        rank: Rank,
        epoch: u32,
        reason: &str,
    ) -> Result<Vec<Action>, Refusal> {
        self.job_for(name, token)?;
        let job = self.job_mut(name)?;
        if job.epoch.as_ref().is_none_or(|e| e.number != epoch) {
            return Ok(Vec::new());
        }
        let reason = format!("rank {rank} gave up: {reason}");
        let mut actions = job.end_epoch(reason.clone());
        actions.extend(self.end_groups(name, &reason));
        Ok(actions)
    }
}

impl Epoch {
    /// Whether all ranks report that they seal their sums.
    pub fn is_sealed(&self) -> bool {
        self.reports.iter().all(|report| report.is_some_and(|report| report.is_sealed))
    }

    /// An epoch that began under an earlier daemon. Ranks that have not left count as alive from
    /// `now` on.
    pub(super) fn resumed(
        number: u32,
        ranks: Vec<RankAddress>,
        ring: Vec<Rank>,
        left: &[bool],
        now: Instant,
    ) -> Self {
        let last_seen = left.iter().map(|&left| (!left).then_some(now)).collect();
        let ring = if ring.is_empty() { Rank::all(ranks.len() as u32).collect() } else { ring };
        Self {
            number,
            ring,
            reconnect: false,
            on_host_ring: false,
            reports: vec![None; ranks.len()],
            path_test: 0,
            acknowledged: vec![0; ranks.len()],
            disconnected: vec![None; ranks.len()],
            ranks,
            last_seen,
        }
    }

    /// Ranks that have not left, and whose connections have been closed for at least `after`
    /// without another heartbeat: their processes have ended.
    pub fn ended(&self, now: Instant, after: Duration) -> impl Iterator<Item = Rank> {
        let ranks = (0..).map(Rank).zip(self.last_seen.iter().zip(&self.disconnected));
        ranks.filter_map(move |(rank, (last_seen, disconnected))| {
            let closed = disconnected.filter(|_| last_seen.is_some())?;
            (now.saturating_duration_since(closed) >= after).then_some(rank)
        })
    }

    /// When a rank's last heartbeat arrived; `None` when it has left.
    pub fn last_seen(&self, rank: Rank) -> Option<Instant> {
        self.last_seen.get(rank.0 as usize).copied().flatten()
    }
}

impl Job {
    /// Ranks that ranks which have joined wait for; all ranks, if none has joined.
    pub(super) fn missing(&self) -> Vec<Rank> {
        let forming = self.forming.as_ref();
        let size = forming.map_or(self.spec.ranks, |forming| forming.size);
        let has_joined = |rank: &Rank| forming.is_some_and(|f| f.ranks.contains_key(rank));
        Rank::all(size).filter(|rank| !has_joined(rank)).collect()
    }

    /// Ranks that wait for others to join.
    pub fn joined(&self) -> Vec<Rank> {
        self.forming.as_ref().map(|f| f.ranks.keys().copied().collect()).unwrap_or_default()
    }

    pub(super) fn has_waiters(&self) -> bool {
        self.forming.is_some()
    }

    /// Refuses all waiting ranks.
    pub(super) fn dismiss_waiters(&mut self, why: &Refusal) -> Vec<Action> {
        let forming = self.forming.take().map(|f| f.ranks).unwrap_or_default();
        forming
            .into_values()
            .map(|w| Action::Reply { waiter: w.waiter, result: Err(why.clone()) })
            .collect()
    }

    /// Answers ranks whose deadline has passed.
    pub(super) fn late_joins(&mut self, now: Instant) -> Vec<Action> {
        let Some(forming) = &mut self.forming else { return Vec::new() };
        let missing: Vec<Rank> =
            Rank::all(forming.size).filter(|r| !forming.ranks.contains_key(r)).collect();
        // Only a few: the answer must fit a header.
        let why = missing.iter().filter_map(|rank| self.refused.get(rank)).take(MOST_REASONS);
        let why: String = why.flat_map(|why| ["; refused: ", why]).collect();
        let missing: Vec<String> = missing.iter().map(Rank::to_string).collect();
        let late: Vec<Rank> = forming
            .ranks
            .iter()
            .filter(|(_, w)| w.deadline <= now)
            .map(|(rank, _)| *rank)
            .collect();
        let message =
            format!("not all ranks have joined in time; missing: {}{why}", missing.join(", "));
        let actions = late
            .iter()
            .filter_map(|rank| forming.ranks.remove(rank))
            .map(|w| Action::Reply {
                waiter: w.waiter,
                result: Err(Refusal::Late(message.clone())),
            })
            .collect();
        if forming.ranks.is_empty() {
            self.forming = None;
            self.refused.clear();
        }
        actions
    }

    /// Why the job must fail, if all ranks that have not left have been silent for too long. As long
    /// as one is alive, it detects dead ranks itself, by an operation in flight, which is when it
    /// matters.
    pub(super) fn silence(&self, now: Instant, timeout: Duration) -> Option<String> {
        let silent = |last_seen: &Instant| now.saturating_duration_since(*last_seen);
        let last_seen = &self.epoch.as_ref()?.last_seen;
        let least =
            last_seen.iter().flatten().map(silent).min().filter(|least| *least > timeout)?;
        let ranks: Vec<String> = (0..)
            .zip(last_seen)
            .filter(|(_, h)| h.is_some())
            .map(|(rank, _)| Rank(rank).to_string())
            .collect();
        let ranks = if ranks.len() == 1 {
            format!("rank {}", ranks[0])
        } else {
            format!("ranks {}", ranks.join(", "))
        };
        Some(format!("{ranks}: no heartbeat for {} ms", least.as_millis()))
    }
}
