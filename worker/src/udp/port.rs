//! Port 4791 of an address, which ranks of one user share.
//!
//! The first rank at an address has an unconnected socket there. Each further one has a socket that
//! is connected to each of its neighbours (`SO_REUSEPORT`). Two ranks at an address may have the
//! same neighbour, which therefore sends to its next and to its previous rank from different ports.
//! The kernel prefers a connected socket for its peer's packets (`compute_score` in
//! net/ipv4/udp.c, Linux 6.12). So ranks need no agreement, and the end of one does not affect the
//! others. With a filter on queue pair numbers both would be different: it chooses by a socket's
//! number, which changes when another one is closed (`reuseport_detach_sock` in
//! net/core/sock_reuseport.c).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use netsum_common::wire::ROCE_PORT;
use nix::sys::socket::{setsockopt, sockopt};
use quinn_udp::UdpSocketState;
use socket2::{Domain, Protocol, Socket, Type};

use super::buffers;
use crate::addresses::wait_for_detection;
use crate::unshared::Unshared;

/// Requested size of each socket buffer in bytes. An unprivileged process may get less.
const SOCKET_BUFFER: usize = 16 << 20;
/// How long another rank may take from opening the port to sharing it.
const SHARED_WITHIN: Duration = Duration::from_millis(200);

/// Why a socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The port is in use, and not shared.
    #[error(
        "UDP port {1} of {0} is in use by another RoCEv2 endpoint that does not share it: the \
         kernel's Soft-RoCE, AF_XDP, another user's rank, or a communicator with a list of \
         addresses: set NETSUM_IP to another address"
    )]
    InUse(IpAddr, u16),
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
    #[error("cannot open a UDP socket on {0} port {1}: {2}")]
    Other(IpAddr, u16, #[source] io::Error),
}

/// A socket that sends or receives RoCEv2.
#[derive(Debug)]
pub(super) struct RoceSocket {
    pub socket: Unshared<Socket>,
    pub state: UdpSocketState,
    /// Bytes of its receive buffer.
    pub buffer: usize,
}

impl RoceSocket {
    fn over(socket: Unshared<Socket>, local: IpAddr) -> io::Result<Self> {
        let state = UdpSocketState::new((&*socket).into())?;
        if local.is_ipv6() {
            buffers::accept_no_checksum(socket.as_fd())?;
        }
        // quinn-udp 0.6.3 requests timestamps, and then has no room for the congestion mark of
        // packets that the kernel coalesced.
        setsockopt(&socket, sockopt::ReceiveTimestampns, &false)?;
        let buffer = buffers::enlarge(&socket, SOCKET_BUFFER)?;
        Ok(Self { socket, state, buffer })
    }

    /// The first at the address: receives all that no other socket is connected for.
    pub fn first(local: IpAddr) -> Result<Self, BindError> {
        let socket = open_port(local)?;
        let share = || {
            socket.set_reuse_port(true)?;
            Self::over(socket, local)
        };
        share().map_err(|e| BindError::Other(local, ROCE_PORT, e))
    }

    /// Sends from a port of its own, `port`, or if 0 from any, beside others at the address.
    pub fn sender(local: IpAddr, port: u16) -> Result<Self, BindError> {
        drop(open_shared(local)?);
        let socket = open(local, port, false)?;
        Self::over(socket, local).map_err(|e| BindError::Other(local, port, e))
    }

    /// The port that it is bound to.
    pub fn port(&self) -> u16 {
        let address = self.socket.local_addr().ok().and_then(|address| address.as_socket());
        address.map_or(ROCE_PORT, |address| address.port())
    }

    /// Receives what one neighbour sends.
    pub fn receiver(local: IpAddr, neighbour: SocketAddr) -> Result<Self, BindError> {
        let socket = open_shared(local)?;
        let connected = socket.connect(&neighbour.into()).and_then(|()| Self::over(socket, local));
        connected.map_err(|e| BindError::Other(local, ROCE_PORT, e))
    }
}

/// Opens a socket on port 4791 of an address, where there is none.
pub(crate) fn open_port(local: IpAddr) -> Result<Unshared<Socket>, BindError> {
    open(local, ROCE_PORT, false)
}

/// Opens a socket on port 4791 of an address beside others, which may be about to share it.
fn open_shared(local: IpAddr) -> Result<Unshared<Socket>, BindError> {
    let until = Instant::now() + SHARED_WITHIN;
    loop {
        match open(local, ROCE_PORT, true) {
            Err(BindError::InUse(..)) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            opened => return opened,
        }
    }
}

fn open(local: IpAddr, port: u16, shared: bool) -> Result<Unshared<Socket>, BindError> {
    let address = SocketAddr::new(local, port);
    let open = || -> io::Result<Unshared<Socket>> {
        let socket = Unshared::new(Socket::new(
            Domain::for_address(address),
            Type::DGRAM,
            Some(Protocol::UDP),
        )?);
        socket.set_reuse_port(shared)?;
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
        io::ErrorKind::AddrInUse => BindError::InUse(local, port),
        io::ErrorKind::AddrNotAvailable => BindError::NoSuchAddress(local),
        _ => BindError::Other(local, port, e),
    })
}

impl AsFd for RoceSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
