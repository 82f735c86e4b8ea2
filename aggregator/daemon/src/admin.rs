//! The administration service.

use std::net::IpAddr;
use std::sync::MutexGuard;
use std::time::{Instant, SystemTime};

use netsum_api::ELECTION;
use netsum_api::v1 as api;
use netsum_api::v1::admin_server::Admin;
use netsum_common::abi::{self, RingNumber};
use netsum_common::counters::Counter;
use netsum_common::serial::{self, Psn, Qpn};
use netsum_common::slot::Slot;
use netsum_common::timing::{self, RankTiming};
use netsum_core::plane::{FlowSpec, RingSpec};
use netsum_core::tenant::{Limits, TenantView};
use netsum_core::{Action, Job, JobRing, Rank, State};
use netsum_dataplane::spread::Ends;
use netsum_dataplane::{Attached, ProgramFacts};
use tonic::{Request, Response, Status};

use super::load::{
    Timings, counter_messages, counters, fragment_bytes, histogram_message, ring_load,
};
use super::message::{
    job_message, job_spec, mac_from_text, mac_text, refused, senders, state_message,
};
use super::netlink::Netlink;
use super::state::{Inner, Shared};
use super::trace;
use super::worker::PortFinder;
use super::{diagnose, memory};

mod ports;

/// The administration service.
#[derive(Clone)]
pub struct AdminService {
    shared: Shared,
    netlink: Option<Netlink>,
    ports: PortFinder,
    started: Instant,
}

type Answer<T> = Result<Response<T>, Status>;

impl AdminService {
    /// A service. Without netlink, ports count as up with their programs attached, and have no
    /// counters.
    pub fn new(shared: Shared, netlink: Option<Netlink>, ports: PortFinder) -> Self {
        Self { shared, netlink, ports, started: Instant::now() }
    }

    /// Updates the MTUs and routers of all ports.
    async fn look_at_ports(&self) -> Result<(), Status> {
        if let Some(netlink) = &self.netlink {
            let interfaces =
                netlink.interfaces().await.map_err(|e| Status::internal(format!("{e:#}")))?;
            let mut inner = self.shared.lock();
            inner.controller.set_mtus(interfaces.iter().map(|l| (l.ifindex, l.mtu)));
            inner.controller.set_routers(interfaces.iter().map(|l| (l.ifindex, l.router)));
        }
        Ok(())
    }

