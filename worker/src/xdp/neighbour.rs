//! MAC addresses of next hops, as the kernel knows them.
//!
//! Packets of AF_XDP sockets bypass the kernel's routes and neighbour table, which still know best
//! where a host is. Querying the table is not enough: the kernel neither resolves nor refreshes
//! entries that it does not use itself. So the driver now and then sends a datagram by the kernel
//! to the other side's discard port (RFC 863), where nothing listens.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use netlink_packet_core::{NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::neighbour::{
    NeighbourAttribute, NeighbourHeader, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType, RouteVia,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr as NetlinkAddr};

use super::frames::Mac;

/// Nothing listens there.
const DISCARD_PORT: u16 = 9;
/// How often a known address is queried again.
const KEEP: Duration = Duration::from_secs(2);
/// How often an unknown one is.
const RETRY: Duration = Duration::from_millis(5);
/// The least time between two datagrams to the discard port.
const NUDGE: Duration = Duration::from_millis(200);

/// The next hops to a few addresses.
pub(super) struct Neighbours {
    local: IpAddr,
    ifindex: u32,
    netlink: Socket,
    nudge: UdpSocket,
    known: Vec<Neighbour>,
}

struct Neighbour {
    to: IpAddr,
    mac: Option<Mac>,
    looked: Instant,
    nudged: Option<Instant>,
}

/// Why there is no route to a host over an interface.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoRoute {
    /// The route uses another interface.
    #[error(
        "the route to {0} does not use the interface that has this rank's address, and AF_XDP \
         cannot send by another one: change the route or NETSUM_IP"
    )]
    Elsewhere(IpAddr),
    /// The address is this machine's.
    #[error(
        "{0} is an address of this machine, and packets to it do not leave by an interface: give \
         each rank over AF_XDP its own machine or network namespace"
    )]
    Here(IpAddr),
    /// There is no route, or the kernel does not answer.
    #[error("no route to {0}: {1}")]
    Kernel(IpAddr, #[source] io::Error),
}

impl Neighbours {
    /// Without any next hops.
    pub fn new(local: IpAddr, ifindex: u32) -> io::Result<Self> {
        let mut netlink = Socket::new(NETLINK_ROUTE)?;
        netlink.bind_auto()?;
        netlink.connect(&NetlinkAddr::new(0, 0))?;
        let nudge = UdpSocket::bind((local, 0))?;
        nudge.set_nonblocking(true)?;
        Ok(Self { local, ifindex, netlink, nudge, known: Vec::new() })
    }

    /// The MAC address of the next hop to an address, if it is known.
    pub fn mac(&mut self, now: Instant, to: IpAddr) -> Option<Mac> {
        let at = match self.known.iter().position(|n| n.to == to) {
            Some(at) => {
                let Neighbour { mac, looked, .. } = self.known[at];
                if now.saturating_duration_since(looked) < if mac.is_some() { KEEP } else { RETRY }
                {
                    return mac;
                }
                at
            }
            None => {
                self.known.push(Neighbour { to, mac: None, looked: now, nudged: None });
                self.known.len() - 1
            }
        };
        let (mac, fresh) = match self.look_up(to) {
            Ok(found) => found,
            Err(error) => {
                log::debug!("{error}");
                (None, false)
            }
        };
        let neighbour = &mut self.known[at];
        neighbour.looked = now;
        if neighbour.mac != mac && mac.is_some() {
            log::debug!("next hop to {to}: {mac:02x?}");
        }
        // A next hop that no longer answers may still be there.
        neighbour.mac = mac.or(neighbour.mac);
        if !fresh && neighbour.nudged.is_none_or(|at| now.saturating_duration_since(at) >= NUDGE) {
            neighbour.nudged = Some(now);
            if let Err(error) = self.nudge.send_to(&[], SocketAddr::new(to, DISCARD_PORT)) {
                log::debug!("{to} port {DISCARD_PORT}: {error}");
            }
        }
        neighbour.mac
    }

    /// The kernel's entry: the address, and whether it is fresh.
    fn look_up(&self, to: IpAddr) -> Result<(Option<Mac>, bool), NoRoute> {
        let hop = self.next_hop(to)?;
        self.resolved(hop).map_err(|e| NoRoute::Kernel(to, e))
    }

