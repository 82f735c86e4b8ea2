//! A job: hosts, links, a box, and the clock, which goes from event to event.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::time::{Duration, Instant};

use super::aggregator::Aggregator;
use super::network::{Class, Direction, Faults, Network, Speed};
use super::rng::Rng;
use super::vector::Vector;
use crate::call;
use crate::engine::{Engine, Finished, Outcome, Settings, Work};
use crate::error::{Error, UnreachableReason};
use crate::failback::{Failback, ReconnectRequest};
use crate::numeric::element::into_data;
use crate::numeric::layout::Layout;
use crate::queue_pairs::{QpInfo, QueuePairChannels, RankQpInfo, SourcePorts};
use crate::seal::{Secret, Share};
use crate::shape::JobShape;
use netsum_common::wire::ROCE_PORT;
use netsum_rc::{Endpoint, EndpointConfig, Psn, Qpn};
use zeroize::Zeroizing;

/// The box is always there.
pub(super) const ALWAYS: Range<Duration> = Duration::ZERO..Duration::MAX;
/// The box is never there.
pub(super) const NEVER: Range<Duration> = Duration::ZERO..Duration::ZERO;

/// The specification of a simulation.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub seed: u64,
    pub ranks: u32,
    pub mtu: u32,
    pub layout: Layout,
    /// Boxes below each box, level by level: with two numbers there are leaves, boxes between, and
    /// a spine. One box if empty.
    pub branches: Vec<usize>,
    /// Losses between boxes, in millionths.
    pub uplink_loss: u32,
    /// Links between boxes, for packets to be summed; instant if not given. Other packets take no
    /// time there.
    pub uplink: Option<Speed>,
    /// Selective retransmission at the hosts and relaxed order in the box; go-back-N and in order
    /// otherwise.
    pub selective: bool,
    pub faults: Faults,
    pub speed: Speed,
    /// The time between a packet's arrival and its delivery with all that have arrived meanwhile:
    /// cards moderate interrupts, and processes must wake up.
    pub wakes: Duration,
    pub timeout: Duration,
    /// Ranks draw their random numbers from this.
    pub session: u64,
    /// How long a rank waits for the previous one's hello.
    pub connect_timeout: Duration,
    /// The ranks know from the start that there is no box.
    pub on_host_ring: bool,
    /// Messages are sealed. Sums of integers must not wrap.
    pub is_sealed: bool,
    /// A rank with another secret.
    pub other_secret: Option<u32>,
    /// When the box sums.
    pub present: Range<Duration>,
    /// And when it does not sum, in between.
    pub absent: Range<Duration>,
    /// When a rank becomes silent for ever.
    pub death: Option<(usize, Duration)>,
    /// The call, from 0, before which rank 0 proposes to reconnect after it, or after the latest
    /// one that another rank has started.
    pub reconnect: Option<usize>,
    /// The same, but then the ranks cannot join.
    pub refused: Option<usize>,
    /// Ranks that have fallen back try the box again, over new connections.
    pub returns: bool,
    /// Each rank's call, every time; a sum if empty.
    pub called: Vec<call::Call>,
    /// How many calls may be in flight.
    pub depth: usize,
    /// One of this many calls waits for its result; not the same ones at all ranks.
    pub blocking: usize,
    /// When ranks do nothing, while packets wait in their sockets.
    pub pauses: Vec<(usize, Range<Duration>)>,
    /// Longest simulated time; a longer case hangs.
    pub limit: Duration,
}

impl Spec {
    /// Without faults, over links of 10 Gb/s and 10 us.
    pub fn new(ranks: u32, layout: Layout, seed: u64) -> Self {
        Self {
            seed,
            ranks,
            mtu: 256,
            layout,
            branches: Vec::new(),
            uplink_loss: 0,
            uplink: None,
            selective: false,
            faults: Faults::default(),
            // 0.8 ns in truth; a whole nanosecond keeps the clock exact.
            speed: Speed { per_byte: 1, latency: Duration::from_micros(10), bucket: 0, others: 0 },
            wakes: Duration::ZERO,
            timeout: Duration::from_secs(10),
            session: 1,
            connect_timeout: Duration::from_secs(10),
            on_host_ring: false,
            is_sealed: false,
            other_secret: None,
            present: ALWAYS,
            absent: NEVER,
            death: None,
            reconnect: None,
            refused: None,
            returns: false,
            called: Vec::new(),
            depth: 1,
            blocking: 5,
            pauses: Vec::new(),
            limit: Duration::from_secs(60),
        }
    }
}

