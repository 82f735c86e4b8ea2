//! `netsum fabric run`.

use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow, ensure};
use netsum_api::v1::manager_server::ManagerServer;
use netsum_controller::limiter::Limits;
use netsum_controller::serve::{WorkerPort, serve};
use netsum_controller::socket::{self, Access, SocketFile};
use netsum_controller::state::HEARTBEAT;
use netsum_controller::store::Store;
use netsum_controller::tls;
use netsum_core::Controller;
use netsum_core::saved::Saved;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::service::Routes;

use crate::boxes::{Boxes, ports};
use crate::config::Config;
use crate::dispatch::Dispatcher;
use crate::etcd::{Leadership, lead};
use crate::orders::{Orders, Shared};
use crate::service::ManagerBackend;

/// A job fails if none of its ranks has sent a heartbeat for this long. It is shorter than at a
/// box: rings at several boxes wait for it.
const DEAD: Duration = Duration::from_secs(10);
/// Timeout for giving the lease back.
const LEAVE: Duration = Duration::from_secs(3);
/// The boxes manage memory and CPUs: they refuse jobs that do not fit.
const MEMORY: u64 = 1 << 40;
const CPUS: u32 = 64;

/// Runs the manager until SIGTERM or SIGINT. Jobs continue without it, and the next one takes them
/// over.
///
/// # Errors
/// If it cannot listen, or cannot read the state of the last one.
#[tokio::main]
pub async fn run(config: &Config) -> Result<()> {
    netsum_controller::serve::raise_descriptor_limit();
    let boxes = Arc::new(Boxes::new(config)?);
    let mut controller = Controller::new(MEMORY, CPUS, DEAD);
    let (saved, store, leading) = state(config).await?;
    let election = next_election(saved.election);
    // Boxes may be silent for longer than the lease lasts: it is renewed from here on.
    let mut leading = match leading {
        Some((mut leading, states)) => {
            leading.write(serde_json::to_string(&Saved { election, ..saved.clone() })?).await?;
            Some(tokio::spawn(leading.keep(states)))
        }
        None => None,
    };
    boxes.set_election(election);
    boxes.restore_port_numbers(&saved.ports);
    boxes.restore_found_links(&saved.found);
    boxes.restore_accepted(&saved.accepted);
    boxes.restore_measured(&saved.measured);
    // This finds the links that active jobs use.
    let seen = boxes.poll().await;
    for (name, reason) in &saved.drained {
        boxes.drain(name, Some(reason.clone())).unwrap_or_else(|e| log::warn!("{e}"));
    }
    controller.set_ports(saved.ports.clone());
    let actions = controller.restore(saved, Instant::now(), |_| None).map_err(|e| anyhow!(e))?;
    controller.set_ports(ports(&seen, controller.ports()));
    let (orders, changes) = Orders::new(boxes.clone());
    let shared = Shared::new(controller, orders, HEARTBEAT);
    let dispatcher =
        Dispatcher::new(shared.clone(), boxes.clone(), &seen).reserving_own_addresses();
    {
        let mut inner = shared.lock();
        (inner.store, inner.election) = (Some(store), election);
        inner.carry_out(None, actions).map_err(|e| anyhow!("{}", e.message()))?;
        let has_unsaved = inner.store.as_ref().is_some_and(Store::has_unsaved);
        ensure!(
            !has_unsaved,
            "{}: the number of this election cannot be written",
            config.state.display()
        );
        let jobs = inner.controller.jobs().count();
        log::info!(
            "{} boxes, {} links; {jobs} jobs taken over; election {election}",
            config.boxes.len(),
            config.links.len()
        );
    }
    let admin = UnixListener::from_std(socket::listen(&config.admin, &Access::default())?)?;
    let _file = SocketFile::new(config.admin.clone());
    let tls = config
        .workers_tls
        .as_ref()
        .map(|files| tls::server_config("workers-tls", files))
        .transpose()?;
    let listener = TcpListener::bind(config.workers).await;
    let listener =
        listener.with_context(|| format!("workers = \"{}\": cannot listen", config.workers))?;
    let kind = tls::kind(config.workers_tls.as_ref());
    log::info!(
        "workers on {}, {kind}; administration on {}",
        config.workers,
        config.admin.display()
    );
    let workers = WorkerPort { listener, tls, limits: Limits::default() };
    let backend = ManagerBackend::new(shared.clone(), boxes);
    let routes = Routes::new(ManagerServer::new(backend.clone()));
    let mut programming = tokio::spawn(dispatcher.run(changes));
    let (mut terminate, mut interrupt) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let led = async {
        match &mut leading {
            Some(leading) => leading.await,
            None => pending().await,
        }
    };
    let ended = tokio::select! {
        result = serve(backend, routes, admin, Some(workers)) => result,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        why = led => Err(anyhow!(why?)),
        why = &mut programming => Err(anyhow!(why?)),
    };
    // No orders and no writes follow: the next one may lead.
    programming.abort();
    shared.lock().store = None;
    if let Some(leading) = leading.filter(|leading| !leading.is_finished()) {
        drop(timeout(LEAVE, leading).await);
    }
    log::info!("ending; jobs continue for the next manager");
    ended
}

type Kept = (Saved, Store, Option<(Leadership, watch::Receiver<String>)>);

/// The last manager's state, and where this one keeps its own. With etcd, returns once it leads.
async fn state(config: &Config) -> Result<Kept> {
    let Some(etcd) = &config.etcd else {
        let store = Store::new(config.state.clone());
        let saved = store.read().with_context(|| config.state.display().to_string())?;
        return Ok((saved.unwrap_or_default(), store, None));
    };
    let leading = lead(etcd, &me(config)).await?;
    let saved = leading.state.as_deref().map(serde_json::from_str).transpose();
    let saved = saved.with_context(|| format!("etcd: {}/state", etcd.prefix))?.unwrap_or_default();
    let (keeper, states) = watch::channel(String::new());
    Ok((saved, Store::forwarding_to(keeper), Some((leading, states))))
}

/// This manager's description for others.
fn me(config: &Config) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}, process {}, workers on {}", host.trim(), std::process::id(), config.workers)
}

/// The election of a new manager: larger than the last known one, and than those whose state is
/// lost or elsewhere.
fn next_election(last: u64) -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    (now.as_millis() as u64).max(last.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_election_is_higher_than_all_before_it() {
        let first = next_election(0);
        assert!(first > 1_700_000_000_000, "{first}");
        assert_eq!(next_election(first + 1_000_000), first + 1_000_001);
        assert!(next_election(u64::MAX) == u64::MAX, "a box has lied");
    }
}
