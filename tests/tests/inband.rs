//! Jobs that an application other than netsum sets up in band. The daemon is told of no connection,
//! and learns them from first packets. These get lost, duplicated, late and corrupted, come from
//! elsewhere, or do not come at all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use netsum_common::wire::in_band::JOB_HEADER_LEN;
use netsum_common::wire::{InBandToken, JobHeader, Opcode};
use netsum_lab::attacker::from_host;
use netsum_lab::cluster::{Cluster, TIMEOUT};
use netsum_lab::faults::{Fault, Faults, Kind, Nth};
use netsum_lab::frames::FrameSpec;
use netsum_lab::in_band::{Connections, Got, Hosts, InBandRing, Others};
use netsum_lab::tap::Tap;
use netsum_lab::{Host, LabSpec};
use serde_json::Value;

fn cluster(ranks: usize, faulty_links: bool) -> Cluster {
    Cluster::start(LabSpec { mtu: 2300, faulty_links, ..LabSpec::hosts(ranks) }).unwrap()
}

fn assert_sums(got: &[Got], messages: u32) {
    for (rank, got) in got.iter().enumerate() {
        assert_eq!((got.sums, got.unsummed), (messages, 0), "rank {rank}: {got:?}");
    }
}

/// Returns `netsum -j job show app` as soon as the condition holds.
fn wait_for(cluster: &Cluster, what: &str, so: impl Fn(&Value) -> bool) -> Value {
    let start = Instant::now();
    loop {
        let job = cluster.netsum_json(&["job", "show", "app"]).unwrap();
        if so(&job) {
            return job;
        }
        assert!(start.elapsed() < TIMEOUT, "{what}: {job:#}\n{}", cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn unclaimed(job: &Value) -> Vec<u64> {
    let places = job["in_band"]["unclaimed"].as_array().unwrap();
    places.iter().map(|place| place["rank"].as_u64().unwrap()).collect()
}

fn has_refused(job: &Value, words: &str) -> bool {
    job["in_band"]["refusals"]
        .as_array()
        .unwrap()
        .iter()
        .any(|why| why.as_str().unwrap().contains(words))
}

fn delete(cluster: &Cluster) {
    cluster.netsum(&["job", "delete", "app"]).unwrap();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn an_application_is_summed_that_nobody_has_registered() {
    for (ranks, mtu, message_size, write) in [
        (2, 1024, 16384, false),
        (3, 256, 2048, true),
        (4, 2048, 65536, false),
        (4, 1024, 1000, true),
    ] {
        let cluster = cluster(ranks as usize, false);
        let hosts = Hosts::of(cluster.lab());
        let mut app =
            InBandRing { mtu, message_size, write, ..InBandRing::new(ranks, InBandToken([0; 16])) };
        app.create_job(&cluster).unwrap();
        let got = app.run_all(&hosts, Connections::new(1), 60).unwrap();
        assert_sums(&got, 60);
        let job = cluster.netsum_json(&["job", "show", "app"]).unwrap();
        assert_eq!((&job["state"], &job["epoch"]), (&"active".into(), &1.into()), "{job:#}");
        let c = Connections::new(1);
        for rank in 0..ranks {
            let flow = &job["flows"][rank as usize];
            let next = (rank + 1) % ranks;
            assert_eq!(flow["qpn"], c.receives(next), "{job:#}");
            assert_eq!(flow["psn"], c.first_psn(rank), "{job:#}");
            assert_eq!(flow["port"], cluster.lab().box_().port(rank as usize), "{job:#}");
            assert_eq!(flow["src_mac"], cluster.lab().host(rank as usize).mac(), "{job:#}");
        }
        assert!(job["in_band"]["token"].is_null(), "a secret: {job:#}");
        let counter = |name| cluster.counter(Some("app"), name).unwrap();
        assert!(counter("in_band_first") >= u64::from(ranks));
        assert_eq!((counter("in_band_header"), counter("internal_error")), (0, 0));
        let first = got.iter().filter_map(|g| g.first).max().unwrap();
        let before: u64 = got.iter().map(|g| g.again).sum();
        let again: u64 = got.iter().map(|g| g.stats.retransmissions).sum();
        println!(
            "{ranks} ranks, path MTU {mtu}: first sum after {first:?}; sent again {before} \
             packets before, {} afterwards",
            again - before
        );
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_first_packet_may_be_lost_doubled_late_or_spoilt() {
    let cluster = cluster(4, true);
    let hosts = Hosts::of(cluster.lab());
    let kinds = [(16384, Kind::First), (1000, Kind::Only)];
    for (message_size, kind) in kinds {
        for what in Fault::ALL {
            // Faults of one rank and of all ranks; once and several times.
            for (faulty, times) in [(1..2, 1), (0..4, 1), (0..4, 3)] {
                let mut app =
                    InBandRing { message_size, ..InBandRing::new(4, InBandToken([0; 16])) };
                app.create_job(&cluster).unwrap();
                for host in cluster.lab().hosts() {
                    let nth = Some(Nth { kind, n: 1, times, what });
                    let up = if faulty.contains(&host.number()) {
                        Faults { nth, ..Faults::NONE }
                    } else {
                        Faults::NONE
                    };
                    host.set_faults(up, Faults::NONE, 1).unwrap();
                }
                let got = app.run_all(&hosts, Connections::new(1), 12);
                let got = got.unwrap_or_else(|e| {
                    panic!("{what:?} x {times} of {faulty:?}: {e:#}\n{}", cluster.daemon_log())
                });
                assert_sums(&got, 12);
                for host in &cluster.lab().hosts()[faulty.clone()] {
                    assert!(
                        host.fault_link().unwrap().counts().unwrap().up.of(what) > 0,
                        "{what:?} did not happen"
                    );
                }
                let job = cluster.netsum_json(&["job", "show", "app"]).unwrap();
                assert_eq!(
                    (&job["state"], &job["epoch"]),
                    (&"active".into(), &1.into()),
                    "{job:#}"
                );
                let first = got.iter().filter_map(|g| g.first).max().unwrap();
                println!("{kind:?} {what:?} x {times} of {faulty:?}: first sum after {first:?}");
                delete(&cluster);
            }
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn set_up_and_sums_survive_faults_of_all_kinds_everywhere() {
    let cluster = cluster(3, true);
    let hosts = Hosts::of(cluster.lab());
    let app = InBandRing::create(&cluster, 3).unwrap();
    for host in cluster.lab().hosts() {
        let faults =
            Faults { loss: 0.02, duplicate: 0.01, reorder: 0.01, corrupt: 0.005, ..Faults::NONE };
        host.set_faults(faults, faults, host.number() as u32 + 1).unwrap();
    }
    assert_sums(&app.run_all(&hosts, Connections::new(1), 60).unwrap(), 60);
    assert!(
        cluster
            .lab()
            .hosts()
            .iter()
            .all(|h| h.fault_link().unwrap().counts().unwrap().up.faults() > 0)
    );
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn new_connections_begin_an_epoch_whose_sums_have_no_old_data() {
    let cluster = cluster(3, false);
    let hosts = Hosts::of(cluster.lab());
    let app = InBandRing::create(&cluster, 3).unwrap();
    let first = Connections::new(1);
    // Other queue pairs and PSNs; the same queue pairs with PSNs behind, ahead and far away; all
    // with other data.
    let again = [
        Connections::new(2),
        Connections { psn: first.psn + 1, ..first },
        Connections { psn: first.psn - 70, ..first },
        Connections { psn: 0x70_0000, ..first },
        Connections { psn: 0x80_1000, qpn: 0x7777 },
    ];
    for (c, epoch) in [&[first][..], &again].concat().into_iter().zip(1..) {
        // The ranks stop in the middle: slots hold parts of messages 20 and 21 of all ranks.
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let ranks = scope.spawn(|| app.run_some(&hosts, c, &[0, 1, 2], 100_000, &stop));
            wait_for(&cluster, "the epoch", |job| {
                job["epoch"] == epoch && job["state"] == "active"
            });
            let before = cluster.counter(Some("app"), "released").unwrap();
            let start = Instant::now();
            while cluster.counter(Some("app"), "released").unwrap() < before + 500 {
                assert!(start.elapsed() < TIMEOUT, "{}", cluster.daemon_log());
                std::thread::sleep(Duration::from_millis(5));
            }
            stop.store(true, Ordering::Relaxed);
            let got = ranks.join().unwrap().unwrap();
            assert!(got.iter().all(|g| g.sums > 20 && g.unsummed == 0), "{got:?}");
        });
    }
    assert_eq!(cluster.counter(Some("app"), "internal_error").unwrap(), 0);
}

/// The box cannot tell such a session from the first one's retransmissions, so an administrator has
/// to restart the job.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn after_a_restart_a_run_with_the_same_numbers_gets_its_own_sums() {
    let cluster = cluster(3, false);
    let hosts = Hosts::of(cluster.lab());
    let mut app = InBandRing::create(&cluster, 3).unwrap();
    // The session is shorter than a window, so the slots still hold all of it.
    assert_sums(&app.run_all(&hosts, Connections::new(1), 2).unwrap(), 2);
    cluster.netsum(&["job", "restart", "app"]).unwrap();
    app.seed = 1;
    assert_sums(&app.run_all(&hosts, Connections::new(1), 2).unwrap(), 2);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_that_reconnects_alone_waits_for_the_others_and_is_named() {
    let cluster = cluster(3, false);
    let hosts = Hosts::of(cluster.lab());
    let app = InBandRing::create(&cluster, 3).unwrap();
    let (old, new) = (Connections::new(1), Connections::new(2));
    let (stop, stop_1) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let others = scope.spawn(|| app.run_some(&hosts, old, &[0, 2], 100_000, &stop));
        let rank_1 = scope.spawn(|| app.run_some(&hosts, old, &[1], 100_000, &stop_1));
        let start = Instant::now();
        while cluster.counter(Some("app"), "released").unwrap() < 500 {
            assert!(start.elapsed() < TIMEOUT, "{}", cluster.daemon_log());
            std::thread::sleep(Duration::from_millis(5));
        }
        stop_1.store(true, Ordering::Relaxed);
        rank_1.join().unwrap().unwrap();
        let rank_1 = scope.spawn(|| app.run_some(&hosts, new, &[1], 30, &AtomicBool::new(false)));
        let job = wait_for(&cluster, "its claim", |job| unclaimed(job) == [0, 2]);
        assert_eq!((&job["state"], &job["epoch"]), (&"active".into(), &1.into()), "{job:#}");
        assert_eq!(job["in_band"]["claims"][0]["rank"], 1, "{job:#}");
        let printed = cluster.netsum(&["diagnose", "app", "--watch", "200ms"]).unwrap();
        assert!(
            printed.contains("rank 1: has reconnected (queue pair 0x2004 of 10.0.0.3)"),
            "{printed}"
        );
        // The other ranks notice, and connect again too.
        stop.store(true, Ordering::Relaxed);
        let got = others.join().unwrap().unwrap();
        assert!(got.iter().all(|g| g.unsummed == 0), "{got:?}");
        let got = app.run_some(&hosts, new, &[0, 2], 30, &AtomicBool::new(false)).unwrap();
        assert_sums(&got, 30);
        assert_sums(&rank_1.join().unwrap().unwrap(), 30);
    });
    assert_eq!(cluster.netsum_json(&["job", "show", "app"]).unwrap()["epoch"], 2);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_wrong_token_is_counted_and_missing_ranks_are_named() {
    let cluster = cluster(3, false);
    let hosts = Hosts::of(cluster.lab());
    let app = InBandRing::create(&cluster, 3).unwrap();
    let mut wrong = app.clone();
    wrong.token.0[5] ^= 1;
    // The box is a plain bridge to these ranks, and they can tell.
    let got = wrong.run_all(&hosts, Connections::new(1), 10).unwrap();
    assert!(got.iter().all(|g| (g.sums, g.unsummed) == (0, 10)), "{got:?}");
    assert!(cluster.counter(None, "in_band_wrong_token").unwrap() >= 30);
    assert_eq!(cluster.counter(None, "in_band_first").unwrap(), 0);
    let printed = |watch: &str| cluster.netsum(&["diagnose", "app", "--watch", watch]).unwrap();
    let nobody = printed("100ms");
    for rank in 0..3 {
        assert!(nobody.contains(&format!("rank {rank}: has not shown up")), "{nobody}");
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let two = scope.spawn(|| app.run_some(&hosts, Connections::new(2), &[0, 2], 10, &stop));
        let job = wait_for(&cluster, "two claims", |job| unclaimed(job) == [1]);
        assert_eq!(job["state"], "waiting", "{job:#}");
        let claims = job["in_band"]["claims"].as_array().unwrap();
        assert_eq!(
            (claims[0]["src"].as_str(), claims[1]["port"].as_str()),
            (Some("10.0.0.1"), Some("port2"))
        );
        let text = cluster.netsum(&["job", "show", "app"]).unwrap();
        assert!(text.contains("not yet shown up in band: rank 1 of ring 0"), "{text}");
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("waits in band: ring 0 rank 2: port port2 src 10.0.0.3"), "{text}");
        let printed = printed("200ms");
        assert!(
            printed.contains("rank 1: has not shown up") && !printed.contains("rank 0:"),
            "{printed}"
        );
        assert!(!printed.contains("none is a first packet"), "{printed}");
        stop.store(true, Ordering::Relaxed);
        let got = two.join().unwrap().unwrap();
        assert!(
            got.iter().all(|g| g.sums + g.unsummed == 0),
            "nothing has reached a receiver: {got:?}"
        );
    });
    // Rank 1 is running, with a wrong token.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| wrong.run_some(&hosts, Connections::new(3), &[1], 10, &stop));
        let printed = printed("1500ms");
        stop.store(true, Ordering::Relaxed);
        assert!(
            printed.contains("first packets with an unknown token arrived during the watch"),
            "{printed}"
        );
        assert!(printed.contains("10.0.0.2 sends to queue pair 0x3004 of 10.0.0.3"), "{printed}");
    });
    assert_sums(&app.run_all(&hosts, Connections::new(4), 10).unwrap(), 10);
}

/// The first packet of a rank's first message, from the rank's own addresses.
fn first_packet(
    app: &InBandRing,
    c: Connections,
    rank: u32,
    change: fn(&mut JobHeader),
) -> FrameSpec {
    let next = (rank + 1) % app.ranks;
    let mut header = app.header(rank, 0);
    change(&mut header);
    let mut payload = app.message(c, rank, 0);
    let only = payload.len() <= app.mtu as usize;
    payload.truncate(app.mtu as usize);
    payload[..JOB_HEADER_LEN].copy_from_slice(&header.encode());
    let (qpn, psn) = (c.receives(next), c.first_psn(rank));
    let mut spec =
        FrameSpec { id: 0, ..FrameSpec::send(rank as u8 + 1, next as u8 + 1, qpn, psn, payload) };
    spec.bth.opcode = Opcode::data(false, true, only, false);
    spec
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn contradictions_fail_the_job_with_the_reason_until_they_are_fixed() {
    let cluster = cluster(2, false);
    let hosts = Hosts::of(cluster.lab());
    type Change = fn(&mut JobHeader);
    let wrong: [(Change, &str); 4] = [
        (|h| h.ranks = 3, "says that there are 3 ranks, the job has 2"),
        (|h| h.dtype = 2, "sends data type 2: 1 (i32)"),
        (|h| h.fragments = 20, "says that its message has 20 packets, the job's messages"),
        (|h| h.fragments = 15, "begins with a message of 15 packets, and rank 0 with one of 16"),
    ];
    for (change, words) in wrong {
        let app = InBandRing::create(&cluster, 2).unwrap();
        let (c, stop) = (Connections::new(1), AtomicBool::new(false));
        let tap = Tap::open(cluster.lab().host(1), Host::INTERFACE).unwrap();
        std::thread::scope(|scope| {
            let one = scope.spawn(|| app.run_some(&hosts, c, &[0], 10, &stop));
            wait_for(&cluster, "rank 0", |job| unclaimed(job) == [1]);
            tap.send(&first_packet(&app, c, 1, change).build()).unwrap();
            let job = wait_for(&cluster, words, |job| job["state"] == "failed");
            let error = job["error"].as_str().unwrap();
            assert!(error.contains(words) && error.contains("rank 1 of ring 0"), "{job:#}");
            let printed = cluster.netsum(&["diagnose", "app", "--watch", "100ms"]).unwrap();
            assert!(printed.contains(words), "{printed}");
            stop.store(true, Ordering::Relaxed);
            one.join().unwrap().unwrap();
        });
        assert_sums(&app.run_all(&hosts, Connections::new(2), 10).unwrap(), 10);
        assert_eq!(cluster.netsum_json(&["job", "show", "app"]).unwrap()["state"], "active");
        delete(&cluster);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_token_does_not_replace_another_hosts_rank() {
    const FOREIGN: usize = 3;
    let cluster = cluster(FOREIGN + 1, false);
    let hosts = Hosts::of(cluster.lab());
    let app = InBandRing::create(&cluster, 3).unwrap();
    let foreign = Tap::open(cluster.lab().host(FOREIGN), Host::INTERFACE).unwrap();
    let theirs = Connections::new(9);
    // Claims for all ranks, in the foreign host's own name and in the ranks' names.
    let claims: Vec<Vec<u8>> = (0..3)
        .flat_map(|rank| {
            let forged = first_packet(&app, theirs, rank, |_| ());
            let recorded = first_packet(&app, Connections::new(1), rank, |_| ());
            [from_host(forged.clone(), FOREIGN as u8), forged, recorded].map(|spec| spec.build())
        })
        .collect();
    let attack = || claims.iter().for_each(|frame| foreign.send(frame).unwrap());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let two = scope.spawn(|| {
            app.run_some(&hosts, Connections::new(1), &[0, 1], 300, &AtomicBool::new(false))
        });
        wait_for(&cluster, "two claims", |job| unclaimed(job) == [2]);
        // Claims for the ranks that already wait. (The test leaves the third rank's place alone,
        // because anybody with the token can take it, once.)
        for (claim, words) in [
            (0, "rank 0 of ring 0, 10.0.0.4 behind port3: 10.0.0.1 waits as this rank already"),
            (1, "rank 0 of ring 0, 10.0.0.1 behind port3: 10.0.0.1 waits as this rank already"),
            (3, "rank 1 of ring 0, 10.0.0.4 behind port3: 10.0.0.2 waits as this rank already"),
        ] {
            foreign.send(&claims[claim]).unwrap();
            wait_for(&cluster, words, |job| has_refused(job, words));
        }
        let job = cluster.netsum_json(&["job", "show", "app"]).unwrap();
        assert_eq!(unclaimed(&job), [2], "{job:#}");
        let third = scope.spawn(|| {
            app.run_some(&hosts, Connections::new(1), &[2], 300, &AtomicBool::new(false))
        });
        wait_for(&cluster, "the epoch", |job| job["state"] == "active");
        // All claims for the running ranks, as often as possible.
        let attacker = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                attack();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let got = [two.join().unwrap().unwrap(), third.join().unwrap().unwrap()].concat();
        attack();
        let job = wait_for(&cluster, "a refusal", |job| {
            has_refused(
                job,
                "rank 2 of ring 0, 10.0.0.4 behind port3: the rank is at work from 10.0.0.3",
            )
        });
        stop.store(true, Ordering::Relaxed);
        attacker.join().unwrap();
        assert_sums(&got, 300);
        assert_eq!((&job["epoch"], &job["state"]), (&1.into(), &"active".into()), "{job:#}");
        assert!(job["in_band"]["claims"].as_array().unwrap().is_empty(), "{job:#}");
        assert!(job["in_band"]["refusals"].as_array().unwrap().len() <= 8, "{job:#}");
        assert!(
            cluster.counter(None, "spoofed").unwrap()
                + cluster.counter(None, "wrong_port").unwrap()
                > 0
        );
    });
    // For a job that begins, an address that belongs behind another port cannot be claimed for this
    // port.
    let mut other = InBandRing { message_size: 2048, ..InBandRing::new(2, InBandToken([0; 16])) };
    let name =
        cluster.netsum_json(&["job", "create", "other", "--in-band", "--ranks", "2"]).unwrap();
    assert_eq!(name["state"], "waiting");
    other.token = token_of(&name);
    let before = cluster.counter(None, "spoofed").unwrap();
    for rank in 0..2 {
        foreign.send(&first_packet(&other, theirs, rank, |_| ()).build()).unwrap();
    }
    let start = Instant::now();
    while cluster.counter(None, "spoofed").unwrap() < before + 2 {
        assert!(start.elapsed() < TIMEOUT, "the claims were not seen");
        std::thread::sleep(Duration::from_millis(5));
    }
    let job = cluster.netsum_json(&["job", "show", "other"]).unwrap();
    assert_eq!(unclaimed(&job), [0, 1], "{job:#}");
}

fn token_of(job: &Value) -> InBandToken {
    let text = job["in_band"]["token"].as_str().unwrap();
    InBandToken(std::array::from_fn(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()))
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_flood_of_first_packets_keeps_no_job_from_its_sums() {
    let cluster = cluster(4, false);
    let hosts = Hosts::of(cluster.lab());
    let app = InBandRing::create(&cluster, 3).unwrap();
    // With the token of another job, for ranks and rings of all kinds, and without any token.
    let other = token_of(
        &cluster.netsum_json(&["job", "create", "other", "--in-band", "--ranks", "64"]).unwrap(),
    );
    let flooder = InBandRing { token: other, ranks: 64, ..app.clone() };
    let tap = Tap::open(cluster.lab().host(3), Host::INTERFACE).unwrap();
    let frames: Vec<Vec<u8>> = (0..1000u32)
        .map(|i| {
            let mut spec = from_host(
                first_packet(&flooder, Connections::new(i % 5 + 10 * (i % 2)), i % 3, |_| ()),
                3,
            );
            spec.payload[24..28].copy_from_slice(&(i % 7).to_le_bytes());
            spec.payload[28..32].copy_from_slice(&i.to_le_bytes());
            spec.payload[8] ^= (i % 2) as u8;
            spec.build()
        })
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                frames.iter().for_each(|frame| tap.send(frame).unwrap());
                std::thread::yield_now();
            }
        });
        let got = app.run_all(&hosts, Connections::new(1), 30);
        stop.store(true, Ordering::Relaxed);
        flood.join().unwrap();
        assert_sums(&got.unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log())), 30);
    });
    assert!(cluster.counter(Some("other"), "in_band_first").unwrap() > 500);
    assert!(cluster.counter(None, "in_band_wrong_token").unwrap() > 500);
    let lines = cluster.daemon_log().lines().count();
    assert!(lines < 1000, "the log has {lines} lines");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn no_first_packet_passes_during_a_daemon_restart() {
    let mut cluster = Cluster::without_daemon(LabSpec { mtu: 2300, ..LabSpec::hosts(3) }).unwrap();
    cluster.pin();
    cluster.start_daemon().unwrap();
    let app = InBandRing::create(&cluster, 3).unwrap();
    let hosts = Hosts::of(cluster.lab());
    for n in 1..3 {
        // The daemon is killed before all ranks have appeared. The last one appears while no daemon
        // runs.
        let c = Connections::new(n);
        let stop = AtomicBool::new(false);
        let others = Others::new(&stop, 3);
        let got = std::thread::scope(|scope| {
            let (app, hosts, others) = (&app, &hosts, &others);
            let start = |rank| scope.spawn(move || app.run(hosts, rank, c, 200, others));
            let mut ranks = vec![start(0), start(1)];
            wait_for(&cluster, "two claims", |job| unclaimed(job) == [2]);
            cluster.kill_daemon().unwrap();
            ranks.push(start(2));
            std::thread::sleep(Duration::from_millis(300));
            cluster.start_daemon().unwrap();
            // The daemon is killed once more while the job is running.
            wait_for(&cluster, "the epoch", |job| job["epoch"] == n);
            cluster.kill_daemon().unwrap();
            std::thread::sleep(Duration::from_millis(50));
            cluster.start_daemon().unwrap();
            ranks.into_iter().map(|r| r.join().unwrap().unwrap()).collect::<Vec<Got>>()
        });
        assert_sums(&got, 200);
    }
    let log = cluster.daemon_log();
    let secret: String = app.token.0.iter().map(|b| format!("{b:02x}")).collect();
    assert!(log.contains("took over") && !log.contains(&secret), "{log}");
}
