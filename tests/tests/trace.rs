//! `netsum trace` and `netsum simulate` against a running daemon: lines and capture files agree
//! with the counters, tracing ends with its client, and a simulation changes nothing in jobs.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aya::maps::{Array, Map, MapData, MapInfo};
use aya::programs::loaded_programs;
use netsum_common::abi::{VERSION, features, maps};
use netsum_common::wire::{self, Opcode};
use netsum_lab::LabSpec;
use netsum_lab::cluster::{Cluster, JobSpec, TIMEOUT, one_on_each_host, program};
use netsum_lab::frames::{FrameSpec, lanes, sum};
use netsum_lab::process::Running;
use nix::sys::signal::Signal;
use pcap_file::pcap::{PcapPacket, PcapWriter};
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use serde_json::Value;

/// Starts `netsum ARGUMENTS` on the box.
fn start(cluster: &Cluster, arguments: &[&str]) -> Running {
    let mut command = cluster.lab().box_().command(program("netsum").unwrap());
    command.args(["--socket", &cluster.socket()]).args(arguments);
    Running::start("netsum trace", &mut command).unwrap()
}

/// Starts `netsum trace`, and waits until it has begun.
fn trace(cluster: &Cluster, arguments: &[&str]) -> Running {
    let tracing = start(cluster, &[&["trace"], arguments].concat());
    wait_until("it traces", || tracing.stderr().contains("netsum: tracing"));
    tracing
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Interrupts a trace as Ctrl-C does, and returns what it reports of losses.
fn interrupt(tracing: Running) -> String {
    tracing.signal(Signal::SIGINT).unwrap();
    let ended = tracing.end(TIMEOUT).unwrap();
    assert!(ended.status.success(), "{ended:?}");
    ended.stderr
}

/// The optional work of the daemon's programs, from their map.
fn enabled_features(cluster: &Cluster) -> u32 {
    let programs = cluster.netsum_json(&["prog", "show", "ingress"]).unwrap();
    let id = programs["programs"][0]["id"].as_u64().unwrap() as u32;
    let program = loaded_programs().flatten().find(|p| p.id() == id).expect("the program");
    let ids = program.map_ids().unwrap().unwrap_or_default();
    let id = ids
        .into_iter()
        .find(|&id| MapInfo::from_id(id).unwrap().name_as_str() == Some(maps::FEATURES));
    let map = Map::from_map_data(MapData::from_id(id.expect("the map")).unwrap()).unwrap();
    Array::<_, u32>::try_from(map).unwrap().get(&0, 0).unwrap()
}

fn is_traced(cluster: &Cluster) -> bool {
    enabled_features(cluster) & features::TRACE != 0
}

/// All counters of a job or of the box that are not zero, without the times of sums.
fn counters(cluster: &Cluster, job: Option<&str>) -> BTreeMap<String, u64> {
    let stats = cluster.netsum_json(&[&["stats"][..], job.as_slice()].concat()).unwrap();
    let counters = stats.as_object().unwrap().iter().filter(|(name, _)| *name != "timing");
    let all = counters.map(|(name, n)| (name.clone(), n.as_u64().unwrap()));
    all.filter(|(_, n)| *n > 0).collect()
}

/// The counters of a job once it is idle, because a rank's timer may cause retransmissions at the
/// end.
fn settled(cluster: &Cluster, job: &str) -> BTreeMap<String, u64> {
    let mut last = counters(cluster, Some(job));
    wait_until("the job rests", || {
        std::thread::sleep(Duration::from_millis(200));
        let before = std::mem::replace(&mut last, counters(cluster, Some(job)));
        before == last
    });
    last
}

/// The growth of the counters between two readings.
fn growth(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let grown = after.iter().map(|(name, n)| (name.clone(), n - before.get(name).unwrap_or(&0)));
    grown.filter(|(_, n)| *n > 0).collect()
}

/// The frames of a pcapng file with their comments.
fn commented(path: &Path) -> Vec<(Vec<u8>, String)> {
    let mut reader = PcapNgReader::new(File::open(path).unwrap()).unwrap();
    let mut packets = Vec::new();
    while let Some(block) = reader.next_block() {
        let Block::EnhancedPacket(p) = block.unwrap() else { continue };
        assert_eq!(p.original_len as usize, p.data.len(), "the whole frame");
        let comment = p.options.iter().find_map(|o| match o {
            EnhancedPacketOption::Comment(text) => Some(text.to_string()),
            _ => None,
        });
        packets.push((p.data.to_vec(), comment.expect("a comment")));
    }
    packets
}

/// How often each counter is in comments like `aggregate: contributions,completed; train/0 rank 1`.
fn verdicts<'a>(comments: impl Iterator<Item = &'a String>) -> BTreeMap<String, u64> {
    let mut counted = BTreeMap::new();
    for comment in comments {
        let (_, rest) = comment.split_once(": ").unwrap();
        for name in rest.split(';').next().unwrap().split(',') {
            *counted.entry(name.to_owned()).or_default() += 1;
        }
    }
    counted
}

