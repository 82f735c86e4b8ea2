//! Drives an [`Endpoint`] over an unprivileged UDP socket, with segmentation offload in both
//! directions (quinn-udp).

pub(crate) mod buffers;
mod port;

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use netsum_common::wire::ROCE_PORT;
use nix::poll::{PollFd, PollFlags};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use quinn_udp::{BATCH_SIZE, EcnCodepoint, RecvMeta};

pub use port::BindError;
use port::RoceSocket;
#[cfg(feature = "xdp")]
pub(crate) use port::open_port;

use netsum_rc::{Endpoint, Transmit};

/// Largest datagram or aggregate that the kernel delivers.
const RECEIVE_LEN: usize = 65_536;

/// The most by which timeouts are late while the socket is never empty.
const FLOODED: Duration = Duration::from_millis(100);
/// How long a driver polls before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(150);

/// Sends and receives RoCEv2 at one address.
#[derive(Debug)]
pub struct UdpDriver {
    local: IpAddr,
    /// To the next rank, and to the previous one if that is another socket.
    senders: Vec<(u16, RoceSocket)>,
    /// Empty: the first sender also receives.
    receivers: Vec<RoceSocket>,
    /// Readable when one of several receivers is.
    epoll: Option<Epoll>,
    receive: [Vec<u8>; BATCH_SIZE],
    meta: [RecvMeta; BATCH_SIZE],
    send: Vec<u8>,
    /// Datagrams for which the socket had no room.
    unsent: Option<Transmit>,
}

impl UdpDriver {
    /// Opens port 4791 of an address, where no other socket is.
    pub fn bind(local: IpAddr) -> Result<Self, BindError> {
        Ok(Self::over(local, vec![RoceSocket::first(local)?]))
    }

    /// Shares port 4791 of an address with other ranks of this user. Sends from these two ports, or
    /// where they are 0 from any. Receives once [`open_sockets`](Self::open_sockets) has been
    /// called.
    pub fn share(local: IpAddr, [next, previous]: [u16; 2]) -> Result<Self, BindError> {
        let next = RoceSocket::sender(local, next)?;
        Ok(Self::over(local, vec![next, RoceSocket::sender(local, previous)?]))
    }

    /// [`share`](Self::share), but the first at the address receives over a single socket.
    pub fn first_or_share(local: IpAddr) -> Result<Self, BindError> {
        match RoceSocket::first(local) {
            Ok(first) => Ok(Self::over(local, vec![first, RoceSocket::sender(local, 0)?])),
            Err(BindError::InUse(..)) => Self::share(local, [0; 2]),
            Err(error) => Err(error),
        }
    }

    fn over(local: IpAddr, senders: Vec<RoceSocket>) -> Self {
        Self {
            local,
            senders: senders.into_iter().map(|sender| (sender.port(), sender)).collect(),
            receivers: Vec::new(),
            epoll: None,
            receive: std::array::from_fn(|_| vec![0; RECEIVE_LEN]),
            meta: [RecvMeta::default(); BATCH_SIZE],
            send: Vec::new(),
            unsent: None,
        }
    }

    /// The UDP ports that it sends from to the next rank and to the previous one.
    pub fn ports(&self) -> [u16; 2] {
        [self.senders[0].0, self.senders[self.senders.len() - 1].0]
    }

    /// The socket that sends from a port.
    fn sender(&self, port: u16) -> &RoceSocket {
        let found = self.senders.iter().find(|(of, _)| *of == port);
        &found.unwrap_or(&self.senders[0]).1
    }

    /// Opens sockets to receive what neighbours send from these addresses and ports, if port 4791
    /// is shared.
    ///
    /// # Errors
    /// A neighbour's source port is not known, or a socket cannot be opened.
    pub fn open_sockets(&mut self, neighbours: [SocketAddr; 2]) -> Result<(), String> {
        if self.senders[0].0 == ROCE_PORT {
            return Ok(());
        }
        if let Ok(first) = RoceSocket::first(self.local) {
            self.receivers = vec![first];
            return Ok(());
        }
        if let Some(adapter) = neighbours.iter().find(|n| n.port() == 0) {
            return Err(format!(
                "other ranks have this address, and {} sends by an RDMA adapter, whose packets the \
                 kernel cannot tell apart: set NETSUM_IP to an address of this rank's own",
                adapter.ip()
            ));
        }
        let receivers = neighbours.iter().map(|n| RoceSocket::receiver(self.local, *n));
        self.receivers = receivers.collect::<Result<_, _>>().map_err(|e| e.to_string())?;
        self.epoll = Some(epoll(&self.receivers).map_err(|e| e.to_string())?);
        Ok(())
    }

