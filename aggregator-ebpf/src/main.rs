//! The object that the daemon loads.
#![no_std]
#![no_main]

use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;
use netsum_aggregator_ebpf::{Dispatch, on_cpu};

netsum_aggregator_ebpf::programs!();

/// `aggregate` in a form that can be test-run: the kernel refuses to test-run programs for CPU and
/// device maps (`bpf_prog_test_run_xdp` in net/bpf/test_run.c). Never attached.
#[xdp]
pub fn probe_aggregate(ctx: XdpContext) -> u32 {
    on_cpu(&ctx, Dispatch::Probe)
}

/// `egress` in a form that can be test-run. Its port is always interface 1, the loopback interface.
/// Never attached.
#[xdp]
pub fn probe_egress(ctx: XdpContext) -> u32 {
    netsum_aggregator_ebpf::egress::result(&ctx, 1)
}
