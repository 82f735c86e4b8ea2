//! Groups of a job's ranks: communicators that are split.

use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{
    Cluster, DaemonOptions, Group, JobSpec, Outcome, TIMEOUT, one_on_each_host,
};
use serde_json::Value;

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
    assert!(log.contains("so many ranks have one address"), "{log}");
    group.end();
}

/// Two racks with two hosts each: two leaves and a spine, whose daemon has these settings.
fn racks(spine: &DaemonOptions) -> Cluster {
    let spec = LabSpec { hosts: 4, racks: 2, mtu: 2300, ..LabSpec::default() };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    cluster.start_daemon_as(spine).unwrap();
    cluster.start_leaves().unwrap();
    cluster
}

/// What a box has: the names of jobs, the jobs of its rings, its flows, and what the tenant uses.
fn contents(cluster: &Cluster, node: Option<usize>) -> (Vec<String>, Vec<String>, usize, Value) {
    let shown = |what| -> Vec<Value> {
        let shown = cluster.netsum_on(node, &["-j", what, "show"]).unwrap();
        serde_json::from_str(&shown).unwrap()
    };
    let names = |all: Vec<Value>, key| -> Vec<String> {
        all.iter().map(|one| one[key].as_str().unwrap().to_owned()).collect()
    };
    let used = ["jobs", "rings", "slots", "memory"].map(|what| shown("tenant")[0][what].clone());
    (names(shown("job"), "name"), names(shown("ring"), "job"), shown("flow").len(), used.into())
}

fn wait(what: &str, condition: impl Fn() -> bool, why: impl Fn() -> String) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}\n{}", why());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn racks_sum_for_rows_and_columns_and_forget_them() {
    const NODES: [Option<usize>; 3] = [Some(0), Some(1), None];
    let cluster = racks(&DaemonOptions::default());
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec { rings: 2, ..JobSpec::new("whole", 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    let all = || NODES.map(|node| contents(&cluster, node));
    let before = all();
    let groups = |node| -> Vec<String> {
        contents(&cluster, node).0.into_iter().filter(|name| name != "whole").collect()
    };

    // Ranks of one rack need only its leaf, those of two also the spine.
    let (rows, columns) = ([0, 0, 1, 1].map(Some), [0, 1, 0, 1].map(Some));
    assert_eq!(split(&mut group, &rows), ["box"; 4], "{}", manager.log());
    let at = NODES.map(groups);
    assert!(at[0].len() == 1 && at[0][0].starts_with("whole/0.0-"), "{at:?}");
    assert!(at[1].len() == 1 && at[1][0].starts_with("whole/0.1-"), "{at:?}");
    assert!(at[2].is_empty(), "{at:?}");
    assert_eq!(split(&mut group, &columns), ["box"; 4], "{}", manager.log());
    wait(
        "the columns are summed at all boxes, and the rows have ended",
        || NODES.map(groups).iter().all(|at| at.len() == 2 && at[0].starts_with("whole/1.0-")),
        || format!("{:?}\n{}", all(), manager.log()),
    );
    let partials = cluster.netsum_on(Some(1), &["-j", "stats", &groups(Some(1))[0]]).unwrap();
    let partials: Value = serde_json::from_str(&partials).unwrap();
    assert!(partials["partials_sent"].as_u64().unwrap() > 0, "{partials}");

    // The next manager takes them over, and hears that ranks leave, although their last heartbeats
    // may have failed.
    manager.kill().unwrap();
    let manager = cluster.start_manager().unwrap();
    for n in 0..3 {
        split(&mut group, &rows);
        split(&mut group, &[None, Some(0), Some(n % 2), Some(1)]);
        split(&mut group, &columns);
    }
    split(&mut group, &[None; 4]);
    let what = "only the job is left";
    wait(what, || all() == before, || format!("{:?}\n{before:?}\n{}", all(), manager.log()));
    let left = || manager.json(&cluster, &["job", "list"]).unwrap();
    let is_alone = || left().as_array().unwrap().len() == 1;
    wait("the manager has only the job", is_alone, || format!("{}\n{}", left(), manager.log()));

    // Groups of ranks that end without leaving.
    split(&mut group, &columns);
    group.end();
    let is_empty = || {
        all().iter().all(|(jobs, rings, flows, _)| (jobs.len(), rings.len(), *flows) == (0, 0, 0))
    };
    wait("boxes have no job", is_empty, || format!("{:?}\n{}", all(), manager.log()));
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn groups_that_a_rack_cannot_sum_use_the_hosts_ring() {
    let limit = "[tenants.default]\njobs = 2\n".to_owned();
    let cluster = racks(&DaemonOptions { listen: limit, ..DaemonOptions::default() });
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec::new("whole", 4);
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    // The spine has room for one group.
    let modes = split(&mut group, &[Some(0), Some(1), Some(0), Some(1)]);
    assert_eq!(modes.iter().filter(|mode| *mode == "box").count(), 2, "{modes:?}");
    let why = "its ranks sum over the hosts' ring: box spine0: tenant `default`: jobs limit 2";
    assert_eq!(manager.log().matches(why).count(), 1, "{}", manager.log());
    split(&mut group, &[None; 4]);
    // Now there is room again.
    assert_eq!(split(&mut group, &[None, Some(1), None, Some(1)])[1], "box", "{}", manager.log());
    group.end();
}
