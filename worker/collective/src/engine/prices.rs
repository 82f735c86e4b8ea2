//! Tests of what each collective sends over the hosts' ring, and of its results there.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::{Engine, Outcome, Settings, Work};
use fastrand::Rng;

use crate::buffer::Buffer;
use crate::call::{Call, Collective, Op};
use crate::channels::{Channel, ChannelEvent, Channels};
use crate::frame::{DATA_HEADER, Frame};
use crate::numeric::block::{EXPONENT_BYTES, Width};
use crate::numeric::collectives::{ByteBlocks, Reduce, Route, Scatter};
use crate::numeric::element::{Element, Owned, into_data};
use crate::numeric::layout::{CHECK_BYTES, Layout};
use crate::numeric::operators::{Code, Reduction};
use crate::shape::JobShape;

const LAYOUT: Layout = Layout { message_size: 2048, window: 3, rings: 2 };

/// Connections to the next rank that lose nothing.
#[derive(Default)]
struct Links {
    arrived: VecDeque<ChannelEvent>,
    sent: Vec<(Channel, Buffer)>,
    /// Sent to be summed by a box that does not exist.
    unsummed: Vec<(u32, u64, Buffer)>,
}

impl Channels for Links {
    fn send(&mut self, channel: Channel, id: u64, data: Buffer) {
        match channel {
            Channel::RingOut(ring) => {
                self.sent.push((Channel::RingIn(ring), data.to_vec().into()));
                self.unsummed.push((ring, id, data));
            }
            _ => {
                self.sent.push((Channel::BypassIn, data.to_vec().into()));
                self.arrived.push_back(ChannelEvent::Sent { channel, id, data });
            }
        }
    }
    fn expect(&mut self, _: Instant, _: Channel, _: u64) {}
    fn receive_into(&mut self, _: Channel, _: Buffer) {}
    fn poll(&mut self) -> Option<ChannelEvent> {
        self.arrived.pop_front()
    }
    fn close(&mut self, channel: Channel) -> Vec<(u64, Buffer)> {
        let is_of = |ring: u32| channel == Channel::RingOut(ring);
        let closed = self.unsummed.extract_if(.., |(ring, ..)| is_of(*ring));
        closed.map(|(_, id, data)| (id, data)).collect()
    }
}

/// Ranks in a ring whose places are not the application's numbers.
struct Ranks {
    ranks: u32,
    /// Whether they fall back from a box in the operation.
    fall_back: bool,
}

impl Ranks {
    /// Runs one call. Returns the outcomes by rank, and the bytes that each has sent in the ring.
    fn run(&self, call: Call, data: impl Fn(u32) -> Owned) -> Vec<(Outcome, u64)> {
        self.run_over(call, data, |_| ()).expect("no rank finds an error")
    }

    /// The same over connections that may change frames; `None` if a rank finds an error.
    fn run_over(
        &self,
        call: Call,
        data: impl Fn(u32) -> Owned,
        mut change: impl FnMut(&mut [u8]),
    ) -> Option<Vec<(Outcome, u64)>> {
        let (ranks, now, timeout) = (self.ranks, Instant::now(), Duration::from_secs(10));
        let on_host_ring = !self.fall_back;
        let (relaxed, is_sealed) = (false, false);
        let shape = JobShape { ranks, mtu: 256, layout: LAYOUT, relaxed, on_host_ring, is_sealed };
        let mut names: Vec<u32> = (0..ranks).collect();
        names.rotate_left(1);
        names.swap(0, ranks as usize / 2);
        let mut members: Vec<(Engine, Links)> = (0..ranks)
            .map(|rank| {
                let mut links = Links::default();
                let settings = Settings { rank, shape, summands: ranks, timeout, session: 1 };
                let mut engine = Engine::new(now, settings, None, &mut links);
                engine.name_ranks(names.clone());
                let work = Work::Owned(data(names[rank as usize]));
                engine.start(now, &mut links, call, work).unwrap();
                (engine, links)
            })
            .collect();
        let mut outcomes: Vec<Option<(Outcome, u64)>> = names.iter().map(|_| None).collect();
        let mut rng = Rng::with_seed(u64::from(ranks));
        let mut steps = 0;
        while outcomes.iter().any(Option::is_none) {
            steps += 1;
            if steps > 1_000_000 {
                // A rank waits for a message that no other sends.
                return None;
            }
            let place = rng.u64(..u64::from(ranks)) as usize;
            let (engine, links) = &mut members[place];
            engine.step(now, links, None);
            if engine.failure().is_some() || engine.statistics().wrong > 0 {
                return None;
            }
            if let Some(outcome) = engine.outcome() {
                let sent = engine.statistics().ring_bytes;
                outcomes[names[place] as usize] = Some((outcome, sent));
            }
            let sent = std::mem::take(&mut links.sent).into_iter();
            let events = sent.map(|(channel, mut data)| {
                change(&mut data);
                ChannelEvent::Received { channel, data }
            });
            members[(place + 1) % ranks as usize].1.arrived.extend(events);
        }
        Some(outcomes.into_iter().flatten().collect())
    }

