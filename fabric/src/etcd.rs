//! Leader election of several managers in etcd, and the state that the next leader continues with.
//!
//! The leader's key lives as long as its lease. State is written only while the key is still the
//! one that this manager created.
//!
//! The crate `etcd-client` (0.21.1) does not fit: it does not build without protoc, which a fresh
//! machine lacks, and it sends a request to one endpoint, so an endpoint that drops packets would
//! cost a standby the request's whole timeout instead of 0.2 s.

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::read::GzEncoder;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use netsum_api::tls::{authority, identity};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{IntoRequest as _, Status};

use crate::config::Etcd;

mod pb {
    #![allow(clippy::all, reason = "generated")]
    tonic::include_proto!("etcdserverpb");
}

use pb::kv_client::KvClient;
use pb::lease_client::LeaseClient;

/// Poll interval of a standby, also for an etcd that does not answer.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Retry interval of a leader: another endpoint may answer.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(1);
/// After this time without an answer the next endpoint is asked too: one may drop packets.
const HEDGE_DELAY: Duration = Duration::from_millis(200);
/// Log interval while etcd does not answer.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Start of a leader's term.
pub struct Leadership {
    /// State that the last leader wrote.
    pub state: Option<String>,
    lead: Lead,
}

struct Lead {
    endpoints: Arc<Endpoints>,
    id: i64,
    leader: Vec<u8>,
    /// The revision that created its key.
    made: i64,
    key: Vec<u8>,
    ttl: Duration,
    /// Start of the lease, which lasts `ttl`.
    since: Instant,
    /// A write has started and is not confirmed.
    unwritten: bool,
}

struct Endpoints {
    channels: Vec<Channel>,
    /// The one that has answered last is asked first.
    first: AtomicUsize,
}

impl Endpoints {
    fn new(config: &Etcd) -> Result<Self> {
        Ok(Self { channels: channels(config)?, first: AtomicUsize::new(0) })
    }

    /// The next one is asked first.
    fn rotate(&self) {
        let next = (self.first.load(Ordering::Relaxed) + 1) % self.channels.len();
        self.first.store(next, Ordering::Relaxed);
    }

    fn first(&self) -> &Channel {
        &self.channels[self.first.load(Ordering::Relaxed)]
    }

    /// Returns the first answer. Several endpoints may get the request, so it must be idempotent.
    async fn request<T, F>(&self, call: impl Fn(Channel) -> F) -> Result<T>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let (count, first) = (self.channels.len(), self.first.load(Ordering::Relaxed));
        let mut rest = (0..count).map(|n| (first + n) % count);
        let (mut pending, mut why) = (FuturesUnordered::new(), None);
        let until = Instant::now() + TIMEOUT;
        loop {
            if let Some(n) = rest.next() {
                let answer = call(self.channels[n].clone());
                pending.push(async move { (n, answer.await) });
            }
            let wait =
                if rest.len() > 0 { (Instant::now() + HEDGE_DELAY).min(until) } else { until };
            match timeout_at(wait, pending.next()).await {
                Ok(Some((n, Ok(answer)))) => {
                    self.first.store(n, Ordering::Relaxed);
                    return Ok(answer);
                }
                Ok(Some((_, Err(status)))) => why = Some(status),
                Ok(None) => {
                    let why = why.context("there is no endpoint")?;
                    return Err(anyhow!("{}", why.message()));
                }
                Err(_) if Instant::now() >= until => {
                    return Err(anyhow!("no answer within {TIMEOUT:?}"));
                }
                Err(_) => {}
            }
        }
    }

    async fn get(&self, key: &[u8]) -> Result<Option<pb::KeyValue>> {
        let range = |channel| {
            let request = pb::RangeRequest { key: key.to_vec() };
            async move { KvClient::new(channel).range(request).await }
        };
        Ok(self.request(range).await?.into_inner().kvs.pop())
    }
}

fn channels(config: &Etcd) -> Result<Vec<Channel>> {
    let channel = |url: &String| {
        let mut endpoint = Endpoint::from_shared(url.clone())?
            .connect_timeout(TIMEOUT)
            // A machine that loses its power does not close its connections.
            .http2_keep_alive_interval(TIMEOUT)
            .keep_alive_timeout(TIMEOUT)
            .keep_alive_while_idle(true);
        if let Some(files) = &config.tls {
            let tls = ClientTlsConfig::new().timeout(TIMEOUT).ca_certificate(authority(&files.ca)?);
            endpoint = endpoint.tls_config(tls.identity(identity(&files.cert, &files.key)?))?;
        }
        Ok(endpoint.connect_lazy())
    };
    config.endpoints.iter().map(channel).collect()
}

