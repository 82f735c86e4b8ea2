//! The XDP programs with BPF_PROG_TEST_RUN: packet in, verdict, packet out, counters.

use aya::maps::{PerCpuArray, PerCpuValues};
use aya::util::nr_cpus;
use netsum_common::abi::{MAX_MTU, ReleaseTag, RingNumber, maps, ring_flags};
use netsum_common::counters::{COUNTERS, Counter};
use netsum_common::slot::{GAP_PSN_AHEAD, STALE_PSN_BEHIND};
use netsum_common::wire::{self, Opcode, TOTAL, group_mark};
use netsum_common::{icrc, serial};
use netsum_core::plane::FlowSpec;
use netsum_dataplane::DataPlane;
use netsum_lab::frames::{FrameSpec, ipv4_checksum, lanes, sum};
use netsum_lab::programs::{BASE_PSN, Bench, DROP, PASS, REDIRECT, flow, fragment, ring, tag};

/// The packet that egress should make from a rank's saved headers and a sum, for a receiver with or
/// without a VLAN tag.
fn expected(source: &FrameSpec, payload: Vec<u8>, ce: bool, vlan: Option<u16>) -> Vec<u8> {
    let tos = if ce && source.tos & 3 != 0 { source.tos | 3 } else { source.tos };
    let vlan = match (source.vlan, vlan) {
        (Some(sent), Some(own)) => Some(sent & 0xf000 | own & 0xfff),
        (_, own) => own,
    };
    FrameSpec { payload, id: 0, tos, vlan, ..source.clone() }.build_result()
}

