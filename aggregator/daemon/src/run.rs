//! `netsum run`.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use netsum_api::v1::admin_server::AdminServer;
use netsum_api::v1::worker_server::WorkerServer;
use netsum_core::{Controller, JobSpec, largest_mtu};
use netsum_dataplane::{Logger, online_cpus, speed};
use rtnetlink::MulticastGroup;
use socket2::Socket;
use tokio::io::unix::AsyncFd;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::{Server, ServerTlsConfig};

use super::admin::AdminService;
use super::chosen::Chosen;
use super::doorman::{Doorman, Limits};
use super::netlink::{Interface, Netlink};
use super::persist::{Begun, Wanted, begin, hold};
use super::reload::Reloader;
use super::rtnl::Changes;
use super::socket::{self, SocketFile};
use super::spread::Spreader;
use super::state::Shared;
use super::trains::{self, Trains};
use super::worker::{PortFinder, WorkerService};
use super::{
    device, diagnose, hops, in_band, lldp, manager, memory, metrics, neighbours, own, privileges,
    tls, uplinks,
};
use crate::config::Config;

/// Runs the daemon until a signal. SIGTERM and SIGINT end its jobs; SIGUSR1 leaves them to the next
/// daemon.
///
/// `path` is the configuration file, which SIGHUP reads again. `reset` removes everything left by
/// an earlier daemon, including its jobs. With `detach_now`, the programs leave the ports when this
/// daemon ends.
pub fn run(path: &Path, config: &Config, reset: bool, detach_now: bool) -> Result<()> {
    privileges::take_descriptors();
    // One thread does everything that needs privileges.
    let setup = Builder::new_current_thread().enable_all().build()?;
    let ready = setup.block_on(Ready::new(config, reset))?;
    drop(setup);
    privileges::give_up()?;
    Builder::new_multi_thread().enable_all().build()?.block_on(ready.run(path, config, detach_now))
}

/// A daemon that has opened everything it needs, but does not serve yet.
struct Ready {
    chosen: Chosen,
    /// The interfaces that are ports, and the numbers of the others.
    interfaces: Vec<Interface>,
    unfit: HashSet<u32>,
    begun: Begun,
    /// The jobs to create again.
    wanted: Option<(Wanted, Vec<JobSpec>)>,
    cpus: Vec<u32>,
    admin: std::os::unix::net::UnixListener,
    _file: SocketFile,
    workers: Option<(std::net::TcpListener, Option<ServerTlsConfig>)>,
    fabric: Option<(std::net::TcpListener, ServerTlsConfig)>,
    metrics: Option<std::net::TcpListener>,
    /// Without it, links are not found.
    lldp: Option<Socket>,
    /// Without it, links are not measured.
    trains: Option<Socket>,
}

impl Ready {
    async fn new(config: &Config, reset: bool) -> Result<Self> {
        let (chosen, interfaces) = Netlink::open()?.choose(&config.ports).await?;
        let tls =
            config.tls.as_ref().map(|files| tls::server_config("listen.tls", files)).transpose()?;
        // The lock comes first: of two daemons that start at once, the second changes nothing.
        let pins = hold(config)?;
        let admin = socket::listen(&config.admin, &config.admin_access)?;
        let _file = SocketFile::new(config.admin.clone());
        let workers = match config.workers {
            Some(address) => Some((listen("listen.workers", address).await?, tls)),
            None => None,
        };
        let fabric = match &config.fabric {
            Some(fabric) => Some((
                listen("listen.fabric.address", fabric.address).await?,
                tls::fabric_config(fabric)?,
            )),
            None => None,
        };
        let metrics = match config.metrics {
            Some(address) => Some(listen("metrics.listen", address).await?),
            None => None,
        };
        let cpus = if config.cpus.is_empty() { online_cpus()? } else { config.cpus.clone() };
        let mut controller =
            Controller::new(config.memory, cpus.len() as u32, config.heartbeat_timeout);
        controller.set_tenants(config.tenants.clone());
        let mut wanted = config.jobs.clone().map(Wanted::open).transpose()?;
        if let Some((_, jobs)) = wanted.as_mut().filter(|_| reset) {
            jobs.clear();
        }
        let mut begun = begin(config, pins, &cpus, &interfaces, reset, controller)?;
        let ports = begun.controller.ports();
        let (fit, unfit): (Vec<_>, Vec<_>) =
            interfaces.into_iter().partition(|l| ports.iter().any(|p| p.ifindex == l.ifindex));
        let (interfaces, unfit) = (fit, unfit.iter().map(|l| l.ifindex).collect());
        begun.adds = begun.adds.or_else(|| measure(&cpus, &interfaces));
        device::tell(&interfaces, &cpus);
        let lldp = lldp::open()
            .inspect_err(|e| log::warn!("{e:#}: a fabric's manager is not told of links"));
        let lldp = lldp.ok();
        let trains =
            trains::open().inspect_err(|e| log::warn!("{e:#}: links are not measured")).ok();
        Ok(Self {
            chosen,
            interfaces,
            unfit,
            begun,
            wanted,
            cpus,
            admin,
            _file,
            workers,
            fabric,
            metrics,
            lldp,
            trains,
        })
    }

