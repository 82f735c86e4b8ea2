//! Rows of figures, as a table and as a picture.

use anyhow::Result;
use serde::Serialize;

use super::{Curve, Point};
use crate::contest::Round;
use crate::plot::{self, Height, Panel};

/// A point of a curve.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The varied quantity.
    pub curve: Curve,
    /// Its value.
    pub x: u32,
    /// `netsum`, or `netsum-ring`.
    pub name: &'static str,
    /// All parameters.
    #[serde(flatten)]
    pub point: Point,
    /// Bytes of the vector for bandwidth.
    pub bytes: usize,
    /// Bits of all jobs' vectors divided by the time of the slowest job, in the best round, in
    /// Gb/s.
    pub algbw_gbps: f64,
    /// Bytes of the vector for latency.
    pub small_bytes: usize,
    /// Median time of an all-reduce of the small vector, in microseconds.
    pub latency_us: f64,
    /// The 99th percentile of those times.
    pub p99_us: f64,
    /// All-reduces of both sizes.
    pub operations: usize,
    /// CPU seconds of the whole machine for 10^9 bytes of vector.
    pub cpu_seconds_per_gb: f64,
    /// Packets sent again.
    pub retransmissions: u64,
    /// All-reduces, by rank, that netsum's ring did instead of the box.
    pub astray: u64,
}

/// The time of a job's all-reduces in a round.
pub(super) fn seconds(round: &Round) -> f64 {
    round.answer.micros.iter().sum::<f64>() / 1e6
}

/// Gb/s of all jobs together in a round. The slowest job determines the time: jobs do not begin at
/// the same moment, and the sum of their own rates would count the time twice in which one job had
/// the machine to itself.
fn rate(jobs: &[Round], bytes: usize) -> f64 {
    let operations: usize = jobs.iter().map(|r| r.answer.micros.len()).sum();
    let longest = jobs.iter().map(seconds).fold(0.0, f64::max);
    (operations * bytes * 8) as f64 / longest / 1e9
}

impl Row {
    /// Makes a row from the rounds with the large vector and with the small one.
    pub(super) fn new(
        curve: Curve,
        x: u32,
        name: &'static str,
        point: Point,
        sizes: [usize; 2],
        rounds: &[Vec<Vec<Round>>; 2],
    ) -> Self {
        let mut small: Vec<f64> =
            rounds[1].iter().flatten().flat_map(|r| r.answer.micros.clone()).collect();
        small.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let i = ((small.len() as f64 * share) as usize).min(small.len().saturating_sub(1));
            small.get(i).copied().unwrap_or(f64::NAN)
        };
        let large: usize = rounds[0].iter().flatten().map(|r| r.answer.micros.len()).sum();
        // Every job's round has the cost of all.
        let cpu: f64 =
            rounds[0].iter().filter_map(|jobs| jobs.first()).map(|r| r.cost.cpu_seconds).sum();
        let sum = |of: fn(&Round) -> u64| rounds.iter().flatten().flatten().map(of).sum::<u64>();
        Self {
            curve,
            x,
            name,
            point,
            bytes: sizes[0],
            algbw_gbps: rounds[0].iter().map(|jobs| rate(jobs, sizes[0])).fold(0.0, f64::max),
            small_bytes: sizes[1],
            latency_us: at(0.5),
            p99_us: at(0.99),
            operations: large + small.len(),
            cpu_seconds_per_gb: cpu / ((large * sizes[0]) as f64 / 1e9),
            retransmissions: sum(|r| r.answer.retransmissions),
            astray: sum(|r| r.answer.astray),
        }
    }

    /// The headings of [`Row::text`].
    pub fn titles() -> String {
        format!(
            "{:<12} {:>5} {:>5} {:>4} {:>6} {:>8} {:>10} {:>8} {:>10} {:>10} {:>8} {:>6} {:>7}",
            "",
            "ranks",
            "rings",
            "jobs",
            "window",
            "message",
            "algbw Gb/s",
            "by usual",
            "latency us",
            "p99 us",
            "CPU",
            "again",
            "by ring"
        )
    }

    /// A line of a table; `usual` is the bandwidth at the curve's usual point.
    pub fn text(&self, usual: f64) -> String {
        let Point { ranks, rings, jobs, window, message_size } = self.point;
        format!(
            "{:<12} {ranks:>5} {rings:>5} {jobs:>4} {window:>6} {message_size:>8} {:>10.3} \
             {:>8.2} {:>10.0} {:>10.0} {:>8.2} {:>6} {:>7}",
            self.name,
            self.algbw_gbps,
            self.algbw_gbps / usual,
            self.latency_us,
            self.p99_us,
            self.cpu_seconds_per_gb,
            self.retransmissions,
            self.astray
        )
    }
}

