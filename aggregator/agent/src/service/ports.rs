//! Ports, the hosts behind them, and the bandwidth probes that measure their links.

use std::collections::HashMap;
use std::time::Instant;

use netsum_api::v1 as api;
use netsum_common::abi::Address;
use netsum_controller::jobs::election;
use netsum_controller::message::{mac_from_text, mac_text};
use netsum_core::PortInfo;
use netsum_core::plane::mapped;
use tonic::{Request, Response, Status};

use super::{AgentService, RpcResult, address, internal};
use crate::agent::Inner;
use crate::bandwidth_probes::BandwidthProbes;
use crate::device;
use crate::netlink::{Netlink, PortLookup};

impl AgentService {
    fn bandwidth_probes(&self) -> Result<(&Netlink, &BandwidthProbes), Status> {
        let netlink = self.backend.network.netlink();
        let bandwidth_probes =
            netlink.and_then(|netlink| Some((netlink, netlink.bandwidth_probes.as_ref()?)));
        bandwidth_probes
            .ok_or_else(|| Status::failed_precondition("this box sends no bandwidth probes"))
    }

    /// Reserves addresses for bridge ports only: a port outside a bridge receives what routers
    /// send, on a path that they choose.
    pub(super) async fn reserve_for(
        &self,
        request: Request<api::ReserveRequest>,
    ) -> RpcResult<api::ReserveReply> {
        let (election, wanted) = (election(&request)?, request.into_inner().reservations);
        let interfaces = self.backend.network.interfaces().await.map_err(internal)?;
        let bridged = |port: &str| {
            let port = interfaces.iter().find(|l| l.name == port && l.bridge.is_some())?;
            Some(port.ifindex)
        };
        let (mut places, mut manager) = (HashMap::new(), HashMap::new());
        for api::Reservation { address: text, port, lapses } in &wanted {
            let key = match mac_from_text(text) {
                Some(mac) => Address::mac(mac),
                None => Address::ip(mapped(address("address", text)?)),
            };
            let places = if *lapses { &mut manager } else { &mut places };
            bridged(port).map(|ifindex| places.insert(key, ifindex));
        }
        let mut inner = self.shared().order(election)?;
        (inner.executor.reserved.fabric, inner.executor.reserved.manager) = (places, manager);
        inner.executor.reserved.called = Some(Instant::now());
        inner.executor.reserve().map_err(internal)?;
        Ok(Response::new(api::ReserveReply {}))
    }

    pub(super) async fn ports(
        &self,
        request: Request<api::ListPortsRequest>,
    ) -> RpcResult<api::ListPortsReply> {
        let election = election(&request)?;
        let netlink = self.backend.network.netlink();
        let hosts = match netlink.filter(|_| request.get_ref().hosts) {
            Some(netlink) => netlink.hosts().await.map_err(internal)?,
            None => Vec::new(),
        };
        let interfaces = self.backend.network.interfaces().await.map_err(internal)?;
        let lldp = netlink.and_then(|netlink| netlink.lldp.as_ref());
        let ports = netlink.map(|_| self.shared().lock().controller.ports().to_vec());
        // Drivers may take their time, so they are queried without the lock.
        let rates: HashMap<u32, u64> =
            ports.iter().flatten().map(|p| (p.ifindex, device::rate(p.ifindex))).collect();
        let mut inner = self.shared().lock();
        // A manager without orders shows by this call that it is alive.
        election.map(|election| inner.accept_election(election));
        let ports = inner.controller.ports().iter().map(|p| {
            let flows = inner
                .controller
                .jobs()
                .flat_map(|j| &j.flows)
                .filter(|f| f.ifindex == p.ifindex)
                .count() as u32;
            let mut port = api::Port {
                name: p.name.clone(),
                ifindex: p.ifindex,
                mtu: p.mtu,
                flows,
                hosts: hosts
                    .iter()
                    .filter(|(i, _)| *i == p.ifindex)
                    .map(|(_, mac)| mac_text(*mac))
                    .collect(),
                up: netlink.is_none(),
                xdp: if netlink.is_none() { "native".into() } else { String::new() },
                ..api::Port::default()
            };
            if let Some(interface) = interfaces.iter().find(|l| l.ifindex == p.ifindex) {
                port.mac.clone_from(&interface.mac);
                (port.mtu, port.up, port.blocked) =
                    (interface.mtu, interface.up, interface.blocked);
                port.xdp = interface.xdp.unwrap_or_default().into();
                port.rate = rates.get(&p.ifindex).copied().unwrap_or_default();
                [port.rx_bytes, port.rx_packets, port.tx_bytes, port.tx_packets] =
                    interface.counters;
            }
            let neighbour = lldp.and_then(|lldp| lldp.get(p.ifindex, Instant::now()));
            port.neighbour = neighbour.map(|(n, age)| api::Neighbour {
                mac: mac_text(n.mac),
                chassis: n.chassis,
                port: n.port,
                age_ms: age.as_millis() as u32,
                chassis_id: n.id,
            });
            port
        });
        let (protocol, release) = (netsum_api::PROTOCOL, netsum_api::RELEASE.into());
        Ok(Response::new(api::ListPortsReply {
            ports: ports.collect(),
            protocol,
            release,
            election: inner.election,
            lldp: lldp.is_some(),
            chassis_id: lldp.map(|lldp| lldp.own.to_string()).unwrap_or_default(),
            aggregation_rate: inner.executor.aggregation_rate(&inner.controller),
            cpus: Some(inner.controller.cpus() as u32),
            macs: interfaces.iter().map(|l| l.mac.clone()).filter(|mac| !mac.is_empty()).collect(),
        }))
    }

