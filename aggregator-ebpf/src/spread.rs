//! Spreads routed, unsummed RoCEv2 over uplinks: a table has the uplink of each flow.
//!
//! The kernel decides whether a packet goes up. If its route has next hops over several uplinks,
//! the kernel would choose by a hash; this program uses the uplink in the flow's entry. A flow
//! without an entry gets one at its first packet: the uplink with the least bytes. So does a flow
//! whose uplink has lost its carrier or its route. All other packets continue to the kernel
//! unchanged, also those that need an answer (an expired TTL, a packet that is too long).

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

use core::mem::size_of;

use aya_ebpf::bindings::{TC_ACT_UNSPEC, bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1};
use aya_ebpf::btf_maps::{Array, HashMap};
use aya_ebpf::helpers::generated::{bpf_fib_lookup, bpf_redirect_neigh};
use aya_ebpf::macros::{btf_map, classifier};
use aya_ebpf::programs::TcContext;
use netsum_common::abi::{
    MAX_SPREAD_FLOWS, MAX_UPLINKS, SPREAD_FIRST, SpreadFlow, SpreadKey, SpreadUplink,
};
use netsum_common::wire::{ROCE_PORT, ipv4_mapped};

/// `BPF_F_NO_PREALLOC`: entries take memory only while they are there.
const NO_PREALLOC: usize = 1;

#[btf_map]
static SPREAD: HashMap<SpreadKey, SpreadFlow, { MAX_SPREAD_FLOWS as usize }, NO_PREALLOC> =
    HashMap::new();
#[btf_map]
static SPREAD_UPLINKS: Array<SpreadUplink, { MAX_UPLINKS as usize }> = Array::new();

/// The packet is for this machine's MAC address (include/uapi/linux/if_packet.h).
const PACKET_HOST: u32 = 0;
/// `BPF_FIB_LOOKUP_OUTPUT`: by this interface. `BPF_FIB_LOOKUP_SKIP_NEIGH`: without the neighbour's
/// MAC address (Linux 6.3).
const OUTPUT: u32 = 1 << 1;
const SKIP_NEIGH: u32 = 1 << 2;

/// `BPF_FIB_LKUP_RET_FRAG_NEEDED`: longer than the path's MTU.
const FRAG_NEEDED: i64 = 8;
const NO_ROUTE: i64 = -1;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const UDP: u8 = 17;
/// The parsed headers, over IPv4 and IPv6.
const HEADERS_V4: usize = 14 + 20 + 8;
const HEADERS_V6: usize = 14 + 40 + 8;
/// A shorter first packet has hardly any payload: an acknowledgement or a read request, not a flow
/// of bytes.
const MIN_FLOW_PACKET: u32 = 128;

/// `struct bpf_fib_lookup`, as far as unions are of use here. Copies of it are made of words of 8
/// bytes, which the verifier wants aligned.
#[repr(C, align(8))]
struct Route {
    family: u8,
    protocol: u8,
    src_port: [u8; 2],
    dst_port: [u8; 2],
    /// 0: the kernel takes the packet's own length.
    len: u16,
    ifindex: u32,
    class: u32,
    src: [u32; 4],
    /// Afterwards the next hop, of `family`.
    dst: [u32; 4],
    rest: [u32; 4],
}

/// The parsed fields of a packet.
struct Packet {
    v6: bool,
    key: SpreadKey,
    ttl: u8,
    /// IPv4's.
    checksum: u16,
}

/// Handles every packet that is to be routed.
#[classifier]
pub fn spread(ctx: TcContext) -> i32 {
    route_by_flow(&ctx).unwrap_or(TC_ACT_UNSPEC)
}

