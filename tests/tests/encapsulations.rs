//! Encapsulations of a packet: tags, extension headers, fragments. The tests check which of them
//! Linux hosts accept, and that the XDP programs pass no packet in them that they would not pass
//! without.

use std::collections::BTreeSet;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use netsum_common::abi::RingNumber;
use netsum_common::wire::Opcode;
use netsum_core::plane::FlowSpec;
use netsum_dataplane::DataPlane;
use netsum_lab::attacker::{TAGS, advertisement, extended, fragments, snap, tagged, with_checksum};
use netsum_lab::frames::{FrameSpec, ipv4_checksum, lanes};
use netsum_lab::netns::output;
use netsum_lab::process::TIMEOUT;
use netsum_lab::programs::{Bench, DROP, LOOPBACK, PASS, flow, fragment, host, ring};
use netsum_lab::tap::Tap;
use netsum_lab::{Host, Lab, LabSpec};

/// Data from host 1 to host 0.
fn data(v6: bool, psn: u32) -> Vec<u8> {
    let spec = FrameSpec::send(2, 1, 0x77, psn, lanes(psn, 64));
    if v6 { with_checksum(spec.v6().build(), 6) } else { spec.build() }
}

/// A frame with bytes behind the end of its IP packet that look like the rest of the packet.
fn padded(mut frame: Vec<u8>) -> Vec<u8> {
    frame.extend(data(false, 0x1234).split_off(42));
    frame
}

/// Ways to send a packet in an IP fragment or behind IPv6 extension headers, as frames.
type Wrap = fn(bool, u32) -> Vec<Vec<u8>>;

/// Each entry: a name, whether it is over IPv6, how it is made, and whether Linux accepts it.
const WAYS: [(&str, bool, Wrap, bool); 17] = [
    ("802.2", false, |v6, psn| vec![snap(&data(v6, psn))], false),
    (
        "802.2 behind a tag",
        false,
        |v6, psn| vec![tagged(&snap(&data(v6, psn)), &[(0x8100, 0)])],
        false,
    ),
    ("fragments", false, |v6, psn| fragments(&data(v6, psn), 64, &[], false).into(), true),
    (
        "the last one first",
        false,
        |v6, psn| reversed(fragments(&data(v6, psn), 64, &[], false)),
        true,
    ),
    ("UDP header alone", false, |v6, psn| fragments(&data(v6, psn), 8, &[], false).into(), true),
    ("half a BTH", false, |v6, psn| fragments(&data(v6, psn), 16, &[], false).into(), true),
    (
        "UDP header, padded",
        false,
        |v6, psn| {
            let [first, second] = fragments(&data(v6, psn), 8, &[], false);
            vec![padded(first), second]
        },
        true,
    ),
    ("hop-by-hop options", true, |v6, psn| vec![extended(&data(v6, psn), &[0])], true),
    ("destination options", true, |v6, psn| vec![extended(&data(v6, psn), &[60])], true),
    ("routing", true, |v6, psn| vec![extended(&data(v6, psn), &[43])], true),
    ("a whole fragment", true, |v6, psn| vec![extended(&data(v6, psn), &[44])], true),
    ("four", true, |v6, psn| vec![extended(&data(v6, psn), &[0, 60, 43, 60])], true),
    ("ten", true, |v6, psn| vec![extended(&data(v6, psn), &[60; 10])], true),
    ("IPv6 fragments", true, |v6, psn| fragments(&data(v6, psn), 64, &[], false).into(), true),
    (
        "IPv6 UDP header alone",
        true,
        |v6, psn| fragments(&data(v6, psn), 8, &[0], false).into(),
        true,
    ),
    (
        "IPv6 fragments behind a tag",
        true,
        |v6, psn| {
            fragments(&data(v6, psn), 64, &[], false).map(|f| tagged(&f, &[(0x88a8, 0)])).into()
        },
        true,
    ),
    // Linux 5.11 and later requires all headers in the first fragment (RFC 8200, 4.5).
    (
        "IPv6 without a UDP header",
        true,
        |v6, psn| fragments(&data(v6, psn), 8, &[], true).into(),
        false,
    ),
];

