//! The XDP program `ingress` with BPF_PROG_TEST_RUN: what it steers, passes and refuses, and how it
//! protects the addresses of ranks.

use std::collections::HashMap;

use netsum_common::abi::RingNumber;
use netsum_common::counters::Counter;
use netsum_common::serial::{self, Qpn};
use netsum_common::slot::{GAP_PSN_AHEAD, STALE_PSN_BEHIND};
use netsum_common::wire::{Opcode, group_mark};
use netsum_core::plane::FlowSpec;
use netsum_dataplane::DataPlane;
use netsum_lab::cpu::Pinned;
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::programs::{
    Bench, DROP, LOOPBACK, PASS, REDIRECT, flow, fragment, host, ring, tag,
};

#[test]
#[ignore = "needs root and BPF"]
fn data_on_a_wrong_port_or_of_a_waiting_ring_is_dropped() {
    let spec = ring(2, 256, 16);
    let mut flows: Vec<FlowSpec> = (0..2).map(|r| flow(&spec, r, false)).collect();
    flows[0].ifindex = 4711;
    let mut bench = Bench::with_flows(spec.clone(), flows).unwrap();
    let data = fragment(0, 2, 0, lanes(0, 64)).build();
    assert_eq!(bench.aggregate(&data).unwrap().action, DROP);
    assert_eq!(bench.counters().unwrap(), [(Counter::WrongPort, 1)]);

    bench.plane.delete_ring(RingNumber(1), &bench.keys.clone(), &[LOOPBACK]).unwrap();
    assert_eq!(bench.aggregate(&data).unwrap().action, DROP, "its job has ended");
    assert_eq!(bench.plane.counters(RingNumber::NONE).unwrap()[Counter::JobEnded as usize], 1);
    bench.plane.create_ring(&spec).unwrap();
    bench.plane.add_flow(&flow(&spec, 0, false)).unwrap();
    assert_eq!(bench.aggregate(&data).unwrap().action, DROP, "not yet active");
    let counters = bench.counters().unwrap();
    assert!(counters.contains(&(Counter::InactiveRing, 1)), "{counters:?}");
}

#[test]
#[ignore = "needs root and BPF"]
fn packets_from_a_slave_are_the_bonds_for_as_long_as_it_is_a_slave() {
    const BOND: u32 = 4711;
    let spec = ring(2, 256, 16);
    let flows = (0..2).map(|r| FlowSpec { ifindex: BOND, ..flow(&spec, r, false) });
    let mut bench = Bench::with_flows(spec.clone(), flows.collect()).unwrap();
    let data = fragment(0, 2, 0, lanes(0, 64));
    let mut ack = data.clone();
    ack.bth.opcode = Opcode::ACK;
    // ARP behind two tags, with rank 0's address.
    let arp = [
        0,
        1,
        8,
        0,
        6,
        4,
        0,
        2,
        2,
        0,
        0,
        0,
        0,
        1,
        10,
        0,
        0,
        host(0),
        2,
        0,
        0,
        0,
        0,
        2,
        10,
        0,
        0,
        2,
    ];
    let tags = [0x81, 0, 0, 7, 0x81, 0, 0, 8, 8, 6];
    let tagged = [&data.build()[..12], &tags[..], &arp[..]].concat();
    for (slaves, actions) in [
        (HashMap::new(), [DROP, DROP, DROP]),
        (HashMap::from([(LOOPBACK, BOND), (4712, BOND)]), [REDIRECT, PASS, PASS]),
        (HashMap::from([(LOOPBACK, 4713), (4712, BOND)]), [DROP, DROP, DROP]),
        (HashMap::new(), [DROP, DROP, DROP]),
    ] {
        bench.plane.set_slaves(slaves.clone()).unwrap();
        let frames = [data.build(), ack.build(), tagged.clone()];
        let run = |frame: Vec<u8>| bench.run("ingress", &frame).unwrap().action;
        assert_eq!(frames.map(run), actions, "{slaves:?}");
    }
    let counters = bench.counters().unwrap();
    for expected in [(Counter::WrongPort, 3), (Counter::Steered, 1), (Counter::Spoofed, 6)] {
        assert!(counters.contains(&expected), "{expected:?}: {counters:?}");
    }
    // The packet for a held-back sum is sent as if it arrived at a slave of the bond. Not all of
    // the slaves exist here.
    bench.plane.set_slaves(HashMap::from([(LOOPBACK, BOND), (4712, BOND)])).unwrap();
    assert_eq!(bench.aggregate(&data.build()).unwrap().action, DROP);
    bench.plane.send_held(&spec, 0, &FlowSpec { ifindex: BOND, ..flow(&spec, 0, false) }).unwrap();
}

