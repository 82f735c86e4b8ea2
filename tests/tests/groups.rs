//! Groups of a job's ranks: communicators that are split.

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, DaemonOptions, Group, JobSpec, Outcome, one_on_each_host};

/// The names of all jobs.
fn jobs(cluster: &Cluster) -> Vec<String> {
    let jobs = cluster.netsum_json(&["job", "list"]).unwrap();
    jobs.as_array().unwrap().iter().map(|job| job["name"].as_str().unwrap().to_owned()).collect()
}

/// Splits the ranks, and checks the sums of each part and of all. Returns the parts' modes.
fn split(group: &mut Group, colors: &[Option<u32>]) -> Vec<String> {
    let outcomes = group.split(colors).unwrap_or_else(|e| panic!("{e:#}\n{}", group.log()));
    let all = (1 << colors.len()) - 1;
    for (rank, Outcome { result, .. }) in outcomes.iter().enumerate() {
        let expected = match colors[rank] {
            None => format!("{all} in all"),
            color => {
                let members: Vec<usize> =
                    (0..colors.len()).rev().filter(|&r| colors[r] == color).collect();
                let own = members.iter().position(|&r| r == rank).unwrap();
                let sum: u32 = members.iter().map(|&r| 1 << r).sum();
                format!("rank {own} of {}, {sum} in the part, {all} in all", members.len())
            }
        };
        assert_eq!(result.as_ref(), Some(&expected), "rank {rank}\n{}", group.log());
    }
    outcomes.into_iter().map(|outcome| outcome.mode).collect()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_box_sums_for_groups_and_for_their_job_at_once() {
    let cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let job = JobSpec { rings: 2, ..JobSpec::new("whole", 4) };
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(4)).unwrap();
    let used = || cluster.netsum_json(&["tenant", "show"]).unwrap();
    let before = used();

    let halves = [Some(0), Some(1), Some(0), Some(1)];
    assert_eq!(split(&mut group, &halves), ["box"; 4], "{}", cluster.daemon_log());
    let names = jobs(&cluster);
    let [whole, first, second] = &names[..] else { panic!("{names:?}") };
    assert_eq!(whole, "whole");
    assert!(first.starts_with("whole/0.0-") && second.starts_with("whole/0.1-"), "{names:?}");
    let shown = cluster.netsum_json(&["job", "show", first]).unwrap();
    assert_eq!((&shown["ranks"], &shown["rings"]), (&2.into(), &2.into()), "{shown}");

    // One rank, which needs no network, three, and one without a part.
    let uneven = [Some(7), Some(1), Some(1), Some(1)];
    assert_eq!(split(&mut group, &uneven)[1..], ["box"; 3]);
    assert_eq!(jobs(&cluster).len(), 2);
    for n in 0..50 {
        let colors = [None, Some(0), Some(n % 2), Some(1)];
        split(&mut group, &colors);
    }
    split(&mut group, &[None; 4]);
    assert_eq!(jobs(&cluster), ["whole"]);
    let after = used();
    let of = |view: &serde_json::Value| {
        ["jobs", "rings", "slots", "memory"].map(|what| view[0][what].clone())
    };
    assert_eq!(of(&after), of(&before), "{after}");
    group.end();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn groups_that_the_box_cannot_sum_use_the_hosts_ring() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    let memory = "[tenants.default]\njobs = 2\n".to_owned();
    cluster.start_daemon_as(&DaemonOptions { listen: memory, ..DaemonOptions::default() }).unwrap();
    let job = JobSpec::new("whole", 4);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &[(0, 0), (0, 0), (1, 0), (1, 0)]).unwrap();
    // The limit leaves room for one group.
    let modes = split(&mut group, &[Some(0), Some(1), Some(0), Some(1)]);
    assert_eq!(modes.iter().filter(|mode| *mode == "box").count(), 2, "{modes:?}");
    let log = cluster.daemon_log();
    let why = "its ranks sum over the hosts' ring: tenant `default`: jobs limit 2, 2 in use";
    // Before, ranks at one address have opened groups for hierarchical sums, which did not fit.
    assert_eq!(log.matches(why).count(), 2, "{log}");
    // What a host sends to itself does not reach the box.
    split(&mut group, &[None; 4]);
    assert_eq!(split(&mut group, &[Some(0), Some(0), None, None])[..2], ["ring"; 2]);
    let log = cluster.daemon_log();
    assert!(log.contains("ranks of one host are neighbours"), "{log}");
    group.end();
}
