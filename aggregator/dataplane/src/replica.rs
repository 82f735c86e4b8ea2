//! A second instance of the programs, with its own maps and a copy of the running instance's data:
//! packets can be run through it without affecting any job.
//!
//! Loading programs and finding maps by their numbers takes root, or CAP_BPF, CAP_NET_ADMIN,
//! CAP_PERFMON and CAP_SYS_ADMIN, which a running daemon has given up. So this is for a separate
//! process. Packets continue while the data is copied: the copy of an active ring may mix several
//! moments.

use std::collections::HashMap as StdHashMap;
use std::io::ErrorKind;

use anyhow::{Context as _, Result, bail};
use aya::maps::{Array, ArrayOfMaps, HashMap, MapData, MapInfo};
use aya::programs::{ProgramError, TestRun as _, TestRunOptions, loaded_programs};
use netsum_common::abi::{
    Address, ConnectionKey, EgressKey, EgressPort, Flow, FlowKey, InBandJob, MAX_RANKS, MAX_RINGS,
    Owner, ReleaseTag, RingConfig, RingNumber, SavedHeader, Token, TraceFilter, features, maps,
    programs, ring_flags, sum_size,
};
use netsum_common::slot::{RingState, Slot};
use netsum_core::plane::RingSpec;

use super::bpf::{BpfDataPlane, program};
use super::held_back;
use super::load::{OBJECT, PROBE_AGGREGATE, PROBE_EGRESS};
use super::plane::{DataPlane as _, Traced};

/// The interface through which clones leave in a test run: the loopback interface.
pub(super) const LOOPBACK: u32 = 1;
/// The longest frame that can be run: it must fit a page with the kernel's own parts. Results are
/// shorter.
pub const LONGEST: usize = 3400;
/// XDP verdicts (`include/uapi/linux/bpf.h`).
pub(super) const XDP_REDIRECT: u32 = 4;

/// The second instance.
pub struct Replica {
    plane: BpfDataPlane,
    rings: StdHashMap<RingNumber, RingConfig>,
    flows: Vec<(FlowKey, Flow)>,
}

/// Members that receive sums: all but the uplink.
fn receivers(ring: &RingConfig) -> u32 {
    ring.members - u32::from(ring.flags & ring_flags::UPLINK != 0)
}

/// A program's result for a frame.
#[derive(Clone, Debug)]
pub struct Step {
    /// XDP verdict.
    pub action: u32,
    /// The counters of the frame, and the state of the slot afterwards.
    pub traced: Traced,
}

/// Maps of the running programs, by name.
struct Live(StdHashMap<String, u32>);

impl Live {
    fn find(numbers: &[u32]) -> Result<Self> {
        let mut found = StdHashMap::new();
        for info in loaded_programs() {
            let info = match info {
                // Other programs may be unloaded while they are listed.
                Err(ProgramError::SyscallError(e)) if e.io_error.kind() == ErrorKind::NotFound => {
                    continue;
                }
                info => info.context("the loaded programs cannot be listed")?,
            };
            if !numbers.contains(&info.id()) {
                continue;
            }
            for id in info.map_ids()?.unwrap_or_default() {
                let map = MapInfo::from_id(id)?;
                found.insert(map.name_as_str().unwrap_or_default().to_owned(), id);
            }
        }
        Ok(Self(found))
    }

    fn open(&self, name: &str) -> Result<MapData> {
        let id =
            self.0.get(name).with_context(|| format!("the running programs have no map {name}"))?;
        Ok(MapData::from_id(*id)?)
    }

    fn array<V: aya::Pod>(&self, name: &str) -> Result<Array<MapData, V>> {
        Ok(Array::try_from(aya::maps::Map::from_map_data(self.open(name)?)?)?)
    }

    fn hash<K: aya::Pod, V: aya::Pod>(&self, name: &str) -> Result<HashMap<MapData, K, V>> {
        Ok(HashMap::try_from(aya::maps::Map::from_map_data(self.open(name)?)?)?)
    }

    fn inner<V: aya::maps::FromMapData + aya::maps::InnerMap>(
        &self,
        name: &str,
        ring: RingNumber,
    ) -> Result<V> {
        let outer: ArrayOfMaps<_, V> =
            ArrayOfMaps::try_from(aya::maps::Map::from_map_data(self.open(name)?)?)?;
        outer.get(&ring.0, 0).with_context(|| format!("{name}[{ring}]"))
    }
}

