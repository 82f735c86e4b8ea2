//! `job create` grants and ranks reach the rates that `netsum plan` promises, on links so slow that
//! CPUs are idle.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use netsum_lab::cluster::{
    Cluster, DaemonOptions, JobSpec, TIMEOUT, WORKER_PORT, one_on_each_host, program,
};
use netsum_lab::process::Running;
use netsum_lab::traffic::ping;
use netsum_lab::{LabSpec, Rate};
use serde_json::Value;

const MBIT: u64 = 1_000_000;

/// The defaults of `job create`.
fn job(name: &str, ranks: u32, mtu: u32, rings: u32) -> JobSpec {
    JobSpec { mtu, message_size: 64 << 10, window: 8, rings, ..JobSpec::new(name, ranks) }
}

/// The plan of a job when such jobs are already running, in a network.
fn plan(cluster: &Cluster, topology: &str, mtu: u32, jobs: &[&str]) -> Vec<Value> {
    let file = cluster.folder().join("planned.toml");
    std::fs::write(&file, topology).unwrap();
    let (file, mtu) = (file.display().to_string(), mtu.to_string());
    let mut arguments = vec!["plan", "--topology", &file, "--mtu", &mtu];
    jobs.iter().for_each(|job| arguments.extend(["--job", job]));
    let plans = cluster.netsum_json(&arguments).unwrap();
    println!("{plans:#}");
    plans["jobs"].as_array().unwrap().clone()
}

fn rings(plan: &Value) -> u32 {
    plan["rings"].as_u64().unwrap() as u32
}

fn rings_by_root(job: &Value) -> BTreeMap<String, u32> {
    let tree = |tree: &Value| (tree["root"].as_str().unwrap().to_owned(), rings(tree));
    job["trees"].as_array().unwrap().iter().map(tree).collect()
}

fn is_near(reached: f64, plan: &Value) {
    let promised = plan["rate"].as_f64().unwrap();
    println!("{reached:.0} B/s, {promised:.0} promised: {:.3}", reached / promised);
    assert!((0.9..1.1).contains(&(reached / promised)), "{reached} B/s, {promised} promised");
}

