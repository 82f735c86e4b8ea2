//! The daemon's services over real sockets, with a data plane that only records calls: no root, no
//! BPF.

mod common;

use std::net::IpAddr;
use std::time::Duration;

use clap::Parser as _;
use common::{Daemon, join};
use netsum_agent::trace;
use netsum_api::v1 as api;
use netsum_cli::Cli;
use netsum_cli::failure::Kind;
use netsum_common::abi::{Hop, MAX_CAPTURE, MIN_CAPTURE, RingNumber, TraceEvent, traced_by};
use netsum_common::counters::Counter;
use netsum_common::serial::{Psn, Qpn};
use netsum_common::slot::Slot;
use netsum_common::wire::{InBandToken, JobHeader};
use netsum_controller::socket::{self, Access, SocketFile};
use netsum_core::plane::FirstPacket;
use netsum_dataplane::Traced;
use netsum_lab::recorder::RecordedState;
use netsum_program::execute;
use serde_json::{Value, json};
use tokio_stream::StreamExt as _;

#[tokio::test]
async fn a_job_is_made_filled_shown_and_deleted_from_the_command_line() {
    let d = Daemon::start().await;
    let made = d
        .netsum("job create train --ranks 2 --mtu 1024 --message-size 4K --window 2")
        .await
        .unwrap();
    assert!(
        made.contains("train: waiting")
            && made.contains("16 slots x (1024 sum + 2 members x 112 header"),
        "{made}"
    );
    let flow = "flow add train --ring 0 --port p1 --qpn 0x11 --psn 255";
    d.netsum(&format!("{flow} --rank 0 --src 10.0.0.1 --dst 10.0.0.2")).await.unwrap();
    let last = d.netsum(&format!("{flow} --rank 1 --src 10.0.0.2 --dst 10.0.0.1")).await.unwrap();
    assert_eq!(last, "train: active  flows 2/2\n");
    assert_eq!(d.recorded.lock().unwrap().active.len(), 1);
    let shown = d.netsum("-j job show train").await.unwrap();
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((&shown["state"], &shown["flows"][1]["psn"]), (&"active".into(), &255.into()));
    assert!(d.netsum("job list").await.unwrap().starts_with("train: active"));
    assert!(
        d.netsum("slot show train --ring 0")
            .await
            .unwrap()
            .contains("slot 0: index 5  len 1024  incomplete  missing ranks 1")
    );
    let rings = d.netsum("ring show").await.unwrap();
    assert!(rings.starts_with("train ring 0: active  id 1  cpu 4  ranks 2  mtu 1024"), "{rings}");
    let flows = d.netsum("flow show").await.unwrap();
    assert!(
        flows.contains("train ring 0 rank 1: port p1")
            && flows.contains("last psn 0x5 contributions"),
        "{flows}"
    );
    let programs = d.netsum("prog show").await.unwrap();
    assert!(
        programs.contains("7: xdp  ingress") && programs.contains("attached to port p0, port p1"),
        "{programs}"
    );
    let rates = d.netsum("stats --interval 20ms --count 2").await.unwrap();
    assert_eq!(rates.lines().count(), 3, "titles and two intervals: {rates}");
    assert!(d.netsum("port show").await.unwrap().contains("p2"));
    let printed = d.netsum("diagnose train --watch 300ms").await.unwrap();
    assert!(printed.contains("* ring 0 rank 1: no packet has arrived since PSN 0x5"), "{printed}");
    assert!(!d.recorded.lock().unwrap().watching, "note-taking has ended with the answer");
    assert!(d.netsum("stats train").await.unwrap().contains("rx_icrc_encapsulated"));
    d.netsum("job delete train").await.unwrap();
    let recorded = d.recorded.lock().unwrap();
    assert!(recorded.rings.is_empty() && recorded.flows.is_empty());
}