    fn receivers(&self) -> &[RoceSocket] {
        match &*self.receivers {
            [] => std::slice::from_ref(&self.senders[0].1),
            receivers => receivers,
        }
    }

    /// How many packets of a path MTU the receive buffer holds at least. The kernel counts the
    /// memory that a packet takes, not its length: a page and its own state for a packet that came
    /// through XDP.
    pub fn receive_capacity(&self, mtu: usize) -> u32 {
        let packet = (mtu + 512).next_multiple_of(4096) + 512;
        let buffer = self.receivers().iter().map(|r| r.buffer).min().unwrap_or_default();
        (buffer / packet) as u32
    }

    /// How many segments the kernel cuts a large send into at most; 1 without segmentation.
    pub fn max_segments(&self) -> usize {
        self.senders[0].1.state.max_gso_segments()
    }

    /// Receives all that has arrived, checks the timers and sends all that may be sent. If that was
    /// nothing, waits for something to do, at most until `until`. Returns whether anything was
    /// received or sent.
    pub fn drive(&mut self, endpoint: &mut Endpoint, until: Instant) -> io::Result<bool> {
        endpoint.set_max_segments(self.max_segments());
        if self.progress(endpoint)? {
            return Ok(true);
        }
        let deadline = endpoint.next_timeout().map_or(until, |t| t.min(until));
        if deadline <= Instant::now() {
            return self.progress(endpoint);
        }
        let is_soon = self.unsent.is_none() && endpoint.in_flight() < MAX_POLLED_IN_FLIGHT;
        if is_soon && spin_until(deadline, || self.progress(endpoint))? {
            return Ok(true);
        }
        let wait = deadline.saturating_duration_since(Instant::now());
        let readable = PollFd::new(self.as_fd(), PollFlags::POLLIN);
        match self.unsent {
            Some(t) => {
                let writable = PollFd::new(self.sender(t.port).as_fd(), PollFlags::POLLOUT);
                wait_for_any(&mut [readable, writable], wait)?;
            }
            None => wait_for_any(&mut [readable], wait)?,
        }
        self.progress(endpoint)
    }

    fn progress(&mut self, endpoint: &mut Endpoint) -> io::Result<bool> {
        // The time before receiving: no timeout expires while its acknowledgement is in the socket,
        // however long this process did not run.
        let before = Instant::now();
        let (received, all) = self.receive(endpoint)?;
        endpoint.handle_timeout(timer_now(before, all));
        let sent = self.transmit(endpoint)?;
        Ok(received || sent)
    }

    /// Returns whether anything was received, and whether the sockets are empty.
    fn receive(&mut self, endpoint: &mut Endpoint) -> io::Result<(bool, bool)> {
        let (mut any, mut all) = (false, true);
        for at in 0..self.receivers().len() {
            let (received, is_empty) = self.receive_at(at, endpoint)?;
            any |= received;
            all &= is_empty;
        }
        Ok((any, all))
    }

