//! Sums in two levels: in a host's shared memory, and between hosts.

use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, Group, JobSpec};

fn start(cluster: &Cluster, job: &JobSpec, hosts: &[usize]) -> Group {
    let token = cluster.create_job(job).unwrap();
    let places: Vec<_> = hosts.iter().map(|host| (*host, 0)).collect();
    cluster.ranks(job, &token, &places).unwrap()
}

/// Bytes that all ranks have sent since the start.
fn work(group: &mut Group, dtype: &str, len: usize, hierarchical: bool) -> u64 {
    let outcomes = group
        .all_reduce(dtype, len, len as u64)
        .unwrap_or_else(|e| panic!("{e:#}\n{}", group.log()));
    for (rank, o) in outcomes.iter().enumerate() {
        let is_right = (&*o.mode, o.hierarchical, o.wrong, o.fallbacks);
        assert_eq!(is_right, ("box", hierarchical, 0, 0), "rank {rank}\n{}", group.log());
    }
    outcomes.iter().map(|o| o.bytes_sent).sum()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_box_sums_one_copy_of_each_host() {
    let cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let places = [&[0, 0, 0, 0, 1, 1, 1, 1][..], &[0, 1, 2, 3, 0, 1, 2, 3], &[0, 1, 1, 2, 2]];
    for (n, hosts) in places.iter().enumerate() {
        let sent = ["off", "auto"].map(|hierarchy| {
            let job = JobSpec {
                hierarchy,
                ..JobSpec::new(&format!("hosts-{n}-{hierarchy}"), hosts.len() as u32)
            };
            let mut group = start(&cluster, &job, hosts);
            let is_on = hierarchy == "auto";
            let before = work(&mut group, "f32", 100, false);
            for (dtype, len) in [("f32", 500_000), ("i32", 300_001), ("f32", 70_000)] {
                work(&mut group, dtype, len, is_on);
            }
            let sent = work(&mut group, "f32", 5000, false) - before;
            group.end();
            cluster.netsum(&["job", "delete", &job.name]).unwrap();
            sent
        });
        // Each host sends one copy instead of one for each rank.
        let mut counts = [0; 4];
        hosts.iter().for_each(|host| counts[*host] += 1);
        let copies = counts.iter().filter(|c| **c > 0).count();
        let (ratio, least) = (sent[0] as f64 / sent[1] as f64, hosts.len() as f64 / copies as f64);
        assert!(ratio > 0.9 * least, "{ratio} instead of {least}: {sent:?}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_that_is_killed_is_named_at_once() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let job = JobSpec { timeout: Duration::from_secs(30), ..JobSpec::new("killed", 4) };
    let mut group = start(&cluster, &job, &[0, 0, 1, 1]);
    work(&mut group, "f32", 200_000, true);
    group.kill(3).unwrap();
    let begun = Instant::now();
    let error = format!("{:#}", group.all_reduce("f32", 200_000, 1).unwrap_err());
    assert!(error.contains("rank 3 died"), "{error}\n{}", group.log());
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}
