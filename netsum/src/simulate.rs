//! `netsum simulate`: runs captured frames through a copy of the running programs, and explains
//! what becomes of each.

use std::collections::BTreeMap;
use std::io::Write;

use netsum_agent::packet::{RingOfJob, packet_message};
use netsum_api::v1 as api;
use netsum_cli::args::SimulateArgs;
use netsum_cli::capture::{self, Captured};
use netsum_cli::client::Client;
use netsum_cli::failure::{Failure, Kind, Result};
use netsum_cli::format::Format;
use netsum_cli::peers::senders;
use netsum_cli::simulation::{Outcome, Simulated, SimulatedStep, Simulation, print};
use netsum_cli::trace::{Packet, describe};
use netsum_common::abi::{self, Flow, RingNumber, TraceEvent};
use netsum_common::counters::{Counter, Kind as CounterKind, of_bits};
use netsum_common::slot::Slot;
use netsum_common::wire::{self, Frame};
use netsum_core::JobRing;
use netsum_core::diagnose::{RefusedPacket, explain};
use netsum_core::plane::unmapped;
use netsum_core::trace::program_name;
use netsum_dataplane::replica::{LONGEST, Replica, Step};

/// XDP verdicts (`include/uapi/linux/bpf.h`).
const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;

/// The counter that decides a frame's outcome: that of the last program except egress.
fn deciding_step(steps: &[Step]) -> Option<(u32, u64)> {
    let on_the_way = |s: &&Step| s.traced.event.program != abi::traced_by::EGRESS;
    steps.iter().rfind(on_the_way).map(|s| (s.action, s.traced.event.counters))
}

fn outcome(action: u32, counters: u64) -> Outcome {
    let has = |c: Counter| counters & c.bit() != 0;
    match action {
        XDP_PASS => Outcome::Passed,
        XDP_DROP if has(Counter::Contributions) && !has(Counter::RedirectFailed) => {
            Outcome::Absorbed
        }
        XDP_DROP => Outcome::Dropped,
        _ if has(Counter::Released) => Outcome::Released,
        _ => Outcome::Replayed,
    }
}

/// The counter that a reason is looked up by.
fn cause(counters: u64) -> Option<Counter> {
    let of = |kind: CounterKind| of_bits(counters).find(|c| c.kind() == kind);
    of(CounterKind::Drop).or_else(|| of(CounterKind::Pass)).or_else(|| of(CounterKind::Work))
}

/// The daemon's report of the running programs.
struct DaemonReport {
    ports: Vec<api::Port>,
    jobs: Vec<api::Job>,
}

impl DaemonReport {
    fn port_name(&self, ifindex: u32) -> String {
        let found = self.ports.iter().find(|p| p.ifindex == ifindex);
        found.map_or_else(|| format!("#{ifindex}"), |p| p.name.clone())
    }

    fn port(&self, option: &str, name: &str) -> Result<u32> {
        self.ports.iter().find(|p| p.name == name).map(|p| p.ifindex).ok_or_else(|| {
            let names: Vec<&str> = self.ports.iter().map(|p| p.name.as_str()).collect();
            let message = format!("{option} `{name}`: netsum has ports {}", names.join(", "));
            Failure::new(Kind::NotFound, message)
        })
    }

    fn ring_of_job(&self, ring: u32) -> Option<RingOfJob> {
        self.jobs.iter().find_map(|job| {
            let number = job.ring_ids.iter().position(|&id| id == ring)?;
            Some(RingOfJob {
                job: job.name.clone(),
                ring: JobRing(number as u32),
                senders: senders(job.ranks, &job.members),
            })
        })
    }
}

/// Ports at which frames arrive.
struct Ports {
    all: Option<u32>,
    of_interface: BTreeMap<String, u32>,
    first: u32,
}

