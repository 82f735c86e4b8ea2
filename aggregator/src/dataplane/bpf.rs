//! [`DataPlane`] with aya: the programs are embedded, loaded into the kernel and fed through their maps.

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result, bail};
use aya::maps::{Array, ArrayOfMaps, DevMap, MapData, PerCpuArray, PerCpuValues, ProgramArray, RingBuf};
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::xdp::{XdpLinkId, XdpMode as AyaMode};
use aya::programs::{ProgramFd, TestRun as _, TestRunAttrs, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use aya_log::EbpfLogger;
use netsum_common::abi::{
    self, Claim, ClaimKey, EgressKey, EgressPort, Flow, FlowKey, InBandJob, MAX_CPUS, MAX_MTU, MAX_RANKS,
    MAX_RINGS, RingConfig, SavedHeader, StrangerKey, Token, TraceFilter, maps, programs, ring_flags, watch,
};
use netsum_common::counters::{COUNTERS, Counter};
use netsum_common::slot::{RingState, Slot};
use netsum_common::timing::Timing;
use netsum_common::wire::{InBandToken, JobHeader};

use super::cpus::Threads;
use super::pins::Pins;
use super::{
    DataPlane, EndedFlow, FirstPacket, FlowSeen, FlowSpec, InBandSpec, ProgramFacts, RingSpec, Traced,
    XdpMode, facts, held, unmapped,
};

/// The BPF object as built by `cargo xtask build-ebpf`.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../objects/netsum.bpf.o");

/// `BPF_F_INNER_MAP`: the array may differ in length from the outer map's template.
const INNER_MAP: u32 = 1 << 12;
/// `BPF_MAP_TYPE_DEVMAP` (`include/uapi/linux/bpf.h`).
const DEVMAP: u32 = 14;

/// What to load the programs with.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// CPUs that serve rings.
    pub cpus: Vec<u32>,
    /// Packets that may wait for each of them; what comes on top is lost and sent again by its host. At most 16384.
    pub cpu_queue: u32,
    /// A contribution that comes in on its ring's CPU does not take the way over the queue, where nothing of its flow is in it.
    pub inline: bool,
}

/// The programs' log, on its way to `log`.
pub type Logger = EbpfLogger<&'static dyn log::Log>;

/// How `ingress` hangs on a port.
pub(super) enum Attachment {
    /// For as long as this process lives.
    Owned(XdpLinkId),
    /// For as long as its file is in bpffs.
    Pinned(PinnedLink),
}

/// The loaded programs. Dropping it detaches and frees everything that is not pinned.
pub struct BpfDataPlane {
    pub(super) ebpf: Ebpf,
    logger: Option<Logger>,
    egress: ProgramFd,
    pub(super) cpus: Vec<u32>,
    pub(super) links: HashMap<u32, Attachment>,
    pub(super) pins: Option<Pins>,
    /// Flows that have ended and whose data is dropped.
    pub(super) ended: HashSet<FlowKey>,
    pub(super) threads: Threads,
    pub(super) rings: HashMap<u32, RingMaps>,
    pub(super) events: RingBuf<MapData>,
}

/// A ring's inner maps that user space reads and writes. To find them again in their outer maps, by number, takes
/// CAP_SYS_ADMIN (`bpf_map_get_fd_by_id` in kernel/bpf/syscall.c), which the daemon has at its start alone.
pub(super) struct RingMaps {
    /// Index of its CPU in [`BpfDataPlane::cpus`].
    pub cpu: u32,
    /// Packets of its that were last known to have come to another CPU.
    pub strayed: u64,
    slots: Array<MapData, Slot>,
    headers: Array<MapData, SavedHeader>,
    ports: DevMap<MapData>,
}

impl BpfDataPlane {
    /// Loads the programs and starts their CPUs. Needs CAP_BPF and CAP_NET_ADMIN.
    pub fn load(options: &LoadOptions) -> Result<Self> {
        Self::load_object(OBJECT, options)
    }

    /// [`load`](Self::load), with maps and attachments that outlive this process; those that are pinned already are used on.
    pub fn load_pinned(options: &LoadOptions, pins: Pins) -> Result<Self> {
        Self::load_all(OBJECT, options, Some(pins))
    }

    /// [`load`](Self::load) with another object that has the same maps and programs.
    pub fn load_object(object: &[u8], options: &LoadOptions) -> Result<Self> {
        Self::load_all(object, options, None)
    }

