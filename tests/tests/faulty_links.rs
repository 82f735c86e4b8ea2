//! The lab's emulated links (`faulty_links`) apply their faults to the right packets, and change
//! nothing else.

use std::net::UdpSocket;
use std::time::Duration;

use netsum_lab::faults::{DirectionCounts, Fault, Faults, Kind, LinkCounts, Nth};
use netsum_lab::frames::FrameSpec;
use netsum_lab::tap::Tap;
use netsum_lab::traffic::{ping, tcp_transfer};
use netsum_lab::{Host, Lab, LabSpec};

/// RoCEv2's UDP port.
const PORT: u16 = 4791;

/// Sends numbered packets from host 0 to host 1, and returns those that arrive.
fn send(lab: &Lab, packets: u32, v6: bool) -> Vec<u32> {
    let ip = |host: usize| if v6 { lab.host(host).ipv6(0) } else { lab.host(host).ip(0) };
    let socket = |host: usize| lab.host(host).enter(|| UdpSocket::bind((ip(host), PORT))).unwrap();
    let (from, to) = (socket(0), socket(1));
    let mut arrived = Vec::new();
    let mut buffer = [0; 16];
    // Small batches keep socket buffers from overflowing. The last packet of a batch may be lost.
    for first in (0..packets).step_by(100) {
        for number in first..packets.min(first + 100) {
            from.send_to(&number.to_be_bytes(), (ip(1), PORT)).unwrap();
        }
        // Late packets of other batches arrive with the next.
        let wait = if first + 100 >= packets { 500 } else { 20 };
        to.set_read_timeout(Some(Duration::from_millis(wait))).unwrap();
        while let Ok(4) = to.recv(&mut buffer) {
            arrived.push(u32::from_be_bytes(buffer[..4].try_into().unwrap()));
        }
    }
    arrived
}

fn lab() -> Lab {
    Lab::new(LabSpec { faulty_links: true, ipv6: true, ..LabSpec::hosts(2) }).unwrap()
}