    async fn run(self, path: &Path, config: &Config, detach_now: bool) -> Result<()> {
        let Begun { mut plane, spread, controller, actions, store, election, adds } = self.begun;
        let mut netlink = Netlink::open()?;
        if let Some(logger) = plane.take_logger() {
            tokio::spawn(forward_log(logger));
        }
        let shared = Shared::new(controller, Box::new(plane), config.heartbeat, config.patience);
        {
            let mut inner = shared.lock();
            memory::tell(&mut inner.controller);
            (inner.store, inner.election, inner.spread, inner.adds) =
                (store, election, spread, adds);
            inner.carry_out(None, actions).map_err(|e| anyhow::anyhow!("{}", e.message()))?;
            if let Some((wanted, jobs)) = self.wanted {
                inner.create_again(wanted, jobs);
            }
        }
        let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let changes = Changes::open(&groups).context("netlink")?;
        // Before ranks can connect.
        own::look(&shared, &netlink).await?;
        if let Some(socket) = self.lldp {
            let own = lldp::chassis_id().context("LLDP: a random chassis id")?;
            let heard = neighbours::Heard::new(&own);
            netlink.heard = Some(heard.clone());
            tokio::spawn(lldp::keep_talking(socket, shared.clone(), netlink.clone(), heard));
        }
        netlink.trains = self.trains.map(Trains::new);
        let names: Vec<&str> = self.interfaces.iter().map(|l| l.name.as_str()).collect();
        log::info!("ports {}; {} CPUs for rings", names.join(", "), self.cpus.len());
        log::info!("administration on {}", config.admin.display());
        let workers = match self.workers {
            Some((listener, tls)) => {
                log::info!(
                    "workers on {}, {}",
                    listener.local_addr()?,
                    tls::kind(config.tls.as_ref())
                );
                let listener = TcpListener::from_std(listener)?;
                Some(WorkerPort { listener, tls, limits: Limits::default() })
            }
            None => None,
        };
        if let Some((listener, tls)) = self.fabric {
            log::info!("the fabric's manager on {}", listener.local_addr()?);
            let listener = TcpListener::from_std(listener)?;
            tokio::spawn(serve_manager(shared.clone(), netlink.clone(), listener, tls));
        }
        if let Some(listener) = self.metrics {
            log::info!("metrics on http://{}/metrics", listener.local_addr()?);
            let listener = TcpListener::from_std(listener)?;
            tokio::spawn(metrics::serve(shared.clone(), Some(netlink.clone()), listener));
        }
        let admin = UnixListener::from_std(self.admin)?;

        let reloader = Reloader::new(
            path.to_owned(),
            config.clone(),
            self.chosen,
            self.unfit,
            shared.clone(),
            netlink.clone(),
            self.cpus,
        );
        let reloader = tokio::spawn(reloader.keep(signal(SignalKind::hangup())?));
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hand_over = signal(SignalKind::user_defined1())?;
        tokio::spawn(manager::keep_alive(shared.clone()));
        tokio::spawn(own::keep(shared.clone(), netlink.clone(), changes));
        tokio::spawn(hops::keep_hops(shared.clone(), netlink.clone()));
        if !config.spread.is_empty() {
            tokio::spawn(uplinks::keep(shared.clone(), netlink.clone()));
        }
        manager::ready();
        let ended = tokio::select! {
            result = serve(shared.clone(), Some(netlink.clone()), PortFinder::Bridge(netlink), admin, workers) => result,
            _ = terminate.recv() => {
                log::info!("SIGTERM: ending");
                Ok(())
            }
            _ = interrupt.recv() => {
                log::info!("SIGINT: ending");
                Ok(())
            }
            _ = hand_over.recv() => {
                let inner = shared.lock();
                if inner.store.is_some() {
                    // Requests complete, and write their changes, under this lock, so none is cut
                    // short when the runtime ends.
                    log::info!("SIGUSR1: ending; {} jobs go on, for the next daemon", inner.controller.jobs().count());
                    manager::stopping();
                    return Ok(());
                }
                log::info!("SIGUSR1: ending, with all jobs, because nothing is pinned");
                Ok(())
            }
        };
        manager::stopping();
        reloader.abort();
        let mut inner = shared.lock();
        if let Some(Err(e)) = inner.spread.take().map(Spreader::end) {
            log::error!("spread flows: {e:#}");
        }
        inner.end_all().unwrap_or_else(|e| log::error!("jobs: {e:#}"));
        let senders = inner.plane.ended_flows()?.len();
        if let Some(pin) =
            config.pin.as_ref().filter(|_| inner.store.is_some() && senders > 0 && !detach_now)
        {
            log::warn!(
                "{senders} connections may still be at work: the programs stay on the ports and \
                 drop their data, so that nobody takes it for a sum. The next `netsum run` takes \
                 them over; `rm -r {}` detaches them",
                pin.display()
            );
            return ended;
        }
        if senders > 0 {
            log::warn!(
                "detached: what {senders} connections may still send reaches its receivers unsummed"
            );
        }
        for ifindex in inner.plane.attached() {
            if let Err(e) = inner.plane.detach(ifindex) {
                log::error!("interface {ifindex}: {e:#}");
            }
        }
        if let Err(e) = inner.plane.unpin() {
            log::error!("pins: {e:#}");
        }
        if let Some(store) = inner.store.take() {
            store.remove().with_context(|| store.path().display().to_string())?;
        }
        ended
    }
}

