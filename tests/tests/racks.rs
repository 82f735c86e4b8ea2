//! Boxes in levels: leaves sum the contributions of their hosts, and a spine sums those of the
//! leaves.

use std::time::{Duration, Instant};

use netsum_common::counters::Counter;
use netsum_common::wire::{Bth, Opcode};
use netsum_lab::cluster::{Cluster, Group, JobSpec, one_on_each_host};
use netsum_lab::faults::Faults;
use netsum_lab::frames::FrameSpec;
use netsum_lab::group::Outcome;
use netsum_lab::lab::BoxNode;
use netsum_lab::racks::Racks;
use netsum_lab::tap::Tap;
use netsum_lab::verbs_ring::{self, JOB, Operation, VerbsRingSpec};
use netsum_lab::{Host, LabSpec};

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn one_copy_of_a_rack_goes_up_and_every_sum_is_right() {
    for (racks, hosts, mtu) in [(2, 4, 1024), (4, 16, 2048), (3, 3, 256), (2, 5, 512)] {
        let spec = LabSpec { racks, mtu: 2300, ..LabSpec::hosts(hosts) };
        let cluster = Cluster::without_daemon(spec).unwrap();
        let job = JobSpec { mtu, ..JobSpec::new("racks", hosts as u32) };
        let boxes = Racks::new(cluster.lab(), &job, false).unwrap();
        let mut group = cluster.ranks_alone(&job, &one_on_each_host(hosts as u32)).unwrap();
        for (dtype, len, seed) in
            [("i32", 1, 1), ("f32", 1000, 2), ("i32", 100_001, 3), ("f32", 150_000, 4)]
        {
            let what = format!("{racks} racks, {hosts} hosts, {len} {dtype}");
            let outcomes = group
                .all_reduce(dtype, len, seed)
                .unwrap_or_else(|e| panic!("{what}: {e:#}\n{}\n{}", group.log(), boxes.counted()));
            for outcome in outcomes {
                assert_eq!(
                    (&*outcome.mode, outcome.wrong),
                    ("box", 0),
                    "{what}: {outcome:?}\n{}",
                    boxes.counted()
                );
            }
        }
        let released = boxes.count(racks, Counter::Released).unwrap();
        for rack in 0..racks {
            let count = |counter| boxes.count(rack, counter).unwrap();
            assert_eq!(
                (count(Counter::PartialsSent), count(Counter::TotalsReceived)),
                (released, released),
                "{rack}"
            );
        }
    }
}

/// A machine with a bridge for its containers is a rack, and its network card is the uplink.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn of_four_ranks_on_a_machine_one_copy_leaves_it() {
    let uplink = Some("1gbit".parse().unwrap());
    let cluster =
        Cluster::without_daemon(LabSpec { racks: 2, uplink, ..LabSpec::hosts(8) }).unwrap();
    let job = JobSpec::new("machines", 8);
    let boxes = Racks::new(cluster.lab(), &job, false).unwrap();
    let mut group = cluster.ranks_alone(&job, &one_on_each_host(8)).unwrap();
    let before = cluster.lab().sent_up().unwrap();
    const LEN: usize = 1_000_000;
    let outcomes = group.all_reduce("i32", LEN, 1).unwrap();
    assert!(
        outcomes.iter().all(|o| (&*o.mode, o.wrong) == ("box", 0)),
        "{outcomes:?}\n{}",
        boxes.counted()
    );
    let sent = cluster.lab().sent_up().unwrap() - before;
    let copies = sent as f64 / 2.0 / (4 * LEN) as f64;
    println!("{copies:.2} copies of 4 leave a machine, headers and acknowledgements among them");
    assert!((1.0..1.2).contains(&copies), "{copies}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn one_percent_loss_in_each_direction() {
    let spec = LabSpec { racks: 2, mtu: 2300, faulty_links: true, ..LabSpec::hosts(4) };
    let cluster = Cluster::without_daemon(spec).unwrap();
    let job = JobSpec::new("lossy", 4);
    let boxes = Racks::new(cluster.lab(), &job, false).unwrap();
    let mut group = cluster.ranks_alone(&job, &one_on_each_host(4)).unwrap();
    for (i, host) in cluster.lab().hosts().iter().enumerate() {
        host.set_faults(Faults::loss(0.01), Faults::loss(0.01), i as u32).unwrap();
    }
    for seed in 0..4 {
        let outcomes = group
            .all_reduce("f32", 300_000, seed)
            .unwrap_or_else(|e| panic!("{e:#}\n{}\n{}", group.log(), boxes.counted()));
        for outcome in outcomes {
            assert_eq!(
                (&*outcome.mode, outcome.wrong),
                ("box", 0),
                "{outcome:?}\n{}",
                boxes.counted()
            );
        }
    }
    assert!(boxes.count(boxes.spine(), Counter::ShiftedPsn).unwrap() > 0, "{}", boxes.counted());
}

