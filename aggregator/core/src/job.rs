//! A job: its properties, resources and state.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use netsum_common::abi::FlowKey;
use netsum_common::abi::{
    self, Fragments, MAX_FLOAT_MTU, MAX_RANKS, MAX_RINGS, MAX_SLOTS, Messages, RingConfig,
    RingNumber, ring_flags,
};

use netsum_common::float::{LSB_MAX, LSB_MIN};
use serde::{Deserialize, Serialize};

use super::in_band::InBand;
use super::members::{Member, Members};
use super::membership::{Epoch, Forming};
use super::rank::Rank;
use super::{Action, Refusal, Token, largest_mtu};
use crate::plane::{FlowSpec, RingSpec};

/// The properties that a job is created with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    pub name: String,
    /// Ranks, 2 to 64, or up to 4096 over several boxes; of an elastic job, as many as have joined
    /// last.
    pub ranks: u32,
    /// Fewest and most ranks, if any number between them may join.
    pub elastic: Option<RangeInclusive<u32>>,
    /// Path MTU in bytes, for any ranks.
    pub mtu: u32,
    /// The largest path MTU that its memory suffices for, if joining ranks may have a larger one;
    /// `None`: `mtu` was given.
    pub largest_mtu: Option<u32>,
    /// Bytes of a message.
    pub message_size: u32,
    /// Messages that a rank may send without their sums.
    pub window: Messages,
    /// 0: no box sums it. Only groups can have none.
    pub rings: u32,
    /// The ICRC of contributions is verified.
    pub verify_icrc: bool,
    /// The box adds f32, as multiples of 2 to this power; `None`: 32-bit integers.
    pub float_lsb: Option<i32>,
    /// Results are released in order, or each when it is complete. `None`: as the joining ranks
    /// require.
    pub in_order: Option<bool>,
    /// Ranks are recognised by the first packets of their connections.
    pub in_band: bool,
    /// The secret that workers must know.
    pub token: Token,
    /// The tenant that owns the job.
    pub tenant: String,
    /// The contributors to this box, if boxes are in levels.
    pub members: Members,
    /// Its ranks may begin even if no boxes can sum for them.
    pub host_ring_fallback: bool,
    /// Its ranks have opened it as a group of another job.
    pub is_group: bool,
}

/// Most ranks of a job over several boxes; each box has at most 64 members.
const MOST_RANKS: u32 = 4096;

/// Whether a text is a valid name for a job or tenant.
pub fn is_name(text: &str) -> bool {
    let is_possible = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
    (1..=64).contains(&text.len()) && text.chars().all(is_possible)
}

/// Whether a text is a valid name for a job or, after its job's name and a slash, for a group.
fn is_name_of_job_or_group(text: &str) -> bool {
    text.split_once('/').map_or(is_name(text), |(job, group)| is_name(job) && is_name(group))
}

impl JobSpec {
    /// Fragments of a full message.
    pub fn fragments(&self) -> Fragments {
        Fragments(self.message_size.div_ceil(self.mtu))
    }

    /// Slots of a ring for this window; `None` if they are too many.
    pub fn slots_for(&self, window: Messages) -> Option<u32> {
        window.of(self.fragments()).and_then(abi::ring_slots)
    }

    /// The path MTU that its memory suffices for.
    pub fn reserved_mtu(&self) -> u32 {
        self.largest_mtu.unwrap_or(self.mtu)
    }

    /// Bytes of the largest sum that its memory suffices for.
    pub fn sum_bytes(&self) -> u32 {
        self.config_for(self.reserved_mtu()).sum_bytes()
    }

    /// The path MTU for links of this MTU, and for ranks that take up to `most`.
    pub(super) fn mtu_for(&self, link: u32, most: u32) -> u32 {
        let most = largest_mtu(link).min(most / abi::MTU_STEP * abi::MTU_STEP);
        self.reserved_mtu().min(most).max(self.mtu)
    }

