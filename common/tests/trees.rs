//! Every rank around a box, or below a tree of boxes, gets every sum exactly right, or nothing; and
//! all of them in the end.

use netsum_common::serial;
use proptest::prelude::*;

mod system;

use system::{Case, System};

/// Levels, the most ranks, and the shape.
type Tree = (u32, u32, Vec<usize>);

fn boxes() -> impl Strategy<Value = Tree> {
    let ranks = prop_oneof![4 => 2usize..6, 1 => Just(8), 1 => Just(33), 1 => Just(64)];
    ranks.prop_map(|ranks| (1, ranks as u32, vec![ranks]))
}

fn trees() -> impl Strategy<Value = Tree> {
    (1u32..4, prop_oneof![4 => 2u32..9, 2 => 9u32..20, 1 => Just(64)], Just(Vec::new()))
}

fn cases(trees: impl Strategy<Value = Tree>) -> impl Strategy<Value = Case> {
    let rogue = prop_oneof![1 => Just(None), 1 => (0u32..2).prop_map(Some)];
    let bools = (any::<bool>(), any::<bool>(), any::<bool>());
    (any::<u64>(), trees, 1u32..4, 1u32..6, 1u32..12, bools, 0u64..4, rogue).prop_map(
        |(
            seed,
            (levels, ranks, shape),
            window,
            fragments,
            messages,
            (relaxed, selective, wrap),
            faults,
            rogue,
        )| {
            Case {
                seed,
                levels,
                ranks,
                shape,
                window,
                fragments,
                messages,
                relaxed,
                selective,
                // Slots count from 0, so a start must be a multiple of them for `low` to match an
                // empty ring.
                start: if wrap { serial::sub(0, 16) } else { 0 },
                loss: [0, 10, 50, 150][faults as usize],
                duplicate: [0, 10, 50, 50][faults as usize],
                reorder: [0, 10, 50, 200][faults as usize],
                rogue,
                idle: 0..0,
                guarded: false,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(5000) })]

    #[test]
    fn every_rank_gets_every_sum_exactly_right_or_nothing(case in cases(boxes())) {
        System::new(case).run();
    }

    #[test]
    fn every_rank_of_a_tree_gets_every_total_exactly_right_or_nothing(case in cases(trees())) {
        System::new(case).run();
    }

    #[test]
    fn no_sum_is_wrong_while_boxes_between_others_let_everything_through(
        case in cases(trees()), from in 0u64..300, long in 1u64..500,
    ) {
        let mut system = System::new(Case { rogue: None, idle: from..from + long, ..case });
        prop_assume!(system.is_possible());
        system.run();
    }

    #[test]
    fn all_get_all_where_the_guard_drops_data_while_boxes_between_others_do_not_add(
        case in cases(trees()), from in 0u64..300, long in 1u64..500,
    ) {
        let mut system = System::new(Case { rogue: None, idle: from..from + long, guarded: true, ..case });
        prop_assume!(system.is_possible());
        system.run();
    }
}

/// 16 hosts in a tree of three levels, most of them.
fn tree(seed: u64, loss: u64) -> Case {
    Case {
        seed,
        levels: 3,
        ranks: 16,
        shape: Vec::new(),
        window: 2,
        fragments: 4,
        messages: 20,
        relaxed: false,
        selective: false,
        start: 0,
        loss,
        duplicate: 0,
        reorder: 0,
        rogue: None,
        idle: 0..0,
        guarded: false,
    }
}

/// Ranks around one box.
fn one_box(ranks: usize, case: Case) -> Case {
    Case { levels: 1, shape: vec![ranks], ..case }
}

#[test]
fn a_rogue_on_a_relaxed_ring_takes_no_slot_that_others_still_need() {
    // Once: a relaxed ring granted as much credit as it had slots, and the rogue made results stale
    // before all had them.
    for seed in 0..200 {
        let case = Case {
            window: 3,
            fragments: 5,
            messages: 2,
            relaxed: true,
            selective: true,
            duplicate: 50,
            reorder: 200,
            rogue: Some(0),
            ..tree(seed, 150)
        };
        System::new(one_box(8, case)).run();
    }
}

#[test]
fn nothing_is_replayed_or_refused_without_faults() {
    for ranks in [2, 3, 64] {
        let mut system = System::new(one_box(ranks, Case { messages: 40, ..tree(1, 0) }));
        system.run();
        assert_eq!((system.boxes[0].released.len(), system.sent), (160, 160 * ranks as u64));
    }
}

#[test]
fn without_faults_one_copy_of_each_fragment_goes_up_and_nothing_is_sent_again() {
    for seed in 0..50 {
        let mut system = System::new(tree(seed, 0));
        system.run();
        let leaves = system.boxes.iter().filter(|node| node.parent.is_some());
        let crossing = leaves.clone().count() as u64;
        assert!(leaves.clone().all(|node| node.sent.len() == 80 && node.released.len() == 80));
        // And as many acknowledgements, of what has come down.
        assert_eq!(system.up, 2 * 80 * crossing, "seed {seed}");
    }
}
