//! Flows in the data plane: the ownership of addresses, and flows whose job has ended.
//!
//! A flow that ends is not removed but replaced, in one step, by an entry without a ring. Its
//! sender does not know of the end, and continues at the PSNs that its receiver expects. If its
//! data were forwarded, the receiver would take it for sums.

use anyhow::{Context as _, Result, bail};
use aya::maps::HashMap;
use netsum_common::abi::{
    Address, ConnectionKey, Flow, FlowKey, Owner, RingNumber, features, maps,
};
use netsum_common::counters::Counter;
use netsum_core::plane::{EndedFlow, FlowSpec, FlowStats, mapped, unmapped};

use super::bpf::{BpfDataPlane, found, ignore_missing};

impl BpfDataPlane {
    /// Registers a flow; replaces an ended one with the same key.
    pub(super) fn register(&mut self, flow: &FlowSpec) -> Result<()> {
        let before = self.flow(flow.key())?;
        self.own(Address::ip(mapped(flow.src)), flow.ifindex, flow.group_mark != 0)
            .with_context(|| flow.src.to_string())?;
        if let Some(mac) = flow.src_mac
            && let Err(error) = self.own(Address::mac(mac), flow.ifindex, flow.group_mark != 0)
        {
            self.disown(Address::ip(mapped(flow.src)), flow.ifindex)?;
            return Err(error.context(format!("MAC address of {}", flow.src)));
        }
        let value = Flow {
            ring: flow.ring,
            rank: flow.member.0,
            base_psn: flow.base_psn.get(),
            ifindex: flow.ifindex,
            src_ip: mapped(flow.src),
            src_mac: flow.src_mac.unwrap_or_default(),
            mac_given: flow.src_mac.is_some().into(),
            group_mark: flow.group_mark,
            ..Flow::NOTHING
        };
        if let Err(error) = self.hash(maps::FLOWS)?.insert(flow.key(), value, 0) {
            self.disown_all(flow.key(), &value)?;
            return Err(error.into());
        }
        self.ended.remove(&flow.key());
        before.map_or(Ok(()), |before| self.disown_all(flow.key(), &before))
    }

