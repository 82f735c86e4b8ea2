//! The JSON that is printed: `netsum/schema` is generated from these types. Scripts rely on the
//! names here.

use std::collections::BTreeMap;

use netsum_api::v1 as api;
use schemars::JsonSchema;
use serde::Serialize;

use super::timing::{Sums, Timing};

/// A job's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Waits for flows.
    Waiting,
    /// All flows are registered: the box sums.
    Active,
    /// Ended by an error.
    Failed,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Active => "active",
            Self::Failed => "failed",
        }
    }
}

impl From<api::JobState> for State {
    fn from(state: api::JobState) -> Self {
        match state {
            api::JobState::Active => Self::Active,
            api::JobState::Failed => Self::Failed,
            api::JobState::Waiting | api::JobState::Unspecified => Self::Waiting,
        }
    }
}

/// A job.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Job {
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: State,
    /// Why it failed; empty unless it has.
    pub error: String,
    /// The tenant that owns it.
    pub tenant: String,
    /// Ranks.
    pub ranks: u32,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// Bytes of the largest message.
    pub message_size: u32,
    /// Messages that a rank may send before it has their sums.
    pub window: u32,
    /// Number of rings.
    pub rings: u32,
    /// `verify` or `ignore`.
    pub icrc: String,
    /// `in-order` or `relaxed`.
    pub order: String,
    /// Slots of one ring.
    pub slots: u32,
    /// Bytes of all rings on the box.
    pub memory: u64,
    /// Number of the set of connections; counts up whenever the ranks join again.
    pub epoch: u32,
    /// The rings' numbers in the data plane.
    pub ring_ids: Vec<u32>,
    /// Registered flows.
    pub flows: Vec<Flow>,
    /// With boxes in levels: the members of each ring here, in order: ranks, groups of ranks, and
    /// `up`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<String>,
    /// The port towards the parent box; several, each with its number of rings.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uplink: String,
    /// Token that workers need to join; only if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Connections that have shown up in band; only of jobs that are set up so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_band: Option<InBand>,
}

impl Job {
    /// Connections that pass this box once all are set up.
    pub fn connections(&self) -> u32 {
        let members = if self.members.is_empty() { self.ranks } else { self.members.len() as u32 };
        members * self.rings
    }
}

/// Connections of a job whose ranks show up by their first packets.
#[derive(Debug, Serialize, JsonSchema)]
pub struct InBand {
    /// Connections that have shown up and wait for others.
    pub claims: Vec<Flow>,
    /// Connections that have not shown up.
    pub unclaimed: Vec<Place>,
    /// First packets that were refused recently, with the reason.
    pub refusals: Vec<String>,
    /// Token that first packets carry; only if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

/// A rank's place in a ring.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Place {
    /// Ring of the job, from 0.
    pub ring: u32,
    /// Rank.
    pub rank: u32,
}

impl From<api::Job> for Job {
    fn from(j: api::Job) -> Self {
        let state = j.state().into();
        let flows = j.flows.into_iter().map(|f| Flow::new(&j.name, f)).collect();
        let in_band = j.in_band.then(|| InBand {
            claims: j.claims.into_iter().map(|f| Flow::new(&j.name, f)).collect(),
            unclaimed: j.unclaimed.iter().map(|p| Place { ring: p.ring, rank: p.rank }).collect(),
            refusals: j.refusals,
            token: (!j.in_band_token.is_empty()).then_some(j.in_band_token),
        });
        Self {
            name: j.name,
            state,
            error: j.error,
            tenant: j.tenant,
            ranks: j.ranks,
            mtu: j.mtu,
            message_size: j.message_size,
            window: j.window,
            rings: j.rings,
            icrc: j.icrc,
            order: j.order,
            slots: j.slots,
            memory: j.memory,
            epoch: j.epoch,
            ring_ids: j.ring_ids,
            flows,
            members: j.members,
            uplink: j.uplink,
            token: (!j.token.is_empty()).then_some(j.token),
            in_band,
        }
    }
}

/// One rank's connection to the next, as the box sees it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Flow {
    /// Its job.
    pub job: String,
    /// Ring of the job, from 0.
    pub ring: u32,
    /// Sending rank.
    pub rank: u32,
    /// Interface at which its packets arrive.
    pub port: String,
    /// The sender's IP address.
    pub src: String,
    /// The sender's MAC address; empty until known.
    pub src_mac: String,
    /// The receiver's IP address.
    pub dst: String,
    /// The receiver's queue pair.
    pub qpn: u32,
    /// PSN of the first packet.
    pub psn: u32,
    /// Data packets received, modulo 2^32.
    pub packets: u32,
    /// How many of them were refused before they reached a slot.
    pub refused: u32,
    /// PSN of the last one; null before the first.
    pub last_psn: Option<u32>,
    /// The counter of the last one's outcome; null before the first.
    pub last_outcome: Option<String>,
}

