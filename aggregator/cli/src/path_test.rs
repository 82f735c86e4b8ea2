//! `netsum path`, as text and JSON.

use std::io::Write;

use netsum_api::v1 as api;
use schemars::JsonSchema;
use serde::Serialize;

use super::diagnosis::Finding;
use super::failure::Result;
use super::format::Format;
use super::layout::{BAD, NAME};

/// Whether packets get through between a job's ranks.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PathTest {
    /// The job.
    pub job: String,
    /// Its ranks, in the order of the ring; none unless they are netsum's and active.
    pub ranks: Vec<Rank>,
    /// Likely causes of losses, the most likely first.
    pub findings: Vec<Finding>,
}

/// A rank's path to the next one.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Rank {
    /// The rank.
    pub rank: u32,
    /// The rank that it sends to.
    pub next: u32,
    /// Interface at which its packets arrive.
    pub port: String,
    /// Its packet of the path MTU was acknowledged.
    pub acknowledged: bool,
    /// Data packets that have arrived to be summed, modulo 2^32.
    pub packets: u32,
    /// Those of them that were refused.
    pub refused: u32,
}

/// Prints it.
pub fn path_test(out: &mut impl Write, format: Format, d: api::Diagnosis) -> Result<()> {
    let rank = |r: api::RankPathTest| {
        let api::RankPathTest { rank, next, port, acknowledged, packets, refused } = r;
        Rank { rank, next, port, acknowledged, packets, refused }
    };
    let test = PathTest {
        job: d.job,
        ranks: d.path_test.into_iter().map(rank).collect(),
        findings: d.findings.into_iter().map(Finding::from).collect(),
    };
    if format.json(out, &test)? {
        return Ok(());
    }
    writeln!(out, "{NAME}{}:{NAME:#} {} ranks tested", test.job, test.ranks.len())?;
    for Rank { rank, next, port, acknowledged, packets, refused } in &test.ranks {
        let to_next = if *acknowledged { "acknowledged" } else { "NOT acknowledged" };
        writeln!(
            out,
            "\trank {rank} by {port}: full packet to rank {next} {to_next}  to be summed \
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
