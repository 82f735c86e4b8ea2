//! The interface that holds an address.

use std::net::IpAddr;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};

/// The MAC address of the interface that holds an address. `None` where there is none, as on loopback.
pub(crate) fn mac_of(ip: IpAddr) -> Option<String> {
    let all: Vec<InterfaceAddress> = getifaddrs().ok()?.collect();
    let holds = |a: &&InterfaceAddress| {
        a.address.as_ref().is_some_and(|s| {
            s.as_sockaddr_in().is_some_and(|s| IpAddr::V4(s.ip()) == ip)
                || s.as_sockaddr_in6().is_some_and(|s| IpAddr::V6(s.ip()) == ip)
        })
    };
    let name = &all.iter().find(holds)?.interface_name;
    let mac = all
        .iter()
        .filter(|a| a.interface_name == *name)
        .find_map(|a| a.address.as_ref()?.as_link_addr()?.addr())?;
    (mac != [0; 6]).then(|| mac.map(|b| format!("{b:02x}")).join(":"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_strangers_have_no_mac() {
        assert_eq!(mac_of("127.0.0.1".parse().unwrap()), None);
        assert_eq!(mac_of("192.0.2.77".parse().unwrap()), None);
    }
}
