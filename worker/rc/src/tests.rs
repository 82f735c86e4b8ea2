//! Two endpoints and a network that loses, duplicates, reorders, delays and corrupts packets, all
//! from a seed.

use std::cell::Cell;
use std::collections::BinaryHeap;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use netsum_common::wire::{ROCE_PORT, Syndrome};

use super::*;

/// A seed replays a test.
pub(crate) struct Rng(fastrand::Rng);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }
    pub(crate) fn next(&mut self) -> u64 {
        self.0.u64(..)
    }
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0.u64(..n)
    }
    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

/// Faults of a network, in thousandths.
#[derive(Clone, Copy, Default)]
pub(crate) struct Faults {
    pub(crate) loss: u64,
    pub(crate) duplicate: u64,
    pub(crate) reorder: u64,
    pub(crate) corrupt: u64,
}

impl Faults {
    pub(crate) fn loss(loss: u64) -> Self {
        Self { loss, ..Self::default() }
    }
}

/// The ends' queue pairs.
pub(crate) const QPNS: [Qpn; 2] = [Qpn::new(10), Qpn::new(11)];

/// Arrival time, tie breaker, receiver and datagram.
type Flying = (Instant, u64, usize, Vec<u8>);

type Meddle = Box<dyn FnMut(&mut Rng, usize, &mut Vec<u8>) -> Vec<Duration>>;

pub(crate) struct Pair {
    pub(crate) now: Instant,
    pub(crate) ends: [Endpoint; 2],
    pub(crate) qps: [QpId; 2],
    pub(crate) ips: [IpAddr; 2],
    /// Earliest first.
    wire: BinaryHeap<std::cmp::Reverse<Flying>>,
    rng: Rng,
    faults: Faults,
    count: u64,
    pub(crate) lost: u64,
    loses_batches: bool,
    /// What happens to a datagram for an end before the faults: a delay for each copy that is
    /// delivered.
    pub(crate) meddle: Option<Meddle>,
}

impl Pair {
    pub(crate) fn new(seed: u64, faults: Faults, change: impl Fn(&mut QpConfig)) -> Self {
        let ips: [IpAddr; 2] = ["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap()];
        let mut rng = Rng::new(seed);
        let psn = [0xff_fff0 + rng.below(32) as u32, rng.below(1 << 24) as u32].map(Psn::new);
        let mut ends = [0, 1].map(|i| Endpoint::new(ips[i], EndpointConfig::default()));
        let qps = [0, 1].map(|i| {
            let mut c = QpConfig::new(QPNS[i], ips[1 - i], QPNS[1 - i], psn[i], psn[1 - i], 256);
            c.retry_limit = None;
            change(&mut c);
            ends[i].add_qp(c).unwrap()
        });
        Self {
            now: Instant::now(),
            ends,
            qps,
            ips,
            wire: BinaryHeap::new(),
            rng,
            faults,
            count: 0,
            lost: 0,
            loses_batches: false,
            meddle: None,
        }
    }

    /// Sends pending datagrams, delivers the next one, and advances the clock. Returns whether
    /// anything happened.
    pub(crate) fn step(&mut self) -> bool {
        let mut buf = Vec::new();
        for from in 0..2 {
            while let Some(t) = self.ends[from].poll_transmit(self.now, &mut buf) {
                if self.loses_batches && t.segment_size.is_some() {
                    continue;
                }
                for datagram in buf.chunks(t.segment_size.unwrap_or(t.len)) {
                    self.put(1 - from, datagram.to_vec());
                }
            }
        }
        let timeout = self.ends.iter().filter_map(Endpoint::next_timeout).min();
        let arrival = self.wire.peek().map(|p| p.0.0);
        let Some(next) = [timeout, arrival].into_iter().flatten().min() else { return false };
        self.now = self.now.max(next);
        while self.wire.peek().is_some_and(|p| p.0.0 <= self.now) {
            let std::cmp::Reverse((_, _, to, datagram)) = self.wire.pop().unwrap();
            self.ends[to].receive(self.now, (self.ips[1 - to], ROCE_PORT).into(), false, &datagram);
        }
        self.ends.iter_mut().for_each(|e| e.handle_timeout(self.now));
        true
    }

    fn put(&mut self, to: usize, mut datagram: Vec<u8>) {
        let f = self.faults;
        let held = match &mut self.meddle {
            Some(meddle) => meddle(&mut self.rng, to, &mut datagram),
            None => vec![Duration::ZERO],
        };
        if self.rng.chance(f.loss) {
            self.lost += 1;
            return;
        }
        let copies = 1 + self.rng.chance(f.duplicate) as u64;
        if self.rng.chance(f.corrupt) {
            let bit = self.rng.below(datagram.len() as u64 * 8) as usize;
            datagram[bit / 8] ^= 1 << (bit % 8);
        }
        for held in held.into_iter().flat_map(|by| (0..copies).map(move |_| by)) {
            let late = if self.rng.chance(f.reorder) { self.rng.below(300) } else { 0 };
            let at = self.now + held + Duration::from_micros(20 + late);
            self.count += 1;
            self.wire.push(std::cmp::Reverse((at, self.count, to, datagram.clone())));
        }
    }
}

fn message(rng: &mut Rng, longest: u64) -> Vec<u8> {
    let len = 4 + rng.below(longest) as usize / 4 * 4;
    let start = rng.next() as u8;
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(start)).collect()
}

