//! Facts about the box itself. Slaves of bonds: their packets belong to the bond. Addresses of the
//! box: no packet from a port may carry one, or ranks would follow a foreign host's ARP away from
//! the daemon, and send it their tokens. Excluded are those on cards beside the ports, as a router
//! may bring their packets to a port, and link-local ones, unless all ports are on their link:
//! routers often have one such address on all their links. Addresses of its gateways: each belongs
//! to the port that the gateway is behind.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use anyhow::Result;
use netsum_common::abi::{Address, Owner};
use netsum_controller::message::mac_from_text;
use netsum_core::plane::mapped;

use super::agent::Shared;
use super::link::Interface;
use super::netlink::{Gateway, Netlink, resolve_neighbour};
use super::rtnl::Changes;

/// Longest time between two looks, in case notices are lost.
const INTERVAL: Duration = Duration::from_secs(10);
/// The loopback interface's number in each network namespace (`LOOPBACK_IFINDEX`,
/// include/net/flow.h, Linux 6.12).
const LOOPBACK: u32 = 1;

/// How MAC addresses of virtual routers begin: VRRP (RFC 5798, 7.3), HSRP of version 1 (RFC 2281,
/// 2) and 2 and for IPv6, and GLBP. They move between ports, and the box cannot tell one that moves
/// from a host that impersonates it.
const VIRTUAL: [&[u8]; 6] = [
    &[0, 0, 0x5e, 0, 1],
    &[0, 0, 0x5e, 0, 2],
    &[0, 0, 0x0c, 7, 0xac],
    &[0, 0, 0x0c, 0x9f],
    &[0, 5, 0x73, 0xa0],
    &[0, 7, 0xb4],
];

/// Maps the slaves of bonds, and reserves the current addresses of this machine and of its
/// gateways.
pub async fn update(shared: &Shared, netlink: &Netlink) -> Result<()> {
    let interfaces = netlink.interfaces().await?;
    let addresses = netlink.addresses().await?;
    let macs = interfaces.iter().filter_map(|l| mac_from_text(&l.mac));
    let macs: HashSet<_> = macs.filter(|mac| *mac != [0; 6]).collect();
    let slaves = interfaces.iter().filter_map(|l| Some((l.ifindex, l.bond?))).collect();
    let gateways = netlink.gateways().await?;
    let mut inner = shared.lock();
    let ports: Vec<u32> = inner.controller.ports().iter().map(|port| port.ifindex).collect();
    let own = of_the_box(&addresses, &interfaces, &ports)
        .into_iter()
        .map(|ip| Address::ip(mapped(ip)))
        .chain(macs.iter().filter(|mac| !is_virtual(mac)).map(|mac| Address::mac(*mac)));
    inner.executor.reserved.gateways =
        of_gateways(&gateways, &interfaces, &ports, resolve_neighbour);
    inner.executor.plane.set_slaves(slaves)?;
    inner.executor.reserved.the_box = own.map(|address| (address, Owner::THE_BOX)).collect();
    inner.controller.set_own_addresses(addresses.into_iter().map(|(_, ip)| ip).collect(), macs);
    inner.executor.reserve()
}

/// The addresses that no packet from a port may carry, out of the box's own and their interfaces:
/// those of loopback interfaces and of the ports' links, with VLANs and macvlans on these, but no
/// virtual router's. A link-local one only if all ports are on its very link.
fn of_the_box(
    addresses: &[(u32, IpAddr)],
    interfaces: &[Interface],
    ports: &[u32],
) -> HashSet<IpAddr> {
    let of = |ifindex| interfaces.iter().find(|l| l.ifindex == ifindex);
    let bridge = |port| of(port)?.bridge;
    let is_on = |port, link| port == link || bridge(port) == Some(link);
    let is_at_ports = |link| {
        // A VLAN may be on a VLAN.
        let below = std::iter::successors(Some(link), |&link| of(link)?.link).take(4);
        below.into_iter().any(|link| ports.iter().any(|&p| is_on(p, link)))
    };
    let is_own = |&&(link, ip): &&(u32, IpAddr)| {
        let mac = of(link).and_then(|l| mac_from_text(&l.mac)).unwrap_or_default();
        if is_link_local(ip) {
            ports.iter().all(|&p| is_on(p, link))
        } else {
            !is_virtual(&mac) && (link == LOOPBACK || is_at_ports(link))
        }
    };
    addresses.iter().filter(is_own).map(|&(_, ip)| ip).collect()
}

fn is_virtual(mac: &[u8; 6]) -> bool {
    VIRTUAL.iter().any(|start| mac.starts_with(start))
}

/// Hosts on another link may have the same address.
pub(super) fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// The addresses of gateways, by the ports that they are behind. A port that routes leads only to
/// its gateway. If a bridge routes, the gateway belongs to the port on which the bridge has seen
/// it, as long as the bridge remembers it; `ask` refreshes that while the gateway exists. Two
/// gateways with one address, as on links of their own, get no port.
fn of_gateways(
    gateways: &[Gateway],
    interfaces: &[Interface],
    ports: &[u32],
    ask: impl Fn(IpAddr),
) -> HashMap<Address, u32> {
    let mut places = HashMap::new();
    for &Gateway { ip, ifindex, mac, seen_at } in gateways {
        let by = interfaces.iter().find(|l| l.ifindex == ifindex);
        let is_elsewhere = gateways.iter().any(|other| other.ip == ip && other.ifindex != ifindex);
        if is_elsewhere || by.is_none_or(|by| by.router.is_none()) {
            continue;
        }
        if ports.contains(&ifindex) && !is_link_local(ip) {
            places.insert(Address::ip(mapped(ip)), ifindex);
        } else if interfaces.iter().any(|l| l.bridge == Some(ifindex)) {
            ask(ip);
            let moves = mac.is_some_and(|mac| is_virtual(&mac));
            let port = seen_at.filter(|port| ports.contains(port) && !moves);
            if let (Some(mac), Some(port)) = (mac, port) {
                places.extend([(Address::ip(mapped(ip)), port), (Address::mac(mac), port)]);
            }
        }
    }
    places
}

