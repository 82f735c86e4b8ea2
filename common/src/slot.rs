//! The slot state machine: what happens to fragment `index` of rank `rank`. Pure; the caller moves
//! the bytes.
//!
//! ## Why a slot can be reused
//! A rank sends message m+W only after it received the sum of m (W = window). So when any rank
//! sends m+2W it holds the sum of m+W, hence every rank has sent m+W, hence every rank holds the
//! sum of m. With at least 2 W F slots (F fragments in a message) a fragment therefore never meets
//! a slot that is still needed.
//!
//! ## Why the box can check the credit
//! Let `low` be the lowest index that has not been released. A rank that sends in message m+W holds
//! the sums of all messages up to m, so all of their indices are below `low`, and its own index is
//! below `low + W F`. The box refuses what lies beyond: a host that ignores its credit cannot take
//! a slot that it has no right to.
//!
//! ## Which results a connection can still ask for
//! While some rank lacks the sum of a fragment k of message m, it has sent nothing of message m+W.
//! Therefore no index from `k + W F` on is complete, and `low` is at most `k + W F`. Fragments
//! farther behind are not replayed: their sender has lost an acknowledgement, or is another session
//! with the numbers of the first.
//!
//! ## Why a ring stops when ranks cut their messages differently
//! Fragments are added by their PSNs alone. A sender whose stream has slipped against its PSNs adds
//! the right lanes in the wrong places, with right ICRCs. rdma_rxe of Linux 6.1 does so after some
//! retransmissions (`req_retry` in rxe_req.c): the next message begins one PSN late, behind an
//! empty packet. The box notices when a fragment begins or ends a message and those of other ranks
//! do not. It cannot tell which other fragments have slipped, so the ring stops summing.
//!
//! ## A box with a parent
//! Its ring has one more member, after the last: U, the uplink ([`ring_flags::UPLINK`]). When all
//! others have contributed, their *partial* sum goes to U, as a contribution on the connection that
//! leaves the group after its last member. The *total* comes back from U on the connection that
//! enters the group at its first member: it replaces the partial sum, and is released like any sum.
//! Only the parent can replay to the next group, so retransmissions of the last member go up again.
//! The parent needs no special code: groups are its members. The argument above uses only ranks and
//! sums, and holds in a tree: a rank that sends m+2W holds the total of m+W, hence every rank under
//! every box has sent m+W, hence holds the total of m.
//!
//! All comparisons are serial numbers modulo 2^24.

use crate::counters::Counter;
use crate::limits::MAX_RANKS;
use crate::ring::{RingConfig, ring_flags};
use crate::{serial, wire};

/// State of one fragment's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Slot {
    /// Fragment index that the slot holds, if [`Slot::USED`].
    pub index: u32,
    /// Bits: [`Slot::USED`] and others.
    pub flags: u32,
    /// Ranks that have contributed, bit by bit.
    pub contributors: u64,
    /// Payload length in bytes.
    pub len: u16,
    /// The finished sum's part in a UDP checksum, in the order of its bytes, set on completion. 0
    /// where the last contribution had none.
    pub checksum: u16,
    /// ICRC state of the finished sum from state 0, set on completion.
    pub crc: u32,
}

impl Slot {
    /// The slot holds an index.
    pub const USED: u32 = 1;
    /// All members have contributed, and the parent, where there is one.
    pub const COMPLETE: u32 = 2;
    /// The result has been sent to all ranks.
    pub const RELEASED: u32 = 4;
    /// A contribution carried the congestion experienced mark.
    pub const CE: u32 = 8;
    /// A saved header has a VLAN tag. Set by those who save headers.
    pub const TAGGED: u32 = 16;
    /// The fragment begins a message.
    pub const FIRST: u32 = 32;
    /// The fragment ends a message.
    pub const LAST: u32 = 64;
    /// All members below have contributed, where there is a parent.
    pub const PARTIAL: u32 = 128;
    /// That sum has been sent up.
    pub const SENT: u32 = 256;
    /// In a relaxed ring: when this sum was released, all earlier ones had been.
    pub const IN_ORDER: u32 = 512;
    /// In a relaxed ring: the last contribution followed a gap in its rank's packets. The bits from
    /// [`Slot::GAP_RANK_SHIFT`] on hold that rank.
    pub const PAST_GAP: u32 = 1024;
    /// Lanes of a sum of floats are infinite or NaN. Set by those who add.
    pub const NOT_FINITE: u32 = 2048;
    /// Lowest bit of that rank.
    pub const GAP_RANK_SHIFT: u32 = 16;
    /// Where the fragment is in its message.
    const BOUNDS: u32 = Self::FIRST | Self::LAST;

