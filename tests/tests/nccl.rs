//! NCCL's plugin on hosts of the lab: the box sums for groups of one job.

use std::path::Path;
use std::process::Command;

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, DaemonOptions, JobSpec, WORKER_PORT};
use netsum_lab::process::program;

#[path = "../../worker/nccl/tests/ranks.rs"]
mod ranks;

use ranks::{Built, Ranks};

/// Starts four ranks of the plugin, which get their numbers from it and not from their environment.
fn start(cluster: &Cluster, built: &Built, case: &str, token: &str) -> Ranks {
    let controller = format!("{}:{WORKER_PORT}", cluster.lab().box_().ip());
    let command = |program: &Path, rank: usize| {
        let mut command: Command = cluster.lab().host(rank).command(program);
        command.env("NETSUM_CONTROLLER", &controller);
        command.env("NETSUM_JOB", "nccl").env("NETSUM_TOKEN", token);
        command
    };
    built.start((12, case), 4, &[], command)
}

fn build() -> Built {
    Built::new(&program("libnetsum.so").unwrap())
}

fn groups(cluster: &Cluster) -> Vec<String> {
    let jobs = cluster.netsum_json(&["job", "list"]).unwrap();
    let names = jobs.as_array().unwrap().iter().map(|job| job["name"].as_str().unwrap().to_owned());
    names.filter(|name| name.starts_with("nccl/")).collect()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_box_sums_for_communicators_of_nccl() {
    let cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let token = cluster.create_job(&JobSpec::new("nccl", 4)).unwrap();
    let built = build();
    let mut all = start(&cluster, &built, "all", &token);
    let handles = all.lines();
    all.exchange(&handles);
    // All have summed 16 vectors of 6,000 floats: at least 16 packets of 1,024 bytes each.
    let lines = all.lines();
    let [group] = &groups(&cluster)[..] else { panic!("{:?}", groups(&cluster)) };
    let contributions = cluster.counter(Some(group), "contributions").unwrap();
    assert!(contributions >= 4 * 16 * 16, "{contributions}");
    all.exchange(&lines);
    let lines = all.lines();
    let logs = all.logs();
    assert_eq!(logs.matches("the box sums").count(), 4, "{logs}");
    all.exchange(&lines);
    assert_eq!(all.results(), ["done"; 4]);

    // Its members are two of the job's ranks, and differ from the first group's.
    assert_eq!(start(&cluster, &built, "two", &token).results(), ["done"; 4]);
    assert_eq!(start(&cluster, &built, "sends", &token).results(), ["done"; 4]);
    assert_eq!(groups(&cluster), [""; 0]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_killed_rank_of_nccl_is_an_error_at_the_others() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(4)).unwrap();
    let listen = "[heartbeat]\ninterval-ms = 100\ntimeout-ms = 4000\n".to_owned();
    cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
    let token = cluster.create_job(&JobSpec::new("nccl", 4)).unwrap();
    let built = build();
    // A wrong token is an error at all, and NCCL goes on without the plugin.
    assert_eq!(start(&cluster, &built, "refused", "wrong").results(), ["done"; 4]);
    let mut ranks = start(&cluster, &built, "dies", &token);
    for _ in 0..2 {
        let lines = ranks.lines();
        ranks.exchange(&lines);
    }
    let lines = ranks.lines();
    assert!(ranks.logs().contains("the box sums"), "{}", ranks.logs());
    ranks.kill_last();
    ranks.exchange(&lines);
    for line in ranks.results() {
        assert!(line.starts_with("error 6: ") && line.contains("rank 3"), "{line}");
    }
}
