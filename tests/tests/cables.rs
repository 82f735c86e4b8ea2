//! The lab's cables: they lose what they should, and nothing else.

use std::net::UdpSocket;
use std::time::Duration;

use netsum_lab::faults::{CableCounts, Faults};
use netsum_lab::traffic::{ping, tcp_transfer};
use netsum_lab::{Lab, LabSpec};

/// RoCEv2's.
const PORT: u16 = 4791;

/// Sends numbered packets from host 0 to host 1; those that arrive.
fn send(lab: &Lab, packets: u32, v6: bool) -> Vec<u32> {
    let ip = |host: usize| if v6 { lab.host(host).ipv6(0) } else { lab.host(host).ip(0) };
    let socket = |host: usize| lab.host(host).enter(|| UdpSocket::bind((ip(host), PORT))).unwrap();
    let (from, to) = (socket(0), socket(1));
    let mut arrived = Vec::new();
    let mut buffer = [0; 16];
    // In small lots, so that no socket buffer overflows; the last packet of a lot may be a lost one.
    for first in (0..packets).step_by(100) {
        for number in first..packets.min(first + 100) {
            from.send_to(&number.to_be_bytes(), (ip(1), PORT)).unwrap();
        }
        to.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        while let Ok(4) = to.recv(&mut buffer) {
            arrived.push(u32::from_be_bytes(buffer[..4].try_into().unwrap()));
        }
    }
    arrived
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_cable_loses_its_share_and_the_same_packets_for_the_same_seed() {
    let lab = Lab::new(LabSpec { cables: true, ipv6: true, ..LabSpec::hosts(2) }).unwrap();
    assert_eq!(send(&lab, 200, false), (0..200).collect::<Vec<_>>(), "a cable that loses nothing");
    let faults = |seed| Faults { up: 0.1, down: 0.0, seed };
    let mut seen = Vec::new();
    for (seed, v6) in [(1, false), (1, true), (2, false)] {
        lab.host(0).set_faults(faults(seed)).unwrap();
        let arrived = send(&lab, 1000, v6);
        let counts = lab.host(0).cable().unwrap().counts().unwrap();
        assert_eq!(counts.up, 1000);
        assert_eq!(arrived.len() as u64, 1000 - counts.up_lost);
        // Five standard deviations of a binomial distribution around its mean.
        assert!((53..=147).contains(&counts.up_lost), "{counts:?}");
        assert_eq!(counts.down_lost, 0);
        seen.push(arrived);
    }
    assert_eq!(seen[0], seen[1], "the same seed");
    assert_ne!(seen[0], seen[2], "another seed");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn each_direction_is_lost_on_its_own_and_other_traffic_is_not() {
    let lab = Lab::new(LabSpec { cables: true, ..LabSpec::hosts(2) }).unwrap();
    lab.host(1).set_faults(Faults { up: 0.0, down: 1.0, seed: 0 }).unwrap();
    assert_eq!(send(&lab, 50, false), Vec::<u32>::new());
    let counts = lab.host(1).cable().unwrap().counts().unwrap();
    assert_eq!(counts, CableCounts { up: 0, up_lost: 0, down: 50, down_lost: 50 });
    let counts = lab.host(0).cable().unwrap().counts().unwrap();
    assert_eq!(counts, CableCounts { up: 50, up_lost: 0, down: 0, down_lost: 0 });

    let second = Duration::from_secs(1);
    ping(lab.host(0), lab.host(1).ip(0), 3, second).unwrap();
    tcp_transfer(lab.host(0), lab.host(1), lab.host(1).ip(0), 1 << 20, 5 * second).unwrap();
    lab.host(1).set_faults(Faults::default()).unwrap();
    assert_eq!(send(&lab, 50, false).len(), 50);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn impossible_faults_are_refused() {
    let lab = Lab::new(LabSpec { cables: true, ..LabSpec::hosts(1) }).unwrap();
    for rate in [-0.1, 1.1, f64::NAN] {
        let error = lab.host(0).set_faults(Faults { down: rate, ..Faults::default() }).unwrap_err();
        assert!(error.to_string().contains("0 to 1"), "{error}");
    }
    let plain = Lab::new(LabSpec::hosts(1)).unwrap();
    assert!(plain.host(0).set_faults(Faults::default()).unwrap_err().to_string().contains("no cables"));
}
