//! How long sums take and which rank is last: as noted by the XDP programs, and as shown for a
//! running job.

use std::time::Duration;

use netsum_common::abi::RingNumber;
use netsum_common::timing::{SAMPLED, Timing, is_sampled};
use netsum_dataplane::DataPlane as _;
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, one_on_each_host};
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::programs::{BASE_PSN, Bench, host, qpn, ring};
use serde_json::Value;

const DROP: u32 = 1;
const REDIRECT: u32 = 4;

/// Sends a rank's fragment with this index through `aggregate`.
fn contribute(bench: &mut Bench, rank: u32, index: u32) -> u32 {
    let psn = (BASE_PSN + index) & 0xff_ffff;
    let ranks = bench.ring.config.members;
    let frame =
        FrameSpec::send(host(rank), host((rank + 1) % ranks), qpn(rank), psn, lanes(rank, 16));
    bench.aggregate(&frame.build()).unwrap().action
}

fn timing(bench: &Bench) -> Box<Timing> {
    bench.plane.timing(bench.ring.id).unwrap()
}

/// How often each of the first three ranks contributed to a timed sum, and how often it was the
/// last.
fn counts(bench: &Bench) -> [(u64, u64); 3] {
    let timing = timing(bench);
    [0, 1, 2].map(|r| (timing.ranks[r].late.count(), timing.ranks[r].last))
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_sum_is_timed_from_its_first_contribution_to_its_last() {
    let mut bench = Bench::new(ring(3, 256, 256), false).unwrap();
    let pause = Duration::from_millis(30);
    assert_eq!(contribute(&mut bench, 1, 0), DROP);
    std::thread::sleep(pause);
    // A duplicate does not count as a contribution, and the first one's time stays.
    assert_eq!(contribute(&mut bench, 1, 0), DROP);
    assert_eq!(contribute(&mut bench, 2, 0), DROP);
    std::thread::sleep(pause);
    assert_eq!(contribute(&mut bench, 0, 0), REDIRECT);
    // A replay does not count either.
    assert_eq!(contribute(&mut bench, 0, 0), REDIRECT);
    assert_eq!(counts(&bench), [(1, 1), (1, 0), (1, 0)]);
    let timing = timing(&bench);
    let (whole, half) = (2 * pause.as_nanos() as u64, pause.as_nanos() as u64);
    let took = timing.completion.sum_ns;
    assert!((whole..whole + 1_000_000_000).contains(&took), "{took}");
    assert_eq!((timing.ranks[0].late.sum_ns, timing.ranks[1].late.sum_ns), (took, 0));
    let late = timing.ranks[2].late.sum_ns;
    assert!((half..=took - half).contains(&late), "{late} of {took}");
    assert!(timing.completion.max().unwrap() > took && timing.completion.count() == 1);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn each_ring_times_its_own_sample_of_indices() {
    let mut bench = Bench::new(ring(3, 256, 512), false).unwrap();
    // One index of each block is timed, at a place that is one earlier than in the block before.
    assert!([0, 2 * SAMPLED - 1, 3 * SAMPLED - 2].into_iter().all(is_sampled));
    for index in 0..3 * SAMPLED - 1 {
        (0..3).for_each(|rank| {
            assert_eq!(contribute(&mut bench, rank, index) == REDIRECT, rank == 2)
        });
    }
    assert_eq!(counts(&bench), [(3, 0), (3, 0), (3, 3)]);
    assert_eq!(*bench.plane.timing(RingNumber(2)).unwrap(), Timing::EMPTY);
    bench.plane.reset_counters(RingNumber(1)).unwrap();
    assert_eq!(*timing(&bench), Timing::EMPTY);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_held_back_sum_is_timed_at_completion() {
    let mut bench = Bench::new(ring(3, 256, 512), false).unwrap();
    // Rank 2 has lost the earlier packets.
    let next = 2 * SAMPLED - 1;
    for index in 0..=next {
        contribute(&mut bench, 0, index);
        contribute(&mut bench, 1, index);
    }
    contribute(&mut bench, 2, next);
    assert_eq!(timing(&bench).completion.count(), 1, "complete, and not released");
    let took = timing(&bench).completion.sum_ns;
    let pause = Duration::from_secs(1);
    std::thread::sleep(pause);
    for index in 0..=next {
        assert_eq!(contribute(&mut bench, 2, index), REDIRECT, "index {index}");
    }
    let timing = timing(&bench);
    assert_eq!((timing.completion.count(), timing.ranks[2].last), (2, 2));
    // Only index 0, for which rank 2 was late, took long.
    let pause = pause.as_nanos() as u64;
    assert!(timing.completion.sum_ns - took >= pause && took < pause, "{took}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_slowest_rank_is_named_also_after_a_daemons_death() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(3)).unwrap();
    cluster.pin();
    cluster.start_daemon().unwrap();
    let job = JobSpec { rings: 2, ..JobSpec::new("train", 3) };
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(3)).unwrap();
    for seed in 0..8 {
        let late = Duration::from_millis(60);
        let files = group.order_all_reduce_last_late("i32", 50_000, seed, late).unwrap();
        group.check_all_reduce("i32", 50_000, seed, &files).unwrap();
    }
    let stats = cluster.netsum_json(&["stats", "train"]).unwrap();
    let timing = &stats["timing"];
    let timed = timing["completion"]["count"].as_u64().unwrap();
    // Each index counts once, on both rings.
    let expected = stats["completed"].as_u64().unwrap() / u64::from(SAMPLED);
    assert!(timed.abs_diff(expected) <= 2, "{stats:#}");
    let last = |timing: &Value, rank: usize| timing["ranks"][rank]["last"].as_u64().unwrap();
    assert_eq!((0..3).map(|rank| last(timing, rank)).sum::<u64>(), timed);
    assert!(last(timing, 2) * 2 > timed, "{timing:#}");
    let late = |rank: usize| timing["ranks"][rank]["late"]["p50_ns"].as_u64().unwrap();
    assert!(late(2) > 33_000_000 && late(2) > late(0), "60 ms late: {timing:#}");
    assert!(timing["completion"]["p50_ns"].as_u64().unwrap() >= late(2), "{timing:#}");
    let text = cluster.netsum(&["stats", "train"]).unwrap();
    assert!(
        text.contains("timing of one fragment in 64") && text.contains("rank 2 behind first"),
        "{text}"
    );
    assert!(
        cluster.netsum_json(&["stats"]).unwrap().get("timing").is_none(),
        "of the box there is none"
    );

    // The timing is pinned like the other maps.
    cluster.kill_daemon().unwrap();
    cluster.start_daemon().unwrap();
    let after = cluster.netsum_json(&["stats", "train"]).unwrap();
    assert!(after["timing"]["completion"]["count"].as_u64().unwrap() >= timed, "{after:#}");
}
