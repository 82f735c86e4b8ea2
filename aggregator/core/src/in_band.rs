//! Jobs that are set up in band: ranks that nobody has told the daemon of show up by the first
//! packet of their connection.
//!
//! The data plane notes such packets and drops them, so their senders send them again and again.
//! When the connections of all ranks have shown up, an *epoch* begins: empty rings, these flows.
//! Connections that are made again show up again; the present epoch goes on until all ranks' have.
//! Only while it has not released a single sum, so that all ranks still hold all that they have
//! sent, it begins anew with what shows up: a rank's connection may have been given up before the
//! others came.
//!
//! Who has the job's token can claim a rank, once: where the rank is at work or waits already, a
//! claim from another address or port is refused.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use netsum_common::abi::{FlowKey, InBandJob, RingNumber, ring_flags};
use netsum_common::serial::Psn;
use netsum_common::wire::in_band::dtype_code;

use super::{Action, Controller, Job, JobRing, JobSpec, Rank, State};
use crate::plane::{FirstPacket, FlowSpec};

/// A claim whose packet has not come again for so long is of a connection that has gone.
pub const CLAIM_LIFE: Duration = Duration::from_secs(60);
/// Refusals that are remembered for whoever asks.
const REFUSALS: usize = 8;

/// What a job that is set up in band has seen.
#[derive(Clone, Debug, Default)]
pub struct InBand {
    /// Connections that wait for those of other ranks.
    claims: Claims,
    /// Those of the present epoch. Empty after a restart of the daemon.
    present: Claims,
    /// The last claims that were refused, and why, without repetitions.
    refused: VecDeque<String>,
    /// Connections of the last epoch, by where they go and the first PSN. A late duplicate of
    /// theirs is no new claim.
    ended: Vec<(FlowKey, Psn)>,
}

/// Connections by ring and rank.
type Claims = BTreeMap<(JobRing, Rank), Claimed>;

#[derive(Clone, Debug)]
struct Claimed {
    packet: FirstPacket,
    seen: Instant,
}

/// What came of a first packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It says nothing new.
    Known,
    /// A rank has shown up; others have not.
    Waits,
    /// The claim is refused, and why.
    Refused(String),
    /// Ranks contradict the job or each other: it has failed.
    Failed(String),
    /// All are there, and this epoch begins.
    Began(u32),
}

/// The answer to first packets of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub job: String,
    /// What came of each, in their order.
    pub outcomes: Vec<Outcome>,
    /// What the edge is to do.
    pub actions: Vec<Action>,
}

impl InBand {
    /// Whether this refusal is a new one.
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
    /// Whether there is a job that first packets can be of.
    pub fn listens_in_band(&self) -> bool {
        self.jobs.values().any(|job| job.spec.in_band)
    }

    /// The job that a first packet is of.
    pub fn job_in_band(&self, number: RingNumber) -> Option<&Job> {
        self.jobs
            .values()
            .find(|job| job.spec.in_band && job.rings.first().is_some_and(|r| r.id == number))
    }

    /// Whether a first packet could make a job begin anew that is at work. Nobody but a rank, from
    /// its own place, can.
    pub fn may_begin_anew(&self, packet: &FirstPacket) -> bool {
        self.job_in_band(packet.job).is_some_and(|job| {
            job.state == State::Active
                && !job.knows(packet)
                && (packet.header.message, packet.header.index) == (0, 0)
                && job.fits(packet).is_ok()
                && job.is_elsewhere(packet).is_none()
        })
    }

    /// The data plane has noted first packets of a job. `None` where it has gone. `released`: the
    /// job's rings have released sums since they were made. However many connections show up at
    /// once, the rings are made once: that takes long.
    pub fn first_packets(
        &mut self,
        number: RingNumber,
        packets: &[FirstPacket],
        released: bool,
        now: Instant,
    ) -> Option<Answer> {
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
        Some(Answer { job, outcomes, actions })
    }

