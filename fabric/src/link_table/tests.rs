//! Tests of links that are found.

use super::*;

fn end(text: &str) -> End {
    End::try_from(text.to_owned()).unwrap()
}

fn link(below: &str, above: &str) -> Link {
    Link { below: end(below), above: end(above), rate: None }
}

/// A port, and its LLDP neighbour. All have one MAC address; a box's chassis id is its name.
fn port(name: &str, seen: &str) -> api::Port {
    api::Port {
        name: name.into(),
        mac: "02:00:00:00:00:01".into(),
        mtu: 1500,
        rate: 10,
        up: true,
        neighbour: (!seen.is_empty()).then(|| api::Neighbour {
            mac: "02:00:00:00:00:01".into(),
            chassis: "chassis".into(),
            port: seen.rsplit('/').next().unwrap().into(),
            age_ms: 0,
            chassis_id: seen.split('/').next().unwrap().into(),
        }),
        ..api::Port::default()
    }
}

fn answers(reports: &[(&str, &[(&str, &str)])]) -> HashMap<String, BoxReport> {
    let answer = |&(of, ports): &(&str, &[(&str, &str)])| {
        let ports = ports.iter().map(|(name, seen)| port(name, seen)).collect();
        let (chassis_id, macs) = (of.to_owned(), vec![format!("mac of {of}"), "shared".into()]);
        (of.to_owned(), BoxReport { ports, lldp: true, chassis_id, macs })
    };
    reports.iter().map(answer).collect()
}

fn link_table(configured: &[(&str, &str)]) -> LinkTable {
    let levels = [("s".to_owned(), 1), ("t".to_owned(), 1)].into();
    LinkTable::new(configured.iter().map(|(below, above)| link(below, above)).collect(), levels)
        .confirmed_by(Vec::new(), LinkTrust::Found)
}

/// Each link's ends, whether it carries traffic, and its fault.
fn state(link_table: &LinkTable) -> Vec<(String, bool, Option<String>)> {
    let of = |c: LinkState| (format!("{} {}", c.link.below, c.link.above), c.carries, c.problem);
    link_table.all().into_iter().map(of).collect()
}

fn is(ends: &str, carries: bool, problem: &str) -> (String, bool, Option<String>) {
    (ends.into(), carries, (!problem.is_empty()).then(|| problem.into()))
}

const BOTH: [(&str, &[(&str, &str)]); 2] =
    [("a", &[("up", "s/1"), ("h", "")]), ("s", &[("1", "a/up")])];
const HALF: [(&str, &[(&str, &str)]); 2] = [("a", &[("up", "")]), ("s", &[("1", "a/up")])];
const NEITHER: [(&str, &[(&str, &str)]); 2] = [("a", &[("up", "")]), ("s", &[("1", "")])];
const DEAF: &str = "a/up receives no LLDP from s/1";

#[test]
fn ports_carry_what_came_between_two_looks() {
    let (mut link_table, now) = (link_table(&[]), Instant::now());
    let with = |rx: u64, tx: u64| {
        let mut answers = answers(&[("a", &[("up", "s/1")])]);
        let port = &mut answers.get_mut("a").unwrap().ports[0];
        (port.rx_bytes, port.tx_bytes) = (rx, tx);
        answers
    };
    link_table.update(with(1_000_000, 0), now);
    assert_eq!((link_table.ports()[0].rx_rate, link_table.ports()[0].tx_rate), (0, 0));
    link_table.update(with(1_500_000, 1000), now + Duration::from_millis(500));
    assert_eq!((link_table.ports()[0].rx_rate, link_table.ports()[0].tx_rate), (1_000_000, 2000));
    // The box has restarted.
    link_table.update(with(0, 0), now + Duration::from_secs(1));
    assert_eq!(link_table.ports()[0].rx_rate, 0);
}

#[test]
fn of_links_that_were_found_the_bridges_own_comes_first() {
    let mut reports = answers(&[
        ("a", &[("swp10", "t/1"), ("swp9", "s/1")]),
        ("s", &[("1", "a/swp9")]),
        ("t", &[("1", "a/swp10")]),
    ]);
    let order = |reports: &HashMap<String, BoxReport>| {
        let mut link_table = link_table(&[]);
        link_table.update(reports.clone(), Instant::now());
        link_table.all().into_iter().map(|c| c.link.below.port).collect::<Vec<_>>()
    };
    assert_eq!(order(&reports), ["swp10", "swp9"]);
    reports.get_mut("a").unwrap().ports[0].blocked = true;
    assert_eq!(order(&reports), ["swp9", "swp10"]);
}

