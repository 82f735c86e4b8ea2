//! IPv6 only, and the addresses that kernels assign by themselves.

use std::net::{IpAddr, Ipv6Addr, UdpSocket};
use std::time::Duration;

use netsum_common::wire;
use netsum_lab::cluster::{Cluster, JobSpec, TIMEOUT, one_on_each_host};
use netsum_lab::frames::{FrameSpec, lanes, sum};
use netsum_lab::netns::{Netns, output};
use netsum_lab::tap::Tap;
use netsum_lab::udp_ring::{self, Load};
use netsum_lab::{Host, Lab, LabSpec};

const RANKS: u32 = 3;

fn without_ipv4(netns: &Netns, interface: &str) {
    output(netns.command("ip").args(["-4", "address", "flush", "dev", interface])).unwrap();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_network_without_ipv4() {
    let spec = LabSpec { mtu: 2300, ipv6: true, ..LabSpec::hosts(RANKS as usize) };
    let mut cluster = Cluster::without_daemon(spec).unwrap();
    without_ipv4(cluster.lab().box_(), "br0");
    cluster.lab().hosts().iter().for_each(|host| without_ipv4(host, Host::INTERFACE));
    cluster.listen_over_ipv6();
    cluster.start_daemon().unwrap();
    let job = JobSpec { mtu: 2048, ..JobSpec::new("six", RANKS) };
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks_v6(&job, &token, &one_on_each_host(RANKS)).unwrap();
    for dtype in ["i32", "f32"] {
        for outcome in group.all_reduce(dtype, 100_000, 6).unwrap() {
            assert_eq!(
                (&*outcome.mode, outcome.wrong, outcome.fallbacks),
                ("box", 0, 0),
                "{outcome:?}"
            );
        }
    }
    let flows = cluster.netsum_json(&["flow", "list", "six"]).unwrap();
    assert_eq!((&flows[0]["src"], &flows[0]["dst"]), (&"fd00::1".into(), &"fd00::2".into()));
}

/// A host whose kernel prefers temporary addresses, and which has just been given an address.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_takes_an_address_that_stays_and_waits_until_it_may() {
    let lab = Lab::new(LabSpec { ipv6: true, ..LabSpec::hosts(1) }).unwrap();
    let host = lab.host(0);
    let ip = |line: &str| output(host.command("ip").args(line.split(' '))).unwrap();
    let set = |name: &str, value: u32| {
        output(host.command("sysctl").arg("-qw").arg(format!("net.ipv6.conf.eth0.{name}={value}")))
            .unwrap();
    };
    ip("-6 address flush dev eth0 scope global");
    set("use_tempaddr", 2);
    set("accept_dad", 1);
    set("dad_transmits", 1);
    ip("address add fd00:7::1/64 dev eth0 mngtmpaddr");
    assert!(ip("-6 address show dev eth0").contains("temporary"), "the kernel has made none");
    let stays: IpAddr = "fd00:7::1".parse().unwrap();
    let chosen = || host.enter(|| netsum_worker::addresses::towards("[fd00:7::2]:9").unwrap());
    assert_eq!(chosen(), stays);
    // The same when the kernel has also checked the temporary address.
    let until = std::time::Instant::now() + TIMEOUT;
    while !ip("-6 address show dev eth0 tentative").is_empty() {
        assert!(std::time::Instant::now() < until, "{}", ip("-6 address show dev eth0"));
    }
    let usual = host.enter(|| {
        let socket = UdpSocket::bind("[::]:0").unwrap();
        socket.connect("[fd00:7::2]:9").unwrap();
        socket.local_addr().unwrap().ip()
    });
    assert_ne!(usual, stays, "the kernel does not prefer the temporary one");
    assert_eq!(chosen(), stays);
    assert_eq!(host.enter(netsum_worker::addresses::reachable).last(), Some(&stays));
    // An address that is still tentative cannot be bound.
    ip("address add fd00:7::9/64 dev eth0");
    assert!(ip("-6 address show dev eth0").contains("tentative"), "the kernel checks nothing");
    host.enter(|| netsum_worker::udp::UdpDriver::bind("fd00:7::9".parse().unwrap())).unwrap();
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn link_local_addresses_are_summed_like_others() {
    // The GID 0 of a kernel. netsum's own ranks do not use it.
    let cluster = Cluster::start(LabSpec { ipv6: true, ..LabSpec::hosts(RANKS as usize) }).unwrap();
    let lab = cluster.lab();
    let load = Load { message_size: 1024, window: 8, ..Load::new(RANKS) };
    let job = JobSpec { message_size: 1024, ..JobSpec::new("local", RANKS) };
    cluster.create_job(&job).unwrap();
    // The address follows from the MAC address (RFC 4291, appendix A).
    let gid = |rank: u32| Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, rank as u16 + 1);
    let next = |rank: u32| (rank + 1) % RANKS;
    for rank in 0..RANKS {
        let flow = load.flow(0, rank, 0, IpAddr::V6(gid(rank)), IpAddr::V6(gid(next(rank))));
        cluster.add_flow("local", &flow, &lab.box_().port(rank as usize)).unwrap();
    }
    let taps: Vec<Tap> =
        lab.hosts().iter().map(|h| Tap::open(h, Host::INTERFACE).unwrap()).collect();
    let fragment = |rank: u32, index: u32| {
        let qpn = udp_ring::receive_qpn(next(rank));
        let psn = (load.psn(rank) + index) & 0xff_ffff;
        let spec = FrameSpec::send(
            rank as u8 + 1,
            next(rank) as u8 + 1,
            qpn,
            psn,
            lanes(rank + index, 256),
        )
        .v6();
        let (src, dst) = (gid(rank).octets().to_vec(), gid(next(rank)).octets().to_vec());
        FrameSpec { src, dst, ..spec }
    };
    for index in 0..300 {
        (0..RANKS)
            .for_each(|rank| taps[rank as usize].send(&fragment(rank, index).build()).unwrap());
        let all: Vec<_> = (0..RANKS).map(|rank| fragment(rank, index).payload).collect();
        for rank in 0..RANKS {
            let got = taps[rank as usize]
                .receive(Duration::from_secs(5), |f| wire::parse(f).is_ok())
                .unwrap();
            let source = fragment((rank + RANKS - 1) % RANKS, index);
            let expected = FrameSpec { payload: sum(&all), ..source };
            assert_eq!(got, expected.build_result(), "index {index}, rank {rank}");
        }
    }
    // netsum's own ranks refuse it, and report what they need.
    let peers = (0..2).map(|rank| IpAddr::V6(gid(rank))).collect();
    let bootstrap = netsum_worker::Bootstrap::Static {
        peers,
        mtu: 1024,
        message_size: 4096,
        window: 2,
        rings: 1,
    };
    let config = netsum_worker::CommConfig::new(0, 2, IpAddr::V6(gid(0)), bootstrap);
    let error = netsum_worker::Communicator::connect(config).unwrap_err().to_string();
    assert!(error.contains("link-local address: use a global or unique local one"), "{error}");
}
