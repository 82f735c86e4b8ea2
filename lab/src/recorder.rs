//! A data plane that only records calls, for daemons without BPF.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use netsum_common::abi::{
    Address, ConnectionKey, FlowKey, Hop, HopKey, InBandJob, RingNumber, TraceFilter,
};
use netsum_common::counters::Counter;
use netsum_common::slot::{RingState, Slot};
use netsum_common::timing::{Part, Timing};
use netsum_common::wire::InBandToken;
use netsum_core::plane::{EndedFlow, FirstPacket, FlowSpec, FlowStats, RingSpec};
use netsum_dataplane::{Attached, DataPlane, EndedRing, ProgramFacts, Traced};

/// The state that the data plane was given.
#[derive(Debug, Default)]
pub struct RecordedState {
    /// Whether to answer as if no packet had arrived.
    pub idle: bool,
    pub rings: HashMap<RingNumber, RingSpec>,
    /// How often rings were created or removed, several at once counted as one.
    pub changes: u32,
    /// How many rings were created, and how often rings were paused.
    pub made: u32,
    pub pauses: u32,
    pub flows: HashSet<FlowKey>,
    /// Ended flows that were forgotten.
    pub forgotten: HashSet<FlowKey>,
    pub active: HashSet<RingNumber>,
    pub watching: bool,
    pub in_band_tokens: HashSet<InBandToken>,
    pub first_packets: Vec<FirstPacket>,
    pub tracing: Option<TraceFilter>,
    pub traced: Vec<Traced>,
    pub lost: u64,
    pub reserved: HashMap<Address, u32>,
    pub hops: HashMap<HopKey, Hop>,
    /// Ports that take no frame; whether slots have their sums; the sums that were sent, by port.
    pub down: HashSet<u32>,
    pub complete: bool,
    pub sent: Vec<(u32, u32)>,
}

/// Answers as if a packet or two had arrived.
pub struct Recorder(pub Arc<Mutex<RecordedState>>);