#[test]
fn a_link_is_found_when_both_ends_hear_each_other() {
    let (mut link_table, now) = (link_table(&[]), Instant::now());
    link_table.update(answers(&HALF), now);
    assert_eq!(state(&link_table), [], "whoever says that he is s/1");
    assert!(link_table.found().is_empty() && link_table.ends().is_empty());
    link_table.update(answers(&BOTH), now);
    assert_eq!(state(&link_table), [is("a/up s/1", true, "")]);
    assert_eq!(link_table.all()[0].link.rate, Some(Rate(10)));
    assert!(
        link_table.ends().contains(&end("a/up"))
            && link_table.ends().contains(&end("s/1"))
            && !link_table.ends().contains(&end("a/h"))
    );
}

#[test]
fn a_link_that_carries_one_direction_counts_as_down() {
    for configured in [&[][..], &[("a/up", "s/1")]] {
        let (mut link_table, now) = (link_table(configured), Instant::now());
        let mut at = |seconds, reports: &[_]| {
            link_table.update(answers(reports), now + Duration::from_secs(seconds));
            state(&link_table)
        };
        assert_eq!(at(0, &BOTH), [is("a/up s/1", true, "")]);
        assert_eq!(at(1, &HALF), [is("a/up s/1", true, "")], "a frame may be lost");
        assert_eq!(at(2, &BOTH), [is("a/up s/1", true, "")]);
        assert_eq!(at(3, &HALF), [is("a/up s/1", true, "")]);
        assert_eq!(at(6, &HALF), [is("a/up s/1", false, DEAF)]);
        assert_eq!(at(7, &HALF[1..]), [is("a/up s/1", false, DEAF)], "a is silent");
        assert_eq!(at(8, &BOTH), [is("a/up s/1", true, "")]);
    }
}

#[test]
fn a_box_that_is_silent_or_has_just_started_is_given_time() {
    let (mut link_table, now) = (link_table(&[]), Instant::now());
    let mut at = |seconds, reports: &[_]| {
        link_table.update(answers(reports), now + Duration::from_secs(seconds));
        state(&link_table)[0].1
    };
    assert!(at(0, &BOTH));
    assert!(at(1, &NEITHER[..1]) && at(60, &NEITHER[..1]), "s says nothing");
    assert!(at(61, &NEITHER) && at(63, &HALF) && !at(64, &HALF));
}

#[test]
fn boxes_of_one_image_have_links_of_their_own_or_are_named() {
    let (mut link_table, now) = (link_table(&[]), Instant::now());
    let mut reports = answers(&[
        ("a", &[("up", "s/1")]),
        ("b", &[("up", "s/2")]),
        ("s", &[("1", "a/up"), ("2", "b/up")]),
    ]);
    link_table.update(reports.clone(), now);
    assert_eq!(state(&link_table), [is("a/up s/1", true, ""), is("b/up s/2", true, "")]);
    assert!(link_table.alike.is_empty());
    reports.get_mut("b").unwrap().chassis_id = "a".into();
    link_table.update(reports, now);
    assert_eq!(link_table.alike, BTreeSet::from(["a, b".to_owned()]));
}

#[test]
fn found_links_follow_the_cables() {
    let (mut link_table, now) = (link_table(&[]), Instant::now());
    link_table.update(answers(&BOTH), now);
    link_table.update(
        answers(&[("a", &[("up", "t/7")]), ("s", &[("1", "")]), ("t", &[("7", "a/up")])]),
        now,
    );
    assert_eq!(state(&link_table), [is("a/up t/7", true, "")]);
    link_table.update(answers(&[("a", &[("up", "")]), ("t", &[("7", "")])]), now);
    link_table.update(answers(&[("a", &[("up", "")]), ("t", &[("7", "")])]), now + GRACE);
    assert_eq!(
        state(&link_table),
        [is("a/up t/7", false, "neither end receives LLDP from the other")]
    );
}

#[test]
fn one_forged_frame_removes_no_link_across_managers() {
    let (mut first, now) = (link_table(&[]), Instant::now());
    first.update(answers(&BOTH), now);
    assert!(first.has_changed() && !first.has_changed());
    first.update(answers(&[("a", &[("up", "00:07")]), ("s", &[("1", "a/up")])]), now);
    assert_eq!(state(&first), [is("a/up s/1", true, "")]);
    first.update(answers(&BOTH), now + Duration::from_secs(1));
    assert_eq!(state(&first), [is("a/up s/1", true, "")]);
    assert!(!first.has_changed());

    let mut next = link_table(&[]);
    assert!(next.found().is_empty());
    next.restore(first.found().into_iter().map(|ends| ends.map(|text| end(&text))));
    next.update(answers(&BOTH[..1]), now);
    assert_eq!(state(&next), [is("a/up s/1", true, "")], "s is silent");
}

