//! The controller on its own.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netsum_common::abi::{Messages, RingNumber, ring_flags};
use netsum_common::serial::{Psn, Qpn};
use netsum_common::wire::TOTAL;
use proptest::prelude::*;

use super::membership::{Join, RankReport};
use super::*;

/// The spec that tests of the core derive their jobs from.
pub(super) fn spec(name: &str, ranks: u32) -> JobSpec {
    JobSpec {
        name: name.into(),
        ranks,
        elastic: None,
        mtu: 1024,
        largest_mtu: None,
        message_size: 65536,
        window: Messages(2),
        rings: 1,
        verify_icrc: true,
        float_lsb: None,
        in_order: None,
        in_band: false,
        host_ring_fallback: false,
        is_group: false,
        token: "t".into(),
        tenant: "default".into(),
        members: members::Members::default(),
    }
}

fn controller() -> Controller {
    let mut c = Controller::new(64 << 20, 2, Duration::from_secs(1));
    let port =
        |i: u32| PortInfo { name: format!("p{i}"), ifindex: 10 + i, mtu: 1500, router: None };
    c.set_ports((0..4).map(port).collect());
    c
}

fn flow(rank: u32, ranks: u32) -> FlowSpec {
    let ip = |r: u32| IpAddr::from([10, 0, 0, r as u8 + 1]);
    FlowSpec {
        ring: RingNumber::NONE,
        member: Rank(rank),
        base_psn: Psn::new(5),
        ifindex: 10 + rank,
        src: ip(rank),
        dst: ip((rank + 1) % ranks),
        qpn: Qpn::new(100 + rank),
        src_mac: None,
        group_mark: 0,
    }
}

fn join(job: &str, rank: u32, epoch: u32, waiter: u64, now: Instant) -> Join {
    let c = |n: u32| Connection {
        receive_qpn: 16 * rank + n,
        send_qpn: 16 * rank + n + 1,
        first_psn: n,
    };
    Join {
        job: job.into(),
        token: "t".into(),
        address: RankAddress {
            rank: Rank(rank),
            ip: IpAddr::from([10, 0, epoch as u8, rank as u8 + 1]),
            mac: [2, 0, 0, 0, 0, rank as u8],
            rings: vec![c(4)],
            bypass: c(8),
            any_ip_id: false,
            selective: true,
            largest_mtu: 1456,
            ports: [4791; 2],
        },
        ifindex: 10 + rank,
        mac: [2, 0, 0, 0, 0, rank as u8],
        ranks: 0,
        epoch,
        deadline: now + Duration::from_secs(5),
        waiter,
    }
}

/// A controller with an active job `a`, whose ranks have joined now.
fn joined(ranks: u32) -> (Controller, Instant) {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("a", ranks)).unwrap();
    (0..ranks).for_each(|rank| drop(c.join(join("a", rank, 0, rank.into(), now), now).unwrap()));
    (c, now)
}

fn replies(actions: &[Action]) -> Vec<(u64, bool)> {
    let reply = |a: &Action| match a {
        Action::Reply { waiter, result } => Some((*waiter, result.is_ok())),
        _ => None,
    };
    actions.iter().filter_map(reply).collect()
}

#[test]
fn a_job_of_floats_is_refused_where_its_sums_could_not_be_right() {
    let mut c = controller();
    let floats = |lsb| JobSpec { float_lsb: Some(lsb), ..spec("a", 2) };
    let members = |members: members::Members| JobSpec { members, ..floats(-40) };
    let groups = members::groups("--groups", "0-0,1-1").unwrap();
    let part = members::Members { groups, ..members::Members::default() };
    for (spec, why) in [
        (members(part), "--dtype f32 with --members"),
        (JobSpec { in_band: true, ..floats(-40) }, "--dtype f32 with --in-band"),
        (JobSpec { elastic: Some(2..=2), ..floats(-40) }, "--dtype f32 with --min-ranks"),
        (floats(-121), "--lsb -121: must be -120 to 60"),
        (floats(61), "--lsb 61: must be -120 to 60"),
        (JobSpec { mtu: 2112, ..floats(-40) }, "--mtu 2112: must be at most 2048"),
    ] {
        let error = c.create_job(spec).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let actions = c.create_job(JobSpec { mtu: 0, ..floats(-30) }).unwrap();
    let Action::CreateRing(ring) = &actions[1] else { panic!("{actions:?}") };
    let config = ring.config;
    assert_eq!((config.flags & ring_flags::FLOAT, config.lsb), (ring_flags::FLOAT, -30));
    assert_eq!((config.mtu, config.sum_bytes()), (1024, 2048));
    let of_integers = ring_memory(config.slots, 1024, 2);
    assert_eq!(c.memory_used(), of_integers + u64::from(config.slots) * 1024);
    let now = Instant::now();
    let error = c.join(join("a", 0, 0, 0, now), now).unwrap_err().to_string();
    assert!(error.contains("adds floats (--dtype f32), and ranks of netsum send"), "{error}");
    // Its memory and its properties are the same after a restart.
    (0..2).for_each(|rank| drop(c.add_flow("a", JobRing(0), flow(rank, 2)).unwrap()));
    let restarted = c.restart_job("a").unwrap();
    assert!(restarted.contains(&Action::CreateRing(ring.clone())), "{restarted:?}");
}

#[test]
fn a_job_is_active_once_all_its_flows_are_there() {
    let mut c = controller();
    let actions = c.create_job(spec("a", 2)).unwrap();
    let [Action::ResetCounters(RingNumber(1)), Action::CreateRing(r)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!((r.config.slots, r.config.credit, r.id), (256, 128, RingNumber(1)));
    assert_eq!(c.add_flow("a", JobRing(0), flow(0, 2)).unwrap().len(), 1);
    assert_eq!(c.job("a").unwrap().state, State::Waiting);
    let actions = c.add_flow("a", JobRing(0), flow(1, 2)).unwrap();
    assert!(matches!(&actions[1], Action::ActivateRing(_, ports) if ports == &[10, 11]));
    assert_eq!(c.job("a").unwrap().state, State::Active);
    let actions = c.delete_job("a").unwrap();
    assert!(
        matches!(&actions[..], [Action::DeleteRing { ring: RingNumber(1), flows, .. }] if flows.len() == 2)
    );
    assert_eq!(c.pool.used(), 0);
}

#[test]
fn refusals_name_the_argument_and_what_would_be_right() {
    let mut c = controller();
    c.create_job(spec("taken", 2)).unwrap();
    let mut cases: Vec<(JobSpec, &str)> = vec![
        (spec("taken", 2), "job `taken` already exists"),
        (spec("no spaces", 2), "NAME `no spaces`"),
        (spec("a", 1), "--ranks 1: must be 2 to 64"),
        (spec("a", 65), "--ranks 65: must be 2 to 64"),
    ];
    let mut push = |change: fn(&mut JobSpec), expected| {
        let mut s = spec("a", 2);
        change(&mut s);
        cases.push((s, expected));
    };
    push(|s| s.mtu = 4096, "--mtu 4096: the kernel clones a broadcast packet into one page");
    push(|s| s.mtu = 1000, "--mtu 1000: must be a multiple of 64, 256 to 3328");
    push(|s| s.mtu = 2048, "--mtu 2048: port p0 has an MTU of 1500");
    push(|s| s.message_size = 1022, "--message-size 1022: must be a multiple of 4");
    push(|s| s.window = Messages(0), "--window 0");
    push(|s| s.rings = 0, "--rings 0: must be 1 to 255");
    push(
        |s| s.window = Messages(1 << 20),
        "--window 1048576 with --message-size 65536: 2 x 1048576 x 64 slots",
    );
    push(
        |s| (s.ranks, s.window, s.rings) = (64, Messages(32), 8),
        "not enough memory for slots: 8 rings x 4096 slots x (1024",
    );
    for (spec, expected) in cases {
        let error = c.create_job(spec).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let mut flows: Vec<(u32, FlowSpec, &str)> =
        vec![(1, flow(0, 2), "--ring 1: the job has rings 0 to 0")];
    let mut push = |change: fn(&mut FlowSpec), expected| {
        let mut f = flow(1, 2);
        change(&mut f);
        flows.push((0, f, expected));
    };
    push(|f| f.member = Rank(2), "--rank 2: the job has ranks 0 to 1");
    push(
        |f| f.src = "fd00::1".parse().unwrap(),
        "--dst 10.0.0.1: not of the same family as --src fd00::1",
    );
    push(|f| f.member = Rank(0), "--rank 0: already has a flow in ring 0");
    push(
        |f| (f.dst, f.qpn) = (flow(0, 2).dst, Qpn::new(100)),
        "a flow of job `taken` goes there already",
    );
    c.add_flow("taken", JobRing(0), flow(0, 2)).unwrap();
    for (ring, flow, expected) in flows {
        let error = c.add_flow("taken", JobRing(ring), flow).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(c.job("nobody").unwrap_err().to_string(), "job `nobody`: no such job");
}

#[test]
fn ranks_are_answered_when_all_have_joined() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("a", 3)).unwrap();
    assert_eq!(c.join(join("a", 0, 0, 1, now), now).unwrap(), []);
    assert_eq!(c.join(join("a", 2, 0, 2, now), now).unwrap(), []);
    let actions = c.join(join("a", 1, 0, 3, now), now).unwrap();
    assert_eq!(replies(&actions), [(1, true), (3, true), (2, true)]);
    assert_eq!(actions.iter().filter(|a| matches!(a, Action::AddFlow(_))).count(), 3);
    let job = c.job("a").unwrap();
    assert_eq!((&job.state, job.epoch.as_ref().unwrap().number), (&State::Active, 1));
    // Rank 2 sends to rank 0.
    assert_eq!((job.flows[2].dst, job.flows[2].qpn), (IpAddr::from([10, 0, 0, 1]), Qpn::new(4)));
    // A repeated request gets the same answer; another address is refused.
    assert_eq!(replies(&c.join(join("a", 1, 0, 9, now), now).unwrap()), [(9, true)]);
    let mut other = join("a", 1, 1, 10, now);
    other.address.ip = IpAddr::from([10, 9, 9, 9]);
    assert!(
        c.join(other, now).unwrap_err().to_string().contains("has already joined from 10.0.0.2")
    );
}

#[test]
fn a_path_test_is_not_done_by_a_report_of_before_a_restart() {
    let (mut c, _) = joined(2);
    let test = c.request_path_test("a").unwrap();
    let acknowledged = |c: &Controller| c.job("a").unwrap().epoch.as_ref().unwrap().acknowledged[0];
    c.path_test_acknowledged("a", Rank(0), 1, test + 4);
    assert!(acknowledged(&c) < test);
    c.path_test_acknowledged("a", Rank(0), 1, test);
    assert_eq!(acknowledged(&c), test);
}

#[test]
fn packets_that_hosts_can_forge_make_no_wrong_card_fatal() {
    let (c, _) = joined(2);
    let job = c.job("a").unwrap();
    let [src, dst] = [1, 2].map(|n| IpAddr::from([10, 0, 0, n]));
    let is_fatal = |to, at_home| {
        let stray = missing_packets::Misplaced { src, to, port: "p3".into() };
        missing_packets::misplaced(job, &[stray], |_| "p0".into(), |_| at_home)[0].is_fatal
    };
    // Rank 1 receives on the bypass connection at queue pair 24.
    assert!(is_fatal(Some((dst, 24)), false));
    assert!(!is_fatal(Some((dst, 24)), true), "its own packets come in at its port");
    assert!(!is_fatal(Some((dst, 25)), false), "a guess");
    assert!(!is_fatal(None, false), "ARP");
}

#[test]
fn another_epoch_starts_with_empty_rings() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("a", 2)).unwrap();
    for epoch in 0..3 {
        c.join(join("a", 0, epoch * 2, 1, now), now).unwrap();
        let actions = c.join(join("a", 1, epoch * 2, 2, now), now).unwrap();
        assert!(
            matches!(actions[0], Action::DeleteRing { .. })
                && matches!(actions[1], Action::CreateRing(_))
        );
        assert_eq!(c.job("a").unwrap().epoch.as_ref().unwrap().number, epoch + 1);
        assert_eq!(c.job("a").unwrap().flows.len(), 2);
    }
}