    /// The data plane's configuration for each of its rings; `in_order`: they release results in
    /// order.
    pub(super) fn ring_config(&self, mtu: u32, slots: u32, in_order: bool) -> RingConfig {
        let fragments = Fragments(self.message_size.div_ceil(mtu));
        let credit = self.window.of(fragments).map_or(0, |credit| credit.0);
        let relaxed = if in_order { 0 } else { ring_flags::RELAXED };
        let ranks = self.member_count();
        RingConfig {
            flags: self.flags() | relaxed,
            members: ranks,
            slots,
            credit,
            ..self.config_for(mtu)
        }
    }

    /// What path MTU and data type determine of it.
    fn config_for(&self, mtu: u32) -> RingConfig {
        let (flags, lsb) = (self.flags(), self.float_lsb.unwrap_or(0));
        RingConfig { flags, mtu, lsb, ..RingConfig::default() }
    }

    /// The rank that owns a member's connection, if ranks without boxes in levels are in order.
    pub(super) fn sender(&self, member: Rank) -> Rank {
        self.members.sender(member.0, self.ranks).map_or(member, Rank)
    }

    /// Number of members of each ring on this box.
    pub fn member_count(&self) -> u32 {
        self.members.count(self.ranks)
    }

    /// The number of members that its memory suffices for.
    pub(super) fn max_members(&self) -> u32 {
        self.elastic.as_ref().map_or(self.member_count(), |elastic| *elastic.end())
    }

    /// Ranks that join together, as one of them reported; 0: not reported.
    pub(super) fn joining(&self, ranks: u32) -> Result<u32, Refusal> {
        match &self.elastic {
            _ if ranks == 0 || ranks == self.ranks => Ok(self.ranks),
            Some(elastic) if elastic.contains(&ranks) => Ok(ranks),
            Some(elastic) => Err(Refusal::Invalid(format!(
                "ranks {ranks}: the job has {} to {}",
                elastic.start(),
                elastic.end()
            ))),
            None => Err(Refusal::Invalid(format!("ranks {ranks}: the job has {}", self.ranks))),
        }
    }

    /// Bits of [`ring_flags`] that do not depend on its ranks.
    pub(super) fn flags(&self) -> u32 {
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        flag(!self.verify_icrc, ring_flags::ICRC_IGNORE)
            | flag(self.float_lsb.is_some(), ring_flags::FLOAT)
            | flag(self.in_band, ring_flags::IN_BAND)
            | flag(self.members.uplink.is_some(), ring_flags::UPLINK)
            | flag(!self.members.groups.is_empty(), ring_flags::GROUPS)
            | u32::from(self.members.group_mark(self.ranks)) << ring_flags::GROUP_MARK_SHIFT
    }

