//! The parts of the XDP programs; see ARCHITECTURE.md, "The path of a packet".
//!
//! | program | where | what |
//! | --- | --- | --- |
//! | `ingress` | ports | sends data of registered flows to its ring's CPU, the rest to the bridge |
//! | `aggregate` | CPU map | adds a contribution; sends the sum |
//! | `aggregate_inline` | called by `ingress` | the same for packets on the ring's CPU |
//! | `egress` | device maps | gives each clone of a result its receiver's headers |
//! | `guard` | ports, behind XDP | drops data that has bypassed `ingress` |
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`packet`] | a packet in the driver's buffer, as the verifier follows it |
//! | [`classify`] | which flow a packet belongs to; [`wrapped`]: behind tags or extensions |
//! | [`check`] | whether a contribution may be added |
//! | [`payload`] | copies and adds payloads; [`float`](mod@float): floats |
//! | [`saved`] | headers that a slot keeps for the result |
//! | [`output`] | what becomes of a contribution's packet |
//! | [`in_band`] | first packets of jobs that are set up in band |
//! | [`trace`] | events for `netsum trace` |
//! | [`maps`] | the maps |
//!
//! `spread.rs` is an object of its own, without the maps of these; `main.rs` is the object that the
//! daemon loads; `bench/ebpf/src/main.rs` measures the parts.
#![no_std]
#![feature(asm_experimental_arch)]

/// Expands to its body once for each number. The compiler would keep loops of a constant length,
/// which are slower by a third.
macro_rules! unrolled {
    ($i:ident in $($n:literal)+ => $body:expr) => { $({ const $i: usize = $n; $body })+ };
}

pub mod aggregate;
pub mod check;
pub mod classify;
pub mod egress;
pub mod float;
pub mod guard;
pub mod in_band;
pub mod maps;
pub mod output;
pub mod packet;
pub mod payload;
pub mod saved;
pub mod trace;
pub mod wrapped;

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{ConnectionKey, Flow, MAX_MTU, features, traced_by};
use netsum_common::counters::Counter;
use netsum_common::serial;
use netsum_common::slot::STALE_PSN_BEHIND;
use netsum_common::wire::Bytes as _;

use classify::{Class, Classified, classify, from_its_sender, is_psn_shifted, is_spoofed, refused};
use packet::Packet;

/// Added to the PSN of a stale packet.
const AS_DUPLICATE: u32 = serial::sub(0, STALE_PSN_BEHIND);

/// Handles every packet that arrives at a port.
#[inline(always)]
pub fn on_port(ctx: &XdpContext) -> u32 {
    let p = Packet::new(ctx);
    let mut found = Classified::NOTHING;
    match classify(&p, &mut found) {
        Class::Pass if is_spoofed(ctx.ingress_ifindex() as u32, &found.frame) => {
            found.counter = Counter::Spoofed;
            refuse(ctx, traced_by::INGRESS, &found)
        }
        Class::Pass if found.unknown_flow => unknown_flow(ctx, &p, &mut found),
        Class::Pass => pass(ctx, traced_by::INGRESS, &found),
        Class::Refuse => refuse(ctx, traced_by::INGRESS, &found),
        Class::Data => {
            // SAFETY: a map value. The ring's CPU also writes the fields of the last packet: a lost
            // count only distorts a diagnosis.
            let flow = unsafe { &mut *found.flow };
            let Some(ring) = maps::ring(found.ring) else { return XDP_DROP };
            // The ring's CPU makes the other checks. What could fill its queue is dropped here:
            // other hosts' packets, and old recordings, which it would have to turn into socket
            // buffers.
            if let Err(counter) = from_its_sender(ctx, &found.frame, flow) {
                flow.refused = flow.refused.wrapping_add(1);
                found.counter = counter;
                seen_here(flow, &found);
                return refuse(ctx, traced_by::INGRESS, &found);
            }
            if flow.group_mark != 0 && is_psn_shifted(flow, &found.frame) {
                found.counter = Counter::ShiftedPsn;
                return pass(ctx, traced_by::INGRESS, &found);
            }
            if check::is_laps_behind(ring, flow, &found.frame) {
                return stale(ctx, &p, flow, &mut found);
            }
            // The packet next to the last accepted one of its flow overtakes nothing that another
            // CPU has queued.
            if flow.next_psn == found.frame.bth.psn && maps::is_current_cpu(ring.cpu) {
                maps::tail_call_aggregate(ctx);
            }
            steer(ctx, &found)
        }
    }
}

