//! Interfaces, bridge ports and the bridge's forwarding table, over netlink.

use std::collections::{BTreeSet, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use netsum_core::bridging::{Bridged, obstacles};
use netsum_core::port::Problem;
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteNextHop, RouteType, RouteVia,
};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::protocols::NETLINK_ROUTE;

use super::bandwidth_probes::BandwidthProbes;
use super::filters::filters;
use super::link::HEADER;
pub use super::link::Interface;
use super::neighbours::LldpNeighbours;
use super::port_selection::PortSelection;
use super::rtnl::{Raw, Rtnl};
use crate::config::Ports;

/// A netlink connection.
#[derive(Clone)]
pub struct Netlink {
    rtnl: Rtnl,
    /// The neighbours that ports see; `None` without LLDP.
    pub lldp: Option<LldpNeighbours>,
    /// Sends and receives bandwidth probes; `None` without a socket for them.
    pub bandwidth_probes: Option<BandwidthProbes>,
}

impl Netlink {
    /// Connects, within a tokio runtime.
    pub fn open() -> Result<Self> {
        Ok(Self {
            rtnl: Rtnl::open(NETLINK_ROUTE).context("netlink")?,
            lldp: None,
            bandwidth_probes: None,
        })
    }

    /// All interfaces.
    pub async fn interfaces(&self) -> Result<Vec<Interface>> {
        let messages = self.rtnl.dump(link(0)).await.context("the list of interfaces")?;
        Ok(completed(messages.iter().filter_map(|m| Interface::parse(&m.bytes)).collect()))
    }

    /// Why bridges may not forward between these ports.
    pub async fn obstacles(&self, ports: &HashSet<u32>) -> Result<Vec<Problem>> {
        let all = self.interfaces().await?;
        let ports: Vec<&Interface> = all.iter().filter(|l| ports.contains(&l.ifindex)).collect();
        let bridges: HashSet<u32> = ports.iter().filter_map(|l| l.bridge).collect();
        if bridges.is_empty() {
            return Ok(Vec::new());
        }
        let is_on = |what: &str| {
            let on = std::fs::read_to_string(format!("/proc/sys/net/bridge/bridge-nf-call-{what}"));
            // If /proc/sys is hidden, as by systemd's ProcSubset, it may be on.
            on.map_or_else(|_| !Path::new("/proc/sys/net").exists(), |on| on.trim() != "0")
        };
        let calls = |l: &Interface| bridges.contains(&l.ifindex) && l.settings.call_iptables;
        let through = [is_on("iptables") || all.iter().any(calls), is_on("ip6tables")];
        let filters = filters(through).await.unwrap_or_else(|e| {
            log::debug!("cannot list nftables' chains: {e:#}");
            Vec::new()
        });
        let bridged: Vec<Bridged> = ports.into_iter().map(Interface::bridged).collect();
        Ok(obstacles(&bridged, &filters))
    }

    /// An interface by its number; `None` if the kernel reports that it does not exist.
    async fn interface(&self, ifindex: u32) -> Result<Option<Interface>> {
        match self.rtnl.get(link(ifindex)).await {
            Ok(messages) => Ok(messages.iter().find_map(|m| Interface::parse(&m.bytes))),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => Ok(None),
            Err(e) => Err(e).with_context(|| format!("interface {ifindex}")),
        }
    }

    /// The interfaces that a configuration names.
    ///
    /// # Errors
    /// If one is missing.
    pub async fn choose(&self, ports: &Ports) -> Result<(PortSelection, Vec<Interface>)> {
        PortSelection::new(ports.clone(), &self.interfaces().await?)
    }

    /// The chosen interfaces that exist now. If the kernel's list lacks one of these ports, a query
    /// of its own confirms that.
    pub async fn present(
        &self,
        chosen: &mut PortSelection,
        ports: &[u32],
    ) -> Result<Vec<Interface>> {
        let mut all = self.interfaces().await?;
        for ifindex in ports.iter().chain(chosen.ifindexes()).filter(|i| **i != 0) {
            if all.iter().all(|l| l.ifindex != *ifindex) {
                all.extend(self.interface(*ifindex).await?);
            }
        }
        Ok(chosen.find(&completed(all)))
    }

