//! Socket options that none of our crates supports.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::sys::socket::{setsockopt, sockopt};
use socket2::Socket;

/// Accepts packets without a UDP checksum, as the box sends them (RFC 6935; Linux 3.16).
pub fn accept_no_checksum(fd: BorrowedFd<'_>) -> io::Result<()> {
    /// `include/uapi/linux/udp.h`.
    const UDP_NO_CHECK6_RX: libc::c_int = 102;
    set_option(fd, libc::SOL_UDP, UDP_NO_CHECK6_RX, 1)
}

/// Sets an option whose value is an int.
pub fn set_option(
    fd: BorrowedFd<'_>,
    level: i32,
    option: i32,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the option's value is an int that lives across the call.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Enlarges both buffers, beyond the system's limit if the process may. Returns the receive
/// buffer's size.
pub fn enlarge(socket: &Socket, bytes: usize) -> io::Result<usize> {
    if setsockopt(socket, sockopt::RcvBufForce, &bytes).is_err() {
        socket.set_recv_buffer_size(bytes)?;
    }
    if setsockopt(socket, sockopt::SndBufForce, &bytes).is_err() {
        socket.set_send_buffer_size(bytes)?;
    }
    socket.recv_buffer_size()
}