/// Sends messages in both directions; each must arrive once, in order, bit by bit.
pub(crate) fn exchange(seed: u64, faults: Faults, change: impl Fn(&mut QpConfig)) -> [Stats; 2] {
    let mut pair = Pair::new(seed, faults, change);
    let mut rng = Rng::new(!seed);
    let sent = [0, 1].map(|_| {
        (0..8)
            .map(|_| (message(&mut rng, 6000), rng.chance(500).then(|| rng.next() as u32)))
            .collect::<Vec<_>>()
    });
    for (end, sent) in sent.iter().enumerate() {
        for (i, (data, immediate)) in sent.iter().enumerate() {
            pair.ends[end].post_send(pair.qps[end], i as u64, data.clone(), *immediate);
            pair.ends[end].post_receive(pair.qps[end], Vec::new());
        }
    }
    let (mut received, mut acknowledged) = ([vec![], vec![]], [0, 0]);
    for _ in 0..100_000 {
        if !pair.step() {
            break;
        }
        for end in 0..2 {
            while let Some(event) = pair.ends[end].poll_event() {
                match event {
                    Event::Received { data, immediate, .. } => {
                        received[end].push((data, immediate))
                    }
                    Event::Sent { id, .. } => {
                        assert_eq!(id, acknowledged[end], "seed {seed}");
                        acknowledged[end] += 1;
                    }
                    Event::Failed { error, .. } => panic!("seed {seed}: {error}"),
                }
            }
        }
    }
    assert_eq!(acknowledged, [8, 8], "seed {seed}");
    for end in 0..2 {
        assert!(received[end] == sent[1 - end], "seed {seed}: messages differ");
    }
    pair.ends.map(|e| *e.stats())
}

#[test]
fn nothing_is_sent_again_without_loss() {
    for mtu in [256, 512, 1024, 1408, 2048, 3328, 4096] {
        for (operation, selective) in [
            (Operation::Send, false),
            (Operation::Write { address: 0x1000, rkey: 7 }, false),
            (Operation::Send, true),
        ] {
            for stats in exchange(mtu as u64, Faults::default(), |c| {
                c.mtu = mtu;
                c.selective = selective;
                c.opcode = operation;
            }) {
                assert_eq!(
                    (stats.retransmissions, stats.out_of_sequence, stats.naks_sent),
                    (0, 0, 0)
                );
                assert_eq!((stats.rx_icrc_encapsulated, stats.discarded), (0, 0));
            }
        }
    }
}

#[test]
fn every_message_arrives_once_and_in_order_under_faults() {
    for seed in 0..1500 {
        let mut rng = Rng::new(seed ^ 0x5555);
        let faults = Faults {
            loss: rng.below(100),
            duplicate: rng.below(100),
            reorder: rng.below(100),
            corrupt: rng.below(50),
        };
        exchange(seed, faults, |c| {
            c.mtu = [256, 512, 1024, 1408, 3328][seed as usize % 5];
            c.max_inflight = 1 + (seed as u32 * 7) % 130;
            c.selective = seed % 3 == 0;
            c.reused = seed % 2 == 0;
        });
    }
}

#[test]
fn messages_arrive_also_where_all_batches_are_lost() {
    for selective in [false, true] {
        let mut pair = Pair::new(1, Faults::default(), |c| c.selective = selective);
        pair.loses_batches = true;
        pair.ends[0].post_send(pair.qps[0], 0, vec![5; 20 * 256], None);
        pair.ends[1].post_receive(pair.qps[1], Vec::new());
        let mut steps = 0;
        while !matches!(pair.ends[1].poll_event(), Some(Event::Received { .. })) {
            assert!(pair.step() && steps < 10_000, "selective: {selective}");
            steps += 1;
        }
    }
}

#[test]
fn a_lost_packet_gets_a_nak_without_a_timeout() {
    // 3% loss: NAKs recover almost all.
    let stats = exchange(42, Faults::loss(30), |_| ());
    assert!(stats[0].packet_seq_err + stats[1].packet_seq_err > 0);
}

#[test]
fn a_silent_peer_is_an_error_and_not_a_hang() {
    let mut pair = Pair::new(1, Faults::loss(1000), |c| c.retry_limit = Some(3));
    pair.ends[0].post_send(pair.qps[0], 9, vec![0; 4000], None);
    while pair.step() {}
    assert_eq!(
        pair.ends[0].poll_event(),
        Some(Event::Failed { qp: pair.qps[0], error: QpError::RetryExceeded })
    );
    assert_eq!(pair.ends[0].next_timeout(), None);
}

#[test]
fn a_receiver_without_buffer_is_not_ready_and_then_is() {
    let mut pair = Pair::new(2, Faults::default(), |_| ());
    pair.ends[0].post_send(pair.qps[0], 0, vec![7; 1000], Some(3));
    for _ in 0..20 {
        pair.step();
    }
    assert!(pair.ends[0].stats().rnr_nak_retry > 0);
    pair.ends[1].post_receive(pair.qps[1], Vec::new());
    while pair.step() {}
    let (id, data) = (pair.qps[1], vec![7; 1000]);
    assert_eq!(
        pair.ends[1].poll_event(),
        Some(Event::Received { qp: id, data, immediate: Some(3) })
    );
}

/// The packets that an end sends now: PSNs, and whether each requests an acknowledgement.
pub(crate) fn sent_now(pair: &mut Pair, end: usize) -> Vec<(u32, bool)> {
    use netsum_common::wire::Bth;
    let (mut buf, mut sent) = (Vec::new(), Vec::new());
    while let Some(t) = pair.ends[end].poll_transmit(pair.now, &mut buf) {
        for datagram in buf.chunks(t.segment_size.unwrap_or(t.len)) {
            let bth = Bth::decode(datagram[..12].try_into().unwrap());
            sent.push((bth.psn, bth.ack_request));
        }
    }
    sent
}

