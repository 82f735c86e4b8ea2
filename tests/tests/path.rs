//! Paths on which half of the packets get through: the cause is named within 2 s, by the ranks, in
//! the daemon's log and by `netsum diagnose`.

use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, TIMEOUT, one_on_each_host};
use netsum_lab::faults::Faults;
use netsum_lab::netns::{Netns, output};
use netsum_lab::traffic::ping;

use crate::interfaces::drop_what_is_forwarded;

fn run(netns: &Netns, program: &str, words: &str) {
    output(netns.command(program).args(words.split(' '))).unwrap();
}

/// Waits until the log has all these words in one line.
fn is_logged(cluster: &Cluster, words: &[&str]) {
    let start = Instant::now();
    let has = |line: &str| words.iter().all(|word| line.contains(word));
    while !cluster.daemon_log().lines().any(has) {
        assert!(start.elapsed() < TIMEOUT, "{words:?}: {}", cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The number between "did not answer within " and the unit, in ms.
fn millis(error: &str) -> f64 {
    let (_, after) =
        error.split_once("did not answer within ").unwrap_or_else(|| panic!("{error}"));
    let number: String = after.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    let factor = if after[number.len()..].starts_with("ms") { 1.0 } else { 1000.0 };
    number.parse::<f64>().unwrap() * factor
}

fn diagnosis(cluster: &Cluster, job: &str) -> String {
    cluster.netsum(&["diagnose", job, "--watch", "300ms"]).unwrap()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_filter_between_neighbours_is_named_before_the_first_sum() {
    let cluster = Cluster::start(LabSpec::hosts(3)).unwrap();
    let job = JobSpec::new("filtered", 3);
    let token = cluster.create_job(&job).unwrap();
    // The neighbours know each other's MAC addresses, so only RoCE is lost.
    let hosts = cluster.lab().hosts();
    for (host, next) in hosts.iter().zip(hosts.iter().cycle().skip(1)) {
        ping(host, next.ip(0), 1, TIMEOUT).unwrap();
    }
    cluster.lab().box_().enter(drop_what_is_forwarded);
    let error = format!("{:#}", cluster.ranks(&job, &token, &one_on_each_host(3)).unwrap_err());
    assert!(error.contains("chain bridge f c filters forwarded packets, policy drop"), "{error}");
    assert!(millis(&error) < 5000.0, "{error}");
    is_logged(&cluster, &["job filtered: rank", "chain bridge f c filters"]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_veth_without_gro_is_named_before_the_first_sum_and_in_mid_job() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let job = JobSpec::new("deaf", 2);
    let token = cluster.create_job(&job).unwrap();
    let gro = |how| run(cluster.lab().host(1), "ethtool", &format!("-K eth0 gro {how}"));
    let words = ["port port1: it takes no frames that XDP redirects to it", "gro on"];
    gro("off");
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    is_logged(&cluster, &["job deaf: rank", words[0], words[1]]);
    let printed = diagnosis(&cluster, "deaf");
    assert!(words.iter().all(|word| printed.contains(word)), "{printed}");
    let by = |group: &mut netsum_lab::group::Group| {
        let outcomes = group.all_reduce("i32", 10_000, 1).unwrap();
        outcomes.into_iter().map(|outcome| outcome.mode).collect::<Vec<_>>()
    };
    assert_eq!(by(&mut group), ["ring", "ring"]);
    let told = || group.log().contains("cause of the fallback, reported by the box: port port1");
    let start = Instant::now();
    while !told() {
        assert!(start.elapsed() < TIMEOUT, "{}", group.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(group);

    gro("on");
    let other = JobSpec::new("deafened", 2);
    let token = cluster.create_job(&other).unwrap();
    let mut group = cluster.ranks(&other, &token, &one_on_each_host(2)).unwrap();
    assert_eq!(by(&mut group), ["box", "box"]);
    gro("off");
    // Rank 0 gets its sums, rank 1 does not.
    assert_eq!(by(&mut group)[1], "ring");
    is_logged(&cluster, &["job deafened: rank", words[0], words[1]]);
    gro("on");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_whose_packets_come_in_by_another_card_is_named() {
    let cluster = Cluster::start(LabSpec { ips_per_host: 2, ..LabSpec::hosts(3) }).unwrap();
    let (box_, host) = (cluster.lab().box_(), cluster.lab().host(0));
    let (second, name) = (host.ip(1), host.name());
    run(
        box_,
        "ip",
        &format!("link add port3 type veth peer name eth1 address 02:00:00:00:00:77 netns {name}"),
    );
    run(box_, "ip", "link set port3 master br0 up");
    run(box_, "ethtool", "-K port3 gro on");
    run(host, "ip", &format!("address del {second}/16 dev eth0"));
    run(host, "ip", "link set eth1 up");
    run(host, "ethtool", "-K eth1 gro on tso off");
    run(host, "ip", &format!("address add {second}/16 dev eth1"));
    let start = Instant::now();
    while !cluster.netsum(&["port", "show"]).unwrap().contains("port3") {
        assert!(start.elapsed() < TIMEOUT, "{}", cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
    let job = JobSpec::new("cards", 4);
    let token = cluster.create_job(&job).unwrap();
    let places = [(0, 0), (1, 0), (0, 1), (2, 0)];
    let error = format!("{:#}", cluster.ranks(&job, &token, &places).unwrap_err());
    let cause = format!("packets of rank 2 ({second}) arrive at port0, not port3");
    assert!(error.contains(&cause) && error.contains("arp_ignore"), "{error}");
    assert!(millis(&error) < 5000.0, "{error}");
    is_logged(&cluster, &["job cards: rank", &cause]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_of_a_running_job_test_their_path_again() {
    let cluster = Cluster::start(LabSpec { faulty_links: true, ..LabSpec::hosts(3) }).unwrap();
    let job = JobSpec::new("running", 3);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(3)).unwrap();
    group.all_reduce("i32", 10_000, 1).unwrap();
    let acknowledged = || {
        let printed = cluster.netsum_json(&["path", "running"]).unwrap();
        let ranks = printed["ranks"].as_array().unwrap().clone();
        let of = |rank: &serde_json::Value| rank["acknowledged"].as_bool().unwrap();
        (ranks.iter().map(of).collect::<Vec<_>>(), printed)
    };
    let (all, printed) = acknowledged();
    assert_eq!(all, [true; 3], "{printed:#}");
    assert!(printed["ranks"][0]["packets"].as_u64().unwrap() > 0, "{printed:#}");
    // The packets of rank 2 are lost: its data to rank 0, and its acknowledgements to rank 1.
    cluster.lab().host(2).set_faults(Faults::loss(1.0), Faults::NONE, 1).unwrap();
    let (some, printed) = acknowledged();
    assert_eq!(some, [true, false, false], "{printed:#}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_port_whose_mtu_is_lowered_in_mid_job_is_named() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let job = JobSpec::new("narrowed", 2);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    group.all_reduce("i32", 10_000, 1).unwrap();
    run(cluster.lab().box_(), "ip", "link set port1 mtu 900");
    let printed = diagnosis(&cluster, "narrowed");
    assert!(printed.contains("port port1 has an MTU of 900"), "{printed}");
    run(cluster.lab().box_(), "ip", "link set port1 mtu 1500");
}
