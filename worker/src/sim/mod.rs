//! Whole jobs without sockets and clocks: N ranks' engines and endpoints, a network that loses, doubles and delays, and
//! a box that sums real packets with the slot state machine of `common`. Everything follows from a seed.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`aggregator`] | the box |
//! | [`tests`] | what must hold |

mod aggregator;
mod tests;

use std::collections::{BinaryHeap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::comm::config::JobShape;
use crate::comm::engine::{Engine, Finished, Settings};
use crate::comm::error::Error;
use crate::comm::links::{Links, Numbers, RankNumbers};
use crate::numeric::element::{Data, Dtype, Slice};
use crate::numeric::layout::Layout;
use crate::numeric::quant::Scale;
use crate::rc::{Endpoint, EndpointConfig};
use aggregator::Aggregator;

/// A small generator (splitmix64).
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

/// What each hop does to packets, in thousandths.
#[derive(Clone, Copy, Default)]
struct Faults {
    loss: u64,
    duplicate: u64,
    reorder: u64,
}

/// A slice of either type.
#[derive(Clone, Debug)]
enum Vector {
    I(Vec<i32>),
    F(Vec<f32>),
}

impl Vector {
    fn bits(&self) -> Vec<u32> {
        match self {
            Self::I(x) => x.iter().map(|x| *x as u32).collect(),
            Self::F(x) => x.iter().map(|x| x.to_bits()).collect(),
        }
    }
}

impl Data for Vector {
    fn dtype(&self) -> Dtype {
        match self {
            Self::I(_) => Dtype::I32,
            Self::F(_) => Dtype::F32,
        }
    }
    fn len(&self) -> usize {
        match self {
            Self::I(x) => x.len(),
            Self::F(x) => x.len(),
        }
    }
    fn bucket(&self, range: Range<usize>) -> u8 {
        match self {
            Self::I(_) => 0,
            Self::F(x) => crate::numeric::quant::bucket(&x[range]),
        }
    }
    fn load(&self, range: Range<usize>, scale: Option<Scale>, out: &mut [u8]) {
        match self {
            Self::I(x) => crate::Element::to_lanes(&x[range], scale, out),
            Self::F(x) => crate::Element::to_lanes(&x[range], scale, out),
        }
    }
    fn store(&mut self, range: Range<usize>, scale: Option<Scale>, sums: &[u8]) {
        match self {
            Self::I(x) => crate::Element::from_lanes(sums, scale, &mut x[range]),
            Self::F(x) => crate::Element::from_lanes(sums, scale, &mut x[range]),
        }
    }
}

/// One operation of a rank, begun when the one before is done and its time has come.
struct Call {
    data: Vector,
    not_before: Duration,
}

struct Host {
    links: Links,
    engine: Engine,
    calls: VecDeque<Call>,
    current: Option<Vector>,
    results: Vec<(Result<Finished, Error>, Vector, Duration)>,
    alive: bool,
}

/// A datagram on its way.
struct Flying {
    from: usize,
    to: usize,
    at_box: bool,
    datagram: Vec<u8>,
}

struct Sim {
    start: Instant,
    now: Instant,
    hosts: Vec<Host>,
    ips: Vec<IpAddr>,
    aggregator: Aggregator,
    /// When the box begins and ceases to sum.
    present: Range<Duration>,
    /// When a rank falls silent.
    death: Option<(usize, Duration)>,
    flying: Vec<Option<Flying>>,
    queue: BinaryHeap<std::cmp::Reverse<(Instant, u64, usize)>>,
    order: u64,
    rng: Rng,
    faults: Faults,
}

/// What a simulation is about.
#[derive(Clone)]
struct Spec {
    ranks: u32,
    layout: Layout,
    faults: Faults,
    seed: u64,
    timeout: Duration,
    present: Range<Duration>,
    death: Option<(usize, Duration)>,
}

const ALWAYS: Range<Duration> = Duration::ZERO..Duration::MAX;
const MTU: u32 = 256;

impl Spec {
    fn new(ranks: u32, layout: Layout, seed: u64) -> Self {
        let (faults, timeout) = (Faults::default(), Duration::from_secs(10));
        Self { ranks, layout, faults, seed, timeout, present: ALWAYS, death: None }
    }
}

impl Sim {
    fn new(spec: &Spec, mut calls: impl FnMut(u32) -> Vec<Call>) -> Self {
        let mut rng = Rng(spec.seed);
        let Spec { ranks, layout, .. } = *spec;
        let shape = JobShape { ranks, mtu: MTU, layout };
        let ips: Vec<IpAddr> = (0..ranks).map(|r| Ipv4Addr::new(10, 0, 0, r as u8 + 1).into()).collect();
        let mut qpn = 0;
        let mut numbers = || {
            qpn += 2;
            // Near the end of the 24 bits, so that some wrap.
            let first_psn = (0xff_ffe0 + rng.below(64)) as u32 & 0xff_ffff;
            Numbers { receive_qpn: 0x100 + qpn, send_qpn: 0x101 + qpn, first_psn }
        };
        let all: Vec<RankNumbers> = ips
            .iter()
            .map(|ip| RankNumbers {
                ip: *ip,
                rings: (0..layout.rings).map(|_| numbers()).collect(),
                plain: numbers(),
            })
            .collect();
        let start = Instant::now();
        let hosts = (0..ranks).map(|rank| {
            let endpoint = Endpoint::new(ips[rank as usize], EndpointConfig::default());
            let mut links = Links::new(endpoint, &shape, rank, &all, 4096).unwrap();
            let engine = Engine::new(start, Settings { rank, shape, timeout: spec.timeout }, &mut links);
            let calls = calls(rank).into();
            Host { links, engine, calls, current: None, results: Vec::new(), alive: true }
        });
        Self {
            hosts: hosts.collect(),
            start,
            now: start,
            aggregator: Aggregator::new(&shape, &all),
            ips,
            present: spec.present.clone(),
            death: spec.death,
            flying: Vec::new(),
            queue: BinaryHeap::new(),
            order: 0,
            rng,
            faults: spec.faults,
        }
    }

    fn elapsed(&self) -> Duration {
        self.now - self.start
    }

    /// Puts a datagram on one hop.
    fn hop(&mut self, flying: Flying) {
        if self.rng.chance(self.faults.loss) {
            return;
        }
        let copies = 1 + self.rng.chance(self.faults.duplicate) as u32;
        for _ in 0..copies {
            let late = if self.rng.chance(self.faults.reorder) { self.rng.below(200) } else { 0 };
            let arrival = self.now + Duration::from_micros(10 + late);
            self.order += 1;
            self.queue.push(std::cmp::Reverse((arrival, self.order, self.flying.len())));
            self.flying.push(Some(Flying { datagram: flying.datagram.clone(), ..flying }));
        }
    }

    fn transmit(&mut self, from: usize) {
        let mut buf = Vec::new();
        while let Some(t) = self.hosts[from].links.endpoint.poll_transmit(self.now, &mut buf) {
            let Some(to) = self.ips.iter().position(|ip| *ip == t.to) else { panic!("sent to a stranger") };
            for datagram in buf.chunks(t.segment_size.unwrap_or(t.len)) {
                self.hop(Flying { from, to, at_box: true, datagram: datagram.to_vec() });
            }
        }
    }

    /// Lets a rank work off what it has.
    fn work(&mut self, rank: usize) {
        if let Some((dead, at)) = self.death
            && dead == rank
            && self.elapsed() >= at
        {
            self.hosts[rank].alive = false;
        }
        let (now, elapsed) = (self.now, self.elapsed());
        let host = &mut self.hosts[rank];
        if !host.alive {
            return;
        }
        host.links.endpoint.handle_timeout(now);
        loop {
            match &mut host.current {
                Some(data) => host.engine.step(now, &mut host.links, data),
                None => host.engine.step(now, &mut host.links, &mut Slice::<i32>(&mut [])),
            }
            if let Some(outcome) = host.current.as_ref().and_then(|_| host.engine.finished()) {
                host.results.push((outcome, host.current.take().unwrap(), elapsed));
            }
            if host.current.is_some() || host.calls.front().is_none_or(|c| elapsed < c.not_before) {
                break;
            }
            let data = host.calls.pop_front().unwrap().data;
            match host.engine.start(now, &mut host.links, &data) {
                Ok(()) => host.current = Some(data),
                Err(error) => host.results.push((Err(error), data, elapsed)),
            }
        }
        self.transmit(rank);
    }

    fn arrive(&mut self, flying: Flying) {
        let Flying { from, to, at_box, datagram } = flying;
        if !at_box {
            let now = self.now;
            let host = &mut self.hosts[to];
            if host.alive {
                host.links.endpoint.receive(now, self.ips[from], false, &datagram);
            }
            return self.work(to);
        }
        if self.present.contains(&self.elapsed()) {
            let (ips, now_out) = (&self.ips, &mut Vec::new());
            if self.aggregator.take(ips[from], ips[to], &datagram, now_out) {
                for (src, dst, datagram) in now_out.drain(..) {
                    let place = |ip| self.ips.iter().position(|i| *i == ip).unwrap();
                    let (from, to) = (place(src), place(dst));
                    self.hop(Flying { from, to, at_box: false, datagram });
                }
                return;
            }
        }
        self.hop(Flying { from, to, at_box: false, datagram });
    }

    /// Runs until all ranks alive have finished their calls. Panics after a minute of simulated time.
    fn run(&mut self) {
        (0..self.hosts.len()).for_each(|r| self.work(r));
        while self.hosts.iter().any(|h| h.alive && (h.current.is_some() || !h.calls.is_empty())) {
            assert!(self.elapsed() < Duration::from_secs(60), "a hang: {}", self.describe());
            let timeout = |h: &Host| {
                let call = h.calls.front().filter(|_| h.current.is_none()).map(|c| self.start + c.not_before);
                let rc = h.links.endpoint.next_timeout();
                [rc, call, Some(h.engine.next_timeout())].into_iter().flatten().min().map(|t| t.max(self.now))
            };
            let due = (0..self.hosts.len())
                .filter(|r| self.hosts[*r].alive)
                .filter_map(|r| timeout(&self.hosts[r]).map(|t| (t, r)))
                .min();
            let arrival = self.queue.peek().map(|q| q.0.0);
            match (arrival, due) {
                (Some(arrival), due) if due.is_none_or(|d| arrival <= d.0) => {
                    let Some(std::cmp::Reverse((at, _, flying))) = self.queue.pop() else { unreachable!() };
                    self.now = self.now.max(at);
                    let flying = self.flying[flying].take().unwrap();
                    self.arrive(flying);
                }
                (_, Some((at, rank))) => {
                    // A timer that is due and does nothing must not stop the clock.
                    self.now = if at <= self.now { self.now + Duration::from_micros(1) } else { at };
                    self.work(rank);
                }
                (_, None) => panic!("nobody is alive"),
            }
        }
    }

    fn describe(&self) -> String {
        let hosts = self.hosts.iter().map(|h| {
            let calls = h.calls.len() + h.current.is_some() as usize;
            format!("{calls} calls, {:?} {:?}", h.engine.mode(), h.engine.statistics())
        });
        hosts.collect::<Vec<_>>().join("\n")
    }
}
