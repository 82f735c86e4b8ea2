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
    pub rings: Vec<api::RingDiagnosis>,
    /// Findings, the most likely cause first.
    pub findings: Vec<api::Finding>,
    /// Dropped packets of the job, by reason; only reasons that are not zero.
    pub drops: BTreeMap<String, u64>,
}

impl From<api::Diagnosis> for Diagnosis {
    fn from(d: api::Diagnosis) -> Self {
        let state = d.state().into();
        Self {
            job: d.job,
            state,
            ranks: d.ranks,
            rings: d.rings,
            findings: d.findings,
            drops: d.drops.into_iter().map(|c| (c.name, c.value)).collect(),
        }
    }
}

fn ago(ms: u64) -> String {
    format!("{:.1} s ago", ms as f64 / 1000.0)
}

fn rank_line(out: &mut impl Write, r: &api::RankDiagnosis, credit: u32) -> Result<()> {
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
                    "ring {}: stalled at index {} for {time:.1} s  missing ranks {ranks}",
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