    fn receive_at(&mut self, at: usize, endpoint: &mut Endpoint) -> io::Result<(bool, bool)> {
        let from = self.receivers.get(at).unwrap_or(&self.senders[0].1);
        let mut any = false;
        // Bounded, because sending must not wait too long.
        for _ in 0..4 {
            let mut slices = self.receive.each_mut().map(|b| IoSliceMut::new(b));
            let count = match from.state.recv((&*from.socket).into(), &mut slices, &mut self.meta) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok((any, true)),
                // An ICMP error of an earlier send: retransmission handles it.
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::ConnectionRefused | io::ErrorKind::Interrupted
                    ) =>
                {
                    continue;
                }
                Err(e) => return Err(e),
            };
            let now = Instant::now();
            for (meta, buffer) in self.meta.iter().zip(&self.receive).take(count) {
                let ce = meta.ecn == Some(EcnCodepoint::Ce);
                for datagram in buffer[..meta.len].chunks(meta.stride.max(1)) {
                    endpoint.receive(now, meta.addr, ce, datagram);
                }
            }
            any |= count > 0;
            if count < BATCH_SIZE {
                return Ok((any, true));
            }
        }
        Ok((any, false))
    }

    /// Sends all that may be sent. Returns whether anything was.
    pub fn transmit(&mut self, endpoint: &mut Endpoint) -> io::Result<bool> {
        let mut any = false;
        loop {
            let next = match self.unsent.take() {
                Some(t) => Some(t),
                None => endpoint.poll_transmit(Instant::now(), &mut self.send),
            };
            let Some(t) = next else { return Ok(any) };
            let datagrams = quinn_udp::Transmit {
                destination: SocketAddr::new(t.to, ROCE_PORT),
                ecn: Some(EcnCodepoint::Ect0),
                contents: &self.send[..t.len],
                segment_size: t.segment_size,
                src_ip: None,
            };
            let sender = self.sender(t.port);
            match sender.state.try_send((&*sender.socket).into(), &datagrams) {
                Ok(()) => any = true,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.unsent = Some(t);
                    return Ok(any);
                }
                Err(e) if e.raw_os_error() == Some(nix::errno::Errno::EMSGSIZE as i32) => {
                    let (payload, to) = (t.segment_size.unwrap_or(t.len), t.to);
                    // The headers of IP and UDP.
                    let mtu = payload + if to.is_ipv4() { 28 } else { 48 };
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidInput,
                        format!(
                            "a UDP payload of {payload} bytes does not fit the interface towards \
                             {to}: its MTU must be at least {mtu}"
                        ),
                    ));
                }
                // Temporarily out of memory or without a route, or segmentation is not supported
                // here: the same as a loss.
                Err(e) => log::debug!("cannot send to {}: {e}", t.to),
            }
        }
    }
}

impl AsFd for UdpDriver {
    /// Readable when something has arrived.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_ref().map_or_else(|| self.receivers()[0].socket.as_fd(), |e| e.0.as_fd())
    }
}

/// A descriptor that is readable when one of the sockets is.
pub(crate) fn epoll(sockets: &[impl AsFd]) -> io::Result<Epoll> {
    let all = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    for socket in sockets {
        all.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
    }
    Ok(all)
}

/// The time for which timers are checked: that before all packets were received. If there are
/// always more, as in a flood, timeouts are late, but they expire.
pub(crate) fn timer_now(before: Instant, all: bool) -> Instant {
    if all { before } else { before.checked_sub(FLOODED).unwrap_or(before) }
}

/// Polls for [`SPIN_TIME`] and not beyond a deadline, and yields the processor in between. Packets
/// usually arrive soon, and sleeping and waking take longer than polling: 4 and 16 KiB take a fifth
/// less time or more (4 ranks on two cores), large vectors the same. Spinning without yielding is
/// slower where ranks share cores: it blocks those that it waits for.
pub(crate) fn spin_until(
    deadline: Instant,
    mut progress: impl FnMut() -> io::Result<bool>,
) -> io::Result<bool> {
    let end = deadline.min(Instant::now() + SPIN_TIME);
    while Instant::now() < end {
        std::thread::yield_now();
        if progress()? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// With more bytes in flight no operation waits for a single packet, and polling would only keep a
/// CPU busy: at 100 Mb/s a packet arrives every 120 us.
pub(crate) const MAX_POLLED_IN_FLIGHT: u64 = 40 << 10;

/// Waits until a file descriptor is ready, or some time has passed.
pub fn wait_for(fd: BorrowedFd<'_>, flags: PollFlags, wait: Duration) -> io::Result<()> {
    wait_for_any(&mut [PollFd::new(fd, flags)], wait)
}

/// [`wait_for`] one of several.
pub(crate) fn wait_for_any(fds: &mut [PollFd<'_>], wait: Duration) -> io::Result<()> {
    let wait = nix::sys::time::TimeSpec::from_duration(wait.min(Duration::from_secs(1)));
    match nix::poll::ppoll(fds, Some(wait), None) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
