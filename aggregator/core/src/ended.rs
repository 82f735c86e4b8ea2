//! Flows whose job has ended, and for how long their data is dropped.
//!
//! A sender is not told that its job has ended. It sends on, and again, until its own retries are
//! used up; then its connection has an error, which is right. So a flow is forgotten when nothing
//! has come on it for [`LINGER`].

use std::collections::HashMap;
use std::time::{Duration, Instant};

use netsum_common::abi::{FlowKey, MAX_ENDED};

use crate::plane::EndedFlow;

/// How long nothing may have come on a flow that has ended before it is forgotten. Longer than any
/// sender's retries, whose timer is 4.096 us x 2^n, or up to four times that (IBTA 9.7.6.1.3; n is
/// 14 to 20 as a rule); and than an application computes between two messages: all its connections
/// would be intact, and let through what it sends next.
pub const LINGER: Duration = Duration::from_secs(3600);
/// Most that are kept: all flows may end at once, beside as many connections that waited. Beyond,
/// those are forgotten on which nothing has come for longest.
const MOST: usize = MAX_ENDED as usize;

/// What was last seen of them.
#[derive(Debug, Default)]
pub struct Ended {
    seen: HashMap<FlowKey, (u32, Instant)>,
}

impl Ended {
    /// Takes note of what has come on all flows that have ended; those that are to be forgotten.
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
        let keep = by_age.iter().take(MOST).take_while(|(_, _, since)| !idle(*since)).count();
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
    fn a_flow_that_was_registered_again_and_ended_again_begins_anew() {
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
        // Of another job, in which somebody has made up first packets.
        all.extend((MAX_FLOWS..2 * MAX_FLOWS).map(|q| flow(q, 0)));
        let forgotten = ended.observe(&all, start + Duration::from_secs(1));
        assert!(forgotten.is_empty(), "{}", forgotten.len());
    }

    #[test]
    fn they_are_bounded_and_the_oldest_go_first() {
        let (mut ended, start) = (Ended::default(), Instant::now());
        let old: Vec<_> = (0..10).map(|q| flow(q, 0)).collect();
        ended.observe(&old, start);
        let all: Vec<_> = (0..MOST as u32 + 10).map(|q| flow(q, 0)).collect();
        let mut forgotten = ended.observe(&all, start + Duration::from_secs(1));
        forgotten.sort_by_key(|key| key.qpn);
        assert_eq!(forgotten, old.iter().map(|f| f.key).collect::<Vec<_>>());
    }
}
