//! Congestion marks of one host's uplink reach every receiver's results, congestion notifications
//! pass the box, and netsum's own hosts slow down.

use std::time::{Duration, Instant};

use netsum_common::abi::RingNumber;
use netsum_common::counters::Counter;
use netsum_common::wire::{self, Bth, Opcode};
use netsum_dataplane::{BpfDataPlane, DataPlane, count};
use netsum_lab::cluster::{Cluster, JobSpec, one_on_each_host};
use netsum_lab::faults::{Bottleneck, DirectionCounts, Fault, Faults, Kind, LinkCounts, Nth};
use netsum_lab::frames::{FrameSpec, lanes, sum};
use netsum_lab::tap::Tap;
use netsum_lab::traffic::tcp_transfer;
use netsum_lab::udp_ring::{self, Home, Load};
use netsum_lab::{Host, Lab, LabSpec};
use netsum_worker::rc::Stats;

const SECOND: Duration = Duration::from_secs(1);
const RANKS: u32 = 3;
const PLACES: [usize; 3] = [0, 1, 2];
/// BECN, in the byte of the BTH that the ICRC does not cover.
const BECN: u8 = 0x40;

fn lab() -> Lab {
    Lab::new(LabSpec {
        mtu: 2300,
        ipv6: true,
        faulty_links: true,
        ..LabSpec::hosts(RANKS as usize)
    })
    .unwrap()
}

/// A ring of connections over emulated links, none of which loses a packet.
struct Ring {
    stats: Vec<Stats>,
    faulty_links: Vec<LinkCounts>,
    counters: Vec<u64>,
}

