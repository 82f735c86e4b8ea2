//! Ranks join a manager of several boxes as they join one.

use std::time::{Duration, Instant};

use crate::parents::{SECOND, second_parent};
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, Group, JobSpec, PATIENCE, one_on_each_host};
use netsum_lab::group::Outcome;
use netsum_lab::manager::Manager;

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
    let all_sum = || {
        let shown = manager.json(&cluster, &["fabric", "show"]).unwrap();
        let sums = |b: &serde_json::Value| b["answers"] == true && b["jobs"] == serde_json::json!([JOB]);
        let (boxes, links) = (shown["boxes"].as_array().unwrap(), shown["links"].as_array().unwrap());
        boxes.len() == 3 && boxes.iter().all(sums) && links.iter().all(|link| link["up"] == true)
    };
    // What it shows is from its last look.
    wait("fabric show has three boxes at work", all_sum);
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

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_of_two_racks_in_turns_send_one_copy_up_and_keep_their_numbers() {
    let cluster = fabric(2, 4);
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec { timeout: Duration::from_secs(4), ..JobSpec::new(JOB, 4) };
    let mut places = one_on_each_host(4);
    places.swap(1, 2);
    let mut group = cluster.ranks_of(&manager, &job, &places).unwrap();
    work(&mut group, 1);
    let stats = cluster.netsum_on(Some(1), &["-j", "stats"]).unwrap();
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    assert!(stats["partial_sent"].as_u64().unwrap() > 0, "{stats}");
    let flows = cluster.netsum_on(Some(0), &["-j", "flow", "show", JOB]).unwrap();
    let flows: serde_json::Value = serde_json::from_str(&flows).unwrap();
    let mut ranks: Vec<_> = flows.as_array().unwrap().iter().map(|f| f["rank"].as_u64().unwrap()).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 2, 3], "rank 3's comes down");
    manager.json(&cluster, &["job", "renew", JOB]).unwrap();
    (2..6).for_each(|seed| work(&mut group, seed));
    group.kill(1).unwrap();
    let errors = group.all_reduce("i32", 1000, 6).unwrap_err().to_string();
    assert!(errors.lines().all(|why| why.contains("rank 1 died")), "{errors}");
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

/// Two leaves below two spines, the second of which is rack 2's box.
fn two_spines() -> (Cluster, Manager) {
    let mut cluster = Cluster::without_daemon(LabSpec { racks: 3, mtu: 2300, ..LabSpec::hosts(6) }).unwrap();
    second_parent(cluster.lab());
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    let manager = start_manager(&cluster);
    (cluster, manager)
}

/// One that knows both spines.
fn start_manager(cluster: &Cluster) -> Manager {
    let links = [0, 1].map(|rack| (format!("leaf{rack}/{SECOND}"), format!("leaf2/down{rack}")));
    cluster.start_manager_with(&links).unwrap()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_spine_that_is_drained_is_empty_after_a_pause_no_longer_than_a_renewal() {
    let (cluster, manager) = two_spines();
    let job = JobSpec { rings: 2, ..JobSpec::new(JOB, 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    // Sums go on, all by the boxes, until the ranks have connected anew; the longest.
    let mut pause = |command: &[&str]| {
        let renewals = |outcomes: &[Outcome]| outcomes.iter().map(|o| o.renewals).min();
        let (mut longest, mut seed) = (Duration::ZERO, 0);
        let mut sum = || {
            seed += 1;
            let begun = Instant::now();
            let outcomes = group.all_reduce("i32", 20_000, seed).unwrap();
            longest = begun.elapsed().max(longest);
            assert!(
                outcomes.iter().all(|o| (&*o.mode, o.wrong) == ("box", 0)),
                "{outcomes:?}\n{}",
                manager.log()
            );
            renewals(&outcomes)
        };
        let before = sum();
        manager.json(&cluster, command).unwrap();
        let start = Instant::now();
        while sum() == before {
            assert!(start.elapsed() < PATIENCE, "{}", manager.log());
        }
        for _ in 0..3 {
            sum();
        }
        longest
    };
    let renewal = pause(&["job", "renew", JOB]);
    let drain = pause(&["fabric", "drain", "leaf2", "--reason", "new fan"]);
    println!("the longest all-reduce: {renewal:.0?} with a renewal, {drain:.0?} when a spine is drained");
    let shown = || manager.json(&cluster, &["fabric", "show"]).unwrap()["boxes"][2].clone();
    wait("it is drained", || shown()["drained"] == true);
    assert_eq!((jobs(&cluster, Some(2)), &shown()["drain"]), (0, &"new fan".into()));
    manager.kill().unwrap();
    let manager = start_manager(&cluster);
    let shown = manager.json(&cluster, &["fabric", "show"]).unwrap()["boxes"][2].clone();
    assert_eq!(shown["drain"], "new fan", "it survives the manager");
    work(&mut group, 2);
    manager.json(&cluster, &["fabric", "undrain", "leaf2"]).unwrap();
    let start = Instant::now();
    while jobs(&cluster, Some(2)) == 0 {
        assert!(start.elapsed() < PATIENCE, "{}", manager.log());
        work(&mut group, 3);
    }
    work(&mut group, 4);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn rings_spread_over_two_spines_and_come_together_when_one_is_cut_off() {
    let (cluster, manager) = two_spines();
    let job = JobSpec { rings: 2, ..JobSpec::new(JOB, 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    let members = |node: Option<usize>| cluster.netsum_on(node, &["job", "show", JOB]);
    assert!(members(Some(0)).unwrap().contains("uplink=1,second=1"), "{}", members(Some(0)).unwrap());
    assert!(members(Some(2)).unwrap().contains("0-1,2-3"));
    cluster.lab().leaf(2).set_link("down1", false).unwrap();
    let cut = Instant::now();
    let without = work_until_boxes(&cluster, &mut group, || manager.log());
    println!("{without} sums without the boxes; {:.1} s until they sum again", cut.elapsed().as_secs_f64());
    println!("{}\n{}", manager.log(), group.log());
    work(&mut group, 2);
    assert!(members(Some(2)).is_err() && manager.log().contains("its tree has changed"), "{}", manager.log());
    // And apart again.
    cluster.lab().leaf(2).set_link("down1", true).unwrap();
    let start = Instant::now();
    while members(Some(2)).is_err() {
        assert!(start.elapsed() < PATIENCE, "{}", manager.log());
        work_until_boxes(&cluster, &mut group, || manager.log());
    }
    work(&mut group, 3);
    println!("apart after {:.1} s\n{}\n{}", start.elapsed().as_secs_f64(), manager.log(), group.log());
}
