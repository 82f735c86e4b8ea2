//! The data plane on the ports of a real bridge. The tests send and receive frames at the hosts.

use std::time::Duration;

use netsum_common::abi::RingNumber;
use netsum_common::counters::Counter;
use netsum_common::wire::{self, L3};
use netsum_core::plane::{FlowSpec, RingSpec};
use netsum_dataplane::{BpfDataPlane, DataPlane, count};
use netsum_lab::frames::{FrameSpec, lanes, sum};
use netsum_lab::programs::{BASE_PSN, flow, host, qpn, ring};
use netsum_lab::tap::Tap;
use netsum_lab::traffic::{ping, tcp_transfer};
use netsum_lab::{Host, Lab, LabSpec};

const SECOND: Duration = Duration::from_secs(1);
/// Each message has one fragment here.
const WINDOW: u32 = 8;

/// A lab with programs on its box, and a ring over all hosts.
struct Bridge {
    lab: Lab,
    plane: BpfDataPlane,
    ring: RingSpec,
    ports: Vec<u32>,
    taps: Vec<Tap>,
    v6: bool,
}

impl Bridge {
    /// Each rank has its own host.
    fn new(ranks: u32, mtu: u32, v6: bool) -> Self {
        Self::placed(&(0..ranks as usize).collect::<Vec<_>>(), mtu, v6)
    }

    /// Rank r on host `places[r]`.
    fn placed(places: &[usize], mtu: u32, v6: bool) -> Self {
        let ranks = places.len() as u32;
        let hosts = places.iter().max().unwrap() + 1;
        let lab = Lab::new(LabSpec { mtu: 2300, ipv6: true, ..LabSpec::hosts(hosts) }).unwrap();
        let every_port: Vec<u32> =
            (0..hosts).map(|i| lab.box_().ifindex(&lab.box_().port(i)).unwrap()).collect();
        let ports: Vec<u32> = places.iter().map(|&host| every_port[host]).collect();
        let ring = ring(ranks, mtu, 2 * WINDOW);
        let plane = lab.box_().enter(|| {
            let mut plane = BpfDataPlane::load(&[1]).unwrap();
            for &port in &every_port {
                plane.attach(port).unwrap();
            }
            plane.create_ring(&ring).unwrap();
            for rank in 0..ranks {
                let flow = FlowSpec { ifindex: ports[rank as usize], ..flow(&ring, rank, v6) };
                plane.add_flow(&flow).unwrap();
            }
            plane.activate_ring(&ring, &ports).unwrap();
            plane
        });
        let taps = taps(&lab);
        Self { lab, plane, ring, ports, taps, v6 }
    }

    /// The fragment `index` that `rank` sends.
    fn fragment(&self, rank: u32, index: u32, lane_count: usize) -> FrameSpec {
        let ranks = self.ring.config.members;
        let psn = (BASE_PSN + index) & 0xff_ffff;
        let payload = lanes(rank * 1000 + index, lane_count);
        let spec = FrameSpec::send(host(rank), host((rank + 1) % ranks), qpn(rank), psn, payload);
        let spec = FrameSpec { udp_checksum: 0xabcd * (index % 2) as u16, ..spec };
        if self.v6 { spec.v6() } else { spec }
    }

    fn counters(&self) -> Vec<(Counter, u64)> {
        let (ring, none) = (
            self.plane.counters(RingNumber(1)).unwrap(),
            self.plane.counters(RingNumber::NONE).unwrap(),
        );
        Counter::ALL
            .iter()
            .map(|&c| (c, count(&ring, c) + count(&none, c)))
            .filter(|(_, n)| *n > 0)
            .collect()
    }

    fn count(&self, counter: Counter) -> u64 {
        self.counters().iter().find(|(c, _)| *c == counter).map_or(0, |(_, n)| *n)
    }
}

fn taps(lab: &Lab) -> Vec<Tap> {
    lab.hosts().iter().map(|h| Tap::open(h, Host::INTERFACE).unwrap()).collect()
}