#[test]
fn boxes_of_one_level_have_no_link() {
    let (mut link_table, now) = (link_table(&[]), Instant::now());
    link_table.update(answers(&[("a", &[("x", "b/y")]), ("b", &[("y", "a/x")])]), now);
    assert_eq!(
        state(&link_table),
        [is("a/x b/y", false, "both boxes are of level 0: it is not used")]
    );
    assert!(link_table.ends().contains(&end("b/y")), "no host is there");
    assert!(link_table.all()[0].is_unused, "no bridge's way up");
}

/// A host that is plugged into both boxes can pass their LLDP frames on.
#[test]
fn a_link_that_is_found_is_used_once_an_end_is_named_or_accepted() {
    let now = Instant::now();
    let with = |named: &[&str]| {
        let named = named.iter().map(|text| Pattern::try_from((*text).to_owned()).unwrap());
        let mut link_table = link_table(&[]).confirmed_by(named.collect(), LinkTrust::Named);
        link_table.update(answers(&BOTH), now);
        link_table
    };
    let mut proposed = with(&["b/*", "a/up2"]);
    let why = "unconfirmed, and not used: hosts can forge LLDP. Name an end in `uplinks`, or \
        `netsum fabric accept a/up`";
    assert_eq!(state(&proposed), [is("a/up s/1", false, why)]);
    assert!(proposed.all()[0].is_unused, "nothing goes by it");
    assert_eq!(proposed.unmeasured(|link_state| link_state.carries, |_| false), []);
    assert!(proposed.ends().contains(&end("a/up")), "hosts of other racks come by it");
    for named in ["a/u*", "s/1", "*/1"] {
        assert_eq!(state(&with(&[named])), [is("a/up s/1", true, "")], "{named}");
    }
    let why = proposed.accept(&end("a/h"), false).unwrap_err();
    assert!(why.starts_with("no link with the end a/h was found"), "{why}");
    assert_eq!(proposed.accept(&end("s/1"), true).unwrap_err(), "s/1 was not accepted");
    proposed.accept(&end("s/1"), false).unwrap();
    assert_eq!(state(&proposed), [is("a/up s/1", true, "")]);
    assert_eq!(proposed.accepted(), ["s/1"]);
    let mut next = with(&[]);
    next.restore_accepted(proposed.accepted().iter().map(|text| end(text)));
    assert_eq!(state(&next), [is("a/up s/1", true, "")], "the next manager knows");
    next.accept(&end("s/1"), true).unwrap();
    assert!(!state(&next)[0].1);
    let why = link_table(&[("a/up", "s/1")]).accept(&end("s/1"), false).unwrap_err();
    assert_eq!(why, "the manager's file lists all links");
}

#[test]
fn a_port_with_hosts_of_a_job_is_no_uplink() {
    let (mut link_table, now) = (link_table(&[]), Instant::now());
    link_table.set_host_ports([end("a/up")].into_iter());
    link_table.update(answers(&BOTH), now);
    let (_, carries, problem) = state(&link_table).remove(0);
    assert!(!carries && problem.unwrap().starts_with("ranks of a job were behind a/up"));
    assert!(link_table.all()[0].is_unused && !link_table.ends().contains(&end("a/up")));
    link_table.accept(&end("a/up"), false).unwrap();
    link_table.update(answers(&BOTH), now);
    assert_eq!(state(&link_table), [is("a/up s/1", true, "")], "it was plugged in elsewhere");
}

#[test]
fn a_configured_link_wins_and_another_lldp_peer_is_reported() {
    let now = Instant::now();
    let with = |reports: &[_]| {
        let mut link_table = link_table(&[("a/up", "s/1")]);
        link_table.update(answers(reports), now);
        link_table.update(answers(reports), now + GRACE);
        state(&link_table)
    };
    let other = with(&[("a", &[("up", "s/2")]), ("s", &[("1", ""), ("2", "a/up")])]);
    assert_eq!(
        other,
        [is("a/up s/1", true, "a/up is configured to s/1, but receives LLDP from s/2")]
    );
    let foreign = with(&[("a", &[("up", "00:07")]), ("s", &[("1", "")])]);
    let why = "a/up is configured to s/1, but receives LLDP from chassis 00:07 (02:00:00:00:00:01)";
    assert_eq!(foreign, [is("a/up s/1", true, why)]);
    assert_eq!(with(&NEITHER), [is("a/up s/1", true, "")], "a medium without LLDP");
}

#[test]
fn a_box_that_does_not_listen_takes_no_typed_link_away() {
    let (mut link_table, now) = (link_table(&[("a/up", "s/1")]), Instant::now());
    let mut reports = answers(&HALF);
    reports.get_mut("a").unwrap().lldp = false;
    link_table.update(reports.clone(), now);
    link_table.update(reports, now + 2 * GRACE);
    assert_eq!(state(&link_table), [is("a/up s/1", true, "")]);
}

