//! Nanoseconds of each path through the programs, by repeating one packet.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use netsum_common::abi::{
    MAX_CAPTURE, MAX_FLOAT_MTU, RingConfig, TRACE_BUFFER_BYTES, TraceFilter, ring_flags,
};
use netsum_common::float::LSB_DEFAULT;
use netsum_dataplane::DataPlane as _;
use serde::Serialize;

use super::{DEFAULT_RANKS, Settings, flows, gbps};
use netsum_lab::frames::{FrameSpec, floats, lanes};
use netsum_lab::programs::{BASE_PSN, Bench, DROP, PASS, REDIRECT, host, qpn, ring};

/// The benchmark's programs in the object.
pub const PROGRAMS: &[&str] = &[
    "bench_empty",
    "bench_copy",
    "bench_sum",
    "bench_crc",
    "bench_reset",
    "bench_restore",
    "bench_keep",
    "bench_fill",
    "bench_ingress",
    "bench_claim",
    "bench_absorb",
    "bench_absorb_timed",
    "bench_complete",
    "bench_replay",
    "bench_egress",
];

/// Work of a run that is subtracted from its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Base {
    /// Nothing is subtracted.
    Nothing,
    /// The test run itself.
    Empty,
    /// Resetting the slot.
    Slot,
    /// Resetting the slot and the packet.
    SlotAndPacket,
}

/// A path: its name, its description, and the work that is subtracted.
const PATHS: &[(&str, &str, Base)] = &[
    ("empty", "an empty program, not subtracted", Base::Nothing),
    ("copy", "part: copy payload to slot", Base::Empty),
    ("sum", "part: add payload to slot", Base::Empty),
    ("crc", "part: CRC of payload", Base::Empty),
    ("reset", "resetting the slot", Base::Empty),
    ("restore", "resetting slot and packet", Base::Empty),
    ("ingress", "ingress: steer", Base::Empty),
    ("pass", "ingress: pass, not a flow", Base::Empty),
    ("guard", "guard: a packet that ingress passed", Base::Empty),
    ("absorb/ignore", "absorb, ICRC not verified", Base::Slot),
    ("absorb/verify", "absorb, ICRC verified", Base::Slot),
    ("timed/verify", "the same, timed (one index in 64)", Base::Slot),
    ("complete/ignore", "complete, ICRC not verified", Base::SlotAndPacket),
    ("complete/verify", "complete, ICRC verified", Base::SlotAndPacket),
    ("absorb/float", "absorb f32, ICRC verified", Base::Slot),
    ("complete/float", "complete f32, ICRC verified", Base::SlotAndPacket),
    ("replay/ignore", "replay, ICRC not verified", Base::SlotAndPacket),
    ("replay/verify", "replay, ICRC verified", Base::SlotAndPacket),
    ("egress", "egress of one clone", Base::Empty),
    ("ingress/traced", "ingress: steer, traced", Base::Empty),
    ("absorb/other", "absorb, another ring traced", Base::Slot),
    ("absorb/traced", "absorb, traced with its headers", Base::Slot),
    ("absorb/whole", "absorb, traced as a whole", Base::Slot),
    ("absorb/full", "absorb, event buffer full", Base::Slot),
];

/// The paths that packets of this size can take.
fn paths(mtu: u32) -> impl Iterator<Item = (&'static str, &'static str, Base)> {
    PATHS.iter().copied().filter(move |(path, ..)| !is_float(path) || mtu <= MAX_FLOAT_MTU)
}

fn is_float(path: &str) -> bool {
    path.ends_with("/float")
}

/// The number of runs whose events fit the ring buffer: events of headers, and of whole frames.
const REPEAT_TRACED: u32 = TRACE_BUFFER_BYTES / 256;
const REPEAT_WHOLE: u32 = TRACE_BUFFER_BYTES / 4096;

/// The cost of a path.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub path: &'static str,
    pub what: &'static str,
    /// Path MTU, and the packet's payload.
    pub mtu: u32,
    /// Mean ns of a run in the best round.
    pub run_ns: f64,
    /// The same without the test run, and without resetting what a run changes.
    pub ns: f64,
    /// Packets per second at that time, in millions.
    pub mpps: f64,
    /// Payload at that time, in Gb/s.
    pub gbps: f64,
}

/// The cost of a contribution on its ring's CPU, compared with the sum of its parts measured alone:
/// finding its flow (ingress does little else), the CRC, the addition.
#[derive(Clone, Debug, Serialize)]
pub struct Parts {
    pub mtu: u32,
    /// ns of an absorbed contribution, ICRC verified.
    pub absorb_ns: f64,
    pub parts_ns: f64,
    /// `absorb_ns` divided by the sum of the parts.
    pub ratio: f64,
    /// The same without the CRC, on both sides.
    pub ratio_without_icrc: f64,
}

