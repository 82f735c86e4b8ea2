//! Rings in the data plane: their maps, from creation to removal.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd as _, OwnedFd};

use anyhow::{Context as _, Result, bail};
use aya::maps::{Array, DevMap, Map, MapData};
use netsum_common::abi::{
    self, EgressKey, EgressPort, Hop, HopKey, MAX_FLOAT_MTU, MAX_MTU, MAX_RANKS, MAX_RINGS,
    MIN_MTU, MTU_STEP, RingConfig, RingNumber, SavedHeader, maps, ring_flags,
};
use netsum_common::float::{LSB_MAX, LSB_MIN, Table};
use netsum_common::slot::{RingState, Slot};
use netsum_common::timing::Timing;
use netsum_core::plane::RingSpec;

use super::bpf::{ARRAY, BpfDataPlane, DEVMAP, RingMaps, create, ignore_missing};
use super::plane::EndedRing;

/// `BPF_F_INNER_MAP`: the array's length may differ from that of the outer map's template.
const INNER_MAP: u32 = 1 << 12;

/// Rings that are created or removed at once: seven descriptors each.
const BATCH: usize = 64;

/// Numbers of entries in a ring's inner maps.
struct Sizes {
    slots: u32,
    sum_bytes: u32,
    headers: u32,
    ports: u32,
}

impl BpfDataPlane {
    pub(super) fn make_rings(&mut self, rings: &[RingSpec]) -> Result<()> {
        rings.iter().try_for_each(check)?;
        for some in rings.chunks(BATCH) {
            let mut sizes = Vec::new();
            for ring in some {
                let config = self.config(ring)?;
                let RingConfig { slots, members: ranks, .. } = config;
                let ports = ranks - has_parent(&config) as u32;
                let sum_bytes = config.sum_bytes();
                sizes.push((
                    ring.id,
                    ring.cpu,
                    Sizes { slots, sum_bytes, headers: slots * ranks, ports },
                ));
                // This is first: it identifies the ring's maps, and they are freed even if not all
                // can be created.
                self.array(maps::RINGS)?.set(ring.id.0, config, 0)?;
                self.array(maps::RING_STATES)?.set(ring.id.0, RingState::default(), 0)?;
            }
            self.put_maps(&sizes)?;
            self.put_tables(some)?;
        }
        Ok(())
    }

    /// Creates the tables of rings of floats. Each stays when its ring ends, until another ring of
    /// floats gets the number: it cannot be made smaller.
    fn put_tables(&mut self, rings: &[RingSpec]) -> Result<()> {
        let mut put = Vec::new();
        for RingSpec { id, config, .. } in rings {
            if config.flags & ring_flags::FLOAT != 0 {
                let map = create(ARRAY, size_of::<Table>() as u32, 1, INNER_MAP)?;
                let fd = map.fd().as_fd().try_clone_to_owned()?;
                let mut table = Array::try_from(Map::from_map_data(map)?)?;
                table.set(0, Table::new(config.lsb, config.members), 0)?;
                put.push((*id, fd));
            }
        }
        self.put_all(maps::FLOAT_TABLES, &put)
    }

