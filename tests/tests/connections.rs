//! Reliable connections through the data plane: an application that knows nothing of netsum but its flows, a ring of RC
//! queue pairs with a window, over the library's endpoint.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use netsum_aggregator::dataplane::bpf::{BpfDataPlane, LoadOptions};
use netsum_aggregator::dataplane::{DataPlane, FlowSpec, RingSpec, XdpMode, count};
use netsum_common::abi;
use netsum_common::counters::Counter;
use netsum_lab::faults::Faults;
use netsum_lab::frames::{lanes, sum};
use netsum_lab::{Host, Lab, LabSpec};
use netsum_worker::rc::{Endpoint, EndpointConfig, Event, QpConfig, Stats};
use netsum_worker::udp::UdpDriver;

const FIRST_PSN: u32 = 0xff_ff00;

#[derive(Clone, Copy)]
struct Load {
    ranks: u32,
    mtu: u32,
    messages: u32,
    message_size: u32,
    window: u32,
    loss: f64,
}

/// Receive queue pair of a rank.
fn qpn(rank: u32) -> u32 {
    0x200 + rank
}

/// Runs a load; the endpoints' and the ring's counters.
fn run(load: Load) -> (Vec<Stats>, Vec<u64>, Duration) {
    let lab = Lab::new(LabSpec { mtu: 2300, cables: load.loss > 0.0, ..LabSpec::hosts(load.ranks as usize) })
        .unwrap();
    let fragments = load.message_size.div_ceil(load.mtu);
    let ring = RingSpec {
        id: 1,
        ranks: load.ranks,
        slots: abi::ring_slots(load.window, fragments).unwrap(),
        window: load.window * fragments,
        mtu: load.mtu,
        cpu: 0,
        verify_icrc: true,
        in_order: true,
        in_band: false,
    };
    let ports: Vec<u32> =
        lab.hosts().iter().map(|h| lab.box_().ifindex(&lab.box_().port(h.number())).unwrap()).collect();
    let plane = lab.box_().enter(|| {
        let mut plane = BpfDataPlane::load(&LoadOptions { cpus: vec![1], cpu_queue: 4096 }).unwrap();
        ports.iter().for_each(|&p| plane.attach(p, XdpMode::Native).unwrap());
        plane.create_ring(&ring).unwrap();
        for rank in 0..load.ranks {
            let next = (rank + 1) % load.ranks;
            plane
                .add_flow(&FlowSpec {
                    ring: 1,
                    rank,
                    base_psn: FIRST_PSN + rank,
                    ifindex: ports[rank as usize],
                    src: lab.host(rank as usize).ip(0),
                    dst: lab.host(next as usize).ip(0),
                    qpn: qpn(next),
                    src_mac: None,
                })
                .unwrap();
        }
        plane.activate_ring(&ring, &ports).unwrap();
        plane
    });
    if load.loss > 0.0 {
        for host in lab.hosts() {
            let seed = host.number() as u32 + 1;
            host.set_faults(Faults::loss(load.loss), Faults::loss(load.loss), seed).unwrap();
        }
    }
    let ips: Vec<IpAddr> = lab.hosts().iter().map(|h| h.ip(0)).collect();
    let start = Instant::now();
    let stats = std::thread::scope(|s| {
        let ranks: Vec<_> = lab
            .hosts()
            .iter()
            .map(|host| {
                let ips = &ips;
                s.spawn(move || rank(host, ips, load))
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    (stats, plane.counters(1).unwrap(), start.elapsed())
}

fn payload(rank: u32, message: u32, load: Load) -> Vec<u8> {
    lanes(rank * 100_003 + message, load.message_size as usize / 4)
}

fn rank(host: &Host, ips: &[IpAddr], load: Load) -> Stats {
    let me = host.number() as u32;
    let (next, previous) = ((me + 1) % load.ranks, (me + load.ranks - 1) % load.ranks);
    let mut driver = host.enter(|| UdpDriver::bind(ips[me as usize]).unwrap());
    let mut endpoint = Endpoint::new(ips[me as usize], EndpointConfig::default());
    let mtu = load.mtu as usize;
    let mut out = QpConfig::new(0x300 + me, ips[next as usize], qpn(next), FIRST_PSN + me, 0, mtu);
    out.retry_limit = None;
    out.ack_timeout = Duration::from_millis(if load.loss > 0.0 { 50 } else { 1000 });
    let out = endpoint.add_qp(out).unwrap();
    let into = QpConfig::new(qpn(me), ips[previous as usize], 0x300 + previous, 0, FIRST_PSN + previous, mtu);
    let into = endpoint.add_qp(into).unwrap();
    (0..load.window * 2).for_each(|_| endpoint.post_receive(into, Vec::new()));
    let (mut sent, mut received, mut acknowledged) = (0, 0, 0);
    let deadline = Instant::now() + Duration::from_secs(60);
    // Stays a little after the last sum: the neighbour may need an acknowledgement again.
    let mut quiet = None;
    loop {
        while sent < load.messages && sent < received + load.window {
            endpoint.post_send(out, sent as u64, payload(me, sent, load), None);
            sent += 1;
        }
        let wait = Duration::from_millis(10);
        driver.drive(&mut endpoint, Instant::now() + wait).unwrap();
        while let Some(event) = endpoint.poll_event() {
            match event {
                Event::Received { data, .. } => {
                    let all: Vec<_> = (0..load.ranks).map(|r| payload(r, received, load)).collect();
                    assert!(data == sum(&all), "rank {me}, message {received}: not the sum");
                    received += 1;
                    endpoint.post_receive(into, data);
                }
                Event::Sent { .. } => acknowledged += 1,
                Event::Failed { error, .. } => panic!("rank {me}: {error}"),
            }
        }
        assert!(
            Instant::now() < deadline,
            "rank {me}: {sent} sent, {acknowledged} acknowledged, {received} received; {:?}",
            endpoint.stats()
        );
        if (received, acknowledged) == (load.messages, load.messages) {
            let since = *quiet.get_or_insert_with(Instant::now);
            if since.elapsed() > Duration::from_millis(if load.loss > 0.0 { 500 } else { 50 }) {
                return *endpoint.stats();
            }
        }
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_ring_of_connections_is_summed_without_a_retransmission() {
    for (ranks, mtu) in [(2, 1024), (3, 256), (4, 2048), (4, 1024)] {
        let load = Load { ranks, mtu, messages: 200, message_size: 65_536, window: 2, loss: 0.0 };
        let (stats, counters, time) = run(load);
        let bytes = load.messages as f64 * load.message_size as f64;
        println!("{ranks} ranks, path MTU {mtu}: {:.2} Gb/s", bytes * 8e-9 / time.as_secs_f64());
        for (rank, s) in stats.iter().enumerate() {
            assert_eq!((s.retransmissions, s.out_of_sequence, s.naks_sent), (0, 0, 0), "rank {rank}: {s:?}");
            assert_eq!((s.rx_icrc_encapsulated, s.discarded), (0, 0), "rank {rank}: {s:?}");
        }
        let fragments = (load.messages * load.message_size / mtu) as u64;
        assert_eq!(count(&counters, Counter::Released), fragments);
        assert_eq!(count(&counters, Counter::Fragments), fragments * ranks as u64);
        assert_eq!(count(&counters, Counter::Replays) + count(&counters, Counter::Duplicate), 0);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_ring_of_connections_survives_loss_both_ways() {
    let load = Load { ranks: 3, mtu: 1024, messages: 100, message_size: 65_536, window: 2, loss: 0.01 };
    let (stats, counters, time) = run(load);
    let sent: u64 = stats.iter().map(|s| s.sent_packets).sum();
    let again: u64 = stats.iter().map(|s| s.retransmissions).sum();
    println!("1% loss: {again} of {sent} packets sent again, {time:?}");
    assert!(again > 0, "the cables lost nothing");
    assert_eq!(count(&counters, Counter::Released), (load.messages * load.message_size / load.mtu) as u64);
}
