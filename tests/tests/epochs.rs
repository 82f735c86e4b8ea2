//! Ranks replace their connections in mid-job, while packets of the old ones still arrive: no old
//! data gets into a new sum.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use netsum_lab::attacker::Seen;
use netsum_lab::cluster::{Cluster, JobSpec, RankReply, TIMEOUT, one_on_each_host};
use netsum_lab::faults::{Fault, Faults};
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::tap::Tap;
use netsum_lab::udp_ring::{self, Home, Load};
use netsum_lab::{Host, LabSpec};

const RANKS: u32 = 3;

/// Sends frames from their hosts' ports while `work` runs, at most `rounds` times each, and returns
/// how many it sent.
fn meanwhile<R: Send>(
    cluster: &Cluster,
    frames: &[Vec<Vec<u8>>],
    rounds: u32,
    work: impl FnOnce() -> R + Send,
) -> (R, u64) {
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let taps: Vec<Tap> = (0..frames.len())
        .map(|h| Tap::open(cluster.lab().host(h), Host::INTERFACE).unwrap())
        .collect();
    std::thread::scope(|s| {
        s.spawn(|| {
            let longest = frames.iter().map(Vec::len).max().unwrap_or(0);
            for _ in (0..rounds).take_while(|_| !stop.load(Ordering::Relaxed)) {
                for i in 0..longest {
                    for (tap, frames) in taps.iter().zip(frames) {
                        if let Some(frame) = frames.get(i) {
                            tap.send(frame).unwrap();
                            sent.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    // Late packets, not a flood: with as many as two cores can send, hosts do
                    // little but NAK.
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, Ordering::Relaxed);
        match result {
            Ok(result) => (result, sent.load(Ordering::Relaxed)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_that_dies_in_mid_job_and_comes_again() {
    let cluster =
        Cluster::start(LabSpec { faulty_links: true, ..LabSpec::hosts(RANKS as usize) }).unwrap();
    let lab = cluster.lab();
    let job = JobSpec { timeout: Duration::from_secs(5), ..JobSpec::new("mortal", RANKS) };
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(RANKS)).unwrap();
    // Records what the first epoch's connections carry. Results have the headers of the previous
    // rank.
    let taps: Vec<Tap> =
        lab.hosts().iter().map(|h| Tap::open(h, Host::INTERFACE).unwrap()).collect();
    let mut old: Vec<Vec<Vec<u8>>> = std::thread::scope(|s| {
        let watchers: Vec<_> = taps.iter().map(|tap| s.spawn(|| Seen::watch(tap).frames)).collect();
        group.all_reduce("i32", 300_000, 0).unwrap();
        watchers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    old.rotate_left(1);
    assert!(old.iter().all(|frames| frames.len() > 100), "too little was seen");
    // From now on some packets are late. Those that wait in a link at the end arrive in the next
    // epoch.
    for host in lab.hosts() {
        let late = Faults::of(Fault::Reorder, 0.02);
        host.set_faults(late, late, host.number() as u32).unwrap();
    }

    group.order_all_reduce("i32", 20_000_000, 1).unwrap();
    let begun = cluster.counter(Some("mortal"), "released").unwrap() + 500;
    let start = Instant::now();
    while cluster.counter(Some("mortal"), "released").unwrap() < begun {
        assert!(start.elapsed() < TIMEOUT, "nothing is summed");
    }
    group.kill(1).unwrap();
    // The rank starts again before the others notice that it was killed.
    cluster.start_again(&mut group, 1).unwrap();
    for rank in [0, 2] {
        let RankReply::Error(error) = group.answer(rank, TIMEOUT).unwrap() else {
            panic!("rank {rank}: no error")
        };
        assert!(error.contains("rank 1"), "rank {rank}: {error}");
        group.order_reconnect(rank).unwrap();
    }
    for rank in 0..RANKS as usize {
        let answer = group.answer(rank, TIMEOUT).unwrap();
        assert!(
            matches!(answer, RankReply::Done(_)),
            "rank {rank}: {answer:?}\n{}",
            cluster.daemon_log()
        );
    }
    let shown = cluster.netsum_json(&["job", "show", "mortal"]).unwrap();
    assert_eq!((&shown["state"], &shown["epoch"]), (&"active".into(), &2.into()), "{shown}");

    let ended = || cluster.counter(None, "job_ended").unwrap();
    let before = ended();
    let (outcomes, sent) = meanwhile(&cluster, &old, u32::MAX, || {
        let mut outcomes = Vec::new();
        let start = Instant::now();
        for seed in 2.. {
            let dtype = if seed % 2 == 0 { "i32" } else { "f32" };
            outcomes = group.all_reduce(dtype, 300_000, seed).unwrap();
            if seed > 4 && start.elapsed() > Duration::from_secs(1) {
                break;
            }
        }
        outcomes
    });
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(
            (&*outcome.mode, outcome.wrong, outcome.fallbacks),
            ("box", 0, 0),
            "rank {rank}: {outcome:?}"
        );
    }
    let dropped = ended() - before;
    println!("{sent} packets of the first epoch came late, {dropped} were dropped for it");
    assert!(sent > 1000 && dropped >= sent * 9 / 10, "{sent} sent, {dropped} dropped");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn an_application_reconnects_with_other_psns() {
    let cluster = Cluster::start(LabSpec::hosts(RANKS as usize)).unwrap();
    let lab = cluster.lab();
    let first = Load { first_psn: 0x1000, leave_after: Some(20), ..Load::new(RANKS) };
    let job = JobSpec {
        message_size: first.message_size,
        window: first.window,
        ..JobSpec::new("again", RANKS)
    };
    cluster.create_job(&job).unwrap();
    let homes: Vec<Home<'_>> = lab.hosts().iter().map(|h| -> Home<'_> { (h, h.ip(0)) }).collect();
    let register = |load: Load| {
        for rank in 0..RANKS {
            let next = (rank + 1) % RANKS;
            let flow = load.flow(0, rank, 0, homes[rank as usize].1, homes[next as usize].1);
            cluster.add_flow("again", &flow, &lab.box_().port(rank as usize)).unwrap();
        }
    };
    register(first);
    udp_ring::run(first, &homes).unwrap();
    // Contributions of rank 0 alone, to free slots: half of a sum that will never be complete.
    let packet = |rank: u32, psn: u32, seed: u32| {
        let to = (rank + 1) % RANKS;
        let spec = FrameSpec::send(
            rank as u8 + 1,
            to as u8 + 1,
            udp_ring::receive_qpn(to),
            psn,
            lanes(seed, 256),
        );
        FrameSpec { id: 0, ..spec }.build()
    };
    let tap = Tap::open(lab.host(0), Host::INTERFACE).unwrap();
    let slots = || cluster.netsum_json(&["slot", "show", "again"]).unwrap();
    let incomplete = || {
        let shown = slots();
        shown["slots"].as_array().unwrap().iter().filter(|s| s["state"] == "incomplete").count()
    };
    let start = Instant::now();
    while incomplete() < 32 {
        assert!(start.elapsed() < TIMEOUT, "{} incomplete slots: {}", incomplete(), slots());
        // The other ranks may have left later than rank 0. Then these frames complete sums to which
        // the others have contributed, and the next slots are free.
        let low = slots()["rings"][0]["low"].as_u64().unwrap() as u32;
        for index in low..low + 64 {
            tap.send(&packet(0, first.psn(0) + index, 0xbad)).unwrap();
        }
    }

    let flow = first.flow(0, 0, 0, homes[0].1, homes[1].1);
    let refused = cluster.add_flow("again", &flow, "port0").unwrap_err();
    assert!(refused.to_string().contains("already has a flow in ring 0"), "{refused}");
    let printed = cluster.netsum(&["job", "restart", "again"]).unwrap();
    assert_eq!(printed, "again: waiting  flows 0/3\n");
    assert_eq!(incomplete(), 0);
    let second = Load { first_psn: 0x80_0000, leave_after: None, ..first };
    register(second);
    // Packets of the first connections arrive again, for the same queue pairs.
    let old: Vec<Vec<Vec<u8>>> = (0..RANKS)
        .map(|rank| {
            (0..22 * 64)
                .step_by(7)
                .map(|index| packet(rank, first.psn(rank) + index, index))
                .collect()
        })
        .collect();
    let late =
        || ["credit_violation", "stale"].map(|name| cluster.counter(Some("again"), name).unwrap());
    let before = late();
    // While old packets keep the hosts busy, a rank that waits for a sum may have to retransmit.
    let second = Load { ack_timeout: Duration::from_millis(200), ..second };
    // Each old packet costs a NAK and retransmissions, so a flood without an end would hold up the
    // sums for minutes on a busy machine.
    let (stats, sent) = meanwhile(&cluster, &old, 20, || udp_ring::run(second, &homes).unwrap());
    let released = cluster.counter(Some("again"), "released").unwrap();
    println!("{sent} packets of the first connections came late: {before:?} to {:?}", late());
    assert!(sent > 100 && late().iter().sum::<u64>() > before.iter().sum::<u64>());
    assert_eq!(stats.len(), RANKS as usize);
    assert!(released >= second.fragments());
}