/// All ranks contribute. Checks every verdict, the sum, and the packet for each rank.
fn all_reduce(bench: &mut Bench, specs: &[FrameSpec], ce: bool) {
    let total = sum(&specs.iter().map(|s| s.payload.clone()).collect::<Vec<_>>());
    let last = specs.len() - 1;
    for (rank, spec) in specs.iter().enumerate() {
        let out = bench.aggregate(&spec.build()).unwrap();
        if rank < last {
            assert_eq!(out.action, DROP, "rank {rank}: {:?}", bench.counters().unwrap());
            continue;
        }
        assert_eq!(out.action, REDIRECT, "{:?}", bench.counters().unwrap());
        let tag = tag(&out.packet);
        assert_eq!(
            (tag.ring, tag.rank, tag.payload as usize),
            (1, ReleaseTag::ALL, spec.payload_offset())
        );
        assert_eq!(out.packet[spec.payload_offset()..][..total.len()], total, "the sum");
        // All ranks are behind the loopback interface: the clones go to rank 0, 1, 2, ... in turn.
        for receiver in 0..specs.len() {
            let source = &specs[(receiver + last) % specs.len()];
            let result = bench.egress(&out.packet).unwrap();
            assert_eq!(result.action, PASS, "to rank {receiver}: {:?}", bench.counters().unwrap());
            let vlan = specs[receiver].vlan;
            assert_eq!(
                result.packet,
                expected(source, total.clone(), ce, vlan),
                "to rank {receiver}"
            );
        }
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn every_header_variant_and_length_is_summed() {
    let mut bench = Bench::new(ring(3, 2048, 64), false).unwrap();
    for v6 in [false, true] {
        for mtu in [256, 512, 1024, 1408, 2048, 3264, 3328] {
            let ring = ring(3, mtu, 64);
            let flows: Vec<_> = (0..3).map(|r| flow(&ring, r, v6)).collect();
            bench.restart(ring, &flows).unwrap();
            let mut index = 0;
            for opcode in 0..=0x0b {
                for vlan in [None, Some(42)] {
                    let mtu = mtu as usize;
                    let len = [mtu, mtu - 4, mtu / 2 + 4, 4, 252, 256][index as usize % 6].min(mtu);
                    // All packets of a message but the last are full.
                    let len = if Opcode(opcode).is_last() { len } else { mtu };
                    let specs: Vec<_> = (0..3)
                        .map(|rank| {
                            let mut s = fragment(rank, 3, index, lanes(rank, len / 4));
                            s.bth.opcode = Opcode(opcode);
                            s.bth.ack_request = rank == 1;
                            s.vlan = vlan;
                            if v6 { s.v6() } else { s }
                        })
                        .collect();
                    all_reduce(&mut bench, &specs, false);
                    index += 1;
                }
            }
        }
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn every_length_that_is_a_multiple_of_four() {
    let mut bench = Bench::new(ring(2, MAX_MTU as u32, 1024), false).unwrap();
    for (index, len) in (4..=MAX_MTU).step_by(4).enumerate() {
        let specs: Vec<_> =
            (0..2).map(|rank| fragment(rank, 2, index as u32, lanes(rank, len / 4))).collect();
        all_reduce(&mut bench, &specs, false);
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn two_to_sixty_four_ranks() {
    let mut bench = Bench::new(ring(2, 256, 8), false).unwrap();
    for ranks in [2, 3, 4, 8, 31, 32, 33, 63, 64] {
        let ring = ring(ranks, 256, 8);
        let flows: Vec<_> = (0..ranks).map(|r| flow(&ring, r, false)).collect();
        bench.restart(ring, &flows).unwrap();
        for index in 0..20 {
            let specs: Vec<_> =
                (0..ranks).map(|r| fragment(r, ranks, index, lanes(r + index, 64))).collect();
            all_reduce(&mut bench, &specs, false);
        }
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn ranks_with_different_headers_get_their_own() {
    // Rank 0 is tagged, rank 1 sends WRITE ONLY with immediate, and rank 2 sends plain SENDs:
    // egress has to move the packet's head.
    let mut bench = Bench::new(ring(3, 1024, 64), false).unwrap();
    for index in 0..6 {
        let mut specs: Vec<_> =
            (0..3).map(|rank| fragment(rank, 3, index, lanes(rank, 256))).collect();
        specs[0].vlan = Some(7);
        specs[1].bth.opcode = Opcode::WRITE_ONLY_IMM;
        all_reduce(&mut bench, &specs, false);
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn results_are_in_the_vlan_of_their_receivers_own_packets() {
    let mut bench = Bench::new(ring(3, 3328, 64), false).unwrap();
    // Every tag next to every other and to itself: no tag, a tag with and without priority, another
    // VLAN, a priority alone.
    let tags = [None, Some(5), Some(0x6005), Some(0x2007), Some(0x6000)];
    for v6 in [false, true] {
        let ring = ring(3, 3328, 256);
        let flows: Vec<_> = (0..3).map(|r| flow(&ring, r, v6)).collect();
        bench.restart(ring, &flows).unwrap();
        let pairs = tags.iter().flat_map(|a| tags.iter().map(move |b| (*a, *b)));
        for (index, (a, b)) in pairs.enumerate() {
            let vlans = [a, b, tags[index % tags.len()]];
            for (half, len) in [4, 3328].into_iter().enumerate() {
                let specs: Vec<_> = (0..3)
                    .map(|rank| {
                        let s = fragment(rank, 3, (2 * index + half) as u32, lanes(rank, len / 4));
                        let s = FrameSpec { vlan: vlans[rank as usize], ..s };
                        if v6 { s.v6() } else { s }
                    })
                    .collect();
                all_reduce(&mut bench, &specs, false);
            }
        }
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn congestion_marks_are_carried_over() {
    let mut bench = Bench::new(ring(3, 1024, 64), false).unwrap();
    let mut specs: Vec<_> = (0..3).map(|rank| fragment(rank, 3, 0, lanes(rank, 256))).collect();
    specs[1].tos |= 3;
    specs[2].tos = 0x20; // not ECN-capable, so it must not be marked
    all_reduce(&mut bench, &specs, true);
    let specs: Vec<_> = (0..3).map(|rank| fragment(rank, 3, 1, lanes(rank, 256))).collect();
    all_reduce(&mut bench, &specs, false);
    assert!(bench.counters().unwrap().contains(&(Counter::EcnMarked, 1)));

    let ring = ring(3, 1024, 64);
    let flows: Vec<_> = (0..3).map(|r| flow(&ring, r, true)).collect();
    bench.restart(ring, &flows).unwrap();
    let mut specs: Vec<_> =
        (0..3).map(|rank| fragment(rank, 3, 0, lanes(rank, 256)).v6()).collect();
    specs[0].tos |= 3;
    all_reduce(&mut bench, &specs, true);
}

#[test]
#[ignore = "needs root and BPF"]
fn duplicates_are_never_added_twice_and_finished_ones_are_replayed() {
    let mut bench = Bench::new(ring(2, 256, 8), false).unwrap();
    let total = sum(&[lanes(0, 64), lanes(1, 64)]);
    bench.sequence(&[(0, 0, DROP), (0, 0, DROP), (0, 0, DROP), (1, 0, REDIRECT)]).unwrap();
    let mut again = fragment(0, 2, 0, lanes(0, 64));
    again.bth.ack_request = true;
    let out = bench.aggregate(&again.build()).unwrap();
    assert_eq!(out.action, REDIRECT);
    assert_eq!(tag(&out.packet).rank, 1, "a replay goes to the next rank alone");
    let result = bench.egress(&out.packet).unwrap();
    assert_eq!(
        result.packet,
        expected(&again, total, false, None),
        "with the retransmission's own headers"
    );
    let counters = bench.counters().unwrap();
    for c in [
        (Counter::Contributions, 2),
        (Counter::DuplicateRequest, 2),
        (Counter::Released, 1),
        (Counter::Replays, 1),
        (Counter::Completed, 1),
        (Counter::Results, 1),
    ] {
        assert!(counters.contains(&c), "{c:?} in {counters:?}");
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn results_leave_in_order_and_gaps_make_the_receiver_nak() {
    let mut bench = Bench::new(ring(2, 256, 16), false).unwrap();
    // Rank 0 loses packet 0. Its packets 1 and 2 are forwarded, and their receiver NAKs (gaps of 1
    // and 2); packet 3 is not.
    bench.sequence(&[(1, 0, DROP), (1, 1, DROP), (1, 2, DROP), (1, 3, DROP)]).unwrap();
    for (index, action) in [(1u32, PASS), (2, PASS), (3, DROP)] {
        // These complete their slots, whose sums are held back.
        let mut spec = fragment(0, 2, index, lanes(index, 64));
        let out = bench.aggregate(&spec.build()).unwrap();
        assert_eq!(out.action, action, "index {index}");
        if action == PASS {
            spec.bth.psn = (spec.bth.psn + GAP_PSN_AHEAD) & 0xff_ffff;
            (spec.payload, spec.udp_checksum) = (sum(&[lanes(index, 64), lanes(1 + index, 64)]), 0);
            assert_eq!(out.packet, spec.build(), "valid, but from far ahead");
        }
    }
    let counters = bench.counters().unwrap();
    assert!(
        counters.contains(&(Counter::HeldBack, 3))
            && counters.contains(&(Counter::OutOfSequence, 3))
    );
    // Rank 0 goes back: each of its packets carries a released sum.
    bench
        .sequence(&[(0, 0, REDIRECT), (0, 1, REDIRECT), (0, 2, REDIRECT), (0, 3, REDIRECT)])
        .unwrap();
    let counters = bench.counters().unwrap();
    assert!(counters.contains(&(Counter::Released, 4)), "{counters:?}");
}

#[test]
#[ignore = "needs root and BPF"]
fn a_packet_past_a_gap_is_never_taken_for_data() {
    let mut bench = Bench::new(ring(2, 256, 16), false).unwrap();
    let mut forwarded = Vec::new();
    for index in 1..=5 {
        let mut spec = fragment(0, 2, index, lanes(0, 64));
        spec.bth.opcode = Opcode::WRITE_ONLY_IMM;
        spec.udp_checksum = 0xaaaa;
        let out = bench.aggregate(&spec.build()).unwrap();
        if out.action == PASS {
            forwarded.push(index);
            spec.bth.psn = (spec.bth.psn + GAP_PSN_AHEAD) & 0xff_ffff;
            spec.udp_checksum = 0;
            assert_eq!(out.packet, spec.build(), "PSN far ahead, ICRC right, all else as it was");
        }
    }
    assert_eq!(forwarded, [1, 2, 4]);
    assert!(bench.counters().unwrap().contains(&(Counter::GapForwarded, 3)));
}

#[test]
#[ignore = "needs root and BPF"]
fn stale_retransmissions_pass_and_credit_violations_do_not() {
    let mut bench = Bench::new(ring(2, 256, 8), false).unwrap();
    for index in 0..10 {
        bench.sequence(&[(0, index, DROP), (1, index, REDIRECT)]).unwrap();
    }
    let mut stale = fragment(0, 2, 1, lanes(9, 64));
    stale.udp_checksum = 0xbbbb;
    let out = bench.aggregate(&stale.build()).unwrap();
    stale.udp_checksum = 0;
    stale.bth.psn = serial::sub(stale.bth.psn, STALE_PSN_BEHIND);
    assert_eq!(
        (out.action, out.packet),
        (PASS, stale.build()),
        "slot 1 holds 9: a duplicate to any receiver"
    );
    // The window is 4, so index 13 is the last with credit: index 14 would need credit that cannot
    // exist.
    bench
        .sequence(&[(0, 10, DROP), (0, 11, DROP), (0, 12, DROP), (0, 13, DROP), (0, 14, DROP)])
        .unwrap();
    let counters = bench.counters().unwrap();
    assert!(counters.contains(&(Counter::Stale, 1)), "{counters:?}");
    assert!(counters.contains(&(Counter::CreditViolation, 1)), "{counters:?}");
    bench
        .sequence(&[(1, 10, REDIRECT), (1, 11, REDIRECT), (1, 12, REDIRECT), (1, 13, REDIRECT)])
        .unwrap();
}

#[test]
#[ignore = "needs root and BPF"]
fn a_late_partial_is_never_sent_as_the_total() {
    let mut spec = ring(3, 256, 8);
    spec.config.flags =
        ring_flags::UPLINK | u32::from(group_mark(2)) << ring_flags::GROUP_MARK_SHIFT;
    let mut flows: Vec<FlowSpec> = (0..3).map(|rank| flow(&spec, rank, false)).collect();
    flows[2].group_mark = TOTAL;
    let mut bench = Bench::with_flows(spec, flows).unwrap();
    let data = |rank| fragment(rank, 3, 0, lanes(rank, 64)).build();
    let mark_of = |packet: &[u8]| wire::parse(packet).unwrap().bth.flags;
    assert_eq!(bench.aggregate(&data(0)).unwrap().action, DROP);
    let first = bench.aggregate(&data(1)).unwrap();
    assert_eq!(mark_of(&bench.egress(&first.packet).unwrap().packet), group_mark(2));
    let again = bench.aggregate(&data(1)).unwrap();
    let mut total = fragment(2, 3, 0, lanes(9, 64));
    total.bth.flags = TOTAL;
    assert_eq!(bench.aggregate(&total.build()).unwrap().action, REDIRECT);
    // The packet would carry the partial sum under the total's ICRC and mark, and only the ICRC
    // would reveal that.
    assert_eq!(bench.egress(&again.packet).unwrap().action, DROP);
    let again = bench.aggregate(&data(1)).unwrap();
    let up = bench.egress(&again.packet).unwrap();
    assert_eq!((up.action, mark_of(&up.packet)), (PASS, group_mark(2) | TOTAL));
}

#[test]
#[ignore = "needs root and BPF"]
fn a_replay_of_a_reused_slot_is_dropped() {
    // Rank 0 misses an acknowledgement and goes back: its old packet 0 arrives in one batch of the
    // CPU map with its new packets 1 and 2. Packets that the batch redirects leave at its end, when
    // index 2 has the slot of index 0.
    let mut bench = Bench::new(ring(2, 256, 2), false).unwrap();
    // The sums are all zeros, so their CRC state is that of a slot whose CRC is not known yet.
    let zeros = |rank, index| fragment(rank, 2, index, vec![0; 256]).build();
    assert_eq!(bench.aggregate(&zeros(0, 0)).unwrap().action, DROP);
    assert_eq!(bench.aggregate(&zeros(1, 0)).unwrap().action, REDIRECT);
    let replay = bench.aggregate(&zeros(0, 0)).unwrap();
    assert_eq!(replay.action, REDIRECT);
    assert_eq!(bench.aggregate(&zeros(0, 1)).unwrap().action, DROP);
    assert_eq!(bench.aggregate(&zeros(1, 1)).unwrap().action, REDIRECT);
    assert_eq!(bench.aggregate(&fragment(0, 2, 2, lanes(0, 64)).build()).unwrap().action, DROP);
    let before = bench.egress(&replay.packet).unwrap();
    assert_eq!(
        before.action, DROP,
        "it would be taken for the sum of fragment 2: {:02x?}",
        before.packet
    );
    assert!(bench.counters().unwrap().contains(&(Counter::EgressNoRoute, 1)));
}

#[test]
#[ignore = "needs root and BPF"]
fn relaxed_rings_release_as_they_complete() {
    let mut ring = ring(2, 256, 16);
    ring.config.flags = ring_flags::RELAXED;
    let mut bench = Bench::new(ring, false).unwrap();
    bench
        .sequence(&[
            // Forwarded past a gap, once: its receiver NAKs.
            (0, 1, PASS),
            (1, 0, DROP),
            (1, 1, REDIRECT),
            (1, 2, DROP),
            (0, 2, REDIRECT),
            (0, 0, REDIRECT),
        ])
        .unwrap();
    for index in 3..200 {
        bench.sequence(&[(0, index, DROP), (1, index, REDIRECT)]).unwrap();
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn icrc_is_not_verified_where_the_job_says_so() {
    let mut ring = ring(2, 256, 16);
    ring.config.flags = ring_flags::ICRC_IGNORE;
    let mut bench = Bench::new(ring, false).unwrap();
    let mut bad = fragment(0, 2, 0, lanes(0, 64)).build();
    let n = bad.len();
    bad[n - 1] ^= 0x55;
    assert_eq!(bench.aggregate(&bad).unwrap().action, DROP);
    let out = bench.aggregate(&fragment(1, 2, 0, lanes(1, 64)).build()).unwrap();
    assert_eq!(out.action, REDIRECT);
    let total = sum(&[lanes(0, 64), lanes(1, 64)]);
    assert_eq!(
        bench.egress(&out.packet).unwrap().packet,
        expected(&fragment(1, 2, 0, vec![]), total, false, None),
        "what leaves is right all the same"
    );
}

/// A name, a change to a good contribution, the verdict and the counter that follow.
type BadInput = (&'static str, fn(&mut Vec<u8>), u32, Counter);

/// Rewrites the ICRC: a changed packet is then refused for the change, not for its ICRC.
fn resign(f: &mut [u8]) {
    let Ok(frame) = wire::parse(&*f) else { return };
    let end = f.len() - 4;
    let icrc = icrc::of_frame(f, frame.l3, frame.ip, end, 0).unwrap();
    f[end..].copy_from_slice(&icrc.to_le_bytes());
}

/// Changes bytes of a header, and with them the checksum and the ICRC.
fn set(f: &mut [u8], at: usize, bytes: &[u8]) {
    f[at..at + bytes.len()].copy_from_slice(bytes);
    checksum(f);
    resign(f);
}

/// Changes the lengths in IPv4's and UDP's headers to those of `payload` bytes.
fn set_lengths(f: &mut [u8], payload: u16) {
    f[16..18].copy_from_slice(&(20 + 8 + 12 + payload + 4).to_be_bytes());
    set(f, 38, &(8 + 12 + payload + 4).to_be_bytes());
}

/// Rewrites the IPv4 checksum.
fn checksum(f: &mut [u8]) {
    f[24..26].fill(0);
    let sum = ipv4_checksum(&f[14..34]);
    f[24..26].copy_from_slice(&sum.to_be_bytes());
}

#[test]
#[ignore = "needs root and BPF"]
fn bad_input_is_counted_by_reason_and_never_added() {
    // Offsets: Ethernet 0, IPv4 14, UDP 34, BTH 42, payload 54.
    let cases: &[BadInput] = &[
        ("wrong ICRC", |f| *f.last_mut().unwrap() ^= 1, DROP, Counter::BadIcrc),
        ("payload changed", |f| f[60] ^= 0x80, DROP, Counter::BadIcrc),
        ("PSN changed", |f| f[53] ^= 1, DROP, Counter::BadIcrc),
        ("another source address", |f| set(f, 29, &[99]), DROP, Counter::WrongSourceIp),
        ("another source MAC", |f| f[11] = 99, DROP, Counter::WrongSourceMac),
        ("unknown queue pair", |f| set(f, 49, &[0xee]), PASS, Counter::NoFlow),
        ("another destination", |f| set(f, 33, &[77]), PASS, Counter::NoFlow),
        ("an ACK", |f| set(f, 42, &[0x11]), PASS, Counter::NotData),
        ("a READ request", |f| set(f, 42, &[0x0c]), PASS, Counter::NotData),
        ("a CNP", |f| set(f, 42, &[0x81]), PASS, Counter::NotData),
        ("a reserved opcode", |f| set(f, 42, &[0x1e]), PASS, Counter::ReservedOpcode),
        ("an unreliable datagram", |f| set(f, 42, &[0x64]), PASS, Counter::ReservedOpcode),
        ("a pad count", |f| set(f, 43, &[0x10]), DROP, Counter::BadPad),
        ("a transport version", |f| set(f, 43, &[1]), DROP, Counter::BadVersion),
        ("a partition", |f| set(f, 44, &[0x12]), DROP, Counter::BadPkey),
        ("UDP length too large", |f| set(f, 39, &[0x20]), DROP, Counter::BadUdpLength),
        ("UDP length zero", |f| set(f, 38, &[0, 0]), DROP, Counter::BadUdpLength),
        ("UDP length below BTH", |f| set(f, 38, &[0, 19]), DROP, Counter::BadUdpLength),
        ("IP length too small", |f| set(f, 17, &[0x28]), DROP, Counter::BadUdpLength),
        ("IP length zero", |f| set(f, 16, &[0, 0]), DROP, Counter::BadUdpLength),
        ("cut off", |f| f.truncate(200), DROP, Counter::Truncated),
        ("cut off in the BTH", |f| f.truncate(50), PASS, Counter::TruncatedHeaders),
        ("cut off in the UDP header", |f| f.truncate(38), PASS, Counter::NotRoce),
        ("a first fragment", |f| set(f, 20, &[0x20]), DROP, Counter::IpFragment),
        ("a later fragment", |f| set(f, 21, &[9]), PASS, Counter::NotRoce),
        ("IP header too short", |f| f[14] = 0x44, PASS, Counter::NotRoce),
        ("IP version", |f| f[14] = 0x55, PASS, Counter::NotRoce),
        ("another UDP port", |f| f[36] = 0, PASS, Counter::NotRoce),
        ("TCP", |f| f[23] = 6, PASS, Counter::NotRoce),
        ("ARP", |f| f[12..14].copy_from_slice(&[8, 6]), PASS, Counter::NotRoce),
        (
            "IP options",
            |f| {
                f.splice(34..34, [1, 1, 1, 0]);
                f[14] = 0x46;
                f[17] += 4;
            },
            DROP,
            Counter::IpOptions,
        ),
        (
            "a payload of 254 bytes",
            |f| {
                f.drain(58..60);
                set_lengths(f, 254);
            },
            DROP,
            Counter::BadPayloadLength,
        ),
        (
            "no payload",
            |f| {
                f[42] = Opcode::SEND_MIDDLE.0; // An empty message stops the ring.
                f.drain(54..54 + 256);
                set_lengths(f, 0);
            },
            DROP,
            Counter::BadPayloadLength,
        ),
        (
            "a payload beyond the path MTU",
            |f| {
                f.splice(54..54, [0; 4]);
                set_lengths(f, 260);
            },
            DROP,
            Counter::Oversized,
        ),
        (
            "another length than the first",
            |f| {
                f.drain(54..58);
                set_lengths(f, 252);
            },
            DROP,
            Counter::LengthMismatch,
        ),
    ];
    let mut bench = Bench::new(ring(2, 256, 16), false).unwrap();
    for (i, (what, change, action, counter)) in cases.iter().enumerate() {
        // A good contribution of rank 1 shows rank 1's MAC address and opens the slot; rank 0's
        // contribution is spoilt.
        let index = i as u32;
        let good = fragment(0, 2, index, lanes(0, 64));
        assert_eq!(
            bench.aggregate(&fragment(1, 2, index, lanes(1, 64)).build()).unwrap().action,
            DROP
        );
        if i == 0 {
            // From now on rank 0's MAC address is known.
            assert_eq!(bench.plane.flow_stats(bench.keys[0]).unwrap().mac, None);
        }
        let before = bench.counters().unwrap();
        let mut bad = good.build();
        change(&mut bad);
        // Packets of unknown flows do not reach the ring's CPU.
        let passes = *action == PASS;
        let out = if passes { bench.run("ingress", &bad) } else { bench.aggregate(&bad) }.unwrap();
        let counters = bench.counters().unwrap();
        let changed: Vec<_> =
            counters.iter().filter(|c| !before.contains(c)).map(|c| c.0).collect();
        let unlearned = i == 0;
        assert_eq!(out.action, *action, "{what}: {changed:?}");
        assert_eq!(changed, [*counter], "{what}");
        if passes {
            assert_eq!(out.packet, bad, "{what}: untouched");
            assert_eq!(
                bench.aggregate(&bad).unwrap().action,
                DROP,
                "{what}: if it does, its flow has ended"
            );
        }
        if unlearned {
            assert_eq!(
                bench.plane.flow_stats(bench.keys[0]).unwrap().mac,
                None,
                "not learned from a bad packet"
            );
        }
        // Nothing was added and nothing is disturbed: the good packet completes the sum.
        let done = bench.aggregate(&good.build()).unwrap();
        assert_eq!(done.action, REDIRECT, "after {what}: {:?}", bench.counters().unwrap());
        assert_eq!(done.packet[54..54 + 256], sum(&[lanes(0, 64), lanes(1, 64)]), "after {what}");
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn a_sequence_number_wraps_within_a_ring() {
    let mut bench = Bench::new(ring(2, 256, 64), false).unwrap();
    // BASE_PSN is 16 below 2^24.
    for index in 0..40 {
        let specs: Vec<_> = (0..2).map(|r| fragment(r, 2, index, lanes(r + index, 64))).collect();
        all_reduce(&mut bench, &specs, false);
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn a_packet_that_is_not_its_messages_last_must_be_full() {
    let mut bench = Bench::new(ring(3, 256, 16), false).unwrap();
    let packet = |rank: u32, index: u32, opcode: u8, lane_count: usize| {
        let mut spec = fragment(rank, 3, index, lanes(rank, lane_count));
        spec.bth.opcode = Opcode(opcode);
        spec
    };
    for (index, opcode) in (0..=0x0b).filter(|&o| !Opcode(o).is_last()).enumerate() {
        let index = index as u32;
        // It arrives first, and does not take the slot.
        assert_eq!(bench.aggregate(&packet(0, index, opcode, 63).build()).unwrap().action, DROP);
        let specs: Vec<_> = (0..3).map(|rank| packet(rank, index, opcode, 64)).collect();
        all_reduce(&mut bench, &specs, false);
    }
    assert!(bench.counters().unwrap().contains(&(Counter::ShortFragment, 4)));
    // The last packet of a message may have any length. The refused packet is noted for
    // `netsum diagnose`.
    assert_eq!(bench.aggregate(&packet(0, 4, 4, 3).build()).unwrap().action, DROP);
    assert_eq!(bench.aggregate(&packet(1, 4, 4, 64).build()).unwrap().action, DROP);
    let seen = bench.plane.flow_stats(bench.keys[1]).unwrap();
    assert_eq!(seen.mismatch, Some(((BASE_PSN + 4) & 0xff_ffff, 256)));
    assert_eq!(bench.plane.flow_stats(bench.keys[0]).unwrap().mismatch, None);
}

fn count(bench: &Bench, counter: Counter) -> u64 {
    bench.counters().unwrap().iter().find(|(c, _)| *c == counter).map_or(0, |(_, count)| *count)
}

/// rdma_rxe does this when its timer fires after an acknowledgement of a message's last packet has
/// overtaken its retransmission (seen on Linux 6.1): it sends an empty message with the next one's
/// first PSN, and then all data one PSN late.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn nothing_is_added_of_a_sender_that_has_lost_its_place() {
    let four = [Opcode::SEND_FIRST, Opcode::SEND_MIDDLE, Opcode::SEND_MIDDLE, Opcode::SEND_LAST];
    // The data of index `of`, sent with index `at`.
    let data = |rank: u32, of: u32, opcode: Opcode, at: u32| {
        let mut spec = fragment(rank, 2, at, lanes(rank + 2 * of, 64));
        spec.bth.opcode = opcode;
        spec.build()
    };
    let honest = |rank, index: u32| data(rank, index, four[index as usize % 4], index);
    let empty = |index| {
        let mut spec = fragment(0, 2, index, Vec::new());
        spec.bth.opcode = Opcode::SEND_ONLY;
        spec.build()
    };
    // Whether the empty message reaches the box, and whether rank 0's packets with index 5 and 6
    // did before it lost its place.
    for (shown, sent) in [(true, &[4][..]), (true, &[4, 6]), (false, &[4, 5]), (false, &[4])] {
        let mut bench = Bench::new(ring(2, 256, 16), false).unwrap();
        for index in 0..4 {
            assert_eq!(bench.aggregate(&honest(0, index)).unwrap().action, DROP);
            assert_eq!(bench.aggregate(&honest(1, index)).unwrap().action, REDIRECT);
        }
        for index in 4..8 {
            bench.aggregate(&honest(1, index)).unwrap();
        }
        for &index in sent {
            bench.aggregate(&honest(0, index)).unwrap();
        }
        let summed = count(&bench, Counter::Contributions);
        if shown {
            assert_eq!(bench.aggregate(&empty(4)).unwrap().action, DROP);
        }
        // The data is late by one packet, and at the next attempt by a whole message, which looks
        // in place.
        for index in 5..8 {
            let opcode = four[index as usize % 4 - 1];
            assert_eq!(
                bench.aggregate(&data(0, index - 1, opcode, index)).unwrap().action,
                DROP,
                "{shown} {sent:?} {index}"
            );
        }
        for index in 4..8 {
            let late = data(0, index - 4, four[index as usize % 4], index);
            assert_eq!(bench.aggregate(&late).unwrap().action, DROP, "{shown} {sent:?} {index}");
        }
        assert_eq!(count(&bench, Counter::Contributions), summed, "{shown} {sent:?}");
        assert_eq!(count(&bench, Counter::LayoutMismatch), 1, "{shown} {sent:?}");
        assert_eq!(count(&bench, Counter::RingStopped), 6 + u64::from(shown), "{shown} {sent:?}");
        assert_eq!(bench.plane.ring_state(RingNumber(1)).unwrap().stopped, 1, "rank 0");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn old_wrong_cpu_counts_are_ignored_after_a_restart() {
    let spec = ring(2, 256, 16);
    let mut bench = Bench::new(spec.clone(), false).unwrap();
    let counters = bench.plane.map_mut(maps::COUNTERS).unwrap();
    let mut counters = PerCpuArray::<_, u64>::try_from(counters).unwrap();
    let strayed = PerCpuValues::try_from(vec![3; nr_cpus().unwrap()]).unwrap();
    counters.set(spec.id.0 * COUNTERS + Counter::WrongCpu as u32, strayed, 0).unwrap();
    let told = bench.plane.keep_cpus().unwrap();
    assert!(told.iter().any(|done| done.contains("packets came to another CPU")), "{told:?}");
    bench.restart(spec.clone(), &[flow(&spec, 0, false), flow(&spec, 1, false)]).unwrap();
    assert_eq!(bench.plane.keep_cpus().unwrap(), [""; 0]);
}
