//! `netsum path`, as text and JSON.

use std::io::Write;

use netsum_api::v1 as api;
use schemars::JsonSchema;
use serde::Serialize;

use super::failure::Result;
use super::format::Format;
use super::layout::{BAD, NAME};

/// Whether packets get through between a job's ranks.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PathTest {
    /// The job.
    pub job: String,
    /// Its ranks, in the order of the ring; none unless they are netsum's and active.
    pub ranks: Vec<api::RankPathTest>,
    /// Likely causes of losses, the most likely first.
    pub findings: Vec<api::Finding>,
}

/// Prints it.
pub fn path_test(out: &mut impl Write, format: Format, d: api::Diagnosis) -> Result<()> {
    let test = PathTest { job: d.job, ranks: d.path_test, findings: d.findings };
    if format.json(out, &test)? {
        return Ok(());
    }
    writeln!(out, "{NAME}{}:{NAME:#} {} ranks tested", test.job, test.ranks.len())?;
    for api::RankPathTest { rank, next, port, acknowledged, packets, refused } in &test.ranks {
        let to_next = if *acknowledged { "acknowledged" } else { "NOT acknowledged" };
        let by = if port.is_empty() { String::new() } else { format!(" by {port}") };
        writeln!(
            out,
            "\trank {rank}{by}: full packet to rank {next} {to_next}  to be summed \
             {packets} ({refused} refused)"
        )?;
    }
    for f in &test.findings {
        let rank = f.rank.map(|rank| format!("rank {rank}: ")).unwrap_or_default();
        writeln!(out, "{BAD}*{BAD:#} {rank}{}", f.what)?;
        writeln!(out, "  next: {}", f.next)?;
    }
    Ok(())
}