fn is_roce(frame: &[u8]) -> bool {
    wire::parse(frame).is_ok()
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn every_host_gets_every_sum_in_order_with_its_neighbours_headers() {
    for (ranks, mtu, v6) in [(2, 256, false), (3, 512, true), (4, 1024, false), (8, 2048, true)] {
        let bridge = Bridge::new(ranks, mtu, v6);
        // Several windows of fragments; the last fragment is short.
        let fragments = 4 * WINDOW;
        let len = |index: u32| if index + 1 == fragments { 3 } else { mtu as usize / 4 };
        for first in (0..fragments).step_by(WINDOW as usize) {
            let window = first..first + WINDOW;
            for rank in 0..ranks {
                for index in window.clone() {
                    bridge.taps[rank as usize]
                        .send(&bridge.fragment(rank, index, len(index)).build())
                        .unwrap();
                }
            }
            for index in window {
                let all: Vec<_> =
                    (0..ranks).map(|r| bridge.fragment(r, index, len(index)).payload).collect();
                for rank in 0..ranks {
                    let frame = bridge.taps[rank as usize].receive(SECOND, is_roce);
                    let frame = frame.unwrap_or_else(|e| {
                        panic!(
                            "{ranks} ranks, index {index}, rank {rank}: {e}; {:?}",
                            bridge.counters()
                        )
                    });
                    let source = bridge.fragment((rank + ranks - 1) % ranks, index, len(index));
                    let expected = FrameSpec { payload: sum(&all), id: 0, ..source }.build_result();
                    assert_eq!(frame, expected, "{ranks} ranks, index {index}, rank {rank}");
                }
            }
        }
        let n = u64::from(fragments);
        assert_eq!(bridge.count(Counter::Contributions), n * u64::from(ranks));
        assert_eq!(bridge.count(Counter::Released), n);
        assert_eq!(bridge.count(Counter::Results), n * u64::from(ranks));
        assert_eq!(bridge.count(Counter::Replays) + bridge.count(Counter::OutOfSequence), 0);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn ranks_behind_one_port_get_a_result_each() {
    for places in [&[0, 1, 0, 1][..], &[0, 0, 1], &[0, 0, 0, 1, 1, 0]] {
        let ranks = places.len() as u32;
        let bridge = Bridge::placed(places, 512, false);
        for index in 0..2 * WINDOW {
            for rank in 0..ranks {
                bridge.taps[places[rank as usize]]
                    .send(&bridge.fragment(rank, index, 128).build())
                    .unwrap();
            }
            let all: Vec<_> = (0..ranks).map(|r| bridge.fragment(r, index, 128).payload).collect();
            let expected = |rank: u32| {
                let source = bridge.fragment((rank + ranks - 1) % ranks, index, 128);
                FrameSpec { payload: sum(&all), id: 0, ..source }.build_result()
            };
            for host in 0..bridge.taps.len() {
                // Frames arrive in the order of ranks, one for each rank on the host.
                for rank in (0..ranks).filter(|&r| places[r as usize] == host) {
                    let frame = bridge.taps[host].receive(SECOND, is_roce).unwrap();
                    assert_eq!(frame, expected(rank), "{places:?}, index {index}, rank {rank}");
                }
            }
        }
        assert_eq!(bridge.count(Counter::EgressNoRoute) + bridge.count(Counter::RedirectFailed), 0);
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn a_lost_result_is_replayed_to_the_one_that_asks_again() {
    let bridge = Bridge::new(3, 256, false);
    for rank in 0..3 {
        bridge.taps[rank as usize].send(&bridge.fragment(rank, 0, 64).build()).unwrap();
    }
    for tap in &bridge.taps {
        tap.receive(SECOND, is_roce).unwrap();
    }
    // Rank 2 got no acknowledgement from rank 0 and retransmits.
    bridge.taps[2].send(&bridge.fragment(2, 0, 64).build()).unwrap();
    let again = bridge.taps[0].receive(SECOND, is_roce).unwrap();
    let all: Vec<_> = (0..3).map(|r| bridge.fragment(r, 0, 64).payload).collect();
    let expected = FrameSpec { payload: sum(&all), id: 0, ..bridge.fragment(2, 0, 64) };
    assert_eq!(again, expected.build());
    assert_eq!(bridge.count(Counter::Replays), 1);
    // The other ranks receive nothing.
    for rank in [1, 2] {
        assert!(bridge.taps[rank].receive(Duration::from_millis(50), is_roce).is_err());
    }
}

#[test]
#[ignore = "needs root and BPF: cargo xtask test"]
fn packets_other_than_a_flows_data_cross_the_bridge_untouched() {
    let mut bridge = Bridge::new(2, 1024, false);
    let [a, b] = [bridge.lab.host(0), bridge.lab.host(1)];
    ping(a, b.ip(0), 3, SECOND).unwrap();
    ping(a, b.ipv6(0), 3, SECOND).unwrap();
    ping(a, bridge.lab.box_().ip(), 3, SECOND).unwrap();
    tcp_transfer(a, b, b.ip(0), 8 << 20, 5 * SECOND).unwrap();
    tcp_transfer(b, a, a.ipv6(0), 1 << 20, 5 * SECOND).unwrap();
    // The old taps are full of the TCP traffic.
    bridge.taps = taps(&bridge.lab);
    // RoCE of an unknown flow, with its own checksum and identification.
    let mut other = FrameSpec::send(1, 2, 0xabc, 77, lanes(7, 64));
    other.udp_checksum = 0x1234;
    // An acknowledgement of the ring's own connection.
    let mut acknowledgement = other.build();
    acknowledgement[42] = 0x11;
    for frame in [other.build(), acknowledgement] {
        bridge.taps[0].send(&frame).unwrap();
        assert_eq!(bridge.taps[1].receive(SECOND, is_roce).unwrap(), frame);
    }
    assert_eq!(bridge.count(Counter::Contributions), 0);

    // Without the programs, the ring's data is forwarded as well.
    let data = bridge.fragment(0, 0, 64).build();
    for &port in &bridge.ports {
        bridge.plane.detach(port).unwrap();
    }
    bridge.taps[0].send(&data).unwrap();
    assert_eq!(bridge.taps[1].receive(SECOND, is_roce).unwrap(), data);
    // With the programs attached again, it is summed.
    bridge.lab.box_().enter(|| {
        for &port in &bridge.ports {
            bridge.plane.attach(port).unwrap();
        }
    });
    for rank in 0..2 {
        bridge.taps[rank as usize].send(&bridge.fragment(rank, 0, 64).build()).unwrap();
    }
    for tap in &bridge.taps {
        let frame = tap.receive(SECOND, is_roce).unwrap();
        assert_eq!(wire::parse(&frame[..]).map(|f| f.l3), Ok(L3::V4));
        let all: Vec<_> = (0..2).map(|r| bridge.fragment(r, 0, 64).payload).collect();
        assert_eq!(frame[54..54 + 256], sum(&all));
    }
}
