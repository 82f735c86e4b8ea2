//! The counterpart of `lab/verbs/ring.c` over the library's own endpoint instead of libibverbs: a
//! rank of a ring that does not know of netsum. It takes the same arguments, and exchanges the same
//! lines with its launcher.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use netsum_worker::rc::{Endpoint, EndpointConfig, Event, Psn, QpConfig, QpId, Qpn};
use netsum_worker::udp::UdpDriver;

/// Address of the memory that the previous rank's WRITEs name. This memory does not exist: the
/// endpoint receives WRITEs like SENDs.
const ADDRESS: u64 = 0x10000;
const RKEY: u32 = 0x77;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Op {
    Send,
    SendImm,
    Write,
    PlainWrite,
    /// Sends no message: the previous rank reads.
    Read,
}

struct Options {
    ip: IpAddr,
    rank: u32,
    ranks: u32,
    mtu: u32,
    sizes: Vec<u32>,
    messages: u32,
    window: u32,
    timeout: u32,
    retry: u32,
    op: Op,
    sum: bool,
    give_up_after: Duration,
}

impl Options {
    fn parse(words: impl Iterator<Item = String>) -> Result<Self> {
        let words: Vec<String> = words.collect();
        let mut given: HashMap<&str, &str> = HashMap::new();
        for pair in words.chunks(2) {
            let [name, value] = pair else { bail!("{}: a value is missing", pair[0]) };
            given.insert(name, value);
        }
        let text =
            |name: &str| given.get(name).copied().with_context(|| format!("{name}: missing"));
        let number =
            |name: &str| -> Result<u32> { text(name)?.parse().with_context(|| name.to_owned()) };
        let op = match text("--op")? {
            "send" => Op::Send,
            "send-imm" => Op::SendImm,
            "write" => Op::Write,
            "plain-write" => Op::PlainWrite,
            "read" => Op::Read,
            other => bail!("--op {other}: not known"),
        };
        Ok(Self {
            ip: text("--ip")?.parse()?,
            rank: number("--rank")?,
            ranks: number("--ranks")?,
            mtu: number("--mtu")?,
            sizes: text("--size")?
                .split(',')
                .map(|size| Ok(size.parse()?))
                .collect::<Result<_>>()?,
            messages: number("--messages")?,
            window: number("--window")?,
            timeout: number("--timeout")?,
            retry: number("--retry")?,
            op,
            sum: text("--expect")? == "sum",
            give_up_after: Duration::from_secs(number("--give-up-after")?.into()),
        })
    }

    fn slots(&self) -> u32 {
        self.ranks * self.window
    }

    fn size(&self, message: u32) -> usize {
        self.sizes[message as usize % self.sizes.len()] as usize
    }

    fn stride(&self) -> u64 {
        u64::from(self.sizes.iter().copied().max().unwrap_or(0)).next_multiple_of(4)
    }

    fn last(&self) -> u32 {
        (self.rank + self.ranks - 1) % self.ranks
    }

    /// The payload of a rank's message; of several ranks, their sum.
    fn payload(&self, ranks: std::ops::Range<u32>, message: u32) -> Vec<u8> {
        let size = self.size(message);
        let lane =
            |i: u32| ranks.clone().fold(0u32, |sum, rank| sum.wrapping_add(lane(rank, message, i)));
        let mut bytes: Vec<u8> =
            (0..size.div_ceil(4) as u32).flat_map(|i| lane(i).to_le_bytes()).collect();
        bytes.truncate(size);
        bytes
    }
}

/// Lane i of a rank's message, computed as in ring.c.
fn lane(rank: u32, message: u32, i: u32) -> u32 {
    let mut x = (rank + 1)
        .wrapping_mul(0x9e37_79b1)
        .wrapping_add(message.wrapping_mul(0x85eb_ca77))
        .wrapping_add(i.wrapping_mul(0xc2b2_ae3d));
    x ^= x >> 15;
    x = x.wrapping_mul(0x2c1b_3c6d);
    x ^ x >> 12
}

