//! Unsummed flows, spread over the uplinks of a box that routes: the program, its table, and the
//! load of uplinks.
//!
//! The program chooses an uplink for each new flow. This module adds up what flows have sent, and
//! forgets idle flows.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, MapData};
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::tc::{SchedClassifierLink, SchedClassifierLinkId, TcAttachOptions};
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType};
use aya::{Ebpf, EbpfLoader};
use netsum_common::abi::{
    MAX_UPLINKS, SPREAD_FIRST, SpreadFlow, SpreadKey, SpreadUplink, maps, programs,
};

use super::bpf::{Attachment, found, ignore_missing};
use super::pins::Pins;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../objects/spread.bpf.o");

/// A flow that has sent nothing for this long is forgotten. It may use another uplink when it sends
/// again.
const IDLE: Duration = Duration::from_secs(60);

/// The loaded program. Dropping it detaches it, unless it is pinned.
pub struct Spread {
    ebpf: Ebpf,
    /// By interface number.
    attachments: HashMap<u32, Attachment<SchedClassifierLinkId>>,
    /// The folder of pinned attachments.
    pins: Option<PathBuf>,
    /// The uplinks' interfaces of an earlier daemon, until this one's are known: the places of
    /// flows refer to them.
    before: Option<Vec<u32>>,
    /// Bytes that flows had sent when they were last active, and when that was.
    seen: HashMap<SpreadKey, (u64, Instant)>,
}

/// A requested uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uplink {
    pub ifindex: u32,
    /// It has a carrier.
    pub up: bool,
}

