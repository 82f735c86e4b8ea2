//! Jobs that are set up in band: the daemon learns of ranks only by the first packet of each
//! connection.
//!
//! The data plane notes and drops such packets, which makes their senders retransmit them. When the
//! connections of all ranks have shown up, an *epoch* begins with empty rings and these flows.
//! Replaced connections show up again; the present epoch continues until those of all ranks have.
//! Only while the epoch has not released a single sum, and all ranks still hold everything that
//! they have sent, does it restart with any connection that shows up: a rank may have given up its
//! connection before the others arrived.
//!
//! A holder of the job's token can claim a rank once: if the rank is at work or waits already, a
//! claim from another address or port is refused.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use netsum_common::abi::{FlowKey, InBandJob, RingNumber, ring_flags};
use netsum_common::serial::Psn;
use netsum_common::wire::in_band::DTYPE_I32;

use super::{Action, Controller, Job, JobRing, JobSpec, Rank, State};
use crate::plane::{FirstPacket, FlowSpec, no_host};

/// A claim whose packet has not arrived again for this long belongs to a closed connection.
pub const CLAIM_LIFE: Duration = Duration::from_secs(60);
/// Refusals that are kept for queries.
const REFUSALS: usize = 8;

/// The in-band state of a job.
#[derive(Clone, Debug, Default)]
pub struct InBand {
    /// Connections that wait for those of other ranks.
    claims: Claims,
    /// Connections of the present epoch. Empty after a restart of the daemon.
    present: Claims,
    /// The last refused claims with their reasons, without repetitions.
    refused: VecDeque<String>,
    /// Connections of the last epoch, by destination and first PSN. A late duplicate of their first
    /// packets is not a new claim.
    ended: Vec<(FlowKey, Psn)>,
}

/// Connections by ring and rank.
type Claims = BTreeMap<(JobRing, Rank), Claimed>;

#[derive(Clone, Debug)]
struct Claimed {
    packet: FirstPacket,
    seen: Instant,
}

/// The outcome of a first packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is known already.
    Known,
    /// Its rank has shown up; others are missing.
    Waits,
    /// The claim is refused, for this reason.
    Refused(String),
    /// Ranks contradict the job or each other: the job has failed.
    Failed(String),
    /// All ranks have shown up, and this epoch begins.
    Began(u32),
}

/// The answer to first packets of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstPacketsReply {
    pub job: String,
    /// The outcome of each packet, in their order.
    pub outcomes: Vec<Outcome>,
    /// Actions for the caller.
    pub actions: Vec<Action>,
}

impl InBand {
    /// Records a refusal; returns whether it is new.
    fn refuse(&mut self, why: &str) -> bool {
        if self.refused.iter().any(|known| known == why) {
            return false;
        }
        if self.refused.len() == REFUSALS {
            self.refused.pop_front();
        }
        self.refused.push_back(why.to_owned());
        true
    }
}

impl Controller {
    /// Whether any job accepts first packets.
    pub fn has_in_band_jobs(&self) -> bool {
        self.jobs.values().any(|job| job.spec.in_band)
    }

    /// The job that owns a first packet.
    pub fn job_in_band(&self, number: RingNumber) -> Option<&Job> {
        self.jobs
            .values()
            .find(|job| job.spec.in_band && job.rings.first().is_some_and(|r| r.id == number))
    }

    /// Whether a first packet could restart the epoch of an active job. Only a rank at its own
    /// address and port can.
    pub fn may_restart_epoch(&self, packet: &FirstPacket) -> bool {
        self.job_in_band(packet.job).is_some_and(|job| {
            job.state == State::Active
                && !job.knows(packet)
                && (packet.header.message, packet.header.index) == (0, 0)
                && job.fits(packet).is_ok()
                && job.is_elsewhere(packet).is_none()
        })
    }

