//! Many jobs of several tenants on one box: limits, the queue, and all of them at once in the data plane.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use netsum_common::counters::Counter;
use netsum_common::wire;
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, DaemonOptions, PATIENCE, program};
use netsum_lab::frames::{FrameSpec, lanes, sum};
use netsum_lab::lab::Host;
use netsum_lab::process::{Ended, Running};
use netsum_lab::tap::Tap;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// Bytes on the box of a job of [`SHAPE`]: 16 slots of 1024 bytes, two headers and their state.
const ONE: u64 = 16 * (1024 + 2 * 112 + 24);
/// With the usual window, 2.
const SHAPE: [&str; 4] = ["--ranks", "2", "--message-size", "4K"];
const MINUTE: Duration = Duration::from_secs(60);

/// A daemon with room for so many jobs, and further sections in its configuration.
fn start(spec: LabSpec, room: u64, sections: &str) -> Cluster {
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    let listen = format!("[pool]\nmemory = \"{}\"\n{sections}", room * ONE);
    cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
    cluster
}

/// `netsum job create NAME --wait`, under way.
fn create(lab: &netsum_lab::Lab, socket: &str, name: &str, options: &[&str]) -> Running {
    let mut command = lab.box_().command(program("netsum").unwrap());
    command.args(["--socket", socket, "job", "create", name, "--wait"]).args(SHAPE).args(options);
    Running::start(&format!("job create {name}"), &mut command).unwrap()
}

fn tenants(cluster: &Cluster) -> BTreeMap<String, Value> {
    let all = cluster.netsum_json(&["tenant", "show"]).unwrap();
    all.as_array().unwrap().iter().map(|t| (t["name"].as_str().unwrap().to_owned(), t.clone())).collect()
}

