//! Passes the first packets that the data plane has noted to the controller.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use netsum_common::abi::RingNumber;
use netsum_common::slot::Slot;
use netsum_core::in_band::Outcome;
use netsum_core::plane::{FirstPacket, RingSpec};
use netsum_core::{Job, State};

use super::agent::{Inner, Shared};

/// Poll interval. A sender's timer is longer, so its first retransmission is usually summed.
const INTERVAL: Duration = Duration::from_millis(10);

/// Passes first packets to the controller periodically, while some job is set up in band.
pub async fn poll_first_packets(shared: Shared) {
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut lines = LogBudget::new(Instant::now());
    loop {
        tick.tick().await;
        let mut inner = shared.lock();
        if inner.controller.has_in_band_jobs() {
            take_first_packets(&mut inner, &mut lines, Instant::now());
        }
    }
}

/// Rate limit for log lines: a client with a token can invent as many first packets as there are
/// numbers.
struct LogBudget {
    left: u32,
    since: Instant,
}

impl LogBudget {
    /// Lines in a period; enough for the ranks of a large job.
    const MAX_LINES: u32 = 200;
    const PERIOD: Duration = Duration::from_secs(10);

    fn new(now: Instant) -> Self {
        Self { left: Self::MAX_LINES, since: now }
    }

    /// The level at which to log one more line.
    fn level(&mut self, level: log::Level, now: Instant) -> log::Level {
        if now - self.since >= Self::PERIOD {
            *self = Self::new(now);
        }
        match self.left {
            0 => return log::Level::Debug,
            1 => log::warn!(
                "first packets: too many to log all of them; level debug shows the others"
            ),
            _ => {}
        }
        self.left -= 1;
        level
    }
}

/// Whether a job's rings have released sums since they were created.
fn has_released(inner: &Inner, job: &Job) -> bool {
    let untouched = |ring: &RingSpec| -> anyhow::Result<bool> {
        let (state, slot) =
            (inner.executor.plane.ring_state(ring.id)?, inner.executor.plane.slot(ring.id, 0)?);
        // Indices wrap: after a whole cycle, slot 0 holds a released index.
        Ok(state.low == 0 && !slot.is(Slot::RELEASED))
    };
    job.state == State::Active && !job.rings.iter().all(|ring| untouched(ring).unwrap_or(false))
}

fn take_first_packets(inner: &mut Inner, lines: &mut LogBudget, now: Instant) {
    let packets = match inner.executor.plane.first_packets() {
        Ok(packets) => packets,
        Err(e) => return log::error!("first packets cannot be read: {e:#}"),
    };
    let mut by_job: BTreeMap<RingNumber, Vec<FirstPacket>> = BTreeMap::new();
    for packet in packets {
        by_job.entry(packet.job).or_default().push(packet);
    }
    for (number, packets) in by_job {
        take(inner, number, &packets, lines, now);
    }
}

/// Handles the first packets of one job.
fn take(
    inner: &mut Inner,
    number: RingNumber,
    packets: &[FirstPacket],
    lines: &mut LogBudget,
    now: Instant,
) {
    let (paused, released) = stop_if_it_may_restart_epoch(inner, number, packets);
    let Some(answer) = inner.controller.first_packets(number, packets, released, now) else {
        return;
    };
    let job = &answer.job;
    let mut began = false;
    for (packet, outcome) in packets.iter().zip(answer.outcomes) {
        let (rank, ring) = (packet.header.rank, packet.header.ring);
        let port = inner.controller.port_name(packet.ifindex);
        let what = format!(
            "rank {rank} of ring {ring} has shown up: {} behind {port} to queue pair {:#x} of {}",
            packet.src,
            packet.qpn.get(),
            packet.dst
        );
        let (level, line) = match outcome {
            Outcome::Known => continue,
            Outcome::Waits => (log::Level::Info, what),
            Outcome::Refused(why) => (log::Level::Warn, format!("refused in band: {why}")),
            Outcome::Failed(why) => (log::Level::Warn, format!("cannot be set up in band: {why}")),
            Outcome::Began(epoch) => {
                began = true;
                (log::Level::Info, format!("{what}; all are there, epoch {epoch} begins"))
            }
        };
        let level = lines.level(level, now);
        log::log!(level, NETSUM_JOB = job, NETSUM_RING = ring, NETSUM_RANK = rank, NETSUM_PORT = port; "job {job}: {line}");
    }
    if !answer.actions.is_empty() {
        inner.carry_out_or_log(Some(job), answer.actions);
    }
    if !began && let Err(e) = inner.executor.plane.resume_rings(&paused) {
        log::error!(NETSUM_JOB = job; "job {job}: cannot resume its rings: {e:#}");
    }
}

/// Pauses an active job's rings if these first packets may restart it, which is possible until it
/// has released a sum. Without the pause, a sum could be released between the check and the end of
/// the rings: some ranks would have it and not send for it again, and others would wait for it.
/// Returns the paused rings, and whether a sum has been released.
fn stop_if_it_may_restart_epoch(
    inner: &mut Inner,
    number: RingNumber,
    packets: &[FirstPacket],
) -> (Vec<RingNumber>, bool) {
    let has_released = |inner: &Inner| {
        inner.controller.job_in_band(number).is_some_and(|job| has_released(inner, job))
    };
    if has_released(inner)
        || !packets.iter().any(|packet| inner.controller.may_restart_epoch(packet))
    {
        return (Vec::new(), has_released(inner));
    }
    let rings = inner.controller.job_in_band(number).map_or(&[][..], |job| &job.rings);
    let rings: Vec<RingNumber> = rings.iter().map(|ring| ring.id).collect();
    if let Err(e) = inner.executor.plane.pause_rings(&rings) {
        let numbers: Vec<u32> = rings.iter().map(|ring| ring.0).collect();
        log::error!("rings {numbers:?} cannot be stopped: {e:#}");
    }
    (rings, has_released(inner))
}

#[cfg(test)]
mod tests {
    use log::Level;

    use super::*;

    #[test]
    fn lines_are_rationed() {
        let start = Instant::now();
        let mut lines = LogBudget::new(start);
        for _ in 0..LogBudget::MAX_LINES {
            assert_eq!(lines.level(Level::Warn, start), Level::Warn);
        }
        assert_eq!(lines.level(Level::Warn, start + LogBudget::PERIOD / 2), Level::Debug);
        assert_eq!(lines.level(Level::Info, start + LogBudget::PERIOD), Level::Info);
    }
}
