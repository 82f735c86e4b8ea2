//! The state of active rings over time, and the ranks that a ring waits for. Pure; the daemon reads
//! the maps periodically.
//!
//! The packet path has no clock. Everything that depends on time is determined here: how long a
//! ring's lowest unreleased index has not moved, and when each rank's last packet arrived. The
//! precision is that of the daemon's reads.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use netsum_common::abi::{RingConfig, RingNumber, ring_flags};
use netsum_common::serial::{self, Psn};
use netsum_common::slot::{RingState, Slot};

use crate::Rank;
use crate::plane::{FlowStats, RingSpec};

/// The usual [`RingTimeouts::hold`].
pub const HELD_BACK_TIMEOUT: Duration = Duration::from_millis(200);

/// Timeouts of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingTimeouts {
    /// How long a complete sum is held back without a packet to carry it, before the box sends one.
    pub hold: Duration,
    /// How long a sum may lack contributions before it is reported.
    pub stall: Duration,
}

/// A reading of a ring.
#[derive(Clone, Debug)]
pub struct RingView {
    /// The ring's state.
    pub state: RingState,
    /// The slot of its lowest unreleased index.
    pub slot: Slot,
    /// The record of each rank's flow, in rank order.
    pub ranks: Vec<FlowStats>,
    /// First PSN of each rank.
    pub base_psns: Vec<Psn>,
}

impl RingView {
    /// The slot of the lowest unreleased index, if it has a contribution.
    pub fn front(&self) -> Option<&Slot> {
        let slot = &self.slot;
        (slot.is(Slot::USED) && slot.index == self.state.low && !slot.is(Slot::RELEASED))
            .then_some(slot)
    }

    /// Index of a rank's last packet; `None` before the first, or if it is far from the ring's.
    pub fn last_index(&self, rank: usize, credit: u32) -> Option<u32> {
        let seen = &self.ranks[rank];
        seen.last_verdict?;
        let index = serial::sub(seen.last_psn, self.base_psns[rank].get());
        let distance = serial::diff(index, self.state.low);
        (distance.unsigned_abs() <= 2 * credit).then_some(index)
    }

    /// Whether some rank has sent fragments that have not been released.
    pub fn is_pending(&self, credit: u32) -> bool {
        let sent_beyond = |rank| {
            self.last_index(rank, credit).is_some_and(|i| serial::diff(i, self.state.low) >= 0)
        };
        self.front().is_some() || (0..self.ranks.len()).any(sent_beyond)
    }

    /// Fragments that a rank has sent beyond the released ones.
    pub fn credit_used(&self, rank: usize, credit: u32) -> u32 {
        self.last_index(rank, credit)
            .map_or(0, |i| (serial::diff(i, self.state.low) + 1).max(0) as u32)
    }

    /// Slots with an unreleased sum. Fragments beyond a gap of their rank do not count.
    pub fn slots_used(&self) -> u32 {
        let ahead = |&e: &u32| serial::diff(e, self.state.low).max(0) as u32;
        self.state.expected[..self.ranks.len()].iter().map(ahead).max().unwrap_or(0)
    }

    /// Whether the lowest unreleased index has its sum, or its partial sum, but no packet to carry
    /// it.
    pub fn is_held_back(&self) -> bool {
        self.front()
            .is_some_and(|s| s.is(Slot::COMPLETE) || s.is(Slot::PARTIAL) && !s.is(Slot::SENT))
    }

    /// Members that have not contributed to the lowest unreleased index. The last member, if it is
    /// the uplink, counts only after the partial sum has been sent.
    pub fn missing(&self, ring: &RingConfig) -> Vec<Rank> {
        let (contributors, sent) =
            self.front().map_or((0, false), |s| (s.contributors, s.is(Slot::SENT)));
        let not_yet = ring.flags & ring_flags::UPLINK != 0 && !sent;
        let members = self.ranks.len() as u32 - u32::from(not_yet);
        Rank::all(members).filter(|r| contributors & 1 << r.0 == 0).collect()
    }
}

/// An event of a ring that requires an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RingEvent {
    /// A complete sum waits for a packet to carry it.
    Held { slot: u32 },
    /// The ring has been stalled for too long. Reported once.
    Stalled {
        /// Its lowest unreleased index.
        index: u32,
        /// How long it has been stalled.
        stalled_for: Duration,
        /// The ranks that have not contributed.
        missing: Vec<Rank>,
    },
    /// A ring that was reported continues.
    Resumed {
        /// How long it was stalled.
        after: Duration,
    },
}

