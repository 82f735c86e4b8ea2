//! Measures how long sums take, and which rank they wait for, for one fragment index in
//! [`SAMPLED`]: only there the packet path reads a clock. Pure; the caller passes the time.
//!
//! A sum's time runs from its first contribution to its last, not to its release: in an in-order
//! ring a complete sum may be held back for an earlier one, and that one's time shows it. A
//! duplicate does not count as a contribution.

use crate::limits::{MAX_RANKS, MAX_SLOTS};

/// One fragment index in this many is timed; a power of two.
pub const SAMPLED: u32 = 64;
/// Buckets of a [`Histogram`].
pub const BUCKETS: usize = 32;
/// Timed sums that can be under way in a ring: all in the credit, which is half of the slots at the
/// most.
pub const STARTS: usize = (MAX_SLOTS / 2 / SAMPLED) as usize;
/// The first bucket's bound is 2^6 ns, less than any two packets are apart.
const SHIFT: u32 = 6;

/// Whether a fragment index is timed: one in each block of [`SAMPLED`], at one place earlier in
/// each following block. Every fragment of a message is timed at some point, even if messages are
/// as long as a block.
#[inline(always)]
pub const fn is_sampled(index: u32) -> bool {
    (index + index / SAMPLED) & (SAMPLED - 1) == 0
}

/// Durations by powers of two: bucket b has those below [`Histogram::bound`]`(b)` and not below the
/// bound before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Histogram {
    /// How many durations are in each bucket.
    pub counts: [u64; BUCKETS],
    /// All durations together in nanoseconds.
    pub sum_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl Histogram {
    /// Without any duration.
    pub const EMPTY: Self = Self { counts: [0; BUCKETS], sum_ns: 0 };

    /// The bucket of a duration. The last one also has all longer ones.
    #[inline(always)]
    pub const fn bucket(ns: u64) -> usize {
        let bucket = (u64::BITS - (ns >> SHIFT).leading_zeros()) as usize;
        if bucket < BUCKETS { bucket } else { BUCKETS - 1 }
    }

    /// Where a bucket ends, in nanoseconds; the last one, 137 s, in name only.
    pub const fn bound(bucket: usize) -> u64 {
        1 << (SHIFT as usize + bucket)
    }

    /// Takes a duration in.
    #[inline(always)]
    pub fn add(&mut self, ns: u64) {
        self.counts[Self::bucket(ns) & (BUCKETS - 1)] += 1;
        self.sum_ns += ns;
    }

    /// How many durations there are.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Upper bound of `per_mille` of the durations, in nanoseconds: at most twice the true value.
    /// `None` without any.
    pub fn percentile(&self, per_mille: u64) -> Option<u64> {
        let wanted = (self.count() * per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        let reached = self.counts.iter().position(|n| {
            seen += n;
            seen >= wanted
        });
        reached.map(Self::bound)
    }

    /// The bound that all are below, in nanoseconds.
    pub fn max(&self) -> Option<u64> {
        self.counts.iter().rposition(|&n| n > 0).map(Self::bound)
    }

    /// Mean duration in nanoseconds.
    pub fn mean(&self) -> Option<u64> {
        self.sum_ns.checked_div(self.count())
    }

    /// With all the durations of another one.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, n)| *sum += n);
        self.sum_ns += other.sum_ns;
    }

    /// The durations since an earlier reading; all if the counts have restarted in between.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut grown = *self;
        for (n, before) in grown.counts.iter_mut().zip(&earlier.counts) {
            let Some(more) = n.checked_sub(*before) else { return *self };
            *n = more;
        }
        grown.sum_ns = self.sum_ns.saturating_sub(earlier.sum_ns);
        grown
    }
}

/// A rank's part in the timed sums of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct RankTiming {
    /// How often it was the last to contribute.
    pub last: u64,
    /// Delay of its contribution after the first one; 0 if its own was the first.
    pub late: Histogram,
}

/// Place of a contribution in its sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Part {
    /// It is a sum's first.
    First,
    /// It is neither first nor last.
    Middle,
    /// It completes the sum.
    Last,
}

/// The timed sums of a ring, written by its CPU alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Timing {
    /// When the sums that are under way had their first contribution, in nanoseconds of any clock;
    /// by index / [`SAMPLED`] modulo [`STARTS`]. No two of them share a place: incomplete sums are
    /// within the credit.
    pub started: [u64; STARTS],
    /// From first contribution to last.
    pub completion: Histogram,
    pub ranks: [RankTiming; MAX_RANKS],
}

impl Timing {
    /// Nothing timed yet.
    pub const EMPTY: Self = Self {
        started: [0; STARTS],
        completion: Histogram::EMPTY,
        ranks: [RankTiming { last: 0, late: Histogram::EMPTY }; MAX_RANKS],
    };

    /// A contribution to an index that [`is_sampled`].
    #[inline(always)]
    pub fn record(&mut self, index: u32, rank: u32, part: Part, now: u64) {
        let started = &mut self.started[(index / SAMPLED) as usize & (STARTS - 1)];
        if matches!(part, Part::First) {
            *started = now;
        }
        let late = now.saturating_sub(*started);
        let rank = &mut self.ranks[rank as usize & (MAX_RANKS - 1)];
        rank.late.add(late);
        if matches!(part, Part::Last) {
            rank.last += 1;
            self.completion.add(late);
        }
    }
}

