//! The start of a box: from nothing, or where a daemon was killed.

use std::io;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use netsum_common::abi::RingNumber;
use netsum_controller::store::Store;
use netsum_core::saved::{Saved, SavedJob};
use netsum_core::{Action, Controller, PortInfo};
use netsum_dataplane::pins::{PinnedState, Pins};
use netsum_dataplane::{BpfDataPlane, DataPlane as _};

use super::device;
use super::link::Interface;
use super::spread::Spreader;
use crate::config::Config;

/// A data plane with programs on all ports that can have them, and a controller that matches it.
pub struct Startup {
    pub plane: BpfDataPlane,
    pub spread: Option<Spreader>,
    pub controller: Controller,
    /// Actions to carry out before the first request.
    pub actions: Vec<Action>,
    /// The store for changes.
    pub store: Option<Store>,
    /// The highest election of a manager that has called.
    pub election: u64,
    /// The measured aggregation rate of one CPU.
    pub aggregation_rate: Option<u64>,
}

/// Locks the pinned maps and programs; `None` if nothing is pinned.
///
/// # Errors
/// If another daemon is running.
pub fn hold(config: &Config) -> Result<Option<Pins>> {
    let pins = config.pin.as_ref().map(|dir| Pins::hold(dir, &config.state.with_extension("lock")));
    Ok(pins.transpose()?.flatten())
}

/// Starts from nothing, or continues where a daemon was killed.
///
/// # Errors
/// If the kernel refuses; then nothing that this call attached remains.
pub fn begin(
    config: &Config,
    pins: Option<Pins>,
    cpus: &[u32],
    interfaces: &[Interface],
    reset: bool,
    mut controller: Controller,
) -> Result<Startup> {
    let Some(pins) = pins else {
        let mut plane = BpfDataPlane::load(cpus)?;
        controller.set_ports(attach(&mut plane, interfaces, &[], &[])?);
        let spread = Spreader::start(&config.spread, None)?;
        return Ok(Startup {
            plane,
            spread,
            controller,
            actions: Vec::new(),
            store: None,
            election: 0,
            aggregation_rate: None,
        });
    };
    let store = Store::new(config.state.clone());
    let mut old = Vec::new();
    if reset {
        old = pins.clear()?;
    }
    let saved = match pins.find()? {
        PinnedState::Nothing => None,
        // A daemon that was stopped may have left ended connections without any jobs.
        PinnedState::Ours => {
            Some(store.read::<Saved>().map(Option::unwrap_or_default).unwrap_or_else(|e| {
                log::warn!("{}: cannot read, jobs are dropped: {e:#}", store.path().display());
                Saved::default()
            }))
        }
    };
    let Some(saved) = saved else {
        old.extend(pins.clear()?);
        store.remove()?;
        let spread = Spreader::start(&config.spread, Some(&pins))?;
        let mut plane = BpfDataPlane::load_pinned(cpus, pins)?;
        match attach(&mut plane, interfaces, &[], &old) {
            Ok(ports) => controller.set_ports(ports),
            Err(e) => {
                plane.unpin()?;
                return Err(e);
            }
        }
        return Ok(Startup {
            plane,
            spread,
            controller,
            actions: Vec::new(),
            store: Some(store),
            election: 0,
            aggregation_rate: None,
        });
    };

    let spread = Spreader::start(&config.spread, Some(&pins))?;
    let mut plane = BpfDataPlane::load_pinned(cpus, pins)?;
    let links = plane.take_over_links()?;
    controller.set_ports(attach(&mut plane, interfaces, &links, &[])?);
    let rings: Vec<RingNumber> =
        saved.jobs.iter().flat_map(SavedJob::rings).map(|r| r.id).collect();
    let flows: Vec<_> = saved.jobs.iter().flat_map(|j| j.flows.clone()).collect();
    if plane.remove_others(&rings, &flows)? > 0 {
        log::warn!("removing orphaned rings: no saved job owns them");
    }
    let mut broken = Vec::new();
    for job in &saved.jobs {
        for ring in job.rings() {
            if !plane.is_intact(&ring, job.is_active(), &job.flows)? {
                broken.push(ring.id);
            } else if !job.is_active() {
                // The state may be older than the maps, and a ring that begins must be empty.
                plane.empty_ring(&ring, 0)?;
            }
        }
    }
    let (jobs, election, aggregation_rate) =
        (saved.jobs.len(), saved.election, saved.aggregation_rate);
    let why = |job: &SavedJob| {
        let half = job.rings().any(|r| broken.contains(&r.id));
        half.then(|| "the one before was killed while it changed the job".to_owned())
    };
    let actions = controller.restore(saved, Instant::now(), why).map_err(|e| {
        anyhow::anyhow!(
            "the jobs of the daemon that was killed cannot be taken over: {e}; --reset ends them"
        )
    })?;
    let ended = plane.ended_flows()?.len();
    log::info!(
        "took over from the previous daemon: {} ports, {jobs} jobs, {ended} connections whose job \
         has ended",
        links.len()
    );
    Ok(Startup {
        plane,
        spread,
        controller,
        actions,
        store: Some(store),
        election,
        aggregation_rate,
    })
}

/// Makes interfaces ports, except those in `done`, which are ports already. Interfaces that cannot
/// be ports are logged. Ports in `busy` were just detached, but the kernel detaches only a moment
/// after the link's last descriptor is closed, so attaching is retried for a second.
///
/// # Errors
/// If no interface can be a port.
fn attach(
    plane: &mut BpfDataPlane,
    interfaces: &[Interface],
    done: &[u32],
    busy: &[u32],
) -> Result<Vec<PortInfo>> {
    let start = Instant::now();
    let (mut ports, mut unfit) = (Vec::new(), Vec::new());
    for interface in interfaces {
        let was_ours = busy.contains(&interface.ifindex);
        let wait = |e: &anyhow::Error| {
            let is_busy = e.chain().any(|c| {
                c.downcast_ref::<io::Error>()
                    .is_some_and(|e| e.kind() == io::ErrorKind::ResourceBusy)
            });
            is_busy && was_ours && start.elapsed() < Duration::from_secs(1)
        };
        let attach = || loop {
            match plane.attach(interface.ifindex) {
                Err(e) if wait(&e) => std::thread::sleep(Duration::from_millis(10)),
                result => break result,
            }
        };
        let is_done = done.contains(&interface.ifindex);
        match if is_done { Ok(()) } else { device::attach(interface, was_ours, attach) } {
            Ok(()) => ports.push(interface.port()),
            Err(e) => unfit.push((interface, e)),
        }
    }
    if ports.is_empty() {
        let why: Vec<String> =
            unfit.iter().map(|(l, e)| format!("port {}: {e:#}", l.name)).collect();
        bail!("{}", why.join("; "));
    }
    unfit.iter().for_each(|(interface, e)| device::log_unfit_port(interface, e));
    Ok(ports)
}