    /// Handles first packets that the data plane has noted for a job; `None` if the job has been
    /// deleted. `released`: the job's rings have released sums since they were created. Creating
    /// rings takes long, so they are created at most once per call.
    pub fn first_packets(
        &mut self,
        number: RingNumber,
        packets: &[FirstPacket],
        released: bool,
        now: Instant,
    ) -> Option<FirstPacketsReply> {
        let job = self.job_in_band(number)?.spec.name.clone();
        let mut last_claim = None;
        let mut one = |(i, packet)| match self.claim(&job, packet, now) {
            Ok(again) => {
                last_claim = Some(i);
                if again { Outcome::Known } else { Outcome::Waits }
            }
            Err(outcome) => outcome,
        };
        let mut outcomes: Vec<Outcome> = packets.iter().enumerate().map(&mut one).collect();
        let mut actions = Vec::new();
        if let Some(last) = last_claim
            && let Some(all) = self.jobs[&job].all_claims(released)
        {
            match self.begin_in_band(&job, all) {
                Ok(begin) => {
                    (outcomes[last], actions) = (Outcome::Began(self.jobs[&job].last_epoch), begin)
                }
                Err(outcome) => outcomes[last] = outcome,
            }
        }
        Some(FirstPacketsReply { job, outcomes, actions })
    }

    /// A connection claims its rank. Returns whether it had claimed it before, or another outcome
    /// of its packet.
    fn claim(&mut self, name: &str, packet: &FirstPacket, now: Instant) -> Result<bool, Outcome> {
        let where_from = format!("{} behind {}", packet.src, self.port_name(packet.ifindex));
        let mtu = self.check_mtu(&where_from, self.jobs[name].spec.mtu, packet.ifindex);
        let job = self.jobs.get_mut(name).expect("the job has just been found");
        if job.knows(packet) {
            // It was under way, or already noted, when its epoch began.
            return Err(Outcome::Known);
        }
        let (ring, rank) = (JobRing(packet.header.ring), packet.header.rank);
        let here = format!("rank {rank} of ring {ring}, {where_from}");
        if (packet.header.message, packet.header.index) != (0, 0) {
            // The first message's first packet was lost, or arrives after this one.
            if packet.header.message < job.spec.window.0 {
                return Err(Outcome::Known);
            }
            let why = format!(
                "{here}: is at message {} already, and its first was never seen: it must connect \
                 again",
                packet.header.message
            );
            return Err(job.refused(why));
        }
        if let Err(why) = job.fits(packet).and(mtu.map_err(|r| r.to_string())) {
            return Err(job.contradicted(format!("{here}: {why}")));
        }
        if let Some(why) = job.is_elsewhere(packet) {
            return Err(job.refused(format!("{here}: {why}")));
        }
        let claimed = Claimed { packet: packet.clone(), seen: now };
        let before = job.in_band.claims.insert((ring, Rank(rank)), claimed);
        let again = before.is_some_and(|before| before.packet == *packet);
        if !again && matches!(job.state, State::Failed(_)) {
            // A new claim suggests that the cause of the failure has been fixed.
            job.state = State::Waiting;
        }
        Ok(again)
    }

    /// Begins an epoch: all connections have shown up.
    fn begin_in_band(&mut self, name: &str, all: Claims) -> Result<Vec<Action>, Outcome> {
        let job = &self.jobs[name];
        let flows = job.claimed_flows(&all);
        let sender = |member| job.spec.sender(member);
        let refusal = job
            .disagreement(&all)
            .or_else(|| self.contradiction(name, &flows, sender).map(|r| r.to_string()))
            .or_else(|| self.check_owners(name, &flows, sender).err().map(|r| r.to_string()));
        if refusal.is_none() {
            self.take_over(&flows);
        }
        let job = self.jobs.get_mut(name).expect("the job has just been looked at");
        if let Some(why) = refusal {
            return Err(job.contradicted(why));
        }
        let ended = job.flows.iter().filter(|old| !flows.contains(old));
        job.in_band.ended = ended.map(|f| (f.key(), f.base_psn)).collect();
        job.in_band.present = all;
        job.in_band.claims.clear();
        job.in_band.refused.clear();
        // Rings start empty. Without flows they are empty already, and creating them again would
        // take longer than the senders' timers.
        let mut actions = if job.flows.is_empty() { Vec::new() } else { job.restart() };
        job.last_epoch += 1;
        job.flows = flows.clone();
        actions.extend(flows.into_iter().map(Action::AddFlow));
        actions.extend(job.activate_if_complete());
        Ok(actions)
    }
}