impl Spread {
    /// Loads the program. With pins, those of an earlier daemon are reused.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn load(pins: Option<&Pins>) -> Result<Self> {
        pins.map_or(Ok(()), Pins::make)?;
        let mut loader = EbpfLoader::new();
        for name in [maps::SPREAD, maps::SPREAD_UPLINKS] {
            if let Some(pins) = pins {
                loader.map_pin_path(name, pins.map(name));
            }
        }
        let mut ebpf =
            loader.load(OBJECT).context("the kernel does not take the maps for spread flows")?;
        program(&mut ebpf)?.load().context("the kernel does not take the program `spread`")?;
        let pins = pins.map(Pins::spread_dir);
        let mut spread =
            Self { ebpf, attachments: HashMap::new(), pins, before: None, seen: HashMap::new() };
        spread.take_over()?;
        spread.before = Some(spread.uplinks()?.iter().map(|uplink| uplink.ifindex).collect());
        Ok(spread)
    }

    /// Takes over pinned attachments.
    fn take_over(&mut self) -> Result<()> {
        let Some(folder) = &self.pins else { return Ok(()) };
        std::fs::create_dir_all(folder)?;
        for ifindex in super::pins::numbers(folder) {
            let path = folder.join(ifindex.to_string());
            let program = program(&mut self.ebpf)?;
            let taken = PinnedLink::from_pin(&path).map_err(anyhow::Error::from).and_then(|link| {
                let id =
                    program.attach_to_link(SchedClassifierLink::try_from(FdLink::from(link))?)?;
                program.take_link(id)?;
                Ok(PinnedLink::from_pin(&path)?)
            });
            match taken {
                Ok(link) => drop(self.attachments.insert(ifindex, Attachment::Pinned(link))),
                // The interface was deleted.
                Err(_) => std::fs::remove_file(&path)?,
            }
        }
        Ok(())
    }

    /// Attaches the program to exactly these interfaces.
    ///
    /// # Errors
    /// If it cannot be attached to one.
    pub fn attach_exactly(&mut self, wanted: &HashSet<u32>) -> Result<()> {
        let gone: Vec<u32> =
            self.attachments.keys().filter(|ifindex| !wanted.contains(ifindex)).copied().collect();
        for ifindex in gone {
            self.detach(ifindex)?;
        }
        let missing: Vec<u32> = wanted
            .iter()
            .filter(|ifindex| !self.attachments.contains_key(ifindex))
            .copied()
            .collect();
        missing.into_iter().try_for_each(|ifindex| self.attach(ifindex))
    }

    fn attach(&mut self, ifindex: u32) -> Result<()> {
        let name = nix::net::if_::if_indextoname(ifindex)?.into_string()?;
        let program = program(&mut self.ebpf)?;
        let order = TcAttachOptions::TcxOrder(LinkOrder::last());
        let id = program
            .attach_with_options(&name, TcAttachType::Ingress, order)
            .with_context(|| format!("cannot attach to {name} (Linux 6.6)"))?;
        let attachment = match &self.pins {
            Some(folder) => {
                let link = FdLink::try_from(program.take_link(id)?)?;
                Attachment::Pinned(link.pin(folder.join(ifindex.to_string()))?)
            }
            None => Attachment::Owned(id),
        };
        self.attachments.insert(ifindex, attachment);
        Ok(())
    }

    fn detach(&mut self, ifindex: u32) -> Result<()> {
        match self.attachments.remove(&ifindex) {
            Some(Attachment::Owned(id)) => Ok(program(&mut self.ebpf)?.detach(id)?),
            Some(Attachment::Pinned(link)) => {
                link.unpin()?;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Adds up what flows have sent, forgets idle flows, and sets the uplinks. A flow refers to its
    /// uplink by its place in `wanted`.
    ///
    /// # Errors
    /// If there are more than [`MAX_UPLINKS`], or the maps cannot be written.
    pub fn set_uplinks(&mut self, wanted: &[Uplink], now: Instant) -> Result<()> {
        ensure!(wanted.len() <= MAX_UPLINKS as usize, "at most {MAX_UPLINKS} uplinks");
        self.renumber(wanted)?;
        let (mut seen, mut idle) = (HashMap::new(), Vec::new());
        let mut all = vec![SpreadUplink::default(); MAX_UPLINKS as usize];
        for (uplink, wanted) in all.iter_mut().zip(wanted) {
            (uplink.ifindex, uplink.up) = (wanted.ifindex, wanted.up.into());
        }
        for (key, flow) in self.flows()? {
            let before = self.seen.get(&key).filter(|(bytes, _)| *bytes == flow.bytes);
            let since = before.map_or(now, |(_, since)| *since);
            if flow.given == 0 && now.duration_since(since) >= IDLE {
                idle.push(key);
                continue;
            }
            seen.insert(key, (flow.bytes, since));
            let counts = flow.bytes.max(flow.advance);
            if let Some(uplink) = all.get_mut(flow.uplink as usize).filter(|_| counts > 0) {
                uplink.load += counts;
                uplink.flows += u64::from(flow.advance > 0 || flow.bytes >= SPREAD_FIRST);
            }
        }
        self.seen = seen;
        let mut flows = self.table()?;
        idle.iter().try_for_each(|key| ignore_missing(flows.remove(key)))?;
        let mut uplinks: Array<_, SpreadUplink> = Array::try_from(
            self.ebpf.map_mut(maps::SPREAD_UPLINKS).context(maps::SPREAD_UPLINKS)?,
        )?;
        (0..).zip(&all).try_for_each(|(place, uplink)| Ok(uplinks.set(place, uplink, 0)?))
    }

    /// Gives flows of an earlier daemon the places of their uplinks in `wanted`. Flows whose uplink
    /// was removed are forgotten.
    fn renumber(&mut self, wanted: &[Uplink]) -> Result<()> {
        let Some(before) = self.before.take() else { return Ok(()) };
        let place = |old: u32| {
            let ifindex = *before.get(old as usize)?;
            let now = wanted.iter().position(|uplink| ifindex != 0 && uplink.ifindex == ifindex)?;
            u32::try_from(now).ok()
        };
        for (key, flow) in self.flows()? {
            let given =
                if flow.given == 0 { Some(0) } else { place(flow.given - 1).map(|now| 1 + now) };
            let mut flows = self.table()?;
            match (place(flow.uplink), given) {
                (Some(uplink), Some(given)) if (uplink, given) == (flow.uplink, flow.given) => {}
                (Some(uplink), Some(given)) => {
                    flows.insert(key, SpreadFlow { uplink, given, ..flow }, 0)?;
                }
                _ => ignore_missing(flows.remove(&key))?,
            }
        }
        Ok(())
    }

    /// Pins a flow to an uplink, from its next packet on.
    ///
    /// # Errors
    /// If the table is full.
    pub fn pin(&mut self, flow: FlowEndpoints, uplink: u32) -> Result<()> {
        let mut flows = self.table()?;
        let new = SpreadFlow { uplink, given: 1 + uplink, bytes: 0, advance: 0 };
        let before = found(flows.get(&flow.key(), 0))?;
        let new = before.map_or(new, |before| SpreadFlow { uplink, given: 1 + uplink, ..before });
        flows.insert(flow.key(), new, 0).context("no room for another flow")
    }

    /// Lets the program choose a flow's uplink again.
    ///
    /// # Errors
    /// If the table cannot be written.
    pub fn unpin(&mut self, flow: FlowEndpoints) -> Result<()> {
        ignore_missing(self.table()?.remove(&flow.key()))
    }

    /// All flows.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn flows(&mut self) -> Result<Vec<(SpreadKey, SpreadFlow)>> {
        let flows = self.table()?;
        // A flow that is removed meanwhile is skipped.
        Ok(flows.iter().filter_map(Result::ok).collect())
    }

    /// The uplinks, by place.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn uplinks(&self) -> Result<Vec<SpreadUplink>> {
        let map = self.ebpf.map(maps::SPREAD_UPLINKS).context(maps::SPREAD_UPLINKS)?;
        Ok(Array::try_from(map)?.iter().collect::<Result<_, _>>()?)
    }

    /// The program, for test runs.
    ///
    /// # Errors
    /// If the object does not contain it.
    pub fn program(&mut self) -> Result<&mut SchedClassifier> {
        program(&mut self.ebpf)
    }

    fn table(&mut self) -> Result<aya::maps::HashMap<&mut MapData, SpreadKey, SpreadFlow>> {
        Ok(aya::maps::HashMap::try_from(self.ebpf.map_mut(maps::SPREAD).context(maps::SPREAD)?)?)
    }
}

/// The key of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowEndpoints {
    pub src: IpAddr,
    pub dst: IpAddr,
    /// UDP source port.
    pub src_port: u16,
}

impl FlowEndpoints {
    fn key(self) -> SpreadKey {
        let bytes = |ip| match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        SpreadKey {
            src_ip: bytes(self.src),
            dst_ip: bytes(self.dst),
            src_port: self.src_port.into(),
        }
    }
}

impl From<SpreadKey> for FlowEndpoints {
    fn from(key: SpreadKey) -> Self {
        let ip = |bytes: [u8; 16]| IpAddr::from(bytes).to_canonical();
        Self { src: ip(key.src_ip), dst: ip(key.dst_ip), src_port: key.src_port as u16 }
    }
}

fn program(ebpf: &mut Ebpf) -> Result<&mut SchedClassifier> {
    Ok(ebpf.program_mut(programs::SPREAD).context(programs::SPREAD)?.try_into()?)
}