fn validator(file: &str) -> jsonschema::Validator {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../netsum/schema").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    jsonschema::draft202012::new(&serde_json::from_str(&text).unwrap()).unwrap()
}

fn assert_valid(validator: &jsonschema::Validator, value: &Value) {
    let errors: Vec<String> = validator.iter_errors(value).map(|e| e.to_string()).collect();
    assert!(errors.is_empty(), "{errors:?}\n{value:#}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_trace_of_a_job_at_work_agrees_with_its_counters() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let job = JobSpec::new("train", 2);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    group.all_reduce("i32", 1000, 1).unwrap();
    assert!(!is_traced(&cluster));
    settled(&cluster, "train");

    let file = cluster.folder().join("trace.pcapng");
    let tracing = trace(&cluster, &["--job", "train", "--pcap", file.to_str().unwrap()]);
    assert!(is_traced(&cluster));
    let before = settled(&cluster, "train");
    group.all_reduce("i32", 30_000, 2).unwrap();
    let after = settled(&cluster, "train");
    let printed = interrupt(tracing);
    assert!(printed.contains(" 0 events were lost"), "{printed}");
    wait_until("it is off", || !is_traced(&cluster));
    let packets = commented(&file);
    assert_eq!(verdicts(packets.iter().map(|(_, comment)| comment)), growth(&before, &after));
    assert!(packets.len() > 3 * 2 * 30_000 * 4 / 1024, "{}", packets.len());
    for (frame, comment) in &packets {
        let parsed = wire::parse(&frame[..]).unwrap_or_else(|e| panic!("{comment}: {e:?}"));
        assert!(comment.contains("train/0 rank "), "{comment}");
        if !parsed.bth.opcode.is_rc_data() {
            continue;
        }
        // All frames have the right ICRC, as received and as sent.
        let len = parsed.data_len(frame.len()).unwrap();
        let icrc =
            netsum_common::icrc::of_frame(frame, parsed.l3, parsed.ip, parsed.payload(), len);
        assert_eq!(frame[parsed.payload() + len..][..4], icrc.unwrap().to_le_bytes(), "{comment}");
    }

    // The same as lines of JSON, for one rank and one verdict, until there are enough.
    let lines = trace(
        &cluster,
        &["-j", "--job", "train", "--rank", "1", "--verdict", "contributions", "-c", "20"],
    );
    group.all_reduce("i32", 30_000, 3).unwrap();
    let text = lines.success(TIMEOUT).unwrap();
    let validator = validator("trace.json");
    let mut last = None;
    for line in text.lines() {
        let packet: Value = serde_json::from_str(line).unwrap();
        assert_valid(&validator, &packet);
        assert_eq!(
            (&packet["program"], &packet["slot"]["rank"]),
            (&"aggregate".into(), &1.into()),
            "{line}"
        );
        assert_eq!(packet["verdict"][0], "contributions", "{line}");
        let index = packet["slot"]["index"].as_u64();
        assert!(last < index, "a rank's fragments come in order: {line}");
        last = index;
    }
    assert_eq!(text.lines().count(), 20);
    // The same as text.
    let lines =
        trace(&cluster, &["--job", "train", "--ring", "0", "--program", "egress", "--count", "3"]);
    group.all_reduce("i32", 1000, 4).unwrap();
    let text = lines.success(TIMEOUT).unwrap();
    assert_eq!(
        text.lines().filter(|l| l.contains(" train/0 rank ") && l.ends_with(" results")).count(),
        3,
        "{text}"
    );

    for (arguments, expected) in [
        (["trace", "--job", "nobody"], "no such job"),
        (["trace", "--verdict", "bad"], "a counter of `netsum stats`"),
        (["trace", "--program", "eg"], "ingress, aggregate, egress"),
    ] {
        let error = format!("{:#}", cluster.netsum(&arguments).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
    wait_until("it is off", || !is_traced(&cluster));
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn tracing_ends_with_its_client() {
    let mut cluster = Cluster::without_daemon(LabSpec::hosts(2)).unwrap();
    cluster.pin();
    cluster.start_daemon().unwrap();
    let (one, other) = (trace(&cluster, &[]), trace(&cluster, &["--verdict", "drop"]));
    one.signal(Signal::SIGKILL).unwrap();
    one.end(TIMEOUT).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(is_traced(&cluster), "the other one goes on");
    other.signal(Signal::SIGKILL).unwrap();
    other.end(TIMEOUT).unwrap();
    wait_until("it is off", || !is_traced(&cluster));

    // A killed daemon leaves its programs running, and they continue to trace; its clients are
    // told.
    cluster.create_job(&JobSpec::new("train", 2)).unwrap();
    let tracing = trace(&cluster, &[]);
    cluster.kill_daemon().unwrap();
    let ended = tracing.end(TIMEOUT).unwrap();
    assert_eq!(ended.status.code(), Some(5), "{ended:?}");
    assert!(ended.stderr.contains("the daemon closed the connection"), "{ended:?}");
    let pinned = cluster.pins().join(format!("abi-{}/maps/{}", VERSION, maps::FEATURES));
    let watch_map = Map::from_map_data(MapData::from_pin(pinned).unwrap()).unwrap();
    let enabled = Array::<_, u32>::try_from(watch_map).unwrap().get(&0, 0).unwrap();
    assert_ne!(enabled & features::TRACE, 0);
    cluster.start_daemon().unwrap();
    wait_until("the log says so", || {
        cluster.daemon_log().contains("took over from the previous daemon")
    });
    assert!(!is_traced(&cluster));
    cluster.stop_daemon().unwrap();
}

/// Writes frames into a pcap file.
fn pcap(path: PathBuf, frames: &[Vec<u8>]) -> PathBuf {
    let mut writer = PcapWriter::new(File::create(&path).unwrap()).unwrap();
    for (i, frame) in (0..).zip(frames) {
        let packet = PcapPacket::new(Duration::from_micros(i), frame.len() as u32, frame);
        writer.write_packet(&packet).unwrap();
    }
    path
}

/// A job of two ranks that exist only as frames.
fn app(cluster: &Cluster) {
    let properties = ["--ranks", "2", "--mtu", "1024", "--message-size", "4096", "--window", "2"];
    cluster.netsum(&[&["job", "create", "app"][..], &properties].concat()).unwrap();
    for (rank, port, src, dst, qpn) in [
        ("0", "port0", "10.0.0.1", "10.0.0.2", "0x100"),
        ("1", "port1", "10.0.0.2", "10.0.0.1", "0x101"),
    ] {
        let flow = [
            "--rank", rank, "--port", port, "--src", src, "--dst", dst, "--qpn", qpn, "--psn",
            "0x1000",
        ];
        cluster.netsum(&[&["flow", "add", "app", "--ring", "0"][..], &flow].concat()).unwrap();
    }
}

fn fragment(rank: u8, index: u32) -> FrameSpec {
    let (from, to) = (rank + 1, 2 - rank);
    FrameSpec::send(from, to, 0x100 + u32::from(rank), 0x1000 + index, lanes(u32::from(rank), 256))
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_simulation_explains_every_frame_and_no_job_notices() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let job = JobSpec::new("train", 2);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    group.all_reduce("i32", 1000, 1).unwrap();
    app(&cluster);

    let mut ack = fragment(0, 0);
    ack.bth.opcode = Opcode::ACK;
    let mut spoilt = fragment(1, 1).build();
    *spoilt.last_mut().unwrap() ^= 1;
    let mut arp = vec![0xff; 60];
    arp[12..14].copy_from_slice(&wire::ETHERTYPE_ARP.to_be_bytes());
    arp[28..32].copy_from_slice(&[10, 0, 0, 1]);
    let frames = [
        fragment(0, 0).build(),
        fragment(1, 0).build(),
        ack.build(),
        spoilt,
        fragment(0, 9).build(),
        fragment(0, 0).build(),
        arp,
        fragment(1, 2).build(),
    ];
    let file = pcap(cluster.folder().join("frames.pcap"), &frames);
    let file = file.to_str().unwrap();
    let before = (counters(&cluster, None), cluster.netsum(&["slot", "show", "app"]).unwrap());
    // Another job is running all the while.
    let files = group.order_all_reduce("i32", 300_000, 2).unwrap();
    let printed = cluster.netsum_json(&["simulate", file]).unwrap();
    group.check_all_reduce("i32", 300_000, 2, &files).unwrap();
    assert_valid(&validator("simulation.json"), &printed);
    let of = |field: &str| -> Vec<&str> {
        printed["frames"].as_array().unwrap().iter().map(|f| f[field].as_str().unwrap()).collect()
    };
    assert_eq!(
        of("outcome"),
        ["absorbed", "released", "passed", "dropped", "dropped", "replayed", "passed", "passed"],
        "{printed:#}"
    );
    assert_eq!(of("what")[1..3], ["SEND_ONLY", "ACK"]);
    assert_eq!(of("what")[6], "ARP");
    assert_eq!(
        of("port"),
        ["port0", "port1", "port0", "port1", "port0", "port0", "port0", "port1"]
    );
    assert_eq!(printed["same_programs"], true);
    let frame = |number: usize| &printed["frames"][number - 1];
    let to: Vec<_> =
        frame(2)["steps"].as_array().unwrap().iter().filter_map(|s| s["to"].as_u64()).collect();
    assert_eq!(to, [0, 1], "{printed:#}");
    assert_eq!(
        (&frame(2)["job"], &frame(2)["slot"]["contributors"]),
        (&"app".into(), &serde_json::json!([0, 1]))
    );
    assert_eq!(frame(4)["reason"], "rank 1: its packets have a wrong ICRC", "{printed:#}");
    assert!(frame(4)["next"].as_str().unwrap().contains("--icrc ignore"), "{printed:#}");
    let beyond = frame(5)["reason"].as_str().unwrap();
    assert!(beyond.contains("beyond its credit: index 9, where 1 to 8 are allowed"), "{printed:#}");
    assert_eq!(
        frame(8)["steps"][1]["verdict"],
        serde_json::json!(["contributions", "out_of_sequence", "gap_forwarded"])
    );
    // The frames have changed nothing in their job.
    assert_eq!(cluster.netsum(&["slot", "show", "app"]).unwrap(), before.1);
    assert_eq!(counters(&cluster, Some("app")), BTreeMap::new());
    let grown = growth(&before.0, &counters(&cluster, None));
    assert!(
        !grown.contains_key("rx_icrc_encapsulated") && !grown.contains_key("credit_violation"),
        "{grown:?}"
    );

    // The outcome at another port differs, and the text agrees with the JSON.
    let text = cluster.netsum(&["simulate", file, "--port", "port1"]).unwrap();
    assert!(text.contains("rank 0: its packets arrive at another port than port0"), "{text}");
    assert!(text.contains("8 frames: absorbed 1  dropped 6  passed 1"), "{text}");

    // The slots of the running job count: rank 0's fragment is already there.
    let tap = netsum_lab::tap::Tap::open(cluster.lab().host(0), "eth0").unwrap();
    tap.send(&fragment(0, 0).build()).unwrap();
    wait_until("the box has it", || counters(&cluster, Some("app")).contains_key("contributions"));
    let outcomes = |arguments: &[&str]| {
        let printed = cluster.netsum_json(&[&["simulate", file], arguments].concat()).unwrap();
        printed["outcomes"].clone()
    };
    assert_eq!(
        outcomes(&[]),
        serde_json::json!({"dropped": 3, "passed": 3, "released": 1, "replayed": 1})
    );
    assert_eq!(
        outcomes(&["--fresh"]),
        serde_json::json!({"absorbed": 1, "dropped": 2, "passed": 3, "released": 1, "replayed": 1})
    );
    // The sum includes it: the other rank receives both.
    let other = netsum_lab::tap::Tap::open(cluster.lab().host(1), "eth0").unwrap();
    other.send(&fragment(1, 0).build()).unwrap();
    let expected = sum(&[lanes(0, 256), lanes(1, 256)]);
    other
        .receive(TIMEOUT, |f| wire::parse(f).is_ok_and(|p| f[p.payload()..].starts_with(&expected)))
        .unwrap();

    for (arguments, expected) in [
        (&["simulate", "/nowhere"][..], "/nowhere: "),
        (&["simulate", "/proc/self/status"], "neither pcap nor pcapng"),
        (&["simulate", file, "--port", "eth7"], "netsum has ports port0, port1"),
    ] {
        let error = format!("{:#}", cluster.netsum(arguments).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_capture_of_a_real_job_comes_to_the_same_sums_again() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let job = JobSpec::new("train", 2);
    let token = cluster.create_job(&job).unwrap();
    let file = cluster.folder().join("job.pcapng");
    let tracing = trace(&cluster, &["--program", "ingress", "--pcap", file.to_str().unwrap()]);
    let mut group = cluster.ranks(&job, &token, &one_on_each_host(2)).unwrap();
    group.all_reduce("i32", 20_000, 1).unwrap();
    let live = settled(&cluster, "train");
    let printed = interrupt(tracing);
    assert!(printed.contains(" 0 events were lost"), "{printed}");

    let printed = cluster.netsum_json(&["simulate", file.to_str().unwrap(), "--fresh"]).unwrap();
    // Frames of a file never arrive on the CPU of a ring.
    let came: u64 = ["steered", "inline"].iter().filter_map(|&name| live.get(name)).sum();
    assert_eq!(printed["counters"]["steered"].as_u64(), Some(came), "{}", printed["counters"]);
    for name in ["contributions", "completed", "released"] {
        assert_eq!(
            printed["counters"][name].as_u64(),
            live.get(name).copied(),
            "{name}: {}",
            printed["counters"]
        );
    }
    let (mut contributions, mut acknowledgements) = (0, 0);
    for frame in printed["frames"].as_array().unwrap() {
        match frame["what"].as_str().unwrap() {
            "ACK" => {
                assert_eq!(frame["outcome"], "passed", "{frame:#}");
                acknowledgements += 1;
            }
            what if frame["job"] == "train" => {
                assert!(what.starts_with("SEND_"), "{frame:#}");
                let has = |name: &str| {
                    frame["steps"][1]["verdict"].as_array().unwrap().contains(&name.into())
                };
                // A rank that is delayed on a busy machine retransmits.
                let outcomes = if has("contributions") {
                    ["absorbed", "released"]
                } else {
                    ["dropped", "replayed"]
                };
                assert!(outcomes.contains(&frame["outcome"].as_str().unwrap()), "{frame:#}");
                assert!(
                    has("contributions") || has("duplicate_request") || has("replays"),
                    "{frame:#}"
                );
                contributions += u64::from(has("contributions"));
            }
            _ => assert_eq!(frame["outcome"], "passed", "{frame:#}"),
        }
    }
    assert_eq!(contributions, live["contributions"]);
    assert!(acknowledgements > 0);
    assert_eq!(counters(&cluster, Some("train")), live, "the job has not noticed");
}