    /// IP addresses of this machine, and the interfaces that have them.
    pub async fn addresses(&self) -> Result<Vec<(u32, IpAddr)>> {
        let question = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let messages = self.rtnl.dump(question).await.context("the list of addresses")?;
        let messages: Vec<AddressMessage> = messages
            .iter()
            .filter_map(|m| match m.decode()? {
                RouteNetlinkMessage::NewAddress(m) => Some(m),
                _ => None,
            })
            .collect();
        // On a point-to-point link, the first address belongs to the other end.
        let ip = |a: &AddressAttribute| match a {
            AddressAttribute::Address(ip) | AddressAttribute::Local(ip) => Some(*ip),
            _ => None,
        };
        let local = |a: &&AddressAttribute| matches!(a, AddressAttribute::Local(_));
        let own = |m: &AddressMessage| {
            let ip = m.attributes.iter().find(local).or(m.attributes.first()).and_then(ip)?;
            Some((m.header.index, ip))
        };
        Ok(messages.iter().filter_map(own).collect())
    }

    /// The gateways of this machine's routes, with their MAC addresses and bridge ports, if known.
    pub async fn gateways(&self) -> Result<Vec<Gateway>> {
        let mut found = BTreeSet::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut question = RouteMessage::default();
            question.header.address_family = family;
            let question = RouteNetlinkMessage::GetRoute(question);
            let routes = match self.rtnl.dump(question).await {
                Ok(routes) => routes,
                // A kernel without IPv6.
                Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => continue,
                Err(e) => return Err(e).context("the list of routes"),
            };
            for route in routes.iter().filter_map(|m| m.decode()) {
                let RouteNetlinkMessage::NewRoute(route) = route else { continue };
                found.extend(gateway(&route.attributes, None));
                for attribute in &route.attributes {
                    let RouteAttribute::MultiPath(hops) = attribute else { continue };
                    let of =
                        |hop: &RouteNextHop| gateway(&hop.attributes, Some(hop.interface_index));
                    found.extend(hops.iter().filter_map(of));
                }
            }
        }
        if found.is_empty() {
            return Ok(Vec::new());
        }
        let mut neighbours = self.neighbours(AddressFamily::Inet).await?;
        neighbours.extend(self.neighbours(AddressFamily::Inet6).await?);
        let table = self.neighbours(AddressFamily::Bridge).await?;
        let gateway = |(ip, ifindex): (IpAddr, u32)| {
            let is_it = |e: &&NeighbourMessage| {
                let address = neighbour(ip);
                let of = |a: &NeighbourAttribute| matches!(a, NeighbourAttribute::Destination(d) if *d == address);
                e.header.ifindex == ifindex && e.attributes.iter().any(of)
            };
            let mac = neighbours.iter().find(is_it).and_then(mac_of);
            let seen = |e: &&NeighbourMessage| {
                mac.is_some() && mac_of(e) == mac && e.header.state != NeighbourState::Permanent
            };
            let mut seen_at: Vec<u32> =
                table.iter().filter(seen).map(|e| e.header.ifindex).collect();
            seen_at.dedup();
            // A switch with one MAC address on several ports, in VLANs of their own, has no place.
            let seen_at = (seen_at.len() == 1).then(|| seen_at[0]);
            Gateway { ip, ifindex, mac, seen_at }
        };
        Ok(found.into_iter().map(gateway).collect())
    }

    /// MAC addresses that bridges have seen, and their interfaces.
    pub async fn hosts(&self) -> Result<Vec<(u32, [u8; 6])>> {
        let table = self
            .neighbours(AddressFamily::Bridge)
            .await
            .context("the bridge's forwarding table")?;
        // Permanent entries are the interfaces' own addresses; a set first bit means a group
        // address.
        let seen = table.iter().filter(|e| e.header.state != NeighbourState::Permanent);
        let host = |e: &NeighbourMessage| {
            mac_of(e).filter(|mac| mac[0] & 1 == 0).map(|mac| (e.header.ifindex, mac))
        };
        let hosts: BTreeSet<_> = seen.filter_map(host).collect();
        Ok(hosts.into_iter().collect())
    }

    /// Finds a host's port. First choice is the interface behind which the bridge has seen its MAC
    /// address. Otherwise it is the interface of the router by which this machine reaches the
    /// host's IP address, or the one of these `ports` by which it does so. Waits a second for one
    /// of them to appear.
    pub async fn port_of(&self, mac: [u8; 6], ip: IpAddr, ports: &[u32]) -> Result<PortLookup> {
        let mut router = None;
        for attempt in 0..20 {
            let table = self
                .neighbours(AddressFamily::Bridge)
                .await
                .context("the bridge's forwarding table")?;
            let behind = |mac: [u8; 6]| {
                table.iter().find(|e| mac_of(e) == Some(mac)).map(|e| e.header.ifindex)
            };
            if let Some(ifindex) = behind(mac) {
                return Ok(PortLookup::Port { ifindex, mac });
            }
            // The host's own packets take precedence: a network in which this machine has no
            // address may seem to be behind its router.
            if attempt >= 4 {
                let next_hop = self.next_hop_to(ip).await?;
                router = next_hop.as_ref().map(|next_hop| next_hop.next).filter(|next| *next != ip);
                match next_hop {
                    Some(NextHop { mac: Some(mac), ifindex, .. }) => {
                        let port = ports.contains(&ifindex).then_some(ifindex);
                        if let Some(ifindex) = router.and_then(|_| behind(mac)).or(port) {
                            return Ok(PortLookup::Port { ifindex, mac });
                        }
                    }
                    Some(NextHop { mac: None, .. }) => resolve_neighbour(ip),
                    None => {}
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(PortLookup::NotSeen { router })
    }

    /// The interface behind which a neighbour of this machine, or the router towards an address,
    /// is; `None` if unknown.
    pub async fn seen_at(&self, ip: IpAddr) -> Result<Option<u32>> {
        let Some(NextHop { mac: Some(mac), ifindex, .. }) = self.next_hop_to(ip).await? else {
            return Ok(None);
        };
        let table = self
            .neighbours(AddressFamily::Bridge)
            .await
            .context("the bridge's forwarding table")?;
        Ok(table
            .iter()
            .find(|e| mac_of(e) == Some(mac))
            .map(|e| e.header.ifindex)
            .or(Some(ifindex)))
    }

    /// Entries of a neighbour table.
    async fn neighbours(&self, family: AddressFamily) -> Result<Vec<NeighbourMessage>> {
        let mut question = NeighbourMessage::default();
        question.header.family = family;
        let messages = self.rtnl.dump(RouteNetlinkMessage::GetNeighbour(question)).await?;
        let entry = |m: &Raw| match m.decode()? {
            RouteNetlinkMessage::NewNeighbour(m) => Some(m),
            _ => None,
        };
        Ok(messages.iter().filter_map(entry).collect())
    }

    /// The route from this machine to an address; `None` without one.
    pub async fn next_hop_to(&self, ip: IpAddr) -> Result<Option<NextHop>> {
        let mut question = RouteMessage::default();
        (question.header.address_family, question.header.destination_prefix_length) = match ip {
            IpAddr::V4(_) => (AddressFamily::Inet, 32),
            IpAddr::V6(_) => (AddressFamily::Inet6, 128),
        };
        question.attributes.push(RouteAttribute::Destination(ip.into()));
        let answer = match self.rtnl.get(RouteNetlinkMessage::GetRoute(question)).await {
            Ok(answer) => answer,
            // There is no route.
            Err(e) if e.raw_os_error().is_some() => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("the route to {ip}")),
        };
        let route = |m: &Raw| match m.decode()? {
            RouteNetlinkMessage::NewRoute(m) => Some(m),
            _ => None,
        };
        let answer: Vec<RouteMessage> = answer.iter().filter_map(route).collect();
        let (mut next, mut ifindex) = (ip, None);
        for attribute in answer.iter().flat_map(|route| &route.attributes) {
            match attribute {
                RouteAttribute::Gateway(RouteAddress::Inet(ip)) => next = IpAddr::V4(*ip),
                RouteAttribute::Gateway(RouteAddress::Inet6(ip)) => next = IpAddr::V6(*ip),
                RouteAttribute::Via(RouteVia::Inet6(ip)) => next = IpAddr::V6(*ip),
                RouteAttribute::Oif(interface) => ifindex = Some(*interface),
                _ => {}
            }
        }
        let Some(ifindex) = ifindex else { return Ok(None) };
        let is_own = answer.iter().any(|route| route.header.kind == RouteType::Local);
        let family = if next.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let address = neighbour(next);
        let table = self.neighbours(family).await.context("the neighbour table")?;
        let is_next = |e: &&NeighbourMessage| {
            let of = |a: &NeighbourAttribute| matches!(a, NeighbourAttribute::Destination(d) if *d == address);
            e.header.ifindex == ifindex && e.attributes.iter().any(of)
        };
        Ok(Some(NextHop {
            ifindex,
            next,
            mac: table.iter().find(is_next).and_then(mac_of),
            is_own,
        }))
    }
}

/// A router that a route of this machine names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gateway {
    pub ip: IpAddr,
    /// The interface that leads to it.
    pub ifindex: u32,
    /// Its MAC address, if the kernel knows it.
    pub mac: Option<[u8; 6]>,
    /// The bridge port on which that address was seen, if it is only one.
    pub seen_at: Option<u32>,
}

