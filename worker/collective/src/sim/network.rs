//! The links between hosts and box, and the faults of packets on them.
//!
//! Each host has one link up, to the box, and one down. A packet waits behind those before it,
//! takes time by the link's rate, and arrives after the link's latency.

use std::fmt;
use std::time::{Duration, Instant};

use netsum_common::wire::{Bth, DATAGRAM_OVERHEAD, Opcode};

use super::rng::{Random, Rng};

/// The class of a packet, for faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    /// A rank's own data, also if the box forwards it.
    Data,
    /// A positive acknowledgement.
    Ack,
    /// A negative one.
    Nak,
    /// Packets of a box on a registered connection: sums, and packets that make the receiver NAK.
    Result,
}

impl Class {
    const ALL: [Self; 4] = [Self::Data, Self::Ack, Self::Nak, Self::Result];

    /// The class of a datagram that does not come from the box.
    pub fn of(datagram: &[u8]) -> Self {
        let Some(head) = datagram.first_chunk::<12>() else { return Self::Data };
        if Bth::decode(head).opcode != Opcode::ACK {
            Self::Data
        } else if datagram.get(12).is_some_and(|syndrome| syndrome & 0xe0 == 0) {
            Self::Ack
        } else {
            Self::Nak
        }
    }
}

/// From a host to the box, or from the box to a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    Up,
    Down,
}

/// How often each fault hits a packet, in millionths; faults are independent.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Rates {
    pub loss: u32,
    pub duplicate: u32,
    /// Late by up to 0.2 ms, which lets others overtake it; one in eight by up to 100 ms.
    pub reorder: u32,
    /// One to three bits change.
    pub corrupt: u32,
    /// The link pauses for up to 5 ms before it; packets behind it wait too.
    pub delay: u32,
}

/// Losses in bursts (Gilbert 1960, Elliott 1963): a link is good or bad, and may change with each
/// packet. A bad one becomes good after at most 20 ms; otherwise it would stay bad for seconds
/// while timeouts back off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Burst {
    /// From good to bad, in millionths.
    pub enter: u32,
    /// From bad to good, in millionths.
    pub leave: u32,
    /// Loss while bad, in millionths.
    pub loss: u32,
}

/// A link that carries nothing for a while, or for ever.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    pub rank: usize,
    /// Both when `None`.
    pub direction: Option<Direction>,
    pub from: Duration,
    pub until: Duration,
}

/// One lost packet: the `nth` of its kind, from 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Victim {
    pub rank: usize,
    pub class: Class,
    pub direction: Direction,
    pub nth: u32,
}

/// All faults of the links.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Faults {
    /// By class.
    pub up: [Rates; 4],
    /// By class.
    pub down: [Rates; 4],
    pub burst_up: Option<Burst>,
    pub burst_down: Option<Burst>,
    pub cut: Option<Cut>,
    pub victims: Vec<Victim>,
}

impl Faults {
    /// The same for all packets.
    pub fn even(rates: Rates) -> Self {
        Self { up: [rates; 4], down: [rates; 4], ..Self::default() }
    }

    /// Only loss, the same for all packets, in millionths.
    #[cfg(test)]
    pub fn loss(loss: u32) -> Self {
        Self::even(Rates { loss, ..Rates::default() })
    }
}

/// Speed of all links.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Speed {
    /// Nanoseconds for a byte.
    pub per_byte: u32,
    pub latency: Duration,
    /// Bytes that an idle link sends at once, as a token bucket does (tc-tbf(8)).
    pub bucket: u32,
    /// How many of 1000 bytes belong to other jobs, in evenly spaced packets of 1000.
    pub others: u32,
}

#[derive(Clone, Debug)]
struct Link {
    free: Instant,
    /// When the next packet of another job is sent.
    other: Instant,
    /// The longest time.
    bad: Option<Instant>,
    /// Packets so far, by class.
    count: [u32; 4],
}

/// Counters of faults.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Damage {
    pub lost: u64,
    /// Of these, contributions and sums.
    pub lost_data: u64,
    pub doubled: u64,
    pub late: u64,
    pub corrupted: u64,
}

/// All links.
pub(super) struct Network {
    start: Instant,
    speed: Speed,
    faults: Faults,
    up: Vec<Link>,
    down: Vec<Link>,
    rng: Rng,
    pub damage: Damage,
}

const LONGEST_BURST: Duration = Duration::from_millis(20);

impl Network {
    pub fn new(start: Instant, hosts: usize, speed: Speed, faults: Faults, seed: u64) -> Self {
        let links = vec![Link { free: start, other: start, bad: None, count: [0; 4] }; hosts];
        let rng = Rng::with_seed(seed ^ 0x6e65_7477_6f72_6b00);
        Self {
            start,
            speed,
            faults,
            up: links.clone(),
            down: links,
            rng,
            damage: Damage::default(),
        }
    }

    /// Packets of a class that hosts have sent.
    #[cfg(test)]
    pub fn sent(&self, class: Class) -> u32 {
        self.up.iter().map(|link| link.count[class as usize]).sum()
    }

