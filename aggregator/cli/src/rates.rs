//! `netsum stats --interval`: rates of jobs, from two readings of the counters. Pure except for the
//! printing.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;

use netsum_api::v1 as api;
use netsum_common::counters::Counter;

use super::failure::Result;
use super::format::Format;
use super::layout::{FAIR, NAME, PLAIN};
use super::timing::{self, Sums};
use super::view::{JobRates, Rates};

/// Lines of jobs after which the column titles are repeated.
const TITLES_EVERY: usize = 20;

/// Rates between two readings; jobs that are not in both are left out.
pub fn between(before: &api::StatsReply, after: &api::StatsReply, time: f64) -> Rates {
    let interval = after.time_ns.saturating_sub(before.time_ns) as f64 / 1e9;
    let old: HashMap<&str, &api::JobStats> =
        before.jobs.iter().map(|j| (j.job.as_str(), j)).collect();
    let names: Vec<(&str, &str)> =
        after.counters.iter().map(|c| (c.name.as_str(), c.kind.as_str())).collect();
    let jobs = after
        .jobs
        .iter()
        .filter_map(|new| Some(job(&names, old.get(new.job.as_str())?, new, interval)));
    Rates { time, interval, jobs: jobs.collect() }
}

fn job(
    names: &[(&str, &str)],
    old: &api::JobStats,
    new: &api::JobStats,
    interval: f64,
) -> JobRates {
    let rate = |i: usize| {
        // A job of the same name that was created again in between counts from zero.
        let grown = new.values[i]
            .checked_sub(old.values.get(i).copied().unwrap_or(0))
            .unwrap_or(new.values[i]);
        if interval > 0.0 { grown as f64 / interval } else { 0.0 }
    };
    let of = |c: Counter| names.iter().position(|(name, _)| *name == c.name()).map_or(0.0, rate);
    let drops_by_reason: BTreeMap<String, f64> = names
        .iter()
        .enumerate()
        .filter(|(_, (_, kind))| *kind == "drop")
        .map(|(i, (name, _))| ((*name).to_owned(), rate(i)))
        .filter(|(_, rate)| *rate > 0.0)
        .collect();
    let gbps = |c: Counter| of(c) * new.fragment_bytes * 8.0 / 1e9;
    let sums = Sums::new(new).since(&Sums::new(old));
    let last = sums.last();
    let job = (!new.job.is_empty()).then(|| new.job.clone());
    JobRates {
        state: job.is_some().then(|| new.state().into()),
        job,
        contributions: of(Counter::Contributions),
        gbps_in: gbps(Counter::Contributions),
        gbps_out: gbps(Counter::Results),
        replays: of(Counter::Replays),
        // The sum of an empty list is -0.0.
        drops: drops_by_reason.values().fold(0.0, |sum, rate| sum + rate),
        drops_by_reason,
        completion_p50_ns: sums.completion.percentile(500),
        completion_p99_ns: sums.completion.percentile(990),
        last_rank: last.map(|(place, _)| sums.rank(place)),
        last_share: last.map(|(_, share)| share),
        slots: new.slots,
        slots_used: new.slots_used,
        credit: new.credit,
        credit_used: new.credit_used,
    }
}

/// Prints rates, interval by interval.
#[derive(Debug)]
pub struct Printer {
    format: Format,
    lines: usize,
}

impl Printer {
    /// A printer that has printed nothing yet.
    pub fn new(format: Format) -> Self {
        Self { format, lines: 0 }
    }

    /// Prints an interval's rates: one line for each job, and one for packets that belong to none
    /// if any of them were dropped.
    pub fn print(&mut self, out: &mut impl Write, rates: &Rates) -> Result<()> {
        if self.format.json(out, rates)? {
            out.flush()?;
            return Ok(());
        }
        let shown: Vec<&JobRates> =
            rates.jobs.iter().filter(|j| j.job.is_some() || j.drops > 0.0).collect();
        let width =
            shown.iter().filter_map(|j| j.job.as_ref()).map(String::len).max().unwrap_or(0).max(8);
        if self.lines == 0 || self.lines >= TITLES_EVERY {
            let title = format!(
                "{:<8}  {:<width$}  {:>11}  {:>8}  {:>8}  {:>8}  {:>8}  {:>13}  {:>13}  {:>9}  {:>9}  \
                 {:>9}",
                "utc",
                "job",
                "contrib/s",
                "in Gb/s",
                "out Gb/s",
                "replay/s",
                "drop/s",
                "slots used",
                "credit used",
                "sum p50",
                "sum p99",
                "last rank"
            );
            writeln!(out, "{NAME}{title}{NAME:#}")?;
            self.lines = 0;
        }
        let clock = clock(rates.time);
        if shown.is_empty() {
            writeln!(out, "{clock}  no jobs")?;
        }
        for j in shown {
            let name = j.job.as_deref().unwrap_or("(none)");
            let drops = if j.drops > 0.0 { FAIR } else { PLAIN };
            let (slots, credit) = (
                format!("{}/{}", j.slots_used, j.slots),
                format!("{}/{}", j.credit_used, j.credit),
            );
            let (p50, p99) =
                (timing::below(j.completion_p50_ns), timing::below(j.completion_p99_ns));
            let last = match (j.last_rank, j.last_share) {
                (Some(rank), Some(share)) => format!("{rank} {:>4.0} %", 100.0 * share),
                _ => "-".into(),
            };
            writeln!(
                out,
                "{clock}  {name:<width$}  {:>11.0}  {:>8.3}  {:>8.3}  {:>8.0}  \
                 {drops}{:>8.0}{drops:#}  {slots:>13}  {credit:>13}  {p50:>9}  {p99:>9}  {last:>9}",
                j.contributions, j.gbps_in, j.gbps_out, j.replays, j.drops
            )?;
            self.lines += 1;
            if !j.drops_by_reason.is_empty() {
                let reasons: Vec<String> = j
                    .drops_by_reason
                    .iter()
                    .map(|(name, rate)| format!("{name} {rate:.0}/s"))
                    .collect();
                writeln!(out, "\t{}", reasons.join("  "))?;
            }
        }
        out.flush()?;
        Ok(())
    }
}

