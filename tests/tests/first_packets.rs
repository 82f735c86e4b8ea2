//! Jobs that are set up in band, in the XDP programs, packet by packet: which first packets are
//! noted, and that messages of registered connections must begin with a header.

use netsum_common::abi::{InBandJob, MAX_MTU, RingNumber, SavedHeader, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::serial::{Psn, Qpn};
use netsum_common::wire::in_band::JOB_HEADER_LEN;
use netsum_common::wire::{Bth, InBandToken, JobHeader, Opcode};
use netsum_core::plane::{FirstPacket, RingSpec};
use netsum_dataplane::{DataPlane, held_back};
use netsum_lab::frames::{FrameSpec, lanes, sum};
use netsum_lab::programs::{BASE_PSN, Bench, LOOPBACK, flow, host, qpn, ring};

const DROP: u32 = 1;
const PASS: u32 = 2;
const REDIRECT: u32 = 4;
const RANKS: u32 = 3;
const LEN: usize = 1024;

fn in_band_ring() -> RingSpec {
    let mut ring = ring(RANKS, LEN as u32, 64);
    ring.config.flags = ring_flags::IN_BAND;
    ring
}

const TOKEN: InBandToken = InBandToken(*b"sixteen bytes of");

fn job() -> InBandJob {
    InBandJob { job: RingNumber(1), ranks: RANKS, rings: 1, flags: 0 }
}

fn header(rank: u32, message: u32, index: u32) -> JobHeader {
    JobHeader { dtype: 1, token: TOKEN, ring: 0, rank, ranks: RANKS, message, fragments: 2, index }
}

/// A first packet of a connection to `qpn`.
fn first(header: JobHeader, qpn: u32, psn: u32) -> FrameSpec {
    let rank = header.rank % RANKS;
    let mut payload = lanes(rank, LEN / 4);
    payload[..JOB_HEADER_LEN].copy_from_slice(&header.encode());
    let mut spec =
        FrameSpec::send(host(rank), host((rank + 1) % RANKS), qpn, psn & 0xff_ffff, payload);
    spec.bth.opcode = Opcode::SEND_FIRST;
    spec
}

/// A waiting job: its ring has no flow yet.
fn waiting() -> Bench {
    let mut bench = ended();
    bench.plane.forget_ended(&bench.keys.clone()).unwrap();
    bench
}

/// The same, but its connections were flows before.
fn ended() -> Bench {
    let mut bench = Bench::new(in_band_ring(), false).unwrap();
    bench.plane.delete_ring(RingNumber(1), &bench.keys.clone(), &[LOOPBACK]).unwrap();
    bench.plane.create_ring(&in_band_ring()).unwrap();
    bench.plane.add_in_band_token(TOKEN, job()).unwrap();
    bench
}

/// A running job.
fn at_work() -> Bench {
    let mut bench = Bench::new(in_band_ring(), false).unwrap();
    bench.plane.add_in_band_token(TOKEN, job()).unwrap();
    bench
}

/// The verdicts of both programs.
fn both(bench: &mut Bench, frame: &[u8]) -> [u32; 2] {
    [bench.run("ingress", frame).unwrap().action, bench.aggregate(frame).unwrap().action]
}

fn counted(bench: &Bench, counter: Counter) -> u64 {
    bench.counters().unwrap().iter().find(|(c, _)| *c == counter).map_or(0, |(_, n)| *n)
}

#[test]
#[ignore = "needs root and BPF"]
fn first_packets_are_dropped_until_registered() {
    let mut bench = waiting();
    for v6 in [false, true] {
        for opcode in [0x00, 0x04, 0x05, 0x06, 0x0a, 0x0b].map(Opcode) {
            for vlan in [None, Some(7)] {
                bench.plane.add_in_band_token(TOKEN, job()).unwrap();
                let before =
                    [Counter::InBandFirst, Counter::InBandWaits].map(|c| counted(&bench, c));
                let mut spec = first(header(1, 0, 0), 0x4711, 0x12_3456);
                (spec.bth.opcode, spec.vlan) = (opcode, vlan);
                let spec = if v6 { spec.v6() } else { spec };
                // The same packet arrives repeatedly.
                (0..3).for_each(|_| {
                    assert_eq!(both(&mut bench, &spec.build()), [REDIRECT, DROP], "{opcode:?}")
                });
                let ip = |host: u8| match v6 {
                    true => format!("fd00::{host}").parse().unwrap(),
                    false => format!("10.0.0.{host}").parse().unwrap(),
                };
                let expected = FirstPacket {
                    job: RingNumber(1),
                    header: header(1, 0, 0),
                    ifindex: LOOPBACK,
                    src: ip(2),
                    src_mac: [2, 0, 0, 0, 0, 2],
                    dst: ip(3),
                    qpn: Qpn::new(0x4711),
                    psn: Psn::new(0x12_3456),
                    len: LEN as u32,
                    only: opcode.is_last(),
                };
                assert_eq!(bench.plane.first_packets().unwrap(), [expected]);
                assert_eq!(bench.plane.first_packets().unwrap(), []);
                // Later packets of this connection do not pass either; packets of other connections
                // do.
                let mut middle = spec.clone();
                middle.bth.opcode = Opcode::SEND_MIDDLE;
                let mut spoilt = spec.clone();
                spoilt.payload[8] ^= 1;
                for same in [&middle, &spoilt] {
                    assert_eq!(bench.run("ingress", &same.build()).unwrap().action, DROP);
                    assert!(
                        !bench.guard(&same.build(), 1).unwrap().0,
                        "nor where the port has no XDP program"
                    );
                }
                let after =
                    [Counter::InBandFirst, Counter::InBandWaits].map(|c| counted(&bench, c));
                assert_eq!([after[0] - before[0], after[1] - before[1]], [3, 2]);
                for other in [
                    FrameSpec { bth: Bth { qpn: 0x4712, ..middle.bth }, ..middle.clone() },
                    FrameSpec { bth: Bth { opcode: Opcode::ACK, ..middle.bth }, ..middle.clone() },
                    FrameSpec { src: spec.dst.clone(), ..middle.clone() },
                ] {
                    assert_eq!(bench.run("ingress", &other.build()).unwrap().action, PASS);
                }
                // This lasts until both the job and the connection have ended.
                let another = InBandJob { job: RingNumber(2), ..job() };
                bench.plane.add_in_band_token(InBandToken([1; 16]), another).unwrap();
                bench.plane.remove_in_band_token(TOKEN).unwrap();
                assert_eq!(
                    bench.run("ingress", &middle.build()).unwrap().action,
                    DROP,
                    "its receiver waits"
                );
                let ended: Vec<_> =
                    bench.plane.ended_flows().unwrap().iter().map(|f| f.key).collect();
                assert_eq!(ended.len(), 1);
                bench.plane.forget_ended(&ended).unwrap();
                assert_eq!(bench.run("ingress", &middle.build()).unwrap().action, PASS);
            }
        }
    }
}

#[test]
#[ignore = "needs root and BPF"]
fn packets_other_than_a_jobs_first_pass() {
    let mut bench = waiting();
    let spec = first(header(1, 0, 0), 0x4711, 5);
    let change = |f: fn(&mut FrameSpec)| {
        let mut spec = spec.clone();
        f(&mut spec);
        spec.build()
    };
    let mut options = spec.build();
    options.splice(34..34, [1, 1, 1, 0]);
    options[14] = 0x46;
    options[17] += 4;
    // A frame with a wrong token or version is counted as such; the rest are ordinary data.
    let cases = [
        ("another token", change(|s| s.payload[8] ^= 1), Counter::InBandWrongToken),
        ("another token's end", change(|s| s.payload[23] ^= 0x80), Counter::InBandWrongToken),
        ("another version", change(|s| s.payload[4] = 2), Counter::InBandVersion),
        ("another magic", change(|s| s.payload[0] ^= 1), Counter::NoFlow),
        ("no header", change(|s| s.payload = lanes(1, 256)), Counter::NoFlow),
        ("half a header", change(|s| s.payload.truncate(JOB_HEADER_LEN - 4)), Counter::NoFlow),
        ("a middle packet", change(|s| s.bth.opcode = Opcode::SEND_MIDDLE), Counter::NoFlow),
        ("a last packet", change(|s| s.bth.opcode = Opcode::WRITE_LAST_IMM), Counter::NoFlow),
        ("a READ response", change(|s| s.bth.opcode = Opcode(0x0d)), Counter::NoFlow),
        ("an unreliable SEND", change(|s| s.bth.opcode = Opcode(0x24)), Counter::NoFlow),
        ("a pad", change(|s| s.bth.pad = 1), Counter::NoFlow),
        ("another partition", change(|s| s.bth.pkey = 1), Counter::NoFlow),
        ("IP options", options, Counter::NoFlow),
    ];
    for (what, frame, counter) in cases {
        let before = counted(&bench, counter);
        assert_eq!(bench.run("ingress", &frame).unwrap().action, PASS, "{what}");
        assert_eq!(counted(&bench, counter), before + 1, "{what}: {:?}", bench.counters().unwrap());
        assert_eq!(bench.aggregate(&frame).unwrap().action, DROP, "{what}: nothing passes there");
    }
    assert_eq!(bench.plane.first_packets().unwrap(), []);
    // Without such a job, no first packet is noted either.
    bench.plane.remove_in_band_token(TOKEN).unwrap();
    bench.plane.remove_in_band_token(TOKEN).unwrap();
    assert_eq!(both(&mut bench, &spec.build()), [PASS, DROP]);
    let before = counted(&bench, Counter::InBandWrongToken);
    assert_eq!(both(&mut bench, &change(|s| s.payload[8] ^= 1)), [PASS, DROP]);
    assert_eq!(counted(&bench, Counter::InBandWrongToken), before, "nobody looks");
}

#[test]
#[ignore = "needs root and BPF"]
fn an_ended_connection_may_claim_again_and_its_other_data_is_dropped() {
    let mut bench = ended();
    let mut spec = first(header(1, 0, 0), bench.keys[1].qpn, 0x12_3456);
    assert_eq!(both(&mut bench, &spec.build()), [REDIRECT, DROP]);
    assert_eq!(bench.plane.first_packets().unwrap().len(), 1);
    spec.bth.opcode = Opcode::SEND_MIDDLE;
    assert_eq!(both(&mut bench, &spec.build()), [DROP, DROP]);
    assert_eq!(bench.plane.counters(RingNumber::NONE).unwrap()[Counter::JobEnded as usize], 2);
}

#[test]
#[ignore = "needs root and BPF"]
fn a_first_packet_that_is_not_whole_claims_nothing() {
    let mut bench = waiting();
    let right = first(header(1, 0, 0), 0x4711, 5);
    for at in [0, 30, 49, 53, 54 + 28, 54 + 44, 600] {
        // The ICRC covers neither the MAC address nor the fields by which the frame is found; it
        // covers everything else.
        let mut frame = right.build();
        frame[at] ^= 1;
        let verdict = both(&mut bench, &frame);
        match at {
            0 => assert_eq!(
                (verdict, bench.plane.first_packets().unwrap().len()),
                ([REDIRECT, DROP], 1)
            ),
            _ => assert_eq!(
                (verdict, bench.plane.first_packets().unwrap()),
                ([REDIRECT, DROP], vec![]),
                "byte {at}"
            ),
        }
    }
    assert_eq!(counted(&bench, Counter::BadIcrc), 6);
    // Nor does the spoilt frame stop the other connection that it seems to belong to: byte 49 is
    // the last byte of the QPN.
    let mut other = right.clone();
    (other.bth.qpn, other.bth.opcode) = (0x4710, Opcode::SEND_MIDDLE);
    assert_eq!(bench.run("ingress", &other.build()).unwrap().action, PASS);
    // A packet that is too long to be cloned.
    let mut long = right.clone();
    long.payload.resize(MAX_MTU + 4, 0);
    assert_eq!(both(&mut bench, &long.build()), [REDIRECT, DROP]);
    assert_eq!(counted(&bench, Counter::Oversized), 1);
    // The ICRC is not checked if the job says so.
    bench
        .plane
        .add_in_band_token(TOKEN, InBandJob { flags: ring_flags::ICRC_IGNORE, ..job() })
        .unwrap();
    let mut frame = right.build();
    *frame.last_mut().unwrap() ^= 1;
    assert_eq!(both(&mut bench, &frame), [REDIRECT, DROP]);
    assert_eq!(bench.plane.first_packets().unwrap().len(), 1);
}

#[test]
#[ignore = "needs root and BPF"]
fn a_flood_of_first_packets_takes_one_place_for_each_rank_and_port() {
    let mut bench = waiting();
    for i in 0..20_000u32 {
        let numbers = JobHeader {
            ring: if i / 7 % 2 == 0 { i } else { 0 },
            message: i % 5,
            ..header(if i / 70 % 2 == 0 { i } else { i % RANKS }, 0, i)
        };
        let mut spec = first(numbers, i & 0xff_ffff, i);
        spec.src[3] = i as u8;
        spec.macs.1[5] = i as u8;
        spec.payload.truncate(64);
        assert_eq!(bench.aggregate(&spec.build()).unwrap().action, DROP);
    }
    let noted = bench.plane.first_packets().unwrap();
    // Ring 0 or another ring, with ranks 0 to 2 or another rank.
    assert_eq!(noted.len(), 2 * (RANKS as usize + 1), "{noted:?}");
    assert!(
        noted.iter().all(|p| p.header.message == 0),
        "the first message's is the one that counts"
    );
}

/// A host with one job's token takes no places from others when that job ends: neither from future
/// flows nor from flows that have ended.
#[test]
#[ignore = "needs root and BPF"]
fn a_first_packet_flood_ends_a_bounded_number_of_connections() {
    let mut bench = waiting();
    for i in 0..40_000u32 {
        let mut spec = first(header(1, 0, 0), 0x1_0000 + i, i);
        spec.payload.truncate(64);
        assert_eq!(bench.run("ingress", &spec.build()).unwrap().action, REDIRECT);
    }
    let ended = bench.plane.remove_in_band_token(TOKEN);
    let places = bench.plane.ended_flows().unwrap().len();
    let spec = in_band_ring();
    let others = (0..RANKS)
        .map(|rank| bench.plane.add_flow(&flow(&spec, rank, false)).map_err(|e| format!("{e:#}")));
    let others: Vec<_> = others.collect();
    assert!(ended.is_ok() && others.iter().all(Result::is_ok), "{ended:?}, {others:?}");
    assert!((1..=16 * RANKS as usize).contains(&places), "{places}");
}

/// A rank's packet with this index, on a registered connection.
fn packet(rank: u32, index: u32, opcode: Opcode, begins: Option<JobHeader>) -> FrameSpec {
    let mut spec = first(header(rank, 0, 0), qpn(rank), BASE_PSN + index);
    spec.bth.opcode = opcode;
    spec.payload = lanes(rank + index, LEN / 4);
    if let Some(header) = begins {
        spec.payload[..JOB_HEADER_LEN].copy_from_slice(&header.encode());
    }
    spec
}

#[test]
#[ignore = "needs root and BPF"]
fn headers_are_summed_like_all_lanes() {
    let mut bench = at_work();
    for message in 0..20 {
        for (part, opcode) in [(0, Opcode::SEND_FIRST), (1, Opcode::SEND_LAST)] {
            let index = 2 * message + part;
            let begins = |rank| (part == 0).then(|| header(rank, message, index));
            let specs: Vec<_> =
                (0..RANKS).map(|rank| packet(rank, index, opcode, begins(rank))).collect();
            let total = sum(&specs.iter().map(|s| s.payload.clone()).collect::<Vec<_>>());
            for (rank, spec) in specs.iter().enumerate() {
                let out = bench.aggregate(&spec.build()).unwrap();
                let last = rank as u32 == RANKS - 1;
                assert_eq!(
                    out.action,
                    if last { REDIRECT } else { DROP },
                    "{:?}",
                    bench.counters().unwrap()
                );
                if last {
                    let result = bench.egress(&out.packet).unwrap().packet;
                    assert_eq!(result[54..54 + LEN], total);
                }
            }
        }
    }
    assert_eq!(bench.plane.first_packets().unwrap(), []);
}

#[test]
#[ignore = "needs root and BPF"]
fn a_message_with_a_wrong_index_becomes_a_claim() {
    let mut bench = at_work();
    let send = |bench: &mut Bench, spec: &FrameSpec| both(bench, &spec.build());
    assert_eq!(
        send(&mut bench, &packet(0, 0, Opcode::SEND_FIRST, Some(header(0, 0, 0)))),
        [REDIRECT, DROP]
    );
    // No header, half a header, a header with another token, and one with another version.
    let mut short = packet(1, 0, Opcode::SEND_ONLY, Some(header(1, 0, 0)));
    short.payload.truncate(40);
    let mut token = header(1, 0, 7);
    token.token.0[3] ^= 1;
    let mut version = packet(1, 0, Opcode::SEND_FIRST, Some(header(1, 0, 0)));
    version.payload[4] = 9;
    for spec in [
        packet(1, 0, Opcode::SEND_FIRST, None),
        packet(1, 0, Opcode::SEND_FIRST, Some(token)),
        short,
        version,
    ] {
        assert_eq!(send(&mut bench, &spec), [REDIRECT, DROP]);
    }
    assert_eq!(counted(&bench, Counter::InBandHeader), 4);
    assert_eq!(counted(&bench, Counter::Contributions), 1, "none was added");
    assert_eq!(bench.plane.first_packets().unwrap(), []);
    // The same queue pair with other PSNs, wherever they are for the ring: beyond the credit,
    // stale, or within the window.
    for jump in [5000, 0x80_0000, 0xff_ff00, 1] {
        let mut again = packet(1, jump, Opcode::SEND_FIRST, Some(header(1, 0, 0)));
        again.bth.psn &= 0xff_ffff;
        assert_eq!(send(&mut bench, &again), [REDIRECT, DROP], "{jump}");
        let noted = bench.plane.first_packets().unwrap();
        assert_eq!(noted.len(), 1, "{jump}");
        assert_eq!((noted[0].qpn.get(), noted[0].psn.get()), (qpn(1), again.bth.psn), "{jump}");
    }
    assert_eq!(counted(&bench, Counter::InBandFirst), 4);
    assert_eq!(counted(&bench, Counter::Contributions), 1, "none was added");
    // The later packets of a message have no header.
    assert_eq!(send(&mut bench, &packet(0, 1, Opcode::SEND_LAST, None)), [REDIRECT, DROP]);
    assert_eq!(counted(&bench, Counter::Contributions), 2);
}

#[test]
#[ignore = "needs root and BPF"]
fn packets_of_the_box_for_a_held_sum_begin_as_they_must() {
    let mut bench = at_work();
    // Rank 0 has lost nothing. The sum is held back because the other ranks' earlier packets are
    // missing.
    bench.aggregate(&packet(0, 0, Opcode::SEND_FIRST, Some(header(0, 0, 0))).build()).unwrap();
    bench.aggregate(&packet(0, 1, Opcode::SEND_LAST, None).build()).unwrap();
    let specs: Vec<_> = (0..RANKS)
        .map(|rank| packet(rank, 2, Opcode::SEND_FIRST, Some(header(rank, 1, 2))))
        .collect();
    for spec in &specs {
        bench.aggregate(&spec.build()).unwrap();
    }
    assert_eq!(counted(&bench, Counter::HeldBack), 1);
    let frame = specs[0].build();
    let mut words = [0; 13];
    for (word, bytes) in words.iter_mut().zip(frame.as_chunks().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    let saved = SavedHeader { words, len: 54, ip: 14, v6: 0, reserved: [0; 5] };
    let duplicate = held_back::duplicate(&saved, LEN, Some(2)).unwrap();
    assert_eq!(bench.aggregate(&duplicate).unwrap().action, DROP);
    assert_eq!(
        (counted(&bench, Counter::DuplicateRequest), counted(&bench, Counter::InBandHeader)),
        (1, 0)
    );
}

#[test]
#[ignore = "needs root and BPF"]
fn a_first_packet_at_another_port_counts_as_spoofed() {
    // The ranks of the running job are registered behind another port than the one at which packets
    // arrive here.
    let ring = in_band_ring();
    let mac = |rank| Some([2, 0, 0, 0, 0, host(rank)]);
    let flows: Vec<_> = (0..RANKS)
        .map(|rank| netsum_core::plane::FlowSpec {
            ifindex: 4711,
            src_mac: mac(rank),
            ..flow(&ring, rank, false)
        })
        .collect();
    let mut bench = Bench::with_flows(ring, flows).unwrap();
    bench.plane.add_in_band_token(TOKEN, job()).unwrap();
    let claim = first(header(1, 0, 0), 0x4711, 5);
    for (ip, mac) in [(true, true), (true, false), (false, true)] {
        let mut spec = claim.clone();
        if !ip {
            spec.src[3] = 77;
        }
        if !mac {
            spec.macs.1[5] = 77;
        }
        assert_eq!(bench.run("ingress", &spec.build()).unwrap().action, DROP);
    }
    assert_eq!(counted(&bench, Counter::Spoofed), 3);
    assert_eq!(bench.plane.first_packets().unwrap(), []);
}