    /// Bits of [`Bth::flags`](crate::wire::Bth::flags) that its sum carries to the receiver of a
    /// rank's packets.
    #[inline(always)]
    pub const fn receiver_marks(&self, rank: u32) -> u8 {
        let past_gap = self.is(Self::PAST_GAP) && self.flags >> Self::GAP_RANK_SHIFT == rank;
        (if self.is(Self::IN_ORDER) { wire::IN_ORDER } else { 0 })
            | if past_gap { wire::PAST_GAP } else { 0 }
    }

    /// Whether a flag is set.
    #[inline(always)]
    pub const fn is(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// State of a ring, written by its CPU alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct RingState {
    /// The lowest index that has not been released.
    pub low: u32,
    /// 0; or 1 + the rank that made the ring stop, because its message boundaries differ from the
    /// others'.
    pub stopped: u32,
    /// For each rank the index behind its last contiguous fragment; in a relaxed ring, behind its
    /// newest one.
    pub expected: [u32; MAX_RANKS],
    /// The lowest index whose partial sum has not been sent up, where there is a parent and results
    /// leave in order.
    pub up: u32,
}

impl Default for RingState {
    fn default() -> Self {
        Self { low: 0, stopped: 0, expected: [0; MAX_RANKS], up: 0 }
    }
}

const _: () = {
    assert!(size_of::<Slot>() == 24);
    assert!(size_of::<RingState>() == 12 + 4 * MAX_RANKS);
};

/// A data fragment as the state machine sees it.
#[derive(Clone, Copy, Debug)]
pub struct Fragment {
    /// Sending rank, below the ring's ranks.
    pub rank: u32,
    /// (PSN - base PSN) mod 2^24.
    pub index: u32,
    /// Payload length in bytes.
    pub len: u32,
    /// Congestion experienced.
    pub ce: bool,
    /// Bits of [`Slot::FIRST`] and [`Slot::LAST`].
    pub bounds: u32,
    /// Another box has marked it as a total sum ([`wire::TOTAL`]).
    pub total: bool,
}

/// Action on the payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload {
    /// Nothing.
    Leave,
    /// Becomes the slot's sum.
    Copy,
    /// Is added to the slot's sum.
    Add,
}

/// Action on the packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Output {
    /// Absorbed: drop it.
    Drop,
    /// Put the sum into it and send it to all members.
    Release,
    /// Put the sum into it and send it to the next member.
    Replay,
    /// Forward it with a PSN from far behind ([`STALE_PSN_BEHIND`]): its receiver has the result
    /// and acknowledges again.
    Stale,
    /// Forward it with a PSN from far ahead ([`GAP_PSN_AHEAD`]): its receiver NAKs with the PSN
    /// that it misses.
    Gap,
    /// Put the sum into it and send it to the parent.
    Up,
}

/// Distance by which a packet's PSN is moved ahead before it is forwarded to make the receiver NAK.
///
/// The receiver must not take the packet for data. With its own PSN it could, if it were delayed on
/// the bridge's way until the gap has been closed; so its PSN is moved into the middle of what IBTA
/// 9.7.5.1.1 calls the invalid region, where every receiver answers with a PSN sequence error that
/// names its own expected PSN.
pub const GAP_PSN_AHEAD: u32 = 1 << 22;

/// Distance by which a stale packet's PSN is moved back.
///
/// Its receiver should have the result, and then takes any PSN from behind for a duplicate: it
/// executes nothing and acknowledges all that it has (IBTA 9.7.5.1.2). But a receiver that was
/// started again, with its first run's queue pair and PSN, expects just this PSN, and would take
/// one rank's data for a sum. Moved to the middle of the duplicate region (IBTA 9.7.5.1.1), no PSN
/// is the one that a receiver expects.
///
/// It is not moved ahead, as at a gap: some receivers (rdma_rxe) NAK once and are silent until the
/// missing packet arrives, and here none may be missing. Were that NAK lost, the sender would never
/// learn what has arrived.
pub const STALE_PSN_BEHIND: u32 = 1 << 22;