#[test]
fn small_messages_share_acknowledgements() {
    let asked = |messages: u64, bytes: usize, change: &dyn Fn(&mut QpConfig)| {
        let mut pair = Pair::new(5, Faults::default(), |c| {
            c.selective = true;
            change(c)
        });
        for id in 0..messages {
            pair.ends[0].post_send(pair.qps[0], id, vec![1; bytes], None);
        }
        let sent = sent_now(&mut pair, 0).into_iter().enumerate();
        sent.filter(|(_, (_, asks))| *asks).map(|(n, _)| n).collect::<Vec<_>>()
    };
    assert_eq!(asked(1, 256, &|_| ()), [0]);
    assert_eq!(asked(30, 256, &|_| ()), [0, 1, 2, 3, 11, 19, 27]);
    assert_eq!(asked(4, 4 * 256, &|_| ()), [3, 11]);
    assert_eq!(asked(3, 10 * 256, &|_| ()), [9, 19, 29]);
    // The window's last packet, and often enough before it.
    assert_eq!(asked(30, 256, &|c| c.max_inflight = 20), [0, 1, 2, 3, 6, 9, 12, 15, 18, 19]);
    assert_eq!(asked(9, 256, &|c| c.max_inflight = 4), [0, 1, 2, 3]);
    // Sums, and receivers that do not acknowledge without a request.
    assert_eq!(asked(4, 256, &|c| c.waits_for_others = true), [0, 1, 2, 3]);
    assert_eq!(asked(4, 256, &|c| c.selective = false), [0, 1, 2, 3]);
}

#[test]
fn no_more_is_in_flight_than_the_receiver_holds() {
    for (own, theirs, expected) in [(128, 12, 12), (128, 14, 12), (10, 128, 10), (128, 0, 1)] {
        for (selective, expected) in [(true, expected), (false, own)] {
            let mut pair = Pair::new(5, Faults::default(), |c| {
                c.selective = selective;
                c.max_inflight = if c.local_qpn == QPNS[0] { own } else { theirs };
            });
            let send = |pair: &mut Pair, packets: usize| {
                pair.ends[0].post_send(pair.qps[0], 0, vec![1; packets * 256], None);
                pair.ends[1].post_receive(pair.qps[1], Vec::new());
            };
            send(&mut pair, 1);
            while pair.ends[0].outstanding(pair.qps[0]) > 0 && pair.step() {}
            send(&mut pair, 200);
            assert_eq!(sent_now(&mut pair, 0).len() as u32, expected, "{own} {theirs} {selective}");
        }
    }
    let numbers: Vec<_> = (0..NO_LIMIT).filter_map(packets).collect();
    assert_eq!((&numbers[..9], numbers[30]), (&[0, 1, 2, 3, 4, 6, 8, 12, 16][..], 32_768));
    assert_eq!(
        [0, 1, 5, 128, u32::MAX].map(|most| packets(credits(most))),
        [0, 1, 4, 128, 32_768].map(Some)
    );
    assert_eq!(packets(NO_LIMIT), None);
}

#[test]
fn messages_without_a_request_are_acknowledged_and_sent_again_if_lost() {
    const MS: Duration = Duration::from_millis(1);
    for victim in (0..20).chain([NONE]) {
        let mut pair = Pair::new(5, Faults::default(), |c| {
            (c.selective, c.min_ack_timeout) = (true, Some(16 * MS));
        });
        let mut nth = 0;
        pair.meddle = Some(Box::new(move |_, to, _| {
            nth += u32::from(to == 1);
            if to == 1 && nth == victim + 1 { vec![] } else { vec![Duration::ZERO] }
        }));
        for id in 0..20 {
            pair.ends[0].post_send(pair.qps[0], id, vec![id as u8; 256], None);
            pair.ends[1].post_receive(pair.qps[1], Vec::new());
        }
        let start = pair.now;
        while pair.ends[0].outstanding(pair.qps[0]) > 0 && pair.step() {}
        let (took, stats) = (pair.now - start, pair.ends[0].stats());
        // No later one shows the loss of the last one. Those without a loss wait for the receiver.
        let tail = victim == 19;
        assert_eq!(stats.local_ack_timeout, u64::from(tail), "{victim}");
        assert_eq!(stats.retransmissions, u64::from(victim != NONE), "{victim}");
        assert!(took < if tail { 18 * MS } else { MS + MS / 5 }, "{victim}: {took:?}");
        assert_eq!(std::iter::from_fn(|| pair.ends[1].poll_event()).count(), 20, "{victim}");
    }
    const NONE: u32 = 20;
}

/// An acknowledgement of all up to a PSN arrives at end 0.
/// A driver whose socket is full does not poll.
#[test]
fn an_acknowledgement_that_is_owed_is_due_once_and_before_the_end() {
    let owing = || {
        let mut pair = Pair::new(5, Faults::default(), |c| c.selective = true);
        // The fifth is late; the first four are acknowledged at once.
        let mut nth = 0;
        pair.meddle = Some(Box::new(move |_, to, _| {
            nth += u32::from(to == 1);
            vec![Duration::from_micros(if nth == 5 { 100 } else { 0 })]
        }));
        for id in 0..5 {
            pair.ends[0].post_send(pair.qps[0], id, vec![1; 256], None);
            pair.ends[1].post_receive(pair.qps[1], Vec::new());
        }
        while pair.ends[1].next_timeout().is_none() && pair.step() {}
        pair
    };
    let mut pair = owing();
    let late = pair.now + Duration::from_millis(4);
    pair.ends[1].handle_timeout(late);
    assert!(pair.ends[1].next_timeout().is_none_or(|at| at > late));
    assert_eq!(sent_now(&mut pair, 1).len(), 1);
    let mut pair = owing();
    assert_eq!(sent_now(&mut pair, 1).len(), 0);
    pair.ends[1].acknowledge_all();
    assert_eq!(sent_now(&mut pair, 1).len(), 1);
}

