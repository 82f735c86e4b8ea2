//! The JSON that is printed: `netsum/schema` is generated from these types, and from messages of
//! the API (`api/build.rs`). Scripts rely on the names here.

use std::collections::BTreeMap;
use std::mem::take;
use std::ops::Deref;

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
    #[serde(flatten)]
    job: api::Job,
    /// Its state.
    pub state: State,
    /// Registered flows.
    pub flows: Vec<Flow>,
    /// Token that workers need to join; only if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Connections that have shown up in band; only of jobs that are set up so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_band: Option<InBand>,
    /// Fewest ranks that may join; only of elastic jobs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_ranks: Option<u32>,
    /// Most ranks that may join; only of elastic jobs, whose `ranks` are those that joined last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_ranks: Option<u32>,
}

impl Deref for Job {
    type Target = api::Job;

    fn deref(&self) -> &api::Job {
        &self.job
    }
}

impl Job {
    /// Connections that pass this box once all are set up.
    pub fn connections(&self) -> u32 {
        let members = if self.members.is_empty() { self.ranks } else { self.members.len() as u32 };
        members * self.rings
    }
}

/// Connections of a job whose ranks are recognised by their first packets.
#[derive(Debug, Serialize, JsonSchema)]
pub struct InBand {
    /// Connections that have shown up and wait for others.
    pub claims: Vec<Flow>,
    /// Connections that have not shown up.
    pub unclaimed: Vec<api::RingPosition>,
    /// First packets that were refused recently, with the reason.
    pub refusals: Vec<String>,
    /// Token that first packets carry; only if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

impl From<api::Job> for Job {
    fn from(mut job: api::Job) -> Self {
        let name = job.name.clone();
        let flows = |flows: Vec<api::Flow>| -> Vec<Flow> {
            flows.into_iter().map(|f| Flow::new(&name, f)).collect()
        };
        let given = |token: String| (!token.is_empty()).then_some(token);
        let in_band = job.in_band.then(|| InBand {
            claims: flows(take(&mut job.claims)),
            unclaimed: take(&mut job.unclaimed),
            refusals: take(&mut job.refusals),
            token: given(take(&mut job.in_band_token)),
        });
        let is_elastic = job.max_ranks > 0;
        Self {
            min_ranks: is_elastic.then_some(job.min_ranks),
            max_ranks: is_elastic.then_some(job.max_ranks),
            state: job.state().into(),
            flows: flows(take(&mut job.flows)),
            token: given(take(&mut job.token)),
            in_band,
            job,
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
    pub last_verdict: Option<String>,
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
            last_verdict: seen.last_psn.map(|_| seen.last_verdict),
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
    pub contributions: f64,
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