/// The two fragments in reverse order.
fn reversed([first, second]: [Vec<u8>; 2]) -> Vec<Vec<u8>> {
    vec![second, first]
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn linux_takes_packets_from_behind_some_tags_and_extension_headers() {
    let lab = Lab::new(LabSpec { ipv6: true, ..LabSpec::hosts(3) }).unwrap();
    let socket = lab.host(0).enter(|| UdpSocket::bind("[::]:4791").unwrap());
    let tap = Tap::open(lab.host(1), Host::INTERFACE).unwrap();
    // (what it is, its PSN, whether Linux accepts it)
    let mut cases: Vec<(String, u32, bool)> = Vec::new();
    for (tags, taken) in TAGS {
        for v6 in [false, true] {
            let psn = cases.len() as u32 + 1;
            tap.send(&tagged(&data(v6, psn), tags)).unwrap();
            cases.push((format!("{tags:x?}, IPv6: {v6}"), psn, taken));
        }
    }
    for (what, v6, way, taken) in WAYS {
        let psn = cases.len() as u32 + 1;
        way(v6, psn).iter().for_each(|frame| tap.send(frame).unwrap());
        cases.push((what.into(), psn, taken));
    }
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let (mut arrived, mut buffer) = (BTreeSet::new(), [0; 2048]);
    while let Ok(len) = socket.recv(&mut buffer) {
        assert_eq!(len, 12 + 256 + 4);
        arrived.insert(u32::from_be_bytes([0, buffer[9], buffer[10], buffer[11]]));
    }
    for (what, psn, taken) in &cases {
        assert_eq!(arrived.contains(psn), *taken, "{what}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn linux_accepts_encapsulated_neighbour_advertisements() {
    let lab = Lab::new(LabSpec { ipv6: true, ..LabSpec::hosts(3) }).unwrap();
    let foreign = Tap::open(lab.host(2), Host::INTERFACE).unwrap();
    let is_taken_over = |address: &str| {
        let mut ip = lab.host(0).command("ip");
        let entry = output(ip.args(["neigh", "show", "to", address])).unwrap();
        entry.contains(&lab.host(2).mac())
    };
    let (forged, last) = (advertisement(1, 0, 2), advertisement(2, 0, 2));
    for (what, frame, believed) in [
        ("as it is", forged.clone(), true),
        ("tagged twice", tagged(&forged, &[(0x88a8, 0), (0x8100, 0)]), true),
        ("behind destination options", extended(&forged, &[60]), true),
        ("behind two headers", extended(&forged, &[0, 60]), true),
        // RFC 6980 forbids fragments in neighbour discovery.
        ("in a fragment", extended(&forged, &[44]), false),
    ] {
        for address in ["fd00::2", "fd00::3"] {
            let mut ip = lab.host(0).command("ip");
            ip.args(["neigh", "replace", address, "lladdr", &lab.host(1).mac()]);
            output(ip.args(["dev", Host::INTERFACE, "nud", "stale"])).unwrap();
        }
        let start = Instant::now();
        while !is_taken_over("fd00::3") {
            assert!(start.elapsed() < TIMEOUT, "{what}: the last frame has not arrived");
            foreign.send(&frame).unwrap();
            foreign.send(&last).unwrap();
        }
        assert_eq!(is_taken_over("fd00::2"), believed, "{what}");
    }
}

/// A ring of two ranks. Rank 0 is behind `port`; packets arrive at the loopback interface.
fn bench(port: u32, v6: bool) -> Bench {
    let spec = ring(2, 256, 16);
    let mut flows: Vec<FlowSpec> = (0..2).map(|r| flow(&spec, r, v6)).collect();
    flows[0].ifindex = port;
    flows[0].src_mac = Some([2, 0, 0, 0, 0, host(0)]);
    Bench::with_flows(spec, flows).unwrap()
}

fn counted(bench: &Bench, name: &str) -> u64 {
    bench.counters().unwrap().iter().filter(|(c, _)| c.name() == name).map(|(_, n)| n).sum()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn no_tags_and_no_headers_take_a_ranks_address_past_another_port() {
    const FOREIGN: u8 = 77;
    let acknowledgement = |v6: bool| {
        let mut ack = FrameSpec::send(host(0), host(1), 0x77, 5, lanes(0, 1));
        ack.bth.opcode = Opcode::ACK;
        ack.macs.1[5] = FOREIGN;
        if v6 { ack.v6().build() } else { ack.build() }
    };
    let data = || {
        let mut data = fragment(0, 2, 0, lanes(0, 64));
        data.macs.1[5] = FOREIGN;
        data.build()
    };
    let lab_free_arp = {
        let mut f = [[0xff; 6], [2, 0, 0, 0, 0, FOREIGN]].concat();
        f.extend([
            0x08,
            0x06,
            0,
            1,
            0x08,
            0,
            6,
            4,
            0,
            2,
            2,
            0,
            0,
            0,
            0,
            FOREIGN,
            10,
            0,
            0,
            host(0),
        ]);
        f.resize(60, 0);
        f
    };
    let mut cases: Vec<(String, bool, Vec<u8>)> = Vec::new();
    for (tags, _) in TAGS {
        for (what, v6, frame) in [
            ("ACK", false, acknowledgement(false)),
            ("ACK", true, acknowledgement(true)),
            ("ARP", false, lab_free_arp.clone()),
            ("advertisement", true, advertisement(host(0) - 1, 1, FOREIGN - 1)),
            ("data", false, data()),
        ] {
            cases.push((format!("{what}, IPv6: {v6}, {tags:x?}"), v6, tagged(&frame, tags)));
        }
    }
    for extensions in [
        &[0][..],
        &[60],
        &[43],
        &[44],
        &[0, 60, 43, 60],
        &[60; 6],
        &[60; 7],
        &[0, 60, 60, 60, 60, 60, 60, 60],
    ] {
        let forged = advertisement(host(0) - 1, 1, FOREIGN - 1);
        cases.push((format!("advertisement, {extensions:?}"), true, extended(&forged, extensions)));
        let both = tagged(&extended(&forged, extensions), &[(0x88a8, 0), (0x8100, 0)]);
        cases.push((format!("tagged advertisement, {extensions:?}"), true, both));
    }
    let (mut four, mut six) = (bench(4711, false), bench(4711, true));
    for (what, v6, frame) in &cases {
        let away = if *v6 { &mut six } else { &mut four };
        assert_eq!(away.run("ingress", frame).unwrap().action, DROP, "{what}");
    }
    for mut away in [four, six] {
        away.plane.delete_ring(RingNumber(1), &away.keys.clone(), &[LOOPBACK]).unwrap();
        away.plane.forget_ended(&away.keys.clone()).unwrap();
        for (what, _, frame) in &cases {
            let out = away.run("ingress", frame).unwrap();
            assert_eq!((out.action, &out.packet), (PASS, frame), "{what}, when the job has gone");
        }
    }
}

/// Encapsulated packets that carry no rank's address pass while a job is registered.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn others_tags_and_headers_pass_beside_a_job() {
    let mut bench = bench(4711, true);
    let foreign = |mut frame: Vec<u8>| {
        // From fd00::3 to fd00::4.
        (frame[37], frame[53], frame[11], frame[5]) = (3, 4, 3, 4);
        frame
    };
    let frame = foreign(data(true, 7));
    let [first, second] = fragments(&frame, 64, &[], false);
    let [early, late] = fragments(&frame, 8, &[], false);
    let mut dns = frame.clone();
    dns[56..58].copy_from_slice(&53u16.to_be_bytes());
    let dns = fragments(&dns, 8, &[60], false);
    let mut report = extended(&foreign(advertisement(5, 5, 5)), &[0]);
    report[62] = 143;
    for (what, frame, action) in [
        ("two tags", tagged(&frame, &[(0x88a8, 7), (0x8100, 9)]), PASS),
        ("extension headers", extended(&frame, &[0, 43, 60]), PASS),
        ("a first fragment", first, PASS),
        ("a later one", second, PASS),
        ("one that hides where it goes", early, DROP),
        ("what is nothing without it", late, PASS),
        ("DNS in fragments", dns[0].clone(), PASS),
        ("the rest", dns[1].clone(), PASS),
        ("a multicast listener's report", report, PASS),
    ] {
        let out = bench.run("ingress", &frame).unwrap();
        assert_eq!(out.action, action, "{what}: {:?}", bench.counters().unwrap());
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn data_of_a_flow_that_cannot_be_summed_is_dropped_with_its_reason() {
    let whole = |v6: bool, index: u32| {
        let spec = fragment(0, 2, index, lanes(0, 64));
        if v6 { with_checksum(spec.v6().build(), 6) } else { spec.build() }
    };
    let opcode = |opcode: u8| {
        let mut spec = fragment(0, 2, 0, lanes(0, 64));
        spec.bth.opcode = Opcode(opcode);
        spec.build()
    };
    let options = {
        let mut f = whole(false, 0);
        f.splice(34..34, [1, 1, 1, 0]);
        f[14] = 0x46;
        f[16..18].copy_from_slice(&(24 + 24 + 256u16).to_be_bytes());
        f[24..26].fill(0);
        let sum = ipv4_checksum(&f[14..38]);
        f[24..26].copy_from_slice(&sum.to_be_bytes());
        f
    };
    let cut = |v6: bool, first: usize| fragments(&whole(v6, 0), first, &[], false);
    let hidden = fragments(&whole(true, 0), 8, &[], true);
    let mut cases = vec![
        ("SEND LAST with invalidate".to_owned(), false, opcode(0x16), "other_data"),
        ("SEND ONLY with invalidate".into(), false, opcode(0x17), "other_data"),
        ("compare and swap".into(), false, opcode(0x13), "other_data"),
        ("fetch and add".into(), false, opcode(0x14), "other_data"),
        ("atomic write".into(), false, opcode(0x1d), "other_data"),
        ("UC SEND ONLY".into(), false, opcode(0x24), "other_data"),
        ("UC WRITE LAST".into(), false, opcode(0x28), "other_data"),
        ("XRC SEND ONLY".into(), false, opcode(0xa4), "other_data"),
        ("IPv4 options".into(), false, options, "ip_options"),
        ("a fragment with the BTH".into(), false, cut(false, 64)[0].clone(), "ip_fragment"),
        ("a fragment with half a BTH".into(), false, cut(false, 16)[0].clone(), "unparsed_headers"),
        ("a fragment without a BTH".into(), false, cut(false, 8)[0].clone(), "unparsed_headers"),
        ("the same, padded".into(), false, padded(cut(false, 8)[0].clone()), "unparsed_headers"),
        ("an IPv6 fragment with the BTH".into(), true, cut(true, 64)[0].clone(), "ipv6_extensions"),
        (
            "an IPv6 fragment with half a BTH".into(),
            true,
            cut(true, 16)[0].clone(),
            "unparsed_headers",
        ),
        ("an IPv6 fragment without UDP".into(), true, hidden[0].clone(), "unparsed_headers"),
        ("a whole IPv6 fragment".into(), true, extended(&whole(true, 0), &[44]), "ipv6_extensions"),
    ];
    for extensions in [&[0][..], &[43], &[60], &[0, 60], &[60; 6]] {
        let frame = extended(&whole(true, 0), extensions);
        cases.push((format!("headers {extensions:?}"), true, frame, "ipv6_extensions"));
    }
    cases.push((
        "headers beyond count".into(),
        true,
        extended(&whole(true, 0), &[60; 7]),
        "unparsed_headers",
    ));
    for v6 in [false, true] {
        for (tags, _) in
            TAGS.iter().filter(|(tags, _)| tags.len() > 1 || tags.iter().any(|t| t.0 != 0x8100))
        {
            let reason = if tags.len() > 2 { "unparsed_headers" } else { "vlan_tags" };
            cases.push((format!("{tags:x?}, IPv6: {v6}"), v6, tagged(&whole(v6, 0), tags), reason));
        }
    }
    let mut benches = [false, true].map(|v6| Bench::new(ring(2, 256, 16), v6).unwrap());
    for (what, v6, frame, reason) in &cases {
        let bench = &mut benches[usize::from(*v6)];
        let before = counted(bench, reason);
        assert_eq!(
            bench.run("ingress", frame).unwrap().action,
            DROP,
            "{what}: {:?}",
            bench.counters().unwrap()
        );
        assert_eq!(counted(bench, reason), before + 1, "{what}: {:?}", bench.counters().unwrap());
    }
    // Without its first fragment, which has the UDP header, the rest of a packet is useless, so it
    // passes. A box without flows is a plain bridge.
    for mut bench in benches {
        assert_eq!(bench.run("ingress", &cut(false, 64)[1]).unwrap().action, PASS);
        bench.plane.delete_ring(RingNumber(1), &bench.keys.clone(), &[LOOPBACK]).unwrap();
        bench.plane.forget_ended(&bench.keys.clone()).unwrap();
        for (what, _, frame, _) in &cases {
            assert_eq!(
                bench.run("ingress", frame).unwrap().action,
                PASS,
                "{what}, when the job has gone"
            );
        }
    }
}