    /// The router to an address, or the address itself; an error if packets would leave by another
    /// interface.
    pub fn next_hop(&self, to: IpAddr) -> Result<IpAddr, NoRoute> {
        let bits = if to.is_ipv4() { 32 } else { 128 };
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: family(to),
            destination_prefix_length: bits,
            source_prefix_length: bits,
            ..RouteHeader::default()
        };
        message.attributes = vec![
            RouteAttribute::Destination(route_address(to)),
            RouteAttribute::Source(route_address(self.local)),
        ];
        let route = match self.request(RouteNetlinkMessage::GetRoute(message)) {
            Ok(RouteNetlinkMessage::NewRoute(route)) => route,
            Ok(_) => return Err(NoRoute::Kernel(to, io::ErrorKind::InvalidData.into())),
            Err(e) => return Err(NoRoute::Kernel(to, e)),
        };
        if route.header.kind == RouteType::Local {
            return Err(NoRoute::Here(to));
        }
        if !route.attributes.contains(&RouteAttribute::Oif(self.ifindex)) {
            return Err(NoRoute::Elsewhere(to));
        }
        let gateway = route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet(ip))
            | RouteAttribute::Via(RouteVia::Inet(ip)) => Some(IpAddr::V4(*ip)),
            RouteAttribute::Gateway(RouteAddress::Inet6(ip))
            | RouteAttribute::Via(RouteVia::Inet6(ip)) => Some(IpAddr::V6(*ip)),
            _ => None,
        });
        Ok(gateway.unwrap_or(to))
    }

    fn resolved(&self, hop: IpAddr) -> io::Result<(Option<Mac>, bool)> {
        let mut message = NeighbourMessage::default();
        message.header = NeighbourHeader {
            family: family(hop),
            ifindex: self.ifindex,
            ..NeighbourHeader::default()
        };
        message.attributes = vec![NeighbourAttribute::Destination(hop.into())];
        let entry = match self.request(RouteNetlinkMessage::GetNeighbour(message)) {
            Ok(RouteNetlinkMessage::NewNeighbour(entry)) => entry,
            Ok(_) => return Err(io::ErrorKind::InvalidData.into()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((None, false)),
            Err(e) => return Err(e),
        };
        let fresh = match entry.header.state {
            NeighbourState::Incomplete | NeighbourState::Failed | NeighbourState::None => {
                return Ok((None, false));
            }
            NeighbourState::Reachable | NeighbourState::Permanent | NeighbourState::Noarp => true,
            _ => false,
        };
        let mac = entry.attributes.iter().find_map(|attribute| match attribute {
            NeighbourAttribute::LinkLayerAddress(mac) => Mac::try_from(&**mac).ok(),
            _ => None,
        });
        Ok((mac, fresh && mac.is_some()))
    }

    /// One request, one answer: the kernel answers before the send returns.
    fn request(&self, request: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
        message.finalize();
        let mut buffer = vec![0; message.buffer_len()];
        message.serialize(&mut buffer);
        self.netlink.send(&buffer, 0)?;
        let (answer, _) = self.netlink.recv_from_full()?;
        let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer)
            .map_err(io::Error::other)?;
        match answer.payload {
            NetlinkPayload::InnerMessage(message) => Ok(message),
            NetlinkPayload::Error(error) => Err(error.to_io()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

fn family(ip: IpAddr) -> AddressFamily {
    if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn route_address(ip: IpAddr) -> RouteAddress {
    match ip {
        IpAddr::V4(ip) => RouteAddress::Inet(ip),
        IpAddr::V6(ip) => RouteAddress::Inet6(ip),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machines_own_addresses_are_refused() {
        // The loopback interface exists in every network namespace, as number 1.
        let neighbours = Neighbours::new("127.0.0.1".parse().unwrap(), 1).unwrap();
        let error = neighbours.next_hop("127.0.0.2".parse().unwrap()).unwrap_err();
        assert!(matches!(error, NoRoute::Here(_)), "{error}");
        assert!(error.to_string().contains("address of this machine"), "{error}");
    }

    #[test]
    fn nobody_has_a_mac_address_on_loopback() {
        let mut neighbours = Neighbours::new("127.0.0.1".parse().unwrap(), 1).unwrap();
        let now = Instant::now();
        assert_eq!(neighbours.mac(now, "127.0.0.2".parse().unwrap()), None);
        assert_eq!(neighbours.mac(now, "127.0.0.2".parse().unwrap()), None, "queried once");
    }
}
