//! What `netsum check` prints.

use std::io::Write;

use schemars::JsonSchema;
use serde::Serialize;

use super::failure::Result;
use super::format::Format;
use super::layout::{self, BAD, Entry, FAIR, GOOD, NAME, plain, styled};

/// Severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Correct.
    Ok,
    /// It works, but could be better; or it could not be determined.
    Warning,
    /// netsum will not start, or not sum.
    Error,
}

/// A finding.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct Finding {
    /// Severity.
    pub level: Level,
    /// Subject.
    pub subject: String,
    /// The finding.
    pub found: String,
    /// How to fix it; null if nothing is wrong.
    pub hint: Option<String>,
}

/// The findings on a machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct CheckReport {
    /// The worst level of all findings.
    pub level: Level,
    /// All findings.
    pub findings: Vec<Finding>,
}

/// Prints the findings.
pub fn print(out: &mut impl Write, format: Format, report: &CheckReport) -> Result<()> {
    if format.json(out, report)? {
        return Ok(());
    }
    let entry = |f: &Finding| {
        let level = match f.level {
            Level::Ok => styled("ok", GOOD),
            Level::Warning => styled("warning", FAIR),
            Level::Error => styled("error", BAD),
        };
        let mut entry =
            Entry::new(vec![level, styled(format!("{}:", f.subject), NAME), plain(&f.found)]);
        if let Some(hint) = &f.hint {
            entry.attributes(0, vec![plain(hint)]);
        }
        entry
    };
    layout::print(out, &report.findings.iter().map(entry).collect::<Vec<_>>())?;
    let count = |level| report.findings.iter().filter(|f| f.level == level).count();
    let (errors, warnings) = (count(Level::Error), count(Level::Warning));
    writeln!(out, "{} checked, {errors} errors, {warnings} warnings", report.findings.len())?;
    Ok(())
}
