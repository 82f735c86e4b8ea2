//! Drives an [`Endpoint`] over an unprivileged UDP socket, with segmentation offload in both
//! directions (quinn-udp).

pub(crate) mod buffers;

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use netsum_common::wire::ROCE_PORT;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{setsockopt, sockopt};
use quinn_udp::{BATCH_SIZE, EcnCodepoint, RecvMeta, UdpSocketState};
use socket2::{Domain, Protocol, Socket, Type};

use crate::addresses::wait_for_detection;
use crate::unshared::{self, Unshared};
use netsum_rc::{Endpoint, Transmit};

/// Requested size of each socket buffer in bytes. An unprivileged process may get less.
const SOCKET_BUFFER: usize = 16 << 20;
/// Largest datagram or aggregate that the kernel delivers.
const RECEIVE_LEN: usize = 65_536;

/// The most by which timeouts are late while the socket is never empty.
const FLOODED: Duration = Duration::from_millis(100);
/// How long a driver polls before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(150);

/// Why a socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// This process already has the port on this address.
    #[error(
        "this process has a communicator at {0} already: close that one first, or use it, because \
         each communicator needs its own address"
    )]
    Ours(IpAddr),
    /// Another program has the port on this address.
    #[error(
        "UDP port {ROCE_PORT} of {0} is in use by another RoCEv2 endpoint, perhaps the kernel's \
         Soft-RoCE: each rank needs its own address"
    )]
    InUse(IpAddr),
    /// It means nothing without an interface, and RoCEv2 headers have none.
    #[error("{0} is a link-local address: use a global or unique local one")]
    LinkLocal(IpAddr),
    /// This machine does not have the address.
    #[error(
        "{0} is not an address of this machine: set NETSUM_IP, or NETSUM_PEERS at this rank's \
         place, to one that `ip address` shows"
    )]
    NoSuchAddress(IpAddr),
    /// Another error.
    #[error("cannot open a UDP socket on {0} port {ROCE_PORT}: {1}")]
    Other(IpAddr, #[source] io::Error),
}

/// Opens a socket on port 4791 of an address.
pub(crate) fn open_port(local: IpAddr) -> Result<Unshared<Socket>, BindError> {
    let open = || -> io::Result<Unshared<Socket>> {
        let address = SocketAddr::new(local, ROCE_PORT);
        let socket = Unshared::new(Socket::new(
            Domain::for_address(address),
            Type::DGRAM,
            Some(Protocol::UDP),
        )?);
        socket.bind(&address.into())?;
        Ok(socket)
    };
    if matches!(local, IpAddr::V6(ip) if ip.is_unicast_link_local()) {
        return Err(BindError::LinkLocal(local));
    }
    let opened = match open() {
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable && wait_for_detection(local) => {
            open()
        }
        opened => opened,
    };
    opened.map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse if unshared::is_bound(SocketAddr::new(local, ROCE_PORT)) => {
            BindError::Ours(local)
        }
        io::ErrorKind::AddrInUse => BindError::InUse(local),
        io::ErrorKind::AddrNotAvailable => BindError::NoSuchAddress(local),
        _ => BindError::Other(local, e),
    })
}

/// A socket that speaks RoCEv2.
#[derive(Debug)]
pub struct UdpDriver {
    socket: Unshared<Socket>,
    state: UdpSocketState,
    receive: [Vec<u8>; BATCH_SIZE],
    meta: [RecvMeta; BATCH_SIZE],
    send: Vec<u8>,
    /// Datagrams for which the socket had no room.
    unsent: Option<Transmit>,
    receive_buffer: usize,
}

impl UdpDriver {
    /// Opens port 4791 of an address.
    pub fn bind(local: IpAddr) -> Result<Self, BindError> {
        let socket = open_port(local)?;
        Self::over(socket, local).map_err(|e| BindError::Other(local, e))
    }

    fn over(socket: Unshared<Socket>, local: IpAddr) -> io::Result<Self> {
        let state = UdpSocketState::new((&*socket).into())?;
        if local.is_ipv6() {
            buffers::accept_no_checksum(socket.as_fd())?;
        }
        // quinn-udp 0.6.3 requests timestamps, and then has no room for the congestion mark of
        // packets that the kernel coalesced.
        setsockopt(&socket, sockopt::ReceiveTimestampns, &false)?;
        let receive_buffer = buffers::enlarge(&socket, SOCKET_BUFFER)?;
        Ok(Self {
            socket,
            state,
            receive: std::array::from_fn(|_| vec![0; RECEIVE_LEN]),
            meta: [RecvMeta::default(); BATCH_SIZE],
            send: Vec::new(),
            unsent: None,
            receive_buffer,
        })
    }

    /// How many packets of a path MTU the receive buffer holds at least. The kernel counts the
    /// memory that a packet takes, not its length: a page and its own state for a packet that came
    /// through XDP.
    pub fn receive_capacity(&self, mtu: usize) -> u32 {
        let packet = (mtu + 512).next_multiple_of(4096) + 512;
        (self.receive_buffer / packet) as u32
    }

    /// How many segments the kernel cuts a large send into at most; 1 without segmentation.
    pub fn max_segments(&self) -> usize {
        self.state.max_gso_segments()
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
        let mut flags = PollFlags::POLLIN;
        if self.unsent.is_some() {
            flags |= PollFlags::POLLOUT;
        }
        wait_for(self.socket.as_fd(), flags, wait)?;
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

    /// Returns whether anything was received, and whether the socket is empty.
    fn receive(&mut self, endpoint: &mut Endpoint) -> io::Result<(bool, bool)> {
        let mut any = false;
        // Bounded, because sending must not wait too long.
        for _ in 0..4 {
            let mut slices = self.receive.each_mut().map(|b| IoSliceMut::new(b));
            let count = match self.state.recv((&*self.socket).into(), &mut slices, &mut self.meta) {
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
            match self.state.try_send((&*self.socket).into(), &datagrams) {
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
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
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

/// With so many bytes in flight no operation waits for a single packet, and polling would only keep
/// a processor busy: at 100 Mb/s a packet arrives every 120 us.
pub(crate) const MAX_POLLED_IN_FLIGHT: u64 = 40 << 10;

/// Waits until a file descriptor is ready, or some time has passed.
pub fn wait_for(fd: BorrowedFd<'_>, flags: PollFlags, wait: Duration) -> io::Result<()> {
    let wait = nix::sys::time::TimeSpec::from_duration(wait.min(Duration::from_secs(1)));
    match nix::poll::ppoll(&mut [PollFd::new(fd, flags)], Some(wait), None) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
