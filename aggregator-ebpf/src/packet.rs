//! A packet in the driver's buffer, in the form that the verifier can follow.

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::programs::XdpContext;
use netsum_common::wire::Bytes;

/// Largest offset.
const FARTHEST: usize = 0x3fff;

/// Start and end of the packet, and the context that they belong to.
#[derive(Clone, Copy)]
pub struct Packet {
    data: usize,
    end: usize,
    pub(crate) ctx: *mut xdp_md,
}

impl Packet {
    /// The packet of a program's context. Helpers that move the packet's head make it stale.
    #[inline(always)]
    pub fn new(ctx: &XdpContext) -> Self {
        Self { data: ctx.data(), end: ctx.data_end(), ctx: ctx.ctx }
    }

    /// Address of `N` bytes at an offset, if they are inside.
    #[inline(always)]
    pub fn at<const N: usize>(&self, offset: usize) -> Option<usize> {
        let p = self.data + offset;
        if p + N > self.end { None } else { Some(p) }
    }

    /// Like [`Packet::at`], for loops over words: the compiler must not know where the pointer
    /// comes from, or it turns the comparison into arithmetic on the packet's end, which the
    /// verifier prohibits.
    #[inline(always)]
    pub fn word<const N: usize>(&self, offset: usize) -> Option<usize> {
        let p = opaque(self.data + offset);
        if p + N > self.end { None } else { Some(p) }
    }

    /// The word of four bytes.
    #[inline(always)]
    pub fn lane(&self, offset: usize) -> Option<*mut u32> {
        self.word::<4>(offset).map(|p| p as *mut u32)
    }

    /// Overwrites bytes at an offset.
    #[inline(always)]
    pub fn store<const N: usize>(&self, offset: usize, bytes: [u8; N]) -> Option<()> {
        let p = self.at::<N>(offset)?;
        // SAFETY: N bytes from `p` on are inside the packet, as just checked.
        unsafe { (p as *mut [u8; N]).write_unaligned(bytes) };
        Some(())
    }
}

impl Bytes for Packet {
    #[inline(always)]
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let p = self.at::<N>(offset)?;
        // SAFETY: N bytes from `p` on are inside the packet, as just checked.
        Some(unsafe { (p as *const [u8; N]).read_unaligned() })
    }

    #[inline(always)]
    fn load_far<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        // No frame is longer. The verifier of Linux 6.12 needs the bound.
        let offset = opaque(offset);
        if offset > FARTHEST {
            return None;
        }
        // Reads through the compared pointer: the verifier does not know the bounds of another sum.
        let p = opaque(self.data + offset);
        if p + N > self.end {
            return None;
        }
        // SAFETY: N bytes from `p` on are inside the packet, as just checked.
        Some(unsafe { (p as *const [u8; N]).read_unaligned() })
    }

    #[inline(always)]
    fn len(&self) -> usize {
        self.end - self.data
    }
}

/// Interface that a packet leaves by; for programs in a device map (Linux 5.8).
#[inline(always)]
pub fn egress_ifindex(ctx: &XdpContext) -> u32 {
    let md: *const xdp_md = ctx.ctx;
    // SAFETY: the context is valid for the program's run; the verifier rewrites the access.
    unsafe { (*md).egress_ifindex }
}

/// The same value, of unknown origin to the compiler.
#[inline(always)]
pub fn opaque(mut value: usize) -> usize {
    // A real instruction: the line info of an empty template would make the kernel refuse the
    // program. SAFETY: a move that neither reads nor writes anything but its operand.
    unsafe {
        core::arch::asm!(
            "{0} = {0}",
            inout(reg) value,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    value
}
