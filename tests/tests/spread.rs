//! Flows that are not summed, spread over the uplinks of boxes that route.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use netsum_common::wire::ROCE_PORT;
use netsum_dataplane::spread::{Ends, Spread, Uplink};
use netsum_lab::lab::BoxNode;
use netsum_lab::netns::{Netns, output};
use netsum_lab::{Host, Lab, LabSpec};
use netsum_plan::flows::{Piece, spread};

const SPINES: usize = 3;
/// Packets of a flow, and bytes in each.
const PACKETS: usize = 3000;
const LEN: usize = 1000;

/// Two leaves with two hosts each, and a link from either to each of three spines. All route.
fn lab() -> Lab {
    let spec = LabSpec { racks: 2, routes: true, spines: SPINES, ipv6: true, ..LabSpec::hosts(4) };
    let lab = Lab::new(spec).unwrap();
    for rack in [0, 1] {
        let files = ["ipv4/fib_multipath_hash_policy", "ipv6/fib_multipath_hash_policy"];
        lab.leaf(rack).enter(|| files.map(|f| std::fs::write(format!("/proc/sys/net/{f}"), "1").unwrap()));
    }
    lab
}

/// What a leaf has sent by each uplink.
fn sent(leaf: &BoxNode) -> [u64; SPINES] {
    let links = output(leaf.command("ip").args(["-j", "-s", "link"])).unwrap();
    let links: serde_json::Value = serde_json::from_str(&links).unwrap();
    let of = |name: &str| links.as_array().unwrap().iter().find(|l| l["ifname"] == name).unwrap().clone();
    std::array::from_fn(|spine| of(&BoxNode::uplink(spine))["stats64"]["tx"]["bytes"].as_u64().unwrap())
}

fn ip(host: &Host, v6: bool) -> IpAddr {
    if v6 { host.ipv6(0) } else { host.ip(0) }
}

/// A flow from the first rack to the second one.
struct Sender {
    socket: UdpSocket,
    to: SocketAddr,
    packets: usize,
}

fn sender(lab: &Lab, flow: usize, port: u16, packets: usize, v6: bool) -> (Sender, Ends) {
    let (from, to) = (lab.host(flow / 2 % 2), lab.host(2 + flow % 2));
    let ends = Ends { src: ip(from, v6), dst: ip(to, v6), src_port: port };
    let socket = from.enter(|| UdpSocket::bind((ends.src, port))).unwrap();
    (Sender { socket, to: SocketAddr::new(ends.dst, ROCE_PORT), packets }, ends)
}

/// Sends all of them at the same time; what the first leaf has sent of it by each uplink.
fn send(lab: &Lab, mut senders: Vec<Sender>) -> [u64; SPINES] {
    let receivers: Vec<UdpSocket> = [2, 3]
        .iter()
        .flat_map(|&h| [false, true].map(|v6| (lab.host(h), v6)))
        .map(|(h, v6)| h.enter(|| UdpSocket::bind((ip(h, v6), ROCE_PORT)).unwrap()))
        .collect();
    receivers.iter().for_each(|r| r.set_nonblocking(true).unwrap());
    let (before, mut received, mut total) = (sent(lab.leaf(0)), 0, 0);
    let mut buffer = [0; LEN];
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
        received += receivers.iter().map(|r| std::iter::from_fn(|| r.recv(&mut buffer).ok()).count()).sum::<usize>();
    }
    std::thread::sleep(Duration::from_millis(50));
    received += receivers.iter().map(|r| std::iter::from_fn(|| r.recv(&mut buffer).ok()).count()).sum::<usize>();
    let after = sent(lab.leaf(0));
    assert_eq!(received, total, "packets were lost: {before:?}, {after:?}");
    std::array::from_fn(|spine| after[spine] - before[spine])
}

/// How much more the fullest uplink carries than the mean one.
fn excess(bytes: [u64; SPINES]) -> f64 {
    let mean = bytes.iter().sum::<u64>() as f64 / SPINES as f64;
    bytes.iter().max().copied().unwrap() as f64 / mean - 1.0
}

fn even(bytes: [u64; SPINES]) -> bool {
    let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
    most - least <= most / 100
}

fn uplinks(leaf: &Netns) -> Vec<Uplink> {
    (0..SPINES).map(|s| Uplink { ifindex: leaf.ifindex(&BoxNode::uplink(s)).unwrap(), up: true }).collect()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn thin() {
    let lab = lab();
    for v6 in [true, false] {
        let pieces = spread(4, SPINES, 0);
        let senders = |lab: &Lab, base: u16| -> Vec<(Sender, Ends, Piece)> {
            pieces.iter().enumerate().map(|(x, piece)| {
                let (s, e) = sender(lab, piece.flow, base | x as u16, PACKETS / piece.of, v6);
                (s, e, *piece)
            }).collect()
        };
        for try_ in 0..3u16 {
            let hashed = send(&lab, senders(&lab, 0xd000 + try_ * 64).into_iter().map(|s| s.0).collect());
            println!("v6 {v6}: ECMP {hashed:?} {:.1} %", 100.0 * excess(hashed));
        }
        let leaf = lab.leaf(0);
        let mut plane = leaf.enter(|| Spread::load(None)).unwrap();
        plane.set_uplinks(&uplinks(leaf), Instant::now()).unwrap();
        let door = leaf.ifindex("br0").unwrap();
        leaf.enter(|| plane.set_doors(&HashSet::from([door]))).unwrap();
        let mut all = Vec::new();
        for (s, e, p) in senders(&lab, 0xc000) {
            plane.give(e, p.uplink as u32).unwrap();
            all.push(s);
        }
        let bytes = send(&lab, all);
        println!("v6 {v6}: given {bytes:?} {:.3} %", 100.0 * excess(bytes));
        println!("{:?}\n{:?}", plane.flows().unwrap(), plane.uplinks().unwrap()[..4].to_vec());
        assert!(even(bytes));
    }
}
