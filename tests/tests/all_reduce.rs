//! All-reduces through the box, end to end. Every result is compared bit by bit with a sum computed
//! in this process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use netsum_common::unmanaged::static_connection;
use netsum_lab::LabSpec;
use netsum_lab::cluster::{
    Cluster, Group, JobSpec, Outcome, RankReply, TIMEOUT, WORKER_PORT, one_on_each_host,
};
use netsum_lab::faults::Faults;
use netsum_lab::netns::output;
use netsum_lab::traffic::{ping, tcp_transfer};

const SECOND: Duration = Duration::from_secs(1);
/// Fits the largest path MTU with all headers, and XDP on veth.
const LAB_MTU: u32 = 3500;

fn lab(hosts: usize) -> LabSpec {
    LabSpec { mtu: LAB_MTU, ..LabSpec::hosts(hosts) }
}

/// Starts a job's ranks, one on each host.
fn start(cluster: &Cluster, job: &JobSpec) -> Group {
    let token = cluster.create_job(job).unwrap();
    cluster.ranks(job, &token, &one_on_each_host(job.ranks)).unwrap()
}

fn assert_box(outcomes: &[Outcome], what: &str) {
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.mode, "box", "{what}, rank {rank}: {outcome:?}");
        assert!(outcome.verified > 0, "{what}, rank {rank}: {outcome:?}");
        assert_eq!((outcome.wrong, outcome.fallbacks), (0, 0), "{what}, rank {rank}: {outcome:?}");
    }
}

