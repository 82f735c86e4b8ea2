//! Has boxes measure the links between them: trains go over each, both ways, and what comes in tells its rate.

use std::time::Duration;

use netsum_api::v1 as api;
use tokio::time::{sleep, timeout};
use tonic::Status;

use crate::boxes::Boxes;
use crate::client::PATIENCE;
use crate::config::{End, Link};
use crate::measured::{Carries, FIRST, TRAINS, both, bytes, direction};

/// How often the receiver is asked, and how often nothing more may have come since: then the rest is lost.
const ASK: Duration = Duration::from_millis(30);
const IDLE: u32 = 5;

impl Boxes {
    /// Measures links, one after the other.
    pub async fn measure_links(&self, links: Vec<Link>) {
        let _one = self.measuring.lock().await;
        for link in links {
            let carries = self.link(&link).await.map_err(|why| why.message().to_owned());
            self.have_measured(&link, carries);
        }
    }

    async fn link(&self, link: &Link) -> Result<Carries, Status> {
        let up = self.way(&link.below, &link.above).await?;
        Ok(both(up, self.way(&link.above, &link.below).await?))
    }

    async fn way(&self, from: &End, to: &End) -> Result<Carries, Status> {
        let lost = || Status::unavailable(format!("too little of what {from} sends comes to {to}"));
        let (_, first) = self.train(from, to, FIRST).await?;
        let mut trains = Vec::new();
        for _ in 0..TRAINS {
            trains.push(self.train(from, to, bytes(first)).await?);
        }
        direction(&trains).ok_or_else(lost)
    }

    /// What the sender of a train could send at most, and the rate at which it came in; 0 where too little came.
    async fn train(&self, from: &End, to: &End, bytes: u32) -> Result<(u64, u64), Status> {
        let no_box = || Status::not_found("there is no such box");
        let mut sender = self.client(&from.of).ok_or_else(no_box)?;
        let mut receiver = self.client(&to.of).ok_or_else(no_box)?;
        let late = |_| Status::deadline_exceeded(format!("no answer within {PATIENCE:?}"));
        let request = api::SendTrainRequest { port: from.port.clone(), bytes };
        let sent = timeout(PATIENCE, sender.send_train(request)).await.map_err(late)??.into_inner();
        let sent = sent.train.ok_or_else(|| Status::internal("no train"))?;
        let (mut heard, mut idle) = (api::Train::default(), 0);
        while heard.frames < sent.frames && idle < IDLE {
            sleep(ASK).await;
            let ports = receiver.list_ports(api::ListPortsRequest::default());
            let ports = timeout(PATIENCE, ports).await.map_err(late)??.into_inner().ports;
            let port = ports.into_iter().find(|port| port.name == to.port);
            let now = port.and_then(|port| port.train).filter(|train| train.number == sent.number);
            let now = now.unwrap_or_default();
            idle = if now.frames == heard.frames { idle + 1 } else { 0 };
            heard = now;
        }
        log::debug!(
            "train from {from} to {to}: {} frames at {} b/s, of which {} came at {} b/s",
            sent.frames,
            sent.rate,
            heard.frames,
            heard.rate
        );
        Ok((sent.rate, heard.rate))
    }
}