/// etcd takes requests of 1.5 MiB by default, and has the state as one value.
fn packed(state: &str) -> Result<Vec<u8>> {
    let mut packed = Vec::new();
    GzEncoder::new(state.as_bytes(), Compression::fast()).read_to_end(&mut packed)?;
    Ok(packed)
}

fn unpacked(value: Vec<u8>) -> Result<String> {
    let mut state = String::new();
    GzDecoder::new(&*value).read_to_string(&mut state)?;
    Ok(state)
}

async fn within<T>(answer: impl Future<Output = Result<T, Status>>) -> Result<T> {
    let answer =
        timeout(TIMEOUT, answer).await.map_err(|_| anyhow!("no answer within {TIMEOUT:?}"))?;
    answer.map_err(|status| anyhow!("{}", status.message()))
}

/// Puts a key if the leader's key was created at this revision; 0 if it must not exist.
fn put(leader: &[u8], made: i64, put: pb::PutRequest) -> pb::TxnRequest {
    let compare = pb::Compare {
        target: pb::compare::CompareTarget::Create.into(),
        key: leader.to_vec(),
        target_union: Some(pb::compare::TargetUnion::CreateRevision(made)),
    };
    let success = pb::RequestOp { request: Some(pb::request_op::Request::RequestPut(put)) };
    pb::TxnRequest { compare: vec![compare], success: vec![success] }
}

