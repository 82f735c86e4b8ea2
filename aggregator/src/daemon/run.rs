//! `netsum run`.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use netsum_api::v1::admin_server::AdminServer;
use netsum_api::v1::worker_server::WorkerServer;
use tokio::io::unix::AsyncFd;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::transport::Server;

use super::admin::AdminService;
use super::diagnose;
use super::links::{Link, Netlink};
use super::persist::{Begun, begin};
use super::state::Shared;
use super::worker::{PortFinder, WorkerService};
use crate::config::Config;
use crate::core::{Controller, PortInfo};
use crate::dataplane::bpf::Logger;

/// Removes a socket's file when the daemon ends.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Runs the daemon until SIGTERM or SIGINT.
///
/// `reset` drops what a daemon that was killed has left.
pub async fn run(config: Config, reset: bool) -> Result<()> {
    let netlink = Netlink::open()?;
    let links = netlink.resolve(&config.ports).await?;
    let admin = listen_unix(&config.admin).await?;
    let _file = SocketFile(config.admin.clone());
    let workers = match config.workers {
        Some(address) => Some(
            TcpListener::bind(address)
                .await
                .with_context(|| format!("listen.workers = \"{address}\": cannot listen"))?,
        ),
        None => None,
    };
    let cpus = if config.cpus.is_empty() { online_cpus()? } else { config.cpus.clone() };
    let mut controller = Controller::new(config.memory, cpus.len() as u32, config.heartbeat_timeout);
    controller.set_ports(links.iter().map(port_info).collect());
    let Begun { mut plane, controller, actions, store } = begin(&config, &cpus, &links, reset, controller)?;
    if let Some(logger) = plane.take_logger() {
        tokio::spawn(forward_log(logger));
    }
    let shared = Shared::new(controller, Box::new(plane), config.heartbeat, config.patience);
    {
        let mut inner = shared.lock();
        inner.store = store;
        inner.carry_out(None, actions).map_err(|e| anyhow::anyhow!("{}", e.message()))?;
    }
    let names: Vec<&str> = links.iter().map(|l| l.name.as_str()).collect();
    log::info!("ports {}; {} CPUs for rings", names.join(", "), cpus.len());
    log::info!("administration on {}", config.admin.display());
    if let Some(address) = config.workers {
        log::info!("workers on {address}");
    }

    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let ended = tokio::select! {
        result = serve(shared.clone(), Some(netlink.clone()), PortFinder::Bridge(netlink), admin, workers) => result,
        _ = terminate.recv() => {
            log::info!("SIGTERM: detaching");
            Ok(())
        }
        _ = interrupt.recv() => {
            log::info!("SIGINT: detaching");
            Ok(())
        }
    };
    let mut inner = shared.lock();
    for link in &links {
        if let Err(e) = inner.plane.detach(link.ifindex) {
            log::error!("port {}: {e:#}", link.name);
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

/// Serves both services until one fails.
pub async fn serve(
    shared: Shared,
    netlink: Option<Netlink>,
    ports: PortFinder,
    admin: UnixListener,
    workers: Option<TcpListener>,
) -> Result<()> {
    let time = tokio::spawn(shared.clone().keep_time());
    let watch = tokio::spawn(diagnose::keep_watch(shared.clone()));
    let admin = Server::builder()
        .add_service(AdminServer::new(AdminService::new(shared.clone(), netlink)))
        .serve_with_incoming(UnixListenerStream::new(admin));
    let result = match workers {
        Some(listener) => {
            let workers = Server::builder()
                .tcp_nodelay(true)
                .add_service(WorkerServer::new(WorkerService::new(shared, ports)))
                .serve_with_incoming(TcpListenerStream::new(listener));
            tokio::try_join!(admin, workers).map(|_| ())
        }
        None => admin.await,
    };
    time.abort();
    watch.abort();
    result.context("the control API")
}

/// Listens on a Unix socket for this user alone. A socket that a killed daemon has left is replaced.
pub async fn listen_unix(path: &Path) -> Result<UnixListener> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("listen.admin: cannot make {}", folder.display()))?;
    }
    if path.exists() {
        if UnixStream::connect(path).await.is_ok() {
            bail!("listen.admin = {path:?}: another `netsum run` listens there already");
        }
        std::fs::remove_file(path).with_context(|| format!("listen.admin = {path:?}: cannot be replaced"))?;
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("listen.admin = {path:?}: cannot listen"))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn port_info(link: &Link) -> PortInfo {
    PortInfo { name: link.name.clone(), ifindex: link.ifindex, mtu: link.mtu }
}

fn online_cpus() -> Result<Vec<u32>> {
    aya::util::online_cpus().map_err(|(what, e)| anyhow::anyhow!("{what}: {e}"))
}

/// Hands the XDP programs' log on to `log`.
async fn forward_log(logger: Logger) {
    // SAFETY: the logger owns its ring buffer's descriptor for as long as it lives, and always names the same one.
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
