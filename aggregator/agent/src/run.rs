//! `netsum run`.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use anyhow::{Context, Result};
use netsum_controller::limiter::Limits;
use netsum_controller::serve::{WorkerPort, raise_descriptor_limit};
use netsum_controller::socket::{self, SocketFile};
use netsum_controller::store::JobFile;
use netsum_controller::tls;
use netsum_core::{Controller, JobSpec, largest_mtu};
use netsum_dataplane::{Logger, aggregation_rate, online_cpus};
use rtnetlink::MulticastGroup;
use socket2::Socket;
use tokio::io::unix::AsyncFd;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tonic::transport::ServerTlsConfig;

use super::agent::{Agent, Shared};
use super::bandwidth_probes::{self, BandwidthProbes};
use super::link::Interface;
use super::listen::{manager_tls, serve, serve_manager};
use super::netlink::Netlink;
use super::network::Network;
use super::port_selection::PortSelection;
use super::reload::Reloader;
use super::rtnl::Changes;
use super::spread::Spreader;
use super::startup::{Startup, begin, hold};
use super::{
    device, hops, lldp, memory, metrics, neighbours, own_addresses, privileges, spread_uplinks,
    systemd,
};
use crate::config::Config;

/// Runs the daemon until a signal. SIGTERM and SIGINT end its jobs; SIGUSR1 leaves them to the next
/// daemon.
///
/// `path` is the configuration file, which SIGHUP reads again. `reset` removes everything left by
/// an earlier daemon, including its jobs. With `detach_now`, the programs leave the ports when this
/// daemon ends.
pub fn run(path: &Path, config: &Config, reset: bool, detach_now: bool) -> Result<()> {
    raise_descriptor_limit();
    // One thread does everything that needs privileges.
    let setup = Builder::new_current_thread().enable_all().build()?;
    let ready = setup.block_on(Ready::new(config, reset))?;
    drop(setup);
    privileges::drop_capabilities()?;
    Builder::new_multi_thread().enable_all().build()?.block_on(ready.run(path, config, detach_now))
}

