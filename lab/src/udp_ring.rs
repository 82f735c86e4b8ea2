//! An application that knows of netsum only its flows: a ring of RC queue pairs with a window, over
//! the library's endpoint. As with verbs, all ranks of a host share its address, and differ by
//! their queue pairs.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use netsum_common::abi::{self, Fragments, Messages, RingConfig, RingNumber, ring_flags};
use netsum_common::serial;
use netsum_core::plane::{FlowSpec, RingSpec};
use netsum_dataplane::{BpfDataPlane, DataPlane};
use netsum_worker::rc::{
    Endpoint, EndpointConfig, Event, Operation, Psn, QpConfig, QpId, Qpn, Stats,
};
use netsum_worker::udp::UdpDriver;

use crate::Lab;
use crate::frames::{float_sum, floats, lanes, sum};
use crate::netns::Netns;
use crate::traffic::ping;

/// Settings of the ring.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub ranks: u32,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// Messages that each rank sends.
    pub messages: u32,
    /// Their length in bytes.
    pub message_size: u32,
    /// Messages that a rank may send before it has their sums.
    pub window: u32,
    /// First PSN of rank 0; that of rank r is r higher.
    pub first_psn: u32,
    /// Messages are f32, which the box adds as multiples of 2 to this power.
    pub lsb: Option<i32>,
    /// SEND or WRITE.
    pub operation: Operation,
    /// Messages carry their number as immediate data.
    pub immediate: bool,
    /// The acknowledgement timeout. With a long one, retransmissions hide no loss; with a short
    /// one, lost packets are soon repaired.
    pub ack_timeout: Duration,
    /// See [`EndpointConfig::cnp_interval`].
    pub cnp_interval: Option<Duration>,
    /// Ranks stop silently once they have this many sums, even with messages in flight.
    pub leave_after: Option<u32>,
}

impl Load {
    /// `ranks` ranks, and defaults for the rest: PSNs wrap soon.
    pub fn new(ranks: u32) -> Self {
        Self {
            ranks,
            mtu: 1024,
            messages: 100,
            message_size: 65_536,
            window: 2,
            first_psn: 0xff_ff00,
            lsb: None,
            operation: Operation::Send,
            immediate: false,
            ack_timeout: Duration::from_secs(1),
            cnp_interval: None,
            leave_after: None,
        }
    }

    /// Packets in all messages of a rank.
    pub fn fragments(&self) -> u64 {
        u64::from(self.messages) * u64::from(self.message_size.div_ceil(self.mtu))
    }

    /// Its ring, for a data plane without a daemon.
    pub fn ring(&self, id: u32) -> Result<RingSpec> {
        let fragments = Fragments(self.message_size.div_ceil(self.mtu));
        let credit = Messages(self.window).of(fragments).context("too many fragments")?;
        Ok(RingSpec {
            id: RingNumber(id),
            cpu: 0,
            config: RingConfig {
                members: self.ranks,
                slots: abi::ring_slots(credit).context("too many slots")?,
                credit: credit.0,
                mtu: self.mtu,
                flags: if self.lsb.is_some() { ring_flags::FLOAT } else { 0 },
                lsb: self.lsb.unwrap_or(0),
                ..RingConfig::default()
            },
        })
    }

    /// The flow of a rank, from and to these addresses.
    pub fn flow(&self, ring: u32, rank: u32, ifindex: u32, src: IpAddr, dst: IpAddr) -> FlowSpec {
        FlowSpec {
            ring: RingNumber(ring),
            member: netsum_core::Rank(rank),
            base_psn: Psn::new(self.psn(rank)),
            ifindex,
            src,
            dst,
            qpn: Qpn::new(receive_qpn((rank + 1) % self.ranks)),
            src_mac: None,
            group_mark: 0,
        }
    }

    /// First PSN of a rank.
    pub fn psn(&self, rank: u32) -> u32 {
        serial::add(self.first_psn, rank)
    }

    /// How long a finished rank stays: with a short timeout, other ranks may still retransmit.
    fn linger(&self) -> Duration {
        if self.ack_timeout < Duration::from_secs(1) {
            10 * self.ack_timeout
        } else {
            Duration::from_millis(250)
        }
    }

    fn payload(&self, rank: u32, message: u32) -> Vec<u8> {
        let (seed, count) = (rank * 100_003 + message, self.message_size as usize / 4);
        match self.lsb {
            // Some messages have lanes that are infinite or NaN.
            Some(_) => floats(seed, count, message.is_multiple_of(3)),
            None => lanes(seed, count),
        }
    }
}

