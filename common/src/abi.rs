//! Keys and values of the BPF maps: the border between the XDP programs and user space.
//!
//! Layouts are `repr(C)` without implicit padding, and asserted below. Whoever changes one raises
//! [`VERSION`]: a daemon takes over pinned maps only of its own version.

use crate::wire::in_band::JOB_HEADER_LEN;
use crate::wire::{ICRC_LEN, InBandToken, MAX_HEADERS};

/// Version of everything in this module, of [`crate::counters`] and of the map names.
pub const VERSION: u32 = 17;

pub use crate::limits::*;
pub use crate::ring::{Fragments, Messages, RingConfig, RingNumber, ring_flags};

/// Names of the maps in the BPF object.
pub mod maps {
    /// Hash, [`super::FlowKey`] to [`super::Flow`], for those that have ended, too.
    pub const FLOWS: &str = "FLOWS";
    /// Hash, [`super::Address`] to [`super::Owner`].
    pub const OWNERS: &str = "OWNERS";
    /// Array, ring to [`super::RingConfig`].
    pub const RINGS: &str = "RINGS";
    /// Array, ring to [`crate::slot::RingState`].
    pub const STATES: &str = "STATES";
    /// Array of maps, ring to array of [`crate::slot::Slot`].
    pub const SLOTS: &str = "SLOTS";
    /// Arrays of maps by path MTU, in the order of [`super::MTUS`]: ring to array of sums, each as
    /// long as the path MTU, in little-endian words as on the wire.
    pub const SUMS: [&str; 4] = ["SUMS_256", "SUMS_512", "SUMS_1024", "SUMS_2048"];
    /// Array of maps, ring to array of [`super::SavedHeader`], `slot * ranks + rank`.
    pub const HEADERS: &str = "HEADERS";
    /// Array of maps, ring to device map with the port of each rank, in rank order.
    pub const PORTS: &str = "PORTS";
    /// Device map, ring to the port towards its parent box, where it has one.
    pub const UPLINKS: &str = "UPLINKS";
    /// Hash, [`super::EgressKey`] to [`super::EgressPort`].
    pub const EGRESS: &str = "EGRESS";
    /// Hash, [`super::HopKey`] to [`super::Hop`]: members to which the box routes.
    pub const HOPS: &str = "HOPS";
    /// Per-CPU array of one [`crate::icrc::Lagged`], for the CRC of a long payload.
    pub const LAGGED: &str = "LAGGED";
    /// Array of one u32, bits of [`super::watch`]: what is looked at beyond the work itself.
    pub const WATCH: &str = "WATCH";
    /// Hash that forgets the oldest, [`super::StrangerKey`] to its SEND and WRITE packets as u64.
    pub const STRANGERS: &str = "STRANGERS";
    /// Hash, [`super::Token`] to [`super::InBandJob`].
    pub const TOKENS: &str = "TOKENS";
    /// Hash, [`super::ClaimKey`] to [`super::Claim`]; user space takes out what it has read.
    pub const CLAIMS: &str = "CLAIMS";
    /// Hash that forgets the oldest, [`super::StrangerKey`] to the number of a job's first ring:
    /// connections that have shown up in band. While they are not registered, none of their data
    /// passes.
    pub const WAITING: &str = "WAITING";
    /// CPU map, one entry for each CPU that serves rings.
    pub const CPUS: &str = "CPUS";
    /// Per-CPU array, `ring * COUNTERS + counter` to u64.
    pub const COUNTERS: &str = "COUNTERS";
    /// Array, ring to [`crate::timing::Timing`].
    pub const TIMINGS: &str = "TIMINGS";
    /// Array of one [`super::TraceFilter`]: which packets are traced, while [`super::watch::TRACE`]
    /// is set.
    pub const TRACED: &str = "TRACED";
    /// Ring buffer of traced packets: each a [`super::TraceEvent`], and behind it the bytes of the
    /// frame that it says.
    pub const EVENTS: &str = "EVENTS";
    /// Per-CPU array of one u64: traced packets that [`EVENTS`] had no room for.
    pub const LOST: &str = "LOST";
    /// Per-CPU array of one [`super::TraceRecord`], where an event is put together.
    pub const SCRATCH: &str = "SCRATCH";
    /// Program array of one: [`super::programs::AGGREGATE_INLINE`], or nothing.
    pub const PROGRAMS: &str = "PROGRAMS";
    /// All of them.
    pub const ALL: [&str; 28] = [
        OWNERS, FLOWS, RINGS, STATES, SLOTS, SUMS[0], SUMS[1], SUMS[2], SUMS[3], HEADERS, PORTS,
        UPLINKS, EGRESS, HOPS, WATCH, STRANGERS, TOKENS, CLAIMS, WAITING, CPUS, COUNTERS, TIMINGS,
        TRACED, EVENTS, LOST, SCRATCH, LAGGED, PROGRAMS,
    ];

