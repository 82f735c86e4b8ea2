//! Traced packets as messages of the API.

use netsum_api::v1 as api;
use netsum_common::abi::TraceEvent;
use netsum_common::counters::of_bits;
use netsum_common::serial;
use netsum_common::slot::Slot;
use netsum_core::JobRing;
use netsum_core::trace::program_name;
use netsum_dataplane::Traced;

/// A ring, with its number within its job.
#[derive(Clone, Debug)]
pub struct RingOfJob {
    pub job: String,
    pub ring: JobRing,
    /// The ranks whose connections belong to the ring's members ([`Job::sender`]).
    pub senders: Vec<u32>,
}

impl RingOfJob {
    /// The rank whose connection belongs to a member.
    pub fn sender(&self, member: u32) -> u32 {
        self.senders.get(member as usize).copied().unwrap_or(member)
    }

    /// The ranks whose bits are set.
    fn ranks(&self, members: u64) -> Vec<u32> {
        let is_set = |(member, _): &(usize, &u32)| members >> member & 1 != 0;
        self.senders.iter().enumerate().filter(is_set).map(|(_, rank)| *rank).collect()
    }
}

/// A traced packet as a message, with at most `capture` bytes of its frame.
pub fn packet_message(
    traced: &Traced,
    clock: u64,
    port: String,
    ring: Option<RingOfJob>,
    capture: u32,
) -> api::TracedPacket {
    let Traced { event, frame } = traced;
    let slot = ring
        .as_ref()
        .filter(|_| event.rank != TraceEvent::NONE)
        .map(|ring| slot_message(event, ring));
    api::TracedPacket {
        time_ns: event.time.wrapping_add(clock),
        program: program_name(event.program).into(),
        port,
        ifindex: event.ifindex,
        cpu: event.cpu,
        verdict: of_bits(event.counters).map(|c| c.name().into()).collect(),
        len: event.len,
        frame: frame[..frame.len().min(capture as usize)].to_vec(),
        ring: ring.as_ref().map(|r| r.ring.0),
        job: ring.map(|r| r.job).unwrap_or_default(),
        slot,
    }
}

fn slot_message(event: &TraceEvent, ring: &RingOfJob) -> api::SlotSnapshot {
    let is = |flag: u32| event.slot_flags & flag != 0;
    // As in the slot machine, every rank has contributed to released sums.
    let expected =
        if serial::before(event.expected, event.low) { event.low } else { event.expected };
    api::SlotSnapshot {
        rank: ring.sender(event.rank),
        index: event.index,
        low: event.low,
        gap: serial::diff(event.index, expected).max(0) as u32,
        holds: is(Slot::USED).then_some(event.slot_index),
        contributors: ring.ranks(event.contributors),
        ranks: ring.senders.len() as u32,
        complete: is(Slot::COMPLETE),
        released: is(Slot::RELEASED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_a_ring_have_the_jobs_numbers() {
        // A rack with ranks 4 and 5 and an uplink. The packet is rank 5's; rank 5 and the uplink's
        // total have contributed.
        let ring = RingOfJob { job: "train".into(), ring: JobRing(0), senders: vec![4, 5, 3] };
        let event = TraceEvent {
            time: 0,
            counters: 0,
            contributors: 0b110,
            ring: 1,
            rank: 1,
            index: 7,
            low: 7,
            expected: 8,
            slot_index: 7,
            slot_flags: Slot::USED,
            ifindex: 1,
            program: 1,
            len: 64,
            captured: 0,
            cpu: 0,
        };
        let packet =
            packet_message(&Traced { event, frame: Vec::new() }, 0, String::new(), Some(ring), 0);
        let slot = packet.slot.unwrap();
        assert_eq!((slot.rank, slot.contributors, slot.ranks), (5, vec![5, 3], 3));
    }
}
