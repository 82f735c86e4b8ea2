//! The data plane of a box that has only an API.

use std::collections::HashMap;

use netsum_common::abi::{
    Address, ConnectionKey, FlowKey, Hop, HopKey, InBandJob, RingNumber, TraceFilter,
};
use netsum_common::counters::Counter;
use netsum_common::slot::{RingState, Slot};
use netsum_common::timing::Timing;
use netsum_common::wire::InBandToken;
use netsum_core::plane::{EndedFlow, FirstPacket, FlowSeen, FlowSpec, RingSpec};
use netsum_dataplane::{DataPlane, EndedRing, ProgramFacts, Traced};

/// Does nothing.
pub struct Nowhere;

impl DataPlane for Nowhere {
    fn attach(&mut self, _: u32) -> anyhow::Result<()> {
        Ok(())
    }
    fn detach(&mut self, _: u32) -> anyhow::Result<()> {
        Ok(())
    }
    fn create_rings(&mut self, _: &[RingSpec]) -> anyhow::Result<()> {
        Ok(())
    }
    fn reset_counters(&mut self, _: RingNumber) -> anyhow::Result<()> {
        Ok(())
    }
    fn add_flow(&mut self, _: &FlowSpec) -> anyhow::Result<()> {
        Ok(())
    }
    fn activate_ring(&mut self, _: &RingSpec, _: &[u32]) -> anyhow::Result<()> {
        Ok(())
    }
    fn set_hop(&mut self, _: HopKey, _: &Hop) -> anyhow::Result<()> {
        Ok(())
    }
    fn reserve(&mut self, _: HashMap<Address, u32>) -> anyhow::Result<()> {
        Ok(())
    }
    fn set_slaves(&mut self, _: HashMap<u32, u32>) -> anyhow::Result<()> {
        Ok(())
    }
    fn delete_rings(&mut self, _: &[EndedRing]) -> anyhow::Result<()> {
        Ok(())
    }
    fn forget_ended(&mut self, _: &[FlowKey]) -> anyhow::Result<()> {
        Ok(())
    }
    fn ended_flows(&self) -> anyhow::Result<Vec<EndedFlow>> {
        Ok(Vec::new())
    }
    fn pause_rings(&mut self, _: &[RingNumber]) -> anyhow::Result<()> {
        Ok(())
    }
    fn resume_rings(&mut self, _: &[RingNumber]) -> anyhow::Result<()> {
        Ok(())
    }
    fn attached(&self) -> Vec<u32> {
        Vec::new()
    }
    fn keep_cpus(&mut self) -> anyhow::Result<Vec<String>> {
        Ok(Vec::new())
    }
    fn unpin(&mut self) -> anyhow::Result<()> {
        Ok(())
    }
    fn counters(&self, _: RingNumber) -> anyhow::Result<Vec<u64>> {
        Ok(vec![0; Counter::ALL.len()])
    }
    fn timing(&self, _: RingNumber) -> anyhow::Result<Box<Timing>> {
        Ok(Box::new(Timing::EMPTY))
    }
    fn slots(&self, _: RingNumber) -> anyhow::Result<Vec<Slot>> {
        Ok(Vec::new())
    }
    fn ring_state(&self, _: RingNumber) -> anyhow::Result<RingState> {
        Ok(RingState::default())
    }
    fn slot(&self, _: RingNumber, _: u32) -> anyhow::Result<Slot> {
        Ok(Slot::default())
    }
    fn flow_seen(&self, _: FlowKey) -> anyhow::Result<FlowSeen> {
        Ok(FlowSeen::default())
    }
    fn send_held(&mut self, _: &RingSpec, _: u32, _: &FlowSpec) -> anyhow::Result<()> {
        Ok(())
    }
    fn watch_unknown_flows(&mut self, _: bool) -> anyhow::Result<()> {
        Ok(())
    }
    fn unknown_flows(&self) -> anyhow::Result<Vec<(ConnectionKey, u64)>> {
        Ok(Vec::new())
    }
    fn listen_in_band(&mut self, _: InBandToken, _: InBandJob) -> anyhow::Result<()> {
        anyhow::bail!("set-up in band does not work over several boxes")
    }
    fn ignore_in_band(&mut self, _: InBandToken) -> anyhow::Result<()> {
        Ok(())
    }
    fn first_packets(&mut self) -> anyhow::Result<Vec<FirstPacket>> {
        Ok(Vec::new())
    }
    fn trace(&mut self, _: Option<&TraceFilter>) -> anyhow::Result<()> {
        anyhow::bail!("the manager receives no packets: trace at a box")
    }
    fn traced(&mut self, _: usize) -> anyhow::Result<Vec<Traced>> {
        Ok(Vec::new())
    }
    fn trace_lost(&self) -> anyhow::Result<u64> {
        Ok(0)
    }
    fn cpu_number(&self, cpu: u32) -> u32 {
        cpu
    }
    fn programs(&self) -> anyhow::Result<Vec<ProgramFacts>> {
        Ok(Vec::new())
    }
}
