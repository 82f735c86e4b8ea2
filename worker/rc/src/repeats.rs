//! What is sent again to a selective receiver: what it says that it lacks, and no more.
//!
//! A packet is repeated when it is first told to be missing, and once more when something has come
//! that was sent after its repetition. What was lost at the end of a list is seen by nobody, so the
//! last packet of all asks after it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use super::path::Path;

/// Least time for what was repeated to be acknowledged, before the last packet asks for it.
const LEAST_ASKING: Duration = Duration::from_micros(200);

/// So many losses of one packet are usual; where there are more, something else is wrong, or the
/// sum waits for another rank.
const USUAL: u32 = 8;

/// State of one sending half. Packets have its numbers.
#[derive(Debug, Default)]
pub(super) struct Repeats {
    /// Packets that are to be repeated.
    due: BTreeSet<u64>,
    /// Packets that have been, and are not acknowledged.
    repeated: BTreeMap<u64, Repeated>,
    /// How many have been, ever.
    count: u64,
    /// When the last packet asks whether those have come, if nothing newer has told: once for each
    /// NAK that lists some.
    ask: Option<Instant>,
    may_ask: bool,
    lost_oldest_twice: bool,
}

/// When a packet was repeated: how many packets had been sent by then, and how many repeated; and
/// how often it was lost then.
#[derive(Clone, Copy, Debug)]
struct Repeated {
    sent: u64,
    count: u64,
    at: Instant,
    lost: u32,
}

impl Repeated {
    /// When it may be repeated once more: longer and longer after the last time, up to `most`.
    fn next(&self, path: &Path, most: Duration) -> Instant {
        let unusual = self.lost.saturating_sub(USUAL).min(16);
        self.at
            + if unusual == 0 { Duration::ZERO } else { (path.least() * (1 << unusual)).min(most) }
    }
}

/// When the packet that came last was sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Came {
    /// In its turn, by its number.
    First(u64),
    /// As so many repetitions had been.
    Repeated(u64),
}

impl Came {
    fn is_after(self, then: &Repeated) -> bool {
        match self {
            Self::First(packet) => packet >= then.sent,
            Self::Repeated(count) => count > then.count,
        }
    }
}

/// A packet to be repeated now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Repeat {
    pub packet: u64,
    /// None is due behind it.
    pub last: bool,
}

impl Repeats {
    /// The next one.
    pub fn first(&self) -> Option<u64> {
        self.due.first().copied()
    }

    /// Takes the next one to be sent, when the packets before `sent` have been.
    pub fn next(&mut self, now: Instant, sent: u64, path: &Path) -> Option<Repeat> {
        let packet = self.due.pop_first()?;
        let last = self.due.is_empty();
        self.count += 1;
        let lost = self.repeated.get(&packet).map_or(0, |then| then.lost);
        self.repeated.insert(packet, Repeated { sent, count: self.count, at: now, lost });
        if last && std::mem::take(&mut self.may_ask) {
            self.ask = Some(now + path.usual().max(LEAST_ASKING));
        }
        Some(Repeat { packet, last })
    }

    /// A packet is to be repeated, whether or not it is known to be missing.
    pub fn add(&mut self, packet: u64) {
        self.due.insert(packet);
    }

    /// Whether some of these packets have been repeated.
    pub fn have_repeated(&self, packets: Range<u64>) -> bool {
        self.repeated.range(packets).next().is_some()
    }

    /// When the packet was sent that came last. Asked before what came with it is acknowledged.
    pub fn came(&self, packet: u64) -> Came {
        self.repeated.get(&packet).map_or(Came::First(packet), |r| Came::Repeated(r.count))
    }

    /// These packets are missing, `came` came last, and `oldest` is not acknowledged. What is lost
    /// again and again waits for up to `most` each time.
    pub fn add_missing(
        &mut self,
        packets: Range<u64>,
        came: Option<Came>,
        oldest: u64,
        overdue: Option<Duration>,
        (now, path, most): (Instant, &Path, Duration),
    ) {
        for n in packets {
            if let Some(then) = self.repeated.get_mut(&n) {
                let is_overdue = overdue.is_some_and(|after| now >= then.at + after);
                if !is_overdue && !came.is_some_and(|came| came.is_after(then)) {
                    continue;
                }
                let next = then.next(path, most);
                if now < next {
                    self.ask = Some(self.ask.map_or(next, |t| t.min(next)));
                    continue;
                }
                then.lost += u32::from(!self.due.contains(&n));
                self.lost_oldest_twice |= n == oldest;
            }
            self.due.insert(n);
            self.may_ask = true;
        }
    }

