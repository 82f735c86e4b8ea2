//! Generates a job with faults from a seed, and checks that it ends as it must.

use std::fmt;
use std::time::Duration;

use super::aggregator::Corruption;
use super::job::{ALWAYS, Call, NEVER, Sim, Spec};
use super::network::{Burst, Class, Cut, Damage, Direction, Faults, Rates, Victim, percent};
use super::rng::{Random, Rng};
use super::vector::Vector;
use crate::error::Error;
use crate::numeric::block::Width;
use crate::numeric::element::Dtype;
use crate::numeric::layout::Layout;
use crate::report::Mode;

/// A job with all its faults.
pub(super) struct Scenario {
    pub spec: Spec,
    pub operations: Vec<(Dtype, usize)>,
    /// Of this many operations, one starts late at a rank.
    pub idle: u64,
    pub corruption: Option<(u32, Corruption)>,
}

/// The result of a case.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    /// All operations gave the right sum at every rank.
    pub right: bool,
    /// At least in part, the hosts' ring summed.
    pub by_ring: bool,
    /// Datagrams that the network lost.
    pub lost: u64,
    /// Datagrams that the network corrupted.
    pub corrupted: u64,
    /// Data packets sent.
    pub packets: u64,
    /// Data packets sent again.
    pub retransmissions: u64,
    pub timeouts: u64,
    /// Simulated time.
    pub time: Duration,
}

/// Random faults, none more often than `worst`. If half of all packets are lost, ranks rightly take
/// each other for dead: a case stays well below.
fn rates(rng: &mut Rng, worst: u32) -> Rates {
    let mut rate = |often: u64, worst: u32| {
        if rng.u64(..100) < often { rng.u64(..u64::from(worst)) as u32 } else { 0 }
    };
    Rates {
        loss: rate(60, worst),
        duplicate: rate(30, worst),
        reorder: rate(30, worst),
        corrupt: rate(30, worst / 2),
        delay: rate(20, worst / 4),
    }
}

fn burst(rng: &mut Rng) -> Burst {
    Burst {
        enter: rng.pick(&[1_000, 5_000, 20_000]),
        leave: rng.pick(&[50_000, 200_000, 500_000]),
        loss: rng.pick(&[300_000, 800_000, 1_000_000]),
    }
}

