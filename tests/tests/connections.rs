//! Reliable connections through the data plane, of an application that knows nothing of netsum
//! except its flows.

use std::time::{Duration, Instant};

use netsum_common::abi::RingNumber;
use netsum_common::counters::Counter;
use netsum_dataplane::{DataPlane, count};
use netsum_lab::faults::Faults;
use netsum_lab::udp_ring::{self, Home, Load};
use netsum_lab::{Lab, LabSpec};
use netsum_worker::rc::{Operation, Stats};

fn lab(hosts: usize) -> LabSpec {
    LabSpec { mtu: 2300, ipv6: true, ..LabSpec::hosts(hosts) }
}

/// Runs a load with rank r on host `places[r]`, and returns the counters of the endpoints and of
/// the ring.
fn run(lab: &Lab, load: Load, places: &[usize], v6: bool) -> (Vec<Stats>, Vec<u64>, Duration) {
    let plane = udp_ring::register(lab, &load, places, v6).unwrap();
    let home = |&place: &usize| -> Home<'_> {
        let host = lab.host(place);
        (host, if v6 { host.ipv6(0) } else { host.ip(0) })
    };
    let homes: Vec<Home<'_>> = places.iter().map(home).collect();
    let start = Instant::now();
    let stats = udp_ring::run(load, &homes).unwrap();
    (stats, plane.counters(RingNumber(1)).unwrap(), start.elapsed())
}

fn each_on_its_host(ranks: u32) -> Vec<usize> {
    (0..ranks as usize).collect()
}

/// No packet was lost, duplicated, late or corrupted.
fn assert_clean(load: &Load, stats: &[Stats], counters: &[u64]) {
    for (host, s) in stats.iter().enumerate() {
        assert_eq!(
            (s.retransmissions, s.out_of_sequence, s.naks_sent),
            (0, 0, 0),
            "host {host}: {s:?}"
        );
        assert_eq!((s.rx_icrc_encapsulated, s.discarded), (0, 0), "host {host}: {s:?}");
    }
    assert_eq!(count(counters, Counter::Released), load.fragments());
    assert_eq!(count(counters, Counter::Contributions), load.fragments() * u64::from(load.ranks));
    assert_eq!(count(counters, Counter::Replays) + count(counters, Counter::DuplicateRequest), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_ring_of_connections_is_summed_without_a_retransmission() {
    for (ranks, mtu) in [(2, 1024), (3, 256), (4, 2048), (4, 1024)] {
        let load = Load { mtu, messages: 200, ..Load::new(ranks) };
        let lab = Lab::new(lab(ranks as usize)).unwrap();
        let (stats, counters, time) = run(&lab, load, &each_on_its_host(ranks), false);
        let bytes = f64::from(load.messages) * f64::from(load.message_size);
        println!("{ranks} ranks, path MTU {mtu}: {:.2} Gb/s", bytes * 8e-9 / time.as_secs_f64());
        assert_clean(&load, &stats, &counters);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_of_one_host_differ_by_their_queue_pairs() {
    let write = Operation::Write { address: 0x1000, rkey: 7 };
    for (places, v6, operation) in [
        (&[0, 1, 0, 1][..], false, Operation::Send),
        (&[0, 1, 0, 2, 1, 2], true, Operation::Send),
        (&[0, 1, 0, 1, 0, 1, 0, 1], false, write),
    ] {
        let load =
            Load { messages: 50, operation, immediate: v6, ..Load::new(places.len() as u32) };
        let lab = Lab::new(lab(places.iter().max().unwrap() + 1)).unwrap();
        let (stats, counters, _) = run(&lab, load, places, v6);
        assert_clean(&load, &stats, &counters);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_ring_of_connections_survives_loss_both_ways() {
    let load = Load { ack_timeout: Duration::from_millis(50), ..Load::new(3) };
    let lab = Lab::new(LabSpec { faulty_links: true, ..lab(3) }).unwrap();
    for host in lab.hosts() {
        let seed = host.number() as u32 + 1;
        host.set_faults(Faults::loss(0.01), Faults::loss(0.01), seed).unwrap();
    }
    let (stats, counters, time) = run(&lab, load, &each_on_its_host(3), false);
    let sent: u64 = stats.iter().map(|s| s.sent_packets).sum();
    let again: u64 = stats.iter().map(|s| s.retransmissions).sum();
    println!("1% loss: {again} of {sent} packets sent again, {time:?}");
    assert!(again > 0, "the links lost nothing");
    assert_eq!(count(&counters, Counter::Released), load.fragments());
}