    /// Whether the oldest packet was lost once more, and nothing has been acknowledged since.
    pub fn lost_oldest_twice(&self) -> bool {
        self.lost_oldest_twice
    }

    /// Everything before `packet` has arrived, which is news.
    pub fn acknowledge(&mut self, packet: u64) {
        self.lost_oldest_twice = false;
        self.due = self.due.split_off(&packet);
        self.repeated = self.repeated.split_off(&packet);
        self.ask = self.ask.filter(|_| !self.repeated.is_empty());
    }

    /// Nothing is to be repeated by itself.
    pub fn clear(&mut self) {
        self.due.clear();
    }

    /// When [`asks`](Self::asks) should be called.
    pub fn deadline(&self) -> Option<Instant> {
        self.ask
    }

    /// Whether the last packet is to ask now for what was repeated.
    pub fn asks(&mut self, now: Instant) -> bool {
        self.ask.take_if(|t| now >= *t).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Event;
    use crate::tests::{Faults, Pair, QPNS, exchange};

    /// Repeats all that is due, when the packets before `sent` have been sent.
    fn repeat(repeats: &mut Repeats, now: Instant, sent: u64) -> Vec<u64> {
        let path = Path::new();
        std::iter::from_fn(|| repeats.next(now, sent, &path)).map(|r| r.packet).collect()
    }

    fn missing(repeats: &mut Repeats, packets: Range<u64>, came: u64) {
        let came = repeats.came(came);
        repeats.add_missing(
            packets,
            Some(came),
            3,
            None,
            (Instant::now(), &Path::new(), Duration::ZERO),
        );
    }

    #[test]
    fn a_packet_is_repeated_once_more_only_when_something_came_that_was_sent_later() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        missing(&mut repeats, 3..6, 6);
        assert_eq!(repeat(&mut repeats, now, 10), [3, 4, 5]);
        // Sent before the repetition, whether in its turn or as a repetition itself.
        for came in [6, 9, 3] {
            missing(&mut repeats, 3..4, came);
            assert_eq!(
                (repeat(&mut repeats, now, 10), repeats.lost_oldest_twice()),
                (vec![], false),
                "{came}"
            );
        }
        missing(&mut repeats, 4..5, 5);
        assert_eq!((repeat(&mut repeats, now, 10), repeats.lost_oldest_twice()), (vec![4], false));
        missing(&mut repeats, 3..4, 10);
        assert_eq!((repeat(&mut repeats, now, 12), repeats.lost_oldest_twice()), (vec![3], true));
        repeats.acknowledge(4);
        assert!(!repeats.lost_oldest_twice());
    }

    #[test]
    fn the_last_packet_asks_once_for_a_list_and_not_for_what_is_acknowledged() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let due = now + Path::new().usual().max(LEAST_ASKING);
        missing(&mut repeats, 3..5, 6);
        assert_eq!(repeats.deadline(), None, "nothing has been repeated");
        repeat(&mut repeats, now, 10);
        assert_eq!(repeats.deadline(), Some(due));
        assert!(!repeats.asks(now) && repeats.asks(due) && !repeats.asks(due));
        repeats.add(9);
        repeat(&mut repeats, due, 10);
        assert_eq!(repeats.deadline(), None, "what asks is not asked for");
        missing(&mut repeats, 3..4, 9);
        repeat(&mut repeats, now, 10);
        repeats.acknowledge(9);
        assert_eq!(repeats.deadline(), Some(due), "9 has been repeated, too");
        repeats.acknowledge(10);
        assert_eq!(repeats.deadline(), None);
    }

    #[test]
    fn a_receiver_that_is_not_selective_gets_all_from_a_sender_that_is() {
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
    fn a_selective_sender_repeats_what_is_lost_and_little_more() {
        for loss in [1, 10, 50] {
            let sum = |selective: bool| {
                let runs = (0..10).map(|seed| one_way(seed, loss, selective));
                runs.fold((0, 0, Duration::ZERO), |a, b| (a.0 + b.0, a.1 + b.1, a.2 + b.2))
            };
            let ((again, lost, took), back) = (sum(true), sum(false));
            println!(
                "{loss} in a thousand: {lost} lost, {again} sent again, {took:?}; go-back-N {back:?}"
            );
            assert!(again <= lost * 11 / 10 + 5 && again < back.0 / 10, "{again} {lost}");
        }
    }
}