/// Mean ns of a run in the best round, by path.
pub(super) type Runs = BTreeMap<&'static str, f64>;

pub(super) fn measure(bench: &mut Bench, settings: &Settings) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &mtu in &settings.mtus {
        let mut runs = Runs::new();
        for round in 0..settings.rounds {
            for (path, ..) in paths(mtu) {
                let at = Point { ranks: DEFAULT_RANKS, mtu, repeat: settings.repeat };
                let ns =
                    run(bench, path, &at).with_context(|| format!("{path}, path MTU {mtu}"))?;
                note(&mut runs, path, ns, round);
            }
        }
        rows.extend(paths(mtu).map(|(path, what, base)| {
            let ns = match base {
                Base::Nothing => runs[path],
                Base::Empty => runs[path] - runs["empty"],
                Base::Slot => runs[path] - runs["reset"],
                Base::SlotAndPacket => runs[path] - runs["restore"],
            };
            Row {
                path,
                what,
                mtu,
                run_ns: runs[path],
                ns,
                mpps: 1e3 / ns,
                gbps: gbps(mtu.into(), ns),
            }
        }));
    }
    Ok(rows)
}

/// Keeps the best round; the first only warms up.
pub(super) fn note(runs: &mut Runs, path: &'static str, ns: f64, round: usize) {
    let least = runs.entry(path).or_insert(f64::MAX);
    if round > 0 {
        *least = least.min(ns);
    }
}

/// Contributions compared with their parts, by path MTU.
pub fn parts(rows: &[Row]) -> Vec<Parts> {
    let of = |path: &str, mtu| rows.iter().find(|r| (r.path, r.mtu) == (path, mtu)).map(|r| r.ns);
    let parts = |mtu| {
        let (crc, others) = (of("crc", mtu)?, of("ingress", mtu)? + of("sum", mtu)?);
        let (verify, ignore) = (of("absorb/verify", mtu)?, of("absorb/ignore", mtu)?);
        Some(Parts {
            mtu,
            absorb_ns: verify,
            parts_ns: others + crc,
            ratio: verify / (others + crc),
            ratio_without_icrc: ignore / others,
        })
    };
    rows.iter().filter(|r| r.path == "empty").filter_map(|r| parts(r.mtu)).collect()
}

/// The conditions of a measurement.
pub(super) struct Point {
    pub ranks: u32,
    pub mtu: u32,
    pub repeat: u32,
}

/// Mean ns of one run of a path.
pub(super) fn run(bench: &mut Bench, path: &'static str, at: &Point) -> Result<f64> {
    let mut spec = ring(at.ranks, at.mtu, 16);
    if path.ends_with("/ignore") {
        spec.config.flags = ring_flags::ICRC_IGNORE;
    }
    if is_float(path) {
        (spec.config.flags, spec.config.lsb) = (ring_flags::FLOAT, LSB_DEFAULT);
    }
    let timed = path == "timed/verify";
    // Changing maps waits for all CPUs, tens of milliseconds each; changing flags does not.
    let kind = |config: &RingConfig| (config.members, config.mtu, config.sum_bytes());
    if kind(&spec.config) == kind(&bench.ring.config) {
        if spec != bench.ring || timed {
            bench.reset(spec)?;
        }
    } else {
        let flows = flows(&spec);
        bench.restart(spec, &flows)?;
    }
    let psn = if timed { BASE_PSN - 1 } else { BASE_PSN };
    let frame = |rank: u32| {
        let to = host((rank + 1) % at.ranks);
        let count = at.mtu as usize / 4;
        let payload = if is_float(path) { floats(rank, count, false) } else { lanes(rank, count) };
        FrameSpec::send(host(rank), to, qpn(rank), psn, payload)
    };
    let data = frame(0).build();
    // The others' contributions open the slot and leave headers for egress. Rank 0's payload is
    // kept for programs that restore it; its headers are saved below, by a contribution that
    // completes the slot.
    let fill = |bench: &mut Bench| -> Result<()> {
        bench.run("bench_keep", &data)?;
        for rank in (1..at.ranks).chain([0]) {
            bench.run("bench_fill", &frame(rank).build())?;
        }
        Ok(())
    };
    let (kind, _) = path.split_once('/').unwrap_or((path, ""));
    let (program, action) = match kind {
        "pass" | "guard" => {
            let mut other = frame(0);
            other.bth.qpn = 0x0055_5555;
            if kind == "guard" {
                let (passes, duration) = bench.guard(&other.build(), at.repeat)?;
                ensure!(passes, "`guard` drops a packet of other traffic");
                return Ok(duration.as_nanos() as f64);
            }
            return repeat(bench, path, "bench_ingress", &other.build(), PASS, at.repeat);
        }
        "ingress" => ("bench_ingress", REDIRECT),
        "crc" => return Ok(bench.repeat("bench_crc", &data, at.repeat)?.duration.as_nanos() as f64),
        "empty" => ("bench_empty", DROP),
        "copy" => ("bench_copy", DROP),
        "sum" => ("bench_sum", DROP),
        "reset" => ("bench_reset", DROP),
        "restore" => ("bench_restore", DROP),
        "claim" => ("bench_claim", DROP),
        "absorb" => ("bench_absorb", DROP),
        "timed" => ("bench_absorb_timed", DROP),
        "complete" => ("bench_complete", REDIRECT),
        "replay" => ("bench_replay", REDIRECT),
        "egress" => ("bench_egress", PASS),
        other => anyhow::bail!("unknown path `{other}`"),
    };
    if !matches!(kind, "empty" | "copy" | "sum" | "ingress") {
        fill(bench)?;
    }
    let late = bench.plane.timing(bench.ring.id)?.ranks[0].late.count();
    let ns = repeat(bench, path, program, &data, action, at.repeat)?;
    if timed {
        let timed = bench.plane.timing(bench.ring.id)?.ranks[0].late.count() - late;
        ensure!(timed >= u64::from(at.repeat), "{timed} packets were timed");
    }
    Ok(ns)
}

