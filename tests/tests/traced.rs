//! Tracing in the XDP programs, packet by packet (BPF_PROG_TEST_RUN): no event while it is off, and
//! the right events while it is on.

use netsum_common::abi::{
    MAX_CAPTURE, MIN_CAPTURE, TRACE_BUFFER_BYTES, TraceEvent, TraceFilter, traced_by,
};
use netsum_common::counters::Counter;
use netsum_common::slot::Slot;
use netsum_dataplane::{DataPlane, Traced};
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::programs::{BASE_PSN, Bench, LOOPBACK, host, qpn, ring};

fn fragment(rank: u32, ranks: u32, index: u32) -> Vec<u8> {
    let psn = (BASE_PSN + index) & 0xff_ffff;
    FrameSpec::send(host(rank), host((rank + 1) % ranks), qpn(rank), psn, lanes(rank + index, 64))
        .build()
}

fn events(bench: &mut Bench) -> Vec<Traced> {
    bench.plane.traced(usize::MAX).unwrap()
}

/// The only event that a program has written.
fn event(bench: &mut Bench) -> Traced {
    let mut all = events(bench);
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

fn bits(counters: &[Counter]) -> u64 {
    counters.iter().fold(0, |bits, c| bits | c.bit())
}

#[test]
#[ignore = "needs root and BPF"]
fn programs_trace_only_while_a_client_traces() {
    let mut bench = Bench::new(ring(2, 256, 8), false).unwrap();
    let all = |bench: &mut Bench, index: u32| {
        bench.run("ingress", &fragment(0, 2, index)).unwrap();
        bench.aggregate(&fragment(0, 2, index)).unwrap();
        let out = bench.aggregate(&fragment(1, 2, index)).unwrap();
        bench.egress(&out.packet).unwrap()
    };
    all(&mut bench, 0);
    assert_eq!(events(&mut bench), []);

    bench.plane.trace(Some(&TraceFilter::ALL)).unwrap();
    let left = all(&mut bench, 1);
    let traced = events(&mut bench);
    let seen: Vec<_> =
        traced.iter().map(|t| (t.event.program, t.event.rank, t.event.counters)).collect();
    assert_eq!(
        seen,
        [
            (traced_by::INGRESS, 0, bits(&[Counter::Steered])),
            (traced_by::AGGREGATE, 0, bits(&[Counter::Contributions])),
            (
                traced_by::AGGREGATE,
                1,
                bits(&[Counter::Contributions, Counter::Completed, Counter::Released])
            ),
            (traced_by::EGRESS, 1, bits(&[Counter::Results])),
        ]
    );
    assert!(
        traced.iter().all(|t| (t.event.ring, t.event.index, t.event.ifindex) == (1, 1, LOOPBACK))
    );
    assert!(traced.is_sorted_by_key(|t| t.event.time));
    // The contributors, in turn: none yet for this index; then the first rank; then the second,
    // which releases the sum.
    let slots: Vec<_> =
        traced.iter().map(|t| (t.event.contributors, t.event.low, t.event.slot_index)).collect();
    assert_eq!(slots, [(0, 1, 0), (1, 1, 1), (3, 2, 1), (3, 2, 1)]);
    let whole_message = Slot::FIRST | Slot::LAST;
    let released = Slot::USED | Slot::COMPLETE | Slot::RELEASED;
    assert_eq!(traced[2].event.slot_flags, released | whole_message);
    // The traced frame is the one received, although the program has put sum and tag into it; at
    // egress it is the one sent.
    assert_eq!(traced[2].frame, fragment(1, 2, 1)[..MIN_CAPTURE as usize]);
    assert_eq!(traced[3].frame, left.packet[..MIN_CAPTURE as usize]);
    assert_eq!(traced[3].event.len as usize, left.packet.len());

    bench.plane.trace(None).unwrap();
    all(&mut bench, 2);
    assert_eq!(events(&mut bench), []);
    assert_eq!(bench.plane.trace_lost().unwrap(), 0);
}

#[test]
#[ignore = "needs root and BPF"]
fn every_kind_of_verdict_has_the_names_of_its_counters() {
    let mut bench = Bench::new(ring(2, 256, 8), false).unwrap();
    bench.plane.trace(Some(&TraceFilter::ALL)).unwrap();
    let aggregate = |bench: &mut Bench, frame: &[u8]| {
        bench.aggregate(frame).unwrap();
        event(bench).event
    };
    // A packet behind a gap of one is forwarded, and its receiver NAKs.
    let gap = aggregate(&mut bench, &fragment(0, 2, 1));
    assert_eq!(
        gap.counters,
        bits(&[Counter::Contributions, Counter::OutOfSequence, Counter::GapForwarded])
    );
    assert_eq!((gap.index, gap.expected, gap.low), (1, 0, 0));
    let held = aggregate(&mut bench, &fragment(1, 2, 1));
    assert_eq!(
        held.counters & bits(&[Counter::Completed, Counter::HeldBack]),
        bits(&[Counter::Completed, Counter::HeldBack])
    );
    assert_eq!(aggregate(&mut bench, &fragment(0, 2, 0)).counters, Counter::Contributions.bit());
    assert_eq!(aggregate(&mut bench, &fragment(0, 2, 0)).counters, Counter::DuplicateRequest.bit());
    aggregate(&mut bench, &fragment(1, 2, 0));
    assert_eq!(aggregate(&mut bench, &fragment(1, 2, 0)).counters, Counter::Replays.bit());
    assert_eq!(aggregate(&mut bench, &fragment(0, 2, 7)).counters, Counter::CreditViolation.bit());
    let mut spoilt = fragment(0, 2, 2);
    *spoilt.last_mut().unwrap() ^= 1;
    let bad = aggregate(&mut bench, &spoilt);
    assert_eq!((bad.counters, bad.rank, bad.index), (Counter::BadIcrc.bit(), 0, 2));
    // At ingress: an acknowledgement of a flow, and packets without a flow.
    let mut ack = FrameSpec::send(host(0), host(1), qpn(0), 5, vec![0; 4]);
    ack.bth.opcode = netsum_common::wire::Opcode::ACK;
    bench.run("ingress", &ack.build()).unwrap();
    let ack = event(&mut bench).event;
    assert_eq!((ack.counters, ack.ring, ack.rank), (Counter::NotData.bit(), 1, 0));
    bench.run("ingress", &FrameSpec::send(7, 8, 9, 10, vec![0; 4]).build()).unwrap();
    let none = event(&mut bench).event;
    assert_eq!((none.counters, none.ring, none.rank), (Counter::NoFlow.bit(), 0, TraceEvent::NONE));
    bench.run("ingress", &[0; 60]).unwrap();
    let short = event(&mut bench);
    assert_eq!((short.event.counters, &short.frame[..]), (Counter::NotRoce.bit(), &[0; 60][..]));
    // A replay whose slot was reused meanwhile.
    bench.egress(&[0xff; 100]).unwrap();
    let lost = event(&mut bench).event;
    assert_eq!(
        (lost.program, lost.counters, lost.ring),
        (traced_by::EGRESS, Counter::EgressNoRoute.bit(), 0)
    );
}

#[test]
#[ignore = "needs root and BPF"]
fn filters_choose_rings_verdicts_and_whole_frames() {
    let mut bench = Bench::new(ring(2, 2048, 8), false).unwrap();
    let filter = TraceFilter { counters: Counter::Contributions.bit(), ..TraceFilter::ALL };
    bench.plane.trace(Some(&filter)).unwrap();
    let long = FrameSpec::send(host(0), host(1), qpn(0), BASE_PSN, lanes(0, 512)).build();
    bench.run("ingress", &long).unwrap();
    bench.aggregate(&long).unwrap();
    bench.aggregate(&long).unwrap();
    assert_eq!(event(&mut bench).event.counters, Counter::Contributions.bit());

    let mut filter = TraceFilter { capture: MAX_CAPTURE as u32, ..TraceFilter::ALL };
    filter.rings = [1, 0, 0, 0];
    bench.plane.trace(Some(&filter)).unwrap();
    bench.aggregate(&long).unwrap();
    assert_eq!(events(&mut bench), [], "ring 1 is not wanted");
    filter.rings = [2, 0, 0, 0];
    bench.plane.trace(Some(&filter)).unwrap();
    bench.run("ingress", &[0; 60]).unwrap();
    bench.aggregate(&long).unwrap();
    assert_eq!(event(&mut bench).frame, long);
    // The frame is longer than a capture can be.
    filter.rings = [1, 0, 0, 0];
    bench.plane.trace(Some(&filter)).unwrap();
    bench.run("ingress", &[7; 3500]).unwrap();
    let cut = event(&mut bench);
    assert_eq!((cut.event.len, &cut.frame[..]), (3500, &[7; MAX_CAPTURE][..]));
    filter.capture = 0;
    bench.plane.trace(Some(&filter)).unwrap();
    bench.run("ingress", &[7; 3500]).unwrap();
    assert_eq!(event(&mut bench).frame.len(), MIN_CAPTURE as usize, "headers are always there");
}

#[test]
#[ignore = "needs root and BPF"]
fn lost_events_are_counted_until_the_next_start() {
    let mut bench = Bench::new(ring(2, 256, 8), false).unwrap();
    bench.plane.trace(Some(&TraceFilter::ALL)).unwrap();
    let runs = 2 * TRACE_BUFFER_BYTES / (size_of::<TraceEvent>() as u32 + MIN_CAPTURE);
    bench.repeat("ingress", &[0; 200], runs).unwrap();
    let lost = bench.plane.trace_lost().unwrap();
    assert!(lost > u64::from(runs) / 4, "{lost} of {runs}");
    bench.plane.trace(None).unwrap();
    bench.plane.trace(Some(&TraceFilter::ALL)).unwrap();
    assert_eq!(events(&mut bench), []);
    bench.plane.trace(None).unwrap();
    bench.repeat("ingress", &[0; 200], runs).unwrap();
    assert_eq!(bench.plane.trace_lost().unwrap(), lost, "nothing is lost while it is off");
    bench.plane.trace(Some(&TraceFilter::ALL)).unwrap();
    bench.repeat("ingress", &[0; 200], runs / 4).unwrap();
    assert_eq!(events(&mut bench).len() as u32, runs / 4);
    assert_eq!(bench.plane.trace_lost().unwrap(), lost);
}