/// An elastic job of 2 to 4 ranks.
fn elastic() -> JobSpec {
    JobSpec { elastic: Some(2..=4), ..spec("a", 4) }
}

/// How a rank joins it as one of `ranks`.
fn one_of(ranks: u32, rank: u32, epoch: u32, now: Instant) -> Join {
    Join { ranks, ..join("a", rank, epoch, (10 * epoch + rank).into(), now) }
}

#[test]
fn an_elastic_job_begins_with_as_many_ranks_as_they_say() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(elastic()).unwrap();
    let used = c.pool.used();
    for (epoch, size) in [4, 3, 2, 4].into_iter().enumerate() {
        let epoch = epoch as u32;
        let mut last = Vec::new();
        for rank in 0..size {
            assert_eq!(replies(&last), []);
            last = c.join(one_of(size, rank, epoch + u32::from(epoch > 0), now), now).unwrap();
        }
        assert_eq!(replies(&last).iter().filter(|(_, good)| *good).count(), size as usize);
        let job = c.job("a").unwrap();
        assert_eq!(
            (job.spec.ranks, job.flows.len(), &job.state),
            (size, size as usize, &State::Active)
        );
        assert_eq!(job.rings[0].config.members, size);
        let to_last = job.flows.iter().find(|f| f.member == Rank(size - 1)).unwrap().dst;
        assert_eq!(to_last, job.flows[0].src, "the ring is not closed");
        // It takes no less memory, so a larger epoch always fits.
        assert_eq!(c.pool.used(), used);
        let (mut again, saved) = (controller(), c.save());
        again.restore(saved.clone(), now, |_| None).unwrap();
        assert_eq!(again.save(), saved);
    }
}

#[test]
fn an_elastic_job_refuses_other_sizes_and_ranks() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(elastic()).unwrap();
    for (ranks, rank, words) in [
        (5, 0, "ranks 5: the job has 2 to 4"),
        (1, 0, "ranks 1: the job has 2 to 4"),
        (3, 3, "rank 3: the job has ranks 0 to 2"),
    ] {
        let why = c.join(one_of(ranks, rank, 0, now), now).unwrap_err().to_string();
        assert!(why.contains(words), "{why}");
    }
    c.delete_job("a").unwrap();
    c.create_job(spec("a", 4)).unwrap();
    let why = c.join(one_of(3, 0, 0, now), now).unwrap_err().to_string();
    assert!(why.contains("ranks 3: the job has 4"), "{why}");
    // An unfit range.
    for (elastic, in_band) in
        [(1..=4, false), (std::ops::RangeInclusive::new(5, 4), false), (2..=4, true)]
    {
        let bad = JobSpec { elastic: Some(elastic), in_band, ..spec("b", 4) };
        let why = c.create_job(bad).unwrap_err().to_string();
        assert!(why.contains("--min-ranks"), "{why}");
    }
}

#[test]
fn ranks_that_wait_as_another_number_are_dismissed_by_newer_ones() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(elastic()).unwrap();
    (0..3).for_each(|rank| drop(c.join(one_of(4, rank, 0, now), now).unwrap()));
    // The fourth host does not come back, and the launcher begins again without it.
    let actions = c.join(Join { waiter: 20, ..one_of(3, 1, 0, now) }, now).unwrap();
    assert_eq!(replies(&actions), [(0, false), (1, false), (2, false)]);
    assert!(format!("{actions:?}").contains("rank 1 has joined as one of 3 ranks, not of 4"));
    assert_eq!(c.job("a").unwrap().missing(), [Rank(0), Rank(2)]);
    c.join(Join { waiter: 21, ..one_of(3, 2, 0, now) }, now).unwrap();
    let actions = c.join(Join { waiter: 22, ..one_of(3, 0, 0, now) }, now).unwrap();
    assert_eq!(replies(&actions), [(22, true), (20, true), (21, true)]);
    // A rank of the larger epoch before that asks late.
    let late = c.join(one_of(4, 3, 1, now), now).unwrap_err().to_string();
    assert!(late.contains("rank 3: the job is running with 3 ranks"), "{late}");
}

#[test]
fn a_join_timeout_names_the_missing_ranks() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("a", 4)).unwrap();
    c.join(join("a", 1, 0, 7, now), now).unwrap();
    for rank in [1, 3, 4] {
        c.note_refused("a", Rank(rank), &format!("rank {rank}: the bridge has not seen it"));
    }
    assert_eq!(c.tick(now + Duration::from_secs(4)), []);
    let actions = c.tick(now + Duration::from_secs(6));
    let [Action::Reply { waiter: 7, result: Err(why) }] = &actions[..] else {
        panic!("{actions:?}")
    };
    let why = why.to_string();
    assert!(
        why.ends_with("missing: 0, 2, 3; refused: rank 3: the bridge has not seen it"),
        "{why}"
    );
}

#[test]
fn a_rank_that_disconnects_and_stays_away_has_ended() {
    let (mut c, now) = joined(3);
    let at = |ms| now + Duration::from_millis(ms);
    let ended = |c: &Controller, ms| -> Vec<u32> {
        let epoch = c.job("a").unwrap().epoch.as_ref().unwrap();
        epoch.ended(at(ms), Duration::from_millis(1500)).map(|rank| rank.0).collect()
    };
    // Of another epoch, and of no rank.
    c.disconnected("a", Rank(0), 2, at(100));
    c.disconnected("a", Rank(3), 1, at(100));
    c.disconnected("b", Rank(0), 1, at(100));
    // Rank 1 connects again, rank 2 leaves.
    (0..3).for_each(|rank| c.disconnected("a", Rank(rank), 1, at(200)));
    c.heartbeat("a", "t", Rank(1), 1, false, at(900)).unwrap();
    // Of its first connection.
    c.disconnected("a", Rank(1), 1, at(800));
    c.leave("a", "t", Rank(2), 1).unwrap();
    assert!(ended(&c, 1699).is_empty());
    assert_eq!(ended(&c, 1700), [0]);
    // The daemon received nothing for a second.
    c.extend_heartbeats(Duration::from_secs(1), |_| true);
    assert!(ended(&c, 2699).is_empty());
    assert_eq!(ended(&c, 2700), [0]);
}

#[test]
fn a_job_ends_when_all_remaining_ranks_are_silent() {
    let (mut c, now) = joined(3);
    let at = |ms| now + Duration::from_millis(ms);
    // Ranks 1 and 2 are stopped between two operations, and continue.
    for ms in [900, 1800, 2700] {
        c.heartbeat("a", "t", Rank(0), 1, false, at(ms)).unwrap();
        assert_eq!(c.tick(at(ms)), []);
    }
    c.heartbeat("a", "t", Rank(1), 1, false, at(2800)).unwrap();
    c.leave("a", "t", Rank(0), 1).unwrap();
    assert_eq!(c.tick(at(3700)), []);
    let actions = c.tick(at(4000));
    assert!(matches!(&actions[0], Action::DeleteRing { flows, .. } if flows.len() == 3));
    let State::Failed(why) = &c.job("a").unwrap().state else { panic!("not failed") };
    assert_eq!(why, "ranks 1, 2: no heartbeat for 1200 ms");
    (0..2).for_each(|rank| drop(c.join(join("a", rank, 1, 3, now), now).unwrap()));
    assert_eq!(
        replies(&c.join(join("a", 2, 1, 4, now), now).unwrap()),
        [(3, true), (3, true), (4, true)]
    );
}

#[test]
fn ranks_that_failed_to_reconnect_may_resume_heartbeats() {
    let (mut c, now) = joined(2);
    let at = |ms| now + Duration::from_millis(ms);
    // Rank 1 is stopped before it has left.
    c.leave("a", "t", Rank(0), 1).unwrap();
    for ms in [900, 1800, 2700] {
        c.heartbeat("a", "t", Rank(0), 1, false, at(ms)).unwrap();
        assert_eq!(c.tick(at(ms)), []);
    }
}

#[test]
fn ranks_whose_ports_are_isolated_from_each_other_are_refused() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("a", 2)).unwrap();
    let at = |rank: u32, ifindex| Join { ifindex, ..join("a", rank, 0, u64::from(rank), now) };
    let leave = |c: &mut Controller| {
        let epoch = epoch_number(c.job("a").unwrap());
        (0..2).for_each(|rank| drop(c.leave("a", "t", Rank(rank), epoch).unwrap()));
    };
    for (isolated, refused) in
        [(vec![(10, 1)], false), (vec![(10, 1), (11, 2)], false), (vec![(10, 1), (11, 1)], true)]
    {
        c.set_isolated(isolated.into_iter());
        c.join(at(0, 10), now).unwrap();
        let actions = c.join(at(1, 11), now).unwrap();
        assert_eq!(replies(&actions), [(0, !refused), (1, !refused)], "{actions:?}");
        leave(&mut c);
    }
    // The box routes packets from these ports.
    c.set_routers([10, 11].map(|ifindex| (ifindex, Some([2; 6]))).into_iter());
    c.join(at(0, 10), now).unwrap();
    assert_eq!(replies(&c.join(at(1, 11), now).unwrap()), [(0, true), (1, true)]);
    leave(&mut c);
    // Only neighbours count.
    c.set_routers([10, 11].map(|ifindex| (ifindex, None)).into_iter());
    c.create_job(spec("b", 4)).unwrap();
    c.set_isolated([(10, 1), (12, 1)].into_iter());
    let ports = [10, 11, 12, 13];
    let all = (0..4).map(|rank| {
        let join = join("b", rank, 0, u64::from(rank), now);
        c.join(Join { ifindex: ports[rank as usize], ..join }, now).unwrap()
    });
    assert!(replies(&all.last().unwrap()).iter().all(|(_, ok)| *ok));
}

#[test]
fn heartbeats_missed_while_the_daemon_was_busy_do_not_count() {
    let (mut c, now) = joined(2);
    // Creating the rings of another job took three seconds.
    c.extend_heartbeats(Duration::from_secs(3), |_| true);
    assert_eq!(c.tick(now + Duration::from_millis(3900)), []);
    assert!(matches!(c.tick(now + Duration::from_millis(4100))[0], Action::DeleteRing { .. }));
}