impl Replica {
    /// Loads the programs again, and copies rings, flows and owners of the running ones, which have
    /// these numbers; unless `fresh`, also the content of slots and the learned MAC addresses.
    ///
    /// Must be called in the network namespace of the ports.
    pub fn new(numbers: &[u32], fresh: bool) -> Result<Self> {
        let live = Live::find(numbers)?;
        let configs: Array<_, RingConfig> = live.array(maps::RINGS)?;
        let mut rings = StdHashMap::new();
        for ring in (1..MAX_RINGS).map(RingNumber) {
            let config = configs.get(&ring.0, 0)?;
            if config.mtu != 0 {
                rings.insert(ring, config);
            }
        }
        let mut cpus: Vec<u32> = rings.values().map(|r| r.cpu).collect();
        cpus.sort_unstable();
        cpus.dedup();
        if cpus.is_empty() {
            cpus.push(0);
        }
        let mut plane = BpfDataPlane::load_object(OBJECT, &cpus)?;
        plane.set_inline(false)?;
        for name in [PROBE_AGGREGATE, PROBE_EGRESS] {
            program(&mut plane.ebpf, name)?.load().with_context(|| format!("program `{name}`"))?;
        }
        let flows: HashMap<_, FlowKey, Flow> = live.hash(maps::FLOWS)?;
        let flows: Vec<(FlowKey, Flow)> = flows.iter().collect::<Result<_, _>>()?;
        let mut replica = Self { plane, rings, flows };
        replica.copy(&live, &cpus, fresh)?;
        replica.plane.trace(Some(&TraceFilter::ALL))?;
        Ok(replica)
    }

    fn copy(&mut self, live: &Live, cpus: &[u32], fresh: bool) -> Result<()> {
        if fresh {
            for (_, flow) in self.flows.iter_mut().filter(|(_, flow)| flow.mac_given == 0) {
                flow.src_mac = [0; 6];
            }
        }
        for (&ring, config) in &self.rings {
            let spec = spec(ring, config, cpus);
            self.plane.create_ring(&spec)?;
            if config.flags & ring_flags::ACTIVE != 0 {
                let mut of_ring: Vec<&Flow> =
                    self.flows.iter().map(|(_, f)| f).filter(|f| f.ring == ring).collect();
                of_ring.sort_by_key(|f| f.rank);
                let ports: Vec<u32> = of_ring.iter().map(|f| f.ifindex).collect();
                self.plane.activate_ring(&spec, &ports)?;
            }
            // The variant for test runs has one port only; its clones go to rank 0, 1, 2, ... in
            // turn.
            let ranks = std::array::from_fn(|rank| rank as u8);
            let all =
                EgressPort { count: receivers(config).min(MAX_RANKS as u32), cursor: 0, ranks };
            self.plane.hash(maps::EGRESS_PORTS)?.insert(
                EgressKey { ring, ifindex: LOOPBACK },
                all,
                0,
            )?;
            if !fresh {
                copy_slots(&mut self.plane, live, ring, config)?;
            }
        }
        for (key, flow) in &self.flows {
            self.plane.hash::<FlowKey, Flow>(maps::FLOWS)?.insert(key, flow, 0)?;
        }
        let slaves = live.hash::<u32, u32>(maps::SLAVES)?;
        self.plane.set_slaves(slaves.iter().collect::<Result<_, _>>()?)?;
        if copy_hash::<Address, Owner>(&mut self.plane, live, maps::OWNERS)? > 0 {
            self.plane.set_features(features::RANKS, true)?;
        }
        if copy_hash::<Token, InBandJob>(&mut self.plane, live, maps::TOKENS)? > 0 {
            self.plane.set_features(features::FIRST_PACKETS, true)?;
        }
        if !fresh {
            copy_hash::<ConnectionKey, u32>(&mut self.plane, live, maps::PENDING_CONNS)?;
        }
        Ok(())
    }

    /// The flows at the time of the copy.
    pub fn flows(&self) -> &[(FlowKey, Flow)] {
        &self.flows
    }

    /// A ring's configuration.
    pub fn ring(&self, ring: RingNumber) -> Option<&RingConfig> {
        self.rings.get(&ring)
    }

    /// The kernel's tag of `ingress`, which shows whether it equals the running program.
    pub fn tag(&mut self) -> Result<u64> {
        Ok(self.plane.program(programs::INGRESS)?.info()?.tag())
    }

    /// Runs a frame that arrives at an interface through `ingress`, `aggregate` and, for each
    /// clone, `egress`, as far as it gets.
    pub fn run(&mut self, frame: &[u8], ifindex: u32) -> Result<Vec<Step>> {
        let (mut steps, mut out) = (Vec::new(), Vec::new());
        let receiver = self.plane.receivers(ifindex).first().copied();
        for name in [programs::INGRESS, PROBE_AGGREGATE] {
            let step;
            (step, out) = self.step(name, frame, receiver)?;
            let on = step.action == XDP_REDIRECT;
            steps.push(step);
            if !on {
                return Ok(steps);
            }
        }
        let tag = out.first_chunk().context("a result shorter than its tag")?;
        // SAFETY: `ReleaseTag` is `repr(C)`, 12 bytes without padding, and every bit pattern is
        // valid.
        let tag: ReleaseTag = unsafe { std::mem::transmute::<[u8; 12], ReleaseTag>(*tag) };
        let clones = match tag.rank {
            ReleaseTag::ALL => self.rings.get(&RingNumber(tag.ring)).map_or(0, receivers),
            _ => 1,
        };
        for _ in 0..clones {
            steps.push(self.step(PROBE_EGRESS, &out, None)?.0);
        }
        Ok(steps)
    }