impl DataPlane for Recorder {
    fn attach(&mut self, _: u32) -> anyhow::Result<()> {
        Ok(())
    }
    fn detach(&mut self, _: u32) -> anyhow::Result<()> {
        Ok(())
    }
    fn create_rings(&mut self, rings: &[RingSpec]) -> anyhow::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.rings.extend(rings.iter().map(|ring| (ring.id, ring.clone())));
        state.made += rings.len() as u32;
        state.changes += 1;
        Ok(())
    }
    fn reset_counters(&mut self, _: RingNumber) -> anyhow::Result<()> {
        Ok(())
    }
    fn add_flow(&mut self, flow: &FlowSpec) -> anyhow::Result<()> {
        anyhow::ensure!(flow.qpn.get() != 0xbad, "this data plane does not like 0xbad");
        self.0.lock().unwrap().flows.insert(flow.key());
        Ok(())
    }
    fn activate_ring(&mut self, ring: &RingSpec, _: &[u32]) -> anyhow::Result<()> {
        self.0.lock().unwrap().active.insert(ring.id);
        Ok(())
    }
    fn set_hop(&mut self, to: HopKey, hop: &Hop) -> anyhow::Result<()> {
        self.0.lock().unwrap().hops.insert(to, *hop);
        Ok(())
    }
    fn reserve(&mut self, places: HashMap<Address, u32>) -> anyhow::Result<()> {
        self.0.lock().unwrap().reserved = places;
        Ok(())
    }
    fn set_slaves(&mut self, _: HashMap<u32, u32>) -> anyhow::Result<()> {
        Ok(())
    }
    fn delete_rings(&mut self, rings: &[EndedRing]) -> anyhow::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.changes += 1;
        for EndedRing { id, flows, .. } in rings {
            state.rings.remove(id);
            state.active.remove(id);
            state.flows.retain(|flow| !flows.contains(flow));
        }
        Ok(())
    }
    fn forget_ended(&mut self, flows: &[FlowKey]) -> anyhow::Result<()> {
        self.0.lock().unwrap().forgotten.extend(flows);
        Ok(())
    }
    fn ended_flows(&self) -> anyhow::Result<Vec<EndedFlow>> {
        Ok(Vec::new())
    }
    fn pause_rings(&mut self, rings: &[RingNumber]) -> anyhow::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.active.retain(|ring| !rings.contains(ring));
        state.pauses += 1;
        Ok(())
    }
    fn resume_rings(&mut self, rings: &[RingNumber]) -> anyhow::Result<()> {
        self.0.lock().unwrap().active.extend(rings);
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
    fn counters(&self, ring: RingNumber) -> anyhow::Result<Vec<u64>> {
        Ok(vec![ring.0.into(); Counter::ALL.len()])
    }
    fn timing(&self, ring: RingNumber) -> anyhow::Result<Box<Timing>> {
        // One sum, for which all others have waited for rank 1.
        let mut timing = Box::new(Timing::EMPTY);
        timing.record(0, 0, Part::First, 1_000);
        timing.record(0, 1, Part::Last, 1_000 + 100 * u64::from(ring.0));
        Ok(timing)
    }
    fn slots(&self, _: RingNumber) -> anyhow::Result<Vec<Slot>> {
        Ok(vec![
            Slot { index: 5, flags: Slot::USED, contributors: 1, len: 1024, checksum: 0, crc: 0 },
            Slot::default(),
        ])
    }
    fn ring_state(&self, _: RingNumber) -> anyhow::Result<RingState> {
        Ok(RingState::default())
    }
    fn slot(&self, _: RingNumber, _: u32) -> anyhow::Result<Slot> {
        let state = self.0.lock().unwrap();
        if state.idle {
            return Ok(Slot::default());
        }
        let complete = if state.complete { Slot::COMPLETE } else { 0 };
        let flags = Slot::USED | complete;
        Ok(Slot { index: 0, flags, contributors: 1, len: 1024, checksum: 0, crc: 0 })
    }
    fn flow_stats(&self, key: FlowKey) -> anyhow::Result<FlowStats> {
        // One packet has arrived on each connection to 0x11.
        let sent = key.qpn == 0x11 && !self.0.lock().unwrap().idle;
        Ok(FlowStats {
            packets: sent.into(),
            last_psn: 5,
            last_verdict: sent.then_some(Counter::Contributions),
            ..FlowStats::default()
        })
    }
    fn send_held(&mut self, _: &RingSpec, slot: u32, flow: &FlowSpec) -> anyhow::Result<()> {
        let mut state = self.0.lock().unwrap();
        anyhow::ensure!(state.complete, "nothing is held");
        anyhow::ensure!(!state.down.contains(&flow.ifindex), "port {} is down", flow.ifindex);
        state.sent.push((slot, flow.ifindex));
        Ok(())
    }
    fn watch_unknown_flows(&mut self, on: bool) -> anyhow::Result<()> {
        self.0.lock().unwrap().watching = on;
        Ok(())
    }
    fn unknown_flows(&self) -> anyhow::Result<Vec<(ConnectionKey, u64)>> {
        Ok(Vec::new())
    }
    fn add_in_band_token(&mut self, token: InBandToken, _: InBandJob) -> anyhow::Result<()> {
        self.0.lock().unwrap().in_band_tokens.insert(token);
        Ok(())
    }
    fn remove_in_band_token(&mut self, token: InBandToken) -> anyhow::Result<()> {
        self.0.lock().unwrap().in_band_tokens.remove(&token);
        Ok(())
    }
    fn first_packets(&mut self) -> anyhow::Result<Vec<FirstPacket>> {
        Ok(std::mem::take(&mut self.0.lock().unwrap().first_packets))
    }
    fn trace(&mut self, filter: Option<&TraceFilter>) -> anyhow::Result<()> {
        self.0.lock().unwrap().tracing = filter.copied();
        Ok(())
    }
    fn traced(&mut self, most: usize) -> anyhow::Result<Vec<Traced>> {
        let traced = &mut self.0.lock().unwrap().traced;
        Ok(traced.drain(..most.min(traced.len())).collect())
    }
    fn trace_lost(&self) -> anyhow::Result<u64> {
        Ok(self.0.lock().unwrap().lost)
    }
    fn cpu_number(&self, cpu: u32) -> u32 {
        4 + cpu
    }
    fn programs(&self) -> anyhow::Result<Vec<ProgramFacts>> {
        let program = |id: u32, name: &'static str, attached: Vec<Attached>| ProgramFacts {
            id,
            name,
            tag: 0xabc,
            loaded_at: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)),
            xlated_bytes: 4096,
            jited_bytes: 2048,
            memory: 8192,
            verified_instructions: 1234,
            runs: (0, 0),
            attached,
        };
        Ok(vec![
            program(7, "ingress", vec![Attached::Port(10), Attached::Port(11)]),
            program(8, "aggregate", vec![Attached::Cpu(4)]),
            program(9, "egress", vec![Attached::DeviceMap]),
        ])
    }
}
