//! Keys and values of the BPF maps: the border between the XDP programs and user space.
//!
//! Layouts are `repr(C)` without implicit padding, and asserted below. Raise [`VERSION`] with every
//! change: a daemon takes over pinned maps only of its own version.

use crate::wire::in_band::JOB_HEADER_LEN;
use crate::wire::{ICRC_LEN, InBandToken, MAX_HEADERS};

/// Version of everything in this module, of [`crate::counters`] and of the map names.
pub const VERSION: u32 = 22;

pub use crate::limits::*;
pub use crate::ring::{Fragments, Messages, RingConfig, RingNumber, ring_flags};

/// Names of the maps in the BPF object.
pub mod maps {
    /// Hash, [`super::FlowKey`] to [`super::Flow`], including flows whose job has ended.
    pub const FLOWS: &str = "FLOWS";
    /// Hash, [`super::Address`] to [`super::Owner`].
    pub const OWNERS: &str = "OWNERS";
    /// Hash, interface of a bond's slave to that of the bond: XDP programs see slaves.
    pub const SLAVES: &str = "SLAVES";
    /// Array, ring to [`super::RingConfig`].
    pub const RINGS: &str = "RINGS";
    /// Array, ring to [`crate::slot::RingState`].
    pub const RING_STATES: &str = "RING_STATES";
    /// Array of maps, ring to array of [`crate::slot::Slot`].
    pub const SLOTS: &str = "SLOTS";
    /// Arrays of maps, in the order of [`super::SUM_SIZES`]: ring to array of sums, in
    /// little-endian words as on the wire.
    pub const SUMS: [&str; 6] =
        ["SUMS_512", "SUMS_1024", "SUMS_1536", "SUMS_2048", "SUMS_3328", "SUMS_4096"];
    /// Array of maps, ring of floats to array of one [`crate::float::Table`].
    pub const FLOAT_TABLES: &str = "FLOAT_TABLES";
    /// Array of maps, ring to array of [`super::SavedHeader`], `slot * members + member`.
    pub const SAVED_HEADERS: &str = "SAVED_HEADERS";
    /// Array of maps, ring to device map with the port of each member, in order.
    pub const RING_PORTS: &str = "RING_PORTS";
    /// Device map, ring to the port towards its parent box, if it has one.
    pub const UPLINKS: &str = "UPLINKS";
    /// Hash, [`super::EgressKey`] to [`super::EgressPort`].
    pub const EGRESS_PORTS: &str = "EGRESS_PORTS";
    /// Hash, [`super::HopKey`] to [`super::Hop`]: members to which the box routes.
    pub const HOPS: &str = "HOPS";
    /// Per-CPU array of one [`crate::icrc::Lagged`], for the CRC of a long payload.
    pub const LAGGED: &str = "LAGGED";
    /// Array of one u32, bits of [`super::features`]: optional work.
    pub const FEATURES: &str = "FEATURES";
    /// LRU hash, [`super::ConnectionKey`] to the number of its SEND and WRITE packets as u64:
    /// unknown flows.
    pub const UNKNOWN_FLOWS: &str = "UNKNOWN_FLOWS";
    /// Hash, [`super::Token`] to [`super::InBandJob`].
    pub const TOKENS: &str = "TOKENS";
    /// Hash, [`super::ClaimKey`] to [`super::Claim`]; user space removes the entries that it has
    /// read.
    pub const CLAIMS: &str = "CLAIMS";
    /// LRU hash, [`super::ConnectionKey`] to the number of a job's first ring: connections that
    /// have shown up in band. Their data is dropped until they are registered.
    pub const PENDING_CONNS: &str = "PENDING_CONNS";
    /// CPU map, one entry for each CPU that serves rings.
    pub const CPUS: &str = "CPUS";
    /// Per-CPU array, `ring * COUNTERS + counter` to u64.
    pub const COUNTERS: &str = "COUNTERS";
    /// Array, ring to [`crate::timing::Timing`].
    pub const TIMINGS: &str = "TIMINGS";
    /// Array of one [`super::TraceFilter`]: the packets to trace, while
    /// [`super::features::TRACE`] is set.
    pub const TRACE_FILTER: &str = "TRACE_FILTER";
    /// Ring buffer of traced packets: each is a [`super::TraceEvent`] followed by bytes of the
    /// frame.
    pub const TRACE_EVENTS: &str = "TRACE_EVENTS";
    /// Per-CPU array of one u64: traced packets that did not fit [`TRACE_EVENTS`].
    pub const TRACE_LOST: &str = "TRACE_LOST";
    /// Per-CPU array of one [`super::TraceRecord`]: buffer for an event.
    pub const TRACE_SCRATCH: &str = "TRACE_SCRATCH";
    /// Program array of one: [`super::programs::AGGREGATE_INLINE`], or nothing.
    pub const TAIL_CALLS: &str = "TAIL_CALLS";
    /// All of them.
    pub const ALL: [&str; 32] = [
        OWNERS,
        FLOWS,
        RINGS,
        RING_STATES,
        SLOTS,
        SUMS[0],
        SUMS[1],
        SUMS[2],
        SUMS[3],
        SUMS[4],
        SUMS[5],
        FLOAT_TABLES,
        SAVED_HEADERS,
        RING_PORTS,
        UPLINKS,
        EGRESS_PORTS,
        HOPS,
        FEATURES,
        UNKNOWN_FLOWS,
        TOKENS,
        CLAIMS,
        PENDING_CONNS,
        CPUS,
        COUNTERS,
        TIMINGS,
        TRACE_FILTER,
        TRACE_EVENTS,
        TRACE_LOST,
        TRACE_SCRATCH,
        LAGGED,
        TAIL_CALLS,
        SLAVES,
    ];

