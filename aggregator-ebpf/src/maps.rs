//! The maps. Names, keys and values are `netsum_common::abi`'s.

use core::marker::PhantomData;

use aya_ebpf::bindings::bpf_map_type::BPF_MAP_TYPE_ARRAY;
use aya_ebpf::btf_maps::{
    Array, ArrayOfMaps, CpuMap, DevMap, HashMap, LruHashMap, PerCpuArray, ProgramArray, RingBuf,
};
use aya_ebpf::helpers::generated::bpf_map_lookup_elem;
use aya_ebpf::helpers::{bpf_get_smp_processor_id, bpf_ringbuf_output};
use aya_ebpf::macros::btf_map;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::*;
use netsum_common::counters::{COUNTERS as COUNTERS_PER_RING, Counter};
use netsum_common::float::Table;
use netsum_common::icrc::Lagged;
use netsum_common::slot::{RingState, Slot};
use netsum_common::timing::Timing;

/// `BPF_F_INNER_MAP`: inner arrays may differ in length (Linux 5.10).
const INNER: usize = 1 << 12;
/// `BPF_F_BROADCAST`: to every device in the map (Linux 5.13).
const BROADCAST: u64 = 1 << 3;
/// `BPF_F_NO_PREALLOC`: entries take memory only while they are there.
const SPARSE: usize = 1;
/// `BPF_RB_NO_WAKEUP`: to wake the reader costs more than the event, and it looks often enough.
const NO_WAKEUP: u64 = 1;
const RINGS_LEN: usize = MAX_RINGS as usize;
const COUNTERS_LEN: usize = (MAX_RINGS * COUNTERS_PER_RING) as usize;

/// A template of arrays that user space makes. Its values have a size and no type, unlike an
/// `Array`'s: what user space makes has no types, and Linux 6.1 puts only maps of the same kind
/// into the outer map (kernel/bpf/map_in_map.c, `bpf_map_meta_equal`).
#[repr(C)]
pub struct InnerArray<T, const SIZE: usize> {
    r#type: *const [i32; BPF_MAP_TYPE_ARRAY as usize],
    key_size: *const [i32; size_of::<u32>()],
    value_size: *const [i32; SIZE],
    max_entries: *const [i32; 1],
    map_flags: *const [i32; INNER],
    of: PhantomData<T>,
}

impl<T, const SIZE: usize> InnerArray<T, SIZE> {
    /// A value.
    #[inline(always)]
    fn get_ptr_mut(&self, index: u32) -> Option<*mut T> {
        const { assert!(size_of::<T>() == SIZE) };
        // SAFETY: `self` is a map that an outer map's look-up has returned, and the key has the
        // size of its keys.
        let value = unsafe {
            bpf_map_lookup_elem((&raw const *self).cast_mut().cast(), (&raw const index).cast())
        };
        if value.is_null() { None } else { Some(value.cast()) }
    }
}

#[btf_map]
static FLOWS: HashMap<FlowKey, Flow, { (MAX_FLOWS + MAX_ENDED_FLOWS) as usize }> = HashMap::new();
#[btf_map]
static OWNERS: HashMap<Address, Owner, { MAX_OWNERS as usize }> = HashMap::new();
#[btf_map]
static SLAVES: HashMap<u32, u32, { MAX_SLAVES as usize }, SPARSE> = HashMap::new();
#[btf_map]
static RINGS: Array<RingConfig, RINGS_LEN> = Array::new();
#[btf_map]
static RING_STATES: Array<RingState, RINGS_LEN> = Array::new();
#[btf_map]
static SLOTS: ArrayOfMaps<InnerArray<Slot, { size_of::<Slot>() }>, RINGS_LEN> = ArrayOfMaps::new();
#[btf_map]
static SUMS_512: ArrayOfMaps<InnerArray<[u64; 64], 512>, RINGS_LEN> = ArrayOfMaps::new();
#[btf_map]
static SUMS_1024: ArrayOfMaps<InnerArray<[u64; 128], 1024>, RINGS_LEN> = ArrayOfMaps::new();
#[btf_map]
static SUMS_1536: ArrayOfMaps<InnerArray<[u64; 192], 1536>, RINGS_LEN> = ArrayOfMaps::new();
#[btf_map]
static SUMS_2048: ArrayOfMaps<InnerArray<[u64; 256], 2048>, RINGS_LEN> = ArrayOfMaps::new();
#[btf_map]
static SUMS_3328: ArrayOfMaps<InnerArray<[u64; 416], 3328>, RINGS_LEN> = ArrayOfMaps::new();
#[btf_map]
static SUMS_4096: ArrayOfMaps<InnerArray<[u64; 512], 4096>, RINGS_LEN> = ArrayOfMaps::new();
#[btf_map]
static FLOAT_TABLES: ArrayOfMaps<InnerArray<Table, { size_of::<Table>() }>, RINGS_LEN> =
    ArrayOfMaps::new();