    /// What all ranks get, and what each gets by reduce and reduce-scatter, is the same.
    fn check_sums<T: Element>(
        &self,
        op: Op,
        width: Width,
        length: usize,
        of: impl Fn(u32, usize) -> T,
    ) {
        let ranks = self.ranks;
        let part = length / ranks as usize;
        let own = |rank| (0..length).map(|i| of(rank, i)).collect::<Vec<T>>();
        let call = |collective| Call { width, ..Call::from(collective) };
        let code = |rank| Code::new::<T>(op, rank, ranks, false).unwrap();
        let divisor = if op == Op::Average { ranks } else { 1 };
        let reduce = |collective, root: Option<u32>| {
            let all = self.run(call(collective), |rank| {
                let keeps = root.is_none_or(|root| root == rank);
                let data = Reduce { data: own(rank), keeps, divisor };
                Box::new(Reduction::new(data, code(rank)))
            });
            let data = all.into_iter().map(|(outcome, _)| {
                let data: Reduction<Reduce<Vec<T>>> = into_data(outcome.data.unwrap()).unwrap();
                (texts(&data.elements.data), outcome.result.unwrap().verified)
            });
            data.collect::<Vec<_>>()
        };
        let sums = reduce(Collective::AllReduce(op), None);
        let what = format!("{op} of {length} {} at {ranks} ranks", T::DTYPE);
        assert!(sums.iter().all(|all| *all == sums[0]), "{what}");
        let root = ranks / 3;
        for (rank, (got, _)) in (0..).zip(reduce(Collective::Reduce { op, root }, Some(root))) {
            let wanted = if rank == root { sums[0].0.clone() } else { texts(&own(rank)) };
            assert!(got == wanted, "{what}: reduce at rank {rank}");
        }
        let scattered = self.run(call(Collective::ReduceScatter(op)), |rank| {
            let (output, start) = (vec![of(0, 0); part], part * rank as usize);
            let data = Scatter { input: own(rank), output, start, divisor };
            Box::new(Reduction::new(data, code(rank)))
        });
        for (rank, (outcome, _)) in scattered.into_iter().enumerate() {
            let data = into_data::<Reduction<Scatter<Vec<T>, Vec<T>>>>(outcome.data.unwrap());
            let output = texts(&data.unwrap().elements.output);
            let wanted = &sums[0].0[rank * output.len()..][..output.len()];
            assert!(output == wanted, "{what}: reduce_scatter at rank {rank}");
            assert!(outcome.result.unwrap().verified <= sums[0].1, "{what}");
        }
    }

    /// Moves bytes. Returns the most that a rank has sent.
    fn check_moved(&self, collective: Collective, route: Route, block: usize) -> u64 {
        let ranks = self.ranks as usize;
        let byte = |from: usize, to: usize, i: usize| (from * 71 + to * 37 + i * 3 + 200) as u8;
        let (given, taken) = match route {
            Route::Broadcast { .. } => (0, 1),
            Route::AllGather => (1, ranks),
            Route::AllToAll => (ranks, ranks),
        };
        let all = self.run(collective.into(), |rank| {
            let rank = rank as usize;
            let blocks =
                |n: usize| (0..n).flat_map(|to| (0..block).map(move |i| byte(rank, to, i)));
            let input: Vec<u8> = blocks(given).collect();
            let output: Vec<u8> = match route {
                Route::Broadcast { .. } => blocks(1).collect(),
                _ => vec![9; taken * block],
            };
            Box::new(ByteBlocks { input, output, route, block, rank, ranks })
        });
        let mut most = 0;
        for (rank, (outcome, sent)) in all.into_iter().enumerate() {
            let moved = into_data::<ByteBlocks<Vec<u8>, Vec<u8>>>(outcome.data.unwrap()).unwrap();
            for (at, got) in moved.output.chunks(block.max(1)).enumerate() {
                let (from, to) = match route {
                    Route::Broadcast { root } => (root, 0),
                    Route::AllGather => (at, 0),
                    Route::AllToAll => (at, rank),
                };
                let wanted: Vec<u8> = (0..block).map(|i| byte(from, to, i)).collect();
                assert!(got == wanted, "{route:?} of {block} bytes at rank {rank} of {ranks}");
            }
            most = most.max(sent);
        }
        most
    }
}

