//! Answers the controller's queries about this machine, which take time.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use netsum_api::v1 as api;
use netsum_controller::backend::{Backend, RankLocation};
use netsum_controller::message::mac_text;
use netsum_core::RankAddress;
use netsum_core::port::Problem;
use tokio::sync::Mutex;
use tonic::Status;

use super::agent::{Agent, Shared};
use super::netlink::PortLookup;
use super::network::Network;
use super::{diagnose, missing_packets};

/// A box as its services see it.
#[derive(Clone)]
pub struct BoxBackend {
    shared: Shared,
    pub network: Network,
    seen: Arc<Mutex<missing_packets::CachedEvidence>>,
}

impl BoxBackend {
    pub fn new(shared: Shared, network: Network) -> Self {
        Self { shared, network, seen: Arc::default() }
    }
}

fn internal(error: anyhow::Error) -> Status {
    Status::internal(format!("{error:#}"))
}

#[tonic::async_trait]
impl Backend for BoxBackend {
    type Executor = Agent;

    fn shared(&self) -> &Shared {
        &self.shared
    }

    async fn refresh_ports(&self) -> Result<(), Status> {
        let interfaces = self.network.interfaces().await.map_err(internal)?;
        let mut inner = self.shared.lock();
        inner.controller.set_mtus(interfaces.iter().map(|l| (l.ifindex, l.mtu)));
        inner.controller.set_routers(interfaces.iter().map(|l| (l.ifindex, l.router)));
        Ok(())
    }

    async fn find(
        &self,
        rank: u32,
        address: &RankAddress,
        _: Duration,
    ) -> Result<RankLocation, Status> {
        let next_hop = self.network.next_hop_to(address.ip).await.map_err(internal)?;
        if next_hop.is_some_and(|next_hop| next_hop.is_own) {
            return Err(Status::failed_precondition(format!(
                "rank {rank}: {} is an address of the box itself",
                address.ip
            )));
        }
        let ports: Vec<u32> =
            self.shared.lock().controller.ports().iter().map(|p| p.ifindex).collect();
        let found = self.network.port_of(address.mac, address.ip, &ports).await;
        let found = found.map_err(internal)?;
        let interfaces = self.network.interfaces().await.map_err(internal)?;
        let refused = |why: String| Err(Status::failed_precondition(format!("rank {rank}: {why}")));
        let of = format!("MAC address {} of {}", mac_text(address.mac), address.ip);
        let (ifindex, mac) = match found {
            PortLookup::Port { ifindex, mac } => (ifindex, mac),
            PortLookup::NotSeen { router: None } => {
                return refused(format!(
                    "the bridge has not seen {of} on any port; a rank behind a router is found by \
                     the box's route to it"
                ));
            }
            PortLookup::NotSeen { router: Some(router) } => {
                return refused(format!(
                    "the bridge has not seen {of} on any port, nor that of {router}, the box's \
                     router on the way there"
                ));
            }
        };
        let mut inner = self.shared.lock();
        let isolated = interfaces.iter().filter(|l| l.isolated);
        inner.controller.set_isolated(isolated.filter_map(|l| Some((l.ifindex, l.bridge?))));
        inner.controller.set_mtus(interfaces.iter().map(|l| (l.ifindex, l.mtu)));
        inner.controller.set_routers(interfaces.iter().map(|l| (l.ifindex, l.router)));
        if inner.controller.ports().iter().any(|p| p.ifindex == ifindex) {
            let router = next_hop.map(|next_hop| next_hop.next).filter(|next| *next != address.ip);
            Ok(RankLocation { ifindex, mac, router })
        } else {
            let of = if mac == address.mac {
                of
            } else {
                format!("{}, the router of {},", mac_text(mac), address.ip)
            };
            let name = interfaces.iter().find(|l| l.ifindex == ifindex).map_or("?", |l| &l.name);
            refused(format!("{of} is behind {name}, which is not a port of netsum's"))
        }
    }

    async fn port_seen(&self, ip: IpAddr) -> Option<String> {
        let ifindex = self.network.netlink()?.seen_at(ip).await.ok()??;
        let inner = self.shared.lock();
        let port = inner.controller.ports().iter().find(|p| p.ifindex == ifindex);
        port.map(|port| port.name.clone())
    }

    async fn diagnose(&self, request: api::DiagnoseRequest) -> Result<api::Diagnosis, Status> {
        Ok(diagnose::answer(&self.shared, &self.network, request).await?.0)
    }

    async fn explain_missing_packets(
        &self,
        request: api::ExplainMissingPacketsRequest,
    ) -> Result<api::ExplainMissingPacketsReply, Status> {
        let cause =
            missing_packets::cause(&self.shared, &self.network, &self.seen, &request).await?;
        let reply = cause.map(|d| api::ExplainMissingPacketsReply {
            cause: format!("{}: {}", d.found, d.hint),
            certain: d.is_fatal,
        });
        Ok(reply.unwrap_or_default())
    }

    fn job_aborted(&self, job: String, ports: HashSet<u32>) {
        let network = self.network.clone();
        tokio::spawn(async move {
            for Problem { found, hint, .. } in network.obstacles(&ports).await {
                log::warn!(
                    NETSUM_JOB = job;
                    "job {job} has ended; possible cause: {found}: {hint}"
                );
            }
        });
    }
}