    fn load_all(object: &[u8], options: &LoadOptions, pins: Option<Pins>) -> Result<Self> {
        if options.cpus.is_empty() {
            bail!("no CPU is given to serve rings");
        }
        // 0 silences the programs; otherwise the numbers of `log` and aya-log agree, 1 for error to 5 for trace.
        let level = log::max_level() as usize as u8;
        let mut loader = EbpfLoader::new();
        loader.override_global(aya_log::LEVEL, &level, false);
        if let Some(pins) = &pins {
            pins.make()?;
            for name in maps::ALL {
                loader.map_pin_path(name, pins.map(name));
            }
        }
        let mut ebpf =
            loader.load(object).context("the kernel does not take the maps of the XDP programs")?;
        for name in [programs::INGRESS, programs::AGGREGATE, programs::AGGREGATE_INLINE, programs::EGRESS] {
            program(&mut ebpf, name)?
                .load()
                .with_context(|| format!("the kernel does not take the XDP program `{name}`"))?;
        }
        let logger = if level > 0 { EbpfLogger::init(&mut ebpf).ok() } else { None };
        let egress = program(&mut ebpf, programs::EGRESS)?.fd()?.try_clone()?;
        let aggregate = program(&mut ebpf, programs::AGGREGATE)?.fd()?.try_clone()?;
        let events = RingBuf::try_from(ebpf.take_map(maps::EVENTS).context(maps::EVENTS)?)?;
        let mut plane = Self {
            ebpf,
            logger,
            egress,
            cpus: options.cpus.clone(),
            threads: Threads { configured: options.cpus.clone(), queue: options.cpu_queue, aggregate },
            links: HashMap::new(),
            pins,
            ended: HashSet::new(),
            rings: HashMap::new(),
            events,
        };
        for &cpu in &options.cpus {
            if cpu >= MAX_CPUS {
                bail!("CPU {cpu} is out of range: at most {}", MAX_CPUS - 1);
            }
            plane.start_thread(cpu)?;
        }
        plane.take_inline(options.inline)?;
        // Nobody looks any more who did when an earlier daemon was killed.
        plane.watch(watch::STRANGERS | watch::TRACE, false)?;
        Ok(plane)
    }

    /// Whether contributions that come in on their ring's CPU are taken there at once, from now on.
    pub fn take_inline(&mut self, wanted: bool) -> Result<()> {
        let program = program(&mut self.ebpf, programs::AGGREGATE_INLINE)?.fd()?.try_clone()?;
        let map = self.ebpf.map_mut(maps::PROGRAMS).context(maps::PROGRAMS)?;
        let mut array = ProgramArray::try_from(map)?;
        if wanted { Ok(array.set(0, &program, 0)?) } else { ignore_missing(array.clear_index(&0)) }
    }

    /// The programs' log; to be flushed when its file descriptor is readable.
    pub fn take_logger(&mut self) -> Option<Logger> {
        self.logger.take()
    }

    /// A loaded program, for test runs.
    pub fn program(&mut self, name: &str) -> Result<&mut Xdp> {
        program(&mut self.ebpf, name)
    }