    /// Of an object of its own: hash, [`super::SpreadKey`] to [`super::SpreadFlow`].
    pub const SPREAD: &str = "SPREAD";
    /// In the same object: array of [`super::SpreadUplink`]. Those that are there come first.
    pub const SPREAD_UPLINKS: &str = "SPREAD_UPLINKS";
}

/// Names of the programs in the BPF object.
pub mod programs {
    /// Attached to the ports.
    pub const INGRESS: &str = "ingress";
    /// In every entry of the CPU map.
    pub const AGGREGATE: &str = "aggregate";
    /// What `ingress` goes on with where a packet comes in on its ring's CPU.
    pub const AGGREGATE_INLINE: &str = "aggregate_inline";
    /// In every entry of the device maps.
    pub const EGRESS: &str = "egress";
    /// Attached to the ports behind XDP.
    pub const GUARD: &str = "guard";
    /// In an object of its own, attached where the hosts' packets come to be routed.
    pub const SPREAD: &str = "spread";
}

/// What identifies a flow: where its packets go.
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
    /// The port that its packets come in on.
    pub ifindex: u32,
    /// The sender's address; IPv4 in mapped form.
    pub src_ip: [u8; 16],
    /// The sender's MAC address (or its router's); all zero until the first verified packet has
    /// shown it.
    pub src_mac: [u8; 6],
    /// 1 where user space has given `src_mac`, 0 where it is learned.
    pub mac_given: u8,
    /// What its packets must bear where they come by another box ([`crate::wire::bears`]), which
    /// may have moved a PSN ([`crate::slot::is_moved`]). 0 elsewhere.
    pub bears: u8,
    /// Data packets that came for it, whatever became of them; this and what follows is written by
    /// the ring's CPU and read by whoever asks why a job stands still.
    pub packets: u32,
    /// Those of them that were refused before the slot machine saw them.
    pub refused: u32,
    /// PSN of the last one.
    pub last_psn: u32,
    /// What became of the last one: the number of a [`crate::counters::Counter`].
    pub last_outcome: u32,
    /// PSN behind the last contribution that the ring's CPU has taken, or [`Flow::NONE_TAKEN`]. The
    /// packet that has it may be taken where it comes in, if that is the ring's CPU: none of its
    /// flow waits in the CPU map's queue, unless it is sent again.
    pub next_psn: u32,
    /// PSN of the last packet that had another length than its slot.
    pub mismatch_psn: u32,
    /// Its payload length in bytes; 0 where there was none.
    pub mismatch_len: u32,
    /// The port that the receiver is behind, where another box is in between: its address belongs
    /// to that port. 0 elsewhere.
    pub dst_ifindex: u32,
}

impl Flow {
    /// In place of a ring: the flow's job has ended. What its sender still sends is dropped,
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
        bears: 0,
        packets: 0,
        refused: 0,
        last_psn: 0,
        last_outcome: 0,
        next_psn: Self::NONE_TAKEN,
        mismatch_psn: 0,
        mismatch_len: 0,
        dst_ifindex: 0,
    };
    /// No PSN, for [`Flow::next_psn`] while the ring's CPU has taken nothing.
    pub const NONE_TAKEN: u32 = u32::MAX;
}