pub(crate) fn acknowledge(pair: &mut Pair, psn: u32) {
    acknowledge_with(pair, psn, Syndrome::Ack(0x1f));
}

pub(crate) fn acknowledge_with(pair: &mut Pair, psn: u32, syndrome: Syndrome) {
    use netsum_common::wire::{Aeth, Bth, Opcode};
    let aeth = Some(Aeth { syndrome, msn: 0 });
    let ext = packet::Extended { aeth, ..Default::default() };
    let mut datagram = Vec::new();
    packet::encode(
        &mut datagram,
        (pair.ips[1], ROCE_PORT).into(),
        pair.ips[0],
        0,
        &Bth::new(Opcode::ACK, 10, psn),
        &ext,
        &[],
    );
    pair.ends[0].receive(pair.now, (pair.ips[1], ROCE_PORT).into(), false, &datagram);
}

#[test]
fn after_a_timeout_the_oldest_packet_probes_before_others_are_resent() {
    let mut pair = Pair::new(5, Faults::default(), |c| c.send_psn = Psn::new(100));
    pair.ends[0].post_send(pair.qps[0], 0, vec![1; 2560], None);
    assert_eq!(sent_now(&mut pair, 0).len(), 10);
    let expire = |pair: &mut Pair, after: Duration| {
        let due = pair.ends[0].next_timeout().unwrap();
        assert_eq!(due - pair.now, after);
        pair.now = due;
        pair.ends[0].handle_timeout(due);
    };
    expire(&mut pair, Duration::from_micros(67_109));
    assert_eq!(sent_now(&mut pair, 0), [(100, true)]);
    expire(&mut pair, Duration::from_micros(2 * 67_109));
    assert_eq!(sent_now(&mut pair, 0), [(100, true)]);
    // Only the probe was acknowledged: the others are missing there.
    acknowledge(&mut pair, 100);
    assert_eq!(sent_now(&mut pair, 0), []);
    expire(&mut pair, Duration::from_millis(2));
    assert_eq!(
        sent_now(&mut pair, 0).iter().map(|s| s.0).collect::<Vec<_>>(),
        (101..110).collect::<Vec<_>>()
    );
    acknowledge(&mut pair, 109);
    assert_eq!(pair.ends[0].next_timeout(), None);
}

#[test]
fn acknowledgements_reveal_an_early_timeout() {
    let mut pair = Pair::new(5, Faults::default(), |c| c.send_psn = Psn::new(100));
    pair.ends[0].post_send(pair.qps[0], 0, vec![1; 2560], None);
    assert_eq!(sent_now(&mut pair, 0).len(), 10);
    let expire = |pair: &mut Pair| {
        pair.now = pair.ends[0].next_timeout().unwrap();
        pair.ends[0].handle_timeout(pair.now);
        sent_now(pair, 0)
    };
    assert_eq!(expire(&mut pair), [(100, true)]);
    assert_eq!(expire(&mut pair), [(100, true)]);
    acknowledge(&mut pair, 100);
    acknowledge(&mut pair, 103);
    assert_eq!(sent_now(&mut pair, 0), []);
    // The others get the time that they need.
    pair.now += Duration::from_millis(20);
    assert!(pair.ends[0].next_timeout().unwrap() > pair.now);
    acknowledge(&mut pair, 109);
    assert_eq!(pair.ends[0].next_timeout(), None);
}

#[test]
fn a_late_check_of_the_clock_extends_the_timeout_once() {
    let ms = Duration::from_millis;
    let mut pair = Pair::new(8, Faults::default(), |c| c.send_psn = Psn::new(100));
    pair.ends[0].post_send(pair.qps[0], 0, vec![1; 512], None);
    assert_eq!(sent_now(&mut pair, 0).len(), 2);
    let due = pair.ends[0].next_timeout().unwrap();
    pair.now = due + ms(5);
    pair.ends[0].handle_timeout(pair.now);
    assert_eq!(sent_now(&mut pair, 0), [], "the machine stood still, perhaps the other side, too");
    assert_eq!(pair.ends[0].next_timeout(), Some(due + ms(10)));
    // It is late every time, but it is sent.
    pair.now = due + ms(20);
    pair.ends[0].handle_timeout(pair.now);
    assert_eq!(sent_now(&mut pair, 0), [(100, true)]);
    // After an acknowledgement the extension is used up.
    acknowledge(&mut pair, 101);
    pair.ends[0].post_send(pair.qps[0], 1, vec![1; 512], None);
    assert_eq!(sent_now(&mut pair, 0).len(), 2);
    assert!(pair.ends[0].next_timeout().unwrap() <= pair.now + ms(68));
}

#[test]
fn a_round_trip_is_measured_even_if_each_flight_loses_a_packet() {
    let mut pair = Pair::new(9, Faults::default(), |c| {
        (c.send_psn, c.min_ack_timeout) = (Psn::new(100), Some(Duration::from_millis(1)));
    });
    for n in 0..4 {
        pair.ends[0].post_send(pair.qps[0], n, vec![1; 256 * 8], None);
    }
    assert_eq!(sent_now(&mut pair, 0).len(), 32);
    let before = pair.ends[0].next_timeout().unwrap() - pair.now;
    assert!(before > Duration::from_millis(20), "on the slowest link: {before:?}");
    for psn in 100..104 {
        pair.now = pair.ends[0].next_timeout().unwrap();
        pair.ends[0].handle_timeout(pair.now);
        sent_now(&mut pair, 0);
        pair.now += Duration::from_micros(30);
        acknowledge(&mut pair, psn);
    }
    pair.now = pair.ends[0].next_timeout().unwrap();
    pair.ends[0].handle_timeout(pair.now);
    sent_now(&mut pair, 0);
    let after = pair.ends[0].next_timeout().unwrap() - pair.now;
    assert!(after < before / 3, "{before:?}, then {after:?}");
}