    /// Locks the state for a request that changes something, unless a manager elected later has
    /// called.
    fn order(&self, election: Option<u64>) -> Result<MutexGuard<'_, Inner>, Status> {
        let mut inner = self.shared.lock();
        match election {
            Some(theirs) if !inner.hear(theirs) => {
                let now = inner.election;
                let why = format!(
                    "a manager of election {theirs} gives no orders here: one of election {now} \
                     has called"
                );
                Err(Status::aborted(why))
            }
            _ => Ok(inner),
        }
    }

    async fn create(&self, request: Request<api::CreateJobRequest>) -> Result<api::Job, Status> {
        let (election, request) = (election(&request)?, request.into_inner());
        let spec = job_spec(request)?;
        if spec.or_ring && !matches!(self.ports, PortFinder::Boxes(_)) {
            return Err(Status::invalid_argument(
                "--or-ring: only a fabric's manager chooses boxes",
            ));
        }
        let name = spec.name.clone();
        self.look_at_ports().await?;
        let mut inner = self.order(election)?;
        if inner.boxes.is_none() {
            memory::look(&mut inner.controller);
        }
        let actions = inner.controller.create_job(spec).map_err(refused)?;
        if let Err(error) = inner.carry_out(None, actions) {
            let actions = inner.controller.delete_job(&name).map_err(refused)?;
            inner.carry_out(None, actions)?;
            return Err(error);
        }
        log::info!(NETSUM_JOB = name; "job {name} created");
        Ok(self.job(&inner, inner.controller.job(&name).map_err(refused)?, true))
    }

    /// Adds flows in one change of the data plane. If one is refused, those before it stay.
    async fn add(
        &self,
        election: Option<u64>,
        job: &str,
        flows: Vec<api::Flow>,
    ) -> Result<(), Status> {
        self.look_at_ports().await?;
        let mut specs = Vec::new();
        for flow in flows {
            specs.push(self.flow(flow).await);
        }
        let mut inner = self.order(election)?;
        if inner.boxes.is_some() {
            let why = "flows are added at boxes: at a manager ranks join";
            return Err(Status::failed_precondition(why));
        }
        let mut actions = Vec::new();
        let mut add = |(ring, flow): (JobRing, FlowSpec)| {
            actions.extend(inner.controller.add_flow(job, ring, flow).map_err(refused)?);
            Ok(())
        };
        let added = specs.into_iter().try_for_each(|spec| spec.and_then(&mut add));
        inner.carry_out(Some(job), actions)?;
        added
    }

    /// Converts a flow to the controller's form.
    async fn flow(&self, f: api::Flow) -> Result<(JobRing, FlowSpec), Status> {
        let src = address("--src", &f.src)?;
        let mut src_mac = match f.src_mac.as_str() {
            "" => None,
            text => Some(mac_from_text(text).ok_or_else(|| {
                Status::invalid_argument(format!(
                    "--src-mac `{text}`: six bytes like 02:00:00:00:00:01 are needed"
                ))
            })?),
        };
        let way = match &self.netlink {
            Some(netlink) => netlink.way_to(src).await.map_err(internal)?,
            None => None,
        };
        let inner = self.shared.lock();
        let Some(port) = inner.controller.ports().iter().find(|p| p.name == f.port) else {
            let names: Vec<_> = inner.controller.ports().iter().map(|p| p.name.as_str()).collect();
            let message = format!("--port `{}`: netsum has ports {}", f.port, names.join(", "));
            return Err(Status::invalid_argument(message));
        };
        // If this box routes by the port itself, packets carry the MAC address of the last router
        // before it. If the kernel does not know that address, the box learns it.
        if let Some(way) = way.filter(|way| way.ifindex == port.ifindex) {
            src_mac = src_mac.and(way.mac);
        }
        let flow = FlowSpec {
            ring: RingNumber::NONE,
            rank: Rank(f.rank),
            ifindex: port.ifindex,
            src,
            dst: address("--dst", &f.dst)?,
            qpn: Qpn::new(of_24_bits("--qpn", f.qpn)?),
            base_psn: Psn::new(of_24_bits("--psn", f.psn)?),
            src_mac,
            bears: 0,
        };
        Ok((JobRing(f.ring), flow))
    }

    /// A job as a message. `token` says whether it has the job's token.
    fn job(&self, inner: &Inner, job: &Job, token: bool) -> api::Job {
        let heartbeat = self.shared.heartbeat.as_millis() as u32;
        let mut message =
            job_message(job, |ifindex| inner.controller.port_name(ifindex), heartbeat, token);
        message.tenant.clone_from(&job.spec.tenant);
        // The box may have learned addresses that were not given.
        for (flow, spec) in message.flows.iter_mut().zip(&job.flows) {
            let Ok(seen) = inner.plane.flow_seen(spec.key()) else { continue };
            if let Some(mac) = seen.mac {
                flow.src_mac = mac_text(mac);
            }
            flow.seen = Some(api::FlowSeen {
                packets: seen.packets,
                refused: seen.refused,
                last_psn: seen.last_outcome.map(|_| seen.last_psn),
                last_outcome: seen.last_outcome.map(|c| c.name().into()).unwrap_or_default(),
            });
        }
        message
    }
}

/// The election of the calling manager, or `None` if the caller is not a manager.
fn election<T>(request: &Request<T>) -> Result<Option<u64>, Status> {
    let Some(value) = request.metadata().get(ELECTION) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.parse().ok());
    number
        .map(Some)
        .ok_or_else(|| Status::invalid_argument(format!("{ELECTION}: {value:?} is no number")))
}

fn not_spread() -> Status {
    Status::failed_precondition("this box spreads no flows: its configuration has no `spread`")
}