impl FirstPacket {
    fn key(&self) -> FlowKey {
        FlowKey { dst_ip: crate::plane::mapped(self.dst), qpn: self.qpn.get() }
    }
}

impl Job {
    /// The data plane's entry for a job that is set up in band.
    pub(super) fn in_band_token_action(&self) -> Option<Action> {
        let first = self.rings.first().filter(|_| self.spec.in_band)?;
        let JobSpec { ranks, rings, .. } = self.spec;
        let flags = self.spec.flags() & ring_flags::ICRC_IGNORE;
        let job = InBandJob { job: first.id, ranks, rings, flags };
        Some(Action::AddInBandToken(self.spec.token.in_band(), job))
    }

    /// Whether a first packet belongs to the present epoch or the previous one.
    fn knows(&self, packet: &FirstPacket) -> bool {
        let connection = (packet.key(), packet.psn);
        self.flows.iter().any(|f| (f.key(), f.base_psn) == connection)
            || self.in_band.ended.contains(&connection)
    }

    /// Connections that wait for those of other ranks, and when each was last seen, in order of
    /// rings and ranks.
    pub fn claims(&self) -> impl Iterator<Item = (&FirstPacket, Instant)> {
        self.in_band.claims.values().map(|c| (&c.packet, c.seen))
    }

    /// Recently refused claims, with their reasons.
    pub fn refusals(&self) -> impl Iterator<Item = &str> {
        self.in_band.refused.iter().map(String::as_str)
    }

    /// Connections, by ring and rank, that have not shown up while others have, or while the job
    /// waits for all.
    pub fn unclaimed(&self) -> Vec<(JobRing, Rank)> {
        if !self.spec.in_band || self.in_band.claims.is_empty() && !self.flows.is_empty() {
            return Vec::new();
        }
        let all = self
            .numbered_rings()
            .flat_map(|(ring, _)| Rank::all(self.spec.ranks).map(move |rank| (ring, rank)));
        all.filter(|place| !self.in_band.claims.contains_key(place)).collect()
    }

    /// Forgets claims of closed connections.
    pub(super) fn forget_old_claims(&mut self, now: Instant) {
        self.in_band.claims.retain(|_, c| now.saturating_duration_since(c.seen) < CLAIM_LIFE);
    }

    fn refused(&mut self, why: String) -> Outcome {
        if self.in_band.refuse(&why) { Outcome::Refused(why) } else { Outcome::Known }
    }

    /// Ranks contradict the job or each other. A job that has not begun fails; an active epoch
    /// continues.
    fn contradicted(&mut self, why: String) -> Outcome {
        if self.state == State::Active {
            return self.refused(why);
        }
        let new = self.in_band.refuse(&why);
        self.state = State::Failed(why.clone());
        if new { Outcome::Failed(why) } else { Outcome::Known }
    }

    /// A connection for every ring and rank, if all are known. Before the first sum, connections of
    /// the present epoch count too.
    fn all_claims(&self, released: bool) -> Option<Claims> {
        let mut all = self.in_band.claims.clone();
        if self.state == State::Active && !released {
            for (place, claimed) in &self.in_band.present {
                all.entry(*place).or_insert_with(|| claimed.clone());
            }
        }
        (all.len() == self.rings.len() * self.spec.ranks as usize).then_some(all)
    }

