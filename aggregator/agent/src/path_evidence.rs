//! Gathers the evidence for [`netsum_core::missing_packets`].

use std::collections::HashSet;
use std::time::{Duration, Instant};

use netsum_api::v1 as api;
use netsum_common::counters::Counter;
use netsum_common::wire::{self, Frame};
use netsum_core::diagnose::{Finding, UnknownFlow};
use netsum_core::missing_packets::{Evidence, Misplaced, bypass_sender, misplaced, of_port};
use netsum_core::plane::unmapped;
use netsum_core::port::{PortFacts, Problem, tolerable};
use netsum_core::{Job, Rank};

use super::agent::{Inner, Shared};
use super::link::Interface;
use super::{device, trace};

/// A packet that stays unacknowledged for this long is lost repeatedly.
const SILENCE: Duration = Duration::from_secs(2);

/// Starts noting packets with ranks' addresses that arrive on other ports than the ranks'. `None`
/// if too many clients trace already.
pub fn watch_strays(shared: &Shared) -> Option<trace::Tracing> {
    let verdicts = [Counter::WrongPort, Counter::Spoofed].map(|c| c.name().to_owned()).to_vec();
    trace::begin(shared, &api::TraceRequest { verdicts, ..api::TraceRequest::default() })
        .inspect_err(|e| log::debug!("cannot watch for packets on wrong ports: {}", e.message()))
        .ok()
}

/// The packets noted.
pub fn strays(tracing: Option<trace::Tracing>) -> Vec<Misplaced> {
    let packets = tracing.map(|mut tracing| tracing.drain()).unwrap_or_default();
    let stray = |frame: &[u8], port: String| {
        let mut headers = Frame::EMPTY;
        // The source is known even if the rest cannot be parsed.
        let is_roce = wire::parse_into(frame, &mut headers).is_ok();
        let to = is_roce.then(|| (unmapped(headers.dst_ip), headers.bth.qpn));
        Misplaced { src: unmapped(headers.src_ip), to, port }
    };
    let strays = packets.into_iter().map(|p| stray(&p.frame, p.port));
    let mut known = HashSet::new();
    strays.filter(|stray| known.insert(stray.clone())).collect()
}

/// What drivers tell of a job's ports. They may take seconds, so not under the daemon's lock.
pub async fn facts(
    shared: &Shared,
    ports: &HashSet<u32>,
    interfaces: &[Interface],
) -> Vec<PortFacts> {
    let cpus: Vec<u32> = {
        let inner = shared.lock();
        (0..inner.controller.cpus() as u32).map(|c| inner.executor.plane.cpu_number(c)).collect()
    };
    let used: Vec<Interface> =
        interfaces.iter().filter(|l| ports.contains(&l.ifindex)).cloned().collect();
    let ask = move || {
        let facts = used.iter().filter_map(|l| match device::facts(l, &cpus) {
            Ok(facts) => Some(PortFacts { xdp: true, ..facts }),
            Err(e) => {
                log::debug!("port {}: {e:#}", l.name);
                None
            }
        });
        facts.collect()
    };
    tokio::task::spawn_blocking(ask).await.unwrap_or_default()
}

/// The evidence about a job's path, from ports and packets.
pub fn evidence(
    inner: &Inner,
    job: &Job,
    facts: &[PortFacts],
    strays: &[Misplaced],
    unknown_flows: &[UnknownFlow],
) -> Evidence {
    let sums_arrive = job.epoch.as_ref().is_none_or(|epoch| !epoch.on_host_ring);
    let is_home = |s: &&UnknownFlow| {
        job.flows.iter().any(|flow| flow.src == s.src && flow.ifindex == s.ifindex)
    };
    let bypass = unknown_flows.iter().filter(is_home);
    let bypass: Vec<Rank> =
        bypass.filter_map(|s| bypass_sender(job, s.src, s.dst, s.qpn)).collect();
    let has_contributed = |rank| {
        let mut flows = job.flows.iter().filter(|flow| job.sender(flow.member) == rank);
        flows.any(|flow| {
            inner.executor.plane.flow_stats(flow.key()).is_ok_and(|s| s.packets != s.refused)
        })
    };
    let is_home = |rank| bypass.contains(&rank) || has_contributed(rank);
    Evidence {
        misplaced: misplaced(job, strays, |ifindex| inner.controller.port_name(ifindex), is_home),
        ports: facts.iter().flat_map(|facts| of_port(job.mtu(), facts, sums_arrive)).collect(),
        bypass,
        ..Evidence::default()
    }
}

/// The findings that blame a rank.
pub fn of_ranks(findings: &[Finding]) -> Vec<Problem> {
    let of_rank = |f: &Finding| {
        f.rank.map(|rank| tolerable(format!("rank {rank}: {}", f.what), f.next.clone()))
    };
    findings.iter().filter_map(of_rank).collect()
}

/// Waits until all ranks' packets of a path test are acknowledged. Ranks receive the test with
/// their next heartbeat.
pub async fn acknowledged(shared: &Shared, job: &str, test: u32) {
    let until = Instant::now() + shared.heartbeat + SILENCE;
    while Instant::now() < until {
        let is_done = shared.lock().controller.job(job).is_ok_and(|job| {
            job.epoch.as_ref().is_none_or(|e| e.acknowledged.iter().all(|known| *known >= test))
        });
        if is_done {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The state of each rank's path to the next.
pub fn of_ring(inner: &Inner, job: &Job, test: u32) -> Vec<api::RankPathTest> {
    let Some(epoch) = &job.epoch else { return Vec::new() };
    let pairs = epoch.ring.iter().zip(epoch.ring.iter().cycle().skip(1));
    let of = |(rank, next): (&Rank, &Rank)| {
        let flows = || job.flows.iter().filter(|flow| job.sender(flow.member) == *rank);
        let seen: Vec<_> =
            flows().filter_map(|f| inner.executor.plane.flow_stats(f.key()).ok()).collect();
        api::RankPathTest {
            rank: rank.0,
            next: next.0,
            port: flows().next().map(|f| inner.controller.port_name(f.ifindex)).unwrap_or_default(),
            acknowledged: epoch.acknowledged[rank.0 as usize] >= test,
            packets: seen.iter().fold(0, |sum, s| sum.wrapping_add(s.packets)),
            refused: seen.iter().fold(0, |sum, s| sum.wrapping_add(s.refused)),
        }
    };
    pairs.map(of).collect()
}
