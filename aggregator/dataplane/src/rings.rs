//! Rings in the data plane: their maps, from making to removal.

use std::collections::HashMap;

use anyhow::{Context as _, Result, bail};
use aya::maps::{Array, DevMap, MapData};
use netsum_common::abi::{
    self, EgressKey, EgressPort, FlowKey, Hop, HopKey, MAX_MTU, MAX_RANKS, MAX_RINGS, RingConfig, RingNumber,
    SavedHeader, maps, ring_flags,
};
use netsum_common::slot::{RingState, Slot};
use netsum_common::timing::Timing;
use netsum_core::plane::RingSpec;

use super::bpf::{BpfDataPlane, RingMaps, device_map, ignore_missing};

/// `BPF_F_INNER_MAP`: the array may differ in length from the outer map's template.
const INNER_MAP: u32 = 1 << 12;

/// Entries of a ring's inner maps.
struct Sizes {
    slots: u32,
    mtu: u32,
    headers: u32,
    ports: u32,
}

impl BpfDataPlane {
    pub(super) fn make_ring(&mut self, ring: &RingSpec) -> Result<()> {
        check(ring)?;
        let config = self.config(ring)?;
        let RingConfig { slots, mtu, ranks, .. } = config;
        let ports = ranks - has_parent(&config) as u32;
        self.put_maps(ring.id, ring.cpu, &Sizes { slots, mtu, headers: slots * ranks, ports })?;
        self.array(maps::STATES)?.set(ring.id.0, RingState::default(), 0)?;
        self.array(maps::RINGS)?.set(ring.id.0, config, 0)?;
        Ok(())
    }

    pub(super) fn start_ring(&mut self, ring: &RingSpec, ports: &[u32]) -> Result<()> {
        check(ring)?;
        if ports.len() != ring.config.ranks as usize {
            bail!("{} ports for {} ranks", ports.len(), ring.config.ranks);
        }
        self.own_receivers(ring.id, ports)?;
        let egress = self.egress.try_clone()?;
        let (ports, uplink) = ports.split_at(ports.len() - has_parent(&ring.config) as usize);
        if let &[uplink] = uplink {
            let mut uplinks = DevMap::try_from(self.map_mut(maps::UPLINKS)?)?;
            uplinks
                .set(ring.id.0, uplink, Some(&egress), 0)
                .with_context(|| format!("the way up: interface {uplink} cannot be a target of redirects"))?;
        }
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
        let mut config = self.config(ring)?;
        config.flags |= ring_flags::ACTIVE;
        let hops = self.hash::<HopKey, Hop>(maps::HOPS)?;
        let mut members = (0..config.ranks).map(|member| HopKey { ring: ring.id, member });
        if members.any(|member| hops.get(&member, 0).is_ok()) {
            config.flags |= ring_flags::ROUTED;
        }
        Ok(self.array(maps::RINGS)?.set(ring.id.0, config, 0)?)
    }

    pub(super) fn end_ring(&mut self, ring: RingNumber, flows: &[FlowKey], ports: &[u32]) -> Result<()> {
        // From here on nothing is added. What comes is dropped: by the ring, then by the flows that have ended.
        let mut config = self.ring_config(ring)?;
        config.flags &= !ring_flags::ACTIVE;
        self.array(maps::RINGS)?.set(ring.0, config, 0)?;
        if !flows.is_empty() {
            self.wait_for_programs()?;
        }
        for key in flows {
            self.end_flow(*key)?;
        }
        for &ifindex in ports {
            ignore_missing(self.hash::<_, EgressPort>(maps::EGRESS)?.remove(&EgressKey { ring, ifindex }))?;
        }
        for member in 0..config.ranks {
            ignore_missing(self.hash::<_, Hop>(maps::HOPS)?.remove(&HopKey { ring, member }))?;
        }
        if config.mtu == 0 {
            return Ok(());
        }
        // aya has no removal from an array of maps: the smallest maps take the place of the ring's and free them.
        self.put_maps(ring, 0, &Sizes { slots: 1, mtu: config.mtu, headers: 1, ports: 1 })?;
        self.rings.remove(&ring);
        self.array(maps::RINGS)?.set(ring.0, RingConfig::default(), 0)?;
        Ok(())
    }