/// The time of day.
pub(super) fn clock(time: f64) -> String {
    let of_day = time as u64 % 86_400;
    format!("{:02}:{:02}:{:02}", of_day / 3600, of_day / 60 % 60, of_day % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `count` sums of 20 us.
    fn durations(count: u64) -> api::Histogram {
        let mut h = netsum_common::timing::Histogram::EMPTY;
        (0..count).for_each(|_| h.add(20_000));
        crate::timing::tests::message(&h)
    }

    fn reading(time_ms: u64, jobs: &[(&str, u64)]) -> api::StatsReply {
        let counter = |c: &Counter| api::Counter {
            name: c.name().into(),
            kind: c.kind().name().into(),
            ..Default::default()
        };
        let job = |&(name, value): &(&str, u64)| {
            let mut values = vec![0; Counter::ALL.len()];
            values[Counter::Contributions as usize] = value;
            values[Counter::Results as usize] = value;
            values[Counter::DuplicateRequest as usize] = value / 1000;
            api::JobStats {
                job: name.into(),
                state: api::JobState::Active.into(),
                values,
                fragment_bytes: 1000.0,
                slots: 256,
                slots_used: 12,
                credit: 128,
                credit_used: 30,
                completion: Some(durations(value / 100)),
                ranks: (0..2)
                    .map(|rank| api::RankTiming {
                        last: u64::from(rank) * value / 100,
                        late: None,
                        rank,
                    })
                    .collect(),
            }
        };
        api::StatsReply {
            counters: Counter::ALL.iter().map(counter).collect(),
            time_ns: time_ms * 1_000_000,
            jobs: jobs.iter().map(job).collect(),
            sampled: 64,
        }
    }

    #[test]
    fn rates_are_growth_over_time() {
        let rates = between(
            &reading(0, &[("a", 1000), ("", 0)]),
            &reading(500, &[("a", 126_000), ("", 0)]),
            7.0,
        );
        let a = &rates.jobs[0];
        assert_eq!((a.contributions, a.gbps_in, a.gbps_out, a.drops), (250_000.0, 2.0, 2.0, 250.0));
        assert_eq!(a.drops_by_reason, [("duplicate_request".to_owned(), 250.0)].into());
        assert_eq!((a.completion_p50_ns, a.completion_p99_ns), (Some(32_768), Some(32_768)));
        assert_eq!((a.last_rank, a.last_share), (Some(1), Some(1.0)));
        assert_eq!(rates.jobs[1].job, None);
        assert_eq!((rates.jobs[1].completion_p50_ns, rates.jobs[1].last_rank), (None, None));
    }

    #[test]
    fn rates_stay_valid_when_jobs_appear_or_restart() {
        let rates = between(
            &reading(0, &[("gone", 9), ("other", 5000)]),
            &reading(1000, &[("other", 7), ("new", 9)]),
            0.0,
        );
        assert_eq!(rates.jobs.len(), 1);
        assert_eq!(rates.jobs[0].contributions, 7.0);
        let same = reading(5, &[("a", 1)]);
        assert_eq!(between(&same, &same, 0.0).jobs[0].contributions, 0.0);
    }

    #[test]
    fn rates_as_text() {
        let mut out = anstream::StripStream::new(Vec::new());
        let mut printer = Printer::new(Format::Text);
        for at in 1..=2u64 {
            let jobs = |n: u64| [("train", n * 100_000), ("another-job", n * 400), ("", 0)];
            let rates = between(
                &reading(1000 * (at - 1), &jobs(at - 1)),
                &reading(1000 * at, &jobs(at)),
                at as f64,
            );
            printer.print(&mut out, &rates).unwrap();
        }
        insta::assert_snapshot!(String::from_utf8(out.into_inner()).unwrap());
    }
}
