//! Connections over a UDP socket: the RC endpoint of this crate.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use super::buffer::Buffer;
use super::config::{JobShape, Traffic};
use super::error::Error;
use super::links::{Links, Numbers, RankNumbers};
use super::network::{Connections, Network};
use super::numbers::Fresh;
use super::transport::{Channel, Transport, TransportEvent};
use crate::rc::{Endpoint, EndpointConfig};
use crate::udp::UdpDriver;

/// A socket that is open already when the other ranks hear of it: they may send at once.
pub(crate) struct Udp {
    ip: IpAddr,
    driver: UdpDriver,
}

impl Udp {
    /// Opens the socket.
    pub fn bind(ip: IpAddr) -> Result<Self, Error> {
        let driver = UdpDriver::bind(ip).map_err(|e| Error::Socket { ip, reason: e.to_string() })?;
        Ok(Self { ip, driver })
    }
}

impl Network for Udp {
    fn numbers(&mut self, shape: &JobShape) -> Result<(Vec<Numbers>, Numbers), Error> {
        let mut fresh = Fresh::new();
        let rings = (0..shape.layout.rings).map(|_| fresh.connection()).collect();
        Ok((rings, fresh.connection()))
    }

    fn connect(
        self: Box<Self>,
        shape: &JobShape,
        rank: u32,
        ranks: &[RankNumbers],
    ) -> Result<Box<dyn Connections>, Error> {
        let (count, rank) = (ranks.len(), rank as usize);
        let neighbours = [&ranks[(rank + 1) % count], &ranks[(rank + count - 1) % count]];
        let config =
            EndpointConfig { any_ip_id: neighbours.iter().any(|n| n.any_ip_id), ..EndpointConfig::default() };
        let endpoint = Endpoint::new(self.ip, config);
        let capacity = self.driver.receive_capacity(shape.mtu as usize);
        let links = Links::new(endpoint, shape, rank as u32, ranks, capacity)
            .map_err(|e| Error::Config(format!("connections: {e}")))?;
        Ok(Box::new(UdpConnections { ip: self.ip, links, driver: self.driver }))
    }

    fn any_ip_id(&self) -> bool {
        false
    }
}

struct UdpConnections {
    ip: IpAddr,
    links: Links,
    driver: UdpDriver,
}

impl Transport for UdpConnections {
    fn send(&mut self, channel: Channel, id: u64, data: Buffer) {
        self.links.send(channel, id, data);
    }

    fn expect(&mut self, now: Instant, channel: Channel, id: u64) {
        self.links.expect(now, channel, id);
    }

    fn receive_into(&mut self, channel: Channel, buffer: Buffer) {
        self.links.receive_into(channel, buffer);
    }

    fn poll(&mut self) -> Option<TransportEvent> {
        self.links.poll()
    }

    fn close(&mut self, channel: Channel) -> Vec<(u64, Buffer)> {
        self.links.close(channel)
    }
}

impl Connections for UdpConnections {
    fn start(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn drive(&mut self, until: Instant) -> Result<bool, Error> {
        let driven = self.driver.drive(&mut self.links.endpoint, until);
        driven.map_err(|e| Error::Socket { ip: self.ip, reason: e.to_string() })
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.links.endpoint.next_timeout()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.driver.as_fd()
    }

    fn traffic(&self) -> Option<Traffic> {
        let stats = self.links.endpoint.stats();
        Some(Traffic {
            bytes_sent: stats.sent_bytes,
            bytes_received: stats.received_bytes,
            packets_sent: stats.sent_packets,
            packets_received: stats.received_packets,
            retransmissions: stats.retransmissions,
            congestion_marks: stats.ce_received,
        })
    }

    fn restarts(&self) -> u64 {
        0
    }

    fn title(&self) -> String {
        "UDP".to_owned()
    }
}