#[test]
#[ignore = "needs root and BPF"]
fn an_ended_flows_data_is_dropped_until_forgotten_or_reused() {
    let spec = ring(2, 256, 16);
    let mut bench = Bench::new(spec.clone(), false).unwrap();
    let (data, key) = (fragment(0, 2, 0, lanes(0, 64)), bench.keys[0]);
    let mut ack = data.clone();
    ack.bth.opcode = Opcode::ACK;
    bench.plane.delete_ring(RingNumber(1), &bench.keys.clone(), &[LOOPBACK]).unwrap();
    for _ in 0..3 {
        assert_eq!(bench.run("ingress", &data.build()).unwrap().action, DROP);
    }
    // A packet that was steered a moment before, and a packet that cannot be taken for data.
    assert_eq!(bench.aggregate(&data.build()).unwrap().action, DROP);
    assert_eq!(bench.run("ingress", &ack.build()).unwrap().action, PASS);
    let box_wide = bench.plane.counters(RingNumber::NONE).unwrap();
    assert_eq!((box_wide[Counter::JobEnded as usize], box_wide[Counter::NotData as usize]), (4, 1));
    let ended = bench.plane.ended_flows().unwrap();
    assert_eq!(ended.len(), 2);
    assert!(ended.iter().any(|f| (f.key, f.ifindex, f.packets) == (key, LOOPBACK, 3)), "{ended:?}");

    // The flows' addresses are free again, and their numbers are free for another job.
    bench.plane.create_ring(&spec).unwrap();
    let elsewhere = FlowSpec { ifindex: 4711, ..flow(&spec, 0, false) };
    bench.plane.add_flow(&elsewhere).unwrap();
    assert_eq!(bench.plane.ended_flows().unwrap().len(), 1);
    bench.plane.delete_ring(RingNumber(1), &[key], &[]).unwrap();
    bench.plane.forget_ended(&[key]).unwrap();
    assert_eq!(
        bench.run("ingress", &data.build()).unwrap().action,
        PASS,
        "an unknown flow like any other"
    );
    assert_eq!(bench.plane.ended_flows().unwrap().len(), 1);
}

#[test]
#[ignore = "needs root and BPF"]
fn ingress_steers_data_of_flows_and_passes_the_rest() {
    let mut bench = Bench::new(ring(2, 256, 16), false).unwrap();
    let data = fragment(0, 2, 0, lanes(0, 64));
    let out = bench.run("ingress", &data.build()).unwrap();
    assert_eq!((out.action, out.packet), (REDIRECT, data.build()));
    let mut other = data.clone();
    other.bth.qpn = 0x77;
    let out = bench.run("ingress", &other.build()).unwrap();
    assert_eq!((out.action, out.packet), (PASS, other.build()));
    let mut ack = data.clone();
    ack.bth.opcode = Opcode::ACK;
    assert_eq!(bench.run("ingress", &ack.build()).unwrap().action, PASS);
    assert_eq!(
        bench.counters().unwrap(),
        [(Counter::Steered, 1), (Counter::NoFlow, 1), (Counter::NotData, 1)]
    );
}

