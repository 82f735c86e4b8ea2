//! Ranks join a manager of several boxes as they join one.

use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, Group, JobSpec, PATIENCE, one_on_each_host};

const JOB: &str = "train";

fn fabric(racks: usize, hosts: usize) -> Cluster {
    let mut cluster = Cluster::without_daemon(LabSpec { racks, mtu: 2300, ..LabSpec::hosts(hosts) }).unwrap();
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    cluster
}

/// Right sums by the boxes, of two kinds.
fn work(group: &mut Group, seed: u64) {
    for (dtype, len) in [("f32", 30_000), ("i32", 50_000), ("f32", 1_000)] {
        let outcomes = group.all_reduce(dtype, len, seed).unwrap();
        assert!(outcomes.iter().all(|o| (&*o.mode, o.wrong) == ("box", 0)), "{outcomes:?}\n{}", group.log());
    }
}

fn jobs(cluster: &Cluster, rack: Option<usize>) -> usize {
    let shown = cluster.netsum_on(rack, &["-j", "job", "show"]).unwrap();
    serde_json::from_str::<serde_json::Value>(&shown).unwrap().as_array().unwrap().len()
}

fn wait(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_join_the_fabric_and_racks_send_one_copy_up() {
    let cluster = fabric(2, 4);
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec { rings: 2, ..JobSpec::new(JOB, 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    let stats = cluster.netsum_on(Some(1), &["-j", "stats"]).unwrap();
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    assert!(stats["partial_sent"].as_u64().unwrap() > 0, "{stats}");
    assert_eq!(stats["drops"].as_u64().unwrap_or(0), 0, "{stats}");
    let shown = manager.json(&cluster, &["fabric", "show"]).unwrap();
    assert!(shown["links"].as_array().unwrap().iter().all(|link| link["up"] == true), "{shown}");
    let sums = |b: &serde_json::Value| (b["answers"] == true, b["jobs"] == serde_json::json!([JOB]));
    assert_eq!(
        shown["boxes"].as_array().unwrap().iter().map(sums).collect::<Vec<_>>(),
        [(true, true); 3],
        "{shown}"
    );
    let ports = &manager.json(&cluster, &["job", "show", JOB]).unwrap()["flows"];
    assert!(ports.to_string().contains("leaf1/port"), "{ports}");
    // Without the manager boxes go on, and the next one takes the job over.
    manager.kill().unwrap();
    work(&mut group, 2);
    let manager = cluster.start_manager().unwrap();
    work(&mut group, 3);
    assert!(manager.log().contains("1 jobs taken over"), "{}", manager.log());
    assert_eq!([Some(0), Some(1), None].map(|rack| jobs(&cluster, rack)), [1, 1, 1]);
    drop(group);
    wait("boxes forget what has ended", || {
        [Some(0), Some(1), None].iter().all(|rack| jobs(&cluster, *rack) == 0)
    });
}

/// Sums until the boxes have a part in them again; how often they had none.
fn work_until_boxes(cluster: &Cluster, group: &mut Group, log: impl Fn() -> String) -> usize {
    let start = Instant::now();
    for without in 0.. {
        let outcomes = group.all_reduce("i32", 20_000, without as u64).unwrap();
        assert!(outcomes.iter().all(|o| o.wrong == 0), "{outcomes:?}");
        if outcomes.iter().all(|o| o.mode == "box") {
            return without;
        }
        let patient = start.elapsed() < PATIENCE;
        assert!(patient, "{}\n{}\n{}", group.log(), log(), cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(100));
    }
    unreachable!()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_leaf_that_has_lost_its_jobs_gets_them_again() {
    let mut cluster = fabric(2, 4);
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec::new(JOB, 4);
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    // Its programs go with it: nothing is pinned.
    cluster.start_leaf(1).unwrap();
    let without = work_until_boxes(&cluster, &mut group, || manager.log());
    println!("{without} sums without the boxes");
    assert!(without > 0 && manager.log().contains("box leaf1 does not sum any more"), "{}", manager.log());
    work(&mut group, 2);
}
