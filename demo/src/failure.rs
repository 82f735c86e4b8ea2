//! The effects of a failure during the training.

use serde::{Deserialize, Serialize};

/// An all-reduce that takes at least this many seconds is a pause.
const PAUSE: f64 = 0.3;

/// A step of rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepTime {
    /// When it was done, in seconds since the training began.
    pub at: f64,
    /// The time of its all-reduce, in seconds.
    pub took: f64,
    /// Whether the sum came from the boxes.
    pub by_box: bool,
}

/// A failure that the demo caused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// Its description, and that of its end.
    pub words: [String; 2],
    /// When it happened, in seconds since the training began.
    pub failed: f64,
    /// When it ended; `None` if the training ended before.
    pub recovered: Option<f64>,
    pub steps: Vec<StepTime>,
}

/// An event of the training.
#[derive(Clone, Debug, PartialEq)]
pub struct Moment {
    /// In seconds since the training began.
    pub at: f64,
    pub what: String,
}

/// Consecutive steps whose sums have the same origin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phase {
    pub by_box: bool,
    /// When the last step before them was done.
    pub from: f64,
    /// When the first of them was done, and the last.
    pub first: f64,
    pub to: f64,
}

impl Failure {
    /// The phases of sums by the boxes and by the hosts.
    pub fn phases(&self) -> Vec<Phase> {
        let mut phases: Vec<Phase> = Vec::new();
        for &StepTime { at, by_box, .. } in &self.steps {
            match phases.last_mut() {
                Some(last) if last.by_box == by_box => last.to = at,
                last => {
                    let from = last.map_or(0.0, |last| last.to);
                    phases.push(Phase { by_box, from, first: at, to: at });
                }
            }
        }
        phases
    }

    /// All-reduces that took as long as a pause.
    pub fn pauses(&self) -> impl Iterator<Item = StepTime> {
        self.steps.iter().copied().filter(|step| step.took > PAUSE)
    }

    /// The median time of all-reduces with this origin, in seconds.
    pub fn usual(&self, by_box: bool) -> Option<f64> {
        let mut times: Vec<f64> =
            self.steps.iter().filter(|s| s.by_box == by_box).map(|s| s.took).collect();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied()
    }

    /// All events in order.
    pub fn moments(&self) -> Vec<Moment> {
        let mut moments = vec![Moment { at: self.failed, what: self.words[0].clone() }];
        moments.extend(self.recovered.map(|at| Moment { at, what: self.words[1].clone() }));
        // The first phase is not an event.
        moments.extend(
            self.phases().iter().skip(1).map(|phase| Moment {
                at: phase.first,
                what: if phase.by_box { "the boxes sum again" } else { "the hosts' ring sums" }
                    .to_owned(),
            }),
        );
        moments.sort_by(|a, b| a.at.total_cmp(&b.at));
        moments
    }

    /// The promise that was not kept, if any.
    pub fn complaint(&self) -> Option<String> {
        if self.recovered.is_none() {
            return Some(format!("the training ended before {}", self.words[1]));
        }
        let last = self.steps.last()?;
        (!last.by_box)
            .then(|| "THE BOXES DID NOT SUM AGAIN before the training was over".to_owned())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A step each tenth of a second; the hosts sum some of them.
    pub(crate) fn failure() -> Failure {
        let step = |n: usize| StepTime {
            at: (n + 1) as f64 / 10.0 + if n >= 40 { 3.0 } else { 0.0 },
            took: if n == 40 { 3.0 } else { 0.002 + n as f64 * 1e-6 },
            by_box: !(40..60).contains(&n),
        };
        let words =
            ["netsum on spine0 is killed", "netsum on spine0 is started again"].map(str::to_owned);
        Failure { words, failed: 4.01, recovered: Some(8.5), steps: (0..100).map(step).collect() }
    }

    #[test]
    fn events_are_in_order() {
        let texts: Vec<String> =
            failure().moments().iter().map(|m| format!("{:.1} {}", m.at, m.what)).collect();
        let expected = [
            "4.0 netsum on spine0 is killed",
            "7.1 the hosts' ring sums",
            "8.5 netsum on spine0 is started again",
            "9.1 the boxes sum again",
        ];
        assert_eq!(texts, expected);
    }

    #[test]
    fn pauses_and_usual_times_are_found() {
        let failure = failure();
        assert_eq!(failure.pauses().map(|step| step.took).collect::<Vec<_>>(), [3.0]);
        assert!((failure.usual(true).unwrap() - 0.00206).abs() < 1e-5);
        assert_eq!(failure.phases().len(), 3);
    }

    #[test]
    fn a_missing_failback_is_a_complaint() {
        let mut failure = failure();
        assert_eq!(failure.complaint(), None);
        failure.steps.truncate(50);
        assert!(failure.complaint().unwrap().contains("DID NOT SUM AGAIN"));
        failure.recovered = None;
        assert!(
            failure.complaint().unwrap().contains("ended before netsum on spine0 is started again")
        );
    }
}