#[test]
fn the_end_of_an_epoch_does_not_affect_ranks_that_wait_for_the_next() {
    for silent in [false, true] {
        let (mut c, now) = (controller(), Instant::now());
        c.create_job(spec("a", 2)).unwrap();
        c.join(join("a", 0, 0, 1, now), now).unwrap();
        c.join(join("a", 1, 0, 2, now), now).unwrap();
        // Rank 1 dies and is restarted at once; rank 0 or the controller detects that later.
        assert_eq!(c.join(join("a", 1, 2, 3, now), now).unwrap(), []);
        let actions = if silent {
            c.tick(now + Duration::from_millis(1500))
        } else {
            c.abort("a", "t", Rank(0), 1, "rank 1 is dead").unwrap()
        };
        assert!(
            matches!(actions[..], [Action::DeleteRing { .. }, Action::CreateRing(_)]),
            "{actions:?}"
        );
        assert!(matches!(c.job("a").unwrap().state, State::Failed(_)));
        let actions = c.join(join("a", 0, 2, 4, now), now).unwrap();
        assert_eq!(replies(&actions), [(4, true), (3, true)]);
        assert_eq!(c.job("a").unwrap().state, State::Active);
        // Late requests from the first epoch's ranks change nothing.
        assert_eq!(c.abort("a", "t", Rank(0), 1, "late").unwrap(), []);
        assert_eq!(c.leave("a", "t", Rank(0), 1).unwrap(), []);
        assert_eq!(c.job("a").unwrap().state, State::Active);
    }
}

#[test]
fn an_application_that_connects_again_finds_empty_rings() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("hand", 2)).unwrap();
    (0..2).for_each(|rank| drop(c.add_flow("hand", JobRing(0), flow(rank, 2)).unwrap()));
    let actions = c.restart_job("hand").unwrap();
    assert!(
        matches!(&actions[..], [Action::DeleteRing { flows, .. }, Action::CreateRing(_)] if flows.len() == 2),
        "{actions:?}"
    );
    assert_eq!(c.job("hand").unwrap().state, State::Waiting);
    // The same queue pairs with other PSNs.
    for rank in 0..2 {
        c.add_flow("hand", JobRing(0), FlowSpec { base_psn: Psn::new(0x80_0000), ..flow(rank, 2) })
            .unwrap();
    }
    assert_eq!(c.job("hand").unwrap().state, State::Active);
    // Neither in a job whose ranks join, nor in a job that does not exist.
    c.create_job(spec("a", 2)).unwrap();
    c.join(join("a", 0, 0, 1, now), now).unwrap();
    assert!(
        matches!(c.restart_job("a"), Err(Refusal::NotNow(why)) if why.contains("join by themselves"))
    );
    assert!(matches!(c.restart_job("b"), Err(Refusal::NotFound(_))));
}

#[test]
fn ranks_behind_a_router_have_its_mac_address_in_common() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("a", 4)).unwrap();
    let router = [2, 0, 0, 0, 1, 0];
    for rank in 0..4 {
        let mut j = join("a", rank, 0, rank.into(), now);
        if rank % 2 == 0 {
            (j.mac, j.ifindex) = (router, 10);
        }
        c.join(j, now).unwrap();
    }
    let job = c.job("a").unwrap();
    assert_eq!(job.state, State::Active);
    let macs: Vec<_> = job.flows.iter().map(|f| (f.ifindex, f.src_mac.unwrap())).collect();
    let own = |rank: u8| (10 + u32::from(rank), [2, 0, 0, 0, 0, rank]);
    assert_eq!(macs, [(10, router), own(1), (10, router), own(3)]);
    // The router's address may not appear at other ports.
    c.create_job(spec("b", 2)).unwrap();
    c.join(join("b", 0, 1, 9, now), now).unwrap();
    let mut second = join("b", 1, 1, 10, now);
    second.mac = router;
    let actions = c.join(second, now).unwrap();
    assert_eq!(replies(&actions), [(9, false), (10, false)]);
}

#[test]
fn results_are_released_as_the_ranks_that_join_need_them() {
    let relaxed = |actions: &[Action]| {
        let ring = |a: &Action| match a {
            Action::ActivateRing(ring, _) => Some(ring.config.flags & ring_flags::RELAXED != 0),
            _ => None,
        };
        actions.iter().find_map(ring)
    };
    for (order, selective, expected) in [
        (None, true, true),
        (None, false, false),
        (Some(true), true, false),
        (Some(false), false, true),
    ] {
        let (mut c, now) = (controller(), Instant::now());
        c.create_job(JobSpec { in_order: order, ..spec("a", 2) }).unwrap();
        let with = |c: &mut Controller, epoch| {
            c.join(join("a", 0, epoch, 1, now), now).unwrap();
            let mut last = join("a", 1, epoch, 2, now);
            // The kind of IP identifications has no influence.
            (last.address.selective, last.address.any_ip_id) = (selective, selective);
            relaxed(&c.join(last, now).unwrap())
        };
        assert_eq!(with(&mut c, 0), Some(expected), "{order:?} {selective}");
        assert_eq!(c.job("a").unwrap().is_in_order(), !expected);
        // The next daemon restores the same, and the next ranks may differ.
        let mut next = controller();
        next.restore(c.save(), now, |_| None).unwrap();
        assert_eq!(next.job("a").unwrap().is_in_order(), !expected);
        next.abort("a", "t", Rank(1), 1, "over").unwrap();
        assert_eq!(next.job("a").unwrap().is_in_order(), order.unwrap_or(true));
    }
}

#[test]
fn a_path_mtu_that_is_not_given_is_the_largest_that_all_ports_carry() {
    let mut c = controller();
    let mut made_with = |name: &str, mtus: [u32; 2]| {
        c.set_mtus((10..14).map(|port| (port, mtus[usize::from(port > 10)])));
        c.create_job(JobSpec { mtu: 0, ..spec(name, 2) })?;
        Ok::<_, Refusal>(c.job(name)?.spec.mtu)
    };
    assert_eq!(made_with("usual", [1500, 1500]), Ok(1024));
    assert_eq!(made_with("jumbo", [9000, 9000]), Ok(2048));
    assert_eq!(made_with("mixed", [9000, 1500]), Ok(1024));
    assert_eq!(made_with("exact", [2048 + MTU_OVERHEAD, 2048 + MTU_OVERHEAD]), Ok(2048));
    assert_eq!(made_with("one-short", [2048 + MTU_OVERHEAD - 1, 9000]), Ok(1024));
    let none = made_with("none", [300, 9000]).unwrap_err().to_string();
    assert!(none.starts_with("--mtu 256: port p0 has an MTU of 300"), "{none}");
    let mut without_ports = Controller::new(1 << 30, 2, Duration::from_secs(1));
    without_ports.create_job(JobSpec { mtu: 0, ..spec("a", 2) }).unwrap();
    assert_eq!(without_ports.job("a").unwrap().spec.mtu, 1024);
    let steps = [300, 1500, 2131, 3411, 3412, 9000].map(largest_mtu);
    assert_eq!(steps, [256, 1408, 1984, 3264, 3328, 3328]);
    assert_eq!([1500, 2131, 3412].map(largest_ibta_mtu), [1024, 1024, 2048]);
}

#[test]
fn the_largest_path_mtu_fits_ports_and_memory() {
    let (mut c, now) = (controller(), Instant::now());
    let mut made = Vec::new();
    // A session of two ranks that take path MTUs up to these, if the last port has this MTU.
    let mut session = |c: &mut Controller, most: [u32; 2], link: u32| {
        c.set_mtus([(13, link)].into_iter());
        let epoch = c.job("a").unwrap().last_epoch;
        for (rank, most) in (0..).zip(most) {
            let mut join = join("a", rank, epoch, rank.into(), now);
            join.address.largest_mtu = most;
            for action in c.join(join, now).unwrap() {
                if let Action::CreateRing(ring) = action {
                    made.push((ring.config.mtu, ring.config.credit));
                }
            }
        }
        let (mtu, state) = (c.job("a").unwrap().mtu(), c.job("a").unwrap().state.clone());
        assert_eq!((state, c.memory_used()), (State::Active, memory(c)));
        c.leave("a", "t", Rank(0), epoch + 1).unwrap();
        c.leave("a", "t", Rank(1), epoch + 1).unwrap();
        assert_eq!(c.job("a").unwrap().mtu(), 1024, "of any ranks");
        mtu
    };
    c.create_job(JobSpec { mtu: 0, ..spec("a", 2) }).unwrap();
    assert_eq!(session(&mut c, [1456, 1456], 1500), 1408);
    assert_eq!(session(&mut c, [1456, 0], 1500), 1024, "an adapter, or an older release");
    assert_eq!(session(&mut c, [1456, 1399], 1500), 1344, "a host's interface");
    assert_eq!(session(&mut c, [1456, 1456], 1300), 1216, "a port");
    assert_eq!(session(&mut c, [9000, 9000], 9000), 1408, "the memory");
    // The rings in use, and those that follow them; a window is 2 messages of 64 KiB.
    assert_eq!(made[0], (1408, 2 * 47));
    // The next daemon continues with the same.
    c.join(join("a", 0, 9, 1, now), now).unwrap();
    c.join(join("a", 1, 9, 2, now), now).unwrap();
    let mut next = controller();
    next.restore(c.save(), now, |_| None).unwrap();
    assert_eq!((next.job("a").unwrap().mtu(), next.memory_used()), (1408, memory(&c)));
    next.delete_job("a").unwrap();
    assert_eq!(next.memory_used(), 0);
}

proptest! {
    #[test]
    fn the_path_mtu_of_ranks_is_the_largest_that_everything_carries(
        made in 340u32..10_000, link in 340u32..10_000, most in 0u32..10_000,
    ) {
        let mtu = largest_ibta_mtu(made);
        let reserved = largest_mtu(made);
        let spec = JobSpec { mtu, largest_mtu: Some(reserved), ..spec("a", 2) };
        let fits = |mtu: &u32| *mtu <= most && *mtu + MTU_OVERHEAD <= link && *mtu <= reserved;
        let largest = (0..10_000).filter(|mtu| abi::is_mtu(*mtu)).filter(fits).max();
        prop_assert_eq!(spec.mtu_for(link, most), largest.unwrap_or(0).max(mtu));
        prop_assert!(abi::is_mtu(reserved) && mtu.is_power_of_two() && mtu <= reserved);
    }
}

fn ring_memory(slots: u32, sum_bytes: u32, members: u32) -> u64 {
    abi::RingMemory { slots, sum_bytes, members }.bytes()
}

/// Memory of the first job, for path MTU 1408.
fn memory(c: &Controller) -> u64 {
    let job = c.jobs().next().unwrap();
    ring_memory(job.slots, 1408, job.spec.ranks)
}

#[test]
fn a_given_path_mtu_holds_for_any_ranks() {
    let (mut c, now) = (controller(), Instant::now());
    let ranks = Some(members::RankRange { first: 0, last: 1 });
    let part =
        members::Members { ranks, uplink: Some("p3".parse().unwrap()), ..Default::default() };
    c.create_job(JobSpec { mtu: 512, ..spec("given", 2) }).unwrap();
    c.create_job(JobSpec { mtu: 0, in_band: true, ..spec("in-band", 2) }).unwrap();
    c.create_job(JobSpec { mtu: 0, members: part, ..spec("part", 4) }).unwrap();
    let reserved = |name| c.job(name).unwrap().spec.reserved_mtu();
    assert_eq!(["given", "in-band", "part"].map(reserved), [512, 1024, 1024]);
    c.join(join("given", 0, 0, 1, now), now).unwrap();
    c.join(join("given", 1, 0, 2, now), now).unwrap();
    assert_eq!(c.job("given").unwrap().mtu(), 512);
}