fn address(option: &str, text: &str) -> Result<IpAddr, Status> {
    text.parse().map_err(|_| {
        Status::invalid_argument(format!("{option} `{text}`: an IPv4 or IPv6 address is needed"))
    })
}

fn of_24_bits(option: &str, number: u32) -> Result<u32, Status> {
    if number > serial::MASK {
        return Err(Status::invalid_argument(format!("{option} {number:#x}: more than 24 bits")));
    }
    Ok(number)
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn create_job(&self, request: Request<api::CreateJobRequest>) -> Answer<api::Job> {
        let result = self.create(request).await;
        result
            .map(Response::new)
            .inspect_err(|why| self.shared.lock().refused_jobs.count(why.code()))
    }

    async fn list_tenants(
        &self,
        _: Request<api::ListTenantsRequest>,
    ) -> Answer<api::ListTenantsReply> {
        let tenants = self.shared.lock().controller.tenants();
        Ok(Response::new(api::ListTenantsReply {
            tenants: tenants.into_iter().map(tenant_message).collect(),
        }))
    }

    async fn delete_job(
        &self,
        request: Request<api::DeleteJobRequest>,
    ) -> Answer<api::DeleteJobReply> {
        let mut inner = self.order(election(&request)?)?;
        let api::DeleteJobRequest { name, gone } = request.into_inner();
        let flows = inner.controller.job(&name).map(Job::ever_had);
        let mut actions = inner.controller.delete_job(&name).map_err(refused)?;
        actions.extend(flows.ok().filter(|_| gone).map(Action::ForgetEnded));
        inner.carry_out(None, actions)?;
        log::info!(NETSUM_JOB = name; "job {name} deleted");
        Ok(Response::new(api::DeleteJobReply {}))
    }

    async fn restart_job(&self, request: Request<api::RestartJobRequest>) -> Answer<api::Job> {
        let mut inner = self.order(election(&request)?)?;
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
    ) -> Answer<api::ReconnectJobReply> {
        let mut inner = self.order(election(&request)?)?;
        let name = request.into_inner().name;
        inner.controller.renew_job(&name).map_err(refused)?;
        inner.carry_out(None, Vec::new())?;
        log::info!(NETSUM_JOB = name; "job {name}: its ranks are asked to reconnect");
        Ok(Response::new(api::ReconnectJobReply {}))
    }

    async fn list_jobs(&self, _: Request<api::ListJobsRequest>) -> Answer<api::ListJobsReply> {
        let inner = self.shared.lock();
        let jobs = inner.controller.jobs().map(|j| self.job(&inner, j, false)).collect();
        Ok(Response::new(api::ListJobsReply { jobs }))
    }

    async fn show_job(&self, request: Request<api::ShowJobRequest>) -> Answer<api::Job> {
        let r = request.into_inner();
        let inner = self.shared.lock();
        let job = inner.controller.job(&r.name).map_err(refused)?;
        Ok(Response::new(self.job(&inner, job, r.show_token)))
    }

    async fn add_flow(&self, request: Request<api::AddFlowRequest>) -> Answer<api::Job> {
        let (election, r) = (election(&request)?, request.into_inner());
        let f = r.flow.ok_or_else(|| Status::invalid_argument("flow: missing"))?;
        self.add(election, &r.job, vec![f]).await?;
        let inner = self.shared.lock();
        Ok(Response::new(self.job(&inner, inner.controller.job(&r.job).map_err(refused)?, false)))
    }

    async fn add_flows(
        &self,
        request: Request<api::AddFlowsRequest>,
    ) -> Answer<api::AddFlowsReply> {
        let (election, api::AddFlowsRequest { job, flows }) =
            (election(&request)?, request.into_inner());
        self.add(election, &job, flows).await?;
        Ok(Response::new(api::AddFlowsReply {}))
    }

    async fn reserve(&self, request: Request<api::ReserveRequest>) -> Answer<api::ReserveReply> {
        self.reserve_for(request).await
    }

    async fn list_ports(
        &self,
        request: Request<api::ListPortsRequest>,
    ) -> Answer<api::ListPortsReply> {
        self.ports(request).await
    }

    async fn send_train(
        &self,
        request: Request<api::SendTrainRequest>,
    ) -> Answer<api::SendTrainReply> {
        self.train_sent(request).await
    }

    async fn hear_train(
        &self,
        request: Request<api::HearTrainRequest>,
    ) -> Answer<api::HearTrainReply> {
        self.train_heard(request).await
    }

    async fn show_fabric(&self, request: Request<api::ShowFabricRequest>) -> Answer<api::Fabric> {
        if let (true, PortFinder::Boxes(boxes)) = (request.get_ref().measure, &self.ports) {
            boxes.measure().await;
        }
        if let (true, PortFinder::Boxes(boxes)) = (request.get_ref().hosts, &self.ports) {
            return Ok(Response::new(boxes.topology().await));
        }
        let fabric = self.shared.lock().boxes.as_ref().map(|boxes| boxes.show());
        fabric.map(Response::new).ok_or_else(no_manager)
    }

    async fn drain_box(
        &self,
        request: Request<api::DrainBoxRequest>,
    ) -> Answer<api::DrainBoxReply> {
        let mut inner = self.order(election(&request)?)?;
        let api::DrainBoxRequest { name, reason } = request.into_inner();
        inner.boxes.as_mut().ok_or_else(no_manager)?.drain(&name, reason).map_err(refused)?;
        inner.carry_out(None, Vec::new())?;
        Ok(Response::new(api::DrainBoxReply {}))
    }

    async fn accept_link(
        &self,
        request: Request<api::AcceptLinkRequest>,
    ) -> Answer<api::AcceptLinkReply> {
        let mut inner = self.order(election(&request)?)?;
        let api::AcceptLinkRequest { end, revoke } = request.into_inner();
        inner.boxes.as_mut().ok_or_else(no_manager)?.accept(&end, revoke).map_err(refused)?;
        inner.carry_out(None, Vec::new())?;
        Ok(Response::new(api::AcceptLinkReply {}))
    }

    async fn show_spread(&self, _: Request<api::ShowSpreadRequest>) -> Answer<api::Spread> {
        let mut inner = self.shared.lock();
        let shown = inner.spread.as_mut().ok_or_else(not_spread)?.show();
        shown.map(Response::new).map_err(|e| Status::internal(format!("{e:#}")))
    }

    async fn pin_flow(&self, request: Request<api::PinFlowRequest>) -> Answer<api::PinFlowReply> {
        let mut inner = self.order(election(&request)?)?;
        let api::PinFlowRequest { src, src_port, dst, uplink } = request.into_inner();
        let src_port = u16::try_from(src_port).map_err(|_| {
            Status::invalid_argument(format!("port {src_port}: UDP has 16 bits for it"))
        })?;
        let flow = Ends { src: address("src", &src)?, dst: address("dst", &dst)?, src_port };
        inner.spread.as_mut().ok_or_else(not_spread)?.pin(flow, uplink.as_deref())?;
        Ok(Response::new(api::PinFlowReply {}))
    }

    async fn find_port(
        &self,
        request: Request<api::FindPortRequest>,
    ) -> Answer<api::FindPortReply> {
        self.port_of(request).await
    }

    async fn find_hosts(
        &self,
        request: Request<api::FindHostsRequest>,
    ) -> Answer<api::FindHostsReply> {
        self.ports_of(request).await
    }

    async fn show_slots(
        &self,
        request: Request<api::ShowSlotsRequest>,
    ) -> Answer<api::ShowSlotsReply> {
        let r = request.into_inner();
        let inner = self.shared.lock();
        let job = inner.controller.job(&r.job).map_err(refused)?;
        let wanted = r.ring.map(JobRing);
        wanted.map_or(Ok(()), |ring| job.ring(ring).map(drop)).map_err(refused)?;
        let senders = senders(job);
        let mut reply = api::ShowSlotsReply::default();
        for (ring, spec) in
            job.numbered_rings().filter(|(ring, _)| wanted.is_none_or(|w| w == *ring))
        {
            let state = inner.plane.ring_state(spec.id).map_err(internal)?;
            reply.rings.push(api::RingState {
                ring: ring.0,
                cpu: inner.plane.cpu_number(spec.cpu),
                slots: spec.config.slots,
                low: state.low,
                expected: state.expected[..spec.config.ranks as usize].to_vec(),
                ranks: senders.clone(),
            });
            for (i, slot) in inner.plane.slots(spec.id).map_err(internal)?.iter().enumerate() {
                if slot.is(Slot::USED) {
                    reply.slots.push(slot_message(ring, i as u32, slot, &senders));
                }
            }
        }
        Ok(Response::new(reply))
    }

    async fn stats(&self, request: Request<api::StatsRequest>) -> Answer<api::StatsReply> {
        let name = request.into_inner().job;
        let inner = self.shared.lock();
        let mut jobs = Vec::new();
        if name.is_empty() {
            for job in inner.controller.jobs() {
                jobs.push(job_stats(&inner, job).map_err(internal)?);
            }
            let values = counters(&inner, [RingNumber::NONE]).map_err(internal)?;
            jobs.push(api::JobStats { values, ..api::JobStats::default() });
        } else {
            jobs.push(
                job_stats(&inner, inner.controller.job(&name).map_err(refused)?)
                    .map_err(internal)?,
            );
        }
        let mut totals = vec![0; Counter::ALL.len()];
        for job in &jobs {
            totals.iter_mut().zip(&job.values).for_each(|(total, value)| *total += value);
        }
        let time_ns = self.started.elapsed().as_nanos() as u64;
        let counters = counter_messages(totals);
        Ok(Response::new(api::StatsReply { counters, time_ns, jobs, sampled: timing::SAMPLED }))
    }

    async fn list_rings(
        &self,
        request: Request<api::ListRingsRequest>,
    ) -> Answer<api::ListRingsReply> {
        let name = request.into_inner().job;
        let inner = self.shared.lock();
        let jobs: Vec<&Job> = match name.as_str() {
            "" => inner.controller.jobs().collect(),
            name => vec![inner.controller.job(name).map_err(refused)?],
        };
        let mut rings = Vec::new();
        for job in jobs {
            for (job_ring, ring) in job.numbered_rings() {
                rings.push(ring_message(&inner, job, job_ring, ring).map_err(internal)?);
            }
        }
        Ok(Response::new(api::ListRingsReply { rings }))
    }

    async fn list_programs(
        &self,
        _: Request<api::ListProgramsRequest>,
    ) -> Answer<api::ListProgramsReply> {
        let inner = self.shared.lock();
        let programs = inner.plane.programs().map_err(internal)?;
        let programs = programs.into_iter().map(|p| program_message(&inner, p)).collect();
        Ok(Response::new(api::ListProgramsReply {
            programs,
            abi: abi::VERSION,
            aggregation_rate: inner.adds(),
        }))
    }

    type TraceStream = trace::Tracing;

    async fn trace(&self, request: Request<api::TraceRequest>) -> Answer<Self::TraceStream> {
        Ok(Response::new(trace::begin(&self.shared, &request.into_inner())?))
    }

    async fn diagnose(&self, request: Request<api::DiagnoseRequest>) -> Answer<api::Diagnosis> {
        let request = request.into_inner();
        if let PortFinder::Boxes(boxes) = &self.ports {
            let heard = {
                let inner = self.shared.lock();
                let job = inner.controller.job(&request.job).map_err(refused)?;
                let ago = |rank| Some(job.epoch.as_ref()?.heard(rank)?.elapsed());
                (job.state == State::Active).then(|| Rank::all(job.spec.ranks).map(ago).collect())
            };
            // The manager itself knows which ranks have not joined.
            if let Some(heard) = heard {
                return Ok(Response::new(boxes.diagnose(request, heard).await));
            }
        }
        let diagnosis = diagnose::answer(&self.shared, self.netlink.as_ref(), request);
        Ok(Response::new(diagnosis.await?.0))
    }
}