    /// A connection claims its rank: whether it has done so before. Or what else came of its
    /// packet.
    fn claim(&mut self, name: &str, packet: &FirstPacket, now: Instant) -> Result<bool, Outcome> {
        let where_from = format!("{} behind {}", packet.src, self.port_name(packet.ifindex));
        let mtu = self.check_mtu(&where_from, self.jobs[name].spec.mtu, packet.ifindex);
        let job = self.jobs.get_mut(name).expect("the job has just been found");
        if job.knows(packet) {
            // It was on its way, or noted, when its epoch began.
            return Err(Outcome::Known);
        }
        let (ring, rank) = (JobRing(packet.header.ring), packet.header.rank);
        let here = format!("rank {rank} of ring {ring}, {where_from}");
        if (packet.header.message, packet.header.index) != (0, 0) {
            // The first message's first packet was lost, or comes behind this one.
            if packet.header.message < job.spec.window.0 {
                return Err(Outcome::Known);
            }
            let why = format!(
                "{here}: is at message {} already, and its first was never seen: it must connect again",
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
            // Somebody has mended something.
            job.state = State::Waiting;
        }
        Ok(again)
    }

    /// All connections have shown up.
    fn begin_in_band(&mut self, name: &str, all: Claims) -> Result<Vec<Action>, Outcome> {
        let flows = self.jobs[name].claimed_flows(&all);
        let refusal = self.jobs[name]
            .disagreement(&all)
            .or_else(|| self.contradiction(name, &flows).map(|r| r.to_string()))
            .or_else(|| self.check_owners(name, &flows).err().map(|r| r.to_string()));
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
        // Rings start empty, whatever was in them. Without flows nothing was; to make them anew
        // would take longer than the senders' timers.
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
    /// What the data plane has to know where the job is set up in band.
    pub(super) fn listen_in_band(&self) -> Option<Action> {
        let first = self.rings.first().filter(|_| self.spec.in_band)?;
        let JobSpec { ranks, rings, .. } = self.spec;
        let flags = self.spec.flags() & ring_flags::ICRC_IGNORE;
        let job = InBandJob { job: first.id, ranks, rings, flags };
        Some(Action::ListenInBand(self.spec.token.in_band(), job))
    }

    /// Whether a first packet is of the present epoch or the one before.
    fn knows(&self, packet: &FirstPacket) -> bool {
        let connection = (packet.key(), packet.psn);
        self.flows.iter().any(|f| (f.key(), f.base_psn) == connection)
            || self.in_band.ended.contains(&connection)
    }

    /// Connections that wait for those of other ranks, and for how long they have not been heard
    /// of: in order of rings and ranks.
    pub fn claims(&self) -> impl Iterator<Item = (&FirstPacket, Instant)> {
        self.in_band.claims.values().map(|c| (&c.packet, c.seen))
    }

    /// Claims that were refused of late, and why.
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

    /// Forgets claims of connections that have gone.
    pub(super) fn forget_old_claims(&mut self, now: Instant) {
        self.in_band.claims.retain(|_, c| now.saturating_duration_since(c.seen) < CLAIM_LIFE);
    }

    fn refused(&mut self, why: String) -> Outcome {
        if self.in_band.refuse(&why) { Outcome::Refused(why) } else { Outcome::Known }
    }

    /// Ranks contradict the job or each other. That ends a job that has not begun; an epoch that is
    /// at work goes on.
    fn contradicted(&mut self, why: String) -> Outcome {
        if self.state == State::Active {
            return self.refused(why);
        }
        let new = self.in_band.refuse(&why);
        self.state = State::Failed(why.clone());
        if new { Outcome::Failed(why) } else { Outcome::Known }
    }

    /// A connection for every place, if there are. Before the first sum that may be one of the
    /// present epoch.
    fn all_claims(&self, released: bool) -> Option<Claims> {
        let mut all = self.in_band.claims.clone();
        if self.state == State::Active && !released {
            for (place, claimed) in &self.in_band.present {
                all.entry(*place).or_insert_with(|| claimed.clone());
            }
        }
        (all.len() == self.rings.len() * self.spec.ranks as usize).then_some(all)
    }

    /// Whether what a first packet says of the job is so.
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
        if Some(h.dtype) != dtype_code(&spec.dtype) {
            return Err(format!("sends data type {}, the job's is {}", h.dtype, spec.dtype));
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
                "says that its message has {} packets, the job's messages of {} bytes have {} at the most",
                h.fragments,
                spec.message_size,
                spec.fragments()
            ));
        }
        if packet.src.is_ipv4() != packet.dst.is_ipv4() {
            return Err(format!("sends to {}, an address of another family", packet.dst));
        }
        Ok(())
    }

    /// Whether the rank is known to be at another place.
    fn is_elsewhere(&self, packet: &FirstPacket) -> Option<String> {
        let h = &packet.header;
        let job_ring = JobRing(h.ring);
        let ring = self.ring(job_ring).ok()?.id;
        let at_work = self.flows.iter().find(|f| f.ring == ring && f.rank == Rank(h.rank));
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
                rank,
                base_psn: psn,
                ifindex,
                src,
                dst,
                qpn,
                src_mac: Some(src_mac),
                bears: 0,
            }
        };
        claims.iter().map(flow).collect()
    }

    /// What the ranks do not agree on, when all are there.
    fn disagreement(&self, claims: &Claims) -> Option<String> {
        claims.iter().find_map(|(&(ring, rank), claimed)| {
            let next_rank = rank.next(self.spec.ranks);
            let next = &claims.get(&(ring, next_rank))?.packet;
            let (own, first) = (&claimed.packet, &claims.get(&(ring, Rank(0)))?.packet);
            if own.dst != next.src {
                return Some(format!(
                    "rank {rank} of ring {ring} sends to {}, and rank {next_rank} is {}: each rank's connection must go to the next rank",
                    own.dst, next.src
                ));
            }
            (own.header.fragments != first.header.fragments).then(|| {
                format!(
                    "rank {rank} of ring {ring} begins with a message of {} packets, and rank 0 with one of {}",
                    own.header.fragments, first.header.fragments
                )
            })
        })
    }
}