    /// In an object of its own: hash, [`super::SpreadKey`] to [`super::SpreadFlow`].
    pub const SPREAD: &str = "SPREAD";
    /// In the same object: array of [`super::SpreadUplink`]. Used entries come first.
    pub const SPREAD_UPLINKS: &str = "SPREAD_UPLINKS";
}

/// Names of the programs in the BPF object.
pub mod programs {
    /// Attached to the ports.
    pub const INGRESS: &str = "ingress";
    /// In every entry of the CPU map.
    pub const AGGREGATE: &str = "aggregate";
    /// Called by `ingress` for a packet that arrives on its ring's CPU.
    pub const AGGREGATE_INLINE: &str = "aggregate_inline";
    /// In every entry of the device maps.
    pub const EGRESS: &str = "egress";
    /// Attached to the ports behind XDP.
    pub const GUARD: &str = "guard";
    /// In an object of its own, attached where the hosts' packets arrive for routing.
    pub const SPREAD: &str = "spread";
}

/// Key of a flow: the destination of its packets.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct FlowKey {
    /// Destination address; IPv4 in mapped form.
    pub dst_ip: [u8; 16],
    /// Destination queue pair number.
    pub qpn: u32,
}

/// A registered flow: rank k's connection to rank k+1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Flow {
    /// Its ring, or [`Flow::ENDED`].
    pub ring: RingNumber,
    /// The sending rank.
    pub rank: u32,
    /// PSN of fragment index 0.
    pub base_psn: u32,
    /// The port at which its packets arrive.
    pub ifindex: u32,
    /// The sender's address; IPv4 in mapped form.
    pub src_ip: [u8; 16],
    /// The sender's MAC address (or its router's); all zero until the first verified packet.
    pub src_mac: [u8; 6],
    /// 1 if user space has set `src_mac`, 0 if it is learned.
    pub mac_given: u8,
    /// Mark that its packets must carry if another box forwards them
    /// ([`crate::wire::has_group_mark`]); that box may have moved a PSN
    /// ([`crate::slot::is_psn_shifted`]). 0 otherwise.
    pub group_mark: u8,
    /// Data packets received, whatever their outcome. The ring's CPU writes this and the following
    /// fields; diagnosis reads them.
    pub packets: u32,
    /// How many of them were refused before they reached the slot machine.
    pub refused: u32,
    /// PSN of the last one.
    pub last_psn: u32,
    /// Outcome of the last one: the number of a [`crate::counters::Counter`].
    pub last_verdict: u32,
    /// The PSN after the last contribution that the ring's CPU has accepted, or
    /// [`Flow::NO_PSN`]. A packet with this PSN may be summed at once if it arrives on the
    /// ring's CPU: no packet of its flow waits in the CPU map's queue, except retransmissions.
    pub next_psn: u32,
    /// PSN of the last packet whose length differed from its slot's.
    pub mismatch_psn: u32,
    /// Its payload length in bytes; 0 if there was none.
    pub mismatch_len: u32,
    /// The port that the receiver is behind, if another box is in between: its address belongs to
    /// that port. 0 otherwise.
    pub dst_ifindex: u32,
}

