//! Takes what the data plane has noted of first packets to the controller.

use std::time::{Duration, Instant};

use netsum_common::slot::Slot;

use super::state::{Inner, Shared};
use crate::core::in_band::Outcome;
use crate::core::{Job, State};
use crate::dataplane::RingSpec;

/// How often they are taken. A sender's timer is longer, so that most often its first retransmission is summed.
const INTERVAL: Duration = Duration::from_millis(10);

/// Takes first packets to the controller, again and again, while there are jobs that are set up in band.
pub async fn keep_listening(shared: Shared) {
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let mut inner = shared.lock();
        if inner.controller.listens_in_band() {
            listen(&mut inner, Instant::now());
        }
    }
}

/// Whether a job's rings have released sums since they were made.
fn has_released(inner: &Inner, job: &Job) -> bool {
    let untouched = |ring: &RingSpec| -> anyhow::Result<bool> {
        let (state, slot) = (inner.plane.ring_state(ring.id)?, inner.plane.slot(ring.id, 0)?);
        // Indices wrap: then slot 0 holds one that was released.
        Ok(state.low == 0 && !slot.is(Slot::RELEASED))
    };
    job.state == State::Active && !job.rings.iter().all(|ring| untouched(ring).unwrap_or(false))
}

fn listen(inner: &mut Inner, now: Instant) {
    let packets = match inner.plane.first_packets() {
        Ok(packets) => packets,
        Err(e) => return log::error!("first packets cannot be read: {e:#}"),
    };
    for packet in packets {
        let what = format!(
            "rank {} of ring {} has shown up: {} behind {} to queue pair {:#x} of {}",
            packet.header.rank,
            packet.header.ring,
            packet.src,
            inner.controller.port_name(packet.ifindex),
            packet.qpn,
            packet.dst
        );
        let released = inner.controller.job_in_band(packet.job).is_some_and(|job| has_released(inner, job));
        let Some(answer) = inner.controller.first_packet(packet, released, now) else { continue };
        let job = &answer.job;
        match &answer.outcome {
            Outcome::Known => {}
            Outcome::Waits => log::info!("job {job}: {what}"),
            Outcome::Refused(why) => log::warn!("job {job}: refused in band: {why}"),
            Outcome::Failed(why) => log::warn!("job {job}: cannot be set up in band: {why}"),
            Outcome::Began(epoch) => log::info!("job {job}: {what}; all are there, epoch {epoch} begins"),
        }
        if !answer.actions.is_empty()
            && let Err(e) = inner.carry_out(Some(job), answer.actions)
        {
            log::error!("job {job}: {}", e.message());
        }
    }
}
