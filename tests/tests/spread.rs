//! Flows that are not summed, spread over the uplinks of boxes that route.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use aya::programs::{TestRun, TestRunOptions};
use netsum_common::abi::MAX_SPREAD_FLOWS;
use netsum_common::wire::ROCE_PORT;
use netsum_dataplane::pins::Pins;
use netsum_dataplane::spread::{FlowEndpoints, Spread, Uplink};
use netsum_lab::cluster::{Cluster, TIMEOUT};
use netsum_lab::frames::{FrameSpec, ipv4_checksum, lanes};
use netsum_lab::lab::BoxNode;
use netsum_lab::netns::output;
use netsum_lab::{Host, Lab, LabSpec};
use netsum_plan::flows::{Piece, spread};
use nix::sys::signal::Signal;
use serde_json::Value;

const SPINES: usize = 3;
/// Packets of a flow, and bytes in each packet.
const PACKETS: usize = 3000;
const LEN: usize = 1000;
/// Verdicts: pass to the next program, and redirect to an uplink (include/uapi/linux/bpf.h).
const UNSPEC: i32 = -1;
const REDIRECT: i32 = 7;

/// Two leaves with two hosts each, and a link from each leaf to each of three spines. All boxes
/// route. ECMP takes ports into account.
fn cluster() -> Cluster {
    let spec = LabSpec { racks: 2, routes: true, spines: SPINES, ipv6: true, ..LabSpec::hosts(4) };
    let cluster = Cluster::without_daemon(spec).unwrap();
    for rack in [0, 1] {
        let settings = [
            "ipv4/fib_multipath_hash_policy",
            "ipv6/fib_multipath_hash_policy",
            "ipv4/conf/all/ignore_routes_with_linkdown",
            "ipv6/conf/all/ignore_routes_with_linkdown",
        ];
        let set = |name: &str| std::fs::write(format!("/proc/sys/net/{name}"), "1").unwrap();
        cluster.lab().leaf(rack).enter(|| settings.iter().for_each(|name| set(name)));
    }
    cluster
}

/// Bytes that a leaf has sent through each uplink.
fn sent(leaf: &BoxNode) -> [u64; SPINES] {
    let links = output(leaf.command("ip").args(["-j", "-s", "link"])).unwrap();
    let links: serde_json::Value = serde_json::from_str(&links).unwrap();
    let of = |name: &str| {
        links.as_array().unwrap().iter().find(|l| l["ifname"] == name).unwrap().clone()
    };
    std::array::from_fn(|spine| {
        of(&BoxNode::uplink(spine))["stats64"]["tx"]["bytes"].as_u64().unwrap()
    })
}

fn ip(host: &Host, v6: bool) -> IpAddr {
    if v6 { host.ipv6(0) } else { host.ip(0) }
}

/// A flow from the first rack to the second.
struct Sender {
    socket: UdpSocket,
    to: SocketAddr,
    packets: usize,
}

fn sender(lab: &Lab, flow: usize, port: u16, packets: usize, v6: bool) -> (Sender, FlowEndpoints) {
    let (from, to) = (lab.host(flow / 2 % 2), lab.host(2 + flow % 2));
    let ends = FlowEndpoints { src: ip(from, v6), dst: ip(to, v6), src_port: port };
    let socket = from.enter(|| UdpSocket::bind((ends.src, port))).unwrap();
    (Sender { socket, to: SocketAddr::new(ends.dst, ROCE_PORT), packets }, ends)
}

/// Runs all senders at the same time. Returns the bytes that the first leaf has sent for them
/// through each uplink.
fn send(lab: &Lab, mut senders: Vec<Sender>) -> [u64; SPINES] {
    let receivers: Vec<UdpSocket> = [2, 3]
        .iter()
        .flat_map(|&h| [false, true].map(|v6| (lab.host(h), v6)))
        .map(|(h, v6)| h.enter(|| UdpSocket::bind((ip(h, v6), ROCE_PORT)).unwrap()))
        .collect();
    receivers.iter().for_each(|r| r.set_nonblocking(true).unwrap());
    let (before, mut received, mut total) = (sent(lab.leaf(0)), 0, 0);
    let mut buffer = [0; LEN];
    let mut arrived = || -> usize {
        let all = receivers.iter();
        all.map(|r| std::iter::from_fn(|| r.recv(&mut buffer).ok()).count()).sum()
    };
    let packet = [0; LEN];
    while senders.iter().any(|s| s.packets > 0) {
        for sender in senders.iter_mut().filter(|s| s.packets > 0) {
            sender.socket.send_to(&packet, sender.to).unwrap();
            sender.packets -= 1;
            total += 1;
        }
        if total % 16 == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        received += arrived();
    }
    let start = Instant::now();
    while received < total && start.elapsed() < TIMEOUT {
        std::thread::sleep(Duration::from_millis(1));
        received += arrived();
    }
    let after = sent(lab.leaf(0));
    assert_eq!(received, total, "packets were lost: {before:?}, {after:?}");
    std::array::from_fn(|spine| after[spine] - before[spine])
}

