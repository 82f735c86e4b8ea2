//! "Why does it hang?": a lab produces every cause that users meet, and the tests check what
//! `netsum diagnose` reports. Also sums that no packet carries, which the box sends by itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use netsum_common::wire;
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, TIMEOUT, one_on_each_host};
use netsum_lab::faults::Faults;
use netsum_lab::frames::{FrameSpec, lanes, sum};
use netsum_lab::tap::Tap;
use serde_json::Value;

const SECOND: Duration = Duration::from_secs(1);
const PAYLOAD: usize = 1024;

/// The queue pair that a rank sends to, and its first PSN.
fn numbers(rank: u8) -> (u32, u32) {
    (0x100 + u32::from(rank), 0x1000 * (u32::from(rank) + 1))
}

/// Three ranks, one on each host, that exist only as frames.
struct TapRing<'a> {
    cluster: &'a Cluster,
    taps: Vec<Tap>,
}

impl<'a> TapRing<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        let taps = cluster.lab().hosts().iter().map(|h| Tap::open(h, "eth0").unwrap()).collect();
        Self { cluster, taps }
    }

    fn create(&self, ranks: u8) {
        let ranks = ranks.to_string();
        let properties =
            ["--mtu", "1024", "--message-size", "4096", "--window", "2", "--ranks", &ranks];
        self.cluster.netsum(&[&["job", "create", "app"][..], &properties].concat()).unwrap();
    }

    fn add_flow(&self, rank: u8, ranks: u8) {
        let (qpn, psn) = numbers(rank);
        let next = (rank + 1) % ranks;
        let text = [
            rank.to_string(),
            format!("port{rank}"),
            format!("10.0.0.{}", rank + 1),
            format!("10.0.0.{}", next + 1),
            qpn.to_string(),
            psn.to_string(),
        ];
        let [rank, port, src, dst, qpn, psn] = text.each_ref().map(String::as_str);
        let arguments = [
            "flow", "add", "app", "--ring", "0", "--rank", rank, "--port", port, "--src", src,
            "--dst", dst, "--qpn", qpn, "--psn", psn,
        ];
        self.cluster.netsum(&arguments).unwrap();
    }

    fn start(&self, ranks: u8) {
        self.create(ranks);
        (0..ranks).for_each(|rank| self.add_flow(rank, ranks));
    }

    fn end(&self) {
        self.cluster.netsum(&["job", "delete", "app"]).unwrap();
    }

    /// A rank's correct fragment.
    fn fragment(rank: u8, ranks: u8, index: u32) -> FrameSpec {
        let (qpn, psn) = numbers(rank);
        let payload = lanes(u32::from(rank), PAYLOAD / 4);
        FrameSpec::send(rank + 1, (rank + 1) % ranks + 1, qpn, psn + index, payload)
    }

    fn send(&self, host: u8, frame: &FrameSpec) {
        self.taps[usize::from(host)].send(&frame.build()).unwrap();
    }

    /// Waits until the box has absorbed this many contributions.
    fn taken(&self, fragments: u64) {
        let start = Instant::now();
        while self.cluster.counter(Some("app"), "contributions").unwrap() < fragments {
            assert!(start.elapsed() < TIMEOUT, "the box has not taken {fragments} fragments");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns what `netsum diagnose` finds while host `host` keeps sending `frame`.
    fn diagnose_while(&self, host: u8, frame: Option<&FrameSpec>) -> Value {
        let done = AtomicBool::new(false);
        let tap = &self.taps[usize::from(host)];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while let (Some(frame), false) = (frame, done.load(Ordering::Relaxed)) {
                    tap.send(&frame.build()).unwrap();
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let printed = self.cluster.netsum_json(&["diagnose", "app", "--watch", "400ms"]);
            done.store(true, Ordering::Relaxed);
            printed.unwrap()
        })
    }
}

