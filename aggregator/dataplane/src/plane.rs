//! What the controller asks of the data plane, and what that says of itself.

use std::collections::HashMap;
use std::time::SystemTime;

#[cfg(doc)]
use netsum_common::abi::Owner;
use netsum_common::abi::{
    Address, FlowKey, Hop, HopKey, InBandJob, RingNumber, StrangerKey, TraceEvent, TraceFilter,
};
use netsum_common::counters::Counter;
use netsum_common::slot::{RingState, Slot};
use netsum_common::timing::Timing;
use netsum_common::wire::InBandToken;
use netsum_core::plane::{EndedFlow, FirstPacket, FlowSeen, FlowSpec, RingSpec};

/// A ring that is to be removed.
#[derive(Clone, Debug, Default)]
pub struct EndedRing {
    pub id: RingNumber,
    /// Its flows, and the interfaces of its members.
    pub flows: Vec<FlowKey>,
    pub ports: Vec<u32>,
}

/// What the controller asks of the data plane.
pub trait DataPlane: Send {
    /// Attaches the programs of a port to an interface, in its driver; again, where somebody has
    /// detached the ingress program.
    fn attach(&mut self, ifindex: u32) -> anyhow::Result<()>;
    /// Detaches it, also where that was attached by an earlier daemon; traffic is bridged as if
    /// netsum were not there.
    fn detach(&mut self, ifindex: u32) -> anyhow::Result<()>;
    /// Makes rings' maps, empty. The rings are not active yet. Their counters go on.
    fn create_rings(&mut self, rings: &[RingSpec]) -> anyhow::Result<()>;
    /// One of them.
    fn create_ring(&mut self, ring: &RingSpec) -> anyhow::Result<()> {
        self.create_rings(std::slice::from_ref(ring))
    }
    /// Sets a ring's counters and timed sums to zero.
    fn reset_counters(&mut self, ring: RingNumber) -> anyhow::Result<()>;
    /// Registers a flow of a ring that exists.
    fn add_flow(&mut self, flow: &FlowSpec) -> anyhow::Result<()>;
    /// Starts a ring: `ports[r]` is the interface of rank r.
    fn activate_ring(&mut self, ring: &RingSpec, ports: &[u32]) -> anyhow::Result<()>;
    /// Notes the next hop to a member, before its ring is activated; again, when it changes.
    /// Members without one are bridged to.
    fn set_hop(&mut self, member: HopKey, hop: &Hop) -> anyhow::Result<()>;
    /// Replaces the addresses that belong somewhere without any flow: by a port's interface, or
    /// [`Owner::THE_BOX`].
    fn reserve(&mut self, places: HashMap<Address, u32>) -> anyhow::Result<()>;
    /// Replaces the interfaces that are slaves of bonds, each with its bond's: their packets are the
    /// bond's.
    fn set_slaves(&mut self, slaves: HashMap<u32, u32>) -> anyhow::Result<()>;
    /// Removes rings and frees their memory. Their flows have ended: what still comes on them is
    /// dropped, until they are forgotten or registered again. What is missing already is no error.
    fn delete_rings(&mut self, rings: &[EndedRing]) -> anyhow::Result<()>;
    /// One of them.
    fn delete_ring(
        &mut self,
        id: RingNumber,
        flows: &[FlowKey],
        ports: &[u32],
    ) -> anyhow::Result<()> {
        self.delete_rings(&[EndedRing { id, flows: flows.to_vec(), ports: ports.to_vec() }])
    }
    /// Forgets flows that have ended. What still comes on them passes, as any stranger's.
    fn forget_ended(&mut self, flows: &[FlowKey]) -> anyhow::Result<()>;
    /// The flows that have ended and whose data is dropped.
    fn ended_flows(&self) -> anyhow::Result<Vec<EndedFlow>>;
    /// Stops rings for a moment: what comes is dropped. Returns when no packet is under way in them
    /// any more.
    fn pause_rings(&mut self, rings: &[RingNumber]) -> anyhow::Result<()>;
    /// Goes on with rings that were stopped.
    fn resume_rings(&mut self, rings: &[RingNumber]) -> anyhow::Result<()>;
    /// The interfaces that the ingress program is attached to, by this daemon or one before.
    fn attached(&self) -> Vec<u32>;
    /// Looks whether the CPUs of rings are online and serve them, and mends what is not so; what
    /// was done, in words.
    fn keep_cpus(&mut self) -> anyhow::Result<Vec<String>>;
    /// Lets go of everything that would outlive this process.
    fn unpin(&mut self) -> anyhow::Result<()>;
    /// Counters of a ring ([`RingNumber::NONE`]: of packets that belong to none), indexed by
    /// [`Counter`], summed over CPUs.
    fn counters(&self, ring: RingNumber) -> anyhow::Result<Vec<u64>>;
    /// The timed sums of a ring.
    fn timing(&self, ring: RingNumber) -> anyhow::Result<Box<Timing>>;
    fn slots(&self, ring: RingNumber) -> anyhow::Result<Vec<Slot>>;
    fn ring_state(&self, ring: RingNumber) -> anyhow::Result<RingState>;
    fn slot(&self, ring: RingNumber, slot: u32) -> anyhow::Result<Slot>;
    fn flow_seen(&self, key: FlowKey) -> anyhow::Result<FlowSeen>;
    /// Sends the sum of a complete slot of an active ring on its way, as if its rank `flow` had
    /// sent its fragment again.
    fn send_held(&mut self, ring: &RingSpec, slot: u32, flow: &FlowSpec) -> anyhow::Result<()>;
    /// Begins, with a clean sheet, or ends to note connections that the box does not know.
    fn watch_strangers(&mut self, on: bool) -> anyhow::Result<()>;
    /// Connections noted since the watch began, and how many data packets came on each.
    fn strangers(&self) -> anyhow::Result<Vec<(StrangerKey, u64)>>;
    /// Begins to note and drop first packets with a job's token; again and with other properties,
    /// if it does already.
    fn listen_in_band(&mut self, token: InBandToken, job: InBandJob) -> anyhow::Result<()>;
    /// Passes first packets with this token on, as others. What is missing already is no error.
    fn ignore_in_band(&mut self, token: InBandToken) -> anyhow::Result<()>;
    /// Takes out what has been noted of first packets since the last time.
    fn first_packets(&mut self) -> anyhow::Result<Vec<FirstPacket>>;
    /// Notes packets from now on, for [`DataPlane::traced`]; or, with `None`, none any more. What
    /// was noted before is forgotten where it was off.
    fn trace(&mut self, filter: Option<&TraceFilter>) -> anyhow::Result<()>;
    /// Takes out noted packets, in the order in which they were noted, `most` of them at the most.
    fn traced(&mut self, most: usize) -> anyhow::Result<Vec<Traced>>;
    /// Packets, ever, that were to be noted and for which there was no room.
    fn trace_lost(&self) -> anyhow::Result<u64>;
    /// The number of a CPU that serves rings, from its place in the configured list
    /// ([`RingSpec::cpu`]).
    fn cpu_number(&self, cpu: u32) -> u32;
    /// The programs as the kernel has them.
    fn programs(&self) -> anyhow::Result<Vec<ProgramFacts>>;
}

/// A packet that was traced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traced {
    /// What a program made of it.
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
    /// What the kernel makes of its instructions.
    pub tag: u64,
    /// When it was loaded.
    pub loaded_at: Option<SystemTime>,
    /// Bytes as the kernel has it.
    pub xlated_bytes: u32,
    /// Bytes of machine code; 0 without JIT.
    pub jited_bytes: u32,
    /// Bytes of memory that it locks.
    pub memory: u64,
    /// Instructions that the verifier went through.
    pub verified_instructions: u32,
    /// How often it has run, and the nanoseconds that it took; 0 unless `kernel.bpf_stats_enabled`
    /// is set.
    pub runs: (u64, u64),
    /// Where its packets come from.
    pub attached: Vec<Attached>,
}

/// Where a program's packets come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attached {
    /// A port, by its interface number.
    Port(u32),
    /// What is steered to a CPU.
    Cpu(u32),
    /// What `ingress` goes on with.
    Ingress,
    /// What is sent by a ring's device map.
    DeviceMap,
}

/// One counter's value out of what [`DataPlane::counters`] gives.
pub fn count(counters: &[u64], counter: Counter) -> u64 {
    counters.get(counter as usize).copied().unwrap_or(0)
}
