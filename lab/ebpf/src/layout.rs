//! Maps of the links' programs. `netsum_lab::faults` includes this file.

/// Settings of one direction.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Settings {
    /// A packet suffers the first fault whose threshold exceeds the hash of the packet's number.
    /// Thresholds are cumulative shares times 2^32.
    pub thresholds: [u64; 5],
    /// Selects other packets.
    pub seed: u64,
    /// Bit mask of the packet kinds that are counted to find the n-th packet.
    pub kinds: u64,
    /// The number of the first packet to suffer `what`, from 1.
    pub nth: u64,
    /// How many packets in a row suffer it.
    pub times: u64,
    /// The fault.
    pub what: u64,
    /// Rate of the bottleneck in bytes per second; 0 without a bottleneck.
    pub rate: u64,
    /// Bytes that may wait there; packets beyond are marked.
    pub depth: u64,
}

/// Counters of one direction.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Counts {
    /// RoCEv2 packets that arrived; on a link with a rate, all packets.
    pub seen: u64,
    /// Packets of `Settings::kinds`.
    pub matched: u64,
    /// Packets that suffered each fault.
    pub done: [u64; 5],
    /// Packets that were not marked because their sender does not use ECN.
    pub spared: u64,
}