    /// Checks every property; returns the slots of a ring.
    pub fn check(&self) -> Result<u32, Refusal> {
        let invalid = |message: String| Err(Refusal::Invalid(message));
        if !is_name_of_job_or_group(&self.name) {
            return invalid(format!(
                "NAME `{}`: must be 1 to 64 of a-z, 0-9, `.`, `_`, `-`",
                self.name
            ));
        }
        let most = if self.members.is_part() { MOST_RANKS } else { MAX_RANKS as u32 };
        if !(2..=most).contains(&self.ranks) {
            return invalid(format!("--ranks {}: must be 2 to {most}", self.ranks));
        }
        if let Some(elastic) = &self.elastic {
            if *elastic.start() < 2 || !elastic.contains(&self.ranks) {
                return invalid(format!(
                    "--min-ranks {}: must be 2 to the number of ranks, {}",
                    elastic.start(),
                    elastic.end()
                ));
            }
            if self.in_band || self.members.is_part() {
                return invalid(
                    "--min-ranks with --in-band, --members, --groups or --uplink: the number of \
                     ranks is fixed there"
                        .into(),
                );
            }
        }
        self.members.check(self.ranks)?;
        self.members.uplink.as_ref().map_or(Ok(()), |uplink| uplink.check(self.rings))?;
        if self.in_band && self.members.is_part() {
            return invalid(
                "--in-band with --members, --groups or --uplink: this box sees only some of the \
                 ranks"
                    .into(),
            );
        }
        if self.mtu == 4096 {
            return invalid(
                "--mtu 4096: the kernel clones a broadcast packet into one page, 3328 is the \
                 largest, and 2048 for adapters"
                    .into(),
            );
        }
        if !abi::is_mtu(self.mtu) {
            return invalid(format!(
                "--mtu {}: must be a multiple of {}, {} to {}",
                self.mtu,
                abi::MTU_STEP,
                abi::MIN_MTU,
                abi::MAX_MTU
            ));
        }
        if let Some(lsb) = self.float_lsb {
            self.check_floats(lsb)?;
        }
        if self.message_size < 64 || !self.message_size.is_multiple_of(4) {
            return invalid(format!(
                "--message-size {}: must be a multiple of 4, at least 64",
                self.message_size
            ));
        }
        if self.window == Messages(0) {
            return invalid("--window 0: must be at least 1".into());
        }
        if self.rings >= MAX_RINGS || self.rings == 0 && !self.is_group {
            return invalid(format!("--rings {}: must be 1 to {}", self.rings, MAX_RINGS - 1));
        }
        if self.in_band && self.in_order == Some(false) {
            return invalid(
                "--in-band with --order relaxed: a receiver that accepts packets in any order \
                 could accept unsummed ones from before all ranks have joined"
                    .into(),
            );
        }
        self.slots_for(self.window).ok_or_else(|| {
            Refusal::Invalid(format!(
                "--window {} with --message-size {}: 2 x {} x {} slots in a ring: must be at most \
                 {MAX_SLOTS}",
                self.window,
                self.message_size,
                self.window,
                self.fragments()
            ))
        })
    }
}

impl JobSpec {
    fn check_floats(&self, lsb: i32) -> Result<(), Refusal> {
        let message = if self.members.is_part() {
            "--dtype f32 with --members, --groups or --uplink: sums of several boxes would be \
             rounded more than once"
                .into()
        } else if self.in_band {
            "--dtype f32 with --in-band: a header of integers begins each message there".into()
        } else if self.elastic.is_some() {
            "--dtype f32 with --min-ranks: only netsum's own ranks report how many join, and they \
             send integers"
                .into()
        } else if !(LSB_MIN..=LSB_MAX).contains(&lsb) {
            format!("--lsb {lsb}: must be {LSB_MIN} to {LSB_MAX}")
        } else if self.mtu > MAX_FLOAT_MTU {
            format!(
                "--mtu {}: must be at most {MAX_FLOAT_MTU} with --dtype f32, whose sums take 64 \
                 bits a lane",
                self.mtu
            )
        } else {
            return Ok(());
        };
        Err(Refusal::Invalid(message))
    }
}

/// A ring's number within its job, from 0. A ring's number on the box, over all jobs, is a
/// [`RingNumber`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobRing(pub u32);

impl fmt::Display for JobRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// State of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// It waits for flows.
    Waiting,
    /// All flows are registered.
    Active,
    /// It ended with this error.
    Failed(String),
}

#[derive(Clone, Debug)]
pub struct Job {
    /// Its properties.
    pub spec: JobSpec,
    /// Slots of each ring.
    pub slots: u32,
    /// Its rings in the data plane.
    pub rings: Vec<RingSpec>,
    /// Registered flows.
    pub flows: Vec<FlowSpec>,
    /// Its state.
    pub state: State,
    /// The ranks that have joined and are at work.
    pub epoch: Option<Epoch>,
    /// Number of the last epoch that began.
    pub last_epoch: u32,
    /// How often its ranks have fallen back from the box, as far as this controller knows.
    pub fallbacks: u64,
    /// Nonzero floats of its ranks that became 0, as heartbeats to this controller
    /// reported.
    pub underflows: u64,
    pub(super) forming: Option<Forming>,
    /// Why ranks were refused that have not joined since.
    pub(super) refused: BTreeMap<Rank, String>,
    pub(super) in_band: InBand,
    /// The last flows that it had.
    pub(super) ended: Vec<FlowKey>,
    /// Of a group: since when it waits for ranks, as they have opened it or have left.
    pub(super) idle_since: Option<Instant>,
}

