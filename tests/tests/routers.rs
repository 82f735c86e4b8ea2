//! Ranks behind a router: their packets have the router's MAC address, and so have the results for
//! them.

use std::time::Duration;

use netsum_common::wire;
use netsum_lab::attacker::arp_claim;
use netsum_lab::cluster::{Cluster, JobSpec, Outcome, RankHost};
use netsum_lab::faults::Faults;
use netsum_lab::frames::{FrameSpec, lanes};
use netsum_lab::tap::Tap;
use netsum_lab::udp_ring::{self, Home, Load};
use netsum_lab::{Host, LabSpec};

const SECOND: Duration = Duration::from_secs(1);
/// Host 0 is the router. Hosts 1 and 2 are at the bridge like the router, host 3 is a foreign host
/// there, and hosts 4 and 5 are behind the router.
const FOREIGN: usize = 3;
const PLACES: [RankHost; 4] = [(4, 0), (1, 0), (5, 0), (2, 0)];
const ROUTER: &str = "02:00:00:00:00:01";

fn cluster(faulty_links: bool) -> Cluster {
    let spec = LabSpec { mtu: 2300, ipv6: true, routed: 2, faulty_links, ..LabSpec::hosts(4) };
    Cluster::start(spec).unwrap()
}

fn assert_box(outcomes: &[Outcome], what: &str) {
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.mode, "box", "{what}, rank {rank}: {outcome:?}");
        assert_eq!((outcome.wrong, outcome.fallbacks), (0, 0), "{what}, rank {rank}: {outcome:?}");
    }
}

/// MAC addresses and TTL of the results that a host receives meanwhile.
fn results(
    host: &Host,
    expected: usize,
    work: impl FnOnce() + Send,
) -> Vec<([u8; 6], [u8; 6], u8)> {
    let tap = Tap::open(host, Host::INTERFACE).unwrap();
    std::thread::scope(|s| {
        let work = s.spawn(work);
        let mut seen = Vec::new();
        while seen.len() < expected {
            let is_data = |f: &[u8]| wire::parse(f).is_ok_and(|f| f.bth.opcode.is_rc_data());
            let frame = tap.receive(30 * SECOND, is_data).unwrap();
            let parsed = wire::parse(&frame[..]).unwrap();
            let ttl = frame[parsed.ip + if parsed.l3 == wire::L3::V4 { 8 } else { 7 }];
            seen.push((frame[..6].try_into().unwrap(), parsed.src_mac, ttl));
        }
        work.join().unwrap();
        seen
    })
}

fn mac(host: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, host + 1]
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn two_hosts_behind_one_router_join_a_job() {
    for v6 in [false, true] {
        let cluster = cluster(false);
        let lab = cluster.lab();
        let job = JobSpec { mtu: 2048, ..JobSpec::new("routed", 4) };
        let token = cluster.create_job(&job).unwrap();
        let group = if v6 {
            cluster.ranks_v6(&job, &token, &PLACES)
        } else {
            cluster.ranks(&job, &token, &PLACES)
        };
        let mut group = group.unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.daemon_log()));
        for dtype in ["i32", "f32"] {
            assert_box(&group.all_reduce(dtype, 200_000, 4).unwrap(), dtype);
        }
        // The box knows the ranks behind the router by the router's address, and the others by
        // their own.
        let flows = cluster.netsum_json(&["flow", "list", "routed"]).unwrap();
        let flows: Vec<_> = flows.as_array().unwrap().iter().collect();
        let bound: Vec<_> = flows
            .iter()
            .map(|f| (f["port"].as_str().unwrap(), f["src_mac"].as_str().unwrap()))
            .collect();
        let own = |host: usize| lab.host(host).mac();
        let expected =
            [("port0", ROUTER), ("port1", &*own(1)), ("port0", ROUTER), ("port2", &*own(2))];
        assert_eq!(bound, expected);

        // The results as the hosts receive them. Rank 1's have the headers of rank 0, routed once.
        // Rank 2's have those of rank 1, into which the router behind the box puts its own address.
        let mut order = || assert_box(&group.all_reduce("i32", 50_000, 5).unwrap(), "watched");
        let at_the_bridge = results(lab.host(1), 50, &mut order);
        assert!(
            at_the_bridge.iter().all(|seen| *seen == (mac(1), mac(0), 63)),
            "{at_the_bridge:?}"
        );
        let behind = results(lab.host(5), 50, &mut order);
        assert!(behind.iter().all(|(to, _, ttl)| (*to, *ttl) == (mac(5), 63)), "{behind:?}");
        assert!(behind.iter().all(|(_, from, _)| *from != mac(1)), "{behind:?}");
    }
}