#[test]
#[ignore = "needs root and BPF"]
fn inline_sums_only_the_next_expected_packet() {
    let mut bench = Bench::new(ring(2, 256, 16), false).unwrap();
    let frame = |rank: u32, index: u32| fragment(rank, 2, index, lanes(rank + index, 64)).build();
    // Nothing is known of the flow yet, so a packet of it may be in the queue.
    assert_eq!(bench.at_home(&frame(0, 0)).unwrap().action, REDIRECT);
    assert_eq!(bench.aggregate(&frame(0, 0)).unwrap().action, DROP);
    let steered = |bench: &Bench| {
        let counters = bench.counters().unwrap();
        [Counter::Steered, Counter::Inline]
            .map(|c| counters.iter().find(|(of, _)| *of == c).map_or(0, |c| c.1))
    };
    assert_eq!(steered(&bench), [1, 0]);
    // The next packet is summed inline, unless inline is off, and only on this CPU.
    assert_eq!(bench.run("ingress", &frame(0, 1)).unwrap().action, REDIRECT);
    bench.plane.set_inline(true).unwrap();
    {
        let _elsewhere = Pinned::to(1).unwrap();
        assert_eq!(bench.run("ingress", &frame(0, 1)).unwrap().action, REDIRECT);
    }
    assert_eq!(bench.at_home(&frame(0, 1)).unwrap().action, DROP);
    assert_eq!(steered(&bench), [3, 1]);
    // Packet 2 may be in the queue, as far as `ingress` knows. So packet 3 is queued behind it, and
    // packet 2 is summed inline when it arrives again.
    assert_eq!(bench.at_home(&frame(0, 3)).unwrap().action, REDIRECT);
    assert_eq!(bench.at_home(&frame(0, 2)).unwrap().action, DROP);
    assert_eq!(steered(&bench), [4, 2]);
    // The inline packet is summed and released as through the CPU map.
    assert_eq!(bench.aggregate(&frame(1, 0)).unwrap().action, REDIRECT);
    let out = bench.at_home(&frame(1, 1)).unwrap();
    assert_eq!(out.action, REDIRECT);
    assert_eq!(tag(&out.packet).index, 1);
    assert_eq!(bench.plane.ring_state(RingNumber(1)).unwrap().low, 2);
    // A corrupted packet is not accepted, and the packet behind it goes through the queue again.
    let mut broken = frame(1, 2);
    *broken.last_mut().unwrap() ^= 1;
    assert_eq!(bench.at_home(&broken).unwrap().action, DROP);
    assert_eq!(bench.at_home(&frame(1, 3)).unwrap().action, REDIRECT);
    let counters = bench.counters().unwrap();
    assert!(counters.contains(&(Counter::BadIcrc, 1)), "{counters:?}");
    assert_eq!(steered(&bench), [5, 4]);
}

#[test]
#[ignore = "needs root and BPF"]
fn ingress_keeps_recorded_packets_and_wrong_senders_off_the_rings_cpu() {
    let mut bench = Bench::new(ring(2, 256, 8), false).unwrap();
    for index in 0..10 {
        bench.sequence(&[(0, index, DROP), (1, index, REDIRECT)]).unwrap();
    }
    let before = bench.counters().unwrap();
    // Index 10 is next. Slot 1 holds index 9; slot 2 still holds index 2, whose result may be
    // requested.
    for (index, action) in [(0, PASS), (1, PASS), (2, REDIRECT), (9, REDIRECT)] {
        let mut spec = fragment(0, 2, index, lanes(9, 64));
        let out = bench.run("ingress", &spec.build()).unwrap();
        if action == PASS {
            (spec.bth.psn, spec.udp_checksum) = (serial::sub(spec.bth.psn, STALE_PSN_BEHIND), 0);
        }
        assert_eq!((out.action, out.packet), (action, spec.build()), "index {index}");
    }
    let mut spoilt = [fragment(0, 2, 1, lanes(9, 64)), fragment(0, 2, 10, lanes(9, 64))];
    spoilt[0].src[3] = 99;
    spoilt[1].macs.1[5] = 99;
    for frame in &spoilt {
        assert_eq!(bench.run("ingress", &frame.build()).unwrap().action, DROP);
    }
    let mut counted = bench.counters().unwrap();
    counted.retain(|c| !before.contains(c));
    let expected =
        [Counter::Steered, Counter::Stale, Counter::WrongSourceIp, Counter::WrongSourceMac];
    assert!(expected.iter().all(|e| counted.iter().any(|(c, _)| c == e)), "{counted:?}");
    assert_eq!(counted.len(), expected.len(), "{counted:?}");
}