    pub(super) fn start_ring(&mut self, ring: &RingSpec, ports: &[u32]) -> Result<()> {
        check(ring)?;
        if ports.len() != ring.config.members as usize {
            bail!("{} ports for {} ranks", ports.len(), ring.config.members);
        }
        self.own_receivers(ring.id, ports)?;
        let egress = self.egress.try_clone()?;
        let (ports, uplink) = ports.split_at(ports.len() - has_parent(&ring.config) as usize);
        if let &[uplink] = uplink {
            let mut uplinks = DevMap::try_from(self.map_mut(maps::UPLINKS)?)?;
            uplinks.set(ring.id.0, uplink, Some(&egress), 0).with_context(|| {
                format!("the way up: interface {uplink} cannot be a target of redirects")
            })?;
        }
        let devices =
            &mut self.rings.get_mut(&ring.id).context("the ring has not been created")?.ports;
        let mut behind: HashMap<u32, EgressPort> = HashMap::new();
        for (rank, &ifindex) in ports.iter().enumerate() {
            devices.set(rank as u32, ifindex, Some(&egress), 0).with_context(|| {
                format!("rank {rank}: interface {ifindex} cannot be a target of redirects")
            })?;
            let port = behind.entry(ifindex).or_insert(EgressPort {
                count: 0,
                cursor: 0,
                ranks: [0; MAX_RANKS],
            });
            port.ranks[port.count as usize] = rank as u8;
            port.count += 1;
        }
        for (ifindex, port) in behind {
            self.hash(maps::EGRESS_PORTS)?.insert(EgressKey { ring: ring.id, ifindex }, port, 0)?;
        }
        let mut config = self.config(ring)?;
        config.flags |= ring_flags::ACTIVE;
        let hops = self.hash::<HopKey, Hop>(maps::HOPS)?;
        let mut members = (0..config.members).map(|member| HopKey { ring: ring.id, member });
        if members.any(|member| hops.get(&member, 0).is_ok()) {
            config.flags |= ring_flags::ROUTED;
        }
        Ok(self.array(maps::RINGS)?.set(ring.id.0, config, 0)?)
    }

    pub(super) fn end_rings(&mut self, rings: &[EndedRing]) -> Result<()> {
        // From here on nothing is added. Arriving data is dropped: by the inactive rings, later by
        // the ended flows.
        for ring in rings {
            self.set_active(ring.id, false)?;
        }
        if rings.iter().any(|ring| !ring.flows.is_empty()) {
            self.wait_for_programs()?;
        }
        let (mut made, mut ended) = (Vec::new(), Ok(()));
        for EndedRing { id, flows, ports } in rings {
            for key in flows {
                // All flows, even after an error: another job may get the ring's number next.
                ended = ended.and(self.end_flow(*key));
            }
            for &ifindex in ports {
                let key = EgressKey { ring: *id, ifindex };
                ignore_missing(self.hash::<_, EgressPort>(maps::EGRESS_PORTS)?.remove(&key))?;
            }
            let config = self.ring_config(*id)?;
            for member in 0..config.members {
                ignore_missing(
                    self.hash::<_, Hop>(maps::HOPS)?.remove(&HopKey { ring: *id, member }),
                )?;
            }
            if config.mtu != 0 {
                let sum_bytes = config.sum_bytes();
                made.push((*id, 0, Sizes { slots: 1, sum_bytes, headers: 1, ports: 1 }));
            }
        }
        // aya cannot remove maps from an array of maps: the smallest possible maps replace the
        // rings' maps, which frees them.
        for some in made.chunks(BATCH) {
            self.put_maps(some)?;
            for (id, ..) in some {
                self.rings.remove(id);
                self.array(maps::RINGS)?.set(id.0, RingConfig::default(), 0)?;
            }
        }
        ended
    }

    /// Opens the maps of a ring that an earlier daemon created. Needs CAP_SYS_ADMIN.
    pub(super) fn open_ring(&mut self, ring: RingNumber, cpu: u32) -> Result<()> {
        let maps = RingMaps {
            cpu,
            wrong_cpu: self.wrong_cpu(ring)?,
            slots: self.inner(maps::SLOTS, ring)?,
            headers: self.inner(maps::SAVED_HEADERS, ring)?,
            ports: self.inner(maps::RING_PORTS, ring)?,
        };
        self.rings.insert(ring, maps);
        Ok(())
    }

