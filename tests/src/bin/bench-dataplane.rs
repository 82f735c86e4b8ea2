//! Nanoseconds per packet of each way through the data plane, with BPF_PROG_TEST_RUN, beside an empty program and a plain
//! copy in the same run; and how many instructions the verifier went through.
//!
//! Every figure is the smallest mean of several rounds, the rounds of all programs interleaved, because the machines that
//! this runs on are noisy. `--json` prints the same for programs.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{Context, Result};
use netsum_aggregator::dataplane::{DataPlane as _, FlowSpec, RingSpec};
use netsum_common::abi::{EVENTS_BYTES, MAX_CAPTURE, TraceFilter};
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::programs::{BASE_PSN, Bench, flow, host, qpn, ring};

static OBJECT: &[u8] = aya::include_bytes_aligned!("../bench.bpf.o");

const ROUNDS: usize = 15;
const REPEAT: u32 = 20_000;
const MTUS: [u32; 4] = [256, 512, 1024, 2048];
/// Program, what it measures, and whether its slot is put back first.
const PATHS: &[(&str, &str, bool)] = &[
    ("bench_empty", "empty program", false),
    ("bench_copy", "part: copy payload to slot", false),
    ("bench_sum", "part: add payload to slot", false),
    ("bench_crc", "part: CRC of payload", false),
    ("bench_reset", "putting the slot back", false),
    ("bench_ingress", "ingress: steer", false),
    ("pass", "ingress: pass, not a flow", false),
    ("absorb/ignore", "absorb, ICRC not verified", true),
    ("absorb/verify", "absorb, ICRC verified", true),
    ("timed/verify", "the same, timed (one index in 64)", true),
    ("complete/verify", "complete, ICRC verified", true),
    ("replay/verify", "replay, ICRC verified", false),
    ("bench_egress", "egress of one clone", false),
    ("ingress/traced", "ingress: steer, traced", false),
    ("absorb/other", "absorb, another ring traced", true),
    ("absorb/traced", "absorb, traced with its headers", true),
    ("absorb/whole", "absorb, traced as a whole", true),
    ("absorb/full", "absorb, no room for the event", true),
];
/// Runs of which the ring buffer holds every event: of headers, and of whole frames.
const REPEAT_TRACED: u32 = EVENTS_BYTES / 256;
const REPEAT_WHOLE: u32 = EVENTS_BYTES / 2560;