#[btf_map]
static SAVED_HEADERS: ArrayOfMaps<
    InnerArray<SavedHeader, { size_of::<SavedHeader>() }>,
    RINGS_LEN,
> = ArrayOfMaps::new();
#[btf_map]
static RING_PORTS: ArrayOfMaps<DevMap<MAX_RANKS>, RINGS_LEN> = ArrayOfMaps::new();
#[btf_map]
static UPLINKS: DevMap<RINGS_LEN> = DevMap::new();
#[btf_map]
static EGRESS_PORTS: HashMap<EgressKey, EgressPort, { MAX_FLOWS as usize }> = HashMap::new();
#[btf_map]
static HOPS: HashMap<HopKey, Hop, { MAX_FLOWS as usize }> = HashMap::new();
#[btf_map]
static CPUS: CpuMap<{ MAX_CPUS as usize }> = CpuMap::new();
#[btf_map]
static TAIL_CALLS: ProgramArray<1> = ProgramArray::new();
#[btf_map]
static COUNTERS: PerCpuArray<u64, COUNTERS_LEN> = PerCpuArray::new();
#[btf_map]
static TIMINGS: Array<Timing, RINGS_LEN> = Array::new();

#[btf_map]
static LAGGED: PerCpuArray<Lagged, 1> = PerCpuArray::new();

#[btf_map]
static FEATURES: Array<u32, 1> = Array::new();
#[btf_map]
static UNKNOWN_FLOWS: LruHashMap<ConnectionKey, u64, { MAX_UNKNOWN_FLOWS as usize }> =
    LruHashMap::new();

#[btf_map]
static TRACE_FILTER: Array<TraceFilter, 1> = Array::new();
#[btf_map]
static TRACE_EVENTS: RingBuf<TraceRecord, { TRACE_BUFFER_BYTES as usize }> = RingBuf::new();
#[btf_map]
static TRACE_LOST: PerCpuArray<u64, 1> = PerCpuArray::new();
#[btf_map]
static TRACE_SCRATCH: PerCpuArray<TraceRecord, 1> = PerCpuArray::new();

#[btf_map]
static TOKENS: HashMap<Token, InBandJob, RINGS_LEN> = HashMap::new();
#[btf_map]
static CLAIMS: HashMap<ClaimKey, Claim, { MAX_CLAIMS as usize }, SPARSE> = HashMap::new();

#[btf_map]
static PENDING_CONNS: LruHashMap<ConnectionKey, u32, { MAX_PENDING_CONNECTIONS as usize }> =
    LruHashMap::new();

/// The optional work to do: bits of [`features`].
#[inline(always)]
pub fn features() -> u32 {
    FEATURES.get(0).map_or(0, |w| *w)
}

/// The job, set up in band, that a token belongs to.
#[inline(always)]
pub fn in_band_job(token: &Token) -> Option<&'static InBandJob> {
    // SAFETY: user space writes the value as a whole.
    TOKENS.get_ptr(token).map(|job| unsafe { &*job })
}

/// Notes a claim. Without room, it acts as if the packet were lost: the sender retransmits.
#[inline(always)]
pub fn note_claim(key: &ClaimKey, claim: &Claim, flags: u64) {
    let _ = CLAIMS.insert(key, claim, flags);
}

/// Drops a connection's data from now on.
#[inline(always)]
pub fn wait(key: &ConnectionKey, job: u32) {
    let _ = PENDING_CONNS.insert(key, job, 0);
}

