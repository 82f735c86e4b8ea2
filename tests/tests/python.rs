//! The Python package on hosts of the lab. `cargo xtask test` installs it into target/python.

use std::path::{Path, PathBuf};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, PATIENCE, WORKER_PORT};
use netsum_lab::process::Running;

/// A file of the project.
fn of_project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Starts a rank with what torchrun would set, and where the box is. Its address it finds by itself.
fn start(cluster: &Cluster, case: &str, rank: usize, ranks: usize, job: &str, token: &str) -> Running {
    let python = of_project("target/python/pypi/bin/python");
    assert!(python.exists(), "no {}: `cargo xtask test python` installs it", python.display());
    let mut command = cluster.lab().host(rank).command(python);
    command.arg(of_project("python/tests/box.py")).arg(case).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string()).env("LOCAL_RANK", "0");
    let controller = format!("{}:{WORKER_PORT}", cluster.lab().box_().ip());
    command.env("NETSUM_CONTROLLER", controller).env("NETSUM_JOB", job).env("NETSUM_TOKEN", token);
    Running::start(&format!("Python rank {rank}"), &mut command).unwrap()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn arrays_are_summed_by_the_box_and_by_the_ranks_when_it_is_gone() {
    let mut cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let token = cluster.create_job(&JobSpec::new("arrays", 4)).unwrap();
    let mut ranks: Vec<Running> =
        (0..4).map(|rank| start(&cluster, "sums", rank, 4, "arrays", &token)).collect();
    for rank in &mut ranks {
        let line = rank.line(PATIENCE).unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log()));
        assert_eq!(line, "summed");
    }
    assert!(cluster.counter(Some("arrays"), "fragments").unwrap() > 4000);
    cluster.kill_daemon().unwrap();
    for rank in &mut ranks {
        rank.say("go on").unwrap();
    }
    for rank in ranks {
        let said = rank.success(PATIENCE).unwrap();
        assert!(said.contains("fell back"), "{said}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_connect_anew_while_operations_follow_each_other_without_a_pause() {
    let cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let token = cluster.create_job(&JobSpec::new("loops", 4)).unwrap();
    let mut ranks: Vec<Running> =
        (0..4).map(|rank| start(&cluster, "renews", rank, 4, "loops", &token)).collect();
    for _ in 0..3 {
        for rank in &mut ranks {
            let line = rank.line(PATIENCE).unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log()));
            assert_eq!(line, "ready");
        }
        cluster.netsum(&["job", "renew", "loops"]).unwrap();
    }
    for rank in ranks {
        let said = rank.success(PATIENCE).unwrap();
        assert!(said.contains("renewed"), "{said}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn what_a_job_refuses_is_said_with_what_to_do() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let token = cluster.create_job(&JobSpec::new("strict", 2)).unwrap();
    for (ranks, job, token, words) in [
        (2, "strict", "0123", &["ControllerError", "token", "netsum job"][..]),
        (3, "strict", &*token, &["ConfigError", "ranks 3", "job strict has 2", "WORLD_SIZE"]),
        (2, "other", &token, &["ControllerError", "other"]),
    ] {
        let said = start(&cluster, "refused", 0, ranks, job, token).success(PATIENCE).unwrap();
        assert!(words.iter().all(|word| said.contains(word)), "{words:?}: {said}");
    }
}
