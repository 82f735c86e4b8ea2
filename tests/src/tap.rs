//! A host that is nothing but frames: sends any, and shows every frame that arrives.

use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use socket2::{Domain, Socket, Type};

use crate::netns::Netns;

/// A packet socket on one interface.
#[derive(Debug)]
pub struct Tap {
    socket: Socket,
}

impl Tap {
    pub fn open(netns: &Netns, interface: &str) -> Result<Self> {
        let ifindex = netns.ifindex(interface)?;
        let all = (libc::ETH_P_ALL as u16).to_be();
        // No protocol until it is bound: nothing of other interfaces.
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
            return Err(io::Error::last_os_error()).with_context(|| format!("packet socket on {interface}"));
        }
        socket.set_recv_buffer_size(8 << 20)?;
        let on: libc::c_int = 1;
        // SAFETY: the option's value is an int that lives across the call.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_AUXDATA,
                (&raw const on).cast(),
                size_of_val(&on) as libc::socklen_t,
            )
        };
        if set != 0 {
            return Err(io::Error::last_os_error()).context("PACKET_AUXDATA");
        }
        Ok(Self { socket })
    }

    pub fn send(&self, frame: &[u8]) -> Result<()> {
        let sent = self.socket.send(frame)?;
        anyhow::ensure!(sent == frame.len(), "{sent} bytes of {} were sent", frame.len());
        Ok(())
    }

    /// The next frame that arrives and that `wanted` wants.
    ///
    /// # Errors
    /// If none does within `timeout`.
    pub fn receive(&self, timeout: Duration, wanted: impl Fn(&[u8]) -> bool) -> Result<Vec<u8>> {
        let start = Instant::now();
        loop {
            let left = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero());
            let left = left.with_context(|| format!("no such frame within {timeout:?}"))?;
            self.socket.set_read_timeout(Some(left))?;
            let Ok(received) = self.receive_one() else { continue };
            if let Some(frame) = received.filter(|frame| wanted(frame)) {
                return Ok(frame);
            }
        }
    }

    /// The next frame as it was on the wire; `None` for one that goes out.
    fn receive_one(&self) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = [0u8; 4096];
        // Aligned as a control message has to be; room for one with the auxiliary data.
        let mut control = [0u64; 8];
        // SAFETY: a structure of integers and pointers; all zeros is a value.
        let (mut from, mut message): (libc::sockaddr_ll, libc::msghdr) = unsafe { std::mem::zeroed() };
        let mut vector = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        message.msg_name = (&raw mut from).cast();
        message.msg_namelen = size_of_val(&from) as libc::socklen_t;
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: all that the message points to lives across the call and has the lengths that it says.
        let len = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, 0) };
        let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
        if from.sll_pkttype == libc::PACKET_OUTGOING {
            return Ok(None);
        }
        let mut frame = buffer[..len].to_vec();
        // SAFETY: the kernel has written the control messages, as long as it says in each header.
        let auxiliary = unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            let is_it = !header.is_null()
                && (*header).cmsg_level == libc::SOL_PACKET
                && (*header).cmsg_type == libc::PACKET_AUXDATA;
            is_it.then(|| libc::CMSG_DATA(header).cast::<libc::tpacket_auxdata>().read_unaligned())
        };
        // The kernel takes the tag out of a frame before it shows it.
        if let Some(aux) = auxiliary.filter(|aux| aux.tp_status & libc::TP_STATUS_VLAN_VALID != 0) {
            let tag = [aux.tp_vlan_tpid.to_be_bytes(), aux.tp_vlan_tci.to_be_bytes()].concat();
            frame.splice(12..12, tag);
        }
        Ok(Some(frame))
    }
}
