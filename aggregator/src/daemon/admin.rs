//! The administration service.

use std::net::IpAddr;

use netsum_api::v1 as api;
use netsum_api::v1::admin_server::Admin;
use netsum_common::counters::{Counter, Kind};
use netsum_common::slot::Slot;
use tonic::{Request, Response, Status};

use super::diagnose;
use super::links::Netlink;
use super::state::{Inner, Shared};
use super::{job_message, mac_from_text, mac_text};
use crate::core::{Job, JobSpec};
use crate::dataplane::{FlowSeen, FlowSpec, count};

/// Answers administration.
#[derive(Clone)]
pub struct AdminService {
    shared: Shared,
    netlink: Option<Netlink>,
}

type Answer<T> = Result<Response<T>, Status>;

impl AdminService {
    /// A service; without netlink, ports have no counters.
    pub fn new(shared: Shared, netlink: Option<Netlink>) -> Self {
        Self { shared, netlink }
    }

    /// A job, and its token only for those who ask for it.
    fn job(&self, inner: &Inner, job: &Job, token: bool) -> api::Job {
        let heartbeat = self.shared.heartbeat.as_millis() as u32;
        let mut message = job_message(job, |ifindex| inner.controller.port_name(ifindex), heartbeat, token);
        // The box may have learned what was not given.
        for (flow, spec) in message.flows.iter_mut().zip(&job.flows) {
            if let Ok(FlowSeen { mac: Some(mac), .. }) = inner.plane.flow_seen(spec.key()) {
                flow.src_mac = mac_text(mac);
            }
        }
        message
    }
}

fn token() -> Result<String, Status> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).map_err(|e| Status::internal(format!("no random numbers: {e}")))?;
    Ok(bytes.map(|b| format!("{b:02x}")).concat())
}

