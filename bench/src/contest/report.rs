//! Rows of figures, as a table, as JSON and as a picture.

use std::fmt::Write as _;

use anyhow::Result;
use serde::Serialize;

use super::Round;
use crate::plot::{self, Height, Panel};

/// What one contestant did with one size.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    /// `f32` or `i32`.
    pub dtype: &'static str,
    /// Of each rank's vector.
    pub bytes: usize,
    /// All-reduces measured.
    pub operations: usize,
    /// Mean of the best round, in microseconds.
    pub mean_us: f64,
    /// Of all rounds.
    pub median_us: f64,
    /// 99th percentile of all rounds; of fewer than a hundred operations the longest.
    pub p99_us: f64,
    /// Bytes of the vector by the mean, in Gb/s.
    pub algbw_gbps: f64,
    /// What a ring would have to move over each link for that, 2 (n-1)/n of it; nccl-tests' measure.
    pub busbw_gbps: f64,
    /// Processor time of the whole machine, hosts and box, for 10^9 bytes of vector.
    pub cpu_seconds_per_gb: f64,
    /// Bytes sent over rank 0's link by the vector's bytes.
    pub sent_ratio: f64,
    /// Bytes received, likewise.
    pub received_ratio: f64,
    /// Packets sent again, where the contestant knows.
    pub retransmissions: u64,
    /// All-reduces that netsum's box was to sum, and the ring did.
    pub astray: u64,
}

impl Row {
    /// From a contestant's rounds with a size.
    pub fn new(name: &str, float: bool, bytes: usize, ranks: u32, rounds: &[Round]) -> Self {
        let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len() as f64;
        let mean_us = rounds.iter().map(|r| mean(&r.answer.micros)).fold(f64::INFINITY, f64::min);
        let mut all: Vec<f64> = rounds.iter().flat_map(|r| r.answer.micros.iter().copied()).collect();
        all.sort_by(f64::total_cmp);
        let at = |share: f64| all[((all.len() as f64 * share) as usize).min(all.len() - 1)];
        let total = (bytes * all.len()) as f64;
        let cpu: f64 = rounds.iter().map(|r| r.cost.cpu_seconds).sum();
        let sent: u64 = rounds.iter().map(|r| r.cost.sent).sum();
        let received: u64 = rounds.iter().map(|r| r.cost.received).sum();
        let algbw_gbps = bytes as f64 * 8.0 / mean_us / 1e3;
        Self {
            name: name.to_owned(),
            dtype: if float { "f32" } else { "i32" },
            bytes,
            operations: all.len(),
            mean_us,
            median_us: at(0.5),
            p99_us: at(0.99),
            algbw_gbps,
            busbw_gbps: algbw_gbps * 2.0 * f64::from(ranks - 1) / f64::from(ranks),
            cpu_seconds_per_gb: cpu / (total / 1e9),
            sent_ratio: sent as f64 / total,
            received_ratio: received as f64 / total,
            retransmissions: rounds.iter().map(|r| r.answer.retransmissions).sum(),
            astray: rounds.iter().map(|r| r.answer.astray).sum(),
        }
    }

    /// Titles over the columns of [`Row::text`].
    pub fn titles() -> String {
        format!(
            "{:22} {:5} {:>9} {:>5} {:>10} {:>10} {:>10} {:>7} {:>7} {:>8} {:>6} {:>6} {:>6}",
            "",
            "dtype",
            "size",
            "#ops",
            "mean",
            "median",
            "p99",
            "algbw",
            "busbw",
            "CPU",
            "sent",
            "recvd",
            "again"
        ) + &format!(
            "\n{:22} {:5} {:>9} {:>5} {:>10} {:>10} {:>10} {:>7} {:>7} {:>8} {:>6} {:>6} {:>6}",
            "", "", "B", "", "us", "us", "us", "Gb/s", "Gb/s", "s/GB", "B/B", "B/B", ""
        )
    }

    /// A line of a table.
    pub fn text(&self) -> String {
        let mut line = format!(
            "{:22} {:5} {:>9} {:>5} {:>10.1} {:>10.1} {:>10.1} {:>7.3} {:>7.3} {:>8.2} {:>6.2} {:>6.2} {:>6}",
            self.name,
            self.dtype,
            self.bytes,
            self.operations,
            self.mean_us,
            self.median_us,
            self.p99_us,
            self.algbw_gbps,
            self.busbw_gbps,
            self.cpu_seconds_per_gb,
            self.sent_ratio,
            self.received_ratio,
            self.retransmissions
        );
        if self.astray > 0 {
            let _ = write!(line, "  {} by the ring", self.astray);
        }
        line
    }
}

/// A picture of algorithm bandwidth over size, both in powers.
///
/// # Errors
/// If it cannot be drawn.
pub fn picture(rows: &[Row], title: &str) -> Result<String> {
    let panel = Panel {
        title: title.to_owned(),
        x: "bytes of each rank's vector".to_owned(),
        y: "algbw, Gb/s".to_owned(),
        height: Height::Log,
        x_is_bytes: true,
        series: plot::series(rows, |r| r.name.clone(), |r| (r.bytes as f64, r.algbw_gbps)),
    };
    plot::picture(&[panel], 1, (900, 540))
}

#[cfg(test)]
mod tests {
    use super::super::Answer;
    use super::super::cost::Cost;
    use super::*;

    fn round(micros: &[f64]) -> Round {
        let answer = Answer { micros: micros.to_vec(), wrong: 0, retransmissions: 1, astray: 0 };
        Round { answer, cost: Cost { cpu_seconds: 0.005, sent: 4000, received: 2000 } }
    }

    #[test]
    fn a_row_has_the_best_rounds_mean_and_all_rounds_percentiles() {
        let row = Row::new("x", true, 1000, 4, &[round(&[10.0, 30.0]), round(&[2.0, 6.0])]);
        assert_eq!((row.operations, row.mean_us, row.median_us, row.p99_us), (4, 4.0, 10.0, 30.0));
        // 8000 bits in 4 us.
        assert_eq!((row.algbw_gbps, row.busbw_gbps), (2.0, 3.0));
        assert_eq!((row.sent_ratio, row.received_ratio, row.retransmissions), (2.0, 1.0, 2));
        assert!((row.cpu_seconds_per_gb - 0.01 / 4e-6).abs() < 1e-3);
        assert_eq!(row.text().len(), Row::titles().lines().next().unwrap().len());
    }

    #[test]
    fn a_picture_names_every_contestant() {
        let rows: Vec<Row> = [("one", 1024), ("two", 1024), ("one", 1 << 20), ("two", 1 << 20)]
            .iter()
            .map(|(name, bytes)| Row::new(name, true, *bytes, 4, &[round(&[100.0])]))
            .collect();
        let svg = picture(&rows, "a title").unwrap();
        for text in ["a title", ">\none\n<", ">\ntwo\n<", "1 MiB"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
    }
}
