//! `netsum simulate` with jobs that are set up in band, tagged frames and IPv6: each frame has the
//! outcome that it would have on the box, with the right words.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use netsum_common::wire::{self, InBandToken, Opcode};
use netsum_lab::LabSpec;
use netsum_lab::cluster::Cluster;
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::in_band::{Connections, Hosts, InBandRing};
use pcap_file::pcap::{PcapPacket, PcapWriter};
use serde_json::{Value, json};

/// The outcomes of frames in a pcap file, as JSON that is checked against its schema.
fn simulate(cluster: &Cluster, frames: &[Vec<u8>], options: &[&str]) -> Value {
    let path = cluster.folder().join("frames.pcap");
    let mut writer = PcapWriter::new(File::create(&path).unwrap()).unwrap();
    for frame in frames {
        writer.write_packet(&PcapPacket::new(Duration::ZERO, frame.len() as u32, frame)).unwrap();
    }
    drop(writer);
    let printed =
        cluster.netsum_json(&[&["simulate", path.to_str().unwrap()], options].concat()).unwrap();
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("../netsum/schema/simulation.json");
    let schema = serde_json::from_str(&std::fs::read_to_string(schema).unwrap()).unwrap();
    let validator = jsonschema::draft202012::new(&schema).unwrap();
    let errors: Vec<String> = validator.iter_errors(&printed).map(|e| e.to_string()).collect();
    assert!(errors.is_empty(), "{errors:?}\n{printed:#}");
    printed
}

/// A field of every frame.
fn all<'a>(printed: &'a Value, field: &str) -> Vec<&'a str> {
    printed["frames"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| f[field].as_str().unwrap_or("none"))
        .collect()
}

/// The packets of a rank's first message.
fn packets(app: &InBandRing, c: Connections, rank: u32) -> Vec<FrameSpec> {
    let message = app.message(c, rank, 0);
    let chunks: Vec<&[u8]> = message.chunks(app.mtu as usize).collect();
    let next = (rank + 1) % app.ranks;
    let packet = |(i, chunk): (usize, &&[u8])| {
        let psn = (c.first_psn(rank) + i as u32) & 0xff_ffff;
        let mut packet =
            FrameSpec::send(rank as u8 + 1, next as u8 + 1, c.receives(next), psn, chunk.to_vec());
        packet.bth.opcode = match i {
            0 => Opcode::SEND_FIRST,
            i if i + 1 == chunks.len() => Opcode::SEND_LAST,
            _ => Opcode::SEND_MIDDLE,
        };
        packet
    };
    chunks.iter().enumerate().map(packet).collect()
}

