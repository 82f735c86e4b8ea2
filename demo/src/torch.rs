//! Results of trainings with PyTorch, summed by netsum and by Gloo.

use std::fmt::Write;

use serde::Serialize;

use crate::report::{LinkBytes, grouped};

/// The first steps, in which PyTorch reorders its buckets; they are not in the time of a step.
pub const WARMING: usize = 3;
/// The largest difference of a loss from Gloo's. Sums of floats in another order differ, and the
/// differences grow from step to step.
const CLOSE: f64 = 0.01;

/// One training.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// The loss of rank 0's batch at each step.
    pub loss: Vec<f64>,
    /// Time of each of rank 0's steps, in seconds.
    pub seconds: Vec<f64>,
    /// The loss of the test data.
    pub test: f64,
    /// Hash of each rank's weights.
    pub weights: Vec<String>,
    /// All steps' bytes on each host's link.
    pub links: Vec<LinkBytes>,
    /// Whether the box did all sums; None with Gloo.
    pub by_box: Option<bool>,
}

/// Trainings of one model over links of one rate.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    pub model: String,
    pub rate: String,
    /// The number of parameters.
    pub floats: u64,
    pub netsum: Run,
    pub gloo: Run,
    /// The second training by netsum.
    pub again: Run,
}

/// All comparisons.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub hosts: usize,
    pub steps: usize,
    pub seed: u64,
    pub comparisons: Vec<Comparison>,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

impl Run {
    fn warm(&self) -> &[f64] {
        self.seconds.get(WARMING..).unwrap_or_default()
    }

    /// The median time of a step, in seconds.
    pub fn step_time(&self) -> f64 {
        median(self.warm().to_vec())
    }

    /// Megabytes that a host sends and receives in a step.
    pub fn megabytes(&self) -> [f64; 2] {
        let all = (self.links.len() * self.loss.len()) as f64 * 1e6;
        let sum = |way: fn(&LinkBytes) -> u64| self.links.iter().map(way).sum::<u64>() as f64 / all;
        [sum(|link| link.sent), sum(|link| link.received)]
    }

    fn ranks_agree(&self) -> bool {
        self.weights.iter().all(|weights| *weights == self.weights[0])
    }
}

impl Comparison {
    /// The median time of a step of both trainings by netsum, in seconds.
    pub fn netsum_time(&self) -> f64 {
        median([self.netsum.warm(), self.again.warm()].concat())
    }

    /// The largest difference between the losses by netsum and by Gloo.
    pub fn largest_difference(&self) -> f64 {
        self.netsum.loss.iter().zip(&self.gloo.loss).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }

    /// Whether both trainings by netsum have the same bits.
    fn repeats(&self) -> bool {
        self.netsum.loss == self.again.loss && self.netsum.weights == self.again.weights
    }

    fn complaints(&self) -> Vec<&'static str> {
        let runs = [&self.netsum, &self.gloo, &self.again];
        [
            (runs.iter().all(|run| run.ranks_agree()), "the ranks' weights differ"),
            (runs.iter().all(|run| run.by_box != Some(false)), "the box did not do all sums"),
            (self.repeats(), "netsum's two trainings differ in bits"),
            (self.largest_difference() < CLOSE, "the losses are too far apart"),
        ]
        .into_iter()
        .filter_map(|(holds, what)| (!holds).then_some(what))
        .collect()
    }
}

impl Summary {
    /// The demo's final table.
    pub fn table(&self) -> String {
        let mut out = String::new();
        for comparison in &self.comparisons {
            let Comparison { model, rate, floats, netsum, gloo, again } = comparison;
            let _ = writeln!(out, "  {model}, {} weights, links of {rate}", grouped(*floats));
            for (who, run) in [("netsum", netsum), ("Gloo", gloo), ("netsum again", again)] {
                let [up, down] = run.megabytes();
                let _ = writeln!(
                    out,
                    "    {who:<13}{:>5.0} ms a step   {up:>6.2} MB up {down:>6.2} down   loss \
                     {:.4}, {:.4} in the test   weights {} on {}",
                    1e3 * run.step_time(),
                    run.loss.last().copied().unwrap_or(f64::NAN),
                    run.test,
                    run.weights[0],
                    if run.ranks_agree() {
                        format!("all {}", self.hosts)
                    } else {
                        "RANK 0".to_owned()
                    },
                );
            }
            let _ = writeln!(
                out,
                "    Gloo takes {:.2} x netsum's time; losses differ by {:.1e} at most; netsum \
                 twice: {}\n",
                gloo.step_time() / comparison.netsum_time(),
                comparison.largest_difference(),
                if comparison.repeats() { "the same bits" } else { "OTHER BITS" },
            );
        }
        out
    }

    /// The promises that were not kept.
    pub fn complaints(&self) -> Vec<String> {
        let named = |c: &Comparison| {
            c.complaints()
                .into_iter()
                .map(|what| format!("{}, {}: {what}", c.model, c.rate))
                .collect::<Vec<_>>()
        };
        self.comparisons.iter().flat_map(named).collect()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn summary() -> Summary {
        let run = |seconds: f64, megabytes: u64, weights: &str| Run {
            loss: (0..10).map(|step| 2.3 / f64::from(step + 1)).collect(),
            seconds: [&[9.0; WARMING][..], &[seconds; 7]].concat(),
            test: 0.25,
            weights: vec![weights.to_owned(); 4],
            links: vec![
                LinkBytes { sent: megabytes * 10_000_000, received: megabytes * 10_000_000 };
                4
            ],
            by_box: (weights == "aa").then_some(true),
        };
        let comparison = |rate: &str, seconds: f64| Comparison {
            model: "cnn".to_owned(),
            rate: rate.to_owned(),
            floats: 1_500_000,
            netsum: run(seconds, 6, "aa"),
            gloo: run(1.5 * seconds, 9, "bb"),
            again: run(seconds, 6, "aa"),
        };
        Summary {
            hosts: 4,
            steps: 10,
            seed: 1,
            comparisons: vec![comparison("250mbit", 0.2), comparison("1gbit", 0.05)],
        }
    }

    #[test]
    fn the_table_has_times_bytes_and_bits() {
        let table = summary().table();
        for part in [
            "200 ms a step",
            "300 ms",
            "9.00 MB up   9.00 down",
            "Gloo takes 1.50 x",
            "the same bits",
        ] {
            assert!(table.contains(part), "no `{part}` in\n{table}");
        }
        assert_eq!(summary().complaints(), Vec::<String>::new());
    }

    #[test]
    fn a_broken_promise_is_named() {
        let complaint = |change: fn(&mut Comparison)| {
            let mut summary = summary();
            change(&mut summary.comparisons[1]);
            summary.complaints().join("; ")
        };
        let bits = "cnn, 1gbit: netsum's two trainings differ in bits";
        assert_eq!(complaint(|c| c.again.loss[3] += 1e-9), bits);
        assert_eq!(complaint(|c| c.again.weights = vec!["cc".to_owned(); 4]), bits);
        assert!(
            complaint(|c| c.gloo.weights[2] = "cc".to_owned())
                .contains("the ranks' weights differ")
        );
        assert!(complaint(|c| c.again.by_box = Some(false)).contains(
            "the box did not do all \
             sums"
        ));
        assert!(complaint(|c| c.gloo.loss[3] += 1.0).contains("too far apart"));
    }
}