/// By how much the fullest uplink exceeds the mean.
fn excess(bytes: [u64; SPINES]) -> f64 {
    let mean = bytes.iter().sum::<u64>() as f64 / SPINES as f64;
    bytes.iter().max().copied().unwrap() as f64 / mean - 1.0
}

fn even(bytes: [u64; SPINES]) -> bool {
    let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
    most - least <= most / 100
}

/// The flows in pieces, each of which has its own port, from `first` on.
fn senders(lab: &Lab, first: u16, pieces: &[Piece], v6: bool) -> Vec<(Sender, FlowEndpoints)> {
    let all = (first..).zip(pieces);
    all.map(|(port, piece)| sender(lab, piece.flow, port, PACKETS / piece.of, v6)).collect()
}

fn pin(cluster: &Cluster, flow: &FlowEndpoints, uplink: usize) {
    let (src, port, dst) = (flow.src.to_string(), flow.src_port.to_string(), flow.dst.to_string());
    let command = ["spread", "pin", &src, &port, &dst, &BoxNode::uplink(uplink)];
    cluster.netsum_on(Some(0), &command).unwrap();
}

fn shown(cluster: &Cluster) -> Value {
    serde_json::from_str(&cluster.netsum_on(Some(0), &["-j", "spread", "show"]).unwrap()).unwrap()
}

/// The uplink of each flow, by port.
fn by_port(cluster: &Cluster) -> BTreeMap<u64, String> {
    let shown = shown(cluster);
    let flow =
        |f: &Value| (f["src_port"].as_u64().unwrap(), f["uplink"].as_str().unwrap().to_owned());
    shown["flows"].as_array().unwrap().iter().map(flow).collect()
}

