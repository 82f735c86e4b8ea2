//! Timed sums, as `netsum stats` and `top` show them: which rank is last, and how late.
//! Pure except for the printing.

use std::io::Write;

use netsum_api::v1 as api;
use netsum_common::timing::{BUCKETS, Histogram};
use schemars::JsonSchema;
use serde::Serialize;

use super::failure::Result;
use super::layout::NAME;

/// Reads a histogram from the API. A daemon of another version may have more buckets: those beyond
/// ours are added to the last.
pub fn histogram(message: Option<&api::Histogram>) -> Histogram {
    let mut histogram = Histogram::EMPTY;
    if let Some(message) = message {
        for (bucket, count) in message.counts.iter().enumerate() {
            histogram.counts[bucket.min(BUCKETS - 1)] += count;
        }
        histogram.sum_ns = message.sum_ns;
    }
    histogram
}

/// A rank's part in the timed sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    pub rank: u32,
    /// How often it was the last.
    pub last: u64,
    /// Its delay after the first contribution.
    pub late: Histogram,
}

/// The timed sums of a job, in total or in an interval.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// From first contribution to last.
    pub completion: Histogram,
    /// The ranks, in their order. All the following index them by their place here.
    pub ranks: Vec<Part>,
}

impl Sums {
    /// The sums in a reading.
    pub fn new(stats: &api::JobStats) -> Self {
        let part = |r: &api::RankTiming| Part {
            rank: r.rank,
            last: r.last,
            late: histogram(r.late.as_ref()),
        };
        Self {
            completion: histogram(stats.completion.as_ref()),
            ranks: stats.ranks.iter().map(part).collect(),
        }
    }

    /// The sums since an earlier reading; all of them if the job was created again in between.
    pub fn since(&self, earlier: &Self) -> Self {
        let recreated = earlier.ranks.len() != self.ranks.len()
            || self.ranks.iter().zip(&earlier.ranks).any(|(now, before)| now.last < before.last);
        if recreated {
            return self.clone();
        }
        let part = |(now, before): (&Part, &Part)| Part {
            rank: now.rank,
            last: now.last - before.last,
            late: now.late.since(&before.late),
        };
        Self {
            completion: self.completion.since(&earlier.completion),
            ranks: self.ranks.iter().zip(&earlier.ranks).map(part).collect(),
        }
    }

    /// Adds others of the same job.
    pub fn merge(&mut self, other: &Self) {
        self.completion.merge(&other.completion);
        self.ranks.resize(self.ranks.len().max(other.ranks.len()), Part::default());
        for (sum, more) in self.ranks.iter_mut().zip(&other.ranks) {
            sum.rank = more.rank;
            sum.last += more.last;
            sum.late.merge(&more.late);
        }
    }

    /// The rank at a place.
    pub fn rank(&self, place: usize) -> u32 {
        self.ranks.get(place).map_or(0, |part| part.rank)
    }

    /// How often a rank was the last, 0 to 1.
    pub fn share(&self, rank: usize) -> f64 {
        let all: u64 = self.ranks.iter().map(|r| r.last).sum();
        if all == 0 {
            0.0
        } else {
            self.ranks.get(rank).map_or(0.0, |r| r.last as f64 / all as f64)
        }
    }

    /// The rank that was the last most often, and how often, 0 to 1; the lowest of equals. `None`
    /// without any sums.
    pub fn last(&self) -> Option<(usize, f64)> {
        let most = self.ranks.iter().map(|r| r.last).max().filter(|&most| most > 0)?;
        let rank = self.ranks.iter().position(|r| r.last == most)?;
        Some((rank, self.share(rank)))
    }

    /// The rank that the others wait for: it is last at least 1.5 times as often as an equal share,
    /// over enough sums to rule out chance.
    pub fn straggler(&self) -> Option<usize> {
        let (rank, share) = self.last()?;
        let sums: u64 = self.ranks.iter().map(|r| r.last).sum();
        (sums >= 16 && share * self.ranks.len() as f64 >= 1.5).then_some(rank)
    }
}

/// A time with three digits and its unit.
pub fn time(ns: u64) -> String {
    let ns = ns as f64;
    let (value, unit) = match ns {
        ns if ns < 999.5 => return format!("{ns:.0} ns"),
        ns if ns < 999.5e3 => (ns / 1e3, "us"),
        ns if ns < 999.5e6 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    let digits = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.digits$} {unit}")
}

/// An upper bound as text.
pub fn below(bound: Option<u64>) -> String {
    bound.map_or_else(|| "-".into(), |ns| format!("< {}", time(ns)))
}

/// Timed sums as JSON.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Timing {
    /// One of this many fragment indexes is timed.
    pub sampled: u32,
    /// From a slot's first contribution to its last.
    pub completion: Durations,
    /// Each rank's part, in their order.
    pub ranks: Vec<RankTiming>,
}

/// A rank's part in the timed sums.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RankTiming {
    /// The rank.
    pub rank: u32,
    /// How often it was the last to contribute.
    pub last: u64,
    /// The same as a fraction of all sums, 0 to 1.
    pub last_share: f64,
    /// Delay of its contribution after the first one; 0 if its own was the first.
    pub late: Durations,
}

