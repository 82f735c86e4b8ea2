//! Frames to the neighbour at the other end of a port.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use nix::sys::socket::{LinkAddr, MsgFlags, SockaddrLike as _, bind, sendto};

/// The group address that any kind of bridge takes for itself, and does not forward.
pub(crate) const NEAREST_BRIDGE: [u8; 6] = [0x01, 0x80, 0xc2, 0, 0, 0x0e];
/// Bytes of the two addresses and the EtherType.
pub(crate) const HEADER: usize = 14;

/// The socket address for frames of a type at an interface.
fn address(ethertype: u16, ifindex: u32) -> io::Result<LinkAddr> {
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: ethertype.to_be(),
        sll_ifindex: ifindex as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the address lives, has this length, and is of this family.
    let address = unsafe { LinkAddr::from_raw((&raw const address).cast(), Some(length)) };
    address.ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

pub(crate) fn send(
    socket: &impl AsFd,
    ethertype: u16,
    ifindex: u32,
    frame: &[u8],
) -> io::Result<()> {
    sendto(
        socket.as_fd().as_raw_fd(),
        frame,
        &address(ethertype, ifindex)?,
        MsgFlags::MSG_DONTWAIT,
    )?;
    Ok(())
}

/// Binds a socket to one EtherType at one interface.
pub(crate) fn bind_to(socket: &impl AsFd, ethertype: u16, ifindex: u32) -> io::Result<()> {
    Ok(bind(socket.as_fd().as_raw_fd(), &address(ethertype, ifindex)?)?)
}
