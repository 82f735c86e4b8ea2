//! Drops packets between `ingress` and the bridge that have bypassed `ingress`.
//!
//! A port may lose its XDP program while packets still arrive: a veth that goes down removes the
//! program first and stops receiving later (`veth_disable_xdp` in drivers/net/veth.c, Linux 6.18),
//! and an administrator may detach it. Contributions would then reach their neighbours unsummed.

use aya_ebpf::bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC};
use aya_ebpf::programs::TcContext;
use netsum_common::abi::{ConnectionKey, features};
use netsum_common::counters::Counter;
use netsum_common::wire::{Bytes, Frame, Reject, Wrapped};

use crate::classify::{Class, Classified, classify, is_psn_shifted, is_spoofed};
use crate::maps;

/// No headers are longer than this.
const HEADERS: u32 = 128;

/// On every packet that a port hands to the kernel.
#[inline(always)]
pub fn on_port(ctx: &TcContext) -> i32 {
    let linear = (ctx.data_end() - ctx.data()) as u32;
    let wanted = if ctx.len() < HEADERS { ctx.len() } else { HEADERS };
    if linear < wanted && ctx.pull_data(wanted).is_err() {
        // Out of memory: the packet cannot be classified.
        return TC_ACT_SHOT;
    }
    let p = Headers { data: ctx.data(), end: ctx.data_end(), len: ctx.len() as usize };
    let mut found = Classified::NOTHING;
    let passes = match classify(&p, &mut found) {
        Class::Data => {
            // SAFETY: a map value, which lives as long as the program runs.
            let flow = unsafe { &*found.flow };
            is_psn_shifted(flow, &found.frame)
        }
        Class::Pass => {
            !found.has_ended() && !is_spoofed(port(ctx), &found.frame) && !waits(port(ctx), &found)
        }
        Class::Refuse => false,
    };
    if passes {
        return TC_ACT_UNSPEC;
    }
    maps::count(found.ring, Counter::BypassedIngress);
    TC_ACT_SHOT
}

/// Whether it is data of a connection that has shown up in band, and waits for other ranks.
#[inline(always)]
fn waits(port: u32, found: &Classified) -> bool {
    let Frame { src_ip, dst_ip, bth, .. } = found.frame;
    found.unknown_flow
        && maps::features() & features::FIRST_PACKETS != 0
        && maps::pending_job(&ConnectionKey { src_ip, dst_ip, qpn: bth.qpn, ifindex: port })
            .is_some()
}

/// Interface at which the packet arrived.
#[inline(always)]
fn port(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for the program's run; the verifier rewrites the access.
    unsafe { (*ctx.skb.skb).ifindex }
}

/// The headers of a packet of this length. Linux has removed one tag, if there was one.
struct Headers {
    data: usize,
    end: usize,
    len: usize,
}

impl Bytes for Headers {
    #[inline(always)]
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let p = self.data + offset;
        if p + N > self.end {
            return None;
        }
        // SAFETY: N bytes from `p` on are inside the packet, as just checked.
        Some(unsafe { (p as *const [u8; N]).read_unaligned() })
    }

    #[inline(always)]
    fn len(&self) -> usize {
        self.len
    }
}

/// No further parsing: data that can be summed is not behind more headers.
impl Wrapped for Headers {
    #[inline(always)]
    fn hidden(&self) -> Reject {
        Reject::NotRoce
    }
    #[inline(always)]
    fn tagged(&self, _: &mut Frame) -> Reject {
        Reject::NotRoce
    }
    #[inline(always)]
    fn extended(&self, _: &mut Frame) -> Reject {
        Reject::NotRoce
    }
}
