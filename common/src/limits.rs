//! Limits. Sizes of some maps follow from these, so they are part of the ABI ([`crate::abi`]).

/// Most members of a ring at a box.
pub const MAX_RANKS: usize = 64;
/// Ring numbers run from 1 to `MAX_RINGS - 1`; 0 means none.
pub const MAX_RINGS: u32 = 256;
/// Most flows on the box.
pub const MAX_FLOWS: u32 = MAX_RINGS * MAX_RANKS as u32;
/// Most connections whose job has ended and whose data is dropped: all flows at once, and as many
/// that were about to become flows.
pub const MAX_ENDED_FLOWS: u32 = 2 * MAX_FLOWS;
/// Most addresses that belong to ranks: a MAC and an IP address each.
pub const MAX_OWNERS: u32 = 2 * MAX_FLOWS;
/// Most slots in a ring.
pub const MAX_SLOTS: u32 = 1 << 16;
/// Connections that [`crate::abi::maps::UNKNOWN_FLOWS`] holds.
pub const MAX_UNKNOWN_FLOWS: u32 = 1024;
/// First packets of jobs set up in band that [`crate::abi::maps::CLAIMS`] holds; user space removes
/// them many times a second.
pub const MAX_CLAIMS: u32 = 4096;
/// Connections that [`crate::abi::maps::PENDING_CONNS`] holds.
pub const MAX_PENDING_CONNECTIONS: u32 = 2 * MAX_FLOWS;
/// Bytes of [`crate::abi::maps::TRACE_EVENTS`], a power of two.
pub const TRACE_BUFFER_BYTES: u32 = 4 << 20;
/// Most bytes of a frame in a traced event: fits the longest headers, the largest path MTU and the
/// ICRC.
pub const MAX_CAPTURE: usize = 3440;
/// Least bytes of a frame in a traced event, if the frame has them: fits all headers.
pub const MIN_CAPTURE: u32 = 128;
/// Most CPUs that rings can be spread over.
pub const MAX_CPUS: u32 = 256;
/// Bytes of payload that are processed at once, without a check of the length.
pub const CELL_LEN: usize = 256;
/// The largest path MTU, in whole cells: a broadcast clone has to fit a page of 4 KiB, with its
/// headers, 256 bytes before them and the 320 of `skb_shared_info` behind (`xdpf_clone` in
/// net/core/xdp.c).
pub const MAX_MTU: usize = 13 * CELL_LEN;
/// The smallest path MTU.
pub const MIN_MTU: u32 = 256;
/// Path MTUs are multiples of this. Adapters take only powers of two (`enum ibv_mtu` of
/// libibverbs).
pub const MTU_STEP: u32 = 64;
/// The largest path MTU of a ring of floats, whose sums take twice the payload.
pub const MAX_FLOAT_MTU: u32 = 2048;
/// Sizes of sums, each in maps of its own: a ring takes the smallest that fits its sums.
pub const SUM_SIZES: [u32; 6] = [512, 1024, 1536, 2048, 3328, 4096];
const _: () = assert!(SUM_SIZES[4] as usize == MAX_MTU && SUM_SIZES[5] == 2 * MAX_FLOAT_MTU);

/// Bytes for sums of payloads with up to `mtu` bytes of floats: one of two sizes, because the
/// verifier processes the loops over their lanes once for each.
#[inline(always)]
pub const fn float_sum_bytes(mtu: u32) -> u32 {
    if mtu <= MAX_FLOAT_MTU / 2 { MAX_FLOAT_MTU } else { 2 * MAX_FLOAT_MTU }
}

/// Bytes of a link's MTU that a path MTU needs in addition: IPv6, UDP, BTH, RETH, immediate data,
/// ICRC. A VLAN tag does not count (`xdp_ok_fwd_dev` in include/linux/filter.h).
pub const MTU_OVERHEAD: u32 = 40 + 8 + 12 + 16 + 4 + 4;

/// Bytes of memory for a sum of this many bytes.
pub const fn sum_len(bytes: u32) -> u32 {
    SUM_SIZES[sum_size(bytes)]
}

/// Whether a job may have this path MTU.
pub const fn is_mtu(mtu: u32) -> bool {
    mtu >= MIN_MTU && mtu as usize <= MAX_MTU && mtu.is_multiple_of(MTU_STEP)
}

/// Index into [`SUM_SIZES`] for sums of this many bytes.
#[inline(always)]
pub const fn sum_size(bytes: u32) -> usize {
    if bytes <= SUM_SIZES[0] {
        0
    } else if bytes <= SUM_SIZES[1] {
        1
    } else if bytes <= SUM_SIZES[2] {
        2
    } else if bytes <= SUM_SIZES[3] {
        3
    } else if bytes <= SUM_SIZES[4] {
        4
    } else {
        5
    }
}
/// Most slaves of bonds on a box.
pub const MAX_SLAVES: u32 = 1024;
/// Most uplinks that a box spreads flows over.
pub const MAX_UPLINKS: u32 = 16;
/// Most flows that it spreads at a time.
pub const MAX_SPREAD_FLOWS: u32 = 16384;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sum_has_the_smallest_size_that_fits() {
        for bytes in 0..=2 * MAX_FLOAT_MTU {
            let fits = SUM_SIZES.iter().filter(|size| **size >= bytes).min();
            assert_eq!(Some(&sum_len(bytes)), fits, "{bytes}");
        }
        assert!(is_mtu(256) && is_mtu(1408) && is_mtu(3328));
        assert!(![0, 192, 1000, 3392, 4096].into_iter().any(is_mtu));
    }
}
