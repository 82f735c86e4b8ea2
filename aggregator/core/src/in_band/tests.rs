//! First packets that are lost, duplicated, late, from elsewhere, or contradict each other.

use std::net::IpAddr;

use netsum_common::serial::Qpn;
use netsum_common::wire::JobHeader;
use proptest::prelude::*;

use super::*;
use crate::{JobSpec, PortInfo, Refusal};

const RANKS: u32 = 3;
/// The number of the first job's first ring.
const JOB: RingNumber = RingNumber(1);

fn spec(name: &str) -> JobSpec {
    JobSpec { in_band: true, token: name.into(), ..crate::tests::spec(name, RANKS) }
}

fn controller() -> Controller {
    let mut c = Controller::new(64 << 20, 2, Duration::from_secs(1));
    c.set_ports(
        (0..5)
            .map(|i| PortInfo { name: format!("p{i}"), ifindex: 10 + i, mtu: 1500, router: None })
            .collect(),
    );
    c
}

fn with_job() -> Controller {
    let mut c = controller();
    let actions = c.create_job(spec("a")).unwrap();
    let job = InBandJob { job: JOB, ranks: RANKS, rings: 1, flags: 0 };
    assert_eq!(actions[2], Action::AddInBandToken(spec("a").token.in_band(), job));
    c
}

/// The first packet of the `n`-th connection that a rank makes.
fn packet(rank: u32, n: u32) -> FirstPacket {
    let ip = |rank: u32| IpAddr::from([10, 0, 0, rank as u8 + 1]);
    let token = crate::Token::from("a").in_band();
    FirstPacket {
        job: JOB,
        header: JobHeader {
            dtype: 1,
            token,
            ring: 0,
            rank,
            ranks: RANKS,
            message: 0,
            fragments: 64,
            index: 0,
        },
        ifindex: 10 + rank,
        src: ip(rank),
        src_mac: [2, 0, 0, 0, 0, rank as u8 + 1],
        dst: ip((rank + 1) % RANKS),
        qpn: Qpn::new(0x100 * n + rank),
        psn: Psn::new(0x1000 * rank + n),
        len: 1024,
        only: false,
    }
}

/// The outcome of one packet, and the resulting actions.
fn report(c: &mut Controller, packet: FirstPacket, released: bool) -> (Outcome, Vec<Action>) {
    let mut answer = c.first_packets(JOB, &[packet], released, Instant::now()).unwrap();
    assert_eq!(answer.outcomes.len(), 1);
    let outcome = answer.outcomes.remove(0);
    let began = matches!(outcome, Outcome::Began(_));
    assert_eq!(began, !answer.actions.is_empty(), "{outcome:?}: {:?}", answer.actions);
    (outcome, answer.actions)
}

fn outcome(c: &mut Controller, packet: FirstPacket) -> Outcome {
    report(c, packet, true).0
}

fn refused(c: &mut Controller, packet: FirstPacket, words: &str) {
    match outcome(c, packet) {
        Outcome::Refused(why) => assert!(why.contains(words), "{why}"),
        other => panic!("{other:?}, not refused with {words}"),
    }
}

/// All ranks' `n`-th connections.
fn begin(c: &mut Controller, n: u32) -> Vec<Action> {
    (0..RANKS - 1).for_each(|rank| assert_eq!(outcome(c, packet(rank, n)), Outcome::Waits));
    let (outcome, actions) = report(c, packet(RANKS - 1, n), true);
    assert_eq!(outcome, Outcome::Began(n));
    actions
}

