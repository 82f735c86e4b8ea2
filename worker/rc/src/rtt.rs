//! Estimates how long an acknowledgement may take: one estimate for all queue pairs of an endpoint,
//! which share its link.
//!
//! A packet waits behind all packets that were sent before it. Its acknowledgement waits behind the
//! other side's packets, which are about as many. So a round trip means nothing without its *load*,
//! the bytes that were in flight: it takes 42 ms for half a megabyte at 100 Mb/s, and 0.1 ms for a
//! few bytes on the same link. Three things are estimated:
//!
//! - Mean and deviation of packets that are acknowledged at once (RFC 6298, 2).
//! - Four times the least recent round trip under a similar load. Acknowledgements that wait for
//!   other ranks also wait for these to recover from losses. Mean and deviation would include that
//!   time; the least does not.
//! - The cost of more load than has been measured: in proportion, and at most that of the slowest
//!   link. Before the first round trip there is only this estimate: half a megabyte gets its
//!   second, and a few bytes cannot take long on any link.

use std::time::{Duration, Instant};

/// Time for a byte on the slowest supported link, of 10 Mb/s: once to the other side, once for the
/// acknowledgement that waits behind as much, and once in reserve; in nanoseconds.
const SLOWEST_BYTE: u64 = 3 * 800;
/// Bytes around a payload on the wire.
pub(super) const PACKET_OVERHEAD: u64 = netsum_common::wire::PACKET_OVERHEAD as u64;
/// A round trip under a smaller load says little about a load of more than twice as much: a link
/// with a shaper lets a burst pass at once.
const MIN_SIGNIFICANT_LOAD: u64 = 32 << 10;
/// Time after a gap in which more are expected.
const LOSSY: Duration = Duration::from_millis(100);
/// Longest pause between repeated NAKs behind a box, unless round trips require a longer one.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_millis(16);
/// The estimate until a round trip has been measured.
const FIRST_ROUND_TRIP: Duration = Duration::from_micros(100);

/// The longest time for `bytes`.
pub(super) fn slowest(bytes: u64) -> Duration {
    Duration::from_nanos(bytes * SLOWEST_BYTE)
}

/// The least of the last 16 to 32 round trips.
#[derive(Clone, Copy, Debug)]
struct Least {
    /// The least of the 16 before.
    before: Duration,
    current: Duration,
    samples: u32,
}

impl Least {
    fn add(&mut self, sample: Duration) {
        self.current = self.current.min(sample);
        self.samples += 1;
        if self.samples.is_multiple_of(16) {
            self.before = std::mem::replace(&mut self.current, Duration::MAX);
        }
    }

    fn get(&self) -> Duration {
        if self.samples < 15 && self.current < Duration::MAX {
            self.current
        } else {
            self.before.min(self.current)
        }
    }
}

/// The round trips of an endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct RttEstimator {
    /// Bytes in flight: sent, and not acknowledged.
    load: u64,
    /// The largest recent load of a measured round trip. Decays as the mean does.
    measured: u64,
    /// Mean and mean deviation.
    mean: Option<(Duration, Duration)>,
    /// The least of all round trips.
    least: Least,
    /// The least of those under at least half of `measured`.
    loaded: Least,
    /// Packets of sums that have arrived, and when the last one did.
    sums: (u64, Option<Instant>),
    /// Most packets that may be sent without their sums.
    credit: u64,
    /// A receiver has missed a packet: now a long wait costs more than a needless packet.
    lossy: bool,
    /// When the other side last reported a gap.
    gap: Option<Instant>,
}

impl RttEstimator {
    pub fn new() -> Self {
        let least = Least { before: FIRST_ROUND_TRIP, current: Duration::MAX, samples: 0 };
        Self {
            load: 0,
            measured: 0,
            mean: None,
            least,
            loaded: least,
            sums: (0, None),
            credit: 0,
            lossy: false,
            gap: None,
        }
    }

    /// A receiver has missed a packet. While connections start, that is not a loss: the receiver
    /// did not exist yet.
    pub fn on_gap(&mut self) {
        self.lossy |= self.load > MIN_SIGNIFICANT_LOAD / 4;
    }

    /// The other side has reported a gap. A gap that is seen only here does not count: kernels that
    /// coalesce packets swap some of them.
    pub fn note_gap(&mut self, now: Instant) {
        self.gap = Some(now);
    }

    /// When to suspect a loss at the end of the packets that were sent, for a timeout that was
    /// started as in [`since`](Self::since). Only where other packets are lost: without loss, sums
    /// stop because a rank computes.
    pub fn may_be_lost(&self, start: (Instant, u64)) -> Option<Instant> {
        let at = self.since(start) + self.usual();
        self.gap.filter(|gap| at < *gap + LOSSY).map(|_| at)
    }

    /// Adds packets that may be sent without their sums.
    pub fn widen(&mut self, packets: u32) {
        self.credit += u64::from(packets);
    }

    /// A packet of a sum has arrived: the links work.
    pub fn on_sum(&mut self, now: Instant) {
        self.sums = (self.sums.0 + 1, Some(now));
    }

    /// Packets of sums that have arrived.
    pub fn sums(&self) -> u64 {
        self.sums.0
    }

    /// The start of a timeout that was started after `sums` packets of sums: later ones restart it,
    /// because the awaited packet may be behind them in the same queues. But these hold at most
    /// twice the credit, here and on the other side.
    pub fn since(&self, (start, sums): (Instant, u64)) -> Instant {
        match self.sums.1 {
            Some(last) if self.sums.0 - sums <= 2 * self.credit => start.max(last),
            _ => start,
        }
    }

    /// Bytes are sent. Returns the load with them.
    pub fn send(&mut self, bytes: u64) -> u64 {
        self.load += bytes;
        self.load
    }