fn no_manager() -> Status {
    Status::failed_precondition("this daemon is a box's; a manager has a --socket of its own")
}

fn internal(error: anyhow::Error) -> Status {
    Status::internal(format!("{error:#}"))
}

fn job_stats(inner: &Inner, job: &Job) -> anyhow::Result<api::JobStats> {
    let mut stats = api::JobStats {
        job: job.spec.name.clone(),
        state: state_message(&job.state).into(),
        values: counters(inner, job.rings.iter().map(|r| r.id))?,
        fragment_bytes: fragment_bytes(job),
        ..api::JobStats::default()
    };
    let mut of_rank = vec![0; job.spec.member_count() as usize];
    let mut timings = Timings::of_ranks(job.spec.member_count());
    for ring in &job.rings {
        timings.add(inner, ring.id)?;
        let load = ring_load(inner, job, ring)?;
        stats.slots += ring.config.slots;
        stats.slots_used += load.slots_used;
        stats.credit += ring.config.credit;
        of_rank.iter_mut().zip(load.credit_used).for_each(|(sum, used)| *sum += used);
    }
    stats.credit_used = of_rank.into_iter().max().unwrap_or(0);
    stats.completion = Some(histogram_message(&timings.completion));
    let rank = |(r, rank): (&RankTiming, u32)| api::RankTiming {
        last: r.last,
        late: Some(histogram_message(&r.late)),
        rank,
    };
    stats.ranks = timings.ranks.iter().zip(senders(job)).map(rank).collect();
    Ok(stats)
}

