//! `torchrun --nnodes 2:3` on hosts of the lab: ranks die, training resumes with those that are
//! there, and nothing has to be done at the box. `cargo xtask test` creates target/python/debian.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use netsum_lab::cluster::Cluster;
use netsum_lab::process::Running;
use netsum_lab::{Host, LabSpec};
use serde_json::Value;

const HOSTS: usize = 3;
/// Timeout until the ranks have found each other again: torchrun takes 15 s to notice that one of
/// its agents has died, and PyTorch takes seconds to load.
const TIMEOUT: Duration = Duration::from_secs(180);

fn of_project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Starts torchrun on a host. Its workers end with it, as on a machine that fails.
fn torchrun(cluster: &Cluster, host: usize, checkpoint: &Path) -> Running {
    let python = of_project("target/python/debian/bin/python");
    assert!(python.exists(), "no {}: `cargo xtask test train` makes it", python.display());
    let lab = cluster.lab();
    let first = lab.host(0).ip(0);
    let mut command = lab.host(host).command("unshare");
    command.args(["--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    // Agents tell each other their host's name, which must be one that resolves there.
    command.args(["sh", "-c", r#"hostname "$0" && exec "$@""#, &lab.host(host).ip(0).to_string()]);
    command.arg(&python).args(["-m", "torch.distributed.run", "--nnodes", "2:3"]);
    command.args(["--nproc_per_node", "1", "--max_restarts", "9", "--monitor_interval", "0.1"]);
    command.args(["--rdzv_backend", "c10d", "--rdzv_endpoint", &format!("{first}:29400")]);
    let is_host = u8::from(host == 0);
    command.args(["--rdzv_conf", &format!("is_host={is_host},last_call_timeout=1")]);
    // See "Train with PyTorch".
    command.args(["-r", "9:1", "-t", "9:1"]);
    command.arg(of_project("python/examples/train.py"));
    command.args(["--steps", "1000000", "--checkpoint"]).arg(checkpoint);
    command.env("OMP_NUM_THREADS", "1").env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("NETSUM_CONTROLLER", cluster.workers().to_string());
    command.env("NETSUM_JOB", "train").env("NETSUM_TOKEN", "sesame").env("NETSUM_TIMEOUT", "5");
    command.env("GLOO_SOCKET_IFNAME", Host::INTERFACE);
    Running::start(&format!("torchrun on host {host}"), &mut command).unwrap()
}

/// Waits until rank 0 reports an event that fits.
fn wait_for(cluster: &Cluster, agent: &mut Running, fits: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        assert!(Instant::now() < deadline, "not within {TIMEOUT:?}:\n{}", agent.stderr());
        let line = agent.line(TIMEOUT);
        let line = line.unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log()));
        if let Some(reported) = serde_json::from_str(&line).ok().filter(&fits) {
            return reported;
        }
    }
}

fn is(event: &'static str) -> impl Fn(&Value) -> bool {
    move |reported| reported["event"] == event
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn training_resumes_with_the_ranks_that_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    let cluster = Cluster::start(LabSpec::hosts(HOSTS)).unwrap();
    let job = ["job", "create", "train", "--ranks", "3", "--min-ranks", "2", "--token", "sesame"];
    cluster.netsum(&job).unwrap();
    let shown = || cluster.netsum_json(&["job", "show", "train"]).unwrap();
    let mut agents: Vec<Running> =
        (0..HOSTS).map(|host| torchrun(&cluster, host, &checkpoint)).collect();
    let first = wait_for(&cluster, &mut agents[0], is("step"));
    assert_eq!(first["step"], 0);
    let after =
        |step: u64| move |reported: &Value| reported["step"].as_u64().is_some_and(|s| s > step);
    wait_for(&cluster, &mut agents[0], after(20));
    assert_eq!((&shown()["ranks"], &shown()["epoch"]), (&3.into(), &1.into()));

    // A host fails.
    drop(agents.pop());
    let died = Instant::now();
    let resumed = wait_for(&cluster, &mut agents[0], is("resumed"));
    println!("resumed {:.1} s after a host's end", died.elapsed().as_secs_f64());
    assert_eq!(resumed["ranks"], 2);
    let step = resumed["step"].as_u64().unwrap();
    assert!(step >= 20, "{resumed}");
    let released = || cluster.counter(Some("train"), "released").unwrap();
    let before = released();
    wait_for(&cluster, &mut agents[0], after(step + 20));
    assert!(released() > before, "the box does not sum for 2 ranks");
    assert_eq!((&shown()["ranks"], &shown()["epoch"]), (&2.into(), &2.into()));

    // It comes back.
    agents.push(torchrun(&cluster, HOSTS - 1, &checkpoint));
    let resumed = wait_for(&cluster, &mut agents[0], is("resumed"));
    assert_eq!(resumed["ranks"], 3);
    let step = resumed["step"].as_u64().unwrap();
    let before = released();
    let last = wait_for(&cluster, &mut agents[0], after(step + 20));
    assert!(released() > before, "the box does not sum for 3 ranks");
    assert_eq!((&shown()["ranks"], &shown()["state"]), (&3.into(), &"active".into()));
    let [first, last] = [first, last].map(|reported| reported["loss"].as_f64().unwrap());
    assert!(last < first / 2.0, "nothing was learnt: {first} to {last}");
}