    pub(super) async fn bandwidth_probe_sent(
        &self,
        request: Request<api::SendBandwidthProbeRequest>,
    ) -> RpcResult<api::SendBandwidthProbeReply> {
        let (election, request) = (election(&request)?, request.into_inner());
        let (netlink, bandwidth_probes) = self.bandwidth_probes()?;
        let interfaces = netlink.interfaces().await.map_err(internal)?;
        let port = {
            let inner = self.shared().order(election)?;
            let port = port(&inner, &request.port)?;
            if inner
                .controller
                .jobs()
                .flat_map(|job| &job.flows)
                .any(|flow| flow.ifindex == port.ifindex)
            {
                return Err(Status::failed_precondition(format!(
                    "a job has its rings at {}",
                    port.name
                )));
            }
            port.ifindex
        };
        let port = interfaces.iter().find(|l| l.ifindex == port && l.up);
        let port =
            port.ok_or_else(|| Status::failed_precondition(format!("{} is down", request.port)))?;
        let mac = mac_from_text(&port.mac).ok_or_else(|| {
            Status::failed_precondition(format!("{} has no address", request.port))
        })?;
        let probe =
            bandwidth_probes.send(port.ifindex, mac, port.mtu, request.bytes as usize).await;
        let probe = probe.map_err(|e| Status::unavailable(format!("{}: {e}", request.port)))?;
        Ok(Response::new(api::SendBandwidthProbeReply { probe: Some(probe) }))
    }

    pub(super) async fn bandwidth_probe_received(
        &self,
        request: Request<api::ReceiveBandwidthProbeRequest>,
    ) -> RpcResult<api::ReceiveBandwidthProbeReply> {
        let (election, request) = (election(&request)?, request.into_inner());
        let (_, bandwidth_probes) = self.bandwidth_probes()?;
        let port = {
            let inner = self.shared().order(election)?;
            port(&inner, &request.port)?.ifindex
        };
        let probe = bandwidth_probes
            .receive(port)
            .map_err(|e| Status::unavailable(format!("{}: {e}", request.port)))?;
        Ok(Response::new(api::ReceiveBandwidthProbeReply { probe: Some(probe) }))
    }

    pub(super) async fn port_of(
        &self,
        request: Request<api::FindPortRequest>,
    ) -> RpcResult<api::FindPortReply> {
        let r = request.into_inner();
        let mac = mac_from_text(&r.mac)
            .ok_or_else(|| Status::invalid_argument("mac: six bytes in hex are needed"))?;
        let ip = address("ip", &r.ip)?;
        let ports: Vec<u32> =
            self.shared().lock().controller.ports().iter().map(|p| p.ifindex).collect();
        let found = self.backend.network.port_of(mac, ip, &ports).await.map_err(internal)?;
        let PortLookup::Port { ifindex, mac } = found else {
            return Err(Status::not_found(format!("{ip} is not behind any port")));
        };
        let inner = self.shared().lock();
        let port = inner.controller.ports().iter().find(|p| p.ifindex == ifindex);
        let port = port
            .ok_or_else(|| Status::not_found(format!("{ip} is not behind a port of netsum's")))?;
        Ok(Response::new(api::FindPortReply { port: port.name.clone(), mac: mac_text(mac) }))
    }

    pub(super) async fn ports_of(
        &self,
        request: Request<api::FindHostsRequest>,
    ) -> RpcResult<api::FindHostsReply> {
        let macs = request.into_inner().macs;
        let seen = self.backend.network.hosts(&macs).await.map_err(internal)?;
        let inner = self.shared().lock();
        let ports: HashMap<u32, &String> =
            inner.controller.ports().iter().map(|p| (p.ifindex, &p.name)).collect();
        let host = |mac: String| {
            let port = (*ports.get(seen.get(&mac)?)?).clone();
            Some(api::FabricHost { mac, port })
        };
        let hosts = macs.into_iter().filter_map(host).collect();
        Ok(Response::new(api::FindHostsReply { hosts }))
    }
}

fn port<'a>(inner: &'a Inner, name: &str) -> Result<&'a PortInfo, Status> {
    let port = inner.controller.ports().iter().find(|port| port.name == name);
    port.ok_or_else(|| Status::not_found(format!("port `{name}` does not exist")))
}