/// A daemon that has opened everything it needs, but does not serve yet.
struct Ready {
    chosen: PortSelection,
    /// The interfaces that are ports, and the numbers of the others.
    interfaces: Vec<Interface>,
    unfit: HashSet<u32>,
    begun: Startup,
    /// The jobs to create again.
    job_file: Option<(JobFile, Vec<JobSpec>)>,
    cpus: Vec<u32>,
    admin: std::os::unix::net::UnixListener,
    _file: SocketFile,
    workers: Option<(std::net::TcpListener, Option<ServerTlsConfig>)>,
    fabric: Option<(std::net::TcpListener, ServerTlsConfig)>,
    metrics: Option<std::net::TcpListener>,
    /// Without it, links are not found.
    lldp: Option<Socket>,
    /// Without it, links are not measured.
    bandwidth_probes: Option<Socket>,
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
            Some(fabric) => {
                Some((listen("listen.fabric.address", fabric.address).await?, manager_tls(fabric)?))
            }
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
        let mut job_file = config.jobs.clone().map(JobFile::open).transpose()?;
        if let Some((_, jobs)) = job_file.as_mut().filter(|_| reset) {
            jobs.clear();
        }
        let mut begun = begin(config, pins, &cpus, &interfaces, reset, controller)?;
        let ports = begun.controller.ports();
        let (fit, unfit): (Vec<_>, Vec<_>) =
            interfaces.into_iter().partition(|l| ports.iter().any(|p| p.ifindex == l.ifindex));
        let (interfaces, unfit) = (fit, unfit.iter().map(|l| l.ifindex).collect());
        begun.aggregation_rate = begun.aggregation_rate.or_else(|| measure(&cpus, &interfaces));
        device::log_defects(&interfaces, &cpus);
        let lldp = lldp::open()
            .inspect_err(|e| log::warn!("{e:#}: a fabric's manager cannot find this box's links"));
        let lldp = lldp.ok();
        let bandwidth_probes = bandwidth_probes::open()
            .inspect_err(|e| log::warn!("{e:#}: links cannot be measured"))
            .ok();
        Ok(Self {
            chosen,
            interfaces,
            unfit,
            begun,
            job_file,
            cpus,
            admin,
            _file,
            workers,
            fabric,
            metrics,
            lldp,
            bandwidth_probes,
        })
    }

    async fn run(self, path: &Path, config: &Config, detach_now: bool) -> Result<()> {
        let Startup { mut plane, spread, controller, actions, store, election, aggregation_rate } =
            self.begun;
        let mut netlink = Netlink::open()?;
        if let Some(logger) = plane.take_logger() {
            tokio::spawn(forward_log(logger));
        }
        let agent = Agent::new(Box::new(plane), config.timeouts);
        let shared = Shared::new(controller, agent, config.heartbeat);
        {
            let mut inner = shared.lock();
            memory::update_and_warn(&mut inner.controller);
            (inner.store, inner.election) = (store, election);
            (inner.executor.spread, inner.executor.aggregation_rate) = (spread, aggregation_rate);
            inner.carry_out(None, actions).map_err(|e| anyhow::anyhow!("{}", e.message()))?;
            if let Some((job_file, jobs)) = self.job_file {
                inner.recreate_jobs(job_file, jobs);
            }
        }
        let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let changes = Changes::open(&groups).context("netlink")?;
        // Before ranks can connect.
        own_addresses::update(&shared, &netlink).await?;
        if let Some(socket) = self.lldp {
            let own = lldp::chassis_id().context("LLDP: a random chassis id")?;
            let neighbours = neighbours::LldpNeighbours::new(&own);
            netlink.lldp = Some(neighbours.clone());
            tokio::spawn(lldp::send_and_receive(
                socket,
                shared.clone(),
                netlink.clone(),
                neighbours,
            ));
        }
        netlink.bandwidth_probes = self.bandwidth_probes.map(BandwidthProbes::new);
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
        let network = Network::Kernel(netlink.clone());
        if let Some((listener, tls)) = self.fabric {
            log::info!("port for the fabric's manager: {}", listener.local_addr()?);
            let listener = TcpListener::from_std(listener)?;
            tokio::spawn(serve_manager(shared.clone(), network.clone(), listener, tls));
        }
        if let Some(listener) = self.metrics {
            log::info!("metrics on http://{}/metrics", listener.local_addr()?);
            let listener = TcpListener::from_std(listener)?;
            tokio::spawn(metrics::serve(shared.clone(), network.clone(), listener));
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
        let reloader = tokio::spawn(reloader.run(signal(SignalKind::hangup())?));
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hand_over = signal(SignalKind::user_defined1())?;
        tokio::spawn(systemd::keep_alive(shared.clone()));
        tokio::spawn(own_addresses::follow(shared.clone(), netlink.clone(), changes));
        tokio::spawn(hops::update_next_hops(shared.clone(), netlink.clone()));
        if !config.spread.is_empty() {
            tokio::spawn(spread_uplinks::follow(shared.clone(), netlink.clone()));
        }
        systemd::ready();
        let ended = tokio::select! {
            result = serve(shared.clone(), network, admin, workers) => result,
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
                    log::info!("SIGUSR1: ending; {} jobs continue, and the next daemon takes them \
                                over", inner.controller.jobs().count());
                    systemd::stopping();
                    return Ok(());
                }
                log::info!("SIGUSR1: ending all jobs, because nothing is pinned");
                Ok(())
            }
        };
        systemd::stopping();
        reloader.abort();
        let mut inner = shared.lock();
        if let Some(Err(e)) = inner.executor.spread.take().map(Spreader::stop) {
            log::error!("cannot stop spreading flows: {e:#}");
        }
        inner.end_all().unwrap_or_else(|e| log::error!("cannot end the jobs: {e:#}"));
        let senders = inner.executor.plane.ended_flows()?.len();
        if let Some(pin) =
            config.pin.as_ref().filter(|_| inner.store.is_some() && senders > 0 && !detach_now)
        {
            log::warn!(
                "{senders} connections may still send: the programs stay on the ports and drop \
                 their data, which a receiver could take for a sum. The next `netsum run` takes \
                 them over; `rm -r {}` detaches them",
                pin.display()
            );
            return ended;
        }
        if senders > 0 {
            log::warn!(
                "programs detached: data of up to {senders} connections now reaches its receivers \
                 unsummed"
            );
        }
        for ifindex in inner.executor.plane.attached() {
            if let Err(e) = inner.executor.plane.detach(ifindex) {
                log::error!("interface {ifindex}: cannot detach the programs: {e:#}");
            }
        }
        if let Err(e) = inner.executor.plane.unpin() {
            log::error!("cannot remove the pins: {e:#}");
        }
        if let Some(store) = inner.store.take() {
            store.remove().with_context(|| store.path().display().to_string())?;
        }
        ended
    }
}

/// Measures the aggregation rate of one of these CPUs, in bytes per second, at the largest path MTU
/// that the ports carry.
fn measure(cpus: &[u32], interfaces: &[Interface]) -> Option<u64> {
    let mtu = largest_mtu(interfaces.iter().map(|l| l.mtu).min()?);
    let rate = aggregation_rate::measure(mtu).inspect_err(|e| {
        log::warn!(
            "cannot measure the aggregation rate, so plans assume that the box keeps up \
                    with its links: {e:#}"
        )
    });
    let rate = rate.ok()?;
    log::info!(
        "aggregation rate: {} MB/s on each of {} CPUs at path MTU {mtu}",
        rate / 1_000_000,
        cpus.len()
    );
    Some(rate)
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