impl Spec {
    fn shape(&self, on_host_ring: bool) -> JobShape {
        let Self { ranks, mtu, layout, selective: relaxed, is_sealed, .. } = *self;
        JobShape { ranks, mtu, layout, relaxed, on_host_ring, is_sealed }
    }
}

fn boxes(spec: &Spec, shape: &JobShape, ranks: &[RankQpInfo]) -> Aggregator {
    Aggregator::new(shape, ranks, &spec.branches, spec.uplink_loss, spec.uplink, spec.seed)
}

/// One operation of a rank. It starts when its time has come and few enough are in flight.
pub(super) struct Call {
    pub data: Vector,
    pub not_before: Duration,
}

pub(super) struct Host {
    pub stack: QueuePairChannels,
    pub engine: Engine,
    pub calls: VecDeque<Call>,
    /// The slice that the engine borrows.
    pub current: Option<Vector>,
    /// Calls that have started.
    pub begun: usize,
    /// Outcome, slice and time.
    pub results: Vec<(Result<Finished, Error>, Vector, Duration)>,
    pub alive: bool,
    /// When it left to reconnect; it does nothing afterwards.
    pub parted: Option<Duration>,
    /// Since when it waits for all to join again.
    joins: Option<Duration>,
    /// Datagrams that have arrived during a pause.
    inbox: Vec<(usize, Vec<u8>)>,
    /// When it must run next.
    due: Option<Instant>,
}

/// A datagram in flight.
struct Flying {
    at: Instant,
    /// Breaks ties.
    order: u64,
    from: usize,
    to: usize,
    at_box: bool,
    datagram: Vec<u8>,
}

impl PartialEq for Flying {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl Eq for Flying {}
impl PartialOrd for Flying {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Flying {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

pub(super) struct Sim {
    start: Instant,
    now: Instant,
    pub hosts: Vec<Host>,
    ips: Vec<IpAddr>,
    pub aggregator: Aggregator,
    spec: Spec,
    pub network: Network,
    queue: BinaryHeap<Reverse<Flying>>,
    order: u64,
    buf: Vec<u8>,
    out: Vec<(IpAddr, IpAddr, Vec<u8>)>,
    /// Numbers of queue pairs, and PSNs.
    numbers: (u32, Rng),
    failback: Failback,
    /// After how many operations the ranks could not join.
    pub refused: Option<usize>,
    /// When all ranks have reconnected.
    pub connected: Vec<Duration>,
    /// From now on no box accepts a fragment.
    pub drops_all: bool,
}

/// The delay of the answer to the last rank that joins; it grows with each rank's number.
const ANSWER: Duration = Duration::from_micros(30);

impl Sim {
    pub fn new(spec: &Spec, mut calls: impl FnMut(u32) -> Vec<Call>) -> Self {
        let shape = spec.shape(false);
        let Spec { ranks, layout, .. } = *spec;
        let ips: Vec<IpAddr> =
            (0..ranks).map(|r| Ipv4Addr::new(10, 0, 0, r as u8 + 1).into()).collect();
        let mut numbers = (0, Rng::with_seed(spec.seed));
        let all = fresh(&mut numbers, &ips, layout.rings);
        let start = Instant::now();
        let hosts = (0..ranks).map(|rank| {
            let (stack, engine) = connect(spec, start, rank, &all, 0);
            Host {
                stack,
                engine,
                calls: calls(rank).into(),
                current: None,
                begun: 0,
                results: Vec::new(),
                alive: true,
                parted: None,
                joins: None,
                inbox: Vec::new(),
                due: Some(start),
            }
        });
        let faults = spec.faults.clone();
        Self {
            hosts: hosts.collect(),
            start,
            now: start,
            aggregator: boxes(spec, &shape, &all),
            ips,
            network: Network::new(start, ranks as usize, spec.speed, faults, spec.seed),
            spec: spec.clone(),
            queue: BinaryHeap::new(),
            order: 0,
            buf: Vec::new(),
            out: Vec::new(),
            numbers,
            failback: Failback::new(start),
            refused: None,
            connected: Vec::new(),
            drops_all: false,
        }
    }

    /// All ranks have joined again: creates new connections, and a box with their flows.
    fn reconnect(&mut self) {
        let layout = self.spec.layout;
        let all = fresh(&mut self.numbers, &self.ips, layout.rings);
        let shape = self.spec.shape(false);
        self.aggregator = boxes(&self.spec, &shape, &all);
        if self.drops_all {
            self.aggregator.drop_all();
        }
        self.connected.push(self.elapsed());
        self.failback.connected(self.now, 0);
        for (rank, host) in self.hosts.iter_mut().enumerate() {
            let session = self.connected.len() as u64;
            (host.stack, host.engine) = connect(&self.spec, self.now, rank as u32, &all, session);
            (host.joins, host.due) = (None, Some(self.now));
        }
    }