/// Starts the first leaf's daemon, and waits until it spreads flows.
fn start(cluster: &mut Cluster) {
    cluster.start_box(Some(0)).unwrap();
    let start = Instant::now();
    while shown(cluster)["uplinks"].as_array().unwrap().iter().any(|uplink| uplink["up"] != true) {
        assert!(start.elapsed() < TIMEOUT, "{}", shown(cluster));
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(100));
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn four_flows_over_three_uplinks_that_carry_the_same() {
    let mut cluster = cluster();
    let pieces = spread(4, SPINES, 0);
    let hashed = |cluster: &Cluster, first| {
        [false, true].map(|v6| {
            let senders = senders(cluster.lab(), first, &pieces, v6);
            excess(send(cluster.lab(), senders.into_iter().map(|s| s.0).collect()))
        })
    };
    let mut by_hash: Vec<f64> = (0..5).flat_map(|n| hashed(&cluster, 0xd000 + 64 * n)).collect();
    by_hash.sort_by(f64::total_cmp);
    println!(
        "ECMP: the fullest uplink has {:.0} to {:.0} % more than the mean",
        100.0 * by_hash[0],
        100.0 * by_hash[9]
    );
    start(&mut cluster);
    for v6 in [false, true] {
        let senders = senders(cluster.lab(), 0xc000, &pieces, v6);
        senders
            .iter()
            .zip(&pieces)
            .for_each(|((_, ends), piece)| pin(&cluster, ends, piece.uplink));
        let bytes = send(cluster.lab(), senders.into_iter().map(|s| s.0).collect());
        println!("pinned, IPv6 {v6}: {bytes:?}, {:.3} %", 100.0 * excess(bytes));
        assert!(even(bytes), "{bytes:?}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn flows_that_nobody_has_pinned_go_by_the_uplink_with_the_least_bytes() {
    let mut cluster = cluster();
    start(&mut cluster);
    for v6 in [false, true] {
        let whole = spread(6, SPINES, 0);
        let all = senders(cluster.lab(), 0xc100, &whole, v6);
        let bytes = send(cluster.lab(), all.into_iter().map(|s| s.0).collect());
        println!("6 flows at once, IPv6 {v6}: {bytes:?}");
        assert!(even(bytes), "{bytes:?}");
    }
    // One more flow, and after it two more of the same length: each takes another uplink.
    let one = |port, packets| vec![sender(cluster.lab(), 0, port, packets, false).0];
    let first = send(cluster.lab(), one(0xc200, 2 * PACKETS));
    std::thread::sleep(Duration::from_millis(1200));
    let mut pair = one(0xc201, 2 * PACKETS);
    pair.extend(one(0xc202, 2 * PACKETS));
    let more = send(cluster.lab(), pair);
    let bytes: [u64; SPINES] = std::array::from_fn(|i| first[i] + more[i]);
    assert!(even(bytes), "{first:?}, {more:?}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_flows_of_a_spine_that_fails_move_and_the_rest_stay() {
    for (v6, lost) in [(false, 1), (true, 2)] {
        let mut cluster = cluster();
        start(&mut cluster);
        let flows = spread(6, SPINES, 0);
        let first = 0xc300 + 64 * u16::from(v6);
        let all = || senders(cluster.lab(), first, &flows, v6).into_iter().map(|s| s.0).collect();
        assert!(even(send(cluster.lab(), all())));
        let before = by_port(&cluster);
        let (name, spine) = (BoxNode::uplink(lost), cluster.lab().spine(lost));
        [0, 1].iter().for_each(|&rack| spine.set_link(&spine.rack_port(rack), false).unwrap());
        let (cut, is_up) = (Instant::now(), |uplink: &Value| uplink["up"] == true);
        while shown(&cluster)["uplinks"].as_array().unwrap().iter().all(is_up) {
            assert!(cut.elapsed() < TIMEOUT, "{}", shown(&cluster));
        }
        // Time for the other leaf's kernel to notice the lost carrier.
        std::thread::sleep(Duration::from_millis(300));
        let bytes = send(cluster.lab(), all());
        let after = by_port(&cluster);
        let stays = |port: &u64| before[port] != name;
        let mine = || {
            before.keys().filter(|&&port| (u64::from(first)..u64::from(first) + 6).contains(&port))
        };
        assert_eq!(mine().filter(|port| !stays(port)).count(), 2, "{before:?}");
        for port in mine() {
            let moved = before[port] != after[port];
            assert_eq!(moved, !stays(port), "{port}: {before:?}, {after:?}");
            assert_ne!(after[port], name);
        }
        // Each of the other uplinks carries one more flow: 6 over 2.
        println!("IPv6 {v6}, without {name}: {bytes:?}");
        let left: Vec<u64> = (0..SPINES).filter(|&n| n != lost).map(|n| bytes[n]).collect();
        assert!(bytes[lost] < 2000 && left[0].abs_diff(left[1]) <= left[0] / 100, "{bytes:?}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn flows_keep_their_uplinks_only_if_the_daemon_is_killed() {
    let mut cluster = cluster();
    cluster.pin();
    start(&mut cluster);
    let pieces = spread(3, SPINES, 0);
    let all = |cluster: &Cluster| {
        senders(cluster.lab(), 0xc400, &pieces, false).into_iter().map(|s| s.0).collect()
    };
    // Pinned to another uplink than the box would choose.
    let flows = senders(cluster.lab(), 0xc400, &pieces, false);
    flows.iter().for_each(|(_, ends)| pin(&cluster, ends, 2));
    drop(flows);
    let by_one = |bytes: [u64; SPINES]| bytes[0] < 2000 && bytes[1] < 2000 && bytes[2] > 9_000_000;
    let before = by_port(&cluster);
    cluster.kill_box(Some(0)).unwrap();
    let bytes = send(cluster.lab(), all(&cluster));
    assert!(by_one(bytes), "without a daemon: {bytes:?}");
    start(&mut cluster);
    assert_eq!(by_port(&cluster), before);
    let bytes = send(cluster.lab(), all(&cluster));
    assert!(by_one(bytes), "by the next one: {bytes:?}");
    let (pins, start) = (cluster.pins().join("leaf0"), Instant::now());
    assert!(pins.exists());
    cluster.signal_box(Some(0), Signal::SIGTERM).unwrap();
    while pins.exists() {
        assert!(start.elapsed() < TIMEOUT, "pins are left");
        std::thread::sleep(Duration::from_millis(20));
    }
    // The kernel's hash places these flows: not all on one uplink.
    std::thread::sleep(Duration::from_millis(200));
    let bytes = send(
        cluster.lab(),
        senders(cluster.lab(), 0xc400, &spread(12, SPINES, 0), false)
            .into_iter()
            .map(|s| s.0)
            .collect(),
    );
    assert!(bytes[0] > 2000 || bytes[1] > 2000, "{bytes:?}");
}

/// The program in the first leaf, with all uplinks, one packet at a time.
struct Bench<'a> {
    lab: &'a Lab,
    spread: Spread,
}

impl Bench<'_> {
    /// Returns the verdict, the packet afterwards, and the time of one run.
    fn run(&mut self, packet: &[u8], times: u32) -> (i32, Vec<u8>, Duration) {
        let mut out = vec![0; 4096];
        let options = TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut out),
            repeat: times,
            ..TestRunOptions::new()
        };
        let program = self.spread.program().unwrap();
        let result = self.lab.leaf(0).enter(|| program.test_run(options)).unwrap();
        out.truncate(result.data_size_out as usize);
        (result.return_value as i32, out, result.duration)
    }
}

fn bench(lab: &Lab) -> Bench<'_> {
    let leaf = lab.leaf(0);
    let mut spread = leaf.enter(|| Spread::load(None)).unwrap();
    let uplinks: Vec<Uplink> = (0..SPINES)
        .map(|n| Uplink { ifindex: leaf.ifindex(&BoxNode::uplink(n)).unwrap(), up: true })
        .collect();
    spread.set_uplinks(&uplinks, Instant::now()).unwrap();
    Bench { lab, spread }
}

/// A packet from host 0 to host 2, to the MAC address of the loopback interface, at which packets
/// of a test run arrive.
fn packet(v6: bool) -> FrameSpec {
    let spec = FrameSpec::send(1, 3, 0x77, 0, lanes(0, 256));
    let spec = FrameSpec { macs: ([0; 6], [2, 0, 0, 0, 0, 1]), ..spec };
    if v6 { spec.v6() } else { spec }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn packets_other_than_roce_for_an_uplink_are_left_to_the_kernel() {
    let cluster = cluster();
    let mut bench = bench(cluster.lab());
    for v6 in [false, true] {
        let good = packet(v6).build();
        let (verdict, out, _) = bench.run(&good, 1);
        assert_eq!(verdict, REDIRECT);
        let ttl = if v6 { 21 } else { 22 };
        assert_eq!((good[ttl], out[ttl]), (64, 63));
        if !v6 {
            let mut header = out[14..34].to_vec();
            header[10..12].fill(0);
            assert_eq!(out[24..26], ipv4_checksum(&header).to_be_bytes(), "the checksum");
        }
        let known = bench.spread.flows().unwrap().len();
        let changed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut frame = good.clone();
            frame[if v6 { 54 } else { 34 }] = 0xee;
            change(&mut frame);
            frame
        };
        let udp = if v6 { 54 } else { 34 };
        let mut others = vec![
            ("another port", changed(&|f| f[udp + 3] ^= 1)),
            ("TCP", changed(&|f| f[if v6 { 20 } else { 23 }] = 6)),
            ("an old TTL", changed(&|f| f[ttl] = 1)),
            ("not to us", changed(&|f| f[5] = 9)),
            ("a group", changed(&|f| f[0] = 1)),
            ("ARP", changed(&|f| f[12..14].copy_from_slice(&[8, 6]))),
            ("to a host at the same leaf", FrameSpec { dst: packet(v6).src, ..packet(v6) }.build()),
        ];
        if v6 {
            others.push(("a fragment", changed(&|f| f[20] = 44)));
            others.push(("nobody's address", changed(&|f| f[38] = 0x20)));
        } else {
            others.push(("options", changed(&|f| f[14] = 0x46)));
            others.push(("the first fragment", changed(&|f| f[20] |= 0x20)));
            others.push(("a later fragment", changed(&|f| f[21] = 1)));
            others.push(("nobody's address", changed(&|f| f[30] = 77)));
        }
        // A test run accepts only frames with a whole IP header.
        others.extend((udp..udp + 8).map(|len| ("a short one", good[..len].to_vec())));
        for (what, frame) in &others {
            let (verdict, out, _) = bench.run(frame, 1);
            assert_eq!((verdict, &out == frame), (UNSPEC, true), "{what}, {}", frame.len());
        }
        assert_eq!(bench.spread.flows().unwrap().len(), known, "none of them is a flow");
        let (mut seed, mut redirected) = (1u32, 0);
        for _ in 0..20_000 {
            let mut frame = good.clone();
            for _ in 0..2 {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                frame[seed as usize >> 8 & 63] ^= (seed >> 16) as u8;
            }
            let (verdict, out, _) = bench.run(&frame, 1);
            assert!(
                verdict == UNSPEC && out == frame || verdict == REDIRECT,
                "{verdict}: {frame:02x?}"
            );
            redirected += u32::from(verdict == REDIRECT);
        }
        println!("IPv6 {v6}: of 20000 spoilt packets {redirected} went up");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_full_table_leaves_new_flows_to_the_kernel() {
    let cluster = cluster();
    let mut bench = bench(cluster.lab());
    let ends = |n: u32| FlowEndpoints {
        src: Ipv4Addr::from(n).into(),
        dst: Ipv4Addr::BROADCAST.into(),
        src_port: 1,
    };
    let known = packet(false).build();
    assert_eq!(bench.run(&known, 1).0, REDIRECT);
    // Each repeated run decrements the TTL.
    let old = |v6| {
        let mut frame = packet(v6).build();
        frame[if v6 { 21 } else { 22 }] = 255;
        frame
    };
    let time_of = |bench: &mut Bench<'_>, v6| {
        let runs = (0..500).map(|_| bench.run(&old(v6), 250));
        let times: Vec<Duration> =
            runs.inspect(|run| assert_eq!(run.0, REDIRECT)).map(|run| run.2).collect();
        times.iter().sum::<Duration>() / times.len() as u32
    };
    let time = |bench: &mut Bench<'_>| time_of(bench, false);
    let empty = time(&mut bench);
    (1..MAX_SPREAD_FLOWS).for_each(|n| bench.spread.pin(ends(n), 0).unwrap());
    assert!(bench.spread.pin(ends(0), 0).is_err());
    assert_eq!(bench.run(&packet(true).build(), 1).0, UNSPEC, "no room");
    assert_eq!(bench.run(&known, 1).0, REDIRECT, "a flow that is known goes its way");
    let full = time(&mut bench);
    bench.spread.unpin(ends(1)).unwrap();
    assert_eq!(bench.run(&packet(true).build(), 1).0, REDIRECT, "room again");
    let others =
        bench.run(&FrameSpec { macs: ([9; 6], [2; 6]), ..packet(false) }.build(), 100_000).2;
    let v6 = time_of(&mut bench, true);
    println!(
        "a packet: {empty:?} with 1 flow, {full:?} with {MAX_SPREAD_FLOWS}; over IPv6 {v6:?}; not for \
         this machine {others:?}"
    );
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_pinned_flow_goes_back_to_its_uplink_when_that_is_back() {
    let cluster = cluster();
    let mut bench = bench(cluster.lab());
    let frame = packet(false).build();
    assert_eq!(bench.run(&frame, 1).0, REDIRECT);
    let leaf = cluster.lab().leaf(0);
    let uplinks = |up| -> Vec<Uplink> {
        let uplink = |n| Uplink {
            ifindex: leaf.ifindex(&BoxNode::uplink(n)).unwrap(),
            up: up || n != SPINES - 1,
        };
        (0..SPINES).map(uplink).collect()
    };
    let key = bench.spread.flows().unwrap()[0].0;
    bench.spread.pin(FlowEndpoints::from(key), SPINES as u32 - 1).unwrap();
    for (up, is_there) in [(true, true), (false, false), (true, true)] {
        bench.spread.set_uplinks(&uplinks(up), Instant::now()).unwrap();
        assert_eq!(bench.run(&frame, 1).0, REDIRECT);
        let flow = bench.spread.flows().unwrap()[0].1;
        assert_eq!(flow.uplink == SPINES as u32 - 1, is_there, "{flow:?}");
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn flows_keep_uplinks_if_the_next_daemon_reorders_them() {
    let cluster = cluster();
    let folder = tempfile::tempdir().unwrap();
    let pins = Pins::hold(&cluster.pins(), &folder.path().join("lock")).unwrap().unwrap();
    let flow =
        |src_port| FlowEndpoints { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), src_port };
    let uplink = |ifindex| Uplink { ifindex, up: false };
    let mut spread = Spread::load(Some(&pins)).unwrap();
    spread.set_uplinks(&[uplink(7), uplink(8)], Instant::now()).unwrap();
    spread.pin(flow(1), 0).unwrap();
    spread.pin(flow(2), 1).unwrap();
    drop(spread);
    let mut spread = Spread::load(Some(&pins)).unwrap();
    spread.set_uplinks(&[uplink(8), uplink(9)], Instant::now()).unwrap();
    let left: Vec<_> = spread.flows().unwrap();
    drop(spread);
    pins.remove().unwrap();
    assert_eq!(left.len(), 1, "the flow by 7 is forgotten: {left:?}");
    assert_eq!(
        (FlowEndpoints::from(left[0].0), left[0].1.uplink, left[0].1.given),
        (flow(2), 0, 1)
    );
}
