//! An AF_XDP socket on one receive queue of an interface, with its rings and its memory.

use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send, setsockopt, sockopt};
use xdp::nic::NicIndex;
use xdp::slab::{Slab, StackSlab};
use xdp::socket::{OptName, SocketError, XdpSocket, XdpSocketBuilder};
use xdp::umem::{FrameSize, UmemCfgBuilder};
use xdp::{RingConfigBuilder, Umem, WakableRings};

use super::error::XdpError;

/// Frames for the kernel to receive into. With the others they are less than 6 MiB, below the 8 MiB
/// that systemd lets processes lock.
pub(super) const RX_FRAMES: usize = 1024;
/// Frames for sending.
pub(super) const TX_FRAMES: usize = 512;
/// Bytes of a frame: a page.
const FRAME: usize = 4096;
/// Bytes of a frame for the packet: the kernel reserves the first ones (XDP_PACKET_HEADROOM).
pub(super) const ROOM: usize = FRAME - 256;
/// Packets to receive or send at once.
pub(super) const BATCH: usize = 64;
/// Descriptors that the kernel sends in one call in copy mode (net/xdp/xsk.c, `TX_BATCH_SIZE`).
const KICK: usize = 32;
/// Requested size of the socket buffer in bytes, large enough that only the rings limit.
const SEND_BUFFER: usize = 16 << 20;
/// How long a queue may be busy: the kernel frees the queue of a closed socket with a delay.
const BUSY: Duration = Duration::from_secs(2);

/// A socket. The kernel and this process share its memory: pages stay until both have released
/// them.
pub(super) struct Queue {
    // Dropped in this order: the socket is closed before its rings and its memory are unmapped.
    socket: XdpSocket,
    rings: WakableRings,
    umem: Umem,
    /// Frames that the kernel has to receive into, or has filled and this process has not read.
    receiving: usize,
    /// Frames being sent.
    sending: usize,
    /// The kernel may not have processed some of them.
    behind: bool,
    zero_copy: bool,
}

