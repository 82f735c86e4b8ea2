//! The Python package on hosts of the lab. `cargo xtask test` installs it into target/python.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, DaemonOptions, JobSpec, TIMEOUT, WORKER_PORT};
use netsum_lab::netns::output;
use netsum_lab::process::Running;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A file of the project.
fn of_project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Starts a rank with the variables that torchrun would set, and with the box's address. The rank
/// finds its own address by itself.
fn start(
    cluster: &Cluster,
    case: &str,
    rank: usize,
    ranks: usize,
    job: &str,
    token: &str,
) -> Running {
    let mut command = command(cluster, case, rank, ranks, job, token);
    Running::start(&format!("Python rank {rank}"), &mut command).unwrap()
}

fn command(
    cluster: &Cluster,
    case: &str,
    rank: usize,
    ranks: usize,
    job: &str,
    token: &str,
) -> Command {
    let python = of_project("target/python/pypi/bin/python");
    assert!(python.exists(), "no {}: `cargo xtask test python` installs it", python.display());
    let mut command = cluster.lab().host(rank).command(python);
    command.arg(of_project("python/tests/box.py")).arg(case).env("PYTHONDONTWRITEBYTECODE", "1");
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", ranks.to_string())
        .env("LOCAL_RANK", "0");
    let controller = format!("{}:{WORKER_PORT}", cluster.lab().box_().ip());
    command.env("NETSUM_CONTROLLER", controller).env("NETSUM_JOB", job).env("NETSUM_TOKEN", token);
    command
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn arrays_are_summed_with_and_without_the_box() {
    let mut cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let token = cluster.create_job(&JobSpec::new("arrays", 4)).unwrap();
    let mut ranks: Vec<Running> =
        (0..4).map(|rank| start(&cluster, "sums", rank, 4, "arrays", &token)).collect();
    for rank in &mut ranks {
        let line = rank.line(TIMEOUT).unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log()));
        assert_eq!(line, "summed");
    }
    assert!(cluster.counter(Some("arrays"), "contributions").unwrap() > 4000);
    cluster.kill_daemon().unwrap();
    for rank in &mut ranks {
        rank.send_line("go on").unwrap();
    }
    for rank in ranks {
        let printed = rank.success(TIMEOUT).unwrap();
        assert!(printed.contains("fell back"), "{printed}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_reconnect_between_operations_without_a_pause() {
    let cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let token = cluster.create_job(&JobSpec::new("loops", 4)).unwrap();
    let mut ranks: Vec<Running> =
        (0..4).map(|rank| start(&cluster, "reconnects", rank, 4, "loops", &token)).collect();
    for _ in 0..3 {
        for rank in &mut ranks {
            let line =
                rank.line(TIMEOUT).unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log()));
            assert_eq!(line, "ready");
        }
        cluster.netsum(&["job", "reconnect", "loops"]).unwrap();
    }
    for rank in ranks {
        let printed = rank.success(TIMEOUT).unwrap();
        assert!(printed.contains("reconnected"), "{printed}");
    }
}

