//! [`DataPlane`] with aya; operations that need more than one map access are in the module that
//! they belong to.

use std::collections::HashMap;

use anyhow::Result;
use aya::maps::{Array, PerCpuArray, PerCpuValues};
use netsum_common::abi::{
    Address, ConnectionKey, FlowKey, Hop, HopKey, InBandJob, RingNumber, TraceFilter, maps,
};
use netsum_common::counters::COUNTERS;
use netsum_common::slot::{RingState, Slot};
use netsum_common::timing::Timing;
use netsum_common::wire::InBandToken;
use netsum_core::plane::{EndedFlow, FirstPacket, FlowSpec, FlowStats, RingSpec};

use super::bpf::BpfDataPlane;
use super::plane::{DataPlane, EndedRing, ProgramFacts, Traced};
use super::{program_info, trace};

impl DataPlane for BpfDataPlane {
    fn attach(&mut self, ifindex: u32) -> Result<()> {
        self.attach_port(ifindex)
    }

    fn detach(&mut self, ifindex: u32) -> Result<()> {
        self.detach_port(ifindex)
    }

    fn create_rings(&mut self, rings: &[RingSpec]) -> Result<()> {
        self.make_rings(rings)
    }

    fn reset_counters(&mut self, ring: RingNumber) -> Result<()> {
        let cpus = aya::util::nr_cpus().map_err(|(what, e)| anyhow::anyhow!("{what}: {e}"))?;
        let mut counters: PerCpuArray<_, u64> =
            PerCpuArray::try_from(self.map_mut(maps::COUNTERS)?)?;
        for counter in 0..COUNTERS {
            counters.set(ring.0 * COUNTERS + counter, PerCpuValues::try_from(vec![0; cpus])?, 0)?;
        }
        Ok(self.array(maps::TIMINGS)?.set(ring.0, Timing::EMPTY, 0)?)
    }

    fn add_flow(&mut self, flow: &FlowSpec) -> Result<()> {
        self.register(flow)
    }

    fn activate_ring(&mut self, ring: &RingSpec, ports: &[u32]) -> Result<()> {
        self.start_ring(ring, ports)
    }

    fn set_hop(&mut self, member: HopKey, hop: &Hop) -> Result<()> {
        Ok(self.hash(maps::HOPS)?.insert(member, *hop, 0)?)
    }

    fn reserve(&mut self, places: HashMap<Address, u32>) -> Result<()> {
        self.set_reserved(places)
    }

    fn set_slaves(&mut self, slaves: HashMap<u32, u32>) -> Result<()> {
        self.map_slaves(slaves)
    }

    fn delete_rings(&mut self, rings: &[EndedRing]) -> Result<()> {
        self.end_rings(rings)
    }

    fn forget_ended(&mut self, flows: &[FlowKey]) -> Result<()> {
        let ended: Vec<FlowKey> =
            flows.iter().filter(|key| self.ended.contains(*key)).copied().collect();
        ended.into_iter().try_for_each(|key| self.forget_flow(key))
    }

    fn ended_flows(&self) -> Result<Vec<EndedFlow>> {
        self.ended()
    }

    fn pause_rings(&mut self, rings: &[RingNumber]) -> Result<()> {
        rings.iter().try_for_each(|ring| self.set_active(*ring, false))?;
        self.wait_for_programs()
    }

    fn resume_rings(&mut self, rings: &[RingNumber]) -> Result<()> {
        rings.iter().try_for_each(|ring| self.set_active(*ring, true))
    }

    fn attached(&self) -> Vec<u32> {
        self.ports.keys().copied().collect()
    }

    fn keep_cpus(&mut self) -> Result<Vec<String>> {
        self.repair_cpus()
    }

    fn unpin(&mut self) -> Result<()> {
        match self.pins.take() {
            Some(pins) => pins.remove(),
            None => Ok(()),
        }
    }

    fn counters(&self, ring: RingNumber) -> Result<Vec<u64>> {
        let map: PerCpuArray<_, u64> = self.map(maps::COUNTERS)?;
        (0..COUNTERS).map(|c| Ok(map.get(&(ring.0 * COUNTERS + c), 0)?.iter().sum())).collect()
    }

    fn timing(&self, ring: RingNumber) -> Result<Box<Timing>> {
        let timings: Array<_, Timing> = self.map(maps::TIMINGS)?;
        Ok(Box::new(timings.get(&ring.0, 0)?))
    }

    fn slots(&self, ring: RingNumber) -> Result<Vec<Slot>> {
        self.maps_of(ring)?.slots.iter().map(|s| Ok(s?)).collect()
    }

    fn slot(&self, ring: RingNumber, slot: u32) -> Result<Slot> {
        Ok(self.maps_of(ring)?.slots.get(&slot, 0)?)
    }

    fn ring_state(&self, ring: RingNumber) -> Result<RingState> {
        let states: Array<_, RingState> = self.map(maps::RING_STATES)?;
        Ok(states.get(&ring.0, 0)?)
    }

    fn flow_stats(&self, key: FlowKey) -> Result<FlowStats> {
        self.seen(key)
    }

    fn send_held(&mut self, ring: &RingSpec, slot: u32, flow: &FlowSpec) -> Result<()> {
        self.send_duplicate(ring, slot, flow)
    }

    fn watch_unknown_flows(&mut self, on: bool) -> Result<()> {
        self.note_unknown_flows(on)
    }

    fn unknown_flows(&self) -> Result<Vec<(ConnectionKey, u64)>> {
        self.noted_unknown_flows()
    }

    fn add_in_band_token(&mut self, token: InBandToken, job: InBandJob) -> Result<()> {
        self.add_token(token, job)
    }

    fn remove_in_band_token(&mut self, token: InBandToken) -> Result<()> {
        self.remove_token(token)
    }

    fn first_packets(&mut self) -> Result<Vec<FirstPacket>> {
        self.take_first_packets()
    }

    fn trace(&mut self, filter: Option<&TraceFilter>) -> Result<()> {
        trace::switch(self, filter)
    }

    fn traced(&mut self, most: usize) -> Result<Vec<Traced>> {
        Ok(trace::take(&mut self.events, most))
    }

    fn trace_lost(&self) -> Result<u64> {
        trace::lost(self)
    }

    fn cpu_number(&self, cpu: u32) -> u32 {
        self.cpus.get(cpu as usize).copied().unwrap_or(cpu)
    }

    fn programs(&self) -> Result<Vec<ProgramFacts>> {
        program_info::programs(self)
    }
}