/// Waits until this manager leads. `me` describes it to others.
///
/// # Errors
/// If the configuration cannot be used.
pub async fn lead(config: &Etcd, me: &str) -> Result<Leadership> {
    let endpoints = Arc::new(Endpoints::new(config).context("etcd")?);
    let (mut logged, mut other, mut granted) = (None::<Instant>, Vec::new(), None);
    loop {
        match campaign(config, me, &endpoints, &mut granted).await {
            Ok(Ok(leading)) => return Ok(leading),
            Ok(Err(leader)) if leader != other => {
                log::info!("standby: manager {} is the leader", String::from_utf8_lossy(&leader));
                other = leader;
            }
            Ok(Err(_)) => {}
            Err(e) if logged.is_none_or(|logged| logged.elapsed() > LOG_INTERVAL) => {
                log::warn!("etcd {}: {e:#}; retrying", config.endpoints.join(", "));
                logged = Some(Instant::now());
            }
            Err(_) => {}
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Becomes the leader if nobody leads; otherwise returns the leader. A lease that was `granted` may
/// own the leader's key already: the answer to that request may have been lost.
async fn campaign(
    config: &Etcd,
    me: &str,
    endpoints: &Arc<Endpoints>,
    granted: &mut Option<(i64, Instant)>,
) -> Result<Result<Leadership, Vec<u8>>> {
    let [leader, key] =
        ["leader", "state"].map(|name| format!("{}/{name}", config.prefix).into_bytes());
    let before = endpoints.get(&leader).await?;
    let is_mine = |key: &pb::KeyValue, granted: &Option<(i64, Instant)>| {
        granted.is_some_and(|(id, _)| id == key.lease)
    };
    let now = match before {
        Some(key) if is_mine(&key, granted) => key,
        Some(other) => return Ok(Err(other.value)),
        None => {
            let since = Instant::now();
            let ttl = i64::from(config.lease_s);
            let grant = |channel| async move {
                LeaseClient::new(channel).lease_grant(pb::LeaseGrantRequest { ttl }).await
            };
            let lease = endpoints.request(grant).await?.into_inner().id;
            *granted = Some((lease, since));
            let claim = pb::PutRequest { key: leader.clone(), value: me.into(), lease };
            let claim = put(&leader, 0, claim);
            let claim = |channel| {
                let claim = claim.clone();
                async move { KvClient::new(channel).txn(claim).await }
            };
            endpoints.request(claim).await?;
            endpoints.get(&leader).await?.context("the leader's key was just deleted")?
        }
    };
    let Some((id, since)) = granted.filter(|_| is_mine(&now, granted)) else {
        return Ok(Err(now.value));
    };
    let state = endpoints.get(&key).await?.map(|state| unpacked(state.value)).transpose()?;
    let (made, ttl) = (now.create_revision, Duration::from_secs(config.lease_s.into()));
    let endpoints = endpoints.clone();
    Ok(Ok(Leadership {
        state,
        lead: Lead { endpoints, id, leader, made, key, ttl, since, unwritten: false },
    }))
}

impl Leadership {
    /// Writes the state at once.
    ///
    /// # Errors
    /// If etcd does not take it, or another manager leads by now.
    pub async fn write(&mut self, state: String) -> Result<()> {
        let written = self.lead.write_by_any(&state).await.context("etcd")?;
        ensure!(written, "etcd: another manager leads by now");
        Ok(())
    }

    /// Keeps the lease and writes new states while this manager leads; returns why it stopped. When
    /// the sender of states ends, it gives the lease back and another manager may lead at once.
    pub async fn keep(self, mut states: watch::Receiver<String>) -> String {
        let mut lead = self.lead;
        let mut failing = false;
        loop {
            let until = lead.since + lead.ttl;
            match timeout_at(until, lead.round(&mut states, &mut failing)).await {
                Ok(Some(why)) => return why,
                Ok(None) if states.has_changed().is_err() => {
                    lead.leave(&states)
                        .await
                        .unwrap_or_else(|e| log::warn!("etcd: {e:#}; the lease ends later"));
                    return "ending".to_owned();
                }
                // Another renewal may have succeeded meanwhile.
                Err(_) if Instant::now() >= lead.since + lead.ttl => {
                    return format!(
                        "etcd has not renewed the lease for {:?}: another manager may lead",
                        lead.ttl
                    );
                }
                _ => {}
            }
        }
    }
}

impl Lead {
    async fn round(
        &mut self,
        states: &mut watch::Receiver<String>,
        failing: &mut bool,
    ) -> Option<String> {
        let next = Instant::now() + self.ttl / 5;
        let result = self.renew_and_write(states).await;
        if result.is_err() != *failing {
            *failing = !*failing;
            match &result {
                Err(e) => log::warn!("etcd: {e:#}; retrying"),
                Ok(_) => log::info!("etcd answers again"),
            }
        }
        match result {
            Ok(None) => tokio::select! {
                () = sleep_until(next) => None,
                changed = states.changed() => {
                    // Marked as seen only after the write.
                    changed.is_ok().then(|| states.mark_changed());
                    None
                }
            },
            Ok(why) => why,
            Err(_) => {
                sleep(RETRY_INTERVAL).await;
                None
            }
        }
    }

    /// Writes the last state, and gives the lease back.
    async fn leave(&mut self, states: &watch::Receiver<String>) -> Result<()> {
        let state = states.borrow().clone();
        if !state.is_empty() {
            self.write_by_any(&state).await?;
        }
        let id = self.id;
        let revoke = |channel| async move {
            LeaseClient::new(channel).lease_revoke(pb::LeaseRevokeRequest { id }).await
        };
        self.endpoints.request(revoke).await.map(drop)
    }

    /// Tries each endpoint until one answers.
    async fn write_by_any(&mut self, state: &str) -> Result<bool> {
        let mut written = self.write(state).await;
        for _ in 1..self.endpoints.channels.len() {
            if written.is_err() {
                written = self.write(state).await;
            }
        }
        written
    }

    /// False if this manager does not lead: then nothing is written.
    async fn write(&mut self, state: &str) -> Result<bool> {
        let put_state = pb::PutRequest { key: self.key.clone(), value: packed(state)?, lease: 0 };
        let request = put(&self.leader, self.made, put_state);
        // By one endpoint at a time: an older state must not come behind a newer one.
        let mut kv = KvClient::new(self.endpoints.first().clone());
        let written = within(kv.txn(request)).await.inspect_err(|_| self.endpoints.rotate());
        let written = written.map(|answer| answer.into_inner().succeeded);
        written.context("the state is not written: the next manager would lack it")
    }

    /// Renews the lease and writes; returns why it stopped leading, if so.
    async fn renew_and_write(
        &mut self,
        states: &mut watch::Receiver<String>,
    ) -> Result<Option<String>> {
        let sent = Instant::now();
        let id = self.id;
        let keep_alive = |channel| async move {
            let request = tokio_stream::once(pb::LeaseKeepAliveRequest { id }).into_request();
            LeaseClient::new(channel).lease_keep_alive(request).await?.into_inner().message().await
        };
        let answer = self.endpoints.request(keep_alive).await;
        let answer = answer.and_then(|answer| answer.context("no answer"));
        if answer.context("the lease is not renewed, and this manager ends with it")?.ttl <= 0 {
            return Ok(Some("the lease in etcd has ended: another manager may lead".to_owned()));
        }
        self.since = sent;
        if self.unwritten || states.has_changed().unwrap_or_default() {
            // This stays set if the write is cancelled.
            self.unwritten = true;
            let state = states.borrow_and_update().clone();
            if !self.write(&state).await? {
                return Ok(Some("another manager leads by now".to_owned()));
            }
            self.unwritten = false;
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_state_is_read_and_nonsense_is_refused() {
        let ranks: String = (0..9999)
            .map(|rank| format!("{{\"rank\":{rank},\"psn\":{}}},", rank * 7919 % 65536))
            .collect();
        let state = format!("{{\"ranks\":[{ranks}]}}");
        let small = packed(&state).unwrap();
        assert!(small.len() < state.len() / 3, "{} of {}", small.len(), state.len());
        assert_eq!(unpacked(small).unwrap(), state);
        assert!(unpacked(b"nonsense".to_vec()).is_err());
    }
}
