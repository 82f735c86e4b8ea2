//! Drives an [`Endpoint`] over AF_XDP sockets, which exchange frames between the adapter's queues
//! and this process, past the kernel's network stack.
//!
//! | module | what lives there |
//! | --- | --- |
//! | this one | the driver |
//! | [`frames`] | Ethernet, IP and UDP headers |
//! | [`queue`] | a socket on one queue, its rings and memory |
//! | [`program`] | the XDP program that steers packets to the sockets |
//! | [`neighbour`] | MAC addresses of next hops |
//! | [`error`] | why AF_XDP cannot be used, and what to do |

mod error;
mod frames;
mod neighbour;
mod program;
mod queue;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use nix::sys::epoll::Epoll;

pub use error::XdpError;

use crate::control::interface;
use crate::udp;
use crate::unshared::Unshared;
use frames::{Addresses, Mac, headers_len};
use neighbour::Neighbours;
use netsum_rc::packet::OVERHEAD;
use netsum_rc::{Endpoint, Transmit};
use program::Program;
use queue::{BATCH, Queue, ROOM, RX_FRAMES};

/// The most receive queues that get a socket each; the program's map has room for more.
const MOST_QUEUES: u32 = 16;
/// The most bytes of a data packet's extended headers: RETH and immediate data.
const EXTENDED: usize = 20;
/// The longest wait while packets could not be sent.
const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// How long the first query for a next hop may take.
const RESOLVE: Duration = Duration::from_secs(1);

/// The sockets of a rank that sends RoCEv2 past the kernel.
pub struct XdpDriver {
    // Dropped in this order: the program is detached before the sockets are closed.
    _program: Program,
    queues: Vec<Queue>,
    /// Readable if one of `queues` is, where there are several.
    epoll: Option<Epoll>,
    /// Keeps the port in use: other programs cannot open it, and packets that the program passes to
    /// the kernel find a socket.
    _port: Unshared<socket2::Socket>,
    local: IpAddr,
    mac: Mac,
    neighbours: Neighbours,
    send: Vec<u8>,
    /// Datagrams for which there was no room.
    unsent: Option<Transmit>,
}

impl XdpDriver {
    /// Attaches the program to the interface that has an address, and opens a socket on each of its
    /// receive queues.
    ///
    /// # Errors
    /// Names a missing capability, a port in use, or an interface that has an XDP program.
    pub fn bind(local: IpAddr) -> Result<Self, XdpError> {
        error::check_capabilities()?;
        let port = udp::open_port(local)?;
        let interface = interface::that_holds(local).ok_or(XdpError::NoInterface)?;
        let mac = interface.mac.as_deref().and_then(parse_mac).ok_or(XdpError::NoInterface)?;
        let ifindex = nix::net::if_::if_nametoindex(&*interface.name).map_err(io::Error::from)?;
        let count = queue::receive_queues(&interface.name)?;
        if count > MOST_QUEUES {
            return Err(XdpError::Queues {
                interface: interface.name,
                queues: count,
                most: MOST_QUEUES,
            });
        }
        let neighbours = Neighbours::new(local, ifindex)?;
        let mut program = Program::attach(&interface.name, ifindex, local)?;
        let queues = (0..count).map(|n| Queue::open(ifindex, n)).collect::<Result<Vec<_>, _>>()?;
        let epoll = if count > 1 { Some(udp::epoll(&queues)?) } else { None };
        for (number, queue) in (0..).zip(&queues) {
            program.set_socket(number, queue.as_raw_fd())?;
        }
        Ok(Self {
            _program: program,
            queues,
            epoll,
            _port: port,
            local,
            mac,
            neighbours,
            send: Vec::new(),
            unsent: None,
        })
    }

    /// Whether the adapter itself reads and writes this process's memory.
    pub fn is_zero_copy(&self) -> bool {
        self.queues.iter().all(Queue::is_zero_copy)
    }

    /// How many packets the sockets hold at least.
    pub fn receive_capacity(&self, _mtu: usize) -> u32 {
        RX_FRAMES as u32
    }

    /// Finds the next hops to the ranks that there will be packets for. Queries unknown ones again
    /// later.
    ///
    /// # Errors
    /// If packets of this path MTU are too long, or a route does not use the interface.
    pub fn prepare(&mut self, mtu: usize, peers: &[IpAddr]) -> Result<(), XdpError> {
        let most = ROOM - headers_len(self.local) - OVERHEAD - EXTENDED;
        if mtu > most {
            return Err(XdpError::Mtu { mtu, most: most / 64 * 64 });
        }
        for peer in peers {
            self.neighbours.next_hop(*peer).map_err(|e| XdpError::NoRoute(e.to_string()))?;
        }
        let until = Instant::now() + RESOLVE;
        for peer in peers {
            while self.neighbours.mac(Instant::now(), *peer).is_none() && Instant::now() < until {
                std::thread::sleep(RETRY_PAUSE);
            }
        }
        Ok(())
    }