impl Scenario {
    /// Generates the case of a seed.
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed ^ 0x7363_656e_6172_696f);
        let rng = &mut rng;
        let ranks = rng.pick(&[2, 2, 2, 3, 3, 3, 4, 4, 5, 8]);
        let layout = Layout {
            message_size: rng.pick(&[336, 360, 512, 600, 1024, 2048]),
            window: rng.pick(&[1, 2, 2, 3, 4]),
            rings: rng.pick(&[1, 1, 1, 2, 3]),
        };
        let mut spec = Spec::new(ranks, layout, seed);
        (spec.timeout, spec.connect_timeout) = (Duration::from_secs(4), Duration::from_secs(6));
        spec.selective = rng.u64(..3) == 0;
        let f = &mut spec.faults;
        match rng.u64(..10) {
            0 => {}
            // One packet of a kind: the first, the last, or any. A number beyond the last has no
            // effect.
            1 | 2 => {
                for _ in 0..rng.pick(&[1, 1, 1, 2, 3]) {
                    let class = rng.pick(&[Class::Data, Class::Ack, Class::Nak, Class::Result]);
                    let down = class == Class::Result || rng.u64(..2) == 0;
                    let direction = if down { Direction::Down } else { Direction::Up };
                    let (rank, nth) = (rng.u64(..u64::from(ranks)) as usize, rng.u64(..12) as u32);
                    f.victims.push(Victim { rank, class, direction, nth });
                }
            }
            // One kind of packet in one direction.
            3 | 4 => {
                let class = rng.u64(..4) as usize;
                let worst = rng.pick(&[20_000, 100_000, 200_000]);
                if class == Class::Result as usize || rng.u64(..2) == 0 {
                    f.down[class] = rates(rng, worst);
                } else {
                    f.up[class] = rates(rng, worst);
                }
            }
            5 | 6 => {
                *f = Faults::even(rates(rng, 30_000));
            }
            7 => {
                for class in 0..4 {
                    f.up[class] = rates(rng, 100_000);
                    f.down[class] = rates(rng, 100_000);
                }
            }
            _ => {
                if rng.u64(..2) == 0 {
                    *f = Faults::even(rates(rng, 10_000));
                }
                let (up, down) = rng.pick(&[(true, false), (false, true), (true, true)]);
                f.burst_up = up.then(|| burst(rng));
                f.burst_down = down.then(|| burst(rng));
            }
        }
        // From its own generator: the other properties of a seed's case stay the same.
        let mut levels = Rng::with_seed(seed ^ 0x6c65_7665_6c73_0000);
        if ranks > 3 && levels.u64(..3) == 0 {
            spec.branches = vec![levels.pick(&[2, 2, 3, ranks as usize])];
            spec.uplink_loss = levels.pick(&[0, 0, 1_000, 10_000, 50_000]);
            if spec.branches == [2] && levels.u64(..2) == 0 {
                spec.branches.push(levels.pick(&[1, 2]));
            }
        }
        spec.is_sealed = Rng::with_seed(seed ^ 0x7365_616c_6564_0000).u64(..3) == 0;
        let instant = |rng: &mut Rng| {
            Duration::from_micros(1 << rng.u64(..17)) + Duration::from_nanos(rng.u64(..9999))
        };
        if rng.u64(..6) == 0 {
            for _ in 0..rng.pick(&[1, 1, 2]) {
                let from = instant(rng);
                let length = Duration::from_micros(1 << rng.u64(..20));
                spec.pauses.push((rng.u64(..u64::from(ranks)) as usize, from..from + length));
            }
        }
        if rng.u64(..12) == 0 {
            let from = instant(rng);
            let until = match rng.u64(..2) {
                0 => from + Duration::from_micros(1 << rng.u64(..20)),
                _ => Duration::MAX,
            };
            let direction = rng.pick(&[None, Some(Direction::Up), Some(Direction::Down)]);
            spec.faults.cut =
                Some(Cut { rank: rng.u64(..u64::from(ranks)) as usize, direction, from, until });
        } else if rng.u64(..12) == 0 {
            spec.death = Some((rng.u64(..u64::from(ranks)) as usize, instant(rng)));
        }
        spec.present = match rng.u64(..24) {
            0 => NEVER,
            1 => Duration::ZERO..instant(rng),
            2 => instant(rng)..Duration::MAX,
            _ => ALWAYS,
        };
        let corruption = (rng.u64(..24) == 0).then(|| {
            (
                rng.u64(..8) as u32,
                rng.pick(&[Corruption::Flip, Corruption::Exchange, Corruption::Double]),
            )
        });
        let operations = (0..rng.pick(&[1, 1, 2, 3])).map(|_| {
            let dtype = rng.pick(&[Dtype::I32, Dtype::F32]);
            let elements = layout.elements(dtype, Width::Full).expect("messages have room") as u64;
            let length = match rng.u64(..4) {
                0 => rng.u64(..4),
                1 => rng.u64(..elements + 1),
                _ => rng.u64(..elements * 8),
            };
            (dtype, length as usize)
        });
        let mut operations: Vec<_> = operations.collect();
        let idle = rng.pick(&[0, 0, 4]);
        let reconnected = rng.u64(..operations.len() as u64) as usize;
        spec.reconnect = (rng.u64(..4) == 0).then_some(reconnected);
        if rng.u64(..2) == 0 {
            // Several operations in flight, small ones among them.
            spec.depth = rng.pick(&[2, 3, 5, 8]);
            for _ in 0..rng.u64(..8) {
                let (dtype, _) = operations[rng.u64(..operations.len() as u64) as usize];
                let length = if rng.u64(..2) == 0 { rng.u64(..9) } else { rng.u64(..700) };
                operations.push((dtype, length as usize));
            }
        }
        for (dtype, length) in &mut operations {
            if *dtype == Dtype::I32 && *length < 700 && *length % 2 == 1 {
                *dtype = Dtype::F64;
            }
        }
        Self { operations, idle, corruption, spec }
    }

    fn calls(&self, rank: u32) -> Vec<Call> {
        let seed = self.spec.seed;
        let mut rng = Rng::with_seed(seed ^ u64::from(rank) << 32);
        let calls = self.operations.iter().enumerate().map(|(n, (dtype, length))| {
            let salt = (seed << 4) + n as u64;
            let data = match dtype {
                Dtype::I32 if self.spec.is_sealed => Vector::small_ints(rank, *length, salt),
                Dtype::I32 => Vector::ints(rank, *length, salt),
                Dtype::F64 => Vector::doubles(rank, self.spec.ranks, *length, salt),
                _ if seed.is_multiple_of(3) => Vector::floats(rank, *length, salt).halves(),
                _ => Vector::floats(rank, *length, salt),
            };
            let late = self.idle != 0 && rng.u64(..self.idle) == 0;
            let not_before = Duration::from_micros(if late { 1 << rng.u64(..19) } else { 0 });
            Call { data, not_before }
        });
        calls.collect()
    }

    /// Whether a rank is unreachable for longer than the timeout: dead, paused, or cut off.
    fn unreachable(&self) -> Option<usize> {
        let cut = self.spec.faults.cut.filter(|c| c.until == Duration::MAX).map(|c| c.rank);
        self.spec.death.map(|d| d.0).or(cut)
    }

    /// Runs the case. Every operation must give the right sum at every rank or, if a rank is
    /// unreachable, an error that names it.
    ///
    /// # Errors
    /// The condition that did not hold.
    pub fn run(&self) -> Result<Summary, String> {
        let mut sim = Sim::new(&self.spec, |rank| self.calls(rank));
        if let Some((after, how)) = self.corruption {
            sim.aggregator.corrupt(after, how);
        }
        sim.run();
        let mut summary = Summary { right: true, time: sim.elapsed(), ..Summary::default() };
        self.check_results(&sim, &mut summary)?;
        // A dead rank does not repeat its last acknowledgements.
        if summary.right && !summary.by_ring && self.spec.death.is_none() {
            // Packets in flight arrive, and the last acknowledgements are repeated.
            sim.settle(Duration::from_millis(500));
            let unreleased = sim.aggregator.unreleased();
            if !unreleased.is_empty() {
                return Err(format!(
                    "slots are not released after the end: {}",
                    unreleased.join("; ")
                ));
            }
        }
        for host in &sim.hosts {
            let stats = host.stack.endpoint.stats();
            summary.packets += stats.sent_packets;
            summary.retransmissions += stats.retransmissions;
            summary.timeouts += stats.local_ack_timeout;
            let counted = host.engine.statistics();
            if self.corruption.is_none()
                && self.spec.present == ALWAYS
                && counted.wrong + counted.unsummed > 0
            {
                return Err(format!("a box without defect gave a wrong sum: {counted:?}"));
            }
        }
        (summary.lost, summary.corrupted) = (sim.network.damage.lost, sim.network.damage.corrupted);
        let quiet = sim.network.damage == Damage::default()
            && self.spec.death.is_none()
            && self.spec.uplink_loss == 0;
        let busy = self.idle == 0 && self.spec.pauses.is_empty() && self.spec.present == ALWAYS;
        let stays = self.spec.reconnect.is_none();
        if quiet
            && busy
            && stays
            && summary.right
            && !summary.by_ring
            && summary.retransmissions > 0
        {
            return Err(format!(
                "{} packets sent again without any fault",
                summary.retransmissions
            ));
        }
        Ok(summary)
    }

    fn check_results(&self, sim: &Sim, summary: &mut Summary) -> Result<(), String> {
        let all: Vec<Vec<Call>> = (0..self.spec.ranks).map(|r| self.calls(r)).collect();
        let dead = self.spec.death.map(|d| d.0);
        if let Some(last) = self.spec.reconnect {
            self.check_reconnect(sim, last)?;
        }
        for n in 0..self.operations.len() {
            let contributions: Vec<Vector> = all.iter().map(|c| c[n].data.clone()).collect();
            let expected = Vector::sum_in(n + 1, &self.spec.layout, &contributions);
            for (rank, host) in sim.hosts.iter().enumerate().filter(|(r, _)| Some(*r) != dead) {
                let Some((outcome, data, _)) = host.results.get(n) else {
                    // It reconnects, and does not take part in later operations.
                    if host.parted.is_some() && self.spec.reconnect.is_some_and(|last| last < n) {
                        continue;
                    }
                    return Err(format!("rank {rank} has no outcome of operation {n}"));
                };
                match outcome {
                    Ok(finished) => {
                        summary.by_ring |= finished.mode == Mode::HostRing;
                        if data.bits() != expected {
                            return Err(format!("rank {rank}: a wrong sum in operation {n}"));
                        }
                    }
                    Err(error) => {
                        summary.right = false;
                        self.check_error(rank, error)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Ranks that reconnect have completed the same operations, and all of them reconnect.
    fn check_reconnect(&self, sim: &Sim, last: usize) -> Result<(), String> {
        for (rank, host) in sim.hosts.iter().enumerate() {
            let right = host.results.iter().all(|(outcome, ..)| outcome.is_ok());
            // The last operation is the one before which rank 0 proposes, or the latest one that
            // another rank has started then: before rank 0 has started it, no rank can complete it.
            let latest = last + self.spec.depth;
            if host.parted.is_some()
                && !(right && (last + 1..=latest).contains(&host.results.len()))
            {
                return Err(format!(
                    "rank {rank} has left after {} operations",
                    host.results.len()
                ));
            }
            let others = sim.hosts.iter().filter(|h| h.parted.is_some()).map(|h| h.results.len());
            if host.parted.is_some() && others.max() != Some(host.results.len()) {
                return Err(format!(
                    "rank {rank} has left after {}, others later",
                    host.results.len()
                ));
            }
            if host.parted.is_none() && right && self.unreachable().is_none() {
                return Err(format!("rank {rank} has stayed"));
            }
        }
        Ok(())
    }

    /// An error must name the unreachable rank or, if a link is cut in one direction, the rank at
    /// its other end.
    fn check_error(&self, rank: usize, error: &Error) -> Result<(), String> {
        let wrong = || Err(format!("rank {rank}: {error}"));
        let Some(lost) = self.unreachable() else { return wrong() };
        let (named, mentioned) = match error {
            Error::RankDied { rank: named, reason } => {
                (named, reason.contains(&format!("rank {lost} ")))
            }
            // From `connect`, at the rank that is cut off.
            Error::Unreachable { rank: named, .. } => (named, rank == lost),
            _ => return wrong(),
        };
        if *named as usize == lost || self.spec.faults.cut.is_some() && mentioned {
            return Ok(());
        }
        wrong()
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.spec;
        let model = if s.selective { "selective, relaxed" } else { "go-back-N, in order" };
        let Layout { message_size, window, rings } = s.layout;
        write!(
            f,
            "{} ranks, {model}, messages of {message_size} B, window {window}, rings {rings};",
            s.ranks
        )?;
        for (dtype, length) in &self.operations {
            write!(f, " {length} {dtype}")?;
        }
        if !s.branches.is_empty() {
            write!(
                f,
                "; boxes below each {:?}, {} lost between these",
                s.branches,
                percent(s.uplink_loss)
            )?;
        }
        if s.is_sealed {
            f.write_str("; sealed")?;
        }
        write!(f, "; {}", s.faults)?;
        for (rank, during) in &s.pauses {
            write!(f, "; rank {rank} pauses in {during:?}")?;
        }
        if let Some((rank, at)) = s.death {
            write!(f, "; rank {rank} dies at {at:?}")?;
        }
        if s.depth > 1 {
            write!(f, "; {} in flight", s.depth)?;
        }
        if let Some(last) = s.reconnect {
            write!(f, "; reconnects after operation {last}")?;
        }
        if self.idle > 0 {
            write!(f, "; {} of operations late", percent(1_000_000 / self.idle as u32))?;
        }
        if s.present != ALWAYS {
            write!(f, "; a box in {:?}", s.present)?;
        }
        if let Some((after, how)) = self.corruption {
            write!(f, "; sum {after} corrupted: {how:?}")?;
        }
        Ok(())
    }
}
