//! How full rings are, and their jobs' counters: for `netsum ring`, `netsum stats` and the metrics.

use std::time::{Duration, Instant};

use netsum_api::v1 as api;
use netsum_common::abi::RingNumber;
use netsum_common::counters::Counter;
use netsum_common::timing::{Histogram, RankTiming};
use netsum_core::Job;
use netsum_core::plane::{FlowSpec, RingSpec};
use netsum_core::watch::RingView;
use netsum_dataplane::count;

use super::agent::Inner;

/// How full a ring is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RingLoad {
    /// The lowest unreleased index.
    pub low: u32,
    /// Slots that hold an unreleased sum.
    pub slots_used: u32,
    /// Fragments that each rank has sent beyond the released ones.
    pub credit_used: Vec<u32>,
    /// How long the ring has been stalled with something pending.
    pub stalled: Option<Duration>,
}

/// A ring's flows in rank order.
pub(super) fn flows_of(job: &Job, ring: RingNumber) -> Vec<FlowSpec> {
    let mut flows: Vec<FlowSpec> = job.flows.iter().filter(|f| f.ring == ring).cloned().collect();
    flows.sort_by_key(|f| f.member);
    flows
}

pub(super) fn view(inner: &Inner, ring: &RingSpec, flows: &[FlowSpec]) -> anyhow::Result<RingView> {
    let state = inner.executor.plane.ring_state(ring.id)?;
    Ok(RingView {
        slot: inner.executor.plane.slot(ring.id, state.low & (ring.config.slots - 1))?,
        state,
        ranks: flows
            .iter()
            .map(|f| inner.executor.plane.flow_stats(f.key()))
            .collect::<Result<_, _>>()?,
        base_psns: flows.iter().map(|f| f.base_psn).collect(),
    })
}

/// Reads the load of a job's ring. An inactive ring is empty.
pub fn ring_load(inner: &Inner, job: &Job, ring: &RingSpec) -> anyhow::Result<RingLoad> {
    if !job.has_active_rings() {
        return Ok(RingLoad {
            credit_used: vec![0; ring.config.members as usize],
            ..RingLoad::default()
        });
    }
    let view = view(inner, ring, &flows_of(job, ring.id))?;
    let pending = view.is_pending(ring.config.credit);
    let since = inner.executor.watch.stalled_since(ring.id).filter(|_| pending);
    Ok(RingLoad {
        low: view.state.low,
        slots_used: view.slots_used(),
        credit_used: (0..view.ranks.len())
            .map(|rank| view.credit_used(rank, ring.config.credit))
            .collect(),
        stalled: since.map(|since| Instant::now().saturating_duration_since(since)),
    })
}

/// All counters in the order of their numbers, summed over rings.
pub fn counters(
    inner: &Inner,
    rings: impl IntoIterator<Item = RingNumber>,
) -> anyhow::Result<Vec<u64>> {
    let mut totals = vec![0; Counter::ALL.len()];
    for ring in rings {
        let values = inner.executor.plane.counters(ring)?;
        for (total, &c) in totals.iter_mut().zip(Counter::ALL) {
            *total += count(&values, c);
        }
    }
    Ok(totals)
}

/// The timed sums of a job, over all its rings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From first contribution to last.
    pub completion: Histogram,
    /// The ranks, in order.
    pub ranks: Vec<RankTiming>,
}

impl Timings {
    /// Without any sum.
    pub fn of_ranks(ranks: u32) -> Self {
        Self { completion: Histogram::EMPTY, ranks: vec![RankTiming::default(); ranks as usize] }
    }

    /// Adds those of a ring.
    pub fn add(&mut self, inner: &Inner, ring: RingNumber) -> anyhow::Result<()> {
        let timing = inner.executor.plane.timing(ring)?;
        self.completion.merge(&timing.completion);
        for (sum, of_ring) in self.ranks.iter_mut().zip(&timing.ranks) {
            sum.last += of_ring.last;
            sum.late.merge(&of_ring.late);
        }
        Ok(())
    }
}

pub fn histogram_message(h: &Histogram) -> api::Histogram {
    api::Histogram { counts: h.counts.to_vec(), sum_ns: h.sum_ns }
}

/// Average payload bytes per fragment of a full message. The data plane counts fragments, and a
/// message's last one may be short.
pub fn fragment_bytes(job: &Job) -> f64 {
    let size = job.spec.message_size;
    f64::from(size) / f64::from(size.div_ceil(job.mtu()))
}

/// Pairs values, in the order of the counters' numbers, with their counters.
pub(super) fn counter_messages(values: Vec<u64>) -> Vec<api::Counter> {
    let message = |(c, value): (&Counter, u64)| api::Counter {
        name: c.name().into(),
        value,
        kind: c.kind().name().into(),
        help: c.help().trim().into(),
    };
    Counter::ALL.iter().zip(values).map(message).collect()
}