/// Ranks of a job on two hosts, on their k-th addresses, sum and leave.
fn reduce(hosts: &[Host], controller: &str, job: &str, token: &str, k: usize) {
    let rank = |rank: usize| {
        let mut perf = hosts[rank].command(program("netsum-perf").unwrap());
        perf.args("all_reduce -b 64K -e 64K --iters 2 --check -j --connect-timeout 30 --ranks 2".split(' '))
            .args(["--controller", controller, "--job", job, "--rank", &rank.to_string()])
            .args(["--ip", &hosts[rank].ip(k).to_string()])
            .env("NETSUM_TOKEN", token);
        Running::start(&format!("rank {rank} of {job}"), &mut perf).unwrap()
    };
    let printed: Vec<String> =
        [rank(0), rank(1)].into_iter().map(|rank| rank.success(MINUTE).unwrap()).collect();
    let said = printed.concat();
    assert!(said.contains("\"by\": \"box\"") && said.contains("\"wrong\": 0"), "{job}: {said}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn sixty_four_jobs_of_four_tenants_take_turns() {
    const ROOM: u64 = 8;
    let limits = [("a", "jobs", 4), ("b", "memory", 2 * ONE), ("c", "slots", 48)];
    let mut sections = limits.iter().fold(String::new(), |mut text, (tenant, what, limit)| {
        let quotes = if *what == "memory" { "\"" } else { "" };
        writeln!(text, "[tenants.{tenant}]\n{what} = {quotes}{limit}{quotes}").unwrap();
        text
    });
    sections += "priority = 1\n";
    let cluster = start(LabSpec { ips_per_host: ROOM as usize, ..LabSpec::hosts(2) }, ROOM, &sections);
    let (lab, socket, controller) = (cluster.lab(), cluster.socket(), cluster.workers().to_string());
    let begin = Instant::now();
    let addresses = Mutex::new((0..ROOM as usize).collect::<Vec<_>>());
    let (mut most_waiting, mut most_jobs, mut looks) = (0, 0, 0);
    std::thread::scope(|s| {
        let threads: Vec<_> = (0..64)
            .map(|n| {
                let (socket, controller, addresses) = (&socket, &controller, &addresses);
                s.spawn(move || {
                    let (name, tenant) = (format!("job{n}"), ["a", "b", "c", "default"][n % 4]);
                    let created = create(lab, socket, &name, &["-j", "--tenant", tenant, "--timeout", "2m"]);
                    let created: Value = serde_json::from_str(&created.success(2 * MINUTE).unwrap()).unwrap();
                    assert_eq!(created["tenant"], tenant);
                    // Who has been admitted has an address to itself: there are as many as places.
                    let k = addresses.lock().unwrap().pop().expect("more jobs than there is room for");
                    reduce(lab.hosts(), controller, &name, created["token"].as_str().unwrap(), k);
                    addresses.lock().unwrap().push(k);
                    let mut delete = lab.box_().command(program("netsum").unwrap());
                    netsum_lab::netns::output(delete.args(["--socket", socket, "job", "delete", &name]))
                        .unwrap();
                })
            })
            .collect();
        while !threads.iter().all(|t| t.is_finished()) {
            let all = tenants(&cluster);
            for (tenant, what, limit) in limits {
                let used = all[tenant][what]["used"].as_u64().unwrap();
                assert!(used <= limit && all[tenant][what]["limit"] == limit, "{}", all[tenant]);
            }
            let sum =
                |f: &dyn Fn(&Value) -> &Value| all.values().map(|t| f(t).as_u64().unwrap()).sum::<u64>();
            assert!(sum(&|t| &t["memory"]["used"]) <= ROOM * ONE);
            most_jobs = most_jobs.max(sum(&|t| &t["jobs"]["used"]));
            most_waiting = most_waiting.max(sum(&|t| &t["waiting"]));
            looks += 1;
            std::thread::sleep(Duration::from_millis(50));
        }
        for thread in threads {
            thread.join().unwrap_or_else(|e| std::panic::resume_unwind(e));
        }
    });
    println!("{:?}: up to {most_jobs} at work, {most_waiting} waiting", begin.elapsed());
    assert!(begin.elapsed() < 2 * MINUTE && looks > 3, "{:?}, {looks} looks", begin.elapsed());
    assert!(most_jobs == ROOM && most_waiting > 20, "{most_jobs} jobs, {most_waiting} waiting");
    assert_eq!(cluster.netsum_json(&["job", "show"]).unwrap(), Value::Array(Vec::new()));
    assert_eq!(cluster.netsum_json(&["ring", "show"]).unwrap(), Value::Array(Vec::new()));
    for (name, t) in tenants(&cluster) {
        let used = ["jobs", "rings", "slots", "memory"].map(|what| t[what]["used"].as_u64().unwrap());
        assert_eq!((used, t["waiting"].as_u64()), ([0; 4], Some(0)), "{name}");
    }
}

fn interrupted(command: Running) -> Ended {
    kill(Pid::from_raw(command.pid() as i32), Signal::SIGINT).unwrap();
    command.end(PATIENCE).unwrap()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_command_waits_for_its_jobs_turn_and_an_interrupt_takes_it_out() {
    let mut cluster = start(LabSpec::hosts(2), 1, "[tenants.small]\njobs = 0\n");
    let (lab, socket) = (cluster.lab(), cluster.socket());
    let shape = |name| [&["job", "create", name][..], &SHAPE].concat();
    cluster.netsum(&shape("first")).unwrap();
    let place = |command: &mut Running| {
        let line = command.line(PATIENCE).unwrap();
        line.split("place ").nth(1).and_then(|l| l.split(" in").next()).unwrap_or(&line).to_owned()
    };
    let mut one = create(lab, &socket, "one", &[]);
    assert_eq!(place(&mut one), "1 of 1");
    let mut two = create(lab, &socket, "two", &["--window", "1..2"]);
    assert_eq!((place(&mut two), place(&mut one)), ("2 of 2".into(), "1 of 2".into()));
    let mut three = create(lab, &socket, "three", &[]);
    assert_eq!((place(&mut three), place(&mut two)), ("3 of 3".into(), "2 of 3".into()));
    let shown = cluster.netsum_json(&["job", "show", "two"]).unwrap();
    assert_eq!((&shown["state"], &shown["queue"]["position"]), (&"queued".into(), &2.into()), "{shown}");
    assert!(shown["queue"]["waits_for"].as_str().unwrap().contains("not enough memory"), "{shown}");
    assert!(shown.get("token").is_none(), "{shown}");

    // An interrupt, and a death without warning.
    let ended = interrupted(one);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(ended.stderr.contains("interrupted: job `one` has left the queue"), "{ended:?}");
    assert_eq!(place(&mut two), "1 of 2");
    three.signal(Signal::SIGKILL).unwrap();
    drop(three);
    assert_eq!(place(&mut two), "1 of 1");

    // Time runs out; and there is no use in waiting for what can never be.
    let late = create(lab, &socket, "late", &["--timeout", "100ms"]).end(PATIENCE).unwrap();
    assert_eq!(late.status.code(), Some(3), "{late:?}");
    assert!(late.stderr.contains("job `late` waited in vain, at last in place 2 of 2"), "{late:?}");
    let never = create(lab, &socket, "never", &["--tenant", "small"]).end(PATIENCE).unwrap();
    assert!(never.stderr.contains("tenant `small`: jobs limit 0, 0 in use, 1 needed"), "{never:?}");

    cluster.netsum(&["job", "delete", "first"]).unwrap();
    let printed = two.success(PATIENCE).unwrap();
    assert!(printed.contains("two: waiting") && printed.contains("window 2 of 1..2"), "{printed}");

    // Limits that are read again let in who waited for them.
    let file = cluster.folder().join("netsum.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let hang_up = |text: &str| {
        std::fs::write(&file, text).unwrap();
        kill(Pid::from_raw(cluster.daemon_pid() as i32), Signal::SIGHUP).unwrap();
    };
    let mut four = create(lab, &socket, "four", &[]);
    assert_eq!(place(&mut four), "1 of 1");
    hang_up(&text.replace(&format!("\"{ONE}\""), &format!("\"{}\"", 2 * ONE)));
    assert!(four.success(PATIENCE).unwrap().contains("four: waiting"));
    hang_up(
        &(text.replace(&format!("\"{ONE}\""), &format!("\"{}\"", 2 * ONE)) + "[tenants.default]\njobs = 1\n"),
    );
    let start = Instant::now();
    while tenants(&cluster)["default"]["jobs"]["limit"] != 1 {
        assert!(start.elapsed() < PATIENCE, "{}", cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(tenants(&cluster)["default"]["jobs"]["used"], 2, "a limit that is lowered ends no job");
    let error = format!("{:#}", cluster.netsum(&shape("five")).unwrap_err());
    assert!(error.contains("tenant `default`: jobs limit 1, 2 in use, 1 needed"), "{error}");
    for name in ["two", "four"] {
        cluster.netsum(&["job", "delete", name]).unwrap();
    }
    assert_eq!(cluster.netsum_json(&["job", "show"]).unwrap(), Value::Array(Vec::new()));

    // Who waits for a daemon that has gone away does so no longer than it wanted to, and can be interrupted.
    cluster.netsum(&shape("six")).unwrap();
    let mut seven = create(lab, &socket, "seven", &[]);
    assert_eq!(place(&mut seven), "1 of 1");
    let mut eight = create(lab, &socket, "eight", &["--timeout", "2s"]);
    assert_eq!(place(&mut eight), "2 of 2");
    cluster.kill_daemon().unwrap();
    let ended = eight.end(PATIENCE).unwrap();
    assert_eq!(ended.status.code(), Some(5), "{ended:?}");
    assert!(ended.stderr.contains("gone away and not come back"), "{ended:?}");
    let ended = interrupted(seven);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(ended.stderr.contains("job `seven` waits up to 120 s for the next one"), "{ended:?}");
    assert!(ended.stderr.contains("interrupted: job `seven` waits no more"), "{ended:?}");
}

/// A daemon whose jobs outlive it, with room for so many.
fn start_pinned(room: u64) -> Cluster {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    cluster.pin();
    start_again(&mut cluster, room);
    cluster
}

fn start_again(cluster: &mut Cluster, room: u64) {
    let listen = format!("[pool]\nmemory = \"{}\"\n", room * ONE);
    cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
}

/// The names of all jobs, those that wait last.
fn jobs(cluster: &Cluster) -> Vec<String> {
    let all = cluster.netsum_json(&["job", "show"]).unwrap();
    all.as_array().unwrap().iter().map(|j| j["name"].as_str().unwrap().to_owned()).collect()
}

/// Waits until these are the jobs that there are.
fn wait_for_jobs(cluster: &Cluster, expected: &[&str]) {
    let start = Instant::now();
    while jobs(cluster) != expected {
        assert!(start.elapsed() < PATIENCE, "{:?}: {}", jobs(cluster), cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn who_waits_keeps_its_place_when_the_daemon_is_killed() {
    let mut cluster = start_pinned(1);
    let socket = cluster.socket();
    cluster.netsum(&[&["job", "create", "first"][..], &SHAPE].concat()).unwrap();
    let mut old = create(cluster.lab(), &socket, "old", &[]);
    wait_for_jobs(&cluster, &["first", "old"]);
    let young = create(cluster.lab(), &socket, "young", &[]);
    wait_for_jobs(&cluster, &["first", "old", "young"]);
    let fickle = create(cluster.lab(), &socket, "fickle", &[]);
    wait_for_jobs(&cluster, &["first", "old", "young", "fickle"]);

    // The older one comes back later, and one not at all.
    old.signal(Signal::SIGSTOP).unwrap();
    cluster.kill_daemon().unwrap();
    let start = Instant::now();
    while !fickle.stderr().contains("the daemon has gone away") {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(20));
    }
    let ended = interrupted(fickle);
    assert!(ended.stderr.contains("interrupted: job `fickle` waits no more"), "{ended:?}");
    start_again(&mut cluster, 1);
    wait_for_jobs(&cluster, &["first", "young"]);
    old.signal(Signal::SIGCONT).unwrap();
    wait_for_jobs(&cluster, &["first", "old", "young"]);

    // The next daemon has room for another one, and gives it to the one that has waited for longer.
    old.signal(Signal::SIGSTOP).unwrap();
    cluster.kill_daemon().unwrap();
    start_again(&mut cluster, 2);
    wait_for_jobs(&cluster, &["first", "young"]);
    let shown = cluster.netsum_json(&["job", "show", "young"]).unwrap();
    assert!(shown["queue"]["waits_for"].as_str().unwrap().contains("others to come back"), "{shown}");
    old.signal(Signal::SIGCONT).unwrap();
    while !old.line(PATIENCE).unwrap().starts_with("old: waiting") {}
    wait_for_jobs(&cluster, &["first", "old", "young"]);
    let said = old.stderr();
    assert_eq!(said.matches("the daemon has gone away; job `old` waits up to 120 s").count(), 2, "{said}");
    old.success(PATIENCE).unwrap();
    cluster.netsum(&["job", "delete", "old"]).unwrap();
    assert!(young.success(PATIENCE).unwrap().contains("young: waiting"));
    assert_eq!(jobs(&cluster), ["first", "young"]);
}

/// The job that a command has waited for is there, and the token that it has printed is that of the job.
fn assert_has_job(cluster: &Cluster, name: &str, command: Running) {
    let created: Value = serde_json::from_str(&command.success(PATIENCE).unwrap()).unwrap();
    let shown = cluster.netsum_json(&["job", "show", name, "--show-token"]).unwrap();
    assert_eq!((&created["token"], &shown["state"]), (&shown["token"], &"waiting".into()), "{shown}");
    assert_eq!(jobs(cluster), [name], "nothing is left behind");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_job_that_is_created_while_the_daemon_is_killed_is_neither_lost_nor_left_behind() {
    let mut cluster = start_pinned(1);
    let socket = cluster.socket();
    cluster.netsum(&[&["job", "create", "turn0"][..], &SHAPE].concat()).unwrap();
    // Killed earlier or later, around the moment in which one job ends and the next one is created.
    for turn in 1..=10 {
        let (before, name) = (format!("turn{}", turn - 1), format!("turn{turn}"));
        let waits = create(cluster.lab(), &socket, &name, &["-j"]);
        wait_for_jobs(&cluster, &[&before, &name]);
        let mut delete = cluster.lab().box_().command(program("netsum").unwrap());
        delete.args(["--socket", &socket, "job", "delete", &before]);
        let delete = Running::start("job delete", &mut delete).unwrap();
        std::thread::sleep(Duration::from_millis(2 * turn));
        cluster.kill_daemon().unwrap();
        drop(delete);
        start_again(&mut cluster, 1);
        if jobs(&cluster).contains(&before) {
            cluster.netsum(&["job", "delete", &before]).unwrap();
        }
        assert_has_job(&cluster, &name, waits);
    }

    // For certain: as if the one job, which is there, were the one that is waited for and that nobody was told of.
    let mut last = cluster.lab().box_().command(program("netsum").unwrap());
    last.args(["-d", "--socket", &socket, "job", "create", "last", "--wait", "-j"]).args(SHAPE);
    let last = Running::start("job create last", &mut last).unwrap();
    wait_for_jobs(&cluster, &["turn10", "last"]);
    cluster.kill_daemon().unwrap();
    let said = last.stderr();
    let since = said.split("QueueJob last, since ").nth(1).and_then(|s| s.split(' ').next()).unwrap();
    let text = std::fs::read_to_string(cluster.state_file()).unwrap();
    let mut state: Value = serde_json::from_str(&text).unwrap();
    state["jobs"][0]["spec"]["name"] = "last".into();
    let since: u64 = since.parse().unwrap();
    state["handed"] = serde_json::json!({ "last": { "since": since, "told": false } });
    std::fs::write(cluster.state_file(), state.to_string()).unwrap();
    start_again(&mut cluster, 1);
    assert_has_job(&cluster, "last", last);
    assert!(cluster.daemon_log().contains("who has waited for it has come back"), "{}", cluster.daemon_log());
}

const JOBS: u32 = 64;
/// Fragments of a message; a ring has twice as many slots.
const FRAGMENTS: u32 = 4;
const MTU: usize = 256;

/// The queue pair on which the rank that is not `rank` receives.
fn qpn(job: u32, rank: u32) -> u32 {
    0x1000 + 2 * job + rank
}

fn payload(job: u32, rank: u32, index: u32) -> Vec<u8> {
    lanes(rank + 2 * (index + 100 * job), MTU / 4)
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn sixty_four_jobs_are_active_at_once() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let lab = cluster.lab();
    let mut commands = String::new();
    for job in 0..JOBS {
        writeln!(commands, "job create j{job} --ranks 2 --mtu {MTU} --message-size 1K --window 1").unwrap();
        for rank in 0..2 {
            let ip = |rank: u32| -> IpAddr { lab.host(rank as usize).ip(0) };
            writeln!(
                commands,
                "flow add j{job} --ring 0 --rank {rank} --port port{rank} --src {} --dst {} --qpn {} --psn {job}",
                ip(rank),
                ip(1 - rank),
                qpn(job, rank)
            )
            .unwrap();
        }
    }
    let file = cluster.folder().join("commands");
    std::fs::write(&file, commands).unwrap();
    cluster.netsum(&["batch", "file", file.to_str().unwrap()]).unwrap();
    let jobs = cluster.netsum_json(&["job", "show"]).unwrap();
    let active = jobs.as_array().unwrap().iter().filter(|j| j["state"] == "active").count();
    assert_eq!(active, JOBS as usize);

    let taps: Vec<Tap> = lab.hosts().iter().map(|host| Tap::open(host, Host::INTERFACE).unwrap()).collect();
    // Three messages: every slot is used again. A message is sent when the sum of the one before has come.
    for message in 0..3 {
        let indices = message * FRAGMENTS..(message + 1) * FRAGMENTS;
        for index in indices.clone() {
            for (job, rank) in (0..JOBS).flat_map(|job| [(job, 0), (job, 1)]) {
                let (from, to) = (rank as u8 + 1, 2 - rank as u8);
                let payload = payload(job, rank, index);
                let frame = FrameSpec::send(from, to, qpn(job, rank), job + index, payload).build();
                taps[rank as usize].send(&frame).unwrap();
            }
        }
        for (receiver, tap) in taps.iter().enumerate() {
            let sender = 1 - receiver as u32;
            // Results of a ring come in order; those of different rings as they like.
            let mut next = vec![message * FRAGMENTS; JOBS as usize];
            for _ in 0..JOBS * FRAGMENTS {
                let is_result = |f: &[u8]| wire::parse(f).is_ok_and(|p| p.bth.opcode.is_rc_data());
                let frame = tap.receive(PATIENCE, is_result).unwrap();
                let parsed = wire::parse(frame.as_slice()).unwrap();
                let job = (parsed.bth.qpn - qpn(0, sender)) / 2;
                let index = next[job as usize];
                assert_eq!((parsed.bth.qpn, parsed.bth.psn), (qpn(job, sender), job + index), "job {job}");
                next[job as usize] += 1;
                let expected = sum(&[payload(job, 0, index), payload(job, 1, index)]);
                let sent = FrameSpec::send(sender as u8 + 1, receiver as u8 + 1, 0, 0, Vec::new());
                assert_eq!(frame[sent.payload_offset()..][..MTU], expected, "job {job}, index {index}");
            }
            assert!(next.iter().all(|&n| n == indices.end), "{next:?}");
        }
    }
    for (counter, expected) in [
        (Counter::Fragments, 2 * JOBS * 3 * FRAGMENTS),
        (Counter::Released, JOBS * 3 * FRAGMENTS),
        (Counter::CreditViolation, 0),
    ] {
        assert_eq!(cluster.counter(None, counter.name()).unwrap(), u64::from(expected), "{}", counter.name());
    }
    let deletes: String = (0..JOBS).map(|job| format!("job delete j{job}\n")).collect();
    std::fs::write(&file, deletes).unwrap();
    cluster.netsum(&["batch", "file", file.to_str().unwrap()]).unwrap();
    assert_eq!(tenants(&cluster)["default"]["memory"]["used"], 0);
}
