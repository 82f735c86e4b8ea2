//! What a simulated host has below its engine: reliable connections, as datagrams in and out.

use std::net::IpAddr;
use std::time::Instant;

use netsum_common::wire::ROCE_PORT;

use crate::channels::Channels;
use crate::queue_pairs::QueuePairChannels;
use netsum_rc::{Stats, Transmit};

/// One host's connections.
pub(super) trait Stack: Channels {
    fn receive(&mut self, now: Instant, from: IpAddr, datagram: &[u8]);
    fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit>;
    fn next_timeout(&self) -> Option<Instant>;
    fn handle_timeout(&mut self, now: Instant);
    fn stats(&self) -> Stats;
}

impl Stack for QueuePairChannels {
    fn receive(&mut self, now: Instant, from: IpAddr, datagram: &[u8]) {
        self.endpoint.receive(now, (from, ROCE_PORT).into(), false, datagram);
    }

    fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        self.endpoint.poll_transmit(now, buf)
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.endpoint.next_timeout()
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.endpoint.handle_timeout(now);
    }

    fn stats(&self) -> Stats {
        *self.endpoint.stats()
    }
}