fn ring_message(
    inner: &Inner,
    job: &Job,
    job_ring: JobRing,
    ring: &RingSpec,
) -> anyhow::Result<api::Ring> {
    let load = ring_load(inner, job, ring)?;
    Ok(api::Ring {
        job: job.spec.name.clone(),
        ring: job_ring.0,
        id: ring.id.0,
        cpu: inner.plane.cpu_number(ring.cpu),
        active: job.state == State::Active,
        ranks: ring.config.ranks,
        mtu: ring.config.mtu,
        memory: abi::ring_memory(ring.config.slots, ring.config.mtu, ring.config.ranks),
        slots: ring.config.slots,
        slots_used: load.slots_used,
        low: load.low,
        credit: ring.config.credit,
        credit_used: load.credit_used,
        waits_ms: load.waits.map(|t| t.as_millis() as u64),
    })
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

fn program_message(inner: &Inner, p: ProgramFacts) -> api::Program {
    let place = |a: &Attached| match a {
        Attached::Port(ifindex) => format!("port {}", inner.controller.port_name(*ifindex)),
        Attached::Cpu(cpu) => format!("cpu {cpu}"),
        Attached::Ingress => "ingress".into(),
        Attached::DeviceMap => "device map".into(),
    };
    let since_1970 = p.loaded_at.and_then(|t| t.duration_since(SystemTime::UNIX_EPOCH).ok());
    api::Program {
        id: p.id,
        name: p.name.into(),
        kind: if p.name == abi::programs::GUARD { "sched_cls" } else { "xdp" }.into(),
        tag: format!("{:016x}", p.tag),
        loaded_at: since_1970.map_or(0, |t| t.as_secs()),
        xlated_bytes: p.xlated_bytes,
        jited_bytes: p.jited_bytes,
        memory: p.memory,
        verified_instructions: p.verified_instructions,
        runs: p.runs.0,
        run_ns: p.runs.1,
        attached: p.attached.iter().map(place).collect(),
    }
}

fn slot_message(ring: JobRing, number: u32, slot: &Slot, senders: &[u32]) -> api::Slot {
    let of = |has: bool| -> Vec<u32> {
        let (members, is) = (0.., |member: u32| (slot.contributors >> member & 1 != 0) == has);
        members.zip(senders).filter(|(member, _)| is(*member)).map(|(_, rank)| *rank).collect()
    };
    api::Slot {
        ring: ring.0,
        slot: number,
        index: slot.index,
        len: slot.len.into(),
        state: match slot {
            s if s.is(Slot::RELEASED) => "released",
            s if s.is(Slot::COMPLETE) => "complete",
            _ => "partial",
        }
        .into(),
        contributors: of(true),
        missing: of(false),
    }
}
