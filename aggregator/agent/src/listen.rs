//! Serves a box: workers, administrators, and the manager of its fabric.

use std::io;
use std::time::Duration;

use anyhow::Result;
use netsum_api::v1::agent_server::AgentServer;
use netsum_api::v1::jobs_server::JobsServer;
use netsum_controller::jobs::JobsService;
use netsum_controller::limiter::{ConnectionLimiter, Limits};
use netsum_controller::serve::{self, KEEP_ALIVE, MAX_HEADERS, WorkerPort, accepted};
use netsum_controller::tls::{Tls, server_config};
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::service::Routes;
use tonic::transport::{Server, ServerTlsConfig};

use super::agent::Shared;
use super::backend::BoxBackend;
use super::config::Fabric;
use super::network::Network;
use super::service::AgentService;
use super::{in_band, watch};

/// A manager needs more concurrent requests than a worker.
const MANAGER_STREAMS: u32 = 32;
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Serves workers and administrators until that fails, and watches the rings meanwhile.
pub async fn serve(
    shared: Shared,
    network: Network,
    admin: UnixListener,
    workers: Option<WorkerPort>,
) -> Result<()> {
    let watch = tokio::spawn(watch::run(shared.clone()));
    let listening = tokio::spawn(in_band::poll_first_packets(shared.clone()));
    let backend = BoxBackend::new(shared, network);
    let routes = Routes::new(AgentServer::new(AgentService::new(backend.clone())));
    let result = serve::serve(backend, routes, admin, workers).await;
    watch.abort();
    listening.abort();
    result
}

/// TLS for a fabric's manager, which must show a certificate.
///
/// # Errors
/// If a file cannot be read, or has no certificate or key.
pub fn manager_tls(fabric: &Fabric) -> Result<ServerTlsConfig> {
    let Fabric { cert, key, ca, .. } = fabric.clone();
    server_config("listen.fabric", &Tls { cert, key, client_ca: Some(ca) })
}

/// Serves administration to a fabric's manager.
pub async fn serve_manager(
    shared: Shared,
    network: Network,
    listener: TcpListener,
    tls: ServerTlsConfig,
) {
    let backend = BoxBackend::new(shared, network);
    // A client that has passed the handshake may stay.
    let limits = Limits { connections: 64, per_address: 16, timeout: FOREVER, ..Limits::default() };
    let limiter = ConnectionLimiter::new(limits);
    let connections = accepted(TcpListenerStream::new(listener))
        .filter_map(move |tcp| tcp.ok().and_then(|tcp| limiter.admit(tcp)).map(Ok::<_, io::Error>));
    let served = async {
        let mut server = Server::builder()
            .max_concurrent_streams(MANAGER_STREAMS)
            .http2_max_header_list_size(MAX_HEADERS)
            .http2_keepalive_interval(Some(KEEP_ALIVE))
            .tls_config(tls)?;
        server
            .add_service(JobsServer::new(JobsService::new(backend.clone())))
            .add_service(AgentServer::new(AgentService::new(backend)))
            .serve_with_incoming(connections)
            .await
    };
    if let Err(e) = served.await {
        log::error!("listen.fabric: {e}: managers can no longer connect");
    }
}
