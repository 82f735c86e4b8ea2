//! Ranks that reconnect while their job is running, and so return to a box that they had given up:
//! every sum stays right.

use std::ffi::CString;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use netsum_lab::cluster::{
    Cluster, DaemonOptions, Group, JobSpec, Outcome, RankReply, TIMEOUT, one_on_each_host,
};
use netsum_lab::{LabSpec, netns};

const RANKS: u32 = 3;
const SECOND: Duration = Duration::from_secs(1);
const JOB: &str = "renewed";

/// A running job, which outlives the daemon.
fn start(timeout: Duration) -> (Cluster, Group) {
    start_with(timeout, 5 * SECOND)
}

/// The same, with the time after which the daemon takes silent ranks for gone.
fn start_with(timeout: Duration, heartbeat: Duration) -> (Cluster, Group) {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(RANKS as usize)).unwrap();
    cluster.pin();
    start_daemon(&mut cluster, heartbeat);
    let job = JobSpec { message_size: 4096, timeout, ..JobSpec::new(JOB, RANKS) };
    let token = cluster.create_job(&job).unwrap();
    let places: Vec<_> = (0..RANKS as usize).map(|host| (host, 0)).collect();
    let mut group = cluster.ranks(&job, &token, &places).unwrap();
    work(&mut group, 1);
    assert_eq!(epoch(&cluster), 1);
    (cluster, group)
}

fn start_daemon(cluster: &mut Cluster, heartbeat: Duration) {
    let listen =
        format!("[heartbeat]\ninterval-ms = 100\ntimeout-ms = {}\n", heartbeat.as_millis());
    cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
}

fn request_reconnect(cluster: &Cluster) {
    cluster.netsum(&["job", "reconnect", JOB]).unwrap();
}

fn epoch(cluster: &Cluster) -> u64 {
    cluster.netsum_json(&["job", "show", JOB]).unwrap()["epoch"].as_u64().unwrap()
}

/// A few sums, right and by the box. Returns the outcomes of the last.
fn work(group: &mut Group, seed: u64) -> Vec<Outcome> {
    let mut all = Vec::new();
    for (dtype, len) in [("f32", 30_000), ("i32", 100), ("i32", 50_000)] {
        all = group.all_reduce(dtype, len, seed).unwrap();
        for (rank, o) in all.iter().enumerate() {
            assert_eq!(
                (&*o.mode, o.wrong, o.fallbacks),
                ("box", 0, 0),
                "rank {rank}: {o:?}\n{}",
                group.log()
            );
        }
    }
    all
}