impl Flow {
    fn new(job: &str, f: api::Flow) -> Self {
        let seen = f.seen.unwrap_or_default();
        Self {
            job: job.to_owned(),
            ring: f.ring,
            rank: f.rank,
            port: f.port,
            src: f.src,
            src_mac: f.src_mac,
            dst: f.dst,
            qpn: f.qpn,
            psn: f.psn,
            packets: seen.packets,
            refused: seen.refused,
            last_psn: seen.last_psn,
            last_outcome: seen.last_psn.map(|_| seen.last_outcome),
        }
    }
}

/// A job's connections and slots that one CPU serves.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Ring {
    /// Its job.
    pub job: String,
    /// Ring of the job, from 0.
    pub ring: u32,
    /// Its number in the data plane.
    pub id: u32,
    /// The CPU that serves it.
    pub cpu: u32,
    /// The box sums.
    pub active: bool,
    /// Ranks.
    pub ranks: u32,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// Bytes on the box.
    pub memory: u64,
    /// Slots.
    pub slots: u32,
    /// Slots with a sum that has not been released.
    pub slots_used: u32,
    /// The lowest index that has not been released.
    pub low: u32,
    /// Fragments that a rank may send beyond `low`.
    pub credit: u32,
    /// Fragments that each rank has sent beyond `low`, in rank order.
    pub credit_used: Vec<u32>,
    /// Milliseconds that it has stood still with something pending; null if nothing is pending.
    pub waits_ms: Option<u64>,
}

impl From<api::Ring> for Ring {
    fn from(r: api::Ring) -> Self {
        Self {
            job: r.job,
            ring: r.ring,
            id: r.id,
            cpu: r.cpu,
            active: r.active,
            ranks: r.ranks,
            mtu: r.mtu,
            memory: r.memory,
            slots: r.slots,
            slots_used: r.slots_used,
            low: r.low,
            credit: r.credit,
            credit_used: r.credit_used,
            waits_ms: r.waits_ms,
        }
    }
}

/// An interface towards hosts.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Its number.
    pub ifindex: u32,
    /// Its MAC address.
    pub mac: String,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// It is up and has a carrier.
    pub up: bool,
    /// How the program is attached: `native` or `skb`; empty if it is not.
    pub xdp: String,
    /// Registered flows whose packets arrive here.
    pub flows: u32,
    /// Bytes received, of all traffic.
    pub rx_bytes: u64,
    /// Packets received.
    pub rx_packets: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Packets sent.
    pub tx_packets: u64,
}

impl From<api::Port> for Port {
    fn from(p: api::Port) -> Self {
        Self {
            name: p.name,
            ifindex: p.ifindex,
            mac: p.mac,
            mtu: p.mtu,
            up: p.up,
            xdp: p.xdp,
            flows: p.flows,
            rx_bytes: p.rx_bytes,
            rx_packets: p.rx_packets,
            tx_bytes: p.tx_bytes,
            tx_packets: p.tx_packets,
        }
    }
}

/// The used slots of a job.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Slots {
    /// Its rings.
    pub rings: Vec<SlotRing>,
    /// Their used slots.
    pub slots: Vec<Slot>,
}

/// A ring's slots in short.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SlotRing {
    /// Ring of the job, from 0.
    pub ring: u32,
    /// The CPU that serves it.
    pub cpu: u32,
    /// Slots.
    pub slots: u32,
    /// The lowest index that has not been released.
    pub low: u32,
    /// For each rank, the index behind its last contiguous fragment.
    pub expected: Vec<u32>,
    /// These ranks. With boxes in levels: for each member, the rank that owns its connection.
    pub ranks: Vec<u32>,
}

/// The box's buffer for one index.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Slot {
    /// Ring of the job, from 0.
    pub ring: u32,
    /// Its number.
    pub slot: u32,
    /// The index that it holds.
    pub index: u32,
    /// Bytes of payload.
    pub len: u32,
    /// `partial`, `complete` or `released`.
    pub state: String,
    /// Ranks that have contributed.
    pub contributors: Vec<u32>,
    /// Ranks that have not.
    pub missing: Vec<u32>,
}

impl From<api::ShowSlotsReply> for Slots {
    fn from(reply: api::ShowSlotsReply) -> Self {
        let ring = |r: api::RingState| SlotRing {
            ring: r.ring,
            cpu: r.cpu,
            slots: r.slots,
            low: r.low,
            expected: r.expected,
            ranks: r.ranks,
        };
        let slot = |s: api::Slot| Slot {
            ring: s.ring,
            slot: s.slot,
            index: s.index,
            len: s.len,
            state: s.state,
            contributors: s.contributors,
            missing: s.missing,
        };
        Self {
            rings: reply.rings.into_iter().map(ring).collect(),
            slots: reply.slots.into_iter().map(slot).collect(),
        }
    }
}