#[test]
fn a_job_short_of_memory_gets_the_path_mtu_of_adapters() {
    let of = |mtu| ring_memory(256, mtu, 2);
    let mut c = Controller::new(of(1024), 2, Duration::from_secs(1));
    c.create_job(JobSpec { mtu: 0, ..spec("a", 2) }).unwrap();
    assert_eq!(c.job("a").unwrap().spec.reserved_mtu(), 1024);
    let mut c = Controller::new(of(1408), 2, Duration::from_secs(1));
    c.create_job(JobSpec { mtu: 0, ..spec("a", 2) }).unwrap();
    assert_eq!(c.job("a").unwrap().spec.reserved_mtu(), 1408);
    c.delete_job("a").unwrap();
    let why = c.create_job(JobSpec { mtu: 0, window: Messages(4), ..spec("a", 2) }).unwrap_err();
    assert!(why.to_string().ends_with("--window 2 would fit"), "{why}");
}

#[test]
fn a_port_whose_mtu_has_become_too_small_is_refused_by_name() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("a", 2)).unwrap();
    c.create_job(spec("b", 2)).unwrap();
    c.set_mtus([(11, 1024 + MTU_OVERHEAD - 1), (99, 1)].into_iter());
    let refused = |what: Result<Vec<Action>, Refusal>, who: &str| {
        let Err(Refusal::Invalid(why)) = what else { panic!("{what:?}") };
        assert!(why.starts_with(who) && why.contains("port p1 has an MTU of 1107"), "{why}");
        assert!(why.contains("at least 1108 is needed"), "{why}");
    };
    refused(c.create_job(spec("c", 2)), "--mtu 1024: ");
    refused(c.add_flow("a", JobRing(0), flow(1, 2)), "--rank 1: ");
    refused(c.join(join("b", 1, 0, 1, now), now), "rank 1: ");
    // Jobs on other ports continue.
    c.add_flow("a", JobRing(0), flow(0, 2)).unwrap();
    c.set_mtus([(11, 1024 + MTU_OVERHEAD)].into_iter());
    c.add_flow("a", JobRing(0), flow(1, 2)).unwrap();
}

#[test]
fn tokens_are_checked_and_nothing_is_told_without() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("a", 2)).unwrap();
    let mut wrong = join("a", 0, 0, 1, now);
    wrong.token = "x".into();
    let denied = c.join(wrong, now).unwrap_err();
    assert_eq!(denied, c.job_for("a", "x").unwrap_err());
    assert!(matches!(denied, Refusal::Denied(_)));
    assert!(c.leave("a", "", Rank(0), 0).is_err() && c.abort("a", "tt", Rank(0), 0, "").is_err());
}

#[test]
fn impossible_connections_are_refused_when_the_last_rank_joins() {
    type Change = fn(&mut RankAddress);
    let cases: [(Change, &str); 2] = [
        (|a| a.ip = "fd00::2".parse().unwrap(), "not of one family"),
        // Two processes of one host with the same number.
        (
            |a| {
                a.mac = join("a", 0, 0, 1, Instant::now()).address.mac;
                (a.ip, a.rings[0].receive_qpn) = (IpAddr::from([10, 0, 0, 1]), 4);
            },
            "two ranks of the job",
        ),
    ];
    for (change, expected) in cases {
        let (mut c, now) = (controller(), Instant::now());
        c.create_job(spec("a", 4)).unwrap();
        let mut second = join("a", 1, 0, 1, now);
        change(&mut second.address);
        c.join(second, now).unwrap();
        let others = [0, 2, 3].map(|rank| join("a", rank, 0, rank.into(), now));
        let actions: Vec<Action> =
            others.into_iter().flat_map(|join| c.join(join, now).unwrap()).collect();
        assert_eq!(replies(&actions), [0, 1, 2, 3].map(|rank| (rank, false)), "{actions:?}");
        assert!(format!("{actions:?}").contains(expected), "{actions:?}");
        assert_eq!(c.job("a").unwrap().state, State::Waiting);
    }
}

#[test]
fn a_job_that_all_have_left_waits_for_others() {
    let (mut c, now) = joined(2);
    assert_eq!(c.leave("a", "t", Rank(0), 1).unwrap(), []);
    assert_eq!(c.tick(now + Duration::from_millis(500)), []);
    assert!(!c.leave("a", "t", Rank(1), 1).unwrap().is_empty());
    assert_eq!(c.job("a").unwrap().state, State::Waiting);
    assert!(c.job("a").unwrap().flows.is_empty());
}

#[derive(Clone, Debug)]
enum Event {
    Create(u8, u32, u32),
    Delete(u8),
    Open(u8, u32),
    Flow(u8, u32, u32),
    Join(u8, u32, u32),
    Leave(u8, u32),
    Abort(u8, u32),
    Tick(u64),
}

fn events() -> impl Strategy<Value = Event> {
    // The last four are groups.
    let (job, any, rank) = (0u8..4, 0u8..8, 0u32..4);
    prop_oneof![
        (job.clone(), 1u32..5, 0u32..4).prop_map(|(j, n, r)| Event::Create(j, n, r)),
        any.clone().prop_map(Event::Delete),
        (job, 1u32..5).prop_map(|(j, n)| Event::Open(j, n)),
        (any.clone(), 0u32..3, rank.clone()).prop_map(|(j, r, k)| Event::Flow(j, r, k)),
        (any.clone(), rank.clone(), 0u32..3).prop_map(|(j, k, e)| Event::Join(j, k, e)),
        (any.clone(), rank.clone()).prop_map(|(j, k)| Event::Leave(j, k)),
        (any, rank).prop_map(|(j, k)| Event::Abort(j, k)),
        (0u64..30_000).prop_map(Event::Tick),
    ]
}

