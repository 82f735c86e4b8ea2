//! The metrics port: what `netsum stats`, `ring` and `port` show, for Prometheus, over HTTP on a
//! loopback address.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`gather`](mod@gather) | reads the daemon's state, a ring at a time |
//! | [`families`] | metrics by name, with units and labels; pure. [`tenants`]: those of tenants |
//! | `family` | the building blocks of metrics |

pub mod families;
mod family;
pub mod gather;
pub mod tenants;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::agent::Shared;
use super::network::Network;

/// Connections open at once. Further ones are closed immediately.
const CONNECTIONS: usize = 16;
/// Longest time for a request's headers.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time of a connection.
const LONGEST: Duration = Duration::from_secs(300);
/// Bytes of a request's headers.
const MAX_HEADERS: usize = 16 << 10;
/// <https://github.com/prometheus/OpenMetrics/blob/v1.0.0/specification/OpenMetrics.md>,
/// "Content Type".
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answers scrapes for as long as the daemon lives.
pub async fn serve(shared: Shared, network: Network, listener: TcpListener) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let tcp = match listener.accept().await {
            Ok((tcp, _)) => tcp,
            Err(e) => {
                // Most likely the process is out of descriptors, which will be freed.
                log::warn!("metrics: cannot accept a connection: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        let (shared, network) = (shared.clone(), network.clone());
        tokio::spawn(async move {
            let _place = place;
            let talk = tokio::time::timeout(LONGEST, converse(tcp, shared, network));
            if let Ok(Err(e)) = talk.await {
                log::debug!("metrics: {e}");
            }
        });
    }
}

async fn converse(tcp: TcpStream, shared: Shared, network: Network) -> hyper::Result<()> {
    let service = service_fn(move |request: Request<Incoming>| {
        let (shared, network) = (shared.clone(), network.clone());
        async move { Ok::<_, Infallible>(answer(request, &shared, &network).await) }
    });
    hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(TIMEOUT)
        .max_buf_size(MAX_HEADERS)
        .serve_connection(TokioIo::new(tcp), service)
        .await
}

async fn answer(
    request: Request<Incoming>,
    shared: &Shared,
    network: &Network,
) -> Response<Full<Bytes>> {
    let plain = "text/plain; charset=utf-8";
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => {
            let text = match gather::gather(shared, network).await {
                Ok(snapshot) => families::text(snapshot).map_err(anyhow::Error::from),
                Err(e) => Err(e),
            };
            match text {
                Ok(text) => (StatusCode::OK, OPEN_METRICS, text),
                Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, plain, format!("{e:#}\n")),
            }
        }
        (&Method::GET | &Method::HEAD, "/") => {
            (StatusCode::OK, plain, "netsum: metrics are at /metrics\n".into())
        }
        (&Method::GET | &Method::HEAD, _) => {
            (StatusCode::NOT_FOUND, plain, "metrics are at /metrics\n".into())
        }
        _ => (StatusCode::METHOD_NOT_ALLOWED, plain, "use GET or HEAD\n".into()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    if status == StatusCode::METHOD_NOT_ALLOWED {
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    response
}