    /// Receives all that has arrived, checks the timers and sends all that may be sent. If that was
    /// nothing, waits for something to do, at most until `until`. Returns whether anything was
    /// received or sent.
    pub fn drive(&mut self, endpoint: &mut Endpoint, until: Instant) -> io::Result<bool> {
        endpoint.set_max_segments(BATCH);
        if self.progress(endpoint)? {
            return Ok(true);
        }
        let deadline = endpoint.next_timeout().map_or(until, |t| t.min(until));
        let mut wait = deadline.saturating_duration_since(Instant::now());
        if self.unsent.is_some() || self.queues[0].is_behind() {
            wait = wait.min(RETRY_PAUSE);
        }
        if wait.is_zero() && self.epoll.is_none() {
            return self.progress(endpoint);
        }
        if self.unsent.is_none()
            && endpoint.in_flight() < udp::MAX_POLLED_IN_FLIGHT
            && !self.queues[0].is_behind()
            && udp::spin_until(deadline, || self.progress(endpoint))?
        {
            return Ok(true);
        }
        // Also without waiting: a driver that has run out of frames continues when it is polled,
        // and the next wait may be at all sockets at once, which does not poll each of them.
        self.wait(wait)?;
        self.progress(endpoint)
    }

    fn wait(&self, wait: Duration) -> io::Result<()> {
        if let [queue] = &*self.queues {
            return udp::wait_for(queue.as_fd(), PollFlags::POLLIN, wait);
        }
        let last = self.queues.len() - 1;
        let mut all: [_; MOST_QUEUES as usize] = std::array::from_fn(|i| {
            PollFd::new(self.queues[i.min(last)].as_fd(), PollFlags::POLLIN)
        });
        udp::wait_for_any(&mut all[..=last], wait)
    }

    fn progress(&mut self, endpoint: &mut Endpoint) -> io::Result<bool> {
        // As with UDP, time is taken before receiving.
        let before = Instant::now();
        let (received, all) = self.receive(endpoint)?;
        endpoint.handle_timeout(udp::timer_now(before, all));
        let sent = self.transmit(endpoint)?;
        Ok(received || sent)
    }

    /// Returns whether anything was received, and whether the sockets are empty.
    fn receive(&mut self, endpoint: &mut Endpoint) -> io::Result<(bool, bool)> {
        let (mut any, mut all) = (false, true);
        for queue in &mut self.queues {
            // Bounded, because sending must not wait too long.
            let mut emptied = false;
            for _ in 0..4 {
                let now = Instant::now();
                let count = queue.receive(|frame| {
                    if let Some(r) = frames::datagram(frame, self.local) {
                        endpoint.receive_identified(now, r.from, r.ce, r.id, r.datagram);
                    }
                })?;
                any |= count > 0;
                emptied = count < BATCH;
                if emptied {
                    break;
                }
            }
            all &= emptied;
        }
        Ok((any, all))
    }

    /// Sends all that may be sent. Returns whether anything was.
    pub fn transmit(&mut self, endpoint: &mut Endpoint) -> io::Result<bool> {
        let mut any = false;
        // All packets are sent by the first queue.
        let queue = &mut self.queues[0];
        loop {
            let now = Instant::now();
            let next = match self.unsent.take() {
                Some(t) => Some(t),
                None => endpoint.poll_transmit(now, &mut self.send),
            };
            let Some(t) = next else { break };
            let segment = t.segment_size.unwrap_or(t.len).max(1);
            if !queue.has_room(t.len.div_ceil(segment)) {
                self.unsent = Some(t);
                break;
            }
            let Some(dst_mac) = self.neighbours.mac(now, t.to) else {
                // The same as a loss.
                log::debug!("the next hop to {} is not known yet", t.to);
                continue;
            };
            let addresses =
                Addresses { src_mac: self.mac, dst_mac, src: self.local, port: t.port, dst: t.to };
            let headers = headers_len(t.to);
            let datagrams = || self.send[..t.len].chunks(segment);
            let mut bodies = datagrams();
            queue.send(datagrams().map(|d| headers + d.len()), |i, frame| {
                let body = bodies.next().unwrap_or_default();
                // The endpoint counts the identifications of one transmission up.
                frames::write_headers(frame, &addresses, i as u16, body.len());
                frame[headers..].copy_from_slice(body);
            })?;
            any = true;
        }
        if queue.is_behind() {
            queue.kick()?;
        }
        Ok(any)
    }
}

impl AsFd for XdpDriver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_ref().map_or_else(|| self.queues[0].as_fd(), |e| e.0.as_fd())
    }
}

/// The bytes of a MAC address in its usual form.
fn parse_mac(text: &str) -> Option<Mac> {
    let mut bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok());
    let mut mac = Mac::default();
    for byte in &mut mac {
        *byte = bytes.next()??;
    }
    bytes.next().is_none().then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_addresses_are_read() {
        assert_eq!(parse_mac("02:00:00:00:00:fe"), Some([2, 0, 0, 0, 0, 0xfe]));
        for wrong in ["", "02:00:00:00:00", "02:00:00:00:00:00:00", "02:00:00:00:00:xx"] {
            assert_eq!(parse_mac(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_loopback_interface_is_not_for_af_xdp() {
        // Whatever the process may do: loopback has no MAC address, or capabilities are missing.
        let error = XdpDriver::bind("127.0.0.77".parse().unwrap()).err().unwrap();
        assert!(matches!(error, XdpError::NoInterface | XdpError::Capabilities(_)), "{error}");
    }
}