/// Five standard deviations of a binomial distribution around its mean, for a tenth of 1000
/// packets.
const TENTH: std::ops::RangeInclusive<u64> = 53..=147;

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_link_loses_its_share_and_the_same_packets_for_the_same_seed() {
    let lab = lab();
    assert_eq!(send(&lab, 200, false), (0..200).collect::<Vec<_>>(), "a link without faults");
    let mut seen = Vec::new();
    for (seed, v6) in [(1, false), (1, true), (2, false)] {
        lab.host(0).set_faults(Faults::loss(0.1), Faults::NONE, seed).unwrap();
        let arrived = send(&lab, 1000, v6);
        let counts = lab.host(0).fault_link().unwrap().counts().unwrap();
        assert_eq!(counts.up.seen, 1000);
        assert_eq!(arrived.len() as u64, 1000 - counts.up.lost);
        assert!(TENTH.contains(&counts.up.lost), "{counts:?}");
        assert_eq!((counts.up.faults(), counts.down.faults()), (counts.up.lost, 0));
        seen.push(arrived);
    }
    assert_eq!(seen[0], seen[1], "the same seed");
    assert_ne!(seen[0], seen[2], "another seed");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn duplicates_come_once_more_and_soon() {
    let lab = lab();
    for v6 in [false, true] {
        lab.host(0).set_faults(Faults::of(Fault::Duplicate, 0.1), Faults::NONE, 1).unwrap();
        let arrived = send(&lab, 1000, v6);
        let up = lab.host(0).fault_link().unwrap().counts().unwrap().up;
        assert!(TENTH.contains(&up.duplicated) && up.faults() == up.duplicated, "{up:?}");
        let (mut first, mut again) = (Vec::new(), Vec::new());
        for number in arrived {
            if first.contains(&number) {
                // Duplicates that wait leave one by one, so some wait longer than they would alone.
                assert!(first.len() as u32 - number <= 20, "{number} again behind {}", first.len());
                again.push(number);
            } else {
                first.push(number);
            }
        }
        assert_eq!(first, (0..1000).collect::<Vec<_>>(), "the first time all come in order");
        // The last duplicates may still wait for packets to leave with.
        assert!(
            (up.duplicated - 8..=up.duplicated).contains(&(again.len() as u64)),
            "{up:?}, {again:?}"
        );
        assert!(again.windows(2).all(|w| w[0] < w[1]), "one duplicate for each: {again:?}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn late_packets_come_once_and_soon() {
    let lab = lab();
    let mut seen = Vec::new();
    for (seed, v6) in [(1, false), (1, true), (2, false)] {
        let lab = if seed == 1 { &lab } else { &self::lab() };
        lab.host(0).set_faults(Faults::of(Fault::Reorder, 0.1), Faults::NONE, seed).unwrap();
        let arrived = send(lab, 1000, v6);
        let up = lab.host(0).fault_link().unwrap().counts().unwrap().up;
        assert!(TENTH.contains(&up.reordered) && up.faults() == up.reordered, "{up:?}");
        let mut late = 0;
        for (i, number) in arrived.iter().enumerate() {
            let greatest = arrived[..i].iter().max().copied().unwrap_or_default();
            assert!(greatest <= number + 20, "{number} behind {greatest}");
            late += u64::from(*number < greatest);
        }
        assert!(late + 8 >= up.reordered && late <= up.reordered, "{up:?}, {late} late");
        let mut sorted = arrived.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), arrived.len(), "none comes twice");
        assert!(arrived.len() >= 992, "{} of 1000", arrived.len());
        // Packets left in the stash arrive with the next packets.
        lab.host(0).set_faults(Faults::NONE, Faults::NONE, 0).unwrap();
        assert_eq!(send(lab, 100, v6).len(), 100 + 1000 - arrived.len());
        seen.push(arrived);
    }
    assert_eq!(seen[0], seen[1], "the same seed");
    assert_ne!(seen[0], seen[2], "another seed");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn corrupt_packets_differ_in_one_bit() {
    let lab = lab();
    // The tap is at the link's end, because a bridge with br_netfilter drops packets with a wrong
    // IP header.
    let tap = Tap::open(lab.box_(), &lab.box_().port(0)).unwrap();
    let spec = |psn| FrameSpec::send(1, 2, 0x77, psn, vec![0x5a; 256]);
    let from = Tap::open(lab.host(0), Host::INTERFACE).unwrap();
    lab.host(0).set_faults(Faults::of(Fault::Corrupt, 1.0), Faults::NONE, 3).unwrap();
    let mut places = Vec::new();
    for psn in 0..100 {
        let frame = spec(psn).build();
        from.send(&frame).unwrap();
        let got = tap.receive(Duration::from_secs(5), |got| got.len() == frame.len()).unwrap();
        let flipped: u32 = frame.iter().zip(&got).map(|(a, b)| (a ^ b).count_ones()).sum();
        assert_eq!(flipped, 1, "PSN {psn}");
        places.push(frame.iter().zip(&got).position(|(a, b)| a != b).unwrap());
    }
    assert_eq!(lab.host(0).fault_link().unwrap().counts().unwrap().up.corrupted, 100);
    assert!(places.iter().all(|at| *at >= 14), "{places:?}");
    assert!(places.iter().any(|at| *at < 54) && places.iter().any(|at| *at > 250), "{places:?}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_nth_packet_of_a_kind_is_hit() {
    let lab = lab();
    // The numbers that `send` sends begin with a zero byte, the opcode of a first packet. The rest
    // of the packet does not matter.
    lab.host(0).set_faults(Faults::nth(Kind::First, 5, Fault::Loss), Faults::NONE, 0).unwrap();
    let all_but = |lost: &[u32]| (0..100).filter(|n| !lost.contains(n)).collect::<Vec<u32>>();
    assert_eq!(send(&lab, 100, false), all_but(&[4]));
    let nth = Nth { kind: Kind::First, n: 1, times: 3, what: Fault::Loss };
    lab.host(0).set_faults(Faults { nth: Some(nth), ..Faults::NONE }, Faults::NONE, 0).unwrap();
    assert_eq!(send(&lab, 100, true), all_but(&[0, 1, 2]));
    lab.host(0).set_faults(Faults::nth(Kind::Ack, 1, Fault::Loss), Faults::NONE, 0).unwrap();
    assert_eq!(send(&lab, 100, false), all_but(&[]), "none is an acknowledgement");
    assert_eq!(lab.host(0).fault_link().unwrap().counts().unwrap().up.faults(), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn each_direction_suffers_on_its_own_and_other_traffic_does_not() {
    let lab = lab();
    lab.host(1).set_faults(Faults::NONE, Faults::loss(1.0), 0).unwrap();
    assert_eq!(send(&lab, 50, false), Vec::<u32>::new());
    let counts = lab.host(1).fault_link().unwrap().counts().unwrap();
    // Without an n-th packet to watch for, the link counts data.
    let down = DirectionCounts { seen: 50, lost: 50, of_kind: 50, ..DirectionCounts::default() };
    assert_eq!(counts, LinkCounts { down, ..LinkCounts::default() });
    let counts = lab.host(0).fault_link().unwrap().counts().unwrap();
    assert_eq!((counts.up.seen, counts.up.faults(), counts.down.seen), (50, 0, 0));

    let second = Duration::from_secs(1);
    ping(lab.host(0), lab.host(1).ip(0), 3, second).unwrap();
    tcp_transfer(lab.host(0), lab.host(1), lab.host(1).ip(0), 1 << 20, 5 * second).unwrap();
    lab.host(1).set_faults(Faults::NONE, Faults::NONE, 0).unwrap();
    assert_eq!(send(&lab, 50, false).len(), 50);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn impossible_faults_are_refused() {
    let lab = Lab::new(LabSpec { faulty_links: true, ..LabSpec::hosts(1) }).unwrap();
    let too_much = Faults { loss: 0.6, reorder: 0.6, ..Faults::NONE };
    let zeroth = Faults::nth(Kind::Ack, 0, Fault::Loss);
    let rates = [-0.1, 1.1, f64::NAN].map(|rate| (Faults::loss(rate), "0 to 1"));
    for (down, word) in rates.into_iter().chain([(too_much, "together 0 to 1"), (zeroth, "from 1")])
    {
        let error = lab.host(0).set_faults(Faults::NONE, down, 0).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
    let plain = Lab::new(LabSpec::hosts(1)).unwrap();
    let error = plain.host(0).set_faults(Faults::NONE, Faults::NONE, 0).unwrap_err();
    assert!(error.to_string().contains("no faulty links"), "{error}");
}
