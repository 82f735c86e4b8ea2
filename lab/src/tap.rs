//! Sends arbitrary frames as a host, and receives every frame that arrives there.

use std::collections::VecDeque;
use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use netsum_common::wire;
use socket2::{Domain, Socket, Type};

use crate::frames::{ipv4_checksum, udp_checksum};
use crate::netns::Netns;

/// A packet socket on one interface.
#[derive(Debug)]
pub struct Tap {
    socket: Socket,
    /// Frames that were received but not requested yet.
    received: Mutex<VecDeque<Vec<u8>>>,
}

impl Tap {
    pub fn open(netns: &Netns, interface: &str) -> Result<Self> {
        let ifindex = netns.ifindex(interface)?;
        let all = (libc::ETH_P_ALL as u16).to_be();
        // Without a protocol until it is bound: otherwise it would receive other interfaces'
        // frames.
        let socket = netns.enter(|| Socket::new(Domain::PACKET, Type::RAW, None))?;
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: all,
            sll_ifindex: ifindex as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the address lives, has this length, and is of the socket's family.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) };
        if bound != 0 {
            return Err(io::Error::last_os_error())
                .with_context(|| format!("packet socket on {interface}"));
        }
        socket.set_recv_buffer_size(8 << 20)?;
        let on: libc::c_int = 1;
        for option in [libc::PACKET_AUXDATA, libc::PACKET_VNET_HDR] {
            // SAFETY: the option's value is an int that lives across the call.
            let set = unsafe {
                libc::setsockopt(
                    socket.as_raw_fd(),
                    libc::SOL_PACKET,
                    option,
                    (&raw const on).cast(),
                    size_of_val(&on) as libc::socklen_t,
                )
            };
            if set != 0 {
                return Err(io::Error::last_os_error())
                    .with_context(|| format!("option {option} of a packet socket"));
            }
        }
        Ok(Self { socket, received: Mutex::default() })
    }

    pub fn send(&self, frame: &[u8]) -> Result<()> {
        let message = [&[0; VNET_HDR_LEN], frame].concat();
        let sent = self.socket.send(&message)?;
        anyhow::ensure!(sent == message.len(), "{sent} bytes of {} were sent", message.len());
        Ok(())
    }

    /// The next arriving frame for which `wanted` is true.
    ///
    /// # Errors
    /// If none arrives within `timeout`.
    pub fn receive(&self, timeout: Duration, wanted: impl Fn(&[u8]) -> bool) -> Result<Vec<u8>> {
        let start = Instant::now();
        loop {
            let left = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero());
            let left = left.with_context(|| format!("no such frame within {timeout:?}"))?;
            self.socket.set_read_timeout(Some(left))?;
            if let Some(frame) = self.next().filter(|frame| wanted(frame)) {
                return Ok(frame);
            }
        }
    }

    /// The next frame as it was on the link; `None` if none is waiting.
    fn next(&self) -> Option<Vec<u8>> {
        let mut received = self.received.lock().expect("nobody panics here");
        if received.is_empty() {
            received.extend(self.receive_some().unwrap_or_default());
        }
        received.pop_front()
    }

    /// Receives a frame, or several that the kernel has coalesced. Returns no frame if it is an
    /// outgoing one.
    fn receive_some(&self) -> io::Result<Vec<Vec<u8>>> {
        let mut buffer = vec![0u8; VNET_HDR_LEN + (64 << 10) + 128];
        // Aligned as a control message must be, with room for the auxiliary data.
        let mut control = [0u64; 8];
        // SAFETY: a structure of integers and pointers; all zeros is a value.
        let (mut from, mut message): (libc::sockaddr_ll, libc::msghdr) =
            unsafe { std::mem::zeroed() };
        let mut vector =
            libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        message.msg_name = (&raw mut from).cast();
        message.msg_namelen = size_of_val(&from) as libc::socklen_t;
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: all that the message points to lives across the call and has the stated lengths.
        let len = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, 0) };
        let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
        if from.sll_pkttype == libc::PACKET_OUTGOING {
            return Ok(Vec::new());
        }
        let Some((&[_, kind, _, _, size @ .., _, _, _, _], frame)) =
            buffer[..len].split_first_chunk::<VNET_HDR_LEN>()
        else {
            return Ok(Vec::new());
        };
        let mut frames = match kind {
            GSO_UDP_L4 => datagrams(frame, u16::from_le_bytes(size).into()),
            _ => vec![frame.to_vec()],
        };
        // SAFETY: the kernel has written the control messages, each as long as its header says.
        let auxiliary = unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            let is_it = !header.is_null()
                && (*header).cmsg_level == libc::SOL_PACKET
                && (*header).cmsg_type == libc::PACKET_AUXDATA;
            is_it.then(|| libc::CMSG_DATA(header).cast::<libc::tpacket_auxdata>().read_unaligned())
        };
        // The kernel removes the tag from a frame before it delivers the frame.
        if let Some(aux) = auxiliary.filter(|aux| aux.tp_status & libc::TP_STATUS_VLAN_VALID != 0) {
            let tag = [aux.tp_vlan_tpid.to_be_bytes(), aux.tp_vlan_tci.to_be_bytes()].concat();
            for frame in &mut frames {
                frame.splice(12..12, tag.iter().copied());
            }
        }
        Ok(frames)
    }
}

