//! Changes while the daemon runs: its configuration, on SIGHUP, and ports that are added or
//! removed.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use netsum_controller::executor::new_program_generation;
use tokio::signal::unix::Signal;

use super::agent::{Inner, Shared};
use super::device;
use super::memory;
use super::netlink::{Interface, Netlink};
use super::own_addresses;
use super::port_selection::PortSelection;
use super::systemd;
use crate::config::Config;

/// Poll interval for ports. Ranks that have fallen back try the box again after a second; by then a
/// port that lost its program has it again.
const INTERVAL: Duration = Duration::from_millis(500);

/// Reloads the configuration, and follows changes of ports.
pub struct Reloader {
    path: PathBuf,
    config: Config,
    chosen: PortSelection,
    shared: Shared,
    netlink: Netlink,
    /// The CPUs that serve rings.
    cpus: Vec<u32>,
    /// Interfaces that could not become ports, and have been logged.
    refused: HashSet<u32>,
}

impl Reloader {
    /// For a daemon that runs with this configuration, read from a file, and has logged that the
    /// interfaces in `refused` cannot be ports.
    pub fn new(
        path: PathBuf,
        config: Config,
        chosen: PortSelection,
        refused: HashSet<u32>,
        shared: Shared,
        netlink: Netlink,
        cpus: Vec<u32>,
    ) -> Self {
        Self { path, config, chosen, shared, netlink, cpus, refused }
    }