/// A port that is down takes no frame of any rank.
#[tokio::test]
async fn a_held_sum_goes_out_by_another_port_where_the_first_ranks_is_down() {
    let d = Daemon::start().await;
    {
        let mut recorded = d.recorded.lock().unwrap();
        recorded.complete = true;
        recorded.down.insert(10);
    }
    d.netsum("job create train --ranks 2").await.unwrap();
    for (rank, qpn) in [(0, "0x21"), (1, "0x22")] {
        let (src, dst) = (rank + 1, 2 - rank);
        let flow = format!(
            "flow add train --ring 0 --rank {rank} --src 10.0.0.{src} --dst 10.0.0.{dst} --psn 1 \
             --qpn {qpn} --port p{rank}"
        );
        d.netsum(&flow).await.unwrap();
    }
    for _ in 0..500 {
        if let Some(sent) = d.recorded.lock().unwrap().sent.first() {
            assert_eq!(*sent, (0, 11));
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the sum is held");
}

#[tokio::test]
async fn refusals_reach_the_command_line_in_plain_words() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 2").await.unwrap();
    let flow = "flow add train --ring 0 --rank 0 --src 10.0.0.1 --dst 10.0.0.2 --psn 1";
    for (line, expected) in [
        (
            "job create train --ranks 2".to_owned(),
            "job `train` already exists: pick another name or delete it",
        ),
        ("job create big --ranks 64 --window 64".into(), "not enough memory for slots"),
        (
            "job create a --ranks 2 --icrc maybe".into(),
            "--icrc maybe: verify or ignore is possible",
        ),
        ("job create a --ranks two".into(), "invalid value 'two' for '--ranks <N>'"),
        ("job create a --ranks 2 --message-size huge".into(), "a number like 65536"),
        (
            "job create a --ranks 2 --message-size 5G".into(),
            "--message-size 5.0 GiB: less than 4 GiB is possible",
        ),
        ("job create a --ranks 2 --mtu 0".into(), "invalid value '0' for '--mtu <BYTES>'"),
        ("job show nobody".into(), "job `nobody`: no such job"),
        (format!("{flow} --qpn 1 --port eth9"), "--port `eth9`: netsum has ports p0, p1, p2"),
        (format!("{flow} --qpn 0x1000000 --port p0"), "--qpn 0x1000000: more than 24 bits"),
        (
            format!("{flow} --qpn 1 --port p0").replace("--psn 1", "--psn 0xffffffff"),
            "--psn 0xffffffff: more than 24 bits",
        ),
        (format!("{flow} --qpn twelve --port p0"), "a number is expected, decimal or 0x"),
        (format!("{flow} --qpn 1 --port p0 --src-mac 1:2"), "--src-mac `1:2`: six bytes"),
        ("slot show train --ring 4".into(), "--ring 4: the job has rings 0 to 0"),
    ] {
        let error = d.netsum(&line).await.unwrap_err();
        assert!(error.contains(expected), "{line}: {error}");
    }
    // A refusal of the data plane fails the job, with an error.
    let error = d.netsum(&format!("{flow} --qpn 0xbad --port p0")).await.unwrap_err();
    assert!(error.contains("does not like 0xbad"), "{error}");
    assert!(d.netsum("job show train").await.unwrap().contains("failed"));
    // JSON together with a capture file would be lost.
    let (_, result) = d.netsum_both("-j trace --pcap frames.pcapng").await;
    assert_eq!(result.unwrap_err().kind, Kind::Usage);
    let gone =
        Cli::try_parse_from(["netsum", "--socket", "/nowhere/netsum.sock", "job", "list"]).unwrap();
    let error = format!("{:#}", execute(gone, &mut Vec::new()).await.unwrap_err());
    assert!(
        error.contains("no daemon at /nowhere/netsum.sock: is `netsum run` running?"),
        "{error}"
    );
}

/// The first packet of a rank of the job whose first ring is number 1.
fn first_packet(rank: u32, change: fn(&mut FirstPacket)) -> FirstPacket {
    let token = InBandToken([0; 16]); // The data plane has compared it.
    let header =
        JobHeader { dtype: 1, token, ring: 0, rank, ranks: 2, message: 0, fragments: 1, index: 0 };
    let ip = |rank: u32| IpAddr::from([10, 0, 0, rank as u8 + 1]);
    let (src, dst) = (ip(rank), ip((rank + 1) % 2));
    let src_mac = [2, 0, 0, 0, 0, rank as u8 + 1];
    let (ifindex, qpn, psn) = (10 + rank, Qpn::new(0x20 + rank), Psn::new(5));
    let mut packet = FirstPacket {
        job: RingNumber(1),
        header,
        ifindex,
        src,
        src_mac,
        dst,
        qpn,
        psn,
        len: 512,
        only: true,
    };
    change(&mut packet);
    packet
}

#[tokio::test]
async fn an_elastic_job_shows_how_many_ranks_may_join() {
    let d = Daemon::start().await;
    let made = d.netsum("-j job create grows --ranks 4 --min-ranks 2 --mtu 1024").await.unwrap();
    let shown = d.netsum("-j job show grows").await.unwrap();
    for text in [made, shown] {
        let job: Value = serde_json::from_str(&text).unwrap();
        let of = ["ranks", "min_ranks", "max_ranks"].map(|what| job[what].clone());
        assert_eq!(of, [json!(4), json!(2), json!(4)], "{text}");
    }
    assert!(d.netsum("job show grows").await.unwrap().contains("ranks 4 (2 to 4)"));
    let other = d.netsum("-j job create fixed --ranks 2 --mtu 1024").await.unwrap();
    assert!(!other.contains("min_ranks") && !other.contains("max_ranks"), "{other}");
}

#[tokio::test]
async fn a_job_of_floats_shows_its_lsb_and_is_not_for_ranks_of_netsum() {
    let d = Daemon::start().await;
    let create = "job create train --ranks 2 --mtu 1024 --token sesame";
    for (options, why) in [
        ("--dtype bf16", "--dtype bf16: i32 or f32 is possible"),
        ("--lsb -40", "--lsb -40: only with --dtype f32"),
        ("--dtype f32 --lsb x", "--lsb x: not a number"),
        ("--dtype f32 --lsb 61", "--lsb 61: must be -120 to 60"),
    ] {
        let error = d.netsum(&format!("{create} {options}")).await.unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    d.netsum(&format!("{create} --dtype f32 --lsb -30")).await.unwrap();
    let shown: Value = serde_json::from_str(&d.netsum("-j job show train").await.unwrap()).unwrap();
    assert_eq!((&shown["dtype"], &shown["lsb"]), (&json!("f32"), &json!(-30)), "{shown:#}");
    let shown = d.netsum("job show train").await.unwrap();
    assert!(shown.contains("dtype f32  lsb 2^-30") && shown.contains("(2048 sum"), "{shown}");
    let error = d.worker().await.join(join(0, "sesame", 1000)).await.unwrap_err();
    assert!(error.message().contains("create it without --dtype"), "{error}");
    d.netsum("job create usual --ranks 2 --mtu 1024 --dtype f32").await.unwrap();
    assert!(d.netsum("job show usual").await.unwrap().contains("lsb 2^-40"));
    let integers = d.netsum("-j job create integers --ranks 2 --mtu 1024").await.unwrap();
    assert!(!integers.contains("dtype") && !integers.contains("lsb"), "{integers}");
}

#[tokio::test]
async fn a_job_is_set_up_in_band_and_shows_how_far_it_is() {
    let d = Daemon::start().await;
    let made =
        d.netsum("job create train --ranks 2 --mtu 1024 --in-band --token sesame").await.unwrap();
    assert!(made.contains("token in band ") && made.contains("token sesame"), "{made}");
    let in_band =
        made.split("token in band ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    assert_eq!(in_band.len(), 32, "{made}");
    assert_eq!(d.recorded.lock().unwrap().in_band_tokens.len(), 1);
    for line in
        ["job show train", "-j job show train", "job list", "-j job list", "-j flow list train"]
    {
        let shown = d.netsum(line).await.unwrap();
        assert!(!shown.contains("sesame") && !shown.contains(&in_band), "{line}: {shown}");
    }
    let shown = d.netsum("job show train --show-token").await.unwrap();
    assert!(shown.contains(&in_band), "{shown}");
    // Registering flows or joining by other means is refused.
    let flow =
        "flow add train --ring 0 --rank 0 --src 10.0.0.1 --dst 10.0.0.2 --psn 1 --qpn 1 --port p0";
    assert!(d.netsum(flow).await.unwrap_err().contains("in band"));
    let error = d.worker().await.join(join(0, "sesame", 1000)).await.unwrap_err();
    assert!(error.message().contains("is set up in band, ranks cannot join"), "{error}");

    let show = async |so: fn(&Value) -> bool| {
        for _ in 0..500 {
            let shown: Value =
                serde_json::from_str(&d.netsum("-j job show train").await.unwrap()).unwrap();
            if so(&shown) {
                return shown;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{}", d.netsum("-p job show train").await.unwrap());
    };
    let note = |packet| d.recorded.lock().unwrap().first_packets.push(packet);
    note(first_packet(1, |_| ()));
    let shown = show(|j| j["in_band"]["claims"][0]["rank"] == 1).await;
    assert_eq!(shown["in_band"]["unclaimed"], json!([{ "ring": 0, "rank": 0 }]), "{shown:#}");
    let printed = d.netsum("diagnose train --watch 10ms").await.unwrap();
    assert!(printed.contains("* ring 0 rank 0: has not shown up"), "{printed}");
    note(first_packet(1, |p| p.ifindex = 12));
    let shown = show(|j| j["in_band"]["refusals"][0].is_string()).await;
    assert_eq!(shown["state"], "waiting", "{shown:#}");
    note(first_packet(0, |p| p.header.ranks = 7));
    let shown = show(|j| j["state"] == "failed").await;
    assert!(
        shown["error"].as_str().unwrap().contains("says that there are 7 ranks, the job has 2"),
        "{shown:#}"
    );
    note(first_packet(0, |_| ()));
    let shown = show(|j| j["state"] == "active").await;
    assert_eq!(
        (&shown["epoch"], shown["flows"].as_array().unwrap().len()),
        (&1.into(), 2),
        "{shown:#}"
    );
    assert_eq!(d.recorded.lock().unwrap().active.len(), 1);
    d.netsum("job delete train").await.unwrap();
    let recorded = d.recorded.lock().unwrap();
    assert!(recorded.in_band_tokens.is_empty() && recorded.flows.is_empty());
}

#[tokio::test]
async fn ranks_that_join_again_have_the_next_hops_that_were_known() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 2 --token secret").await.unwrap();
    let own = [2, 0, 0, 0, 0, 9];
    d.shared.lock().controller.set_routers([(10, Some(own))].into_iter());
    let mut known = Vec::new();
    for dst in [[0; 6], [2, 0, 0, 0, 0, 7]] {
        let joins = (0..2).map(|rank| {
            let worker = d.worker();
            async move { worker.await.join(join(rank, "secret", 5000)).await.unwrap().into_inner() }
        });
        let epoch = futures::future::join_all(joins).await.remove(0).job.unwrap().epoch;
        known.push(d.recorded.lock().unwrap().hops.values().all(|hop| hop.dst == dst));
        {
            let mut inner = d.shared.lock();
            let edges: Vec<_> = inner.controller.routed_connections().collect();
            let hop = Hop { own, dst: [2, 0, 0, 0, 0, 7], src: own };
            inner.executor.next_hops =
                edges.iter().map(|edge| ((edge.dst, edge.own), hop)).collect();
        }
        for rank in 0..2 {
            let leave =
                api::LeaveRequest { job: "train".into(), token: "secret".into(), rank, epoch };
            d.worker().await.leave(leave).await.unwrap();
        }
    }
    assert_eq!((known, d.recorded.lock().unwrap().hops.len()), (vec![true; 2], 2));
}

#[tokio::test]
async fn reconnecting_before_the_first_sum_creates_rings_once() {
    const RINGS: u32 = 16;
    let d = Daemon::start().await;
    let job = format!(
        "job create train --ranks 2 --mtu 1024 --rings {RINGS} --message-size 4K --in-band \
         --token sesame"
    );
    d.netsum(&job).await.unwrap();
    // Notes the first packets of all connections at once.
    let connect = async |base_qpn: u32| {
        let places = (0..RINGS).flat_map(|ring| (0..2).map(move |rank| (ring, rank)));
        let packet = |(ring, rank)| {
            let mut packet =
                first_packet(rank, |p| (p.len, p.only, p.header.fragments) = (1024, false, 4));
            (packet.header.ring, packet.qpn) = (ring, Qpn::new(base_qpn + 2 * ring + rank));
            packet
        };
        d.recorded.lock().unwrap().first_packets = places.map(packet).collect();
        for _ in 0..500 {
            let is_new =
                |recorded: &RecordedState| recorded.flows.iter().all(|flow| flow.qpn >= base_qpn);
            let is_done = |recorded: &RecordedState| {
                is_new(recorded) && recorded.active.len() == RINGS as usize
            };
            if is_done(&d.recorded.lock().unwrap()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{}", d.netsum("-p job show train").await.unwrap());
    };
    let made_and_paused = || {
        let recorded = d.recorded.lock().unwrap();
        (recorded.made, recorded.pauses)
    };
    // All rings of a job are created by one change of the data plane.
    assert_eq!(d.recorded.lock().unwrap().changes, 1);
    connect(0x100).await;
    assert_eq!(made_and_paused(), (RINGS, 0));
    connect(0x200).await;
    assert_eq!(made_and_paused(), (2 * RINGS, 1));
}

#[tokio::test]
async fn ranks_join_over_tcp_and_learn_of_each_other() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 3 --token secret").await.unwrap();
    let replies = (0..3).map(|rank| {
        let worker = d.worker();
        async move { worker.await.join(join(rank, "secret", 5000)).await.unwrap().into_inner() }
    });
    for reply in futures::future::join_all(replies).await {
        assert_eq!(reply.ranks.len(), 3);
        assert_eq!(reply.ranks[2].rings[0].receive_qpn, 34);
        let job = reply.job.unwrap();
        assert_eq!((job.state(), job.epoch, job.token.as_str()), (api::JobState::Active, 1, ""));
    }
    assert_eq!(d.recorded.lock().unwrap().flows.len(), 3);
    // The remaining ranks send no heartbeats: the job fails, naming them, and its flows are
    // removed.
    let leave =
        api::LeaveRequest { job: "train".into(), token: "secret".into(), rank: 0, epoch: 1 };
    d.worker().await.leave(leave).await.unwrap();
    let failed = async {
        loop {
            let (job, token) = ("train".into(), "secret".into());
            let describe = api::DescribeRequest { job, token };
            let reply = d.worker().await.describe(describe).await.unwrap().into_inner();
            if reply.state() == api::JobState::Failed {
                return reply.error;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let error = tokio::time::timeout(Duration::from_secs(5), failed).await.unwrap();
    assert!(error.contains("ranks 1, 2: no heartbeat for"), "{error}");
    assert!(d.recorded.lock().unwrap().flows.is_empty());
}

#[tokio::test]
async fn one_non_selective_rank_makes_the_ring_in_order() {
    for (ranks, order) in [([true, true], "relaxed"), ([true, false], "in-order")] {
        let d = Daemon::start().await;
        d.netsum("job create train --ranks 2 --token secret").await.unwrap();
        let replies = ranks.into_iter().zip(0..).map(|(selective, rank)| {
            let mut request = join(rank, "secret", 5000);
            request.address.as_mut().unwrap().selective = selective;
            let worker = d.worker();
            async move { worker.await.join(request).await.unwrap().into_inner() }
        });
        for reply in futures::future::join_all(replies).await {
            assert_eq!(reply.job.unwrap().order, order);
            assert_eq!(reply.ranks.iter().map(|r| r.selective).collect::<Vec<_>>(), ranks);
        }
    }
}

#[tokio::test]
async fn unauthorised_and_late_ranks_hear_why() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 3 --token secret").await.unwrap();
    let denied = d.worker().await.join(join(0, "guess", 1000)).await.unwrap_err();
    assert_eq!(denied.code(), tonic::Code::Unauthenticated);
    let describe = api::DescribeRequest { job: "other".into(), token: "secret".into() };
    let unknown = d.worker().await.describe(describe).await.unwrap_err();
    assert_eq!(
        unknown.code(),
        tonic::Code::Unauthenticated,
        "a caller without a token does not learn whether there is such a job"
    );
    let late = d.worker().await.join(join(1, "secret", 200)).await.unwrap_err();
    assert_eq!(late.code(), tonic::Code::DeadlineExceeded);
    assert!(late.message().contains("missing: 0, 2"), "{}", late.message());
    let mut nonsense = join(0, "secret", 200);
    nonsense.address.as_mut().unwrap().mac = "zz".into();
    let error = d.worker().await.join(nonsense).await.unwrap_err();
    assert!(error.message().contains("rank 0: mac `zz`: six bytes"), "{}", error.message());
}

#[tokio::test]
async fn a_rank_whose_process_ended_while_it_waited_may_come_again() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 2 --token secret").await.unwrap();
    let mut gone = d.worker().await;
    let waits = tokio::spawn(async move { gone.join(join(0, "secret", 60_000)).await });
    let has_joined =
        |n: usize| d.shared.lock().controller.job("train").unwrap().joined().len() == n;
    let until = async |n: usize| {
        while !has_joined(n) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), until(1)).await.unwrap();
    waits.abort();
    tokio::time::timeout(Duration::from_secs(5), until(0)).await.unwrap();
    // With other queue pairs, as in a new process.
    let mut again = join(0, "secret", 5000);
    again.address.as_mut().unwrap().bypass.as_mut().unwrap().first_psn = 99;
    let (mut one, mut other) = (d.worker().await, d.worker().await);
    let (one, other) = tokio::join!(one.join(again), other.join(join(1, "secret", 5000)));
    assert_eq!(
        (one.unwrap().into_inner().ranks.len(), other.unwrap().into_inner().ranks.len()),
        (2, 2)
    );
}

#[tokio::test]
async fn a_socket_left_by_a_killed_daemon_is_replaced_and_a_live_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/netsum.sock");
    let first = socket::listen(&path, &Access::default()).unwrap();
    assert!(
        format!("{:#}", socket::listen(&path, &Access::default()).unwrap_err())
            .contains("another `netsum run` listens there already")
    );
    drop(first);
    socket::listen(&path, &Access::default()).unwrap();

    // If two daemons start at once, the later one gets the path, and the other does not remove its
    // file.
    let file = SocketFile::new(path.clone());
    std::fs::remove_file(&path).unwrap();
    let _later = socket::listen(&path, &Access::default()).unwrap();
    drop(file);
    assert!(path.exists());
    drop(SocketFile::new(path.clone()));
    assert!(!path.exists());
}

#[tokio::test]
async fn a_diagnosis_names_the_ranks_that_have_not_joined() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 3 --token secret").await.unwrap();
    let mut worker = d.worker().await;
    let waits = tokio::spawn(async move { worker.join(join(1, "secret", 5000)).await });
    let printed = loop {
        let printed = d.netsum("-j diagnose train --watch 20ms").await.unwrap();
        let printed: serde_json::Value = serde_json::from_str(&printed).unwrap();
        if printed["findings"].as_array().unwrap().len() < 3 {
            break printed;
        }
    };
    let of = |i: usize| {
        (printed["findings"][i]["rank"].as_u64(), printed["findings"][i]["what"].as_str())
    };
    assert_eq!(
        [of(0), of(1)],
        [(Some(0), Some("has not joined")), (Some(2), Some("has not joined"))]
    );
    waits.abort();
}

/// A traced contribution of a rank, as the data plane notes it.
fn traced(ring: RingNumber, rank: u32, index: u32, counter: Counter) -> Traced {
    let event = TraceEvent {
        time: 0,
        counters: counter.bit(),
        contributors: 1 << rank,
        ring: ring.0,
        rank,
        index,
        low: 3,
        expected: 5,
        slot_index: index,
        slot_flags: Slot::USED,
        ifindex: 11,
        program: traced_by::AGGREGATE,
        len: 1086,
        captured: 60,
        cpu: 4,
    };
    Traced { event, frame: vec![0; 60] }
}

#[tokio::test]
async fn a_trace_shows_what_is_wanted_and_ends_with_its_client() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 2").await.unwrap();
    let ring = *d.recorded.lock().unwrap().rings.keys().next().unwrap();
    {
        let mut recorded = d.recorded.lock().unwrap();
        recorded.lost = 7;
        recorded.traced = vec![
            traced(ring, 1, 3, Counter::Contributions),
            traced(ring, 0, 4, Counter::Contributions),
            traced(ring, 1, 4, Counter::DuplicateRequest),
            traced(RingNumber(9), 1, 5, Counter::Contributions),
            traced(ring, 1, 6, Counter::Contributions),
        ];
    }
    let lines =
        d.netsum("-j trace --job train --rank 1 --verdict contributions --count 2").await.unwrap();
    let lines: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let of = |i: usize| [&lines[i]["slot"]["index"], &lines[i]["slot"]["gap"], &lines[i]["lost"]];
    assert_eq!(of(0), [3, 0, 0], "what was lost before it began is not its business");
    assert_eq!(of(1), [6, 1, 0]);
    assert_eq!(
        (&lines[1]["port"], &lines[1]["job"], lines.len()),
        (&"p1".into(), &"train".into(), 2)
    );
    // The client has disconnected, and the filter is removed with it.
    let start = std::time::Instant::now();
    while d.recorded.lock().unwrap().tracing.is_some() {
        assert!(start.elapsed() < Duration::from_secs(10), "the data plane goes on tracing");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }

    // Two clients at once: the data plane notes what both want, and reports losses to both.
    let shared = d.shared.clone();
    let begin = |verdict: &str, capture: u32| {
        let verdicts = vec![verdict.to_owned()];
        trace::begin(&shared, &api::TraceRequest { verdicts, capture, ..Default::default() })
            .unwrap()
    };
    let (mut one, other) = (begin("stale", 0), begin("drop", 9999));
    let filter = d.recorded.lock().unwrap().tracing.unwrap();
    assert_eq!(filter.capture as usize, MAX_CAPTURE);
    assert_ne!(filter.counters & Counter::BadIcrc.bit(), 0);
    assert_eq!(filter.counters & Counter::Contributions.bit(), 0);
    drop(other);
    let filter = d.recorded.lock().unwrap().tracing.unwrap();
    assert_eq!((filter.counters, filter.capture), (Counter::Stale.bit(), MIN_CAPTURE));
    d.recorded.lock().unwrap().lost = 12;
    assert_eq!(one.next().await.unwrap().unwrap(), api::TraceReply::default());
    assert_eq!(one.next().await.unwrap().unwrap().lost, 5);
    drop(one);
    assert_eq!(d.recorded.lock().unwrap().tracing, None);
}

#[tokio::test]
async fn exit_codes_tell_usage_refusal_absence_and_no_daemon_apart() {
    let d = Daemon::start().await;
    d.netsum("job create train --ranks 2").await.unwrap();
    for (line, kind) in [
        ("job create a --ranks two", Kind::Usage),
        ("flow add train", Kind::Usage),
        ("frobnicate", Kind::Usage),
        ("stats --interval 0s", Kind::Usage),
        ("job create train --ranks 2", Kind::Refused),
        ("job create big --ranks 64 --window 64", Kind::Refused),
        ("job create a --ranks 2 --icrc maybe", Kind::Refused),
        ("diagnose train --watch 1h", Kind::Refused),
        ("trace --job nobody", Kind::NotFound),
        ("trace --ring 0", Kind::Usage),
        ("trace --snaplen 200", Kind::Usage),
        ("trace --job train --ring 1", Kind::Refused),
        ("trace --verdict nonsense", Kind::Refused),
        ("simulate /nowhere/frames.pcap", Kind::Failed),
        ("simulate frames.pcap --map eth0", Kind::Usage),
        ("job show nobody", Kind::NotFound),
        ("ring show nobody", Kind::NotFound),
        ("stats --interval 1s nobody", Kind::NotFound),
        ("port show eth9", Kind::NotFound),
        ("prog show gone", Kind::NotFound),
    ] {
        let (out, result) = d.netsum_both(line).await;
        let failure = result.expect_err(line);
        assert_eq!((failure.kind, out.as_str()), (kind, ""), "{line}: {failure}");
        if kind == Kind::Usage {
            continue;
        }
        // The same in JSON, on standard output.
        let (out, result) = d.netsum_both(&format!("-j {line}")).await;
        let printed: serde_json::Value =
            serde_json::from_str(&out).unwrap_or_else(|e| panic!("{line}: {e}: {out}"));
        assert_eq!(printed["error"].as_str(), Some(failure.message.as_str()), "{line}");
        assert_eq!(
            (printed["exit"].as_u64(), result.unwrap_err().message.as_str()),
            (Some(kind as u64), "")
        );
    }
    let gone =
        Cli::try_parse_from(["netsum", "--socket", "/nowhere/netsum.sock", "job", "list"]).unwrap();
    assert_eq!(execute(gone, &mut Vec::new()).await.unwrap_err().kind, Kind::NoDaemon);
}

#[tokio::test]
async fn a_job_that_does_not_fit_is_refused_with_what_would() {
    let d = Daemon::start().await;
    // 5.1 of 8 MiB.
    let large = "--ranks 2 --mtu 1024 --message-size 256K --window 4 --rings 2";
    d.netsum(&format!("job create first {large}")).await.unwrap();
    let (_, refused) = d.netsum_both(&format!("job create second {large}")).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind, Kind::Refused);
    assert!(refused.message.starts_with("not enough memory for slots: 2 rings x"), "{refused}");
    assert!(refused.message.ends_with("--window 2 would fit"), "{refused}");
    assert_eq!(d.recorded.lock().unwrap().rings.len(), 2);
    d.netsum("job delete first").await.unwrap();
    d.netsum(&format!("job create second {large}")).await.unwrap();
    let tenant = d.netsum("tenant").await.unwrap();
    assert!(
        tenant.starts_with("default: configured") && tenant.contains("jobs 1/no limit"),
        "{tenant}"
    );
    assert_eq!(
        d.netsum("tenant show nobody").await.unwrap_err(),
        "TENANT `nobody` does not exist: there are default"
    );
}
