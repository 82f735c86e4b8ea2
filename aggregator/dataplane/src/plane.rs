//! The data plane's interface for the controller, and the types of its answers.

use std::collections::HashMap;
use std::time::SystemTime;

#[cfg(doc)]
use netsum_common::abi::Owner;
use netsum_common::abi::{
    Address, ConnectionKey, FlowKey, Hop, HopKey, InBandJob, RingNumber, TraceEvent, TraceFilter,
};
use netsum_common::counters::Counter;
use netsum_common::slot::{RingState, Slot};
use netsum_common::timing::Timing;
use netsum_common::wire::InBandToken;
use netsum_core::plane::{EndedFlow, FirstPacket, FlowSpec, FlowStats, RingSpec};

/// A ring to be removed.
#[derive(Clone, Debug, Default)]
pub struct EndedRing {
    pub id: RingNumber,
    /// Its flows, and the interfaces of its members.
    pub flows: Vec<FlowKey>,
    pub ports: Vec<u32>,
}

/// The data plane's interface for the controller.
pub trait DataPlane: Send {
    /// Attaches the programs of a port to an interface, in its driver; also again, if the ingress
    /// program was detached.
    fn attach(&mut self, ifindex: u32) -> anyhow::Result<()>;
    /// Detaches the programs, including those of an earlier daemon; traffic is bridged as without
    /// netsum.
    fn detach(&mut self, ifindex: u32) -> anyhow::Result<()>;
    /// Creates rings' maps, empty. The rings are not active yet. Their counters keep their values.
    fn create_rings(&mut self, rings: &[RingSpec]) -> anyhow::Result<()>;
    /// Creates one ring.
    fn create_ring(&mut self, ring: &RingSpec) -> anyhow::Result<()> {
        self.create_rings(std::slice::from_ref(ring))
    }
    /// Sets a ring's counters and timed sums to zero.
    fn reset_counters(&mut self, ring: RingNumber) -> anyhow::Result<()>;
    /// Registers a flow of a ring that exists.
    fn add_flow(&mut self, flow: &FlowSpec) -> anyhow::Result<()>;
    /// Starts a ring: `ports[r]` is the interface of rank r.
    fn activate_ring(&mut self, ring: &RingSpec, ports: &[u32]) -> anyhow::Result<()>;
    /// Sets the next hop to a member, before its ring is activated; again, when it changes. Traffic
    /// to members without a next hop is bridged.
    fn set_hop(&mut self, member: HopKey, hop: &Hop) -> anyhow::Result<()>;
    /// Replaces the addresses with a fixed place that does not depend on flows: a port's interface,
    /// or [`Owner::THE_BOX`].
    fn reserve(&mut self, places: HashMap<Address, u32>) -> anyhow::Result<()>;
    /// Replaces the interfaces that are slaves of bonds, each with its bond: their packets count as
    /// the bond's.
    fn set_slaves(&mut self, slaves: HashMap<u32, u32>) -> anyhow::Result<()>;
    /// Removes rings and frees their memory. Their flows have ended: data that still arrives on
    /// them is dropped, until they are forgotten or registered again. A missing ring is not an
    /// error.
    fn delete_rings(&mut self, rings: &[EndedRing]) -> anyhow::Result<()>;
    /// Removes one ring.
    fn delete_ring(
        &mut self,
        id: RingNumber,
        flows: &[FlowKey],
        ports: &[u32],
    ) -> anyhow::Result<()> {
        self.delete_rings(&[EndedRing { id, flows: flows.to_vec(), ports: ports.to_vec() }])
    }
    /// Forgets ended flows. Data that still arrives on them is forwarded, like that of unknown
    /// flows.
    fn forget_ended(&mut self, flows: &[FlowKey]) -> anyhow::Result<()>;
    /// The ended flows, whose data is dropped.
    fn ended_flows(&self) -> anyhow::Result<Vec<EndedFlow>>;
    /// Pauses rings: arriving data is dropped. Returns when no packet is under way in them.
    fn pause_rings(&mut self, rings: &[RingNumber]) -> anyhow::Result<()>;
    /// Resumes paused rings.
    fn resume_rings(&mut self, rings: &[RingNumber]) -> anyhow::Result<()>;
    /// The interfaces that the ingress program is attached to, by this daemon or an earlier one.
    fn attached(&self) -> Vec<u32>;
    /// Checks that the CPUs of rings are online and serve them, and fixes what is not. Returns what
    /// was done, as text.
    fn keep_cpus(&mut self) -> anyhow::Result<Vec<String>>;
    /// Removes everything that would outlive this process.
    fn unpin(&mut self) -> anyhow::Result<()>;
    /// Counters of a ring ([`RingNumber::NONE`]: of packets that belong to no ring), indexed by
    /// [`Counter`], summed over CPUs.
    fn counters(&self, ring: RingNumber) -> anyhow::Result<Vec<u64>>;
    /// The timed sums of a ring.
    fn timing(&self, ring: RingNumber) -> anyhow::Result<Box<Timing>>;
    fn slots(&self, ring: RingNumber) -> anyhow::Result<Vec<Slot>>;
    fn ring_state(&self, ring: RingNumber) -> anyhow::Result<RingState>;
    fn slot(&self, ring: RingNumber, slot: u32) -> anyhow::Result<Slot>;
    fn flow_stats(&self, key: FlowKey) -> anyhow::Result<FlowStats>;
    /// Releases the complete sum in a slot of an active ring, as if the rank of `flow` had sent its
    /// fragment again.
    fn send_held(&mut self, ring: &RingSpec, slot: u32, flow: &FlowSpec) -> anyhow::Result<()>;
    /// Starts or stops recording unknown flows; starting clears the record.
    fn watch_unknown_flows(&mut self, on: bool) -> anyhow::Result<()>;
    /// Unknown flows recorded since the start, with the number of data packets of each.
    fn unknown_flows(&self) -> anyhow::Result<Vec<(ConnectionKey, u64)>>;
    /// Starts noting and dropping first packets with a job's token; also changes the properties of
    /// a token that is known already.
    fn add_in_band_token(&mut self, token: InBandToken, job: InBandJob) -> anyhow::Result<()>;
    /// Forwards first packets with this token like other packets. A missing token is not an error.
    fn remove_in_band_token(&mut self, token: InBandToken) -> anyhow::Result<()>;
    /// Takes the first packets noted since the last call.
    fn first_packets(&mut self) -> anyhow::Result<Vec<FirstPacket>>;
    /// Starts tracing packets for [`DataPlane::traced`]; `None` stops it. Starting after a stop
    /// discards earlier traces.
    fn trace(&mut self, filter: Option<&TraceFilter>) -> anyhow::Result<()>;
    /// Takes at most `most` traced packets, in the order in which they were traced.
    fn traced(&mut self, most: usize) -> anyhow::Result<Vec<Traced>>;
    /// Total number of packets that could not be traced for lack of room.
    fn trace_lost(&self) -> anyhow::Result<u64>;
    /// The number of a CPU that serves rings, by its place in the configured list
    /// ([`RingSpec::cpu`]).
    fn cpu_number(&self, cpu: u32) -> u32;
    /// The programs, as the kernel reports them.
    fn programs(&self) -> anyhow::Result<Vec<ProgramFacts>>;
}