    /// A rank has completed the last operation over these connections, and waits for the others to
    /// join.
    fn join(&mut self, rank: usize) {
        let elapsed = self.elapsed();
        let host = &mut self.hosts[rank];
        let since = *host.joins.get_or_insert(elapsed);
        let refused = self.spec.refused.is_some()
            && self.refused.is_none_or(|after| host.results.len() <= after);
        let answered = if refused {
            // Some ranks notice it earlier than others.
            since + Duration::from_micros(1 << (7 * rank % 13))
        } else {
            let Some(last) = self.hosts.iter().map(|h| h.joins).collect::<Option<Vec<_>>>() else {
                return;
            };
            let last = last.into_iter().max().unwrap_or_default();
            if self.spec.returns {
                return self.reconnect();
            }
            let at = last + ANSWER * (rank as u32 + 1);
            // The other ranks get the answer, too.
            let soon = self.start + at;
            let waiting = self.hosts.iter_mut().filter(|h| h.parted.is_none());
            waiting.for_each(|h| h.due = Some(h.due.map_or(soon, |due| due.min(soon))));
            at
        };
        let host = &mut self.hosts[rank];
        if elapsed < answered {
            let at = self.start + answered;
            host.due = Some(host.due.map_or(at, |due| due.min(at)));
        } else if refused {
            host.engine.keep_connections();
            (host.joins, host.due) = (None, Some(self.now));
            self.refused = self.refused.or((rank == 0).then_some(host.results.len()));
        } else {
            host.engine.leave(&mut host.stack);
            host.parted = Some(elapsed);
            host.calls.clear();
            self.transmit(rank);
        }
    }

    pub fn elapsed(&self) -> Duration {
        self.now - self.start
    }

    fn hop(
        &mut self,
        direction: Direction,
        class: Class,
        from: usize,
        to: usize,
        datagram: Vec<u8>,
    ) {
        let (queue, order) = (&mut self.queue, &mut self.order);
        let (rank, at_box) = match direction {
            Direction::Up => (from, true),
            Direction::Down => (to, false),
        };
        self.network.send(self.now, rank, direction, class, datagram, |at, datagram| {
            *order += 1;
            queue.push(Reverse(Flying { at, order: *order, from, to, at_box, datagram }));
        });
    }

    /// The rank that has an address. Addresses count up.
    fn host_of(&self, ip: IpAddr) -> usize {
        match ip {
            IpAddr::V4(ip) => usize::from(ip.octets()[3]) - 1,
            IpAddr::V6(_) => unreachable!("all are IPv4"),
        }
    }

    fn transmit(&mut self, from: usize) {
        let mut buf = std::mem::take(&mut self.buf);
        while let Some(t) = self.hosts[from].stack.endpoint.poll_transmit(self.now, &mut buf) {
            let to = self.host_of(t.to);
            for datagram in buf.chunks(t.segment_size.unwrap_or(t.len)) {
                self.hop(Direction::Up, Class::of(datagram), from, to, datagram.to_vec());
            }
        }
        self.buf = buf;
    }

    /// The end of the pause that a rank is in.
    fn paused(&self, rank: usize) -> Option<Duration> {
        let elapsed = self.elapsed();
        let pauses =
            self.spec.pauses.iter().filter(|(r, during)| *r == rank && during.contains(&elapsed));
        pauses.map(|(_, during)| during.end).max()
    }