/// Handles data of a flow whose result every receiver has long had.
#[inline(always)]
fn stale(ctx: &XdpContext, p: &Packet, flow: &mut Flow, found: &mut Classified) -> u32 {
    let len = found.frame.data_len(p.len());
    found.counter = match len {
        Ok(len) if len > MAX_MTU => Counter::Oversized,
        Ok(_) => Counter::Stale,
        Err(reject) => reject.counter(),
    };
    seen_here(flow, found);
    match len {
        Ok(len) if len <= MAX_MTU => {
            // Before the packet changes.
            let action = pass(ctx, traced_by::INGRESS, found);
            if payload::shift_psn(ctx, &found.frame, len, AS_DUPLICATE) { action } else { XDP_DROP }
        }
        _ => {
            flow.refused = flow.refused.wrapping_add(1);
            refuse(ctx, traced_by::INGRESS, found)
        }
    }
}

/// Handles data that arrives at a port and belongs to no flow, or no longer to one.
#[inline(always)]
fn unknown_flow(ctx: &XdpContext, p: &Packet, found: &mut Classified) -> u32 {
    let (features, has_ended) = (maps::features(), found.has_ended());
    if features & (features::FIRST_PACKETS | features::UNKNOWN_FLOWS) == 0 && !has_ended {
        return pass(ctx, traced_by::INGRESS, found);
    }
    let key = ConnectionKey {
        src_ip: found.frame.src_ip,
        dst_ip: found.frame.dst_ip,
        qpn: found.frame.bth.qpn,
        ifindex: maps::port_of(ctx.ingress_ifindex() as u32),
    };
    if found.first && features & features::FIRST_PACKETS != 0 && in_band::is_of_job(ctx, p, found) {
        // The ring's CPU checks it, as it checks contributions. The next packet must not overtake
        // it.
        maps::wait(&key, found.ring);
        return steer(ctx, found);
    }
    if has_ended {
        return ended(ctx, found);
    }
    if features & features::FIRST_PACKETS != 0
        && let Some(job) = maps::pending_job(&key)
    {
        (found.ring, found.counter) = (job, Counter::InBandWaits);
        return refuse(ctx, traced_by::INGRESS, found);
    }
    if features & features::UNKNOWN_FLOWS != 0 {
        maps::count_unknown_flow(&key);
    }
    pass(ctx, traced_by::INGRESS, found)
}

/// Handles data of a flow whose job has ended.
#[inline(always)]
fn ended(ctx: &XdpContext, found: &mut Classified) -> u32 {
    found.counter = Counter::JobEnded;
    // SAFETY: a map value. A lost count makes the flow look idle for a moment at worst.
    let flow = unsafe { &mut *found.flow };
    // Packets of other senders do not keep it alive.
    if from_its_sender(ctx, &found.frame, flow).is_ok() {
        seen_here(flow, found);
    }
    refuse(ctx, traced_by::INGRESS, found)
}

/// Sends the packet to the ring's CPU.
#[inline(always)]
fn steer(ctx: &XdpContext, found: &Classified) -> u32 {
    let Some(ring) = maps::ring(found.ring) else { return XDP_DROP };
    let (action, counter) = match maps::to_cpu(ring.cpu) {
        Ok(action) => (action, Counter::Steered),
        Err(_) => (XDP_DROP, Counter::SteerFailed),
    };
    maps::count(found.ring, counter);
    trace::classified(ctx, traced_by::INGRESS, found, counter);
    action
}

/// Notes a packet of a flow that does not reach the ring's CPU.
#[inline(always)]
fn seen_here(flow: &mut Flow, found: &Classified) {
    flow.packets = flow.packets.wrapping_add(1);
    flow.last_psn = found.frame.bth.psn;
    flow.last_verdict = found.counter as u32;
}