/// Every path MTU and type, with one job per MTU.
fn matrix(ranks: u32) {
    let cluster = Cluster::start(lab(ranks as usize)).unwrap();
    for mtu in [256, 512, 1024, 1408, 2048, 3328] {
        let job = JobSpec { mtu, ..JobSpec::new(&format!("mtu-{mtu}"), ranks) };
        let mut group = start(&cluster, &job);
        for (seed, len) in [(1, 1), (2, 1000), (3, 150_001)] {
            for dtype in ["i32", "f32"] {
                let what = format!("{ranks} ranks, path MTU {mtu}, {len} {dtype}");
                let outcomes = group.all_reduce(dtype, len, seed).unwrap_or_else(|e| {
                    panic!("{what}: {e:#}\n{}\n{}", group.log(), cluster.daemon_log())
                });
                assert_box(&outcomes, &what);
            }
        }
        let order = &cluster.netsum_json(&["job", "show", &job.name]).unwrap()["order"];
        assert_eq!(order, "relaxed", "all ranks have netsum's own endpoint");
        drop(group);
        cluster.netsum(&["job", "delete", &job.name]).unwrap();
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn two_ranks_with_all_path_mtus_and_types() {
    matrix(2);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn three_ranks_with_all_path_mtus_and_types() {
    matrix(3);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn four_ranks_with_all_path_mtus_and_types() {
    matrix(4);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn eight_ranks_with_all_path_mtus_and_types() {
    matrix(8);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn two_jobs_with_several_rings_at_once() {
    let cluster = Cluster::start(LabSpec { ips_per_host: 2, ..lab(3) }).unwrap();
    let first = JobSpec { rings: 2, ..JobSpec::new("first", 3) };
    let second = JobSpec { rings: 3, mtu: 2048, message_size: 32768, ..JobSpec::new("second", 3) };
    let mut a = start(&cluster, &first);
    let token = cluster.create_job(&second).unwrap();
    // The second job has its own addresses, and its ranks are on the hosts in another order.
    let mut b = cluster.ranks(&second, &token, &[(2, 1), (0, 1), (1, 1)]).unwrap();
    for seed in 0..3 {
        let of_a = a.order_all_reduce("i32", 300_000, seed).unwrap();
        let of_b = b.order_all_reduce("f32", 200_000, seed + 100).unwrap();
        assert_box(&a.check_all_reduce("i32", 300_000, seed, &of_a).unwrap(), "first");
        assert_box(&b.check_all_reduce("f32", 200_000, seed + 100, &of_b).unwrap(), "second");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ipv6() {
    let cluster = Cluster::start(LabSpec { ipv6: true, ..lab(3) }).unwrap();
    let job = JobSpec { mtu: 2048, ..JobSpec::new("six", 3) };
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks_v6(&job, &token, &one_on_each_host(3)).unwrap();
    for dtype in ["i32", "f32"] {
        assert_box(&group.all_reduce(dtype, 100_000, 6).unwrap(), dtype);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn two_ranks_on_one_port() {
    let cluster = Cluster::start(LabSpec { ips_per_host: 2, ..lab(2) }).unwrap();
    let job = JobSpec::new("pairs", 4);
    let token = cluster.create_job(&job).unwrap();
    // Neighbours are on different hosts: packets that a host sends to itself never reach a box.
    let mut group = cluster.ranks(&job, &token, &[(0, 0), (1, 0), (0, 1), (1, 1)]).unwrap();
    for dtype in ["i32", "f32"] {
        assert_box(&group.all_reduce(dtype, 100_000, 4).unwrap(), dtype);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn other_traffic_meanwhile() {
    let cluster = Cluster::start(lab(3)).unwrap();
    let lab = cluster.lab();
    let mut group = start(&cluster, &JobSpec::new("busy", 3));
    std::thread::scope(|s| {
        let tcp = s.spawn(|| {
            tcp_transfer(lab.host(0), lab.host(1), lab.host(1).ip(0), 64 << 20, 10 * SECOND)
        });
        let pings = s.spawn(|| ping(lab.host(1), lab.host(2).ip(0), 200, SECOND));
        let mut seed = 0;
        while seed < 5 || !tcp.is_finished() || !pings.is_finished() {
            assert_box(&group.all_reduce("i32", 200_000, seed).unwrap(), "busy");
            seed += 1;
        }
        tcp.join().unwrap().unwrap();
        assert_eq!(pings.join().unwrap().unwrap().len(), 200);
    });
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn one_percent_loss_in_each_direction() {
    for (ranks, mtu, rings) in [(2, 2048, 1), (3, 1024, 2), (4, 1024, 1)] {
        let cluster =
            Cluster::start(LabSpec { faulty_links: true, ..lab(ranks as usize) }).unwrap();
        let job = JobSpec { mtu, rings, ..JobSpec::new("lossy", ranks) };
        let mut group = start(&cluster, &job);
        for host in cluster.lab().hosts() {
            host.set_faults(Faults::loss(0.01), Faults::loss(0.01), host.number() as u32).unwrap();
        }
        for (seed, dtype) in [(1, "i32"), (2, "f32")] {
            let outcomes = group.all_reduce(dtype, 200_000, seed).unwrap_or_else(|e| {
                panic!("{ranks} ranks, {dtype}: {e:#}\n{}\n{}", group.log(), cluster.daemon_log())
            });
            assert_box(&outcomes, dtype);
        }
        let counts: Vec<_> = cluster
            .lab()
            .hosts()
            .iter()
            .map(|h| h.fault_link().unwrap().counts().unwrap())
            .collect();
        assert!(counts.iter().all(|c| c.up.lost > 0 && c.down.lost > 0), "{counts:?}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_killed_rank_is_named_by_the_others() {
    let cluster = Cluster::start(lab(4)).unwrap();
    let job = JobSpec { timeout: 2 * SECOND, ..JobSpec::new("mortal", 4) };
    let mut group = start(&cluster, &job);
    group.all_reduce("i32", 1000, 0).unwrap();
    let start = Instant::now();
    group.order_all_reduce("i32", 20_000_000, 1).unwrap();
    group.kill(2).unwrap();
    let answers = group.answers(TIMEOUT).unwrap();
    assert_eq!(answers.len(), 3);
    for (rank, answer) in answers {
        let RankReply::Error(error) = answer else { panic!("rank {rank}: {answer:?}") };
        assert!(error.contains("rank 2"), "rank {rank}: {error}");
    }
    assert!(start.elapsed() < 15 * SECOND, "{:?}", start.elapsed());
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_end_of_a_process_is_noticed_before_the_timeout() {
    let cluster = Cluster::start(lab(3)).unwrap();
    for hosts in [&[0, 1, 2][..], &[0, 0, 1, 2]] {
        let ranks = hosts.len() as u32;
        let job = JobSpec { timeout: 2 * TIMEOUT, ..JobSpec::new(&format!("of-{ranks}"), ranks) };
        let token = cluster.create_job(&job).unwrap();
        let places: Vec<_> = hosts.iter().map(|host| (*host, 0)).collect();
        let mut group = cluster.ranks(&job, &token, &places).unwrap();
        group.all_reduce("f32", 100_000, 0).unwrap();
        group.kill(hosts.len() - 1).unwrap();
        let error = format!("{:#}", group.all_reduce("f32", 100_000, 1).unwrap_err());
        let named = format!("rank {} died", ranks - 1);
        assert!(error.contains(&named), "{error}\n{}", group.log());
        assert!(error.contains("its process has ended"), "{error}");
    }
}

/// A reset connection looks to the daemon like the end of the process.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_whose_heartbeats_connection_is_reset_is_alive() {
    let cluster = Cluster::start(lab(3)).unwrap();
    let mut group = start(&cluster, &JobSpec::new("reset", 3));
    assert_box(&group.all_reduce("i32", 1000, 0).unwrap(), "before");
    let mut reset = cluster.lab().host(2).command("ss");
    reset.args(["-K", "-H", "-t", "dport", "=", &format!(":{WORKER_PORT}")]);
    let is_over = &AtomicBool::new(false);
    let resets = std::thread::scope(|s| {
        let resets = s.spawn(move || {
            let mut resets = 0;
            while !is_over.load(Ordering::Relaxed) {
                resets += output(&mut reset).unwrap().lines().count();
                std::thread::sleep(SECOND / 20);
            }
            resets
        });
        // The others wait for the last rank, and are told of ranks that have ended.
        let files = group.order_all_reduce_last_late("i32", 1000, 1, 5 * SECOND);
        is_over.store(true, Ordering::Relaxed);
        let outcomes = files.and_then(|files| group.check_all_reduce("i32", 1000, 1, &files));
        assert_box(&outcomes.unwrap(), "meanwhile");
        resets.join().unwrap()
    });
    // It sends a heartbeat each second.
    assert!(resets >= 3, "{resets} resets");
    assert_box(&group.all_reduce("i32", 1000, 2).unwrap(), "afterwards");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn without_a_box_the_ranks_sum_over_the_host_ring() {
    let cluster = Cluster::without_daemon(lab(3)).unwrap();
    let mut group = cluster.ranks_alone(&JobSpec::new("alone", 3), &one_on_each_host(3)).unwrap();
    for (seed, dtype) in [(1, "i32"), (2, "f32")] {
        for outcome in group.all_reduce(dtype, 100_000, seed).unwrap() {
            assert_eq!((&*outcome.mode, outcome.fallbacks, outcome.wrong), ("ring", 1, 0));
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn flows_that_were_added_by_hand_are_summed() {
    let cluster = Cluster::start(lab(3)).unwrap();
    let job = JobSpec::new("by-hand", 3);
    cluster.create_job(&job).unwrap();
    for rank in 0..3 {
        let (from, to) = (cluster.lab().host(rank), cluster.lab().host((rank + 1) % 3));
        let connection = static_connection(rank as u32, Some(0));
        let next = static_connection((rank as u32 + 1) % 3, Some(0));
        cluster
            .netsum(&[
                "flow",
                "add",
                "by-hand",
                "--ring",
                "0",
                "--rank",
                &rank.to_string(),
                "--port",
                &cluster.lab().box_().port(rank),
                "--src",
                &from.ip(0).to_string(),
                "--dst",
                &to.ip(0).to_string(),
                "--qpn",
                &format!("0x{:x}", next.receive_qpn.get()),
                "--psn",
                &connection.first_psn.get().to_string(),
            ])
            .unwrap();
    }
    let shown = cluster.netsum(&["job", "show", "by-hand"]).unwrap();
    assert!(shown.contains("active"), "{shown}");
    let mut group = cluster.ranks_alone(&job, &one_on_each_host(3)).unwrap();
    assert_box(&group.all_reduce("f32", 100_000, 9).unwrap(), "by hand");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_box_goes_and_comes_back_between_all_reduces() {
    let mut cluster = Cluster::start(lab(3)).unwrap();
    let job = JobSpec::new("patient", 3);
    let mut group = start(&cluster, &job);
    assert_box(&group.all_reduce("i32", 100_000, 1).unwrap(), "before");
    cluster.stop_daemon().unwrap();
    // The box is a plain bridge now; the hosts' ring computes the right sums.
    for outcome in group.all_reduce("i32", 100_000, 2).unwrap() {
        assert_eq!((&*outcome.mode, outcome.fallbacks), ("ring", 1), "{outcome:?}");
    }
    cluster.start_daemon().unwrap();
    group.all_reduce("f32", 100_000, 3).unwrap();
    // New ranks are summed by the box again.
    drop(group);
    let mut group = start(&cluster, &JobSpec::new("again", 3));
    assert_box(&group.all_reduce("f32", 100_000, 4).unwrap(), "after");
}
