//! What the floor under all-reduces in the box shares with its XDP program: the packets of an all-reduce, and nothing summed. No part of
//! the box's own border ([`crate::abi`]), like [`crate::live`].

/// Names.
pub mod maps {
    /// Array of one [`super::FloorConfig`].
    pub const CONFIG: &str = "FLOOR_CONFIG";
}

/// The program for ports.
pub const PROGRAM: &str = "floor_port";
/// The multicast group that all hosts send to and belong to, so that nobody's packet needs another destination to reach them all.
pub const GROUP: [u8; 4] = [239, 192, 47, 91];
/// Indices of which contributions are counted at the same time; a power of two.
pub const SLOTS: usize = 1024;

/// What the program has to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct FloorConfig {
    /// Contributions to each index.
    pub ranks: u32,
    /// Not 0 where hosts send packets with UDP checksums, and results are to have them. Otherwise these have none, like netsum's.
    pub checksums: u32,
    /// Where results come from: a host takes no packet from its own address.
    pub source: [u8; 4],
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, Copy, 'static, integers without implicit padding; every bit pattern is a value.
    unsafe impl aya::Pod for super::FloorConfig {}
}
