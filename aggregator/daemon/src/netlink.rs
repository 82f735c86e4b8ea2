//! Interfaces, bridge ports and the bridge's forwarding table, over netlink.

use std::collections::{BTreeSet, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::channel::mpsc::UnboundedReceiver;
use futures::{StreamExt as _, TryStreamExt as _};
use netsum_core::PortInfo;
use rtnetlink::MulticastGroup;
use rtnetlink::packet_core::NetlinkMessage;
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use rtnetlink::packet_route::link::{
    AfSpecInet, AfSpecInet6, AfSpecUnspec, BridgePortState, InfoBridgePort, InfoPortData, InfoPortKind,
    LinkAttribute, LinkFlags, LinkInfo, LinkMessage, LinkXdp, XdpAttached,
};
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteType, RouteVia};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::SocketAddr;
use tokio::sync::Mutex;

use super::message::mac_from_text;
use super::neighbours::Heard;
use super::trains::Trains;

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub ifindex: u32,
    pub name: String,
    pub mac: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// It is up and has a carrier.
    pub up: bool,
    /// The bridge that it is a port of.
    pub bridge: Option<u32>,
    /// For this MAC address packets come in that this machine routes: its own, or its bridge's. `None` where it routes nothing.
    pub router: Option<[u8; 6]>,
    /// Its bridge sends nothing there by itself: spanning tree says so, or it does not flood there.
    pub blocked: bool,
    /// The XDP program that is attached: "native" or "skb".
    pub xdp: Option<&'static str>,
    /// Bytes and packets received and sent.
    pub counters: [u64; 4],
}

impl Interface {
    /// The port, as the controller knows it.
    pub fn port(&self) -> PortInfo {
        PortInfo { name: self.name.clone(), ifindex: self.ifindex, mtu: self.mtu, router: self.router }
    }
}

/// A netlink connection.
#[derive(Clone)]
pub struct Netlink {
    handle: rtnetlink::Handle,
    /// The kernel answers a list that is asked for while another goes out on the same socket with EBUSY
    /// (`__netlink_dump_start` in net/netlink/af_netlink.c).
    one_list: Arc<Mutex<()>>,
    /// What ports hear; `None` where nobody listens.
    pub heard: Option<Heard>,
    /// Sends and hears trains; `None` where nobody does.
    pub trains: Option<Trains>,
}

