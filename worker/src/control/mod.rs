//! The client of the box's daemon: gRPC behind blocking calls.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`heartbeat`] | the thread that sends heartbeats |
//! | [`interface`] | the interface that has an address |
//! | [`tls`] | TLS, and why it fails |

pub(crate) mod heartbeat;
pub(crate) mod interface;
mod tls;

use std::error::Error as _;
use std::future::Future;
use std::time::{Duration, Instant};

pub(crate) use netsum_api::v1::explain_missing_packets_request::MissingPackets;
use netsum_api::v1::worker_client::WorkerClient;
use netsum_api::v1::{self, JobState};
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Response, Status};

use crate::comm::config::Tls;
use netsum_collective::error::Error;
use netsum_collective::failback::ReconnectRequest;

/// How long to retry where nobody listens: the controller may be about to start.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The controller's answer to a heartbeat.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct HeartbeatAnswer {
    /// Whether and when to reconnect.
    pub reconnect_request: ReconnectRequest,
    /// Why the job has failed, if it has.
    pub failed: Option<String>,
    /// The number of the path test that it asks for.
    pub path_test: u32,
    /// Ranks whose processes have ended.
    pub ended_ranks: Vec<u32>,
}

/// Why packets do not arrive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Cause {
    /// What is wrong and what to do; empty where the box knows nothing.
    pub text: String,
    /// Waiting does not help.
    pub is_certain: bool,
}

/// A client of one job.
pub(crate) struct Control {
    runtime: tokio::runtime::Runtime,
    address: String,
    job: String,
    token: String,
    tls: Option<ClientTlsConfig>,
    files: Option<Tls>,
    /// Whether the rank seals its sums, which heartbeats report.
    is_sealed: bool,
    /// How long to retry where nobody listens.
    patience: Duration,
    /// Whether to retry also where the controller ends before it has answered.
    again: bool,
    client: Option<WorkerClient<Channel>>,
}

