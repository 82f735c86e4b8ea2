//! Ranks as the manager sees them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hyper_util::rt::TokioIo;
use netsum_api::v1 as api;
use netsum_api::v1::worker_client::WorkerClient;
use netsum_api::{PROTOCOL, RELEASE};
use tokio::net::TcpSocket;
use tokio::task::JoinSet;
use tonic::Code;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use super::Size;

pub const TOKEN: &str = "sesame";
/// The time that a rank waits for the others.
const JOIN: Duration = Duration::from_secs(120);

pub fn job_name(job: usize) -> String {
    format!("job{job}")
}

/// A host's MAC address.
pub fn mac(host: usize) -> [u8; 6] {
    [2, 0, 0, 0, (host >> 8) as u8, host as u8]
}

/// All ranks of all jobs, one on each host.
#[derive(Clone)]
pub struct Ranks(Vec<Arc<Rank>>);

struct Rank {
    job: String,
    rank: u32,
    host: usize,
    rings: usize,
    /// Its current epoch.
    epoch: AtomicU32,
    client: WorkerClient<Channel>,
}

impl Ranks {
    /// Ranks that are not connected yet.
    pub fn new(manager: SocketAddr, size: &Size) -> Self {
        let rank = |host: usize| {
            Arc::new(Rank {
                job: job_name(host / size.ranks),
                rank: (host % size.ranks) as u32,
                host,
                rings: size.rings,
                epoch: AtomicU32::new(0),
                client: WorkerClient::new(channel(host, manager)),
            })
        };
        Self((0..size.jobs * size.ranks).map(rank).collect())
    }

    /// All join at once, after this many epochs.
    pub async fn join_all(&self, epoch: u32) -> Result<()> {
        self.all(move |rank| async move {
            let request = rank.join_request(epoch);
            let reply = rank.client.clone().join(request).await?.into_inner();
            ensure!(reply.ranks.len() > 1, "no other ranks");
            rank.epoch.store(reply.job.context("no job")?.epoch, Ordering::Relaxed);
            Ok(())
        })
        .await
    }

    /// Each sends one heartbeat, and learns that its job is active.
    pub async fn beat_all(&self, on_host_ring: bool) -> Result<()> {
        self.all(move |rank| async move {
            let reply = rank.beat(on_host_ring).await?;
            ensure!(reply.state() == api::JobState::Active, "{:?} {}", reply.state(), reply.error);
            Ok(())
        })
        .await
    }

    /// All send heartbeats every second.
    pub async fn live(self) {
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        loop {
            ticks.tick().await;
            let _ = self.all(|rank| async move { rank.beat(false).await.map(drop) }).await;
        }
    }

    async fn all<F: Future<Output = Result<()>> + Send + 'static>(
        &self,
        work: impl Fn(Arc<Rank>) -> F,
    ) -> Result<()> {
        let mut tasks = JoinSet::new();
        for rank in &self.0 {
            let (name, work) = (format!("rank {} of {}", rank.rank, rank.job), work(rank.clone()));
            tasks.spawn(async move { work.await.context(name) });
        }
        let all = async {
            while let Some(done) = tasks.join_next().await {
                done??;
            }
            Ok(())
        };
        tokio::time::timeout(JOIN, all).await.with_context(|| format!("not within {JOIN:?}"))?
    }
}

impl Rank {
    fn join_request(&self, epoch: u32) -> api::JoinRequest {
        let number = |n: usize| (1 + 2 * (self.rings + 1) * epoch as usize + n) as u32;
        let connection = |n: usize| api::Connection {
            receive_qpn: number(2 * n),
            send_qpn: number(2 * n + 1),
            first_psn: 1000,
        };
        let [_, _, _, _, high, low] = mac(self.host);
        let address = api::RankAddress {
            rank: self.rank,
            ip: format!("10.0.{high}.{low}"),
            mac: mac(self.host).map(|byte| format!("{byte:02x}")).join(":"),
            rings: (0..self.rings).map(connection).collect(),
            bypass: Some(connection(self.rings)),
            any_ip_id: false,
            selective: true,
            largest_mtu: 0,
            next_port: 4791,
            previous_port: 4791,
        };
        api::JoinRequest {
            job: self.job.clone(),
            token: TOKEN.into(),
            address: Some(address),
            epoch: epoch + 1,
            timeout_ms: JOIN.as_millis() as u32,
            protocol: PROTOCOL,
            release: RELEASE.into(),
            ranks: 0,
        }
    }

    async fn beat(&self, on_host_ring: bool) -> Result<api::HeartbeatReply> {
        let request = api::HeartbeatRequest {
            job: self.job.clone(),
            token: TOKEN.into(),
            rank: self.rank,
            epoch: self.epoch.load(Ordering::Relaxed),
            on_host_ring,
            acknowledged_path_test: 0,
            sealed: false,
            underflows: 0,
        };
        // Requests fail until the next manager listens.
        loop {
            match self.client.clone().heartbeat(request.clone()).await {
                Err(status) if status.code() == Code::Unavailable => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                answer => return Ok(answer?.into_inner()),
            }
        }
    }
}

/// A lazy connection from the host's own address.
fn channel(host: usize, manager: SocketAddr) -> Channel {
    let [_, _, _, _, high, low] = mac(host);
    let own = SocketAddr::from(([127, 1, high, low], 0));
    let connect = service_fn(move |_: Uri| async move {
        let socket = TcpSocket::new_v4()?;
        socket.bind(own)?;
        Ok::<_, io::Error>(TokioIo::new(socket.connect(manager).await?))
    });
    Endpoint::from_static("http://manager").connect_with_connector_lazy(connect)
}
