//! Ranks that use a kernel's Soft-RoCE through libibverbs: in virtual machines, through the box.

use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{
    Cluster, Group, JobSpec, Outcome, RankReply, TIMEOUT, WORKER_PORT, program,
};
use netsum_lab::faults::{Fault, Faults};
use netsum_lab::process::Running;
use netsum_lab::vm::parts::Kernel;

/// Hosts that are virtual machines; one more host is a namespace.
const VMS: usize = 3;

/// Everything is in one test, because booting takes longer than all the rest.
#[test]
#[ignore = "needs root, BPF and QEMU: cargo xtask test"]
fn ranks_with_an_adapter_sum_by_the_box_and_without_it() {
    let start = Instant::now();
    let spec = LabSpec {
        vms: vec![Kernel::V6_1; VMS],
        faulty_links: true,
        mtu: 2200,
        ..LabSpec::hosts(VMS + 1)
    };
    let mut cluster = Cluster::start(spec).unwrap();
    println!("booted in {:.0?}", start.elapsed());
    sums(&cluster);
    loss(&cluster);
    slow_rank(&cluster);
    mixed(&cluster);
    perf(&cluster);
    refusals(&cluster);
    death(&cluster);
    box_that_vanishes(&mut cluster);
}

fn ranks(cluster: &Cluster, job: &JobSpec, hosts: &[usize]) -> Group {
    let token = cluster.create_job(job).unwrap();
    let places: Vec<_> = hosts.iter().map(|&host| (host, 0)).collect();
    let group =
        cluster.ranks(job, &token, &places).unwrap_or_else(|e| panic!("{}: {e:#}", job.name));
    for (transport, &host) in group.transports.iter().zip(hosts) {
        let expected = if host < VMS { "rxe0 port 1 GID 1" } else { "UDP" };
        assert_eq!(transport, expected, "{}: host {host}", job.name);
    }
    group
}

fn reduce(cluster: &Cluster, group: &mut Group, what: &str, len: usize, by: &str) -> Vec<Outcome> {
    let mut all = Vec::new();
    for dtype in ["i32", "f32"] {
        let outcomes = group.all_reduce(dtype, len, 1).unwrap_or_else(|e| {
            panic!("{what}, {dtype}: {e:#}\n{}\n{}", group.log(), cluster.daemon_log())
        });
        for (rank, outcome) in outcomes.iter().enumerate() {
            assert_eq!(
                (&*outcome.mode, outcome.wrong),
                (by, 0),
                "{what}, {dtype}, rank {rank}: {}",
                group.log()
            );
        }
        all.extend(outcomes);
    }
    all
}

fn sums(cluster: &Cluster) {
    for (name, mtu, rings) in [("one-ring", 1024, 1), ("two-rings", 0, 2)] {
        let job = JobSpec { mtu, rings, ..JobSpec::new(name, VMS as u32) };
        let mut group = ranks(cluster, &job, &[0, 1, 2]);
        reduce(cluster, &mut group, name, 100_000, "box");
        let counter = |counter| cluster.counter(Some(name), counter).unwrap();
        assert_eq!(counter("contributions"), 3 * counter("released"), "{name}");
        let used = &cluster.netsum_json(&["job", "show", name]).unwrap()["mtu"];
        assert_eq!(used, if mtu == 0 { 2048 } else { mtu }, "adapters take powers of two");
    }
}

fn loss(cluster: &Cluster) {
    let job = JobSpec::new("loss", VMS as u32);
    let mut group = ranks(cluster, &job, &[0, 1, 2]);
    let faults = |faults: Faults| {
        for (seed, host) in cluster.lab().hosts().iter().enumerate() {
            host.set_faults(faults, faults, seed as u32 + 1).unwrap();
        }
    };
    faults(Faults::of(Fault::Loss, 0.01));
    reduce(cluster, &mut group, "1 % loss each way", 100_000, "box");
    let hosts = &cluster.lab().hosts()[..VMS];
    let lost: u64 = hosts
        .iter()
        .map(|h| h.fault_link().unwrap().counts().unwrap())
        .map(|c| c.up.faults() + c.down.faults())
        .sum();
    assert!(lost > 0, "nothing was lost");
    faults(Faults::NONE);
}

/// The adapter gives up long before the last rank arrives.
fn slow_rank(cluster: &Cluster) {
    // 16.8 ms, with one retry.
    let job = JobSpec { retry: (12, 1), ..JobSpec::new("slow", VMS as u32) };
    let mut group = ranks(cluster, &job, &[0, 1, 2]);
    let files = group.order_all_reduce_last_late("f32", 50_000, 2, Duration::from_secs(1)).unwrap();
    let outcomes = group.check_all_reduce("f32", 50_000, 2, &files).unwrap();
    let stats = cluster.netsum(&["stats", "slow"]).unwrap();
    assert!(
        outcomes.iter().all(|o| o.mode == "box" && o.fallbacks == 0),
        "{outcomes:?}\n{}{stats}",
        group.log()
    );
    let restarts: Vec<u64> = outcomes.iter().map(|o| o.restarts).collect();
    // The ranks that were in time.
    assert!(restarts[0] > 2 && restarts[1] > 2, "{restarts:?}");
    reduce(cluster, &mut group, "after a slow rank", 10_000, "box");
}