/// A driver whose socket is never empty passes a time of a while ago.
#[test]
fn a_late_check_of_the_clock_does_not_count_as_round_trip() {
    let (late, rtt) = (Duration::from_millis(100), Duration::from_micros(30));
    let mut pair = Pair::new(11, Faults::default(), |c| {
        (c.send_psn, c.min_ack_timeout) = (Psn::new(100), Some(Duration::from_millis(1)));
    });
    let mut waits = Vec::new();
    for psn in 100..110 {
        pair.ends[0].post_send(pair.qps[0], 0, vec![1; 256], None);
        assert_eq!(sent_now(&mut pair, 0), [(psn, true)]);
        let due = pair.ends[0].next_timeout().unwrap();
        waits.push(due - pair.now);
        pair.now = due + late;
        pair.ends[0].handle_timeout(due);
        assert_eq!(sent_now(&mut pair, 0), [(psn, true)], "it was lost");
        pair.now += rtt;
        acknowledge(&mut pair, psn);
    }
    assert!(waits.iter().all(|wait| *wait < Duration::from_millis(5)), "{waits:?}");
}

#[test]
fn a_link_that_is_slower_than_estimated_gets_its_time() {
    let mut pair = Pair::new(10, Faults::default(), |c| {
        (c.send_psn, c.min_ack_timeout) = (Psn::new(100), Some(Duration::from_millis(1)));
    });
    let mut again = Vec::new();
    let mut last = 99;
    // The first flight fits into the bucket of the link's shaper, and takes no time.
    for took in [1, 200, 200, 200] {
        let start = pair.now;
        pair.ends[0].post_send(pair.qps[0], 0, vec![1; 256 * 128], None);
        assert_eq!(sent_now(&mut pair, 0).len(), 128);
        last += 128;
        let mut sent = 0;
        loop {
            let due = pair.ends[0].next_timeout().unwrap();
            if due > start + Duration::from_millis(took) {
                break;
            }
            pair.now = due;
            pair.ends[0].handle_timeout(due);
            sent += sent_now(&mut pair, 0).len();
        }
        again.push(sent);
        pair.now = start + Duration::from_millis(took);
        acknowledge(&mut pair, last);
    }
    assert_eq!((again[0], again[2], again[3]), (0, 0, 0), "{again:?}");
    assert!(again[1] > 0, "{again:?}");
}

#[test]
fn a_timeout_that_was_too_short_becomes_longer() {
    let ms = Duration::from_millis;
    let mut pair = Pair::new(6, Faults::default(), |c| {
        c.send_psn = Psn::new(100);
        (c.min_ack_timeout, c.waits_for_others) = (Some(ms(8)), true);
    });
    let mut psn = 99;
    let mut send = |pair: &mut Pair, packets: u32| {
        psn += packets;
        pair.ends[0].post_send(pair.qps[0], psn.into(), vec![1; 256 * packets as usize], None);
        pair.ends[0].expect(pair.now, pair.qps[0], psn.into());
        assert_eq!(sent_now(pair, 0).len() as u32, packets);
        psn
    };
    // All four had arrived, late, when the timeout expired; the next one waits twice as long.
    for expected in [8, 16, 32, 64] {
        let last = send(&mut pair, 4);
        let due = pair.ends[0].next_timeout().unwrap();
        assert_eq!(due - pair.now, ms(expected));
        pair.now = due;
        pair.ends[0].handle_timeout(due);
        assert_eq!(sent_now(&mut pair, 0).len(), 1);
        pair.now += ms(3);
        acknowledge(&mut pair, last);
    }
    // Without losses it decreases again.
    let mut waits = Vec::new();
    for _ in 0..7000 {
        let last = send(&mut pair, 1);
        waits.push(pair.ends[0].next_timeout().unwrap() - pair.now);
        pair.now += ms(1);
        acknowledge(&mut pair, last);
    }
    waits.dedup();
    assert_eq!(waits, [ms(64), ms(32), ms(16), ms(8)]);
}

#[test]
fn a_timeout_is_short_only_if_an_acknowledgement_is_expected() {
    let (long, short) = (Duration::from_micros(67_109), Duration::from_millis(4));
    let mut pair = Pair::new(6, Faults::default(), |c| {
        c.send_psn = Psn::new(100);
        (c.min_ack_timeout, c.waits_for_others) = (Some(short), true);
    });
    pair.ends[0].post_send(pair.qps[0], 7, vec![1; 256], None);
    pair.ends[0].post_send(pair.qps[0], 8, vec![1; 256], None);
    assert_eq!(sent_now(&mut pair, 0).len(), 2);
    let due = |pair: &Pair| pair.ends[0].next_timeout().map(|t| t - pair.now);
    assert_eq!(due(&pair), Some(long));
    pair.ends[0].expect(pair.now, pair.qps[0], 7);
    assert_eq!(due(&pair), Some(short));
    acknowledge(&mut pair, 100);
    assert_eq!(due(&pair), Some(long), "no answer to the second message is expected");
    pair.ends[0].expect(pair.now, pair.qps[0], 8);
    for backoff in [1, 2, 4, 8, 16, 32] {
        assert_eq!(due(&pair), Some(short * backoff.min(16)));
        pair.now += due(&pair).unwrap();
        pair.ends[0].handle_timeout(pair.now);
        assert_eq!(sent_now(&mut pair, 0), [(101, true)]);
    }
}

