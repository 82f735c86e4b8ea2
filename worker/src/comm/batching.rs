//! When to receive next. With many bytes in flight, packets are received in batches: a wake-up
//! costs as much as several packets, and no operation waits for a single one.

use std::time::{Duration, Instant};

/// With fewer bytes in flight, an operation may wait for the next packet. These are more than
/// [`BATCH`] of the longest packets: with fewer in flight than are waited for, each wait would
/// lengthen the next one.
const LEAST_IN_FLIGHT: u64 = 128 << 10;
/// How many packets to gather.
const BATCH: u32 = 32;
/// The longest wait: a part of the millisecond that [`LEAST_IN_FLIGHT`] takes at 1 Gb/s.
const LONGEST_WAIT: Duration = Duration::from_micros(150);
/// Packets further apart than this are received one by one.
const LARGEST_GAP: Duration = Duration::from_micros(50);

/// Decides from the rate at which packets arrive.
#[derive(Debug, Default)]
pub(crate) struct ReceiveBatching {
    last: Option<Instant>,
    /// The smoothed time between two packets.
    gap: Duration,
}

impl ReceiveBatching {
    /// Notes that packets have been received.
    pub fn received(&mut self, now: Instant, packets: u32) {
        if let Some(last) = self.last.replace(now) {
            // A pause between two operations says little about the rate.
            let gap = ((now - last) / packets).min(2 * LARGEST_GAP);
            self.gap = (3 * self.gap + gap) / 4;
        }
    }

    /// How long to wait until the next packets are received; `None`: until one arrives.
    pub fn wait(&self, now: Instant, in_flight: u64) -> Option<Duration> {
        if in_flight < LEAST_IN_FLIGHT || self.gap > LARGEST_GAP {
            return None;
        }
        let until = self.last? + (BATCH * self.gap).min(LONGEST_WAIT);
        Some(until.saturating_duration_since(now)).filter(|wait| !wait.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BULK: u64 = 512 << 10;

    /// Receives 20 batches of `packets`, `gap` apart.
    fn at_rate(packets: u32, gap: Duration) -> (ReceiveBatching, Instant) {
        let (mut batching, mut now) = (ReceiveBatching::default(), Instant::now());
        for _ in 0..20 {
            now += packets * gap;
            batching.received(now, packets);
        }
        (batching, now)
    }

    #[test]
    fn a_fast_link_fills_a_batch() {
        let (batching, now) = at_rate(4, Duration::from_nanos(1000));
        let wait = batching.wait(now, BULK).unwrap();
        assert!((28..=32).contains(&wait.as_micros()), "{wait:?}");
        assert_eq!(batching.wait(now + wait, BULK), None);
    }

    #[test]
    fn a_wait_is_short_at_any_rate() {
        for gap in [5, 11, 25, 45] {
            let (batching, now) = at_rate(1, Duration::from_micros(gap));
            assert_eq!(batching.wait(now, BULK), Some(LONGEST_WAIT), "gap {gap} us");
        }
    }

    #[test]
    fn slow_links_and_small_operations_do_not_wait() {
        let (slow, now) = at_rate(1, Duration::from_micros(120));
        assert_eq!(slow.wait(now, BULK), None);
        let (fast, now) = at_rate(4, Duration::from_nanos(1000));
        assert_eq!(fast.wait(now, LEAST_IN_FLIGHT - 1), None);
        assert_eq!(ReceiveBatching::default().wait(now, BULK), None);
    }

    #[test]
    fn a_pause_between_operations_does_not_end_the_batches() {
        let (mut batching, now) = at_rate(4, Duration::from_micros(1));
        let later = now + Duration::from_secs(1);
        batching.received(later, 4);
        assert!(batching.wait(later, BULK).is_some());
    }
}