impl Flow {
    /// Instead of a ring: the flow's job has ended. Data that its sender still sends is dropped,
    /// because its receiver would take it for a sum.
    pub const ENDED: RingNumber = RingNumber::NONE;
    /// No flow at all.
    pub const NOTHING: Self = Self {
        ring: Self::ENDED,
        rank: 0,
        base_psn: 0,
        ifindex: 0,
        src_ip: [0; 16],
        src_mac: [0; 6],
        mac_given: 0,
        group_mark: 0,
        packets: 0,
        refused: 0,
        last_psn: 0,
        last_verdict: 0,
        next_psn: Self::NO_PSN,
        mismatch_psn: 0,
        mismatch_len: 0,
        dst_ifindex: 0,
    };
    /// Value of [`Flow::next_psn`] before the ring's CPU has accepted a packet.
    pub const NO_PSN: u32 = u32::MAX;
}

/// A connection of an unknown flow, key of [`maps::UNKNOWN_FLOWS`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct ConnectionKey {
    /// Source address; IPv4 in mapped form.
    pub src_ip: [u8; 16],
    /// Destination address; IPv4 in mapped form.
    pub dst_ip: [u8; 16],
    /// Destination queue pair number.
    pub qpn: u32,
    /// The port that its packets come in on.
    pub ifindex: u32,
}

/// An address that belongs to one rank, in words: a BPF program builds it on its stack, which needs
/// alignment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct Address([u64; 2]);

impl Address {
    /// An IP address; IPv4 in mapped form.
    #[inline(always)]
    pub const fn ip(a: [u8; 16]) -> Self {
        Self([
            u64::from_ne_bytes([a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]]),
            u64::from_ne_bytes([a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]]),
        ])
    }

    /// A MAC address. Read as an IP address it would be a multicast one, which is never a source.
    #[inline(always)]
    pub const fn mac(m: [u8; 6]) -> Self {
        Self([u64::MAX, u64::from_ne_bytes([0, 0, m[0], m[1], m[2], m[3], m[4], m[5]])])
    }

    /// Its words, as arguments of a BPF function.
    #[inline(always)]
    pub const fn words(self) -> [u64; 2] {
        self.0
    }

    #[inline(always)]
    pub const fn from_words(words: [u64; 2]) -> Self {
        Self(words)
    }
}

/// The owner of an address: packets that arrive at other ports must not carry it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Owner {
    /// The port's interface.
    pub ifindex: u32,
    /// How many flows have it as their sender's address; 0 if it is reserved without flows.
    pub flows: u32,
}

impl Owner {
    /// Instead of a port: the box itself, whose addresses no arriving packet may carry.
    pub const THE_BOX: u32 = u32::MAX;
}

/// Optional work of the programs.
pub mod features {
    /// Unknown flows are noted in [`super::maps::UNKNOWN_FLOWS`] for the daemon.
    pub const UNKNOWN_FLOWS: u32 = 1;
    /// First packets of messages are searched for the header of a job that is set up in band: such
    /// jobs exist.
    pub const FIRST_PACKETS: u32 = 2;
    /// Packets and their outcomes are noted in [`super::maps::TRACE_EVENTS`]: a client traces.
    pub const TRACE: u32 = 4;
    /// [`super::maps::OWNERS`] has addresses: packets with hidden headers may carry one, and are
    /// dropped.
    pub const RANKS: u32 = 8;
}

/// Filter of traced packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct TraceFilter {
    /// Rings, bit by bit; bit 0 is for packets of no ring.
    pub rings: [u64; (MAX_RINGS / 64) as usize],
    /// Counters, bit by bit: selects packets that one of them counted.
    pub counters: u64,
    /// Bytes of the frame to note, [`MIN_CAPTURE`] to [`MAX_CAPTURE`].
    pub capture: u32,
    /// Zero.
    pub reserved: u32,
}

