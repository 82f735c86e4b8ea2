//! The packets to send again to a selective receiver: only those that it lists as missing.
//!
//! A packet is retransmitted when it is first listed as missing. It is retransmitted once more when
//! a packet has arrived that was sent after the retransmission. A loss at the end of a list is not
//! visible from gaps, so a packet is sent again as a probe: the last one of all, or the oldest one
//! behind a box.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use super::rtt::RttEstimator;

/// Least time to wait for acknowledgements of retransmissions, before a packet probes.
const LEAST_PROBE_DELAY: Duration = Duration::from_micros(200);

/// Losses of one packet that are usual. More mean another problem, or that the sum waits for
/// another rank.
const USUAL_LOSSES: u32 = 8;

/// State of one sending half. Packets are counted as there.
#[derive(Debug, Default)]
pub(super) struct RetransmitQueue {
    /// Packets to retransmit.
    due: BTreeSet<u64>,
    /// Packets that have been retransmitted and not acknowledged.
    retransmitted: BTreeMap<u64, Retransmitted>,
    /// Retransmissions so far.
    count: u64,
    /// When a packet probes whether retransmissions have arrived, if no NAK shows it before: once
    /// for each NAK with a list.
    probe_at: Option<Instant>,
    may_probe: bool,
    lost_oldest_twice: bool,
}

/// A retransmission: how many packets had been sent and retransmitted by then, and how often the
/// packet was lost before.
#[derive(Clone, Copy, Debug)]
struct Retransmitted {
    sent: u64,
    count: u64,
    at: Instant,
    lost: u32,
}

impl Retransmitted {
    /// When it may be retransmitted once more: after a growing pause of at most `most`.
    fn next(&self, rtt: &RttEstimator, most: Duration) -> Instant {
        let unusual = self.lost.saturating_sub(USUAL_LOSSES).min(16);
        self.at
            + if unusual == 0 { Duration::ZERO } else { (rtt.least() * (1 << unusual)).min(most) }
    }
}

/// When the packet that arrived last was sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Newest {
    /// As a first transmission, by its number.
    First(u64),
    /// As a retransmission, by how many there had been.
    Repeated(u64),
}

impl Newest {
    fn is_after(self, then: &Retransmitted) -> bool {
        match self {
            Self::First(packet) => packet >= then.sent,
            Self::Repeated(count) => count > then.count,
        }
    }
}

/// A packet to retransmit now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Retransmit {
    pub packet: u64,
    /// No other one is due after it.
    pub last: bool,
}

impl RetransmitQueue {
    /// The next packet to retransmit.
    pub fn first(&self) -> Option<u64> {
        self.due.first().copied()
    }

    /// Takes the next packet to retransmit, when the packets before `sent` have been sent.
    pub fn next(&mut self, now: Instant, sent: u64, rtt: &RttEstimator) -> Option<Retransmit> {
        let packet = self.due.pop_first()?;
        let last = self.due.is_empty();
        self.count += 1;
        let lost = self.retransmitted.get(&packet).map_or(0, |then| then.lost);
        self.retransmitted.insert(packet, Retransmitted { sent, count: self.count, at: now, lost });
        if last && std::mem::take(&mut self.may_probe) {
            self.probe_at = Some(now + rtt.usual().max(LEAST_PROBE_DELAY));
        }
        Some(Retransmit { packet, last })
    }

    /// Adds a packet, whether or not it is known to be missing.
    pub fn add(&mut self, packet: u64) {
        self.due.insert(packet);
    }

    /// Whether some of these packets have been retransmitted.
    pub fn have_retransmitted(&self, packets: Range<u64>) -> bool {
        self.retransmitted.range(packets).next().is_some()
    }

    /// When the packet that arrived last was sent. Must be called before it is acknowledged.
    pub fn newest(&self, packet: u64) -> Newest {
        self.retransmitted.get(&packet).map_or(Newest::First(packet), |r| Newest::Repeated(r.count))
    }

    /// Adds packets that are missing. `newest` arrived last, and `oldest` is the oldest packet
    /// without an acknowledgement. A packet that is lost again and again waits for up to `most`
    /// each time.
    pub fn add_missing(
        &mut self,
        packets: Range<u64>,
        newest: Option<Newest>,
        oldest: u64,
        overdue: Option<Duration>,
        (now, rtt, most): (Instant, &RttEstimator, Duration),
    ) {
        for n in packets {
            if let Some(then) = self.retransmitted.get_mut(&n) {
                let is_overdue = overdue.is_some_and(|after| now >= then.at + after);
                if !is_overdue && !newest.is_some_and(|newest| newest.is_after(then)) {
                    continue;
                }
                let next = then.next(rtt, most);
                if now < next {
                    self.probe_at = Some(self.probe_at.map_or(next, |t| t.min(next)));
                    continue;
                }
                then.lost += u32::from(!self.due.contains(&n));
                self.lost_oldest_twice |= n == oldest;
            }
            self.due.insert(n);
            self.may_probe = true;
        }
    }

    /// Whether the oldest packet was lost once more, and no acknowledgement has arrived since.
    pub fn lost_oldest_twice(&self) -> bool {
        self.lost_oldest_twice
    }

    /// Everything before `packet` has arrived.
    pub fn acknowledge(&mut self, packet: u64) {
        self.lost_oldest_twice = false;
        self.due = self.due.split_off(&packet);
        self.retransmitted = self.retransmitted.split_off(&packet);
        self.probe_at = self.probe_at.filter(|_| !self.retransmitted.is_empty());
    }

