//! Hosts behind slow links that lose nothing: the links have the right rate in each direction, and
//! nothing is retransmitted, however long the hosts' send queues are.

use std::time::Duration;

use netsum_lab::cluster::{Cluster, Group, JobSpec, one_on_each_host};
use netsum_lab::faults::{Bottleneck, Fault, Faults};
use netsum_lab::netns::{Netns, output};
use netsum_lab::traffic::{tcp_transfer, udp_flood};
use netsum_lab::{Host, Lab, LabSpec};

const KIB: u32 = 1 << 10;
const MIB: usize = 1 << 20;
const SECOND: Duration = Duration::from_secs(1);

/// Hosts behind links of this rate.
fn lab(hosts: u32, rate: &str) -> Cluster {
    let rate = Some(rate.parse().unwrap());
    Cluster::start(LabSpec { mtu: 2300, rate, ..LabSpec::hosts(hosts as usize) }).unwrap()
}

/// Runs all-reduces of these sizes in bytes, and returns the number of retransmitted packets.
fn sent_again(group: &mut Group, mode: &str, sizes: &[usize], what: &str) -> u64 {
    group.start_together();
    let (mut again, mut micros) = (0, 0);
    for (seed, bytes) in sizes.iter().enumerate() {
        let outcomes = group
            .all_reduce("f32", bytes / 4, seed as u64)
            .unwrap_or_else(|e| panic!("{what}: {e:#}\n{}", group.log()));
        assert!(outcomes.iter().all(|o| o.mode == mode && o.wrong == 0), "{what}: {outcomes:?}");
        again += outcomes.iter().map(|o| o.retransmissions).sum::<u64>();
        micros += outcomes.iter().map(|o| o.micros).max().unwrap_or(0);
    }
    println!("{what}: {again} sent again, {} ms", micros / 1000);
    again
}

/// Nothing is sent again in one of three runs at least. A rank that gets no CPU for longer than its
/// neighbour's timer looks like a lost packet: that is not the network's fault, and happens on a
/// busy machine, but not three times in a row.
fn assert_nothing_sent_again(what: &str, mut run: impl FnMut() -> u64) {
    assert!((0..3).any(|_| run() == 0), "{what}: packets were sent again in each of three runs");
}

/// Sums by the box, with a job for each window, in messages of 64 KiB.
fn by_the_box(hosts: u32, rate: &str, windows: &[u32], sizes: &[usize]) {
    let cluster = lab(hosts, rate);
    for &window in windows {
        let name = format!("window-{window}");
        let job = JobSpec { message_size: 64 * KIB, window, ..JobSpec::new(&name, hosts) };
        let token = cluster.create_job(&job).unwrap();
        let mut group = cluster.ranks(&job, &token, &one_on_each_host(hosts)).unwrap();
        let what = format!("{rate}, {hosts} hosts, window {window}");
        assert_nothing_sent_again(&what, || {
            let again = sent_again(&mut group, "box", sizes, &what);
            if again > 0 {
                println!("{}", cluster.netsum(&["stats", &name]).unwrap());
            }
            again
        });
        drop(group);
        cluster.netsum(&["job", "delete", &name]).unwrap();
    }
}

/// Sums by the hosts' ring, without a box.
fn by_the_ring(hosts: u32, rate: &str, window: u32, sizes: &[usize]) {
    let cluster = lab(hosts, rate);
    let job = JobSpec { message_size: 64 * KIB, window, ..JobSpec::new("ring", hosts) };
    let mut group = cluster.ranks_alone(&job, &one_on_each_host(hosts)).unwrap();
    let what = format!("{rate}, {hosts} hosts, the hosts' ring, window {window}");
    // Until the ranks fall back, they send everything to be summed by a box.
    group.all_reduce("i32", 1000, 1).unwrap();
    assert_nothing_sent_again(&what, || sent_again(&mut group, "ring", sizes, &what));
}