/// Whether a PSN may have been moved by [`GAP_PSN_AHEAD`] or [`STALE_PSN_BEHIND`]; its
/// receiver does not take it for data. The flow's next PSN is about `next`, and its ring has this
/// many slots. Not every distant PSN was moved: an application that reconnects with the same queue
/// pair has any PSN. A sender whose acknowledgements are lost goes back by at most a few windows.
#[inline(always)]
pub const fn is_psn_shifted(psn: u32, next: u32, slots: u32) -> bool {
    const { assert!(GAP_PSN_AHEAD == STALE_PSN_BEHIND) };
    serial::diff(psn, next).unsigned_abs().abs_diff(GAP_PSN_AHEAD) < 4 * slots
}

/// The verdict on a fragment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// Action on the payload, before the output.
    pub payload: Payload,
    /// Save the packet's headers for its rank.
    pub save_header: bool,
    /// The slot has just received the last contribution to a sum that leaves the box: compute its
    /// CRC after the payload is added.
    pub completed: bool,
    /// Action on the packet.
    pub output: Output,
    pub counter: Counter,
    /// The fragment arrived past a gap of its rank.
    pub gap: bool,
}

impl Verdict {
    /// In one word.
    #[inline(always)]
    pub const fn packed(self) -> PackedVerdict {
        let flags = (self.save_header as u64) << 16
            | (self.completed as u64) << 17
            | (self.gap as u64) << 18;
        let leaves = matches!(self.output, Output::Release | Output::Replay | Output::Up) as u64;
        PackedVerdict(
            flags
                | leaves << 19
                | (self.output as u64) << 12
                | (self.payload as u64) << 8
                | self.counter as u64,
        )
    }

    const fn only(output: Output, counter: Counter) -> Self {
        Self {
            payload: Payload::Leave,
            save_header: false,
            completed: false,
            output,
            counter,
            gap: false,
        }
    }
}

/// A [`Verdict`] in one word: XDP programs have little stack, and a global function can return it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackedVerdict(pub u64);

impl PackedVerdict {
    /// Something that must be there is not.
    pub const INTERNAL: Self = Verdict::only(Output::Drop, Counter::InternalError).packed();

    #[inline(always)]
    pub const fn payload_is(self, payload: Payload) -> bool {
        self.0 >> 8 & 0xf == payload as u64
    }

    #[inline(always)]
    pub const fn output_is(self, output: Output) -> bool {
        self.0 >> 12 & 0xf == output as u64
    }

    #[inline(always)]
    pub const fn save_header(self) -> bool {
        self.0 >> 16 & 1 != 0
    }

    #[inline(always)]
    pub const fn completed(self) -> bool {
        self.0 >> 17 & 1 != 0
    }

    #[inline(always)]
    pub const fn gap(self) -> bool {
        self.0 >> 18 & 1 != 0
    }

    /// The packet is sent on with the sum in it.
    #[inline(always)]
    pub const fn leaves(self) -> bool {
        self.0 >> 19 & 1 != 0
    }

    /// Number of the counter.
    #[inline(always)]
    pub const fn counter(self) -> u32 {
        self.0 as u32 & 0xff
    }

    #[inline(always)]
    pub const fn counts(self, counter: Counter) -> bool {
        self.counter() == counter as u32
    }

    /// The sum is complete and held back for an earlier one.
    #[inline(always)]
    pub const fn is_held_back(self) -> bool {
        self.completed() && !self.output_is(Output::Release) && !self.output_is(Output::Up)
    }

    /// Calls `count` for each counter of a fragment with this verdict besides
    /// [`counter`](Self::counter); `ce` is its congestion mark. If its result cannot be sent, that
    /// is counted as well.
    #[inline(always)]
    pub fn secondary_counters(self, ce: bool, mut count: impl FnMut(Counter)) {
        if self.gap() {
            count(Counter::OutOfSequence);
        }
        if ce {
            count(Counter::EcnMarked);
        }
        if self.completed() && !self.counts(Counter::TotalsReceived) {
            count(Counter::Completed);
        }
        if self.is_held_back() {
            count(Counter::HeldBack);
        }
        if self.output_is(Output::Release) {
            count(Counter::Released);
        }
        if self.output_is(Output::Gap) {
            count(Counter::GapForwarded);
        }
        if self.output_is(Output::Up) && !self.counts(Counter::PartialsResent) {
            count(Counter::PartialsSent);
        }
    }

