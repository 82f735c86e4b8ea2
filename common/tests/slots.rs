//! The slot machine step by step.

use netsum_common::abi::{MAX_SLOTS, RingConfig, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::serial;
use netsum_common::slot::{
    Fragment, GAP_PSN_AHEAD, Output, Payload, RingState, STALE_PSN_BEHIND, Slot, Verdict,
    is_psn_shifted, on_fragment,
};

#[test]
fn a_gap_is_seen_after_a_jump_over_acknowledged_packets() {
    let ring = RingConfig {
        flags: ring_flags::ACTIVE,
        members: 2,
        slots: 32,
        credit: 16,
        mtu: 256,
        ..RingConfig::default()
    };
    let mut state = RingState::default();
    let mut slots = vec![Slot::default(); 32];
    let mut output = |rank, index| {
        let fragment = Fragment { rank, index, len: 4, ce: false, total: false, bounds: 0 };
        on_fragment(&ring, &mut state, &mut slots[index as usize % 32], fragment).output
    };
    for index in 0..8 {
        output(1, index);
    }
    // Rank 0 loses 0, sends 1 to 7, and goes back. Its 0 to 3 arrive again, then those of rank 1,
    // sent again too, bring the other results out.
    for index in (1..8).chain(0..4) {
        output(0, index);
    }
    for index in 4..8 {
        assert_eq!(output(1, index), Output::Release, "{index}");
    }
    // With that all is acknowledged, and rank 0 continues behind it: in order, nothing is missing.
    assert_eq!(output(0, 8), Output::Drop);
    // It loses 9, and that is a gap of one.
    assert_eq!(output(0, 10), Output::Gap);
}

#[test]
fn results_that_no_connection_can_lack_are_not_replayed() {
    let ring = RingConfig {
        flags: ring_flags::ACTIVE,
        members: 2,
        slots: 16,
        credit: 4,
        mtu: 256,
        ..RingConfig::default()
    };
    let (mut state, mut slots) = (RingState::default(), [Slot::default(); 16]);
    let mut at = |index: u32, rank| {
        let fragment = Fragment { rank, index, len: 4, ce: false, total: false, bounds: 0 };
        on_fragment(&ring, &mut state, &mut slots[index as usize % 16], fragment).output
    };
    for index in 0..10 {
        assert_eq!((at(index, 0), at(index, 1)), (Output::Drop, Output::Release));
    }
    // 10 is next. A rank that lacks 6 has sent nothing of 10; one that lacked 5 could not have sent
    // 9, which is released.
    for index in 0..10 {
        assert_eq!(
            at(index, 0),
            if index < 6 { Output::Stale } else { Output::Replay },
            "index {index}"
        );
    }
}

#[test]
fn a_sender_whose_stream_has_slipped_stops_the_ring() {
    let ring = RingConfig {
        flags: ring_flags::ACTIVE,
        members: 2,
        slots: 16,
        credit: 8,
        mtu: 256,
        ..RingConfig::default()
    };
    let (mut state, mut slots) = (RingState::default(), [Slot::default(); 16]);
    let mut at = |rank, index: u32, bounds| {
        let fragment = Fragment { rank, index, len: 4, ce: false, total: false, bounds };
        on_fragment(&ring, &mut state, &mut slots[index as usize], fragment)
    };
    let bounds = |index: u32| [Slot::FIRST, 0, 0, Slot::LAST][index as usize % 4];
    for index in 0..8 {
        at(0, index, bounds(index));
    }
    assert_eq!(at(1, 0, bounds(0)).output, Output::Release);
    // One PSN late: its first is where the others have their second.
    let slipped = at(1, 5, Slot::FIRST);
    assert_eq!((slipped.output, slipped.counter), (Output::Drop, Counter::LayoutMismatch));
    for index in 1..8 {
        let verdict = at(1, index, bounds(index));
        assert_eq!(
            (verdict.payload, verdict.output),
            (Payload::Leave, Output::Drop),
            "index {index}"
        );
        assert_eq!(verdict.counter, Counter::RingStopped);
    }
    assert_eq!(state.stopped, 2);
}

#[test]
fn shifted_psns_are_distinguished_from_expected_ones() {
    for next in [0, 5, 0x3f_ffff, serial::MASK] {
        let near = |n: i32| serial::add(next, n as u32);
        for n in [-65_536, -1, 0, 1, 65_536] {
            assert!(!is_psn_shifted(near(n), next, MAX_SLOTS), "{n} from {next:#x}");
            assert!(
                is_psn_shifted(serial::add(near(n), GAP_PSN_AHEAD), next, MAX_SLOTS),
                "{n} from {next:#x}, past a gap"
            );
        }
        for behind in [0, 1, 65_536, 200_000] {
            let stale = serial::sub(near(-behind), STALE_PSN_BEHIND);
            assert!(is_psn_shifted(stale, next, MAX_SLOTS), "{behind} behind {next:#x}");
        }
        let any = (0..64).filter(|n| is_psn_shifted(near(n << 18), next, MAX_SLOTS)).count();
        assert!(any <= 4, "{any} of 64 PSNs anywhere");
    }
}

#[test]
fn a_verdict_in_one_word_says_the_same() {
    use Output::{Drop, Gap, Release, Replay, Stale, Up};
    let outputs = [Drop, Release, Replay, Stale, Gap, Up];
    for output in outputs {
        for payload in [Payload::Leave, Payload::Copy, Payload::Add] {
            for &counter in Counter::ALL {
                for bits in 0..8 {
                    let [save_header, completed, gap] = [0, 1, 2].map(|bit| bits >> bit & 1 != 0);
                    let v = Verdict { payload, save_header, completed, output, counter, gap };
                    let p = v.packed();
                    assert_eq!(
                        (p.save_header(), p.completed(), p.gap()),
                        (save_header, completed, gap)
                    );
                    assert!(
                        p.output_is(output) && p.payload_is(payload) && p.counts(counter),
                        "{v:?}"
                    );
                    assert_eq!(outputs.iter().filter(|o| p.output_is(**o)).count(), 1);
                    assert_eq!(p.leaves(), matches!(output, Release | Replay | Up));
                    assert_eq!(p.is_held_back(), completed && !matches!(output, Release | Up));
                    assert_eq!(p.counters(false) & counter.bit(), counter.bit());
                }
            }
        }
    }
}

#[test]
fn only_a_packet_that_says_so_is_a_total_and_only_to_a_box_below() {
    let below = RingConfig {
        flags: ring_flags::ACTIVE | ring_flags::UPLINK,
        members: 2,
        slots: 4,
        credit: 2,
        mtu: 256,
        ..RingConfig::default()
    };
    let fragment = |rank, total| Fragment { rank, index: 0, len: 4, ce: false, total, bounds: 0 };
    let (mut state, mut slot) = (RingState::default(), Slot::default());
    let mut take = |ring: &RingConfig, f| on_fragment(ring, &mut state, &mut slot, f);
    assert_eq!(take(&below, fragment(0, false)).output, Output::Up);
    // A parent that does not add lets the other group's partial sum through.
    let other = take(&below, fragment(1, false));
    assert_eq!((other.output, other.counter), (Output::Drop, Counter::UnexpectedTotal));
    assert_eq!(take(&below, fragment(1, true)).output, Output::Release);

    // A parent that was created again gets a total again, from a box that has released it.
    let parent = RingConfig { flags: ring_flags::ACTIVE | ring_flags::GROUPS, ..below };
    let (mut state, mut slot) = (RingState::default(), Slot::default());
    let mut take = |f| on_fragment(&parent, &mut state, &mut slot, f);
    let refused = (Output::Drop, Payload::Leave, Counter::UnexpectedTotal);
    let verdict = |v: Verdict| (v.output, v.payload, v.counter);
    assert_eq!(verdict(take(fragment(0, true))), refused);
    assert_eq!(take(fragment(1, false)).payload, Payload::Copy);
    assert_eq!(verdict(take(fragment(0, true))), refused);
    assert_eq!(take(fragment(0, false)).output, Output::Release);
    assert_eq!(take(fragment(0, true)).output, Output::Replay, "it is known here");
}
