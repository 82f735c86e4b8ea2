//! `netsum report JOB`: watches a job for a while and writes one self-contained HTML file.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`plot`] | the pictures, as SVG; pure |
//! | [`page`] | the file; pure |
//!
//! This file queries the daemon and adds up its answers.

pub mod page;
pub mod plot;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use netsum_api::v1 as api;
use netsum_common::counters::{Counter, Kind as CounterKind};
use tokio::time::{Instant, sleep_until};

use super::client::Client;
use super::failure::{Failure, Kind, Result};
use super::format::Format;
use super::rates;
use super::timing::Sums;
use super::view::{Job, Written};

/// Points of the curve.
const POINTS: u32 = 100;
/// Shortest time between two of them.
const SHORTEST: Duration = Duration::from_millis(50);

/// Rates of a job between two readings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// End of the interval, in seconds from the beginning.
    pub time: f64,
    /// Gigabits per second of payload, received and sent.
    pub gbps: (f64, f64),
}

/// A watched job.
#[derive(Debug)]
pub struct WatchedJob {
    /// Its properties.
    pub job: Job,
    /// Start of the watch, in seconds since 1970.
    pub began: u64,
    /// Length of the watch in seconds.
    pub seconds: f64,
    /// One fragment index in so many is timed.
    pub sampled: u32,
    /// Throughput.
    pub points: Vec<Point>,
    /// The sums timed in the watch.
    pub sums: Sums,
    /// Counters of the watch, by name.
    pub counters: BTreeMap<&'static str, u64>,
}

impl WatchedJob {
    /// From readings of one job; the first and the last are the ends of the watch.
    pub fn new(job: Job, began: u64, readings: &[api::StatsReply]) -> Self {
        let (Some(first), Some(last)) = (readings.first(), readings.last()) else {
            return Self {
                job,
                began,
                seconds: 0.0,
                sampled: 0,
                points: Vec::new(),
                sums: Sums::default(),
                counters: BTreeMap::new(),
            };
        };
        let since =
            |reply: &api::StatsReply| reply.time_ns.saturating_sub(first.time_ns) as f64 / 1e9;
        let point = |pair: &[api::StatsReply]| {
            let time = since(&pair[1]);
            let rates = rates::between(&pair[0], &pair[1], time);
            rates.jobs.first().map(|r| Point { time, gbps: (r.gbps_in, r.gbps_out) })
        };
        let sums = match (first.jobs.first(), last.jobs.first()) {
            (Some(old), Some(new)) => Sums::new(new).since(&Sums::new(old)),
            _ => Sums::default(),
        };
        let value = |reply: &api::StatsReply, c: Counter| {
            reply.counters.iter().find(|of| of.name == c.name()).map_or(0, |of| of.value)
        };
        let grown = |&c: &Counter| (c.name(), value(last, c).saturating_sub(value(first, c)));
        Self {
            job,
            began,
            seconds: since(last),
            sampled: last.sampled,
            points: readings.windows(2).filter_map(point).collect(),
            sums,
            counters: Counter::ALL.iter().map(grown).collect(),
        }
    }

    /// Dropped packets, with their reason, number and meaning; the most frequent first.
    pub fn drops(&self) -> Vec<(&'static str, u64, &'static str)> {
        let dropped = Counter::ALL.iter().filter(|c| c.kind() == CounterKind::Drop);
        let mut drops: Vec<_> = dropped
            .map(|c| (c.name(), self.counters.get(c.name()).copied().unwrap_or(0), c.help().trim()))
            .filter(|(_, count, _)| *count > 0)
            .collect();
        drops.sort_by_key(|(_, count, _)| std::cmp::Reverse(*count));
        drops
    }
}

/// Watches a job and writes the report to a file; `-` is standard output.
///
/// # Errors
/// If the job does not exist or is deleted meanwhile, or if the file cannot be written.
pub async fn run(
    out: &mut impl Write,
    format: Format,
    client: &mut Client,
    name: String,
    watch: Duration,
    file: &Path,
) -> Result<()> {
    let to_stdout = file.as_os_str() == "-";
    if to_stdout && format != Format::Text {
        return Err(Failure::new(Kind::Usage, "-j and the page cannot both go to standard output"));
    }
    // An unwritable file fails before the watch, not after it.
    let broken = |e: std::io::Error| Failure::new(Kind::Failed, format!("{}: {e}", file.display()));
    let mut opened =
        if to_stdout { None } else { Some(std::fs::File::create(file).map_err(broken)?) };

    let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let step = (watch / POINTS).max(SHORTEST);
    let end = Instant::now() + watch;
    let mut readings = vec![client.stats(name.clone()).await?];
    while Instant::now() < end {
        sleep_until(end.min(Instant::now() + step)).await;
        readings.push(client.stats(name.clone()).await?);
    }
    let job = Job::from(client.show_job(name, false).await?);
    let report = WatchedJob::new(job, began, &readings);
    let page = page::page(&report).map_err(|e| Failure::new(Kind::Failed, e.to_string()))?;
    let Some(opened) = &mut opened else { return Ok(out.write_all(page.as_bytes())?) };
    opened.write_all(page.as_bytes()).map_err(broken)?;
    let written = Written { file: file.display().to_string(), seconds: report.seconds };
    if !format.json(out, &written)? {
        writeln!(out, "{}: {:.1} s of job {}", written.file, report.seconds, report.job.name)?;
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::timing::tests::sums;
    use crate::top::model::tests::reading;

    /// Eight seconds of "train", a reading each second.
    pub fn report() -> WatchedJob {
        let of_train = |second: u64| {
            let mut all = reading(second);
            all.stats.jobs.retain(|j| j.job == "train");
            let values = all.stats.jobs[0].values.clone();
            all.stats.counters.iter_mut().zip(values).for_each(|(c, value)| c.value = value);
            all.stats
        };
        let readings: Vec<_> = (2..=10).map(of_train).collect();
        let job = reading(10).jobs.into_iter().find(|j| j.name == "train").unwrap();
        WatchedJob::new(Job::from(job), 1_700_000_000, &readings)
    }

    #[test]
    fn a_report_is_what_came_between_its_ends() {
        let report = report();
        assert_eq!((report.seconds, report.points.len(), report.sampled), (8.0, 8, 64));
        assert_eq!(report.points[0], Point { time: 1.0, gbps: (0.8, 0.8) });
        assert_eq!(report.counters["fragments"], 2 * (100 + 1000 + 700 + 400) * 1000);
        let timed = report.sums.completion.count();
        assert!(timed.abs_diff(report.counters["fragments"] / 64 / 4) <= 1, "{timed}");
        assert_eq!(report.sums.ranks.iter().map(|r| r.last).collect::<Vec<_>>(), [0, 0, timed, 0]);
        assert_eq!(
            report.drops().iter().map(|d| (d.0, d.1)).collect::<Vec<_>>(),
            [("rx_icrc_encapsulated", 44)]
        );
    }

    #[test]
    fn nothing_read_is_nothing_and_no_panic() {
        let WatchedJob { job, .. } = report();
        let nothing = WatchedJob::new(job, 0, &[]);
        assert!(nothing.points.is_empty() && nothing.drops().is_empty());
        assert_eq!(nothing.sums, sums(0, 0, 0, 0));
    }
}
