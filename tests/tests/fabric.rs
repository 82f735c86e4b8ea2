//! Ranks join a manager of several boxes in the same way as a single box.

use netsum_lab::attacker::arp_claim;
use netsum_lab::cluster::{Cluster, Group, JobSpec, TIMEOUT, one_on_each_host};
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::tap::Tap;
use netsum_lab::{Host, LabSpec};
use std::time::{Duration, Instant};

pub const SECOND: Duration = Duration::from_secs(1);
pub const JOB: &str = "train";

/// Two leaves with two hosts each, and spines, each with its own daemon.
pub fn fabric(spines: usize) -> Cluster {
    fabric_of(LabSpec { spines, ..LabSpec::default() }, false)
}

pub fn fabric_of(spec: LabSpec, pinned: bool) -> Cluster {
    let spec = LabSpec { hosts: 4, racks: 2, mtu: 2300, ..spec };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    if pinned {
        cluster.pin();
    }
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    cluster
}

/// A host at a leaf without ranks sends in the names of ranks at other leaves.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_addresses_are_reserved_at_every_box() {
    let mut cluster =
        Cluster::without_daemon(LabSpec { hosts: 6, racks: 3, mtu: 2300, ..LabSpec::default() })
            .unwrap();
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    let manager = cluster.start_manager().unwrap();
    let mut group =
        cluster.ranks_of(&manager, &JobSpec::new(JOB, 4), &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    let foreign = cluster.lab().host(4);
    let broadcast = |from: u8, psn: u32| {
        let mut frame = FrameSpec::send(from + 1, 99, 7, psn, lanes(psn, 64)).build();
        frame[..6].fill(0xff);
        frame
    };
    let forged: Vec<Vec<u8>> = (0..4)
        .flat_map(|rank| [arp_claim([10, 0, 0, rank + 1], foreign), broadcast(rank, 1)])
        .collect();
    let taps = [5, 2].map(|host| Tap::open(cluster.lab().host(host), Host::INTERFACE).unwrap());
    let tap = Tap::open(foreign, Host::INTERFACE).unwrap();
    forged.iter().for_each(|frame| tap.send(frame).unwrap());
    let own = broadcast(4, 2);
    tap.send(&own).unwrap();
    for tap in &taps {
        let first = tap.receive(TIMEOUT, |f| f == own || forged.iter().any(|g| g == f)).unwrap();
        assert_eq!(first, own, "a forged frame has come by");
    }
    // Packets that ranks themselves send reach all hosts.
    for rank in 0..4 {
        let frame = broadcast(rank, 3);
        Tap::open(cluster.lab().host(rank.into()), Host::INTERFACE).unwrap().send(&frame).unwrap();
        taps[0].receive(TIMEOUT, |f| f == frame).unwrap_or_else(|e| panic!("rank {rank}: {e:#}"));
    }
    work(&mut group, 2);
    // The addresses are free again when the job is over.
    drop(group);
    let start = Instant::now();
    let claim = arp_claim([10, 0, 0, 1], foreign);
    while tap.send(&claim).is_ok() && taps[0].receive(SECOND / 10, |f| f == claim).is_err() {
        assert!(start.elapsed() < TIMEOUT, "a rank's address stays reserved");
    }
}

/// The manager is on the spine. Ranks at leaves connect to it, and send it their tokens.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_managers_address_is_nobody_elses_at_any_box() {
    let cluster = fabric(1);
    let manager = cluster.start_manager().unwrap();
    let foreign = cluster.lab().host(3);
    let std::net::IpAddr::V4(ip) = cluster.manager().ip() else { panic!("it has IPv4") };
    let claim = arp_claim(ip.octets(), foreign);
    let tap = Tap::open(foreign, Host::INTERFACE).unwrap();
    let taps = [0, 2].map(|host| Tap::open(cluster.lab().host(host), Host::INTERFACE).unwrap());
    let mut psn = 0;
    let start = Instant::now();
    loop {
        tap.send(&claim).unwrap();
        let mut last = FrameSpec::send(4, 99, 7, psn, lanes(psn, 64)).build();
        last[..6].fill(0xff);
        tap.send(&last).unwrap();
        let arrived =
            |tap: &Tap| tap.receive(TIMEOUT, |f| f == claim || f == last).unwrap() == claim;
        // All of them are emptied.
        if !taps.iter().map(arrived).collect::<Vec<_>>().contains(&true) {
            break;
        }
        assert!(
            start.elapsed() < TIMEOUT,
            "the manager's address is taken over: {}",
            manager.log()
        );
        psn += 1;
    }
    let mut group =
        cluster.ranks_of(&manager, &JobSpec::new(JOB, 4), &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
}