/// A connection that the box does not know, as [`maps::STRANGERS`] notes it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct StrangerKey {
    /// Source address; IPv4 in mapped form.
    pub src_ip: [u8; 16],
    /// Destination address; IPv4 in mapped form.
    pub dst_ip: [u8; 16],
    /// Destination queue pair number.
    pub qpn: u32,
    /// The port that its packets come in on.
    pub ifindex: u32,
}

/// An address that a rank has to itself, in words: a BPF program builds it on its stack, which
/// wants alignment.
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

    /// A MAC address. As an IP address it were a multicast one, which nobody sends from.
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

/// Where an address belongs: nothing that comes in elsewhere may bear it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Owner {
    /// The port's interface.
    pub ifindex: u32,
    /// How many flows have it as their sender's; 0 where it belongs there without any.
    pub flows: u32,
}

impl Owner {
    /// In place of a port: the box itself, whose addresses nothing that comes in may carry.
    pub const THE_BOX: u32 = u32::MAX;
}

/// What is looked at beyond the work itself.
pub mod watch {
    /// Data is noted in [`super::maps::STRANGERS`]: somebody looks for it.
    pub const STRANGERS: u32 = 1;
    /// First packets of messages are searched for the header of a job that is set up in band: there
    /// are such jobs.
    pub const FIRST_PACKETS: u32 = 2;
    /// Packets are noted in [`super::maps::EVENTS`], with what became of them: somebody traces.
    pub const TRACE: u32 = 4;
    /// There are addresses in [`super::maps::OWNERS`]: what cannot be seen through may carry one,
    /// and does not pass.
    pub const RANKS: u32 = 8;
}

/// Which packets are traced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct TraceFilter {
    /// Rings, bit by bit; bit 0 is for packets of no ring.
    pub rings: [u64; (MAX_RINGS / 64) as usize],
    /// Counters, bit by bit: a packet that was counted by one of them.
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

/// What a program made of a packet, and how its slot was afterwards.
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
    /// The rank that sent it or, at egress, gets it; [`TraceEvent::NONE`] where it is of no flow.
    /// What follows up to `slot_flags` means something only where there is a rank.
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
    /// The port that it came in on or, at egress, leaves by.
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

/// The token of a job that is set up in band, in words. It cannot be printed.
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
    /// Its first ring, which stands for the job.
    pub job: RingNumber,
    pub ranks: u32,
    pub rings: u32,
    /// Bits of [`ring_flags`]: whether the ICRC is verified.
    pub flags: u32,
}

/// Whose claim it is. There is one place for each rank and port, so that no flood of first packets
/// fills the map.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct ClaimKey {
    /// The job's first ring.
    pub job: RingNumber,
    /// Ring of the job that the packet names; the job's number of rings where it names more.
    pub ring: u32,
    /// Rank that the packet names; the job's number of ranks where it names more.
    pub rank: u32,
    /// The port that it came in on.
    pub ifindex: u32,
}

/// A first packet with the token of a job that is set up in band, of a connection that is not
/// registered. It cannot be printed, because the token is in it.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Claim {
    /// A [`crate::wire::JobHeader`], as it is in the packet.
    pub header: [u64; JOB_HEADER_LEN / 8],
    /// Where it comes from and goes to.
    pub connection: StrangerKey,
    pub psn: u32,
    /// Length of its payload in bytes.
    pub len: u32,
    /// The sender's MAC address (or its router's).
    pub src_mac: [u8; 6],
    /// 1 where the packet is its message's last, too.
    pub only: u8,
    /// Zero.
    pub reserved: u8,
}

/// Room for the longest headers.
pub type HeaderWords = [u64; MAX_HEADERS.div_ceil(8)];

/// The headers of one rank's packet, from the Ethernet destination to the last byte before the
/// payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct SavedHeader {
    /// The bytes, in words so that they can be copied so; anything behind the length.
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

/// Which ring's results on which port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct EgressKey {
    /// The ring.
    pub ring: RingNumber,
    /// The port's interface.
    pub ifindex: u32,
}

/// The ranks behind a port. A broadcast sends as many clones to the port, and each takes the next
/// rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct EgressPort {
    /// How many ranks of the ring are behind the port.
    pub count: u32,
    /// Whose turn it is, below `count`.
    pub cursor: u32,
    pub ranks: [u8; MAX_RANKS],
}