    /// All its counters, bit by bit.
    #[inline(always)]
    pub fn counters(self, ce: bool) -> u64 {
        let mut bits = 1 << self.counter();
        self.secondary_counters(ce, |counter| bits |= counter.bit());
        bits
    }
}

/// Most released slots that [`advance_low`] steps over in one call. Where more wait behind one that
/// was late, a packet or two may be refused until `low` has caught up; a larger credit in exchange
/// would let a host that ignores its own take slots whose results others still miss.
const LOW_STEPS: u32 = 1024;

/// Decides about a fragment and updates slot and ring. `slot` is slot `index mod slots`.
///
/// A relaxed ring must call [`advance_low`] first.
#[inline(always)]
pub fn on_fragment(
    ring: &RingConfig,
    state: &mut RingState,
    slot: &mut Slot,
    f: Fragment,
) -> Verdict {
    match ring.flags & ring_flags::UPLINK {
        0 => decide::<false>(ring, state, slot, f),
        _ => decide::<true>(ring, state, slot, f),
    }
}

/// [`on_fragment`] of a ring with a parent, or of one without.
#[inline(always)]
pub fn decide<const HAS_PARENT: bool>(
    ring: &RingConfig,
    state: &mut RingState,
    slot: &mut Slot,
    f: Fragment,
) -> Verdict {
    let relaxed = ring.flags & ring_flags::RELAXED != 0;
    if state.stopped != 0 {
        return Verdict::only(Output::Drop, Counter::RingStopped);
    }
    let ahead = serial::diff(f.index, state.low);
    if ahead >= ring.credit as i32 {
        return Verdict::only(Output::Drop, Counter::CreditViolation);
    }

    let used = slot.is(Slot::USED);
    let distance = serial::diff(f.index, slot.index);
    if used && distance < 0 {
        return Verdict::only(Output::Stale, Counter::Stale);
    }

    // Members before the way up, if there is one.
    let members = ring.members.wrapping_sub(HAS_PARENT as u32);
    let is_total = HAS_PARENT && f.rank == members;
    if is_total && !(f.total && used && distance == 0 && slot.is(Slot::SENT)) {
        // Nobody can have a total to which nothing was sent from here; and a parent that does not
        // add lets partial sums of others through.
        return Verdict::only(Output::Drop, Counter::UnexpectedTotal);
    }
    let is_last = HAS_PARENT && f.rank + 1 == members;

    // Gaps: what of this rank's is missing, as far as the box has seen.
    let expected = &mut state.expected[f.rank as usize % MAX_RANKS];
    // Released indices have come from every rank. A sender that goes back skips acknowledged ones,
    // so its own packets alone would leave a permanent gap.
    if serial::diff(*expected, state.low) < 0 {
        *expected = state.low;
    }
    let gap = serial::diff(f.index, *expected);
    let past_gap = gap > 0;
    if gap == 0 || relaxed && past_gap {
        *expected = serial::add(f.index, 1);
    }
    // In-order rings NAK at gaps of 1, 2, 4, ...: one lost NAK does not cost a timeout, and a long
    // gap costs few packets. Relaxed rings NAK once: if that is lost, later sums show the receivers
    // the gap.
    let absorbed =
        if past_gap && (relaxed || gap & (gap - 1) == 0) { Output::Gap } else { Output::Drop };

    let bit = 1u64 << (f.rank & 63);
    if !used || distance > 0 {
        if f.total {
            // Its sender's box has released it, and this one has forgotten what it had added.
            return Verdict::only(Output::Drop, Counter::UnexpectedTotal);
        }
        if used && !slot.is(Slot::RELEASED) || ahead < 0 {
            // Older and still needed; or an index below `low` whose slot does not hold it, which
            // cannot have been released by this ring.
            return Verdict::only(Output::Drop, Counter::CreditViolation);
        }
        *slot = Slot {
            index: f.index,
            flags: Slot::USED | f.bounds | if f.ce { Slot::CE } else { 0 },
            contributors: bit,
            len: f.len as u16,
            checksum: 0,
            crc: 0,
        };
        // The only rank below a box, whose partial sum is what it sends.
        let alone = HAS_PARENT && members == 1;
        if alone {
            slot.flags |= Slot::PARTIAL;
        }
        return Verdict {
            payload: Payload::Copy,
            save_header: true,
            completed: alone,
            output: if alone && goes_up(state, slot, relaxed) { Output::Up } else { absorbed },
            counter: Counter::Contributions,
            gap: past_gap,
        };
    }

    // The slot holds this index.
    if f.bounds != slot.flags & Slot::BOUNDS {
        state.stopped = f.rank + 1;
        return Verdict::only(Output::Drop, Counter::LayoutMismatch);
    }
    if f.len != slot.len as u32 {
        return Verdict::only(Output::Drop, Counter::LengthMismatch);
    }
    if slot.is(Slot::RELEASED) {
        if -ahead > ring.credit as i32 {
            return Verdict::only(Output::Stale, Counter::Stale);
        }
        let (output, counter) = if is_last {
            (Output::Up, Counter::PartialsResent)
        } else {
            (Output::Replay, Counter::Replays)
        };
        return Verdict { save_header: true, ..Verdict::only(output, counter) };
    }
    let new = slot.contributors & bit == 0;
    if new && f.total && !is_total {
        return Verdict::only(Output::Drop, Counter::UnexpectedTotal);
    }
    let mut completed = false;
    if new {
        slot.contributors |= bit;
        if f.ce {
            slot.flags |= Slot::CE;
        }
        let all = u64::MAX >> (64 - members.clamp(1, 64));
        completed = is_total || slot.contributors == all;
        if completed {
            slot.flags |= if HAS_PARENT && !is_total { Slot::PARTIAL } else { Slot::COMPLETE };
        }
    }
    let mut counter = if new { Counter::Contributions } else { Counter::DuplicateRequest };
    let mut payload = if new { Payload::Add } else { Payload::Leave };
    if is_total && new {
        (payload, counter) = (Payload::Copy, Counter::TotalsReceived);
    }
    if slot.is(Slot::COMPLETE) && (relaxed || ahead == 0) {
        slot.flags |= Slot::RELEASED;
        if relaxed && past_gap {
            slot.flags |= Slot::PAST_GAP | f.rank << Slot::GAP_RANK_SHIFT;
        }
        if ahead == 0 {
            state.low = serial::add(f.index, 1);
            slot.flags |= if relaxed { Slot::IN_ORDER } else { 0 };
        }
        return Verdict {
            payload,
            save_header: true,
            completed,
            output: Output::Release,
            counter,
            gap: past_gap,
        };
    }
    let mut output = absorbed;
    if HAS_PARENT && slot.is(Slot::SENT) {
        if is_last {
            (output, counter) = (Output::Up, Counter::PartialsResent);
        }
    } else if HAS_PARENT && slot.is(Slot::PARTIAL) && goes_up(state, slot, relaxed) {
        output = Output::Up;
    }
    Verdict { payload, save_header: true, completed, output, counter, gap: past_gap }
}