impl Control {
    /// A client that has not connected yet.
    pub fn new(address: &str, job: &str, token: &str, files: Option<&Tls>) -> Result<Self, Error> {
        let tls =
            files.map(tls::client_config).transpose().map_err(|e| Error::Config(e.to_string()))?;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| {
                Error::Config(format!("cannot start a runtime for the control client: {e}"))
            })?;
        Ok(Self {
            runtime,
            address: address.to_owned(),
            job: job.to_owned(),
            token: token.to_owned(),
            tls,
            files: files.cloned(),
            is_sealed: false,
            patience: TIMEOUT,
            again: false,
            client: None,
        })
    }

    /// The rank seals its sums.
    pub fn sealed(self) -> Self {
        Self { is_sealed: true, ..self }
    }

    /// Retries for this long, even if the controller ends before it answers: it was there a moment
    /// ago.
    pub fn retry_for(&mut self, patience: Duration) {
        (self.patience, self.again) = (patience, true);
    }

    fn error(&self, reason: impl Into<String>) -> Error {
        Error::Controller { address: self.address.clone(), reason: reason.into() }
    }

    fn call<T, F>(
        &mut self,
        timeout: Duration,
        call: impl FnOnce(WorkerClient<Channel>) -> F,
    ) -> Result<T, Status>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let client = match &self.client {
            Some(client) => client.clone(),
            None => {
                let scheme = if self.tls.is_some() { "https" } else { "http" };
                let mut endpoint = Endpoint::from_shared(format!("{scheme}://{}", self.address))
                    .map_err(|e| Status::invalid_argument(format!("not HOST:PORT ({e})")))?
                    .connect_timeout(timeout.min(TIMEOUT));
                if let Some(tls) = &self.tls {
                    endpoint = endpoint.tls_config(tls.clone()).map_err(|e| {
                        Status::invalid_argument(format!("TLS: {}", root_cause(&e)))
                    })?;
                }
                let channel =
                    self.runtime.block_on(endpoint.connect()).map_err(|e| self.unreachable(&e))?;
                self.client.insert(WorkerClient::new(channel)).clone()
            }
        };
        let answer = self.runtime.block_on(async {
            tokio::time::timeout(timeout, call(client))
                .await
                .map_err(|_| Status::deadline_exceeded(format!("no answer within {timeout:?}")))?
        });
        // A failed connection has a cause; the controller's own refusals have none.
        let answer = answer.map_err(|status| {
            match (tls::reason(&status, self.files.as_ref()), status.source()) {
                (Some(reason), _) => Status::invalid_argument(reason),
                (None, Some(cause)) => Status::unavailable(root_cause(cause)),
                (None, None) => status,
            }
        });
        if answer.as_ref().is_err_and(|s| s.code() == Code::Unavailable) {
            self.client = None;
        }
        answer.map(Response::into_inner)
    }

    /// The status of a failed connection; callers do not retry if TLS is the reason.
    fn unreachable(&self, e: &tonic::transport::Error) -> Status {
        match tls::reason(e, self.files.as_ref()) {
            Some(reason) => Status::invalid_argument(reason),
            None => Status::unavailable(format!(
                "cannot connect: {}: check that NETSUM_CONTROLLER is the box and that `netsum run` \
                 runs there",
                root_cause(e)
            )),
        }
    }

    /// The job's properties.
    pub fn describe(&mut self, timeout: Duration) -> Result<v1::Job, Error> {
        let request = v1::DescribeRequest { job: self.job.clone(), token: self.token.clone() };
        self.first_call(timeout, |mut c| {
            let request = request.clone();
            async move { c.describe(request).await }
        })
    }

    /// Opens this group of `ranks` ranks, and returns its properties. The client is one of the
    /// group.
    pub fn open_group(
        &mut self,
        group: &str,
        ranks: u32,
        timeout: Duration,
    ) -> Result<v1::Job, Error> {
        let job = self.job.split_once('/').map_or(&*self.job, |(job, _)| job).to_owned();
        let (token, group) = (self.token.clone(), group.to_owned());
        let request = v1::OpenGroupRequest { job, token, group, ranks };
        self.first_call(timeout, |mut c| {
            let request = request.clone();
            async move { c.open_group(request).await }
        })
    }

    /// A call that is repeated while the controller cannot be reached: it may be about to start.
    fn first_call<T, F>(
        &mut self,
        timeout: Duration,
        call: impl Fn(WorkerClient<Channel>) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let started = Instant::now();
        loop {
            let wait = Duration::from_secs(10).min(timeout);
            match self.call(wait, &call) {
                Ok(answer) => return Ok(answer),
                Err(s)
                    if s.code() == Code::Unavailable
                        && started.elapsed() < self.patience.min(timeout) =>
                {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(s) if s.code() == Code::Unimplemented => {
                    let reason = "its netsum has no groups: install this release there, too";
                    return Err(self.error(reason));
                }
                Err(s) => {
                    let broken =
                        ["broken pipe", "reset"].iter().any(|word| s.message().contains(word));
                    return Err(match &self.files {
                        Some(files) if s.code() == Code::Unavailable && broken => {
                            self.error(format!("{}: {}", s.message(), tls::suspicion(files)))
                        }
                        _ => self.error(s.message()),
                    });
                }
            }
        }
    }

    /// Registers this rank and waits for all others.
    pub fn join(
        &mut self,
        address: v1::RankAddress,
        ranks: u32,
        epoch: u32,
        timeout: Duration,
    ) -> Result<v1::JoinReply, Error> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let request = v1::JoinRequest {
                job: self.job.clone(),
                token: self.token.clone(),
                address: Some(address.clone()),
                epoch,
                timeout_ms: left.as_millis() as u32,
                protocol: netsum_api::PROTOCOL,
                release: netsum_api::RELEASE.into(),
                ranks,
            };
            // The controller's own deadline comes first: its answer names the ranks that are
            // missing.
            let wait = left + Duration::from_secs(2);
            match self.call(wait, |mut c| async move { c.join(request).await }) {
                // The controller answers a second request with the same address alike.
                Err(s) if self.again && s.code() == Code::Unavailable && !left.is_zero() => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Ok(reply) => {
                    for warning in &reply.warnings {
                        log::warn!("rank {}: {warning}", address.rank);
                    }
                    return Ok(reply);
                }
                Err(s) => return Err(self.error(s.message())),
            }
        }
    }

    /// Sends a heartbeat. If the controller has restarted and does not know the job, that is an
    /// ordinary error, because the ranks do not depend on the controller.
    pub fn heartbeat(
        &mut self,
        rank: u32,
        epoch: u32,
        on_host_ring: bool,
        acknowledged_path_test: u32,
        underflows: u64,
        timeout: Duration,
    ) -> Result<HeartbeatAnswer, Error> {
        let (job, token) = (self.job.clone(), self.token.clone());
        let request = v1::HeartbeatRequest {
            job,
            token,
            rank,
            epoch,
            on_host_ring,
            acknowledged_path_test,
            sealed: self.is_sealed,
            underflows,
        };
        match self.call(timeout, |mut c| async move { c.heartbeat(request).await }) {
            Ok(reply) => {
                // After a new start of the box its job waits for ranks, which is not a failure.
                let other =
                    reply.epoch > epoch || reply.epoch < epoch && reply.state() == JobState::Active;
                let reconnect_request = ReconnectRequest {
                    reconnect: reply.reconnect,
                    program_generation: reply.program_generation,
                };
                let failed = match reply.state() {
                    JobState::Failed => Some(reply.error.clone()),
                    _ if other => {
                        let theirs = reply.epoch;
                        Some(format!(
                            "its connections were replaced (epoch {theirs}, this rank's is {epoch})"
                        ))
                    }
                    _ => None,
                };
                let v1::HeartbeatReply { path_test, ended_ranks, .. } = reply;
                let ended_ranks = if other { Vec::new() } else { ended_ranks };
                Ok(HeartbeatAnswer { reconnect_request, failed, path_test, ended_ranks })
            }
            Err(s) => Err(self.error(s.message())),
        }
    }

    /// Asks why packets of the job do not arrive, as far as the box can tell.
    pub fn explain_missing_packets(
        &mut self,
        rank: u32,
        epoch: u32,
        missing: MissingPackets,
        timeout: Duration,
    ) -> Result<Cause, Error> {
        let (job, token) = (self.job.clone(), self.token.clone());
        let request =
            v1::ExplainMissingPacketsRequest { job, token, rank, epoch, missing: missing.into() };
        self.call(timeout, |mut c| async move { c.explain_missing_packets(request).await })
            .map(|reply| Cause { text: reply.cause, is_certain: reply.certain })
            .map_err(|s| self.error(s.message()))
    }

    /// Reports that this rank leaves in good order.
    pub fn leave(&mut self, rank: u32, epoch: u32, timeout: Duration) -> Result<(), Error> {
        let request =
            v1::LeaveRequest { job: self.job.clone(), token: self.token.clone(), rank, epoch };
        self.call(timeout, |mut c| async move { c.leave(request).await })
            .map(|_| ())
            .map_err(|s| self.error(s.message()))
    }

    /// Reports that this rank has failed, which ends the job.
    pub fn abort(
        &mut self,
        rank: u32,
        epoch: u32,
        reason: &str,
        timeout: Duration,
    ) -> Result<(), Error> {
        let (job, token, reason) = (self.job.clone(), self.token.clone(), reason.to_owned());
        let request = v1::AbortRequest { job, token, rank, reason, epoch };
        self.call(timeout, |mut c| async move { c.abort(request).await })
            .map(|_| ())
            .map_err(|s| self.error(s.message()))
    }
}

/// The innermost cause of an error.
fn root_cause(e: &dyn std::error::Error) -> String {
    let mut e = e;
    while let Some(source) = e.source() {
        e = source;
    }
    e.to_string()
}