/// Ends that: the connection does not show up.
#[inline(always)]
pub fn remove_pending(key: &ConnectionKey) {
    let _ = PENDING_CONNS.remove(key);
}

/// The job for which a connection waits.
#[inline(always)]
pub fn pending_job(key: &ConnectionKey) -> Option<u32> {
    // SAFETY: a map value that nobody changes.
    PENDING_CONNS.get_ptr(key).map(|job| unsafe { *job })
}

/// Counts a packet of an unknown flow.
#[inline(always)]
pub fn count_unknown_flow(key: &ConnectionKey) {
    match UNKNOWN_FLOWS.get_ptr_mut(key) {
        // SAFETY: a map value. Two CPUs may lose counts, which need not be exact.
        Some(count) => unsafe { *count += 1 },
        None => {
            let _ = UNKNOWN_FLOWS.insert(key, 1, 0);
        }
    }
}

/// Buffer for the CRC of a long payload.
#[inline(always)]
pub fn lagged() -> Option<*mut Lagged> {
    LAGGED.get_ptr_mut(0)
}

/// Adds one to a ring's counter; ring 0 stands for none.
#[inline(always)]
pub fn count(ring: u32, counter: Counter) {
    count_number(ring, counter as u32);
}

/// The same, by the counter's number.
#[inline(always)]
pub fn count_number(ring: u32, counter: u32) {
    if let Some(c) = COUNTERS.get_ptr_mut(ring * COUNTERS_PER_RING + counter) {
        // SAFETY: a per-CPU value, and XDP programs of one CPU do not interrupt each other.
        unsafe { *c += 1 }
    }
}

/// The flow that a packet belongs to.
#[inline(always)]
pub fn flow(key: &FlowKey) -> Option<*mut Flow> {
    FLOWS.get_ptr_mut(key)
}

/// The port of an address, if it is a rank's.
#[inline(always)]
pub fn owner(address: &Address) -> Option<&'static Owner> {
    // SAFETY: user space writes the value as a whole.
    OWNERS.get_ptr(address).map(|o| unsafe { &*o })
}

/// The port of packets that arrive at this interface: the interface itself, or the bond that it
/// is a slave of.
#[inline(always)]
pub fn port_of(ifindex: u32) -> u32 {
    // SAFETY: a map value of one word.
    SLAVES.get_ptr(&ifindex).map_or(ifindex, |bond| unsafe { *bond })
}

/// Whether packets that arrive at an interface belong to this port. Reads a map only if the two
/// differ.
#[inline(always)]
pub fn is_port(ifindex: u32, port: u32) -> bool {
    ifindex == port || port_of(ifindex) == port
}

#[inline(always)]
pub fn ring(ring: u32) -> Option<&'static RingConfig> {
    RINGS.get(ring)
}

#[inline(always)]
pub fn state(ring: u32) -> Option<*mut RingState> {
    RING_STATES.get_ptr_mut(ring)
}

/// A ring's timed sums.
#[inline(always)]
pub fn timing(ring: u32) -> Option<*mut Timing> {
    TIMINGS.get_ptr_mut(ring)
}

#[inline(always)]
pub fn slot(ring: u32, slot: u32) -> Option<*mut Slot> {
    SLOTS.get(ring)?.get_ptr_mut(slot)
}

/// A slot's sum, in a ring with sums of 512 bytes.
#[inline(always)]
pub fn sum_512(ring: u32, slot: u32) -> Option<*mut [u64; 64]> {
    SUMS_512.get(ring)?.get_ptr_mut(slot)
}

/// A slot's sum, in a ring with sums of 1024 bytes.
#[inline(always)]
pub fn sum_1024(ring: u32, slot: u32) -> Option<*mut [u64; 128]> {
    SUMS_1024.get(ring)?.get_ptr_mut(slot)
}

/// A slot's sum, in a ring with sums of 1536 bytes.
#[inline(always)]
pub fn sum_1536(ring: u32, slot: u32) -> Option<*mut [u64; 192]> {
    SUMS_1536.get(ring)?.get_ptr_mut(slot)
}

