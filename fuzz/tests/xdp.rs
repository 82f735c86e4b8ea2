//! The XDP programs against a model of them, for a few seconds; `cargo xtask fuzz xdp` goes on for longer.

use std::time::{Duration, Instant};

use netsum_common::counters::Counter;
use netsum_fuzz::{files, seeded, target};
use netsum_lab::differential::{Differential, Summary};

#[test]
#[ignore = "needs root and BPF"]
fn programs_and_model_agree_on_every_packet() {
    let mut both = Differential::new().unwrap();
    let mut total = Summary::default();
    let mut run = |name: String, input: &[u8]| {
        let summary = both.run(input).unwrap_or_else(|e| panic!("{name}: {e:?}"));
        total.packets += summary.packets;
        total.released += summary.released;
        total.clones += summary.clones;
    };
    let committed = files::committed("xdp");
    committed.iter().for_each(|(path, input)| run(path.display().to_string(), input));
    let corpus: Vec<_> = committed.into_iter().map(|(_, input)| input).collect();
    let (start, mut number) = (Instant::now(), 0);
    let longest = target("xdp").expect("a target").longest;
    while number < 100 || start.elapsed() < Duration::from_secs(5) {
        run(format!("sequence {number}"), &seeded::input(number, longest, &corpus));
        number += 1;
    }
    println!("{number} sequences, {total:?}");
    // Sequences that end early, or never get past the parser, would agree too.
    let impossible = [Counter::SteerFailed, Counter::RedirectFailed, Counter::Internal];
    for &counter in Counter::ALL.iter().filter(|c| !impossible.contains(c)) {
        assert!(both.counted(counter) > 0, "{} never happened", counter.name());
    }
    assert!(impossible.iter().all(|&c| both.counted(c) == 0));
    assert!(total.released > total.packets / 100 && total.clones > total.released, "hardly a sum");
}