#[test]
fn a_leafs_ring_is_active_with_all_flows_and_an_uplink() {
    let mut c = controller();
    let ranks = Some(members::RankRange { first: 2, last: 3 });
    let leaf =
        members::Members { ranks, uplink: Some("p3".parse().unwrap()), ..Default::default() };
    let spec = JobSpec { members: leaf, ..spec("a", 6) };
    let actions = c.create_job(spec.clone()).unwrap();
    let made = actions
        .iter()
        .find_map(|a| if let Action::CreateRing(r) = a { Some(r.config) } else { None });
    let config = made.unwrap();
    assert_eq!((config.members, config.flags & ring_flags::UPLINK), (3, ring_flags::UPLINK));
    let ten = |rank: u32, ifindex| FlowSpec { ifindex, qpn: Qpn::new(100 + rank), ..flow(rank, 6) };
    let add = |c: &mut Controller, rank, ifindex| c.add_flow("a", JobRing(0), ten(rank, ifindex));
    let error = add(&mut c, 4, 10).unwrap_err().to_string();
    assert!(error.contains("those of ranks 2, 3, 1 do"), "{error}");
    add(&mut c, 2, 10).unwrap();
    add(&mut c, 1, 13).unwrap();
    let actions = add(&mut c, 3, 11).unwrap();
    let [Action::AddFlow(last), Action::ActivateRing(_, ports)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!((last.member, last.group_mark, &ports[..]), (Rank(1), 0, &[10, 11, 13][..]));
    let job = c.job("a").unwrap();
    assert!(
        job.flows.iter().any(|f| f.member == Rank(2)
            && f.group_mark == TOTAL
            && job.sender(f.member) == Rank(1))
    );
    let error = c.create_job(JobSpec { in_band: true, ..spec }).unwrap_err().to_string();
    assert!(error.contains("only some of the ranks"), "{error}");
}

#[test]
fn one_address_on_two_hosts_is_refused_at_all_ranks() {
    let mut c = controller();
    c.create_job(spec("a", 3)).unwrap();
    let now = Instant::now();
    let mut ranks: Vec<Join> = (0..3).map(|rank| join("a", rank, 0, rank.into(), now)).collect();
    for rank in [0, 2] {
        (ranks[rank].address.ip, ranks[rank].ifindex) = (IpAddr::from([172, 17, 0, 2]), 10);
    }
    let actions: Vec<Action> =
        ranks.into_iter().flat_map(|rank| c.join(rank, now).unwrap()).collect();
    assert_eq!(replies(&actions), [(0, false), (1, false), (2, false)]);
    let Some(Action::Reply { result: Err(refusal), .. }) = actions.first() else {
        panic!("{actions:?}")
    };
    let text = refusal.to_string();
    assert!(
        text.contains("rank 0 and rank 2 have one address, 172.17.0.2")
            && text.contains("NETSUM_IP"),
        "{text}"
    );
    // Ranks of one host may share an address if they are not neighbours in the ring.
    c.create_job(spec("b", 4)).unwrap();
    for rank in 0..4 {
        let mut join = join("b", rank, 0, 10 + u64::from(rank), now);
        if [1, 2].contains(&rank) {
            (join.address.ip, join.address.mac) = (IpAddr::from([10, 0, 0, 7]), [2, 0, 0, 0, 0, 7]);
            (join.mac, join.ifindex) = (join.address.mac, 11);
        }
        let actions = c.join(join, now).unwrap();
        assert_eq!(replies(&actions).len(), if rank == 3 { 4 } else { 0 });
        assert!(replies(&actions).iter().all(|(_, is_ok)| *is_ok), "{actions:?}");
    }
    let job = c.job("b").unwrap();
    assert_eq!(job.epoch.as_ref().unwrap().ring, [0, 2, 3, 1].map(Rank));
    // Flows are numbered by place, and name their ranks.
    assert_eq!([0, 1, 2, 3].map(|place| job.sender(Rank(place)).0), [0, 2, 3, 1]);
    assert_eq!(job.flows[1].src, IpAddr::from([10, 0, 0, 7]));
}

/// Two ranks with one address join, behind these ports.
fn joined_at_one_address(c: &mut Controller, job: &str, ports: [u32; 2]) -> Vec<Action> {
    let now = Instant::now();
    c.create_job(spec(job, 2)).unwrap();
    let joins = (0..).zip(ports).map(|(rank, port)| {
        let mut join = join(job, rank, 0, rank.into(), now);
        (join.address.ip, join.address.mac) = (IpAddr::from([10, 0, 0, 7]), [2, 0, 0, 0, 0, 7]);
        (join.mac, join.ifindex) = (join.address.mac, port);
        join
    });
    joins.collect::<Vec<_>>().into_iter().flat_map(|join| c.join(join, now).unwrap()).collect()
}

#[test]
fn ranks_on_one_host_sum_over_the_hosts_ring_at_a_box() {
    let mut c = controller();
    let actions = joined_at_one_address(&mut c, "a", [11, 11]);
    assert_eq!(replies(&actions).iter().filter(|(_, is_ok)| *is_ok).count(), 2, "{actions:?}");
    let job = c.job("a").unwrap();
    assert_eq!((job.is_summed_by_hosts(), job.has_active_rings()), (true, false));
    assert!(job.epoch.as_ref().unwrap().on_host_ring);
}

#[test]
fn ranks_on_one_host_are_checked_as_others_are() {
    let mut c = controller();
    let now = Instant::now();
    c.create_job(spec("owner", 2)).unwrap();
    for rank in 0..2 {
        let mut join = join("owner", rank, 0, rank.into(), now);
        if rank == 1 {
            (join.address.ip, join.address.mac) = (IpAddr::from([10, 0, 0, 7]), [2, 0, 0, 0, 0, 7]);
            (join.mac, join.ifindex) = (join.address.mac, 11);
        }
        c.join(join, now).unwrap();
    }
    let actions = joined_at_one_address(&mut c, "a", [12, 12]);
    let refused = format!("{actions:?}");
    assert!(replies(&actions).iter().all(|(_, is_ok)| !is_ok), "{refused}");
    assert!(refused.contains("10.0.0.7"), "{refused}");
}

#[test]
fn a_manager_refuses_ranks_on_one_host() {
    let mut c = controller();
    let named = |port: &PortInfo| PortInfo { name: format!("a/{}", port.name), ..port.clone() };
    c.set_ports(c.ports().iter().map(named).collect());
    let actions = joined_at_one_address(&mut c, "a", [11, 11]);
    assert!(format!("{actions:?}").contains("at most half"), "{actions:?}");
}

/// A leaf with ranks 0 and 1, whose receiver is behind the parent, at p0, p1 and p3. The flow of
/// rank 1 is missing.
fn leaf_without_its_last(job: &str, c: &mut Controller) {
    let ranks = Some(members::RankRange { first: 0, last: 1 });
    let members =
        members::Members { ranks, uplink: Some("p3".parse().unwrap()), ..Default::default() };
    c.create_job(JobSpec { members, ..spec(job, 4) }).unwrap();
    c.add_flow(job, JobRing(0), flow(0, 4)).unwrap();
    c.add_flow(job, JobRing(0), FlowSpec { ifindex: 13, ..flow(3, 4) }).unwrap();
}

#[test]
fn a_receiver_above_with_an_address_of_another_port_is_refused() {
    let mut c = controller();
    leaf_without_its_last("a", &mut c);
    let to = |last: u8| FlowSpec { dst: IpAddr::from([10, 0, 0, last]), ..flow(1, 4) };
    let error = c.add_flow("a", JobRing(0), to(1)).unwrap_err().to_string();
    let expected = "rank 1: --dst 10.0.0.1 is behind port p3, but is in use by rank 0 of job `a` \
        behind port p0";
    assert_eq!(error, expected);
    // A host of another job, which would be shut out.
    c.create_job(spec("b", 2)).unwrap();
    let b =
        FlowSpec { src: IpAddr::from([10, 0, 0, 9]), ifindex: 12, qpn: Qpn::new(9), ..flow(0, 2) };
    c.add_flow("b", JobRing(0), b).unwrap();
    let error = c.add_flow("a", JobRing(0), to(9)).unwrap_err().to_string();
    assert!(
        error.contains(
            "rank 1: --dst 10.0.0.9 is behind port p3, but is in use by rank 0 of job `b`"
        ),
        "{error}"
    );
    let active = c.add_flow("a", JobRing(0), to(3)).unwrap();
    assert!(matches!(active[..], [Action::AddFlow(_), Action::ActivateRing(..)]), "{active:?}");
}

#[test]
fn a_flow_from_the_address_of_a_receiver_above_is_refused() {
    let mut c = controller();
    leaf_without_its_last("a", &mut c);
    c.add_flow("a", JobRing(0), flow(1, 4)).unwrap();
    c.create_job(spec("b", 2)).unwrap();
    // Rank 2 of job a, to which its rank 1 sends, is behind p3.
    let b =
        FlowSpec { src: IpAddr::from([10, 0, 0, 3]), ifindex: 12, qpn: Qpn::new(9), ..flow(0, 2) };
    let error = c.add_flow("b", JobRing(0), b).unwrap_err().to_string();
    assert!(
        error.contains("rank 0: address 10.0.0.3")
            && error.contains("rank 1 of job `a` behind port p3"),
        "{error}"
    );
    assert_eq!(c.job("b").unwrap().state, State::Waiting);
}

#[test]
fn the_state_file_has_plain_numbers() {
    let flow = FlowSpec { ring: RingNumber(3), ..flow(0, 2) };
    let text = r#"{"ring":3,"member":0,"base_psn":5,"ifindex":10,"src":"10.0.0.1","dst":"10.0.0.2","qpn":100,"src_mac":null,"group_mark":0}"#;
    assert_eq!(serde_json::to_string(&flow).unwrap(), text);
    assert_eq!(serde_json::from_str::<FlowSpec>(text).unwrap(), flow);
    assert_eq!(serde_json::to_value(spec("a", 2)).unwrap()["window"], 2);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    #[test]
    fn nothing_leaks_and_no_two_jobs_share_a_ring_or_a_flow(events in prop::collection::vec(events(), 1..60)) {
        let (mut c, mut now) = (controller(), Instant::now());
        // The data plane's state.
        let mut rings: HashSet<RingNumber> = HashSet::new();
        let mut flows: HashSet<FlowKey> = HashSet::new();
        let mut waiter = 0;
        for event in events {
            let name = |j: u8| if j < 4 { format!("j{j}") } else { format!("j{}/g", j - 4) };
            let epoch = |c: &Controller, j: u8| c.job(&name(j)).map_or(0, |j| j.last_epoch);
            let actions = match event {
                Event::Create(j, ranks, rings) => {
                    let mut s = spec(&name(j), ranks);
                    s.rings = rings;
                    c.create_job(s)
                }
                Event::Delete(j) => c.delete_job(&name(j)),
                Event::Open(j, ranks) => {
                    c.open_group(&name(j), "t", "g", ranks, now).map(|open| open.actions)
                }
                Event::Flow(j, r, k) => c.add_flow(&name(j), JobRing(r), FlowSpec { qpn: Qpn::new(50 * r + k + 1000 * j as u32), ..flow(k, 4) }),
                Event::Join(j, k, e) => {
                    waiter += 1;
                    let mut join = join(&name(j), k, e, waiter, now);
                    // Groups may have the addresses of their job.
                    join.address.rings[0].receive_qpn += 256 * u32::from(j);
                    c.join(join, now)
                }
                Event::Leave(j, k) => { let e = epoch(&c, j); c.leave(&name(j), "t", Rank(k), e) }
                Event::Abort(j, k) => { let e = epoch(&c, j); c.abort(&name(j), "t", Rank(k), e, "why not") }
                Event::Tick(ms) => { now += Duration::from_millis(ms); Ok(c.tick(now)) }
            };
            for action in actions.unwrap_or_default() {
                match action {
                    Action::CreateRing(r) => prop_assert!(rings.insert(r.id), "ring {} twice", r.id),
                    Action::DeleteRing { ring, flows: gone, .. } => {
                        prop_assert!(rings.remove(&ring));
                        for key in gone { prop_assert!(flows.remove(&key)); }
                    }
                    Action::AddFlow(f) => prop_assert!(flows.insert(f.key()), "flow twice"),
                    Action::ActivateRing(r, ports) => {
                        prop_assert!(rings.contains(&r.id));
                        prop_assert_eq!(ports.len(), r.config.members as usize);
                    }
                    Action::ForgetEnded(gone) => prop_assert!(gone.iter().all(|key| !flows.contains(key))),
                    Action::Reply { .. } | Action::ResetCounters(_) => {}
                    Action::AddInBandToken(..) | Action::RemoveInBandToken(_) => {}
                }
            }
            let used: u64 = c.jobs().map(|j| pool::job_memory(&j.spec, j.slots)).sum();
            prop_assert_eq!(used, c.pool.used());
            prop_assert_eq!(rings.len(), c.jobs().map(|j| j.rings.len()).sum::<usize>());
            prop_assert_eq!(flows.len(), c.jobs().map(|j| j.flows.len()).sum::<usize>());
        }
        let names: Vec<String> = c.jobs().map(|j| j.spec.name.clone()).collect();
        for name in names {
            // With a job, its groups are deleted.
            prop_assert!(c.delete_job(&name).is_ok() || name.contains('/'));
        }
        prop_assert_eq!(c.pool.used(), 0);
    }
}

/// A new daemon's controller, restored from the saved state of `c`.
fn after_restart(c: &Controller) -> Controller {
    let text = serde_json::to_string(&c.save()).unwrap();
    let mut next = controller();
    let actions =
        next.restore(serde_json::from_str(&text).unwrap(), Instant::now(), |_| None).unwrap();
    assert_eq!(actions, [], "the data plane has everything already");
    assert_eq!(next.pool.used(), c.pool.used());
    next
}

#[test]
fn saved_jobs_continue_after_a_restart() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("hand", 2)).unwrap();
    c.add_flow("hand", JobRing(0), flow(0, 2)).unwrap();
    c.create_job(spec("train", 2)).unwrap();
    c.join(join("train", 0, 0, 1, now), now).unwrap();
    c.join(join("train", 1, 0, 2, now), now).unwrap();
    c.create_job(spec("gone", 3)).unwrap();
    c.delete_job("gone").unwrap();

    let mut c = after_restart(&c);
    assert_eq!(c.jobs().map(|j| j.spec.name.as_str()).collect::<Vec<_>>(), ["hand", "train"]);
    // After the missing flow is added, the job begins; ring numbers are not assigned twice.
    let actions = c.add_flow("hand", JobRing(0), flow(1, 2)).unwrap();
    assert!(
        matches!(&actions[..], [Action::AddFlow(_), Action::ActivateRing(r, _)] if r.id == RingNumber(1)),
        "{actions:?}"
    );
    let actions = c.create_job(spec("third", 2)).unwrap();
    assert!(
        matches!(&actions[..], [Action::ResetCounters(RingNumber(3)), Action::CreateRing(_)]),
        "{actions:?}"
    );
    // Ranks continue and leave as before.
    assert_eq!(c.heartbeat("train", "t", Rank(0), 1, false, now).unwrap().state, State::Active);
    assert_eq!(c.leave("train", "t", Rank(0), 1).unwrap(), []);
    let mut c = after_restart(&c);
    assert!(
        !c.leave("train", "t", Rank(1), 1).unwrap().is_empty(),
        "the other has left before the restart"
    );
    assert_eq!(c.job("train").unwrap().state, State::Waiting);
    // A rank that is silent after the restart is detected.
    let mut c = after_restart(&c);
    c.join(join("train", 0, 1, 3, now), now).unwrap();
    c.join(join("train", 1, 1, 4, now), now).unwrap();
    let mut c = after_restart(&c);
    c.tick(Instant::now() + Duration::from_secs(2));
    assert!(
        matches!(&c.job("train").unwrap().state, State::Failed(why) if why.contains("no heartbeat"))
    );
    for job in ["hand", "train", "third"] {
        c.delete_job(job).unwrap();
    }
    assert_eq!(c.pool.used(), 0);
}

#[test]
fn a_recreated_job_is_empty_and_accepts_ranks_of_later_epochs() {
    let (mut c, now) = (controller(), Instant::now());
    for (name, in_band) in [("z", true), ("train", false)] {
        c.create_job(JobSpec { in_band, in_order: Some(true), ..spec(name, 2) }).unwrap();
    }
    for epoch in [0, 2, 3] {
        (0..2).for_each(|rank| drop(c.join(join("train", rank, epoch, 0, now), now).unwrap()));
    }
    assert_eq!(epoch_number(c.job("train").unwrap()), 3);
    let text = serde_json::to_string(&c.specs().collect::<Vec<_>>()).unwrap();
    let kept: Vec<JobSpec> = serde_json::from_str(&text).unwrap();
    assert_eq!(kept.iter().collect::<Vec<_>>(), c.specs().collect::<Vec<_>>());

    // The machine has booted, and no port exists yet; one appears with its MTU from before it was
    // configured.
    let mut next = Controller::new(64 << 20, 2, Duration::from_secs(1));
    let actions: Vec<_> =
        kept.clone().into_iter().flat_map(|spec| next.recreate_job(spec).unwrap()).collect();
    let made = actions.iter().filter(|a| matches!(a, Action::CreateRing(_))).count();
    let tokens = actions.iter().filter(|a| matches!(a, Action::AddInBandToken(..))).count();
    assert_eq!((made, tokens), (2, 1), "{actions:?}");
    next.set_ports(vec![PortInfo { name: "p0".into(), ifindex: 10, mtu: 576, router: None }]);
    let error = next.join(join("train", 0, 0, 0, now), now).unwrap_err().to_string();
    assert!(error.contains("port p0 has an MTU of 576"), "{error}");
    next.set_ports(c.ports().to_vec());
    let job = next.heartbeat("train", "t", Rank(0), 3, false, now).unwrap();
    assert_eq!((&job.state, job.last_epoch), (&State::Waiting, 0), "their epoch is unknown here");
    (0..2).for_each(|rank| drop(next.join(join("train", rank, 0, 0, now), now).unwrap()));
    assert_eq!(next.job("train").unwrap().state, State::Active);

    // A job that no longer fits is refused with the reason, and does not exist.
    let mut small = Controller::new(1 << 10, 2, Duration::from_secs(1));
    let error = small.recreate_job(kept[0].clone()).unwrap_err().to_string();
    assert!(error.contains("not enough memory for slots"), "{error}");
    assert_eq!(small.jobs().count(), 0);
}

