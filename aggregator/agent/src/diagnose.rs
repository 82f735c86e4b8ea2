//! Gathers the evidence for [`netsum_core::diagnose`].

use std::collections::HashMap;
use std::time::{Duration, Instant};

use netsum_api::v1 as api;
use netsum_common::abi::RingNumber;
use netsum_common::counters::{Counter, Kind};
use netsum_common::serial;
use netsum_controller::message::{diagnosis_message, refused};
use netsum_core::diagnose::{MemberEvidence, PortEvidence, RingEvidence, UnknownFlow, diagnose};
use netsum_core::missing_packets::Evidence;
use netsum_core::plane::{RingSpec, unmapped};
use netsum_core::{Job, JobRing, Rank};
use netsum_dataplane::count;
use tonic::Status;

use super::agent::{Inner, Shared};
use super::link::Interface;
use super::load::{counter_messages, counters, flows_of, view};
use super::network::Network;
use super::path_evidence;

/// Ends the noting of unknown connections when the last client that asked for it disconnects.
struct Watching(Shared);

impl Drop for Watching {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        inner.executor.watchers -= 1;
        if inner.executor.watchers == 0
            && let Err(e) = inner.executor.plane.watch_unknown_flows(false)
        {
            log::error!("cannot stop the recording of unknown flows: {e:#}");
        }
    }
}

/// Watches a job for a while, and says why it has stalled. Also returns the evidence about its
/// path.
pub async fn answer(
    shared: &Shared,
    network: &Network,
    request: api::DiagnoseRequest,
) -> Result<(api::Diagnosis, Evidence), Status> {
    let internal = |e: anyhow::Error| Status::internal(format!("{e:#}"));
    let watch = Duration::from_millis(request.watch_ms.into());
    let before = network.interfaces().await.map_err(internal)?;
    let mut packets: HashMap<(RingNumber, Rank), u32> = HashMap::new();
    let tokens_before;
    let watching = {
        let mut inner = shared.lock();
        tokens_before = wrong_tokens(&inner).map_err(internal)?;
        for flow in inner.controller.job(&request.job).map_err(refused)?.flows.clone() {
            packets.insert(
                (flow.ring, flow.member),
                inner.executor.plane.flow_stats(flow.key()).map_err(internal)?.packets,
            );
        }
        if inner.executor.watchers == 0 {
            inner.executor.plane.watch_unknown_flows(true).map_err(internal)?;
        }
        inner.executor.watchers += 1;
        Watching(shared.clone())
    };
    let strays = path_evidence::watch_strays(shared);
    let test = request
        .path_test
        .then(|| shared.lock().controller.request_path_test(&request.job))
        .flatten();
    tokio::time::sleep(watch).await;
    if let Some(test) = test {
        path_evidence::acknowledged(shared, &request.job, test).await;
    }
    let strays = path_evidence::strays(strays);
    let after = network.interfaces().await.map_err(internal)?;
    let mut ports =
        shared.lock().controller.job(&request.job).map(Job::flow_ports).unwrap_or_default();
    let facts = path_evidence::facts(shared, &ports, &after).await;
    let is_known = !ports.is_empty();
    if !is_known {
        // A rank that has not joined may be behind any port.
        ports.extend(shared.lock().controller.ports().iter().map(|port| port.ifindex));
    }
    let bridging = network.obstacles(&ports).await;
    let inner = shared.lock();
    let unknown_flows = unknown_flows(&inner).map_err(internal)?;
    let job = inner.controller.job(&request.job).map_err(refused)?;
    let mut evidence = path_evidence::evidence(&inner, job, &facts, &strays, &unknown_flows);
    evidence.bridging = bridging;
    let mut obstacles = evidence.obstacles();
    obstacles.iter_mut().for_each(|o| o.is_fatal &= is_known);
    let rings = if job.has_active_rings() {
        let evidence = |(number, ring): (JobRing, &RingSpec)| {
            ring_evidence(&inner, job, number, ring, &packets, [&before, &after])
        };
        job.numbered_rings().map(evidence).collect::<Result<Vec<_>, _>>().map_err(internal)?
    } else {
        Vec::new()
    };
    let wrong_tokens = wrong_tokens(&inner).map_err(internal)?.saturating_sub(tokens_before);
    let findings = diagnose(job, &rings, &unknown_flows, wrong_tokens, &obstacles);
    evidence.findings = path_evidence::of_ranks(&findings);
    let drops =
        counter_messages(counters(&inner, job.rings.iter().map(|r| r.id)).map_err(internal)?);
    let rings = rings.iter().map(ring_message).collect();
    let diagnosis = api::Diagnosis {
        rings,
        path_test: test.map(|test| path_evidence::of_ring(&inner, job, test)).unwrap_or_default(),
        drops: drops.into_iter().filter(|c| c.value > 0 && c.kind == Kind::Drop.name()).collect(),
        ..diagnosis_message(job, findings)
    };
    drop(inner);
    drop(watching);
    Ok((diagnosis, evidence))
}