impl Netlink {
    /// Connects, within a tokio runtime.
    pub fn open() -> Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection().context("netlink")?;
        tokio::spawn(connection);
        Ok(Self { handle, one_list: Arc::default(), heard: None, trains: None })
    }

    /// All interfaces.
    pub async fn interfaces(&self) -> Result<Vec<Interface>> {
        let handle = self.handle.clone();
        let messages: Vec<LinkMessage> =
            self.list(async move { Ok(handle.link().get().execute().try_collect().await?) }).await?;
        let mut all: Vec<Interface> = messages.iter().map(interface).collect();
        for i in 0..all.len() {
            if let Some(bridge) = all[i].bridge {
                all[i].router = all.iter().find(|l| l.ifindex == bridge).and_then(|bridge| bridge.router);
            }
        }
        Ok(all)
    }

    /// The interface numbers of a bridge's ports, or of interfaces by name, in order.
    pub async fn resolve(&self, ports: &crate::config::Ports) -> Result<Vec<Interface>> {
        let interfaces = self.interfaces().await?;
        let by_name = |name: &str| interfaces.iter().find(|l| l.name == name);
        match ports {
            crate::config::Ports::Bridge(name) => {
                let Some(bridge) = by_name(name) else {
                    bail!("bridge = {name:?}: there is no such interface")
                };
                let ports: Vec<Interface> =
                    interfaces.iter().filter(|l| l.bridge == Some(bridge.ifindex)).cloned().collect();
                if ports.is_empty() {
                    bail!("bridge = {name:?}: the bridge has no ports, or {name} is no bridge");
                }
                Ok(ports)
            }
            crate::config::Ports::List(names) => names
                .iter()
                .map(|n| by_name(n).cloned().with_context(|| format!("ports: there is no interface {n:?}")))
                .collect(),
        }
    }

    /// Those of a bridge's ports, or of interfaces by name, that there are at the moment.
    pub async fn present(&self, ports: &crate::config::Ports) -> Result<Vec<Interface>> {
        let interfaces = self.interfaces().await?;
        let bridge = match ports {
            crate::config::Ports::Bridge(name) => {
                interfaces.iter().find(|l| l.name == *name).map(|l| l.ifindex)
            }
            crate::config::Ports::List(_) => None,
        };
        let wanted = |l: &Interface| match ports {
            crate::config::Ports::Bridge(_) => bridge.is_some() && l.bridge == bridge,
            crate::config::Ports::List(names) => names.contains(&l.name),
        };
        Ok(interfaces.into_iter().filter(wanted).collect())
    }

    /// IP and MAC addresses of this machine, on all its interfaces.
    pub async fn own(&self) -> Result<(HashSet<IpAddr>, HashSet<[u8; 6]>)> {
        let handle = self.handle.clone();
        let messages: Vec<AddressMessage> =
            self.list(async move { Ok(handle.address().get().execute().try_collect().await?) }).await?;
        // On a point-to-point link the first is the other end's.
        let ip = |a: &AddressAttribute| match a {
            AddressAttribute::Address(ip) | AddressAttribute::Local(ip) => Some(*ip),
            _ => None,
        };
        let local = |a: &&AddressAttribute| matches!(a, AddressAttribute::Local(_));
        let own = |m: &AddressMessage| m.attributes.iter().find(local).or(m.attributes.first()).and_then(ip);
        let macs = self.interfaces().await?.into_iter().filter_map(|l| mac_from_text(&l.mac));
        Ok((messages.iter().filter_map(own).collect(), macs.filter(|mac| *mac != [0; 6]).collect()))
    }

    /// MAC addresses that bridges have seen, and behind which interface.
    pub async fn hosts(&self) -> Result<Vec<(u32, [u8; 6])>> {
        let table = self.neighbours(AddressFamily::Bridge).await.context("the bridge's forwarding table")?;
        // The interfaces' own are there for ever; the first bit is that of groups.
        let seen = table.iter().filter(|e| e.header.state != NeighbourState::Permanent);
        let host =
            |e: &NeighbourMessage| mac_of(e).filter(|mac| mac[0] & 1 == 0).map(|mac| (e.header.ifindex, mac));
        let hosts: BTreeSet<_> = seen.filter_map(host).collect();
        Ok(hosts.into_iter().collect())
    }

    /// Where a host is: the interface behind which the bridge has seen its MAC address or, where it has not, that of the router
    /// by which this machine reaches its IP address; or, of these `ports`, the one by which it does so. Waits a second for either to be
    /// seen.
    pub async fn port_of(&self, mac: [u8; 6], ip: IpAddr, ports: &[u32]) -> Result<Found> {
        let mut router = None;
        for attempt in 0..20 {
            let table =
                self.neighbours(AddressFamily::Bridge).await.context("the bridge's forwarding table")?;
            let behind =
                |mac: [u8; 6]| table.iter().find(|e| mac_of(e) == Some(mac)).map(|e| e.header.ifindex);
            if let Some(ifindex) = behind(mac) {
                return Ok(Found::Port { ifindex, mac });
            }
            // A host's own packets come first: a network that this machine has no address in may seem to be behind its router.
            if attempt >= 4 {
                let way = self.way_to(ip).await?;
                router = way.as_ref().map(|way| way.next).filter(|next| *next != ip);
                match way {
                    Some(Way { mac: Some(mac), ifindex, .. }) => {
                        let port = ports.contains(&ifindex).then_some(ifindex);
                        if let Some(ifindex) = router.and_then(|_| behind(mac)).or(port) {
                            return Ok(Found::Port { ifindex, mac });
                        }
                    }
                    Some(Way { mac: None, .. }) => ask_for(ip),
                    None => {}
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(Found::Nothing { router })
    }

    /// The interface behind which a neighbour of this machine is, or the router towards an address, where it is known.
    pub async fn seen_at(&self, ip: IpAddr) -> Result<Option<u32>> {
        let Some(Way { mac: Some(mac), ifindex, .. }) = self.way_to(ip).await? else { return Ok(None) };
        let table = self.neighbours(AddressFamily::Bridge).await.context("the bridge's forwarding table")?;
        Ok(table.iter().find(|e| mac_of(e) == Some(mac)).map(|e| e.header.ifindex).or(Some(ifindex)))
    }

    /// Entries of a neighbour table.
    async fn neighbours(&self, family: AddressFamily) -> Result<Vec<NeighbourMessage>> {
        let request = self.handle.neighbours().get().set_address_family(family);
        self.list(async move { Ok(request.execute().try_collect().await?) }).await
    }

    /// Takes a list to its end, also where nobody waits for it any more, as for the answer to a manager that has heard enough: the next
    /// one would be refused.
    async fn list<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let one_list = self.one_list.clone();
        let whole = tokio::spawn(async move {
            let _one_list = one_list.lock().await;
            work.await
        });
        whole.await?
    }

    /// How this machine would send to an address; `None` where there is no way.
    pub async fn way_to(&self, ip: IpAddr) -> Result<Option<Way>> {
        let mut question = RouteMessage::default();
        (question.header.address_family, question.header.destination_prefix_length) = match ip {
            IpAddr::V4(_) => (AddressFamily::Inet, 32),
            IpAddr::V6(_) => (AddressFamily::Inet6, 128),
        };
        question.attributes.push(RouteAttribute::Destination(ip.into()));
        let answer: Vec<RouteMessage> = match self.handle.route().get(question).execute().try_collect().await
        {
            Ok(answer) => answer,
            Err(rtnetlink::Error::NetlinkError(_)) => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("the route to {ip}")),
        };
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
        let (family, address) = match next {
            IpAddr::V4(ip) => (AddressFamily::Inet, NeighbourAddress::Inet(ip)),
            IpAddr::V6(ip) => (AddressFamily::Inet6, NeighbourAddress::Inet6(ip)),
        };
        let table = self.neighbours(family).await.context("the neighbour table")?;
        let is_next = |e: &&NeighbourMessage| {
            let of =
                |a: &NeighbourAttribute| matches!(a, NeighbourAttribute::Destination(d) if *d == address);
            e.header.ifindex == ifindex && e.attributes.iter().any(of)
        };
        Ok(Some(Way { ifindex, next, mac: table.iter().find(is_next).and_then(mac_of), is_own }))
    }
}