    /// Puts a datagram on the link of `rank`. Calls `deliver` with the time at which it, or each
    /// copy, arrives.
    pub fn send(
        &mut self,
        now: Instant,
        rank: usize,
        direction: Direction,
        class: Class,
        mut datagram: Vec<u8>,
        mut deliver: impl FnMut(Instant, Vec<u8>),
    ) {
        let (link, rates, burst) = match direction {
            Direction::Up => (&mut self.up[rank], &self.faults.up, self.faults.burst_up),
            Direction::Down => (&mut self.down[rank], &self.faults.down, self.faults.burst_down),
        };
        let (rates, rng, damage) = (rates[class as usize], &mut self.rng, &mut self.damage);
        let nth = link.count[class as usize];
        link.count[class as usize] += 1;
        if rng.chance(rates.delay) {
            damage.late += 1;
            link.free = link.free.max(now) + Duration::from_micros(rng.u64(..5000));
        }
        let time = |bytes: u64| Duration::from_nanos(u64::from(self.speed.per_byte) * bytes);
        if self.speed.others > 0 {
            let between = time(1_000_000 / u64::from(self.speed.others));
            while link.other <= now {
                link.free = link.free.max(link.other) + time(1000);
                link.other += between;
            }
        }
        let time = time((datagram.len() + DATAGRAM_OVERHEAD) as u64);
        link.free = link.free.max(now) + time;
        // With a bucket, `free` is when it will be full again.
        let bucket =
            Duration::from_nanos(u64::from(self.speed.per_byte) * u64::from(self.speed.bucket));
        let arrival = (link.free - bucket).max(now) + self.speed.latency;

        let mut lost = rng.chance(rates.loss);
        if let Some(burst) = burst {
            link.bad = link.bad.filter(|end| now < *end);
            if rng.chance(if link.bad.is_some() { burst.leave } else { burst.enter }) {
                link.bad = if link.bad.is_some() { None } else { Some(now + LONGEST_BURST) };
            }
            lost |= link.bad.is_some() && rng.chance(burst.loss);
        }
        if let Some(cut) = &self.faults.cut {
            lost |= cut.rank == rank
                && cut.direction.is_none_or(|d| d == direction)
                && (cut.from..cut.until).contains(&(now - self.start));
        }
        let victim = Victim { rank, class, direction, nth };
        lost |= self.faults.victims.contains(&victim);
        if log::log_enabled!(log::Level::Trace) {
            let bth = datagram.first_chunk().map(Bth::decode);
            let (opcode, qpn, psn) = bth.map_or((0, 0, 0), |b| (b.opcode.0, b.qpn, b.psn));
            let what = if lost { "lost " } else { "" };
            let at = now - self.start;
            log::trace!(
                "{at:?} {what}{direction:?} {rank} {class:?} {nth}: {opcode:#x} to {qpn:#x} PSN \
                 {psn:#x}"
            );
        }
        if lost {
            damage.lost += 1;
            damage.lost_data += u64::from(matches!(class, Class::Data | Class::Result));
            return;
        }

        if rng.chance(rates.corrupt) {
            damage.corrupted += 1;
            for _ in 0..=rng.u64(..3) {
                let bit = rng.u64(..datagram.len() as u64 * 8) as usize;
                datagram[bit / 8] ^= 1 << (bit % 8);
            }
        }
        let mut late = || {
            if !rng.chance(rates.reorder) {
                return Duration::ZERO;
            }
            damage.late += 1;
            let most = if rng.u64(..8) == 0 { 100_000 } else { 200 };
            Duration::from_micros(rng.u64(..most))
        };
        let (first, second) = (late(), late());
        if rng.chance(rates.duplicate) {
            damage.doubled += 1;
            deliver(arrival + second, datagram.clone());
        }
        deliver(arrival + first, datagram);
    }
}

/// Formats a rate.
pub(super) fn percent(ppm: u32) -> String {
    format!("{} %", f64::from(ppm) / 1e4)
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("lost", self.loss),
            ("doubled", self.duplicate),
            ("late", self.reorder),
            ("corrupted", self.corrupt),
            ("delayed", self.delay),
        ];
        let parts: Vec<_> = parts
            .iter()
            .filter(|p| p.1 > 0)
            .map(|(name, p)| format!("{} {name}", percent(*p)))
            .collect();
        f.write_str(&parts.join(", "))
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        for (side, rates, burst) in
            [("up", &self.up, &self.burst_up), ("down", &self.down, &self.burst_down)]
        {
            if rates[0] != Rates::default() && rates.iter().all(|r| *r == rates[0]) {
                parts.push(format!("all {side} {}", rates[0]));
            } else {
                for class in Class::ALL {
                    if rates[class as usize] != Rates::default() {
                        parts.push(format!("{class:?} {side} {}", rates[class as usize]));
                    }
                }
            }
            if let Some(b) = burst {
                let (enter, leave, loss) = (percent(b.enter), percent(b.leave), percent(b.loss));
                parts.push(format!("bursts {side} ({enter} in, {leave} out, {loss} lost)"));
            }
        }
        if let Some(c) = &self.cut {
            let side = c.direction.map_or("link".to_owned(), |d| format!("link {d:?}"));
            let until = if c.until == Duration::MAX {
                "the end".to_owned()
            } else {
                format!("{:?}", c.until)
            };
            parts.push(format!("{side} of rank {} cut from {:?} to {until}", c.rank, c.from));
        }
        for v in &self.victims {
            parts.push(format!(
                "{:?} {:?} of rank {} number {} lost",
                v.class, v.direction, v.rank, v.nth
            ));
        }
        f.write_str(if parts.is_empty() { "no faults" } else { "" })?;
        f.write_str(&parts.join("; "))
    }
}
