//! Shared by the benchmark of live frames, which includes this file, and its XDP programs.

/// Names of the maps.
pub mod maps {
    /// Array, rank to [`super::LiveFrame`].
    pub const FRAMES: &str = "LIVE_FRAMES";
    /// Array of one [`super::LiveSender`].
    pub const SENDER: &str = "LIVE_SENDER";
    /// Array of one [`super::LiveReceiver`].
    pub const RECEIVER: &str = "LIVE_RECEIVER";
    /// Device map without a program, rank to port.
    pub const PORTS: &str = "LIVE_PORTS";
}

/// Ring whose slot 0 has the payload that every contribution gets, or that packets are restored from.
pub const PAYLOADS: u32 = 2;

/// A rank's untagged IPv4 SEND with PSN 0, without its payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct LiveFrame {
    /// The headers, 54 bytes.
    pub words: [u64; 7],
    /// The ICRC of headers and payload.
    pub icrc: u32,
    /// Zero.
    pub reserved: u32,
}

/// State of the sender; written by its CPU. As long as a cache line, like [`LiveReceiver`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct LiveSender {
    /// Index of the next contribution.
    pub index: u32,
    pub rank: u32,
    /// How many indices the sender may be ahead of the ring.
    pub credit: u32,
    /// The ring's lowest unreleased index when the sender last looked, which it does when it has no
    /// credit.
    pub low: u32,
    /// Contributions sent.
    pub sent: u64,
    /// Times that there was no credit.
    pub waited: u64,
    /// Zero.
    pub reserved: [u64; 4],
}

/// Contributions that reached the ring's CPU without `aggregate`; written by that CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct LiveReceiver {
    /// Rank of the next contribution.
    pub rank: u32,
    /// Zero.
    pub reserved: u32,
    /// Indices whose contributions have all arrived.
    pub completed: u64,
    /// Zero.
    pub padding: [u64; 6],
}

const _: () = {
    assert!(size_of::<LiveFrame>() == 64);
    assert!(size_of::<LiveSender>() == 64);
    assert!(size_of::<LiveReceiver>() == 64);
};