#[test]
#[ignore = "needs root and BPF"]
fn packets_before_a_rings_first_never_reach_its_receiver() {
    // Packets like those of a flow that was registered with too high a PSN: its receiver waits for
    // exactly these.
    let mut bench = Bench::new(ring(2, 256, 8), false).unwrap();
    for (ran, behind) in [(0, 1), (0, 9), (0, 1 << 20), (30, 1), (30, 9), (30, 1 << 20)] {
        let done = bench.plane.ring_state(RingNumber(1)).unwrap().low;
        for index in done..ran {
            bench.sequence(&[(0, index, DROP), (1, index, REDIRECT)]).unwrap();
        }
        let mut early = fragment(0, 2, 0, lanes(9, 64));
        early.bth.psn = serial::sub(early.bth.psn, behind);
        let frame = early.build();
        assert_eq!(
            bench.run("ingress", &frame).unwrap().action,
            REDIRECT,
            "{ran} {behind}: as every contribution"
        );
        if ran == 0 {
            assert_eq!(bench.aggregate(&frame).unwrap().action, DROP, "{ran} {behind}");
        }
    }
    let counters = bench.counters().unwrap();
    assert!(counters.contains(&(Counter::CreditViolation, 3)), "{counters:?}");
}

#[test]
#[ignore = "needs root and BPF"]
fn a_moved_psn_passes_only_on_flows_of_boxes() {
    let spec = ring(2, 256, 8);
    let mut flows: Vec<FlowSpec> = (0..2).map(|rank| flow(&spec, rank, false)).collect();
    flows[0].group_mark = group_mark(4);
    let mut bench = Bench::with_flows(spec, flows).unwrap();
    let first = bench.run("ingress", &fragment(0, 2, GAP_PSN_AHEAD, lanes(9, 64)).build()).unwrap();
    assert_eq!(first.action, REDIRECT, "nothing has come that another box could have moved");
    // The total of another box is expected, so a single rank's contribution and the sum of fewer
    // ranks are refused.
    let mut contribution = fragment(0, 2, 0, lanes(9, 64));
    for (carried, refused) in [(0, 1), (group_mark(2), 2), (group_mark(4), 2)] {
        contribution.bth.flags = carried;
        assert_eq!(bench.aggregate(&contribution.build()).unwrap().action, DROP);
        let counters = bench.counters().unwrap();
        assert!(counters.contains(&(Counter::UnexpectedTotal, refused)), "{carried}: {counters:?}");
    }
    bench.sequence(&[(1, 0, REDIRECT)]).unwrap();
    let at = |rank, by: u32| {
        let mut data = fragment(rank, 2, 0, lanes(9, 64));
        data.bth.psn = serial::add(data.bth.psn, by);
        data.build()
    };
    let behind = serial::sub(0, STALE_PSN_BEHIND);
    for by in [GAP_PSN_AHEAD, GAP_PSN_AHEAD + 1, behind] {
        assert_eq!(bench.run("ingress", &at(0, by)).unwrap().action, PASS, "{by:#x}");
        assert_eq!(
            bench.run("ingress", &at(1, by)).unwrap().action,
            REDIRECT,
            "{by:#x}: as every contribution"
        );
    }
    // Packets that their receiver would take for data do not pass either.
    for by in [0, 1, 1 << 20, GAP_PSN_AHEAD / 2, GAP_PSN_AHEAD + 100, serial::sub(0, 1)] {
        assert_eq!(bench.run("ingress", &at(0, by)).unwrap().action, REDIRECT, "{by:#x}");
    }
    let counters = bench.counters().unwrap();
    assert!(counters.contains(&(Counter::ShiftedPsn, 3)), "{counters:?}");
    assert!(counters.contains(&(Counter::UnexpectedTotal, 2)), "{counters:?}");
}