    /// Lets a rank process its datagrams.
    fn work(&mut self, rank: usize) {
        let (now, elapsed, start) = (self.now, self.elapsed(), self.start);
        if self.spec.death.is_some_and(|(dead, at)| dead == rank && elapsed >= at) {
            self.hosts[rank].alive = false;
        }
        let pause = self.paused(rank);
        let host = &mut self.hosts[rank];
        host.due = None;
        if !host.alive || host.parted.is_some() {
            return;
        }
        if let Some(end) = pause {
            host.due = Some(start + end);
            return;
        }
        for (from, datagram) in std::mem::take(&mut host.inbox) {
            host.stack.endpoint.receive(now, (self.ips[from], ROCE_PORT).into(), false, &datagram);
        }
        host.stack.endpoint.handle_timeout(now);
        loop {
            match &mut host.current {
                Some(data) => host.engine.step(now, &mut host.stack, Some(data)),
                None => host.engine.step(now, &mut host.stack, None),
            }
            while let Some(Outcome { result, data, .. }) = host.engine.outcome() {
                if let Some(data) = data.and_then(into_data).or_else(|| host.current.take()) {
                    host.results.push((result, data, elapsed));
                }
            }
            // As `Session`.
            host.joins = host.joins.filter(|_| host.engine.failure().is_none());
            if host.joins.is_some() || host.engine.must_reconnect() {
                break;
            }
            let free = host.current.is_none() && host.engine.open() < self.spec.depth;
            if !free || host.calls.front().is_none_or(|c| elapsed < c.not_before) {
                break;
            }
            // As `Communicator::connect`.
            if !host.engine.greeted() && host.engine.failure().is_none() {
                if elapsed >= self.spec.connect_timeout {
                    let previous = (rank + self.ips.len() - 1) % self.ips.len();
                    let (ip, after) = (self.ips[previous], self.spec.connect_timeout);
                    let reason = UnreachableReason::Silent;
                    let error = Error::Unreachable { rank: previous as u32, ip, after, reason };
                    let calls = host.calls.drain(..);
                    host.results.extend(calls.map(|c| (Err(error.clone()), c.data, elapsed)));
                    host.engine.fail_to_connect(&mut host.stack, &error);
                }
                break;
            }
            let there =
                self.spec.present.contains(&elapsed) && !self.spec.absent.contains(&elapsed);
            // Other datagrams after a pause.
            let program_generation = u64::from(there) << u8::from(elapsed >= self.spec.absent.end);
            let reconnect_request = ReconnectRequest { reconnect: false, program_generation };
            let asks = self.spec.reconnect == Some(host.begun)
                || self.spec.refused == Some(host.begun)
                || self.spec.returns
                    && self.failback.is_due(now, reconnect_request, host.engine.box_trust());
            if rank == 0 && asks {
                host.engine.propose_reconnect(&mut host.stack);
            }
            if host.engine.is_full() {
                break;
            }
            let Some(Call { data, .. }) = host.calls.pop_front() else { break };
            host.begun += 1;
            let Spec { depth, blocking, .. } = self.spec;
            let blocking = depth == 1 || (host.begun + rank).is_multiple_of(blocking);
            let work =
                if blocking { Work::Lent(&data) } else { Work::Owned(Box::new(data.clone())) };
            let called = self.spec.called.get(rank).copied();
            let called = called.unwrap_or(call::Call { width: data.width(), ..call::Call::SUM });
            match host.engine.start(now, &mut host.stack, called, work) {
                Ok(_) if blocking => host.current = Some(data),
                Ok(_) => {}
                Err(error) => host.results.push((Err(error), data, elapsed)),
            }
        }
        self.transmit(rank);
        let host = &mut self.hosts[rank];
        let free = host.current.is_none() && host.engine.open() < self.spec.depth;
        let calls = host.calls.front().filter(|_| free && !host.engine.is_full());
        let call = calls.map(|c| {
            start
                + if host.engine.greeted() {
                    c.not_before
                } else {
                    self.spec.connect_timeout.max(c.not_before)
                }
        });
        let due = [host.stack.endpoint.next_timeout(), call, Some(host.engine.next_timeout())];
        // A timer that is due and does nothing must not stop the clock.
        host.due = due.into_iter().flatten().min().map(|t| t.max(now + Duration::from_micros(1)));
        if host.joins.is_some() || host.engine.must_reconnect() {
            self.join(rank);
        }
    }

    fn arrive(&mut self, flying: Flying) {
        let Flying { from, to, at_box, datagram, .. } = flying;
        if !at_box {
            let host = &mut self.hosts[to];
            let is_first = host.inbox.is_empty();
            host.inbox.push((from, datagram));
            if self.spec.wakes.is_zero() {
                self.work(to);
            } else if is_first {
                let at = self.now + self.spec.wakes;
                host.due = Some(host.due.map_or(at, |due| due.min(at)));
            }
            return;
        }
        let elapsed = self.elapsed();
        if self.spec.present.contains(&elapsed) && !self.spec.absent.contains(&elapsed) {
            let mut out = std::mem::take(&mut self.out);
            let taken =
                self.aggregator.take(self.now, self.ips[from], self.ips[to], &datagram, &mut out);
            self.release(out);
            if taken {
                return;
            }
        }
        self.hop(Direction::Down, Class::of(&datagram), from, to, datagram);
    }

    /// Sends packets of boxes to hosts.
    fn release(&mut self, mut out: Vec<(IpAddr, IpAddr, Vec<u8>)>) {
        for (src, dst, datagram) in out.drain(..) {
            self.hop(
                Direction::Down,
                Class::Result,
                self.host_of(src),
                self.host_of(dst),
                datagram,
            );
        }
        self.out = out;
    }

