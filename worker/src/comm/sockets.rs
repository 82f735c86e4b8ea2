//! Connections over sockets: netsum's RC endpoint, over UDP or AF_XDP.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::allocator::QpAllocator;
use super::batching::ReceiveBatching;
use super::network::{Bind, Connections, Network};
use crate::udp::UdpDriver;
#[cfg(feature = "xdp")]
use crate::xdp::XdpDriver;
use netsum_collective::buffer::Buffer;
use netsum_collective::channels::{Channel, ChannelEvent, Channels};
use netsum_collective::error::Error;
use netsum_collective::queue_pairs::{QpInfo, QueuePairChannels, RankQpInfo, SourcePorts};
use netsum_collective::report::Traffic;
use netsum_collective::shape::JobShape;
#[cfg(feature = "xdp")]
use netsum_common::wire::ROCE_PORT;
use netsum_rc::{Endpoint, EndpointConfig};

/// The least time between congestion notifications to a sender, as in DCQCN (SIGCOMM 2015, table
/// 14).
const CNP_INTERVAL: Duration = Duration::from_micros(50);

/// Sends and receives an endpoint's datagrams.
pub(crate) trait Driver: AsFd + Send + 'static {
    /// See [`UdpDriver::drive`].
    fn drive(&mut self, endpoint: &mut Endpoint, until: Instant) -> io::Result<bool>;
    /// Sends all that may be sent. Returns whether anything was.
    fn transmit(&mut self, endpoint: &mut Endpoint) -> io::Result<bool>;
    /// How many packets of a path MTU the receive buffer holds at least.
    fn receive_capacity(&self, mtu: usize) -> u32;
    /// Prepares for neighbours that send from these addresses and ports, and for this path MTU.
    fn prepare(&mut self, mtu: usize, neighbours: [SocketAddr; 2]) -> Result<(), String>;
    /// The UDP ports that it sends from.
    fn ports(&self) -> SourcePorts;
    /// The name for people.
    fn transport_name(&self) -> &'static str;
}

impl Driver for UdpDriver {
    fn drive(&mut self, endpoint: &mut Endpoint, until: Instant) -> io::Result<bool> {
        self.drive(endpoint, until)
    }

    fn transmit(&mut self, endpoint: &mut Endpoint) -> io::Result<bool> {
        self.transmit(endpoint)
    }

    fn receive_capacity(&self, mtu: usize) -> u32 {
        self.receive_capacity(mtu)
    }

    fn prepare(&mut self, _mtu: usize, neighbours: [SocketAddr; 2]) -> Result<(), String> {
        self.open_sockets(neighbours)
    }

    fn ports(&self) -> SourcePorts {
        let [next, previous] = self.ports();
        SourcePorts { next, previous }
    }

    fn transport_name(&self) -> &'static str {
        "UDP"
    }
}

#[cfg(feature = "xdp")]
impl Driver for XdpDriver {
    fn drive(&mut self, endpoint: &mut Endpoint, until: Instant) -> io::Result<bool> {
        self.drive(endpoint, until)
    }

    fn transmit(&mut self, endpoint: &mut Endpoint) -> io::Result<bool> {
        self.transmit(endpoint)
    }

    fn receive_capacity(&self, mtu: usize) -> u32 {
        self.receive_capacity(mtu)
    }

    fn prepare(&mut self, mtu: usize, neighbours: [SocketAddr; 2]) -> Result<(), String> {
        self.prepare(mtu, &neighbours.map(|n| n.ip())).map_err(|e| e.to_string())
    }

    fn ports(&self) -> SourcePorts {
        // No other rank is at this address, so any two ports are its own.
        SourcePorts { next: ROCE_PORT, previous: 0xc001 }
    }

    fn transport_name(&self) -> &'static str {
        if self.is_zero_copy() { "AF_XDP, zero-copy" } else { "AF_XDP, copy mode" }
    }
}

/// Sockets without connections. They are usually open before the other ranks know them, because
/// these may send at once.
pub(crate) struct SocketNetwork<D> {
    ip: IpAddr,
    bind: fn(IpAddr) -> Result<D, Error>,
    driver: Option<D>,
}

fn no_socket(ip: IpAddr, e: &impl ToString) -> Error {
    Error::Socket { ip, reason: e.to_string() }
}

impl SocketNetwork<UdpDriver> {
    /// UDP sockets. `ports`: those to send from, which the other ranks expect; if they are 4791, no
    /// other rank can be at this address.
    pub fn udp(ip: IpAddr, ports: Option<SourcePorts>, when: Bind) -> Result<Self, Error> {
        let bind = |ip| UdpDriver::bind(ip).map_err(|e| no_socket(ip, &e));
        let driver = match (ports, when) {
            (Some(SourcePorts::ROCE), Bind::Later) => None,
            (Some(SourcePorts::ROCE), Bind::Now) => Some(UdpDriver::bind(ip)),
            (Some(SourcePorts { next, previous }), _) => {
                Some(UdpDriver::share(ip, [next, previous]))
            }
            (None, Bind::Now) => Some(UdpDriver::first_or_share(ip)),
            (None, Bind::Later) => Some(UdpDriver::share(ip, [0; 2])),
        };
        let driver = driver.transpose().map_err(|e| no_socket(ip, &e))?;
        Ok(Self { ip, bind, driver })
    }
}

