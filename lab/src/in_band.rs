//! An application that knows of netsum only the header of its messages: a ring of RC queue pairs
//! with a window, over the library's endpoint. Each rank sends to the next, and expects the sum
//! from the previous one.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use netsum_common::serial;
use netsum_common::wire::in_band::JOB_HEADER_LEN;
use netsum_common::wire::{InBandToken, JobHeader};
use netsum_worker::rc::{Endpoint, EndpointConfig, Event, Operation, Psn, QpConfig, Qpn, Stats};
use netsum_worker::udp::UdpDriver;

use crate::cluster::Cluster;
use crate::frames::{lanes, sum};
use crate::lab::Lab;
use crate::netns::Netns;

/// Timeout of all ranks together.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
pub struct InBandRing {
    /// Ranks, one on each of the first hosts.
    pub ranks: u32,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// Bytes of the longest messages, with the header.
    pub message_size: u32,
    /// Messages that a rank may send before it has their sums.
    pub window: u32,
    /// Use RDMA WRITE instead of SEND.
    pub write: bool,
    /// Seed of the data.
    pub seed: u32,
    /// The token in its messages.
    pub token: InBandToken,
}

/// The connections of all ranks, and what is sent on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connections {
    /// First queue pair number. The data depends on it, too.
    pub qpn: u32,
    /// First PSNs.
    pub psn: u32,
}

impl Connections {
    /// The `n`-th set of connections, each with other queue pairs and PSNs. PSNs wrap early.
    pub fn new(n: u32) -> Self {
        Self { qpn: 0x1000 * n, psn: serial::sub(0, 40 + 1000 * n) }
    }

    /// Queue pair to which rank k-1 sends.
    pub fn receives(&self, rank: u32) -> u32 {
        self.qpn + 2 * rank
    }

    pub fn first_psn(&self, rank: u32) -> u32 {
        serial::sub(self.psn, 100 * rank)
    }
}

/// Where ranks run: one on each host.
#[derive(Clone, Debug)]
pub struct Hosts(Vec<(Netns, IpAddr)>);

impl Hosts {
    pub fn of(lab: &Lab) -> Self {
        Self(lab.hosts().iter().map(|host| (Netns::clone(host), host.ip(0))).collect())
    }
}

/// State shared by ranks that run at the same time.
#[derive(Debug)]
pub struct Others<'a> {
    stop: &'a AtomicBool,
    /// How many ranks are done.
    done: AtomicUsize,
    ranks: usize,
}

impl<'a> Others<'a> {
    /// For `ranks` ranks, which run until `stop` is set or all are done.
    pub fn new(stop: &'a AtomicBool, ranks: usize) -> Self {
        Self { stop, done: AtomicUsize::new(0), ranks }
    }
}

/// Results of a rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Got {
    /// Messages with the right sum and header.
    pub sums: u32,
    /// Messages as the previous rank sent them.
    pub unsummed: u32,
    /// Time from the start to the first message.
    pub first: Option<Duration>,
    /// Packets sent again until then.
    pub again: u64,
    /// The endpoint's counters.
    pub stats: Stats,
}

impl InBandRing {
    /// `ranks` ranks with messages of several packets.
    pub fn new(ranks: u32, token: InBandToken) -> Self {
        Self { ranks, mtu: 1024, message_size: 16 << 10, window: 2, write: false, seed: 0, token }
    }