/// Least mean ns over the rounds, by path and MTU.
type Figures = BTreeMap<(&'static str, u32), f64>;

fn main() -> ExitCode {
    match run(std::env::args().any(|a| a == "--json")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench-dataplane: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(json: bool) -> Result<()> {
    let mut figures = Figures::new();
    let programs = [
        "bench_empty",
        "bench_copy",
        "bench_sum",
        "bench_crc",
        "bench_reset",
        "bench_ingress",
        "bench_absorb",
        "bench_absorb_timed",
        "bench_complete",
        "bench_replay",
        "bench_egress",
    ];
    let ranks = 4;
    let spec = ring(ranks, 2048, 16);
    let flows = flows(&spec);
    let mut bench = Bench::with_object(OBJECT, &programs, spec, flows)?;
    for mtu in MTUS {
        for round in 0..ROUNDS {
            for &(path, _, _) in PATHS {
                let ns = measure(&mut bench, path, mtu).with_context(|| format!("{path}, path MTU {mtu}"))?;
                let least = figures.entry((path, mtu)).or_insert(f64::MAX);
                if round > 0 {
                    *least = least.min(ns);
                }
            }
        }
    }
    let mut instructions = BTreeMap::new();
    for name in ["ingress", "aggregate", "egress"] {
        let info = bench.plane.program(name)?.info()?;
        instructions.insert(
            name,
            (info.verified_instruction_count().unwrap_or(0), info.size_translated().unwrap_or(0) / 8),
        );
    }
    if json {
        print_json(&figures, &instructions)
    } else {
        print_table(&figures, &instructions)
    }
    Ok(())
}

/// The usual packets have index 1, because index 0 is timed.
fn flows(ring: &RingSpec) -> Vec<FlowSpec> {
    let one_earlier = |r| FlowSpec { base_psn: BASE_PSN - 1, ..flow(ring, r, false) };
    (0..ring.ranks).map(one_earlier).collect()
}

/// Mean ns of one run of a path.
fn measure(bench: &mut Bench, path: &str, mtu: u32) -> Result<f64> {
    let mut spec = bench.ring.clone();
    spec.mtu = mtu;
    spec.verify_icrc = !path.ends_with("/ignore");
    let ranks = spec.ranks;
    let timed = path.starts_with("timed");
    if spec != bench.ring || timed {
        let flows = flows(&spec);
        bench.restart(spec, &flows)?;
    }
    let psn = if timed { BASE_PSN - 1 } else { BASE_PSN };
    let frame = |rank: u32| {
        FrameSpec::send(host(rank), host((rank + 1) % ranks), qpn(rank), psn, lanes(rank, mtu as usize / 4))
    };
    let data = frame(0).build();
    let (mut filter, times) = match path {
        "ingress/traced" | "absorb/traced" => (Some(TraceFilter::ALL), REPEAT_TRACED),
        "absorb/whole" => {
            (Some(TraceFilter { capture: MAX_CAPTURE as u32, ..TraceFilter::ALL }), REPEAT_WHOLE)
        }
        "absorb/other" | "absorb/full" => (Some(TraceFilter::ALL), REPEAT),
        _ => (None, REPEAT),
    };
    if path == "absorb/other"
        && let Some(filter) = &mut filter
    {
        filter.rings = [1 << 7, 0, 0, 0];
    }
    // Off first, so that the buffer is empty when it is on.
    bench.plane.trace(None)?;
    let expect = |bench: &mut Bench, program: &str, packet: &[u8], action: u32| -> Result<f64> {
        if let Some(filter) = &filter {
            bench.plane.trace(Some(filter))?;
        }
        if path == "absorb/full" {
            bench.repeat(program, packet, 2 * REPEAT_TRACED)?;
        }
        let lost = bench.plane.trace_lost()?;
        let out = bench.repeat(program, packet, times)?;
        let lost = bench.plane.trace_lost()? - lost;
        anyhow::ensure!((lost > 0) == (path == "absorb/full"), "{lost} of {times} events were lost");
        anyhow::ensure!(
            out.action == action,
            "verdict {} instead of {action}: {:?}",
            out.action,
            bench.counters()?
        );
        Ok(out.duration.as_nanos() as f64)
    };
    // The others' contributions open the slot and leave headers for egress.
    let fill = |bench: &mut Bench| -> Result<()> {
        for rank in 1..ranks {
            bench.run("bench_replay", &frame(rank).build())?;
        }
        Ok(())
    };
    match path {
        "pass" => {
            let mut other = frame(0);
            other.bth.qpn = 0x0055_5555;
            expect(bench, "bench_ingress", &other.build(), 2)
        }
        "bench_ingress" | "ingress/traced" => expect(bench, "bench_ingress", &data, 4),
        "bench_crc" => Ok(bench.repeat(path, &data, REPEAT)?.duration.as_nanos() as f64),
        _ if path.starts_with("absorb/") => {
            fill(bench)?;
            expect(bench, "bench_absorb", &data, 1)
        }
        "timed/verify" => {
            fill(bench)?;
            let before = bench.plane.timing(bench.ring.id)?.ranks[0].late.count();
            let ns = expect(bench, "bench_absorb_timed", &data, 1)?;
            let timed = bench.plane.timing(bench.ring.id)?.ranks[0].late.count() - before;
            anyhow::ensure!(timed >= u64::from(REPEAT), "{timed} packets were timed");
            Ok(ns)
        }
        "complete/verify" => {
            fill(bench)?;
            // In a repeated run the packet has the sum as its payload from the second run on; ICRC and tag are put back by
            // no one, so each run is one of its own.
            let mut total = 0f64;
            let runs = 400;
            for _ in 0..runs {
                let out = bench.run("bench_complete", &data)?;
                anyhow::ensure!(out.action == 4, "verdict {}: {:?}", out.action, bench.counters()?);
                total += out.duration.as_nanos() as f64;
            }
            Ok(total / runs as f64)
        }
        "replay/verify" => {
            fill(bench)?;
            bench.run("bench_complete", &data)?;
            let mut total = 0f64;
            let runs = 400;
            for _ in 0..runs {
                let out = bench.run("bench_replay", &data)?;
                anyhow::ensure!(out.action == 4, "verdict {}: {:?}", out.action, bench.counters()?);
                total += out.duration.as_nanos() as f64;
            }
            Ok(total / runs as f64)
        }
        "bench_egress" => {
            fill(bench)?;
            let released = bench.run("bench_complete", &data)?.packet;
            let runs = 400;
            let mut total = 0f64;
            for _ in 0..runs {
                let out = bench.run("bench_egress", &released)?;
                anyhow::ensure!(out.action == 2, "verdict {}: {:?}", out.action, bench.counters()?);
                total += out.duration.as_nanos() as f64;
            }
            Ok(total / runs as f64)
        }
        part => expect(bench, part, &data, 1),
    }
}

fn print_table(figures: &Figures, instructions: &BTreeMap<&str, (u32, u32)>) {
    println!("ns per packet (BPF_PROG_TEST_RUN, 4 ranks, IPv4 SEND), least of {ROUNDS} rounds");
    print!("{:<36}", "path MTU");
    MTUS.iter().for_each(|m| print!("{m:>8}"));
    println!("{:>14}", "over empty@1K");
    for &(path, what, put_back) in PATHS {
        print!("{what:<36}");
        MTUS.iter().for_each(|m| print!("{:>8.0}", figures[&(path, *m)]));
        let reset = if put_back { figures[&("bench_reset", 1024)] } else { figures[&("bench_empty", 1024)] };
        println!("{:>14.0}", figures[&(path, 1024)] - reset);
    }
    println!("\nprogram      verified instructions   program length");
    for (name, (verified, length)) in instructions {
        println!("{name:<12} {verified:>21} {length:>16}");
    }
}

fn print_json(figures: &Figures, instructions: &BTreeMap<&str, (u32, u32)>) {
    let paths: Vec<_> = figures
        .iter()
        .map(|((path, mtu), ns)| serde_json::json!({ "path": path, "mtu": mtu, "ns": ns }))
        .collect();
    let programs: Vec<_> = instructions
        .iter()
        .map(|(name, (verified, length))| {
            serde_json::json!({ "program": name, "verified_instructions": verified, "instructions": length })
        })
        .collect();
    println!("{}", serde_json::json!({ "ns_per_packet": paths, "programs": programs }));
}