/// `None` leaves the packet to the kernel.
#[inline(always)]
fn route_by_flow(ctx: &TcContext) -> Option<i32> {
    let packet = parse(ctx)?;
    // SAFETY: the context is valid for the program's run; the verifier rewrites the access.
    let ifindex = unsafe { (*ctx.skb.skb).ifindex };
    let kernel_route = packet.route(ctx, ifindex, SKIP_NEIGH).ok()?;
    if !is_uplink(kernel_route.ifindex) {
        return None;
    }
    let flow = SPREAD.get_ptr_mut(&packet.key);
    let route = match flow {
        Some(flow) => {
            // SAFETY: a map value, which lives as long as the program runs.
            let (uplink, pinned) = unsafe { ((*flow).uplink, (*flow).given) };
            // A pinned flow returns to its uplink as soon as that is usable.
            let back = if pinned == 0 || pinned == uplink + 1 {
                None
            } else {
                packet.route_over(ctx, pinned - 1).ok()
            };
            match back {
                Some(route) => {
                    // SAFETY: as above.
                    unsafe { (*flow).uplink = pinned - 1 };
                    route
                }
                None => match packet.route_over(ctx, uplink) {
                    Ok(route) => route,
                    // The kernel reports that to the sender.
                    Err(FRAG_NEEDED) => return None,
                    Err(_) => {
                        let (uplink, route) = packet.least_loaded(ctx)?;
                        // SAFETY: as above. All CPUs choose alike, more or less.
                        unsafe {
                            (*flow).uplink = uplink;
                            add_load(uplink, (*flow).bytes.max((*flow).advance));
                        }
                        route
                    }
                },
            }
        }
        None => {
            let (uplink, route) = packet.least_loaded(ctx)?;
            let advance = if ctx.len() < MIN_FLOW_PACKET { 0 } else { mean_flow_bytes() };
            let flow = SpreadFlow { uplink, given: 0, bytes: ctx.len() as u64, advance };
            // Without room the kernel routes the packet.
            SPREAD.insert(&packet.key, flow, 0).ok()?;
            add_load(uplink, advance);
            route
        }
    };
    if let Some(flow) = flow {
        // SAFETY: a map value; a word that is added to by all.
        unsafe { add(&raw mut (*flow).bytes, ctx.len() as u64) };
    }
    packet.decrement_ttl(ctx)?;
    let next = bpf_redir_neigh__bindgen_ty_1 { ipv6_nh: route.dst };
    let mut hop = bpf_redir_neigh { nh_family: route.family as u32, __bindgen_anon_1: next };
    // SAFETY: the kernel copies the next hop.
    Some(unsafe {
        bpf_redirect_neigh(route.ifindex, &mut hop, size_of::<bpf_redir_neigh>() as i32, 0)
    } as i32)
}

#[inline(always)]
fn parse(ctx: &TcContext) -> Option<Packet> {
    // SAFETY: the context is valid for the program's run; the verifier rewrites the access.
    let (kind, tagged) = unsafe { ((*ctx.skb.skb).pkt_type, (*ctx.skb.skb).vlan_present) };
    if kind != PACKET_HOST || tagged != 0 {
        return None;
    }
    if ctx.data_end() - ctx.data() < HEADERS_V6 {
        // The whole packet, if it is shorter.
        ctx.pull_data(ctx.len().min(HEADERS_V6 as u32)).ok()?;
    }
    let data = ctx.data();
    if data + HEADERS_V4 > ctx.data_end() {
        return None;
    }
    // SAFETY: the bounds were checked just above.
    let b = unsafe { &*(data as *const [u8; HEADERS_V4]) };
    let v6 = match [b[12], b[13]] {
        // Neither options nor fragments.
        [0x08, 0x00] if b[14] == 0x45 && b[20] & 0x3f == 0 && b[21] == 0 && b[23] == UDP => false,
        [0x86, 0xdd] if b[14] >> 4 == 6 && b[20] == UDP => true,
        _ => return None,
    };
    let mut key = SpreadKey { src_ip: [0; 16], dst_ip: [0; 16], src_port: 0 };
    let (ttl, [from, to]) = if v6 {
        if data + HEADERS_V6 > ctx.data_end() {
            return None;
        }
        // SAFETY: the bounds were checked just above.
        let b = unsafe { &*(data as *const [u8; HEADERS_V6]) };
        key.src_ip.copy_from_slice(&b[22..38]);
        key.dst_ip.copy_from_slice(&b[38..54]);
        (b[21], [[b[54], b[55]], [b[56], b[57]]])
    } else {
        // The kernel drops packets of such addresses, or takes them itself.
        if [b[26], b[30]].iter().any(|&first| matches!(first, 0 | 127 | 224..)) {
            return None;
        }
        key.src_ip = ipv4_mapped([b[26], b[27], b[28], b[29]]);
        key.dst_ip = ipv4_mapped([b[30], b[31], b[32], b[33]]);
        (b[22], [[b[34], b[35]], [b[36], b[37]]])
    };
    if v6 && (key.src_ip[0] == 0xff || key.dst_ip[0] == 0xff)
        || u16::from_be_bytes(to) != ROCE_PORT
        || ttl <= 1
    {
        return None;
    }
    key.src_port = u16::from_be_bytes(from) as u32;
    Some(Packet { v6, key, ttl, checksum: u16::from_be_bytes([b[24], b[25]]) })
}