/// A ring's history.
#[derive(Clone, Debug)]
struct Track {
    low: u32,
    /// When `low` was first seen with something pending.
    pending: Option<Instant>,
    reported: bool,
    /// When the box last sent for a held slot.
    sent: Option<Instant>,
    /// Packets of each rank, and when their number last changed.
    ranks: Vec<(u32, Option<Instant>)>,
}

/// The histories of all active rings, by ring number.
#[derive(Debug)]
pub struct Watch {
    timeouts: RingTimeouts,
    rings: BTreeMap<RingNumber, Track>,
}

impl Watch {
    /// A watch without any readings.
    pub fn new(timeouts: RingTimeouts) -> Self {
        Self { timeouts, rings: BTreeMap::new() }
    }

    /// Changes the timeouts.
    pub fn set_timeouts(&mut self, timeouts: RingTimeouts) {
        self.timeouts = timeouts;
    }

    /// Forgets all rings but the active ones.
    pub fn retain(&mut self, active: impl Fn(RingNumber) -> bool) {
        self.rings.retain(|&ring, _| active(ring));
    }

    /// Records a reading of a ring; returns events.
    pub fn observe(&mut self, ring: &RingSpec, view: &RingView, now: Instant) -> Vec<RingEvent> {
        let track = self.rings.entry(ring.id).or_insert_with(|| Track {
            low: view.state.low,
            pending: None,
            reported: false,
            sent: None,
            // The arrival times of packets before the first reading are unknown.
            ranks: view.ranks.iter().map(|r| (r.packets, None)).collect(),
        });
        for (known, seen) in track.ranks.iter_mut().zip(&view.ranks) {
            if known.0 != seen.packets {
                *known = (seen.packets, Some(now));
            }
        }
        let mut events = Vec::new();
        let pending = view.is_pending(ring.config.credit);
        if track.low != view.state.low || !pending {
            if track.reported {
                let after = track.pending.map_or(Duration::ZERO, |t| now - t);
                events.push(RingEvent::Resumed { after });
            }
            (track.low, track.reported, track.sent) = (view.state.low, false, None);
            track.pending = pending.then_some(now);
            return events;
        }
        let waited = now - *track.pending.get_or_insert(now);
        let held = view.is_held_back();
        if held
            && waited >= self.timeouts.hold
            && track.sent.is_none_or(|t| now - t >= self.timeouts.hold)
        {
            track.sent = Some(now);
            events.push(RingEvent::Held { slot: view.state.low & (ring.config.slots - 1) });
        }
        if !track.reported && waited >= self.timeouts.stall {
            track.reported = true;
            events.push(RingEvent::Stalled {
                index: view.state.low,
                stalled_for: waited,
                missing: view.missing(&ring.config),
            });
        }
        events
    }

    /// Since when a ring has been stalled with something pending.
    pub fn stalled_since(&self, ring: RingNumber) -> Option<Instant> {
        self.rings.get(&ring)?.pending
    }

    /// When a rank's last packet was seen; `None` before the first, or if it arrived before the
    /// first reading.
    pub fn last_packet(&self, ring: RingNumber, rank: Rank) -> Option<Instant> {
        self.rings.get(&ring)?.ranks.get(rank.0 as usize)?.1
    }
}

#[cfg(test)]
mod tests {
    use netsum_common::abi::RingConfig;
    use netsum_common::counters::Counter;

    use super::*;

    const TIMEOUTS: RingTimeouts =
        RingTimeouts { hold: Duration::from_millis(100), stall: Duration::from_secs(5) };

    const RING: RingNumber = RingNumber(3);

    fn ring() -> RingSpec {
        RingSpec {
            id: RING,
            cpu: 0,
            config: RingConfig {
                members: 2,
                slots: 16,
                credit: 8,
                mtu: 1024,
                ..RingConfig::default()
            },
        }
    }

    /// Ranks 0 and 1 have sent up to `sent`; the slot at `low` has `contributors`.
    fn view(low: u32, contributors: u64, sent: [Option<u32>; 2]) -> RingView {
        let complete = if contributors == 3 { Slot::COMPLETE } else { 0 };
        let base_psns = vec![Psn::new(0xff_fffe), Psn::new(100)];
        let seen = |rank: usize| FlowStats {
            packets: sent[rank].map_or(0, |i| i + 1),
            last_psn: sent[rank].map_or(0, |i| base_psns[rank].plus(i).get()),
            last_verdict: sent[rank].map(|_| Counter::Contributions),
            ..FlowStats::default()
        };
        let flags = if contributors == 0 { 0 } else { Slot::USED | complete };
        RingView {
            state: RingState { low, ..RingState::default() },
            slot: Slot { index: low, flags, contributors, len: 1024, checksum: 0, crc: 0 },
            ranks: vec![seen(0), seen(1)],
            base_psns,
        }
    }

