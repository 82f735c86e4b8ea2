//! `netsum check`: looks at a machine before the first start, and says what is wrong and how to mend it.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`judge`] | what follows from the facts; pure |
//! | [`gather`](mod@gather) | the facts: kernel, bpffs, bridge, ports |
//! | [`device`] | what a driver says of its interface: ethtool and netdev netlink |

pub mod device;
pub mod gather;
pub mod judge;

use std::io::Write;
use std::path::Path;

use schemars::JsonSchema;
use serde::Serialize;

use crate::cli::failure::{Failure, Kind, Result};
use crate::cli::layout::{self, BAD, Entry, FAIR, GOOD, NAME, plain, styled};
use crate::cli::print::Format;
use crate::config::{Config, Ports};

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
pub struct Report {
    /// The worst of all findings.
    pub level: Level,
    /// Each.
    pub findings: Vec<Finding>,
}

/// Looks at this machine, and at the ports of a configuration or a bridge; prints what it finds.
///
/// # Errors
/// If anything would keep netsum from working. That has been printed.
pub async fn run(
    out: &mut impl Write,
    format: Format,
    config: Option<&Path>,
    bridge: Option<String>,
) -> Result<()> {
    let config = config.map(Config::read).transpose();
    let mut findings = Vec::new();
    let ports = match (&config, bridge) {
        (Ok(Some(config)), _) => Some(config.ports.clone()),
        (_, bridge) => bridge.map(Ports::Bridge),
    };
    if let Err(e) = &config {
        findings.push(Finding {
            level: Level::Error,
            subject: "configuration".into(),
            found: e.to_string(),
            mend: Some("see netsum.example.toml".into()),
        });
    }
    let facts = gather::gather(config.as_ref().ok().and_then(Option::as_ref), ports.as_ref()).await?;
    findings.extend(judge::judge(&facts));
    let level = findings.iter().map(|f| f.level).max().unwrap_or(Level::Ok);
    let report = Report { level, findings };
    if !format.json(out, &report)? {
        print(out, &report)?;
    }
    if level == Level::Error { Err(Failure::new(Kind::Failed, "")) } else { Ok(()) }
}

fn print(out: &mut impl Write, report: &Report) -> Result<()> {
    let entry = |f: &Finding| {
        let level = match f.level {
            Level::Ok => styled("ok", GOOD),
            Level::Warning => styled("warning", FAIR),
            Level::Error => styled("error", BAD),
        };
        let mut entry = Entry::new(vec![level, styled(format!("{}:", f.subject), NAME), plain(&f.found)]);
        if let Some(mend) = &f.mend {
            entry.attributes(0, vec![plain(mend)]);
        }
        entry
    };
    layout::print(out, &report.findings.iter().map(entry).collect::<Vec<_>>())?;
    let count = |level| report.findings.iter().filter(|f| f.level == level).count();
    let (errors, warnings) = (count(Level::Error), count(Level::Warning));
    writeln!(out, "{} looked at, {errors} errors, {warnings} warnings", report.findings.len())?;
    Ok(())
}
