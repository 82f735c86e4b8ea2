//! The XDP programs against a model of them, for a few seconds; `cargo xtask fuzz xdp` goes on for longer.

use std::time::{Duration, Instant};

use netsum_common::counters::Counter;
use netsum_lab::differential::{Differential, Summary};

/// A small generator (splitmix64), so that a number replays.
fn bytes(mut state: u64, len: usize) -> Vec<u8> {
    let next = |_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) as u8
    };
    (0..len).map(next).collect()
}

#[test]
#[ignore = "needs root and BPF"]
fn programs_and_model_agree_on_every_packet() {
    let mut both = Differential::new().unwrap();
    let (start, mut total, mut sequences) = (Instant::now(), Summary::default(), 0);
    while sequences < 100 || start.elapsed() < Duration::from_secs(5) {
        let summary =
            both.run(&bytes(sequences, 2000)).unwrap_or_else(|e| panic!("sequence {sequences}: {e:?}"));
        total.packets += summary.packets;
        total.released += summary.released;
        total.clones += summary.clones;
        sequences += 1;
    }
    println!("{sequences} sequences, {total:?}, {:.1} s", start.elapsed().as_secs_f64());
    // Sequences that end early, or never get past the parser, would agree too.
    let impossible = [Counter::SteerFailed, Counter::RedirectFailed, Counter::Internal];
    for &counter in Counter::ALL.iter().filter(|c| !impossible.contains(c)) {
        assert!(both.counted(counter) > 0, "{} never happened", counter.name());
    }
    assert!(impossible.iter().all(|&c| both.counted(c) == 0));
    assert!(total.released > total.packets / 50 && total.clones > total.released, "{total:?}: hardly a sum");
}
