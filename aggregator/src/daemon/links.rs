//! Interfaces, bridge ports and the bridge's forwarding table, over netlink.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::link::{
    InfoPortKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, LinkXdp, XdpAttached,
};
use rtnetlink::packet_route::neighbour::NeighbourAttribute;

use futures::TryStreamExt as _;
use tokio::sync::Mutex;

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Number.
    pub ifindex: u32,
    /// Name.
    pub name: String,
    /// MAC address.
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
    pub async fn links(&self) -> Result<Vec<Link>> {
        let _one_list = self.one_list.lock().await;
        let messages: Vec<LinkMessage> = self.handle.link().get().execute().try_collect().await?;
        Ok(messages.iter().map(link).collect())
    }

    /// The interface numbers of a bridge's ports, or of interfaces by name, in order.
    pub async fn resolve(&self, ports: &crate::config::Ports) -> Result<Vec<Link>> {
        let links = self.links().await?;
        let by_name = |name: &str| links.iter().find(|l| l.name == name);
        match ports {
            crate::config::Ports::Bridge(name) => {
                let Some(bridge) = by_name(name) else {
                    bail!("bridge = {name:?}: there is no such interface")
                };
                let ports: Vec<Link> =
                    links.iter().filter(|l| l.bridge == Some(bridge.ifindex)).cloned().collect();
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
    pub async fn present(&self, ports: &crate::config::Ports) -> Result<Vec<Link>> {
        let links = self.links().await?;
        let bridge = match ports {
            crate::config::Ports::Bridge(name) => links.iter().find(|l| l.name == *name).map(|l| l.ifindex),
            crate::config::Ports::List(_) => None,
        };
        let wanted = |l: &Link| match ports {
            crate::config::Ports::Bridge(_) => bridge.is_some() && l.bridge == bridge,
            crate::config::Ports::List(names) => names.contains(&l.name),
        };
        Ok(links.into_iter().filter(wanted).collect())
    }

    /// The interface behind which the bridge has seen a MAC address. Waits a second for it to be seen.
    pub async fn port_of(&self, mac: [u8; 6]) -> Result<Option<u32>> {
        for _ in 0..20 {
            let mut get = self.handle.neighbours().get();
            get.message_mut().header.family = AddressFamily::Bridge;
            let one_list = self.one_list.lock().await;
            let entries: Vec<_> =
                get.execute().try_collect().await.context("the bridge's forwarding table")?;
            drop(one_list);
            let found = entries.iter().find(|e| {
                e.attributes
                    .iter()
                    .any(|a| matches!(a, NeighbourAttribute::LinkLayerAddress(m) if m[..] == mac))
            });
            if let Some(entry) = found {
                return Ok(Some(entry.header.ifindex));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(None)
    }
}

fn link(message: &LinkMessage) -> Link {
    let mut link = Link {
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
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Address(mac) => {
                link.mac = mac.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(":");
            }
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Controller(index) => link.bridge = Some(*index),
            LinkAttribute::LinkInfo(infos) => {
                bridge_port |= infos.iter().any(|i| matches!(i, LinkInfo::PortKind(InfoPortKind::Bridge)));
            }
            LinkAttribute::Stats64(s) => {
                link.counters = [s.rx_bytes, s.rx_packets, s.tx_bytes, s.tx_packets];
            }
            LinkAttribute::Xdp(xdp) => {
                for x in xdp {
                    if let LinkXdp::Attached(a) = x {
                        link.xdp = match a {
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
        link.bridge = None;
    }
    link
}