#[test]
fn an_epoch_begins_when_all_have_shown_up_and_not_before() {
    let mut c = with_job();
    for _ in 0..3 {
        // The same packet arrives repeatedly.
        let first = outcome(&mut c, packet(1, 1));
        assert!(matches!(first, Outcome::Waits | Outcome::Known), "{first:?}");
    }
    assert_eq!(c.job("a").unwrap().unclaimed(), [(JobRing(0), Rank(0)), (JobRing(0), Rank(2))]);
    assert_eq!(outcome(&mut c, packet(2, 1)), Outcome::Waits);
    let (began, actions) = report(&mut c, packet(0, 1), true);
    assert_eq!(began, Outcome::Began(1));
    // Its rings are still empty.
    let [flows @ .., Action::ActivateRing(ring, ports)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(ring.config.flags == ring_flags::IN_BAND && ports == &[10, 11, 12]);
    for (rank, flow) in flows.iter().enumerate() {
        let Action::AddFlow(flow) = flow else { panic!("{flow:?}") };
        let p = packet(rank as u32, 1);
        assert_eq!(
            (flow.member, flow.base_psn, flow.ifindex),
            (Rank(p.header.rank), p.psn, p.ifindex)
        );
        assert_eq!(
            (flow.src, flow.dst, flow.qpn, flow.src_mac),
            (p.src, p.dst, p.qpn, Some(p.src_mac))
        );
    }
    let job = c.job("a").unwrap();
    assert_eq!((&job.state, job.last_epoch, job.unclaimed()), (&State::Active, 1, vec![]));
    // Packets that were under way meanwhile.
    assert_eq!(outcome(&mut c, packet(1, 1)), Outcome::Known);
}

#[test]
fn later_messages_claim_nothing_but_reveal_early_senders() {
    let mut c = with_job();
    let later = |rank, message, index| {
        let mut p = packet(rank, 1);
        (p.header.message, p.header.index) = (message, index);
        p.psn = p.psn.plus(index);
        p
    };
    // Within the window: the first message's packet is being retransmitted.
    assert_eq!(outcome(&mut c, later(0, 1, 64)), Outcome::Known);
    assert_eq!(c.job("a").unwrap().unclaimed().len(), 3);
    refused(&mut c, later(0, 17, 17 * 64), "is at message 17 already");
    assert_eq!(outcome(&mut c, later(0, 17, 17 * 64)), Outcome::Known, "told once");
    begin(&mut c, 1);
}

#[test]
fn an_epoch_begins_empty_once_all_ranks_reconnected() {
    let mut c = with_job();
    begin(&mut c, 1);
    // One rank has lost its connection; the others' epoch continues meanwhile.
    assert_eq!(outcome(&mut c, packet(1, 2)), Outcome::Waits);
    assert_eq!((&c.job("a").unwrap().state, c.job("a").unwrap().last_epoch), (&State::Active, 1));
    assert_eq!(c.job("a").unwrap().unclaimed(), [(JobRing(0), Rank(0)), (JobRing(0), Rank(2))]);
    // It has lost the new one, too.
    assert_eq!(outcome(&mut c, packet(1, 3)), Outcome::Waits);
    assert_eq!(outcome(&mut c, packet(0, 2)), Outcome::Waits);
    let (began, actions) = report(&mut c, packet(2, 2), true);
    assert_eq!(began, Outcome::Began(2));
    let [Action::DeleteRing { flows, .. }, Action::CreateRing(_), ..] = &actions[..] else {
        panic!("{actions:?}")
    };
    let old: Vec<FlowKey> = (0..RANKS).map(|rank| packet(rank, 1).key()).collect();
    assert_eq!(*flows, old, "nothing of the old epoch stays");
    let new: Vec<u32> = c.job("a").unwrap().flows.iter().map(|f| f.qpn.get()).collect();
    assert_eq!(new, [0x200, 0x301, 0x202]);
    // Duplicates from the old connections that were under way all the time.
    (0..RANKS).for_each(|rank| assert_eq!(outcome(&mut c, packet(rank, 1)), Outcome::Known));
    assert_eq!(c.job("a").unwrap().last_epoch, 2);
    // The same queue pair with another PSN is another connection.
    assert_eq!(
        outcome(&mut c, FirstPacket { psn: Psn::new(0x77_7777), ..packet(0, 2) }),
        Outcome::Waits
    );
}

#[test]
fn a_new_connection_replaces_the_old_one_before_the_first_sum() {
    let mut c = with_job();
    // Rank 2 waited too long and gave up its connection; the others arrived before its next one.
    begin(&mut c, 1);
    assert_eq!(report(&mut c, packet(2, 2), false).0, Outcome::Began(2));
    let qpns: Vec<u32> = c.job("a").unwrap().flows.iter().map(|f| f.qpn.get()).collect();
    assert_eq!(qpns, [0x100, 0x101, 0x202]);
    // A late duplicate from the abandoned connection.
    assert_eq!(report(&mut c, packet(2, 1), false).0, Outcome::Known);
    // The ranks must still agree.
    let mut wrong = packet(1, 3);
    wrong.header.fragments = 3;
    let (refused, _) = report(&mut c, wrong, false);
    assert!(matches!(&refused, Outcome::Refused(why) if why.contains("3 packets")), "{refused:?}");
    assert_eq!(c.job("a").unwrap().state, State::Active);
    // After the first sum all ranks have to reconnect.
    assert_eq!(outcome(&mut c, packet(1, 4)), Outcome::Waits);
}

#[test]
fn many_reconnects_at_once_create_the_rings_once() {
    const RINGS: u32 = 5;
    let mut c = controller();
    c.create_job(JobSpec { rings: RINGS, message_size: 4096, ..spec("a") }).unwrap();
    let mut all_at_once = |n| {
        let places = (0..RINGS).flat_map(|ring| (0..RANKS).map(move |rank| (ring, rank)));
        let mut packets: Vec<FirstPacket> = places
            .map(|(ring, rank)| {
                let mut p = FirstPacket {
                    qpn: Qpn::new(0x1000 * n + 0x10 * ring + rank),
                    ..packet(rank, n)
                };
                (p.header.ring, p.header.fragments) = (ring, 4);
                p
            })
            .collect();
        // One packet is refused, and does not prevent the epoch.
        packets.push(FirstPacket { ifindex: 14, ..packets[0].clone() });
        let answer = c.first_packets(JOB, &packets, false, Instant::now()).unwrap();
        let [before @ .., last, thief] = &answer.outcomes[..] else { panic!("{answer:?}") };
        assert!(before.iter().all(|o| *o == Outcome::Waits), "{before:?}");
        assert_eq!(*last, Outcome::Began(n));
        assert!(matches!(thief, Outcome::Refused(_)), "{thief:?}");
        let count =
            |is: fn(&Action) -> bool| answer.actions.iter().filter(|a| is(a)).count() as u32;
        assert_eq!(count(|a| matches!(a, Action::AddFlow(_))), RINGS * RANKS);
        assert_eq!(count(|a| matches!(a, Action::ActivateRing(..))), RINGS);
        count(|a| matches!(a, Action::CreateRing(_)))
    };
    assert_eq!(all_at_once(1), 0, "they were made with the job");
    assert_eq!(all_at_once(2), RINGS);
}

#[test]
fn a_rank_that_waits_or_is_at_work_cannot_be_claimed_from_elsewhere() {
    let thieves = |n| {
        let ip = IpAddr::from([10, 0, 0, 99]);
        // Another port, with the rank's address or a different one; the rank's port with another
        // address.
        [
            FirstPacket { ifindex: 14, ..packet(1, n) },
            FirstPacket { ifindex: 14, src: ip, ..packet(1, n) },
            FirstPacket { src: ip, ..packet(1, n) },
        ]
    };
    let mut c = with_job();
    assert_eq!(outcome(&mut c, packet(1, 1)), Outcome::Waits);
    thieves(2).into_iter().for_each(|p| refused(&mut c, p, "10.0.0.2 waits as this rank already"));
    assert_eq!(outcome(&mut c, packet(0, 1)), Outcome::Waits);
    assert_eq!(outcome(&mut c, packet(2, 1)), Outcome::Began(1));
    assert_eq!(c.job("a").unwrap().flows[1].ifindex, 11);
    thieves(3).into_iter().for_each(|p| refused(&mut c, p, "the rank is at work from 10.0.0.2"));
    assert_eq!(c.job("a").unwrap().claims().count(), 0);
    // The last refusals are remembered.
    assert!(c.job("a").unwrap().refusals().any(|why| why.contains("10.0.0.99 behind p4")));
    for i in 0..100 {
        let p = FirstPacket { src: IpAddr::from([10, 0, 1, i]), ..packet(1, 4) };
        refused(&mut c, p, "at work");
    }
    assert_eq!(c.job("a").unwrap().refusals().count(), REFUSALS);
}

#[test]
fn an_address_that_belongs_behind_another_port_is_refused_in_band() {
    let mut c = with_job();
    let other = JobSpec { in_band: false, ranks: 2, ..spec("b") };
    c.create_job(other).unwrap();
    let flow = |rank: u32| FlowSpec {
        ring: RingNumber::NONE,
        member: Rank(rank),
        base_psn: Psn::new(5),
        ifindex: 13,
        src: IpAddr::from([10, 0, 0, 1 + 6 * rank as u8]),
        dst: IpAddr::from([10, 0, 0, 7]),
        qpn: Qpn::new(100 + rank),
        src_mac: None,
        group_mark: 0,
    };
    c.add_flow("b", JobRing(0), flow(0)).unwrap();
    assert_eq!(outcome(&mut c, packet(0, 1)), Outcome::Waits);
    assert_eq!(outcome(&mut c, packet(1, 1)), Outcome::Waits);
    let answer = outcome(&mut c, packet(2, 1));
    assert!(
        matches!(&answer, Outcome::Failed(why) if why.contains("rank 0: address 10.0.0.1 is \
            behind port ") && why.contains(", but is in use by rank ")),
        "{answer:?}"
    );
    // The same for a queue pair of another job.
    c.delete_job("b").unwrap();
    c.create_job(JobSpec { in_band: false, ranks: 2, ..spec("b") }).unwrap();
    let same = FlowSpec {
        src: IpAddr::from([10, 0, 0, 9]),
        dst: packet(1, 1).dst,
        qpn: packet(1, 1).qpn,
        ..flow(0)
    };
    c.add_flow("b", JobRing(0), same).unwrap();
    let answer = outcome(&mut c, packet(2, 1));
    assert!(
        matches!(&answer, Outcome::Failed(why) if why.contains("a flow of another job goes there")),
        "{answer:?}"
    );
    c.delete_job("b").unwrap();
    assert_eq!(outcome(&mut c, packet(2, 1)), Outcome::Began(1), "the cause is mended");
}

#[test]
fn contradictions_fail_the_job_but_no_epoch() {
    let change = |f: fn(&mut FirstPacket)| {
        let mut p = packet(2, 1);
        f(&mut p);
        p
    };
    let wrong = [
        (change(|p| p.header.ranks = 4), "says that there are 4 ranks, the job has 3"),
        (change(|p| p.header.rank = 3), "the job has ranks 0 to 2"),
        (change(|p| p.header.ring = 1), "the job has rings 0 to 0"),
        (change(|p| p.header.dtype = 2), "sends data type 2: 1 (i32)"),
        (change(|p| p.header.dtype = 0x101), "sends data type 257"),
        (change(|p| p.len = 512), "its packets carry 512 bytes, the job's path MTU is 1024"),
        (change(|p| (p.len, p.only, p.header.fragments) = (2048, true, 1)), "carry 2048 bytes"),
        (
            change(|p| p.header.fragments = 65),
            "the job's messages of 65536 bytes have 64 at the most",
        ),
        (
            change(|p| p.header.fragments = 1),
            "says that its message has 1 packets, and sends not the only one",
        ),
        (change(|p| p.only = true), "says that its message has 64 packets, and sends the only one"),
        (change(|p| p.dst = "fd00::1".parse().unwrap()), "an address of another family"),
        (change(|p| p.src = "0.0.0.0".parse().unwrap()), "not the address of a host"),
        // Detected only when all are there.
        (
            change(|p| p.header.fragments = 63),
            "begins with a message of 63 packets, and rank 0 with one of 64",
        ),
        (change(|p| p.dst = p.src), "rank 2 of ring 0 sends to 10.0.0.3, and rank 0 is 10.0.0.1"),
        (
            change(|p| (p.dst, p.qpn) = (packet(1, 1).dst, packet(1, 1).qpn)),
            "rank 2 of ring 0 sends to",
        ),
    ];
    for (packet_2, words) in &wrong {
        let mut c = with_job();
        assert_eq!(outcome(&mut c, packet(0, 1)), Outcome::Waits);
        assert_eq!(outcome(&mut c, packet(1, 1)), Outcome::Waits);
        match outcome(&mut c, packet_2.clone()) {
            Outcome::Failed(why) => assert!(why.contains(words), "{why}"),
            other => panic!("{words}: {other:?}"),
        }
        assert!(matches!(&c.job("a").unwrap().state, State::Failed(why) if why.contains(words)));
        assert_eq!(outcome(&mut c, packet_2.clone()), Outcome::Known, "told once");
        assert_eq!(outcome(&mut c, packet(0, 1)), Outcome::Known);
        assert!(matches!(c.job("a").unwrap().state, State::Failed(_)), "{words}: and stays so");
        // The cause has been fixed.
        assert_eq!(outcome(&mut c, packet(2, 1)), Outcome::Began(1), "{words}");
        assert_eq!(c.job("a").unwrap().refusals().count(), 0);
        // The same while the job is active: its epoch continues.
        let again = FirstPacket { psn: Psn::new(0x55_5555), ..packet_2.clone() };
        match outcome(&mut c, again) {
            Outcome::Waits => {} // what is found out only when all are there
            other => {
                assert!(matches!(&other, Outcome::Refused(why) if why.contains(words)), "{other:?}")
            }
        }
        assert_eq!(c.job("a").unwrap().state, State::Active);
    }
}

#[test]
fn a_port_whose_mtu_has_become_too_small_is_named() {
    let mut c = with_job();
    c.set_mtus([(11, 1000)].into_iter());
    let answer = outcome(&mut c, packet(1, 1));
    assert!(
        matches!(&answer, Outcome::Failed(why) if why.contains("port p1 has an MTU of 1000")),
        "{answer:?}"
    );
    c.set_mtus([(11, 1500)].into_iter());
    begin(&mut c, 1);
}

#[test]
fn claims_of_connections_that_have_gone_are_forgotten() {
    let (mut c, start) = (with_job(), Instant::now());
    let at = |s| start + Duration::from_secs(s);
    let at_time = |c: &mut Controller, p, s| {
        c.first_packets(JOB, &[p], true, at(s)).unwrap().outcomes.remove(0)
    };
    assert_eq!(at_time(&mut c, packet(0, 1), 0), Outcome::Waits);
    assert_eq!(at_time(&mut c, packet(1, 1), 0), Outcome::Waits);
    assert_eq!(at_time(&mut c, packet(1, 1), 40), Outcome::Known);
    c.tick(at(70));
    assert_eq!(
        c.job("a").unwrap().unclaimed(),
        [(JobRing(0), Rank(0)), (JobRing(0), Rank(2))],
        "rank 1 has come again, rank 0 has not"
    );
    // Another host can take the rank.
    assert_eq!(
        at_time(&mut c, FirstPacket { src: IpAddr::from([10, 0, 0, 77]), ..packet(0, 2) }, 70),
        Outcome::Waits
    );
}

#[test]
fn jobs_in_band_are_told_from_others() {
    let mut c = with_job();
    let token = |name: &str| JobSpec { token: "a".into(), ..spec(name) };
    assert!(c.create_job(token("b")).unwrap_err().to_string().contains("job `a` has the same"));
    c.create_job(JobSpec { in_band: false, ..token("b") }).unwrap();
    let error = c.create_job(JobSpec { in_order: Some(false), ..spec("c") }).unwrap_err();
    assert!(
        matches!(&error, Refusal::Invalid(why) if why.contains("--in-band with --order relaxed")),
        "{error}"
    );
    let flow = FlowSpec {
        ring: RingNumber::NONE,
        member: Rank(0),
        base_psn: Psn::default(),
        ifindex: 10,
        src: IpAddr::from([10, 0, 0, 1]),
        dst: IpAddr::from([10, 0, 0, 2]),
        qpn: Qpn::new(1),
        src_mac: None,
        group_mark: 0,
    };
    assert!(c.add_flow("a", JobRing(0), flow).unwrap_err().to_string().contains("in band"));
    // A packet that was noted before its job was deleted, and one of a job that does not exist.
    let actions = c.delete_job("a").unwrap();
    assert!(matches!(actions[0], Action::RemoveInBandToken(_)), "{actions:?}");
    assert_eq!(c.first_packets(JOB, &[packet(0, 1)], true, Instant::now()), None);
    let of_b = FirstPacket { job: RingNumber(2), ..packet(0, 1) };
    assert_eq!(c.first_packets(RingNumber(2), &[of_b], true, Instant::now()), None);
    assert!(!c.has_in_band_jobs());
}

#[test]
fn a_restart_restores_tokens_and_continues_the_epoch() {
    let mut c = with_job();
    begin(&mut c, 1);
    assert_eq!(outcome(&mut c, packet(0, 2)), Outcome::Waits);
    let saved = serde_json::from_str(&serde_json::to_string(&c.save()).unwrap()).unwrap();
    let mut next = controller();
    let actions = next.restore(saved, Instant::now(), |_| None).unwrap();
    assert!(
        matches!(&actions[..], [Action::AddInBandToken(_, job)] if job.job == JOB),
        "{actions:?}"
    );
    assert_eq!(outcome(&mut next, packet(2, 1)), Outcome::Known);
    begin(&mut next, 2);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    /// Senders retransmit their first packets until they are summed. Each may be lost or arrive any
    /// number of times, at any later time, also from abandoned connections. The connections that
    /// all ranks keep end in one epoch.
    #[test]
    fn the_latest_connections_form_an_epoch_despite_faults(
        before in prop::collection::vec((0..RANKS, 1u32..4, any::<bool>()), 0..40),
        last in prop::collection::vec(0..RANKS, 0..20),
        order in Just((0..RANKS).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let mut c = with_job();
        let mut released = false;
        // Live connections send once more at the end.
        let last = last.into_iter().chain(order.iter().copied()).chain(order.iter().copied());
        let last = last.map(|rank| (rank, 9, false));
        for (rank, n, sums) in before.into_iter().chain(last) {
            let active = c.job("a").unwrap().state == State::Active;
            released = active && (released || sums);
            let (outcome, actions) = report(&mut c, packet(rank, n), released);
            if let Outcome::Began(_) = outcome {
                released = false;
                let adds = actions.iter().filter(|a| matches!(a, Action::AddFlow(_))).count();
                prop_assert_eq!(adds, RANKS as usize);
                let last = actions.last().unwrap();
                prop_assert!(matches!(last, Action::ActivateRing(..)), "{:?}", last);
            }
        }
        let job = c.job("a").unwrap();
        let flows: Vec<Qpn> = job.flows.iter().map(|f| f.qpn).collect();
        prop_assert_eq!(flows, (0..RANKS).map(|rank| packet(rank, 9).qpn).collect::<Vec<_>>());
        prop_assert_eq!(&job.state, &State::Active);
        prop_assert_eq!(job.claims().count(), 0);
    }
}