#[test]
fn a_box_is_known_by_a_mac_address_that_no_other_has() {
    let mut link_table = link_table(&[]);
    link_table.update(answers(&BOTH), Instant::now());
    assert_eq!(link_table.with_mac("mac of s").as_deref(), Some("s"));
    assert_eq!([link_table.with_mac("shared"), link_table.with_mac("another")], [None, None]);
}

#[test]
fn mtus_that_differ_are_said() {
    let mut link_table = link_table(&[]);
    let mut reports = answers(&BOTH);
    reports.get_mut("a").unwrap().ports[0].mtu = 9000;
    link_table.update(reports, Instant::now());
    assert_eq!(state(&link_table), [is("a/up s/1", true, "MTU 9000 at a/up and 1500 at s/1")]);
}

#[test]
fn a_link_of_unknown_rate_is_measured_at_each_link_up() {
    let (mut link_table, now) = (link_table(&[]), Instant::now());
    let with_rate = |rate| {
        let mut reports = answers(&BOTH);
        reports.values_mut().flat_map(|answer| &mut answer.ports).for_each(|port| port.rate = rate);
        reports
    };
    link_table.update(with_rate(0), now);
    let unmeasured =
        |link_table: &mut LinkTable, up| link_table.unmeasured(|_| up, |_| false).len();
    assert_eq!(link_table.unmeasured(|_| true, |of| of == "s").len(), 0, "a box is silent");
    assert_eq!(
        [true, true, false, true, true].map(|up| unmeasured(&mut link_table, up)),
        [1, 0, 0, 1, 0]
    );
    let of = link_table.all().remove(0).link;
    link_table.record_measurement(&of, Ok(Capacity::Exactly(1000)));
    assert_eq!(
        [false, true].map(|up| unmeasured(&mut link_table, up)),
        [0, 1],
        "it may be another link"
    );
    link_table.update(with_rate(10_000), now);
    assert_eq!([false, true].map(|up| unmeasured(&mut link_table, up)), [0, 0], "its driver knows");
}

#[test]
fn measured_rates_count_and_the_next_manager_restores_them() {
    let (mut first, now) = (link_table(&[("a/up", "s/1")]), Instant::now());
    first.update(answers(&BOTH), now);
    let rate = |link_table: &LinkTable| link_table.all()[0].link.rate.map(|rate| rate.0);
    let of = link("a/up", "s/1");
    first.has_changed();
    for (carries, counts, changed) in [
        (Ok(Capacity::Exactly(1000)), 1000, true),
        (Ok(Capacity::Exactly(1090)), 1000, false),
        (Err("a job has its rings at up".to_owned()), 1000, false),
        (Ok(Capacity::Exactly(890)), 890, true),
    ] {
        first.record_measurement(&of, carries);
        assert_eq!((rate(&first), first.has_changed()), (Some(counts), changed));
    }
    let again = |configured, nominal| {
        let mut next = link_table(&[("a/up", configured)]);
        next.restore_measured(&first.measured());
        let mut reports = answers(&BOTH);
        reports
            .values_mut()
            .flat_map(|answer| &mut answer.ports)
            .for_each(|port| port.rate = nominal);
        next.update(reports, now);
        rate(&next)
    };
    assert_eq!(again("s/1", 10), Some(890));
    assert_eq!(again("t/1", 10), Some(10), "the link leads elsewhere");
    assert_eq!(again("s/1", 20), Some(20), "it is another one");
}

#[test]
fn ports_show_whom_they_hear_and_who_hears_them() {
    let mut link_table = link_table(&[]);
    link_table.update(
        answers(&[("a", &[("up", ""), ("h", ""), ("x", "00:07")]), ("s", &[("1", "a/up")])]),
        Instant::now(),
    );
    let of = |p: api::FabricPort| {
        (p.port, p.neighbour, p.foreign, p.sees_neighbour, p.seen_by_neighbour, p.neighbour_mtu)
    };
    let is = |port: &str, neighbour: &str, [foreign, sees, seen_by]: [bool; 3], mtu| {
        (port.to_owned(), neighbour.to_owned(), foreign, sees, seen_by, mtu)
    };
    let ports: Vec<_> = link_table.ports().into_iter().map(of).collect();
    assert_eq!(
        ports,
        [
            is("a/up", "s/1", [false, false, true], 1500),
            is("a/h", "", [false; 3], 0),
            is("a/x", "chassis 00:07 (02:00:00:00:00:01)", [true, true, false], 0),
            is("s/1", "a/up", [false, true, false], 1500),
        ]
    );
}
