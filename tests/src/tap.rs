//! A host that is nothing but frames: sends any, and shows every frame that arrives.

use std::io;
use std::mem::{MaybeUninit, size_of};
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
    /// Opens an interface.
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
        Ok(Self { socket })
    }

    /// Sends a frame.
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
            let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
            let Ok((len, from)) = self.socket.recv_from(&mut buffer) else { continue };
            // SAFETY: the kernel has written the address of a packet socket.
            let from = unsafe { &*from.as_ptr().cast::<libc::sockaddr_ll>() };
            if from.sll_pkttype == libc::PACKET_OUTGOING {
                continue;
            }
            // SAFETY: the kernel has written `len` bytes.
            let frame: Vec<u8> = buffer[..len].iter().map(|b| unsafe { b.assume_init() }).collect();
            if wanted(&frame) {
                return Ok(frame);
            }
        }
    }
}
