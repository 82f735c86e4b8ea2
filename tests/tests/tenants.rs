//! Many jobs of several tenants on one box: limits, refusals, and all jobs at once in the data
//! plane.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use netsum_common::counters::Counter;
use netsum_common::wire;
use netsum_lab::cluster::{Cluster, DaemonOptions, TIMEOUT, program};
use netsum_lab::frames::{FrameSpec, lanes, sum};
use netsum_lab::lab::Host;
use netsum_lab::netns::output;
use netsum_lab::process::Running;
use netsum_lab::tap::Tap;
use netsum_lab::{Lab, LabSpec};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// Bytes on the box for a job of [`SHAPE`]: 16 slots of 1024 bytes, two headers and their state.
const ONE: u64 = 16 * (1024 + 2 * 112 + 24);
const SHAPE: [&str; 8] = ["--ranks", "2", "--mtu", "1024", "--message-size", "4K", "--window", "2"];
const MINUTE: Duration = Duration::from_secs(60);

/// A daemon with room for this many jobs, and further sections in its configuration.
fn start(spec: LabSpec, room: u64, sections: &str) -> Cluster {
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    let listen = format!("[pool]\nmemory = \"{}\"\n{sections}", room * ONE);
    cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
    cluster
}

/// Runs `netsum job create NAME` with the common shape. The error says why the job was refused.
fn create(lab: &Lab, socket: &str, name: &str, options: &[&str]) -> Result<Value, String> {
    let mut command = lab.box_().command(program("netsum").unwrap());
    command.args(["--socket", socket, "-j", "job", "create", name]).args(SHAPE).args(options);
    let ended =
        Running::start(&format!("job create {name}"), &mut command).unwrap().end(TIMEOUT).unwrap();
    match ended.status.code() {
        Some(0) => Ok(serde_json::from_str(&ended.stdout).unwrap()),
        Some(3) => Err(ended.stdout),
        _ => panic!("{ended:?}"),
    }
}

fn tenants(cluster: &Cluster) -> BTreeMap<String, Value> {
    let all = cluster.netsum_json(&["tenant", "show"]).unwrap();
    all.as_array()
        .unwrap()
        .iter()
        .map(|t| (t["name"].as_str().unwrap().to_owned(), t.clone()))
        .collect()
}