    /// Opens the maps of a ring that an earlier daemon has made. Needs CAP_SYS_ADMIN.
    pub(super) fn open_ring(&mut self, ring: RingNumber, cpu: u32) -> Result<()> {
        let maps = RingMaps {
            cpu,
            strayed: self.strayed(ring)?,
            slots: self.inner(maps::SLOTS, ring)?,
            headers: self.inner(maps::HEADERS, ring)?,
            ports: self.inner(maps::PORTS, ring)?,
        };
        self.rings.insert(ring, maps);
        Ok(())
    }

    /// Empties a ring, keeping its maps: faster than making it anew, which waits for all CPUs. It begins with index
    /// `start` and is not active. For tests.
    pub fn empty_ring(&mut self, ring: &RingSpec, start: u32) -> Result<()> {
        let config = self.config(ring)?;
        self.array(maps::RINGS)?.set(ring.id.0, config, 0)?;
        let mut slots: Array<MapData, Slot> = self.inner(maps::SLOTS, ring.id)?;
        (0..ring.config.slots).try_for_each(|slot| slots.set(slot, Slot::default(), 0))?;
        self.array(maps::TIMINGS)?.set(ring.id.0, Timing::EMPTY, 0)?;
        let state = RingState { low: start, expected: [start; MAX_RANKS], ..RingState::default() };
        Ok(self.array(maps::STATES)?.set(ring.id.0, state, 0)?)
    }

    /// Makes a ring's inner maps anew.
    fn put_maps(&mut self, ring: RingNumber, cpu: u32, sizes: &Sizes) -> Result<()> {
        let slots: Array<MapData, Slot> = Array::create(sizes.slots, INNER_MAP)?;
        let headers: Array<MapData, SavedHeader> = Array::create(sizes.headers, INNER_MAP)?;
        let ports = device_map(sizes.ports)?;
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
        let strayed = self.strayed(ring)?;
        self.rings.insert(ring, RingMaps { cpu, strayed, slots, headers, ports });
        Ok(())
    }

    fn put_sums<const MTU: usize>(&mut self, ring: RingNumber, slots: u32) -> Result<()> {
        let sums: Array<MapData, [u8; MTU]> = Array::create(slots, INNER_MAP)?;
        let index = abi::MTUS.iter().position(|&m| m as usize == MTU).context("a path MTU of the ABI")?;
        self.put(maps::SUMS[index], ring, &sums)
    }

    /// What a ring's map holds while it is not active.
    fn config(&self, ring: &RingSpec) -> Result<RingConfig> {
        let cpu = *self.cpus.get(ring.cpu as usize).with_context(|| format!("no CPU number {}", ring.cpu))?;
        Ok(RingConfig { cpu, ..ring.config })
    }
}

/// Whether its last member is the way up to another box.
fn has_parent(ring: &RingConfig) -> bool {
    ring.flags & ring_flags::UPLINK != 0
}

fn check(&RingSpec { id, config: ring, .. }: &RingSpec) -> Result<()> {
    if id == RingNumber::NONE || id.0 >= MAX_RINGS {
        bail!("ring number {id} is out of range: 1 to {}", MAX_RINGS - 1);
    }
    if !(2..=MAX_RANKS as u32).contains(&ring.ranks) {
        bail!("{} ranks: 2 to {MAX_RANKS} are possible", ring.ranks);
    }
    if !ring.slots.is_power_of_two()
        || ring.slots > abi::MAX_SLOTS
        || ring.slots < ring.credit.saturating_mul(2)
    {
        bail!("{} slots: a power of two, at least twice the credit of {}", ring.slots, ring.credit);
    }
    if !abi::MTUS.contains(&ring.mtu) {
        bail!("path MTU {}: one of {:?}, at most {MAX_MTU}", ring.mtu, abi::MTUS);
    }
    Ok(())
}