/// Whether it is a finished partial sum's turn to be sent up, and notes that it is.
#[inline(always)]
fn goes_up(state: &mut RingState, slot: &mut Slot, relaxed: bool) -> bool {
    if !relaxed && slot.index != state.up {
        return false;
    }
    slot.flags |= Slot::SENT;
    state.up = serial::add(slot.index, 1);
    true
}

/// Whether an index is so far behind that [`on_fragment`] would find it [`Output::Stale`] in any
/// state with this `low`, or a later one: the index that its slot holds by now, one lap ahead at
/// least, has been released. So another CPU may ask, with a `low` that is not the newest.
///
/// Indices begin with 0, and the comparison as plain numbers leaves out what lies before that: a
/// flow that was registered with a wrong PSN sends such, and its receiver, which expects them,
/// would take them for sums. For `on_fragment` they are beyond the credit. It leaves out some that
/// are laps behind, too, when indices have wrapped a while ago.
#[inline(always)]
pub const fn is_laps_behind(ring: &RingConfig, low: u32, index: u32) -> bool {
    index < low && serial::diff(low, index) > ring.slots as i32
}

/// Moves a relaxed ring's `low` past slots that have been released, a bounded number at a time.
/// `slot(i)` reads slot `i`.
#[inline(always)]
pub fn advance_low(ring: &RingConfig, state: &mut RingState, slot: impl Fn(u32) -> Option<Slot>) {
    let mut i = 0;
    while i < LOW_STEPS {
        let Some(s) = slot(state.low & (ring.slots - 1)) else { return };
        if !s.is(Slot::RELEASED) || s.index != state.low {
            return;
        }
        state.low = serial::add(state.low, 1);
        i += 1;
    }
}
