//! The parts of the XDP programs; see ARCHITECTURE.md, "The way of a packet".
//!
//! | program | where | what |
//! | --- | --- | --- |
//! | `ingress` | ports | data of registered flows goes to its ring's CPU, all else to the bridge |
//! | `aggregate` | CPU map | adds a contribution up; sends the sum |
//! | `egress` | device maps | gives each clone of a result its receiver's headers |
//!
//! `main.rs` is the object that the daemon loads, `bench.rs` one that measures the parts.
#![no_std]
#![feature(asm_experimental_arch)]

/// Expands to its body once for each number: loops of a constant length that the compiler would leave as loops, which
/// costs a third more.
macro_rules! unrolled {
    ($i:ident in $($n:literal)+ => $body:expr) => { $({ const $i: usize = $n; $body })+ };
}

pub mod aggregate;
pub mod classify;
pub mod egress;
pub mod maps;
pub mod packet;
pub mod payload;

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::Flow;
use netsum_common::counters::Counter;

use classify::{Class, Found, classify, from_its_sender, is_spoofed, refused};
use packet::Packet;

/// On every packet that comes in by a port.
#[inline(always)]
pub fn on_port(ctx: &XdpContext) -> u32 {
    let p = Packet::new(ctx);
    let mut found = Found::NOTHING;
    match classify(&p, &mut found) {
        Class::Pass if is_spoofed(ctx, &found.frame) => {
            found.counter = Counter::Spoofed;
            refuse(ctx, &found)
        }
        Class::Pass => {
            if found.stranger {
                classify::note_stranger(&found.frame, ctx.ingress_ifindex() as u32);
            }
            pass(&found)
        }
        Class::Refuse => refuse(ctx, &found),
        Class::Data => {
            // SAFETY: a map value. What was last seen is written by the ring's CPU too: a count that one takes from the
            // other spoils a diagnosis at worst.
            let flow = unsafe { &mut *found.flow };
            let Some(ring) = maps::ring(found.ring) else { return XDP_DROP };
            // Whatever else is wrong is found on the ring's CPU, but nobody may fill its queue with what is easily told
            // apart here: other hosts' packets, or recorded ones of the right host, which are dear, for the ring's CPU would
            // have to make them socket buffers and take them over the bridge.
            if let Err(counter) = from_its_sender(ctx, &found.frame, flow) {
                flow.refused = flow.refused.wrapping_add(1);
                found.counter = counter;
                seen_here(flow, &found);
                return refuse(ctx, &found);
            }
            if aggregate::is_laps_behind(ring, flow, &found.frame) {
                found.counter = Counter::Stale;
                seen_here(flow, &found);
                return pass(&found);
            }
            match maps::to_cpu(ring.cpu) {
                Ok(action) => {
                    maps::count(found.ring, Counter::Steered);
                    action
                }
                Err(_) => {
                    maps::count(found.ring, Counter::SteerFailed);
                    XDP_DROP
                }
            }
        }
    }
}

/// Notes a packet of a flow that does not go on to the ring's CPU.
#[inline(always)]
fn seen_here(flow: &mut Flow, found: &Found) {
    flow.packets = flow.packets.wrapping_add(1);
    flow.last_psn = found.frame.bth.psn;
    flow.last_outcome = found.counter as u32;
}

/// On every packet that arrives at a ring's CPU.
#[inline(always)]
pub fn on_ring_cpu(ctx: &XdpContext) -> u32 {
    let p = Packet::new(ctx);
    let mut found = Found::NOTHING;
    match classify(&p, &mut found) {
        Class::Pass => pass(&found),
        Class::Refuse => refuse(ctx, &found),
        Class::Data => aggregate::contribution(ctx, &p, &found.frame, found.flow),
    }
}

#[inline(always)]
fn pass(found: &Found) -> u32 {
    maps::count(found.ring, found.counter);
    XDP_PASS
}

#[inline(always)]
fn refuse(ctx: &XdpContext, found: &Found) -> u32 {
    refused(ctx, found.ring, found.counter);
    XDP_DROP
}

/// The three programs that a box runs, for an object that is to have them.
#[macro_export]
macro_rules! programs {
    () => {
        /// On every packet that comes in by a port.
        #[aya_ebpf::macros::xdp]
        pub fn ingress(ctx: aya_ebpf::programs::XdpContext) -> u32 {
            $crate::on_port(&ctx)
        }

        /// On the ring's CPU.
        #[aya_ebpf::macros::xdp(map = "cpumap")]
        pub fn aggregate(ctx: aya_ebpf::programs::XdpContext) -> u32 {
            $crate::on_ring_cpu(&ctx)
        }

        /// On the way out of a port.
        #[aya_ebpf::macros::xdp(map = "devmap")]
        pub fn egress(ctx: aya_ebpf::programs::XdpContext) -> u32 {
            $crate::egress::result(&ctx, $crate::packet::egress_ifindex(&ctx))
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
