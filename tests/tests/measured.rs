//! Measurements of boxes and of the links between them, and how plans and rings use them.

use std::time::{Duration, Instant};

use netsum_lab::cluster::{Cluster, Group, JobSpec, TIMEOUT, one_on_each_host};
use netsum_lab::manager::Manager;
use netsum_lab::netns::output;
use netsum_lab::{LabSpec, Rate};
use serde_json::{Value, json};

const JOB: &str = "train";
const MBIT: u64 = 1_000_000;

fn fabric(rates: &[u64]) -> Cluster {
    let spec = LabSpec {
        hosts: 4,
        racks: 2,
        mtu: 2300,
        spines: rates.len(),
        uplink: rates.first().map(|rate| Rate(rate * MBIT)),
        ..LabSpec::default()
    };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    cluster.pin();
    shape(&cluster, rates);
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    cluster
}

fn shape(cluster: &Cluster, rates: &[u64]) {
    for (spine, rate) in rates.iter().enumerate() {
        cluster.lab().set_uplink_rate(spine, Rate(rate * MBIT)).unwrap();
    }
}

fn links(cluster: &Cluster, manager: &Manager) -> Vec<Value> {
    manager.json(cluster, &["fabric", "topology"]).unwrap()["links"].as_array().unwrap().clone()
}

/// The measured rate of each link, by spine, in Mb/s.
fn measure(cluster: &Cluster, manager: &Manager) -> Vec<Vec<Option<u64>>> {
    let start = Instant::now();
    let shown = manager.netsum(cluster, &["fabric", "probe", "--measure"]).unwrap();
    eprintln!("{:?}\n{shown}", start.elapsed());
    let links = links(cluster, manager);
    let of_spine = |spine: usize| {
        let all = links
            .iter()
            .filter(|link| link["above"].as_str().unwrap().starts_with(&format!("spine{spine}/")));
        all.map(|link| Some(link["measured"].as_u64()? / MBIT)).collect()
    };
    (0..cluster.lab().spec().spines).map(of_spine).collect()
}

fn are_about(measured: &[Option<u64>], rate: u64) -> bool {
    // The tolerance of the test is 5 %.
    measured.len() == 2 && measured.iter().all(|m| m.is_some_and(|m| m.abs_diff(rate) * 20 <= rate))
}

fn trees(cluster: &Cluster, manager: &Manager) -> Vec<(String, u64)> {
    let job = manager.json(cluster, &["fabric", "job", "show", JOB]).unwrap();
    let tree =
        |tree: &Value| (tree["root"].as_str().unwrap().to_owned(), tree["rings"].as_u64().unwrap());
    job["trees"].as_array().unwrap().iter().map(tree).collect()
}