/// A slot's sum, in a ring with sums of 2048 bytes.
#[inline(always)]
pub fn sum_2048(ring: u32, slot: u32) -> Option<*mut [u64; 256]> {
    SUMS_2048.get(ring)?.get_ptr_mut(slot)
}

/// A slot's sum, in a ring with sums of 3328 bytes.
#[inline(always)]
pub fn sum_3328(ring: u32, slot: u32) -> Option<*mut [u64; 416]> {
    SUMS_3328.get(ring)?.get_ptr_mut(slot)
}

/// A slot's sum, in a ring with sums of 4096 bytes.
#[inline(always)]
pub fn sum_4096(ring: u32, slot: u32) -> Option<*mut [u64; 512]> {
    SUMS_4096.get(ring)?.get_ptr_mut(slot)
}

/// The table of a ring of floats.
#[inline(always)]
pub fn float_table(ring: u32) -> Option<*const Table> {
    FLOAT_TABLES.get(ring)?.get_ptr_mut(0).map(|table| table.cast_const())
}

/// The header saved for a slot and rank.
#[inline(always)]
pub fn header(ring: u32, index: u32) -> Option<*mut SavedHeader> {
    SAVED_HEADERS.get(ring)?.get_ptr_mut(index)
}

/// The ranks of a ring behind a port.
#[inline(always)]
pub fn egress_port(key: &EgressKey) -> Option<*mut EgressPort> {
    EGRESS_PORTS.get_ptr_mut(key)
}

/// The next hop to a member.
#[inline(always)]
pub fn hop(key: &HopKey) -> Option<*mut Hop> {
    HOPS.get_ptr_mut(key)
}

/// Whether the program runs on this CPU.
#[inline(always)]
pub fn is_current_cpu(cpu: u32) -> bool {
    // SAFETY: a helper without arguments, which the JIT makes one instruction of (Linux 6.10).
    unsafe { bpf_get_smp_processor_id() == cpu }
}

/// Continues with `aggregate_inline`. Returns only if user space has not enabled it.
#[inline(always)]
pub fn tail_call_aggregate(ctx: &XdpContext) {
    // SAFETY: nothing that is left behind has anything to drop.
    unsafe { TAIL_CALLS.tail_call(ctx, 0) }
}

/// Hands the packet to the ring's CPU.
#[inline(always)]
pub fn to_cpu(cpu: u32) -> Result<u32, u32> {
    CPUS.redirect(cpu, 0)
}

/// Sends a clone to every rank of a ring.
#[inline(always)]
pub fn to_all(ring: u32) -> Option<u32> {
    RING_PORTS.get(ring)?.redirect(0, BROADCAST).ok()
}

/// Sends the packet to one rank of a ring.
#[inline(always)]
pub fn to_rank(ring: u32, rank: u32) -> Option<u32> {
    RING_PORTS.get(ring)?.redirect(rank, 0).ok()
}

/// Sends the packet to a ring's parent box.
#[inline(always)]
pub fn to_parent(ring: u32) -> Option<u32> {
    UPLINKS.redirect(ring, 0).ok()
}

/// The filter of traced packets.
#[inline(always)]
pub fn trace_filter() -> Option<&'static TraceFilter> {
    TRACE_FILTER.get(0)
}

/// Buffer for an event of this CPU.
#[inline(always)]
pub fn scratch() -> Option<*mut TraceRecord> {
    TRACE_SCRATCH.get_ptr_mut(0)
}

/// Sends the first `len` bytes of an event to user space, which polls for events; counts it as lost
/// if the ring buffer is full.
///
/// # Safety
/// They must be initialised and lie in a map value.
#[inline(always)]
pub unsafe fn note_event(record: *const TraceRecord, len: usize) {
    // SAFETY: the map is a ring buffer, and the bytes are the caller's promise.
    let noted = unsafe {
        bpf_ringbuf_output(
            (&raw const TRACE_EVENTS).cast_mut().cast(),
            record.cast_mut().cast(),
            len as u64,
            NO_WAKEUP,
        )
    };
    if noted != 0
        && let Some(lost) = TRACE_LOST.get_ptr_mut(0)
    {
        // SAFETY: a per-CPU value, as with counters.
        unsafe { *lost += 1 }
    }
}
