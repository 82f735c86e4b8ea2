//! Interfaces, bridge ports and the bridge's forwarding table, over netlink.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::TryStreamExt as _;
use netsum_core::PortInfo;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::link::{
    InfoPortKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, LinkXdp, XdpAttached,
};
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteVia};
use tokio::sync::Mutex;

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
    /// The XDP program that is attached: "native" or "skb".
    pub xdp: Option<&'static str>,
    /// Bytes and packets received and sent.
    pub counters: [u64; 4],
}

impl Interface {
    /// The port, as the controller knows it.
    pub fn port(&self) -> PortInfo {
        PortInfo { name: self.name.clone(), ifindex: self.ifindex, mtu: self.mtu }
    }
}

/// A netlink connection.
#[derive(Clone)]
pub struct Netlink {
    handle: rtnetlink::Handle,
    /// The kernel answers a list that is asked for while another goes out on the same socket with EBUSY
    /// (`__netlink_dump_start` in net/netlink/af_netlink.c).
    one_list: Arc<Mutex<()>>,
}

impl Netlink {
    /// Connects, within a tokio runtime.
    pub fn open() -> Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection().context("netlink")?;
        tokio::spawn(connection);
        Ok(Self { handle, one_list: Arc::default() })
    }

    /// All interfaces.
    pub async fn interfaces(&self) -> Result<Vec<Interface>> {
        let _one_list = self.one_list.lock().await;
        let messages: Vec<LinkMessage> = self.handle.link().get().execute().try_collect().await?;
        Ok(messages.iter().map(interface).collect())
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
    /// by which this machine reaches its IP address. Waits a second for either to be seen.
    pub async fn port_of(&self, mac: [u8; 6], ip: IpAddr) -> Result<Found> {
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
                router = self.router_to(ip).await?;
                match router {
                    Some((_, Some(mac))) => {
                        if let Some(ifindex) = behind(mac) {
                            return Ok(Found::Port { ifindex, mac });
                        }
                    }
                    Some((_, None)) => ask_for_router(ip),
                    None => {}
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(Found::Nothing { router: router.map(|(ip, _)| ip) })
    }

    /// Entries of a neighbour table.
    async fn neighbours(&self, family: AddressFamily) -> Result<Vec<NeighbourMessage>> {
        let _one_list = self.one_list.lock().await;
        Ok(self.handle.neighbours().get().set_address_family(family).execute().try_collect().await?)
    }

    /// The router by which this machine reaches an address, and its MAC address if that is known. `None` where there is none
    /// between them, or no way at all.
    async fn router_to(&self, ip: IpAddr) -> Result<Option<(IpAddr, Option<[u8; 6]>)>> {
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
        let attributes = answer.iter().flat_map(|route| &route.attributes);
        let Some(router) = attributes.into_iter().find_map(|a| match a {
            RouteAttribute::Gateway(RouteAddress::Inet(ip)) => Some(IpAddr::V4(*ip)),
            RouteAttribute::Gateway(RouteAddress::Inet6(ip)) => Some(IpAddr::V6(*ip)),
            RouteAttribute::Via(RouteVia::Inet6(ip)) => Some(IpAddr::V6(*ip)),
            _ => None,
        }) else {
            return Ok(None);
        };
        let family = if router.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let address = match router {
            IpAddr::V4(ip) => NeighbourAddress::Inet(ip),
            IpAddr::V6(ip) => NeighbourAddress::Inet6(ip),
        };
        let table = self.neighbours(family).await.context("the neighbour table")?;
        let is_its = |e: &&NeighbourMessage| {
            e.attributes.iter().any(|a| matches!(a, NeighbourAttribute::Destination(d) if *d == address))
        };
        Ok(Some((router, table.iter().filter(is_its).find_map(mac_of))))
    }
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

/// Has the kernel find out its router's MAC address, as any packet to an address behind it does. This one is empty, for the discard
/// service (RFC 863). Who cannot be reached is found out by the caller.
fn ask_for_router(ip: IpAddr) {
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
        xdp: None,
        counters: [0; 4],
    };
    let mut bridge_port = false;
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.name.clone_from(name),
            LinkAttribute::Address(mac) => {
                interface.mac = mac.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(":");
            }
            LinkAttribute::Mtu(mtu) => interface.mtu = *mtu,
            LinkAttribute::Controller(index) => interface.bridge = Some(*index),
            LinkAttribute::LinkInfo(infos) => {
                bridge_port |= infos.iter().any(|i| matches!(i, LinkInfo::PortKind(InfoPortKind::Bridge)));
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
    interface
}
