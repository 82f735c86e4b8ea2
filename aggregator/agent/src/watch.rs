//! Watches active rings: logs stalls, and sends sums that no packet carries; see
//! [`netsum_core::watch`].

use std::time::{Duration, Instant};

use netsum_core::JobRing;
use netsum_core::plane::RingSpec;
use netsum_core::watch::RingEvent;

use super::agent::{Inner, Shared};
use super::load::{flows_of, view};

/// Interval at which active rings are checked.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// Checks all active rings periodically.
pub async fn run(shared: Shared) {
    let mut tick = tokio::time::interval(WATCH_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        poll(&mut shared.lock(), Instant::now());
    }
}

/// Checks all active rings once.
fn poll(inner: &mut Inner, now: Instant) {
    let active: Vec<(String, JobRing, RingSpec)> = active_rings(inner).collect();
    inner.executor.watch.retain(|id| active.iter().any(|(_, _, ring)| ring.id == id));
    for (job, number, ring) in active {
        let Ok(found) = inner.controller.job(&job) else { continue };
        let flows = flows_of(found, ring.id);
        let view = match view(inner, &ring, &flows) {
            Ok(view) => view,
            Err(e) => {
                log::error!(NETSUM_JOB = job, NETSUM_RING = number.0; "job {job}: cannot \
                    read the maps of ring {number}: {e:#}");
                continue;
            }
        };
        for event in inner.executor.watch.observe(&ring, &view, now) {
            match event {
                RingEvent::Held { slot } => {
                    log::debug!(
                        NETSUM_JOB = job, NETSUM_RING = number.0;
                        "job {job}: ring {number}: slot {slot} is complete, but no packet carries \
                         its sum"
                    );
                    // A port that is down takes no frame.
                    let mut sent = inner.executor.plane.send_held(&ring, slot, &flows[0]);
                    for flow in &flows[1..] {
                        sent = sent.or_else(|_| inner.executor.plane.send_held(&ring, slot, flow));
                    }
                    if let Err(e) = sent {
                        log::error!(
                            NETSUM_JOB = job, NETSUM_RING = number.0;
                            "job {job}: ring {number}: cannot send the held-back sum of slot \
                             {slot}: {e:#}"
                        );
                    }
                }
                RingEvent::Stalled { index, stalled_for, missing } => {
                    let Ok(found) = inner.controller.job(&job) else { continue };
                    let ranks: Vec<String> = missing
                        .iter()
                        .map(|&r| {
                            let psn = flows[r.0 as usize].base_psn.plus(index).get();
                            format!("{} (PSN {psn:#x})", found.sender(r))
                        })
                        .collect();
                    let missing = missing.iter().map(|&r| found.sender(r));
                    let numbers = missing.map(|r| r.to_string()).collect::<Vec<_>>().join(", ");
                    log::warn!(
                        NETSUM_JOB = job, NETSUM_RING = number.0, NETSUM_RANK = numbers;
                        "job {job}: ring {number} has stalled at index {index} for {:.1} s; \
                         missing: rank {}; try `netsum diagnose {job}`",
                        stalled_for.as_secs_f64(),
                        ranks.join(", rank ")
                    );
                }
                RingEvent::Resumed { after } => {
                    log::info!(NETSUM_JOB = job, NETSUM_RING = number.0; "job {job}: ring \
                        {number} continues after {:.1} s", after.as_secs_f64());
                }
            }
        }
    }
}

fn active_rings(inner: &Inner) -> impl Iterator<Item = (String, JobRing, RingSpec)> {
    inner.controller.jobs().filter(|j| j.has_active_rings()).flat_map(|j| {
        j.numbered_rings().map(|(number, ring)| (j.spec.name.clone(), number, ring.clone()))
    })
}