impl Packet {
    /// The kernel's route.
    #[inline(always)]
    fn route(&self, ctx: &TcContext, ifindex: u32, flags: u32) -> Result<Route, i64> {
        let (src, dst) = (address_words(&self.key.src_ip), address_words(&self.key.dst_ip));
        let v4 = |a: [u32; 4]| if self.v6 { a } else { [a[3], 0, 0, 0] };
        let mut route = Route {
            family: if self.v6 { AF_INET6 } else { AF_INET },
            protocol: UDP,
            src_port: (self.key.src_port as u16).to_be_bytes(),
            dst_port: ROCE_PORT.to_be_bytes(),
            len: 0,
            ifindex,
            class: 0,
            src: v4(src),
            dst: v4(dst),
            rest: [0; 4],
        };
        // SAFETY: the structure is laid out as the kernel's, of the size that it asks for.
        let error = unsafe {
            bpf_fib_lookup(
                ctx.skb.skb.cast(),
                (&raw mut route).cast(),
                size_of::<Route>() as i32,
                flags,
            )
        };
        if error == 0 { Ok(route) } else { Err(error as i64) }
    }

    /// The route over an uplink with a carrier.
    #[inline(always)]
    fn route_over(&self, ctx: &TcContext, uplink: u32) -> Result<Route, i64> {
        let uplink = SPREAD_UPLINKS.get(uplink).filter(|uplink| uplink.up != 0).ok_or(NO_ROUTE)?;
        let route = self.route(ctx, uplink.ifindex, SKIP_NEIGH | OUTPUT)?;
        // Over IPv6 the answer may have another interface.
        if route.ifindex == uplink.ifindex { Ok(route) } else { Err(NO_ROUTE) }
    }

    /// The route over the usable uplink with the least bytes.
    #[inline(always)]
    fn least_loaded(&self, ctx: &TcContext) -> Option<(u32, Route)> {
        let (mut best, mut least) = (None, u64::MAX);
        for number in 0..MAX_UPLINKS {
            let load = SPREAD_UPLINKS.get(number)?.load;
            if load < least
                && let Ok(route) = self.route_over(ctx, number)
            {
                (best, least) = (Some((number, route)), load);
            }
        }
        best
    }

    /// Decrements the TTL.
    #[inline(always)]
    fn decrement_ttl(&self, ctx: &TcContext) -> Option<()> {
        if self.v6 {
            return ctx.store(21, &(self.ttl - 1), 0).ok();
        }
        // RFC 1624: the TTL is the first byte of its word.
        let (sum, carry) = self.checksum.overflowing_add(0x0100);
        let [high, low] = (sum + u16::from(carry)).to_be_bytes();
        ctx.store(22, &[self.ttl - 1, UDP, high, low], 0).ok()
    }
}

/// Whether an interface is an uplink.
#[inline(always)]
fn is_uplink(ifindex: u32) -> bool {
    for number in 0..MAX_UPLINKS {
        match SPREAD_UPLINKS.get(number) {
            Some(uplink) if uplink.ifindex == ifindex => return true,
            Some(_) => {}
            None => return false,
        }
    }
    false
}

/// Mean bytes of a flow, as far as known. A new flow counts as that many: otherwise all flows that
/// start at about the same time would use the uplink with the least bytes at that moment.
#[inline(always)]
fn mean_flow_bytes() -> u64 {
    let (mut bytes, mut flows) = (0, 0);
    for number in 0..MAX_UPLINKS {
        let Some(uplink) = SPREAD_UPLINKS.get(number) else { break };
        bytes += uplink.load;
        flows += uplink.flows;
    }
    let mean = if flows == 0 { 0 } else { bytes / flows };
    if mean == 0 { SPREAD_FIRST } else { mean }
}

/// Adds a flow to an uplink.
#[inline(always)]
fn add_load(uplink: u32, bytes: u64) {
    if let Some(uplink) = SPREAD_UPLINKS.get_ptr_mut(uplink)
        && bytes > 0
    {
        // SAFETY: a map value; words that are added to by all.
        unsafe {
            add(&raw mut (*uplink).load, bytes);
            add(&raw mut (*uplink).flows, 1);
        }
    }
}

/// # Safety
/// It must be a word of a map value.
#[inline(always)]
unsafe fn add(word: *mut u64, value: u64) {
    // `core` has no atomic addition for this target.
    // SAFETY: the caller's promise.
    unsafe {
        core::arch::asm!(
            "lock *(u64 *)({0} + 0) += {1}",
            in(reg) word,
            in(reg) value,
            options(nostack)
        )
    };
}

/// As the kernel wants addresses: in the order of their bytes.
#[inline(always)]
fn address_words(a: &[u8; 16]) -> [u32; 4] {
    let word = |i: usize| u32::from_ne_bytes([a[i], a[i + 1], a[i + 2], a[i + 3]]);
    [word(0), word(4), word(8), word(12)]
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