#[test]
fn lost_acknowledgements_do_not_lengthen_timeouts_for_ever() {
    let mut pair = Pair::new(1, Faults::default(), |_| ());
    let lost = Rc::new(Cell::new(true));
    let acks = lost.clone();
    pair.meddle = Some(Box::new(move |_, to, _| match to {
        0 if acks.get() => vec![],
        0 => vec![Duration::from_micros(600)],
        _ => vec![Duration::ZERO],
    }));
    // Each time the acknowledgements of a whole flight are lost, and the probe brings one.
    let mut flight = |id| {
        let (start, timeouts) = (pair.now, pair.ends[0].stats().local_ack_timeout);
        pair.ends[1].post_receive(pair.qps[1], Vec::new());
        pair.ends[0].post_send(pair.qps[0], id, vec![7; 128 * 256], None);
        lost.set(true);
        while !matches!(pair.ends[0].poll_event(), Some(Event::Sent { .. })) {
            assert!(pair.step());
            lost.set(pair.ends[0].stats().local_ack_timeout == timeouts);
        }
        pair.now - start
    };
    let first = flight(0);
    for id in 1..6 {
        let took = flight(id);
        assert!(took < first * 3 / 2, "flight {id}: {took:?}, the first {first:?}");
    }
}

#[test]
fn a_packet_from_far_ahead_is_answered_with_a_nak_each_time() {
    use netsum_common::slot::GAP_PSN_AHEAD;
    use netsum_common::wire::{Bth, Opcode};
    let mut pair = Pair::new(3, Faults::default(), |c| {
        (c.send_psn, c.recv_psn) = (Psn::new(100), Psn::new(100))
    });
    pair.ends[1].post_receive(pair.qps[1], Vec::new());
    for ahead in [1, 2, 4, 8] {
        let bth = Bth::new(Opcode::SEND_MIDDLE, 11, 100 + ahead + GAP_PSN_AHEAD);
        let mut datagram = Vec::new();
        packet::encode(
            &mut datagram,
            (pair.ips[0], ROCE_PORT).into(),
            pair.ips[1],
            0,
            &bth,
            &Default::default(),
            &[0; 256],
        );
        pair.ends[1].receive(pair.now, (pair.ips[0], ROCE_PORT).into(), false, &datagram);
        let mut buf = Vec::new();
        assert!(pair.ends[1].poll_transmit(pair.now, &mut buf).is_some(), "a NAK");
        let psn = Bth::decode(buf[..12].try_into().unwrap()).psn;
        assert_eq!((buf[12], psn), (0x60, 100), "names the expected PSN");
    }
    assert_eq!(pair.ends[1].poll_event(), None, "and no data is received");
}

#[test]
fn a_packet_from_far_ahead_gets_a_nak_even_if_results_follow_it() {
    use netsum_common::slot::GAP_PSN_AHEAD;
    use netsum_common::wire::{Bth, Opcode};
    // The box forwards a packet after a gap at PSN 102 before it has the sums of 100 and 101; the
    // receiver reads all three at once.
    let mut pair = Pair::new(3, Faults::default(), |c| {
        (c.send_psn, c.recv_psn) = (Psn::new(100), Psn::new(100))
    });
    (0..2).for_each(|_| pair.ends[1].post_receive(pair.qps[1], Vec::new()));
    for (opcode, psn) in [
        (Opcode::SEND_MIDDLE, 103 + GAP_PSN_AHEAD),
        (Opcode::SEND_ONLY, 100),
        (Opcode::SEND_ONLY, 101),
    ] {
        let bth = Bth { ack_request: true, ..Bth::new(opcode, 11, psn) };
        let mut datagram = Vec::new();
        packet::encode(
            &mut datagram,
            (pair.ips[0], ROCE_PORT).into(),
            pair.ips[1],
            0,
            &bth,
            &Default::default(),
            &[0; 256],
        );
        pair.ends[1].receive(pair.now, (pair.ips[0], ROCE_PORT).into(), false, &datagram);
    }
    let mut buf = Vec::new();
    assert!(pair.ends[1].poll_transmit(pair.now, &mut buf).is_some(), "a NAK");
    let psn = Bth::decode(buf[..12].try_into().unwrap()).psn;
    assert_eq!((buf[12], psn), (0x60, 102), "names the PSN that is expected now");
    assert!(pair.ends[1].poll_transmit(pair.now, &mut buf).is_none(), "once");
}

#[test]
fn packets_of_an_earlier_connection_are_not_acknowledged_for_this_one() {
    use netsum_common::wire::Nak;
    let mut pair = Pair::new(5, Faults::default(), |c| {
        (c.send_psn, c.recv_psn) = (Psn::new(100), Psn::new(100));
        (c.selective, c.reused) = (true, true);
    });
    pair.ends[0].post_send(pair.qps[0], 0, vec![1; 2560], None);
    pair.ends[1].post_receive(pair.qps[1], Vec::new());
    // A receiver that has packets of these numbers acknowledges the last of them again, or NAKs
    // packets after them.
    let stale = |pair: &mut Pair| {
        acknowledge(pair, 104);
        for syndrome in [Nak::SequenceError, Nak::InvalidRequest].map(Syndrome::Nak) {
            acknowledge_with(pair, 105, syndrome);
        }
        assert_eq!(pair.ends[0].poll_event(), None);
    };
    // The first flight is lost.
    assert_eq!(sent_now(&mut pair, 0).len(), 10);
    stale(&mut pair);
    assert_eq!(sent_now(&mut pair, 0), []);
    while !matches!(pair.ends[1].poll_event(), Some(Event::Received { data, .. }) if data == [1; 2560])
    {
        assert!(pair.step());
    }
    stale(&mut pair);
    while pair.step() {}
    assert!(matches!(pair.ends[0].poll_event(), Some(Event::Sent { .. })));
}

