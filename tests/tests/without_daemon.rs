//! Ranks and the data plane without a daemon: what the box can do to ranks.

use netsum_common::counters::Counter;
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, Outcome, one_on_each_host};
use netsum_lab::faults::Faults;
use netsum_lab::plane::Plane;

fn modes(outcomes: &[Outcome]) -> Vec<&str> {
    outcomes.iter().map(|outcome| &*outcome.mode).collect()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_box_is_detached_and_attached_again_between_all_reduces() {
    let cluster = Cluster::without_daemon(LabSpec::hosts(3)).unwrap();
    let job = JobSpec::new("patient", 3);
    let places = one_on_each_host(3);
    let mut plane = Plane::load(cluster.lab()).unwrap();
    plane.attach().unwrap();
    plane.add(&job, &places).unwrap();
    let mut group = cluster.ranks_alone(&job, &places).unwrap();
    assert_eq!(modes(&group.all_reduce("i32", 100_000, 1).unwrap()), ["box"; 3]);
    plane.detach().unwrap();
    assert_eq!(modes(&group.all_reduce("f32", 100_000, 2).unwrap()), ["ring"; 3]);
    plane.attach().unwrap();
    // The sums are right in any case; ranks that have once changed to their ring may stay with it.
    for outcome in group.all_reduce("f32", 100_000, 3).unwrap() {
        assert_eq!((outcome.wrong, outcome.fallbacks), (0, 1), "{outcome:?}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_box_goes_in_the_middle_of_an_all_reduce() {
    let cluster = Cluster::without_daemon(LabSpec::hosts(3)).unwrap();
    let job = JobSpec::new("torn", 3);
    let places = one_on_each_host(3);
    let mut plane = Plane::load(cluster.lab()).unwrap();
    plane.attach().unwrap();
    plane.add(&job, &places).unwrap();
    let mut group = cluster.ranks_alone(&job, &places).unwrap();
    let len = 3_000_000;
    let files = group.order_all_reduce("i32", len, 5).unwrap();
    let begun = plane.count(Counter::Released).unwrap() + 200;
    while plane.count(Counter::Released).unwrap() < begun {
        std::thread::yield_now();
    }
    plane.detach().unwrap();
    let outcomes = group.check_all_reduce("i32", len, 5, &files).unwrap();
    assert_eq!(modes(&outcomes), ["ring"; 3]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn one_percent_loss_in_each_direction() {
    for (ranks, mtu, rings) in [(2, 2048, 1), (3, 1024, 2), (4, 256, 1)] {
        let spec = LabSpec { mtu: 2300, faulty_links: true, ..LabSpec::hosts(ranks as usize) };
        let cluster = Cluster::without_daemon(spec).unwrap();
        let job = JobSpec { mtu, rings, ..JobSpec::new("lossy", ranks) };
        let places = one_on_each_host(ranks);
        let mut plane = Plane::load(cluster.lab()).unwrap();
        plane.attach().unwrap();
        plane.add(&job, &places).unwrap();
        let mut group = cluster.ranks_alone(&job, &places).unwrap();
        for host in cluster.lab().hosts() {
            host.set_faults(Faults::loss(0.01), Faults::loss(0.01), host.number() as u32).unwrap();
        }
        for (seed, dtype) in [(1, "i32"), (2, "f32")] {
            let what = format!("{ranks} ranks, path MTU {mtu}, {rings} rings, {dtype}");
            let outcomes =
                group.all_reduce(dtype, 200_000, seed).unwrap_or_else(|e| panic!("{what}: {e:#}"));
            println!("{what}: {outcomes:?}");
            assert_eq!(modes(&outcomes), vec!["box"; ranks as usize], "{what}");
        }
        for host in cluster.lab().hosts() {
            let counts = host.fault_link().unwrap().counts().unwrap();
            assert!(counts.up.lost > 0 && counts.down.lost > 0, "{counts:?}");
        }
    }
}

/// QPNs and PSNs follow from the list of ranks, so a second session has those of the first, whose
/// sums the box still holds.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_second_run_without_a_restart_takes_no_sum_of_the_first() {
    // Few messages, which the slots still hold, and many, of which the slots hold the last ones.
    for (first, dtype) in [(1000, "i32"), (40, "f32"), (200_000, "i32")] {
        let cluster = Cluster::without_daemon(LabSpec::hosts(3)).unwrap();
        let job = JobSpec::new("again", 3);
        let places = one_on_each_host(3);
        let mut plane = Plane::load(cluster.lab()).unwrap();
        plane.attach().unwrap();
        plane.add(&job, &places).unwrap();
        let mut group = cluster.ranks_alone(&job, &places).unwrap();
        assert_eq!(modes(&group.all_reduce(dtype, first, 1).unwrap()), ["box"; 3]);
        drop(group);
        let mut group = cluster.ranks_alone(&job, &places).unwrap();
        // Each outcome has been compared with the right sum.
        let outcomes = group.all_reduce(dtype, first.min(1000), 2).unwrap();
        println!("{first} {dtype}: {outcomes:?}");
        assert_eq!(modes(&outcomes), ["ring"; 3]);
        if first <= 1000 {
            assert!(group.log().contains("netsum job restart"), "{}", group.log());
        }
    }
}