    /// Bytes in flight.
    pub fn load(&self) -> u64 {
        self.load
    }

    /// Bytes are acknowledged, or given up.
    pub fn release(&mut self, bytes: u64) {
        self.load = self.load.saturating_sub(bytes);
    }

    /// A round trip, and the load when it began. `waited` is set if it may have waited for other
    /// ranks.
    pub fn measure(&mut self, took: Duration, load: u64, waited: bool) {
        self.least.add(took);
        if load > 2 * self.measured {
            // A smaller load says nothing about this one.
            self.loaded = Least { before: took, current: took, samples: 0 };
        } else if 2 * load >= self.measured {
            self.loaded.add(took);
        }
        self.measured = load.max(self.measured - self.measured / 8);
        if !waited {
            self.mean = Some(match self.mean {
                None => (took, took / 2),
                Some((mean, deviation)) => {
                    ((mean * 7 + took) / 8, (deviation * 3 + mean.abs_diff(took)) / 4)
                }
            });
        }
    }

    /// Packets in flight were considered lost, but were only late.
    pub fn raise_estimate(&mut self, took: Duration) {
        let took = took.min(slowest(self.load) * 2);
        if took > self.loaded.get() {
            // Until the next round trip is measured.
            self.loaded = Least { before: took, current: Duration::MAX, samples: 15 };
            self.measured = self.measured.max(self.load);
        }
    }

    /// The least recent round trip.
    pub fn least(&self) -> Duration {
        self.least.get()
    }

    /// How long the network may take for an acknowledgement under a load as large as measured.
    pub fn usual(&self) -> Duration {
        let mean = self.mean.map_or(Duration::ZERO, |(mean, deviation)| mean + deviation * 4);
        mean.max(self.loaded.get() * 4)
    }

    /// How long a packet that was NAKed may take through the box. Little is known about loads
    /// larger than measured; a timeout's time is enough for them.
    pub fn pause(&self) -> Duration {
        self.usual().max(self.longest().min(LONGEST_PAUSE))
    }

    /// The same for the bytes in flight.
    pub fn longest(&self) -> Duration {
        let more = self.load.saturating_sub(self.measured);
        let slowest = slowest(more);
        if self.measured < MIN_SIGNIFICANT_LOAD
            && self.load > 2 * MIN_SIGNIFICANT_LOAD
            && !self.lossy
        {
            return self.usual() + slowest;
        }
        let nanos = (self.loaded.get() * 4).as_nanos() * u128::from(more);
        let scaled = nanos
            .checked_div(u128::from(self.measured))
            .and_then(|nanos| u64::try_from(nanos).ok());
        self.usual() + scaled.map_or(slowest, |nanos| Duration::from_nanos(nanos).min(slowest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Sends `bytes` on a link that takes `per_byte` nanoseconds for a byte, behind as many bytes
    /// in both directions, and measures.
    fn flight(rtt: &mut RttEstimator, bytes: u64, per_byte: u64) -> (Duration, Duration) {
        let load = rtt.send(bytes);
        let (longest, took) = (rtt.longest(), Duration::from_nanos(2 * per_byte * bytes + 50_000));
        rtt.release(bytes);
        rtt.measure(took, load, false);
        (longest, took)
    }

    #[test]
    fn no_load_takes_longer_than_estimated() {
        for per_byte in [1, 8, 80, 800] {
            let mut rtt = RttEstimator::new();
            for (n, bytes) in
                [150, 150, 500_000, 500_000, 90].into_iter().cycle().take(60).enumerate()
            {
                let (longest, took) = flight(&mut rtt, bytes, per_byte);
                assert!(longest >= took, "{per_byte} ns/B, flight {n}: {longest:?}, took {took:?}");
            }
            // After many small packets the estimate is small, but a large load still gets its time.
            for _ in 0..200 {
                flight(&mut rtt, 150, per_byte);
            }
            assert!(rtt.longest() < 2 * MS, "{per_byte} ns/B: {:?}", rtt.longest());
            let (longest, took) = flight(&mut rtt, 500_000, per_byte);
            assert!(longest >= took, "{per_byte} ns/B: {longest:?}, took {took:?}");
        }
    }

    #[test]
    fn a_burst_through_a_token_bucket_does_not_shorten_larger_loads() {
        let mut rtt = RttEstimator::new();
        for _ in 0..4 {
            // 10 Mb/s, and a bucket that holds 16 KiB.
            flight(&mut rtt, 750, 0);
        }
        rtt.send(134_540);
        assert!(rtt.longest() > 215 * MS, "{:?}", rtt.longest());
    }

    #[test]
    fn before_the_first_round_trip_the_estimate_depends_on_bytes() {
        let mut rtt = RttEstimator::new();
        rtt.send(150);
        assert!(rtt.longest() < MS);
        rtt.send(524_288);
        assert!(rtt.longest() > 1000 * MS, "{:?}", rtt.longest());
    }

    #[test]
    fn the_first_round_trip_under_load_shows_a_fast_network() {
        let mut rtt = RttEstimator::new();
        flight(&mut rtt, 150, 1);
        flight(&mut rtt, 35_000, 1);
        rtt.send(70_000);
        assert!(rtt.longest() < 2 * MS, "{:?}", rtt.longest());
    }

    #[test]
    fn losses_of_other_ranks_do_not_lengthen_timeouts() {
        let mut rtt = RttEstimator::new();
        for n in 0..100 {
            let load = rtt.send(64_000);
            rtt.release(64_000);
            rtt.measure(if n % 3 == 0 { MS / 5 } else { 20 * MS }, load, true);
        }
        assert!(rtt.longest() < MS, "{:?}", rtt.longest());
    }
}