/// Measures the aggregation rate of one of these CPUs, in bytes per second, with the default path
/// MTU of jobs.
fn measure(cpus: &[u32], interfaces: &[Interface]) -> Option<u64> {
    let mtu = largest_mtu(interfaces.iter().map(|l| l.mtu).min()?);
    let adds = speed::adds(mtu).inspect_err(|e| {
        log::warn!("how much this box adds could not be measured, and limits no plan: {e:#}")
    });
    let adds = adds.ok()?;
    log::info!(
        "adds {} MB/s with each of {} CPUs, at path MTU {mtu}",
        adds / 1_000_000,
        cpus.len()
    );
    Some(adds)
}

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
/// A manager needs more concurrent requests.
const MANAGER_STREAMS: u32 = 32;
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// A connection that does not answer a ping in this time is closed.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// Serves both services until one fails.
pub async fn serve(
    shared: Shared,
    netlink: Option<Netlink>,
    ports: PortFinder,
    admin: UnixListener,
    workers: Option<WorkerPort>,
) -> Result<()> {
    let time = tokio::spawn(shared.clone().keep_time());
    let watch = tokio::spawn(diagnose::keep_watch(shared.clone()));
    let listening = tokio::spawn(in_band::keep_listening(shared.clone()));
    let admin = Server::builder()
        .add_service(AdminServer::new(AdminService::new(shared.clone(), netlink, ports.clone())))
        .serve_with_incoming(accepted(UnixListenerStream::new(admin)));
    let result = match workers {
        Some(WorkerPort { listener, tls, limits }) => {
            let doorman = Doorman::new(limits);
            let connections = accepted(TcpListenerStream::new(listener))
                .filter_map(move |tcp| doorman.admit(tcp.ok()?).map(Ok::<_, io::Error>));
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
            let service = WorkerService::new(shared, ports);
            let workers = server
                .add_service(WorkerServer::new(service).max_decoding_message_size(MAX_MESSAGE))
                .serve_with_incoming(connections);
            tokio::try_join!(admin, workers).map(|_| ())
        }
        None => admin.await,
    };
    time.abort();
    watch.abort();
    listening.abort();
    result.context("the control API")
}