/// Notices that addresses or interfaces of this machine have changed.
pub struct Changes(UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>);

impl Changes {
    /// From now on.
    pub fn open() -> Result<Self> {
        let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let (connection, _, changes) = rtnetlink::new_multicast_connection(&groups).context("netlink")?;
        tokio::spawn(connection);
        Ok(Self(changes))
    }

    /// Waits for the next ones, all that there are; false where there will be none. Notices that were
    /// lost count as one.
    pub async fn next(&mut self) -> bool {
        let some = self.0.next().await.is_some();
        while self.0.try_recv().is_ok() {}
        some
    }
}

/// How a machine sends to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// By this interface,
    pub ifindex: u32,
    /// to this neighbour: the address itself, or a router's.
    pub next: IpAddr,
    /// The neighbour's MAC address, where the kernel knows it.
    pub mac: Option<[u8; 6]>,
    /// The address is one of this machine's.
    pub is_own: bool,
}

/// What [`Netlink::port_of`] has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The host's packets come from here.
    Port {
        ifindex: u32,
        /// Their MAC address: the host's own, or its router's.
        mac: [u8; 6],
    },
    /// Not a packet of its own has been seen, nor one of its router's.
    Nothing {
        /// The router by which this machine would reach it.
        router: Option<IpAddr>,
    },
}

