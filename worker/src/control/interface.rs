//! The interface that holds an address.

use std::io;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub name: String,
    /// `None` without a MAC address, as on loopback.
    pub mac: Option<String>,
    /// In bytes; `None` if the kernel does not report it.
    pub mtu: Option<u32>,
}

pub(crate) fn that_holds(ip: IpAddr) -> Option<Interface> {
    let all: Vec<InterfaceAddress> = getifaddrs().ok()?.collect();
    let holds = |a: &&InterfaceAddress| {
        a.address.as_ref().is_some_and(|s| {
            s.as_sockaddr_in().is_some_and(|s| IpAddr::V4(s.ip()) == ip)
                || s.as_sockaddr_in6().is_some_and(|s| IpAddr::V6(s.ip()) == ip)
        })
    };
    let name = all.iter().find(holds)?.interface_name.clone();
    let mac = all
        .iter()
        .filter(|a| a.interface_name == name)
        .find_map(|a| a.address.as_ref()?.as_link_addr()?.addr())
        .filter(|mac| *mac != [0; 6]);
    let mac = mac.map(|mac| mac.map(|b| format!("{b:02x}")).join(":"));
    let mtu = mtu_of(&name).ok();
    Some(Interface { name, mac, mtu })
}

/// An interface's MTU (netdevice(7)).
fn mtu_of(name: &str) -> io::Result<u32> {
    // SAFETY: integers and byte arrays; all zeros is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero: it ends the name.
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    // SAFETY: the request lives across the call, which writes an int into it.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has written this field.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_foreign_hosts_have_no_mac() {
        let loopback = that_holds("127.0.0.1".parse().unwrap()).unwrap();
        assert_eq!((loopback.mac, loopback.mtu), (None, Some(65536)));
        assert_eq!(that_holds("192.0.2.77".parse().unwrap()), None);
    }
}
