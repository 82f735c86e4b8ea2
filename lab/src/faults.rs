//! Links that lose, duplicate, reorder, corrupt and mark packets.
//!
//! Such a link, a [`FaultLink`], is a two-port bridge in a namespace of its own, between a host and
//! its port. Both of its ends run an XDP program on arriving packets, and so both directions can
//! suffer, packet by packet. On the host itself the upward direction could not: an XDP program sees
//! only arriving packets, and tc sees GSO packets before they are segmented.

use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use aya::Ebpf;
use aya::maps::{Array, DevMap, MapData};
use aya::programs::Xdp;
use aya::programs::xdp::XdpMode;

use crate::netns::{Netns, output};
use layout::{Counts, Settings};

#[path = "../ebpf/src/layout.rs"]
mod layout;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../../objects/faults.bpf.o");

/// Faults of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The packet is lost.
    Loss,
    /// The packet arrives, and arrives again with one of the next eight packets.
    Duplicate,
    /// The packet arrives behind one of the next eight packets.
    Reorder,
    /// A bit behind the Ethernet header is flipped.
    Corrupt,
    /// The packet is marked as having met congestion, if its sender uses ECN.
    Mark,
}

impl Fault {
    /// All harmful faults, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Loss, Self::Duplicate, Self::Reorder, Self::Corrupt];
}

/// Kinds of RoCEv2 packets. Upward data packets are contributions, and downward ones are results.
/// Ranks also have bypass connections, with messages of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// The first data packet of a message of several.
    First = 1 << 0,
    /// Neither the first nor the last.
    Middle = 1 << 1,
    /// The last data packet of a message of several.
    Last = 1 << 2,
    /// A message of one packet.
    Only = 1 << 3,
    Ack = 1 << 4,
    /// A NAK other than "receiver not ready".
    Nak = 1 << 5,
    /// A congestion notification.
    Cnp = 1 << 6,
}

/// A bottleneck that forwards packets more slowly than they may arrive. Packets do not really wait
/// there; those that would wait behind `depth` bytes or more are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bottleneck {
    /// Bytes per second.
    pub rate: u64,
    /// Bytes.
    pub depth: u64,
}

/// All kinds of data packets.
const DATA: u32 = Kind::First as u32 | Kind::Middle as u32 | Kind::Last as u32 | Kind::Only as u32;

/// The n-th packet of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nth {
    /// The kind that is counted.
    pub kind: Kind,
    /// Counted from 1.
    pub n: u32,
    /// How many packets in a row; 1 for a single packet.
    pub times: u32,
    /// The fault.
    pub what: Fault,
}

/// Faults of RoCEv2 packets in one direction of a link. Other packets always pass; in a lab with a
/// rate, all packets are treated alike.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Share of the packets that are lost, 0 to 1. The other shares are of the same kind, and their
    /// sum is at most 1.
    pub loss: f64,
    /// Share that arrives twice.
    pub duplicate: f64,
    /// Share that arrives late.
    pub reorder: f64,
    /// Share with a flipped bit.
    pub corrupt: f64,
    /// Share that is marked.
    pub mark: f64,
    /// A bottleneck that marks packets as well.
    pub bottleneck: Option<Bottleneck>,
    /// Certain packets that suffer a fault as well.
    pub nth: Option<Nth>,
}

impl Faults {
    /// Without faults.
    pub const NONE: Self = Self {
        loss: 0.0,
        duplicate: 0.0,
        reorder: 0.0,
        corrupt: 0.0,
        mark: 0.0,
        bottleneck: None,
        nth: None,
    };

    /// Loses a share of the packets.
    pub const fn loss(rate: f64) -> Self {
        Self { loss: rate, ..Self::NONE }
    }

    /// A share of the packets suffers one fault.
    pub const fn of(fault: Fault, rate: f64) -> Self {
        match fault {
            Fault::Loss => Self { loss: rate, ..Self::NONE },
            Fault::Duplicate => Self { duplicate: rate, ..Self::NONE },
            Fault::Reorder => Self { reorder: rate, ..Self::NONE },
            Fault::Corrupt => Self { corrupt: rate, ..Self::NONE },
            Fault::Mark => Self { mark: rate, ..Self::NONE },
        }
    }

