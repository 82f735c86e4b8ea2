//! How long an acknowledgement may take: one estimate for all queue pairs of an endpoint, which
//! share its link.
//!
//! What is handed over waits behind all that was handed over before it, and its acknowledgement
//! behind what the other side has to send, which sends about as much. So a round trip tells nothing
//! without the bytes that were on their way, its *load*: 42 ms for half a megabyte at 100 Mb/s, and
//! 0.1 ms for a few bytes on the same link. Three things are estimated:
//!
//! - Of packets that are acknowledged at once, mean and deviation (RFC 6298, 2).
//! - Of those under a like load, the least of late, four times. Acknowledgements that wait for
//!   other ranks also wait for these to recover from their losses, which mean and deviation would
//!   take for the network's own time; the least does not.
//! - What more load than has been measured may cost: in proportion, and no more than on the slowest
//!   link that there may be. That is all there is before the first round trip: half a megabyte gets
//!   its second, and a few bytes cannot take long anywhere.

use std::time::{Duration, Instant};

/// Time for a byte on the slowest link there may be, of 10 Mb/s; once on the way there, once for
/// the acknowledgement that waits behind as much, and once in reserve; in nanoseconds.
const SLOWEST_BYTE: u64 = 3 * 800;
/// Bytes around a payload on the wire.
pub(super) const AROUND: u64 = netsum_common::wire::AROUND as u64;
/// What a smaller load took says little of one that is larger than twice this: a link that is
/// shaped lets a burst pass at once.
const TELLING: u64 = 32 << 10;
/// So long after a gap was seen, more are expected.
const LOSSY: Duration = Duration::from_millis(100);
/// What is asked for behind a box is asked for again after so long at the most, or what round trips
/// ask for if that is longer.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_millis(16);
/// Until one has been measured.
const FIRST_ROUND_TRIP: Duration = Duration::from_micros(100);

/// How long so many bytes take at the most.
pub(super) fn slowest(bytes: u64) -> Duration {
    Duration::from_nanos(bytes * SLOWEST_BYTE)
}

/// The least of the last 16 to 32 round trips.
#[derive(Clone, Copy, Debug)]
struct Least {
    /// Of the 16 before.
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
pub(super) struct Path {
    /// Bytes on their way: sent, and not acknowledged.
    load: u64,
    /// The largest load of late of which a round trip was measured. Fades as the mean does.
    measured: u64,
    /// Mean and mean deviation.
    mean: Option<(Duration, Duration)>,
    /// Of all round trips.
    least: Least,
    /// Of those under at least half of `measured`.
    loaded: Least,
    /// Packets of sums that have arrived, and when the last one did.
    sums: (u64, Option<Instant>),
    /// Most packets that may be sent without their sums.
    credit: u64,
    /// A packet was missed by its receiver: to wait for long costs more than a packet too many.
    lossy: bool,
    /// When the other side last told of a gap.
    gap: Option<Instant>,
}

impl Path {
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

    /// A packet was missed by its receiver. While connections start, that is no loss: the receiver
    /// was not there yet.
    pub fn on_gap(&mut self) {
        self.lossy |= self.load > TELLING / 4;
    }

    /// The other side has told of a gap. One that is seen here alone is none yet: kernels that
    /// coalesce swap packets now and then.
    pub fn note_gap(&mut self, now: Instant) {
        self.gap = Some(now);
    }

    /// When the end of what was sent may be lost, of a time-out that was started as in
    /// [`since`](Self::since). Only where others are: without loss, sums stop because a rank
    /// computes.
    pub fn may_be_lost(&self, start: (Instant, u64)) -> Option<Instant> {
        let at = self.since(start) + self.usual();
        self.gap.filter(|gap| at < *gap + LOSSY).map(|_| at)
    }

    /// As many packets more may be sent without their sums.
    pub fn widen(&mut self, packets: u32) {
        self.credit += u64::from(packets);
    }

    /// A packet of a sum has arrived: the links are at work.
    pub fn on_sum(&mut self, now: Instant) {
        self.sums = (self.sums.0 + 1, Some(now));
    }

    /// Packets of sums that have arrived.
    pub fn sums(&self) -> u64 {
        self.sums.0
    }

    /// Since when a time-out runs that was started when as many packets of sums had arrived: since
    /// the last one of them, for what is waited for may be behind others in the same queues. But
    /// these hold no more than twice the credit, here and on the other side.
    pub fn since(&self, (start, sums): (Instant, u64)) -> Instant {
        match self.sums.1 {
            Some(last) if self.sums.0 - sums <= 2 * self.credit => start.max(last),
            _ => start,
        }
    }

