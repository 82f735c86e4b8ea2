//! The services' queries about a box or a fabric.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Duration;

use netsum_api::v1 as api;
use netsum_core::RankAddress;
use tonic::Status;

use super::executor::Executor;
use super::state::Shared;

/// A box or a fabric, as its services see it: what takes time, and happens without the lock. Each
/// service has a copy.
#[tonic::async_trait]
pub trait Backend: Clone + Send + Sync + 'static {
    type Executor: Executor;

    fn shared(&self) -> &Shared<Self::Executor>;

    /// Updates what the controller knows of ports.
    async fn refresh_ports(&self) -> Result<(), Status>;

    /// Finds the port that a rank is behind. `timeout` bounds the search.
    async fn find(
        &self,
        rank: u32,
        address: &RankAddress,
        timeout: Duration,
    ) -> Result<RankLocation, Status>;

    /// The name of the port at which packets of this address arrive, if known.
    async fn port_seen(&self, ip: IpAddr) -> Option<String>;

    /// Watches a stalled job, and says why it has stalled.
    async fn diagnose(&self, request: api::DiagnoseRequest) -> Result<api::Diagnosis, Status>;

    /// Says why packets do not reach a rank.
    async fn explain_missing_packets(
        &self,
        request: api::ExplainMissingPacketsRequest,
    ) -> Result<api::ExplainMissingPacketsReply, Status>;

    /// Begins to log possible causes after a rank has ended a job, which had its flows at these
    /// ports.
    fn job_aborted(&self, job: String, ports: HashSet<u32>);
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankLocation {
    pub ifindex: u32,
    /// The MAC address of its packets there: its own, or its router's.
    pub mac: [u8; 6],
    /// That router's address, if known.
    pub router: Option<IpAddr>,
}
