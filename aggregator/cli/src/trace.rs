//! `netsum trace`: single packets as lines of text, as JSON and as a capture file.

use std::io::Write;
use std::mem::offset_of;
use std::net::IpAddr;

use netsum_api::v1 as api;
use netsum_common::counters::{Counter, Kind as CounterKind};
use netsum_common::wire::{self, EthHdr, Frame, Ipv4Hdr, Ipv6Hdr, Reject, VlanHdr};
use netsum_core::plane::unmapped;
use schemars::JsonSchema;
use serde::Serialize;

use super::args::TraceArgs;
use super::capture::Writer;
use super::client::Client;
use super::failure::{Failure, Kind, Result};
use super::format::Format;
use super::layout::{BAD, FAIR, NAME, PLAIN};

/// A packet, a program's verdict on it, and its slot right afterwards.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Packet {
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// The program: `ingress`, `aggregate` or `egress`.
    pub program: String,
    /// The port at which it arrived or, at egress, leaves.
    pub port: String,
    /// The CPU.
    pub cpu: u32,
    /// Names of the counters that counted it there.
    pub verdict: Vec<String>,
    /// Its job; null if it belongs to none.
    pub job: Option<String>,
    /// Ring of the job, from 0.
    pub ring: Option<u32>,
    /// Type of the frame: the opcode's name, or another protocol.
    pub what: String,
    /// Its length in bytes.
    pub len: u32,
    /// Its transport header; null if it has none.
    pub transport: Option<Transport>,
    /// Its place and the state of its slot; null if it belongs to no flow.
    pub slot: Option<api::SlotSnapshot>,
    /// Packets lost right before this one, because buffers were full.
    pub lost: u64,
}

/// Addresses and transport header of a RoCEv2 packet.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Transport {
    /// The source address.
    pub src: IpAddr,
    /// The destination address.
    pub dst: IpAddr,
    /// The destination's queue pair number.
    pub qpn: u32,
    /// PSN.
    pub psn: u32,
    /// Opcode, as in the header.
    pub opcode: u8,
}

/// A frame's type in a word, and its transport header.
pub fn describe(frame: &[u8]) -> (String, Option<Transport>) {
    let parsed = match wire::parse(frame) {
        Ok(parsed) | Err((_, Some(parsed))) => parsed,
        Err((Reject::TruncatedHeaders, None)) => return ("RoCE, cut off".into(), None),
        Err((_, None)) => return (other(frame), None),
    };
    let Frame { src_ip, dst_ip, bth, .. } = parsed;
    let what =
        bth.opcode.name().map_or_else(|| format!("opcode {:#04x}", bth.opcode.0), str::to_owned);
    let transport = Transport {
        src: unmapped(src_ip),
        dst: unmapped(dst_ip),
        qpn: bth.qpn,
        psn: bth.psn,
        opcode: bth.opcode.0,
    };
    (what, Some(transport))
}

/// Type of a frame that is not RoCEv2.
fn other(frame: &[u8]) -> String {
    let word = |at: usize| frame.get(at..at + 2).map(|b| u16::from_be_bytes([b[0], b[1]]));
    let (ethertype, ip) = match word(offset_of!(EthHdr, ether_type)) {
        Some(wire::ETHERTYPE_VLAN) => {
            (word(EthHdr::LEN + offset_of!(VlanHdr, ether_type)), EthHdr::LEN + VlanHdr::LEN)
        }
        other => (other, EthHdr::LEN),
    };
    let protocol = |at: usize| match frame.get(at) {
        Some(1) => "ICMP",
        Some(6) => "TCP",
        Some(&wire::IPPROTO_UDP) => "UDP",
        Some(&wire::IPPROTO_ICMPV6) => "ICMPv6",
        _ => "IP",
    };
    match ethertype {
        Some(wire::ETHERTYPE_ARP) => "ARP".into(),
        Some(wire::ETHERTYPE_IPV4) => protocol(ip + offset_of!(Ipv4Hdr, proto)).into(),
        Some(wire::ETHERTYPE_IPV6) => protocol(ip + offset_of!(Ipv6Hdr, next_hdr)).into(),
        Some(ethertype) => format!("ethertype {ethertype:#06x}"),
        None => "no Ethernet".into(),
    }
}

impl Packet {
    /// From the API, with the packets that were lost before it.
    pub fn new(p: api::TracedPacket, lost: u64) -> Self {
        let (what, transport) = describe(&p.frame);
        Self {
            time_ns: p.time_ns,
            program: p.program,
            port: p.port,
            cpu: p.cpu,
            verdict: p.verdict,
            job: (!p.job.is_empty()).then_some(p.job),
            ring: p.ring,
            what,
            len: p.len,
            transport,
            slot: p.slot,
            lost,
        }
    }

    /// The counters that counted it, as one word.
    pub fn verdict_text(&self) -> String {
        self.verdict.join(",")
    }