/// Adapters and netsum's own endpoint in one ring.
fn mixed(cluster: &Cluster) {
    let mut group = ranks(cluster, &JobSpec::new("mixed", 3), &[0, VMS, 1]);
    let order = &cluster.netsum_json(&["job", "show", "mixed"]).unwrap()["order"];
    assert_eq!(order, "in-order", "the kernels go back N");
    reduce(cluster, &mut group, "mixed", 100_000, "box");
}

fn perf_command(
    cluster: &Cluster,
    job: &str,
    token: &str,
    rank: usize,
    arguments: &str,
) -> Running {
    let host = cluster.lab().host(rank);
    let mut perf = host.command(program("netsum-perf").unwrap());
    perf.arg("all_reduce").args(arguments.split(' '));
    perf.env("NETSUM_CONTROLLER", format!("{}:{WORKER_PORT}", cluster.lab().box_().ip()))
        .env("NETSUM_JOB", job)
        .env("NETSUM_TOKEN", token)
        .env("NETSUM_RANK", rank.to_string())
        .env("NETSUM_RANKS", VMS.to_string())
        .env("NETSUM_IP", host.ip(0).to_string());
    Running::start(&format!("netsum-perf of rank {rank}"), &mut perf).unwrap()
}

fn perf(cluster: &Cluster) {
    let job = JobSpec { message_size: 65536, window: 2, ..JobSpec::new("perf", VMS as u32) };
    let token = cluster.create_job(&job).unwrap();
    let arguments = "--transport verbs -b 8 -e 256K -f 32 -n 2 -w 1 --check";
    let perfs: Vec<_> =
        (0..VMS).map(|rank| perf_command(cluster, "perf", &token, rank, arguments)).collect();
    let printed: Vec<String> =
        perfs.into_iter().map(|perf| perf.success(2 * TIMEOUT).unwrap()).collect();
    let table = &printed[0];
    assert!(table.contains("rank 0 over rxe0 port 1 GID 1"), "{table}");
    assert!(table.contains("# wrong elements: 0;"), "{table}");
    let rows: Vec<&str> = table.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(rows.len(), 4, "{table}");
    // The box sums. Retransmissions are up to the kernel, so the table says N/A.
    assert!(rows.iter().all(|row| row.contains(" box ") && row.ends_with("N/A")), "{table}");
}

fn refusals(cluster: &Cluster) {
    let job = JobSpec { mtu: 2048, ..JobSpec::new("wide", VMS as u32) };
    let token = cluster.create_job(&job).unwrap();
    let refused_by = |name: &str, token: &str, arguments: &str, words: &str| {
        let ended = perf_command(cluster, name, token, 0, arguments).end(TIMEOUT).unwrap();
        assert!(
            !ended.status.success() && ended.stderr.contains(words),
            "{arguments}: {}",
            ended.stderr
        );
    };
    let odd = JobSpec { mtu: 1408, ..JobSpec::new("odd", VMS as u32) };
    let odd_token = cluster.create_job(&odd).unwrap();
    let words = "path MTU 1408: adapters take 256, 512, 1024, 2048 or 4096";
    refused_by("odd", &odd_token, "--transport verbs", words);
    let refused = |arguments: &str, words: &str| refused_by("wide", &token, arguments, words);
    refused("--transport verbs --ib-timeout 32", "retry.timeout 32: 1 to 31");
    refused(
        "--transport udp",
        "in use by another RoCEv2 endpoint that does not share it: the kernel's Soft-RoCE",
    );
    let interface_mtu = |mtu: &str| {
        let mut ip = cluster.lab().host(0).command("/usr/bin/ip");
        let ip = Running::start("ip", ip.args(["link", "set", "eth0", "mtu", mtu])).unwrap();
        ip.success(TIMEOUT).unwrap();
    };
    // Enough for the packets, but Soft-RoCE reserves more.
    interface_mtu("2100");
    refused("--transport verbs", "adapter rxe0: path MTU 2048: port 1 supports at most 1024");
    interface_mtu("2200");
}

fn death(cluster: &Cluster) {
    let job = JobSpec { timeout: Duration::from_secs(3), ..JobSpec::new("death", VMS as u32) };
    let mut group = ranks(cluster, &job, &[0, 1, 2]);
    reduce(cluster, &mut group, "before a death", 10_000, "box");
    group.kill(1).unwrap();
    group.order_all_reduce("i32", 100_000, 3).unwrap();
    for (rank, answer) in group.answers(TIMEOUT).unwrap() {
        let RankReply::Error(error) = answer else { panic!("rank {rank}: {answer:?}") };
        assert!(error.contains("rank 1 "), "rank {rank}: {error}");
    }
}

fn box_that_vanishes(cluster: &mut Cluster) {
    let job = JobSpec::new("vanishing", VMS as u32);
    let mut group = ranks(cluster, &job, &[0, 1, 2]);
    reduce(cluster, &mut group, "with a box", 20_000, "box");
    cluster.stop_daemon().unwrap();
    reduce(cluster, &mut group, "without a box", 100_000, "ring");
}