impl Ports {
    fn new(args: &SimulateArgs, report: &DaemonReport) -> Result<Self> {
        let Some(first) = report.ports.first() else {
            return Err(Failure::new(
                Kind::NotFound,
                "the daemon has no ports, so no frame can arrive",
            ));
        };
        let mut of_interface: BTreeMap<String, u32> =
            report.ports.iter().map(|p| (p.name.clone(), p.ifindex)).collect();
        for (interface, port) in &args.map {
            of_interface.insert(interface.clone(), report.port("--map", port)?);
        }
        let all = args.port.as_ref().map(|port| report.port("--port", port)).transpose()?;
        Ok(Self { all, of_interface, first: first.ifindex })
    }

    /// The port of a frame.
    fn of(&self, captured: &Captured, flows: &[(abi::FlowKey, Flow)]) -> u32 {
        let named = || self.of_interface.get(captured.interface.as_ref()?).copied();
        let mut frame = Frame::EMPTY;
        // Other frames also show their source.
        let _ = wire::parse_into(&captured.frame[..], &mut frame);
        let by_source = || {
            let of = |(_, f): &&(abi::FlowKey, Flow)| {
                f.src_ip == frame.src_ip && frame.src_ip != [0; 16]
            };
            flows.iter().find(of).map(|(_, f)| f.ifindex)
        };
        self.all.or_else(named).or_else(by_source).unwrap_or(self.first)
    }
}

/// Why a frame cannot be run.
fn unfit(captured: &Captured, ports: &Ports) -> Option<String> {
    let Captured { frame, len, interface, outbound } = captured;
    if *outbound && interface.as_ref().is_some_and(|i| ports.of_interface.contains_key(i)) {
        return Some("it left the box at a port, and did not arrive".into());
    }
    if frame.len() < *len {
        return Some(format!(
            "the file has {} of its {len} bytes; capture whole frames",
            frame.len()
        ));
    }
    if !(wire::EthHdr::LEN..=LONGEST).contains(&frame.len()) {
        return Some(format!(
            "it has {} bytes; {} to {LONGEST} can be run, and data of a job has less",
            frame.len(),
            wire::EthHdr::LEN
        ));
    }
    None
}

/// Reason of a frame's outcome, and the next step.
fn reason(
    outcome: Outcome,
    counters: u64,
    event: &TraceEvent,
    frame: &[u8],
    report: &DaemonReport,
    copy: &Replica,
) -> (String, String) {
    let fine = |text: String| (text, String::new());
    match outcome {
        Outcome::Absorbed if counters & Counter::HeldBack.bit() != 0 => {
            return fine(
                "it completes its sum, which is held back until an earlier one is released".into(),
            );
        }
        Outcome::Absorbed => {
            return fine("it is added to its slot, which waits for other ranks".into());
        }
        Outcome::Released => {
            return fine("it carries its sum, complete or held back, to all ranks".into());
        }
        Outcome::Replayed => {
            return fine("its sum has been released: it carries it to the next rank again".into());
        }
        Outcome::Passed | Outcome::Dropped | Outcome::Skipped => {}
    }
    let Some(cause) = cause(counters) else { return fine(String::new()) };
    let help = cause.help().trim();
    let drops = match cause {
        Counter::DuplicateRequest => "it has been added already, and is never added twice",
        Counter::InBandFirst => {
            "it begins a connection of the job: the daemon notes it, and the sender retransmits"
        }
        Counter::InBandWaits => "its connection waits for those of the other ranks",
        _ => "",
    };
    if !drops.is_empty() {
        return fine(drops.into());
    }
    if cause.kind() != CounterKind::Drop {
        return fine(format!("counted among {help}"));
    }
    let psn = wire::parse(frame).map(|f| f.bth.psn).unwrap_or_default();
    let flow = copy.flows().iter().find(|(_, f)| (f.ring.0, f.rank) == (event.ring, event.rank));
    let (Some((_, flow)), Some(ring)) = (flow, copy.ring(RingNumber(event.ring))) else {
        return (
            format!("counted among {help}"),
            "check which host sends it, and whether it should".into(),
        );
    };
    let front = event.slot_flags & Slot::USED != 0 && event.slot_index == event.low;
    let port = report.port_name(flow.ifindex);
    let packet = RefusedPacket {
        port: &port,
        src: unmapped(flow.src_ip),
        mtu: ring.mtu,
        credit: ring.credit,
        base_psn: flow.base_psn,
        psn,
        low: event.low,
        accepted: event.expected != 0 || front && event.contributors >> (event.rank & 63) & 1 != 0,
    };
    let (what, next) = explain(cause, &packet);
    (format!("rank {}: {what}", event.rank), next)
}