    /// Runs for as long as the daemon lives.
    pub async fn run(mut self, mut hangup: Signal) {
        let mut tick = tokio::time::interval(INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = hangup.recv() => match self.reload().await {
                    Ok(()) => {
                        log::info!("{}: reloaded", self.path.display());
                        systemd::status("");
                    }
                    Err(e) => {
                        log::error!("reload failed, the old configuration stays: {e:#}");
                        systemd::status(&format!("Reload failed: {e:#}"));
                    }
                },
                _ = tick.tick() => {
                    let ports: Vec<u32> = self.shared.lock().controller.ports().iter().map(|p| p.ifindex).collect();
                    match self.netlink.present(&mut self.chosen, &ports).await {
                        Ok(interfaces) => self.take(&interfaces).await,
                        Err(e) => log::warn!("cannot list the interfaces: {e:#}"),
                    }
                    self.expire();
                }
            }
        }
    }

    /// Reads the configuration again: all of it, or nothing.
    async fn reload(&mut self) -> Result<()> {
        let new = Config::read(&self.path)?;
        let (chosen, interfaces) = self.netlink.choose(&new.ports).await?;
        {
            let mut inner = self.shared.lock();
            for job in inner.controller.jobs() {
                if let Some(flow) =
                    job.flows.iter().find(|f| interfaces.iter().all(|l| l.ifindex != f.ifindex))
                {
                    let port = inner.controller.port_name(flow.ifindex);
                    bail!(
                        "job {} has flows on port {port}, which would go: delete the job first",
                        job.spec.name
                    );
                }
            }
            inner.controller.set_memory(new.memory)?;
            memory::update_and_warn(&mut inner.controller);
            inner.controller.set_heartbeat_timeout(new.heartbeat_timeout);
            inner.controller.set_tenants(new.tenants.clone());
            inner.executor.watch.set_timeouts(new.timeouts);
        }
        let later = self.config.needs_restart(&new);
        if !later.is_empty() {
            log::warn!("takes effect at the next start: {}", later.join(", "));
        }
        let Config { ports, memory, heartbeat_timeout, timeouts, tenants, .. } = new;
        self.config =
            Config { ports, memory, heartbeat_timeout, timeouts, tenants, ..self.config.clone() };
        self.chosen = chosen;
        self.refused.clear();
        self.take(&interfaces).await;
        Ok(())
    }

    /// Cleans up after everything that ends without an event.
    fn expire(&self) {
        let mut guard = self.shared.lock();
        guard.retry_save();
        let Inner { controller, executor, .. } = &mut *guard;
        if let Err(e) = executor.expire(controller, Instant::now()) {
            log::error!("cannot forget ended flows: {e:#}");
        }
        match executor.plane.keep_cpus() {
            Ok(done) => done.iter().for_each(|line| log::warn!("{line}")),
            Err(e) => log::error!("cannot check the CPUs that serve rings: {e:#}"),
        }
    }

    /// Attaches to ports that are new or have lost the program, and releases removed ones.
    async fn take(&mut self, interfaces: &[Interface]) {
        // The ports' links have the addresses that are the box's own.
        if self.change_ports(interfaces)
            && let Err(e) = own_addresses::update(&self.shared, &self.netlink).await
        {
            log::error!("cannot reserve this box's addresses on its new ports: {e:#}");
        }
    }

    /// Returns whether the ports have changed.
    fn change_ports(&mut self, interfaces: &[Interface]) -> bool {
        let mut inner = self.shared.lock();
        let known = inner.controller.ports().to_vec();
        let is_known = |l: &Interface| known.iter().any(|p| p.ifindex == l.ifindex);
        let mut ports: Vec<_> =
            interfaces.iter().filter(|l| is_known(l)).map(Interface::port).collect();
        let removed: Vec<u32> = known
            .iter()
            .map(|p| p.ifindex)
            .filter(|i| interfaces.iter().all(|l| l.ifindex != *i))
            .collect();
        self.refused.retain(|i| interfaces.iter().any(|l| l.ifindex == *i));
        for port in &ports {
            if let Some(before) =
                known.iter().find(|p| p.ifindex == port.ifindex && p.name != port.name)
            {
                log::info!(NETSUM_PORT = port.name; "port {} renamed to {}", before.name, port.name);
            }
        }
        let attached = inner.executor.plane.attached();
        for interface in interfaces.iter().filter(|l| !is_known(l)) {
            // It was a port before, and still has the program that drops data of flows that ended
            // then.
            let attached = if interface.xdp.is_some() && attached.contains(&interface.ifindex) {
                Ok(())
            } else {
                device::attach(interface, false, || {
                    // Detach from a former interface with the same number.
                    inner.executor.plane.detach(interface.ifindex)?;
                    inner.executor.plane.attach(interface.ifindex)
                })
            };
            match attached {
                Ok(()) => {
                    log::info!(NETSUM_PORT = interface.name; "port {} added", interface.name);
                    device::log_defects(std::slice::from_ref(interface), &self.cpus);
                    ports.push(interface.port());
                }
                Err(e) if self.refused.insert(interface.ifindex) => {
                    device::log_unfit_port(interface, &e)
                }
                Err(_) => {}
            }
        }
        for interface in interfaces.iter().filter(|l| is_known(l) && l.xdp.is_none()) {
            // In one step, so no contribution can pass in between.
            match inner.executor.plane.attach(interface.ifindex) {
                Ok(()) => {
                    log::warn!(
                        NETSUM_PORT = interface.name;
                        "port {}: the XDP program was detached; attached it again",
                        interface.name
                    );
                    self.refused.remove(&interface.ifindex);
                    inner.executor.program_generation = new_program_generation();
                }
                Err(e) if self.refused.insert(interface.ifindex) => {
                    log::error!(NETSUM_PORT = interface.name; "port {}: cannot attach the programs: {e:#}", interface.name)
                }
                Err(_) => {}
            }
        }
        if !removed.is_empty() {
            let actions = inner.controller.ports_removed(&removed);
            inner.carry_out_or_log(None, actions);
            for port in known.iter().filter(|p| removed.contains(&p.ifindex)) {
                log::warn!(NETSUM_PORT = port.name; "port {} removed", port.name);
            }
        }
        let have_changed = ports != known;
        if have_changed {
            inner.controller.set_ports(ports);
            // The next daemon has to know them.
            inner.carry_out_or_log(None, Vec::new());
        }
        have_changed
    }
}