/// Durations. All bounds are powers of two and less than twice the true value; durations of 68.7 s
/// and more have no bound, and are counted below the next one.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Durations {
    /// How many.
    pub count: u64,
    /// Their mean in nanoseconds; null without any.
    pub mean_ns: Option<u64>,
    /// Nanoseconds that half of them are below; null without any.
    pub p50_ns: Option<u64>,
    /// Nanoseconds that 99 of 100 are below; null without any.
    pub p99_ns: Option<u64>,
    /// Nanoseconds that all are below; null without any.
    pub max_ns: Option<u64>,
    /// The buckets that are not empty.
    pub buckets: Vec<Bucket>,
}

/// Durations of about the same length.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Bucket {
    /// Upper bound in nanoseconds; none is below half of that.
    pub below_ns: u64,
    /// Number of durations.
    pub count: u64,
}

impl From<&Histogram> for Durations {
    fn from(h: &Histogram) -> Self {
        let bucket = |(b, &count): (usize, &u64)| Bucket { below_ns: Histogram::bound(b), count };
        Self {
            count: h.count(),
            mean_ns: h.mean(),
            p50_ns: h.percentile(500),
            p99_ns: h.percentile(990),
            max_ns: h.max(),
            buckets: h.counts.iter().enumerate().filter(|(_, n)| **n > 0).map(bucket).collect(),
        }
    }
}

impl Timing {
    /// The timed sums of one job.
    pub fn new(sums: &Sums, sampled: u32) -> Self {
        let rank = |(place, part): (usize, &Part)| RankTiming {
            rank: part.rank,
            last: part.last,
            last_share: sums.share(place),
            late: Durations::from(&part.late),
        };
        Self {
            sampled,
            completion: Durations::from(&sums.completion),
            ranks: sums.ranks.iter().enumerate().map(rank).collect(),
        }
    }
}

/// A table: the sums in the first line, then how late each rank came.
pub fn print(out: &mut impl Write, sums: &Sums, sampled: u32) -> Result<()> {
    writeln!(out, "{NAME}timing of one fragment in {sampled}{NAME:#}")?;
    let cells = |h: &Histogram| {
        let mean = h.mean().map_or_else(|| "-".into(), time);
        [below(h.percentile(500)), below(h.percentile(990)), below(h.max()), mean]
    };
    let mut line = |name: &str, last: &str, cells: [String; 4]| {
        let [p50, p99, max, mean] = cells;
        writeln!(out, "\t{name:<19}  {last:>17}  {p50:>9}  {p99:>9}  {max:>9}  {mean:>7}")
    };
    line("", "last", ["p50", "p99", "max", "mean"].map(String::from))?;
    line("first to last", "", cells(&sums.completion))?;
    for (place, part) in sums.ranks.iter().enumerate() {
        let last = format!("{} {:>4.0} %", part.last, 100.0 * sums.share(place));
        line(&format!("rank {} behind first", part.rank), &last, cells(&part.late))?;
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// As the daemon sends it.
    pub fn message(h: &Histogram) -> api::Histogram {
        api::Histogram { counts: h.counts.to_vec(), sum_ns: h.sum_ns }
    }

    /// Sums of `ranks` ranks that all wait for `late` of them.
    pub fn sums(ranks: usize, late: usize, count: u64, ns: u64) -> Sums {
        let part = |rank| Part { rank, ..Part::default() };
        let mut sums =
            Sums { completion: Histogram::EMPTY, ranks: (0..ranks as u32).map(part).collect() };
        for i in 0..count {
            sums.completion.add(ns + i);
            sums.ranks[late].last += 1;
            for (rank, part) in sums.ranks.iter_mut().enumerate() {
                part.late.add(if rank == late { ns + i } else { rank as u64 * 100 });
            }
        }
        sums
    }

    #[test]
    fn times_have_three_digits() {
        let cases = [
            (0, "0 ns"),
            (128, "128 ns"),
            (999, "999 ns"),
            (1_024, "1.02 us"),
            (9_999, "10.0 us"),
            (32_768, "32.8 us"),
            (131_072, "131 us"),
            (999_600, "1.00 ms"),
            (1 << 30, "1.07 s"),
            (1 << 37, "137 s"),
        ];
        for (ns, text) in cases {
            assert_eq!(time(ns), text);
        }
    }

    #[test]
    fn a_rank_that_is_last_far_more_often_is_a_straggler() {
        let mut all = sums(4, 2, 100, 50_000);
        assert_eq!((all.last(), all.straggler()), (Some((2, 1.0)), Some(2)));
        // Each is the last in turn.
        all.ranks.iter_mut().for_each(|r| r.last = 100);
        assert_eq!((all.last(), all.straggler()), (Some((0, 0.25)), None));
        // A few sums can be chance; zero sums say nothing.
        assert_eq!(sums(4, 2, 15, 1).straggler(), None);
        assert_eq!((sums(4, 2, 0, 1).last(), sums(4, 2, 0, 1).straggler()), (None, None));
    }

    #[test]
    fn an_interval_is_what_came_in_it() {
        let early = sums(3, 1, 10, 1_000);
        let more = sums(3, 2, 20, 9_000);
        let mut late = early.clone();
        late.merge(&more);
        assert_eq!(late.since(&early), more);
        // A job of the same name that was created again.
        assert_eq!(early.since(&late), early);
        assert_eq!(sums(2, 0, 5, 100).since(&late), sums(2, 0, 5, 100));
    }

    #[test]
    fn a_table_of_timed_sums() {
        let mut out = anstream::StripStream::new(Vec::new());
        print(&mut out, &sums(12, 10, 1000, 50_000), 64).unwrap();
        print(&mut out, &sums(2, 0, 0, 0), 64).unwrap();
        insta::assert_snapshot!(String::from_utf8(out.into_inner()).unwrap());
    }
}
