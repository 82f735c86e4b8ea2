//! The cost of the data plane: `cargo xtask bench dataplane`.
//!
//! | module | content |
//! | --- | --- |
//! | this one | settings and report |
//! | [`paths`] | ns of each path through the programs, one packet repeated (BPF_PROG_TEST_RUN) |
//! | [`fragment`] | the cost of a whole fragment with few and many ranks, from such figures |
//! | [`live`] | live frames through the kernel, with everything that the figures above leave out |
//! | [`cpu`] | CPU time of a kernel thread |
//! | [`memory`] | the box's memory for a ring |
//! | [`table`], [`picture`] | the report as text and as a picture |
//!
//! Every figure is the best of several rounds, and rounds of compared things take turns, because
//! the machines are noisy.

pub mod cpu;
pub mod fragment;
pub mod live;
pub mod memory;
pub mod paths;
pub mod picture;
pub mod table;

use anyhow::Result;
use netsum_common::abi::{MAX_MTU, RingNumber};
use netsum_common::serial::Psn;
use netsum_core::plane::{FlowSpec, RingSpec};
use netsum_dataplane::DataPlane as _;
use serde::Serialize;

use netsum_lab::programs::{BASE_PSN, Bench, flow, ring};

/// The three programs of the box, and their parts in a repeatable form.
pub(crate) static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../objects/bench.bpf.o");

/// The default number of ranks.
pub const DEFAULT_RANKS: u32 = 4;

/// The amount of measurements.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Rounds of repeated packets. The first warms up.
    pub rounds: usize,
    /// Runs of one packet.
    pub repeat: u32,
    /// Path MTUs.
    pub mtus: Vec<u32>,
    /// Ranks, in growing numbers.
    pub ranks: Vec<u32>,
    /// Path MTUs at which live frames are measured with each number of ranks; at the others only
    /// the usual number is.
    pub live_mtus: Vec<u32>,
    pub live_rounds: usize,
    /// Seconds that live frames are sent in a round.
    pub live_seconds: f64,
}

impl Settings {
    /// Settings for figures.
    pub fn full() -> Self {
        Self {
            // A test run with more than one repetition waits for all CPUs twice
            // (`bpf_dispatcher_change_prog`), some 30 ms.
            rounds: 8,
            repeat: 8_000,
            mtus: vec![256, 512, 1024, 1408, 2048, 3328],
            ranks: vec![2, 4, 8, 16, 32],
            live_mtus: vec![1024, 2048],
            live_rounds: 3,
            live_seconds: 0.35,
        }
    }

    /// Settings for a smoke test.
    pub fn quick() -> Self {
        Self {
            rounds: 2,
            repeat: 500,
            mtus: vec![512, 2048],
            ranks: vec![2, 4],
            live_mtus: vec![2048],
            live_rounds: 1,
            live_seconds: 0.05,
        }
    }
}

/// All results.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// The number of rounds; `paths` and `fragments` have the best.
    pub rounds: usize,
    /// Paths through the programs.
    pub paths: Vec<paths::Row>,
    /// The time of a verified contribution compared with that of its parts.
    pub parts: Vec<paths::Parts>,
    /// Whole fragments, computed from single packets.
    pub fragments: Vec<fragment::Row>,
    /// Live frames; empty if they cannot be sent.
    pub live: Vec<live::Row>,
    /// The reason if live frames were skipped.
    pub live_skipped: Option<String>,
    pub memory: Vec<memory::Row>,
    /// The verifier's statistics of the programs.
    pub programs: Vec<Program>,
}

/// A program of the box.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Program {
    pub program: &'static str,
    /// Instructions that the verifier processed.
    pub verified_instructions: u32,
    /// The program's instructions.
    pub instructions: u32,
}

/// Measures everything.
///
/// # Errors
/// If a program's verdict is not the expected one.
pub fn run(settings: &Settings) -> Result<Figures> {
    let mut bench = load()?;
    let programs = programs(&mut bench)?;
    let paths = paths::measure(&mut bench, settings)?;
    let fragments = fragment::measure(&mut bench, settings)?;
    drop(bench);
    let memory = memory::measure(settings)?;
    let (live, live_skipped) = match live::impossible() {
        Some(why) => (Vec::new(), Some(why)),
        None => (live::measure(settings)?, None),
    };
    let parts = paths::parts(&paths);
    Ok(Figures {
        rounds: settings.rounds,
        paths,
        parts,
        fragments,
        live,
        live_skipped,
        memory,
        programs,
    })
}

/// The programs with a ring, for test runs.
fn load() -> Result<Bench> {
    let spec = ring(DEFAULT_RANKS, 2048, 16);
    let flows = flows(&spec);
    let programs: Vec<&str> = paths::PROGRAMS.to_vec();
    let mut bench = Bench::with_object(OBJECT, &programs, spec, flows)?;
    let payloads = RingSpec { id: RingNumber(live::PAYLOADS), ..ring(2, MAX_MTU as u32, 2) };
    bench.plane.create_ring(&payloads)?;
    Ok(bench)
}

/// The flows of a ring whose usual packets have index 1, because index 0 is timed.
fn flows(ring: &RingSpec) -> Vec<FlowSpec> {
    let one_earlier = |r| FlowSpec { base_psn: Psn::new(BASE_PSN - 1), ..flow(ring, r, false) };
    (0..ring.config.members).map(one_earlier).collect()
}

fn programs(bench: &mut Bench) -> Result<Vec<Program>> {
    let program = |program| {
        let info = bench.plane.program(program)?.info()?;
        Ok(Program {
            program,
            verified_instructions: info.verified_instruction_count().unwrap_or(0),
            instructions: info.size_translated().unwrap_or(0) / 8,
        })
    };
    ["aggregate", "egress", "ingress"].into_iter().map(program).collect()
}

/// The rate in Gb/s of packets with this payload in bytes, each of which takes this many ns.
pub fn gbps(bytes: f64, ns: f64) -> f64 {
    bytes * 8.0 / ns
}