#[test]
fn probes_give_a_slow_link_its_time() {
    let mut pair = Pair::new(5, Faults::default(), |c| {
        (c.send_psn, c.min_ack_timeout) = (Psn::new(100), Some(Duration::from_millis(1)));
    });
    // A token bucket lets these pass at once.
    for psn in 100..108 {
        pair.ends[0].post_send(pair.qps[0], 0, vec![1; 256], None);
        sent_now(&mut pair, 0);
        pair.now += Duration::from_micros(100);
        acknowledge(&mut pair, psn);
    }
    let start = pair.now;
    pair.ends[0].post_send(pair.qps[0], 1, vec![1; 256 * 512], None);
    sent_now(&mut pair, 0);
    for _ in 0..2 {
        pair.now = pair.ends[0].next_timeout().unwrap();
        pair.ends[0].handle_timeout(pair.now);
        assert_eq!(sent_now(&mut pair, 0), [(108, true)]);
    }
    pair.now += Duration::from_millis(20);
    // Nothing was lost.
    acknowledge(&mut pair, 108 + 100);
    let took = pair.now - start;
    assert!(pair.ends[0].next_timeout().unwrap() - pair.now >= took, "{took:?}");
}

#[test]
fn a_packet_that_never_arrives_is_not_sent_again_at_every_nak() {
    let mut pair = Pair::new(3, Faults::default(), |c| c.send_psn = Psn::new(100));
    pair.ends[0].post_send(pair.qps[0], 7, vec![1; 1024], None);
    assert_eq!(sent_now(&mut pair, 0).len(), 4);
    let mut again = 0;
    for _ in 0..10_000 {
        pair.now += Duration::from_micros(100);
        acknowledge_with(&mut pair, 100, Syndrome::Nak(netsum_common::wire::Nak::SequenceError));
        again += sent_now(&mut pair, 0).len();
    }
    assert!((40..=200).contains(&again), "{again} packets in a second");
}

#[test]
fn packets_of_foreign_hosts_and_invalid_ones_are_discarded() {
    let mut pair = Pair::new(4, Faults::default(), |_| ());
    let mut rng = Rng::new(4);
    for len in 0..200 {
        let junk: Vec<u8> = (0..len).map(|_| rng.next() as u8).collect();
        pair.ends[0].receive(pair.now, (pair.ips[1], ROCE_PORT).into(), false, &junk);
    }
    assert_eq!(pair.ends[0].poll_event(), None);
    pair.ends[1].post_send(pair.qps[1], 0, vec![1; 100], None);
    let mut buf = Vec::new();
    pair.ends[1].poll_transmit(pair.now, &mut buf);
    let before = pair.ends[0].stats().rx_icrc_encapsulated;
    pair.ends[0].receive(pair.now, "10.0.0.3:4791".parse().unwrap(), false, &buf);
    assert_eq!(
        pair.ends[0].stats().rx_icrc_encapsulated,
        before + 1,
        "another sender's ICRC cannot be right"
    );
}