impl TraceFilter {
    /// No packet.
    pub const NOTHING: Self = Self {
        rings: [0; (MAX_RINGS / 64) as usize],
        counters: 0,
        capture: MIN_CAPTURE,
        reserved: 0,
    };
    /// Every packet, with its headers.
    pub const ALL: Self = Self {
        rings: [u64::MAX; (MAX_RINGS / 64) as usize],
        counters: u64::MAX,
        capture: MIN_CAPTURE,
        reserved: 0,
    };
}

/// Programs, as a [`TraceEvent`] names them.
pub mod traced_by {
    /// [`super::programs::INGRESS`].
    pub const INGRESS: u32 = 0;
    /// [`super::programs::AGGREGATE`].
    pub const AGGREGATE: u32 = 1;
    /// [`super::programs::EGRESS`].
    pub const EGRESS: u32 = 2;
}

/// A program's verdict on a packet, and its slot afterwards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct TraceEvent {
    /// Nanoseconds of CLOCK_MONOTONIC.
    pub time: u64,
    /// Bits of the [`crate::counters::Counter`]s that counted it.
    pub counters: u64,
    /// Ranks that have contributed to its slot, bit by bit.
    pub contributors: u64,
    /// Its ring, or 0.
    pub ring: u32,
    /// The rank that sent it or, at egress, gets it; [`TraceEvent::NONE`] if it belongs to no flow:
    /// then the fields up to `slot_flags` are meaningless.
    pub rank: u32,
    /// Its fragment index.
    pub index: u32,
    /// The ring's lowest index that has not been released.
    pub low: u32,
    /// The index behind the last contiguous fragment of the rank.
    pub expected: u32,
    /// Index that its slot holds.
    pub slot_index: u32,
    pub slot_flags: u32,
    /// The port at which it arrived or, at egress, leaves.
    pub ifindex: u32,
    /// One of [`traced_by`].
    pub program: u32,
    /// Its length in bytes.
    pub len: u32,
    /// How many bytes of it follow.
    pub captured: u32,
    pub cpu: u32,
}

impl TraceEvent {
    /// For `rank`: no flow.
    pub const NONE: u32 = u32::MAX;
}

/// A [`TraceEvent`] with the bytes of its frame.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TraceRecord {
    pub event: TraceEvent,
    /// The frame's first bytes.
    pub frame: [u8; MAX_CAPTURE],
}

/// The token of a job that is set up in band, in words. It has no `Debug`, because it is a secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Token([u64; 2]);

impl Token {
    /// From its bytes on the wire.
    #[inline(always)]
    pub const fn new(t: InBandToken) -> Self {
        let t = t.0;
        Self([
            u64::from_ne_bytes([t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]]),
            u64::from_ne_bytes([t[8], t[9], t[10], t[11], t[12], t[13], t[14], t[15]]),
        ])
    }

    /// As words of a packet, in the order of its bytes.
    #[inline(always)]
    pub const fn from_words(words: [u64; 2]) -> Self {
        Self(words)
    }

    /// Its bytes on the wire.
    pub fn bytes(self) -> InBandToken {
        let mut t = [0; 16];
        t[..8].copy_from_slice(&self.0[0].to_ne_bytes());
        t[8..].copy_from_slice(&self.0[1].to_ne_bytes());
        InBandToken(t)
    }
}

/// A job that is set up in band.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct InBandJob {
    /// Its first ring, which identifies the job.
    pub job: RingNumber,
    pub ranks: u32,
    pub rings: u32,
    /// Bits of [`ring_flags`]: whether the ICRC is verified.
    pub flags: u32,
}

/// Key of a claim. There is one entry for each rank and port: a flood of first packets cannot fill
/// the map.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct ClaimKey {
    /// The job's first ring.
    pub job: RingNumber,
    /// Ring of the job in the packet; the job's number of rings if the packet's is larger.
    pub ring: u32,
    /// Rank in the packet; the job's number of ranks if the packet's is larger.
    pub rank: u32,
    /// The port at which it arrived.
    pub ifindex: u32,
}

