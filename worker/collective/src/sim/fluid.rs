//! The same all-reduce packet by packet, and as flows of a fluid network (`netsum-plan`): both take
//! equally long.
//!
//! The fluid network has no acknowledgements, and no step of a ring waits for another.

use std::collections::BTreeSet;
use std::time::Duration;

use netsum_common::wire::PACKET_OVERHEAD;
use netsum_papers::collectives::{Collective, Scene};
use netsum_papers::routes::{Balance, Demand};
use netsum_plan::generate;
use netsum_plan::topology::Network;

use super::job::{Call, NEVER, Sim, Spec};
use super::network::Speed;
use super::vector::Vector;
use crate::frame::DATA_HEADER;
use crate::numeric::block::Width;
use crate::numeric::element::Dtype;
use crate::numeric::layout::Layout;
use crate::report::Mode;

const LAYOUT: Layout = Layout { message_size: 64 << 10, window: 8, rings: 1 };
const MTU: u32 = 1024;
/// Packets that arrive before a rank of a ring wakes up and acknowledges all of them at once. With
/// 2 to 12 the times are within 0.5 % of each other. Acknowledging each would send 8 % more: an
/// acknowledgement is 86 bytes on the wire, a packet 1106. With a box it makes no difference.
const WAKES: u32 = 4;

struct Case {
    hosts: usize,
    racks: usize,
    /// Nanoseconds for a byte, of a host's link and of a rack's.
    per_byte: u32,
    uplink: u32,
    latency: Duration,
    /// How many of 1000 bytes of each host's link belong to other jobs.
    others: u32,
    bytes: usize,
    mode: Mode,
}

impl Case {
    fn speed(&self, per_byte: u32) -> Speed {
        Speed { per_byte, latency: self.latency, bucket: 0, others: self.others }
    }

    /// Seconds of the second all-reduce, packet by packet.
    fn packets(&self) -> f64 {
        let mut spec = Spec { mtu: MTU, ..Spec::new(self.hosts as u32, LAYOUT, 1) };
        spec.speed = self.speed(self.per_byte);
        (spec.timeout, spec.limit) = (Duration::from_secs(100), Duration::from_secs(1000));
        if self.racks > 1 {
            spec.branches = vec![self.racks];
            spec.uplink = Some(Speed { others: 0, ..self.speed(self.uplink) });
        }
        if self.mode == Mode::HostRing {
            spec.present = NEVER;
            spec.wakes = Duration::from_nanos(
                u64::from(self.per_byte * WAKES) * (MTU as usize + PACKET_OVERHEAD) as u64,
            );
        }
        let mut sim = Sim::new(&spec, |rank| {
            let calls = (0..2).map(|n| Call {
                data: Vector::ints(rank, self.bytes / 4, n),
                not_before: Duration::ZERO,
            });
            calls.collect()
        });
        sim.run();
        for host in &sim.hosts {
            assert!(host.results.iter().all(|r| r.0.as_ref().is_ok_and(|f| f.mode == self.mode)));
            assert!(
                self.mode == Mode::HostRing || host.stack.endpoint.stats().retransmissions == 0
            );
        }
        let end = |n: usize| sim.hosts.iter().map(|host| host.results[n].2).max().unwrap();
        (end(1) - end(0)).as_secs_f64()
    }

    /// Seconds in a fluid network, for the bytes on the wire.
    fn fluid(&self) -> f64 {
        let bits = |per_byte: u32| 8e9 / f64::from(per_byte);
        let mut topology = generate::rack(self.hosts, bits(self.per_byte));
        if self.racks > 1 {
            topology = generate::leaf_spine(
                self.racks,
                self.hosts / self.racks,
                1,
                bits(self.per_byte),
                1.0,
            );
            let up = topology.links.iter_mut().filter(|link| link.to == "spine0");
            up.for_each(|link| link.bits = bits(self.uplink));
        }
        topology
            .links
            .iter_mut()
            .for_each(|link| link.latency_us = self.latency.as_secs_f64() * 1e6);
        let network = Network::new(&topology).unwrap();
        // From each host to the next, with the same load on all links of hosts, in both directions.
        let rate = 1e9 / f64::from(self.per_byte) * f64::from(self.others) / 1000.0;
        let other = |from| Demand { from, to: (from + 1) % self.hosts, bytes: rate };
        let background =
            if self.others > 0 { (0..self.hosts).map(other).collect() } else { Vec::new() };
        let (failed, balance) = (BTreeSet::new(), Balance::Spray);
        let scene = Scene { network: &network, failed, balance, background, step: 0.0 };
        let collective =
            if self.mode == Mode::HostRing { Collective::Ring } else { Collective::Netsum };
        let elements = LAYOUT.elements(Dtype::I32, Width::Full).unwrap();
        // A rank's part of a message has its own header, which may need one more packet.
        let (parts, each) = match self.mode {
            Mode::HostRing => (self.hosts, DATA_HEADER + elements.div_ceil(self.hosts) * 4),
            _ => (1, LAYOUT.message_size as usize),
        };
        let wire = parts * (each + each.div_ceil(MTU as usize) * PACKET_OVERHEAD);
        scene.seconds(collective, (self.bytes / 4) as f64 / elements as f64 * wire as f64).unwrap()
    }
}

fn case(mode: Mode, hosts: usize, per_byte: u32) -> Case {
    Case {
        hosts,
        racks: 1,
        per_byte,
        uplink: per_byte,
        latency: Duration::from_micros(10),
        others: 0,
        bytes: 8 << 20,
        mode,
    }
}

#[test]
fn packets_and_fluids_take_as_long() {
    let flat = |mode| {
        [(4, 80), (8, 80), (4, 8), (8, 8), (8, 1)]
            .map(|(hosts, per_byte)| case(mode, hosts, per_byte))
    };
    // A rack's link as fast as those of all its hosts, as one of them, and half as fast.
    let racks =
        [(4, 2, 40), (8, 2, 20), (8, 2, 80), (8, 2, 160), (8, 4, 40), (8, 4, 80), (8, 4, 160)];
    let racks =
        racks.map(|(hosts, racks, uplink)| Case { racks, uplink, ..case(Mode::Box, hosts, 80) });
    let beside = [(Mode::Box, 250), (Mode::Box, 500), (Mode::HostRing, 250), (Mode::HostRing, 500)];
    let beside = beside.map(|(mode, others)| Case { others, ..case(mode, 4, 80) });
    let mut wrong = Vec::new();
    let all = flat(Mode::Box).into_iter().chain(racks).chain(flat(Mode::HostRing)).chain(beside);
    for case in all {
        let (packets, fluid) = (case.packets(), case.fluid());
        let text = format!(
            "{:?}, {} hosts, {} racks, {} and {} ns/B, others {} %: {:.2} ms by packets, {:.2} ms \
             by fluids, {:+.1} %",
            case.mode,
            case.hosts,
            case.racks,
            case.per_byte,
            case.uplink,
            case.others / 10,
            packets * 1e3,
            fluid * 1e3,
            (packets / fluid - 1.0) * 100.0
        );
        println!("{text}");
        if (packets / fluid - 1.0).abs() > 0.05 {
            wrong.push(text);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
