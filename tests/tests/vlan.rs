//! Hosts in a VLAN: the hosts tag their frames, or a bridge does.

use netsum_common::wire;
use netsum_lab::cluster::{Cluster, JobSpec, Outcome, TIMEOUT, one_on_each_host};
use netsum_lab::faults::Faults;
use netsum_lab::tap::Tap;
use netsum_lab::{Host, LabSpec};

const RANKS: usize = 4;

fn assert_box(outcomes: &[Outcome], what: &str) {
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.mode, "box", "{what}, rank {rank}: {outcome:?}");
        assert_eq!((outcome.wrong, outcome.fallbacks), (0, 0), "{what}, rank {rank}: {outcome:?}");
    }
}

/// Runs all-reduces with one rank on each host, some of which are tagged. Returns the cluster.
fn all_reduce(spec: LabSpec, v6: bool, len: usize, faults: Faults) -> Cluster {
    let what = format!("tagged: {:?}, IPv6: {v6}", spec.tagged);
    let cluster = Cluster::start(spec).unwrap();
    for host in cluster.lab().hosts().iter().filter(|_| faults != Faults::NONE) {
        host.set_faults(faults, faults, host.number() as u32).unwrap();
    }
    let job = JobSpec { mtu: 2048, ..JobSpec::new("tagged", RANKS as u32) };
    let token = cluster.create_job(&job).unwrap();
    let places = one_on_each_host(job.ranks);
    let group = if v6 {
        cluster.ranks_v6(&job, &token, &places)
    } else {
        cluster.ranks(&job, &token, &places)
    };
    let mut group = group.unwrap_or_else(|e| panic!("{what}: {e:#}\n{}", cluster.daemon_log()));
    for dtype in ["i32", "f32"] {
        let outcomes = group
            .all_reduce(dtype, len, 3)
            .unwrap_or_else(|e| panic!("{what}: {e:#}\n{}\n{}", group.log(), cluster.daemon_log()));
        assert_box(&outcomes, &what);
    }
    drop(group);
    cluster
}

fn lab(tagged: &[usize], faulty_links: bool) -> LabSpec {
    LabSpec {
        mtu: 2300,
        ipv6: true,
        tagged: tagged.to_vec(),
        faulty_links,
        ..LabSpec::hosts(RANKS)
    }
}

/// The tag of a frame, if it has one.
fn tag(frame: &[u8]) -> Option<u16> {
    (frame[12..14] == [0x81, 0]).then(|| u16::from_be_bytes([frame[14], frame[15]]))
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn all_hosts_are_tagged() {
    for v6 in [false, true] {
        all_reduce(lab(&[0, 1, 2, 3], false), v6, 200_000, Faults::NONE);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn tagged_and_untagged_hosts_where_the_bridge_translates() {
    // Each kind of neighbours: both tagged, only the first, only the second, neither.
    for (tagged, v6) in [(&[0, 1][..], false), (&[0, 2], true), (&[3], false)] {
        all_reduce(lab(tagged, false), v6, 200_000, Faults::NONE);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn tagged_hosts_with_loss_both_ways() {
    for tagged in [&[0, 1, 2, 3][..], &[1, 2]] {
        // Linux 6.18 drops batches (UDP_SEGMENT) that get a tag where the interface computes no
        // checksums, as on an emulated link. Everything arrives in single, retransmitted packets,
        // about 250 KB in four seconds.
        let cluster = all_reduce(lab(tagged, true), false, 50_000, Faults::loss(0.04));
        for host in cluster.lab().hosts() {
            let counts = host.fault_link().unwrap().counts().unwrap();
            assert!(counts.up.lost > 0 && counts.down.lost > 0, "{counts:?}");
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn results_on_the_wire_are_tagged_where_their_hosts_are() {
    let tagged = [0, 2, 3];
    let cluster = Cluster::start(lab(&tagged, false)).unwrap();
    let job = JobSpec::new("seen", RANKS as u32);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(job.ranks)).unwrap();
    let taps: Vec<Tap> =
        cluster.lab().hosts().iter().map(|h| Tap::open(h, Host::INTERFACE).unwrap()).collect();
    assert_box(&group.all_reduce("i32", 20_000, 1).unwrap(), "seen");
    for (host, tap) in taps.iter().enumerate() {
        let is_data = |f: &[u8]| wire::parse(f).is_ok_and(|f| f.bth.opcode.is_rc_data());
        let tags: Vec<_> = (0..50).map(|_| tag(&tap.receive(TIMEOUT, is_data).unwrap())).collect();
        let expected = tagged.contains(&host).then_some(5);
        assert!(tags.iter().all(|tag| *tag == expected), "host {host}: {tags:?}");
    }
}
