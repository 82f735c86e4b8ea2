//! Sealed sums through the box, and a box that forges.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use aya::maps::{Array, ArrayOfMaps, Map, MapData};
use netsum_collective::numeric::layout::CHECK_BYTES;
use netsum_collective::numeric::quant::check_sums;
use netsum_collective::numeric::reference::add_lanes;
use netsum_common::abi::{VERSION, maps};
use netsum_common::wire::{ICRC_LEN, parse};
use netsum_lab::cluster::{Cluster, Group, JobSpec, TIMEOUT, one_on_each_host};
use netsum_lab::group::Outcome;
use netsum_lab::tap::Tap;
use netsum_lab::{Host, LabSpec};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SECRET: &str = "a secret of the ranks";

fn start(cluster: &Cluster, job: &JobSpec, hosts: &[usize]) -> Group {
    let token = cluster.create_job(job).unwrap();
    let places: Vec<_> = hosts.iter().map(|host| (*host, 0)).collect();
    cluster.ranks(job, &token, &places).unwrap()
}

fn assert_box(outcomes: &[Outcome], hierarchical: bool, log: &str) {
    for (rank, o) in outcomes.iter().enumerate() {
        let found = (&*o.mode, o.hierarchical, o.wrong, o.fallbacks);
        assert_eq!(found, ("box", hierarchical, 0, 0), "rank {rank}\n{log}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_box_adds_what_it_cannot_read() {
    let mut cluster = Cluster::start(LabSpec::hosts(4)).unwrap();
    let job = JobSpec { secret: SECRET, rings: 2, ..JobSpec::new("sealed", 4) };
    let mut group = start(&cluster, &job, &[0, 1, 2, 3]);
    for (seed, (dtype, len)) in
        [("f32", 10), ("i32", 3), ("f32", 300_000), ("i32", 70_001), ("f32", 0)].iter().enumerate()
    {
        let outcomes = group.all_reduce(dtype, *len, seed as u64).unwrap();
        assert_box(&outcomes, false, &group.log());
    }
    let many = [("f32", 5), ("f32", 40_000), ("i32", 9), ("f32", 100)];
    assert_box(&group.in_flight(&many, 7).unwrap(), false, &group.log());

    let start = Instant::now();
    while cluster.netsum_json(&["job", "show", "sealed"]).unwrap()["sealed"] != true {
        assert!(
            start.elapsed() < TIMEOUT,
            "{}",
            cluster.netsum(&["job", "show", "sealed"]).unwrap()
        );
    }

    // The box becomes a plain bridge.
    cluster.kill_daemon().unwrap();
    let outcomes = group.all_reduce("f32", 100_000, 8).unwrap();
    assert!(outcomes.iter().all(|o| o.mode == "ring" && o.wrong == 0), "{outcomes:?}");
    assert!(group.log().contains("arrived unsummed"), "{}", group.log());
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_of_one_host_seal_what_leaves_it() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let job = JobSpec { secret: SECRET, ..JobSpec::new("sealed", 4) };
    let mut group = start(&cluster, &job, &[0, 0, 1, 1]);
    let outcomes = group.all_reduce("f32", 200_000, 1).unwrap();
    assert_box(&outcomes, true, &group.log());
    assert_box(&group.all_reduce("i32", 200_000, 2).unwrap(), false, &group.log());
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn boxes_in_levels_add_sealed_messages() {
    let spec = LabSpec { hosts: 4, racks: 2, mtu: 2300, ..LabSpec::default() };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    cluster.start_daemon().unwrap();
    cluster.start_leaves().unwrap();
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec { secret: SECRET, ..JobSpec::new("sealed", 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    let outcomes = group.all_reduce("f32", 100_000, 1).unwrap();
    assert_box(&outcomes, false, &group.log());
}

/// How far the bytes of full packets that arrive at a rank are from uniform ones.
fn chi_square(secret: &'static str) -> f64 {
    let cluster = Cluster::start(LabSpec::hosts(3)).unwrap();
    let job = JobSpec { secret, ..JobSpec::new("captured", 3) };
    let mut group = start(&cluster, &job, &[0, 1, 2]);
    // The greetings, which are in clear, come before.
    group.all_reduce("f32", 10, 1).unwrap();
    let tap = Tap::open(cluster.lab().host(0), Host::INTERFACE).unwrap();
    let files = group.order_all_reduce("f32", 100_000, 2).unwrap();
    let mut counts = [0u32; 256];
    let mut payloads = HashSet::new();
    // Packets that arrive again count once.
    while payloads.len() < 250 {
        let is_full = |frame: &[u8]| frame.len() > 1000 && parse(frame).is_ok();
        let frame = tap.receive(TIMEOUT, is_full).unwrap();
        let payload = &frame[parse(&frame[..]).unwrap().payload()..frame.len() - ICRC_LEN];
        if payloads.insert(payload.to_vec()) {
            payload.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
        }
    }
    group.check_all_reduce("f32", 100_000, 2, &files).unwrap();
    let expected = f64::from(counts.iter().sum::<u32>()) / 256.0;
    counts.iter().map(|count| (f64::from(*count) - expected).powi(2) / expected).sum()
}

/// 255 degrees of freedom: random bytes are beyond these once in a million runs.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn sealed_packets_look_random_and_others_do_not() {
    let [sealed, clear] = [SECRET, ""].map(chi_square);
    assert!((157.0..377.0).contains(&sealed) && clear > 3770.0, "{sealed}, in clear {clear}");
}

type Sums = Array<MapData, [u8; 1024]>;

/// The sums of the first ring's slots.
fn sums(cluster: &Cluster) -> Sums {
    let path = cluster.pins().join(format!("abi-{VERSION}/maps/{}", maps::SUMS[1]));
    let map = Map::from_map_data(MapData::from_pin(path).unwrap()).unwrap();
    ArrayOfMaps::<_, Sums>::try_from(map).unwrap().get(&1, 0).unwrap()
}

fn read(sums: &Sums) -> Vec<[u8; 1024]> {
    sums.iter().map(Result::unwrap).collect()
}

/// Adds one to a lane of each used slot, and what follows from it to the check lanes: what an
/// administrator of the box can do. Messages are single packets.
fn forge(mut sums: Sums, empty: &[[u8; 1024]]) {
    let (start, mut before, mut since) = (Instant::now(), read(&sums), Instant::now());
    // Others than the last rank have contributed once the slots have changed, and change no more.
    while before == empty || since.elapsed() < Duration::from_millis(300) {
        assert!(start.elapsed() < TIMEOUT, "no contribution arrives");
        std::thread::sleep(Duration::from_millis(10));
        let now = read(&sums);
        if now != before {
            (before, since) = (now, Instant::now());
        }
    }
    let mut change = [0; 1024];
    change[CHECK_BYTES] = 1;
    let check = check_sums(&change[CHECK_BYTES..]).map(u32::to_le_bytes);
    let place = CHECK_BYTES - check.as_flattened().len();
    change[place..CHECK_BYTES].copy_from_slice(check.as_flattened());
    for (slot, (sum, empty)) in before.iter_mut().zip(empty).enumerate() {
        if *sum != *empty {
            add_lanes(sum, &change);
            sums.set(slot as u32, *sum, 0).unwrap();
        }
    }
}

/// A box that forges a sum of four ranks: whether all get the right one, and the ranks' outcomes.
fn forged(secret: &'static str) -> Result<Vec<Outcome>, String> {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(4)).unwrap();
    cluster.pin();
    cluster.start_daemon().unwrap();
    let job = JobSpec { secret, message_size: 1024, ..JobSpec::new("forged", 4) };
    let mut group = start(&cluster, &job, &[0, 1, 2, 3]);
    let sums = sums(&cluster);
    let empty = read(&sums);
    let last = Pid::from_raw(group.pids().last().unwrap().try_into().unwrap());
    kill(last, Signal::SIGSTOP).unwrap();
    let files = group.order_all_reduce("i32", 100, 1).unwrap();
    forge(sums, &empty);
    kill(last, Signal::SIGCONT).unwrap();
    group.check_all_reduce("i32", 100, 1, &files).map_err(|error| format!("{error:#}"))
}

/// Check lanes find accidents; tags find intentions, too.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_box_that_forges_is_found_if_sums_are_sealed() {
    let error = forged("").unwrap_err();
    assert!(error.contains("1 of 100 elements are wrong"), "{error}");
    let outcomes = forged(SECRET).unwrap();
    let found: u64 = outcomes.iter().map(|o| o.wrong).sum();
    assert!(found > 0 && outcomes.iter().all(|o| o.mode == "ring"), "{outcomes:?}");
}