/// The ranks suspect neither a dead rank nor a box that does not sum.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_message_slower_than_the_timeout_is_no_fault() {
    let cluster = lab(2, "10mbit");
    let timeout = 2 * SECOND;
    let job = JobSpec { message_size: 4 << 20, window: 1, timeout, ..JobSpec::new("long", 2) };
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    sent_again(&mut group, "box", &[8 * MIB], "one message of 3.4 s after another");
    drop(group);
    let mut group = cluster.ranks_alone(&job, &one_on_each_host(2)).unwrap();
    group.all_reduce("i32", 1000, 1).unwrap();
    sent_again(&mut group, "ring", &[16 * MIB], "the same by the hosts' ring");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn without_a_rate_nothing_is_retransmitted_either() {
    let cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let job = JobSpec::new("clean", 4);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(4)).unwrap();
    assert_nothing_sent_again("no rate", || {
        let again = sent_again(&mut group, "box", &[4_000_000; 5], "no rate");
        if again > 0 {
            println!("{}", cluster.netsum(&["stats", "clean"]).unwrap());
        }
        again
    });
    for counter in ["steer_failed", "redirect_failed", "credit_violation", "internal_error"] {
        assert_eq!(cluster.counter(Some("clean"), counter).unwrap(), 0, "{counter}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_flood_arrives_at_the_rate_and_no_more() {
    for (text, rate) in [("100mbit", 100e6), ("250mbit", 250e6)] {
        // One sender fills its own link, two senders fill the receiver's. Queues stay full, so each
        // case has its own lab.
        for senders in [1, 2] {
            let spec = LabSpec { rate: Some(text.parse().unwrap()), ..LabSpec::hosts(senders + 1) };
            let lab = Lab::new(spec).unwrap();
            let (first, from): (&Host, Vec<&Netns>) =
                (lab.host(0), lab.hosts()[1..].iter().map(|host| &**host).collect());
            let tcp =
                tcp_transfer(from[0], first, first.ip(0), rate as usize / 16, 10 * SECOND).unwrap();
            let tcp = tcp * 8.0 / rate;
            let udp = udp_flood(&from, first, first.ip(0), 1428, SECOND).unwrap();
            // The rate includes 42 bytes of headers.
            let udp = udp * 8.0 / rate * 1470.0 / 1428.0;
            println!("{text}, {senders} senders: {udp:.3} of it by UDP, {tcp:.3} by TCP");
            assert!(
                [udp, tcp].iter().all(|share| (0.8..1.01).contains(share)),
                "{text}: {udp} {tcp}"
            );
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn links_with_a_rate_lose_and_mark_packets_of_all_protocols() {
    let rate = Some("100mbit".parse().unwrap());
    let cluster =
        Cluster::start(LabSpec { faulty_links: true, rate, ..LabSpec::hosts(4) }).unwrap();
    let hosts = cluster.lab().hosts();
    let tcp = |faults: Faults, bytes: usize| {
        hosts[1].set_faults(faults, Faults::NONE, 3).unwrap();
        tcp_transfer(&hosts[1], &hosts[0], hosts[0].ip(0), bytes, 20 * SECOND).unwrap();
        hosts[1].fault_link().unwrap().counts().unwrap().up
    };
    let lossy = tcp(Faults::loss(0.01), 8 * MIB);
    let share = lossy.lost as f64 / lossy.seen as f64;
    assert!(lossy.seen > 5000 && (0.005..0.02).contains(&share), "{lossy:?}");
    for host in [&hosts[0], &hosts[1]] {
        host.enter(|| std::fs::write("/proc/sys/net/ipv4/tcp_ecn", "1")).unwrap();
    }
    let half = Bottleneck { rate: 6 << 20, depth: 32 << 10 };
    let marked = tcp(Faults { bottleneck: Some(half), ..Faults::NONE }, 8 * MIB);
    assert!(marked.lost == 0 && marked.marked > 10, "{marked:?}");

    for host in hosts {
        host.set_faults(Faults::loss(0.01), Faults::loss(0.01), 4).unwrap();
    }
    let job = JobSpec { message_size: 64 * KIB, window: 2, ..JobSpec::new("lossy", 4) };
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(4)).unwrap();
    let again = sent_again(&mut group, "box", &[MIB, MIB], "1 % lost each way");
    let counts = hosts.iter().map(|host| host.fault_link().unwrap().counts().unwrap());
    let lost: u64 = counts.map(|c| c.up.lost + c.down.lost).sum();
    println!("{lost} lost, {again} sent again");
    assert!(lost > 100 && again > 0);
    let error = hosts[0]
        .set_faults(Faults::of(Fault::Corrupt, 0.1), Faults::NONE, 1)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("a faulty link with a rate loses and marks packets by share, and no more"),
        "{error}"
    );
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn results_come_at_the_rate_too() {
    let cluster = lab(4, "100mbit");
    // Then contributions arrive as fast as possible.
    for host in cluster.lab().hosts() {
        output(host.command("tc").args(["qdisc", "del", "dev", Host::INTERFACE, "root"])).unwrap();
    }
    for xdp in [vec![], vec![0, 1, 2, 3]] {
        let name = if xdp.is_empty() { "udp" } else { "xdp" };
        let job = JobSpec { message_size: 64 * KIB, window: 2, xdp, ..JobSpec::new(name, 4) };
        let token = cluster.create_job(&job).unwrap();
        let mut group = cluster.ranks(&job, &token, &one_on_each_host(4)).unwrap();
        let outcomes = group.all_reduce("f32", 4 * MIB / 4, 1).unwrap();
        let millis = outcomes.iter().map(|o| o.micros).min().unwrap() / 1000;
        println!("{name}: 4 MiB in {millis} ms");
        // 4 MiB at 100 Mb/s take at least this long.
        assert!(millis >= 335, "{name}: 4 MiB in {millis} ms");
        assert!(outcomes.iter().all(|o| o.mode == "box" && o.wrong == 0), "{name}: {outcomes:?}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn four_hosts_at_100_megabits_do_not_retransmit() {
    by_the_box(4, "100mbit", &[1, 8, 32], &[4 * MIB, 4 * MIB, 400, 4 * MIB]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test --all"]
fn eight_hosts_at_100_megabits_do_not_retransmit() {
    by_the_box(8, "100mbit", &[1, 8, 32], &[4 * MIB, 400, 4 * MIB]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn small_vectors_at_10_megabits_are_not_retransmitted() {
    by_the_box(4, "10mbit", &[1, 8], &[4, 400, 4000, 40_000, 400, 200_000, 4]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn four_hosts_at_a_gigabit_do_not_retransmit() {
    by_the_box(4, "1gbit", &[8], &[16 * MIB, 400, 16 * MIB]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_hosts_own_ring_does_not_retransmit() {
    by_the_ring(2, "10mbit", 8, &[MIB, 400]);
    by_the_ring(4, "100mbit", 2, &[16 * MIB, 400]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test --all"]
fn the_ring_of_more_hosts_or_with_a_larger_window_does_not_retransmit() {
    by_the_ring(4, "10mbit", 8, &[MIB, 400]);
    by_the_ring(3, "100mbit", 32, &[4 * MIB, 400]);
}
