//! Foreign traffic: ping, TCP transfers and floods between namespaces.

use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use socket2::{Domain, Protocol, Socket, Type};

use crate::netns::Netns;

/// Sends ICMP echo requests, each after the previous answer; returns the round-trip times.
///
/// # Errors
/// If a request is not answered within `timeout`.
pub fn ping(from: &Netns, to: IpAddr, count: u16, timeout: Duration) -> Result<Vec<Duration>> {
    from.enter(|| {
        let (domain, protocol, request, reply) = match to {
            IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8, 0),
            IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128, 129),
        };
        let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
        // An identifier of its own: several pings may run in one namespace.
        let id = (std::process::id() as u16).to_be_bytes();
        (0..count).map(|seq| echo(&socket, to, [request, reply], id, seq, timeout)).collect()
    })
}

fn echo(
    socket: &Socket,
    to: IpAddr,
    [request, reply]: [u8; 2],
    id: [u8; 2],
    seq: u16,
    timeout: Duration,
) -> Result<Duration> {
    let seq_bytes = seq.to_be_bytes();
    let mut message = vec![request, 0, 0, 0, id[0], id[1], seq_bytes[0], seq_bytes[1]];
    message.extend((0..56).map(|i| i as u8));
    if to.is_ipv4() {
        // The kernel computes the checksum of ICMPv6.
        let sum = internet_checksum(&message).to_be_bytes();
        message[2..4].copy_from_slice(&sum);
    }
    let start = Instant::now();
    socket.send_to(&message, &SocketAddr::new(to, 0).into())?;
    loop {
        let left = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero());
        let left =
            left.with_context(|| format!("no answer to ping {seq} of {to} within {timeout:?}"))?;
        socket.set_read_timeout(Some(left))?;
        let mut buffer = [MaybeUninit::<u8>::uninit(); 2048];
        let Ok((len, _)) = socket.recv_from(&mut buffer) else { continue };
        // SAFETY: the kernel has written `len` bytes.
        let packet: Vec<u8> = buffer[..len].iter().map(|b| unsafe { b.assume_init() }).collect();
        // IPv4 raw sockets deliver the IP header too.
        let icmp = if to.is_ipv4() { packet.get(20..).unwrap_or_default() } else { &packet };
        if icmp.len() == message.len() && icmp[0] == reply && icmp[4..] == message[4..] {
            return Ok(start.elapsed());
        }
    }
}

/// The Internet checksum (RFC 1071).
fn internet_checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 =
        bytes.chunks(2).map(|c| u32::from(c[0]) << 8 | u32::from(*c.get(1).unwrap_or(&0))).sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Sends `len` bytes over TCP and compares every one; returns the bytes per second.
///
/// # Errors
/// If the connection stalls for `timeout` or breaks, or a byte differs.
pub fn tcp_transfer(
    from: &Netns,
    to: &Netns,
    to_ip: IpAddr,
    len: usize,
    timeout: Duration,
) -> Result<f64> {
    let listener = to.enter(|| TcpListener::bind((to_ip, 0)))?;
    let address = listener.local_addr()?;
    let start = Instant::now();
    std::thread::scope(|s| {
        let sender = s.spawn(move || {
            from.enter(|| -> Result<()> {
                let mut stream = TcpStream::connect_timeout(&address, timeout)?;
                stream.set_write_timeout(Some(timeout))?;
                let mut pattern = Pattern::default();
                let mut block = vec![0; 64 * 1024];
                let mut left = len;
                while left > 0 {
                    let part = left.min(block.len());
                    pattern.fill(&mut block[..part]);
                    stream.write_all(&block[..part])?;
                    left -= part;
                }
                Ok(())
            })
        });
        let received = receive(&listener, len, timeout);
        sender.join().expect("the sender does not panic").context("TCP sender")?;
        received.context("TCP receiver")
    })?;
    Ok(len as f64 / start.elapsed().as_secs_f64())
}

fn receive(listener: &TcpListener, len: usize, timeout: Duration) -> Result<()> {
    // A listener has no timeout, but the sender's connect has one: it either arrives or reports an
    // error.
    listener.set_nonblocking(true)?;
    let mut ready =
        [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(listener), nix::poll::PollFlags::POLLIN)];
    let millis = nix::poll::PollTimeout::try_from(timeout)?;
    ensure!(nix::poll::poll(&mut ready, millis)? == 1, "nobody connected within {timeout:?}");
    let (mut stream, _) = listener.accept()?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(timeout))?;
    let (mut got, mut expected) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    let (mut pattern, mut done) = (Pattern::default(), 0);
    loop {
        let part = stream.read(&mut got)?;
        if part == 0 {
            break;
        }
        pattern.fill(&mut expected[..part]);
        ensure!(got[..part] == expected[..part], "wrong bytes after {done}");
        done += part;
    }
    ensure!(done == len, "{done} bytes of {len} arrived");
    Ok(())
}

/// Makes hosts send UDP packets of `len` bytes to another one as fast as they can. Returns the
/// payload bytes per second that arrive in `time`, from the first packet on.
///
/// # Errors
/// If nothing arrives within `time`.
pub fn udp_flood(
    from: &[&Netns],
    to: &Netns,
    to_ip: IpAddr,
    len: usize,
    time: Duration,
) -> Result<f64> {
    let receiver = to.enter(|| UdpSocket::bind((to_ip, 0)))?;
    receiver.set_read_timeout(Some(time))?;
    let address = receiver.local_addr()?;
    let enough = AtomicBool::new(false);
    let send = |netns: &Netns| -> Result<()> {
        let socket = netns.enter(|| UdpSocket::bind(("0.0.0.0", 0)))?;
        let packet = vec![0; len];
        while !enough.load(Ordering::Relaxed) {
            // A flood fills the queue: errors are expected.
            let _ = socket.send_to(&packet, address);
        }
        Ok(())
    };
    std::thread::scope(|s| {
        let senders: Vec<_> = from.iter().map(|netns| s.spawn(|| send(netns))).collect();
        let count = || -> Result<f64> {
            let mut buffer = vec![0; len];
            receiver.recv(&mut buffer).context("nothing of a flood arrives")?;
            let (start, mut bytes) = (Instant::now(), 0);
            while start.elapsed() < time {
                bytes += receiver.recv(&mut buffer)?;
            }
            Ok(bytes as f64 / start.elapsed().as_secs_f64())
        };
        let rate = count();
        enough.store(true, Ordering::Relaxed);
        senders
            .into_iter()
            .try_for_each(|sender| sender.join().expect("a sender does not panic"))?;
        rate
    })
}

/// A byte sequence that repeats only after 16 GiB.
#[derive(Default)]
struct Pattern {
    word: u32,
    used: usize,
}

impl Pattern {
    fn fill(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            *byte = self.word.wrapping_mul(0x9e37_79b1).to_be_bytes()[self.used];
            self.used += 1;
            if self.used == 4 {
                (self.used, self.word) = (0, self.word.wrapping_add(1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_of_the_example_in_rfc_1071() {
        assert_eq!(internet_checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
    }

    #[test]
    fn the_pattern_does_not_depend_on_how_it_is_cut() {
        let (mut whole, mut parts) = ([0; 100], [0; 100]);
        Pattern::default().fill(&mut whole);
        let mut pattern = Pattern::default();
        for part in parts.chunks_mut(7) {
            pattern.fill(part);
        }
        assert_eq!(whole, parts);
    }
}
