//! Boxes that lack something, and how the daemon reacts.

use std::path::{Path, PathBuf};
use std::time::Instant;

use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, DaemonOptions, JobSpec, TIMEOUT, one_on_each_host};
use netsum_lab::netns::output;

/// A daemon that starts with this script, in its own mount namespace. Folders are `$1` and so on.
fn after(script: &str, folders: &[&Path]) -> DaemonOptions {
    let script = format!("{script}; shift {}; exec \"$@\"", folders.len());
    let words = ["unshare", "--mount", "sh", "-euc", &script, "sh"].map(str::to_owned);
    let folders = folders.iter().map(|folder| folder.display().to_string());
    DaemonOptions { prefix: words.into_iter().chain(folders).collect(), ..DaemonOptions::default() }
}

fn works(cluster: &Cluster) {
    let job = JobSpec::new("train", 2);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    for outcome in group.all_reduce("i32", 50_000, 1).unwrap() {
        assert_eq!(
            (&*outcome.mode, outcome.wrong, outcome.fallbacks),
            ("box", 0, 0),
            "{outcome:?}"
        );
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_daemon_works_without_bpffs_ipv6_and_locked_memory() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    cluster.pin();
    let no_ipv6 = "/proc/sys/net/ipv6/conf/all/disable_ipv6";
    cluster.lab().box_().enter(|| std::fs::write(no_ipv6, "1")).unwrap();
    for host in cluster.lab().hosts() {
        host.enter(|| std::fs::write(no_ipv6, "1")).unwrap();
    }
    // Several mounts of it may be stacked.
    let script =
        "umount -l /sys/fs/bpf; while umount -l /sys/fs/bpf 2>/dev/null; do :; done; ulimit -l 4";
    cluster.start_daemon_as(&after(script, &[])).unwrap();
    let log = cluster.daemon_log();
    assert!(
        log.contains(
            "is not a bpffs (mount -t bpf bpf /sys/fs/bpf), so the jobs end with this daemon"
        ),
        "{log}"
    );
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", cluster.daemon_pid())).unwrap();
    assert!(limits.lines().any(|l| l.starts_with("Max locked memory         4096 ")), "{limits}");
    works(&cluster);
    cluster.hand_over().unwrap();
    assert!(!cluster.pins().exists() && !cluster.state_file().exists());
    let links = output(cluster.lab().box_().command("ip").arg("link")).unwrap();
    assert!(!links.contains("xdp"), "{links}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_full_disk_keeps_the_last_state_until_there_is_room() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    cluster.pin();
    let state = cluster.state_file();
    let folder = state.parent().unwrap();
    let disk = "mkdir -p \"$1\"; mount -t tmpfs -o size=16k tmpfs \"$1\"";
    cluster.start_daemon_as(&after(disk, &[folder])).unwrap();
    // The path as the daemon sees it.
    let inside = |path: &Path| {
        let root = PathBuf::from(format!("/proc/{}/root", cluster.daemon_pid()));
        root.join(path.strip_prefix("/").unwrap())
    };
    let create = |name: &str| cluster.create_job(&JobSpec::new(name, 2)).unwrap();
    create("first");
    let before = std::fs::read_to_string(inside(&state)).unwrap();
    assert!(before.contains("\"first\""), "{before}");

    let filler = inside(&folder.join("filler"));
    assert!(std::fs::write(&filler, [0; 64 << 10]).is_err());
    create("second");
    let start = Instant::now();
    // Its log comes through a pipe.
    while !cluster.daemon_log().contains("ERROR") && start.elapsed() < TIMEOUT {}
    let log = cluster.daemon_log();
    let logged = log.lines().find(|line| line.contains("ERROR")).unwrap_or_else(|| panic!("{log}"));
    assert!(
        logged.contains(&*state.to_string_lossy()) && logged.contains("No space left"),
        "{logged}"
    );
    assert_eq!(std::fs::read_to_string(inside(&state)).unwrap(), before);

    std::fs::remove_file(&filler).unwrap();
    create("third");
    let after = std::fs::read_to_string(inside(&state)).unwrap();
    assert!(
        ["first", "second", "third"].iter().all(|name| after.contains(&format!("\"{name}\""))),
        "{after}"
    );
    cluster.stop_daemon().unwrap();
}
