//! This machine's addresses, and which of them to use.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use crate::udp::buffers::set_option;

/// Duplicate address detection takes up to two seconds (RFC 4862, sections 5.4 and 5.1: a random
/// delay of up to one, and one transmission), unless an administrator asks for more probes.
const DETECTION: Duration = Duration::from_secs(3);
/// How often the addresses are read again.
const STEP: Duration = Duration::from_millis(50);

/// Flags in the kernel's list of IPv6 addresses (`include/uapi/linux/if_addr.h`).
const TEMPORARY: u8 = 0x01;
const DETECTED_TWICE: u8 = 0x08;
const DEPRECATED: u8 = 0x20;
const TENTATIVE: u8 = 0x40;

/// The address of this machine on the route to another. Sends nothing. An IPv6 address is a stable
/// one: not a temporary one (RFC 8981), and the function waits until it has been checked for
/// duplicates.
///
/// # Errors
/// If there is no such host, or no route to it.
pub fn towards(to: impl ToSocketAddrs) -> io::Result<IpAddr> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for to in to.to_socket_addrs()? {
        let until = Instant::now() + DETECTION;
        loop {
            let own = source(to);
            if stays(to.ip(), &own) || !any_is_tentative() || Instant::now() >= until {
                match own {
                    Ok(own) => return Ok(own),
                    Err(error) => last = error,
                }
                break;
            }
            std::thread::sleep(STEP);
        }
    }
    Err(last)
}

/// The kernel's choice.
fn source(to: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
    let socket = UdpSocket::bind((any, 0))?;
    if to.is_ipv6() {
        // RFC 5014. If it fails, the kernel chooses without this preference.
        let public = libc::IPV6_PREFER_SRC_PUBLIC;
        let _ = set_option(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_ADDR_PREFERENCES, public);
    }
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip())
}

/// Whether the chosen address is final, and not a substitute until a better one may be used.
fn stays(to: IpAddr, own: &io::Result<IpAddr>) -> bool {
    match (to, own) {
        (IpAddr::V4(_), _) => true,
        (IpAddr::V6(to), Ok(IpAddr::V6(own))) => {
            // Without another address the kernel takes a link-local or even the loopback one.
            own.is_unicast_link_local() == to.is_unicast_link_local()
                && own.is_loopback() == to.is_loopback()
                && !has(*own, TEMPORARY)
        }
        _ => false,
    }
}

/// This machine's addresses that others may reach: stable ones of interfaces that are up and
/// connected.
#[must_use]
pub fn reachable() -> Vec<IpAddr> {
    let needed = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING;
    let flags = v6_flags();
    let address = |a: nix::ifaddrs::InterfaceAddress| {
        let socket = a.address.filter(|_| a.flags.contains(needed))?;
        let v4 = socket.as_sockaddr_in().map(|s| IpAddr::V4(s.ip()));
        let ip = v4.or_else(|| Some(IpAddr::V6(socket.as_sockaddr_in6()?.ip())))?;
        let fit = match ip {
            IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
            IpAddr::V6(ip) => {
                let unfit = TEMPORARY | DEPRECATED | DETECTED_TWICE;
                let stays = !flags.iter().any(|(other, flags)| *other == ip && flags & unfit != 0);
                stays && !ip.is_loopback() && !ip.is_unicast_link_local()
            }
        };
        fit.then_some(ip)
    };
    getifaddrs().map(|all| all.filter_map(address).collect()).unwrap_or_default()
}

/// Waits until an address has been checked for duplicates. Returns whether it had to wait.
pub(crate) fn wait_for_detection(ip: IpAddr) -> bool {
    let IpAddr::V6(ip) = ip else { return false };
    let until = Instant::now() + DETECTION;
    let was = is_tentative(ip);
    while is_tentative(ip) && Instant::now() < until {
        std::thread::sleep(STEP);
    }
    was
}

fn is_tentative(ip: Ipv6Addr) -> bool {
    has(ip, TENTATIVE) && !has(ip, DETECTED_TWICE)
}

fn any_is_tentative() -> bool {
    v6_flags().iter().any(|(ip, flags)| {
        flags & (TENTATIVE | DETECTED_TWICE) == TENTATIVE && !ip.is_unicast_link_local()
    })
}

fn has(ip: Ipv6Addr, flag: u8) -> bool {
    v6_flags().iter().any(|(other, flags)| *other == ip && flags & flag != 0)
}

fn v6_flags() -> Vec<(Ipv6Addr, u8)> {
    // Without IPv6 the kernel has no such file.
    parse(&std::fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap_or_default())
}

/// Reads addresses and their flags: the first and the fifth of six columns.
fn parse(list: &str) -> Vec<(Ipv6Addr, u8)> {
    let one = |line: &str| {
        let mut columns = line.split_whitespace();
        let ip = u128::from_str_radix(columns.next()?, 16).ok()?;
        Some((ip.into(), u8::from_str_radix(columns.nth(3)?, 16).ok()?))
    };
    list.lines().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_list_is_read() {
        let list = "fd000000000000000000000000000007 02 40 00 41     eth0\n\
                    00000000000000000000000000000001 01 80 10 80       lo\n\n?\n";
        assert_eq!(
            parse(list),
            [("fd00::7".parse().unwrap(), TEMPORARY | TENTATIVE), (Ipv6Addr::LOCALHOST, 0x80)]
        );
    }

    #[test]
    fn a_substitute_address_is_not_final() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let no_way = || Err(io::Error::from(io::ErrorKind::AddrNotAvailable));
        assert!(stays(ip("10.0.0.1"), &no_way()));
        assert!(!stays(ip("fd00::1"), &no_way()));
        assert!(!stays(ip("fd00::1"), &Ok(ip("fe80::1"))) && !stays(ip("fd00::1"), &Ok(ip("::1"))));
        assert!(
            stays(ip("fd00::1"), &Ok(ip("fd00::2"))) && stays(ip("fe80::1"), &Ok(ip("fe80::2")))
        );
    }

    #[test]
    fn the_route_to_this_machine_has_its_address() {
        assert_eq!(towards("127.0.0.1:9").unwrap(), IpAddr::from([127, 0, 0, 1]));
        assert!(towards(("no.such.host.invalid", 9)).is_err());
        assert!(!reachable().iter().any(IpAddr::is_loopback));
    }
}