/// Hosts h0, h1 and so on around a box with two CPUs and this aggregation rate.
fn rack(hosts: usize, rate: Rate, adds: u64, pool: u64) -> String {
    let mut text = format!(
        "[[box]]\nname = \"leaf\"\naggregation-rate = {adds}.0\ncpus = 2\nslot-memory = {pool}.0\n"
    );
    for host in 0..hosts {
        text += &format!("[[host]]\nname = \"h{host}\"\n");
        text += &format!("[[link]]\nfrom = \"h{host}\"\nto = \"leaf\"\nrate = {}.0\n", rate.0);
    }
    text
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_plan_for_one_box_is_granted_and_reached() {
    let rate = Rate(25 * MBIT);
    let cluster = Cluster::start(LabSpec { rate: Some(rate), ..LabSpec::hosts(4) }).unwrap();
    // Four members send 2.9 MB/s each: at 8 MB/s per CPU, that takes both CPUs.
    let plan = plan(&cluster, &rack(4, rate, 16_000_000, 64 << 20), 1024, &[]).remove(0);
    assert_eq!(rings(&plan), 2);
    let token = cluster.create_job(&job("train", 4, 1024, rings(&plan))).unwrap();
    let ranks = (0..4).map(|rank| {
        let host = cluster.lab().host(rank);
        let mut perf = host.command(program("netsum-perf").unwrap());
        perf.args("all_reduce -b 4M -e 4M -w 1 -n 3 -j --job train --ranks 4".split(' '))
            .args(["--controller", &format!("{}:{WORKER_PORT}", cluster.lab().box_().ip())])
            .args([
                "--token",
                &token,
                "--rank",
                &rank.to_string(),
                "--ip",
                &host.ip(0).to_string(),
            ]);
        Running::start(&format!("netsum-perf of rank {rank}"), &mut perf).unwrap()
    });
    let ranks: Vec<Running> = ranks.collect();
    let printed: Vec<String> =
        ranks.into_iter().map(|rank| rank.success(TIMEOUT).unwrap()).collect();
    let rows: Vec<Value> = serde_json::from_str(&printed[0]).unwrap();
    assert_eq!(rows[0]["by"], "box", "{rows:?}");
    is_near(rows[0]["size"].as_f64().unwrap() / rows[0]["time_us"].as_f64().unwrap() * 1e6, &plan);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_pool_has_room_for_what_is_planned_and_for_no_more() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    let mut seen = Vec::new();
    for mib in [1, 2, 3] {
        let listen = format!("[pool]\nmemory = \"{mib}MiB\"\n");
        cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
        let topology = rack(6, Rate(25 * MBIT), 1_000_000_000, mib << 20);
        let plans = plan(&cluster, &topology, 1024, &["first=h0,h1,h2,h3@1", "second=h4,h5"]);
        let counts: Vec<u32> = plans.iter().map(rings).collect();
        for (plan, ranks) in plans.iter().zip([4, 2]) {
            let name = plan["name"].as_str().unwrap();
            if rings(plan) > 0 {
                cluster.create_job(&job(name, ranks, 1024, rings(plan))).unwrap();
                continue;
            }
            let refused = cluster.create_job(&job(name, ranks, 1024, 1)).unwrap_err().to_string();
            assert!(refused.contains("not enough memory for slots"), "{name}: {refused}");
            assert!(plan["full"].to_string().contains("leaf's slots"), "{plan}");
        }
        cluster.stop_daemon().unwrap();
        seen.push(counts);
    }
    // A ring with four members takes 1.5 MiB, and one with two takes 1.2 MiB.
    assert_eq!(seen, [[0, 0], [1, 0], [1, 1]], "rings of both by the pool");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_plan_for_two_spines_is_granted_and_reached() {
    let rates = [20, 10].map(|mbit| Rate(mbit * MBIT));
    let spec = LabSpec {
        hosts: 4,
        racks: 2,
        mtu: 2300,
        spines: 2,
        uplink: Some(rates[0]),
        ..LabSpec::default()
    };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    cluster.lab().set_uplink_rate(1, rates[1]).unwrap();
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    let manager = cluster.start_manager_with_rates(&rates).unwrap();
    // Boxes learn hosts from the packets that these send.
    let hosts = cluster.lab().hosts();
    for (n, host) in hosts.iter().enumerate() {
        ping(host, hosts[(n + 1) % 4].ip(0), 1, TIMEOUT).unwrap();
    }
    let start = Instant::now();
    let topology = loop {
        let text = manager.netsum(&cluster, &["fabric", "topology", "--plan"]).unwrap();
        if text.matches("[[host]]").count() == 4 {
            break text;
        }
        assert!(start.elapsed() < TIMEOUT, "{text}\n{}", manager.log());
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(topology.matches("cpus = ").count(), 4, "{topology}");
    let plan = plan(&cluster, &topology, 2048, &[]).remove(0);
    let planned = rings_by_root(&plan);
    assert_eq!(planned, [("spine0".to_owned(), 2), ("spine1".to_owned(), 1)].into());

    let job = job("train", 4, 2048, rings(&plan));
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    // It takes a tenth of a second until all windows are full, which is little compared with seven
    // seconds.
    let bytes = 24 << 20;
    let outcomes = group.all_reduce("i32", bytes / 4, 1).unwrap();
    assert!(outcomes.iter().all(|o| o.mode == "box" && o.wrong == 0), "{outcomes:?}");
    let micros = outcomes.iter().map(|o| o.micros).max().unwrap();
    is_near(bytes as f64 / micros as f64 * 1e6, &plan);
    let shown = manager.json(&cluster, &["fabric", "job", "show", "train"]).unwrap();
    assert_eq!(rings_by_root(&shown), planned);
}