impl Queue {
    /// Opens a socket on a queue, in the driver's memory if it can.
    pub fn open(ifindex: u32, number: u32) -> Result<Self, XdpError> {
        let failed = |step, source| XdpError::Socket { queue: number, step, source };
        let start = Instant::now();
        loop {
            match Self::try_open(ifindex, number) {
                Err(XdpError::Socket { source, .. })
                    if source.raw_os_error() == Some(libc::EBUSY) && start.elapsed() < BUSY =>
                {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(XdpError::Socket { step, source, .. })
                    if source.raw_os_error() == Some(libc::EBUSY) =>
                {
                    let text = format!("{source}: another AF_XDP socket has this queue");
                    return Err(failed(step, io::Error::other(text)));
                }
                other => return other,
            }
        }
    }

    fn try_open(ifindex: u32, number: u32) -> Result<Self, XdpError> {
        let failed = |step, source| XdpError::Socket { queue: number, step, source };
        let config = |e: xdp::error::Error| failed("its sizes", io::Error::other(e.to_string()));
        let umem = UmemCfgBuilder {
            frame_size: FrameSize::FourK,
            frame_count: (RX_FRAMES + TX_FRAMES) as u32,
            ..UmemCfgBuilder::default()
        };
        let mut umem =
            Umem::map(umem.build().map_err(config)?).map_err(|e| failed("its memory", e))?;
        let sizes = RingConfigBuilder {
            rx_count: RX_FRAMES as u32,
            tx_count: TX_FRAMES as u32,
            fill_count: RX_FRAMES as u32,
            completion_count: TX_FRAMES as u32,
        };
        let refused = |e: SocketError| match e {
            SocketError::SetSockOpt { inner, option: OptName::UmemRegion }
                if inner.raw_os_error() == Some(libc::ENOBUFS) =>
            {
                XdpError::Memory { mib: ((RX_FRAMES + TX_FRAMES) * FRAME) >> 20 }
            }
            SocketError::SocketCreation(inner) => failed("opening it", inner),
            SocketError::SetSockOpt { inner, .. } | SocketError::GetSockOpt { inner, .. } => {
                failed("its options", inner)
            }
            SocketError::RingMap { inner, .. } => failed("its rings", inner),
            SocketError::Bind(inner) => failed("binding it", inner),
        };
        let mut builder = XdpSocketBuilder::new().map_err(refused)?;
        let (mut rings, flags) =
            builder.build_wakable_rings(&umem, sizes.build().map_err(config)?).map_err(refused)?;
        // SAFETY: the kernel owns the frames until they return by the receive ring. If this process
        // unmapped the memory before the socket is closed, the kernel would still have the pages,
        // which it has pinned.
        let receiving = unsafe { rings.fill_ring.enqueue(&mut umem, RX_FRAMES, false) }
            .map_err(|e| failed("its frames", e))?;
        let socket = builder.bind(NicIndex::new(ifindex), number, flags).map_err(refused)?;
        let mut queue =
            Self { socket, rings, umem, receiving, sending: 0, behind: false, zero_copy: false };
        if setsockopt(&queue.as_fd(), sockopt::SndBufForce, &SEND_BUFFER).is_err() {
            // The kernel's default size must do.
            let _ = setsockopt(&queue.as_fd(), sockopt::SndBuf, &SEND_BUFFER);
        }
        queue.zero_copy = is_zero_copy(queue.as_fd()).unwrap_or(false);
        Ok(queue)
    }

    /// Whether the adapter itself reads and writes the socket's memory.
    pub fn is_zero_copy(&self) -> bool {
        self.zero_copy
    }

    /// Passes up to [`BATCH`] received packets to a function, and returns their frames to the
    /// kernel. Returns how many there were.
    pub fn receive(&mut self, mut packet: impl FnMut(&[u8])) -> io::Result<usize> {
        let mut arrived = StackSlab::<BATCH>::new();
        let Some(ring) = &mut self.rings.rx_ring else { return Ok(0) };
        // SAFETY: the packets are not used after this function, and the memory lives as long as
        // `self`.
        let count = unsafe { ring.recv(&self.umem, &mut arrived) };
        if count == 0 {
            return Ok(0);
        }
        self.receiving -= count.min(self.receiving);
        // A packet in several frames would need another kind of socket; the kernel drops those.
        while let Some(frame) = arrived.pop_back() {
            packet(&frame);
            self.umem.free_packet(frame);
        }
        let wanted = RX_FRAMES - self.receiving;
        // SAFETY: as when it was opened.
        self.receiving += unsafe { self.rings.fill_ring.enqueue(&mut self.umem, wanted, false) }?;
        Ok(count)
    }

    /// Whether `packets` can be sent now.
    pub fn has_room(&mut self, packets: usize) -> bool {
        if self.sending + packets > TX_FRAMES {
            self.reclaim();
        }
        self.sending + packets <= TX_FRAMES
    }

    /// Takes back frames that have been sent.
    fn reclaim(&mut self) {
        self.sending -=
            self.rings.completion_ring.dequeue(&mut self.umem, TX_FRAMES).min(self.sending);
    }

    /// Puts up to [`BATCH`] packets of these lengths into the send ring.
    /// [`has_room`](Self::has_room) must have returned true. `write` fills the n-th packet.
    pub fn send(
        &mut self,
        lengths: impl Iterator<Item = usize>,
        mut write: impl FnMut(usize, &mut [u8]),
    ) -> io::Result<()> {
        let full = || io::Error::other("AF_XDP: more packets than frames");
        let mut leaving = StackSlab::<BATCH>::new();
        for (i, len) in lengths.enumerate() {
            // SAFETY: the packet is put into the ring below, and the memory lives as long as
            // `self`.
            let mut frame = unsafe { self.umem.alloc() }.ok_or_else(full)?;
            let len = i32::try_from(len).map_err(io::Error::other)?;
            frame
                .adjust_tail(len)
                .map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e.to_string()))?;
            write(i, &mut frame);
            if leaving.push_front(frame).is_some() {
                return Err(full());
            }
        }
        let count = leaving.len();
        let Some(ring) = &mut self.rings.tx_ring else { return Err(full()) };
        // SAFETY: the kernel owns the frames until they return by the completion ring; for the
        // memory, see above.
        let sent = unsafe { ring.send(&mut leaving, false) }?;
        self.sending += sent;
        self.behind |= sent > 0;
        if sent == count { Ok(()) } else { Err(full()) }
    }

    /// Whether the kernel must be woken to send.
    pub fn is_behind(&self) -> bool {
        self.behind
    }

    /// Wakes the kernel to send, until it has processed all packets or cannot send more now.
    pub fn kick(&mut self) -> io::Result<()> {
        for _ in 0..=self.sending / KICK {
            match send(self.socket.as_raw_fd(), &[], MsgFlags::MSG_DONTWAIT) {
                Ok(_) => {
                    self.behind = false;
                    break;
                }
                // The kernel has sent a batch, or has no room in the socket's buffer.
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(Errno::EBUSY | Errno::ENOBUFS) => break,
                // The same as a loss: the link may come back.
                Err(e @ Errno::ENETDOWN) => {
                    log::debug!("AF_XDP: {e}");
                    self.behind = false;
                    break;
                }
                Err(e) => return Err(e.into()),
            }
        }
        self.reclaim();
        Ok(())
    }
}

impl AsRawFd for Queue {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the socket is open as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.socket.as_raw_fd()) }
    }
}

/// Queries the kernel (if_xdp.h, `XDP_OPTIONS`).
fn is_zero_copy(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut options = libc::xdp_options { flags: 0 };
    let mut len = size_of_val(&options) as libc::socklen_t;
    // SAFETY: value and length live across the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_OPTIONS,
            (&raw mut options).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(options.flags & libc::XDP_OPTIONS_ZEROCOPY != 0)
}

/// How many receive queues an interface has, by `ETHTOOL_GCHANNELS`; 1 if its driver does not
/// report it.
pub(super) fn receive_queues(interface: &str) -> io::Result<u32> {
    /// `include/uapi/linux/ethtool.h`.
    const ETHTOOL_GCHANNELS: u32 = 0x3c;
    /// `struct ethtool_channels`.
    #[derive(Default)]
    #[repr(C)]
    struct Channels {
        cmd: u32,
        most: [u32; 4],
        rx: u32,
        tx: u32,
        other: u32,
        combined: u32,
    }
    let mut channels = Channels { cmd: ETHTOOL_GCHANNELS, ..Channels::default() };
    // SAFETY: integers and byte arrays; all zeros is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero: it ends the name.
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    let socket = UdpSocket::bind(("127.0.0.1", 0))?;
    // SAFETY: the request and the structure that it points to live across the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    if result != 0 {
        return match Errno::last() {
            Errno::EOPNOTSUPP => Ok(1),
            e => Err(e.into()),
        };
    }
    Ok((channels.rx + channels.combined).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_have_queues() {
        // Loopback does not report it, which gives one.
        assert_eq!(receive_queues("lo").unwrap(), 1);
        assert!(receive_queues("nothing0").is_err());
    }
}