/// Keeps all of these up to date.
pub async fn follow(shared: Shared, netlink: Netlink, mut changes: Changes) {
    loop {
        if let Err(e) = update(&shared, &netlink).await {
            log::error!("cannot update the box's addresses, gateways and bonds: {e:#}");
        }
        if let Ok(false) = tokio::time::timeout(INTERVAL, changes.next()).await {
            return log::error!(
                "netlink: changes of this box's addresses and bonds are no longer noticed"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn addresses_are_the_boxs_on_its_ports_links() {
        let port = |ifindex, bridge, link| Interface {
            ifindex,
            bridge,
            link,
            mac: format!("02:00:00:00:00:{ifindex:02}"),
            ..Interface::default()
        };
        // A bridge with two ports, one that routes, a card beside them, a VLAN on a VLAN, and a
        // virtual router's macvlan on it.
        let virtual_mac = "00:00:5e:00:01:07".to_owned();
        let interfaces = [
            port(12, None, None),
            port(2, Some(12), None),
            port(3, Some(12), None),
            port(4, None, None),
            port(5, None, None),
            port(6, None, Some(8)),
            port(8, None, Some(12)),
            Interface { mac: virtual_mac, ..port(7, None, Some(12)) },
        ];
        let global: IpAddr = "10.0.0.1".parse().unwrap();
        let is_own = |link, ip, ports: &[u32]| {
            of_the_box(&[(link, ip)], &interfaces, ports) == HashSet::from([ip])
        };
        for (link, expected) in
            [(12, true), (2, true), (4, true), (5, false), (6, true), (7, false), (LOOPBACK, true)]
        {
            assert_eq!(is_own(link, global, &[2, 3, 4]), expected, "interface {link}");
        }
        for local in ["fe80::1", "169.254.0.1"].map(|ip| ip.parse().unwrap()) {
            assert!(is_own(12, local, &[2, 3]) && is_own(4, local, &[4]));
            assert!(!is_own(12, local, &[2, 3, 4]), "port 4 routes");
            assert!(!is_own(4, local, &[2, 3, 4]) && !is_own(5, local, &[2, 3]));
        }
    }

    #[test]
    fn a_gateway_belongs_to_the_port_that_it_is_behind() {
        let interface = |ifindex, bridge, routes: bool| Interface {
            ifindex,
            bridge,
            router: routes.then_some([2; 6]),
            ..Interface::default()
        };
        // A bridge with two ports, two ports that route, and the machine's own interface.
        let interfaces = [
            interface(1, None, true),
            interface(2, Some(1), true),
            interface(3, Some(1), true),
            interface(4, None, true),
            interface(5, None, false),
        ];
        let mac = [2, 0, 0, 0, 0, 7];
        let gateway =
            |ifindex, mac, seen_at| Gateway { ip: [10, 0, 0, 7].into(), ifindex, mac, seen_at };
        let ip = Address::ip(mapped([10, 0, 0, 7].into()));
        let asked = Cell::new(0);
        let places = |gateway: Gateway| {
            of_gateways(&[gateway], &interfaces, &[2, 3, 4], |_| asked.set(asked.get() + 1))
        };
        assert_eq!(places(gateway(4, None, None)), HashMap::from([(ip, 4)]), "that routes");
        assert_eq!(places(gateway(5, Some(mac), Some(2))), HashMap::new(), "it routes nothing");
        assert_eq!(asked.get(), 0);
        let both = HashMap::from([(ip, 3), (Address::mac(mac), 3)]);
        assert_eq!(places(gateway(1, Some(mac), Some(3))), both);
        assert_eq!(
            places(gateway(1, Some(mac), Some(9))),
            HashMap::new(),
            "not a port of netsum's"
        );
        assert_eq!(places(gateway(1, Some(mac), None)), HashMap::new(), "nobody has seen it");
        for virtual_mac in
            [[0, 0, 0x5e, 0, 1, 7], [0, 0, 0x0c, 0x9f, 0xf0, 7], [0, 7, 0xb4, 0, 1, 1]]
        {
            assert_eq!(places(gateway(1, Some(virtual_mac), Some(3))), HashMap::new(), "it moves");
        }
        assert_eq!(asked.get(), 6, "the bridge is to see it again");
        let two = [gateway(4, None, None), gateway(1, Some(mac), Some(3))];
        assert_eq!(of_gateways(&two, &interfaces, &[2, 3, 4], |_| {}), HashMap::new());
        let of_link = Gateway { ip: "fe80::1".parse().unwrap(), ..two[0] };
        assert_eq!(of_gateways(&[of_link], &interfaces, &[4], |_| {}), HashMap::new());
    }
}
