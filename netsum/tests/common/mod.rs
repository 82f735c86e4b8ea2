//! A daemon whose services listen on real sockets, with a data plane that only records calls.
#![allow(dead_code, reason = "each test program uses a part of this")]

pub mod authority;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::Parser as _;
use netsum_agent::agent::{Agent, Shared};
use netsum_agent::listen::serve;
use netsum_agent::metrics;
use netsum_agent::network::Network;
use netsum_api::v1 as api;
use netsum_api::v1::worker_client::WorkerClient;
use netsum_cli::Cli;
use netsum_cli::failure::{Failure, Kind};
use netsum_controller::limiter::Limits;
use netsum_controller::serve::WorkerPort;
use netsum_controller::socket::{self, Access};
use netsum_core::watch::RingTimeouts;
use netsum_core::{Controller, PortInfo};
use netsum_lab::recorder::{RecordedState, Recorder};
use netsum_program::execute;
use tokio::net::TcpListener;
use tonic::transport::{Channel, ServerTlsConfig};

pub struct Daemon {
    pub folder: tempfile::TempDir,
    pub address: String,
    pub recorded: Arc<Mutex<RecordedState>>,
    pub shared: Shared,
    pub metrics: std::net::SocketAddr,
    metrics_task: tokio::task::JoinHandle<()>,
    task: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Daemon {
    pub async fn start() -> Self {
        Self::with(Limits::default(), None).await
    }

    pub async fn with(limits: Limits, tls: Option<ServerTlsConfig>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let recorded = Arc::new(Mutex::new(RecordedState::default()));
        let mut controller = Controller::new(8 << 20, 2, Duration::from_millis(600));
        let port =
            |i: u32| PortInfo { name: format!("p{i}"), ifindex: 10 + i, mtu: 1500, router: None };
        controller.set_ports((0..3).map(port).collect());
        let timeouts =
            RingTimeouts { hold: Duration::from_millis(200), stall: Duration::from_millis(300) };
        let agent = Agent::new(Box::new(Recorder(recorded.clone())), timeouts);
        let shared = Shared::new(controller, agent, Duration::from_millis(200));
        let admin = socket::listen(&folder.path().join("netsum.sock"), &Access::default()).unwrap();
        let admin = tokio::net::UnixListener::from_std(admin).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", tcp.local_addr().unwrap());
        let workers = WorkerPort { listener: tcp, tls, limits };
        let network = Network::Fixed(Arc::new(|_| Some(10)));
        let task = tokio::spawn(serve(shared.clone(), network.clone(), admin, Some(workers)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let metrics = listener.local_addr().unwrap();
        let metrics_task = tokio::spawn(metrics::serve(shared.clone(), network, listener));
        Self { folder, address, recorded, shared, metrics, metrics_task, task }
    }

    /// Runs a command line; returns its output, or its error.
    pub async fn netsum(&self, line: &str) -> Result<String, String> {
        let (out, result) = self.netsum_both(line).await;
        result.map(|()| out).map_err(|e| e.message)
    }

    /// Runs a command line; returns its output, and whether it failed.
    pub async fn netsum_both(&self, line: &str) -> (String, Result<(), Failure>) {
        netsum_at(&self.folder.path().join("netsum.sock"), line).await
    }

    pub async fn worker(&self) -> WorkerClient<Channel> {
        WorkerClient::connect(self.address.clone()).await.unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.task.abort();
        self.metrics_task.abort();
    }
}

/// Runs a command line at a socket; returns its output, and whether it failed.
pub async fn netsum_at(socket: &Path, line: &str) -> (String, Result<(), Failure>) {
    let words =
        ["netsum", "--socket", socket.to_str().unwrap()].into_iter().chain(line.split_whitespace());
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        Err(e) => return (String::new(), Err(Failure::new(Kind::Usage, e.to_string()))),
    };
    let mut out = anstream::StripStream::new(Vec::new());
    let result = execute(cli, &mut out).await;
    (String::from_utf8(out.into_inner()).unwrap(), result)
}

pub fn join(rank: u32, token: &str, timeout_ms: u32) -> api::JoinRequest {
    let c = |n: u32| api::Connection {
        receive_qpn: 16 * rank + n,
        send_qpn: 16 * rank + n + 1,
        first_psn: 7,
    };
    let address = api::RankAddress {
        rank,
        ip: format!("10.0.0.{}", rank + 1),
        mac: format!("02:00:00:00:00:0{}", rank + 1),
        rings: vec![c(2)],
        bypass: Some(c(8)),
        any_ip_id: false,
        selective: true,
        largest_mtu: 0,
        next_port: 4791,
        previous_port: 4791,
    };
    api::JoinRequest {
        job: "train".into(),
        token: token.into(),
        address: Some(address),
        epoch: 0,
        timeout_ms,
        protocol: netsum_api::PROTOCOL,
        release: netsum_api::RELEASE.into(),
        ranks: 0,
    }
}