    /// A map of the object; for benchmarks, whose object has more of them.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn map_mut(&mut self, name: &str) -> Result<&mut aya::maps::Map> {
        self.ebpf.map_mut(name).with_context(|| format!("the BPF object has no map `{name}`"))
    }

    /// Empties a ring, keeping its maps: faster than making it anew, which waits for all CPUs. It begins with index
    /// `start` and is not active. For tests.
    pub fn empty_ring(&mut self, ring: &RingSpec, start: u32) -> Result<()> {
        let config = self.config(ring, false)?;
        self.array(maps::RINGS)?.set(ring.id, config, 0)?;
        let mut slots: Array<MapData, Slot> = self.inner(maps::SLOTS, ring.id)?;
        (0..ring.slots).try_for_each(|slot| slots.set(slot, Slot::default(), 0))?;
        self.array(maps::TIMINGS)?.set(ring.id, Timing::EMPTY, 0)?;
        let state = RingState { low: start, expected: [start; MAX_RANKS], ..RingState::default() };
        Ok(self.array(maps::STATES)?.set(ring.id, state, 0)?)
    }

    pub(super) fn array<V: aya::Pod>(&mut self, name: &str) -> Result<Array<&mut MapData, V>> {
        Ok(Array::try_from(self.ebpf.map_mut(name).with_context(|| name.to_owned())?)?)
    }

    pub(super) fn hash<K: aya::Pod, V: aya::Pod>(
        &mut self,
        name: &str,
    ) -> Result<aya::maps::HashMap<&mut MapData, K, V>> {
        Ok(aya::maps::HashMap::try_from(self.ebpf.map_mut(name).with_context(|| name.to_owned())?)?)
    }

    /// Puts an inner map into an outer one.
    fn put<V: aya::maps::InnerMap>(&mut self, outer: &str, ring: u32, inner: &V) -> Result<()> {
        let map = self.ebpf.map_mut(outer).with_context(|| outer.to_owned())?;
        let mut outer_map: ArrayOfMaps<_, V> = ArrayOfMaps::try_from(map)?;
        outer_map.set(ring, inner, 0).with_context(|| format!("{outer}[{ring}]"))
    }

    /// Makes a ring's inner maps anew.
    fn put_maps(&mut self, ring: u32, cpu: u32, sizes: &Sizes) -> Result<()> {
        let slots: Array<MapData, Slot> = Array::create(sizes.slots, INNER_MAP)?;
        let headers: Array<MapData, SavedHeader> = Array::create(sizes.headers, INNER_MAP)?;
        let ports = aya_obj::Map::new_from_params(DEVMAP, 4, 8, sizes.ports, 0);
        let ports = DevMap::try_from(aya::maps::Map::from_map_data(MapData::create(ports, "ports", None)?)?)?;
        self.put(maps::SLOTS, ring, &slots)?;
        match sizes.mtu {
            256 => self.put_sums::<256>(ring, sizes.slots)?,
            512 => self.put_sums::<512>(ring, sizes.slots)?,
            1024 => self.put_sums::<1024>(ring, sizes.slots)?,
            2048 => self.put_sums::<2048>(ring, sizes.slots)?,
            other => bail!("no map for path MTU {other}"),
        }
        self.put(maps::HEADERS, ring, &headers)?;
        self.put(maps::PORTS, ring, &ports)?;
        self.rings.insert(ring, RingMaps { cpu, strayed: 0, slots, headers, ports });
        Ok(())
    }

    fn put_sums<const MTU: usize>(&mut self, ring: u32, slots: u32) -> Result<()> {
        let sums: Array<MapData, [u8; MTU]> = Array::create(slots, INNER_MAP)?;
        let index = abi::MTUS.iter().position(|&m| m as usize == MTU).context("a path MTU of the ABI")?;
        self.put(maps::SUMS[index], ring, &sums)
    }

    /// What the data plane has of a ring.
    pub(super) fn ring_config(&mut self, ring: u32) -> Result<RingConfig> {
        Ok(self.array(maps::RINGS)?.get(&ring, 0)?)
    }

    pub(super) fn set_active(&mut self, ring: u32, active: bool) -> Result<()> {
        let mut config = self.ring_config(ring)?;
        config.flags = config.flags & !ring_flags::ACTIVE | if active { ring_flags::ACTIVE } else { 0 };
        Ok(self.array(maps::RINGS)?.set(ring, config, 0)?)
    }

    /// Returns when no program runs any more that may have seen maps as they were before. To put an inner map into its place
    /// waits for that (kernel/bpf/syscall.c, `maybe_wait_bpf_programs`); ring 0 is none.
    pub(super) fn wait_for_programs(&mut self) -> Result<()> {
        let ports = aya_obj::Map::new_from_params(DEVMAP, 4, 8, 1, 0);
        let ports = DevMap::try_from(aya::maps::Map::from_map_data(MapData::create(ports, "ports", None)?)?)?;
        self.put(maps::PORTS, 0, &ports)
    }

    fn maps_of(&self, ring: u32) -> Result<&RingMaps> {
        self.rings.get(&ring).context("the ring has not been created")
    }

    /// Opens the maps of a ring that an earlier daemon has made. Needs CAP_SYS_ADMIN.
    pub(super) fn open_ring(&mut self, ring: u32, cpu: u32) -> Result<()> {
        let maps = RingMaps {
            cpu,
            strayed: 0,
            slots: self.inner(maps::SLOTS, ring)?,
            headers: self.inner(maps::HEADERS, ring)?,
            ports: self.inner(maps::PORTS, ring)?,
        };
        self.rings.insert(ring, maps);
        Ok(())
    }

    pub(super) fn inner<V: aya::maps::FromMapData + aya::maps::InnerMap>(
        &self,
        outer: &str,
        ring: u32,
    ) -> Result<V> {
        let map = self.ebpf.map(outer).with_context(|| outer.to_owned())?;
        let outer_map: ArrayOfMaps<_, V> = ArrayOfMaps::try_from(map)?;
        outer_map.get(&ring, 0).with_context(|| format!("{outer}[{ring}]"))
    }

    /// Sets or clears bits of what is looked at.
    pub(super) fn watch(&mut self, bits: u32, on: bool) -> Result<()> {
        let mut watched: Array<_, u32> = self.array(maps::WATCH)?;
        let before = watched.get(&0, 0)?;
        Ok(watched.set(0, if on { before | bits } else { before & !bits }, 0)?)
    }

    fn config(&self, ring: &RingSpec, active: bool) -> Result<RingConfig> {
        let cpu = *self.cpus.get(ring.cpu as usize).with_context(|| format!("no CPU number {}", ring.cpu))?;
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        Ok(RingConfig {
            flags: flag(active, ring_flags::ACTIVE)
                | flag(!ring.verify_icrc, ring_flags::ICRC_IGNORE)
                | flag(!ring.in_order, ring_flags::RELAXED)
                | flag(ring.in_band, ring_flags::IN_BAND),
            ranks: ring.ranks,
            slots: ring.slots,
            window: ring.window,
            mtu: ring.mtu,
            cpu,
        })
    }
}

