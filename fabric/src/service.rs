//! The manager's services: that for boxes and links, and what the service for jobs asks of it.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use netsum_api::v1 as api;
use netsum_api::v1::manager_server::Manager;
use netsum_controller::backend::{Backend, RankLocation};
use netsum_controller::message::{diagnosis_message, refused};
use netsum_core::diagnose::diagnose;
use netsum_core::{Rank, RankAddress, State};
use tonic::{Request, Response, Status};

use crate::boxes::Boxes;
use crate::orders::{Orders, Shared};

/// A manager as its services see it.
#[derive(Clone)]
pub struct ManagerBackend {
    shared: Shared,
    boxes: Arc<Boxes>,
}

impl ManagerBackend {
    pub fn new(shared: Shared, boxes: Arc<Boxes>) -> Self {
        Self { shared, boxes }
    }

    /// Writes what an administrator has changed.
    fn keep(&self) -> Result<(), Status> {
        self.shared.lock().carry_out(None, Vec::new())
    }
}

#[tonic::async_trait]
impl Backend for ManagerBackend {
    type Executor = Orders;

    fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Boxes are polled anyway.
    async fn refresh_ports(&self) -> Result<(), Status> {
        Ok(())
    }

    async fn find(
        &self,
        rank: u32,
        address: &RankAddress,
        patience: Duration,
    ) -> Result<RankLocation, Status> {
        let found = self.boxes.find(rank, address.mac, address.ip, patience).await;
        found.map(|(ifindex, mac)| RankLocation { ifindex, mac, router: None })
    }

    async fn port_seen(&self, _: IpAddr) -> Option<String> {
        None
    }

    async fn diagnose(&self, request: api::DiagnoseRequest) -> Result<api::Diagnosis, Status> {
        let ages = {
            let inner = self.shared.lock();
            let job = inner.controller.job(&request.job).map_err(refused)?;
            if job.state != State::Active {
                // The manager itself knows which ranks have not joined.
                return Ok(diagnosis_message(job, diagnose(job, &[], &[], 0, &[])));
            }
            let ago = |rank| Some(job.epoch.as_ref()?.last_seen(rank)?.elapsed());
            Rank::all(job.spec.ranks).map(ago).collect()
        };
        Ok(self.boxes.diagnose(request, ages).await)
    }

    /// Each box knows only its own ports; `netsum fabric diagnose` queries them all.
    async fn explain_missing_packets(
        &self,
        _: api::ExplainMissingPacketsRequest,
    ) -> Result<api::ExplainMissingPacketsReply, Status> {
        Ok(api::ExplainMissingPacketsReply::default())
    }

    fn job_aborted(&self, _: String, _: HashSet<u32>) {}
}

#[tonic::async_trait]
impl Manager for ManagerBackend {
    async fn show_fabric(
        &self,
        request: Request<api::ShowFabricRequest>,
    ) -> Result<Response<api::Fabric>, Status> {
        let api::ShowFabricRequest { hosts, measure } = request.into_inner();
        if measure {
            self.boxes.measure().await;
        }
        let fabric = if hosts { self.boxes.topology().await } else { self.boxes.show() };
        Ok(Response::new(fabric))
    }

    async fn drain_box(
        &self,
        request: Request<api::DrainBoxRequest>,
    ) -> Result<Response<api::DrainBoxReply>, Status> {
        let api::DrainBoxRequest { name, reason } = request.into_inner();
        self.boxes.drain(&name, reason).map_err(refused)?;
        self.keep()?;
        Ok(Response::new(api::DrainBoxReply {}))
    }

    async fn accept_link(
        &self,
        request: Request<api::AcceptLinkRequest>,
    ) -> Result<Response<api::AcceptLinkReply>, Status> {
        let api::AcceptLinkRequest { end, revoke } = request.into_inner();
        self.boxes.accept(&end, revoke).map_err(refused)?;
        self.keep()?;
        Ok(Response::new(api::AcceptLinkReply {}))
    }
}