    /// Bytes go on their way. The load with them.
    pub fn send(&mut self, bytes: u64) -> u64 {
        self.load += bytes;
        self.load
    }

    /// Bytes on their way.
    pub fn load(&self) -> u64 {
        self.load
    }

    /// Bytes are acknowledged, or given up.
    pub fn take_back(&mut self, bytes: u64) {
        self.load = self.load.saturating_sub(bytes);
    }

    /// A round trip, and the load under which it began. `waited` for other ranks, perhaps.
    pub fn measure(&mut self, took: Duration, load: u64, waited: bool) {
        self.least.add(took);
        if load > 2 * self.measured {
            // What less load took says nothing of this.
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

    /// What is on its way was thought to be lost, and only took so long.
    pub fn was_slower(&mut self, took: Duration) {
        let took = took.min(slowest(self.load) * 2);
        if took > self.loaded.get() {
            // Until the next one is measured.
            self.loaded = Least { before: took, current: Duration::MAX, samples: 15 };
            self.measured = self.measured.max(self.load);
        }
    }

    /// The least round trip of late.
    pub fn least(&self) -> Duration {
        self.least.get()
    }

    /// How long the acknowledgement of as much as has been measured may take, as far as the network
    /// is concerned.
    pub fn usual(&self) -> Duration {
        let mean = self.mean.map_or(Duration::ZERO, |(mean, deviation)| mean + deviation * 4);
        mean.max(self.loaded.get() * 4)
    }

    /// How long what was asked for may take to come by the box. Little is known of more than was
    /// measured, and then a time-out's time is enough.
    pub fn pause(&self) -> Duration {
        self.usual().max(self.longest().min(LONGEST_PAUSE))
    }

    /// The same for what is on its way.
    pub fn longest(&self) -> Duration {
        let more = self.load.saturating_sub(self.measured);
        let slowest = slowest(more);
        if self.measured < TELLING && self.load > 2 * TELLING && !self.lossy {
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

    /// Sends so much on a link that takes so many nanoseconds for a byte, both ways behind as much,
    /// and measures.
    fn flight(path: &mut Path, bytes: u64, per_byte: u64) -> (Duration, Duration) {
        let load = path.send(bytes);
        let (longest, took) = (path.longest(), Duration::from_nanos(2 * per_byte * bytes + 50_000));
        path.take_back(bytes);
        path.measure(took, load, false);
        (longest, took)
    }

    #[test]
    fn no_load_takes_longer_than_expected_whatever_came_before() {
        for per_byte in [1, 8, 80, 800] {
            let mut path = Path::new();
            for (n, bytes) in
                [150, 150, 500_000, 500_000, 90].into_iter().cycle().take(60).enumerate()
            {
                let (longest, took) = flight(&mut path, bytes, per_byte);
                assert!(longest >= took, "{per_byte} ns/B, flight {n}: {longest:?}, took {took:?}");
            }
            // Many small ones, after which the estimate is small, and yet a large one has its time.
            for _ in 0..200 {
                flight(&mut path, 150, per_byte);
            }
            assert!(path.longest() < 2 * MS, "{per_byte} ns/B: {:?}", path.longest());
            let (longest, took) = flight(&mut path, 500_000, per_byte);
            assert!(longest >= took, "{per_byte} ns/B: {longest:?}, took {took:?}");
        }
    }

    #[test]
    fn what_a_bucket_lets_pass_at_once_says_nothing_of_more() {
        let mut path = Path::new();
        for _ in 0..4 {
            // 10 Mb/s, and a bucket that holds 16 KiB.
            flight(&mut path, 750, 0);
        }
        path.send(134_540);
        assert!(path.longest() > 215 * MS, "{:?}", path.longest());
    }

    #[test]
    fn before_the_first_round_trip_bytes_alone_tell_and_few_bytes_take_little() {
        let mut path = Path::new();
        path.send(150);
        assert!(path.longest() < MS);
        path.send(524_288);
        assert!(path.longest() > 1000 * MS, "{:?}", path.longest());
    }

    #[test]
    fn a_fast_network_is_found_out_with_the_first_round_trip_under_load() {
        let mut path = Path::new();
        flight(&mut path, 150, 1);
        flight(&mut path, 35_000, 1);
        path.send(70_000);
        assert!(path.longest() < 2 * MS, "{:?}", path.longest());
    }

    #[test]
    fn that_others_recover_from_losses_makes_no_time_out_longer() {
        let mut path = Path::new();
        for n in 0..100 {
            let load = path.send(64_000);
            path.take_back(64_000);
            path.measure(if n % 3 == 0 { MS / 5 } else { 20 * MS }, load, true);
        }
        assert!(path.longest() < MS, "{:?}", path.longest());
    }
}