    /// Advances to the next event. Returns whether there is one.
    fn step(&mut self) -> bool {
        let hosts = self.hosts.iter().enumerate();
        let due = hosts.filter(|(_, h)| h.alive).filter_map(|(r, h)| h.due.map(|t| (t, r))).min();
        let arrival = self.queue.peek().map(|Reverse(flying)| flying.at);
        if let Some(at) = self.aggregator.next()
            && arrival.is_none_or(|arrival| at <= arrival)
            && due.is_none_or(|(due, _)| at <= due)
        {
            self.now = self.now.max(at);
            let mut out = std::mem::take(&mut self.out);
            self.aggregator.arrive(&mut out);
            self.release(out);
            return true;
        }
        match (self.queue.peek(), due) {
            (Some(Reverse(flying)), due) if due.is_none_or(|d| flying.at <= d.0) => {
                let Some(Reverse(flying)) = self.queue.pop() else { return false };
                self.now = self.now.max(flying.at);
                self.arrive(flying);
            }
            (_, Some((at, rank))) => {
                self.now = self.now.max(at);
                self.work(rank);
            }
            (_, None) => return false,
        }
        true
    }

    /// Runs until all living ranks have finished their calls, and those that reconnect have left.
    ///
    /// # Panics
    /// After the specified longest time.
    pub fn run(&mut self) {
        let is_busy = |h: &Host| {
            let reconnects = h.engine.waits_for_consent() || h.engine.must_reconnect();
            h.engine.open() > 0 || !h.calls.is_empty() || reconnects
        };
        while self.hosts.iter().any(|h| h.alive && h.parted.is_none() && is_busy(h)) {
            assert!(self.elapsed() < self.spec.limit, "a hang: {}", self.describe());
            assert!(self.step(), "nobody is alive");
        }
    }

    /// Runs for a while: packets in flight arrive, and the rest is acknowledged.
    pub fn settle(&mut self, time: Duration) {
        let end = self.elapsed() + time;
        while self.elapsed() < end && self.step() {}
    }

    fn describe(&self) -> String {
        let hosts = self.hosts.iter().map(|h| {
            let calls = h.calls.len() + h.engine.open();
            format!("{calls} calls, {:?} {:?}", h.engine.mode(), h.engine.statistics())
        });
        let unreleased = self.aggregator.unreleased().join("; ");
        format!("{}\nunreleased: {unreleased}", hosts.collect::<Vec<_>>().join("\n"))
    }
}

/// Numbers that no connection has used before.
fn fresh(numbers: &mut (u32, Rng), ips: &[IpAddr], rings: u32) -> Vec<RankQpInfo> {
    let (qpn, rng) = numbers;
    let mut connection = || {
        *qpn += 2;
        // Near the end of the 24 bits, where some wrap.
        let first_psn = Psn::new((0xff_ffe0 + rng.u64(..64)) as u32);
        QpInfo { receive_qpn: Qpn::new(0x100 + *qpn), send_qpn: Qpn::new(0x101 + *qpn), first_psn }
    };
    ips.iter()
        .map(|ip| RankQpInfo {
            ip: *ip,
            rings: (0..rings).map(|_| connection()).collect(),
            bypass: connection(),
            any_ip_id: false,
            selective: true,
            ports: SourcePorts::ROCE,
        })
        .collect()
}

/// A rank's connections after this many reconnects.
fn connect(
    spec: &Spec,
    now: Instant,
    rank: u32,
    all: &[RankQpInfo],
    reconnects: u64,
) -> (QueuePairChannels, Engine) {
    let shape = spec.shape(spec.on_host_ring);
    let endpoint = Endpoint::new(all[rank as usize].ip, EndpointConfig::default());
    let mut stack = QueuePairChannels::new(endpoint, &shape, rank, all, 4096).expect("connections");
    let mut rng =
        Rng::with_seed(spec.seed << 32 ^ (spec.session + reconnects) << 8 ^ u64::from(rank));
    let session = rng.u64(..);
    let share = spec.is_sealed.then(|| {
        let is_other = spec.other_secret == Some(rank);
        let text = if is_other { "another secret, as long" } else { "a secret of the simulator" };
        let secret = Secret::new(text).expect("it is long enough");
        let mut random = Zeroizing::new([0; 64]);
        rng.fill(&mut *random);
        Share::new(secret, &["job"], &random)
    });
    let (summands, timeout) = (shape.ranks, spec.timeout);
    let settings = Settings { rank, shape, summands, timeout, session };
    let engine = Engine::new(now, settings, share, &mut stack);
    (stack, engine)
}