    /// Checks a first packet's header against the job.
    fn fits(&self, packet: &FirstPacket) -> Result<(), String> {
        let (spec, h) = (&self.spec, &packet.header);
        if h.ranks != spec.ranks {
            return Err(format!(
                "says that there are {} ranks, the job has {}",
                h.ranks, spec.ranks
            ));
        }
        if h.rank >= spec.ranks {
            return Err(format!("the job has ranks 0 to {}", spec.ranks - 1));
        }
        if h.ring >= spec.rings {
            return Err(format!("the job has rings 0 to {}", spec.rings - 1));
        }
        if h.dtype != DTYPE_I32 {
            return Err(format!("sends data type {}: {DTYPE_I32} (i32) is possible", h.dtype));
        }
        if packet.len > spec.mtu || !packet.only && packet.len != spec.mtu {
            return Err(format!(
                "its packets carry {} bytes, the job's path MTU is {}",
                packet.len, spec.mtu
            ));
        }
        if packet.only != (h.fragments == 1) {
            let is = if packet.only { "the only one" } else { "not the only one" };
            return Err(format!(
                "says that its message has {} packets, and sends {is}",
                h.fragments
            ));
        }
        if h.fragments > spec.fragments().0 {
            return Err(format!(
                "says that its message has {} packets, the job's messages of {} bytes have {} at \
                 the most",
                h.fragments,
                spec.message_size,
                spec.fragments()
            ));
        }
        if let Some(ip) = no_host([packet.src, packet.dst]) {
            return Err(format!("{ip} is not the address of a host"));
        }
        if packet.src.is_ipv4() != packet.dst.is_ipv4() {
            return Err(format!("sends to {}, an address of another family", packet.dst));
        }
        Ok(())
    }

    /// Why the packet does not come from the rank's known address and port, if so.
    fn is_elsewhere(&self, packet: &FirstPacket) -> Option<String> {
        let h = &packet.header;
        let job_ring = JobRing(h.ring);
        let ring = self.ring(job_ring).ok()?.id;
        let at_work = self.flows.iter().find(|f| f.ring == ring && f.member == Rank(h.rank));
        if let Some(f) = at_work.filter(|f| (f.src, f.ifindex) != (packet.src, packet.ifindex)) {
            return Some(format!("the rank is at work from {}", f.src));
        }
        let claimed = self.in_band.claims.get(&(job_ring, Rank(h.rank))).map(|c| &c.packet);
        let other = claimed.filter(|c| (c.src, c.ifindex) != (packet.src, packet.ifindex))?;
        Some(format!("{} waits as this rank already", other.src))
    }

    fn claimed_flows(&self, claims: &Claims) -> Vec<FlowSpec> {
        let flow = |(&(ring, rank), claimed): (&(JobRing, Rank), &Claimed)| {
            let FirstPacket { ifindex, src, src_mac, dst, qpn, psn, .. } = claimed.packet;
            let ring = self.rings[ring.0 as usize].id;
            FlowSpec {
                ring,
                member: rank,
                base_psn: psn,
                ifindex,
                src,
                dst,
                qpn,
                src_mac: Some(src_mac),
                group_mark: 0,
            }
        };
        claims.iter().map(flow).collect()
    }

    /// How the ranks' connections contradict each other, if they do.
    fn disagreement(&self, claims: &Claims) -> Option<String> {
        claims.iter().find_map(|(&(ring, rank), claimed)| {
            let next_rank = rank.next(self.spec.ranks);
            let next = &claims.get(&(ring, next_rank))?.packet;
            let (own, first) = (&claimed.packet, &claims.get(&(ring, Rank(0)))?.packet);
            if own.dst != next.src {
                return Some(format!(
                    "rank {rank} of ring {ring} sends to {}, and rank {next_rank} is {}: each \
                     rank's connection must go to the next rank",
                    own.dst, next.src
                ));
            }
            (own.header.fragments != first.header.fragments).then(|| {
                format!(
                    "rank {rank} of ring {ring} begins with a message of {} packets, and rank 0 \
                     with one of {}",
                    own.header.fragments, first.header.fragments
                )
            })
        })
    }
}