/// Entries of a ring's inner maps.
struct Sizes {
    slots: u32,
    mtu: u32,
    headers: u32,
    ports: u32,
}

pub(super) fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    Ok(ebpf
        .program_mut(name)
        .with_context(|| format!("the BPF object has no program `{name}`"))?
        .try_into()?)
}

fn check(ring: &RingSpec) -> Result<()> {
    if ring.id == 0 || ring.id >= MAX_RINGS {
        bail!("ring number {} is out of range: 1 to {}", ring.id, MAX_RINGS - 1);
    }
    if !(2..=MAX_RANKS as u32).contains(&ring.ranks) {
        bail!("{} ranks: 2 to {MAX_RANKS} are possible", ring.ranks);
    }
    if !ring.slots.is_power_of_two()
        || ring.slots > abi::MAX_SLOTS
        || ring.slots < ring.window.saturating_mul(2)
    {
        bail!("{} slots: a power of two, at least twice the window of {}", ring.slots, ring.window);
    }
    if !abi::MTUS.contains(&ring.mtu) {
        bail!("path MTU {}: one of {:?}, at most {MAX_MTU}", ring.mtu, abi::MTUS);
    }
    Ok(())
}

impl DataPlane for BpfDataPlane {
    fn attach(&mut self, ifindex: u32, mode: XdpMode) -> Result<()> {
        let mode = match mode {
            XdpMode::Native => AyaMode::Driver,
            XdpMode::Skb => AyaMode::Skb,
        };
        let program = program(&mut self.ebpf, programs::INGRESS)?;
        let id = program.attach_to_if_index(ifindex, mode)?;
        let attachment = match &self.pins {
            Some(pins) => {
                let link = FdLink::try_from(program.take_link(id)?).context(
                    "this kernel has no XDP links (Linux 5.9), which outliving the daemon rests on",
                )?;
                Attachment::Pinned(link.pin(pins.link(ifindex))?)
            }
            None => Attachment::Owned(id),
        };
        self.links.insert(ifindex, attachment);
        Ok(())
    }

