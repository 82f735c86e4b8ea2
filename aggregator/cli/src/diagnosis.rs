//! `netsum diagnose`, as text and JSON.

use std::collections::BTreeMap;
use std::io::Write;

use netsum_api::v1 as api;
use schemars::JsonSchema;
use serde::Serialize;

use super::failure::Result;
use super::format::Format;
use super::layout::{BAD, FAIR, NAME};
use super::view::State;

/// Why a job is stalled.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Diagnosis {
    /// The job.
    pub job: String,
    /// Its state.
    pub state: State,
    /// Ranks.
    pub ranks: u32,
    /// Its rings, while it is active.
    pub rings: Vec<Ring>,
    /// Findings, the most likely cause first.
    pub findings: Vec<Finding>,
    /// Dropped packets of the job, by reason; only reasons that are not zero.
    pub drops: BTreeMap<String, u64>,
}

/// A ring of the job.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Ring {
    /// Ring of the job, from 0.
    pub ring: u32,
    /// The lowest index that has not been released.
    pub low: u32,
    /// Ranks that have not contributed to it.
    pub missing: Vec<u32>,
    /// Milliseconds that it has been stalled with something pending; null if nothing is pending.
    pub stalled_ms: Option<u64>,
    /// Fragments that a rank may send beyond `low`.
    pub credit: u32,
    /// Its ranks.
    pub ranks: Vec<Rank>,
}

/// A rank of a ring.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Rank {
    /// The rank.
    pub rank: u32,
    /// It has not contributed to the lowest unreleased index.
    pub missing: bool,
    /// Interface at which its packets arrive.
    pub port: String,
    /// The port is up.
    pub port_up: bool,
    /// The index behind its last contiguous fragment.
    pub expected: u32,
    /// PSN of that index.
    pub expected_psn: u32,
    /// Fragments that it has sent beyond what has been released.
    pub credit_used: u32,
    /// Data packets received, modulo 2^32.
    pub packets: u32,
    /// How many of them were refused.
    pub refused: u32,
    /// PSN of the last one; null before the first.
    pub last_psn: Option<u32>,
    /// The counter of its outcome; empty before the first.
    pub last_verdict: String,
    /// Milliseconds since it arrived; null if unknown.
    pub last_ms: Option<u64>,
    /// Milliseconds since its process's last heartbeat; null for applications that do not use
    /// netsum's library.
    pub heartbeat_ms: Option<u64>,
}

/// A finding.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Finding {
    /// The ring in question.
    pub ring: Option<u32>,
    /// The rank in question.
    pub rank: Option<u32>,
    /// The finding, as text.
    pub what: String,
    /// The next step.
    pub next: String,
}

impl From<api::RankDiagnosis> for Rank {
    fn from(r: api::RankDiagnosis) -> Self {
        Self {
            rank: r.rank,
            missing: r.missing,
            port: r.port,
            port_up: r.port_up,
            expected: r.expected,
            expected_psn: r.expected_psn,
            credit_used: r.credit_used,
            packets: r.packets,
            refused: r.refused,
            last_psn: r.last_psn,
            last_verdict: r.last_verdict,
            last_ms: r.last_ms,
            heartbeat_ms: r.heartbeat_ms,
        }
    }
}

impl From<api::Finding> for Finding {
    fn from(f: api::Finding) -> Self {
        Self { ring: f.ring, rank: f.rank, what: f.what, next: f.next }
    }
}

impl From<api::Diagnosis> for Diagnosis {
    fn from(d: api::Diagnosis) -> Self {
        let state = d.state().into();
        let ring = |r: api::RingDiagnosis| Ring {
            ring: r.ring,
            low: r.low,
            missing: r.missing,
            stalled_ms: r.stalled_ms,
            credit: r.credit,
            ranks: r.ranks.into_iter().map(Rank::from).collect(),
        };
        Self {
            job: d.job,
            state,
            ranks: d.ranks,
            rings: d.rings.into_iter().map(ring).collect(),
            findings: d.findings.into_iter().map(Finding::from).collect(),
            drops: d.drops.into_iter().map(|c| (c.name, c.value)).collect(),
        }
    }
}

fn ago(ms: u64) -> String {
    format!("{:.1} s ago", ms as f64 / 1000.0)
}