/// Queue pair that receives from the previous rank.
pub fn receive_qpn(rank: u32) -> u32 {
    0x200 + rank
}

/// Queue pair that sends to the next rank.
pub fn send_qpn(rank: u32) -> u32 {
    0x300 + rank
}

/// Where a rank runs: its host's namespace and address.
pub type Home<'a> = (&'a Netns, IpAddr);

/// Runs all ranks, rank r at `homes[r]`; returns the endpoints' counters, by address in the order
/// of their first ranks.
///
/// # Errors
/// If a sum is wrong, a connection fails, or it takes more than a minute.
pub fn run(load: Load, homes: &[Home<'_>]) -> Result<Vec<Stats>> {
    ensure!(homes.len() == load.ranks as usize, "{} homes for {} ranks", homes.len(), load.ranks);
    let ips: Vec<IpAddr> = homes.iter().map(|home| home.1).collect();
    let mut hosts: Vec<(Home<'_>, Vec<u32>)> = Vec::new();
    for (rank, home) in homes.iter().enumerate() {
        match hosts.iter_mut().find(|(h, _)| h.1 == home.1) {
            Some((_, ranks)) => ranks.push(rank as u32),
            None => hosts.push((*home, vec![rank as u32])),
        }
    }
    // Packets that wait for their next hop's MAC address may be overtaken by later ones
    // (net/core/neighbour.c, `neigh_update`), which would look like a loss.
    for (rank, (netns, _)) in homes.iter().enumerate() {
        ping(netns, ips[(rank + 1) % ips.len()], 1, Duration::from_secs(5))?;
    }
    std::thread::scope(|s| {
        let hosts: Vec<_> = hosts
            .iter()
            .map(|((netns, ip), ranks)| s.spawn(|| host(load, netns, *ip, ranks, &ips)))
            .collect();
        hosts.into_iter().map(|h| h.join().expect("a host does not panic")).collect()
    })
}

/// Loads the programs on a lab's box, and registers the flows of a ring, number 1, with rank r on
/// host `places[r]`.
///
/// # Errors
/// If the kernel refuses any of it.
/// If the kernel refuses any of it.
pub fn register(lab: &Lab, load: &Load, places: &[usize], v6: bool) -> Result<BpfDataPlane> {
    let ring = load.ring(1)?;
    let port = |host: usize| lab.box_().ifindex(&lab.box_().port(host));
    let all = (0..lab.hosts().len()).map(port).collect::<Result<Vec<_>>>()?;
    let ports: Vec<u32> = places.iter().map(|&host| all[host]).collect();
    let ip = |rank: u32| {
        let host = lab.host(places[rank as usize]);
        if v6 { host.ipv6(0) } else { host.ip(0) }
    };
    // Interface indices are only valid in the box's namespace.
    lab.box_().enter(|| {
        let mut plane = BpfDataPlane::load(&[1])?;
        all.iter().try_for_each(|&port| plane.attach(port))?;
        plane.create_ring(&ring)?;
        for rank in 0..load.ranks {
            let (src, dst) = (ip(rank), ip((rank + 1) % load.ranks));
            plane.add_flow(&load.flow(1, rank, ports[rank as usize], src, dst))?;
        }
        plane.activate_ring(&ring, &ports)?;
        Ok(plane)
    })
}

/// A running rank.
struct Rank {
    number: u32,
    out: QpId,
    into: QpId,
    sent: u32,
    received: u32,
    acknowledged: u32,
}

impl Rank {
    fn new(load: &Load, endpoint: &mut Endpoint, number: u32, ips: &[IpAddr]) -> Result<Self> {
        let (next, previous) = ((number + 1) % load.ranks, (number + load.ranks - 1) % load.ranks);
        let (to, from, mtu) = (ips[next as usize], ips[previous as usize], load.mtu as usize);
        let (send, receive) = (|rank| Qpn::new(send_qpn(rank)), |rank| Qpn::new(receive_qpn(rank)));
        let psn = |rank| Psn::new(load.psn(rank));
        let mut out =
            QpConfig::new(send(number), to, receive(next), psn(number), Psn::default(), mtu);
        out.retry_limit = None;
        out.ack_timeout = load.ack_timeout;
        out.opcode = load.operation;
        // Through a box, an acknowledgement waits for all ranks, and its delay says nothing about
        // the link.
        out.waits_for_others = true;
        let into = QpConfig::new(
            receive(number),
            from,
            send(previous),
            Psn::default(),
            psn(previous),
            mtu,
        );
        let (out, into) = (endpoint.add_qp(out)?, endpoint.add_qp(into)?);
        (0..load.window * 2).for_each(|_| endpoint.post_receive(into, Vec::new()));
        Ok(Self { number, out, into, sent: 0, received: 0, acknowledged: 0 })
    }

    fn send(&mut self, load: &Load, endpoint: &mut Endpoint) {
        while self.sent < load.messages && self.sent < self.received + load.window {
            let immediate = load.immediate.then_some(self.sent);
            let payload = load.payload(self.number, self.sent);
            endpoint.post_send(self.out, self.sent.into(), payload, immediate);
            self.sent += 1;
        }
    }

    fn receive(&mut self, load: &Load, data: &[u8], immediate: Option<u32>) -> Result<()> {
        let all: Vec<_> = (0..load.ranks).map(|r| load.payload(r, self.received)).collect();
        let (rank, message) = (self.number, self.received);
        let expected = match load.lsb {
            Some(lsb) => float_sum(lsb, load.ranks, &all).0,
            None => sum(&all),
        };
        if let Some(at) = (0..data.len()).step_by(4).find(|&i| data[i..i + 4] != expected[i..i + 4])
        {
            let terms: Vec<_> = all.iter().map(|x| &x[at..at + 4]).collect();
            bail!(
                "rank {rank}, message {message}: at {at} {:02x?} is not the sum of {terms:02x?}, \
                 {:02x?}",
                &data[at..at + 4],
                &expected[at..at + 4]
            );
        }
        ensure!(
            immediate == load.immediate.then_some(message),
            "rank {rank}: {immediate:?} with {message}"
        );
        self.received += 1;
        Ok(())
    }

    fn is_done(&self, load: &Load) -> bool {
        (self.received, self.acknowledged) == (load.messages, load.messages)
    }
}

/// All ranks of a host.
fn host(load: Load, netns: &Netns, ip: IpAddr, numbers: &[u32], ips: &[IpAddr]) -> Result<Stats> {
    let mut driver = netns.enter(|| UdpDriver::bind(ip))?;
    let config = EndpointConfig { cnp_interval: load.cnp_interval, ..EndpointConfig::default() };
    let mut endpoint = Endpoint::new(ip, config);
    let ranks = numbers.iter().map(|&number| Rank::new(&load, &mut endpoint, number, ips));
    let mut ranks = ranks.collect::<Result<Vec<_>>>()?;
    let deadline = Instant::now() + Duration::from_secs(60);
    // Stays a little after the last sum: the neighbour may need an acknowledgement again.
    let mut quiet = None;
    loop {
        ranks.iter_mut().for_each(|rank| rank.send(&load, &mut endpoint));
        driver.drive(&mut endpoint, Instant::now() + Duration::from_millis(10))?;
        while let Some(event) = endpoint.poll_event() {
            match event {
                Event::Received { qp, data, immediate } => {
                    let rank = ranks
                        .iter_mut()
                        .find(|r| r.into == qp)
                        .context("a queue pair of nobody's")?;
                    rank.receive(&load, &data, immediate)?;
                    endpoint.post_receive(qp, data);
                }
                Event::Sent { qp, .. } => {
                    ranks.iter_mut().filter(|r| r.out == qp).for_each(|r| r.acknowledged += 1);
                }
                Event::Failed { error, .. } => bail!("{ip}: {error}"),
            }
        }
        if let Some(enough) = load.leave_after
            && ranks.iter().all(|r| r.received >= enough)
        {
            return Ok(*endpoint.stats());
        }
        if Instant::now() > deadline {
            let ranks: Vec<_> =
                ranks.iter().map(|r| (r.number, r.sent, r.acknowledged, r.received)).collect();
            bail!("{ip}: rank, sent, acknowledged, received: {ranks:?}; {:?}", endpoint.stats());
        }
        if ranks.iter().all(|r| r.is_done(&load)) {
            let since: &mut Instant = quiet.get_or_insert_with(Instant::now);
            if since.elapsed() > load.linger() {
                return Ok(*endpoint.stats());
            }
        }
    }
}
