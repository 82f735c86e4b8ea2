//! Boxes in levels: leaves add up what comes from their hosts, and a spine what comes from them.

use netsum_common::counters::Counter;
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, one_on_each_host};
use netsum_lab::faults::Faults;
use netsum_lab::racks::Racks;

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn one_copy_of_a_rack_goes_up_and_every_sum_is_right() {
    for (racks, hosts, mtu) in [(2, 4, 1024), (4, 16, 2048), (3, 3, 256), (2, 5, 512)] {
        let spec = LabSpec { racks, mtu: 2300, ..LabSpec::hosts(hosts) };
        let cluster = Cluster::without_daemon(spec).unwrap();
        let job = JobSpec { mtu, ..JobSpec::new("racks", hosts as u32) };
        let boxes = Racks::new(cluster.lab(), &job, false).unwrap();
        let mut group = cluster.ranks_alone(&job, &one_on_each_host(hosts as u32)).unwrap();
        for (dtype, len, seed) in [("i32", 1, 1), ("f32", 1000, 2), ("i32", 100_001, 3), ("f32", 150_000, 4)]
        {
            let what = format!("{racks} racks, {hosts} hosts, {len} {dtype}");
            let outcomes = group
                .all_reduce(dtype, len, seed)
                .unwrap_or_else(|e| panic!("{what}: {e:#}\n{}\n{}", group.log(), boxes.counted()));
            for outcome in outcomes {
                assert_eq!(
                    (&*outcome.mode, outcome.wrong),
                    ("box", 0),
                    "{what}: {outcome:?}\n{}",
                    boxes.counted()
                );
            }
        }
        let released = boxes.count_on_spine(Counter::Released).unwrap();
        for rack in 0..racks {
            let count = |counter| boxes.count(rack, counter).unwrap();
            assert_eq!((count(Counter::Partials), count(Counter::Totals)), (released, released), "{rack}");
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn one_percent_loss_in_each_direction() {
    let spec = LabSpec { racks: 2, mtu: 2300, cables: true, ..LabSpec::hosts(4) };
    let cluster = Cluster::without_daemon(spec).unwrap();
    let job = JobSpec::new("lossy", 4);
    let boxes = Racks::new(cluster.lab(), &job, false).unwrap();
    let mut group = cluster.ranks_alone(&job, &one_on_each_host(4)).unwrap();
    for (i, host) in cluster.lab().hosts().iter().enumerate() {
        host.set_faults(Faults::loss(0.01), Faults::loss(0.01), i as u32).unwrap();
    }
    for seed in 0..4 {
        let outcomes = group
            .all_reduce("f32", 300_000, seed)
            .unwrap_or_else(|e| panic!("{e:#}\n{}\n{}", group.log(), boxes.counted()));
        for outcome in outcomes {
            assert_eq!((&*outcome.mode, outcome.wrong), ("box", 0), "{outcome:?}\n{}", boxes.counted());
        }
    }
    assert!(boxes.count_on_spine(Counter::Moved).unwrap() > 0, "{}", boxes.counted());
}