/// A member of a ring, which gets its results.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct HopKey {
    pub ring: RingNumber,
    /// Its place in the ring; the last one's is the way up, where the box has a parent.
    pub member: u32,
}

/// The next hop to a member: what a router writes into packets to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct Hop {
    /// The box's own MAC address where packets for this member come in. Those to another are
    /// bridged, and stay as they are.
    pub own: [u8; 6],
    /// The MAC address of the next hop; all zero where it is not known, and packets are dropped.
    pub dst: [u8; 6],
    /// The box's own MAC address towards it.
    pub src: [u8; 6],
}

/// What a released packet carries in place of its Ethernet addresses on the way to egress, which
/// writes the real ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct ReleaseTag {
    /// Ring number.
    pub ring: u32,
    /// Fragment index. Between the verdict and egress the slot may have moved on to a later one,
    /// because a CPU handles a batch of packets before what it redirected leaves.
    pub index: u32,
    /// The rank to send to, or [`ReleaseTag::ALL`]; on the way up, perhaps with
    /// [`ReleaseTag::TOTAL`].
    pub rank: u16,
    /// Offset of the payload in this packet.
    pub payload: u16,
}

impl ReleaseTag {
    /// In `rank`: the packet is one of a broadcast's clones.
    pub const ALL: u16 = u16::MAX;
    /// In `rank`: the packet holds the total, and no partial sum.
    pub const TOTAL: u16 = 1 << 8;
}

/// What tells flows apart that are spread over uplinks: the sender chooses the UDP source port.
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

/// What the first flow of all counts as. One that has sent as much counts, however small its first
/// packet was.
pub const SPREAD_FIRST: u64 = 1 << 16;

/// A flow that goes by one uplink.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct SpreadFlow {
    /// Place of its uplink in [`maps::SPREAD_UPLINKS`].
    pub uplink: u32,
    /// 1 + the place of the one that somebody has said; 0 where it was chosen at its first packet.
    /// They differ while that one cannot be used.
    pub given: u32,
    /// Bytes of its frames.
    pub bytes: u64,
    /// It counts as so many bytes until it has sent more.
    pub advance: u64,
}

/// An uplink.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct SpreadUplink {
    /// Its interface; 0 where there is none.
    pub ifindex: u32,
    /// 1 while it has a carrier.
    pub up: u32,
    /// Bytes of its flows. Whoever adds a flow adds its advance; user space adds up what flows have
    /// sent, again and again.
    pub load: u64,
    /// Its flows that count.
    pub flows: u64,
}

const _: () = {
    assert!(size_of::<SpreadKey>() == 36);
    assert!(size_of::<SpreadFlow>() == 24);
    assert!(size_of::<SpreadUplink>() == 24);
    assert!(size_of::<FlowKey>() == 20);
    assert!(size_of::<Flow>() == 72);
    assert!(size_of::<StrangerKey>() == 40);
    assert!(size_of::<Address>() == 16);
    assert!(size_of::<Owner>() == 8);
    assert!(size_of::<Token>() == 16);
    assert!(size_of::<InBandJob>() == 16);
    assert!(size_of::<ClaimKey>() == 16);
    assert!(size_of::<Claim>() == 104);
    assert!(size_of::<RingConfig>() == 24);
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
    // A counter is a bit of a word.
    assert!(crate::counters::COUNTERS <= 64);
};

/// Memory of a ring on the box in bytes: slots x (payload + ranks x saved headers), and the slots'
/// own state.
pub const fn ring_memory(slots: u32, mtu: u32, ranks: u32) -> u64 {
    slots as u64
        * (mtu as u64
            + ranks as u64 * size_of::<SavedHeader>() as u64
            + size_of::<crate::slot::Slot>() as u64)
}

/// Slots that a ring needs for a credit: twice as many, rounded up to a power of two. `None` where
/// that is more than [`MAX_SLOTS`].
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
    unsafe impl aya::Pod for super::StrangerKey {}
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
}
