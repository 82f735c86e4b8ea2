//! What `netsum simulate` prints.

use std::collections::BTreeMap;
use std::io::Write;

use netsum_api::v1 as api;
use schemars::JsonSchema;
use serde::Serialize;

use super::failure::Result;
use super::format::Format;
use super::layout::{BAD, FAIR, GOOD, NAME, PLAIN};
use super::trace::{self, Transport};

/// Simulated outcomes of the frames of a file.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Simulation {
    /// The simulated programs equal those that the daemon has loaded, instruction by instruction.
    pub same_programs: bool,
    /// The frames, in the file's order.
    pub frames: Vec<Simulated>,
    /// How many frames came to each end.
    pub outcomes: BTreeMap<String, u64>,
    /// Counters of all programs.
    pub counters: BTreeMap<String, u64>,
}

/// A frame's simulated outcome.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Simulated {
    /// Its number in the file, from 1.
    pub number: u64,
    /// The port at which it arrives.
    pub port: String,
    /// Type of the frame: the opcode's name, or another protocol.
    pub what: String,
    /// Its length in bytes.
    pub len: u32,
    /// Its transport header; null if it has none.
    pub transport: Option<Transport>,
    /// Its job; null if it belongs to none.
    pub job: Option<String>,
    /// Ring of the job, from 0.
    pub ring: Option<u32>,
    /// Its place, with the state of ring and slot right after it; null if it belongs to no flow.
    pub slot: Option<api::SlotSnapshot>,
    /// Its outcome.
    pub outcome: Outcome,
    /// Names of the counters that count it, in each program that it meets.
    pub steps: Vec<SimulatedStep>,
    /// Why, in words.
    pub reason: String,
    /// The next step; empty if nothing is wrong.
    pub next: String,
}

/// A program's verdict on a frame.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SimulatedStep {
    /// The program.
    pub program: String,
    /// Names of the counters that count the frame there.
    pub verdict: Vec<String>,
    /// At egress: the rank that gets the result.
    pub to: Option<u32>,
}

/// Outcome of a frame.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Added to its slot and consumed.
    Absorbed,
    /// Carries the sum to all ranks.
    Released,
    /// Carries a released sum to the next rank again.
    Replayed,
    /// The bridge forwards it.
    Passed,
    /// The box drops it.
    Dropped,
    /// Not simulated.
    Skipped,
}

impl Outcome {
    /// As text and JSON have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Absorbed => "absorbed",
            Self::Released => "released",
            Self::Replayed => "replayed",
            Self::Passed => "passed",
            Self::Dropped => "dropped",
            Self::Skipped => "skipped",
        }
    }
}

/// Prints all outcomes.
pub fn print(out: &mut impl Write, format: Format, simulation: &Simulation) -> Result<()> {
    if format.json(out, simulation)? {
        return Ok(());
    }
    let frames = &simulation.frames;
    let cells = |f: &Simulated| {
        let place = match (&f.job, f.ring) {
            (Some(job), Some(ring)) => trace::place(job, ring, f.slot.as_ref()),
            _ => String::new(),
        };
        let addresses = f.transport.as_ref().map_or_else(String::new, |t| {
            format!("{} > {} qp {:#x} psn {:#x}", t.src, t.dst, t.qpn, t.psn)
        });
        [f.number.to_string(), f.port.clone(), f.what.clone(), addresses, place]
    };
    let mut widths = [0; 5];
    for f in frames {
        widths.iter_mut().zip(cells(f)).for_each(|(width, cell)| *width = cell.len().max(*width));
    }
    let [a, b, c, d, e] = widths;
    for f in frames {
        let [number, port, what, addresses, place] = cells(f);
        let style = match f.outcome {
            Outcome::Absorbed | Outcome::Replayed => PLAIN,
            Outcome::Released => GOOD,
            Outcome::Passed | Outcome::Skipped => FAIR,
            Outcome::Dropped if f.next.is_empty() => PLAIN,
            Outcome::Dropped => BAD,
        };
        writeln!(
            out,
            "{number:>a$}  {NAME}{port:<b$}{NAME:#}  {what:<c$}  {addresses:<d$}  {place:<e$}  \
             {style}{}{style:#}",
            f.outcome.name()
        )?;
        let verdicts: Vec<String> = (f.steps.iter())
            .map(|s| match s.to {
                Some(rank) => format!("{} to rank {rank}: {}", s.program, s.verdict.join(",")),
                None => format!("{}: {}", s.program, s.verdict.join(",")),
            })
            .collect();
        if !verdicts.is_empty() {
            writeln!(out, "{:a$}  {}", "", verdicts.join("; "))?;
        }
        writeln!(out, "{:a$}  {}", "", f.reason)?;
        if !f.next.is_empty() {
            writeln!(out, "{:a$}  next: {}", "", f.next)?;
        }
    }
    let list = |map: &BTreeMap<String, u64>| {
        map.iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join("  ")
    };
    writeln!(out, "{NAME}{} frames:{NAME:#} {}", frames.len(), list(&simulation.outcomes))?;
    if !simulation.counters.is_empty() {
        writeln!(out, "counted: {}", list(&simulation.counters))?;
    }
    if !simulation.same_programs {
        writeln!(
            out,
            "{FAIR}the daemon's programs differ from those of this `netsum`, of the same \
             version{FAIR:#}"
        )?;
    }
    Ok(())
}