#[test]
fn saved_jobs_that_no_longer_fit_are_refused_and_lost_ports_end_their_jobs() {
    let mut c = controller();
    c.create_job(spec("a", 2)).unwrap();
    (0..2).for_each(|rank| drop(c.add_flow("a", JobRing(0), flow(rank, 2)).unwrap()));
    let mut small = Controller::new(1 << 10, 2, Duration::from_secs(1));
    let error = small.restore(c.save(), Instant::now(), |_| None).unwrap_err();
    assert!(error.contains("job `a`") && error.contains("pool.memory = 1.0 KiB"), "{error}");

    let mut next = controller();
    next.set_ports(vec![PortInfo { name: "p0".into(), ifindex: 10, mtu: 1500, router: None }]);
    let actions = next.restore(c.save(), Instant::now(), |_| None).unwrap();
    assert!(
        matches!(&actions[..], [Action::DeleteRing { .. }, Action::CreateRing(_)]),
        "{actions:?}"
    );
    let State::Failed(why) = &next.job("a").unwrap().state else { panic!() };
    assert!(why.contains("rank 1: its port (interface 11) was removed"), "{why}");
}

#[test]
fn ten_thousand_jobs_that_are_aborted_leave_nothing() {
    let (mut c, now) = (controller(), Instant::now());
    let (mut rings, mut flows) = (HashSet::new(), HashSet::new());
    let mut carry_out = |actions: Vec<Action>| {
        for action in actions {
            match action {
                Action::CreateRing(r) => drop(rings.insert(r.id)),
                Action::AddFlow(f) => assert!(flows.insert(f.key())),
                Action::DeleteRing { ring, flows: keys, .. } => {
                    rings.remove(&ring);
                    keys.iter().for_each(|k| assert!(flows.remove(k)));
                }
                Action::ResetCounters(_) | Action::ActivateRing(..) | Action::Reply { .. } => {}
                Action::ForgetEnded(gone) => assert!(gone.iter().all(|key| !flows.contains(key))),
                Action::AddInBandToken(..) | Action::RemoveInBandToken(_) => {}
            }
        }
        (rings.len(), flows.len())
    };
    for i in 0..10_000 {
        carry_out(c.create_job(JobSpec { rings: 1, ..spec("a", 2) }).unwrap());
        // All kinds of ends: none joined, one did, all did and one gave up, all left.
        for rank in 0..(i % 3).min(2) {
            carry_out(c.join(join("a", rank, 0, 0, now), now).unwrap());
        }
        if i % 3 == 2 {
            let actions = if i % 2 == 0 {
                c.abort("a", "t", Rank(0), 1, "tired").unwrap()
            } else {
                carry_out(c.leave("a", "t", Rank(0), 1).unwrap());
                c.leave("a", "t", Rank(1), 1).unwrap()
            };
            carry_out(actions);
        }
        let left = carry_out(c.delete_job("a").unwrap());
        assert_eq!((left, c.pool.used()), ((0, 0), 0), "job {i}");
    }
    assert!(c.save().jobs.is_empty());
}

#[test]
fn nobody_can_take_an_address_of_the_box_itself() {
    let now = Instant::now();
    let mut c = controller();
    c.create_job(spec("a", 2)).unwrap();
    let mac = [2, 0, 0, 0, 0, 0xfe];
    c.set_own_addresses([IpAddr::from([10, 0, 0, 254])].into(), [mac].into());
    let refused = |c: &mut Controller, change: &dyn Fn(&mut Join)| {
        let mut thief = join("a", 1, 0, 1, now);
        change(&mut thief);
        c.join(join("a", 0, 0, 0, now), now).unwrap();
        let actions = c.join(thief, now).unwrap();
        let is_refused = |a: &Action| matches!(a, Action::Reply { result: Err(Refusal::Exists(why)), .. } if why.contains("box itself"));
        assert!(!actions.is_empty() && actions.iter().all(is_refused), "{actions:?}");
    };
    refused(&mut c, &|thief| thief.address.ip = IpAddr::from([10, 0, 0, 254]));
    refused(&mut c, &|thief| thief.mac = mac);
}

#[test]
fn no_rank_has_an_address_of_no_host() {
    for ip in ["::", "0.0.0.0", "::ffff:0.0.0.0", "ff02::1", "224.0.0.1"]
        .map(|ip| ip.parse::<IpAddr>().unwrap())
    {
        let (mut c, now) = (controller(), Instant::now());
        c.create_job(spec("a", 2)).unwrap();
        c.create_job(spec("b", 2)).unwrap();
        for rank in 0..2 {
            let mut one = join("a", rank, 0, rank.into(), now);
            if rank == 1 {
                one.address.ip = ip;
            }
            let joined = c.join(one, now).map(|actions| format!("{actions:?}"));
            let found = joined.unwrap_or_else(|refusal| refusal.to_string());
            assert_eq!(found.contains("not the address of a host"), rank == 1, "{found}");
        }
        let flow = FlowSpec { src: ip, dst: ip, ..flow(0, 2) };
        let refused = c.add_flow("b", JobRing(0), flow).unwrap_err().to_string();
        assert_eq!(refused, format!("{}: not the address of a host", ip.to_canonical()));
    }
}

#[test]
fn nobody_can_take_an_address_that_belongs_behind_another_port() {
    let now = Instant::now();
    let mut c = controller();
    c.create_job(spec("a", 2)).unwrap();
    for rank in 0..2 {
        c.join(join("a", rank, 0, rank.into(), now), now).unwrap();
    }
    // Ranks of another job on ports of their own, but with an address of the first job.
    let join_b = |c: &mut Controller, change: &dyn Fn(&mut Join)| {
        for rank in 0..2 {
            let mut j = join("b", rank, 0, 10 + u64::from(rank), now);
            j.address.ip = IpAddr::from([10, 9, 0, rank as u8 + 1]);
            j.mac = [2, 0, 0, 0, 9, rank as u8];
            j.ifindex = 12 + rank;
            if rank == 1 {
                change(&mut j);
            }
            let actions = c.join(j, now).unwrap();
            if rank == 1 {
                return actions;
            }
        }
        unreachable!()
    };
    c.create_job(spec("b", 2)).unwrap();
    for change in
        [(|j: &mut Join| j.address.ip = IpAddr::from([10, 0, 0, 1])) as fn(&mut Join), |j| {
            j.mac = [2, 0, 0, 0, 0, 0]
        }]
    {
        let actions = join_b(&mut c, &change);
        assert!(
            actions
                .iter()
                .all(|a| matches!(a, Action::Reply { result: Err(Refusal::Exists(why)), .. }
            if why.contains("is in use by rank "))),
            "{actions:?}"
        );
        assert_eq!(c.job("b").unwrap().state, State::Waiting);
    }
    // Several ranks may be behind the same port. And the job's own addresses are fine.
    assert!(replies(&join_b(&mut c, &|_| ())).iter().all(|(_, good)| *good));
    // The same for flows added by hand.
    c.create_job(spec("c", 2)).unwrap();
    let stolen = FlowSpec { qpn: Qpn::new(7), ifindex: 13, ..flow(0, 2) };
    assert!(matches!(c.add_flow("c", JobRing(0), stolen), Err(Refusal::Exists(_))));
}

#[test]
fn a_removed_port_ends_only_jobs_with_flows_there() {
    let mut c = controller();
    for (name, first) in [("a", 0), ("b", 2)] {
        c.create_job(spec(name, 2)).unwrap();
        for rank in 0..2 {
            let f = FlowSpec {
                ifindex: 10 + first + rank,
                src: IpAddr::from([10, 0, first as u8, rank as u8]),
                dst: IpAddr::from([10, 0, first as u8, 1 - rank as u8]),
                ..flow(rank, 2)
            };
            c.add_flow(name, JobRing(0), f).unwrap();
        }
    }
    let actions = c.ports_removed(&[11]);
    assert!(
        actions.iter().any(|a| matches!(a, Action::DeleteRing { ring: RingNumber(1), .. })),
        "{actions:?}"
    );
    assert_eq!(c.job("a").unwrap().state, State::Failed("rank 1: its port p1 was removed".into()));
    assert_eq!(c.job("b").unwrap().state, State::Active);
    assert!(c.ports_removed(&[10, 11]).is_empty(), "a job ends once");
}

#[test]
fn the_pool_shrinks_to_what_the_jobs_take_and_no_further() {
    let mut c = controller();
    c.create_job(spec("a", 2)).unwrap();
    let used = c.memory_used();
    let error = c.set_memory(used - 1).unwrap_err().to_string();
    assert!(error.contains("the jobs take 318.0 KiB already"), "{error}");
    assert_eq!(c.memory(), 64 << 20, "nothing has changed");
    c.set_memory(used).unwrap();
    assert!(matches!(c.create_job(spec("b", 2)), Err(Refusal::Exhausted(_))));
    c.set_memory(2 * used).unwrap();
    c.create_job(spec("b", 2)).unwrap();

    c.set_memory(4 * used).unwrap();
    c.set_available(used - 1);
    let error = c.create_job(spec("more", 2)).unwrap_err().to_string();
    assert!(
        error.contains("are free, but the machine has") && error.contains("would fit"),
        "{error}"
    );
    assert_eq!(c.memory_used(), 2 * used);
    c.set_available(u64::MAX);
    c.create_job(spec("more", 2)).unwrap();
}

/// Memory of a job made by [`small`]: 32 slots of 512 + 2 x 112 + 24 bytes.
const ONE: u64 = 32 * (512 + 224 + 24);

fn small(name: &str, tenant: &str) -> JobSpec {
    JobSpec { mtu: 512, message_size: 4096, tenant: tenant.into(), ..spec(name, 2) }
}

