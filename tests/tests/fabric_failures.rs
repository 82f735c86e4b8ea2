//! A fabric whose boxes, links or manager fail, are drained, or are slow, and how a second job goes
//! around slow links.

use netsum_lab::cluster::{Cluster, Group, JobSpec, TIMEOUT, one_on_each_host};
use netsum_lab::faults::Faults;
use netsum_lab::group::Outcome;
use netsum_lab::manager::Manager;
use netsum_lab::{LabSpec, Rate};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::time::{Duration, Instant};

use crate::fabric::{JOB, SECOND, fabric, fabric_of, jobs, wait, work};

/// The sums of the ranks, and how long they took.
#[derive(Debug, Default)]
struct Seen {
    sums: u64,
    /// Sums without the boxes.
    without: u64,
    /// The duration of the longest sum.
    pause: Duration,
    all: Duration,
}

/// Runs all-reduces until `done` returns true. `done` gets, for each sum, whether it came from the
/// boxes, and the time since the start. Every sum is right.
fn work_until(
    group: &mut Group,
    log: impl Fn() -> String,
    mut done: impl FnMut(bool, Duration) -> bool,
) -> Seen {
    let (start, mut seen) = (Instant::now(), Seen::default());
    loop {
        let called = Instant::now();
        let outcomes = group.all_reduce("i32", 20_000, seen.sums);
        let outcomes = outcomes.unwrap_or_else(|e| panic!("{e:#}\n{}\n{}", group.log(), log()));
        assert!(outcomes.iter().all(|o| o.wrong == 0), "{outcomes:?}");
        let by_boxes = outcomes.iter().all(|o| o.mode == "box");
        seen.sums += 1;
        seen.without += u64::from(!by_boxes);
        seen.all = start.elapsed();
        // Ranks may also wait before an operation, so the time that they report does not cover the
        // whole pause.
        seen.pause = seen.pause.max(called.elapsed());
        if done(by_boxes, seen.all) {
            return seen;
        }
        // Longer than the fourth wait before ranks try the box again.
        assert!(seen.all < 3 * TIMEOUT, "{seen:?}\n{}\n{}", group.log(), log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs all-reduces until the boxes sum again.
fn until_boxes(what: &str, group: &mut Group, log: impl Fn() -> String) -> Seen {
    let seen = work_until(group, log, |by_boxes, _| by_boxes);
    println!("{what}: {seen:.1?}");
    seen
}

/// Runs all-reduces for this long.
fn work_for(what: &str, group: &mut Group, log: impl Fn() -> String, time: Duration) -> Seen {
    let seen = work_until(group, log, |_, elapsed| elapsed > time);
    println!("{what}: {seen:.1?}");
    seen
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_leaf_that_has_lost_its_jobs_gets_them_again() {
    let mut cluster = fabric(1);
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec::new(JOB, 4);
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    // Killing the daemon also removes its programs: nothing is pinned.
    cluster.start_box(Some(1)).unwrap();
    let seen = until_boxes("leaf1 killed and started", &mut group, || manager.log());
    assert!(
        seen.without > 0 && manager.log().contains("box leaf1 no longer sums the job"),
        "{}",
        manager.log()
    );
    work(&mut group, 2);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn draining_a_spine_needs_no_fallback() {
    let cluster = fabric(2);
    let spine1 = cluster.lab().spec().spine(1);
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec { rings: 2, ..JobSpec::new(JOB, 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    // Runs all-reduces, all by the boxes, until the ranks have reconnected, and returns the
    // duration of the longest.
    let mut pause = |command: &[&str]| {
        let reconnects = |outcomes: &[Outcome]| outcomes.iter().map(|o| o.reconnects).min();
        let (mut longest, mut seed) = (Duration::ZERO, 0);
        let mut sum = || {
            seed += 1;
            let begun = Instant::now();
            let outcomes = group.all_reduce("i32", 20_000, seed).unwrap();
            longest = begun.elapsed().max(longest);
            assert!(
                outcomes.iter().all(|o| (&*o.mode, o.wrong) == ("box", 0)),
                "{outcomes:?}\n{}",
                manager.log()
            );
            reconnects(&outcomes)
        };
        let before = sum();
        manager.json(&cluster, command).unwrap();
        let start = Instant::now();
        while sum() == before {
            assert!(start.elapsed() < TIMEOUT, "{}", manager.log());
        }
        for _ in 0..3 {
            sum();
        }
        longest
    };
    let reconnect = pause(&["job", "reconnect", JOB]);
    let drain = pause(&["fabric", "drain", "spine1", "--reason", "new fan"]);
    println!(
        "the longest all-reduce: {reconnect:.0?} with a reconnect, {drain:.0?} when a spine is \
         drained"
    );
    let shown = |manager: &Manager| {
        let fabric = manager.json(&cluster, &["fabric", "show"]).unwrap();
        let boxes = fabric["boxes"].as_array().unwrap();
        boxes.iter().find(|b| b["name"] == "spine1").unwrap().clone()
    };
    wait("it is drained", || shown(&manager)["drained"] == true);
    assert_eq!((jobs(&cluster, spine1), &shown(&manager)["drain"]), (0, &"new fan".into()));
    manager.kill().unwrap();
    let manager = cluster.start_manager().unwrap();
    assert_eq!(shown(&manager)["drain"], "new fan", "it survives the manager");
    work(&mut group, 2);
    manager.json(&cluster, &["fabric", "undrain", "spine1"]).unwrap();
    let start = Instant::now();
    while jobs(&cluster, spine1) == 0 {
        assert!(start.elapsed() < TIMEOUT, "{}", manager.log());
        work(&mut group, 3);
    }
    work(&mut group, 4);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn an_unsummable_job_is_refused_or_uses_the_host_ring() {
    let cluster = fabric(1);
    let manager = cluster.start_manager().unwrap();
    manager.json(&cluster, &["fabric", "drain", "spine0", "--reason", "new fan"]).unwrap();
    let ranks = |job: &JobSpec| cluster.ranks_of(&manager, job, &one_on_each_host(4));
    let refused = ranks(&JobSpec::new(JOB, 4)).map(drop).unwrap_err();
    assert!(format!("{refused:#}").contains("is drained: new fan"), "{refused:#}");

    let mut group =
        ranks(&JobSpec { host_ring_fallback: true, ..JobSpec::new("anyway", 4) }).unwrap();
    for seed in 0..5 {
        for outcome in group.all_reduce("f32", 30_000, seed).unwrap() {
            assert_eq!(
                (&*outcome.mode, outcome.wrong, outcome.fallbacks),
                ("ring", 0, 0),
                "{outcome:?}"
            );
        }
    }
    assert!(group.log().contains("no box sums job anyway now"), "{}", group.log());
    let shown = manager.netsum(&cluster, &["fabric", "job", "show", "anyway"]).unwrap();
    assert!(shown.contains("no boxes sum it"), "{shown}");
    // Meanwhile no failback is tried in vain.
    let seen = work_for("no box is free", &mut group, || manager.log(), Duration::from_secs(4));
    let last = group.all_reduce("i32", 1000, 7).unwrap();
    let is_tried =
        last.iter().any(|o| o.reconnects > 0) || group.log().contains("cannot join again");
    assert!(seen.without == seen.sums && !is_tried, "{seen:?}\n{}", group.log());
    manager.json(&cluster, &["fabric", "undrain", "spine0"]).unwrap();
    until_boxes("spine0 gets rings again", &mut group, || manager.log());
    work(&mut group, 6);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn rings_spread_over_two_spines_and_come_together_when_one_is_cut_off() {
    let cluster = fabric(2);
    let spine1 = cluster.lab().spec().spine(1);
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec { rings: 2, ..JobSpec::new(JOB, 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    let members = |node: Option<usize>| cluster.netsum_on(node, &["job", "show", JOB]);
    assert!(
        members(Some(0)).unwrap().contains("uplink=1,uplink1=1"),
        "{}",
        members(Some(0)).unwrap()
    );
    assert!(members(spine1).unwrap().contains("0-1,2-3"));
    cluster.lab().spine(1).set_link("rack1", false).unwrap();
    until_boxes("a link of spine1 down", &mut group, || manager.log());
    println!("{}\n{}", manager.log(), group.log());
    work(&mut group, 2);
    assert!(
        members(spine1).is_err() && manager.log().contains("its tree has changed"),
        "{}",
        manager.log()
    );
    // When the link is up again, both spines get rings again.
    cluster.lab().spine(1).set_link("rack1", true).unwrap();
    let start = Instant::now();
    while members(spine1).is_err() {
        assert!(start.elapsed() < TIMEOUT, "{}", manager.log());
        work_until(&mut group, || manager.log(), |by_boxes, _| by_boxes);
    }
    work(&mut group, 3);
    println!(
        "apart after {:.1} s\n{}\n{}",
        start.elapsed().as_secs_f64(),
        manager.log(),
        group.log()
    );
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_killed_spine_is_left_out_until_it_returns() {
    let mut cluster = fabric(2);
    let spine1 = cluster.lab().spec().spine(1);
    let (manager, mut group) = at_work(&cluster);
    cluster.kill_box(spine1).unwrap();
    let seen = until_boxes("spine1 killed", &mut group, || manager.log());
    assert!(seen.without > 0 && seen.pause < 6 * SECOND, "{seen:?}\n{}", manager.log());
    work(&mut group, 2);
    let uplinks = || cluster.netsum_on(Some(0), &["job", "show", JOB]).unwrap();
    assert!(!uplinks().contains("uplink1="), "{}", uplinks());
    cluster.start_box(spine1).unwrap();
    let start = Instant::now();
    let spread = || cluster.netsum_on(spine1, &["job", "show", JOB]).is_ok();
    while !spread() {
        assert!(start.elapsed() < TIMEOUT, "{}", manager.log());
        work_until(&mut group, || manager.log(), |by_boxes, _| by_boxes);
    }
    println!("spread again after {:.1} s", start.elapsed().as_secs_f64());
    work(&mut group, 3);

    // The first spine carries the traffic that is not summed, so jobs depend on it.
    cluster.kill_box(None).unwrap();
    let seen = work_for("spine0 killed", &mut group, || manager.log(), 10 * SECOND);
    assert!(seen.without > 0 && seen.pause < 6 * SECOND, "{seen:?}\n{}", manager.log());
    cluster.start_box(None).unwrap();
    until_boxes("spine0 is there", &mut group, || manager.log());
    work(&mut group, 4);
}

/// A running job with two rings.
fn at_work(cluster: &Cluster) -> (Manager, Group) {
    let manager = cluster.start_manager().unwrap();
    let job = JobSpec { rings: 2, ..JobSpec::new(JOB, 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    (manager, group)
}

/// The causes why the job is stalled, once they contain this word.
fn causes(cluster: &Cluster, manager: &Manager, word: &str) -> String {
    let start = Instant::now();
    loop {
        let printed = manager.netsum(cluster, &["fabric", "diagnose", JOB]).unwrap();
        if printed.contains(word) || start.elapsed() > TIMEOUT {
            return printed;
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn diagnosis_names_a_stalled_rank_and_a_dead_link() {
    let cluster = fabric_of(LabSpec { spines: 2, faulty_links: true, ..LabSpec::default() }, false);
    let (manager, mut group) = at_work(&cluster);
    let last = Pid::from_raw(group.pids().last().unwrap().try_into().unwrap());
    kill(last, Signal::SIGSTOP).unwrap();
    let files = group.order_all_reduce("i32", 50_000, 1).unwrap();
    let rank = causes(&cluster, &manager, "rank 3");
    kill(last, Signal::SIGCONT).unwrap();
    assert!(
        rank.contains("rank 3") && rank.contains("(at box leaf1)") && !rank.contains("link "),
        "{rank}"
    );
    let outcomes = group.check_all_reduce("i32", 50_000, 1, &files).unwrap();
    assert!(outcomes.iter().all(|o| o.wrong == 0), "{outcomes:?}");

    // The ranks' acknowledgements go through the first spine.
    let fault_link = cluster.lab().leaf(1).fault_link(1).unwrap();
    fault_link.set(Faults::loss(1.0), Faults::NONE, 1).unwrap();
    let files = group.order_all_reduce("i32", 50_000, 2).unwrap();
    let link = causes(&cluster, &manager, "box spine1 misses data that box leaf1 has");
    fault_link.set(Faults::NONE, Faults::NONE, 1).unwrap();
    println!("{rank}\n{link}");
    assert!(
        link.contains(
            "link leaf1/uplink1 to spine1/rack1: box spine1 misses data that box leaf1 has"
        ),
        "{link}"
    );
    let outcomes = group.check_all_reduce("i32", 50_000, 2, &files).unwrap();
    assert!(outcomes.iter().all(|o| o.wrong == 0), "{outcomes:?}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_link_that_carries_one_direction_alone_ends_no_job() {
    let cluster = fabric_of(LabSpec { spines: 2, faulty_links: true, ..LabSpec::default() }, false);
    let (manager, mut group) = at_work(&cluster);
    let log = || manager.log();
    for (what, up, down) in
        [("up", Faults::loss(1.0), Faults::NONE), ("down", Faults::NONE, Faults::loss(1.0))]
    {
        let link = cluster.lab().leaf(1).fault_link(1).unwrap();
        link.set(up, down, 1).unwrap();
        let seen =
            work_for(&format!("nothing goes {what} to spine1"), &mut group, log, 10 * SECOND);
        assert!(seen.without > 0, "{seen:?}");
        link.set(Faults::NONE, Faults::NONE, 1).unwrap();
        until_boxes("mended", &mut group, log);
    }
    // All unsummed traffic between the ranks goes through the first spine.
    let link = cluster.lab().leaf(1).fault_link(0).unwrap();
    let files = group.order_all_reduce("i32", 8_000_000, 1).unwrap();
    std::thread::sleep(SECOND / 8);
    link.set(Faults::loss(1.0), Faults::NONE, 1).unwrap();
    std::thread::sleep(2 * SECOND);
    link.set(Faults::NONE, Faults::NONE, 1).unwrap();
    let outcomes = group.check_all_reduce("i32", 8_000_000, 1, &files).unwrap();
    assert!(outcomes.iter().all(|o| o.wrong == 0), "{outcomes:?}");
    let took = outcomes.iter().map(|o| Duration::from_micros(o.micros)).max().unwrap();
    assert!(took > 2 * SECOND, "it was over before: {outcomes:?}");
    println!("nothing went up to spine0 for 2 s: the sum took {took:.1?}");
    until_boxes("mended", &mut group, log);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn rings_leave_a_link_that_carries_one_direction() {
    let cluster = fabric_of(LabSpec { spines: 2, faulty_links: true, ..LabSpec::default() }, false);
    let manager = cluster.start_manager_that_finds_links().unwrap();
    let start = Instant::now();
    let up = || {
        let shown = manager.json(&cluster, &["fabric", "show"]).unwrap();
        shown["links"].as_array().unwrap().iter().filter(|link| link["up"] == true).count()
    };
    wait("all four links are found", || up() == 4);
    println!("found after {:.1?}", start.elapsed());
    println!("{}", manager.netsum(&cluster, &["fabric", "probe"]).unwrap());
    let probe = manager.json(&cluster, &["fabric", "probe"]).unwrap();
    let both = |p: &&serde_json::Value| {
        p["sees_neighbour"] == true && p["seen_by_neighbour"] == true && p["path_mtu"] == 2176
    };
    assert_eq!(probe.as_array().unwrap().iter().filter(both).count(), 8, "{probe:#}");

    let job = JobSpec { rings: 2, ..JobSpec::new(JOB, 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    let at_spine1 = || jobs(&cluster, cluster.lab().spec().spine(1));
    assert_eq!(at_spine1(), 1, "{}", manager.log());
    let link = cluster.lab().leaf(1).fault_link(1).unwrap();
    link.cut_up(true).unwrap();
    let half = "spine1/rack1 receives no LLDP from leaf1/uplink1";
    let start = Instant::now();
    let is_reported = || manager.netsum(&cluster, &["fabric", "show"]).unwrap().contains(half);
    work_until(&mut group, || manager.log(), |_, _| is_reported());
    println!("reported after {:.1?}", start.elapsed());
    assert_eq!(up(), 3);
    let left = work_until(&mut group, || manager.log(), |by_boxes, _| by_boxes && at_spine1() == 0);
    println!("rings have left: {left:.1?}");
    assert_eq!(manager.log().matches(half).count(), 1, "{}", manager.log());
    link.cut_up(false).unwrap();
    wait("the link is up again", || up() == 4);
    let back = work_until(&mut group, || manager.log(), |by_boxes, _| by_boxes && at_spine1() == 1);
    println!("rings are back: {back:.1?}");
    work(&mut group, 2);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn jobs_survive_a_killed_manager_and_an_unreachable_box() {
    let cluster = fabric(2);
    let spine1 = cluster.lab().spec().spine(1);
    let manager = cluster.start_manager_that_finds_links().unwrap();
    let up = || {
        let shown = manager.json(&cluster, &["fabric", "show"]).unwrap();
        shown["links"].as_array().unwrap().iter().filter(|link| link["up"] == true).count()
    };
    wait("all four links are found", || up() == 4);
    let job = JobSpec { rings: 2, ..JobSpec::new(JOB, 4) };
    let mut group = cluster.ranks_of(&manager, &job, &one_on_each_host(4)).unwrap();
    work(&mut group, 1);
    manager.kill().unwrap();
    let manager = cluster.start_manager_that_finds_links().unwrap();
    let seen = work_for("the next manager", &mut group, || manager.log(), 3 * SECOND);
    assert_eq!(
        (seen.without, manager.log().contains("its ranks reconnect")),
        (0, false),
        "{}",
        manager.log()
    );
    manager.kill().unwrap();
    cluster.signal_box(spine1, Signal::SIGSTOP).unwrap();
    let manager = cluster.start_manager_that_finds_links().unwrap();
    let seen =
        work_for("a manager, and spine1 is silent", &mut group, || manager.log(), 6 * SECOND);
    assert_eq!(seen.without, 0, "{}", manager.log());
    cluster.signal_box(spine1, Signal::SIGCONT).unwrap();
    wait("spine1 answers again", || manager.log().contains("box spine1: answers again"));
    work_for("it answers again", &mut group, || manager.log(), 3 * SECOND);
    work(&mut group, 2);
    assert!(!manager.log().contains("its ranks reconnect"), "{}", manager.log());
    assert_eq!(jobs(&cluster, spine1), 1, "{}", manager.log());
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_parent_that_is_slow_makes_all_wait_and_no_sum_wrong() {
    let rate = |text: &str| Some(text.parse::<Rate>().unwrap());
    let cluster =
        fabric_of(LabSpec { spines: 2, uplink: rate("100mbit"), ..LabSpec::default() }, false);
    let (manager, mut group) = at_work(&cluster);
    let log = || manager.log();
    cluster.lab().set_uplink_rate(1, rate("1mbit").unwrap()).unwrap();
    work_for("links of spine1 at 1 Mb/s", &mut group, log, 5 * SECOND);
    cluster.lab().set_uplink_rate(1, rate("100mbit").unwrap()).unwrap();
    until_boxes("fast again", &mut group, log);
    // A daemon that gets no CPU time at all: the packet path does not need the daemon.
    let spine1 = cluster.lab().spec().spine(1);
    cluster.signal_box(spine1, Signal::SIGSTOP).unwrap();
    let seen = work_for("the daemon of spine1 stands still", &mut group, log, 5 * SECOND);
    cluster.signal_box(spine1, Signal::SIGCONT).unwrap();
    assert_eq!(seen.without, 0, "{}", manager.log());
    wait("spine1 answers again", || manager.log().contains("box spine1: answers again"));
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn boxes_and_manager_start_again_in_any_order() {
    let mut cluster = fabric(2);
    let (manager, mut group) = at_work(&cluster);
    manager.kill().unwrap();
    cluster.start_box(Some(0)).unwrap();
    work_for("leaf0 started again without a manager", &mut group, String::new, 2 * SECOND);
    let manager = cluster.start_manager().unwrap();
    let seen = until_boxes("the manager after leaf0", &mut group, || manager.log());
    assert!(seen.without > 0, "{}", manager.log());
    work(&mut group, 2);

    cluster.kill_box(Some(0)).unwrap();
    manager.kill().unwrap();
    work_for("neither leaf0 nor manager", &mut group, String::new, 2 * SECOND);
    let manager = cluster.start_manager().unwrap();
    // Ranks do not wait for ranks that cannot join.
    let seen = work_for("a manager without leaf0", &mut group, || manager.log(), 12 * SECOND);
    assert!(seen.pause < 5 * SECOND, "{seen:?}\n{}\n{}", group.log(), manager.log());
    cluster.start_box(Some(0)).unwrap();
    let seen = until_boxes("leaf0 after the manager", &mut group, || manager.log());
    assert!(seen.without > 0, "{}", manager.log());
    work(&mut group, 3);
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn daemons_that_are_killed_with_their_programs_pinned_are_not_missed() {
    let mut cluster = fabric_of(LabSpec { spines: 2, ..LabSpec::default() }, true);
    let (manager, mut group) = at_work(&cluster);
    for number in [Some(1), None] {
        cluster.kill_box(number).unwrap();
        let seen = work_for("killed, programs pinned", &mut group, || manager.log(), 3 * SECOND);
        assert_eq!(seen.without, 0, "{}", manager.log());
        cluster.start_box(number).unwrap();
        let seen = work_for("started again", &mut group, || manager.log(), 3 * SECOND);
        assert_eq!(seen.without, 0, "{}", manager.log());
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_second_job_goes_by_the_links_that_the_first_leaves_it() {
    let rates = ["40mbit", "120mbit"].map(|text| text.parse::<Rate>().unwrap());
    let cluster =
        fabric_of(LabSpec { spines: 2, uplink: Some(rates[0]), ..LabSpec::default() }, false);
    cluster.lab().set_uplink_rate(1, rates[1]).unwrap();
    let manager = cluster.start_manager_with_rates(&rates).unwrap();
    let ranks = |name: &str, rings, hosts: [usize; 2]| {
        let job =
            JobSpec { rings, mtu: 2048, message_size: 16384, window: 8, ..JobSpec::new(name, 2) };
        cluster.ranks_of(&manager, &job, &hosts.map(|host| (host, 0))).unwrap()
    };
    // The first job's only ring goes through spine0, like all traffic that is not summed. One of
    // the second job's rings must do the same.
    let mut first = ranks(JOB, 1, [0, 2]);
    let mut second = ranks("next", 8, [1, 3]);
    work(&mut first, 1);
    work(&mut second, 1);
    let shown = |job: &str| manager.json(&cluster, &["fabric", "job", "show", job]).unwrap();
    let rings = |job: &str| -> Vec<(String, u64)> {
        let trees = shown(job)["trees"].as_array().unwrap().clone();
        trees
            .iter()
            .map(|t| (t["root"].as_str().unwrap().to_owned(), t["rings"].as_u64().unwrap()))
            .collect()
    };
    wait("trees are shown", || !rings("next").is_empty());
    let at = |spine: usize, rings| {
        (cluster.lab().spec().box_name(cluster.lab().spec().spine(spine)), rings)
    };
    assert_eq!((rings(JOB), rings("next")), (vec![at(0, 1)], vec![at(0, 1), at(1, 7)]));

    // Both jobs run at the same time, for about two seconds.
    let files = [
        first.order_all_reduce("i32", 1_500_000, 2).unwrap(),
        second.order_all_reduce("i32", 6_000_000, 2).unwrap(),
    ];
    // All traffic up to spine1 belongs to the second job.
    let is_apart = |next: &serde_json::Value| {
        let up = |spine: usize| next["trees"][spine]["links"][0]["up"].as_f64().unwrap_or(0.0);
        up(1) > 3.0 * up(0) / 2.0 && up(1) > 5e6
    };
    let start = Instant::now();
    let next = loop {
        let next = shown("next");
        if is_apart(&next) {
            break next;
        }
        assert!(start.elapsed() < TIMEOUT, "{next:#}");
        std::thread::sleep(SECOND / 20);
    };
    let text = manager.netsum(&cluster, &["fabric", "job", "show", "next"]).unwrap();
    println!("{}{text}", manager.netsum(&cluster, &["fabric", "job", "show", JOB]).unwrap());
    let outcomes = [
        first.check_all_reduce("i32", 1_500_000, 2, &files[0]).unwrap(),
        second.check_all_reduce("i32", 6_000_000, 2, &files[1]).unwrap(),
    ];
    assert!(outcomes.iter().flatten().all(|o| (&*o.mode, o.wrong) == ("box", 0)), "{outcomes:?}");
    for (job, outcomes, bytes) in [(JOB, &outcomes[0], 6e6), ("next", &outcomes[1], 24e6)] {
        let took = outcomes.iter().map(|o| o.micros).max().unwrap() as f64 / 1e6;
        println!("{job}: {took:.2} s, {:.1} MB/s", bytes / took / 1e6);
    }
    // The plan makes the second job avoid spine0.
    let tree = |spine: usize| next["trees"][spine].clone();
    let planned = [0, 1].map(|spine| tree(spine)["planned"].as_f64().unwrap());
    assert!(planned[0] < 0.01 && planned[1] > 0.99, "{text}");
    manager.kill().unwrap();

    // Neither the first job's end nor another manager changes the second job's shares.
    let manager = cluster.start_manager_with_rates(&rates).unwrap();
    drop(first);
    let is_there =
        || !manager.json(&cluster, &["fabric", "job", "show", JOB]).unwrap()["trees"][0].is_null();
    let seen = work_until(&mut second, || manager.log(), |_, now| now > 3 * SECOND && !is_there());
    println!("without the first job: {seen:.1?}");
    assert_eq!(
        (seen.without, manager.log().contains("its ranks reconnect")),
        (0, false),
        "{}",
        manager.log()
    );
    manager.json(&cluster, &["job", "reconnect", "next"]).unwrap();
    let start = Instant::now();
    let rings = || {
        let trees =
            manager.json(&cluster, &["fabric", "job", "show", "next"]).unwrap()["trees"].clone();
        [0, 1].map(|spine| trees[spine]["rings"].as_u64())
    };
    while rings() != [Some(2), Some(6)] {
        assert!(start.elapsed() < TIMEOUT, "{:?}: {}", rings(), manager.log());
        work(&mut second, 3);
    }
}