/// Length of a `virtio_net_hdr` (include/uapi/linux/virtio_net.h): flags and segmentation type, one
/// byte each; header length, segment size, checksum start and checksum offset, 16 bits each.
const VNET_HDR_LEN: usize = 10;
/// `VIRTIO_NET_HDR_GSO_UDP_L4`.
const GSO_UDP_L4: u8 = 5;

/// The frames that the kernel has coalesced into one; each datagram but the last has `size` bytes.
fn datagrams(frame: &[u8], size: usize) -> Vec<Vec<u8>> {
    let (ip, l3) = (wire::EthHdr::LEN, if frame[12] == 8 { wire::L3::V4 } else { wire::L3::V6 });
    let udp = ip + l3.header_len();
    let (headers, payload) = frame.split_at(udp + wire::UdpHdr::LEN);
    let single = |part: &[u8]| {
        let mut f = [headers, part].concat();
        let len = (wire::UdpHdr::LEN + part.len()) as u16;
        f[udp + 4..udp + 6].copy_from_slice(&len.to_be_bytes());
        match l3 {
            wire::L3::V4 => {
                f[ip + 2..ip + 4].copy_from_slice(&(wire::Ipv4Hdr::LEN as u16 + len).to_be_bytes());
                f[ip + 10..ip + 12].fill(0);
                let checksum = ipv4_checksum(&f[ip..udp]);
                f[ip + 10..ip + 12].copy_from_slice(&checksum.to_be_bytes());
            }
            wire::L3::V6 => f[ip + 4..ip + 6].copy_from_slice(&len.to_be_bytes()),
        }
        let checksum = udp_checksum(&f, l3, ip);
        f[udp + 6..udp + 8].copy_from_slice(&checksum.to_be_bytes());
        f
    };
    payload.chunks(size.max(1)).map(single).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::{FrameSpec, lanes};

    #[test]
    fn frames_that_were_put_together_are_as_they_were() {
        for v6 in [false, true] {
            let spec = |psn| {
                let spec =
                    FrameSpec::send(1, 2, 3, psn, lanes(psn, if psn == 12 { 8 } else { 64 }));
                let spec = FrameSpec { udp_checksum: 1, id: 0, ..spec };
                if v6 { spec.v6() } else { spec }
            };
            let all: Vec<_> = (10..13).map(|psn| spec(psn).build_result()).collect();
            let at = all[0].len() - (wire::BTH_LEN + 256 + wire::ICRC_LEN);
            let together = [&all[0][..], &all[1][at..], &all[2][at..]].concat();
            assert_eq!(datagrams(&together, all[0].len() - at), all);
        }
    }
}