/// A curve's rows as a table.
pub fn table(rows: &[Row]) -> String {
    let usual =
        rows.iter().find(|r| r.point == Point::USUAL && r.name == "netsum").map(|r| r.algbw_gbps);
    let curve = rows.first().map_or("", |r| r.curve.text());
    let lines: Vec<String> = rows.iter().map(|r| r.text(usual.unwrap_or(f64::NAN))).collect();
    format!("{curve}\n{}\n{}\n", Row::titles(), lines.join("\n"))
}

/// A picture: bandwidth and latency of each curve, side by side.
///
/// # Errors
/// If it cannot be drawn.
pub fn picture(rows: &[Row]) -> Result<String> {
    let mut panels = Vec::new();
    for curve in Curve::ALL {
        let of: Vec<&Row> = rows.iter().filter(|r| r.curve == curve).collect();
        if of.is_empty() {
            continue;
        }
        let panel = |title: &str, y: &str, height: fn(&Row) -> f64| Panel {
            title: format!("{title} over {}", curve.text()),
            x: curve.text().to_owned(),
            y: y.to_owned(),
            height: Height::Linear,
            x_is_bytes: curve == Curve::Message,
            series: plot::series(&of, |r| r.name.to_owned(), |r| (r.x.into(), height(r))),
        };
        panels.push(panel("bandwidth", "algbw, Gb/s", |r| r.algbw_gbps));
        panels.push(panel("latency", "median, us", |r| r.latency_us));
    }
    plot::picture(&panels, 2, (560, 360))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contest::Answer;
    use crate::contest::cost::Cost;

    fn round(micros: &[f64]) -> Round {
        let answer = Answer {
            micros: micros.to_vec(),
            busy: 0.0,
            busiest: 0.0,
            wrong: 0,
            retransmissions: 1,
            astray: 0,
        };
        Round { answer, cost: Cost { cpu_seconds: 0.5, ..Cost::default() } }
    }

    fn row(curve: Curve, x: u32) -> Row {
        let large =
            vec![vec![round(&[100.0]), round(&[400.0])], vec![round(&[200.0]), round(&[100.0])]];
        let small = vec![vec![round(&[5.0, 7.0]), round(&[6.0])]];
        Row::new(curve, x, "netsum", curve.point(x), [25_000, 1000], &[large, small])
    }

    #[test]
    fn the_slowest_job_determines_the_time() {
        let row = row(Curve::Jobs, 2);
        // Two jobs with 200,000 bits in 200 us, which is better than in 400.
        assert!((row.algbw_gbps - 2.0).abs() < 1e-9, "{row:?}");
        assert_eq!(
            (row.latency_us, row.p99_us, row.operations, row.retransmissions),
            (6.0, 7.0, 7, 6)
        );
        // Half a second for each of two rounds, four vectors.
        assert!((row.cpu_seconds_per_gb - 1.0 / 1e-4).abs() < 1e-6);
    }

    #[test]
    fn bandwidth_is_compared_with_the_usual_point() {
        let rows = [row(Curve::Window, 1), row(Curve::Window, 8)];
        let table = table(&rows);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!((lines.len(), lines[0]), (4, "window, messages"));
        assert!(lines[3].contains(" 1.00 ") && lines[2].len() == lines[1].len(), "{table}");
    }

    #[test]
    fn every_curve_has_two_panels() {
        let rows = [row(Curve::Window, 1), row(Curve::Window, 8), row(Curve::Message, 4096)];
        let svg = picture(&rows).unwrap();
        for text in
            ["bandwidth over window", "latency over window", "bandwidth over bytes", "4 KiB"]
        {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg.contains("over ranks"));
    }
}