/// The neighbours' addresses and queue pairs, from the launcher's line.
struct Neighbours {
    next: IpAddr,
    next_qpn: Qpn,
    next_rkey: u32,
    next_address: u64,
    last: IpAddr,
    last_qpn: Qpn,
    last_psn: Psn,
}

impl Neighbours {
    fn parse(line: &str) -> Result<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        let [next, next_qpn, _, rkey, address, last, last_qpn, last_psn] = *words else {
            bail!("not told where the neighbours are: {line}")
        };
        Ok(Self {
            next: from_gid(next)?,
            next_qpn: Qpn::new(next_qpn.parse()?),
            next_rkey: rkey.parse()?,
            next_address: address.parse()?,
            last: from_gid(last)?,
            last_qpn: Qpn::new(last_qpn.parse()?),
            last_psn: Psn::new(last_psn.parse()?),
        })
    }
}

fn gid(ip: IpAddr) -> String {
    let v6 = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    v6.octets().map(|byte| format!("{byte:02x}")).concat()
}

fn from_gid(text: &str) -> Result<IpAddr> {
    let number = u128::from_str_radix(text, 16).with_context(|| format!("no GID: {text}"))?;
    Ok(Ipv6Addr::from(number).to_canonical())
}

/// A random number of 24 bits.
fn random24() -> u32 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() as u32 & 0xff_ffff
}

