//! The failure that is caused during the training, and its time.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use netsum_lab::LabSpec;

/// The part of the steps after which it happens.
const AFTER: f64 = 0.25;
/// Its duration.
const LASTS: Duration = Duration::from_secs(5);

/// The failing component.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Victim {
    Manager,
    /// netsum on a box, by the box's number.
    Box(Option<usize>),
    Link {
        rack: usize,
        spine: usize,
    },
}

impl Victim {
    /// Parses `manager`, `uplink`, `spine0`, `leaf1` and so on.
    pub fn parse(text: &str, spec: &LabSpec) -> Result<Self> {
        let boxes = || spec.boxes().map(Some).chain([None]);
        match text {
            "manager" => Ok(Self::Manager),
            "uplink" => Ok(Self::Link { rack: spec.racks - 1, spine: spec.spines - 1 }),
            name => match boxes().find(|number| spec.box_name(*number) == name) {
                Some(number) => Ok(Self::Box(number)),
                None => {
                    let names: Vec<String> = boxes().map(|number| spec.box_name(number)).collect();
                    bail!("--fail {name}: choose manager, uplink, {}", names.join(", "))
                }
            },
        }
    }

    /// Descriptions of the failure and of its end.
    pub fn words(self, spec: &LabSpec) -> [String; 2] {
        let (what, [happens, over]) = match self {
            Self::Manager => ("the manager".to_owned(), ["is killed", "is started again"]),
            Self::Box(number) => {
                (format!("netsum on {}", spec.box_name(number)), ["is killed", "is started again"])
            }
            Self::Link { rack, spine } => {
                let (leaf, spine) = (spec.box_name(Some(rack)), spec.box_name(spec.spine(spine)));
                (format!("the link between {leaf} and {spine}"), ["is cut", "is up again"])
            }
        };
        [happens, over].map(|verb| format!("{what} {verb}"))
    }
}

/// The times of a victim's failure and recovery.
pub struct Plan {
    pub victim: Victim,
    at: usize,
    pub failed: Option<Instant>,
    pub recovered: Option<Instant>,
}

/// The action that is due.
#[derive(Debug, PartialEq)]
pub enum DueAction {
    Fail,
    Recover,
}

impl Plan {
    pub fn new(victim: Victim, steps: usize) -> Self {
        Self { victim, at: (AFTER * steps as f64) as usize, failed: None, recovered: None }
    }

    /// Returns the action that is due after `steps` steps; call it repeatedly.
    pub fn due(&mut self, steps: usize, now: Instant) -> Option<DueAction> {
        match (self.failed, self.recovered) {
            (None, _) if steps >= self.at => {
                self.failed = Some(now);
                Some(DueAction::Fail)
            }
            (Some(failed), None) if now >= failed + LASTS => {
                self.recovered = Some(now);
                Some(DueAction::Recover)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> LabSpec {
        LabSpec { racks: 2, spines: 2, ..LabSpec::hosts(4) }
    }

    #[test]
    fn victims_are_read_and_named() {
        for (text, words) in [
            ("manager", "the manager is killed"),
            ("uplink", "the link between leaf1 and spine1 is cut"),
            ("spine0", "netsum on spine0 is killed"),
            ("spine1", "netsum on spine1 is killed"),
            ("leaf1", "netsum on leaf1 is killed"),
        ] {
            assert_eq!(Victim::parse(text, &spec()).unwrap().words(&spec())[0], words);
        }
        let error = Victim::parse("leaf2", &spec()).unwrap_err().to_string();
        assert_eq!(error, "--fail leaf2: choose manager, uplink, leaf0, leaf1, spine1, spine0");
    }

    #[test]
    fn a_failure_happens_once_and_ends_after_its_time() {
        let start = Instant::now();
        let mut plan = Plan::new(Victim::Manager, 440);
        assert_eq!(plan.due(109, start), None);
        assert_eq!(plan.due(110, start), Some(DueAction::Fail));
        assert_eq!(plan.due(111, start + LASTS / 2), None);
        assert_eq!(plan.due(112, start + LASTS), Some(DueAction::Recover));
        assert_eq!(plan.due(113, start + 2 * LASTS), None);
    }
}
