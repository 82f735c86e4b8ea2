//! Traces single packets: a program's verdict, and the slot afterwards.
//!
//! Without tracing, each program reads one word that is zero. With it, each program sends an event
//! to user space for every packet that passes the filter. It shows the frame as the program got it,
//! except at egress, where it shows the frame that leaves.

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::helpers::generated::{
    bpf_get_smp_processor_id, bpf_ktime_get_ns, bpf_xdp_load_bytes,
};
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{MAX_CAPTURE, MAX_RANKS, MIN_CAPTURE, TraceEvent, features, traced_by};
use netsum_common::counters::Counter;
use netsum_common::serial;
use netsum_common::wire::EthHdr;

use crate::classify::Classified;
use crate::maps;
use crate::packet::opaque;

/// The sender of a packet, or its receiver.
#[derive(Clone, Copy)]
pub struct FlowRef {
    /// Ring, or 0.
    pub ring: u32,
    /// Rank, or [`TraceEvent::NONE`].
    pub rank: u32,
    pub index: u32,
}

impl FlowRef {
    /// Stands for no rank.
    pub const NONE: Self = Self { ring: 0, rank: TraceEvent::NONE, index: 0 };

    /// For a classified packet.
    #[inline(always)]
    fn of(found: &Classified) -> Self {
        if found.flow.is_null() {
            return Self { ring: found.ring, ..Self::NONE };
        }
        // SAFETY: a map value; what is read here is written by user space as a whole.
        let flow = unsafe { &*found.flow };
        Self {
            ring: flow.ring.0,
            rank: flow.rank,
            index: serial::sub(found.frame.bth.psn, flow.base_psn),
        }
    }
}

/// Whether tracing is on.
#[inline(always)]
pub fn is_on() -> bool {
    maps::features() & features::TRACE != 0
}

/// Traces a packet after [`crate::classify::classify`], with its counter.
#[inline(always)]
pub fn classified(ctx: &XdpContext, program: u32, found: &Classified, counter: Counter) {
    if is_on() {
        event(ctx, program, ctx.ingress_ifindex() as u32, FlowRef::of(found), counter.bit());
    }
}

/// Traces a contribution at its ring's CPU, with its counters, bit by bit.
#[inline(always)]
pub fn contribution(ctx: &XdpContext, flow_ref: FlowRef, counters: u64) {
    if is_on() {
        event(ctx, traced_by::AGGREGATE, ctx.ingress_ifindex() as u32, flow_ref, counters);
    }
}

/// Traces a result at a port's egress.
#[inline(always)]
pub fn result(ctx: &XdpContext, ifindex: u32, flow_ref: FlowRef, counter: Counter) {
    if is_on() {
        event(ctx, traced_by::EGRESS, ifindex, flow_ref, counter.bit());
    }
}

#[inline(always)]
fn event(ctx: &XdpContext, program: u32, ifindex: u32, flow_ref: FlowRef, counters: u64) {
    let place = (ifindex as u64) << 32 | (program << 16 | flow_ref.ring) as u64;
    trace_event(ctx.ctx, counters, place, flow_ref.rank, flow_ref.index);
}

/// Notes an event: `place` is interface, program and ring. A global function, as in
/// [`crate::payload`], which the programs call where they have little on their stacks.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn trace_event(
    ctx: *mut xdp_md,
    counters: u64,
    place: u64,
    rank: u32,
    index: u32,
) -> u64 {
    let ring = (place & 0xffff) as u32;
    let Some(filter) = maps::trace_filter() else { return 0 };
    // The mask tells the verifier.
    if filter.rings[(ring >> 6 & 3) as usize] >> (ring & 63) & 1 == 0
        || filter.counters & counters == 0
    {
        return 0;
    }
    let Some(record) = maps::scratch() else { return 0 };
    // SAFETY: a per-CPU value, and programs of a CPU do not interrupt each other.
    let record = unsafe { &mut *record };
    let packet = XdpContext::new(ctx);
    // The whole difference first: the verifier refuses to cut a packet pointer down to 32 bits.
    let len = opaque(packet.data_end() - packet.data()) as u32;
    // SAFETY: helpers without arguments.
    let (time, cpu) = unsafe { (bpf_ktime_get_ns(), bpf_get_smp_processor_id()) };
    // Unknown to the compiler, which would call `memset`: one call more than Linux 6.1 has stack
    // for.
    let zero = opaque(0);
    record.event = TraceEvent {
        time,
        counters,
        contributors: zero as u64,
        ring,
        rank,
        index,
        low: zero as u32,
        expected: zero as u32,
        slot_index: zero as u32,
        slot_flags: zero as u32,
        ifindex: maps::port_of((place >> 32) as u32),
        program: (place >> 16) as u32 & 0xff,
        len,
        captured: 0,
        cpu,
    };
    if rank < MAX_RANKS as u32 {
        slot_of(&mut record.event, ring, rank as usize, index);
    }
    let mut wanted = if filter.capture < MIN_CAPTURE { MIN_CAPTURE } else { filter.capture };
    if wanted > len {
        wanted = len;
    }
    // The verifier must see the bounds on the very value that is used. That of Linux 6.1 does not
    // know that a value other than 0 is at least 1.
    let wanted = opaque(wanted as usize);
    if wanted < EthHdr::LEN || wanted > MAX_CAPTURE {
        return 0;
    }
    record.event.captured = wanted as u32;
    // SAFETY: the value has room for as many bytes.
    if unsafe { bpf_xdp_load_bytes(ctx, 0, record.frame.as_mut_ptr().cast(), wanted as u32) } != 0 {
        return 0;
    }
    // SAFETY: a map value, which is longer; bytes behind this event are of an earlier one.
    unsafe { maps::note_event(record, size_of::<TraceEvent>() + wanted) };
    0
}

/// State of ring and slot.
#[inline(always)]
fn slot_of(event: &mut TraceEvent, ring: u32, rank: usize, index: u32) {
    let Some(config) = maps::ring(ring) else { return };
    let Some(state) = maps::state(ring) else { return };
    // SAFETY: map values of integers; on another CPU than the ring's they may change meanwhile, and
    // then the event shows the earlier or the later state.
    unsafe {
        event.low = (*state).low;
        // The mask applies to a value unknown to the compiler, which keeps it.
        event.expected = (*state).expected[opaque(rank) % MAX_RANKS];
        let Some(slot) = maps::slot(ring, index & config.slots.wrapping_sub(1)) else { return };
        event.contributors = (*slot).contributors;
        event.slot_index = (*slot).index;
        event.slot_flags = (*slot).flags;
    }
}