/// The address is protected even while there is no job, because ranks will call through it.
#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn the_gateway_of_a_box_that_routes_is_kept_for_its_port() {
    let mut cluster = Cluster::without_daemon(LabSpec { routed: 2, ..LabSpec::hosts(4) }).unwrap();
    let forward = || std::fs::write("/proc/sys/net/ipv4/ip_forward", "1");
    cluster.lab().box_().enter(forward).unwrap();
    cluster.start_daemon().unwrap();
    let [foreign, router] = [FOREIGN, 0].map(|host| cluster.lab().host(host));
    let target = Tap::open(cluster.lab().host(1), Host::INTERFACE).unwrap();
    let [theirs, own] = [foreign, router]
        .map(|host| (Tap::open(host, Host::INTERFACE).unwrap(), arp_claim([10, 0, 0, 1], host)));
    let arrives = |(tap, claim): &(Tap, Vec<u8>), psn| {
        tap.send(claim).unwrap();
        let mut last = FrameSpec::send(FOREIGN as u8 + 1, 1, 0x77, psn, lanes(1, 64)).build();
        last[..6].fill(0xff);
        theirs.0.send(&last).unwrap();
        let seen = target.receive(5 * SECOND, |f| f == claim || f == last).unwrap();
        seen == *claim
    };
    let start = std::time::Instant::now();
    let mut psn = 0;
    while arrives(&theirs, psn) {
        assert!(start.elapsed() < 30 * SECOND, "the gateway's address is taken over");
        psn += 1;
    }
    own.0.send(&own.1).unwrap();
    target.receive(5 * SECOND, |f| f == own.1).expect("the gateway's own claim passes");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn routed_ranks_with_loss_both_ways() {
    let cluster = cluster(true);
    for host in cluster.lab().hosts().iter().take(3) {
        host.set_faults(Faults::loss(0.01), Faults::loss(0.01), host.number() as u32).unwrap();
    }
    let job = JobSpec::new("routed", 4);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &PLACES).unwrap();
    for dtype in ["i32", "f32"] {
        assert_box(&group.all_reduce(dtype, 200_000, 6).unwrap(), dtype);
    }
    let lost = cluster.lab().host(0).fault_link().unwrap().counts().unwrap();
    assert!(lost.up.lost > 0 && lost.down.lost > 0, "{lost:?}");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn flows_by_hand_take_the_routers_address_given_or_learned() {
    for given in [false, true] {
        let cluster = cluster(false);
        let lab = cluster.lab();
        let load = Load { messages: 30, ..Load::new(4) };
        let job = JobSpec {
            message_size: load.message_size,
            window: load.window,
            ..JobSpec::new("by-hand", 4)
        };
        cluster.create_job(&job).unwrap();
        let homes: Vec<Home<'_>> = PLACES
            .iter()
            .map(|&(host, k)| -> Home<'_> { (lab.host(host), lab.host(host).ip(k)) })
            .collect();
        for rank in 0..4 {
            let (host, next) = (PLACES[rank].0, (rank + 1) % 4);
            let port = lab.box_().port(if host > 3 { 0 } else { host });
            let mut flow = load.flow(0, rank as u32, 0, homes[rank].1, homes[next].1);
            flow.src_mac = given.then(|| if host > 3 { mac(0) } else { mac(host as u8) });
            cluster.add_flow("by-hand", &flow, &port).unwrap();
        }
        let stats = udp_ring::run(load, &homes).unwrap();
        assert!(stats.iter().all(|s| s.rx_icrc_encapsulated + s.discarded == 0), "{stats:?}");
        assert_eq!(cluster.counter(Some("by-hand"), "released").unwrap(), load.fragments());
        let flows = cluster.netsum_json(&["flow", "list", "by-hand"]).unwrap();
        assert_eq!(flows[0]["src_mac"], ROUTER);
        assert_eq!(flows[2]["src_mac"], ROUTER);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn addresses_of_routers_and_hosts_are_bound_to_ports() {
    let cluster = cluster(false);
    let lab = cluster.lab();
    let job = JobSpec::new("routed", 4);
    let token = cluster.create_job(&job).unwrap();
    let mut group = cluster.ranks(&job, &token, &PLACES).unwrap();
    let flows = cluster.netsum_json(&["flow", "list", "routed"]).unwrap();
    let qpn = |rank: usize| flows[rank]["qpn"].as_u64().unwrap() as u32;
    let count = |name: &str| cluster.counter(None, name).unwrap();
    // A frame from host `from` of a network to host 1, on rank 0's connection.
    let forged = |net: u8, from: u8, source: [u8; 6]| {
        let spec = FrameSpec::send(from + 1, 2, qpn(0), 0, lanes(9, 256));
        FrameSpec { macs: (mac(1), source), src: vec![10, net, 0, from + 1], ..spec }
    };
    let foreign = Tap::open(lab.host(FOREIGN), Host::INTERFACE).unwrap();
    let send = |tap: &Tap, spec: FrameSpec| tap.send(&spec.build()).unwrap();
    let grows = |counter: &str, what: &str, send: &mut dyn FnMut()| {
        let before = count(counter);
        send();
        let start = std::time::Instant::now();
        while count(counter) == before {
            assert!(start.elapsed() < 5 * SECOND, "{what}: {counter} does not grow");
        }
    };
    // At another port: the router's MAC address, and the address of a rank behind it, on a
    // connection that is not registered.
    let other = |spec: FrameSpec| {
        let bth = wire::Bth { qpn: 0x77, ..spec.bth };
        FrameSpec { bth, ..spec }
    };
    grows("spoofed", "MAC", &mut || send(&foreign, other(forged(0, FOREIGN as u8, mac(0)))));
    grows("spoofed", "IP", &mut || send(&foreign, other(forged(100, 4, mac(FOREIGN as u8)))));
    grows("wrong_port", "data", &mut || send(&foreign, forged(100, 4, mac(0))));
    // Behind the router, or at the router itself: another source address than the rank's, or a MAC
    // address other than the router's.
    let router = Tap::open(lab.host(0), Host::INTERFACE).unwrap();
    grows("wrong_source_ip", "a neighbour", &mut || send(&router, forged(100, 9, mac(0))));
    grows("wrong_source_mac", "past the router", &mut || send(&router, forged(100, 4, mac(8))));
    assert_box(&group.all_reduce("i32", 100_000, 7).unwrap(), "afterwards");
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_rank_behind_an_unknown_router_is_refused() {
    let spec = LabSpec { routed: 1, ips_per_host: 2, ..LabSpec::hosts(2) };
    let cluster = Cluster::start(spec).unwrap();
    let job = JobSpec { connect_timeout: 3 * SECOND, ..JobSpec::new("lost", 2) };
    let token = cluster.create_job(&job).unwrap();
    let routes = |lines: &[&str]| {
        for line in lines {
            let mut ip = cluster.lab().box_().command("ip");
            netsum_lab::netns::output(ip.arg("route").args(line.split(' '))).unwrap();
        }
    };
    // The daemon receives the call from the host's first address, but the rank is at its second
    // one.
    let refused = |expected: &str| {
        let error = cluster.ranks(&job, &token, &[(2, 1), (1, 0)]).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("missing: 0"), "{error}");
    };
    let of =
        "rank 0: the bridge has not seen MAC address 02:00:00:00:00:03 of 10.100.1.3 on any port";
    routes(&["del 10.100.0.0/16", "add 10.100.0.0/24 via 10.0.0.1"]);
    refused(&format!("{of}; a rank behind a router is found by the box's route to it"));
    routes(&["add 10.100.1.0/24 via 10.0.0.77"]);
    refused(&format!("{of}, nor that of 10.0.0.77, the box's router on the way there"));
    routes(&["change 10.100.1.0/24 via 10.0.0.1"]);
    let mut group = cluster.ranks(&job, &token, &[(2, 1), (1, 0)]).unwrap();
    assert_box(&group.all_reduce("i32", 10_000, 1).unwrap(), "found");
}