/// Handles a packet that `ingress` has received on the ring's CPU. It is parsed again: the two
/// programs together would need more stack than there is.
#[inline(always)]
pub fn on_port_and_ring_cpu(ctx: &XdpContext) -> u32 {
    on_cpu(ctx, Dispatch::Inline)
}

/// Handles every packet that comes out of the CPU map.
#[inline(always)]
pub fn on_ring_cpu(ctx: &XdpContext) -> u32 {
    on_cpu(ctx, Dispatch::CpuMap)
}

/// The path of a packet to its ring's CPU.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Dispatch {
    /// Through the CPU map, whose thread may run on another CPU after its own was taken offline.
    CpuMap,
    /// From `ingress`, on the same CPU.
    Inline,
    /// In a test run, on any CPU.
    Probe,
}

/// Common to all paths.
#[inline(always)]
pub fn on_cpu(ctx: &XdpContext, dispatch: Dispatch) -> u32 {
    let p = Packet::new(ctx);
    let mut found = Classified::NOTHING;
    match classify(&p, &mut found) {
        // A first packet for set-up in band, or of a flow that was removed after steering.
        Class::Pass
            if found.first
                && maps::features() & features::FIRST_PACKETS != 0
                && in_band::is_claim(ctx, &p, &mut found) =>
        {
            refuse(ctx, traced_by::AGGREGATE, &found)
        }
        // It was data of a flow, or of a connection about to become one, when it was steered. The
        // flow has been removed since.
        Class::Pass => {
            found.counter = Counter::JobEnded;
            refuse(ctx, traced_by::AGGREGATE, &found)
        }
        Class::Refuse => refuse(ctx, traced_by::AGGREGATE, &found),
        Class::Data => {
            if dispatch == Dispatch::Inline {
                maps::count(found.ring, Counter::Inline);
                trace::classified(ctx, traced_by::INGRESS, &found, Counter::Inline);
            }
            aggregate::contribution(ctx, &p, &found.frame, found.flow, dispatch)
        }
    }
}

#[inline(always)]
fn pass(ctx: &XdpContext, program: u32, found: &Classified) -> u32 {
    maps::count(found.ring, found.counter);
    trace::classified(ctx, program, found, found.counter);
    XDP_PASS
}

#[inline(always)]
fn refuse(ctx: &XdpContext, program: u32, found: &Classified) -> u32 {
    refused(ctx, found.ring, found.counter);
    trace::classified(ctx, program, found, found.counter);
    XDP_DROP
}

/// Defines the programs of a box in an object.
#[macro_export]
macro_rules! programs {
    () => {
        /// Handles every packet that arrives at a port.
        #[aya_ebpf::macros::xdp]
        pub fn ingress(ctx: aya_ebpf::programs::XdpContext) -> u32 {
            $crate::on_port(&ctx)
        }

        /// Runs on the ring's CPU.
        #[aya_ebpf::macros::xdp(map = "cpumap")]
        pub fn aggregate(ctx: aya_ebpf::programs::XdpContext) -> u32 {
            $crate::on_ring_cpu(&ctx)
        }

        /// Follows `ingress` if that runs on the ring's CPU.
        #[aya_ebpf::macros::xdp]
        pub fn aggregate_inline(ctx: aya_ebpf::programs::XdpContext) -> u32 {
            $crate::on_port_and_ring_cpu(&ctx)
        }

        /// Runs at a port's egress.
        #[aya_ebpf::macros::xdp(map = "devmap")]
        pub fn egress(ctx: aya_ebpf::programs::XdpContext) -> u32 {
            $crate::egress::result(&ctx, $crate::packet::egress_ifindex(&ctx))
        }

        /// Runs between `ingress` and the bridge.
        #[aya_ebpf::macros::classifier]
        pub fn guard(ctx: aya_ebpf::programs::TcContext) -> i32 {
            $crate::guard::on_port(&ctx)
        }

        #[panic_handler]
        fn panic(_: &core::panic::PanicInfo) -> ! {
            loop {}
        }

        #[unsafe(link_section = "license")]
        #[unsafe(no_mangle)]
        static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
    };
}
