//! Ranks of PyTorch on several hosts find each other without a box, or are told at once why not. A
//! box sums their groups. `cargo xtask test` creates target/python/debian.

use std::path::{Path, PathBuf};
use std::process::Command;

use netsum_lab::cluster::{Cluster, JobSpec, WORKER_PORT};
use netsum_lab::netns::output;
use netsum_lab::process::Running;
use netsum_lab::{Host, Lab, LabSpec};

/// Ranks load PyTorch first.
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(120);

const RANKS: usize = 2;

/// A file of the project.
fn of_project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// The program of a rank, started through `command`.
fn rank(command: Command, method: &str, rank: usize, ranks: usize) -> Command {
    let mut command = program_of(command, "torch_hosts.py", method, rank, ranks);
    for name in ["MASTER_ADDR", "NETSUM_IP", "NETSUM_PEERS", "NETSUM_CONTROLLER"] {
        command.env_remove(name);
    }
    command
}

/// A Python program of a rank, started through `command`.
fn program_of(
    mut command: Command,
    program: &str,
    method: &str,
    rank: usize,
    ranks: usize,
) -> Command {
    let python = of_project("target/python/debian/bin/python");
    assert!(python.exists(), "no {}: `cargo xtask test train` makes it", python.display());
    command.arg(python).arg(of_project("python/tests").join(program)).args([
        method,
        &rank.to_string(),
        &ranks.to_string(),
    ]);
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("OMP_NUM_THREADS", "1");
    command
}

/// The output of one rank on each host.
fn run(lab: &Lab, method: &str, more: impl Fn(usize, &mut Command)) -> Vec<String> {
    run_on(lab, &[0, 1], method, more)
}

/// The output of each rank, on these hosts.
fn run_on(
    lab: &Lab,
    hosts: &[usize],
    method: &str,
    more: impl Fn(usize, &mut Command),
) -> Vec<String> {
    let start = |(number, host): (usize, &usize)| {
        let mut command = rank(lab.host(*host).command("env"), method, number, hosts.len());
        more(number, &mut command);
        Running::start(&format!("PyTorch rank {number}"), &mut command).unwrap()
    };
    let ranks: Vec<Running> = hosts.iter().enumerate().map(start).collect();
    ranks.into_iter().map(|rank| rank.success(TIMEOUT).unwrap()).collect()
}

/// The address of a store at rank 0.
fn tcp(host: &str) -> String {
    format!("tcp://{host}:29500")
}

/// Asserts that each rank has summed at its host's address.
fn summed(lab: &Lab, printed: &[String]) {
    for (number, printed) in printed.iter().enumerate() {
        assert_eq!(printed.trim(), format!("summed at {}", lab.host(number).ip(0)));
    }
}