/// Has the kernel find out the MAC address of the next hop, as any packet to an address does. This one is empty, for the discard
/// service (RFC 863). Who cannot be reached is found out by the caller.
pub fn ask_for(ip: IpAddr) {
    let any: IpAddr = if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let _ = UdpSocket::bind((any, 0)).and_then(|socket| socket.send_to(&[], (ip, 9)));
}

fn mac_of(entry: &NeighbourMessage) -> Option<[u8; 6]> {
    entry.attributes.iter().find_map(|a| match a {
        NeighbourAttribute::LinkLayerAddress(mac) => mac[..].try_into().ok(),
        _ => None,
    })
}

fn interface(message: &LinkMessage) -> Interface {
    let mut interface = Interface {
        ifindex: message.header.index,
        name: String::new(),
        mac: String::new(),
        mtu: 0,
        up: message.header.flags.contains(LinkFlags::LowerUp | LinkFlags::Up),
        bridge: None,
        router: None,
        blocked: false,
        xdp: None,
        counters: [0; 4],
    };
    let (mut bridge_port, mut forwards) = (false, false);
    let mut own = None;
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.name.clone_from(name),
            LinkAttribute::Address(mac) => {
                interface.mac = mac.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(":");
                own = <[u8; 6]>::try_from(&mac[..]).ok();
            }
            LinkAttribute::Mtu(mtu) => interface.mtu = *mtu,
            LinkAttribute::Controller(index) => interface.bridge = Some(*index),
            LinkAttribute::LinkInfo(infos) => {
                bridge_port |= infos.iter().any(|i| matches!(i, LinkInfo::PortKind(InfoPortKind::Bridge)));
                // A port that is down is in no such state, and has its flags.
                let blocks = |i: &InfoBridgePort| match i {
                    InfoBridgePort::State(state) => {
                        matches!(state, BridgePortState::Blocking | BridgePortState::Listening)
                    }
                    InfoBridgePort::UnicastFlood(floods) => !floods,
                    _ => false,
                };
                interface.blocked |= infos.iter().any(|i| match i {
                    LinkInfo::PortData(InfoPortData::BridgePort(of)) => of.iter().any(blocks),
                    _ => false,
                });
            }
            LinkAttribute::AfSpecUnspec(families) => {
                let v4 = |a: &AfSpecInet| matches!(a, AfSpecInet::DevConf(c) if c.forwarding != 0);
                let v6 = |a: &AfSpecInet6| matches!(a, AfSpecInet6::DevConf(c) if c.forwarding != 0);
                forwards |= families.iter().any(|family| match family {
                    AfSpecUnspec::Inet(all) => all.iter().any(v4),
                    AfSpecUnspec::Inet6(all) => all.iter().any(v6),
                    _ => false,
                });
            }
            LinkAttribute::Stats64(s) => {
                interface.counters = [s.rx_bytes, s.rx_packets, s.tx_bytes, s.tx_packets];
            }
            LinkAttribute::Xdp(xdp) => {
                for x in xdp {
                    if let LinkXdp::Attached(a) = x {
                        interface.xdp = match a {
                            XdpAttached::Driver | XdpAttached::Hardware | XdpAttached::Multiple => {
                                Some("native")
                            }
                            XdpAttached::SocketBuffer => Some("skb"),
                            _ => None,
                        };
                    }
                }
            }
            _ => {}
        }
    }
    if !bridge_port {
        interface.bridge = None;
    }
    interface.router = own.filter(|_| forwards);
    interface
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_list_that_nobody_waits_for_any_more_does_not_keep_the_next_from_being_made() {
        let netlink = Netlink::open().unwrap();
        for _ in 0..1000 {
            // Asked, and dropped at once.
            let mut dropped = Box::pin(netlink.interfaces());
            let _ = tokio::time::timeout(Duration::ZERO, &mut dropped).await;
            drop(dropped);
            netlink.neighbours(AddressFamily::Bridge).await.unwrap();
        }
    }
}