#[test]
#[ignore = "needs root and BPF"]
fn an_address_of_a_rank_passes_on_its_own_port_alone() {
    let spec = ring(2, 256, 16);
    // Rank 0 is behind `port`; packets arrive at the loopback interface.
    let flows = |port: u32, v6: bool| {
        let mut flows: Vec<FlowSpec> = (0..2).map(|r| flow(&spec, r, v6)).collect();
        flows[0].ifindex = port;
        flows[0].src_mac = Some([2, 0, 0, 0, 0, host(0)]);
        flows
    };
    let spoofed = |bench: &Bench| {
        let counters = bench.counters().unwrap();
        counters.iter().find(|(c, _)| *c == Counter::Spoofed).map_or(0, |(_, count)| *count)
    };
    let mut bench = Bench::with_flows(spec.clone(), flows(LOOPBACK, false)).unwrap();
    let (rank, foreign) = (host(0), 77);
    let other = |v6: bool, from: u8, mac: u8| {
        let mut spec = FrameSpec::send(from, host(1), 0x77, 5, lanes(0, 8));
        spec.macs.1[5] = mac;
        if v6 { spec.v6() } else { spec }
    };
    let tcp = |v6: bool| {
        let mut frame = other(v6, rank, foreign).build();
        frame[if v6 { 20 } else { 23 }] = 6;
        frame
    };
    let arp = |ip: u8| {
        let mut frame = [[0xff; 6], [2, 0, 0, 0, 0, foreign]].concat();
        frame.extend([0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 2, 2, 0, 0, 0, 0, foreign, 10, 0, 0, ip]);
        frame.resize(60, 0);
        frame
    };
    // A neighbour advertisement, sent from its own address for another host's address.
    let advertisement = |target: u8| {
        let mut frame = other(true, foreign, foreign).build();
        frame[20] = 58;
        frame[54..62].copy_from_slice(&[136, 0, 0, 0, 0x60, 0, 0, 0]);
        frame[62..78].copy_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, target]);
        frame
    };
    let mut ack = other(false, rank, rank);
    ack.bth.opcode = Opcode::ACK;
    let mut tagged = other(false, rank, foreign);
    tagged.vlan = Some(7);
    let mut options = other(false, rank, foreign).build();
    options[14] = 0x46;
    let cases: [(&str, bool, Vec<u8>, bool); 14] = [
        ("ACK", false, ack.build(), false),
        ("IP", false, other(false, rank, foreign).build(), false),
        ("MAC", false, other(false, foreign, rank).build(), false),
        ("IP behind a tag", false, tagged.build(), false),
        ("IP with options", false, options, false),
        ("TCP", false, tcp(false), false),
        ("ARP", false, arp(rank), false),
        ("IPv6", true, other(true, rank, foreign).build(), false),
        ("TCP over IPv6", true, tcp(true), false),
        ("neighbour advertisement", true, advertisement(rank), false),
        ("a foreign host", false, other(false, foreign, foreign).build(), true),
        ("a foreign host's ARP", false, arp(foreign), true),
        ("a foreign host's advertisement", true, advertisement(foreign), true),
        ("a stub of a frame", false, vec![2; 14], true),
    ];
    for (what, v6, packet, passes) in cases {
        bench.restart(spec.clone(), &flows(4711, v6)).unwrap();
        let (before, expected) = (spoofed(&bench), if passes { PASS } else { DROP });
        assert_eq!(
            bench.run("ingress", &packet).unwrap().action,
            expected,
            "{what} on another port"
        );
        assert_eq!(spoofed(&bench) - before, u64::from(!passes), "{what}");
        bench.restart(spec.clone(), &flows(LOOPBACK, v6)).unwrap();
        assert_eq!(bench.run("ingress", &packet).unwrap().action, PASS, "{what} on its own port");
        // When the job is gone, the address is free.
        bench.restart(spec.clone(), &flows(4711, v6)).unwrap();
        bench
            .plane
            .delete_ring(RingNumber(1), &std::mem::take(&mut bench.keys), &[LOOPBACK])
            .unwrap();
        assert_eq!(bench.run("ingress", &packet).unwrap().action, PASS, "{what}, afterwards");
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn an_address_is_a_ranks_until_its_last_flow_has_gone() {
    let spec = ring(2, 256, 16);
    let flows: Vec<FlowSpec> = (0..2)
        .map(|r| FlowSpec {
            ifindex: 4711,
            src_mac: Some([2, 0, 0, 0, 0, host(r)]),
            ..flow(&spec, r, false)
        })
        .collect();
    let mut bench = Bench::with_flows(spec.clone(), flows.clone()).unwrap();
    let mut second = ring(2, 256, 16);
    second.id = RingNumber(2);
    bench.plane.create_ring(&second).unwrap();
    let again = FlowSpec { ring: RingNumber(2), qpn: Qpn::new(0x4711), ..flows[0].clone() };
    // Registering a flow twice has the effect of registering it once.
    bench.plane.add_flow(&again).unwrap();
    bench.plane.add_flow(&again).unwrap();
    let elsewhere =
        FlowSpec { ring: RingNumber(2), qpn: Qpn::new(0x4712), ifindex: 4712, ..flows[0].clone() };
    let error = format!("{:#}", bench.plane.add_flow(&elsewhere).unwrap_err());
    assert!(error.contains("10.0.0.1: belongs to interface 4711 already, not to 4712"), "{error}");
    let packet = FrameSpec::send(host(0), 99, 0x77, 5, lanes(0, 8)).build();
    assert_eq!(bench.run("ingress", &packet).unwrap().action, DROP);
    bench.plane.delete_ring(RingNumber(1), &bench.keys.clone(), &[]).unwrap();
    assert_eq!(bench.run("ingress", &packet).unwrap().action, DROP, "one flow is left");
    bench.plane.delete_ring(RingNumber(2), &[again.key()], &[]).unwrap();
    assert_eq!(bench.run("ingress", &packet).unwrap().action, PASS, "none is");
}

#[test]
#[ignore = "needs root and BPF"]
fn behind_ingress_a_guard_drops_what_must_not_pass() {
    let spec = ring(2, 256, 16);
    let mut flows: Vec<FlowSpec> = (0..2).map(|r| flow(&spec, r, false)).collect();
    flows[1].ifindex = 4711;
    let mut bench = Bench::with_flows(spec, flows).unwrap();
    let moved = |by: u32| {
        let mut frame = fragment(0, 2, 0, lanes(0, 64));
        frame.bth.psn = serial::add(frame.bth.psn, by);
        frame
    };
    // `ingress` cannot have moved a PSN before it accepted a packet of the flow: the flow was
    // registered with a wrong PSN.
    for by in [0, 1 << 21, GAP_PSN_AHEAD, 1 << 23, serial::sub(0, STALE_PSN_BEHIND)] {
        assert!(
            !bench.guard(&moved(by).build(), 1).unwrap().0,
            "{by:#x} ahead of a flow's first packet"
        );
    }
    assert_eq!(bench.aggregate(&moved(0).build()).unwrap().action, DROP);
    let mut passes = |f: &FrameSpec| bench.guard(&f.build(), 1).unwrap().0;
    // An application that reconnected with the same queue pair.
    for by in [1 << 21, 3 << 21, 1 << 23, 5 << 21, 7 << 21] {
        assert!(!passes(&moved(by)), "{by:#x} ahead of what was taken last");
    }
    // `ingress` passes these: packets of unknown flows, acknowledgements, and data with a moved
    // PSN.
    assert!(passes(&FrameSpec::send(50, 51, 9, 0, lanes(0, 64))));
    let mut ack = fragment(0, 2, 0, vec![]);
    ack.bth.opcode = Opcode::ACK;
    assert!(passes(&ack));
    assert!(passes(&moved(GAP_PSN_AHEAD)) && passes(&moved(serial::sub(0, STALE_PSN_BEHIND))));
    // `ingress` does not pass these.
    for index in [0, 1, 15, serial::sub(0, 100)] {
        assert!(!passes(&moved(index)), "a contribution, index {index}");
    }
    let mut invalidate = fragment(0, 2, 0, lanes(0, 64));
    invalidate.bth.opcode = Opcode(0x16);
    assert!(!passes(&invalidate), "data in a form that cannot be summed");
    let mut forged = fragment(1, 2, 0, vec![]);
    forged.bth.opcode = Opcode::ACK;
    assert!(!passes(&forged), "an acknowledgement with the address of a rank behind another port");
    bench.plane.delete_ring(RingNumber(1), &bench.keys.clone(), &[LOOPBACK]).unwrap();
    assert!(!bench.guard(&moved(GAP_PSN_AHEAD).build(), 1).unwrap().0, "its job has ended");
    let dropped = |ring| bench.plane.counters(ring).unwrap()[Counter::BypassedIngress as usize];
    assert_eq!((dropped(RingNumber(1)), dropped(RingNumber::NONE)), (16, 1));
}

/// RoCEv1, as in IBTA's annex A16: no IP header and no UDP, but the 40 bytes of a GRH.
fn in_roce_v1(spec: &FrameSpec) -> Vec<u8> {
    let frame = spec.build();
    let gid = |ip: &[u8]| [&[0; 10][..], &[0xff, 0xff], ip].concat();
    let (transport, mut grh) = (&frame[14 + 20 + 8..], vec![0x60, 0, 0, 0]);
    grh.extend((transport.len() as u16).to_be_bytes());
    grh.extend([0x1b, 64]);
    [&frame[..12], &[0x89, 0x15], &grh, &gid(&spec.src), &gid(&spec.dst), transport].concat()
}

#[test]
#[ignore = "needs root and BPF"]
fn nothing_is_summed_of_roce_v1_or_of_other_addresses_of_a_rank() {
    let mut bench = Bench::new(ring(2, 256, 16), false).unwrap();
    let data = fragment(0, 2, 0, lanes(0, 64));
    let (mut from_another, mut to_another) = (data.clone(), data.clone());
    from_another.src[3] = 99;
    to_another.dst[3] = 99;
    let v1 = in_roce_v1(&data);
    assert_eq!(bench.run("ingress", &from_another.build()).unwrap().action, DROP);
    assert!(bench.counters().unwrap().contains(&(Counter::WrongSourceIp, 1)));
    // Foreign packets that no queue pair of their receivers accepts: they pass as without a box.
    for frame in [to_another.build(), v1] {
        let out = bench.run("ingress", &frame).unwrap();
        assert_eq!((out.action, out.packet), (PASS, frame));
    }
    let steered = bench.counters().unwrap().iter().any(|(c, _)| *c == Counter::Steered);
    assert!(!steered && bench.plane.ring_state(RingNumber(1)).unwrap().low == 0);

    // The same from another port than the rank's.
    let spec = ring(2, 256, 16);
    let mut flows: Vec<FlowSpec> = (0..2).map(|r| flow(&spec, r, false)).collect();
    (flows[0].ifindex, flows[0].src_mac) = (4711, Some(data.macs.1));
    let mut bench = Bench::with_flows(spec, flows).unwrap();
    let mut own_mac = data.clone();
    own_mac.macs.1[5] = 99;
    for (spoofed, frame) in [
        (true, to_another.build()),
        (true, in_roce_v1(&data)),
        // The frame has its sender's own MAC address, and the box does not look into a GRH.
        (false, in_roce_v1(&own_mac)),
    ] {
        let action = if spoofed { DROP } else { PASS };
        assert_eq!(bench.run("ingress", &frame).unwrap().action, action, "{frame:02x?}");
    }
    assert!(bench.counters().unwrap().contains(&(Counter::Spoofed, 2)));
}