    /// The `n`-th packet of a kind, from 1, suffers a fault.
    pub const fn nth(kind: Kind, n: u32, what: Fault) -> Self {
        Self { nth: Some(Nth { kind, n, times: 1, what }), ..Self::NONE }
    }
}

/// Counters of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectionCounts {
    /// RoCEv2 packets that arrived; in a lab with a rate, all packets.
    pub seen: u64,
    /// Packets that were lost.
    pub lost: u64,
    /// Packets that arrived twice.
    pub duplicated: u64,
    /// Packets that arrived late.
    pub reordered: u64,
    /// Packets with a flipped bit.
    pub corrupted: u64,
    pub marked: u64,
    /// Packets that were not marked because their sender does not use ECN.
    pub spared: u64,
    /// Packets of the kind that [`Faults::nth`] counts.
    pub of_kind: u64,
}

impl DirectionCounts {
    /// All harmful faults.
    pub fn faults(&self) -> u64 {
        self.lost + self.duplicated + self.reordered + self.corrupted
    }

    pub fn of(&self, fault: Fault) -> u64 {
        match fault {
            Fault::Loss => self.lost,
            Fault::Duplicate => self.duplicated,
            Fault::Reorder => self.reordered,
            Fault::Corrupt => self.corrupted,
            Fault::Mark => self.marked,
        }
    }
}

/// Counters of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounts {
    /// Packets from the host.
    pub up: DirectionCounts,
    /// Packets to the host.
    pub down: DirectionCounts,
}

// SAFETY: integers without padding; every bit pattern is a value.
unsafe impl aya::Pod for Settings {}
// SAFETY: as above.
unsafe impl aya::Pod for Counts {}

/// The link between a host and its port.
#[derive(Debug)]
pub struct FaultLink {
    ebpf: Mutex<Ebpf>,
    /// Whether it has a rate.
    queued: bool,
    wire: Netns,
    number: usize,
}

/// For each direction: the interface where packets arrive, the program on leaving packets, the
/// interface where they leave, and the device map. The first name is also that of the program on
/// arriving packets.
const WAYS: [(&str, &str, &str, &str); 2] =
    [("up", "leave_up", "down", "TO_BOX"), ("down", "leave_down", "up", "TO_HOST")];

impl FaultLink {
    /// Starts the programs of host `number`'s link, which pass everything at first: to the link's
    /// queues, if it has a rate.
    pub fn new(wire: &Netns, number: usize, queued: bool) -> Result<Self> {
        let mut ebpf =
            Ebpf::load(OBJECT).context("the kernel does not take the programs of faulty links")?;
        for (from, leave, to, map) in WAYS {
            let interface = format!("{from}{number}");
            let from = if queued { format!("queued_{from}") } else { from.to_owned() };
            let program: &mut Xdp = ebpf.program_mut(leave).context(leave)?.try_into()?;
            program.load().context(leave)?;
            let program = program.fd()?.try_clone()?;
            let to = wire.ifindex(&format!("{to}{number}"))?;
            let mut devices = DevMap::try_from(ebpf.map_mut(map).context(map)?)?;
            // Interface indices are resolved in the calling thread's namespace.
            wire.enter(|| (0..2).try_for_each(|key| devices.set(key, to, Some(&program), 0)))?;
            let program: &mut Xdp = ebpf.program_mut(&from).context("a program")?.try_into()?;
            program.load().context(from)?;
            let ifindex = wire.ifindex(&interface)?;
            wire.enter(|| program.attach_to_if_index(ifindex, XdpMode::Driver))
                .context(interface)?;
        }
        let link = Self { ebpf: Mutex::new(ebpf), queued, wire: wire.clone(), number };
        link.set(Faults::NONE, Faults::NONE, 0)?;
        Ok(link)
    }