    fn detach(&mut self, ifindex: u32) -> Result<()> {
        match self.links.remove(&ifindex) {
            Some(Attachment::Owned(link)) => Ok(self.program(programs::INGRESS)?.detach(link)?),
            Some(Attachment::Pinned(link)) => {
                // Without its file the link ends when its last descriptor is closed, which is now.
                drop(link.unpin()?);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn create_ring(&mut self, ring: &RingSpec) -> Result<()> {
        check(ring)?;
        let config = self.config(ring, false)?;
        self.put_maps(
            ring.id,
            ring.cpu,
            &Sizes { slots: ring.slots, mtu: ring.mtu, headers: ring.slots * ring.ranks, ports: ring.ranks },
        )?;
        self.array(maps::STATES)?.set(ring.id, RingState::default(), 0)?;
        self.array(maps::RINGS)?.set(ring.id, config, 0)?;
        Ok(())
    }

    fn reset_counters(&mut self, ring: u32) -> Result<()> {
        let cpus = aya::util::nr_cpus().map_err(|(what, e)| anyhow::anyhow!("{what}: {e}"))?;
        let mut counters: PerCpuArray<_, u64> =
            PerCpuArray::try_from(self.ebpf.map_mut(maps::COUNTERS).context(maps::COUNTERS)?)?;
        for counter in 0..COUNTERS {
            counters.set(ring * COUNTERS + counter, PerCpuValues::try_from(vec![0; cpus])?, 0)?;
        }
        Ok(self.array(maps::TIMINGS)?.set(ring, Timing::EMPTY, 0)?)
    }

    fn add_flow(&mut self, flow: &FlowSpec) -> Result<()> {
        self.register(flow)
    }

    fn activate_ring(&mut self, ring: &RingSpec, ports: &[u32]) -> Result<()> {
        check(ring)?;
        if ports.len() != ring.ranks as usize {
            bail!("{} ports for {} ranks", ports.len(), ring.ranks);
        }
        let egress = self.egress.try_clone()?;
        let devices = &mut self.rings.get_mut(&ring.id).context("the ring has not been created")?.ports;
        let mut behind: HashMap<u32, EgressPort> = HashMap::new();
        for (rank, &ifindex) in ports.iter().enumerate() {
            devices.set(rank as u32, ifindex, Some(&egress), 0).with_context(|| {
                format!("rank {rank}: interface {ifindex} cannot be a target of redirects")
            })?;
            let port =
                behind.entry(ifindex).or_insert(EgressPort { count: 0, cursor: 0, ranks: [0; MAX_RANKS] });
            port.ranks[port.count as usize] = rank as u8;
            port.count += 1;
        }
        for (ifindex, port) in behind {
            self.hash(maps::EGRESS)?.insert(EgressKey { ring: ring.id, ifindex }, port, 0)?;
        }
        let config = self.config(ring, true)?;
        Ok(self.array(maps::RINGS)?.set(ring.id, config, 0)?)
    }

    fn delete_ring(&mut self, ring: u32, flows: &[FlowKey], ports: &[u32]) -> Result<()> {
        // From here on nothing is added. What comes is dropped: by the ring, then by the flows that have ended.
        let mut config = self.ring_config(ring)?;
        config.flags &= !ring_flags::ACTIVE;
        self.array(maps::RINGS)?.set(ring, config, 0)?;
        if !flows.is_empty() {
            self.wait_for_programs()?;
        }
        for key in flows {
            self.end_flow(*key)?;
        }
        for &ifindex in ports {
            ignore_missing(self.hash::<_, EgressPort>(maps::EGRESS)?.remove(&EgressKey { ring, ifindex }))?;
        }
        if config.mtu == 0 {
            return Ok(());
        }
        // aya has no removal from an array of maps: the smallest maps take the place of the ring's and free them.
        self.put_maps(ring, 0, &Sizes { slots: 1, mtu: config.mtu, headers: 1, ports: 1 })?;
        self.rings.remove(&ring);
        let none = RingConfig { flags: 0, ranks: 0, slots: 0, window: 0, mtu: 0, cpu: 0 };
        self.array(maps::RINGS)?.set(ring, none, 0)?;
        Ok(())
    }

    fn forget_ended(&mut self, flows: &[FlowKey]) -> Result<()> {
        let ended: Vec<FlowKey> = flows.iter().filter(|key| self.ended.contains(*key)).copied().collect();
        ended.into_iter().try_for_each(|key| self.forget_flow(key))
    }

    fn ended_flows(&self) -> Result<Vec<EndedFlow>> {
        self.ended()
    }

    fn pause_ring(&mut self, ring: u32) -> Result<()> {
        self.set_active(ring, false)?;
        self.wait_for_programs()
    }

    fn resume_ring(&mut self, ring: u32) -> Result<()> {
        self.set_active(ring, true)
    }

    fn attached(&self) -> Vec<u32> {
        self.links.keys().copied().collect()
    }

    fn keep_cpus(&mut self) -> Result<Vec<String>> {
        self.look_after_cpus()
    }

    fn unpin(&mut self) -> Result<()> {
        match self.pins.take() {
            Some(pins) => pins.remove(),
            None => Ok(()),
        }
    }

    fn counters(&self, ring: u32) -> Result<Vec<u64>> {
        let map: PerCpuArray<_, u64> =
            PerCpuArray::try_from(self.ebpf.map(maps::COUNTERS).context(maps::COUNTERS)?)?;
        (0..COUNTERS).map(|c| Ok(map.get(&(ring * COUNTERS + c), 0)?.iter().sum())).collect()
    }

    fn timing(&self, ring: u32) -> Result<Box<Timing>> {
        let timings: Array<_, Timing> =
            Array::try_from(self.ebpf.map(maps::TIMINGS).context(maps::TIMINGS)?)?;
        Ok(Box::new(timings.get(&ring, 0)?))
    }

    fn slots(&self, ring: u32) -> Result<Vec<Slot>> {
        self.maps_of(ring)?.slots.iter().map(|s| Ok(s?)).collect()
    }

    fn slot(&self, ring: u32, slot: u32) -> Result<Slot> {
        Ok(self.maps_of(ring)?.slots.get(&slot, 0)?)
    }

    fn ring_state(&self, ring: u32) -> Result<RingState> {
        let states: Array<_, RingState> =
            Array::try_from(self.ebpf.map(maps::STATES).context(maps::STATES)?)?;
        Ok(states.get(&ring, 0)?)
    }

    fn flow_seen(&self, key: FlowKey) -> Result<FlowSeen> {
        let flows: aya::maps::HashMap<_, FlowKey, Flow> =
            aya::maps::HashMap::try_from(self.ebpf.map(maps::FLOWS).context(maps::FLOWS)?)?;
        let flow = flows.get(&key, 0)?;
        Ok(FlowSeen {
            mac: (flow.src_mac != [0; 6]).then_some(flow.src_mac),
            packets: flow.packets,
            refused: flow.refused,
            last_psn: flow.last_psn,
            last_outcome: Counter::ALL.get(flow.last_outcome as usize).copied().filter(|_| flow.packets > 0),
            mismatch: (flow.mismatch_len != 0).then_some((flow.mismatch_psn, flow.mismatch_len)),
        })
    }

    fn send_held(&mut self, ring: &RingSpec, slot: u32, flow: &FlowSpec) -> Result<()> {
        let read = || -> Result<(SavedHeader, u32, u32)> {
            let held = self.slot(ring.id, slot)?;
            Ok((
                self.maps_of(ring.id)?.headers.get(&(slot * ring.ranks + flow.rank), 0)?,
                held.index,
                held.len,
            ))
        };
        let (saved, index, len) = read()?;
        // The ring's CPU may be about to write them, and headers of two packets would be a packet that stops the ring.
        if read()? != (saved, index, len) {
            return Ok(());
        }
        let index = ring.in_band.then_some(index);
        let frame =
            held::duplicate(&saved, (len as usize).min(MAX_MTU), index).context("no headers are saved")?;
        let context = held::context(frame.len(), flow.ifindex);
        // A live frame: what the program decides is carried out, and the ring's CPU gets it like any other.
        self.program(programs::INGRESS)?.test_run(TestRunOptions {
            data_in: Some(&frame),
            ctx_in: Some(&context),
            attrs: TestRunAttrs::new().xdp_live_frames(1),
            ..TestRunOptions::new()
        })?;
        Ok(())
    }

    fn watch_strangers(&mut self, on: bool) -> Result<()> {
        if on {
            let mut strangers = self.hash::<StrangerKey, u64>(maps::STRANGERS)?;
            let old: Vec<_> = strangers.keys().collect::<Result<_, _>>()?;
            for key in old {
                ignore_missing(strangers.remove(&key))?;
            }
        }
        self.watch(watch::STRANGERS, on)
    }

    fn strangers(&self) -> Result<Vec<(StrangerKey, u64)>> {
        let map: aya::maps::HashMap<_, StrangerKey, u64> =
            aya::maps::HashMap::try_from(self.ebpf.map(maps::STRANGERS).context(maps::STRANGERS)?)?;
        map.iter().map(|entry| Ok(entry?)).collect()
    }

    fn trace(&mut self, filter: Option<&TraceFilter>) -> Result<()> {
        super::trace::switch(self, filter)
    }

    fn traced(&mut self, most: usize) -> Result<Vec<Traced>> {
        Ok(super::trace::take(&mut self.events, most))
    }

    fn trace_lost(&self) -> Result<u64> {
        super::trace::lost(self)
    }

    fn cpu_number(&self, cpu: u32) -> u32 {
        self.cpus.get(cpu as usize).copied().unwrap_or(cpu)
    }

    fn programs(&self) -> Result<Vec<ProgramFacts>> {
        facts::programs(self)
    }

    fn listen_in_band(&mut self, job: &InBandSpec) -> Result<()> {
        let value = InBandJob {
            job: job.job,
            ranks: job.ranks,
            rings: job.rings,
            flags: if job.verify_icrc { 0 } else { ring_flags::ICRC_IGNORE },
        };
        self.hash(maps::TOKENS)?.insert(Token::new(job.token), value, 0)?;
        self.watch(watch::FIRST_PACKETS, true)
    }

    fn ignore_in_band(&mut self, token: InBandToken) -> Result<()> {
        let mut tokens = self.hash::<Token, InBandJob>(maps::TOKENS)?;
        let Some(job) = found(tokens.get(&Token::new(token), 0))? else { return Ok(()) };
        ignore_missing(tokens.remove(&Token::new(token)))?;
        // Until then some program may find the token and let another connection wait.
        self.wait_for_programs()?;
        let waiting = self.hash::<StrangerKey, u32>(maps::WAITING)?;
        let all: Vec<(StrangerKey, u32)> = waiting.iter().collect::<Result<_, _>>()?;
        // A few of each place's. Whoever has the token can make up as many as there is room for, and others need that.
        let room = abi::MAX_ENDED.saturating_sub(self.ended.len() as u32);
        let most = (job.ranks * job.rings * 16).min(room) as usize;
        for (n, (c, _)) in all.iter().filter(|(_, number)| *number == job.job).enumerate() {
            if n < most {
                self.end_connection(c)?;
            }
            ignore_missing(self.hash::<StrangerKey, u32>(maps::WAITING)?.remove(c))?;
        }
        let tokens = self.hash::<Token, InBandJob>(maps::TOKENS)?;
        if tokens.keys().next().is_none() {
            self.watch(watch::FIRST_PACKETS, false)?;
        }
        Ok(())
    }

    fn first_packets(&mut self) -> Result<Vec<FirstPacket>> {
        let mut claims = self.hash::<ClaimKey, Claim>(maps::CLAIMS)?;
        let keys: Vec<ClaimKey> = claims.keys().collect::<Result<_, _>>()?;
        let mut packets = Vec::with_capacity(keys.len());
        for key in keys {
            let Some(claim) = found(claims.get(&key, 0))? else { continue };
            ignore_missing(claims.remove(&key))?;
            packets.extend(first_packet(&key, &claim));
        }
        Ok(packets)
    }
}

/// `None` is impossible: the data plane notes nothing but headers.
fn first_packet(key: &ClaimKey, claim: &Claim) -> Option<FirstPacket> {
    let header: Vec<u8> = claim.header.iter().flat_map(|w| w.to_le_bytes()).collect();
    Some(FirstPacket {
        job: key.job,
        header: JobHeader::decode(header.first_chunk()?)?,
        ifindex: key.ifindex,
        src: unmapped(claim.connection.src_ip),
        src_mac: claim.src_mac,
        dst: unmapped(claim.connection.dst_ip),
        qpn: claim.connection.qpn,
        psn: claim.psn,
        len: claim.len,
        only: claim.only != 0,
    })
}

/// What is in a map, if it is.
pub(super) fn found<T>(result: Result<T, aya::maps::MapError>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) => ignore_missing(Err(error)).map(|()| None),
    }
}

pub(super) fn ignore_missing(result: Result<(), aya::maps::MapError>) -> Result<()> {
    match result {
        Err(aya::maps::MapError::KeyNotFound) => Ok(()),
        Err(aya::maps::MapError::SyscallError(e)) if e.io_error.raw_os_error() == Some(libc::ENOENT) => {
            Ok(())
        }
        other => Ok(other?),
    }
}
