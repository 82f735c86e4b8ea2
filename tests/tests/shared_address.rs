//! Several ranks at one address of a host, over UDP.

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, Group, JobSpec, TIMEOUT};

/// All ranks of a host at its one address.
fn places(hosts: &[usize]) -> Vec<(usize, usize)> {
    hosts.iter().map(|host| (*host, 0)).collect()
}

fn start(cluster: &Cluster, job: &JobSpec, hosts: &[usize]) -> Group {
    let token = cluster.create_job(job).unwrap();
    cluster.ranks(job, &token, &places(hosts)).unwrap()
}

fn work(group: &mut Group, what: &str) {
    for (dtype, len) in [("i32", 1), ("f32", 100_000), ("i32", 70_001)] {
        let outcomes = group
            .all_reduce(dtype, len, len as u64)
            .unwrap_or_else(|e| panic!("{what}: {e:#}\n{}", group.log()));
        for (rank, o) in outcomes.iter().enumerate() {
            let is_right = (&*o.mode, o.wrong, o.fallbacks) == ("box", 0, 0);
            assert!(is_right, "{what}, rank {rank}: {o:?}\n{}", group.log());
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_box_sums_for_hosts_with_several_ranks() {
    let cluster = Cluster::start(LabSpec::hosts(3)).unwrap();
    for (n, hosts) in
        [&[0, 0, 0, 0, 1, 1, 1, 1][..], &[0, 0, 1, 1, 2, 2], &[0, 1, 2, 2], &[0, 1, 1, 0]]
            .iter()
            .enumerate()
    {
        let job = JobSpec { rings: 2, ..JobSpec::new(&format!("many-{n}"), hosts.len() as u32) };
        let mut group = start(&cluster, &job, hosts);
        work(&mut group, &job.name);
        cluster.netsum(&["job", "reconnect", &job.name]).unwrap();
        let epoch = || cluster.netsum_json(&["job", "show", &job.name]).unwrap()["epoch"].clone();
        let begun = std::time::Instant::now();
        while epoch() != 2 {
            work(&mut group, "until the ranks reconnect");
            assert!(begun.elapsed() < TIMEOUT, "{}", group.log());
        }
        work(&mut group, "after a reconnect");
        group.end();
        cluster.netsum(&["job", "delete", &job.name]).unwrap();
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_at_an_address_do_not_depend_on_the_first_one() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let [mut first, mut second] =
        ["first", "second"].map(|name| start(&cluster, &JobSpec::new(name, 2), &[0, 1]));
    work(&mut first, "first");
    work(&mut second, "second");
    // Its ranks have the addresses' unconnected sockets.
    first.kill(0).unwrap();
    first.kill(1).unwrap();
    work(&mut second, "without the first");
    let mut third = start(&cluster, &JobSpec::new("third", 2), &[0, 1]);
    work(&mut third, "third");
    work(&mut second, "beside the third");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_diagnosis_names_ranks_by_their_numbers() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let job = JobSpec::new("named", 4);
    let mut group = start(&cluster, &job, &[0, 0, 1, 1]);
    work(&mut group, "named");
    // The ring is 0, 2, 1, 3.
    let shown = cluster.netsum_json(&["job", "show", "named"]).unwrap();
    let ranks: Vec<u64> = (0..4).map(|i| shown["flows"][i]["rank"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [0, 2, 1, 3], "{shown}");
    group.kill(1).unwrap();
    let error = format!("{:#}", group.all_reduce("i32", 1000, 1).unwrap_err());
    assert!(error.contains("rank 1") || group.log().contains("rank 1"), "{error}\n{}", group.log());
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_host_may_have_most_of_the_ranks() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    cluster.pin();
    cluster.start_daemon().unwrap();
    for hosts in [&[0, 0, 0, 1][..], &[0, 1, 0, 1, 1], &[0, 0]] {
        let job = JobSpec::new("uneven", hosts.len() as u32);
        let mut group = start(&cluster, &job, hosts);
        let on_two_hosts = hosts.contains(&1);
        for (len, is_large) in [(1, false), (100_000, true), (2, false), (100_001, true)] {
            let outcomes = group.all_reduce("f32", len, len as u64).unwrap();
            for (rank, o) in outcomes.iter().enumerate() {
                let is_in_box = is_large && on_two_hosts;
                let expected = (if is_in_box { "box" } else { "ring" }, is_in_box, 0, 0);
                let found = (&*o.mode, o.hierarchical, o.wrong, o.fallbacks);
                assert_eq!(found, expected, "{hosts:?}, rank {rank}\n{}", group.log());
            }
            if len == 100_000 {
                let log = cluster.daemon_log();
                assert!(log.contains("so many ranks have one address"), "{log}");
                cluster.kill_daemon().unwrap();
                cluster.start_daemon().unwrap();
            }
        }
        let diagnosis = cluster.netsum(&["diagnose", &job.name]).unwrap();
        assert!(diagnosis.contains("its ranks sum over the hosts' ring"), "{diagnosis}");
        let log = cluster.daemon_log() + &group.log();
        let missed = ["no sums from the box", "cause of the fallback"];
        assert!(!missed.iter().any(|text| log.contains(text)), "{log}");
        group.end();
        cluster.netsum(&["job", "delete", &job.name]).unwrap();
    }
}