fn built(specs: &[FrameSpec]) -> Vec<Vec<u8>> {
    specs.iter().map(FrameSpec::build).collect()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn frames_of_a_job_that_is_set_up_in_band() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    let app = InBandRing::create(&cluster, 2).unwrap();
    let c = Connections::new(1);
    let (zero, one) = (packets(&app, c, 0), packets(&app, c, 1));
    let strange = InBandRing { token: InBandToken([7; 16]), ..app.clone() };
    let mut spoilt = one[0].build();
    *spoilt.last_mut().unwrap() ^= 1;

    // No rank has appeared yet.
    let frames = [
        zero[0].build(),
        zero[1].build(),
        packets(&strange, c, 1)[0].build(),
        spoilt,
        one[0].build(),
        zero[0].build(),
    ];
    let printed = simulate(&cluster, &frames, &[]);
    assert_eq!(
        all(&printed, "outcome"),
        ["dropped", "dropped", "passed", "dropped", "dropped", "dropped"],
        "{printed:#}"
    );
    let verdict = |number: usize| {
        printed["frames"][number - 1]["steps"].as_array().unwrap().last().unwrap()["verdict"]
            .clone()
    };
    assert_eq!(
        (1..=6).map(verdict).collect::<Vec<_>>(),
        [
            json!(["in_band_first"]),
            json!(["in_band_waits"]),
            json!(["in_band_wrong_token"]),
            json!(["rx_icrc_encapsulated"]),
            json!(["in_band_first"]),
            json!(["in_band_first"])
        ],
        "{printed:#}"
    );
    let frame = |number: usize| &printed["frames"][number - 1];
    for (number, reason) in
        [(1, "it begins a connection of the job"), (2, "waits for those of the other ranks")]
    {
        assert!(frame(number)["reason"].as_str().unwrap().contains(reason), "{printed:#}");
        assert_eq!(frame(number)["next"], "", "nothing is wrong: {printed:#}");
    }
    assert_eq!((&frame(1)["job"], &frame(1)["ring"]), (&"app".into(), &0.into()), "{printed:#}");
    assert_eq!((&frame(3)["job"], &frame(4)["job"]), (&Value::Null, &"app".into()), "{printed:#}");
    let job = cluster.netsum_json(&["job", "show", "app"]).unwrap();
    assert_eq!(job["in_band"]["claims"], json!([]), "the daemon has not registered them: {job:#}");

    // The job is running: its connections were learned in band.
    let got = app.run_all(&Hosts::of(cluster.lab()), c, 10).unwrap();
    assert!(got.iter().all(|g| (g.sums, g.unsummed) == (10, 0)), "{got:?}");
    let before = cluster.counter(Some("app"), "contributions").unwrap();
    let n = zero.len();
    let mut frames = built(&[zero.clone(), one.clone()].concat());
    frames.push(one[0].build());
    // The last frame is from the same queue pair with another PSN: the rank reconnects.
    frames.push(packets(&app, Connections { psn: c.psn + 50, ..c }, 0)[0].build());
    let printed = simulate(&cluster, &frames, &["--fresh"]);
    let expected = [vec!["absorbed"; n], vec!["released"; n], vec!["replayed", "dropped"]].concat();
    assert_eq!(all(&printed, "outcome"), expected, "{printed:#}");
    assert_eq!(all(&printed, "port")[n - 1..n + 1], ["port0", "port1"], "{printed:#}");
    assert!(all(&printed, "job").iter().all(|job| *job == "app"), "{printed:#}");
    let last = printed["frames"].as_array().unwrap().last().unwrap();
    assert!(last["reason"].as_str().unwrap().contains("it begins a connection"), "{last:#}");
    // With the slots of the running job: these packets were released long ago.
    let printed = simulate(&cluster, &frames[..1], &[]);
    assert!(["replayed", "passed"].contains(&all(&printed, "outcome")[0]), "{printed:#}");
    assert_eq!(
        cluster.counter(Some("app"), "contributions").unwrap(),
        before,
        "the job has not noticed"
    );
}

/// A job of two ranks that exist only as frames, with these addresses.
fn by_hand(cluster: &Cluster, name: &str, ips: [&str; 2]) {
    let numbers = [("--ranks", 2), ("--mtu", 1024), ("--message-size", 4096), ("--window", 2)];
    cluster.create(name, &numbers, &[]).unwrap();
    for rank in 0..2 {
        let (port, number, qpn) =
            (format!("port{rank}"), rank.to_string(), (0x100 + rank).to_string());
        let way = ["--rank", &number, "--port", &port, "--qpn", &qpn, "--psn", "0x1000"];
        let ips = ["--src", ips[rank], "--dst", ips[1 - rank]];
        cluster.netsum(&[&["flow", "add", name, "--ring", "0"][..], &way, &ips].concat()).unwrap();
    }
}

fn fragment(rank: u8, index: u32) -> FrameSpec {
    FrameSpec::send(
        rank + 1,
        2 - rank,
        0x100 + u32::from(rank),
        0x1000 + index,
        lanes(rank.into(), 256),
    )
}

fn tagged(spec: FrameSpec) -> FrameSpec {
    FrameSpec { vlan: Some(5), ..spec }
}

