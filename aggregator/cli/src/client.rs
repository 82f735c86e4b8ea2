//! The connection to the daemon.

use std::error::Error as _;
use std::io;
use std::path::Path;

use hyper_util::rt::TokioIo;
use netsum_api::v1 as api;
use netsum_api::v1::agent_client::AgentClient;
use netsum_api::v1::jobs_client::JobsClient;
use netsum_api::v1::manager_client::ManagerClient;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Response, Status, Streaming};
use tower::service_fn;

use super::args::Ends;
use super::failure::{Failure, Kind, Result};

/// A connection to the daemon's administration socket.
pub struct Client {
    jobs: JobsClient<Channel>,
    /// Only a box answers.
    agent: AgentClient<Channel>,
    /// Only a manager answers.
    manager: ManagerClient<Channel>,
}

/// The daemon's answer, without gRPC's own words.
fn checked<T>(answer: std::result::Result<Response<T>, Status>) -> Result<T> {
    answer.map(Response::into_inner).map_err(failure)
}

/// The answer of a daemon that may lack the service: then `otherwise` says where it is.
fn answer_or<T>(answer: std::result::Result<Response<T>, Status>, otherwise: &str) -> Result<T> {
    match answer {
        Err(status) if status.code() == Code::Unimplemented => {
            Err(Failure::new(Kind::Refused, otherwise))
        }
        answer => checked(answer),
    }
}

fn answer_of_box<T>(answer: std::result::Result<Response<T>, Status>) -> Result<T> {
    answer_or(answer, "this socket is a manager's: use a box's --socket")
}

fn answer_of_manager<T>(answer: std::result::Result<Response<T>, Status>) -> Result<T> {
    answer_or(answer, "this socket is a box's: use the manager's --socket")
}

/// Why the daemon did not do what was requested.
fn failure(status: Status) -> Failure {
    let transport = status.source().is_some_and(|e| e.is::<tonic::transport::Error>());
    let (kind, message) = match status.code() {
        Code::NotFound => (Kind::NotFound, status.message().to_owned()),
        Code::InvalidArgument
        | Code::AlreadyExists
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::PermissionDenied
        | Code::Unauthenticated
        | Code::DeadlineExceeded => (Kind::Refused, status.message().to_owned()),
        Code::Unimplemented => {
            (Kind::Refused, "the daemon does not know this request: it has an older version".into())
        }
        Code::Unavailable | Code::Unknown if transport => {
            (Kind::NoDaemon, "the daemon closed the connection before it answered".into())
        }
        _ => (Kind::Failed, status.message().to_owned()),
    };
    Failure::new(kind, message)
}

