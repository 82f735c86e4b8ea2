//! Flows whose job has ended, and how long their data is dropped.
//!
//! A sender is not told that its job has ended. It retransmits until its retries are used up; then
//! its connection fails, which is right. A flow is forgotten after [`LINGER`] without a packet.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use netsum_common::abi::{FlowKey, MAX_ENDED_FLOWS};

use crate::plane::EndedFlow;

/// How long an ended flow must be silent before it is forgotten. This is longer than any sender's
/// retries, whose timer is 4.096 us x 2^n, or up to four times that (IBTA 9.7.6.1.3; n is usually
/// 14 to 20). It is also longer than an application computes between two messages: its connections
/// would still be intact, and its next data would be forwarded.
pub const LINGER: Duration = Duration::from_secs(3600);
/// Most flows that are kept: all flows may end at once, as may as many waiting connections. Beyond
/// that, the flows that have been silent longest are forgotten.
const MAX_ENDED: usize = MAX_ENDED_FLOWS as usize;

/// The last state of each ended flow.
#[derive(Debug, Default)]
pub struct Ended {
    seen: HashMap<FlowKey, (u32, Instant)>,
}

impl Ended {
    /// Records the packets of all ended flows; returns the flows to forget.
    pub fn observe(&mut self, flows: &[EndedFlow], now: Instant) -> Vec<FlowKey> {
        let before = std::mem::take(&mut self.seen);
        let mut by_age: Vec<(FlowKey, u32, Instant)> = flows
            .iter()
            .map(|flow| match before.get(&flow.key) {
                Some(&(packets, since)) if packets == flow.packets => (flow.key, packets, since),
                _ => (flow.key, flow.packets, now),
            })
            .collect();
        by_age.sort_by_key(|(_, _, since)| std::cmp::Reverse(*since));
        let idle = |since: Instant| now.saturating_duration_since(since) >= LINGER;
        let keep = by_age.iter().take(MAX_ENDED).take_while(|(_, _, since)| !idle(*since)).count();
        let forgotten = by_age.split_off(keep).into_iter().map(|(key, ..)| key).collect();
        self.seen =
            by_age.into_iter().map(|(key, packets, since)| (key, (packets, since))).collect();
        forgotten
    }
}

#[cfg(test)]
mod tests {
    use netsum_common::abi::MAX_FLOWS;

    use super::*;

    fn flow(qpn: u32, packets: u32) -> EndedFlow {
        EndedFlow { key: FlowKey { dst_ip: [0; 16], qpn }, ifindex: 1, packets }
    }

    #[test]
    fn a_flow_is_forgotten_when_nothing_has_come_for_long_enough() {
        let (mut ended, start) = (Ended::default(), Instant::now());
        assert!(ended.observe(&[flow(1, 0), flow(2, 0)], start).is_empty());
        let half = start + LINGER / 2;
        assert!(
            ended.observe(&[flow(1, 1), flow(2, 0)], half).is_empty(),
            "something came on flow 1"
        );
        assert_eq!(ended.observe(&[flow(1, 1), flow(2, 0)], start + LINGER), [flow(2, 0).key]);
        assert!(ended.observe(&[flow(1, 1)], half + LINGER - Duration::from_millis(1)).is_empty());
        assert_eq!(ended.observe(&[flow(1, 1)], half + LINGER), [flow(1, 1).key]);
    }

    #[test]
    fn a_flow_that_was_registered_again_and_ended_again_begins_again() {
        let (mut ended, start) = (Ended::default(), Instant::now());
        ended.observe(&[flow(1, 5)], start);
        ended.observe(&[], start + LINGER / 2);
        assert!(ended.observe(&[flow(1, 5)], start + LINGER).is_empty());
    }

    #[test]
    fn all_flows_are_kept_beside_as_many_connections_that_waited() {
        let (mut ended, start) = (Ended::default(), Instant::now());
        let mut all: Vec<_> = (0..MAX_FLOWS).map(|q| flow(q, 0)).collect();
        ended.observe(&all, start);
        // Flows of another job, for which somebody has forged first packets.
        all.extend((MAX_FLOWS..2 * MAX_FLOWS).map(|q| flow(q, 0)));
        let forgotten = ended.observe(&all, start + Duration::from_secs(1));
        assert!(forgotten.is_empty(), "{}", forgotten.len());
    }

    #[test]
    fn they_are_bounded_and_the_oldest_go_first() {
        let (mut ended, start) = (Ended::default(), Instant::now());
        let old: Vec<_> = (0..10).map(|q| flow(q, 0)).collect();
        ended.observe(&old, start);
        let all: Vec<_> = (0..MAX_ENDED as u32 + 10).map(|q| flow(q, 0)).collect();
        let mut forgotten = ended.observe(&all, start + Duration::from_secs(1));
        forgotten.sort_by_key(|key| key.qpn);
        assert_eq!(forgotten, old.iter().map(|f| f.key).collect::<Vec<_>>());
    }
}
