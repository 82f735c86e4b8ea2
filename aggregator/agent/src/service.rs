//! The service for a box's data plane and ports.

use std::net::IpAddr;
use std::time::{Instant, SystemTime};

use netsum_api::v1 as api;
use netsum_api::v1::agent_server::Agent;
use netsum_common::abi::{self, RingConfig, RingMemory, RingNumber};
use netsum_common::counters::Counter;
use netsum_common::serial::{self, Psn, Qpn};
use netsum_common::slot::Slot;
use netsum_common::timing::{self, RankTiming};
use netsum_controller::backend::Backend as _;
use netsum_controller::jobs::{election, shown};
use netsum_controller::message::{RpcResult, mac_from_text, refused, senders, state_message};
use netsum_core::plane::{FlowSpec, RingSpec};
use netsum_core::{Job, JobRing, Rank};
use netsum_dataplane::spread::FlowEndpoints;
use netsum_dataplane::{Attached, ProgramFacts};
use tonic::{Request, Response, Status};

use super::agent::{Inner, Shared};
use super::backend::BoxBackend;
use super::load::{
    Timings, counter_messages, counters, fragment_bytes, histogram_message, ring_load,
};
use super::trace;

mod ports;

/// The service for the data plane and the ports.
#[derive(Clone)]
pub struct AgentService {
    backend: BoxBackend,
    started: Instant,
}

impl AgentService {
    pub fn new(backend: BoxBackend) -> Self {
        Self { backend, started: Instant::now() }
    }

    fn shared(&self) -> &Shared {
        self.backend.shared()
    }

    /// Adds flows in one change of the data plane. If one is refused, those before it stay.
    async fn add(
        &self,
        election: Option<u64>,
        job: &str,
        flows: Vec<api::Flow>,
    ) -> Result<(), Status> {
        self.backend.refresh_ports().await?;
        let mut specs = Vec::new();
        for flow in flows {
            specs.push(self.flow(flow).await);
        }
        let mut inner = self.shared().order(election)?;
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
        let next_hop = self.backend.network.next_hop_to(src).await.map_err(internal)?;
        let inner = self.shared().lock();
        let Some(port) = inner.controller.ports().iter().find(|p| p.name == f.port) else {
            let names: Vec<_> = inner.controller.ports().iter().map(|p| p.name.as_str()).collect();
            let message = format!("--port `{}`: netsum has ports {}", f.port, names.join(", "));
            return Err(Status::invalid_argument(message));
        };
        // If this box routes by the port itself, packets carry the MAC address of the last router
        // before it. If the kernel does not know that address, the box learns it.
        if let Some(next_hop) = next_hop.filter(|next_hop| next_hop.ifindex == port.ifindex) {
            src_mac = src_mac.and(next_hop.mac);
        }
        let flow = FlowSpec {
            ring: RingNumber::NONE,
            member: Rank(f.rank),
            ifindex: port.ifindex,
            src,
            dst: address("--dst", &f.dst)?,
            qpn: Qpn::new(of_24_bits("--qpn", f.qpn)?),
            base_psn: Psn::new(of_24_bits("--psn", f.psn)?),
            src_mac,
            group_mark: 0,
        };
        Ok((JobRing(f.ring), flow))
    }
}

fn not_spread() -> Status {
    Status::failed_precondition("this box spreads no flows: its configuration has no `spread`")
}

fn address(option: &str, text: &str) -> Result<IpAddr, Status> {
    text.parse().map(|ip: IpAddr| ip.to_canonical()).map_err(|_| {
        Status::invalid_argument(format!("{option} `{text}`: must be an IPv4 or IPv6 address"))
    })
}

fn of_24_bits(option: &str, number: u32) -> Result<u32, Status> {
    if number > serial::MASK {
        return Err(Status::invalid_argument(format!("{option} {number:#x}: more than 24 bits")));
    }
    Ok(number)
}

#[tonic::async_trait]
impl Agent for AgentService {
    async fn add_flow(&self, request: Request<api::AddFlowRequest>) -> RpcResult<api::Job> {
        let (election, r) = (election(&request)?, request.into_inner());
        let f = r.flow.ok_or_else(|| Status::invalid_argument("flow: missing"))?;
        self.add(election, &r.job, vec![f]).await?;
        let inner = self.shared().lock();
        Ok(Response::new(shown(
            &inner,
            self.shared().heartbeat,
            inner.controller.job(&r.job).map_err(refused)?,
            false,
        )))
    }

    async fn add_flows(
        &self,
        request: Request<api::AddFlowsRequest>,
    ) -> RpcResult<api::AddFlowsReply> {
        let (election, api::AddFlowsRequest { job, flows }) =
            (election(&request)?, request.into_inner());
        self.add(election, &job, flows).await?;
        Ok(Response::new(api::AddFlowsReply {}))
    }

    async fn reserve(&self, request: Request<api::ReserveRequest>) -> RpcResult<api::ReserveReply> {
        self.reserve_for(request).await
    }

    async fn list_ports(
        &self,
        request: Request<api::ListPortsRequest>,
    ) -> RpcResult<api::ListPortsReply> {
        self.ports(request).await
    }