#[test]
fn a_refusal_names_limit_use_and_what_would_fit() {
    let mut c = controller();
    c.set_memory(10 * ONE).unwrap();
    let some = Limits { jobs: Some(3), memory: Some(3 * ONE), rings: Some(4), slots: None };
    c.set_tenants(BTreeMap::from([("a".to_owned(), some)]));
    c.create_job(JobSpec { rings: 2, ..small("a1", "a") }).unwrap();
    let refused = |c: &mut Controller, spec: JobSpec| c.create_job(spec).unwrap_err().to_string();
    let why = refused(&mut c, JobSpec { rings: 3, ..small("a2", "a") });
    // A smaller window does not change the number of rings.
    assert_eq!(why, "tenant `a`: rings limit 4, 2 in use, 3 needed");
    let wide = |window| JobSpec { window: Messages(window), ..small("a2", "a") };
    let why = refused(&mut c, wide(8));
    let expected =
        "tenant `a`: memory limit 71.2 KiB, 47.5 KiB in use, 95.0 KiB needed; --window 2 would fit";
    assert_eq!(why, expected);
    c.create_job(wide(2)).unwrap();
    assert!(refused(&mut c, wide(1)).contains("already exists: pick another name or delete it"));
    let why = refused(&mut c, JobSpec { window: Messages(1), ..small("a3", "a") });
    assert!(why.contains("memory limit 71.2 KiB, 71.2 KiB in use"), "{why}");
    c.create_job(JobSpec { rings: 6, ..small("d1", "default") }).unwrap();
    let why = refused(&mut c, JobSpec { window: Messages(16), ..small("d2", "default") });
    assert!(why.contains("; 23.8 KiB of 237.5 KiB are free; "), "{why}");
    assert!(why.ends_with("; --window 2 would fit"), "{why}");
    let why = refused(&mut c, JobSpec { rings: 8, ..small("d2", "default") });
    assert!(why.ends_with("; no --window would fit"), "{why}");
    let why = refused(&mut c, small("x", "nobody"));
    assert_eq!(why, "--tenant `nobody`: the configuration has a, default");
    assert_eq!(c.memory_used(), 9 * ONE, "who is refused gets nothing");
}

#[test]
fn a_limit_that_is_lowered_ends_no_job() {
    let mut c = controller();
    let limits = |jobs| BTreeMap::from([("a".to_owned(), Limits { jobs, ..Limits::default() })]);
    c.set_tenants(limits(None));
    (0..3).for_each(|i| drop(c.create_job(small(&format!("a{i}"), "a")).unwrap()));
    c.set_tenants(limits(Some(1)));
    assert_eq!(c.jobs().count(), 3);
    let why = c.create_job(small("a3", "a")).unwrap_err().to_string();
    assert_eq!(why, "tenant `a`: jobs limit 1, 3 in use, 1 needed");
    (0..3).for_each(|i| drop(c.delete_job(&format!("a{i}")).unwrap()));
    c.create_job(small("a3", "a")).unwrap();
    // Jobs of a tenant that is no longer configured still count.
    c.set_tenants(BTreeMap::new());
    let all: Vec<_> =
        c.tenants().into_iter().map(|t| (t.name, t.limits.is_some(), t.used.jobs)).collect();
    assert_eq!(all, [("a".to_owned(), false, 1), ("default".to_owned(), true, 0)]);
}

#[test]
fn a_job_is_sealed_while_all_ranks_of_its_epoch_report_it() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("train", 2)).unwrap();
    let begin = |c: &mut Controller, epoch| {
        (0..2).for_each(|rank| drop(c.join(join("train", rank, epoch, 0, now), now).unwrap()));
    };
    let says = |c: &mut Controller, rank, epoch, is_sealed| {
        let report = RankReport { is_sealed, ..RankReport::default() };
        c.set_report("train", Rank(rank), epoch, report);
        c.job("train").unwrap().epoch.as_ref().unwrap().is_sealed()
    };
    begin(&mut c, 0);
    assert!(!says(&mut c, 0, 1, true));
    assert!(!says(&mut c, 99, 1, true));
    assert!(says(&mut c, 1, 1, true));
    assert!(!says(&mut c, 0, 1, false));
    assert!(says(&mut c, 0, 1, true));
    begin(&mut c, 2);
    assert!(!says(&mut c, 0, 1, true), "an epoch that is over");
    assert!(!says(&mut c, 1, 2, true));
    assert!(!after_restart(&c).job("train").unwrap().epoch.as_ref().unwrap().is_sealed());
}

#[test]
fn underflows_of_all_ranks_and_epochs_add_up() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("train", 2)).unwrap();
    let begin = |c: &mut Controller, epoch| {
        (0..2).for_each(|rank| drop(c.join(join("train", rank, epoch, 0, now), now).unwrap()));
    };
    let after = |c: &mut Controller, rank, epoch, underflows| {
        let report = RankReport { underflows, ..RankReport::default() };
        c.set_report("train", Rank(rank), epoch, report);
        c.job("train").unwrap().underflows
    };
    begin(&mut c, 0);
    assert_eq!(after(&mut c, 0, 1, 5), 5);
    assert_eq!(after(&mut c, 1, 1, 2), 7);
    assert_eq!(after(&mut c, 0, 1, 4), 7, "a heartbeat that another one has overtaken");
    assert_eq!(after(&mut c, 0, 1, 5), 7, "nothing new");
    assert_eq!(after(&mut c, 2, 1, 9), 7, "not a rank");
    begin(&mut c, 2);
    assert_eq!(after(&mut c, 0, 1, 8), 7, "an epoch that is over");
    assert_eq!(after(&mut c, 0, 2, 1), 8, "ranks count from the start of an epoch");
    let mut next = after_restart(&c);
    assert_eq!(after(&mut next, 0, 2, 3), 0, "those that the earlier daemon has counted");
    assert_eq!(after(&mut next, 0, 2, 5), 2);
    assert_eq!(after(&mut c, 1, 2, u64::MAX), u64::MAX);
}

#[test]
fn ranks_on_the_host_ring_have_fallen_back_once_in_an_epoch() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("train", 2)).unwrap();
    let begin = |c: &mut Controller, epoch| {
        (0..2).for_each(|rank| drop(c.join(join("train", rank, epoch, 0, now), now).unwrap()));
    };
    let beats = |c: &mut Controller, rank, epoch, on_host_ring| {
        let job = c.heartbeat("train", "t", Rank(rank), epoch, on_host_ring, now).unwrap();
        (job.epoch.as_ref().is_some_and(|e| e.on_host_ring), job.fallbacks)
    };
    begin(&mut c, 0);
    assert_eq!(beats(&mut c, 0, 1, false), (false, 0));
    assert_eq!(beats(&mut c, 0, 1, true), (true, 1));
    assert_eq!(beats(&mut c, 1, 1, false), (true, 1), "it does not know of it yet");
    assert_eq!(beats(&mut c, 1, 1, true), (true, 1));
    begin(&mut c, 2);
    assert_eq!(beats(&mut c, 0, 1, true), (false, 1), "an epoch that is over");
    assert_eq!(beats(&mut c, 0, 2, true), (true, 2));
    // The next daemon does not know of it yet.
    let mut c = after_restart(&c);
    assert_eq!(beats(&mut c, 1, 2, false), (false, 0));
    assert_eq!(beats(&mut c, 1, 2, true), (true, 1));
    // Heartbeats of ranks that have left do not count.
    begin(&mut c, 3);
    c.leave("train", "t", Rank(0), 3).unwrap();
    assert_eq!(beats(&mut c, 0, 3, true), (false, 1));
}

#[test]
fn ranks_are_asked_to_connect_again_until_they_have() {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(spec("train", 2)).unwrap();
    let asked = |c: &mut Controller, epoch| {
        let job = c.heartbeat("train", "t", Rank(0), epoch, false, now).unwrap();
        job.epoch.as_ref().is_some_and(|e| e.reconnect)
    };
    let begin = |c: &mut Controller, epoch| {
        c.join(join("train", 0, epoch, 1, now), now).unwrap();
        c.join(join("train", 1, epoch, 2, now), now).unwrap();
    };
    assert!(
        matches!(c.reconnect_job("train"), Err(Refusal::NotNow(why)) if why.contains("no ranks"))
    );
    assert!(matches!(c.reconnect_job("other"), Err(Refusal::NotFound(_))));
    begin(&mut c, 0);
    assert!(!asked(&mut c, 1));
    c.reconnect_job("train").unwrap();
    assert!(asked(&mut c, 1));
    let mut c = after_restart(&c);
    assert!(asked(&mut c, 1), "the next daemon asks, too");
    (0..2).for_each(|rank| drop(c.leave("train", "t", Rank(rank), 1).unwrap()));
    begin(&mut c, 1);
    assert!(!asked(&mut c, 2));
}

#[test]
fn deleting_a_job_reports_all_flows_it_ever_had() {
    let (mut c, now) = (Controller::new(64 << 20, 2, Duration::from_secs(1)), Instant::now());
    c.set_ports(controller().ports().to_vec());
    let (ranks, rings) = (64, 80);
    let size =
        JobSpec { mtu: 256, message_size: 256, window: Messages(1), rings, ..spec("a", ranks) };
    c.create_job(size).unwrap();
    for rank in 0..ranks {
        let mut join = join("a", rank, 0, rank.into(), now);
        (join.ifindex, join.mac) = (10 + rank % 4, [2, 0, 0, 0, 0, rank as u8]);
        let number =
            |n| Connection { receive_qpn: 0x1000 + 2 * n, send_qpn: 0x1001 + 2 * n, first_psn: 0 };
        join.address.rings = (0..rings).map(number).collect();
        c.join(join, now).unwrap();
    }
    let flows: HashSet<_> = c.job("a").unwrap().flows.iter().map(FlowSpec::key).collect();
    assert_eq!(flows.len(), (ranks * rings) as usize);
    c.abort("a", "t", Rank(0), 1, "enough").unwrap();
    let had =
        |c: &Controller| c.job("a").unwrap().all_flow_keys().into_iter().collect::<HashSet<_>>();
    assert_eq!(had(&c).len(), flows.len());
    // The next daemon also knows them.
    let saved = serde_json::from_str(&serde_json::to_string(&c.save()).unwrap()).unwrap();
    let mut next = Controller::new(64 << 20, 2, Duration::from_secs(1));
    next.set_ports(c.ports().to_vec());
    next.restore(saved, now, |_| None).unwrap();
    assert_eq!(had(&next), flows);
}

#[test]
fn a_job_forgets_only_flows_that_are_still_its_own() {
    let mut c = controller();
    for name in ["a", "b"] {
        c.create_job(spec(name, 2)).unwrap();
    }
    c.add_flow("a", JobRing(0), flow(0, 2)).unwrap();
    c.restart_job("a").unwrap();
    assert_eq!(c.job("a").unwrap().all_flow_keys(), [flow(0, 2).key()]);
    // Its senders may be active when those of `a` are known to have stopped.
    c.add_flow("b", JobRing(0), flow(0, 2)).unwrap();
    c.delete_job("b").unwrap();
    assert_eq!(c.job("a").unwrap().all_flow_keys(), []);
}