/// Counts first packets whose token matches no job, since the start.
fn wrong_tokens(inner: &Inner) -> anyhow::Result<u64> {
    Ok(count(&inner.executor.plane.counters(RingNumber::NONE)?, Counter::InBandWrongToken))
}

fn ring_evidence(
    inner: &Inner,
    job: &Job,
    number: JobRing,
    ring: &RingSpec,
    packets: &HashMap<(RingNumber, Rank), u32>,
    [before, after]: [&Vec<Interface>; 2],
) -> anyhow::Result<RingEvidence> {
    let now = Instant::now();
    let flows = flows_of(job, ring.id);
    let view = view(inner, ring, &flows)?;
    let ago = |t: Instant| now.saturating_duration_since(t);
    let members = flows.into_iter().zip(&view.ranks).map(|(flow, &seen)| {
        let interface = |interfaces: &[Interface]| {
            interfaces.iter().find(|l| l.ifindex == flow.ifindex).cloned()
        };
        let (old, new) = (interface(before), interface(after));
        let port = PortEvidence {
            name: inner.controller.port_name(flow.ifindex),
            // Without netlink, the port counts as up.
            up: new.as_ref().is_none_or(|l| l.up),
            received: old
                .zip(new)
                .map(|(old, new)| new.counters[1].saturating_sub(old.counters[1])),
        };
        let known = packets.get(&(flow.ring, flow.member)).copied().unwrap_or(0);
        MemberEvidence {
            last: inner.executor.watch.last_packet(ring.id, flow.member).map(ago),
            moved: seen.packets.wrapping_sub(known),
            heartbeat: job
                .epoch
                .as_ref()
                .and_then(|e| e.last_seen(job.sender(flow.member)))
                .map(ago),
            sender: job.sender(flow.member),
            member: job.member(flow.member),
            seen,
            port,
            flow,
        }
    });
    let members = members.collect();
    let stalled = inner
        .executor
        .watch
        .stalled_since(ring.id)
        .map(ago)
        .filter(|_| view.is_pending(ring.config.credit));
    Ok(RingEvidence { ring: number, spec: ring.clone(), view, stalled, members })
}

fn unknown_flows(inner: &Inner) -> anyhow::Result<Vec<UnknownFlow>> {
    let noted = inner.executor.plane.unknown_flows()?;
    Ok(noted
        .into_iter()
        .map(|(key, packets)| UnknownFlow {
            src: unmapped(key.src_ip),
            dst: unmapped(key.dst_ip),
            qpn: key.qpn,
            ifindex: key.ifindex,
            packets,
        })
        .collect())
}

fn ring_message(ring: &RingEvidence) -> api::RingDiagnosis {
    let low = ring.view.state.low;
    let missing =
        if ring.stalled.is_some() { ring.view.missing(&ring.spec.config) } else { Vec::new() };
    let ranks = ring.members.iter().map(|r| {
        let Rank(member) = r.flow.member;
        let expected = ring.view.state.expected[member as usize];
        // The data plane raises it only with the rank's next packet.
        let expected = if serial::before(expected, low) { low } else { expected };
        api::RankDiagnosis {
            rank: r.sender.0,
            port: r.port.name.clone(),
            port_up: r.port.up,
            expected,
            expected_psn: r.flow.base_psn.plus(expected).get(),
            credit_used: ring.view.credit_used(member as usize, ring.spec.config.credit),
            packets: r.seen.packets,
            refused: r.seen.refused,
            last_psn: r.seen.last_verdict.map(|_| r.seen.last_psn),
            last_verdict: r.seen.last_verdict.map(|c| c.name().into()).unwrap_or_default(),
            last_ms: r.last.map(|t| t.as_millis() as u64),
            heartbeat_ms: r.heartbeat.map(|t| t.as_millis() as u64),
            missing: missing.contains(&r.flow.member),
        }
    });
    api::RingDiagnosis {
        ring: ring.ring.0,
        low,
        stalled_ms: ring.stalled.map(|t| t.as_millis() as u64),
        credit: ring.spec.config.credit,
        ranks: ranks.collect(),
        missing: missing.into_iter().map(|rank| ring.members[rank.0 as usize].sender.0).collect(),
    }
}
