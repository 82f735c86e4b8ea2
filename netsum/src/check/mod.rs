//! `netsum check`: inspects a machine before the first start, and reports faults with hints.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`judge`] | judges the facts; pure |
//! | [`gather`](mod@gather) | the facts: kernel, bpffs, bridge, ports |

pub mod gather;
pub mod judge;

use std::io::Write;
use std::path::Path;

use netsum_agent::config::{Config, Ports};
use netsum_cli::check::{CheckReport, Finding, Level, print};
use netsum_cli::failure::{Failure, Kind, Result};
use netsum_cli::format::Format;

/// Inspects this machine, and the ports of a configuration or a bridge; prints the findings.
///
/// # Errors
/// If a finding keeps netsum from working. It has been printed.
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
            hint: Some("the comments in /etc/netsum/netsum.toml, as installed, explain it".into()),
        });
    }
    let facts =
        gather::gather(config.as_ref().ok().and_then(Option::as_ref), ports.as_ref()).await?;
    findings.extend(judge::judge(&facts));
    let level = findings.iter().map(|f| f.level).max().unwrap_or(Level::Ok);
    let report = CheckReport { level, findings };
    print(out, format, &report)?;
    if level == Level::Error { Err(Failure::new(Kind::Failed, "")) } else { Ok(()) }
}