/// Most ended flows that a job remembers; more if its last epoch had more.
const MOST_ENDED: usize = 4096;

impl Job {
    pub(super) fn new(spec: JobSpec, slots: u32, rings: Vec<RingSpec>) -> Self {
        let (flows, state) = (Vec::new(), State::Waiting);
        let in_band = InBand::default();
        let (epoch, forming, refused) = (None, None, BTreeMap::new());
        let (last_epoch, fallbacks, underflows) = (0, 0, 0);
        let ended = Vec::new();
        Self {
            spec,
            slots,
            rings,
            flows,
            state,
            epoch,
            last_epoch,
            fallbacks,
            underflows,
            forming,
            refused,
            in_band,
            ended,
            idle_since: None,
        }
    }

    /// The interfaces at which its flows arrive.
    pub fn flow_ports(&self) -> HashSet<u32> {
        self.flows.iter().map(|flow| flow.ifindex).collect()
    }

    /// The rank that owns a member's connection: a rank its own, a group its last rank's, and the
    /// uplink that of the rank before the first one here.
    pub fn sender(&self, member: Rank) -> Rank {
        let ring = self.epoch.as_ref().filter(|_| !self.spec.members.is_part());
        match ring.and_then(|epoch| epoch.ring.get(member.0 as usize)) {
            Some(rank) => *rank,
            None => self.spec.sender(member),
        }
    }

    /// The member that is the uplink, and the interface at which unsummed packets of its rank
    /// arrive: the first ring's. `None` until that ring has such a flow.
    pub(super) fn uplink_flow(&self, flows: &[FlowSpec]) -> Option<(Rank, u32)> {
        self.spec.members.uplink.as_ref()?;
        let up = Rank(self.spec.member_count() - 1);
        let flow = flows.iter().find(|f| f.ring == self.rings[0].id && f.member == up)?;
        Some((up, flow.ifindex))
    }

    /// The member at this place of its rings.
    pub fn member(&self, place: Rank) -> Member {
        self.spec
            .members
            .list(self.spec.ranks)
            .get(place.0 as usize)
            .copied()
            .unwrap_or(Member::Rank(place.0))
    }

    /// Its rings, numbered within the job.
    pub fn numbered_rings(&self) -> impl Iterator<Item = (JobRing, &RingSpec)> {
        (0..).map(JobRing).zip(&self.rings)
    }

    /// The ring with this number.
    pub fn ring(&self, ring: JobRing) -> Result<&RingSpec, Refusal> {
        let why = || match self.rings.len() {
            0 => Refusal::Invalid(format!("--ring {ring}: the job has no rings")),
            n => Refusal::Invalid(format!("--ring {ring}: the job has rings 0 to {}", n - 1)),
        };
        self.rings.get(ring.0 as usize).ok_or_else(why)
    }

    /// The job's number for a ring of the box.
    pub fn job_ring(&self, id: RingNumber) -> Option<JobRing> {
        self.numbered_rings().find(|(_, ring)| ring.id == id).map(|(ring, _)| ring)
    }

    /// Interface of each member of a ring whose flows are all registered.
    fn ports(&self, ring: RingNumber) -> Vec<u32> {
        let port = |member| {
            self.flows.iter().find(|f| f.ring == ring && f.member == member).map(|f| f.ifindex)
        };
        Rank::all(self.spec.member_count()).filter_map(port).collect()
    }

