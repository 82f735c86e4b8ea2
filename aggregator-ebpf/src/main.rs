//! The XDP programs of the box; see ARCHITECTURE.md, "The way of a packet".
//!
//! | program | where | what |
//! | --- | --- | --- |
//! | `ingress` | ports | data of registered flows goes to its ring's CPU, all else to the bridge |
//! | `aggregate` | CPU map | adds a contribution up; sends the sum |
//! | `egress` | device maps | gives each clone of a result its receiver's headers |
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod aggregate;
mod classify;
mod egress;
mod maps;
mod packet;
mod payload;

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;
use netsum_common::counters::Counter;

use classify::{Class, Found, classify, refused};
use packet::{Packet, egress_ifindex};

/// On every packet that comes in by a port.
#[xdp]
pub fn ingress(ctx: XdpContext) -> u32 {
    let p = Packet::new(&ctx);
    let mut found = Found::NOTHING;
    match classify(&p, &mut found) {
        Class::Pass => pass(&found),
        Class::Refuse => refuse(&ctx, &found),
        Class::Data => {
            let Some(ring) = maps::ring(found.ring) else { return XDP_DROP };
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

/// On the ring's CPU.
#[xdp(map = "cpumap")]
pub fn aggregate(ctx: XdpContext) -> u32 {
    on_ring_cpu(&ctx)
}

/// `aggregate` in a form that can be test-run: the kernel refuses to test-run programs for CPU and device maps
/// (`bpf_prog_test_run_xdp` in net/bpf/test_run.c). Never attached.
#[xdp]
pub fn probe_aggregate(ctx: XdpContext) -> u32 {
    on_ring_cpu(&ctx)
}

#[inline(always)]
fn on_ring_cpu(ctx: &XdpContext) -> u32 {
    let p = Packet::new(ctx);
    let mut found = Found::NOTHING;
    match classify(&p, &mut found) {
        Class::Pass => pass(&found),
        Class::Refuse => refuse(ctx, &found),
        Class::Data => aggregate::contribution(ctx, &p, &found.frame, found.flow),
    }
}

/// On the way out of a port.
#[xdp(map = "devmap")]
pub fn egress(ctx: XdpContext) -> u32 {
    egress::result(&ctx, egress_ifindex(&ctx))
}

/// `egress` in a form that can be test-run. Its port is always interface 1, the loopback interface. Never attached.
#[xdp]
pub fn probe_egress(ctx: XdpContext) -> u32 {
    egress::result(&ctx, 1)
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

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
