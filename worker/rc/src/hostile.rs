//! Selective queue pairs against a network or another side that is hostile.

use std::net::IpAddr;
use std::time::Duration;

use netsum_common::wire::{Aeth, Bth, Nak, Opcode, ROCE_PORT, Syndrome};

use super::gaps::Gaps;
use super::packet::{Extended, encode};
use super::tests::*;
use super::*;

fn nak(pair: &mut Pair, psn: u32, gaps: &Gaps) {
    let aeth = Some(Aeth { syndrome: Syndrome::Nak(Nak::SequenceError), msn: 0 });
    let (ext, bth) = (Extended { aeth, ..Default::default() }, Bth::new(Opcode::ACK, 10, psn));
    let mut datagram = Vec::new();
    encode(
        &mut datagram,
        (pair.ips[1], ROCE_PORT).into(),
        pair.ips[0],
        0,
        &bth,
        &ext,
        &gaps.encode(),
    );
    pair.ends[0].receive(pair.now, (pair.ips[1], ROCE_PORT).into(), false, &datagram);
}

fn missing(newest: u32, rows: &[(u32, u32)]) -> Gaps {
    let rows = rows.iter().map(|&(first, len)| (Psn::new(first), len));
    Gaps { newest: Psn::new(newest), missing: rows.collect() }
}

/// An end's timeout expires, and the packets that it sends then are lost.
fn expire(pair: &mut Pair, end: usize) -> usize {
    pair.now = pair.ends[end].next_timeout().unwrap();
    pair.ends[end].handle_timeout(pair.now);
    sent_now(pair, end).len()
}

#[test]
fn a_receiver_that_keeps_fewer_packets_than_are_in_flight_gets_all() {
    for early in [8, 46] {
        let mut pair = Pair::new(7, Faults::loss(5), |c| {
            (c.selective, c.max_inflight, c.max_early) = (true, 512, early);
        });
        let start = pair.now;
        pair.ends[0].post_send(pair.qps[0], 0, vec![3; 2000 * 256], None);
        pair.ends[1].post_receive(pair.qps[1], Vec::new());
        while pair.ends[1].poll_event().is_none() {
            assert!(pair.step());
        }
        assert!(
            pair.lost > 5 && pair.now - start < Duration::from_secs(2),
            "{:?}",
            pair.now - start
        );
    }
}

#[test]
fn a_packet_that_never_arrives_is_not_retransmitted_at_every_nak() {
    let mut pair = Pair::new(3, Faults::default(), |c| {
        (c.selective, c.send_psn, c.recv_psn) = (true, Psn::new(100), Psn::new(100));
        c.min_ack_timeout = Some(Duration::from_millis(16));
    });
    pair.meddle = Some(Box::new(|_, to, datagram| {
        let bth = Bth::decode(datagram[..12].try_into().unwrap());
        if to == 1 && bth.psn == 103 { vec![] } else { vec![Duration::ZERO] }
    }));
    pair.ends[0].post_send(pair.qps[0], 7, vec![1; 256 * 200], None);
    pair.ends[1].post_receive(pair.qps[1], Vec::new());
    let end = pair.now + Duration::from_secs(1);
    while pair.now < end {
        assert!(pair.step());
    }
    let again = pair.ends[0].stats().retransmissions;
    assert!((40..=200).contains(&again), "{again} packets in a second");
}

#[test]
fn a_timeout_after_a_loss_does_not_lengthen_later_timeouts() {
    let mut pair = Pair::new(6, Faults::default(), |c| {
        (c.selective, c.send_psn) = (true, Psn::new(100));
        c.min_ack_timeout = Some(Duration::from_millis(8));
    });
    let rtt = Duration::from_micros(100);
    for first in (100..200).step_by(10) {
        pair.ends[0].post_send(pair.qps[0], 0, vec![1; 256 * 10], None);
        assert_eq!(sent_now(&mut pair, 0).len(), 10);
        let wait = pair.ends[0].next_timeout().unwrap() - pair.now;
        assert!(wait < Duration::from_millis(9), "{wait:?}");
        assert_eq!(expire(&mut pair, 0), 2);
        pair.now += rtt;
        nak(&mut pair, first + 1, &missing(first + 9, &[(first + 1, 8)]));
        assert_eq!(sent_now(&mut pair, 0).len(), 8);
        for last in [first + 4, first + 9] {
            pair.now += rtt;
            acknowledge(&mut pair, last);
        }
    }
}

#[test]
fn a_receiver_that_is_not_ready_counts_as_alive() {
    for selective in [false, true] {
        let mut pair = Pair::new(6, Faults::default(), |c| {
            (c.selective, c.send_psn, c.retry_limit) = (selective, Psn::new(100), Some(3));
        });
        pair.ends[0].post_send(pair.qps[0], 0, vec![1; 256], None);
        assert_eq!(sent_now(&mut pair, 0).len(), 1);
        for _ in 0..20 {
            assert_eq!(expire(&mut pair, 0), 1);
            acknowledge_with(&mut pair, 100, Syndrome::RnrNak(12));
            assert_eq!(expire(&mut pair, 0), 1, "when it may be ready");
        }
        assert_eq!(pair.ends[0].poll_event(), None);
    }
}