#[test]
fn of_several_ways_up_the_first_has_the_addresses() {
    let mut c = controller();
    let leaf = |uplink: &str| members::Members {
        ranks: Some(members::RankRange { first: 0, last: 1 }),
        uplink: Some(uplink.parse().unwrap()),
        ..Default::default()
    };
    let wrong = JobSpec { rings: 2, members: leaf("p2=1,p9=1"), ..spec("a", 4) };
    assert!(
        c.create_job(wrong.clone())
            .unwrap_err()
            .to_string()
            .contains("--uplink p9: netsum has ports")
    );
    c.create_job(JobSpec { members: leaf("p2=1,p3=1"), ..wrong }).unwrap();
    let add = |c: &mut Controller, ring, rank, ifindex| {
        let flow = FlowSpec { ifindex, qpn: Qpn::new(100 + 10 * ring + rank), ..flow(rank, 4) };
        c.add_flow("a", JobRing(ring), flow).map_err(|e| e.to_string())
    };
    let error = add(&mut c, 1, 3, 12).unwrap_err();
    assert!(error.contains("arrives from the parent, at --uplink p3"), "{error}");
    let error = add(&mut c, 1, 0, 12).unwrap_err();
    assert!(error.contains("that is the --uplink"), "{error}");
    let error = add(&mut c, 1, 3, 13).unwrap_err();
    assert!(error.contains("add its flow in ring 0 first: its --uplink p2"), "{error}");
    for (ring, up) in [(0, 12), (1, 13)] {
        for (rank, ifindex) in [(0, 10), (1, 11), (3, up)] {
            add(&mut c, ring, rank, ifindex).unwrap();
        }
    }
    assert_eq!(c.job("a").unwrap().state, State::Active);
    // Rank 3's address is only at p2.
    c.create_job(spec("b", 4)).unwrap();
    let elsewhere = |ifindex| FlowSpec { ifindex, qpn: Qpn::new(7), ..flow(3, 4) };
    let error = c.add_flow("b", JobRing(0), elsewhere(13)).unwrap_err().to_string();
    assert!(
        error.contains("is behind port p3, but is in use by rank 3 of job `a` behind port p2"),
        "{error}"
    );
    c.add_flow("b", JobRing(0), elsewhere(12)).unwrap();
}

#[test]
fn a_routing_box_sends_to_the_next_members_next_hop() {
    let mut c = controller();
    c.set_routers([(11, Some([2, 0, 0, 0, 0, 9]))].into_iter());
    c.create_job(spec("a", 3)).unwrap();
    for (rank, ifindex) in [(0, 10), (1, 11), (2, 12)] {
        c.add_flow("a", JobRing(0), FlowSpec { ifindex, ..flow(rank, 3) }).unwrap();
    }
    let to = HopKey { ring: RingNumber(1), member: 2 };
    let FlowSpec { dst, .. } = flow(1, 3);
    let mac = flow(2, 3).src_mac;
    let edge = RoutedConnection { to, dst, own: [2, 0, 0, 0, 0, 9], port: Some(12), mac };
    assert_eq!(c.routed_connections().collect::<Vec<_>>(), [edge]);
}

fn group_controller() -> (Controller, Instant) {
    let (mut c, now) = (controller(), Instant::now());
    c.create_job(JobSpec { rings: 2, ..spec("a", 4) }).unwrap();
    (c, now)
}

/// Joins all ranks of a group.
fn join_group(c: &mut Controller, name: &str, ranks: u32, now: Instant) -> Vec<Action> {
    let job = c.job(name).unwrap();
    let (rings, epoch) = (job.rings.len().max(1), job.last_epoch + 1);
    let join = |rank: u32| {
        let mut join = join(name, rank, epoch, rank.into(), now);
        join.address.ip = IpAddr::from([10, 0, 0, rank as u8 + 1]);
        let ring = |n: u32| Connection {
            receive_qpn: 512 * ranks + 64 * rank + 2 * n,
            send_qpn: 512 * ranks + 1 + 64 * rank + 2 * n,
            first_psn: 0,
        };
        join.address.rings = (0..rings as u32).map(ring).collect();
        join
    };
    let joins: Vec<_> = (0..ranks).map(join).collect();
    joins.into_iter().flat_map(|join| c.join(join, now).unwrap()).collect()
}

#[test]
fn a_group_is_a_job_of_its_own_until_its_last_rank_leaves() {
    let (mut c, now) = group_controller();
    let used = c.memory_used();
    let open = c.open_group("a", "t", "g1", 2, now).unwrap();
    assert_eq!((open.name.as_str(), open.without_rings), ("a/g1", None));
    let group = c.job("a/g1").unwrap();
    assert_eq!((group.spec.ranks, group.rings.len(), group.spec.mtu), (2, 2, 1024));
    assert_eq!(group.spec.window, c.job("a").unwrap().spec.window);
    // Another member finds it.
    assert_eq!(c.open_group("a", "t", "g1", 2, now).unwrap().actions, []);
    assert!(c.specs().all(|spec| spec.name == "a"), "a start does not create groups again");
    let began = join_group(&mut c, "a/g1", 2, now);
    assert_eq!(replies(&began), [(0, true), (1, true)]);
    let epoch = c.job("a/g1").unwrap().last_epoch;
    assert_eq!(c.leave("a/g1", "t", Rank(0), epoch).unwrap(), []);
    let actions = c.leave("a/g1", "t", Rank(1), epoch).unwrap();
    assert!(
        matches!(&actions[..], [Action::DeleteRing { .. }, Action::DeleteRing { .. }, Action::ForgetEnded(flows)] if flows.len() == 4),
        "{actions:?}"
    );
    assert!(c.job("a/g1").is_err());
    assert_eq!(c.memory_used(), used);
    // Opened again, it does not begin with an epoch that it had.
    c.open_group("a", "t", "g1", 2, now).unwrap();
    assert!(c.job("a/g1").unwrap().last_epoch >= epoch);
    let rest = c.delete_job("a").unwrap();
    assert_eq!(rest.len(), 4);
    assert_eq!((c.jobs().count(), c.memory_used()), (0, 0));
}

#[test]
fn ranks_that_reconnect_find_their_group() {
    let (mut c, now) = group_controller();
    c.open_group("a", "t", "g", 2, now).unwrap();
    join_group(&mut c, "a/g", 2, now);
    // Rank 0 has left and opens it again before rank 1 leaves.
    c.leave("a/g", "t", Rank(0), 1).unwrap();
    c.open_group("a", "t", "g", 2, now).unwrap();
    c.leave("a/g", "t", Rank(1), 1).unwrap();
    assert_eq!(c.job("a/g").unwrap().state, State::Waiting);
    join_group(&mut c, "a/g", 2, now);
    assert_eq!(c.job("a/g").unwrap().last_epoch, 2);
}

#[test]
fn a_group_without_ranks_and_one_that_has_failed_end() {
    let (mut c, now) = group_controller();
    let used = c.memory_used();
    let after = |s| now + Duration::from_secs(s);
    c.open_group("a", "t", "idle", 2, now).unwrap();
    c.tick(after(59));
    assert!(c.job("a/idle").is_ok());
    assert!(!c.tick(after(61)).is_empty());
    c.open_group("a", "t", "silent", 2, after(61)).unwrap();
    join_group(&mut c, "a/silent", 2, after(61));
    c.tick(after(63));
    assert!(
        matches!(&c.job("a/silent").unwrap().state, State::Failed(why) if why.contains("no heartbeat"))
    );
    c.tick(after(72));
    assert!(c.job("a/silent").is_ok(), "its ranks can still read why");
    c.tick(after(74));
    assert_eq!((c.jobs().count(), c.memory_used()), (1, used));
}

#[test]
fn the_end_of_a_jobs_epoch_ends_those_of_its_groups() {
    let (mut c, now) = group_controller();
    c.open_group("a", "t", "g", 2, now).unwrap();
    join_group(&mut c, "a/g", 2, now);
    join_group(&mut c, "a", 4, now);
    c.abort("a", "t", Rank(1), 1, "no more").unwrap();
    let state = &c.job("a/g").unwrap().state;
    let why = "job a has ended: rank 1 gave up: no more";
    assert_eq!(*state, State::Failed(why.to_owned()));
}

#[test]
fn a_group_of_one_hosts_ranks_gives_its_rings_back() {
    let (mut c, now) = group_controller();
    let used = c.memory_used();
    c.open_group("a", "t", "g", 2, now).unwrap();
    let mut all = Vec::new();
    for rank in 0..2 {
        let mut join = join("a/g", rank, 0, rank.into(), now);
        (join.address.ip, join.address.mac) = (IpAddr::from([10, 0, 0, 1]), [2; 6]);
        let more =
            Connection { receive_qpn: 900 + 2 * rank, send_qpn: 901 + 2 * rank, first_psn: 0 };
        join.address.rings.push(more);
        all.extend(c.join(join, now).unwrap());
    }
    assert!(matches!(&all[..2], [Action::DeleteRing { .. }, Action::DeleteRing { .. }]));
    assert_eq!(replies(&all), [(0, true), (1, true)]);
    assert!(c.job("a/g").unwrap().epoch.as_ref().unwrap().on_host_ring);
    assert_eq!(c.memory_used(), used);
}

#[test]
fn groups_are_refused_by_name() {
    let (mut c, now) = group_controller();
    let mut refused = |job: &str, token: &str, group: &str, ranks: u32, words: &str| {
        let error = c.open_group(job, token, group, ranks, now).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused("b", "t", "g", 2, "job `b`: no such job, or the token is wrong");
    refused("a", "u", "g", 2, "job `a`: no such job, or the token is wrong");
    refused("a/g", "u", "g", 2, "job `a/g`: no such job, or the token is wrong");
    refused("a/g", "t", "h", 2, "job `a/g`: no such group");
    refused("a", "t", "g/h", 2, "group `g/h`: must be 1 to 64 of");
    refused("a", "t", "", 2, "group ``: must be");
    refused("a", "t", "g", 1, "group a/g: 1 ranks: must be 2 to 4");
    refused("a", "t", "g", 5, "group a/g: 5 ranks: must be 2 to 4");
    c.open_group("a", "t", "g", 2, now).unwrap();
    let mut refused = |job: &str, group: &str, ranks: u32, words: &str| {
        let error = c.open_group(job, "t", group, ranks, now).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused("a", "g", 3, "group a/g: is open already, with 2 ranks instead of 3");
    refused("a/g", "h", 2, "job `a/g`: is a group itself");
    c.create_job(JobSpec { in_band: true, token: "t".into(), ..spec("in", 2) }).unwrap();
    let error = c.open_group("in", "t", "g", 2, now).unwrap_err().to_string();
    assert!(error.contains("its ranks do not join"), "{error}");
}

#[test]
fn a_job_has_at_most_256_groups_and_32_of_them_have_rings() {
    let (mut c, now) = group_controller();
    let mut without = 0;
    for n in 0..groups::MAX_GROUPS {
        let open = c.open_group("a", "t", &format!("g{n}"), 2, now).unwrap();
        without += usize::from(open.without_rings.is_some_and(|why| {
            assert!(why.to_string().contains("32 groups with rings already"), "{why}");
            true
        }));
    }
    assert_eq!(without, groups::MAX_GROUPS - groups::MAX_WITH_RINGS);
    let error = c.open_group("a", "t", "more", 2, now).unwrap_err().to_string();
    assert!(error.contains("job a has 256 groups already"), "{error}");
    // The last one works without rings, also after a restart of the daemon.
    let last = "a/g255";
    assert_eq!(c.job(last).unwrap().rings, []);
    let began = join_group(&mut c, last, 2, now);
    assert_eq!(replies(&began).len(), began.len());
    assert!(c.job(last).unwrap().epoch.as_ref().unwrap().on_host_ring);
    let c = after_restart(&c);
    assert!(c.job(last).unwrap().epoch.as_ref().unwrap().on_host_ring);
    assert!(c.job(last).unwrap().ring(JobRing(0)).is_err());
}

#[test]
fn a_tenants_limits_count_groups() {
    let (mut c, now) = group_controller();
    let limits = tenant::Limits { jobs: Some(2), ..tenant::Limits::default() };
    c.set_tenants([("default".to_owned(), limits)].into());
    assert_eq!(c.open_group("a", "t", "g", 2, now).unwrap().without_rings, None);
    let why = c.open_group("a", "t", "h", 2, now).unwrap().without_rings.unwrap().to_string();
    assert!(why.contains("jobs limit 2, 2 in use"), "{why}");
}