/// The daemon is stopped after the ranks have agreed to reconnect, and before they join again.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_wait_while_ranks_reconnect_is_in_time_and_ends_with_ctrl_c() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    let listen = "[heartbeat]\ninterval-ms = 100\ntimeout-ms = 10000\n".to_owned();
    cluster.start_daemon_as(&DaemonOptions { listen, ..DaemonOptions::default() }).unwrap();
    let token = cluster.create_job(&JobSpec::new("held", 2)).unwrap();
    let mut ranks: Vec<Running> =
        (0..2).map(|rank| start(&cluster, "held", rank, 2, "held", &token)).collect();
    let all_say = |ranks: &mut [Running], word: &str| {
        for rank in ranks {
            assert_eq!(rank.line(TIMEOUT).unwrap_or_else(|e| panic!("{e:#}")), word);
        }
    };
    all_say(&mut ranks, "ready");
    cluster.netsum(&["job", "reconnect", "held"]).unwrap();
    // Rank 0 learns of it.
    std::thread::sleep(Duration::from_secs(1));
    let sent = || cluster.counter(Some("held"), "contributions").unwrap();
    let before = sent();
    ranks[0].send_line("go on").unwrap();
    // By then rank 0 has the other rank's consent.
    while sent() == before {}
    let daemon = Pid::from_raw(cluster.daemon_pid().cast_signed());
    kill(daemon, Signal::SIGSTOP).unwrap();
    ranks[1].send_line("go on").unwrap();
    all_say(&mut ranks, "held");
    kill(daemon, Signal::SIGCONT).unwrap();
    ranks.iter_mut().for_each(|rank| rank.send_line("go on").unwrap());
    for rank in ranks {
        let printed = rank.success(TIMEOUT).unwrap();
        assert!(printed.contains("reconnected"), "{printed}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn refusals_of_a_job_say_what_to_do() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let token = cluster.create_job(&JobSpec::new("strict", 2)).unwrap();
    for (ranks, job, token, words) in [
        (2, "strict", "0123", &["ControllerError", "token", "netsum job"][..]),
        (3, "strict", &*token, &["ConfigError", "ranks 3", "job strict has 2", "WORLD_SIZE"]),
        (2, "other", &token, &["ControllerError", "other"]),
    ] {
        let printed = start(&cluster, "refused", 0, ranks, job, token).success(TIMEOUT).unwrap();
        assert!(words.iter().all(|word| printed.contains(word)), "{words:?}: {printed}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_call_that_one_rank_alone_refuses_is_an_error_at_all() {
    let cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let token = cluster.create_job(&JobSpec::new("alone", 4)).unwrap();
    let ranks: Vec<Running> =
        (0..4).map(|rank| start(&cluster, "refused_alone", rank, 4, "alone", &token)).collect();
    for rank in ranks {
        let printed = rank.success(TIMEOUT).unwrap();
        assert!(
            printed.contains("MismatchError")
                && printed.contains("nothing (its own call returned an error"),
            "{printed}"
        );
        assert!(printed.contains("rank 2"), "{printed}");
    }
}

/// A rank that claims an address where it cannot be is refused at once, with the address that the
/// box sees.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn an_address_not_behind_the_box_is_refused_with_the_right_one() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let token = cluster.create_job(&JobSpec::new("lost", 2)).unwrap();
    let (host, box_) = (cluster.lab().host(1), cluster.lab().box_());
    let ip = |mut command: Command, line: &str| output(command.args(line.split(' '))).unwrap();
    let port = box_.port(1);
    // An address of another network, one of an interface without a MAC address, and one that the
    // box has, too.
    ip(host.command("ip"), "link add mgmt0 type veth peer name mgmt1");
    ip(host.command("ip"), "link set mgmt0 up");
    ip(host.command("ip"), "address add 192.168.7.2/24 dev mgmt0");
    ip(host.command("ip"), "address add 10.99.0.1/32 dev lo");
    ip(host.command("ip"), "address add 10.98.0.1/32 dev eth0");
    ip(box_.command("ip"), "address add 10.98.0.1/32 dev br0");
    let seen = format!("its connection comes from {} by port {port}: set NETSUM_IP", host.ip(0));
    for (address, what) in [
        ("192.168.7.2", "the bridge has not seen MAC address"),
        ("10.99.0.1", "the interface with 10.99.0.1 there has no MAC address"),
        ("127.0.0.1", "no MAC address"),
        ("10.98.0.1", "10.98.0.1 is an address of the box itself"),
    ] {
        let mut command = command(&cluster, "refused", 1, 2, "lost", &token);
        let started = Instant::now();
        let rank = Running::start("Python rank 1", command.env("NETSUM_IP", address)).unwrap();
        let printed = rank.success(TIMEOUT).unwrap();
        let words = ["ControllerError", "rank 1", address, what, &seen];
        assert!(words.iter().all(|word| printed.contains(word)), "{words:?}: {printed}");
        // The bridge is watched for a second. A missing rank would be waited for for a minute.
        assert!(started.elapsed() < TIMEOUT / 2, "{address}: {:?}", started.elapsed());
    }
}
