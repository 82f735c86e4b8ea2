//! PyTorch continues training when the box is gone. `cargo xtask test` creates
//! target/python/debian.

use std::path::{Path, PathBuf};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec};
use netsum_lab::process::Running;
use netsum_lab::train::{SumBackend, TrainSpec, Trainers};

/// Ranks load PyTorch first.
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(120);

const RANKS: usize = 4;

/// A file of the project.
fn of_project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A Python that has PyTorch.
fn python() -> PathBuf {
    let python = of_project("target/python/debian/bin/python");
    assert!(python.exists(), "no {}: `cargo xtask test train` makes it", python.display());
    python
}

/// With the hook, beside Gloo: the daemon dies between two steps, and the ranks do not know of it.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_hook_continues_by_the_ring_when_the_daemon_dies_in_mid_training() {
    let mut cluster = Cluster::start(LabSpec::hosts(RANKS)).unwrap();
    let token = cluster.create_job(&JobSpec::new("hook", RANKS as u32)).unwrap();
    let spec =
        TrainSpec { python: python(), model: "cnn".to_owned(), steps: 30, seed: 1, wire: "32bit" };
    let mut trainers = Trainers::start(&cluster, &spec, SumBackend::Hook("hook", &token)).unwrap();
    let kill = |step, _| if step == 10 { cluster.kill_daemon() } else { Ok(()) };
    let trained = trainers.train(kill).unwrap_or_else(|e| panic!("{e:#}"));
    trainers.leave().unwrap();
    assert!(trained.weights.iter().all(|weights| *weights == trained.weights[0]), "{trained:?}");
    assert!(trained.test < 2.0, "has learnt nothing: {trained:?}");
    for statistics in &trained.statistics {
        let count = |name: &str| statistics[name].as_u64().unwrap();
        assert!(count("box_bytes") > 0 && count("ring_bytes") > 0, "{statistics}");
    }
}

/// With the backend: all of its work goes through the box, and work that the box cannot do goes
/// between the ranks through Gloo.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_backend_finds_the_box_and_continues_without_it() {
    let mut cluster = Cluster::start(LabSpec::hosts(RANKS)).unwrap();
    let token = cluster.create_job(&JobSpec::new("backend", RANKS as u32)).unwrap();
    let first = cluster.lab().host(0).ip(0).to_string();
    let start = |rank: usize| {
        let mut command = cluster.lab().host(rank).command(python());
        command.arg(of_project("python/tests/torch_box.py"));
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("OMP_NUM_THREADS", "1");
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("LOCAL_RANK", "0");
        command.env("MASTER_ADDR", &first).env("MASTER_PORT", "29500");
        command.env("NETSUM_CONTROLLER", cluster.workers().to_string());
        command.env("NETSUM_JOB", "backend").env("NETSUM_TOKEN", &token);
        Running::start(&format!("PyTorch rank {rank}"), &mut command).unwrap()
    };
    let mut ranks: Vec<Running> = (0..RANKS).map(start).collect();
    let all_say = |ranks: &mut [Running], cluster: &Cluster| {
        let line = |rank: &mut Running| {
            rank.line(TIMEOUT)
                .unwrap_or_else(|e| panic!("{e:#}\n{}\n{}", rank.stderr(), cluster.daemon_log()))
        };
        let lines: Vec<String> = ranks.iter_mut().map(line).collect();
        assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
        lines.into_iter().next().unwrap()
    };
    assert!(all_say(&mut ranks, &cluster).starts_with("by the box "));
    assert!(cluster.counter(Some("backend"), "contributions").unwrap() > 1000);
    cluster.kill_daemon().unwrap();
    ranks.iter_mut().for_each(|rank| rank.send_line("go on").unwrap());
    assert!(all_say(&mut ranks, &cluster).starts_with("by the ranks "));
    ranks.iter_mut().for_each(|rank| rank.send_line("leave").unwrap());
    for rank in ranks {
        rank.success(TIMEOUT).unwrap();
    }
}
