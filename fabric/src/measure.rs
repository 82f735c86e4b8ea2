//! Has boxes measure the links between them: bandwidth probes cross each link in both directions,
//! and their arrival gives its rate.

use std::time::Duration;

use netsum_api::v1 as api;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Response, Status};

use crate::boxes::Boxes;
use crate::client::TIMEOUT;
use crate::config::{End, Link};
use crate::probe_results::{Capacity, FIRST, PROBES, both, bytes, direction};

/// Poll interval of the receiver, and how many polls without new frames end a probe: the rest is
/// then lost. This limits the wait, whatever a box reports.
const POLL_INTERVAL: Duration = Duration::from_millis(30);
const IDLE_POLLS: u32 = 5;
const LONGEST: Duration = Duration::from_secs(2);

impl Boxes {
    /// Measures links, one after the other.
    pub async fn measure_links(&self, links: Vec<Link>) {
        let _one = self.measuring.lock().await;
        for link in links {
            let carries = self.link(&link).await.map_err(|why| why.message().to_owned());
            self.record_measurement(&link, carries);
        }
    }

    async fn link(&self, link: &Link) -> Result<Capacity, Status> {
        let up = self.one_way(&link.below, &link.above).await?;
        Ok(both(up, self.one_way(&link.above, &link.below).await?))
    }

    async fn one_way(&self, from: &End, to: &End) -> Result<Capacity, Status> {
        let lost = || Status::unavailable(format!("too few frames from {from} arrive at {to}"));
        let (_, first) = self.probe(from, to, FIRST).await?;
        let mut probes = Vec::new();
        for _ in 0..PROBES {
            probes.push(self.probe(from, to, bytes(first)).await?);
        }
        direction(&probes).ok_or_else(lost)
    }

    /// Sends one probe; returns the rate at which it left and the rate at which it arrived, 0 if
    /// too few frames arrived.
    async fn probe(&self, from: &End, to: &End, bytes: u32) -> Result<(u64, u64), Status> {
        let no_box = || Status::not_found("the box does not exist");
        let mut sender = self.client(&from.of).ok_or_else(no_box)?;
        let mut receiver = self.client(&to.of).ok_or_else(no_box)?;
        let poll = api::ReceiveBandwidthProbeRequest { port: to.port.clone() };
        within(receiver.agent.receive_bandwidth_probe(poll.clone())).await?;
        let request = api::SendBandwidthProbeRequest { port: from.port.clone(), bytes };
        let sent =
            within(sender.agent.send_bandwidth_probe(request)).await?.probe.unwrap_or_default();
        let (mut received, mut idle, end) =
            (api::BandwidthProbe::default(), 0, Instant::now() + LONGEST);
        while received.frames < sent.frames && idle < IDLE_POLLS && Instant::now() < end {
            sleep(POLL_INTERVAL).await;
            let now = within(receiver.agent.receive_bandwidth_probe(poll.clone()))
                .await?
                .probe
                .unwrap_or_default();
            if now.number == sent.number && now.frames > received.frames {
                (received, idle) = (now, 0);
            } else {
                idle += 1;
            }
        }
        log::debug!(
            "probe from {from} to {to}: {} frames at {} b/s, of which {} came at {} b/s",
            sent.frames,
            sent.rate,
            received.frames,
            received.rate
        );
        Ok((sent.rate, received.rate))
    }
}

async fn within<T>(answer: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Status> {
    let late = |_| Status::deadline_exceeded(format!("no answer within {TIMEOUT:?}"));
    timeout(TIMEOUT, answer).await.map_err(late)?.map(Response::into_inner)
}