/// Texts tell all bits of these numbers, and compare those of any type.
fn texts<T: Element>(x: &[T]) -> Vec<String> {
    x.iter().map(|x| format!("{x:?}")).collect()
}

fn every_ring() -> impl Iterator<Item = Ranks> {
    (2..=9).flat_map(|ranks| [false, true].map(|fall_back| Ranks { ranks, fall_back }))
}

#[test]
fn each_rank_gets_its_part_of_the_sum_of_all_types() {
    for ring in every_ring() {
        let n = ring.ranks as usize;
        let float = |rank: u32, i: usize| ((i * 7919 + rank as usize * 104_729) % 10_007) as f32;
        for length in [n, 40 * n, 1100 * n] {
            for width in [Width::Full, Width::Half] {
                ring.check_sums(Op::Sum, width, length, float);
            }
            let full = Width::Full;
            ring.check_sums(Op::Average, full, length, float);
            ring.check_sums(Op::Sum, full, length, |rank, i| float(rank, i) as i32);
            ring.check_sums(Op::Sum, full, length, |rank, i| float(rank, i) as u8);
            ring.check_sums(Op::Sum, full, length, |rank, i| float(rank, i) as u64);
            ring.check_sums(Op::BitXor, full, length, |rank, i| float(rank, i) as u8);
            ring.check_sums(Op::Max, full, length, |rank, i| float(rank, i) as u16);
        }
        ring.check_sums(Op::Sum, Width::Full, 300 * n, |rank, i| f64::from(float(rank, i)));
    }
}

#[test]
fn bytes_arrive_where_they_belong() {
    for ring in every_ring() {
        let root = ring.ranks / 3;
        for block in [0, 3, 100, 5001] {
            let b = block as u64;
            let route = Route::Broadcast { root: root as usize };
            ring.check_moved(Collective::Broadcast { root, block: b }, route, block);
            ring.check_moved(Collective::AllGather { block: b }, Route::AllGather, block);
            ring.check_moved(Collective::AllToAll { block: b }, Route::AllToAll, block);
        }
    }
}

/// Bytes of all the lanes that go around twice, with what is rounded up: check lanes, exponents,
/// and of a reduce-scatter the messages in two parts.
fn overhead(ranks: u64, data: u64, in_two_parts: u64) -> u64 {
    let message = u64::from(LAYOUT.message_size);
    let head = (CHECK_BYTES + EXPONENT_BYTES) as u64;
    let messages = data.div_ceil(message - head) + 8;
    messages * (2 * head + 4 * ranks) + 2 * in_two_parts * message
}

#[test]
fn each_collective_has_its_own_price() {
    for ranks in 2..=9u32 {
        let (ring, n) = (Ranks { ranks, fall_back: false }, u64::from(ranks));
        let block = 100_000u64;
        let all = n * block;
        let most = |sent: u64, lanes: u64, in_two_parts: u64| {
            let most = lanes + overhead(n, all, in_two_parts);
            assert!(sent <= most, "{sent} bytes of {most}");
        };
        let call = Collective::AllGather { block };
        most(ring.check_moved(call, Route::AllGather, block as usize), all - block, 0);
        let root = ranks - 1;
        let call = Collective::Broadcast { root, block: all };
        let route = Route::Broadcast { root: root as usize };
        most(ring.check_moved(call, route, all as usize), all, 0);
        let (call, small) = (Collective::AllToAll { block: block / n }, block / n);
        let sent = ring.check_moved(call, Route::AllToAll, small as usize);
        // Messages with several blocks go to all.
        most(sent, small * n * (n - 1) / 2, n * n / 2);
        let floats = all as usize / 4;
        let own = || (0..floats).map(|i| i as f32).collect::<Vec<_>>();
        let sent = ring.run(Collective::ReduceScatter(Op::Sum).into(), |rank| {
            let part = floats / ranks as usize;
            let (output, start) = (vec![0.0; part], part * rank as usize);
            Box::new(Scatter { input: own(), output, start, divisor: 1 })
        });
        sent.iter().for_each(|(_, sent)| most(*sent, all - block, n - 1));
        let sent = ring.run(Collective::Reduce { op: Op::Sum, root }.into(), |rank| {
            Box::new(Reduce { data: own(), keeps: rank == root, divisor: 1 })
        });
        sent.iter().for_each(|(_, sent)| most(*sent, all, 0));
        let of_root = &sent[root as usize].1;
        assert!(*of_root < overhead(n, all, 0), "the root sends {of_root} bytes");
    }
}