    /// Creates its job on the box, which generates its token.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn create(cluster: &Cluster, ranks: u32) -> Result<Self> {
        let mut ring = Self::new(ranks, InBandToken([0; 16]));
        ring.create_job(cluster)?;
        Ok(ring)
    }

    /// Creates its job on the box with this ring's properties, and stores its token.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn create_job(&mut self, cluster: &Cluster) -> Result<()> {
        let numbers = [
            ("--ranks", self.ranks),
            ("--mtu", self.mtu),
            ("--message-size", self.message_size),
            ("--window", self.window),
        ];
        let created = cluster.create("app", &numbers, &["--in-band"])?;
        let text = created["in_band"]["token"]
            .as_str()
            .with_context(|| format!("no token in {created}"))?;
        for (i, byte) in self.token.0.iter_mut().enumerate() {
            *byte = u8::from_str_radix(text.get(2 * i..2 * i + 2).context("a short token")?, 16)?;
        }
        Ok(())
    }

    /// Bytes of a message. Lengths differ.
    fn size(&self, message: u32) -> u32 {
        let short = (self.message_size / 2 / 4 * 4 + 4).max(JOB_HEADER_LEN as u32 + 4);
        if message % 3 == 1 { short } else { self.message_size }
    }

    fn fragments(&self, message: u32) -> u32 {
        self.size(message).div_ceil(self.mtu)
    }

    pub fn header(&self, rank: u32, message: u32) -> JobHeader {
        let before: u32 = (0..message).map(|m| self.fragments(m)).sum();
        JobHeader {
            dtype: 1,
            token: self.token,
            ring: 0,
            rank,
            ranks: self.ranks,
            message,
            fragments: self.fragments(message),
            index: before & serial::MASK,
        }
    }

    pub fn message(&self, c: Connections, rank: u32, message: u32) -> Vec<u8> {
        let mut bytes = lanes(
            rank * 100_003 + message + c.qpn + c.psn + self.seed,
            self.size(message) as usize / 4,
        );
        bytes[..JOB_HEADER_LEN].copy_from_slice(&self.header(rank, message).encode());
        bytes
    }

    /// Runs a rank on its host until it and the others have received `messages` messages and all of
    /// their own have been acknowledged, or until it must stop.
    ///
    /// # Errors
    /// If a message is neither a right sum nor the previous rank's, or time is up.
    pub fn run(
        &self,
        hosts: &Hosts,
        me: u32,
        c: Connections,
        messages: u32,
        others: &Others<'_>,
    ) -> Result<Got> {
        let (next, previous) = ((me + 1) % self.ranks, (me + self.ranks - 1) % self.ranks);
        let ip = |rank: u32| hosts.0[rank as usize].1;
        let mut driver = hosts.0[me as usize].0.enter(|| UdpDriver::bind(ip(me)))?;
        let mut endpoint = Endpoint::new(ip(me), EndpointConfig::default());
        let mtu = self.mtu as usize;
        let (receives, sends) =
            (|rank| Qpn::new(c.receives(rank)), |rank| Qpn::new(c.receives(rank) + 1));
        let psn = |rank| Psn::new(c.first_psn(rank));
        let mut out =
            QpConfig::new(sends(me), ip(next), receives(next), psn(me), Psn::default(), mtu);
        out.retry_limit = None;
        if self.write {
            out.opcode = Operation::Write { address: 0x1000, rkey: 7 };
        }
        let out = endpoint.add_qp(out)?;
        let into = QpConfig::new(
            receives(me),
            ip(previous),
            sends(previous),
            Psn::default(),
            psn(previous),
            mtu,
        );
        let into = endpoint.add_qp(into)?;
        (0..self.window * 2).for_each(|_| endpoint.post_receive(into, Vec::new()));
        let (mut sent, mut acknowledged, mut got) = (0, 0, Got::default());
        let (start, mut done) = (Instant::now(), false);
        loop {
            let received = got.sums + got.unsummed;
            while sent < messages && sent < received + self.window {
                // The receiver would not notice a WRITE without immediate data here.
                let immediate = self.write.then_some(sent);
                endpoint.post_send(out, sent.into(), self.message(c, me, sent), immediate);
                sent += 1;
            }
            driver.drive(&mut endpoint, Instant::now() + Duration::from_millis(10))?;
            while let Some(event) = endpoint.poll_event() {
                match event {
                    Event::Received { data, .. } => {
                        let number = got.sums + got.unsummed;
                        if self.is_sum(c, me, number, &data)? {
                            got.sums += 1;
                        } else {
                            got.unsummed += 1;
                        }
                        if got.first.is_none() {
                            (got.first, got.again) =
                                (Some(start.elapsed()), endpoint.stats().retransmissions);
                        }
                        endpoint.post_receive(into, data);
                    }
                    Event::Sent { .. } => acknowledged += 1,
                    Event::Failed { error, .. } => bail!("rank {me}: {error}"),
                }
            }
            got.stats = *endpoint.stats();
            if others.stop.load(Ordering::Relaxed) {
                return Ok(got);
            }
            ensure!(
                start.elapsed() < TIMEOUT,
                "rank {me}: {sent} sent, {acknowledged} acknowledged, {got:?}"
            );
            if (got.sums + got.unsummed, acknowledged) == (messages, messages) {
                if !std::mem::replace(&mut done, true) {
                    others.done.fetch_add(1, Ordering::Relaxed);
                }
                // A rank that is not done may need an acknowledgement again.
                if others.done.load(Ordering::Relaxed) == others.ranks {
                    return Ok(got);
                }
            }
        }
    }

    /// Whether a received message is the sum, or the previous rank's.
    fn is_sum(&self, c: Connections, me: u32, number: u32, data: &[u8]) -> Result<bool> {
        let all: Vec<_> = (0..self.ranks).map(|r| self.message(c, r, number)).collect();
        let is_sum = data == sum(&all);
        ensure!(
            is_sum || data == all[((me + self.ranks - 1) % self.ranks) as usize],
            "rank {me}, message {number}: neither the sum nor as it was sent"
        );
        Ok(is_sum)
    }

    /// Runs all ranks, independently. Returns the results of each, in order.
    ///
    /// # Errors
    /// The error of the first rank that failed.
    pub fn run_all(&self, hosts: &Hosts, c: Connections, messages: u32) -> Result<Vec<Got>> {
        let all: Vec<u32> = (0..self.ranks).collect();
        self.run_some(hosts, c, &all, messages, &AtomicBool::new(false))
    }

    /// Runs some ranks, until `stop` is set or they are done.
    ///
    /// # Errors
    /// The error of the first rank that failed.
    pub fn run_some(
        &self,
        hosts: &Hosts,
        c: Connections,
        ranks: &[u32],
        messages: u32,
        stop: &AtomicBool,
    ) -> Result<Vec<Got>> {
        let others = &Others::new(stop, ranks.len());
        std::thread::scope(|scope| {
            let ranks: Vec<_> = ranks
                .iter()
                .map(|&rank| scope.spawn(move || self.run(hosts, rank, c, messages, others)))
                .collect();
            ranks.into_iter().map(|r| r.join().expect("a rank does not panic")).collect()
        })
    }
}