/// Asserts that all ranks got the same refusal.
fn refused(printed: &[String], words: &[&str]) {
    assert!(
        printed[0].starts_with("refused: ") && printed.iter().all(|other| *other == printed[0]),
        "{printed:?}"
    );
    assert!(words.iter().all(|word| printed[0].contains(word)), "{words:?}: {}", printed[0]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_stores_machine_or_the_only_address_is_enough() {
    let lab = Lab::new(LabSpec::hosts(RANKS)).unwrap();
    summed(&lab, &run(&lab, &tcp(&lab.host(0).ip(0).to_string()), |_, _| ()));
    let folder = tempfile::tempdir().unwrap();
    summed(&lab, &run(&lab, &format!("file://{}/store", folder.path().display()), |_, _| ()));
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_of_one_host_share_its_address_with_a_box_and_without() {
    const HOSTS: [usize; 4] = [0, 0, 1, 1];
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let (lab, store) = (cluster.lab(), tcp(&cluster.lab().host(0).ip(0).to_string()));
    let expected = HOSTS.map(|host| format!("summed at {}", lab.host(host).ip(0)));
    let printed = |more: &dyn Fn(usize, &mut Command)| {
        let printed = run_on(lab, &HOSTS, &store, more);
        printed.iter().map(|printed| printed.trim().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(printed(&|_, _| ()), expected);
    let token = cluster.create_job(&JobSpec::new("train", 4)).unwrap();
    let controller = format!("{}:{WORKER_PORT}", lab.box_().ip());
    let by_box = printed(&|_, command| {
        command.envs([
            ("NETSUM_CONTROLLER", &*controller),
            ("NETSUM_JOB", "train"),
            ("NETSUM_TOKEN", &token),
        ]);
    });
    assert_eq!(by_box, expected);
    assert!(cluster.counter(Some("train"), "released").unwrap() > 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn one_of_several_addresses_is_chosen_where_another_rank_has_one() {
    let lab = Lab::new(LabSpec { ips_per_host: 2, ..LabSpec::hosts(RANKS) }).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| format!("file://{}/{name}", folder.path().display());
    let second = lab.host(1).ip(1).to_string();
    refused(
        &run(&lab, &file("none"), |_, _| ()),
        &["rank 0: it is not known which of its addresses", &second[..5], "NETSUM_IP"],
    );
    let printed = run(&lab, &file("one"), |rank, command| {
        if rank == 1 {
            command.env("NETSUM_IP", &second);
        }
    });
    assert_eq!(printed[0].trim(), format!("summed at {}", lab.host(0).ip(0)));
    assert_eq!(printed[1].trim(), format!("summed at {second}"));
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_master_whose_own_name_is_a_loopback_address() {
    let lab = Lab::new(LabSpec::hosts(RANKS)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let start = |number: usize| {
        // As Debian's installer writes it.
        let own = if number == 0 { "127.0.1.1".to_owned() } else { lab.host(0).ip(0).to_string() };
        let hosts = folder.path().join(number.to_string());
        std::fs::write(&hosts, format!("127.0.0.1 localhost\n{own} master-of-ranks\n")).unwrap();
        let mut command = lab.host(number).command("unshare");
        command
            .args(["--mount", "sh", "-c", "mount --bind \"$0\" /etc/hosts && exec \"$@\""])
            .arg(hosts);
        let mut command = rank(command, &tcp("master-of-ranks"), number, RANKS);
        Running::start(&format!("PyTorch rank {number}"), &mut command).unwrap()
    };
    let ranks: Vec<Running> = (0..RANKS).map(start).collect();
    let printed: Vec<String> =
        ranks.into_iter().map(|rank| rank.success(TIMEOUT).unwrap()).collect();
    summed(&lab, &printed);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn addresses_that_other_machines_do_not_reach_are_refused_at_all_ranks() {
    let lab = Lab::new(LabSpec::hosts(RANKS)).unwrap();
    let master = tcp(&lab.host(0).ip(0).to_string());
    // As with two containers, each behind its machine.
    for host in lab.hosts() {
        output(host.command("ip").args([
            "address",
            "add",
            "172.17.0.2/32",
            "dev",
            Host::INTERFACE,
        ]))
        .unwrap();
    }
    let printed = run(&lab, &master, |_, command| {
        command.env("NETSUM_IP", "172.17.0.2");
    });
    refused(&printed, &["rank 0 and rank 1", "different machines", "172.17.0.2", "NETSUM_IP"]);
    let printed = run(&lab, &master, |rank, command| {
        if rank == 1 {
            command.env("NETSUM_IP", "127.0.0.1");
        }
    });
    refused(&printed, &["rank 1 has the loopback address 127.0.0.1", "NETSUM_IP"]);
    let printed = run(&lab, &master, |rank, command| {
        if rank == 1 {
            command.env("NETSUM_IP", "10.99.0.1");
        }
    });
    refused(&printed, &["rank 1", "10.99.0.1", "set NETSUM_IP to an address of this machine"]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_box_sums_for_the_rows_and_columns_of_a_mesh() {
    let cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let token = cluster.create_job(&JobSpec::new("mesh", 4)).unwrap();
    let method = tcp(&cluster.lab().host(0).ip(0).to_string());
    let start = |number: usize| {
        let command = cluster.lab().host(number).command("env");
        let mut command = program_of(command, "torch_groups.py", &method, number, 4);
        command.env("NETSUM_CONTROLLER", cluster.workers().to_string());
        command.env("NETSUM_JOB", "mesh").env("NETSUM_TOKEN", &token);
        Running::start(&format!("PyTorch rank {number}"), &mut command).unwrap()
    };
    let mut ranks: Vec<Running> = (0..4).map(start).collect();
    let jobs = || cluster.netsum_json(&["job", "list"]).unwrap().as_array().unwrap().len();
    // The job, two rows, two columns, and a second group of all ranks.
    for (word, count) in [("summed", 6), ("destroyed", 1)] {
        for rank in &mut ranks {
            let line = rank.line(TIMEOUT);
            assert_eq!(line.unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log())), word);
        }
        assert_eq!(jobs(), count, "{}", cluster.daemon_log());
        ranks.iter_mut().for_each(|rank| rank.send_line("go on").unwrap());
    }
    ranks.into_iter().for_each(|rank| drop(rank.success(TIMEOUT).unwrap()));
}