#[test]
fn a_rank_counts_only_sums_that_it_has_verified() {
    let (ranks, root) = (4, 2);
    let ring = Ranks { ranks, fall_back: false };
    let verified = |call: Collective| {
        let all = ring.run(call.into(), |rank| {
            Box::new(Reduce { data: vec![1i32; 5000], keeps: rank == root, divisor: 1 })
        });
        all.into_iter().map(|(outcome, _)| outcome.result.unwrap().verified).collect::<Vec<_>>()
    };
    let [all, ..] = verified(Collective::AllReduce(Op::Sum))[..] else { panic!() };
    assert!(all > 10);
    assert_eq!(verified(Collective::Reduce { op: Op::Sum, root }), [0, 0, all, 0]);
}

/// Changes single bits, also in copies of lanes that only some ranks get. Returns how many changes
/// some rank found; the others must leave the results as they are.
fn found(call: Collective, data: impl Fn(u32) -> Owned, result: impl Fn(Owned) -> Vec<f32>) -> u32 {
    let ring = Ranks { ranks: 3, fall_back: false };
    let run = |change: &mut dyn FnMut(&mut [u8])| {
        let all = ring.run_over(call.into(), &data, change)?.into_iter();
        Some(all.map(|(outcome, _)| result(outcome.data.unwrap())).collect::<Vec<_>>())
    };
    let is_step = |frame: &[u8]| {
        frame.len() > DATA_HEADER && matches!(Frame::decode(frame), Some(Frame::Data(_)))
    };
    let mut steps = 0;
    let right = run(&mut |frame| steps += usize::from(is_step(frame))).unwrap();
    let mut rng = Rng::with_seed(1);
    let mut found = 0;
    for _ in 0..400 {
        let (mut left, random) = (rng.usize(..steps), rng.usize(..));
        let result = run(&mut |frame| {
            if is_step(frame) {
                if left == 0 {
                    let bit = DATA_HEADER * 8 + random % ((frame.len() - DATA_HEADER) * 8);
                    frame[bit / 8] ^= 1 << (bit % 8);
                }
                left = left.wrapping_sub(1);
            }
        });
        match result {
            None => found += 1,
            Some(result) => assert!(result == right, "{call:?}, bit {random} of a step"),
        }
    }
    found
}

#[test]
fn no_changed_bit_changes_a_result_in_silence() {
    let own = |rank: u32, length: usize| -> Vec<f32> {
        (0..length).map(|i| (i as f32 + 1.0) * 2f32.powi(rank as i32)).collect()
    };
    let op = Op::Sum;
    let scatter = |rank| -> Owned {
        let (output, start) = (vec![0f32; 2000], 2000 * rank as usize);
        Box::new(Scatter { input: own(rank, 6000), output, start, divisor: 1 })
    };
    let output = |data| into_data::<Scatter<Vec<f32>, Vec<f32>>>(data).unwrap().output;
    let found_in = found(Collective::ReduceScatter(op), scatter, output);
    assert!(found_in > 300, "{found_in} of 400");
    // One message with a histogram.
    let reduce =
        |rank| -> Owned { Box::new(Reduce { data: own(rank, 100), keeps: rank == 1, divisor: 1 }) };
    let sum = |data| into_data::<Reduce<Vec<f32>>>(data).unwrap().data;
    let found_in = found(Collective::Reduce { op, root: 1 }, reduce, sum);
    assert!(found_in > 200, "{found_in} of 400");
}
