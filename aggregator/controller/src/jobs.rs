//! The service for jobs, which a box and a manager have.

use std::time::Duration;

use netsum_api::ELECTION;
use netsum_api::v1 as api;
use netsum_api::v1::jobs_server::Jobs;
use netsum_core::tenant::{Limits, TenantView};
use netsum_core::{Action, Job, groups};
use tonic::{Request, Response, Status};

use super::backend::Backend;
use super::executor::Executor;
use super::message::{RpcResult, job_message, job_spec, mac_text, refused};
use super::state::{Inner, Shared};

/// Longest time that a client may watch a job.
const MAX_WATCH: Duration = Duration::from_secs(60);

/// The service for jobs.
#[derive(Clone)]
pub struct JobsService<B> {
    backend: B,
}

impl<B: Backend> JobsService<B> {
    pub fn new(backend: B) -> Self {
        Self { backend }
    }

    fn shared(&self) -> &Shared<B::Executor> {
        self.backend.shared()
    }

    async fn create(&self, request: Request<api::CreateJobRequest>) -> Result<api::Job, Status> {
        let (election, request) = (election(&request)?, request.into_inner());
        let spec = job_spec(request)?;
        let name = spec.name.clone();
        if election.is_none() && groups::job_of(&name).is_some() {
            let message = format!("NAME `{name}`: only ranks open groups: use a name without `/`");
            return Err(Status::invalid_argument(message));
        }
        self.backend.refresh_ports().await?;
        let mut guard = self.shared().order(election)?;
        let inner = &mut *guard;
        inner.executor.admit(&mut inner.controller, &spec).map_err(refused)?;
        let actions = inner.controller.create_job(spec).map_err(refused)?;
        if let Err(error) = inner.carry_out(None, actions) {
            let actions = inner.controller.delete_job(&name).map_err(refused)?;
            inner.carry_out(None, actions)?;
            return Err(error);
        }
        log::info!(NETSUM_JOB = name; "job {name} created");
        Ok(self.job(inner, inner.controller.job(&name).map_err(refused)?, true))
    }

    fn job(&self, inner: &Inner<B::Executor>, job: &Job, token: bool) -> api::Job {
        shown(inner, self.shared().heartbeat, job, token)
    }
}

/// The election of the calling manager, or `None` if the caller is not a manager.
pub fn election<T>(request: &Request<T>) -> Result<Option<u64>, Status> {
    let Some(value) = request.metadata().get(ELECTION) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.parse().ok());
    number
        .map(Some)
        .ok_or_else(|| Status::invalid_argument(format!("{ELECTION}: {value:?} is not a number")))
}

/// A job as a message for administrators. `token` says whether it has the job's token.
pub fn shown<E: Executor>(
    inner: &Inner<E>,
    heartbeat: Duration,
    job: &Job,
    token: bool,
) -> api::Job {
    let heartbeat = heartbeat.as_millis() as u32;
    let mut message =
        job_message(job, |ifindex| inner.controller.port_name(ifindex), heartbeat, token);
    message.tenant.clone_from(&job.spec.tenant);
    // The box may have learned addresses that were not given.
    for (flow, spec) in message.flows.iter_mut().zip(&job.flows) {
        let Some(seen) = inner.executor.flow_stats(spec) else { continue };
        if let Some(mac) = seen.mac {
            flow.src_mac = mac_text(mac);
        }
        flow.seen = Some(api::FlowStats {
            packets: seen.packets,
            refused: seen.refused,
            last_psn: seen.last_verdict.map(|_| seen.last_psn),
            last_verdict: seen.last_verdict.map(|c| c.name().into()).unwrap_or_default(),
        });
    }
    message
}

#[tonic::async_trait]
impl<B: Backend> Jobs for JobsService<B> {
    async fn create_job(&self, request: Request<api::CreateJobRequest>) -> RpcResult<api::Job> {
        let result = self.create(request).await;
        result
            .map(Response::new)
            .inspect_err(|why| self.shared().lock().refused_jobs.count(why.code()))
    }

