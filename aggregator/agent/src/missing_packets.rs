//! Answers ranks that ask why packets of their job do not arrive.

use std::time::{Duration, Instant};

use netsum_api::v1 as api;
use netsum_api::v1::explain_missing_packets_request::MissingPackets as ReportedMissing;
use netsum_controller::message::refused;
use netsum_core::Rank;
use netsum_core::missing_packets::{Evidence, MissingPackets};
use netsum_core::port::Problem;
use tonic::Status;

use super::agent::Shared;
use super::diagnose::answer;
use super::network::Network;

/// Time to watch packets for a rank that lacks some. Endpoints retransmit after 67 ms.
const WATCH: Duration = Duration::from_millis(250);
/// All ranks ask at about the same time, so one observation serves them all.
const CACHE_TTL: Duration = Duration::from_secs(1);

/// The last observation of a job.
#[derive(Default)]
pub struct CachedEvidence(Option<(String, u32, Instant, Evidence)>);

/// Why a rank lacks something. Ranks that ask at the same time share one observation.
///
/// # Errors
/// If the job does not exist.
pub async fn cause(
    shared: &Shared,
    network: &Network,
    seen: &tokio::sync::Mutex<CachedEvidence>,
    request: &api::ExplainMissingPacketsRequest,
) -> Result<Option<Problem>, Status> {
    let (job, rank) = (&request.job, Rank(request.rank));
    let missing = match request.missing() {
        ReportedMissing::Sum => MissingPackets::Sum,
        ReportedMissing::Previous => MissingPackets::Previous,
        ReportedMissing::FullSize => MissingPackets::FullSize,
        ReportedMissing::Acknowledgement => MissingPackets::Acknowledgement,
    };
    {
        // Only a rank of the present epoch has a path, and may cost an observation.
        let inner = shared.lock();
        let job = inner.controller.job(job).map_err(refused)?;
        let is_present =
            job.epoch.as_ref().is_some_and(|e| e.number == request.epoch && e.ring.contains(&rank));
        // Where the hosts sum, no sum comes from the box.
        let is_expected = missing != MissingPackets::Sum || !job.is_summed_by_hosts();
        if !is_present || !is_expected {
            return Ok(None);
        }
    }
    let mut seen = seen.lock().await;
    let is_fresh = |(name, epoch, at, _): &(String, u32, Instant, Evidence)| {
        name == job && *epoch == request.epoch && at.elapsed() < CACHE_TTL
    };
    let is_known = seen.0.as_ref().is_some_and(is_fresh);
    if !is_known {
        let watch_ms = WATCH.as_millis() as u32;
        let watched = api::DiagnoseRequest { job: job.clone(), watch_ms, path_test: false };
        let (_, evidence) = answer(shared, network, watched).await?;
        seen.0 = Some((job.clone(), request.epoch, Instant::now(), evidence));
    }
    let Some((.., evidence)) = &seen.0 else { return Ok(None) };
    let ring = {
        let inner = shared.lock();
        let job = inner.controller.job(job).map_err(refused)?;
        job.epoch.as_ref().filter(|e| e.number == request.epoch).map(|e| e.ring.clone())
    };
    let cause = evidence.cause(missing, rank, &ring.unwrap_or_default());
    if let (false, Some(Problem { found, hint, .. })) = (is_known, &cause) {
        let what = match missing {
            MissingPackets::Sum => "no sums from the box",
            MissingPackets::Previous => "no packets from the previous rank",
            MissingPackets::FullSize => "no full-size packets from the previous rank",
            MissingPackets::Acknowledgement => "no acknowledgements from the next rank",
        };
        log::warn!(NETSUM_JOB = job, NETSUM_RANK = rank.0; "job {job}: rank {rank} receives \
                                                            {what}: {found}: {hint}");
    }
    Ok(cause)
}