#[cfg(feature = "xdp")]
impl SocketNetwork<XdpDriver> {
    /// AF_XDP sockets.
    pub fn xdp(ip: IpAddr, when: Bind) -> Result<Self, Error> {
        let bind = |ip| XdpDriver::bind(ip).map_err(|e| no_socket(ip, &e));
        let driver = (when == Bind::Now).then(|| bind(ip)).transpose()?;
        Ok(Self { ip, bind, driver })
    }
}

impl<D: Driver> Network for SocketNetwork<D> {
    fn numbers(&mut self, shape: &JobShape) -> Result<(Vec<QpInfo>, QpInfo), Error> {
        let mut allocator = QpAllocator::new();
        let rings = (0..shape.layout.rings).map(|_| allocator.connection()).collect();
        Ok((rings, allocator.connection()))
    }

    fn connect(
        self: Box<Self>,
        shape: &JobShape,
        rank: u32,
        ranks: &[RankQpInfo],
    ) -> Result<Box<dyn Connections>, Error> {
        let Self { ip, bind, driver } = *self;
        let mut driver = match driver {
            Some(driver) => driver,
            None => bind(ip)?,
        };
        let (count, rank) = (ranks.len(), rank as usize);
        let neighbours = [&ranks[(rank + 1) % count], &ranks[(rank + count - 1) % count]];
        let any_ip_id = neighbours.iter().any(|n| n.any_ip_id);
        let config = EndpointConfig { any_ip_id, cnp_interval: Some(CNP_INTERVAL) };
        let endpoint = Endpoint::new(ip, config);
        let [next, previous] = neighbours;
        let sources = [(next.ip, next.ports.previous), (previous.ip, previous.ports.next)];
        let ready = driver.prepare(shape.mtu as usize, sources.map(SocketAddr::from));
        ready.map_err(|reason| Error::Socket { ip, reason })?;
        let capacity = driver.receive_capacity(shape.mtu as usize);
        let channels = QueuePairChannels::new(endpoint, shape, rank as u32, ranks, capacity)
            .map_err(|e| Error::Config(format!("connections: {e}")))?;
        Ok(Box::new(SocketConnections {
            ip,
            channels,
            driver,
            batching: ReceiveBatching::default(),
        }))
    }

    fn any_ip_id(&self) -> bool {
        false
    }

    fn selective(&self) -> bool {
        true
    }

    fn ports(&self) -> SourcePorts {
        self.driver.as_ref().map_or(SourcePorts::ROCE, Driver::ports)
    }
}

/// A rank's connections, and the driver of their datagrams.
struct SocketConnections<D> {
    ip: IpAddr,
    channels: QueuePairChannels,
    driver: D,
    batching: ReceiveBatching,
}

impl<D: Driver> SocketConnections<D> {
    fn drive_driver(&mut self, until: Instant) -> io::Result<bool> {
        let endpoint = &mut self.channels.endpoint;
        if let Some(wait) = self.batching.wait(Instant::now(), endpoint.in_flight()) {
            let sent = self.driver.transmit(endpoint)?;
            let left = until.saturating_duration_since(Instant::now());
            if sent || left.is_zero() {
                return Ok(sent);
            }
            std::thread::sleep(wait.min(left));
        }
        let before = endpoint.stats().received_packets;
        let driven = self.driver.drive(endpoint, until);
        let packets = endpoint.stats().received_packets - before;
        if packets > 0 {
            self.batching.received(Instant::now(), packets as u32);
        }
        driven
    }
}

impl<D: Driver> Channels for SocketConnections<D> {
    fn send(&mut self, channel: Channel, id: u64, data: Buffer) {
        self.channels.send(channel, id, data);
    }

    fn expect(&mut self, now: Instant, channel: Channel, id: u64) {
        self.channels.expect(now, channel, id);
    }

    fn receive_into(&mut self, channel: Channel, buffer: Buffer) {
        self.channels.receive_into(channel, buffer);
    }

    fn last_part(&self, channel: Channel) -> Option<Instant> {
        self.channels.last_part(channel)
    }

    fn poll(&mut self) -> Option<ChannelEvent> {
        self.channels.poll()
    }

    fn close(&mut self, channel: Channel) -> Vec<(u64, Buffer)> {
        self.channels.close(channel)
    }
}

impl<D: Driver> Connections for SocketConnections<D> {
    fn start(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn drive(&mut self, until: Instant) -> Result<bool, Error> {
        self.drive_driver(until).map_err(|e| Error::Socket { ip: self.ip, reason: e.to_string() })
    }

    fn batch_delay(&self) -> Option<Duration> {
        self.batching.wait(Instant::now(), self.channels.endpoint.in_flight())
    }

    fn acknowledge_all(&mut self) {
        self.channels.endpoint.acknowledge_all();
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.channels.endpoint.next_timeout()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.driver.as_fd()
    }

    fn traffic(&self) -> Option<Traffic> {
        let stats = self.channels.endpoint.stats();
        let mut traffic = Traffic::default();
        traffic.bytes_sent = stats.sent_bytes;
        traffic.bytes_received = stats.received_bytes;
        traffic.packets_sent = stats.sent_packets;
        traffic.packets_received = stats.received_packets;
        traffic.retransmissions = stats.retransmissions;
        traffic.congestion_marks = stats.ce_received;
        Some(traffic)
    }

    fn restarts(&self) -> u64 {
        0
    }

    fn previous_is_in_earlier(&self) -> bool {
        self.channels.previous_is_in_earlier()
    }

    fn stray(&self) -> Option<IpAddr> {
        self.channels.endpoint.stray()
    }

    fn transport_name(&self) -> String {
        self.driver.transport_name().to_owned()
    }
}
