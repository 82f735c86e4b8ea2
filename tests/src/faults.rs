//! Cables that lose packets.
//!
//! A cable is a two-port bridge in a namespace of its own, between a host and its port. Both of its ends run an XDP program that
//! may drop what comes in: so both directions can lose single packets. On the host itself the way up could not: an XDP
//! program sees only what comes in, and tc sees GSO packets before they are cut up.

use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use aya::Ebpf;
use aya::maps::Array;
use aya::programs::Xdp;
use aya::programs::xdp::XdpMode;

use crate::netns::Netns;

static OBJECT: &[u8] = aya::include_bytes_aligned!("faults.bpf.o");

/// Which RoCEv2 packets a cable loses. Other packets always pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Share of the packets from the host that are lost, 0 to 1.
    pub up: f64,
    /// Share of the packets to the host that are lost, 0 to 1.
    pub down: f64,
    /// Chooses which.
    pub seed: u32,
}

/// What a cable has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CableCounts {
    /// RoCEv2 packets that the host sent.
    pub up: u64,
    /// Those of them that were lost.
    pub up_lost: u64,
    /// RoCEv2 packets to the host.
    pub down: u64,
    /// Those of them that were lost.
    pub down_lost: u64,
}

/// `Way` of aggregator-ebpf/src/faults.rs.
#[derive(Clone, Copy)]
#[repr(C)]
struct Way {
    threshold: u64,
    seed: u64,
    seen: u64,
    lost: u64,
}

// SAFETY: four integers without padding; every bit pattern is a value.
unsafe impl aya::Pod for Way {}

/// The cable between a host and its port.
#[derive(Debug)]
pub struct Cable {
    ebpf: Mutex<Ebpf>,
}

impl Cable {
    /// Starts the programs of host `number`'s cable, which lose nothing yet.
    pub fn new(wire: &Netns, number: usize) -> Result<Self> {
        let mut ebpf = Ebpf::load(OBJECT).context("the kernel does not take the cables' programs")?;
        for way in ["up", "down"] {
            let program: &mut Xdp = ebpf.program_mut(way).context(way)?.try_into()?;
            program.load()?;
            let interface = format!("{way}{number}");
            let ifindex = wire.ifindex(&interface)?;
            wire.enter(|| program.attach_to_if_index(ifindex, XdpMode::Driver)).context(interface)?;
        }
        Ok(Self { ebpf: Mutex::new(ebpf) })
    }

    /// Loses packets from now on; the counters start anew.
    ///
    /// # Errors
    /// If a rate is not within 0 to 1.
    pub fn set(&self, faults: Faults) -> Result<()> {
        for (rate, way) in [(faults.up, 0), (faults.down, 1)] {
            ensure!((0.0..=1.0).contains(&rate), "a share of {rate} cannot be lost: 0 to 1");
            let threshold = (rate * 2f64.powi(32)) as u64;
            // Not the same packets on both ways.
            let seed = u64::from(faults.seed) << 1 | u64::from(way);
            self.ways(|ways| Ok(ways.set(way, Way { threshold, seed, seen: 0, lost: 0 }, 0)?))?;
        }
        Ok(())
    }

    /// What it has done since [`Cable::set`].
    pub fn counts(&self) -> Result<CableCounts> {
        self.ways(|ways| {
            let (up, down) = (ways.get(&0, 0)?, ways.get(&1, 0)?);
            Ok(CableCounts { up: up.seen, up_lost: up.lost, down: down.seen, down_lost: down.lost })
        })
    }

    fn ways<R>(&self, work: impl FnOnce(&mut Array<&mut aya::maps::MapData, Way>) -> Result<R>) -> Result<R> {
        let mut ebpf = self.ebpf.lock().expect("nobody panics with a cable");
        work(&mut Array::try_from(ebpf.map_mut("WAYS").context("map WAYS")?)?)
    }
}