    /// Its place and the state of its slot; empty if it belongs to no job.
    pub fn place(&self) -> String {
        match (&self.job, self.ring) {
            (Some(job), Some(ring)) => place(job, ring, self.slot.as_ref()),
            _ => String::new(),
        }
    }

    /// Its comment in a capture file.
    fn comment(&self) -> String {
        let place = self.place();
        let gap = if place.is_empty() { "" } else { "; " };
        format!("{}: {}{gap}{place}", self.program, self.verdict_text())
    }
}

/// A packet's place, and the state of its slot.
pub fn place(job: &str, ring: u32, slot: Option<&api::SlotSnapshot>) -> String {
    let mut text = format!("{job}/{ring}");
    let Some(s) = slot else { return text };
    text += &format!(" rank {} index {} low {}", s.rank, s.index, s.low);
    text += &match s.holds {
        Some(holds) if holds == s.index => {
            let stage = match (s.released, s.complete) {
                (true, _) => " released",
                (false, true) => " complete",
                (false, false) => "",
            };
            format!(" has {}/{}{stage}", s.contributors.len(), s.ranks)
        }
        Some(holds) => format!(" slot holds {holds}"),
        None => " slot empty".into(),
    };
    if s.gap > 0 {
        text += &format!(" gap {}", s.gap);
    }
    text
}

/// Prints packets, a line for each.
#[derive(Debug)]
pub struct Printer {
    format: Format,
    /// Widths of port, addresses and place, as wide as any so far.
    widths: [usize; 3],
}

impl Printer {
    /// A printer that has printed nothing yet.
    pub fn new(format: Format) -> Self {
        Self { format, widths: [5, 23, 0] }
    }

    pub fn print(&mut self, out: &mut impl Write, p: &Packet) -> Result<()> {
        if self.format.json(out, p)? {
            return Ok(());
        }
        if p.lost > 0 {
            writeln!(out, "{}", lost_text(p.lost))?;
        }
        let addresses = match &p.transport {
            Some(t) => format!("{} > {}", t.src, t.dst),
            None => String::new(),
        };
        let numbers = match &p.transport {
            Some(t) => format!("qp {:#08x} psn {:#08x}", t.qpn, t.psn),
            None => String::new(),
        };
        let place = p.place();
        for (width, text) in self.widths.iter_mut().zip([&p.port, &addresses, &place]) {
            *width = text.len().max(*width);
        }
        let [port, between, where_] = self.widths;
        let style = match kind(&p.verdict) {
            CounterKind::Drop => BAD,
            CounterKind::Pass => FAIR,
            CounterKind::Work => PLAIN,
        };
        writeln!(
            out,
            "{} {:<9} {NAME}{:<port$}{NAME:#} {addresses:<between$} {:<15} {numbers:<25} \
             len {:<4} {place:<where_$} {style}{}{style:#}",
            clock(p.time_ns),
            p.program,
            p.port,
            p.what,
            p.len,
            p.verdict_text()
        )?;
        Ok(())
    }
}

/// Kind of a packet's outcome.
pub fn kind(verdict: &[String]) -> CounterKind {
    let of = |kind: CounterKind| {
        Counter::ALL.iter().any(|c| c.kind() == kind && verdict.iter().any(|v| v == c.name()))
    };
    match (of(CounterKind::Drop), of(CounterKind::Pass)) {
        (true, _) => CounterKind::Drop,
        (false, true) => CounterKind::Pass,
        (false, false) => CounterKind::Work,
    }
}

fn lost_text(lost: u64) -> String {
    format!("{lost} {} lost", if lost == 1 { "event was" } else { "events were" })
}