fn simulated(
    number: u64,
    captured: &Captured,
    ifindex: u32,
    report: &DaemonReport,
    copy: &mut Replica,
) -> Result<Simulated> {
    let mut frame = skipped(number, captured, report.port_name(ifindex), String::new());
    let steps = copy.run(&captured.frame, ifindex)?;
    let Some((action, counters)) = deciding_step(&steps) else { return Ok(frame) };
    frame.outcome = outcome(action, counters);
    for step in &steps {
        let event = &step.traced.event;
        let egress = event.program == abi::traced_by::EGRESS;
        if !egress {
            (frame.reason, frame.next) =
                reason(frame.outcome, event.counters, event, &captured.frame, report, copy);
            let ring = report.ring_of_job(event.ring);
            let packet = Packet::new(packet_message(&step.traced, 0, String::new(), ring, 0), 0);
            (frame.job, frame.ring, frame.slot) = (packet.job, packet.ring, packet.slot);
        }
        frame.steps.push(SimulatedStep {
            program: program_name(event.program).into(),
            verdict: of_bits(event.counters).map(|c| c.name().into()).collect(),
            to: (egress && event.rank != TraceEvent::NONE).then_some(event.rank),
        });
    }
    Ok(frame)
}

/// `netsum simulate`.
pub async fn run(
    args: SimulateArgs,
    format: Format,
    client: &mut Client,
    out: &mut impl Write,
) -> Result<()> {
    let captured = capture::read(&args.file)?;
    let programs = client.list_programs().await?;
    if programs.abi != abi::VERSION {
        let message = format!(
            "the daemon has another version (ABI {}, this program has {}): use its own `netsum`",
            programs.abi,
            abi::VERSION
        );
        return Err(Failure::new(Kind::Refused, message));
    }
    let report =
        DaemonReport { ports: client.list_ports().await?, jobs: client.list_jobs().await? };
    let ports = Ports::new(&args, &report)?;
    let numbers: Vec<u32> = programs.programs.iter().map(|p| p.id).collect();
    let mut copy = Replica::new(&numbers, args.fresh).map_err(|e| {
        let hint = "the programs cannot be loaded again next to the daemon's; this needs root";
        Failure::from(e.context(hint))
    })?;
    let tag = format!("{:016x}", copy.tag()?);
    let same_programs = programs.programs.iter().any(|p| p.tag == tag);
    let mut simulation = Simulation {
        same_programs,
        frames: Vec::with_capacity(captured.len()),
        outcomes: BTreeMap::new(),
        counters: BTreeMap::new(),
    };
    for (number, captured) in (1..).zip(&captured) {
        let ifindex = ports.of(captured, copy.flows());
        let frame = match unfit(captured, &ports) {
            Some(reason) => skipped(number, captured, report.port_name(ifindex), reason),
            None => simulated(number, captured, ifindex, &report, &mut copy)?,
        };
        *simulation.outcomes.entry(frame.outcome.name().into()).or_default() += 1;
        for name in frame.steps.iter().flat_map(|s| &s.verdict) {
            *simulation.counters.entry(name.clone()).or_default() += 1;
        }
        simulation.frames.push(frame);
    }
    print(out, format, &simulation)
}

