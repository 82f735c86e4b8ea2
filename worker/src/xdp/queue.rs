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

/// Frames that the kernel has to receive into. With those below 6 MiB, which is less than the 8 MiB
/// that systemd lets processes lock.
pub(super) const RX_FRAMES: usize = 1024;
/// Frames that may be on their way out.
pub(super) const TX_FRAMES: usize = 512;
/// Bytes of a frame: a page.
const FRAME: usize = 4096;
/// Bytes of a frame that a packet may have: the kernel keeps the first for itself
/// (XDP_PACKET_HEADROOM).
pub(super) const ROOM: usize = FRAME - 256;
/// Packets taken in or given out at once.
pub(super) const BATCH: usize = 64;
/// Descriptors that the kernel sends in one call in copy mode (net/xdp/xsk.c, `TX_BATCH_SIZE`).
const KICK: usize = 32;
/// Bytes of socket buffer asked for, so that it is the rings that limit.
const SEND_BUFFER: usize = 16 << 20;
/// How long a queue may be busy: the kernel frees that of a socket which was closed a moment ago by
/// and by.
const BUSY: Duration = Duration::from_secs(2);

/// A socket. Its memory is the kernel's as well as ours: pages stay until both have let them go.
pub(super) struct Queue {
    // In this order: the socket is closed before its rings and its memory are unmapped.
    socket: XdpSocket,
    rings: WakableRings,
    umem: Umem,
    /// Frames that the kernel has to receive into, or has filled and we have not yet seen.
    receiving: usize,
    /// Frames on their way out.
    sending: usize,
    /// Some of them may not have been looked at by the kernel.
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
        // SAFETY: the frames are the kernel's until they come back by the ring of received ones.
        // Should this process unmap the memory before the socket is gone, the kernel still has the
        // pages, which it has pinned.
        let receiving = unsafe { rings.fill_ring.enqueue(&mut umem, RX_FRAMES, false) }
            .map_err(|e| failed("its frames", e))?;
        let socket = builder.bind(NicIndex::new(ifindex), number, flags).map_err(refused)?;
        let mut queue =
            Self { socket, rings, umem, receiving, sending: 0, behind: false, zero_copy: false };
        if setsockopt(&queue.as_fd(), sockopt::SndBufForce, &SEND_BUFFER).is_err() {
            // Then the kernel's usual size has to do.
            let _ = setsockopt(&queue.as_fd(), sockopt::SndBuf, &SEND_BUFFER);
        }
        queue.zero_copy = is_zero_copy(queue.as_fd()).unwrap_or(false);
        Ok(queue)
    }

    /// Whether the adapter itself reads and writes the socket's memory.
    pub fn is_zero_copy(&self) -> bool {
        self.zero_copy
    }

    /// Shows up to [`BATCH`] packets that have arrived, and gives their frames back to the kernel.
    /// How many there were.
    pub fn receive(&mut self, mut packet: impl FnMut(&[u8])) -> io::Result<usize> {
        let mut arrived = StackSlab::<BATCH>::new();
        let Some(ring) = &mut self.rings.rx_ring else { return Ok(0) };
        // SAFETY: the packets are gone at the end of this function, and the memory is there as long
        // as `self`.
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

    /// Whether so many packets can be sent now.
    pub fn has_room(&mut self, packets: usize) -> bool {
        if self.sending + packets > TX_FRAMES {
            self.reclaim();
        }
        self.sending + packets <= TX_FRAMES
    }

    /// Takes frames back that have been sent.
    fn reclaim(&mut self) {
        self.sending -=
            self.rings.completion_ring.dequeue(&mut self.umem, TX_FRAMES).min(self.sending);
    }

    /// Puts up to [`BATCH`] packets, of so many bytes each, into the ring of those to be sent.
    /// [`has_room`](Self::has_room) must have said so. `write` fills in the n-th.
    pub fn send(
        &mut self,
        lengths: impl Iterator<Item = usize>,
        mut write: impl FnMut(usize, &mut [u8]),
    ) -> io::Result<()> {
        let full = || io::Error::other("AF_XDP: more packets than frames");
        let mut leaving = StackSlab::<BATCH>::new();
        for (i, len) in lengths.enumerate() {
            // SAFETY: the packet is given to the ring below, and the memory is there as long as
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
        // SAFETY: the frames are the kernel's until they come back by the completion ring; for the
        // memory, see above.
        let sent = unsafe { ring.send(&mut leaving, false) }?;
        self.sending += sent;
        self.behind |= sent > 0;
        if sent == count { Ok(()) } else { Err(full()) }
    }

    /// Whether the kernel should be told to send.
    pub fn is_behind(&self) -> bool {
        self.behind
    }

    /// Tells the kernel that there is something to be sent, until it has looked at all of it or
    /// will not do more now.
    pub fn kick(&mut self) -> io::Result<()> {
        for _ in 0..=self.sending / KICK {
            match send(self.socket.as_raw_fd(), &[], MsgFlags::MSG_DONTWAIT) {
                Ok(_) => {
                    self.behind = false;
                    break;
                }
                // So many at once, and no more, or no room in the socket's buffer.
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(Errno::EBUSY | Errno::ENOBUFS) => break,
                // As if lost on the way: the link may come again.
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

/// Asks the kernel (if_xdp.h, `XDP_OPTIONS`).
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

/// How many receive queues an interface has, by `ETHTOOL_GCHANNELS`; 1 where its driver does not
/// say.
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
        // Loopback has no such thing, and so one.
        assert_eq!(receive_queues("lo").unwrap(), 1);
        assert!(receive_queues("nothing0").is_err());
    }
}