/// A packet that was traced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traced {
    /// The program's verdict on it.
    pub event: TraceEvent,
    /// Its first bytes.
    pub frame: Vec<u8>,
}

/// A loaded program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramFacts {
    /// The kernel's number for it.
    pub id: u32,
    /// Its name, one of `netsum_common::abi::programs`.
    pub name: &'static str,
    /// The kernel's hash of its instructions.
    pub tag: u64,
    /// When it was loaded.
    pub loaded_at: Option<SystemTime>,
    /// Size in bytes as translated by the kernel.
    pub xlated_bytes: u32,
    /// Size in bytes of its machine code; 0 without JIT.
    pub jited_bytes: u32,
    /// Locked memory in bytes.
    pub memory: u64,
    /// Instructions that the verifier processed.
    pub verified_instructions: u32,
    /// How often it has run, and the total time in nanoseconds; both 0 unless
    /// `kernel.bpf_stats_enabled` is set.
    pub runs: (u64, u64),
    /// The sources of its packets.
    pub attached: Vec<Attached>,
}

/// A source of a program's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attached {
    /// A port, by its interface number.
    Port(u32),
    /// Packets steered to a CPU.
    Cpu(u32),
    /// Tail calls by `ingress`.
    Ingress,
    /// Packets sent by a ring's device map.
    DeviceMap,
}

/// A counter's value in the result of [`DataPlane::counters`].
pub fn count(counters: &[u64], counter: Counter) -> u64 {
    counters.get(counter as usize).copied().unwrap_or(0)
}