/// The gateway of a route, or of one of its next hops, and the interface towards it.
fn gateway(attributes: &[RouteAttribute], mut ifindex: Option<u32>) -> Option<(IpAddr, u32)> {
    let mut next = None;
    for attribute in attributes {
        match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet(ip)) => next = Some(IpAddr::V4(*ip)),
            RouteAttribute::Gateway(RouteAddress::Inet6(ip)) => next = Some(IpAddr::V6(*ip)),
            RouteAttribute::Via(RouteVia::Inet6(ip)) => next = Some(IpAddr::V6(*ip)),
            RouteAttribute::Oif(interface) => ifindex = Some(*interface),
            _ => {}
        }
    }
    Some((next?, ifindex?))
}

fn neighbour(ip: IpAddr) -> NeighbourAddress {
    match ip {
        IpAddr::V4(ip) => NeighbourAddress::Inet(ip),
        IpAddr::V6(ip) => NeighbourAddress::Inet6(ip),
    }
}

/// A machine's route to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// The outgoing interface.
    pub ifindex: u32,
    /// The next neighbour: the address itself, or a router.
    pub next: IpAddr,
    /// The neighbour's MAC address, if the kernel knows it.
    pub mac: Option<[u8; 6]>,
    /// Whether the address belongs to this machine.
    pub is_own: bool,
}

