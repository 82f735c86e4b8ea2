//! Maps and attachments of an earlier daemon: taken over, or removed.

use std::collections::{HashMap, HashSet};

use anyhow::{Context as _, Result};
use aya::maps::{Array, DevMap};
use netsum_common::abi::{
    Address, EgressKey, EgressPort, Flow, FlowKey, Hop, HopKey, InBandJob, MAX_RINGS, Owner,
    RingConfig, RingNumber, Token, features, maps, ring_flags,
};
use netsum_core::plane::{FlowSpec, RingSpec};

use super::bpf::{BpfDataPlane, found, ignore_missing};
use super::plane::EndedRing;

impl BpfDataPlane {
    /// Whether a ring and its flows are complete in the maps. They are not if a daemon was killed
    /// while it changed them.
    pub fn is_intact(&mut self, ring: &RingSpec, active: bool, flows: &[FlowSpec]) -> Result<bool> {
        let rings: Array<_, RingConfig> = self.array(maps::RINGS)?;
        let config = rings.get(&ring.id.0, 0)?;
        let RingConfig { members: ranks, slots, credit, mtu, .. } = ring.config;
        let same = (config.members, config.slots, config.credit, config.mtu)
            == (ranks, slots, credit, mtu);
        if !same || (config.flags & ring_flags::ACTIVE != 0) != active {
            return Ok(false);
        }
        self.open_ring(ring.id, ring.cpu)?;
        self.replace_egress(ring.id)?;
        let map = self.hash::<FlowKey, Flow>(maps::FLOWS)?;
        Ok(flows.iter().filter(|f| f.ring == ring.id).all(|f| {
            map.get(&f.key(), 0).is_ok_and(|v| {
                (v.ring, v.rank, v.base_psn) == (f.ring, f.member.0, f.base_psn.get())
            })
        }))
    }

    /// Replaces the egress program of a ring's clones by that of this process, port by port.
    fn replace_egress(&mut self, ring: RingNumber) -> Result<()> {
        let egress = self.egress.try_clone()?;
        let mut uplinks = DevMap::try_from(self.map_mut(maps::UPLINKS)?)?;
        if let Some(uplink) = found(uplinks.get(ring.0, 0))? {
            uplinks.set(ring.0, uplink.if_index, Some(&egress), 0)?;
        }
        let ports = &mut self.rings.get_mut(&ring).context("the ring was opened")?.ports;
        for member in 0..ports.len() {
            if let Some(port) = found(ports.get(member, 0))? {
                ports.set(member, port.if_index, Some(&egress), 0)?;
            }
        }
        Ok(())
    }

    /// Counts the owners of addresses again: an earlier daemon may have been killed between two
    /// updates.
    fn count_owners(&mut self) -> Result<()> {
        let flows = self.hash::<FlowKey, Flow>(maps::FLOWS)?;
        let flows: Vec<(FlowKey, Flow)> = flows.iter().collect::<Result<_, _>>()?;
        let reserved = |(&address, &ifindex)| {
            (address, HashMap::from([(ifindex, Owner { ifindex, flows: 0 })]))
        };
        let mut counted: HashMap<Address, HashMap<u32, Owner>> =
            self.reserved.iter().map(reserved).collect();
        for (key, flow) in flows.into_iter().filter(|(_, flow)| flow.ring != Flow::ENDED) {
            let mac = (flow.mac_given != 0).then_some((Address::mac(flow.src_mac), flow.ifindex));
            let receiver =
                (flow.dst_ifindex != 0).then_some((Address::ip(key.dst_ip), flow.dst_ifindex));
            let sender = (Address::ip(flow.src_ip), flow.ifindex);
            let claims = [sender].into_iter().chain(mac).chain(receiver);
            for (address, ifindex) in
                claims.filter(|(address, _)| !self.reserved.contains_key(address))
            {
                counted
                    .entry(address)
                    .or_default()
                    .entry(ifindex)
                    .or_insert(Owner { ifindex, flows: 0 })
                    .flows += 1;
            }
        }
        let mut owners = self.hash::<Address, Owner>(maps::OWNERS)?;
        let old: Vec<Address> = owners.keys().collect::<Result<_, _>>()?;
        for address in old.iter().filter(|a| !counted.contains_key(a)) {
            owners.remove(address)?;
        }
        let any = !counted.is_empty();
        for (address, by_port) in counted {
            // A job with several uplinks receives unsummed packets at the present owner, which
            // therefore stays.
            let before =
                found(owners.get(&address, 0))?.and_then(|owner| by_port.get(&owner.ifindex));
            let Some(owner) = before.or_else(|| by_port.values().next()) else { continue };
            owners.insert(address, owner, 0)?;
        }
        self.set_features(features::RANKS, any)
    }

