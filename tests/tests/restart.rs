//! Daemons that are killed, and what the next daemon finds: jobs continue, or end with a reason
//! where they cannot.

use std::time::{Duration, Instant};

use aya::maps::{Array, ArrayOfMaps, DevMap, Map, MapData};
use netsum_common::abi::{VERSION, maps};
use netsum_common::slot::{RingState, Slot};
use netsum_dataplane::pins::Pins;
use netsum_lab::LabSpec;
use netsum_lab::cluster::{
    Cluster, DaemonOptions, Group, JobSpec, Outcome, RankReply, TIMEOUT, one_on_each_host,
};
use netsum_lab::netns;
use serde_json::Value;

const SECOND: Duration = Duration::from_secs(1);

/// A lab with a daemon whose jobs outlive it.
fn pinned(hosts: usize) -> Cluster {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(hosts)).unwrap();
    cluster.pin();
    cluster.start_daemon().unwrap();
    cluster
}

fn start(cluster: &Cluster, job: &JobSpec) -> Group {
    let token = cluster.create_job(job).unwrap();
    cluster.ranks(job, &token, &one_on_each_host(job.ranks)).unwrap()
}

fn assert_box(outcomes: &[Outcome]) {
    for (rank, o) in outcomes.iter().enumerate() {
        assert_eq!((o.mode.as_str(), o.wrong, o.fallbacks), ("box", 0, 0), "rank {rank}: {o:?}");
    }
}

fn xdp_ports(cluster: &Cluster) -> usize {
    let links = netns::output(cluster.lab().box_().command("ip").args(["-d", "link"])).unwrap();
    links.matches("prog/xdp").count()
}

/// The id of the egress program through which the first ring's clones leave, and that of the
/// daemon's own.
fn egress_programs(cluster: &Cluster) -> (u64, u64) {
    let path = cluster.pins().join(format!("abi-{VERSION}/maps/{}", maps::RING_PORTS));
    let map = Map::from_map_data(MapData::from_pin(path).unwrap()).unwrap();
    let outer = ArrayOfMaps::<_, DevMap<MapData>>::try_from(map).unwrap();
    let at_work = outer.get(&1, 0).unwrap().get(0, 0).unwrap().prog_id.unwrap().get();
    let shown = cluster.netsum_json(&["prog", "show", "egress"]).unwrap();
    (at_work.into(), shown["programs"][0]["id"].as_u64().unwrap())
}

