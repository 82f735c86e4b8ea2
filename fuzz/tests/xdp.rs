//! The XDP programs compared with a model, for a few seconds; `cargo xtask fuzz xdp` runs for
//! longer.

use std::time::{Duration, Instant};

use netsum_common::counters::Counter;
use netsum_fuzz::{files, seeded, target};
use netsum_lab::differential::{Differential, Summary};

#[test]
#[ignore = "needs root and BPF"]
fn programs_and_model_agree_on_every_packet() {
    let mut both = Differential::new().unwrap();
    let mut total = Summary::default();
    let mut run = |both: &mut Differential, name: String, input: &[u8]| {
        let summary = both.run(input).unwrap_or_else(|e| panic!("{name}: {e:?}"));
        total.packets += summary.packets;
        total.released += summary.released;
        total.clones += summary.clones;
    };
    let committed = files::committed("xdp");
    committed.iter().for_each(|(path, input)| run(&mut both, path.display().to_string(), input));
    let corpus: Vec<_> = committed.into_iter().map(|(_, input)| input).collect();
    let (start, mut number) = (Instant::now(), 0);
    let longest = target("xdp").expect("a target").longest;
    let impossible =
        [Counter::SteerFailed, Counter::RedirectFailed, Counter::WrongCpu, Counter::InternalError];
    // Rings here have no parent, and flows do not pass another box: `tests/tests/racks.rs` has such
    // tests.
    let of_parents = [
        Counter::PartialsSent,
        Counter::TotalsReceived,
        Counter::PartialsResent,
        Counter::UnexpectedTotal,
        Counter::ShiftedPsn,
    ];
    // Results that every rank has are not replayed, so no clone outlives its slot here
    // (`common/tests/interleaving.rs`). And `guard` is not run.
    let never = |c: &Counter| {
        impossible.contains(c)
            || of_parents.contains(c)
            || matches!(c, Counter::EgressNoRoute | Counter::BypassedIngress)
    };
    let possible = || Counter::ALL.iter().copied().filter(|c| !never(c));
    // Rare counters need more sequences than others.
    let rare = |both: &Differential| possible().any(|c| both.counted(c) == 0);
    while number < 100 || start.elapsed() < Duration::from_secs(5) || number < 500 && rare(&both) {
        let input = seeded::input(number, longest, &corpus);
        run(&mut both, format!("sequence {number}"), &input);
        number += 1;
    }
    println!("{number} sequences, {total:?}");
    // Sequences that end early, or that the parser always refuses, would agree, too.
    for counter in possible() {
        assert!(both.counted(counter) > 0, "{} never happened", counter.name());
    }
    assert!(impossible.iter().chain(&of_parents).all(|&c| both.counted(c) == 0));
    assert!(total.released > total.packets / 100 && total.clones > total.released, "too few sums");
}