    /// Keeps the reserved addresses of an earlier daemon until this one sets its own.
    fn keep_reserved(&mut self) -> Result<()> {
        let owners = self.hash::<Address, Owner>(maps::OWNERS)?;
        let all: Vec<(Address, Owner)> = owners.iter().collect::<Result<_, _>>()?;
        let reserved = all.into_iter().filter(|(_, owner)| owner.flows == 0);
        self.reserved = reserved.map(|(address, owner)| (address, owner.ifindex)).collect();
        Ok(())
    }

    /// Replaces the addresses with a fixed place that does not depend on flows.
    pub(super) fn set_reserved(&mut self, places: HashMap<Address, u32>) -> Result<()> {
        if places == self.reserved {
            return Ok(());
        }
        self.reserved = places;
        self.count_owners()
    }

    /// Removes the egress entries of all other rings.
    fn forget_egress(&mut self, rings: &[RingNumber]) -> Result<()> {
        let mut ports = self.hash::<EgressKey, EgressPort>(maps::EGRESS_PORTS)?;
        let keys: Vec<EgressKey> = ports.keys().collect::<Result<_, _>>()?;
        for key in keys.iter().filter(|key| !rings.contains(&key.ring)) {
            ignore_missing(ports.remove(key))?;
        }
        let mut hops = self.hash::<HopKey, Hop>(maps::HOPS)?;
        let keys: Vec<HopKey> = hops.keys().collect::<Result<_, _>>()?;
        for key in keys.iter().filter(|key| !rings.contains(&key.ring)) {
            ignore_missing(hops.remove(key))?;
        }
        Ok(())
    }

    /// Removes all other rings, and ends all other flows. Returns how many rings it removed.
    pub fn remove_others(&mut self, rings: &[RingNumber], flows: &[FlowSpec]) -> Result<usize> {
        let known: HashSet<FlowKey> = flows.iter().map(FlowSpec::key).collect();
        let map = self.hash::<FlowKey, Flow>(maps::FLOWS)?;
        let all: Vec<(FlowKey, Flow)> = map.iter().collect::<Result<_, _>>()?;
        let others: Vec<_> = all.into_iter().filter(|(key, _)| !known.contains(key)).collect();
        for ring in others.iter().map(|(_, flow)| flow.ring).filter(|ring| *ring != Flow::ENDED) {
            self.set_active(ring, false)?;
        }
        self.wait_for_programs()?;
        for (key, _) in others {
            self.end_flow(key)?;
        }
        self.keep_reserved()?;
        self.count_owners()?;
        // Tokens of continuing jobs stay, so no first packet gets through meanwhile.
        let tokens = self.hash::<Token, InBandJob>(maps::TOKENS)?;
        let jobs: Vec<(Token, InBandJob)> = tokens.iter().collect::<Result<_, _>>()?;
        for (token, _) in jobs.iter().filter(|(_, job)| !rings.contains(&job.job)) {
            self.remove_token(token.bytes())?;
        }
        self.forget_egress(rings)?;
        let mut removed = 0;
        let mut ended = Vec::new();
        for id in (1..MAX_RINGS).map(RingNumber).filter(|r| !rings.contains(r)) {
            removed += usize::from(self.ring_config(id)?.mtu != 0);
            ended.push(EndedRing { id, ..EndedRing::default() });
        }
        self.end_rings(&ended)?;
        Ok(removed)
    }
}
