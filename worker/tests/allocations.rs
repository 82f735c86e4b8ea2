//! Allocated memory is reused: messages and steps cost no allocation, and neither do small
//! operations.
//!
//! Counts the allocations of the application's thread, which drives the engine, the endpoint and
//! the socket while it is in a call.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use allocation_counter::measure;
use netsum_common::unmanaged::static_connection;
use netsum_worker::rc::{Endpoint, EndpointConfig, Event, Psn, QpConfig, QpId};
use netsum_worker::udp::UdpDriver;
use netsum_worker::{Bootstrap, CommConfig, Communicator, Layout, Mode};

const RANKS: u32 = 3;
const MTU: u32 = 1024;
const LAYOUT: Layout = Layout { message_size: 4096, window: 4, rings: 2 };
/// Messages of the long operation.
const MESSAGES: usize = 2000;
/// Small operations, each measured.
const OPERATIONS: usize = 300;

/// An address of 127.0.0.0/8 that no other test run uses at the same time.
fn address(n: u8) -> IpAddr {
    let pid = std::process::id();
    Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, n).into()
}

/// The ranks, each with its own list of all ranks' addresses. Returns the counts of each.
fn ranks(own: impl Fn(u32) -> IpAddr, others: impl Fn(u32) -> IpAddr, mode: Mode) {
    std::thread::scope(|s| {
        for rank in 0..RANKS {
            let peers = (0..RANKS).map(|r| if r == rank { own(r) } else { others(r) }).collect();
            let Layout { message_size, window, rings } = LAYOUT;
            let bootstrap = Bootstrap::Static { peers, mtu: MTU, message_size, window, rings };
            let config = CommConfig::new(rank, RANKS, own(rank), bootstrap);
            s.spawn(move || count(Communicator::connect(config).unwrap(), mode));
        }
    });
}

fn count(mut comm: Communicator, mode: Mode) {
    let mut long = vec![1i32; LAYOUT.message_size as usize / 4 * MESSAGES];
    let mut floats = vec![1f32; LAYOUT.message_size as usize / 4 * MESSAGES];
    // Afterwards all memory is there, except what depends on which rank is late.
    for _ in 0..2 {
        comm.all_reduce(&mut long).unwrap();
        comm.all_reduce(&mut floats).unwrap();
    }
    let messages = measure(|| {
        comm.all_reduce(&mut long).unwrap();
        comm.all_reduce(&mut floats).unwrap();
    });
    let mut few = [1i32; 8];
    // Operations of more than 2 ms are announced, which allocates; on a busy machine that is some
    // of them, not all.
    let measured = (0..OPERATIONS).map(|_| {
        let operation = measure(|| {
            comm.all_reduce(&mut few).unwrap();
        });
        operation.count_total
    });
    let small = measured.min().unwrap();
    let rank = comm.rank();
    assert_eq!(comm.mode(), mode);
    println!("{mode:?} rank {rank}: {} and {small}", messages.count_total);
    // A long operation's announcements and status frames allocate.
    assert!(
        messages.count_total < MESSAGES as u64 / 20,
        "{mode:?} rank {rank}, messages: {messages:?}"
    );
    assert_eq!(small, 0, "{mode:?} rank {rank}: in each of {OPERATIONS} small operations");
}

#[test]
fn the_ranks_own_ring_uses_its_buffers_again() {
    let rank = |r: u32| address(1 + r as u8);
    ranks(rank, rank, Mode::HostRing);
}

#[test]
fn ranks_with_a_box_use_their_buffers_again() {
    let (rank, box_) = (|r: u32| address(11 + r as u8), address(10));
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        let summing = s.spawn(|| StandIn::new(box_, rank).run(&over));
        let counted = std::panic::catch_unwind(|| ranks(rank, |_| box_, Mode::Box));
        over.store(true, Ordering::Relaxed);
        summing.join().unwrap();
        counted.unwrap();
    });
}

/// A box that needs no privileges: every rank takes it for both of its neighbours. It sums
/// messages, not packets, and forwards those of bypass connections.
struct StandIn {
    driver: UdpDriver,
    endpoint: Endpoint,
    /// By connection, the bypass connection first.
    connections: Vec<Vec<Connection>>,
}

/// From a rank to the next one.
struct Connection {
    from: QpId,
    to: QpId,
    waiting: std::collections::VecDeque<Vec<u8>>,
}

impl StandIn {
    fn new(ip: IpAddr, rank: impl Fn(u32) -> IpAddr) -> Self {
        let mut endpoint = Endpoint::new(ip, EndpointConfig::default());
        let mut connection = |r: u32, ring: Option<u32>| {
            let next = (r + 1) % RANKS;
            let (sender, receiver) = (static_connection(r, ring), static_connection(next, ring));
            let mtu = MTU as usize;
            let mut add = |own, remote, qpn, send_psn, recv_psn| {
                let config = QpConfig {
                    retry_limit: None,
                    selective: ring.is_none(),
                    reused: ring.is_none(),
                    ..QpConfig::new(own, rank(remote), qpn, send_psn, recv_psn, mtu)
                };
                endpoint.add_qp(config).unwrap()
            };
            let from =
                add(receiver.receive_qpn, r, sender.send_qpn, Psn::default(), sender.first_psn);
            let to =
                add(sender.send_qpn, next, receiver.receive_qpn, sender.first_psn, Psn::default());
            (0..64).for_each(|_| endpoint.post_receive(from, Vec::new()));
            Connection { from, to, waiting: Default::default() }
        };
        let rings = std::iter::once(None).chain((0..LAYOUT.rings).map(Some));
        let connections =
            rings.map(|ring| (0..RANKS).map(|r| connection(r, ring)).collect()).collect();
        Self { driver: UdpDriver::bind(ip).unwrap(), endpoint, connections }
    }

    fn run(mut self, over: &AtomicBool) {
        while !over.load(Ordering::Relaxed) {
            self.driver
                .drive(&mut self.endpoint, Instant::now() + Duration::from_millis(10))
                .unwrap();
            while let Some(event) = self.endpoint.poll_event() {
                match event {
                    Event::Received { qp, data, .. } => self.take(qp, data),
                    Event::Sent { .. } => {}
                    Event::Failed { error, .. } => panic!("{error}"),
                }
            }
        }
    }

    fn take(&mut self, qp: QpId, data: Vec<u8>) {
        self.endpoint.post_receive(qp, Vec::new());
        let Self { endpoint, connections, .. } = self;
        for (ring, connections) in connections.iter_mut().enumerate() {
            let Some(c) = connections.iter_mut().find(|c| c.from == qp) else { continue };
            if ring == 0 {
                return endpoint.post_send(c.to, 0, data, None);
            }
            c.waiting.push_back(data);
            while connections.iter().all(|c| !c.waiting.is_empty()) {
                let sum = connections
                    .iter_mut()
                    .filter_map(|c| c.waiting.pop_front())
                    .reduce(add)
                    .unwrap();
                connections.iter().for_each(|c| endpoint.post_send(c.to, 0, sum.clone(), None));
            }
            return;
        }
    }
}

/// The sum of two messages, lane by lane.
fn add(mut a: Vec<u8>, b: Vec<u8>) -> Vec<u8> {
    for (a, b) in a.as_chunks_mut::<4>().0.iter_mut().zip(b.as_chunks::<4>().0) {
        *a = u32::from_le_bytes(*a).wrapping_add(u32::from_le_bytes(*b)).to_le_bytes();
    }
    a
}