    /// Runs one program; also returns the resulting frame.
    fn step(&mut self, name: &str, frame: &[u8], ifindex: Option<u32>) -> Result<(Step, Vec<u8>)> {
        let context = ifindex.map(|ifindex| held_back::context(frame.len(), ifindex));
        let mut out = vec![0; 4096];
        let result = self
            .plane
            .program(name)?
            .test_run(TestRunOptions {
                data_in: Some(frame),
                data_out: Some(&mut out),
                ctx_in: context.as_deref(),
                ..TestRunOptions::new()
            })
            .with_context(|| match ifindex {
                Some(ifindex) => format!("`{name}` cannot be run as from interface {ifindex}"),
                None => format!("`{name}` cannot be run"),
            })?;
        out.truncate(result.data_size_out as usize);
        let mut events = self.plane.traced(usize::MAX)?;
        // If the data plane itself fails to send, there are two events: the intended outcome, and
        // the failure.
        let Some(mut traced) = events.pop() else {
            bail!("`{name}` has dropped the frame without a word: its maps contradict each other")
        };
        for earlier in events {
            traced.event.counters |= earlier.event.counters;
        }
        Ok((Step { action: result.return_value, traced }, out))
    }
}

fn spec(ring: RingNumber, config: &RingConfig, cpus: &[u32]) -> RingSpec {
    let cpu = cpus.iter().position(|&cpu| cpu == config.cpu).unwrap_or(0) as u32;
    RingSpec {
        id: ring,
        cpu,
        config: RingConfig { flags: config.flags & !ring_flags::ACTIVE, ..*config },
    }
}

/// Copies a map; returns its number of entries.
fn copy_hash<K: aya::Pod, V: aya::Pod>(
    plane: &mut BpfDataPlane,
    live: &Live,
    name: &str,
) -> Result<usize> {
    let entries: Vec<(K, V)> = live.hash::<K, V>(name)?.iter().collect::<Result<_, _>>()?;
    let mut own = plane.hash::<K, V>(name)?;
    entries.iter().try_for_each(|(key, value)| own.insert(key, value, 0))?;
    Ok(entries.len())
}

/// Copies a ring's state, and the used slots with their sums and headers.
fn copy_slots(
    plane: &mut BpfDataPlane,
    live: &Live,
    ring: RingNumber,
    config: &RingConfig,
) -> Result<()> {
    let states: Array<_, RingState> = live.array(maps::RING_STATES)?;
    plane.array(maps::RING_STATES)?.set(ring.0, states.get(&ring.0, 0)?, 0)?;
    let slots: Array<MapData, Slot> = live.inner(maps::SLOTS, ring)?;
    let headers: Array<MapData, SavedHeader> = live.inner(maps::SAVED_HEADERS, ring)?;
    let mut own_slots: Array<MapData, Slot> = plane.inner(maps::SLOTS, ring)?;
    let mut own_headers: Array<MapData, SavedHeader> = plane.inner(maps::SAVED_HEADERS, ring)?;
    let mut used = Vec::new();
    for slot in 0..config.slots {
        let value = slots.get(&slot, 0)?;
        if value.is(Slot::USED) {
            own_slots.set(slot, value, 0)?;
            for at in slot * config.members..(slot + 1) * config.members {
                own_headers.set(at, headers.get(&at, 0)?, 0)?;
            }
            used.push(slot);
        }
    }
    match sum_size(config.sum_bytes()) {
        0 => copy_sums::<512>(plane, live, ring, &used),
        1 => copy_sums::<1024>(plane, live, ring, &used),
        2 => copy_sums::<1536>(plane, live, ring, &used),
        3 => copy_sums::<2048>(plane, live, ring, &used),
        4 => copy_sums::<3328>(plane, live, ring, &used),
        _ => copy_sums::<4096>(plane, live, ring, &used),
    }
}

fn copy_sums<const SIZE: usize>(
    plane: &BpfDataPlane,
    live: &Live,
    ring: RingNumber,
    used: &[u32],
) -> Result<()> {
    let map = maps::SUMS[sum_size(SIZE as u32)];
    let sums: Array<MapData, [u8; SIZE]> = live.inner(map, ring)?;
    let mut own: Array<MapData, [u8; SIZE]> = plane.inner(map, ring)?;
    used.iter().try_for_each(|slot| Ok(own.set(*slot, sums.get(slot, 0)?, 0)?))
}
