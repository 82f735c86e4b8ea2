//! `netsum diagnose`, as text and JSON.

use std::io::Write;

use anyhow::Result;
use netsum_api::v1 as api;
use serde_json::{Value, json};

use super::print::{Format, state_name};

fn rank_json(r: &api::RankDiagnosis) -> Value {
    json!({
        "rank": r.rank, "missing": r.missing, "port": r.port, "port_up": r.port_up, "expected": r.expected,
        "expected_psn": r.expected_psn, "credit_used": r.credit_used, "packets": r.packets, "refused": r.refused,
        "last_psn": r.last_psn, "last_outcome": r.last_outcome, "last_ms": r.last_ms,
        "heartbeat_ms": r.heartbeat_ms,
    })
}

fn ring_json(r: &api::RingDiagnosis) -> Value {
    json!({
        "ring": r.ring, "low": r.low, "missing": r.missing, "waits_ms": r.waits_ms, "credit": r.credit,
        "ranks": r.ranks.iter().map(rank_json).collect::<Vec<_>>(),
    })
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
        let when = r.last_ms.map_or_else(|| "before netsum looked".into(), ago);
        write!(out, "  last PSN {psn:#x}, {}, {when}", r.last_outcome)?;
    }
    if let Some(ms) = r.heartbeat_ms {
        write!(out, "  heartbeat {}", ago(ms))?;
    }
    writeln!(out)?;
    Ok(())
}

/// Prints a diagnosis.
pub fn diagnosis(out: &mut impl Write, format: Format, d: &api::Diagnosis) -> Result<()> {
    let finding =
        |f: &api::Finding| json!({ "ring": f.ring, "rank": f.rank, "what": f.what, "next": f.next });
    let value = || {
        json!({
            "job": d.job, "state": state_name(d.state()), "ranks": d.ranks,
            "rings": d.rings.iter().map(ring_json).collect::<Vec<_>>(),
            "findings": d.findings.iter().map(finding).collect::<Vec<_>>(),
            "drops": d.drops.iter().map(|c| (c.name.clone(), json!(c.value))).collect::<serde_json::Map<_, _>>(),
        })
    };
    if format.json(out, value)? {
        return Ok(());
    }
    writeln!(out, "{}: {}  ranks {}", d.job, state_name(d.state()), d.ranks)?;
    for r in &d.rings {
        match r.waits_ms {
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
        let drops: Vec<String> = d.drops.iter().map(|c| format!("{} {}", c.name, c.value)).collect();
        writeln!(out, "dropped: {}", drops.join("  "))?;
    }
    for f in &d.findings {
        let place = match (f.ring, f.rank) {
            (Some(ring), Some(rank)) => format!("ring {ring} rank {rank}: "),
            (None, Some(rank)) => format!("rank {rank}: "),
            (Some(ring), None) => format!("ring {ring}: "),
            (None, None) => String::new(),
        };
        writeln!(out, "* {place}{}", f.what)?;
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
            last_outcome: if missing { "rx_icrc_encapsulated" } else { "fragments" }.into(),
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
                waits_ms: Some(61_500),
                credit: 128,
                ranks: vec![rank(0, false), rank(1, true)],
            }],
            findings: vec![api::Finding {
                ring: Some(0),
                rank: Some(1),
                what: "its packets have a wrong ICRC".into(),
                next: "look for whatever changes packets".into(),
            }],
            drops: vec![drop],
        }
    }

    fn text(format: Format) -> String {
        let mut out = Vec::new();
        diagnosis(&mut out, format, &example()).unwrap();
        String::from_utf8(out).unwrap()
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
