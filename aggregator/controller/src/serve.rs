//! Serves workers and administration.

use std::io;
use std::time::Duration;

use anyhow::{Context, Result};
use netsum_api::v1::jobs_server::JobsServer;
use netsum_api::v1::worker_server::WorkerServer;
use netsum_core::Rank;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::service::Routes;
use tonic::transport::{Server, ServerTlsConfig};

use super::backend::Backend;
use super::jobs::JobsService;
use super::limiter::{ConnectionLimiter, Limits, RankEpoch};
use super::worker::WorkerService;

/// The port for workers.
pub struct WorkerPort {
    pub listener: TcpListener,
    /// TLS; cleartext if `None`.
    pub tls: Option<ServerTlsConfig>,
    /// Limits for connections without a token.
    pub limits: Limits,
}

/// Longest message that a worker needs to send; 255 rings take about 5 KB.
pub const MAX_MESSAGE: usize = 16 << 10;
/// Concurrent requests per connection, and bytes of their headers.
pub const MAX_STREAMS: u32 = 8;
pub const MAX_HEADERS: u32 = 16 << 10;
/// Bytes of all unread requests of a connection, and of one frame: the minima of HTTP/2 (RFC 9113,
/// 6.9.2 and 4.2).
pub const MAX_WINDOW: u32 = (1 << 16) - 1;
pub const MAX_FRAME: u32 = 1 << 14;
/// A connection that does not answer a ping in this time is closed.
pub const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// Raises the soft limit of file descriptors: a ring takes three, or seven while it is created; a
/// connection takes one.
pub fn raise_descriptor_limit() {
    let limit = Resource::RLIMIT_NOFILE;
    let raised = getrlimit(limit).and_then(|(_, hard)| setrlimit(limit, hard, hard));
    raised.unwrap_or_else(|e| log::warn!("cannot raise the limit of file descriptors: {e}"));
}

/// Serves workers and administration until one fails. `routes` has the services of administration
/// besides that for jobs.
pub async fn serve<B: Backend>(
    backend: B,
    routes: Routes,
    admin: UnixListener,
    workers: Option<WorkerPort>,
) -> Result<()> {
    let time = tokio::spawn(backend.shared().clone().run_ticks());
    let admin = Server::builder()
        .add_routes(routes.add_service(JobsServer::new(JobsService::new(backend.clone()))))
        .serve_with_incoming(accepted(UnixListenerStream::new(admin)));
    let result = match workers {
        Some(WorkerPort { listener, tls, limits }) => {
            let (sender, mut disconnected) = mpsc::unbounded_channel();
            let limiter = ConnectionLimiter::new(limits).reporting(sender);
            let shared = backend.shared().clone();
            tokio::spawn(async move {
                while let Some((RankEpoch { job, rank, epoch }, at)) = disconnected.recv().await {
                    let mut inner = shared.lock();
                    inner.controller.disconnected(&job, Rank(rank), epoch, at);
                }
            });
            let connections = accepted(TcpListenerStream::new(listener))
                .filter_map(move |tcp| limiter.admit(tcp.ok()?).map(Ok::<_, io::Error>));
            let mut server = Server::builder()
                .max_concurrent_streams(MAX_STREAMS)
                .initial_stream_window_size(MAX_WINDOW)
                .initial_connection_window_size(MAX_WINDOW)
                .max_frame_size(MAX_FRAME)
                .http2_max_header_list_size(MAX_HEADERS)
                .http2_keepalive_interval(Some(KEEP_ALIVE))
                .http2_keepalive_timeout(Some(KEEP_ALIVE));
            if let Some(tls) = tls {
                server = server.tls_config(tls).context("listen.tls")?;
            }
            let service = WorkerService::new(backend);
            let workers = server
                .add_service(WorkerServer::new(service).max_decoding_message_size(MAX_MESSAGE))
                .serve_with_incoming(connections);
            tokio::try_join!(admin, workers).map(|_| ())
        }
        None => admin.await,
    };
    time.abort();
    result.context("the control API")
}

/// Accepted connections. If accepting fails, most likely for lack of descriptors, it pauses,
/// because the kernel offers the same connection again at once.
pub fn accepted<T>(
    connections: impl Stream<Item = io::Result<T>>,
) -> impl Stream<Item = io::Result<T>> {
    let wait = async |connection: io::Result<T>| {
        if let Err(e) = &connection {
            log::warn!("a connection cannot be accepted: {e}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        connection
    };
    connections.then(wait).filter(Result::is_ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn accept_errors_neither_stop_the_server_nor_spin() {
        let started = std::time::Instant::now();
        let none_left = || Err(io::Error::from_raw_os_error(nix::libc::EMFILE));
        let mut connections =
            std::pin::pin!(accepted(tokio_stream::iter([none_left(), none_left(), Ok(1), Ok(2)])));
        assert_eq!(connections.next().await.unwrap().unwrap(), 1);
        assert!(started.elapsed() >= Duration::from_millis(200));
        assert_eq!(connections.next().await.unwrap().unwrap(), 2);
    }
}