/// The programs that are loaded into the kernel.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Programs {
    /// Version of the layout of the maps.
    pub abi: u32,
    /// The programs.
    pub programs: Vec<Program>,
    /// Aggregation rate on all CPUs that serve rings, in bytes per second; null if it could not be
    /// measured.
    pub aggregation_rate: Option<u64>,
}

/// A program.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Program {
    /// The kernel's number for it, as `bpftool prog show id` takes it.
    pub id: u32,
    /// Its type.
    pub r#type: String,
    /// Its name.
    pub name: String,
    /// The kernel's hash of its instructions.
    pub tag: String,
    /// When it was loaded, in seconds since 1970.
    pub loaded_at: u64,
    /// Bytes of the translated program.
    pub bytes_xlated: u32,
    /// Bytes of machine code; 0 without JIT.
    pub bytes_jited: u32,
    /// Bytes of locked memory.
    pub bytes_memlock: u64,
    /// Instructions that the verifier processed.
    pub verified_insns: u32,
    /// Number of runs; 0 unless `kernel.bpf_stats_enabled` is set.
    pub run_cnt: u64,
    /// Nanoseconds that these took.
    pub run_time_ns: u64,
    /// Where its packets come from.
    pub attached: Vec<String>,
}

impl From<api::ListProgramsReply> for Programs {
    fn from(reply: api::ListProgramsReply) -> Self {
        let program = |p: api::Program| Program {
            id: p.id,
            r#type: p.kind,
            name: p.name,
            tag: p.tag,
            loaded_at: p.loaded_at,
            bytes_xlated: p.xlated_bytes,
            bytes_jited: p.jited_bytes,
            bytes_memlock: p.memory,
            verified_insns: p.verified_instructions,
            run_cnt: p.runs,
            run_time_ns: p.run_ns,
            attached: p.attached,
        };
        Self {
            abi: reply.abi,
            programs: reply.programs.into_iter().map(program).collect(),
            aggregation_rate: reply.aggregation_rate,
        }
    }
}

/// Counters by name.
pub type Counters = BTreeMap<String, u64>;

/// The data plane's counters.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Stats {
    /// Counters by name.
    #[serde(flatten)]
    pub counters: Counters,
    /// The timed sums; only for a single job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timing: Option<Timing>,
}

impl Stats {
    /// With `job`, the answer for the one job that was requested; otherwise the answer for the box.
    pub fn new(reply: &api::StatsReply, job: bool) -> Self {
        let timing = |job| Timing::new(&Sums::new(job), reply.sampled);
        Self {
            counters: reply.counters.iter().map(|c| (c.name.clone(), c.value)).collect(),
            timing: reply.jobs.first().filter(|_| job).map(timing),
        }
    }
}

/// Rates of jobs in one interval.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Rates {
    /// When the interval ended, in seconds since 1970.
    pub time: f64,
    /// Its length in seconds.
    pub interval: f64,
    /// Each job.
    pub jobs: Vec<JobRates>,
}

/// Rates of a job in one interval, per second.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct JobRates {
    /// The job; null for packets that belong to none.
    pub job: Option<String>,
    /// Its state; null for packets that belong to none.
    pub state: Option<State>,
    /// Contributions added.
    pub fragments: f64,
    /// Gigabits of payload received with them, as if each fragment were one of a full message.
    pub gbps_in: f64,
    /// Gigabits of payload sent with results, likewise.
    pub gbps_out: f64,
    /// Results sent again.
    pub replays: f64,
    /// Packets dropped.
    pub drops: f64,
    /// The same by reason; only reasons that are not zero.
    pub drops_by_reason: BTreeMap<String, f64>,
    /// Upper bound in nanoseconds of half of the sums, from first contribution to last; null if
    /// none was timed.
    pub completion_p50_ns: Option<u64>,
    /// Upper bound in nanoseconds of 99 of 100 sums; null if none was timed.
    pub completion_p99_ns: Option<u64>,
    /// The rank that was last to contribute most often; null if no sum was timed.
    pub last_rank: Option<u32>,
    /// How often it was last, 0 to 1.
    pub last_share: Option<f64>,
    /// Slots.
    pub slots: u32,
    /// Slots with a sum that has not been released, at the interval's end.
    pub slots_used: u32,
    /// Fragments that a rank may send beyond what has been released.
    pub credit: u32,
    /// The most that any rank has sent, at the interval's end.
    pub credit_used: u32,
}

/// Why a command failed.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Error {
    /// Message.
    pub error: String,
    /// The exit code.
    pub exit: u8,
}