    /// If the next member of a ring is behind another box, so is a flow's receiver. The receiver's
    /// address then belongs to that member's port, and no other host can acknowledge in its name.
    pub(super) fn own_receivers(&mut self, ring: RingNumber, ports: &[u32]) -> Result<()> {
        let flows = self.hash::<FlowKey, Flow>(maps::FLOWS)?;
        let all: Vec<(FlowKey, Flow)> = flows.iter().collect::<Result<_, _>>()?;
        let of_ring = || all.iter().filter(|(_, flow)| flow.ring == ring);
        for &(key, flow) in of_ring().filter(|(_, flow)| flow.dst_ifindex == 0) {
            let next = (flow.rank as usize + 1) % ports.len();
            if of_ring().any(|(_, other)| other.rank as usize == next && other.group_mark != 0) {
                let dst_ifindex = ports[next];
                self.own(Address::ip(key.dst_ip), dst_ifindex, true)
                    .with_context(|| unmapped(key.dst_ip).to_string())?;
                if let Err(error) =
                    self.hash(maps::FLOWS)?.insert(key, Flow { dst_ifindex, ..flow }, 0)
                {
                    self.disown(Address::ip(key.dst_ip), dst_ifindex)?;
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// Drops data of a flow from now on. Its ring must be inactive, and no program may still run in
    /// it: the next flow that ends reuses this one's memory, with another rank. A missing flow is
    /// not an error.
    pub(super) fn end_flow(&mut self, key: FlowKey) -> Result<()> {
        let Some(flow) = self.flow(key)? else { return Ok(()) };
        self.hash(maps::FLOWS)?.insert(key, Flow { ring: Flow::ENDED, ..flow }, 0)?;
        self.ended.insert(key);
        self.disown_all(key, &flow)
    }

    /// Drops data of a connection that waited to become a flow.
    pub(super) fn end_connection(&mut self, c: &ConnectionKey) -> Result<()> {
        let key = FlowKey { dst_ip: c.dst_ip, qpn: c.qpn };
        if self.flow(key)?.is_some() {
            return Ok(());
        }
        let ended =
            Flow { ring: Flow::ENDED, ifindex: c.ifindex, src_ip: c.src_ip, ..Flow::NOTHING };
        self.hash(maps::FLOWS)?.insert(key, ended, 0)?;
        self.ended.insert(key);
        Ok(())
    }

    /// Removes a flow, if it exists, and its ownership of addresses. Data that still arrives on it
    /// is forwarded.
    pub fn forget_flow(&mut self, key: FlowKey) -> Result<()> {
        let Some(flow) = self.flow(key)? else { return Ok(()) };
        ignore_missing(self.hash::<FlowKey, Flow>(maps::FLOWS)?.remove(&key))?;
        self.ended.remove(&key);
        self.disown_all(key, &flow)
    }

    pub(super) fn ended(&self) -> Result<Vec<EndedFlow>> {
        let flows: HashMap<_, FlowKey, Flow> = self.map(maps::FLOWS)?;
        let one = |&key: &FlowKey| {
            let flow = flows.get(&key, 0)?;
            Ok(EndedFlow { key, ifindex: flow.ifindex, packets: flow.packets })
        };
        self.ended.iter().map(one).collect()
    }

    fn flow(&mut self, key: FlowKey) -> Result<Option<Flow>> {
        found(self.hash::<FlowKey, Flow>(maps::FLOWS)?.get(&key, 0))
    }

    /// Counts one more flow of an address, which belongs to one port. If it is behind several
    /// uplinks, the port of the first registered flow owns it; unsummed packets arrive there.
    fn own(&mut self, address: Address, ifindex: u32, by_box: bool) -> Result<()> {
        let reserved = self.reserved.get(&address).copied();
        let mut owners = self.hash::<Address, Owner>(maps::OWNERS)?;
        let before = match reserved {
            Some(ifindex) => Some(Owner { ifindex, flows: 0 }),
            None => found(owners.get(&address, 0))?,
        };
        let mut owner = before.unwrap_or(Owner { ifindex, flows: 0 });
        if owner.ifindex != ifindex {
            if by_box {
                return Ok(());
            }
            match owner.ifindex {
                Owner::THE_BOX => bail!("belongs to the box itself"),
                other => bail!("belongs to interface {other} already, not to {ifindex}"),
            }
        }
        if reserved.is_some() {
            return Ok(());
        }
        owner.flows += 1;
        owners.insert(address, owner, 0)?;
        self.set_features(features::RANKS, true)
    }

    /// Counts one flow less for each of a flow's addresses. An ended flow is not counted.
    fn disown_all(&mut self, key: FlowKey, flow: &Flow) -> Result<()> {
        if flow.ring == Flow::ENDED {
            return Ok(());
        }
        self.disown(Address::ip(flow.src_ip), flow.ifindex)?;
        if flow.dst_ifindex != 0 {
            self.disown(Address::ip(key.dst_ip), flow.dst_ifindex)?;
        }
        if flow.mac_given != 0 {
            self.disown(Address::mac(flow.src_mac), flow.ifindex)
        } else {
            Ok(())
        }
    }

    fn disown(&mut self, address: Address, ifindex: u32) -> Result<()> {
        if self.reserved.contains_key(&address) {
            return Ok(());
        }
        let mut owners = self.hash::<Address, Owner>(maps::OWNERS)?;
        match found(owners.get(&address, 0))? {
            Some(owner) if owner.ifindex != ifindex => Ok(()),
            Some(owner) if owner.flows > 1 => {
                Ok(owners.insert(address, Owner { flows: owner.flows - 1, ..owner }, 0)?)
            }
            Some(_) => {
                ignore_missing(owners.remove(&address))?;
                if owners.keys().next().is_none() {
                    self.set_features(features::RANKS, false)
                } else {
                    Ok(())
                }
            }
            None => Ok(()),
        }
    }

    pub(super) fn seen(&self, key: FlowKey) -> Result<FlowStats> {
        let flows: HashMap<_, FlowKey, Flow> = self.map(maps::FLOWS)?;
        let flow = flows.get(&key, 0)?;
        Ok(FlowStats {
            mac: (flow.src_mac != [0; 6]).then_some(flow.src_mac),
            packets: flow.packets,
            refused: flow.refused,
            last_psn: flow.last_psn,
            last_verdict: Counter::ALL
                .get(flow.last_verdict as usize)
                .copied()
                .filter(|_| flow.packets > 0),
            mismatch: (flow.mismatch_len != 0).then_some((flow.mismatch_psn, flow.mismatch_len)),
        })
    }

    pub(super) fn note_unknown_flows(&mut self, on: bool) -> Result<()> {
        if on {
            let mut unknown_flows = self.hash::<ConnectionKey, u64>(maps::UNKNOWN_FLOWS)?;
            let old: Vec<_> = unknown_flows.keys().collect::<Result<_, _>>()?;
            for key in old {
                ignore_missing(unknown_flows.remove(&key))?;
            }
        }
        self.set_features(features::UNKNOWN_FLOWS, on)
    }

    pub(super) fn noted_unknown_flows(&self) -> Result<Vec<(ConnectionKey, u64)>> {
        let map: HashMap<_, ConnectionKey, u64> = self.map(maps::UNKNOWN_FLOWS)?;
        map.iter().map(|entry| Ok(entry?)).collect()
    }
}