/// The result of [`Netlink::port_of`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortLookup {
    /// The port that receives the host's packets.
    Port {
        ifindex: u32,
        /// Their MAC address: the host's own, or its router's.
        mac: [u8; 6],
    },
    /// No packet of the host or of its router has been seen.
    NotSeen {
        /// The router by which this machine would reach it.
        router: Option<IpAddr>,
    },
}

/// Makes the kernel resolve the next hop's MAC address by sending an empty packet to the discard
/// service (RFC 863). Errors are ignored, because the caller notices an unreachable address.
pub fn resolve_neighbour(ip: IpAddr) {
    let any: IpAddr =
        if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let _ = UdpSocket::bind((any, 0)).and_then(|socket| socket.send_to(&[], (ip, 9)));
}

fn mac_of(entry: &NeighbourMessage) -> Option<[u8; 6]> {
    entry.attributes.iter().find_map(|a| match a {
        NeighbourAttribute::LinkLayerAddress(mac) => mac[..].try_into().ok(),
        _ => None,
    })
}

/// The query for an interface, or for all.
fn link(ifindex: u32) -> Raw {
    let mut bytes = vec![0; HEADER];
    bytes[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    Raw { kind: libc::RTM_GETLINK, bytes }
}

/// Completes interfaces from each other: a bridge's ports get its router address, and a bond gets
/// its slaves.
fn completed(mut all: Vec<Interface>) -> Vec<Interface> {
    for i in 0..all.len() {
        let of_bond = |l: &&Interface| l.bond == Some(all[i].ifindex);
        all[i].slaves = all.iter().filter(of_bond).cloned().collect();
    }
    for i in 0..all.len() {
        if let Some(bridge) = all[i].bridge {
            all[i].router =
                all.iter().find(|l| l.ifindex == bridge).and_then(|bridge| bridge.router);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_abandoned_dump_does_not_block_the_next() {
        let netlink = Netlink::open().unwrap();
        for _ in 0..1000 {
            // Started, and cancelled at once.
            let mut dropped = Box::pin(netlink.interfaces());
            let _ = tokio::time::timeout(Duration::ZERO, &mut dropped).await;
            drop(dropped);
            netlink.neighbours(AddressFamily::Bridge).await.unwrap();
        }
    }
}