/// The time of day with nanoseconds.
fn clock(time_ns: u64) -> String {
    let (seconds, ns) = (time_ns / 1_000_000_000 % 86_400, time_ns % 1_000_000_000);
    format!("{:02}:{:02}:{:02}.{ns:09}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Destination of traced packets.
enum Sink {
    Text(Printer),
    File(Writer),
}

/// `netsum trace`.
pub async fn run(
    args: TraceArgs,
    format: Format,
    client: &mut Client,
    out: &mut impl Write,
) -> Result<()> {
    if args.pcap.is_some() && format != Format::Text {
        return Err(Failure::new(Kind::Usage, "--pcap writes frames, not JSON: omit -j and -p"));
    }
    let capture = match args.pcap {
        Some(_) => args.snaplen.unwrap_or(u32::MAX),
        None => 0,
    };
    let request = api::TraceRequest {
        job: args.job.unwrap_or_default(),
        ring: args.ring,
        rank: args.rank,
        verdicts: args.verdict,
        program: args.program.unwrap_or_default(),
        capture,
    };
    let mut traces = client.trace(request).await?;
    let mut sink = match &args.pcap {
        Some(path) => Sink::File(Writer::create(path)?),
        None => Sink::Text(Printer::new(format)),
    };
    let (mut left, mut seen, mut lost, mut lost_all) = (args.count, 0u64, 0, 0);
    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    let mut begun = false;
    while left != Some(0) {
        let reply = tokio::select! {
            reply = traces.next() => reply?,
            _ = &mut interrupted => break,
        };
        let Some(reply) = reply else { break };
        if !std::mem::replace(&mut begun, true) {
            eprintln!("netsum: tracing, until it is interrupted");
        }
        (lost, lost_all) = (lost + reply.lost, lost_all + reply.lost);
        for packet in reply.packets {
            if left == Some(0) {
                break;
            }
            match &mut sink {
                Sink::Text(printer) => printer.print(out, &Packet::new(packet, lost))?,
                Sink::File(writer) => {
                    let comment = Packet::new(packet.clone(), 0).comment();
                    writer.packet(&packet, &comment, lost)?;
                }
            }
            (lost, seen, left) = (0, seen + 1, left.map(|n| n - 1));
        }
        match &mut sink {
            Sink::Text(_) => out.flush()?,
            Sink::File(writer) => writer.flush()?,
        }
    }
    eprintln!("netsum: {seen} packets, {}", lost_text(lost_all));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The headers of a SEND MIDDLE from 10.0.0.1 to 10.0.0.2.
    fn frame() -> Vec<u8> {
        let mut f = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        f.extend([0x45, 2, 0, 60, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        f.extend([0xc0, 0, 0x12, 0xb7, 0, 40, 0, 0]);
        f.extend([1, 0, 0xff, 0xff, 0, 0, 1, 0, 0, 0, 0x10, 0x11]);
        f.extend([0; 20]);
        f
    }

    fn packet(program: &str, verdict: &[&str], frame: Vec<u8>) -> api::TracedPacket {
        api::TracedPacket {
            time_ns: 1_700_000_000_123_456_789,
            program: program.into(),
            port: "port0".into(),
            verdict: verdict.iter().map(|&v| v.to_owned()).collect(),
            len: 1086,
            frame,
            ..Default::default()
        }
    }

    fn of_job(program: &str, verdict: &[&str], slot: api::SlotSnapshot) -> api::TracedPacket {
        let slot = api::SlotSnapshot { rank: 0, index: 17, ranks: 3, ..slot };
        let p = packet(program, verdict, frame());
        api::TracedPacket { job: "train".into(), ring: Some(0), slot: Some(slot), ..p }
    }

    fn examples() -> Vec<(api::TracedPacket, u64)> {
        let slot = |low, holds, contributors: &[u32]| api::SlotSnapshot {
            low,
            holds,
            contributors: contributors.to_vec(),
            ..Default::default()
        };
        let mut arp = frame();
        arp[13] = 6;
        vec![
            (of_job("ingress", &["steered"], slot(16, None, &[])), 0),
            (of_job("aggregate", &["contributions"], slot(16, Some(17), &[0, 2])), 0),
            (
                of_job(
                    "aggregate",
                    &["contributions", "completed", "released"],
                    api::SlotSnapshot {
                        complete: true,
                        released: true,
                        ..slot(18, Some(17), &[0, 1, 2])
                    },
                ),
                2,
            ),
            (of_job("aggregate", &["stale"], slot(145, Some(145), &[1])), 0),
            (
                of_job(
                    "aggregate",
                    &["rx_icrc_encapsulated"],
                    api::SlotSnapshot { gap: 3, ..slot(14, None, &[]) },
                ),
                0,
            ),
            (packet("ingress", &["not_roce"], arp), 1),
        ]
    }

    fn text(format: Format) -> String {
        let mut out = anstream::StripStream::new(Vec::new());
        let mut printer = Printer::new(format);
        for (packet, lost) in examples() {
            printer.print(&mut out, &Packet::new(packet, lost)).unwrap();
        }
        String::from_utf8(out.into_inner()).unwrap()
    }

    #[test]
    fn traced_packets_as_text() {
        insta::assert_snapshot!(text(Format::Text));
    }

    #[test]
    fn traced_packets_as_json() {
        insta::assert_snapshot!(text(Format::Json));
    }

    #[test]
    fn frames_of_other_kinds_have_a_name() {
        let of = |ethertype: [u8; 2], protocol: u8| {
            let mut f = vec![0; 60];
            (f[12], f[13], f[23]) = (ethertype[0], ethertype[1], protocol);
            describe(&f).0
        };
        assert_eq!(of([8, 6], 0), "ARP");
        assert_eq!(
            (of([8, 0], 6), of([8, 0], 1), of([8, 0], 89)),
            ("TCP".into(), "ICMP".into(), "IP".into())
        );
        assert_eq!(of([0x88, 0xcc], 0), "ethertype 0x88cc");
        assert_eq!(describe(&[1, 2]).0, "no Ethernet");
    }
}