#[test]
fn every_segment_is_a_packet_even_if_the_last_one_is_the_longest() {
    let ips: [IpAddr; 2] = ["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap()];
    for operation in [Operation::Send, Operation::Write { address: 0, rkey: 1 }] {
        let mut end = Endpoint::new(ips[0], EndpointConfig::default());
        let mut c = QpConfig::new(QPNS[0], ips[1], QPNS[1], Psn::new(0), Psn::new(0), 256);
        c.opcode = operation;
        let qp = end.add_qp(c).unwrap();
        // A full last packet, and four bytes of immediate data.
        end.post_send(qp, 1, vec![7; 4 * 256], Some(5));
        let (now, mut buf, mut packets) = (Instant::now(), Vec::new(), 0);
        let mut verifier = packet::Verifier::new(ips[1], false);
        while let Some(t) = end.poll_transmit(now, &mut buf) {
            for datagram in buf.chunks(t.segment_size.unwrap_or(t.len)) {
                verifier.decode((ips[0], ROCE_PORT).into(), datagram).unwrap();
                packets += 1;
            }
        }
        assert_eq!(packets, 4);
    }
}

#[test]
fn senders_are_notified_of_congestion_but_not_too_often() {
    let ips: [IpAddr; 2] = ["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap()];
    let interval = Duration::from_micros(50);
    let config = EndpointConfig { cnp_interval: Some(interval), ..EndpointConfig::default() };
    let mut ends = [0, 1].map(|i| Endpoint::new(ips[i], config.clone()));
    let qps = [0, 1].map(|i| {
        ends[i]
            .add_qp(QpConfig::new(QPNS[i], ips[1 - i], QPNS[1 - i], Psn::new(0), Psn::new(0), 256))
            .unwrap()
    });
    ends[0].post_send(qps[0], 0, vec![1; 256 * 40], None);
    ends[1].post_receive(qps[1], Vec::new());
    let (mut now, mut buf, mut data) = (Instant::now(), Vec::new(), Vec::new());
    while let Some(t) = ends[0].poll_transmit(now, &mut buf) {
        data.extend(buf.chunks(t.segment_size.unwrap_or(t.len)).map(<[u8]>::to_vec));
    }
    assert_eq!(data.len(), 40);
    // Twenty marked packets, ten microseconds apart, then as many without a mark.
    for (n, datagram) in data.iter().enumerate() {
        ends[1].receive(now, (ips[0], ROCE_PORT).into(), n < 20, datagram);
        while ends[1].poll_transmit(now, &mut buf).is_some() {
            ends[0].receive(now, (ips[1], ROCE_PORT).into(), true, &buf);
        }
        now += Duration::from_micros(10);
    }
    assert_eq!((ends[1].stats().ce_received, ends[1].stats().cnp_sent), (20, 4));
    assert_eq!(ends[0].stats().cnp_received, 4);
    assert_eq!(
        ends[0].stats().cnp_sent,
        0,
        "notifications and acknowledgements cause no notifications"
    );
    assert!(matches!(ends[0].poll_event(), Some(Event::Sent { .. })));
}

#[test]
fn sums_swapped_by_a_kernel_are_accepted_without_retransmission() {
    // Also the last two, where no later packet shows the gap.
    for (first, second) in [(3, 4), (38, 39), (10, 30)] {
        let ips: [IpAddr; 2] = ["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap()];
        let mut ends = [0, 1].map(|i| Endpoint::new(ips[i], EndpointConfig::default()));
        let qps = [0, 1].map(|i| {
            let mut c =
                QpConfig::new(QPNS[i], ips[1 - i], QPNS[1 - i], Psn::new(0), Psn::new(0), 256);
            c.waits_for_others = true;
            ends[i].add_qp(c).unwrap()
        });
        let message: Vec<u8> = (0..256 * 40).map(|i| (i / 256) as u8).collect();
        ends[0].post_send(qps[0], 0, message.clone(), None);
        ends[1].post_receive(qps[1], Vec::new());
        let (now, mut buf, mut data) = (Instant::now(), Vec::new(), Vec::new());
        while let Some(t) = ends[0].poll_transmit(now, &mut buf) {
            data.extend(buf.chunks(t.segment_size.unwrap_or(t.len)).map(<[u8]>::to_vec));
        }
        data.swap(first, second);
        // All arrive at once: the receiver answers when it has emptied its socket.
        for datagram in &data {
            ends[1].receive(now, (ips[0], ROCE_PORT).into(), false, datagram);
        }
        while ends[1].poll_transmit(now, &mut buf).is_some() {
            ends[0].receive(now, (ips[1], ROCE_PORT).into(), false, &buf);
        }
        let got = ends[1].poll_event();
        assert!(
            matches!(&got, Some(Event::Received { data, .. }) if *data == message),
            "{first}, {second}: {got:?}"
        );
        assert!(matches!(ends[0].poll_event(), Some(Event::Sent { .. })), "{first}, {second}");
        assert!(ends[0].poll_transmit(now, &mut buf).is_none(), "{first}, {second}: sent again");
    }
}

#[test]
fn messages_of_any_length_arrive() {
    for write in [false, true] {
        let mut pair = Pair::new(6, Faults::loss(50), |c| {
            if write {
                c.opcode = Operation::Write { address: 64, rkey: 1 };
            }
        });
        for len in [0, 1, 2, 3, 5, 255, 256, 257, 511, 1023, 1025] {
            for immediate in [None, Some(len as u32)] {
                let message: Vec<u8> = (0..len).map(|i| i as u8 ^ 0x5a).collect();
                pair.ends[1].post_receive(pair.qps[1], Vec::new());
                pair.ends[0].post_send(pair.qps[0], 1, message.clone(), immediate);
                let mut got = None;
                while got.is_none() {
                    assert!(pair.step(), "{len} bytes: no event is left");
                    while let Some(event) = pair.ends[1].poll_event() {
                        let Event::Received { data, immediate, .. } = event else {
                            panic!("{event:?}")
                        };
                        got = Some((data, immediate));
                    }
                }
                assert_eq!(got, Some((message, immediate)), "{len} bytes");
            }
        }
    }
}

#[test]
fn unsupported_requests_are_refused_in_order() {
    use netsum_common::wire::{Bth, Nak, Opcode};
    // READ, compare and swap, fetch and add, SENDs with invalidate.
    for opcode in [0x0c, 0x13, 0x14, 0x16, 0x17] {
        let mut pair = Pair::new(8, Faults::default(), |_| ());
        pair.ends[1].post_receive(pair.qps[1], Vec::new());
        pair.ends[0].post_send(pair.qps[0], 0, vec![1; 100], None);
        let mut data = Vec::new();
        pair.ends[0].poll_transmit(pair.now, &mut data).unwrap();
        let first = Bth::decode(data[..12].try_into().unwrap()).psn;
        // The answer of end 1 to a request with this PSN.
        let request = |pair: &mut Pair, psn: u32| {
            let bth = Bth::new(Opcode(opcode), 11, psn & 0xff_ffff);
            let (mut datagram, ext) = (Vec::new(), packet::Extended::default());
            packet::encode(
                &mut datagram,
                (pair.ips[0], ROCE_PORT).into(),
                pair.ips[1],
                0,
                &bth,
                &ext,
                &[0; 28],
            );
            pair.ends[1].receive(pair.now, (pair.ips[0], ROCE_PORT).into(), false, &datagram);
            let mut answer = Vec::new();
            pair.ends[1].poll_transmit(pair.now, &mut answer)?;
            Some((Bth::decode(answer[..12].try_into().unwrap()).psn, answer[12]))
        };
        assert_eq!(request(&mut pair, first + 1), Some((first, 0x60)), "past a gap");
        assert_eq!(request(&mut pair, first + 1), None, "once");
        pair.ends[1].receive(pair.now, (pair.ips[0], ROCE_PORT).into(), false, &data);
        pair.ends[1].poll_transmit(pair.now, &mut data).unwrap();
        assert_eq!(request(&mut pair, first), None, "a duplicate of a request that was refused");
        assert_eq!(request(&mut pair, first + 1), Some(((first + 1) & 0xff_ffff, 0x61)));
        assert_eq!(pair.ends[1].stats().unsupported, 4);
        // The requester gets the error.
        acknowledge_with(&mut pair, first + 1, Syndrome::Nak(Nak::InvalidRequest));
        let failed =
            Event::Failed { qp: pair.qps[0], error: QpError::Refused(Nak::InvalidRequest) };
        assert!(std::iter::from_fn(|| pair.ends[0].poll_event()).any(|event| event == failed));
    }
}