/// A first packet with the token of a job that is set up in band, of an unregistered connection. It
/// has no `Debug`, because it contains the token.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Claim {
    /// The packet's [`crate::wire::JobHeader`].
    pub header: [u64; JOB_HEADER_LEN / 8],
    /// Its source and destination.
    pub connection: ConnectionKey,
    pub psn: u32,
    /// Length of its payload in bytes.
    pub len: u32,
    /// The sender's MAC address (or its router's).
    pub src_mac: [u8; 6],
    /// 1 if the packet is also its message's last.
    pub only: u8,
    /// Zero.
    pub reserved: u8,
}

/// Size of the longest headers.
pub type HeaderWords = [u64; MAX_HEADERS.div_ceil(8)];

/// The headers of one rank's packet, from the Ethernet destination to the last byte before the
/// payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct SavedHeader {
    /// The bytes, in words, which are faster to copy; bytes beyond the length are arbitrary.
    pub words: HeaderWords,
    /// Length in bytes; 0 when nothing is saved.
    pub len: u8,
    /// Offset of the IP header.
    pub ip: u8,
    /// 1 for IPv6.
    pub v6: u8,
    /// Zero.
    pub reserved: [u8; 5],
}

/// Key of a ring's results at a port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct EgressKey {
    /// The ring.
    pub ring: RingNumber,
    /// The port's interface.
    pub ifindex: u32,
}

/// The ranks behind a port. A broadcast sends one clone for each to the port, and each clone takes
/// the next rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct EgressPort {
    /// How many ranks of the ring are behind the port.
    pub count: u32,
    /// The next rank, below `count`.
    pub cursor: u32,
    pub ranks: [u8; MAX_RANKS],
}

/// A member of a ring, which gets its results.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct HopKey {
    pub ring: RingNumber,
    /// Its place in the ring; if the box has a parent, the last one is the uplink.
    pub member: u32,
}

/// The next hop to a member: the addresses that a router writes into packets to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct Hop {
    /// The box's own MAC address at which packets for this member arrive. Packets to other
    /// addresses are bridged unchanged.
    pub own: [u8; 6],
    /// The MAC address of the next hop; all zero if unknown: then packets are dropped.
    pub dst: [u8; 6],
    /// The box's own MAC address towards the next hop.
    pub src: [u8; 6],
}

/// Tag of a released packet, in place of its Ethernet addresses; egress writes the real ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct ReleaseTag {
    /// Ring number.
    pub ring: u32,
    /// Fragment index. Between the verdict and egress the slot may get a later index, because a CPU
    /// processes a batch of packets before redirected ones leave.
    pub index: u32,
    /// The rank to send to, or [`ReleaseTag::ALL`]; towards the parent, possibly with
    /// [`ReleaseTag::TOTAL`].
    pub rank: u16,
    /// Offset of the payload in this packet.
    pub payload: u16,
}

impl ReleaseTag {
    /// In `rank`: the packet is one of a broadcast's clones.
    pub const ALL: u16 = u16::MAX;
    /// Flag of `rank`: the packet holds the total, not a partial sum.
    pub const TOTAL: u16 = 1 << 8;
}

/// Key of a spread flow: the sender chooses the UDP source port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct SpreadKey {
    /// Source address; IPv4 in mapped form.
    pub src_ip: [u8; 16],
    /// Destination address; IPv4 in mapped form.
    pub dst_ip: [u8; 16],
    /// UDP source port.
    pub src_port: u32,
}

/// Assumed bytes of the very first flow. A flow that has sent this many bytes counts, however small
/// its first packet was.
pub const SPREAD_FIRST: u64 = 1 << 16;

/// A flow that uses one uplink.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct SpreadFlow {
    /// Place of its uplink in [`maps::SPREAD_UPLINKS`].
    pub uplink: u32,
    /// 1 + the place of the pinned uplink; 0 if the box chose at the first packet. It differs from
    /// `uplink` while the pinned one is unusable.
    pub given: u32,
    /// Bytes of its frames.
    pub bytes: u64,
    /// Assumed bytes, until it has sent more.
    pub advance: u64,
}