    /// Forgets all packets, for go-back-N.
    pub fn clear(&mut self) {
        self.due.clear();
    }

    /// When [`probes`](Self::probes) should be called.
    pub fn deadline(&self) -> Option<Instant> {
        self.probe_at
    }

    /// Whether a packet is to probe now.
    pub fn probes(&mut self, now: Instant) -> bool {
        self.probe_at.take_if(|t| now >= *t).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Event;
    use crate::tests::{Faults, Pair, QPNS, exchange};

    /// Retransmits all that is due, when the packets before `sent` have been sent.
    fn retransmit(queue: &mut RetransmitQueue, now: Instant, sent: u64) -> Vec<u64> {
        let rtt = RttEstimator::new();
        std::iter::from_fn(|| queue.next(now, sent, &rtt)).map(|r| r.packet).collect()
    }

    fn missing(queue: &mut RetransmitQueue, packets: Range<u64>, newest: u64) {
        let newest = queue.newest(newest);
        queue.add_missing(
            packets,
            Some(newest),
            3,
            None,
            (Instant::now(), &RttEstimator::new(), Duration::ZERO),
        );
    }

    #[test]
    fn a_packet_is_retransmitted_again_only_after_a_later_one_arrived() {
        let (mut queue, now) = (RetransmitQueue::default(), Instant::now());
        missing(&mut queue, 3..6, 6);
        assert_eq!(retransmit(&mut queue, now, 10), [3, 4, 5]);
        // Sent before the retransmission: a first transmission or a retransmission.
        for newest in [6, 9, 3] {
            missing(&mut queue, 3..4, newest);
            assert_eq!(
                (retransmit(&mut queue, now, 10), queue.lost_oldest_twice()),
                (vec![], false),
                "{newest}"
            );
        }
        missing(&mut queue, 4..5, 5);
        assert_eq!((retransmit(&mut queue, now, 10), queue.lost_oldest_twice()), (vec![4], false));
        missing(&mut queue, 3..4, 10);
        assert_eq!((retransmit(&mut queue, now, 12), queue.lost_oldest_twice()), (vec![3], true));
        queue.acknowledge(4);
        assert!(!queue.lost_oldest_twice());
    }

    #[test]
    fn the_last_packet_probes_once_for_a_list_unless_acknowledged() {
        let (mut queue, now) = (RetransmitQueue::default(), Instant::now());
        let due = now + RttEstimator::new().usual().max(LEAST_PROBE_DELAY);
        missing(&mut queue, 3..5, 6);
        assert_eq!(queue.deadline(), None, "nothing has been retransmitted");
        retransmit(&mut queue, now, 10);
        assert_eq!(queue.deadline(), Some(due));
        assert!(!queue.probes(now) && queue.probes(due) && !queue.probes(due));
        queue.add(9);
        retransmit(&mut queue, due, 10);
        assert_eq!(queue.deadline(), None, "a probe needs no probe");
        missing(&mut queue, 3..4, 9);
        retransmit(&mut queue, now, 10);
        queue.acknowledge(9);
        assert_eq!(queue.deadline(), Some(due), "9 has been retransmitted, too");
        queue.acknowledge(10);
        assert_eq!(queue.deadline(), None);
    }

    #[test]
    fn a_receiver_that_is_not_selective_receives_from_a_selective_sender() {
        for seed in 0..50 {
            exchange(seed, Faults::loss(50), |c| c.selective = c.local_qpn == QPNS[0]);
        }
    }

    /// Packets sent again, packets lost, and the time that 200 messages of 64 packets take one way.
    fn one_way(seed: u64, loss: u64, selective: bool) -> (u64, u64, Duration) {
        let mut pair = Pair::new(seed, Faults::loss(loss), |c| {
            (c.selective, c.max_inflight, c.max_early) = (selective, 512, 512);
        });
        let (start, mut received) = (pair.now, 0);
        for id in 0..200 {
            pair.ends[0].post_send(pair.qps[0], id, vec![id as u8; 64 * 256], None);
            pair.ends[1].post_receive(pair.qps[1], Vec::new());
        }
        while received < 200 && pair.step() {
            while let Some(event) = pair.ends[1].poll_event() {
                let Event::Received { data, .. } = event else { panic!("{event:?}") };
                assert_eq!(data, vec![received as u8; 64 * 256], "seed {seed}");
                received += 1;
            }
        }
        assert_eq!(received, 200);
        (pair.ends[0].stats().retransmissions, pair.lost, pair.now - start)
    }

    #[test]
    fn a_selective_sender_retransmits_little_more_than_losses() {
        for loss in [1, 10, 50] {
            let sum = |selective: bool| {
                let runs = (0..10).map(|seed| one_way(seed, loss, selective));
                runs.fold((0, 0, Duration::ZERO), |a, b| (a.0 + b.0, a.1 + b.1, a.2 + b.2))
            };
            let ((again, lost, took), back) = (sum(true), sum(false));
            println!(
                "{loss} in a thousand: {lost} lost, {again} sent again, {took:?}; go-back-N \
                 {back:?}"
            );
            assert!(again <= lost * 11 / 10 + 5 && again < back.0 / 10, "{again} {lost}");
        }
    }
}