    /// Blocks all upward packets, RoCE or not; or restores them.
    pub fn cut_up(&self, cut: bool) -> Result<()> {
        let interface = format!("up{}", self.number);
        let tc = |words: &str| output(self.wire.command("tc").args(words.split(' '))).map(drop);
        if cut {
            // Packets sent to this device are discarded.
            let away = "action mirred egress redirect dev lo";
            tc(&format!("qdisc add dev {interface} ingress"))?;
            tc(&format!("filter add dev {interface} ingress protocol all u32 match u32 0 0 {away}"))
        } else {
            tc(&format!("qdisc delete dev {interface} ingress"))
        }
    }

    /// Sets the faults upward and downward, chosen by a seed, and resets the counters.
    ///
    /// # Errors
    /// If a share or the sum of all is not within 0 to 1.
    pub fn set(&self, up: Faults, down: Faults, seed: u32) -> Result<()> {
        for (faults, way) in [(up, 0u32), (down, 1)] {
            let others = faults.duplicate + faults.reorder + faults.corrupt;
            ensure!(
                !self.queued || others == 0.0 && faults.nth.is_none(),
                "a faulty link with a rate loses and marks packets by share, and no more"
            );
            let mut sum = 0.0;
            let mut thresholds = [0; 5];
            let rates =
                [faults.loss, faults.duplicate, faults.reorder, faults.corrupt, faults.mark];
            for (rate, threshold) in rates.into_iter().zip(&mut thresholds) {
                ensure!((0.0..=1.0).contains(&rate), "a share of {rate} is not possible: 0 to 1");
                sum += rate;
                *threshold = (sum * 2f64.powi(32)) as u64;
            }
            ensure!(sum <= 1.0, "shares of {rates:?} are not possible: together 0 to 1");
            // The directions must not select the same packets.
            let seed = u64::from(seed) << 1 | u64::from(way);
            let (kinds, nth, times, what) = match faults.nth {
                Some(Nth { kind, n, times, what }) => {
                    ensure!(n > 0, "the n-th packet is counted from 1");
                    (kind as u32, n, times, what)
                }
                None => (DATA, 0, 0, Fault::Loss),
            };
            let [kinds, nth, times, what] = [kinds, nth, times, what as u32].map(u64::from);
            self.array("COUNTS", |counts| Ok(counts.set(way, Counts::default(), 0)?))?;
            let Bottleneck { rate, depth } =
                faults.bottleneck.unwrap_or(Bottleneck { rate: 0, depth: 0 });
            ensure!(
                rate <= 1 << 33,
                "a rate of {rate} bytes per second is not possible: at most 2^33"
            );
            let settings = Settings { thresholds, seed, kinds, nth, times, what, rate, depth };
            self.array("SETTINGS", |all| Ok(all.set(way, settings, 0)?))?;
        }
        Ok(())
    }

    /// Data packets that the host has sent since [`FaultLink::set`], which must have been called
    /// without an n-th packet.
    pub fn data_packets(&self) -> Result<u64> {
        let settings: Settings = self.array("SETTINGS", |all| Ok(all.get(&0, 0)?))?;
        ensure!(settings.kinds == u64::from(DATA), "the faulty link counts packets of other kinds");
        let counts: Counts = self.array("COUNTS", |counts| Ok(counts.get(&0, 0)?))?;
        Ok(counts.matched)
    }

    /// The counters since [`FaultLink::set`].
    pub fn counts(&self) -> Result<LinkCounts> {
        let way = |way: u32| -> Result<DirectionCounts> {
            let Counts { seen, matched: of_kind, done, spared } =
                self.array("COUNTS", |counts| Ok(counts.get(&way, 0)?))?;
            let [lost, duplicated, reordered, corrupted, marked] = done;
            Ok(DirectionCounts {
                seen,
                lost,
                duplicated,
                reordered,
                corrupted,
                marked,
                spared,
                of_kind,
            })
        };
        Ok(LinkCounts { up: way(0)?, down: way(1)? })
    }

    fn array<V: aya::Pod, R>(
        &self,
        name: &str,
        work: impl FnOnce(&mut Array<&mut MapData, V>) -> Result<R>,
    ) -> Result<R> {
        let mut ebpf = self.ebpf.lock().expect("nobody panics with the programs");
        work(&mut Array::try_from(ebpf.map_mut(name).with_context(|| format!("map {name}"))?)?)
    }
}