fn skipped(number: u64, captured: &Captured, port: String, reason: String) -> Simulated {
    let (what, transport) = describe(&captured.frame);
    Simulated {
        number,
        port,
        what,
        len: captured.len as u32,
        transport,
        job: None,
        ring: None,
        slot: None,
        outcome: Outcome::Skipped,
        steps: Vec::new(),
        reason,
        next: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REDIRECT: u32 = 4;

    #[test]
    fn an_end_follows_from_verdict_and_counters() {
        let of = |action: u32, counters: &[Counter]| {
            outcome(action, counters.iter().fold(0, |bits, c| bits | c.bit()))
        };
        assert_eq!(of(XDP_DROP, &[Counter::Contributions]), Outcome::Absorbed);
        assert_eq!(of(XDP_DROP, &[Counter::DuplicateRequest]), Outcome::Dropped);
        assert_eq!(
            of(XDP_DROP, &[Counter::Contributions, Counter::Released, Counter::RedirectFailed]),
            Outcome::Dropped
        );
        assert_eq!(of(XDP_PASS, &[Counter::Contributions, Counter::GapForwarded]), Outcome::Passed);
        assert_eq!(
            of(REDIRECT, &[Counter::Contributions, Counter::Completed, Counter::Released]),
            Outcome::Released
        );
        assert_eq!(of(REDIRECT, &[Counter::Replays]), Outcome::Replayed);
    }

    #[test]
    fn frames_come_in_where_the_file_or_their_source_says() {
        let port = |name: &str, ifindex: u32| api::Port {
            name: name.into(),
            ifindex,
            ..Default::default()
        };
        let report = DaemonReport {
            ports: vec![port("port0", 10), port("port1", 11), port("port2", 12)],
            jobs: vec![],
        };
        let args = |port: Option<&str>, map: &[(&str, &str)]| SimulateArgs {
            file: "-".into(),
            port: port.map(str::to_owned),
            map: map.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect(),
            fresh: false,
        };
        let mut arp = vec![0u8; 60];
        (arp[12], arp[13]) = (8, 6);
        arp[28..32].copy_from_slice(&[10, 0, 0, 3]);
        let captured = |interface: Option<&str>| Captured {
            frame: arp.clone(),
            len: 60,
            interface: interface.map(str::to_owned),
            outbound: false,
        };
        let flow = Flow {
            ring: RingNumber(1),
            rank: 2,
            base_psn: 0,
            ifindex: 12,
            src_ip: wire::ipv4_mapped([10, 0, 0, 3]),
            ..Flow::NOTHING
        };
        let flows = [(abi::FlowKey { dst_ip: [0; 16], qpn: 1 }, flow)];
        let ports = Ports::new(&args(None, &[("eth0", "port1")]), &report).unwrap();
        assert_eq!(ports.of(&captured(None), &flows), 12, "an ARP packet's sender");
        assert_eq!(ports.of(&captured(None), &[]), 10, "nobody knows");
        assert_eq!(ports.of(&captured(Some("eth0")), &flows), 11);
        assert_eq!(ports.of(&captured(Some("port0")), &flows), 10);
        assert_eq!(ports.of(&captured(Some("eth7")), &flows), 12);
        let ports = Ports::new(&args(Some("port1"), &[]), &report).unwrap();
        assert_eq!(ports.of(&captured(Some("port0")), &flows), 11);
        let error = Ports::new(&args(Some("eth9"), &[]), &report).err().unwrap();
        assert_eq!(error.kind, Kind::NotFound);
        assert!(error.message.contains("port0, port1, port2"), "{}", error.message);
    }

    #[test]
    fn frames_that_cannot_be_run_have_a_reason() {
        let ports = Ports { all: None, of_interface: [("port0".into(), 10)].into(), first: 10 };
        let why = |frame: usize, len: usize, interface: &str, outbound: bool| {
            let captured = Captured {
                frame: vec![0; frame],
                len,
                interface: Some(interface.into()),
                outbound,
            };
            unfit(&captured, &ports).unwrap_or_default()
        };
        assert_eq!(why(60, 60, "port0", false), "");
        assert_eq!(why(60, 60, "eth0", true), "", "what a host sends comes in");
        assert!(why(60, 60, "port0", true).contains("left the box"));
        assert!(why(60, 1086, "port0", false).contains("60 of its 1086 bytes"));
        assert!(why(9000, 9000, "port0", false).contains("9000 bytes"));
        assert!(why(5, 5, "port0", false).contains("5 bytes"));
    }
}
