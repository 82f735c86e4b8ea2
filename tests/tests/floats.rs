//! Jobs of hosts that send floats as they are: every sum is the rounded exact one, bit by bit, also
//! where packets are lost and sums are sent again.

use std::time::Duration;

use netsum_lab::LabSpec;
use netsum_lab::cluster::Cluster;
use netsum_lab::faults::{Fault, Faults, Kind};
use netsum_lab::udp_ring::{self, Home, Load};

const RANKS: u32 = 3;

/// Hosts that know of no daemon, and a job of theirs with this LSB.
fn job(cluster: &Cluster, name: &str, load: &Load) {
    let (ranks, size) = (load.ranks.to_string(), load.message_size.to_string());
    let (window, lsb) = (load.window.to_string(), load.lsb.unwrap().to_string());
    let mtu = load.mtu.to_string();
    let create = ["job", "create", name, "--ranks", &ranks, "--message-size", &size];
    let options = ["--window", &window, "--mtu", &mtu, "--dtype", "f32", "--lsb", &lsb];
    cluster.netsum(&[&create[..], &options].concat()).unwrap();
    let lab = cluster.lab();
    let at = |rank: u32| lab.host(rank as usize).ip(0);
    for rank in 0..load.ranks {
        let flow = load.flow(0, rank, 0, at(rank), at((rank + 1) % load.ranks));
        cluster.add_flow(name, &flow, &lab.box_().port(rank as usize)).unwrap();
    }
}

/// Runs the hosts, which check every sum.
fn run(cluster: &Cluster, load: Load) {
    let home = |rank: u32| -> Home<'_> {
        let host = cluster.lab().host(rank as usize);
        (host, host.ip(0))
    };
    let homes: Vec<Home<'_>> = (0..load.ranks).map(home).collect();
    udp_ring::run(load, &homes).unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log()));
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn floats_of_ordinary_hosts_are_added_exactly_whatever_is_lost() {
    let spec = LabSpec { faulty_links: true, mtu: 2200, ..LabSpec::hosts(RANKS as usize) };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    cluster.pin();
    cluster.start_daemon().unwrap();
    let retries = Load { ack_timeout: Duration::from_millis(200), ..Load::new(RANKS) };
    let counter = |cluster: &Cluster, job, name| cluster.counter(Some(job), name).unwrap();

    // A lost contribution, and a lost sum, which the box sends again.
    let load = Load { mtu: 2048, lsb: Some(-40), messages: 30, ..retries };
    job(&cluster, "few", &load);
    let lost = |n| Faults::nth(Kind::Middle, n, Fault::Loss);
    cluster.lab().host(0).set_faults(lost(50), lost(100), 1).unwrap();
    run(&cluster, load);
    assert!(counter(&cluster, "few", "out_of_sequence") > 0, "no contribution was lost");
    assert!(counter(&cluster, "few", "replays") > 0, "no sum was sent again");
    assert_eq!(counter(&cluster, "few", "completed"), load.fragments());
    cluster.netsum(&["job", "delete", "few"]).unwrap();

    // Another LSB, many losses, and a daemon that is replaced: the table outlives it.
    let load = Load { lsb: Some(-24), messages: 60, first_psn: 0x1000, ..retries };
    job(&cluster, "many", &load);
    for host in cluster.lab().hosts() {
        let loss = Faults::loss(0.005);
        host.set_faults(loss, loss, host.number() as u32).unwrap();
    }
    cluster.kill_daemon().unwrap();
    cluster.start_daemon().unwrap();
    run(&cluster, load);
    assert_eq!(counter(&cluster, "many", "completed"), load.fragments());
    let shown = cluster.netsum_json(&["job", "show", "many"]).unwrap();
    assert_eq!((&shown["dtype"], &shown["lsb"]), (&"f32".into(), &(-24).into()), "{shown:#}");
}