fn address(option: &str, text: &str) -> Result<IpAddr, Status> {
    text.parse().map_err(|_| {
        Status::invalid_argument(format!("{option} `{text}`: an IPv4 or IPv6 address is needed"))
    })
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn create_job(&self, request: Request<api::CreateJobRequest>) -> Answer<api::Job> {
        let r = request.into_inner();
        let choice = |option: &str, value: &str, yes: &str, no: &str| match value {
            v if v == yes => Ok(true),
            v if v == no => Ok(false),
            v => Err(Status::invalid_argument(format!("{option} {v}: {yes} or {no} is possible"))),
        };
        let spec = JobSpec {
            verify_icrc: choice("--icrc", &r.icrc, "verify", "ignore")?,
            in_order: choice("--order", &r.order, "in-order", "relaxed")?,
            name: r.name.clone(),
            ranks: r.ranks,
            dtype: r.dtype,
            mtu: r.mtu,
            message_size: r.message_size,
            window: r.window,
            rings: r.rings,
            in_band: r.in_band,
            token: if r.token.is_empty() { token()? } else { r.token }.into(),
        };
        let mut inner = self.shared.lock();
        let actions = inner.controller.create_job(spec)?;
        if let Err(error) = inner.carry_out(None, actions) {
            let actions = inner.controller.delete_job(&r.name)?;
            inner.carry_out(None, actions)?;
            return Err(error);
        }
        log::info!("job {} created", r.name);
        Ok(Response::new(self.job(&inner, inner.controller.job(&r.name)?, true)))
    }

    async fn delete_job(&self, request: Request<api::DeleteJobRequest>) -> Answer<api::DeleteJobReply> {
        let name = request.into_inner().name;
        let mut inner = self.shared.lock();
        let actions = inner.controller.delete_job(&name)?;
        inner.carry_out(None, actions)?;
        log::info!("job {name} deleted");
        Ok(Response::new(api::DeleteJobReply {}))
    }

    async fn list_jobs(&self, _: Request<api::ListJobsRequest>) -> Answer<api::ListJobsReply> {
        let inner = self.shared.lock();
        let jobs = inner.controller.jobs().map(|j| self.job(&inner, j, false)).collect();
        Ok(Response::new(api::ListJobsReply { jobs }))
    }

    async fn show_job(&self, request: Request<api::ShowJobRequest>) -> Answer<api::Job> {
        let r = request.into_inner();
        let inner = self.shared.lock();
        let job = inner.controller.job(&r.name)?;
        Ok(Response::new(self.job(&inner, job, r.show_token)))
    }

    async fn add_flow(&self, request: Request<api::AddFlowRequest>) -> Answer<api::Job> {
        let r = request.into_inner();
        let f = r.flow.ok_or_else(|| Status::invalid_argument("flow: missing"))?;
        let src_mac = match f.src_mac.as_str() {
            "" => None,
            text => Some(mac_from_text(text).ok_or_else(|| {
                Status::invalid_argument(format!(
                    "--src-mac `{text}`: six bytes like 02:00:00:00:00:01 are needed"
                ))
            })?),
        };
        let mut inner = self.shared.lock();
        let Some(port) = inner.controller.ports().iter().find(|p| p.name == f.port) else {
            let names: Vec<_> = inner.controller.ports().iter().map(|p| p.name.as_str()).collect();
            let message = format!("--port `{}`: netsum has ports {}", f.port, names.join(", "));
            return Err(Status::invalid_argument(message));
        };
        let flow = FlowSpec {
            ring: 0,
            rank: f.rank,
            base_psn: f.psn,
            ifindex: port.ifindex,
            src: address("--src", &f.src)?,
            dst: address("--dst", &f.dst)?,
            qpn: f.qpn,
            src_mac,
        };
        let actions = inner.controller.add_flow(&r.job, f.ring, flow)?;
        inner.carry_out(Some(&r.job), actions)?;
        Ok(Response::new(self.job(&inner, inner.controller.job(&r.job)?, false)))
    }

    async fn list_ports(&self, _: Request<api::ListPortsRequest>) -> Answer<api::ListPortsReply> {
        let links = match &self.netlink {
            Some(netlink) => netlink.links().await.map_err(|e| Status::internal(format!("{e:#}")))?,
            None => Vec::new(),
        };
        let inner = self.shared.lock();
        let ports = inner.controller.ports().iter().map(|p| {
            let flows =
                inner.controller.jobs().flat_map(|j| &j.flows).filter(|f| f.ifindex == p.ifindex).count()
                    as u32;
            let mut port = api::Port {
                name: p.name.clone(),
                ifindex: p.ifindex,
                mtu: p.mtu,
                flows,
                ..api::Port::default()
            };
            if let Some(link) = links.iter().find(|l| l.ifindex == p.ifindex) {
                port.mac.clone_from(&link.mac);
                (port.mtu, port.up) = (link.mtu, link.up);
                port.xdp = link.xdp.unwrap_or_default().into();
                [port.rx_bytes, port.rx_packets, port.tx_bytes, port.tx_packets] = link.counters;
            }
            port
        });
        Ok(Response::new(api::ListPortsReply { ports: ports.collect() }))
    }

    async fn show_slots(&self, request: Request<api::ShowSlotsRequest>) -> Answer<api::ShowSlotsReply> {
        let r = request.into_inner();
        let inner = self.shared.lock();
        let job = inner.controller.job(&r.job)?;
        if let Some(ring) = r.ring.filter(|&ring| ring as usize >= job.rings.len()) {
            let message = format!("--ring {ring}: the job has rings 0 to {}", job.rings.len() - 1);
            return Err(Status::invalid_argument(message));
        }
        let mut reply = api::ShowSlotsReply::default();
        for (index, spec) in
            job.rings.iter().enumerate().filter(|(i, _)| r.ring.is_none_or(|r| r as usize == *i))
        {
            let internal = |e: anyhow::Error| Status::internal(format!("{e:#}"));
            let state = inner.plane.ring_state(spec.id).map_err(internal)?;
            reply.rings.push(api::RingState {
                ring: index as u32,
                cpu: spec.cpu,
                slots: spec.slots,
                low: state.low,
                expected: state.expected[..spec.ranks as usize].to_vec(),
            });
            for (i, slot) in inner.plane.slots(spec.id).map_err(internal)?.iter().enumerate() {
                if slot.is(Slot::USED) {
                    reply.slots.push(slot_message(index as u32, i as u32, slot, spec.ranks));
                }
            }
        }
        Ok(Response::new(reply))
    }

    async fn stats(&self, request: Request<api::StatsRequest>) -> Answer<api::StatsReply> {
        let name = request.into_inner().job;
        let inner = self.shared.lock();
        let rings: Vec<u32> = if name.is_empty() {
            inner.controller.jobs().flat_map(|j| &j.rings).map(|r| r.id).chain([0]).collect()
        } else {
            inner.controller.job(&name)?.rings.iter().map(|r| r.id).collect()
        };
        Ok(Response::new(api::StatsReply { counters: counter_messages(&inner, &rings)? }))
    }

    async fn diagnose(&self, request: Request<api::DiagnoseRequest>) -> Answer<api::Diagnosis> {
        let diagnosis = diagnose::answer(&self.shared, self.netlink.as_ref(), request.into_inner());
        Ok(Response::new(diagnosis.await?))
    }
}

/// All counters, summed over rings.
pub(super) fn counter_messages(inner: &Inner, rings: &[u32]) -> Result<Vec<api::Counter>, Status> {
    let mut totals = vec![0u64; Counter::ALL.len()];
    for &ring in rings {
        let values = inner.plane.counters(ring).map_err(|e| Status::internal(format!("{e:#}")))?;
        for (total, &c) in totals.iter_mut().zip(Counter::ALL) {
            *total += count(&values, c);
        }
    }
    let message = |(c, value): (&Counter, u64)| api::Counter {
        name: c.name().into(),
        value,
        kind: kind_name(c.kind()).into(),
        help: c.help().trim().into(),
    };
    Ok(Counter::ALL.iter().zip(totals).map(message).collect())
}

/// A kind of counter in the API.
pub(super) fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Work => "work",
        Kind::Pass => "pass",
        Kind::Drop => "drop",
    }
}

fn slot_message(ring: u32, number: u32, slot: &Slot, ranks: u32) -> api::Slot {
    let has = |rank: &u32| slot.contributors & 1 << rank != 0;
    api::Slot {
        ring,
        slot: number,
        index: slot.index,
        len: slot.len,
        state: match slot {
            s if s.is(Slot::RELEASED) => "released",
            s if s.is(Slot::COMPLETE) => "complete",
            _ => "partial",
        }
        .into(),
        contributors: (0..ranks).filter(has).collect(),
        missing: (0..ranks).filter(|r| !has(r)).collect(),
    }
}
