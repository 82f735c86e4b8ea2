//! Adds up the reports of test programs, and prints the table.

use std::iter::Sum;
use std::time::Duration;

/// The reason for tests that were left out on purpose.
pub const NOT_ASKED_FOR: &str = "not asked for";

/// The report of a test program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub passed: u32,
    pub failed: u32,
    /// Tests that were not run.
    pub ignored: u32,
}

impl Counts {
    /// Parses the line `test result: ok. 3 passed; 0 failed; 1 ignored; ...` of libtest.
    pub fn parse(line: &str) -> Option<Self> {
        let rest = line.trim().strip_prefix("test result: ")?;
        let (_, counts) = rest.split_once(". ")?;
        let number = |word: &str| {
            let part = counts.split("; ").find(|part| part.ends_with(word))?;
            part.split(' ').next()?.parse().ok()
        };
        Some(Self {
            passed: number(" passed")?,
            failed: number(" failed")?,
            ignored: number(" ignored")?,
        })
    }
}

impl Sum for Counts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |a, b| Self {
            passed: a.passed + b.passed,
            failed: a.failed + b.failed,
            ignored: a.ignored + b.ignored,
        })
    }
}

#[derive(Default)]
struct Set {
    name: &'static str,
    passed: u32,
    failed: u32,
    skipped: u32,
    reasons: Vec<String>,
}

/// All sets of tests, in order of appearance.
#[derive(Default)]
pub struct Tally {
    sets: Vec<Set>,
    failures: Vec<String>,
}

impl Tally {
    fn set(&mut self, name: &'static str) -> &mut Set {
        let at = self.sets.iter().position(|set| set.name == name).unwrap_or_else(|| {
            self.sets.push(Set { name, ..Set::default() });
            self.sets.len() - 1
        });
        &mut self.sets[at]
    }

    /// Adds a program's report.
    pub fn add(&mut self, set: &'static str, counts: Counts) {
        let set = self.set(set);
        set.passed += counts.passed;
        set.failed += counts.failed;
        if counts.ignored > 0 {
            set.skipped += counts.ignored;
            set.reasons.push("marked #[ignore]".into());
        }
    }

    /// Adds a program's report, or its error.
    pub fn count(&mut self, set: &'static str, what: &str, counts: anyhow::Result<Counts>) {
        match counts {
            Ok(counts) => self.add(set, counts),
            Err(error) => self.fail(set, what, &format!("{error:#}")),
        }
    }

    /// Adds a failure that a program has not reported itself.
    pub fn fail(&mut self, set: &'static str, what: &str, why: &str) {
        println!("FAILED {what}: {why}");
        self.failures.push(format!("{what}: {}", why.lines().next().unwrap_or_default()));
        self.set(set).failed += 1;
    }

    /// Adds tests that could not be run.
    pub fn skip(&mut self, set: &'static str, tests: u32, reason: &str) {
        if tests == 0 {
            return;
        }
        println!("SKIP {set}: {reason}");
        let set = self.set(set);
        set.skipped += tests;
        let first_line = reason.lines().next().unwrap_or_default().to_owned();
        if !set.reasons.contains(&first_line) {
            set.reasons.push(first_line);
        }
    }

    /// Adds what another one has counted.
    pub fn extend(&mut self, other: Self) {
        for Set { name, passed, failed, skipped, reasons } in other.sets {
            let set = self.set(name);
            set.passed += passed;
            set.failed += failed;
            set.skipped += skipped;
            set.reasons.extend(reasons);
        }
        self.failures.extend(other.failures);
    }

    /// Whether there was no failure.
    pub fn is_success(&self) -> bool {
        self.sets.iter().all(|set| set.failed == 0)
    }

    /// Whether nothing ran except sets that were left out on purpose.
    pub fn is_empty(&self) -> bool {
        self.sets.iter().all(|set| set.passed + set.failed == 0 && set.reasons == [NOT_ASKED_FOR])
    }

    /// Prints the table; the last line is the total.
    pub fn print(&self, took: Duration) {
        println!("\n{:<22} {:>7} {:>7} {:>7}", "tests", "passed", "failed", "skipped");
        for set in &self.sets {
            let skip =
                set.reasons.iter().map(|reason| format!("  SKIP: {reason}")).collect::<String>();
            println!(
                "{:<22} {:>7} {:>7} {:>7}{skip}",
                set.name, set.passed, set.failed, set.skipped
            );
        }
        for failure in &self.failures {
            println!("FAILED {failure}");
        }
        println!("took {} s", took.as_secs());
        println!("{}", self.total());
    }

    fn total(&self) -> String {
        let sum = |of: fn(&Set) -> u32| self.sets.iter().map(of).sum::<u32>();
        format!(
            "{} passed, {} failed, {} skipped",
            sum(|s| s.passed),
            sum(|s| s.failed),
            sum(|s| s.skipped)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_libtest_are_read() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 7 filtered \
                    out; finished in 0.1s";
        assert_eq!(Counts::parse(line), Some(Counts { passed: 12, failed: 3, ignored: 1 }));
        for other in ["test result: ok.", "running 3 tests", "test x ... ok"] {
            assert_eq!(Counts::parse(other), None);
        }
    }

    #[test]
    fn the_total_counts_every_set_once() {
        let mut tally = Tally::default();
        tally.add("a", Counts { passed: 3, failed: 0, ignored: 1 });
        tally.add("a", Counts { passed: 2, failed: 0, ignored: 0 });
        tally.skip("b", 4, "no root");
        tally.skip("b", 0, "nothing");
        assert!(tally.is_success());
        assert_eq!(tally.total(), "5 passed, 0 failed, 5 skipped");
        tally.fail("c", "x", "why\nand more");
        assert!(!tally.is_success());
        assert_eq!(tally.total(), "5 passed, 1 failed, 5 skipped");
        let mut other = Tally::default();
        other.add("c", Counts { passed: 1, ..Counts::default() });
        other.extend(tally);
        assert_eq!(
            (other.total(), other.failures.len()),
            ("6 passed, 1 failed, 5 skipped".into(), 1)
        );
    }
}
