//! What `netsum check` prints.

use std::io::Write;

use schemars::JsonSchema;
use serde::Serialize;

use super::failure::Result;
use super::format::Format;
use super::layout::{self, BAD, Entry, FAIR, GOOD, NAME, plain, styled};

/// How bad something is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// It works, but could be better; or it could not be found out.
    Warning,
    /// netsum will not start, or not sum.
    Error,
}

/// Something that was looked at.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What was looked at.
    pub subject: String,
    /// What was found.
    pub found: String,
    /// How to mend it; null where nothing has to be.
    pub mend: Option<String>,
}

/// What was found on a machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct Checkup {
    /// The worst of all findings.
    pub level: Level,
    /// Each.
    pub findings: Vec<Finding>,
}

/// Prints what was found.
pub fn print(out: &mut impl Write, format: Format, checkup: &Checkup) -> Result<()> {
    if format.json(out, checkup)? {
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
        if let Some(mend) = &f.mend {
            entry.attributes(0, vec![plain(mend)]);
        }
        entry
    };
    layout::print(out, &checkup.findings.iter().map(entry).collect::<Vec<_>>())?;
    let count = |level| checkup.findings.iter().filter(|f| f.level == level).count();
    let (errors, warnings) = (count(Level::Error), count(Level::Warning));
    writeln!(out, "{} looked at, {errors} errors, {warnings} warnings", checkup.findings.len())?;
    Ok(())
}