/// Replaces the list of a NAK by random words, with a right ICRC.
fn corrupt(rng: &mut Rng, from: IpAddr, to: IpAddr, datagram: &mut Vec<u8>) {
    let bth = Bth::decode(datagram[..12].try_into().unwrap());
    if bth.opcode != Opcode::ACK || datagram.len() <= 20 {
        return;
    }
    let aeth = Aeth::decode(datagram[12..16].try_into().unwrap());
    let mut list = datagram[16..datagram.len() - 4].to_vec();
    match rng.below(6) {
        0 => list.clear(),
        1 => {
            let bit = rng.below(list.len() as u64 * 8) as usize;
            list[bit / 8] ^= 1 << (bit % 8);
        }
        2 => {
            for lane in list.chunks_mut(4).skip(rng.below(3) as usize) {
                lane.copy_from_slice(&(rng.next() as u32).to_be_bytes());
            }
        }
        3 => list.truncate(rng.below(list.len() as u64 + 1) as usize),
        4 => {
            // All valid lists, again and again.
            list.truncate(4);
            for _ in 0..32 {
                list.extend(bth.psn.to_be_bytes());
                list.extend(u32::MAX.to_be_bytes());
            }
        }
        _ => {
            let newest = (bth.psn.wrapping_add(rng.below(300) as u32) & 0xff_ffff).to_be_bytes();
            list[..4].copy_from_slice(&newest);
        }
    }
    let ext = Extended { aeth: Some(aeth), ..Default::default() };
    datagram.clear();
    let bth = Bth { pad: (list.len().wrapping_neg() & 3) as u8, ..bth };
    encode(datagram, (from, ROCE_PORT).into(), to, 0, &bth, &ext, &list);
}

/// Messages in both directions, over the wrap, between ends with different settings. Packets are
/// late by up to 100 ms, duplicates too; lists are random; buffers are not there in time.
fn attack(seed: u64) {
    let mut rng = Rng::new(seed ^ 0xa77a);
    let mut rate = |worst: u64| if rng.below(2) == 0 { rng.below(worst) } else { 0 };
    let faults =
        Faults { loss: rate(200), duplicate: rate(100), reorder: rate(200), corrupt: rate(50) };
    let (spoilt, held, again) = (rate(1000), rate(50), rate(50));
    let selective = [rng.below(4) != 0, rng.below(4) != 0];
    let equal = 1 + rng.below(140) as u32;
    let inflight =
        [0, 1].map(|_| if rng.below(2) == 0 { equal } else { 1 + rng.below(140) as u32 });
    let least = [None, Some(1), Some(16)][rng.below(3) as usize].map(Duration::from_millis);
    let unready = rng.below(4) == 0;
    let start_at = [0, 1].map(|_| Psn::new(0xff_ff80 + rng.below(256) as u32));
    let sums = rng.below(4) == 0;
    let mut pair = Pair::new(seed, faults, |c| {
        let end = usize::from(c.local_qpn != QPNS[0]);
        c.selective = selective[end];
        c.max_inflight = inflight[end];
        c.max_early = inflight[end];
        c.min_ack_timeout = least;
        c.waits_for_others = sums;
        (c.send_psn, c.recv_psn) = (start_at[end], start_at[1 - end]);
    });
    let ips = pair.ips;
    pair.meddle = Some(Box::new(move |rng, to, datagram| {
        if rng.chance(spoilt) {
            corrupt(rng, ips[1 - to], ips[to], datagram);
        }
        let late = |rng: &mut Rng| Duration::from_micros(rng.below(100_000));
        let mut copies = vec![if rng.chance(held) { late(rng) } else { Duration::ZERO }];
        if rng.chance(again) {
            copies.push(late(rng));
        }
        copies
    }));
    let messages = 8;
    let mut sent = [vec![], vec![]];
    for (end, sent) in sent.iter_mut().enumerate() {
        for id in 0..messages {
            let len = rng.below(60 * 256) as usize;
            let data: Vec<u8> =
                (0..len).map(|i| (i as u64 * 31 + i as u64 / 256 + id * 7) as u8).collect();
            pair.ends[end].post_send(pair.qps[end], id, data.clone(), None);
            sent.push(data);
            if !unready {
                pair.ends[end].post_receive(pair.qps[end], Vec::new());
            }
        }
    }
    let (mut received, mut acknowledged, start) = ([0, 0], [0, 0], pair.now);
    let mut steps = 0;
    while acknowledged != [messages; 2] || received != [messages as usize; 2] {
        let before = pair.now;
        assert!(pair.step(), "seed {seed}: nothing runs");
        if unready && rng.below(20) == 0 {
            let end = rng.below(2) as usize;
            pair.ends[end].post_receive(pair.qps[end], Vec::new());
        }
        steps = if pair.now == before { steps + 1 } else { 0 };
        assert!(steps < 1000, "seed {seed}: time stands still");
        assert!(
            pair.now - start < Duration::from_secs(300),
            "seed {seed}: no end: {received:?} {acknowledged:?} {selective:?} {inflight:?}"
        );
        for end in 0..2 {
            while let Some(event) = pair.ends[end].poll_event() {
                match event {
                    Event::Received { data, .. } => {
                        assert!(
                            data == sent[1 - end][received[end]],
                            "seed {seed}: another message"
                        );
                        received[end] += 1;
                    }
                    Event::Sent { id, data, .. } => {
                        assert_eq!(id, acknowledged[end], "seed {seed}");
                        assert!(data == sent[end][id as usize]);
                        acknowledged[end] += 1;
                    }
                    Event::Failed { error, .. } => panic!("seed {seed}: {error}"),
                }
            }
        }
    }
}

#[test]
fn all_arrives_whatever_lists_say() {
    (0..500).for_each(attack);
}