/// Accepted connections. If accepting fails, most likely for lack of descriptors, it pauses,
/// because the kernel offers the same connection again at once.
fn accepted<T>(
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

/// Serves administration to a fabric's manager.
pub async fn serve_manager(
    shared: Shared,
    netlink: Netlink,
    listener: TcpListener,
    tls: ServerTlsConfig,
) {
    let ports = PortFinder::Bridge(netlink.clone());
    let service = AdminServer::new(AdminService::new(shared, Some(netlink), ports));
    // A client that has passed the handshake may stay.
    let limits =
        Limits { connections: 64, per_address: 16, patience: FOREVER, ..Limits::default() };
    let doorman = Doorman::new(limits);
    let connections = accepted(TcpListenerStream::new(listener))
        .filter_map(move |tcp| tcp.ok().and_then(|tcp| doorman.admit(tcp)).map(Ok::<_, io::Error>));
    let served = async {
        let mut server = Server::builder()
            .max_concurrent_streams(MANAGER_STREAMS)
            .http2_max_header_list_size(MAX_HEADERS)
            .http2_keepalive_interval(Some(KEEP_ALIVE))
            .tls_config(tls)?;
        server.add_service(service).serve_with_incoming(connections).await
    };
    if let Err(e) = served.await {
        log::error!("listen.fabric: {e}: no manager can call any more");
    }
}

async fn listen(field: &str, address: std::net::SocketAddr) -> Result<std::net::TcpListener> {
    let listener = TcpListener::bind(address).await.map_err(|e| {
        let hint = match e.raw_os_error() {
            Some(libc::EAFNOSUPPORT) if address.is_ipv6() => "; this kernel has no IPv6",
            _ => "",
        };
        anyhow::Error::new(e).context(format!("{field} = \"{address}\": cannot listen{hint}"))
    });
    Ok(listener?.into_std()?)
}

/// Forwards the XDP programs' log to `log`.
async fn forward_log(logger: Logger) {
    // SAFETY: the logger owns its ring buffer's descriptor for as long as it lives, and always
    // returns the same one.
    let mut logger = match unsafe { AsyncFd::register(logger) } {
        Ok(logger) => logger,
        Err(e) => return log::warn!("the XDP programs' log cannot be read: {e}"),
    };
    loop {
        let result: io::Result<()> = async {
            let mut guard = logger.readable_mut().await?;
            guard.get_inner_mut().flush();
            guard.clear_ready();
            Ok(())
        }
        .await;
        if let Err(e) = result {
            return log::warn!("the XDP programs' log cannot be read: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_that_cannot_be_accepted_is_no_end_and_no_busy_loop() {
        let started = std::time::Instant::now();
        let none_left = || Err(io::Error::from_raw_os_error(libc::EMFILE));
        let mut connections =
            std::pin::pin!(accepted(tokio_stream::iter([none_left(), none_left(), Ok(1), Ok(2)])));
        assert_eq!(connections.next().await.unwrap().unwrap(), 1);
        assert!(started.elapsed() >= Duration::from_millis(200));
        assert_eq!(connections.next().await.unwrap().unwrap(), 2);
    }
}
