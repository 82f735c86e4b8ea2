//! Connections to boxes.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use hyper_util::rt::TokioIo;
use netsum_api::ELECTION;
use netsum_api::tls::{authority, identity};
use netsum_api::v1::agent_client::AgentClient;
use netsum_api::v1::jobs_client::JobsClient;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint, Uri};
use tonic::{Request, Status};
use tower::service_fn;

use crate::config::{BoxConfig, Tls};

/// Timeout of a request.
pub const TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of a connection attempt: a running box accepts at once. It is shorter than [`TIMEOUT`],
/// which distinguishes an unreachable box from a slow one.
pub const CONNECT: Duration = Duration::from_secs(1);
/// Timeout of an order: the rings of a large job take longer.
pub const ORDERS: Duration = Duration::from_secs(30);

/// A connection whose requests carry the manager's election.
type Connection = InterceptedService<Channel, Election>;

/// A box.
#[derive(Clone)]
pub struct Client {
    pub jobs: JobsClient<Connection>,
    pub agent: AgentClient<Connection>,
}

/// Adds the manager's election to all requests to a box, once there is one.
#[derive(Clone, Default)]
pub struct Election(Arc<AtomicU64>);

impl Election {
    pub fn set(&self, number: u64) {
        self.0.store(number, Ordering::Relaxed);
    }

    /// The election's number; 0 before there is one.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Interceptor for Election {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let number = self.get();
        if number > 0 {
            request.metadata_mut().insert(ELECTION, number.into());
        }
        Ok(request)
    }
}

/// Connects on first use.
///
/// # Errors
/// If a certificate, key or address cannot be used.
pub fn connect(b: &BoxConfig, tls: Option<&Tls>, election: Election) -> Result<Client> {
    let connection = InterceptedService::new(channel(b, tls)?, election);
    Ok(Client { jobs: JobsClient::new(connection.clone()), agent: AgentClient::new(connection) })
}

fn channel(b: &BoxConfig, tls: Option<&Tls>) -> Result<Channel> {
    if let Some(path) = b.address.strip_prefix("unix:") {
        let path = PathBuf::from(path);
        let connect = service_fn(move |_: Uri| {
            let path = path.clone();
            async move { Ok::<_, io::Error>(TokioIo::new(tokio::net::UnixStream::connect(path).await?)) }
        });
        let endpoint = Endpoint::from_static("http://netsum").timeout(ORDERS);
        return Ok(endpoint.connect_with_connector_lazy(connect));
    }
    let tls = tls.context("[tls] is missing")?;
    let config = ClientTlsConfig::new()
        .identity(identity(&tls.cert, &tls.key)?)
        .ca_certificate(authority(&tls.ca)?);
    let endpoint = Endpoint::from_shared(b.address.clone())?
        .timeout(ORDERS)
        .connect_timeout(CONNECT)
        // A machine that loses its power does not close its connections.
        .http2_keep_alive_interval(TIMEOUT)
        .keep_alive_timeout(TIMEOUT)
        .keep_alive_while_idle(true);
    // Without a timeout, a box that hangs would block all orders.
    Ok(endpoint.tls_config(config.timeout(CONNECT))?.connect_lazy())
}