/// Waits until the job has this state.
fn wait_for_state(cluster: &Cluster, job: &str, state: &str) -> Value {
    let start = Instant::now();
    loop {
        let shown = cluster.netsum_json(&["job", "show", job]).unwrap();
        if shown["state"] == state {
            return shown;
        }
        assert!(start.elapsed() < TIMEOUT, "{shown:#}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_job_never_notices_that_the_daemon_is_killed() {
    let mut cluster = pinned(3);
    let job = JobSpec { rings: 2, timeout: 5 * SECOND, ..JobSpec::new("train", 3) };
    let mut group = start(&cluster, &job);
    assert_box(&group.all_reduce("f32", 50_000, 1).unwrap());
    let before = cluster.counter(Some("train"), "contributions").unwrap();

    // The daemon is killed in the middle of an operation.
    let files = group.order_all_reduce("i32", 4_000_000, 2).unwrap();
    cluster.kill_daemon().unwrap();
    assert_box(&group.check_all_reduce("i32", 4_000_000, 2, &files).unwrap());
    assert_eq!(xdp_ports(&cluster), 3);
    // An operation without a daemon.
    assert_box(&group.all_reduce("f32", 50_000, 3).unwrap());
    // The next daemon takes over in the middle of another operation.
    let files = group.order_all_reduce("i32", 4_000_000, 4).unwrap();
    cluster.start_daemon().unwrap();
    assert_box(&group.check_all_reduce("i32", 4_000_000, 4, &files).unwrap());
    assert!(cluster.daemon_log().contains("took over from the previous daemon: 3 ports, 1 jobs"));
    assert_box(&group.all_reduce("f32", 50_000, 5).unwrap());
    let (at_work, own) = egress_programs(&cluster);
    assert_eq!(at_work, own, "the ring has the egress program of the daemon before");
    let shown = cluster.netsum_json(&["job", "show", "train"]).unwrap();
    assert_eq!((&shown["state"], &shown["epoch"]), (&"active".into(), &1.into()), "{shown:#}");
    assert_eq!(shown["flows"].as_array().unwrap().len(), 6, "{shown:#}");
    let fragments = cluster.counter(Some("train"), "contributions").unwrap();
    assert!(
        fragments > before + 3 * 2 * 4_000_000 * 4 / 1024,
        "counters go on: {before}, {fragments}"
    );

    // The ranks are connected to the new daemon: it notices a death, and names the rank.
    group.order_all_reduce("f32", 1000, 6).unwrap();
    group.answers(TIMEOUT).unwrap();
    group.kill(1).unwrap();
    group.order_all_reduce("f32", 1000, 7).unwrap();
    for (rank, answer) in group.answers(TIMEOUT).unwrap() {
        let RankReply::Error(error) = answer else { panic!("rank {rank}: {answer:?}") };
        assert!(error.contains("rank 1"), "rank {rank}: {error}");
    }

    // A regular end leaves nothing behind, once the ranks that did not leave are known to be gone.
    cluster.netsum(&["job", "delete", "--forget-connections", "train"]).unwrap();
    cluster.stop_daemon().unwrap();
    assert!(!cluster.pins().exists() && !cluster.state_file().exists());
    assert_eq!(xdp_ports(&cluster), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_replaced_daemon_leaves_its_jobs_at_work() {
    let mut cluster = pinned(2);
    let mut group = start(&cluster, &JobSpec::new("train", 2));
    let files = group.order_all_reduce("i32", 4_000_000, 1).unwrap();
    cluster.hand_over().unwrap();
    assert!(!std::fs::exists(cluster.socket()).unwrap(), "nobody listens there");
    cluster.start_daemon().unwrap();
    assert_box(&group.check_all_reduce("i32", 4_000_000, 1, &files).unwrap());
    assert!(cluster.daemon_log().contains("took over from the previous daemon: 2 ports, 1 jobs"));
    assert_box(&group.all_reduce("f32", 1000, 2).unwrap());
    drop(group);

    let mut cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    cluster.create_job(&JobSpec::new("train", 2)).unwrap();
    cluster.hand_over().unwrap();
    assert_eq!(xdp_ports(&cluster), 0, "nothing can be pinned");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_waiting_job_has_empty_rings_after_a_takeover() {
    let mut cluster = pinned(2);
    cluster.create_job(&JobSpec::new("idle", 2)).unwrap();
    cluster.kill_daemon().unwrap();
    // As after a session that the state file does not know.
    let map = |name: &str| {
        let path = cluster.pins().join(format!("abi-{VERSION}/maps/{name}"));
        Map::from_map_data(MapData::from_pin(path).unwrap()).unwrap()
    };
    let mut states = Array::<_, RingState>::try_from(map(maps::RING_STATES)).unwrap();
    states.set(1, RingState { low: 40, ..RingState::default() }, 0).unwrap();
    let slots = ArrayOfMaps::<_, Array<MapData, Slot>>::try_from(map(maps::SLOTS)).unwrap();
    let used = Slot { index: 5, flags: Slot::USED, ..Slot::default() };
    slots.get(&1, 0).unwrap().set(0, used, 0).unwrap();

    cluster.start_daemon().unwrap();
    let shown = cluster.netsum_json(&["slot", "show", "idle"]).unwrap();
    assert_eq!(shown["rings"][0]["low"], 0, "{shown:#}");
    assert_eq!(shown["slots"].as_array().map_or(0, Vec::len), 0, "{shown:#}");
    assert_eq!(cluster.netsum_json(&["job", "show", "idle"]).unwrap()["state"], "waiting");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn maps_that_cannot_be_taken_over_are_refused_with_a_way_out() {
    let mut cluster = pinned(2);
    cluster.create_job(&JobSpec::new("idle", 2)).unwrap();
    // Another daemon cannot start while the first one is running, whatever state file it is given.
    let lock = cluster.state_file().with_extension("other");
    let error = Pins::hold(&cluster.pins(), &lock).unwrap_err().to_string();
    assert!(error.contains("is in use by another `netsum run`"), "{error}");
    // Maps of another version.
    cluster.kill_daemon().unwrap();
    let other = cluster.pins().join("abi-999");
    std::fs::create_dir(&other).unwrap();
    let error = format!("{:#}", cluster.start_daemon().unwrap_err());
    assert!(
        error.contains("abi-999 has the programs of another version of netsum")
            && error.contains("--reset"),
        "{error}"
    );
    assert_eq!(xdp_ports(&cluster), 2, "nothing has been touched");
    cluster.start_daemon_with(&["--reset"]).unwrap();
    assert!(!other.exists());
    assert_eq!(cluster.netsum_json(&["job", "list"]).unwrap(), serde_json::json!([]));
    // Maps without a state file: the jobs are gone, and the daemon starts over.
    cluster.create_job(&JobSpec::new("idle", 2)).unwrap();
    cluster.kill_daemon().unwrap();
    std::fs::remove_file(cluster.state_file()).unwrap();
    cluster.start_daemon().unwrap();
    assert!(
        cluster.daemon_log().contains("removing orphaned rings: no saved job owns them"),
        "{}",
        cluster.daemon_log()
    );
    // An invalid state file.
    cluster.create_job(&JobSpec::new("idle", 2)).unwrap();
    cluster.kill_daemon().unwrap();
    std::fs::write(cluster.state_file(), "{}").unwrap();
    cluster.start_daemon().unwrap();
    assert!(
        cluster.daemon_log().contains("not what a netsum of this version writes"),
        "{}",
        cluster.daemon_log()
    );
    assert_eq!(xdp_ports(&cluster), 2);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_job_that_was_being_changed_or_has_lost_a_port_ends_with_a_reason() {
    let mut cluster = pinned(3);
    let mut group = start(&cluster, &JobSpec { timeout: 3 * SECOND, ..JobSpec::new("half", 2) });
    group.all_reduce("i32", 1000, 1).unwrap();
    cluster.kill_daemon().unwrap();
    // As if the daemon was killed after it had changed the maps and before it had changed the file.
    let text = std::fs::read_to_string(cluster.state_file()).unwrap();
    let mut state: Value = serde_json::from_str(&text).unwrap();
    state["jobs"][0]["flows"][0]["base_psn"] = 1.into();
    std::fs::write(cluster.state_file(), state.to_string()).unwrap();
    cluster.start_daemon().unwrap();
    let shown = wait_for_state(&cluster, "half", "failed");
    assert!(
        shown["error"].as_str().unwrap().contains("was killed while it changed the job"),
        "{shown:#}"
    );
    // Its ranks get an error or the right sum from a ring, but not a wrong sum.
    let files = group.order_all_reduce("i32", 1000, 2).unwrap();
    if let Err(error) = group.check_all_reduce("i32", 1000, 2, &files) {
        assert!(error.to_string().contains("the controller was restarted"), "{error:#}");
    }
    drop(group);
    cluster.netsum(&["job", "delete", "half"]).unwrap();

    let job = JobSpec { timeout: 3 * SECOND, ..JobSpec::new("far", 3) };
    let mut group = start(&cluster, &job);
    group.all_reduce("i32", 1000, 3).unwrap();
    cluster.kill_daemon().unwrap();
    netns::output(cluster.lab().box_().command("ip").args(["link", "del", "port2"])).unwrap();
    cluster.start_daemon().unwrap();
    let shown = wait_for_state(&cluster, "far", "failed");
    assert!(shown["error"].as_str().unwrap().contains("rank 2: its port"), "{shown:#}");
    group.order_all_reduce("i32", 1000, 4).unwrap();
    for (rank, answer) in group.answers(TIMEOUT).unwrap() {
        assert!(matches!(answer, RankReply::Error(_)), "rank {rank}: {answer:?}");
    }
    // Its hosts may still be sending: the programs stay, and drop their packets.
    cluster.stop_daemon().unwrap();
    assert!(cluster.pins().exists());
    assert_eq!(xdp_ports(&cluster), 2);
    cluster.start_daemon_with(&["--detach-now"]).unwrap();
    let log = cluster.daemon_log();
    assert!(
        log.contains("2 ports, 0 jobs, ") && !log.contains(" 0 connections whose job has ended"),
        "{log}"
    );
    cluster.stop_daemon().unwrap();
    assert!(!cluster.pins().exists());
    assert_eq!(xdp_ports(&cluster), 0);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn jobs_that_come_and_go_leave_no_map_behind() {
    let cluster = pinned(2);
    let descriptors =
        || std::fs::read_dir(format!("/proc/{}/fd", cluster.daemon_pid())).unwrap().count();
    // A size that no other test has: 2 x 3 x 171 fragments are 1026, rounded up to 2048 slots.
    let job = JobSpec { mtu: 512, message_size: 171 * 512, window: 3, ..JobSpec::new("brief", 2) };
    let sums = || {
        let infos = aya::maps::loaded_maps().flatten();
        infos.filter(|m| (m.value_size(), m.max_entries()) == (512, 2048)).count()
    };
    let cycle = || {
        cluster.create_job(&job).unwrap();
        let flow = ["flow", "add", "brief", "--ring", "0", "--rank", "0", "--port", "port0"];
        let way = ["--src", "10.0.0.1", "--dst", "10.0.0.2", "--qpn", "5", "--psn", "7"];
        cluster.netsum(&[&flow[..], &way].concat()).unwrap();
        assert!(sums() >= 1);
        cluster.netsum(&["job", "delete", "brief"]).unwrap();
    };
    cycle();
    let open = descriptors();
    (0..20).for_each(|_| cycle());
    // The daemon closes a client's connection when it next runs.
    let start = Instant::now();
    while descriptors() > open + 2 {
        assert!(start.elapsed() < TIMEOUT, "{open} descriptors were open, now {}", descriptors());
    }
    // The kernel frees a map after a grace period.
    let start = Instant::now();
    while sums() > 0 {
        assert!(start.elapsed() < TIMEOUT, "{} arrays for sums are left", sums());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_guard_that_was_left_without_its_port_is_replaced() {
    let mut cluster = pinned(2);
    cluster.kill_daemon().unwrap();
    // As if a daemon was killed while it detached from a port.
    let box_ = cluster.lab().box_();
    let left = box_.ifindex(&box_.port(1)).unwrap();
    let pins = cluster.pins().join(format!("abi-{VERSION}"));
    std::fs::remove_file(pins.join("links").join(left.to_string())).unwrap();
    let start = Instant::now();
    while xdp_ports(&cluster) == 2 {
        assert!(start.elapsed() < TIMEOUT);
    }
    cluster.start_daemon().unwrap();
    assert_eq!(xdp_ports(&cluster), 2);
    assert!(!cluster.daemon_log().contains("has no guard"), "{}", cluster.daemon_log());

    // If a guard cannot be attached, the daemon does not claim that there is one.
    cluster.kill_daemon().unwrap();
    let guard = pins.join("guards").join(left.to_string());
    std::fs::remove_file(&guard).unwrap();
    std::fs::create_dir(&guard).unwrap();
    cluster.start_daemon().unwrap();
    assert!(cluster.daemon_log().contains("has no guard"), "{}", cluster.daemon_log());
    let shown = cluster.netsum_json(&["prog", "show"]).unwrap();
    let guarded =
        shown["programs"].as_array().unwrap().iter().find(|p| p["name"] == "guard").unwrap();
    assert_eq!(guarded["type"], "sched_cls");
    assert_eq!(guarded["attached"].as_array().unwrap().len(), 1, "{guarded:#}");
}

/// A lab with a daemon that creates its jobs again after a boot.
fn kept(hosts: usize, options: &DaemonOptions) -> Cluster {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(hosts)).unwrap();
    cluster.pin();
    cluster.keep_jobs();
    cluster.start_daemon_as(options).unwrap();
    cluster
}

fn jobs(cluster: &Cluster) -> Vec<String> {
    let listed = cluster.netsum_json(&["job", "list"]).unwrap();
    listed.as_array().unwrap().iter().map(|job| job["name"].as_str().unwrap().to_owned()).collect()
}

/// Runs all-reduces, each of which is right, until the box sums.
fn until_box(cluster: &Cluster, group: &mut Group) {
    let start = Instant::now();
    for seed in 100.. {
        if group.all_reduce("i32", 50_000, seed).unwrap().iter().all(|o| o.mode == "box") {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "{}{}", group.log(), cluster.daemon_log());
        std::thread::sleep(SECOND / 20);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn jobs_are_created_again_and_their_ranks_return() {
    let mut cluster = kept(2, &DaemonOptions::default());
    let job = JobSpec { timeout: 5 * SECOND, ..JobSpec::new("train", 2) };
    for name in ["first", "idle"] {
        cluster.create_job(&JobSpec::new(name, 2)).unwrap();
    }
    let mut group = start(&cluster, &job);
    assert_box(&group.all_reduce("i32", 50_000, 1).unwrap());
    cluster.netsum(&["job", "delete", "first"]).unwrap();

    // The daemon is stopped in the middle of an all-reduce, and started.
    let files = group.order_all_reduce("i32", 4_000_000, 2).unwrap();
    cluster.stop_daemon().unwrap();
    group.check_all_reduce("i32", 4_000_000, 2, &files).unwrap();
    cluster.start_daemon().unwrap();
    assert!(cluster.daemon_log().contains("job train created again, with empty rings"));
    assert_eq!(jobs(&cluster), ["idle", "train"]);
    until_box(&cluster, &mut group);
    // The next daemon takes the jobs over, and creates nothing.
    cluster.kill_daemon().unwrap();
    cluster.start_daemon().unwrap();
    assert!(!cluster.daemon_log().contains("created again"));
    // As after a boot: no map, no program, no state, and for a while a plain bridge.
    let files = group.order_all_reduce("i32", 4_000_000, 3).unwrap();
    cluster.kill_daemon().unwrap();
    std::fs::remove_dir_all(cluster.pins()).unwrap();
    std::fs::remove_file(cluster.state_file()).unwrap();
    group.check_all_reduce("i32", 4_000_000, 3, &files).unwrap();
    cluster.start_daemon().unwrap();
    assert_eq!(jobs(&cluster), ["idle", "train"]);
    until_box(&cluster, &mut group);
    drop(group);

    // `--reset` discards the jobs.
    cluster.kill_daemon().unwrap();
    cluster.start_daemon_with(&["--reset"]).unwrap();
    assert_eq!(jobs(&cluster), [""; 0]);
    cluster.stop_daemon().unwrap();
    cluster.start_daemon().unwrap();
    assert_eq!(jobs(&cluster), [""; 0]);
    cluster.stop_daemon().unwrap();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_full_disk_leaves_the_jobs_that_it_has_and_gets_the_others_later() {
    // Only the daemon uses the disk.
    let mount =
        "mkdir \"$1\"; mount -t tmpfs -o size=16k,mode=700 tmpfs \"$1\"; shift; exec \"$@\"";
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    cluster.pin();
    cluster.keep_jobs();
    let folder = cluster.jobs_file().parent().unwrap().to_owned();
    let words = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", mount, "sh"];
    let prefix =
        words.iter().map(|&word| word.to_owned()).chain([folder.display().to_string()]).collect();
    cluster.start_daemon_as(&DaemonOptions { prefix, ..DaemonOptions::default() }).unwrap();
    cluster.create_job(&JobSpec::new("first", 2)).unwrap();

    let root = std::path::PathBuf::from(format!("/proc/{}/root", cluster.daemon_pid()));
    let seen = |path: &std::path::Path| root.join(path.strip_prefix("/").unwrap());
    let filler = seen(&folder.join("filler"));
    std::fs::write(&filler, vec![0; 1 << 20]).unwrap_err();
    for name in ["second", "third"] {
        cluster.create_job(&JobSpec::new(name, 2)).unwrap();
    }
    let (log, file) = (cluster.daemon_log(), seen(&cluster.jobs_file()));
    let failed =
        format!("{}: cannot write: No space left on device", cluster.jobs_file().display());
    assert_eq!(log.matches(&failed).count(), 1, "{log}");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("first") && !text.contains("second"), "{text}");
    assert!(!file.with_extension("new").exists());

    std::fs::remove_file(&filler).unwrap();
    let start = Instant::now();
    while !cluster.daemon_log().contains("jobs.json: written again") {
        assert!(start.elapsed() < TIMEOUT, "{}", cluster.daemon_log());
        std::thread::sleep(SECOND / 20);
    }
    assert!(std::fs::read_to_string(&file).unwrap().contains("third"));
    cluster.stop_daemon().unwrap();
}