/// Runs all-reduces until the job has these trees.
fn until(group: &mut Group, cluster: &Cluster, manager: &Manager, expected: &[(&str, u64)]) {
    let start = Instant::now();
    for seed in 0.. {
        let outcomes = group.all_reduce("i32", 20_000, seed).unwrap();
        assert!(outcomes.iter().all(|o| o.wrong == 0), "{outcomes:?}");
        let trees = trees(cluster, manager);
        if trees.iter().map(|(root, rings)| (&**root, *rings)).eq(expected.iter().copied()) {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "{trees:?}\n{}", manager.log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn links_are_measured_and_rings_are_shared_out_by_that() {
    let cluster = fabric(&[400, 100, 20]);
    let manager = cluster.start_manager().unwrap();
    assert!(
        links(&cluster, &manager)
            .iter()
            .all(|link| link["nominal"] == 10_000 * MBIT && link["rate"] == 10_000 * MBIT)
    );
    let measured = measure(&cluster, &manager);
    for (measured, rate) in measured.iter().zip([400, 100, 20]) {
        assert!(are_about(measured, rate), "{measured:?} for {rate}\n{}", manager.log());
    }
    let job = JobSpec { rings: 7, ..JobSpec::new(JOB, 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    until(&mut group, &cluster, &manager, &[("spine0", 6), ("spine1", 1)]);

    // Links with the job's rings are not measured. Rings move to other links once that is worth it.
    shape(&cluster, &[40, 100, 400]);
    let measured = measure(&cluster, &manager);
    assert!(are_about(&measured[2], 400), "{measured:?}");
    assert!(measured[0] == [None, None], "{measured:?}");
    let found = links(&cluster, &manager);
    assert!(
        found.iter().any(|link| link["unmeasured"]
            .as_str()
            .is_some_and(|why| why.starts_with("a job has its rings"))),
        "{found:?}"
    );
    until(&mut group, &cluster, &manager, &[("spine0", 3), ("spine1", 1), ("spine2", 3)]);

    // The next manager knows the measurements, and the job stays as it is.
    manager.kill().unwrap();
    let manager = cluster.start_manager().unwrap();
    until(&mut group, &cluster, &manager, &[("spine0", 3), ("spine1", 1), ("spine2", 3)]);
    std::thread::sleep(Duration::from_secs(2));
    assert!(!manager.log().contains("its ranks reconnect"), "{}", manager.log());
    drop(group);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn links_as_fast_as_the_machine_keep_their_nominal_rates() {
    let spec = LabSpec { hosts: 4, racks: 2, mtu: 2300, ..LabSpec::default() };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    let manager = cluster.start_manager().unwrap();
    let all_nominal = || {
        measure(&cluster, &manager);
        for link in links(&cluster, &manager) {
            assert_eq!(
                (&link["rate"], &link["measured"]),
                (&json!(10_000 * MBIT), &Value::Null),
                "{link}"
            );
            assert!(link["unmeasured"].as_str().unwrap().ends_with("or more"), "{link}");
        }
    };
    (0..3).for_each(|_| all_nominal());
    // A queue of the port itself holds its sender back, or loses packets that do not fit, in one
    // direction.
    let leaf = cluster.lab().leaf(0);
    let tc = |arguments: &str| {
        let words = arguments.split_whitespace();
        output(leaf.command("tc").args(["qdisc"]).args(words)).unwrap();
    };
    for (rate, limit) in [(50, 100_000), (250, 100_000), (250, 10_000_000), (400, 10_000_000)] {
        tc(&format!("add dev uplink root tbf rate {rate}mbit burst 64kb limit {limit}"));
        let measured = measure(&cluster, &manager);
        assert!(measured[0][0].is_some_and(|m| m.abs_diff(rate) * 20 <= rate), "{measured:?}");
        assert_eq!(measured[0][1], None);
        tc("del dev uplink root");
        all_nominal();
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_aggregation_rate_survives_a_takeover() {
    let mut cluster = fabric(&[1000]);
    let adds = |cluster: &Cluster| {
        cluster.netsum_json(&["prog", "show"]).unwrap()["aggregation_rate"].as_u64().unwrap()
    };
    let before = adds(&cluster);
    // Every machine adds at least 10 MB/s and at most 100 GB/s.
    assert!((10_000_000..100_000_000_000).contains(&before), "{before}");
    let manager = cluster.start_manager().unwrap();
    let shown = || manager.json(&cluster, &["fabric", "show"]).unwrap();
    let has_rate = |b: &Value| b["aggregation_rate"].as_u64() > Some(0);
    let start = Instant::now();
    while !shown()["boxes"].as_array().unwrap().iter().all(has_rate) {
        assert!(start.elapsed() < TIMEOUT, "{}", shown());
    }
    let plan = manager.netsum(&cluster, &["fabric", "topology", "--plan"]).unwrap();
    assert!(plan.contains("aggregation-rate = "), "{plan}");
    assert!(cluster.daemon_log().contains("aggregation rate: "), "{}", cluster.daemon_log());
    cluster.kill_daemon().unwrap();
    cluster.start_daemon().unwrap();
    assert!(!cluster.daemon_log().contains("MB/s on each of"), "{}", cluster.daemon_log());
    assert_eq!(adds(&cluster), before);
}