fn rank_line(out: &mut impl Write, r: &Rank, credit: u32) -> Result<()> {
    let missing = if r.missing { "missing, " } else { "" };
    let up = if r.port_up { "up" } else { "down" };
    write!(
        out,
        "\trank {}: {missing}next index {} (PSN {:#x})  credit {}/{credit}  {} {up}  packets {}",
        r.rank, r.expected, r.expected_psn, r.credit_used, r.port, r.packets
    )?;
    if r.refused > 0 {
        write!(out, " ({} refused)", r.refused)?;
    }
    if let Some(psn) = r.last_psn {
        let when = r.last_ms.map_or_else(|| "before the watch".into(), ago);
        write!(out, "  last PSN {psn:#x}, {}, {when}", r.last_verdict)?;
    }
    if let Some(ms) = r.heartbeat_ms {
        write!(out, "  heartbeat {}", ago(ms))?;
    }
    writeln!(out)?;
    Ok(())
}

/// Prints a diagnosis.
pub fn diagnosis(out: &mut impl Write, format: Format, d: api::Diagnosis) -> Result<()> {
    let d = Diagnosis::from(d);
    if format.json(out, &d)? {
        return Ok(());
    }
    writeln!(out, "{NAME}{}:{NAME:#} {}  ranks {}", d.job, d.state.name(), d.ranks)?;
    for r in &d.rings {
        match r.stalled_ms {
            Some(ms) => {
                let missing: Vec<String> = r.missing.iter().map(u32::to_string).collect();
                let ranks = if missing.is_empty() { "none".into() } else { missing.join(" ") };
                let time = ms as f64 / 1000.0;
                writeln!(
                    out,
                    "ring {}: index {} waits for {time:.1} s  missing ranks {ranks}",
                    r.ring, r.low
                )?;
            }
            None => writeln!(out, "ring {}: nothing is pending at index {}", r.ring, r.low)?,
        }
        r.ranks.iter().try_for_each(|rank| rank_line(out, rank, r.credit))?;
    }
    if !d.drops.is_empty() {
        let drops: Vec<String> =
            d.drops.iter().map(|(name, value)| format!("{name} {value}")).collect();
        writeln!(out, "{FAIR}dropped:{FAIR:#} {}", drops.join("  "))?;
    }
    for f in &d.findings {
        let place = match (f.ring, f.rank) {
            (Some(ring), Some(rank)) => format!("ring {ring} rank {rank}: "),
            (None, Some(rank)) => format!("rank {rank}: "),
            (Some(ring), None) => format!("ring {ring}: "),
            (None, None) => String::new(),
        };
        writeln!(out, "{BAD}*{BAD:#} {place}{}", f.what)?;
        writeln!(out, "  next: {}", f.next)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> api::Diagnosis {
        let rank = |rank: u32, missing: bool| api::RankDiagnosis {
            rank,
            port: format!("port{rank}"),
            port_up: true,
            expected: 5 + u32::from(!missing),
            expected_psn: 0x105 + u32::from(!missing),
            credit_used: u32::from(!missing),
            packets: 6,
            refused: u32::from(missing),
            last_psn: Some(0x105),
            last_verdict: if missing { "rx_icrc_encapsulated" } else { "contributions" }.into(),
            last_ms: (!missing).then_some(1234),
            heartbeat_ms: Some(300),
            missing,
        };
        let drop = api::Counter {
            name: "rx_icrc_encapsulated".into(),
            value: 1,
            kind: "drop".into(),
            ..Default::default()
        };
        api::Diagnosis {
            job: "train".into(),
            state: api::JobState::Active.into(),
            ranks: 2,
            rings: vec![api::RingDiagnosis {
                ring: 0,
                low: 5,
                missing: vec![1],
                stalled_ms: Some(61_500),
                credit: 128,
                ranks: vec![rank(0, false), rank(1, true)],
            }],
            findings: vec![api::Finding {
                ring: Some(0),
                rank: Some(1),
                what: "its packets have a wrong ICRC".into(),
                next: "find what changes packets".into(),
                behind: String::new(),
                idle: false,
            }],
            drops: vec![drop],
            path_test: Vec::new(),
        }
    }

    fn text(format: Format) -> String {
        let mut out = anstream::StripStream::new(Vec::new());
        diagnosis(&mut out, format, example()).unwrap();
        String::from_utf8(out.into_inner()).unwrap()
    }

    #[test]
    fn a_diagnosis_as_text() {
        insta::assert_snapshot!(text(Format::Text));
    }

    #[test]
    fn a_diagnosis_as_json() {
        insta::assert_snapshot!(text(Format::Pretty));
    }
}