/// The leaves' ports have names like a switch's. The port that comes first alphabetically is not
/// the one through which the bridge sends unsummed traffic.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn discovered_links_follow_the_bridge_not_their_names() {
    let spec = LabSpec { spines: 2, hosts: 4, racks: 2, mtu: 2300, ..LabSpec::default() };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    for (leaf, (old, new)) in [0, 1]
        .iter()
        .flat_map(|leaf| [("uplink", "swp9"), ("uplink1", "swp10")].map(|names| (*leaf, names)))
    {
        let mut ip = cluster.lab().leaf(leaf).command("ip");
        netsum_lab::netns::output(ip.args(["link", "set", old, "name", new])).unwrap();
    }
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    let manager = cluster.start_manager_that_finds_links().unwrap();
    wait("all links carry", || {
        let shown = manager.json(&cluster, &["fabric", "show"]).unwrap();
        let links = shown["links"].as_array().unwrap();
        links.len() == 4 && links.iter().all(|link| link["up"] == true)
    });
    for rings in [1, 2] {
        let job = JobSpec { rings, ..JobSpec::new(&format!("rings{rings}"), 4) };
        let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
        work(&mut group, 1);
        drop(group);
    }
    for box_ in [Some(0), Some(1), None] {
        let stats = cluster.netsum_on(box_, &["-j", "stats"]).unwrap();
        let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
        assert_eq!(stats["spoofed"].as_u64().unwrap_or(0), 0, "{box_:?}: {stats}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn links_of_boxes_of_one_image_are_found_and_no_others() {
    let spec = LabSpec { hosts: 4, racks: 2, mtu: 2300, ..LabSpec::default() };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    for leaf in [0, 1] {
        let mut ip = cluster.lab().leaf(leaf).command("ip");
        netsum_lab::netns::output(ip.args([
            "link",
            "set",
            "uplink",
            "address",
            "02:00:00:00:02:01",
        ]))
        .unwrap();
    }
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    let manager = cluster.start_manager_that_finds_links().unwrap();
    wait("both links carry, and nothing else", || {
        let shown = manager.json(&cluster, &["fabric", "show"]).unwrap();
        let links = shown["links"].as_array().unwrap();
        let ends = |link: &serde_json::Value| {
            ["below", "above"]
                .map(|end| link[end].as_str().unwrap_or_default().to_owned())
                .join(" ")
        };
        let ends: Vec<String> = links.iter().filter(|link| link["up"] == true).map(ends).collect();
        ends == ["leaf0/uplink spine0/rack0", "leaf1/uplink spine0/rack1"]
    });
    let job = JobSpec::new("train", 4);
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
}

/// Checks that the boxes compute right sums, of two types.
pub fn work(group: &mut Group, seed: u64) {
    for (dtype, len) in [("f32", 30_000), ("i32", 50_000), ("f32", 1_000)] {
        let outcomes = group.all_reduce(dtype, len, seed).unwrap();
        assert!(
            outcomes.iter().all(|o| (&*o.mode, o.wrong) == ("box", 0)),
            "{outcomes:?}\n{}",
            group.log()
        );
    }
}

pub fn jobs(cluster: &Cluster, rack: Option<usize>) -> usize {
    let shown = cluster.netsum_on(rack, &["-j", "job", "show"]).unwrap();
    serde_json::from_str::<serde_json::Value>(&shown).unwrap().as_array().unwrap().len()
}

pub fn wait(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_join_the_fabric_and_racks_send_one_copy_up() {
    let cluster = fabric(1);
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec { rings: 2, mtu: 0, ..JobSpec::new(JOB, 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    // The largest that fits the links' MTU of 2300, at every box.
    for rack in [Some(0), Some(1), None] {
        let shown = cluster.netsum_on(rack, &["-j", "job", "show", JOB]).unwrap();
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(shown["mtu"], 2176, "{rack:?}: {shown}");
    }
    let stats = cluster.netsum_on(Some(1), &["-j", "stats"]).unwrap();
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    assert!(stats["partials_sent"].as_u64().unwrap() > 0, "{stats}");
    let all_sum = || {
        let shown = manager.json(&cluster, &["fabric", "show"]).unwrap();
        let sums =
            |b: &serde_json::Value| b["answers"] == true && b["jobs"] == serde_json::json!([JOB]);
        let (boxes, links) =
            (shown["boxes"].as_array().unwrap(), shown["links"].as_array().unwrap());
        boxes.len() == 3 && boxes.iter().all(sums) && links.iter().all(|link| link["up"] == true)
    };
    // `fabric show` reports what the manager saw at its last poll.
    wait("fabric show has three boxes at work", all_sum);
    let ports = &manager.json(&cluster, &["job", "show", JOB]).unwrap()["flows"];
    assert!(ports.to_string().contains("leaf1/port"), "{ports}");
    // Without the manager the boxes continue, and the next manager takes the job over.
    manager.kill().unwrap();
    work(&mut group, 2);
    let manager = cluster.start_manager().unwrap();
    work(&mut group, 3);
    assert!(manager.log().contains("1 jobs taken over"), "{}", manager.log());
    assert_eq!(manager.json(&cluster, &["job", "show", JOB]).unwrap()["mtu"], 2176);
    assert_eq!([Some(0), Some(1), None].map(|rack| jobs(&cluster, rack)), [1, 1, 1]);
    drop(group);
    wait("boxes forget what has ended", || {
        [Some(0), Some(1), None].iter().all(|rack| jobs(&cluster, *rack) == 0)
    });
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_of_two_racks_in_turns_send_one_copy_up_and_keep_their_numbers() {
    let cluster = fabric(1);
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec { timeout: Duration::from_secs(4), ..JobSpec::new(JOB, 4) };
    let mut places = one_on_each_host(4);
    places.swap(1, 2);
    let mut group = cluster.ranks_of(&manager, &job, &places).unwrap();
    work(&mut group, 1);
    let stats = cluster.netsum_on(Some(1), &["-j", "stats"]).unwrap();
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    assert!(stats["partials_sent"].as_u64().unwrap() > 0, "{stats}");
    let flows = cluster.netsum_on(Some(0), &["-j", "flow", "show", JOB]).unwrap();
    let flows: serde_json::Value = serde_json::from_str(&flows).unwrap();
    let mut ranks: Vec<_> =
        flows.as_array().unwrap().iter().map(|f| f["rank"].as_u64().unwrap()).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 2, 3], "rank 3's comes down");
    manager.json(&cluster, &["job", "reconnect", JOB]).unwrap();
    let start = Instant::now();
    while manager.json(&cluster, &["job", "show", JOB]).unwrap()["epoch"] != 2 {
        assert!(start.elapsed() < TIMEOUT, "{}", manager.log());
        work(&mut group, 2);
    }
    (3..6).for_each(|seed| work(&mut group, seed));
    group.kill(1).unwrap();
    let errors = group.all_reduce("i32", 1000, 6).unwrap_err().to_string();
    assert!(errors.lines().all(|why| why.contains("rank 1 died")), "{errors}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn racks_sum_for_hosts_with_several_ranks() {
    let cluster = fabric(1);
    let manager = cluster.start_manager().unwrap();
    let places: Vec<_> = [0, 0, 1, 1, 2, 2, 3, 3].map(|host| (host, 0)).into();
    let mut group = cluster.ranks_of(&manager, &JobSpec::new(JOB, 8), &places).unwrap();
    work(&mut group, 1);
    let stats = cluster.netsum_on(Some(1), &["-j", "stats"]).unwrap();
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    assert!(stats["partials_sent"].as_u64().unwrap() > 0, "{stats}");
    manager.json(&cluster, &["job", "reconnect", JOB]).unwrap();
    (2..6).for_each(|seed| work(&mut group, seed));
}