    async fn list_tenants(
        &self,
        _: Request<api::ListTenantsRequest>,
    ) -> RpcResult<api::ListTenantsReply> {
        let tenants = self.shared().lock().controller.tenants();
        Ok(Response::new(api::ListTenantsReply {
            tenants: tenants.into_iter().map(tenant_message).collect(),
        }))
    }

    async fn delete_job(
        &self,
        request: Request<api::DeleteJobRequest>,
    ) -> RpcResult<api::DeleteJobReply> {
        let mut inner = self.shared().order(election(&request)?)?;
        let api::DeleteJobRequest { name, forget_connections } = request.into_inner();
        // Its groups end with it.
        let is_of = |job: &&Job| {
            job.spec.name == name
                || job.spec.is_group && groups::job_of(&job.spec.name) == Some(&*name)
        };
        let ended = inner.controller.jobs().filter(is_of).flat_map(Job::all_flow_keys).collect();
        let mut actions = inner.controller.delete_job(&name).map_err(refused)?;
        actions.extend(forget_connections.then_some(Action::ForgetEnded(ended)));
        inner.carry_out(None, actions)?;
        log::info!(NETSUM_JOB = name; "job {name} deleted");
        Ok(Response::new(api::DeleteJobReply {}))
    }

    async fn restart_job(&self, request: Request<api::RestartJobRequest>) -> RpcResult<api::Job> {
        let mut inner = self.shared().order(election(&request)?)?;
        let name = request.into_inner().name;
        let actions = inner.controller.restart_job(&name).map_err(refused)?;
        inner.carry_out(Some(&name), actions)?;
        log::info!(NETSUM_JOB = name; "job {name} restarted: its rings are empty and wait for \
            flows");
        Ok(Response::new(self.job(&inner, inner.controller.job(&name).map_err(refused)?, false)))
    }

    async fn reconnect_job(
        &self,
        request: Request<api::ReconnectJobRequest>,
    ) -> RpcResult<api::ReconnectJobReply> {
        let mut inner = self.shared().order(election(&request)?)?;
        let name = request.into_inner().name;
        inner.controller.reconnect_job(&name).map_err(refused)?;
        inner.carry_out(None, Vec::new())?;
        log::info!(NETSUM_JOB = name; "job {name}: reconnect requested");
        Ok(Response::new(api::ReconnectJobReply {}))
    }

    async fn list_jobs(&self, _: Request<api::ListJobsRequest>) -> RpcResult<api::ListJobsReply> {
        let inner = self.shared().lock();
        let jobs = inner.controller.jobs().map(|j| self.job(&inner, j, false)).collect();
        Ok(Response::new(api::ListJobsReply { jobs }))
    }

    async fn show_job(&self, request: Request<api::ShowJobRequest>) -> RpcResult<api::Job> {
        let r = request.into_inner();
        let inner = self.shared().lock();
        let job = inner.controller.job(&r.name).map_err(refused)?;
        Ok(Response::new(self.job(&inner, job, r.show_token)))
    }

    async fn diagnose(&self, request: Request<api::DiagnoseRequest>) -> RpcResult<api::Diagnosis> {
        let request = request.into_inner();
        if Duration::from_millis(request.watch_ms.into()) > MAX_WATCH {
            let message =
                format!("--watch {}: at most {} s", request.watch_ms, MAX_WATCH.as_secs());
            return Err(Status::invalid_argument(message));
        }
        self.backend.diagnose(request).await.map(Response::new)
    }
}

fn tenant_message(t: TenantView) -> api::Tenant {
    let configured = t.limits.is_some();
    let Limits { jobs, rings, slots, memory } = t.limits.unwrap_or_default();
    api::Tenant {
        name: t.name,
        configured,
        jobs_limit: jobs,
        rings_limit: rings,
        slots_limit: slots,
        memory_limit: memory,
        jobs: t.used.jobs,
        rings: t.used.rings,
        slots: t.used.slots,
        memory: t.used.memory,
    }
}
