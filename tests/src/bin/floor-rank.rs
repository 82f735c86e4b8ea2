//! A rank of the floor in a contest: its vector's packets out, as many others back. Does what it is told on standard input, a JSON object
//! a line, and answers likewise.

use std::io::{self, BufRead, IoSliceMut, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use netsum_common::floor::GROUP;
use netsum_common::wire::{BTH_LEN, Bth, ICRC_LEN, Opcode, ROCE_PORT};
use netsum_lab::contest::floor::FloorRank;
use netsum_lab::contest::{Answer, Order};
use netsum_worker::udp::wait_for;
use nix::poll::PollFlags;
use nix::sys::socket::{setsockopt, sockopt};
use quinn_udp::{BATCH_SIZE, RecvMeta, Transmit, UdpSocketState};
use socket2::{Domain, Protocol, Socket, Type};

/// Bytes of receive buffer, where a packet takes more than a page.
const SOCKET_BUFFER: usize = 16 << 20;
/// Largest datagram or aggregate.
const LARGEST: usize = 65_507;
/// After which silence packets have been lost.
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    let spec: FloorRank = serde_json::from_str(&std::env::args().nth(1).context("a FloorRank is missing")?)?;
    let mut link = Link::open(&spec)?;
    println!("ready");
    for line in io::stdin().lock().lines() {
        let order: Order = serde_json::from_str(&line?)?;
        let vector = Vector::new(&spec, &order);
        let mut answer = Answer { micros: Vec::new(), wrong: 0, retransmissions: 0, astray: 0 };
        for _ in 0..order.iters {
            let start = Instant::now();
            answer.wrong += link.exchange(&vector)?;
            answer.micros.push(start.elapsed().as_secs_f64() * 1e6);
        }
        let mut out = io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
    }
    Ok(())
}

/// A rank's vector, cut into packets that lie one behind the other as they are sent: BTH, payload, room for an ICRC.
struct Vector {
    bytes: Vec<u8>,
    /// Bytes of each packet but the last, which may be shorter.
    packet: usize,
    packets: usize,
    /// Every rank's number as elements have it.
    numbers: Vec<[u8; 4]>,
}

impl Vector {
    fn new(spec: &FloorRank, order: &Order) -> Self {
        let number = |x: u32| if order.float { (x as f32).to_le_bytes() } else { x.to_le_bytes() };
        let packets = (order.len * 4).div_ceil(spec.mtu);
        let mut bytes = Vec::with_capacity(order.len * 4 + packets * (BTH_LEN + ICRC_LEN));
        for index in 0..packets {
            bytes.extend(Bth::new(Opcode::SEND_ONLY, 0, index as u32).encode());
            let elements = (order.len - index * spec.mtu / 4).min(spec.mtu / 4);
            bytes.extend(number(spec.rank + 1).repeat(elements));
            bytes.extend([0; ICRC_LEN]);
        }
        let packet = BTH_LEN + spec.mtu + ICRC_LEN;
        Self { bytes, packet, packets, numbers: (1..=spec.ranks).map(number).collect() }
    }

    /// Packets `from` to `to`.
    fn slice(&self, from: usize, to: usize) -> &[u8] {
        &self.bytes[from * self.packet..(to * self.packet).min(self.bytes.len())]
    }
}

/// A socket that sends to all hosts and receives what comes back.
struct Link {
    socket: Socket,
    state: UdpSocketState,
    receive: Vec<Vec<u8>>,
    meta: Vec<RecvMeta>,
    /// Packets in flight.
    window: usize,
}

impl Link {
    fn open(spec: &FloorRank) -> Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
        // One source port and no loop: what comes back is the box's.
        socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, ROCE_PORT)).into())?;
        socket.join_multicast_v4(&GROUP.into(), &spec.ip)?;
        socket.set_multicast_if_v4(&spec.ip)?;
        socket.set_multicast_loop_v4(false)?;
        setsockopt(&socket, sockopt::RcvBufForce, &SOCKET_BUFFER).context("a receive buffer")?;
        Ok(Self {
            state: UdpSocketState::new((&socket).into())?,
            socket,
            receive: vec![vec![0; LARGEST]; BATCH_SIZE],
            meta: vec![RecvMeta::default(); BATCH_SIZE],
            window: spec.window,
        })
    }

    /// Sends all packets and receives all results; how many of these nobody has sent. What has arrived is credit for as much.
    fn exchange(&mut self, vector: &Vector) -> Result<u64> {
        let burst = self.state.max_gso_segments().min(LARGEST / vector.packet).min(self.window);
        let mut came = vec![false; vector.packets];
        let (mut sent, mut received, mut wrong) = (0, 0, 0);
        while received < vector.packets {
            let (sent_before, received_before) = (sent, received);
            while sent < vector.packets {
                let next = (sent + burst).min(vector.packets);
                if next - received > self.window || !self.send(vector, sent, next)? {
                    break;
                }
                sent = next;
            }
            self.receive(vector, &mut came, &mut received, &mut wrong)?;
            if (sent, received) == (sent_before, received_before) {
                self.wait(received, vector.packets)?;
            }
        }
        Ok(wrong)
    }

    /// Sends some packets with one system call; false where the socket has no room.
    fn send(&self, vector: &Vector, from: usize, to: usize) -> Result<bool> {
        let packets = Transmit {
            destination: SocketAddr::from((GROUP, ROCE_PORT)),
            ecn: None,
            contents: vector.slice(from, to),
            segment_size: Some(vector.packet),
            src_ip: None,
        };
        match self.state.try_send((&self.socket).into(), &packets) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e).context("sending"),
        }
    }

    /// Takes note of what has arrived.
    fn receive(
        &mut self,
        vector: &Vector,
        came: &mut [bool],
        received: &mut usize,
        wrong: &mut u64,
    ) -> Result<()> {
        let mut slices: Vec<IoSliceMut<'_>> = self.receive.iter_mut().map(|b| IoSliceMut::new(b)).collect();
        let count = match self.state.recv((&self.socket).into(), &mut slices, &mut self.meta) {
            Ok(count) => count,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e).context("receiving"),
        };
        for (meta, buffer) in self.meta.iter().zip(&self.receive).take(count) {
            for datagram in buffer[..meta.len].chunks(meta.stride.max(1)) {
                let header = datagram.first_chunk().context("a datagram without a header")?;
                let index = Bth::decode(header).psn as usize;
                ensure!(index < vector.packets, "a result for packet {index} of {}", vector.packets);
                ensure!(!std::mem::replace(&mut came[index], true), "two results for packet {index}");
                let whole = datagram.len() == vector.slice(index, index + 1).len();
                let known = vector.numbers.iter().any(|n| datagram[BTH_LEN..].starts_with(n));
                *wrong += u64::from(!(whole && known));
                *received += 1;
            }
        }
        Ok(())
    }

    /// Waits for something to arrive.
    fn wait(&self, received: usize, packets: usize) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            wait_for(self.socket.as_fd(), PollFlags::POLLIN, PATIENCE)?;
            let mut byte = [std::mem::MaybeUninit::uninit()];
            match self.socket.peek(&mut byte) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                _ => return Ok(()),
            }
        }
        bail!("packets have been lost: {received} of {packets} results came, then none for {PATIENCE:?}")
    }
}