/// Repeats a program with tracing as the path needs it; returns the mean ns of a run.
fn repeat(
    bench: &mut Bench,
    path: &str,
    program: &str,
    packet: &[u8],
    action: u32,
    times: u32,
) -> Result<f64> {
    let (filter, times) = match path {
        "ingress/traced" | "absorb/traced" => (Some(TraceFilter::ALL), times.min(REPEAT_TRACED)),
        "absorb/whole" => (
            Some(TraceFilter { capture: MAX_CAPTURE as u32, ..TraceFilter::ALL }),
            times.min(REPEAT_WHOLE),
        ),
        "absorb/other" => {
            (Some(TraceFilter { rings: [1 << 7, 0, 0, 0], ..TraceFilter::ALL }), times)
        }
        "absorb/full" => (Some(TraceFilter::ALL), times),
        _ => (None, times),
    };
    // Off first, to start with an empty buffer.
    bench.plane.trace(None)?;
    if let Some(filter) = &filter {
        bench.plane.trace(Some(filter))?;
    }
    if path == "absorb/full" {
        bench.repeat(program, packet, 2 * REPEAT_TRACED)?;
    }
    let lost = bench.plane.trace_lost()?;
    let out = bench.repeat(program, packet, times)?;
    let lost = bench.plane.trace_lost()? - lost;
    ensure!((lost > 0) == (path == "absorb/full"), "{lost} of {times} events were lost");
    bench.plane.trace(None)?;
    ensure!(
        out.action == action,
        "verdict {} instead of {action}: {:?}",
        out.action,
        bench.counters()?
    );
    Ok(out.duration.as_nanos() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(path: &'static str, mtu: u32, ns: f64) -> Row {
        Row { path, what: "", mtu, run_ns: ns, ns, mpps: 1e3 / ns, gbps: gbps(mtu.into(), ns) }
    }

    #[test]
    fn a_contribution_is_compared_with_its_parts() {
        let mut rows =
            vec![row("empty", 1024, 20.0), row("ingress", 1024, 50.0), row("crc", 1024, 130.0)];
        rows.extend([row("sum", 1024, 70.0), row("absorb/verify", 1024, 300.0)]);
        assert!(parts(&rows).is_empty(), "the CRC is missing");
        rows.push(row("absorb/ignore", 1024, 150.0));
        let parts = parts(&rows);
        assert_eq!((parts.len(), parts[0].parts_ns, parts[0].ratio), (1, 250.0, 1.2));
        assert_eq!(parts[0].ratio_without_icrc, 1.25);
    }

    #[test]
    fn the_first_round_does_not_count() {
        let mut runs = Runs::new();
        for (round, ns) in [1.0, 30.0, 20.0].into_iter().enumerate() {
            note(&mut runs, "x", ns, round);
        }
        assert_eq!(runs["x"], 20.0);
    }

    #[test]
    fn paths_have_names_of_their_own() {
        let names: std::collections::BTreeSet<_> = PATHS.iter().map(|p| p.0).collect();
        assert_eq!(names.len(), PATHS.len());
    }
}