/// Fragments of both ranks, tagged or not, an ACK, a corrupted fragment and a duplicate, and their
/// outcomes.
fn check_fragments(cluster: &Cluster, of: impl Fn(u8, u32) -> FrameSpec) {
    let mut ack = of(0, 0);
    ack.bth.opcode = Opcode::ACK;
    let mut spoilt = of(1, 1).build();
    *spoilt.last_mut().unwrap() ^= 1;
    let frames = [
        of(0, 0).build(),
        of(1, 0).build(),
        ack.build(),
        spoilt,
        of(0, 1).build(),
        of(1, 1).build(),
        of(0, 0).build(),
    ];
    let printed = simulate(cluster, &frames, &[]);
    assert_eq!(
        all(&printed, "outcome"),
        ["absorbed", "released", "passed", "dropped", "absorbed", "released", "replayed"],
        "{printed:#}"
    );
    assert_eq!(
        all(&printed, "port"),
        ["port0", "port1", "port0", "port1", "port0", "port1", "port0"],
        "{printed:#}"
    );
    assert_eq!(all(&printed, "what")[1..3], ["SEND_ONLY", "ACK"]);
    let frame = |number: usize| &printed["frames"][number - 1];
    let steps = frame(2)["steps"].as_array().unwrap();
    let to: Vec<_> =
        steps.iter().filter_map(|s| Some((s["to"].as_u64()?, s["verdict"].clone()))).collect();
    assert_eq!(to, [(0, json!(["results"])), (1, json!(["results"]))], "{printed:#}");
    assert_eq!(frame(4)["reason"], "rank 1: its packets have a wrong ICRC", "{printed:#}");
    // At another port than its rank's, the frame is refused.
    let printed = simulate(cluster, &frames[..1], &["--port", "port1"]);
    assert!(
        all(&printed, "reason")[0].contains("arrive at another port than port0"),
        "{printed:#}"
    );
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn frames_with_a_vlan_tag() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    by_hand(&cluster, "app", ["10.0.0.1", "10.0.0.2"]);
    check_fragments(&cluster, |rank, index| tagged(fragment(rank, index)));
    // Where a bridge translates tags, only one of the ranks is tagged.
    check_fragments(&cluster, |rank, index| {
        if rank == 1 { tagged(fragment(1, index)) } else { fragment(0, index) }
    });
    // Other protocols than RoCE are recognised behind their tags, too, and arrive at their sender's
    // port.
    let mut arp = vec![0xff; 64];
    arp[12..18].copy_from_slice(&[0x81, 0, 0, 5, 8, 6]);
    arp[32..36].copy_from_slice(&[10, 0, 0, 2]);
    let mut tcp = tagged(fragment(1, 0)).build();
    tcp[27] = 6;
    let printed = simulate(&cluster, &[arp, tcp], &[]);
    assert_eq!(all(&printed, "what"), ["ARP", "TCP"], "{printed:#}");
    assert_eq!(
        (all(&printed, "port"), all(&printed, "outcome")),
        (vec!["port1"; 2], vec!["passed"; 2]),
        "{printed:#}"
    );
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn frames_of_ipv6() {
    let cluster = Cluster::start(LabSpec::hosts(2)).unwrap();
    by_hand(&cluster, "six", ["fd00::1", "fd00::2"]);
    check_fragments(&cluster, |rank, index| fragment(rank, index).v6());
    check_fragments(&cluster, |rank, index| tagged(fragment(rank, index).v6()));
    let printed = simulate(&cluster, &[fragment(0, 0).v6().build(), fragment(0, 0).build()], &[]);
    let transport = &printed["frames"][0]["transport"];
    assert_eq!(
        (&transport["src"], &transport["dst"]),
        (&"fd00::1".into(), &"fd00::2".into()),
        "{printed:#}"
    );
    assert_eq!(
        all(&printed, "outcome"),
        ["absorbed", "passed"],
        "nobody has registered the IPv4 one: {printed:#}"
    );
    // A neighbour advertisement for a rank's address passes at the rank's own port only.
    let mut advertisement = fragment(1, 0).v6().build();
    advertisement[20] = wire::IPPROTO_ICMPV6;
    advertisement[54..62].copy_from_slice(&[136, 0, 0, 0, 0x60, 0, 0, 0]);
    advertisement[62..78].copy_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
    let frames = [advertisement];
    let printed = simulate(&cluster, &frames, &[]);
    assert_eq!(
        (all(&printed, "what"), all(&printed, "port")),
        (vec!["ICMPv6"], vec!["port1"]),
        "{printed:#}"
    );
    assert_eq!(all(&printed, "outcome"), ["passed"], "{printed:#}");
    let printed = simulate(&cluster, &frames, &["--port", "port0"]);
    assert_eq!(all(&printed, "outcome"), ["dropped"], "{printed:#}");
    assert_eq!(printed["counters"], json!({"spoofed": 1}), "{printed:#}");
}