    #[test]
    fn a_ring_without_anything_to_do_is_never_reported() {
        let (mut watch, start) = (Watch::new(TIMEOUTS), Instant::now());
        for s in 0..100 {
            let v = view(4, 0, [Some(3), Some(3)]);
            assert_eq!(watch.observe(&ring(), &v, start + Duration::from_secs(s)), []);
        }
        assert_eq!(watch.stalled_since(RING), None);
    }

    #[test]
    fn a_ring_that_stalls_is_reported_once_with_the_ranks_it_waits_for() {
        let (mut watch, start) = (Watch::new(TIMEOUTS), Instant::now());
        let v = view(4, 1, [Some(4), Some(3)]);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(watch.observe(&ring(), &v, at(0)), []);
        assert_eq!(watch.observe(&ring(), &v, at(4999)), []);
        let stalled_for = Duration::from_secs(5);
        assert_eq!(
            watch.observe(&ring(), &v, at(5000)),
            [RingEvent::Stalled { index: 4, stalled_for, missing: vec![Rank(1)] }]
        );
        assert_eq!(watch.observe(&ring(), &v, at(9000)), []);
        let v = view(5, 0, [Some(4), Some(4)]);
        assert_eq!(
            watch.observe(&ring(), &v, at(9100)),
            [RingEvent::Resumed { after: Duration::from_millis(9100) }]
        );
        assert_eq!(watch.observe(&ring(), &v, at(20000)), []);
    }

    #[test]
    fn the_clock_starts_again_with_every_index() {
        let (mut watch, start) = (Watch::new(TIMEOUTS), Instant::now());
        for i in 0..100 {
            let v = view(i, 1, [Some(i), i.checked_sub(1)]);
            assert_eq!(
                watch.observe(&ring(), &v, start + Duration::from_secs(u64::from(i) * 4)),
                []
            );
        }
    }

    #[test]
    fn contributions_behind_a_gap_of_all_ranks_are_pending_too() {
        let (mut watch, start) = (Watch::new(TIMEOUTS), Instant::now());
        // Both ranks' fragments of index 4 were lost; those of 5 arrived.
        let v = view(4, 0, [Some(5), Some(5)]);
        assert_eq!(watch.observe(&ring(), &v, start), []);
        let stalled_for = Duration::from_secs(6);
        assert_eq!(
            watch.observe(&ring(), &v, start + stalled_for),
            [RingEvent::Stalled { index: 4, stalled_for, missing: vec![Rank(0), Rank(1)] }]
        );
    }

    #[test]
    fn a_held_back_sum_gets_a_packet_repeatedly() {
        let (mut watch, start) = (Watch::new(TIMEOUTS), Instant::now());
        let v = view(20, 3, [Some(20), Some(20)]);
        let mut sent = Vec::new();
        for ms in (0..400).step_by(50) {
            if watch.observe(&ring(), &v, start + Duration::from_millis(ms))
                == [RingEvent::Held { slot: 4 }]
            {
                sent.push(ms);
            }
        }
        assert_eq!(sent, [100, 200, 300]);
    }

    #[test]
    fn arrival_times_are_known_after_the_first_reading() {
        let (mut watch, start) = (Watch::new(TIMEOUTS), Instant::now());
        watch.observe(&ring(), &view(4, 0, [Some(3), None]), start);
        assert_eq!(
            (watch.last_packet(RING, Rank(0)), watch.last_packet(RING, Rank(1))),
            (None, None)
        );
        let later = start + Duration::from_secs(1);
        watch.observe(&ring(), &view(4, 2, [Some(3), Some(4)]), later);
        assert_eq!(
            (watch.last_packet(RING, Rank(0)), watch.last_packet(RING, Rank(1))),
            (None, Some(later))
        );
        watch.retain(|ring| ring != RING);
        assert_eq!(watch.last_packet(RING, Rank(1)), None);
    }

    #[test]
    fn a_psn_from_far_away_says_nothing_about_what_is_pending() {
        let (mut watch, start) = (Watch::new(TIMEOUTS), Instant::now());
        let mut v = view(4, 0, [Some(3), Some(3)]);
        v.ranks[1].last_psn = 0x70_0000;
        for s in 0..10 {
            assert_eq!(watch.observe(&ring(), &v, start + Duration::from_secs(s)), []);
        }
    }
}