fn print_line(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

struct Rank {
    options: Options,
    driver: UdpDriver,
    endpoint: Endpoint,
    out: QpId,
    into: QpId,
    neighbours: Neighbours,
    posted: u32,
    sent: u32,
    received: u32,
    /// A plain WRITE, until the SEND behind it announces the message.
    written: Option<Vec<u8>>,
    wrong: u64,
    first_wrong: u32,
}

impl Rank {
    fn send(&mut self) {
        let o = &self.options;
        while self.posted < o.messages
            && self.posted < self.sent + o.window
            && self.posted < self.received + o.window
        {
            let (message, slot) = (self.posted, u64::from(self.posted % o.slots()));
            let data = o.payload(o.rank..o.rank + 1, message);
            let to = (self.neighbours.next_address + slot * o.stride(), self.neighbours.next_rkey);
            let id = u64::from(message) + 1;
            match o.op {
                Op::Send => self.endpoint.post_send(self.out, id, data, None),
                Op::SendImm => self.endpoint.post_send(self.out, id, data, Some(message)),
                Op::Write => self.endpoint.post_write(self.out, id, data, to, Some(message)),
                Op::PlainWrite => {
                    self.endpoint.post_write(self.out, 0, data, to, None);
                    self.endpoint.post_send(self.out, id, Vec::new(), None);
                }
                Op::Read => return,
            }
            self.posted += 1;
        }
    }

    fn arrived(&mut self, data: Vec<u8>, immediate: Option<u32>) -> Result<()> {
        let o = &self.options;
        let data = match (o.op, self.written.take()) {
            (Op::PlainWrite, None) => {
                self.written = Some(data);
                return Ok(());
            }
            (Op::PlainWrite, Some(written)) => {
                ensure!(data.is_empty(), "{} bytes behind a WRITE", data.len());
                written
            }
            _ => data,
        };
        let message = self.received;
        let told = matches!(o.op, Op::SendImm | Op::Write).then_some(message);
        ensure!(immediate == told, "message {message} has immediate {immediate:?}");
        ensure!(data.len() == o.size(message), "message {message} has {} bytes", data.len());
        let expected = o.payload(if o.sum { 0..o.ranks } else { o.last()..o.last() + 1 }, message);
        let wrong = data.chunks(4).zip(expected.chunks(4)).filter(|(a, b)| a != b).count() as u64;
        if wrong > 0 && self.wrong == 0 {
            self.first_wrong = message;
        }
        self.wrong += wrong;
        self.received += 1;
        Ok(())
    }

    /// Makes progress or waits for a moment. Returns whether a message arrived or was acknowledged.
    fn drive(&mut self) -> Result<bool> {
        self.driver.drive(&mut self.endpoint, Instant::now() + Duration::from_millis(10))?;
        let mut progress = false;
        while let Some(event) = self.endpoint.poll_event() {
            progress = true;
            match event {
                Event::Received { data, immediate, .. } => {
                    self.arrived(data, immediate)?;
                    self.endpoint.post_receive(self.into, Vec::new());
                }
                Event::Sent { id, .. } => self.sent += u32::from(id > 0),
                Event::Failed { error, .. } => bail!("{error}"),
            }
        }
        Ok(progress)
    }

    fn run(&mut self, start: Instant) -> Result<()> {
        let mut last = start;
        let messages = self.options.messages;
        while self.sent < messages || self.received < messages {
            self.send();
            if self.drive()? {
                last = Instant::now();
            }
            ensure!(
                last.elapsed() < self.options.give_up_after,
                "nothing within {:?}: {} messages acknowledged, {} received; {:?}",
                self.options.give_up_after,
                self.sent,
                self.received,
                self.endpoint.stats()
            );
        }
        Ok(())
    }

    fn report(&self, word: &str, start: Instant) -> Result<()> {
        let stats = self.endpoint.stats();
        print_line(&format!(
            "{word} messages={} wrong={} first_wrong={} micros={} sent_packets={} \
             retransmissions={} naks_sent={} packet_seq_err={} local_ack_timeout={} \
             duplicate_request={} out_of_sequence={} rx_icrc_encapsulated={} discarded={} \
             ce_received={}",
            self.received,
            self.wrong,
            self.first_wrong,
            start.elapsed().as_micros(),
            stats.sent_packets,
            stats.retransmissions,
            stats.naks_sent,
            stats.packet_seq_err,
            stats.local_ack_timeout,
            stats.duplicate_request,
            stats.out_of_sequence,
            stats.rx_icrc_encapsulated,
            stats.discarded,
            stats.ce_received,
        ))
    }

    /// Acknowledges retransmissions until no rank needs that.
    fn stay(&mut self, lines: &Receiver<String>) -> Result<()> {
        while lines.try_recv() != Err(TryRecvError::Disconnected) {
            self.drive()?;
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let options = Options::parse(std::env::args().skip(1))?;
    let (send_line, lines) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if send_line.send(line).is_err() {
                break;
            }
        }
    });
    let driver = UdpDriver::bind(options.ip)?;
    // A kernel's sender increments the IPv4 identification.
    let mut endpoint =
        Endpoint::new(options.ip, EndpointConfig { any_ip_id: true, ..EndpointConfig::default() });
    let (receive_qpn, send_qpn, psn) = (0x200 + options.rank, 0x300 + options.rank, random24());
    print_line(&format!(
        "here {} {receive_qpn} 0 {RKEY} {ADDRESS} {send_qpn} {psn}",
        gid(options.ip)
    ))?;
    let neighbours =
        Neighbours::parse(&lines.recv().context("not told where the neighbours are")?)?;
    let mtu = options.mtu as usize;
    let (receives, sends, zero) = (Qpn::new(receive_qpn), Qpn::new(send_qpn), Psn::default());
    let mut out =
        QpConfig::new(sends, neighbours.next, neighbours.next_qpn, Psn::new(psn), zero, mtu);
    out.ack_timeout = Duration::from_nanos(4096) * (1 << options.timeout);
    // Seven means forever, as in rdma_rxe.
    out.retry_limit = (options.retry < 7).then_some(options.retry);
    let into = QpConfig::new(
        receives,
        neighbours.last,
        neighbours.last_qpn,
        zero,
        neighbours.last_psn,
        mtu,
    );
    let (out, into) = (endpoint.add_qp(out)?, endpoint.add_qp(into)?);
    (0..2 * options.slots()).for_each(|_| endpoint.post_receive(into, Vec::new()));
    print_line("ready")?;
    ensure!(lines.recv().context("not told to go")? == "go", "not told to go");
    let mut rank = Rank {
        options,
        driver,
        endpoint,
        out,
        into,
        neighbours,
        posted: 0,
        sent: 0,
        received: 0,
        written: None,
        wrong: 0,
        first_wrong: 0,
    };
    let start = Instant::now();
    let ran = rank.run(start);
    rank.report(if ran.is_ok() { "done" } else { "failed" }, start)?;
    ran?;
    rank.stay(&lines)
}