    /// Neighbours in a ring that are behind one port: their packets to each other may never reach
    /// the box.
    pub fn neighbours_behind_one_port(&self) -> Option<(&FlowSpec, &FlowSpec)> {
        self.flows.iter().find_map(|f| {
            let next = (f.ring, f.member.next(self.spec.member_count()), f.ifindex);
            let is_next = |o: &&FlowSpec| (o.ring, o.member, o.ifindex) == next;
            Some((f, self.flows.iter().find(is_next)?))
        })
    }

    pub(super) fn activate_if_complete(&mut self) -> Vec<Action> {
        if self.flows.len() < self.rings.len() * self.spec.member_count() as usize {
            return Vec::new();
        }
        self.state = State::Active;
        self.rings
            .iter()
            .map(|ring| Action::ActivateRing(ring.clone(), self.ports(ring.id)))
            .collect()
    }

    /// Whether its ranks sum without the box: a host has so many of them that neighbours in the
    /// ring share an address, or a group has no rings.
    pub fn is_summed_by_hosts(&self) -> bool {
        self.epoch.is_some() && self.flows.is_empty()
    }

    /// Whether its rings sum.
    pub fn has_active_rings(&self) -> bool {
        self.state == State::Active && !self.flows.is_empty()
    }

    pub fn all_flow_keys(&self) -> Vec<FlowKey> {
        self.flows.iter().map(FlowSpec::key).chain(self.ended.iter().copied()).collect()
    }

    /// Removes flows and rings from the data plane.
    pub(super) fn teardown(&mut self) -> Vec<Action> {
        let flows = std::mem::take(&mut self.flows);
        self.ended.extend(flows.iter().map(FlowSpec::key));
        let more = self.ended.len().saturating_sub(MOST_ENDED.max(flows.len()));
        self.ended.drain(..more);
        let of = |id: RingNumber| flows.iter().filter(move |f| f.ring == id);
        self.rings
            .iter()
            .map(|ring| Action::DeleteRing {
                ring: ring.id,
                flows: of(ring.id).map(FlowSpec::key).collect(),
                ports: of(ring.id).map(|f| f.ifindex).collect(),
            })
            .collect()
    }

    /// The path MTU in use.
    pub fn mtu(&self) -> u32 {
        self.rings.first().map_or(self.spec.mtu, |ring| ring.config.mtu)
    }

    /// Whether its rings release results in order.
    pub fn is_in_order(&self) -> bool {
        self.rings.iter().all(|ring| ring.config.flags & ring_flags::RELAXED == 0)
    }

    /// Removes flows, and creates the rings again, empty.
    pub(super) fn restart(&mut self) -> Vec<Action> {
        self.restart_for(true, self.spec.mtu)
    }

    /// The same for ranks that need results `in_order`, or not, with this path MTU.
    pub(super) fn restart_for(&mut self, in_order: bool, mtu: u32) -> Vec<Action> {
        let mut actions = self.teardown();
        let in_order = self.spec.in_order.unwrap_or(in_order);
        let config = self.spec.ring_config(mtu, self.slots, in_order);
        self.rings.iter_mut().for_each(|ring| ring.config = config);
        actions.extend(self.rings.iter().cloned().map(Action::CreateRing));
        actions
    }

    /// Ends the job with an error; ranks can join it again.
    pub(super) fn fail(&mut self, reason: String) -> Vec<Action> {
        let mut actions = self.dismiss_waiters(&Refusal::NotNow(reason.clone()));
        actions.extend(self.end_epoch(reason));
        actions
    }

    /// Ends the present epoch with an error. Ranks that wait for the next epoch already, for
    /// example after an immediate restart, are not part of it.
    pub(super) fn end_epoch(&mut self, reason: String) -> Vec<Action> {
        self.epoch = None;
        self.state = State::Failed(reason);
        self.restart()
    }

    pub(super) fn tick(&mut self, now: Instant, heartbeat_timeout: Duration) -> Vec<Action> {
        self.forget_old_claims(now);
        let mut actions = self.late_joins(now);
        if let Some(reason) = self.silence(now, heartbeat_timeout) {
            actions.extend(self.end_epoch(reason));
        }
        actions
    }
}