/// The I/O error below another error.
fn io_error<'a>(mut error: &'a (dyn std::error::Error + 'static)) -> Option<&'a io::Error> {
    loop {
        if let Some(io) = error.downcast_ref() {
            return Some(io);
        }
        error = error.source()?;
    }
}

impl Client {
    pub async fn connect(socket: &Path) -> Result<Self> {
        let path = socket.to_owned();
        let connect = service_fn(move |_: Uri| {
            let path = path.clone();
            async move { Ok::<_, io::Error>(TokioIo::new(tokio::net::UnixStream::connect(path).await?)) }
        });
        // The address is not used: the connector has the path.
        let channel = Endpoint::from_static("http://netsum").connect_with_connector(connect).await;
        let channel = channel.map_err(|e| {
            let (reason, forbidden) = match io_error(&e) {
                Some(io) => (io.to_string(), io.kind() == io::ErrorKind::PermissionDenied),
                None => (e.to_string(), false),
            };
            let socket = socket.display();
            if forbidden {
                Failure::new(Kind::Refused, format!("no permission for {socket}: {reason}"))
            } else {
                let message = format!("no daemon at {socket}: is `netsum run` running? ({reason})");
                Failure::new(Kind::NoDaemon, message)
            }
        })?;
        Ok(Self {
            jobs: JobsClient::new(channel.clone()),
            agent: AgentClient::new(channel.clone()),
            manager: ManagerClient::new(channel),
        })
    }

    pub async fn create_job(&mut self, request: api::CreateJobRequest) -> Result<api::Job> {
        checked(self.jobs.create_job(request).await)
    }

    pub async fn list_tenants(&mut self) -> Result<Vec<api::Tenant>> {
        Ok(checked(self.jobs.list_tenants(api::ListTenantsRequest {}).await)?.tenants)
    }

    pub async fn list_jobs(&mut self) -> Result<Vec<api::Job>> {
        Ok(checked(self.jobs.list_jobs(api::ListJobsRequest {}).await)?.jobs)
    }

    /// A job; with its token if requested.
    pub async fn show_job(&mut self, name: String, show_token: bool) -> Result<api::Job> {
        checked(self.jobs.show_job(api::ShowJobRequest { name, show_token }).await)
    }

    pub async fn delete_job(&mut self, name: String, forget_connections: bool) -> Result<()> {
        checked(self.jobs.delete_job(api::DeleteJobRequest { name, forget_connections }).await)
            .map(drop)
    }

    /// Empties a job's rings and forgets its flows.
    pub async fn restart_job(&mut self, name: String) -> Result<api::Job> {
        checked(self.jobs.restart_job(api::RestartJobRequest { name }).await)
    }

    /// Has a job's ranks reconnect.
    pub async fn reconnect_job(&mut self, name: String) -> Result<()> {
        checked(self.jobs.reconnect_job(api::ReconnectJobRequest { name }).await).map(drop)
    }

    /// Registers a flow; returns the job with it.
    pub async fn add_flow(&mut self, job: String, flow: api::Flow) -> Result<api::Job> {
        let answer = self.agent.add_flow(api::AddFlowRequest { job, flow: Some(flow) }).await;
        answer_or(answer, "flows can be added only at a box: use its --socket")
    }

    pub async fn list_ports(&mut self) -> Result<Vec<api::Port>> {
        Ok(answer_of_box(self.agent.list_ports(api::ListPortsRequest::default()).await)?.ports)
    }

    /// The boxes of a fabric; with the hosts below them if requested; `measure` measures links
    /// first.
    pub async fn show_fabric(&mut self, hosts: bool, measure: bool) -> Result<api::Fabric> {
        answer_of_manager(self.manager.show_fabric(api::ShowFabricRequest { hosts, measure }).await)
    }

    /// Drains a box for a reason; without a reason, ends the drain.
    pub async fn drain_box(&mut self, name: String, reason: Option<String>) -> Result<()> {
        answer_of_manager(self.manager.drain_box(api::DrainBoxRequest { name, reason }).await)
            .map(drop)
    }

    /// Makes a fabric use the discovered links with this end, or stop using them.
    pub async fn accept_link(&mut self, end: String, revoke: bool) -> Result<()> {
        answer_of_manager(self.manager.accept_link(api::AcceptLinkRequest { end, revoke }).await)
            .map(drop)
    }

    pub async fn show_spread(&mut self) -> Result<api::Spread> {
        answer_of_box(self.agent.show_spread(api::ShowSpreadRequest {}).await)
    }

    /// Pins a flow to an uplink; without one the box chooses.
    pub async fn pin_flow(&mut self, flow: Ends, uplink: Option<String>) -> Result<()> {
        let Ends { src, src_port, dst } = flow;
        let request = api::PinFlowRequest { src, src_port: src_port.into(), dst, uplink };
        answer_of_box(self.agent.pin_flow(request).await).map(drop)
    }

    /// Used slots of a job.
    pub async fn show_slots(
        &mut self,
        job: String,
        ring: Option<u32>,
    ) -> Result<api::ShowSlotsReply> {
        answer_of_box(self.agent.show_slots(api::ShowSlotsRequest { job, ring }).await)
    }

    /// Rings of a job, or of all when `job` is empty.
    pub async fn list_rings(&mut self, job: String) -> Result<Vec<api::Ring>> {
        Ok(answer_of_box(self.agent.list_rings(api::ListRingsRequest { job }).await)?.rings)
    }

    pub async fn list_programs(&mut self) -> Result<api::ListProgramsReply> {
        answer_of_box(self.agent.list_programs(api::ListProgramsRequest {}).await)
    }

    /// Diagnoses a stalled job.
    pub async fn diagnose(&mut self, job: String, watch_ms: u32) -> Result<api::Diagnosis> {
        checked(self.jobs.diagnose(api::DiagnoseRequest { job, watch_ms, path_test: false }).await)
    }

    /// Whether packets get through between a job's ranks.
    pub async fn path_test(&mut self, job: String) -> Result<api::Diagnosis> {
        let request = api::DiagnoseRequest { job, watch_ms: 250, path_test: true };
        checked(self.jobs.diagnose(request).await)
    }

    /// Single packets, as they arrive.
    pub async fn trace(&mut self, request: api::TraceRequest) -> Result<Traces> {
        let answer = self.agent.trace(request).await;
        answer_or(answer, "the manager receives no packets: trace at a box").map(Traces)
    }

    /// Counters and load of a job, or of the whole box if `job` is empty.
    pub async fn stats(&mut self, job: String) -> Result<api::StatsReply> {
        answer_of_box(self.agent.stats(api::StatsRequest { job }).await)
    }
}

/// A stream of traced packets.
pub struct Traces(Streaming<api::TraceReply>);

impl Traces {
    /// The next ones, and how many were lost before them; `None` if the daemon has ended.
    pub async fn next(&mut self) -> Result<Option<api::TraceReply>> {
        self.0.message().await.map_err(|status| {
            // A connection that breaks has an I/O error below it; a status of the daemon has none.
            if status.source().is_some() {
                Failure::new(Kind::NoDaemon, "the daemon closed the connection")
            } else {
                Failure::new(Kind::Failed, status.message())
            }
        })
    }
}
