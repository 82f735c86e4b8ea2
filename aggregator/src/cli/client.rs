//! The connection to the daemon.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use hyper_util::rt::TokioIo;
use netsum_api::v1 as api;
use netsum_api::v1::admin_client::AdminClient;
use tonic::Status;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

/// A connection to the daemon's administration socket.
pub struct Client {
    admin: AdminClient<Channel>,
}

/// What the daemon said, without gRPC's own words.
fn said(status: Status) -> anyhow::Error {
    anyhow!("{}", status.message())
}

impl Client {
    /// Connects.
    pub async fn connect(socket: &Path) -> Result<Self> {
        let path = socket.to_owned();
        let connect = service_fn(move |_: Uri| {
            let path = path.clone();
            async move { Ok::<_, std::io::Error>(TokioIo::new(tokio::net::UnixStream::connect(path).await?)) }
        });
        // The address is not used: the connector knows its way.
        let channel = Endpoint::from_static("http://netsum")
            .connect_with_connector(connect)
            .await
            .with_context(|| format!("no daemon at {}: is `netsum run` running?", socket.display()))?;
        Ok(Self { admin: AdminClient::new(channel) })
    }

    /// Creates a job.
    pub async fn create_job(&mut self, request: api::CreateJobRequest) -> Result<api::Job> {
        Ok(self.admin.create_job(request).await.map_err(said)?.into_inner())
    }

    /// All jobs.
    pub async fn list_jobs(&mut self) -> Result<Vec<api::Job>> {
        Ok(self.admin.list_jobs(api::ListJobsRequest {}).await.map_err(said)?.into_inner().jobs)
    }

    /// A job, with its token if asked for.
    pub async fn show_job(&mut self, name: String, show_token: bool) -> Result<api::Job> {
        Ok(self.admin.show_job(api::ShowJobRequest { name, show_token }).await.map_err(said)?.into_inner())
    }

    /// Deletes a job.
    pub async fn delete_job(&mut self, name: String) -> Result<()> {
        self.admin.delete_job(api::DeleteJobRequest { name }).await.map_err(said)?;
        Ok(())
    }

    /// Empties a job's rings and forgets its flows.
    pub async fn restart_job(&mut self, name: String) -> Result<api::Job> {
        Ok(self.admin.restart_job(api::RestartJobRequest { name }).await.map_err(said)?.into_inner())
    }

    /// Registers a flow; the job with it.
    pub async fn add_flow(&mut self, job: String, flow: api::Flow) -> Result<api::Job> {
        let request = api::AddFlowRequest { job, flow: Some(flow) };
        Ok(self.admin.add_flow(request).await.map_err(said)?.into_inner())
    }

    /// All ports.
    pub async fn list_ports(&mut self) -> Result<Vec<api::Port>> {
        Ok(self.admin.list_ports(api::ListPortsRequest {}).await.map_err(said)?.into_inner().ports)
    }

    /// Slots of a job that are in use.
    pub async fn show_slots(&mut self, job: String, ring: Option<u32>) -> Result<api::ShowSlotsReply> {
        Ok(self.admin.show_slots(api::ShowSlotsRequest { job, ring }).await.map_err(said)?.into_inner())
    }

    /// Why a job stands still.
    pub async fn diagnose(&mut self, job: String, watch_ms: u32) -> Result<api::Diagnosis> {
        Ok(self.admin.diagnose(api::DiagnoseRequest { job, watch_ms }).await.map_err(said)?.into_inner())
    }

    /// Counters.
    pub async fn stats(&mut self, job: String) -> Result<Vec<api::Counter>> {
        Ok(self.admin.stats(api::StatsRequest { job }).await.map_err(said)?.into_inner().counters)
    }
}