impl Ring {
    fn run(lab: &Lab, plane: &BpfDataPlane, load: Load, v6: bool) -> Self {
        let homes: Vec<Home<'_>> = lab
            .hosts()
            .iter()
            .map(|h| -> Home<'_> { (h, if v6 { h.ipv6(0) } else { h.ip(0) }) })
            .collect();
        let stats = udp_ring::run(load, &homes).unwrap();
        let all = plane.counters(RingNumber(1)).unwrap();
        let named: Vec<_> = Counter::ALL
            .iter()
            .map(|&c| (c.name(), count(&all, c)))
            .filter(|(_, n)| *n > 0)
            .collect();
        assert!(
            stats.iter().all(|s| s.retransmissions == 0 && s.naks_sent == 0),
            "{stats:?}\n{named:?}"
        );
        let faulty_links =
            lab.hosts().iter().map(|h| h.fault_link().unwrap().counts().unwrap()).collect();
        Self { stats, faulty_links, counters: plane.counters(RingNumber(1)).unwrap() }
    }

    fn new(uplink: Faults, load: Load, v6: bool) -> Self {
        let lab = lab();
        lab.host(0).set_faults(uplink, Faults::NONE, 5).unwrap();
        let plane = udp_ring::register(&lab, &load, &PLACES, v6).unwrap();
        Self::run(&lab, &plane, load, v6)
    }

    /// Contributions that arrived at the box with a mark.
    fn marked(&self) -> u64 {
        count(&self.counters, Counter::EcnMarked)
    }
}

/// Every receiver gets exactly the marks of host 0's uplink: the marks of its data arrive in the
/// results, and those of its acknowledgements at rank 2, to which host 0 sends them.
fn assert_carried_over(ring: &Ring) {
    let all = ring.faulty_links[0].up.marked;
    let received: Vec<u64> = ring.stats.iter().map(|s| s.ce_received).collect();
    assert_eq!(received, [ring.marked(), ring.marked(), all], "{:?}", ring.faulty_links);
    assert_eq!(
        ring.faulty_links.iter().map(|c| c.up.spared).sum::<u64>(),
        0,
        "all take part in ECN"
    );
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn marks_of_one_uplink_reach_every_receiver_and_no_other_packet() {
    for (v6, mtu) in [(false, 1024), (true, 2048)] {
        let load = Load { mtu, ..Load::new(RANKS) };
        let ring = Ring::new(Faults::NONE, load, v6);
        assert_eq!(
            ring.marked() + ring.stats.iter().map(|s| s.ce_received).sum::<u64>(),
            0,
            "no marks"
        );

        let some = Nth { kind: Kind::Middle, n: 100, times: 25, what: Fault::Mark };
        let ring = Ring::new(Faults { nth: Some(some), ..Faults::NONE }, load, v6);
        assert_eq!(ring.marked(), 25);
        assert_carried_over(&ring);

        let ring = Ring::new(Faults::of(Fault::Mark, 0.05), load, v6);
        let share = ring.marked() as f64 / load.fragments() as f64;
        assert!((0.03..0.07).contains(&share), "{share}");
        assert_carried_over(&ring);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_bottleneck_marks_what_comes_behind_its_depth() {
    let bottleneck =
        |rate| Faults { bottleneck: Some(Bottleneck { rate, depth: 16 << 10 }), ..Faults::NONE };
    // The application sends 64 KiB at a time. At 20 MB/s the end of a message queues behind more
    // than 16 KiB.
    let load = Load::new(RANKS);
    let ring = Ring::new(bottleneck(20_000_000), load, false);
    let share = ring.marked() as f64 / load.fragments() as f64;
    println!("{:.1} % of the packets met congestion", share * 100.0);
    assert!(share > 0.1, "{share}");
    assert_carried_over(&ring);
    // No host here can send 8 GB/s.
    let ring = Ring::new(bottleneck(8_000_000_000), load, false);
    assert_eq!(ring.marked(), 0);
    assert_carried_over(&ring);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn receivers_notify_their_senders_through_the_box() {
    let lab = lab();
    let load = Load { cnp_interval: Some(Duration::from_micros(50)), ..Load::new(RANKS) };
    let counted = Nth { kind: Kind::Cnp, n: 1, times: 0, what: Fault::Mark };
    let cnps = Faults { nth: Some(counted), ..Faults::NONE };
    for host in lab.hosts() {
        let mark = if host.number() == 0 { 0.05 } else { 0.0 };
        host.set_faults(Faults { mark, ..cnps }, cnps, 6).unwrap();
    }
    let plane = udp_ring::register(&lab, &load, &PLACES, false).unwrap();
    let ring = Ring::run(&lab, &plane, load, false);
    for rank in 0..RANKS as usize {
        let sender = (rank + 2) % 3;
        let (sent, received) = (ring.stats[rank].cnp_sent, ring.stats[sender].cnp_received);
        println!(
            "rank {rank} got {} marks and sent {sent} notifications",
            ring.stats[rank].ce_received
        );
        assert!(sent > 0 && sent <= ring.stats[rank].ce_received);
        assert_eq!(received, sent, "of rank {rank} at rank {sender}");
        let (up, down) =
            (ring.faulty_links[rank].up.of_kind, ring.faulty_links[sender].down.of_kind);
        assert_eq!((up, down), (sent, sent), "rank {rank}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_that_does_not_use_ecn_is_never_marked() {
    for (v6, vlan) in [(false, None), (true, None), (false, Some(0x6005)), (true, Some(0x6005))] {
        let lab = lab();
        for host in lab.hosts() {
            host.set_faults(Faults::of(Fault::Mark, 1.0), Faults::NONE, 7).unwrap();
        }
        let load =
            Load { mtu: 256, message_size: 256, window: 4, first_psn: 77, ..Load::new(RANKS) };
        let _plane = udp_ring::register(&lab, &load, &PLACES, v6).unwrap();
        let taps: Vec<Tap> =
            lab.hosts().iter().map(|h| Tap::open(h, Host::INTERFACE).unwrap()).collect();
        // ECT(0), not ECT, and ECT(1), each with its own differentiated service.
        let tos = |rank: u32| [0x68 | 2, 0x28, 0x48 | 1][rank as usize];
        let fragment = |rank: u32, index: u32| {
            let (from, to) = (rank as u8 + 1, ((rank + 1) % RANKS) as u8 + 1);
            let qpn = udp_ring::receive_qpn((rank + 1) % RANKS);
            let spec =
                FrameSpec::send(from, to, qpn, load.psn(rank) + index, lanes(rank + index * 7, 64));
            let spec = FrameSpec {
                tos: tos(rank),
                vlan,
                udp_checksum: 0x1234 * (index % 2) as u16,
                ..spec
            };
            if v6 { spec.v6() } else { spec }
        };
        for index in 0..20 {
            for rank in 0..RANKS {
                taps[rank as usize].send(&fragment(rank, index).build()).unwrap();
            }
            let all: Vec<_> = (0..RANKS).map(|rank| fragment(rank, index).payload).collect();
            for rank in 0..RANKS {
                let sender = (rank + RANKS - 1) % RANKS;
                let got = taps[rank as usize].receive(SECOND, |f| wire::parse(f).is_ok()).unwrap();
                let tos = if tos(sender) & 3 == 0 { tos(sender) } else { tos(sender) | 3 };
                let source = fragment(sender, index);
                let expected = FrameSpec { payload: sum(&all), id: 0, tos, ..source };
                assert_eq!(
                    got,
                    expected.build_result(),
                    "v6 {v6}, VLAN {vlan:?}, index {index}, rank {rank}"
                );
            }
        }
        let counts: Vec<_> = lab
            .hosts()
            .iter()
            .map(|h| h.fault_link().unwrap().counts().unwrap().up)
            .map(|up| (up.marked, up.spared))
            .collect();
        assert_eq!(counts, [(20, 0), (0, 20), (20, 0)]);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn marks_and_notifications_beside_a_job_at_work() {
    let cluster =
        Cluster::start(LabSpec { faulty_links: true, ..LabSpec::hosts(RANKS as usize) }).unwrap();
    let lab = cluster.lab();
    let job = JobSpec::new("marked", RANKS);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(RANKS)).unwrap();
    let before = group.all_reduce("i32", 100_000, 0).unwrap();
    assert!(before.iter().all(|o| o.mode == "box" && o.marked == 0), "{before:?}");
    let uplink = Bottleneck { rate: 20_000_000, depth: 16 << 10 };
    lab.host(1)
        .set_faults(Faults { bottleneck: Some(uplink), ..Faults::NONE }, Faults::NONE, 0)
        .unwrap();

    // Notifications from rank 1 to rank 0: for a connection that is not registered, and for one
    // that is a flow of the job, as where a queue pair both sends and receives.
    let flows = cluster.netsum_json(&["flow", "list", &job.name]).unwrap();
    let to_0 = flows.as_array().unwrap().iter().find(|f| f["dst"] == "10.0.0.1").unwrap();
    let flow = to_0["qpn"].as_u64().unwrap() as u32;
    let notification = |n: u32| {
        let qpn = if n.is_multiple_of(2) { flow } else { 0x1234 };
        let mut spec = FrameSpec::send(2, 1, qpn, n, vec![0; 16]);
        (spec.tos, spec.id, spec.udp_checksum) = (0xc0, n as u16, 0x4321);
        spec.bth = Bth { flags: BECN, ..Bth::new(Opcode::CNP, qpn, n) };
        spec.build()
    };
    let [from, to] = [1, 0].map(|host| Tap::open(lab.host(host), Host::INTERFACE).unwrap());
    let outcomes = std::thread::scope(|s| {
        let notifications = s.spawn(|| {
            // The ranks' own notifications have another class of service.
            let is_cnp = |f: &[u8]| {
                f[15] == 0xc0 && wire::parse(f).is_ok_and(|f| f.bth.opcode == Opcode::CNP)
            };
            for n in 0..500 {
                from.send(&notification(n)).unwrap();
                assert_eq!(
                    to.receive(5 * SECOND, is_cnp).unwrap(),
                    notification(n),
                    "notification {n}"
                );
            }
        });
        let mut outcomes = Vec::new();
        for seed in 1.. {
            outcomes = group.all_reduce("i32", 200_000, seed).unwrap();
            if seed > 2 && notifications.is_finished() {
                break;
            }
        }
        notifications.join().unwrap();
        outcomes
    });
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(
            (&*outcome.mode, outcome.wrong, outcome.fallbacks),
            ("box", 0, 0),
            "rank {rank}"
        );
        assert!(outcome.marked > 100, "rank {rank}: {outcome:?}");
    }
    let marked = cluster.counter(Some(&job.name), "np_ecn_marked_roce_packets").unwrap();
    println!(
        "{marked} contributions were marked; the ranks got {:?}",
        outcomes.iter().map(|o| o.marked).collect::<Vec<_>>()
    );
    assert!(marked > 100);
}

/// Bytes per second of TCP and of all-reduces that send from the same host, in a lab with links of
/// this rate; and the counts of the host's link.
fn beside_tcp(rate: &str, uplink: Faults) -> ([f64; 2], DirectionCounts) {
    let rate = Some(rate.parse().unwrap());
    let spec =
        LabSpec { faulty_links: true, rate, xdp: true, ..LabSpec::hosts(RANKS as usize + 1) };
    let cluster = Cluster::start(spec).unwrap();
    let lab = cluster.lab();
    let job = JobSpec::new("shared", RANKS);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(RANKS)).unwrap();
    lab.host(0).set_faults(uplink, Faults::NONE, 0).unwrap();
    let (from, to) = (lab.host(0), lab.host(RANKS as usize));
    for host in [from, to] {
        host.enter(|| {
            std::fs::write("/proc/sys/net/ipv4/tcp_ecn", "1")?;
            std::fs::write("/proc/sys/net/ipv4/tcp_congestion_control", "reno")
        })
        .unwrap();
    }
    const ELEMENTS: usize = 1 << 20;
    // Ranks start the next all-reduce before the results of the last one are compared.
    group.all_reduce("f32", ELEMENTS, 0).unwrap();
    std::thread::scope(|s| {
        let tcp = s.spawn(|| tcp_transfer(from, to, to.ip(0), 32 << 20, 30 * SECOND).unwrap());
        let mut files = group.order_all_reduce("f32", ELEMENTS, 1).unwrap();
        let (begun, mut bytes) = (Instant::now(), 0);
        for seed in 1.. {
            let next = group.order_all_reduce("f32", ELEMENTS, seed + 1).unwrap();
            let outcomes = group.check_all_reduce("f32", ELEMENTS, seed, &files).unwrap();
            assert!(outcomes.iter().all(|o| o.mode == "box" && o.wrong == 0), "{outcomes:?}");
            files = next;
            if tcp.is_finished() {
                break;
            }
            bytes += 4 * ELEMENTS;
        }
        let ours = bytes as f64 / begun.elapsed().as_secs_f64();
        ([tcp.join().unwrap(), ours], from.fault_link().unwrap().counts().unwrap().up)
    })
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_link_that_marks_is_shared_with_tcp() {
    // The link's rate, or slightly more: packets then also wait in the queue of the emulated link.
    const RATE: u64 = 12_520_000;
    let bottleneck = Bottleneck { rate: RATE, depth: 64 << 10 };
    let uplink = Faults { bottleneck: Some(bottleneck), ..Faults::NONE };
    let ([tcp, ours], counts) = beside_tcp("100mbit", uplink);
    println!("of 12.5 MB/s, TCP had {:.1} and netsum {:.1}; {counts:?}", tcp / 1e6, ours / 1e6);
    let share = ours / (ours + tcp);
    // The share is half where CPUs cost no time: a sum also waits for the other ranks' part of the
    // round trip.
    assert!((0.1..0.9).contains(&share), "netsum has a share of {share:.2}");
    assert!(ours + tcp > 0.7 * RATE as f64, "the link is not filled");
    // A sender that does not slow down gets most of its packets marked, and TCP shrinks to its
    // smallest window.
    assert!(counts.marked * 10 < counts.seen, "{counts:?}");
}