/// One percent of the packets is lost in each direction, on hosts' links and uplinks alike. Every
/// sum is right.
fn all_reduce_with_losses(spec: LabSpec, len: usize) -> (Cluster, Racks) {
    let ranks = spec.hosts as u32;
    let what = format!("{} racks, {} pods", spec.racks, spec.pods);
    let cluster =
        Cluster::without_daemon(LabSpec { mtu: 2300, faulty_links: true, ..spec }).unwrap();
    let lab = cluster.lab();
    let job = JobSpec::new("lossy", ranks);
    let boxes = Racks::new(lab, &job, false).unwrap();
    let mut group = cluster.ranks_alone(&job, &one_on_each_host(ranks)).unwrap();
    let loss = Faults::loss(0.01);
    lab.hosts().iter().for_each(|host| host.set_faults(loss, loss, host.number() as u32).unwrap());
    lab.spec()
        .below()
        .for_each(|below| lab.leaf(below).set_faults(loss, loss, 100 + below as u32).unwrap());
    for (seed, dtype) in [(1, "i32"), (2, "f32")] {
        let outcomes = group
            .all_reduce(dtype, len, seed)
            .unwrap_or_else(|e| panic!("{what}: {e:#}\n{}\n{}", group.log(), boxes.counted()));
        for outcome in outcomes {
            assert_eq!(
                (&*outcome.mode, outcome.wrong),
                ("box", 0),
                "{what}: {outcome:?}\n{}",
                boxes.counted()
            );
        }
    }
    for below in lab.spec().below() {
        let counts = lab.leaf(below).fault_link(0).unwrap().counts().unwrap();
        assert!(counts.up.lost > 0 && counts.down.lost > 0, "{what}, uplink {below}: {counts:?}");
    }
    (cluster, boxes)
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn one_copy_leaves_each_of_four_racks_despite_loss() {
    let (_cluster, boxes) =
        all_reduce_with_losses(LabSpec { racks: 4, ..LabSpec::hosts(16) }, 100_000);
    let count = |number, counter| boxes.count(number, counter).unwrap();
    for rack in 0..4 {
        let fragments = count(rack, Counter::Released);
        assert_eq!(
            count(rack, Counter::PartialsSent),
            fragments,
            "rack {rack}\n{}",
            boxes.counted()
        );
        let again = count(rack, Counter::PartialsResent) as f64 / fragments as f64;
        println!("rack {rack}: {:.2} copies go up", 1.0 + again);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn three_levels_with_loss_on_all_links() {
    let spec = LabSpec { racks: 4, pods: 2, ..LabSpec::hosts(8) };
    let (_cluster, boxes) = all_reduce_with_losses(spec, 100_000);
    let count = |number, counter| boxes.count(number, counter).unwrap();
    for number in 0..6 {
        assert_eq!(
            count(number, Counter::PartialsSent),
            count(number, Counter::TotalsReceived),
            "{}",
            boxes.counted()
        );
    }
}

/// Runs all-reduces with one rank on each of four hosts in two racks.
fn all_reduce(spec: LabSpec, v6: bool, loss: f64, len: usize) {
    let what = format!("tagged: {:?}, IPv6: {v6}, loss: {loss}", spec.tagged);
    let cluster = Cluster::without_daemon(spec).unwrap();
    let job = JobSpec::new("same", 4);
    let boxes = Racks::with(cluster.lab(), &job, false, v6).unwrap();
    let places = one_on_each_host(4);
    let group =
        if v6 { cluster.ranks_alone_v6(&job, &places) } else { cluster.ranks_alone(&job, &places) };
    let mut group = group.unwrap_or_else(|e| panic!("{what}: {e:#}\n{}", boxes.counted()));
    for host in cluster.lab().hosts().iter().filter(|_| loss > 0.0) {
        host.set_faults(Faults::loss(loss), Faults::loss(loss), host.number() as u32).unwrap();
    }
    for (seed, dtype) in [(1, "i32"), (2, "f32")] {
        let outcomes = group
            .all_reduce(dtype, len, seed)
            .unwrap_or_else(|e| panic!("{what}: {e:#}\n{}\n{}", group.log(), boxes.counted()));
        for outcome in outcomes {
            assert_eq!(
                (&*outcome.mode, outcome.wrong),
                ("box", 0),
                "{what}: {outcome:?}\n{}",
                boxes.counted()
            );
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn racks_over_ipv6() {
    for (faulty_links, loss) in [(false, 0.0), (true, 0.01)] {
        let spec = LabSpec { racks: 2, mtu: 2300, ipv6: true, faulty_links, ..LabSpec::hosts(4) };
        all_reduce(spec, true, loss, 100_000);
    }
}

/// The trunk is between the boxes.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn racks_in_a_vlan() {
    in_a_vlan(&[0, 1, 2, 3], true);
    // On the connections between the racks the senders are tagged; or both ends of one, and neither
    // of the other.
    in_a_vlan(&[1, 3], false);
    in_a_vlan(&[1, 2], false);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test --all"]
fn racks_in_a_vlan_without_loss_or_with_tagged_receivers() {
    in_a_vlan(&[0, 1, 2, 3], false);
    in_a_vlan(&[0, 2], true);
}

fn in_a_vlan(tagged: &[usize], v6: bool) {
    let spec = LabSpec {
        racks: 2,
        mtu: 2300,
        ipv6: true,
        tagged: tagged.to_vec(),
        faulty_links: v6,
        ..LabSpec::hosts(4)
    };
    all_reduce(spec, v6, if v6 { 0.02 } else { 0.0 }, 30_000);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn nobody_acknowledges_in_the_name_of_a_rank_in_another_rack() {
    let cluster = Cluster::without_daemon(LabSpec { racks: 2, ..LabSpec::hosts(4) }).unwrap();
    let boxes = Racks::new(cluster.lab(), &JobSpec::new("forged", 4), false).unwrap();
    // Host 0 is in rack 0 and sends in the names of ranks 2 and 3, which are behind the spine. Rank
    // 2's connection from rank 1 leaves the rack.
    let tap = Tap::open(cluster.lab().host(0), Host::INTERFACE).unwrap();
    let forged = |rank: u8| {
        let mut spec = FrameSpec::send(rank + 1, 2, 0x10_0403, 7, Vec::new());
        spec.bth = Bth::new(Opcode::ACK, 0x10_0403, 7);
        // The box does not know this MAC address. A known one would be reason enough to refuse the
        // frame.
        let mut frame = spec.build();
        frame[6..12].copy_from_slice(&[2, 0, 0, 0, 9, 9]);
        frame
    };
    let spoofed = || boxes.count(0, Counter::Spoofed).unwrap();
    for (rank, refused) in [(2, 1), (3, 2)] {
        tap.send(&forged(rank)).unwrap();
        let start = Instant::now();
        while spoofed() < refused && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(spoofed(), refused, "in the name of rank {rank}\n{}", boxes.counted());
    }
}

/// A box loses its programs in the middle of an all-reduce over two racks: the hosts sum
/// themselves.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_leaf_or_the_spine_goes_in_the_middle_and_no_job_ends() {
    torn(&two_racks(), &[0, 2]);
}

/// Packets that a middle box lets through are neither its own sum nor a total.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn no_sum_is_wrong_when_a_middle_box_fails() {
    torn(&two_pods(), &[4]);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test --all"]
fn the_other_leaf_or_middle_box_goes_in_the_middle() {
    torn(&two_racks(), &[1]);
    torn(&two_pods(), &[5]);
}

fn two_racks() -> LabSpec {
    LabSpec { racks: 2, ..LabSpec::hosts(4) }
}

fn two_pods() -> LabSpec {
    LabSpec { racks: 4, pods: 2, ..LabSpec::hosts(8) }
}

fn torn(spec: &LabSpec, boxes: &[usize]) {
    for (seed, &gone) in boxes.iter().enumerate() {
        let (seed, ranks) = (seed as u64 + 1, spec.hosts as u32);
        let cluster = Cluster::without_daemon(spec.clone()).unwrap();
        let job = JobSpec::new("torn", ranks);
        let mut boxes = Racks::new(cluster.lab(), &job, false).unwrap();
        let mut group = cluster.ranks_alone(&job, &one_on_each_host(ranks)).unwrap();
        let what = |boxes: &Racks, group: &Group| {
            format!("box {gone}\n{}\n{}", group.log(), boxes.counted())
        };
        let len = 8_000_000;
        let files = group.order_all_reduce("i32", len, seed).unwrap();
        while boxes.count(boxes.spine(), Counter::Released).unwrap() < 200 {
            std::thread::yield_now();
        }
        let refused_before = boxes.refused().unwrap();
        boxes.detach(gone).unwrap();
        let outcomes = group
            .check_all_reduce("i32", len, seed, &files)
            .unwrap_or_else(|e| panic!("{e:#}\n{}", what(&boxes, &group)));
        // Every element was compared. A message with sums in front and one rank's data behind fails
        // its check lanes, counts as "wrong", and is summed by the ring.
        assert!(
            outcomes.iter().all(|o| o.mode == "ring"),
            "{outcomes:?}\n{}",
            what(&boxes, &group)
        );
        assert!(spec.pods == 0 || outcomes.iter().all(|o| o.wrong == 0), "{outcomes:?}");
        // If a leaf lets everything through, its hosts may notice first.
        let refused = boxes.refused().unwrap() > refused_before;
        assert!(refused || spec.pods == 0, "{}", what(&boxes, &group));
        boxes.attach(gone).unwrap();
        // The sums are right in any case. Ranks without a daemon are not told that the boxes sum
        // again.
        let wrong = |outcomes: &[Outcome]| outcomes.iter().map(|o| o.wrong).collect::<Vec<_>>();
        let before = wrong(&outcomes);
        let outcomes = group.all_reduce("f32", 100_000, seed).unwrap();
        assert_eq!(wrong(&outcomes), before, "{outcomes:?}\n{}", what(&boxes, &group));
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn an_uplink_is_down_for_a_while_and_no_job_ends() {
    for down in [Duration::from_millis(300), Duration::from_secs(4)] {
        let cluster = Cluster::without_daemon(LabSpec { racks: 2, ..LabSpec::hosts(4) }).unwrap();
        let job = JobSpec::new("cut", 4);
        let boxes = Racks::new(cluster.lab(), &job, false).unwrap();
        let mut group = cluster.ranks_alone(&job, &one_on_each_host(4)).unwrap();
        let len = 3_000_000;
        let files = group.order_all_reduce("i32", len, 1).unwrap();
        while boxes.count(boxes.spine(), Counter::Released).unwrap() < 200 {
            std::thread::yield_now();
        }
        let leaf = cluster.lab().leaf(1);
        leaf.set_link(BoxNode::UPLINK, false).unwrap();
        std::thread::sleep(down);
        leaf.set_link(BoxNode::UPLINK, true).unwrap();
        let outcomes = group
            .check_all_reduce("i32", len, 1, &files)
            .unwrap_or_else(|e| panic!("{down:?}: {e:#}\n{}\n{}", group.log(), boxes.counted()));
        assert!(
            outcomes.iter().all(|o| o.wrong == 0),
            "{down:?}: {outcomes:?}\n{}",
            boxes.counted()
        );
    }
}

/// Boxes with their own daemons, which know of each other only what an administrator configures.
fn by_hand(spec: LabSpec) -> Cluster {
    let mut cluster = Cluster::start(spec).unwrap();
    cluster.start_leaves().unwrap();
    cluster
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn boxes_are_joined_by_hand_without_a_manager() {
    let cluster = by_hand(LabSpec { racks: 2, mtu: 2300, faulty_links: true, ..LabSpec::hosts(4) });
    for (operation, loss) in [
        (Operation::Send, 0.0),
        (Operation::Write, 0.0),
        (Operation::Send, 0.01),
        (Operation::Write, 0.01),
    ] {
        for host in cluster.lab().hosts() {
            host.set_faults(Faults::loss(loss), Faults::loss(loss), host.number() as u32).unwrap();
        }
        let spec = VerbsRingSpec { timeout: 17, ..VerbsRingSpec::new(4, 1024, operation, 20) };
        let reports = verbs_ring::run(&cluster, &spec, Duration::from_secs(60)).unwrap();
        for report in &reports {
            assert_eq!(
                (report.messages, report.wrong),
                (20, 0),
                "{operation:?}, {loss}: {report:?}"
            );
        }
        for rack in [Some(0), Some(1)] {
            let job = cluster.netsum_on(rack, &["-j", "job", "show", JOB]).unwrap();
            let job: serde_json::Value = serde_json::from_str(&job).unwrap();
            let members = if rack == Some(0) { ["0", "1", "up"] } else { ["2", "3", "up"] };
            assert_eq!((&job["members"], &job["state"]), (&members.into(), &"active".into()));
            let stats = cluster.netsum_on(rack, &["-j", "stats", JOB]).unwrap();
            let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
            let [fragments, up, down] = ["completed", "partials_sent", "totals_received"]
                .map(|name| stats[name].as_u64().unwrap());
            assert_eq!((fragments, down), (spec.packets(), spec.packets()), "{stats}");
            assert_eq!(up, spec.packets(), "one copy of the rack goes up: {stats}");
            let slots = cluster.netsum_on(rack, &["-j", "slot", "show", JOB]).unwrap();
            let slots: serde_json::Value = serde_json::from_str(&slots).unwrap();
            let ranks = if rack == Some(0) { [0, 1, 3] } else { [2, 3, 1] };
            assert_eq!(slots["rings"][0]["ranks"], serde_json::json!(ranks));
            assert_eq!(slots["slots"][0]["contributors"], serde_json::json!(ranks), "{slots}");
        }
        verbs_ring::forget(&cluster).unwrap();
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn netsums_own_ranks_are_registered_by_their_addresses() {
    let two_levels: [(_, &[&str], _); 3] = [
        (Some(0), &["--members", "0-1", "--uplink", "uplink"], "port0,port1,uplink"),
        (Some(1), &["--members", "2-3", "--uplink", "uplink"], "port2,port3,uplink"),
        (None, &["--groups", "0-1,2-3"], "rack0,rack1"),
    ];
    registered(LabSpec { racks: 2, ..LabSpec::hosts(4) }, &two_levels);
    let three_levels: [(_, &[&str], _); 7] = [
        (Some(0), &["--members", "0-1", "--uplink", "uplink"], "port0,port1,uplink"),
        (Some(1), &["--members", "2-3", "--uplink", "uplink"], "port2,port3,uplink"),
        (Some(2), &["--members", "4-5", "--uplink", "uplink"], "port4,port5,uplink"),
        (Some(3), &["--members", "6-7", "--uplink", "uplink"], "port6,port7,uplink"),
        (Some(4), &["--groups", "0-1,2-3", "--uplink", "uplink"], "rack0,rack1,uplink"),
        (Some(5), &["--groups", "4-5,6-7", "--uplink", "uplink"], "rack2,rack3,uplink"),
        (None, &["--groups", "0-3,4-7"], "rack4,rack5"),
    ];
    registered(LabSpec { racks: 4, pods: 2, ..LabSpec::hosts(8) }, &three_levels);
}

fn registered(spec: LabSpec, boxes: &[(Option<usize>, &[&str], &str)]) {
    let ranks = spec.hosts as u32;
    let cluster = by_hand(spec);
    let job = JobSpec { rings: 2, ..JobSpec::new("own", ranks) };
    let create = job.create_arguments();
    let create: Vec<&str> = create.iter().map(String::as_str).collect();
    let peers = cluster
        .lab()
        .hosts()
        .iter()
        .map(|host| host.ip(0).to_string())
        .collect::<Vec<_>>()
        .join(",");
    for &(rack, members, ports) in boxes {
        cluster.netsum_on(rack, &[&create[..], members].concat()).unwrap();
        let flows = ["flow", "peers", "own", "--peers", &peers, "--ports", ports];
        let printed = cluster.netsum_on(rack, &flows).unwrap();
        assert!(printed.contains("active"), "{printed}");
    }
    let mut group = cluster.ranks_alone(&job, &one_on_each_host(ranks)).unwrap();
    for seed in 0..3 {
        let outcomes = group.all_reduce("f32", 200_000, seed).unwrap();
        assert!(outcomes.iter().all(|o| (&*o.mode, o.wrong) == ("box", 0)), "{outcomes:?}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn members_that_do_not_fit_are_refused_with_both_names() {
    let cluster = by_hand(LabSpec { racks: 2, ..LabSpec::hosts(4) });
    let create = ["job", "create", "a", "--ranks", "4", "--message-size", "4096"];
    let refused = |more: &[&str]| {
        cluster
            .netsum_on(Some(0), &[&create[..], more].concat())
            .expect_err("it was taken")
            .to_string()
    };
    for (more, why) in [
        (
            &["--members", "0-1"][..],
            "members 0 to 1: not all of the 4 ranks; the others need an --uplink",
        ),
        (&["--members", "0-3", "--uplink", "uplink"], "all 4 ranks are below this box"),
        (&["--members", "0-1", "--uplink", "eth9"], "--uplink eth9: netsum has ports"),
        (&["--groups", "0-1,1-3"], "members 0-1 and 1-3: both have rank 1"),
        (&["--groups", "0,2-3"], "members 0 and 2-3: ranks between them are missing"),
        (&["--groups", "0-x"], "--groups 0-x: `0-x` is not a range like 0-3"),
        (&["--members", "0-1,2"], "--members 0-1,2: one range of ranks is possible"),
        (
            &["--members", "0-1", "--uplink", "uplink", "--in-band"],
            "this box sees only some of the ranks",
        ),
    ] {
        let error = refused(more);
        assert!(error.contains(why), "{more:?}: {error}");
    }
    let leaf = ["--members", "0-1", "--uplink", "uplink"];
    cluster.netsum_on(Some(0), &[&create[..], &leaf].concat()).unwrap();
    let flow = |rank, port| {
        let flow = [
            "flow", "add", "a", "--ring", "0", "--rank", rank, "--port", port, "--src", "10.0.0.1",
        ];
        cluster.netsum_on(
            Some(0),
            &[&flow[..], &["--dst", "10.0.0.2", "--qpn", "7", "--psn", "1"]].concat(),
        )
    };
    for (rank, port, why) in [
        ("2", "port0", "its connection does not cross this box; only those of ranks 0, 1, 3 do"),
        ("3", "port0", "its connection arrives from the parent, at --uplink uplink"),
        ("0", "uplink", "that is the --uplink, and rank 0 is a member below"),
        ("4", "port0", "the job has ranks 0 to 3"),
    ] {
        let error = flow(rank, port).expect_err("it was taken").to_string();
        assert!(error.contains(why), "{rank} {port}: {error}");
    }
    flow("0", "port0").unwrap();
}