/// An uplink.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct SpreadUplink {
    /// Its interface; 0 if the entry is unused.
    pub ifindex: u32,
    /// 1 while it has a carrier.
    pub up: u32,
    /// Bytes of its flows. Adding a flow adds its advance; user space regularly replaces this by
    /// the sum of the flows' bytes.
    pub load: u64,
    /// Number of its flows that count.
    pub flows: u64,
}

const _: () = {
    assert!(size_of::<SpreadKey>() == 36);
    assert!(size_of::<SpreadFlow>() == 24);
    assert!(size_of::<SpreadUplink>() == 24);
    assert!(size_of::<FlowKey>() == 20);
    assert!(size_of::<Flow>() == 72);
    assert!(size_of::<ConnectionKey>() == 40);
    assert!(size_of::<Address>() == 16);
    assert!(size_of::<Owner>() == 8);
    assert!(size_of::<Token>() == 16);
    assert!(size_of::<InBandJob>() == 16);
    assert!(size_of::<ClaimKey>() == 16);
    assert!(size_of::<Claim>() == 104);
    assert!(size_of::<RingConfig>() == 28);
    assert!(size_of::<SavedHeader>() == 112);
    assert!(MAX_HEADERS <= 13 * 8);
    assert!(size_of::<EgressKey>() == 8);
    assert!(size_of::<EgressPort>() == 72);
    assert!(size_of::<HopKey>() == 8);
    assert!(size_of::<Hop>() == 18);
    assert!(size_of::<ReleaseTag>() == 12);
    assert!(size_of::<TraceFilter>() == 48);
    assert!(size_of::<TraceEvent>() == 72);
    assert!(size_of::<TraceRecord>() == 72 + MAX_CAPTURE);
    assert!(MIN_CAPTURE as usize >= MAX_HEADERS && MAX_CAPTURE >= MAX_HEADERS + MAX_MTU + ICRC_LEN);
    // A word has one bit for each counter.
    assert!(crate::counters::COUNTERS <= 64);
};

/// Memory of a ring on the box. Its text is the formula.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingMemory {
    pub slots: u32,
    /// Bytes of the largest sum.
    pub sum_bytes: u32,
    pub members: u32,
}

impl RingMemory {
    pub const fn bytes(self) -> u64 {
        let headers = self.members as usize * size_of::<SavedHeader>();
        let slot = sum_len(self.sum_bytes) as usize + headers + size_of::<crate::slot::Slot>();
        self.slots as u64 * slot as u64
    }
}

impl core::fmt::Display for RingMemory {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { slots, sum_bytes, members } = *self;
        let (sum, header) = (sum_len(sum_bytes), size_of::<SavedHeader>());
        let state = size_of::<crate::slot::Slot>();
        write!(
            f,
            "{slots} slots x ({sum} sum + {members} members x {header} header + {state} state)"
        )
    }
}

/// Slots that a ring needs for a credit: twice as many, rounded up to a power of two. `None` if
/// that exceeds [`MAX_SLOTS`].
pub const fn ring_slots(credit: Fragments) -> Option<u32> {
    let Some(double) = credit.0.checked_mul(2) else { return None };
    if double == 0 || double > MAX_SLOTS { None } else { Some(double.next_power_of_two()) }
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: all of them are `repr(C)`, Copy, 'static, made of integers and byte arrays without
    // implicit padding, as asserted above; every bit pattern is a value.
    unsafe impl aya::Pod for super::FlowKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SpreadKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SpreadFlow {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SpreadUplink {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Flow {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::ConnectionKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Owner {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Address {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Token {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::InBandJob {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::ClaimKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Claim {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::RingConfig {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SavedHeader {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::EgressKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::EgressPort {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::HopKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Hop {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::TraceFilter {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::TraceEvent {}
    // SAFETY: as above.
    unsafe impl aya::Pod for crate::slot::Slot {}
    // SAFETY: as above.
    unsafe impl aya::Pod for crate::slot::RingState {}
    // SAFETY: as above; its size is asserted beside it.
    unsafe impl aya::Pod for crate::timing::Timing {}
    // SAFETY: as above.
    unsafe impl aya::Pod for crate::float::Table {}
}