/// Works until the ranks have reconnected for the n-th time.
fn work_until(cluster: &Cluster, group: &mut Group, reconnects: u64) {
    let begun = Instant::now();
    for seed in 0.. {
        if work(group, seed).iter().all(|o| o.reconnects == reconnects) {
            break;
        }
        assert!(begun.elapsed() < TIMEOUT, "{}\n{}", group.log(), cluster.daemon_log());
    }
    assert_eq!(epoch(cluster), reconnects + 1);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_that_is_stopped_between_two_operations_ends_nothing() {
    let timeout = 2 * SECOND;
    let (cluster, mut group) = start_with(timeout, timeout);
    let rank = Pid::from_raw(group.pids().nth(1).unwrap().try_into().unwrap());
    kill(rank, Signal::SIGSTOP).unwrap();
    std::thread::sleep(2 * timeout);
    kill(rank, Signal::SIGCONT).unwrap();
    work(&mut group, 2);
    assert_eq!(epoch(&cluster), 1);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_connect_again_when_they_are_asked_to_and_every_sum_is_right() {
    let (cluster, mut group) = start(10 * SECOND);
    for reconnects in 1..=3 {
        request_reconnect(&cluster);
        work_until(&cluster, &mut group, reconnects);
    }
    group
        .log()
        .lines()
        .filter(|line| line.contains("reconnected over"))
        .for_each(|line| println!("{line}"));
    // They have reconnected once for each request.
    for seed in 10..14 {
        assert!(work(&mut group, seed).iter().all(|o| o.reconnects == 3));
    }
    let shown = cluster.netsum_json(&["job", "show", JOB]).unwrap();
    assert_eq!((&shown["state"], &shown["epoch"]), (&"active".into(), &4.into()));
    assert_eq!(cluster.counter(None, "credit_violation").unwrap(), 0);
    drop(group);
    let begun = Instant::now();
    while cluster.netsum_json(&["job", "show", JOB]).unwrap()["state"] == "active" {
        assert!(begun.elapsed() < TIMEOUT);
        std::thread::sleep(SECOND / 20);
    }
    let why = format!("{:#}", cluster.netsum(&["job", "reconnect", JOB]).unwrap_err());
    assert!(why.contains("no ranks that have joined it are at work"), "{why}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_connect_again_while_operations_are_in_flight() {
    const OPERATIONS: [(&str, usize); 7] = [
        ("f32", 20_000),
        ("i32", 100),
        ("f32", 10),
        ("i32", 30_000),
        ("f32", 500),
        ("i32", 1),
        ("f32", 1),
    ];
    let (cluster, mut group) = start(10 * SECOND);
    request_reconnect(&cluster);
    let (begun, mut after) = (Instant::now(), 0);
    // A few more over the new connections.
    for seed in 0.. {
        let outcomes = group.in_flight(&OPERATIONS, 100 * seed).unwrap();
        for (rank, o) in outcomes.iter().enumerate() {
            assert_eq!((&*o.mode, o.wrong, o.fallbacks), ("box", 0, 0), "rank {rank}: {o:?}");
            assert!(after == 0 || o.reconnects == 1, "rank {rank}: {o:?}");
        }
        after += u32::from(outcomes.iter().all(|o| o.reconnects == 1));
        if after > 2 {
            break;
        }
        assert!(begun.elapsed() < TIMEOUT, "{}", cluster.daemon_log());
    }
    assert_eq!(cluster.counter(None, "credit_violation").unwrap(), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_reconnect_after_a_daemon_was_killed_before_they_had() {
    let (mut cluster, mut group) = start(10 * SECOND);
    request_reconnect(&cluster);
    cluster.kill_daemon().unwrap();
    start_daemon(&mut cluster, 5 * SECOND);
    work_until(&cluster, &mut group, 1);
    request_reconnect(&cluster);
    // Rank 0 learns of it.
    std::thread::sleep(SECOND);
    let files = group.order_all_reduce("i32", 50_000, 3).unwrap();
    cluster.kill_daemon().unwrap();
    std::thread::sleep(SECOND);
    start_daemon(&mut cluster, 5 * SECOND);
    group.check_all_reduce("i32", 50_000, 3, &files).unwrap();
    work_until(&cluster, &mut group, 2);
    assert_eq!(cluster.counter(None, "credit_violation").unwrap(), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_that_dies_while_all_connect_again_is_named() {
    // Each case runs in its own lab, all at once, because they wait for timeouts.
    std::thread::scope(|scope| {
        for delay in [0, 20, 60, 120, 300] {
            scope.spawn(move || dies_after(Duration::from_millis(delay)));
        }
    });
}

/// A rank dies this long after the start of the operation with which the ranks reconnect.
fn dies_after(delay: Duration) {
    let (cluster, mut group) = start(2 * SECOND);
    request_reconnect(&cluster);
    std::thread::sleep(SECOND / 2);
    group.order_all_reduce("i32", 1000, 3).unwrap();
    std::thread::sleep(delay);
    group.kill(1).unwrap();
    let begin = Instant::now();
    let first = group.answers(TIMEOUT).unwrap();
    group.order_all_reduce("i32", 1000, 4).unwrap();
    let second = group.answers(TIMEOUT).unwrap();
    assert!(begin.elapsed() < 10 * SECOND, "{:?}", begin.elapsed());
    for ((rank, first), (_, second)) in first.into_iter().zip(second) {
        // The operation after which the ranks reconnect may have completed or not.
        let RankReply::Error(error) =
            (if matches!(first, RankReply::Error(_)) { first } else { second })
        else {
            panic!("rank {rank}: no error")
        };
        println!("killed after {delay:?}, rank {rank} in {:.1?}: {error}", begin.elapsed());
        // A rank whose timeout ended a moment earlier is listed as missing, too.
        let missing = error.split("missing: ").nth(1).is_some_and(|who| who.contains('1'));
        assert!(error.contains("rank 1") || missing, "rank {rank}: {error}");
    }
}

/// Ranks that were asked to reconnect, and could not join because the daemon was killed at that
/// moment.
fn joined_in_vain() -> (Cluster, Group) {
    let (mut cluster, mut group) = start(2 * SECOND);
    request_reconnect(&cluster);
    // Rank 0 learns of it.
    std::thread::sleep(SECOND / 2);
    let files = std::thread::scope(|s| {
        let cluster = &mut cluster;
        s.spawn(move || {
            // By then the ranks have agreed, and wait for the last one.
            std::thread::sleep(3 * SECOND / 2);
            cluster.kill_daemon().unwrap();
        });
        group.order_all_reduce_last_late("i32", 50_000, 3, 3 * SECOND).unwrap()
    });
    let begun = Instant::now();
    group.check_all_reduce("i32", 50_000, 3, &files).unwrap();
    println!("joined in vain for {:.1?}", begun.elapsed());
    // The programs sum without a daemon.
    assert!(work(&mut group, 4).iter().all(|o| o.reconnects == 0));
    let log = group.log();
    assert_eq!(
        log.matches("cannot join again and keeps its connections").count(),
        RANKS as usize,
        "{log}"
    );
    (cluster, group)
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_that_cannot_join_again_continue_and_try_later() {
    let (mut cluster, mut group) = joined_in_vain();
    start_daemon(&mut cluster, 5 * SECOND);
    work_until(&cluster, &mut group, 1);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_that_could_not_join_again_outlive_their_job() {
    let (mut cluster, mut group) = joined_in_vain();
    // As if the daemon was killed after it had changed the maps and before it had changed the file:
    // the next daemon ends the job.
    let text = std::fs::read_to_string(cluster.state_file()).unwrap();
    let mut state: serde_json::Value = serde_json::from_str(&text).unwrap();
    state["jobs"][0]["flows"][0]["base_psn"] = 1.into();
    std::fs::write(cluster.state_file(), state.to_string()).unwrap();
    start_daemon(&mut cluster, 5 * SECOND);
    assert_eq!(cluster.netsum_json(&["job", "show", JOB]).unwrap()["state"], "failed");
    // The ranks join the job again.
    go_on(&cluster, &mut group, |outcomes| {
        outcomes.iter().all(|o| o.mode == "box" && o.reconnects == 1)
    });
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_are_back_on_the_box_when_a_port_that_was_down_is_up() {
    let (cluster, mut group) = start(5 * SECOND);
    let (box_, port) = (cluster.lab().box_(), cluster.lab().box_().port(1));
    let released = || cluster.counter(Some(JOB), "released").unwrap();
    let begun = released() + 500;
    let files = group.order_all_reduce("i32", 8_000_000, 2).unwrap();
    // Until all ranks have begun, they wait for each other, whether or not the box sums.
    while released() < begun {}
    box_.set_link(&port, false).unwrap();
    // Longer than three tenths of the timeout, after which ranks use the hosts' ring.
    std::thread::sleep(5 * SECOND / 2);
    box_.set_link(&port, true).unwrap();
    assert!(all_by("ring", &group.check_all_reduce("i32", 8_000_000, 2, &files).unwrap()));
    back_on_the_box(&cluster, &mut group, 1, Instant::now());
}

/// Detaches the programs from the ports, as if their links had never been pinned.
fn detach(cluster: &Cluster) {
    for version in std::fs::read_dir(cluster.pins()).unwrap() {
        let version = version.unwrap().path();
        for folder in ["links", "guards"] {
            for link in std::fs::read_dir(version.join(folder)).unwrap() {
                std::fs::remove_file(link.unwrap().path()).unwrap();
            }
        }
    }
    // The kernel detaches them a moment later.
    let begun = Instant::now();
    let links = || netns::output(cluster.lab().box_().command("ip").args(["-d", "link"])).unwrap();
    while links().contains("prog/xdp") {
        assert!(begun.elapsed() < TIMEOUT, "{}", links());
    }
}

/// `bpf(2)`, with the first words of the attributes.
fn bpf(command: libc::c_int, attributes: [u64; 2]) -> Result<i32, std::io::Error> {
    // SAFETY: the kernel reads no more than the given size, and both commands write nothing.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, attributes.as_ptr(), size_of_val(&attributes))
    };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(result as i32) }
}

/// Does what `bpftool link detach` does: the program is off the port, and the daemon still holds
/// its link.
fn force_off(cluster: &Cluster, port: &str) {
    const OBJ_GET: libc::c_int = 7;
    const LINK_DETACH: libc::c_int = 34;
    let shown =
        netns::output(cluster.lab().box_().command("ip").args(["-o", "link", "show", port]))
            .unwrap();
    let version = std::fs::read_dir(cluster.pins()).unwrap().next().unwrap().unwrap();
    let pin = version.path().join("links").join(shown.split(':').next().unwrap());
    let path = CString::new(pin.into_os_string().into_encoded_bytes()).unwrap();
    let link = bpf(OBJ_GET, [path.as_ptr() as u64, 0]).unwrap();
    // SAFETY: nothing else owns this descriptor.
    let link = unsafe { OwnedFd::from_raw_fd(link) };
    bpf(LINK_DETACH, [link.as_raw_fd() as u64, 0]).unwrap();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_detached_program_is_reattached_without_errors() {
    const LEN: usize = 8_000_000;
    let (cluster, mut group) = start(5 * SECOND);
    let port = cluster.lab().box_().port(1);
    let attached = || {
        let links = netns::output(cluster.lab().box_().command("ip").args(["-d", "link"])).unwrap();
        links.matches("prog/xdp").count()
    };
    assert_eq!(attached(), RANKS as usize);
    let released = || cluster.counter(Some(JOB), "released").unwrap();
    let begun = released() + 500;
    let files = group.order_all_reduce("i32", LEN, 2).unwrap();
    while released() < begun {}
    force_off(&cluster, &port);
    let off = Instant::now();
    while attached() < RANKS as usize {
        assert!(off.elapsed() < 2 * SECOND, "{}", cluster.daemon_log());
    }
    println!("attached again after {:.2?}", off.elapsed());
    // Meanwhile the port's contributions were dropped, and their sender retransmits them.
    assert!(
        all_by("box", &group.check_all_reduce("i32", LEN, 2, &files).unwrap()),
        "{}",
        group.log()
    );
    println!("summed after {:.2?}", off.elapsed());
    assert!(cluster.counter(Some(JOB), "bypassed_ingress").unwrap() > 0);
    let log = cluster.daemon_log();
    assert_eq!(
        log.matches(&format!("port {port}: the XDP program was detached")).count(),
        1,
        "{log}"
    );
    assert_eq!(epoch(&cluster), 1);
}

/// Runs one all-reduce after the other, all right, until `enough` accepts the outcomes.
fn go_on(cluster: &Cluster, group: &mut Group, mut enough: impl FnMut(&[Outcome]) -> bool) {
    let begun = Instant::now();
    for seed in 0.. {
        let (dtype, len) = [("i32", 20_000), ("f32", 100)][seed as usize % 2];
        let outcomes = group.all_reduce(dtype, len, seed).unwrap();
        if enough(&outcomes) {
            break;
        }
        assert!(
            begun.elapsed() < TIMEOUT,
            "{outcomes:?}\n{}\n{}",
            group.log(),
            cluster.daemon_log()
        );
    }
}

fn all_by(mode: &str, outcomes: &[Outcome]) -> bool {
    outcomes.iter().all(|o| o.mode == mode)
}

/// Works until all ranks are back on the box for the n-th time: at the first attempt, since the
/// next comes four seconds later. Each rank logs it once.
fn back_on_the_box(cluster: &Cluster, group: &mut Group, times: u64, since: Instant) {
    go_on(cluster, group, |outcomes| all_by("box", outcomes));
    let took = since.elapsed();
    println!("back on the box after {took:.2?}");
    assert!(took < 4 * SECOND, "{took:?}\n{}", group.log());
    let mut more = 0;
    go_on(cluster, group, |outcomes| {
        more += 1;
        for o in outcomes {
            assert_eq!((&*o.mode, o.fallbacks, o.reconnects), ("box", times, times), "{o:?}");
        }
        more == 30
    });
    let log = group.log();
    for printed in ["falling back from the box", "the box sums again"] {
        assert_eq!(
            log.matches(printed).count() as u64,
            times * u64::from(RANKS),
            "{printed}: {log}"
        );
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_are_back_on_a_box_that_is_detached_and_attached_again() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(RANKS as usize)).unwrap();
    cluster.pin();
    cluster.start_daemon().unwrap();
    // One rank uses other sockets than the others.
    let job = JobSpec { rings: 2, xdp: vec![1], ..JobSpec::new(JOB, RANKS) };
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(RANKS)).unwrap();
    work(&mut group, 1);
    // The daemon is killed in the middle of an all-reduce, and between two. The box stays away for
    // longer than ranks wait, which is four times as long the second time within a minute.
    for (times, in_the_middle, gone) in [(1, true, 3 * SECOND / 2), (2, false, 5 * SECOND)] {
        let files = group.order_all_reduce("i32", 4_000_000, times).unwrap();
        if !in_the_middle {
            assert!(all_by(
                "box",
                &group.check_all_reduce("i32", 4_000_000, times, &files).unwrap()
            ));
        }
        cluster.kill_daemon().unwrap();
        detach(&cluster);
        if in_the_middle {
            group.check_all_reduce("i32", 4_000_000, times, &files).unwrap();
        }
        let away = Instant::now();
        go_on(&cluster, &mut group, |outcomes| {
            assert!(all_by("ring", outcomes), "{outcomes:?}");
            away.elapsed() > gone
        });
        cluster.start_daemon().unwrap();
        back_on_the_box(&cluster, &mut group, times, Instant::now());
        assert_eq!(epoch(&cluster), times + 1);
    }
    let outcomes = group.all_reduce("i32", 100, 9).unwrap();
    assert!(
        outcomes[1].transport.contains("XDP") && outcomes[0].transport == "UDP",
        "{outcomes:?}"
    );
    assert_eq!(cluster.counter(None, "credit_violation").unwrap(), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_return_to_a_replaced_box_with_their_job() {
    let mut cluster = Cluster::start(LabSpec::hosts(RANKS as usize)).unwrap();
    let job = JobSpec::new(JOB, RANKS);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(RANKS)).unwrap();
    work(&mut group, 1);
    cluster.kill_daemon().unwrap();
    go_on(&cluster, &mut group, |outcomes| all_by("ring", outcomes));
    // The daemon does not know the ranks.
    cluster.start_daemon().unwrap();
    let begun = Instant::now();
    go_on(&cluster, &mut group, |outcomes| {
        assert!(
            all_by("ring", outcomes) && outcomes.iter().all(|o| o.reconnects == 0),
            "{outcomes:?}"
        );
        begun.elapsed() > 3 * SECOND
    });
    let arguments = [job.create_arguments(), vec!["--token".to_owned(), token]].concat();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    cluster.netsum(&arguments).unwrap();
    back_on_the_box(&cluster, &mut group, 1, Instant::now());
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_box_off_the_path_is_tried_ever_more_rarely() {
    let cluster = Cluster::start(LabSpec { ips_per_host: 2, ..LabSpec::hosts(2) }).unwrap();
    let job = JobSpec::new(JOB, 3);
    let token = cluster.create_job(&job).unwrap();
    // Data from rank 0 to rank 1 stays on their host.
    let mut group = cluster.ranks(&job, &token, &[(0, 0), (0, 1), (1, 0)]).unwrap();
    let (begun, mut tries, mut longest) = (Instant::now(), Vec::new(), 0);
    go_on(&cluster, &mut group, |outcomes| {
        assert!(all_by("ring", outcomes) && outcomes.iter().all(|o| o.wrong == 0), "{outcomes:?}");
        if outcomes.iter().all(|o| o.reconnects > tries.len() as u64) {
            tries.push(begun.elapsed().as_secs_f32());
        }
        longest = longest.max(outcomes.iter().map(|o| o.micros).max().unwrap());
        tries.len() == 2 && begun.elapsed().as_secs_f32() > tries[1] + 1.3 * (tries[1] - tries[0])
    });
    println!("tried after {tries:.1?} s; the slowest all-reduce took {longest} us");
    assert!(tries.len() == 2 && tries[1] - tries[0] > 4.0, "{tries:?}");
    assert!(!group.log().contains("the box sums again"), "{}", group.log());
}