    async fn send_bandwidth_probe(
        &self,
        request: Request<api::SendBandwidthProbeRequest>,
    ) -> RpcResult<api::SendBandwidthProbeReply> {
        self.bandwidth_probe_sent(request).await
    }

    async fn receive_bandwidth_probe(
        &self,
        request: Request<api::ReceiveBandwidthProbeRequest>,
    ) -> RpcResult<api::ReceiveBandwidthProbeReply> {
        self.bandwidth_probe_received(request).await
    }

    async fn show_spread(&self, _: Request<api::ShowSpreadRequest>) -> RpcResult<api::Spread> {
        let mut inner = self.shared().lock();
        let shown = inner.executor.spread.as_mut().ok_or_else(not_spread)?.show();
        shown.map(Response::new).map_err(|e| Status::internal(format!("{e:#}")))
    }

    async fn pin_flow(
        &self,
        request: Request<api::PinFlowRequest>,
    ) -> RpcResult<api::PinFlowReply> {
        let mut inner = self.shared().order(election(&request)?)?;
        let api::PinFlowRequest { src, src_port, dst, uplink } = request.into_inner();
        let src_port = u16::try_from(src_port).map_err(|_| {
            Status::invalid_argument(format!("port {src_port}: UDP has 16 bits for it"))
        })?;
        let flow =
            FlowEndpoints { src: address("src", &src)?, dst: address("dst", &dst)?, src_port };
        inner.executor.spread.as_mut().ok_or_else(not_spread)?.pin(flow, uplink.as_deref())?;
        Ok(Response::new(api::PinFlowReply {}))
    }

    async fn find_port(
        &self,
        request: Request<api::FindPortRequest>,
    ) -> RpcResult<api::FindPortReply> {
        self.port_of(request).await
    }

    async fn find_hosts(
        &self,
        request: Request<api::FindHostsRequest>,
    ) -> RpcResult<api::FindHostsReply> {
        self.ports_of(request).await
    }

    async fn show_slots(
        &self,
        request: Request<api::ShowSlotsRequest>,
    ) -> RpcResult<api::ShowSlotsReply> {
        let r = request.into_inner();
        let inner = self.shared().lock();
        let job = inner.controller.job(&r.job).map_err(refused)?;
        let wanted = r.ring.map(JobRing);
        wanted.map_or(Ok(()), |ring| job.ring(ring).map(drop)).map_err(refused)?;
        let senders = senders(job);
        let mut reply = api::ShowSlotsReply::default();
        for (ring, spec) in
            job.numbered_rings().filter(|(ring, _)| wanted.is_none_or(|w| w == *ring))
        {
            let state = inner.executor.plane.ring_state(spec.id).map_err(internal)?;
            reply.rings.push(api::RingState {
                ring: ring.0,
                cpu: inner.executor.plane.cpu_number(spec.cpu),
                slots: spec.config.slots,
                low: state.low,
                expected: state.expected[..spec.config.members as usize].to_vec(),
                ranks: senders.clone(),
            });
            for (i, slot) in
                inner.executor.plane.slots(spec.id).map_err(internal)?.iter().enumerate()
            {
                if slot.is(Slot::USED) {
                    reply.slots.push(slot_message(ring, i as u32, slot, &senders));
                }
            }
        }
        Ok(Response::new(reply))
    }

    async fn stats(&self, request: Request<api::StatsRequest>) -> RpcResult<api::StatsReply> {
        let name = request.into_inner().job;
        let inner = self.shared().lock();
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
    ) -> RpcResult<api::ListRingsReply> {
        let name = request.into_inner().job;
        let inner = self.shared().lock();
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
    ) -> RpcResult<api::ListProgramsReply> {
        let inner = self.shared().lock();
        let programs = inner.executor.plane.programs().map_err(internal)?;
        let programs = programs.into_iter().map(|p| program_message(&inner, p)).collect();
        Ok(Response::new(api::ListProgramsReply {
            programs,
            abi: abi::VERSION,
            aggregation_rate: inner.executor.aggregation_rate(&inner.controller),
        }))
    }

    type TraceStream = trace::Tracing;

    async fn trace(&self, request: Request<api::TraceRequest>) -> RpcResult<Self::TraceStream> {
        Ok(Response::new(trace::begin(self.shared(), &request.into_inner())?))
    }
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
    let RingConfig { slots, members, .. } = ring.config;
    let memory = RingMemory { slots, sum_bytes: ring.config.sum_bytes(), members };
    Ok(api::Ring {
        job: job.spec.name.clone(),
        ring: job_ring.0,
        id: ring.id.0,
        cpu: inner.executor.plane.cpu_number(ring.cpu),
        active: job.has_active_rings(),
        ranks: ring.config.members,
        mtu: ring.config.mtu,
        memory: memory.bytes(),
        slots: ring.config.slots,
        slots_used: load.slots_used,
        low: load.low,
        credit: ring.config.credit,
        credit_used: load.credit_used,
        stalled_ms: load.stalled.map(|t| t.as_millis() as u64),
    })
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
            _ => "incomplete",
        }
        .into(),
        contributors: of(true),
        missing: of(false),
    }
}