/// Ranks of a job on two hosts, on their k-th addresses, sum and leave.
fn reduce(hosts: &[Host], controller: &str, job: &str, token: &str, k: usize) {
    let rank = |rank: usize| {
        let mut perf = hosts[rank].command(program("netsum-perf").unwrap());
        perf.args(
            "all_reduce -b 64K -e 64K --iters 2 --check -j --connect-timeout 30 --ranks 2"
                .split(' '),
        )
        .args(["--controller", controller, "--job", job, "--rank", &rank.to_string()])
        .args(["--ip", &hosts[rank].ip(k).to_string()])
        .env("NETSUM_TOKEN", token);
        Running::start(&format!("rank {rank} of {job}"), &mut perf).unwrap()
    };
    let printed: Vec<String> =
        [rank(0), rank(1)].into_iter().map(|rank| rank.success(MINUTE).unwrap()).collect();
    let all_printed = printed.concat();
    assert!(
        all_printed.contains("\"by\": \"box\"") && all_printed.contains("\"wrong\": 0"),
        "{job}: {all_printed}"
    );
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn jobs_of_four_tenants_that_try_again_fill_the_box_and_never_a_limit() {
    const ROOM: u64 = 8;
    let limits = [("a", "jobs", 4), ("b", "memory", 2 * ONE), ("c", "slots", 48)];
    let sections = limits.iter().fold(String::new(), |mut text, (tenant, what, limit)| {
        let quotes = if *what == "memory" { "\"" } else { "" };
        writeln!(text, "[tenants.{tenant}]\n{what} = {quotes}{limit}{quotes}").unwrap();
        text
    });
    let cluster =
        start(LabSpec { ips_per_host: ROOM as usize, ..LabSpec::hosts(2) }, ROOM, &sections);
    let (lab, socket, controller) =
        (cluster.lab(), cluster.socket(), cluster.workers().to_string());
    let begin = Instant::now();
    let addresses = Mutex::new((0..ROOM as usize).collect::<Vec<_>>());
    let (refusals, mut most_jobs, mut looks) = (AtomicU32::new(0), 0, 0);
    std::thread::scope(|s| {
        let threads: Vec<_> = (0..24)
            .map(|n| {
                let (socket, controller, addresses, refusals) =
                    (&socket, &controller, &addresses, &refusals);
                s.spawn(move || {
                    let (name, tenant) = (format!("job{n}"), ["a", "b", "c", "default"][n % 4]);
                    let created = loop {
                        match create(lab, socket, &name, &["--tenant", tenant]) {
                            Ok(created) => break created,
                            Err(why) => {
                                let named = why.contains(&format!("tenant `{tenant}`: "));
                                assert!(
                                    named || why.contains("not enough memory for slots: "),
                                    "{why}"
                                );
                                assert!(begin.elapsed() < 2 * MINUTE, "{why}");
                                refusals.fetch_add(1, Ordering::Relaxed);
                                std::thread::sleep(Duration::from_millis(200));
                            }
                        }
                    };
                    assert_eq!(created["tenant"], tenant);
                    // Each job has its own address: there are as many addresses as places.
                    let k =
                        addresses.lock().unwrap().pop().expect("more jobs than there is room for");
                    reduce(lab.hosts(), controller, &name, created["token"].as_str().unwrap(), k);
                    addresses.lock().unwrap().push(k);
                    let mut delete = lab.box_().command(program("netsum").unwrap());
                    output(delete.args(["--socket", socket, "job", "delete", &name])).unwrap();
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
                |what: &str| all.values().map(|t| t[what]["used"].as_u64().unwrap()).sum::<u64>();
            assert!(sum("memory") <= ROOM * ONE);
            most_jobs = most_jobs.max(sum("jobs"));
            looks += 1;
            std::thread::sleep(Duration::from_millis(50));
        }
        for thread in threads {
            thread.join().unwrap_or_else(|e| std::panic::resume_unwind(e));
        }
    });
    let refusals = refusals.into_inner();
    println!("{:?}: up to {most_jobs} at work, {refusals} refusals", begin.elapsed());
    assert!(
        looks > 3 && most_jobs == ROOM && refusals > 16,
        "{most_jobs} jobs, {refusals} refusals"
    );
    assert_eq!(cluster.netsum_json(&["job", "show"]).unwrap(), Value::Array(Vec::new()));
    assert_eq!(cluster.netsum_json(&["ring", "show"]).unwrap(), Value::Array(Vec::new()));
    for (name, t) in tenants(&cluster) {
        let used =
            ["jobs", "rings", "slots", "memory"].map(|what| t[what]["used"].as_u64().unwrap());
        assert_eq!(used, [0; 4], "{name}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_job_that_does_not_fit_is_refused_until_there_is_room() {
    let cluster = start(LabSpec::hosts(2), 1, "[tenants.small]\njobs = 0\n");
    let create =
        |name: &str, options: &[&str]| create(cluster.lab(), &cluster.socket(), name, options);
    create("first", &[]).unwrap();
    let refused = |name: &str, options: &[&str], expected: &str| {
        let why = create(name, options).unwrap_err();
        assert!(why.contains(expected), "{why}");
    };
    refused("second", &[], "not enough memory for slots: 1 rings x 16 slots x");
    refused("second", &[], "0 B of 19.9 KiB are free");
    refused("never", &["--tenant", "small"], "tenant `small`: jobs limit 0, 0 in use, 1 needed");
    cluster.netsum(&["job", "delete", "first"]).unwrap();
    create("second", &[]).unwrap();

    // The daemon reads the limits again.
    let file = cluster.folder().join("netsum.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let hang_up = |text: &str| {
        std::fs::write(&file, text).unwrap();
        kill(Pid::from_raw(cluster.daemon_pid() as i32), Signal::SIGHUP).unwrap();
    };
    let text = text.replace(&format!("\"{ONE}\""), &format!("\"{}\"", 2 * ONE));
    hang_up(&text);
    let begin = Instant::now();
    while let Err(why) = create("third", &[]) {
        assert!(begin.elapsed() < TIMEOUT, "{why}\n{}", cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
    hang_up(&(text + "[tenants.default]\njobs = 1\n"));
    let begin = Instant::now();
    while tenants(&cluster)["default"]["jobs"]["limit"] != 1 {
        assert!(begin.elapsed() < TIMEOUT, "{}", cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(
        tenants(&cluster)["default"]["jobs"]["used"],
        2,
        "a limit that is lowered ends no job"
    );
    refused("fourth", &[], "tenant `default`: jobs limit 1, 2 in use, 1 needed");
}

const JOBS: u32 = 64;
/// Fragments per message; a ring has twice as many slots.
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
    let netsum = |line: String| {
        let words: Vec<&str> = line.split_whitespace().collect();
        cluster.netsum(&words).unwrap();
    };
    for job in 0..JOBS {
        netsum(format!("job create j{job} --ranks 2 --mtu {MTU} --message-size 1K --window 1"));
        for rank in 0..2 {
            let ip = |rank: u32| -> IpAddr { lab.host(rank as usize).ip(0) };
            netsum(format!(
                "flow add j{job} --ring 0 --rank {rank} --port port{rank} --src {} --dst {} --qpn \
                 {} --psn {job}",
                ip(rank),
                ip(1 - rank),
                qpn(job, rank)
            ));
        }
    }
    let jobs = cluster.netsum_json(&["job", "show"]).unwrap();
    let active = jobs.as_array().unwrap().iter().filter(|j| j["state"] == "active").count();
    assert_eq!(active, JOBS as usize);

    let taps: Vec<Tap> =
        lab.hosts().iter().map(|host| Tap::open(host, Host::INTERFACE).unwrap()).collect();
    // Three messages reuse every slot. A message is sent when the sum of the previous one has
    // arrived.
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
            // Results of one ring arrive in order; those of different rings arrive in any order.
            let mut next = vec![message * FRAGMENTS; JOBS as usize];
            for _ in 0..JOBS * FRAGMENTS {
                let is_result = |f: &[u8]| wire::parse(f).is_ok_and(|p| p.bth.opcode.is_rc_data());
                let frame = tap.receive(TIMEOUT, is_result).unwrap();
                let parsed = wire::parse(frame.as_slice()).unwrap();
                let job = (parsed.bth.qpn - qpn(0, sender)) / 2;
                let index = next[job as usize];
                assert_eq!(
                    (parsed.bth.qpn, parsed.bth.psn),
                    (qpn(job, sender), job + index),
                    "job {job}"
                );
                next[job as usize] += 1;
                let expected = sum(&[payload(job, 0, index), payload(job, 1, index)]);
                let sent = FrameSpec::send(sender as u8 + 1, receiver as u8 + 1, 0, 0, Vec::new());
                assert_eq!(
                    frame[sent.payload_offset()..][..MTU],
                    expected,
                    "job {job}, index {index}"
                );
            }
            assert!(next.iter().all(|&n| n == indices.end), "{next:?}");
        }
    }
    for (counter, expected) in [
        (Counter::Contributions, 2 * JOBS * 3 * FRAGMENTS),
        (Counter::Released, JOBS * 3 * FRAGMENTS),
        (Counter::CreditViolation, 0),
    ] {
        assert_eq!(
            cluster.counter(None, counter.name()).unwrap(),
            u64::from(expected),
            "{}",
            counter.name()
        );
    }
    (0..JOBS).for_each(|job| netsum(format!("job delete j{job}")));
    assert_eq!(tenants(&cluster)["default"]["memory"]["used"], 0);
}