/// Asserts that there is one finding, about this rank, with these words.
fn assert_finding(printed: &Value, rank: Option<u8>, words: &[&str]) {
    let findings = printed["findings"].as_array().unwrap();
    assert_eq!(findings.len(), 1, "{printed:#}");
    assert_eq!(findings[0]["rank"], rank.map_or(Value::Null, Value::from), "{printed:#}");
    let (what, next) =
        (findings[0]["what"].as_str().unwrap(), findings[0]["next"].as_str().unwrap());
    for word in words {
        assert!(what.contains(word), "{word}: {printed:#}");
    }
    assert!(!next.is_empty(), "{printed:#}");
}

/// A parent has the job with another path MTU than the leaves.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn boxes_that_have_made_a_job_differently_are_named() {
    let mut cluster = Cluster::start(LabSpec { racks: 2, ..LabSpec::hosts(4) }).unwrap();
    cluster.start_leaves().unwrap();
    let job = JobSpec::new("differs", 4);
    let peers: Vec<_> = cluster.lab().hosts().iter().map(|host| host.ip(0).to_string()).collect();
    let peers = peers.join(",");
    for (rack, mtu, members, ports) in [
        (Some(0), 1024, &["--members", "0-1", "--uplink", "uplink"][..], "port0,port1"),
        (Some(1), 1024, &["--members", "2-3", "--uplink", "uplink"], "port2,port3"),
        (None, 512, &["--groups", "0-1,2-3"], "rack0,rack1"),
    ] {
        let create = JobSpec { mtu, ..job.clone() }.create_arguments();
        let create: Vec<&str> = create.iter().map(String::as_str).collect();
        cluster.netsum_on(rack, &[&create[..], members].concat()).unwrap();
        let flows = ["flow", "peers", "differs", "--peers", &peers, "--ports", ports];
        cluster.netsum_on(rack, &flows).unwrap();
    }
    let mut group = cluster.ranks_alone(&job, &one_on_each_host(4)).unwrap();
    group.order_all_reduce("i32", 100_000, 1).unwrap();
    let diagnose = |rack| {
        let printed = cluster.netsum_on(rack, &["diagnose", "differs", "--watch", "200ms"]);
        printed.unwrap_or_else(|error| format!("{error:#}"))
    };
    let start = Instant::now();
    let [parent, leaf] = loop {
        let [parent, leaf] = [None, Some(0)].map(diagnose);
        let is_known = parent.matches("sends fragments of more than").count() == 2
            && leaf.contains("the parent behind uplink");
        if is_known || start.elapsed() > TIMEOUT {
            break [parent, leaf];
        }
    };
    println!("{parent}\n{leaf}");
    for (port, ranks) in [("rack0", "0-1"), ("rack1", "2-3")] {
        let what =
            format!("the box behind {port} (ranks {ranks}) sends fragments of more than 512 bytes");
        assert!(parent.contains(&what) && parent.contains("compare `netsum job show`"), "{parent}");
    }
    assert!(leaf.contains("`netsum diagnose` of the parent behind uplink"), "{leaf}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn every_cause_of_a_hang_is_named() {
    let cluster = Cluster::start(LabSpec { mtu: 2300, ..LabSpec::hosts(3) }).unwrap();
    let app = TapRing::new(&cluster);

    // A rank that has no flow.
    app.create(3);
    app.add_flow(0, 3);
    app.add_flow(1, 3);
    assert_finding(&app.diagnose_while(0, None), Some(2), &["has no flow"]);
    app.add_flow(2, 3);
    // No rank has anything to do.
    assert_finding(&app.diagnose_while(0, None), None, &["nothing is pending"]);
    // Two ranks have sent; the third never has.
    (0..2).for_each(|rank| app.send(rank, &TapRing::fragment(rank, 3, 0)));
    app.taken(2);
    let printed = app.diagnose_while(0, None);
    assert_finding(
        &printed,
        Some(2),
        &["no packet to queue pair 0x102 of 10.0.0.1 has arrived", "port2 is up"],
    );
    assert_eq!(printed["rings"][0]["missing"], serde_json::json!([2]), "{printed:#}");
    assert_eq!(printed["rings"][0]["ranks"][0]["credit_used"], 1, "{printed:#}");
    // Rank 2 sends to another queue pair.
    let mut wrong = TapRing::fragment(2, 3, 0);
    wrong.bth.qpn = 0x777;
    let printed = app.diagnose_while(2, Some(&wrong));
    assert_finding(
        &printed,
        Some(2),
        &["sends to queue pair 0x777 of 10.0.0.1, but 0x102 is registered"],
    );
    // Rank 2 sends to another host.
    let mut wrong = TapRing::fragment(2, 3, 0);
    (wrong.dst, wrong.bth.qpn) = (vec![10, 0, 0, 9], 0x5);
    let printed = app.diagnose_while(2, Some(&wrong));
    assert_finding(
        &printed,
        Some(2),
        &["sends from 10.0.0.3 to 10.0.0.9", "from 10.0.0.3 to 10.0.0.1 is registered"],
    );
    // Rank 2's connection begins at another PSN.
    for psn in [0x7000, 0x2ff0] {
        let mut wrong = TapRing::fragment(2, 3, 0);
        wrong.bth.psn = psn;
        let printed = app.diagnose_while(2, Some(&wrong));
        let words = format!("other PSNs (last {psn:#x}) than registered (from 0x3000 on)");
        assert_finding(&printed, Some(2), &[&words]);
    }
    // Rank 2's packets are larger than the path MTU, or smaller than those of the others.
    let mut wrong = TapRing::fragment(2, 3, 0);
    wrong.payload = lanes(2, 512);
    assert_finding(
        &app.diagnose_while(2, Some(&wrong)),
        Some(2),
        &["larger than the job's path MTU of 1024"],
    );
    wrong.payload = lanes(2, 128);
    assert_finding(
        &app.diagnose_while(2, Some(&wrong)),
        Some(2),
        &["sends 512 bytes at index 0, where ranks 0, 1 send 1024"],
    );
    // Another host pretends to be rank 2, or rank 2 is behind another port than registered.
    let right = TapRing::fragment(2, 3, 0);
    assert_finding(&app.diagnose_while(1, Some(&right)), Some(2), &["another port than port2"]);
    let mut wrong = TapRing::fragment(2, 3, 0);
    wrong.src = vec![10, 0, 0, 77];
    assert_finding(
        &app.diagnose_while(2, Some(&wrong)),
        Some(2),
        &["another address than 10.0.0.3"],
    );
    // Wrong ICRCs.
    let printed = {
        let mut bytes = right.build();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        app.taps[2].send(&bytes).unwrap();
        app.diagnose_while(2, None)
    };
    assert_finding(&printed, Some(2), &["wrong ICRC"]);
    assert!(printed["drops"]["rx_icrc_encapsulated"].as_u64() >= Some(1), "{printed:#}");
    // Rank 2's fragment arrives at last, and then rank 2 stops.
    app.send(2, &right);
    app.taken(3);
    (0..2).for_each(|rank| app.send(rank, &TapRing::fragment(rank, 3, 1)));
    app.taken(5);
    let printed = app.diagnose_while(0, None);
    assert_finding(
        &printed,
        Some(2),
        &["no packet has arrived since PSN 0x3000, ", "index 1 (PSN 0x3001) is missing"],
    );
    // Rank 2 sends only old packets: it is slow, or its new packets get lost.
    assert_finding(
        &app.diagnose_while(2, Some(&right)),
        Some(2),
        &["is slow, or its packets are lost"],
    );
    // Rank 2 received no result and keeps retransmitting, while nothing is pending.
    app.send(2, &TapRing::fragment(2, 3, 1));
    app.taken(6);
    let printed = app.diagnose_while(2, Some(&TapRing::fragment(2, 3, 1)));
    assert_finding(
        &printed,
        Some(2),
        &["keeps retransmitting PSN ", "whose sum has been released: rank 0 behind port0"],
    );
    // Rank 2 ignores its credit: 8 fragments from index 2 on.
    (0..2).for_each(|rank| app.send(rank, &TapRing::fragment(rank, 3, 2)));
    app.taken(8);
    let printed = app.diagnose_while(2, Some(&TapRing::fragment(2, 3, 10)));
    assert_finding(
        &printed,
        Some(2),
        &["sends beyond its credit: index 10, where 2 to 9 are allowed"],
    );
    // Rank 2's link goes down.
    let host = &cluster.lab().hosts()[2];
    netsum_lab::netns::output(host.command("ip").args(["link", "set", "eth0", "down"])).unwrap();
    assert_finding(&app.diagnose_while(0, None), Some(2), &["is behind port2, which is down"]);
    // The daemon logs it by itself.
    let start = Instant::now();
    while !cluster.daemon_log().contains("job app: ring 0 has stalled at index 2") {
        assert!(start.elapsed() < TIMEOUT, "{}", cluster.daemon_log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(
        cluster.daemon_log().contains("missing: rank 2 (PSN 0x3002); try `netsum diagnose app`")
    );
    app.end();
    let gone = format!("{:#}", cluster.netsum(&["diagnose", "app"]).unwrap_err());
    assert!(gone.contains("job `app`: no such job"), "{gone}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_black_hole_is_distinguished_from_a_dead_rank() {
    let cluster = Cluster::start(LabSpec { faulty_links: true, ..LabSpec::hosts(3) }).unwrap();
    let job = JobSpec { timeout: 8 * SECOND, ..JobSpec::new("train", 3) };
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(3)).unwrap();
    group.all_reduce("i32", 1000, 1).unwrap();
    cluster.lab().host(2).set_faults(Faults::loss(1.0), Faults::NONE, 1).unwrap();
    group.order_all_reduce("i32", 1000, 2).unwrap();
    let start = Instant::now();
    let printed = loop {
        let printed = cluster.netsum_json(&["diagnose", "train", "--watch", "200ms"]).unwrap();
        if printed["rings"][0]["stalled_ms"].is_u64() {
            break printed;
        }
        assert!(start.elapsed() < 6 * SECOND, "{printed:#}");
    };
    let of_rank = printed["findings"].as_array().unwrap().iter().find(|f| f["rank"] == 2);
    let what = of_rank.unwrap_or_else(|| panic!("{printed:#}"))["what"].as_str().unwrap();
    assert!(
        what.contains("no packet has arrived since PSN") && what.contains("its process is alive"),
        "{printed:#}"
    );
    // The job ends with an error at every rank.
    for (rank, answer) in group.answers(TIMEOUT).unwrap() {
        assert!(
            matches!(answer, netsum_lab::cluster::RankReply::Error(_)),
            "rank {rank}: {answer:?}"
        );
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_sum_that_nothing_takes_along_is_sent_by_the_box() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let app = TapRing::new(&cluster);
    app.start(2);
    // Index 1 is complete before index 0, and no rank retransmits it.
    for index in [1, 0] {
        (0..2).for_each(|rank| app.send(rank, &TapRing::fragment(rank, 2, index)));
        app.taken(if index == 1 { 2 } else { 4 });
    }
    let expected = sum(&[lanes(0, PAYLOAD / 4), lanes(1, PAYLOAD / 4)]);
    for (host, tap) in app.taps.iter().enumerate() {
        // Frames that arrive at host r have the headers of rank r-1.
        let (qpn, psn) = numbers(1 - host as u8);
        let frame = tap
            .receive(TIMEOUT, |f| {
                let mut frame = wire::Frame::EMPTY;
                wire::parse_into(f, &mut frame).is_ok()
                    && (frame.bth.qpn, frame.bth.psn) == (qpn, psn + 1)
                    && f[frame.payload()..].starts_with(&expected)
            })
            .unwrap_or_else(|e| panic!("host {host}: {e:#}\n{}", cluster.daemon_log()));
        let mut parsed = wire::Frame::EMPTY;
        wire::parse_into(&frame[..], &mut parsed).unwrap();
        let icrc =
            netsum_common::icrc::of_frame(&frame, parsed.l3, parsed.ip, parsed.payload(), PAYLOAD)
                .unwrap();
        assert_eq!(&frame[parsed.payload() + PAYLOAD..][..4], &icrc.to_le_bytes());
    }
    assert_eq!(cluster.counter(Some("app"), "released").unwrap(), 2);
    assert_eq!(
        cluster.counter(Some("app"), "duplicate_request").unwrap(),
        1,
        "the box sent it once"
    );
    app.end();
}