const _: () = {
    assert!(SAMPLED.is_power_of_two() && STARTS.is_power_of_two() && BUCKETS.is_power_of_two());
    assert!(MAX_RANKS.is_power_of_two());
    assert!(size_of::<Histogram>() == 8 * (BUCKETS + 1));
    assert!(size_of::<RankTiming>() == 8 + size_of::<Histogram>());
    assert!(
        size_of::<Timing>()
            == 8 * STARTS + size_of::<Histogram>() + MAX_RANKS * size_of::<RankTiming>()
    );
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(durations: &[u64]) -> Histogram {
        let mut histogram = Histogram::EMPTY;
        durations.iter().for_each(|&ns| histogram.add(ns));
        histogram
    }

    #[test]
    fn a_bucket_ends_where_the_next_one_begins() {
        assert_eq!((Histogram::bucket(0), Histogram::bucket(63)), (0, 0));
        for bucket in 0..BUCKETS - 1 {
            let bound = Histogram::bound(bucket);
            assert_eq!(
                (Histogram::bucket(bound - 1), Histogram::bucket(bound)),
                (bucket, bucket + 1)
            );
        }
        assert_eq!(Histogram::bucket(u64::MAX), BUCKETS - 1);
        assert_eq!(Histogram::bound(BUCKETS - 1), 137_438_953_472);
    }

    #[test]
    fn percentiles_of_nothing_one_and_many() {
        let nothing = Histogram::EMPTY;
        assert_eq!((nothing.percentile(500), nothing.max(), nothing.mean()), (None, None, None));
        let one = of(&[100]);
        assert_eq!(
            (one.percentile(0), one.percentile(500), one.percentile(1000)),
            (Some(128), Some(128), Some(128))
        );
        // 98 short ones, two long ones.
        let mut many = vec![1_000; 98];
        many.extend([1_000_000, 2_000_000]);
        let many = of(&many);
        assert_eq!((many.percentile(500), many.percentile(980)), (Some(1024), Some(1024)));
        assert_eq!((many.percentile(990), many.percentile(1000)), (Some(1 << 20), Some(1 << 21)));
        assert_eq!((many.max(), many.mean(), many.count()), (Some(1 << 21), Some(30_980), 100));
    }

    #[test]
    fn growth_is_what_came_and_all_where_it_begins_again() {
        let (early, more) = (of(&[70, 5_000]), of(&[9_000]));
        let mut late = early;
        late.merge(&more);
        assert_eq!(late.since(&early), more);
        assert_eq!(more.since(&late), more);
    }

    proptest! {
        #[test]
        fn a_percentile_is_a_bound_less_than_twice_too_high(mut all in prop::collection::vec(64u64..1 << 36, 1..200), per_mille in 1u64..=1000) {
            let got = of(&all).percentile(per_mille).unwrap();
            all.sort_unstable();
            let exact = all[(all.len() as u64 * per_mille).div_ceil(1000) as usize - 1];
            prop_assert!(exact < got && got <= 2 * exact, "{exact} {got}");
        }
    }

    #[test]
    fn a_sum_takes_from_its_first_contribution_to_its_last() {
        let mut timing = Timing::EMPTY;
        // Two sums under way at once, one of them by the ring's last place; ranks 1 and 2 are late
        // in turn.
        let (a, b) = (0, (STARTS as u32 - 1) * SAMPLED);
        timing.record(a, 0, Part::First, 1_000_000);
        timing.record(b, 1, Part::First, 1_000_100);
        timing.record(a, 1, Part::Middle, 1_000_200);
        timing.record(a, 2, Part::Last, 1_050_000);
        timing.record(b, 2, Part::Middle, 1_060_000);
        timing.record(b, 0, Part::Last, 1_100_100);
        assert_eq!(timing.completion, of(&[50_000, 100_000]));
        assert_eq!([0, 1, 2, 3].map(|r| timing.ranks[r].last), [1, 0, 1, 0]);
        assert_eq!(timing.ranks[0].late, of(&[0, 100_000]));
        assert_eq!(timing.ranks[1].late, of(&[0, 200]));
        assert_eq!(timing.ranks[2].late, of(&[50_000, 59_900]));
        // The place is used again.
        timing.record(a + STARTS as u32 * SAMPLED, 2, Part::First, 2_000_000);
        timing.record(a + STARTS as u32 * SAMPLED, 0, Part::Last, 2_000_300);
        assert_eq!(timing.completion, of(&[50_000, 100_000, 300]));
    }

    #[test]
    fn one_index_in_so_many_is_timed_over_the_wrap_too() {
        let timed: Vec<u32> = (0..=crate::serial::MASK).filter(|&i| is_sampled(i)).collect();
        assert_eq!(timed.len() as u32, (1 << crate::serial::BITS) / SAMPLED);
        assert!(timed.iter().enumerate().all(|(block, i)| i / SAMPLED == block as u32));
        assert_eq!(timed.len() % STARTS, 0, "places would be shared at the wrap");
        // Messages of 64 fragments: each position has its turn.
        let positions: std::collections::BTreeSet<u32> =
            timed[..64].iter().map(|i| i % 64).collect();
        assert_eq!(positions.len(), 64);
    }
}