    /// Empties a ring but keeps its maps: this needs no memory, and does not wait for all CPUs. The
    /// ring begins with index `start` and is not active.
    pub fn empty_ring(&mut self, ring: &RingSpec, start: u32) -> Result<()> {
        let config = self.config(ring)?;
        self.array(maps::RINGS)?.set(ring.id.0, config, 0)?;
        let mut slots: Array<MapData, Slot> = self.inner(maps::SLOTS, ring.id)?;
        (0..ring.config.slots).try_for_each(|slot| slots.set(slot, Slot::default(), 0))?;
        self.array(maps::TIMINGS)?.set(ring.id.0, Timing::EMPTY, 0)?;
        let state = RingState { low: start, expected: [start; MAX_RANKS], ..RingState::default() };
        Ok(self.array(maps::RING_STATES)?.set(ring.id.0, state, 0)?)
    }

    /// Creates rings' inner maps.
    fn put_maps(&mut self, rings: &[(RingNumber, u32, Sizes)]) -> Result<()> {
        let mut put: BTreeMap<&str, Vec<(RingNumber, OwnedFd)>> = BTreeMap::new();
        let mut made = Vec::new();
        for (ring, cpu, Sizes { slots, sum_bytes, headers, ports }) in rings {
            let array = |size, len| create(ARRAY, size, len, INNER_MAP);
            let slots_map = array(size_of::<Slot>() as u32, *slots)?;
            let headers_map = array(size_of::<SavedHeader>() as u32, *headers)?;
            let ports_map = create(DEVMAP, 8, *ports, 0)?;
            for (outer, map) in [
                (maps::SLOTS, &slots_map),
                (maps::SUMS[abi::sum_size(*sum_bytes)], &array(abi::sum_len(*sum_bytes), *slots)?),
                (maps::SAVED_HEADERS, &headers_map),
                (maps::RING_PORTS, &ports_map),
            ] {
                put.entry(outer).or_default().push((*ring, map.fd().as_fd().try_clone_to_owned()?));
            }
            let maps = RingMaps {
                cpu: *cpu,
                wrong_cpu: self.wrong_cpu(*ring)?,
                slots: Array::try_from(Map::from_map_data(slots_map)?)?,
                headers: Array::try_from(Map::from_map_data(headers_map)?)?,
                ports: DevMap::try_from(Map::from_map_data(ports_map)?)?,
            };
            made.push((*ring, maps));
        }
        put.iter().try_for_each(|(outer, inner)| self.put_all(outer, inner))?;
        self.rings.extend(made);
        Ok(())
    }

    /// The content of a ring's map while it is not active.
    fn config(&self, ring: &RingSpec) -> Result<RingConfig> {
        let cpu = *self
            .cpus
            .get(ring.cpu as usize)
            .with_context(|| format!("no CPU number {}", ring.cpu))?;
        Ok(RingConfig { cpu, ..ring.config })
    }
}

/// Whether its last member is the uplink to another box.
fn has_parent(ring: &RingConfig) -> bool {
    ring.flags & ring_flags::UPLINK != 0
}

fn check(&RingSpec { id, config: ring, .. }: &RingSpec) -> Result<()> {
    if id == RingNumber::NONE || id.0 >= MAX_RINGS {
        bail!("ring number {id} is out of range: 1 to {}", MAX_RINGS - 1);
    }
    if !(2..=MAX_RANKS as u32).contains(&ring.members) {
        bail!("{} ranks: 2 to {MAX_RANKS} are possible", ring.members);
    }
    if !ring.slots.is_power_of_two()
        || ring.slots > abi::MAX_SLOTS
        || ring.slots < ring.credit.saturating_mul(2)
    {
        bail!("{} slots: a power of two, at least twice the credit of {}", ring.slots, ring.credit);
    }
    if !abi::is_mtu(ring.mtu) {
        bail!("path MTU {}: a multiple of {MTU_STEP}, {MIN_MTU} to {MAX_MTU}", ring.mtu);
    }
    if ring.flags & ring_flags::FLOAT != 0
        && (ring.mtu > MAX_FLOAT_MTU || !(LSB_MIN..=LSB_MAX).contains(&ring.lsb))
    {
        bail!("floats with path MTU {} and LSB 2^{}", ring.mtu, ring.lsb);
    }
    Ok(())
}
