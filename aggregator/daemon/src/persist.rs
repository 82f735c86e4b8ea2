//! The file that the controller's state outlives the daemon in, and how a daemon begins with it.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use netsum_core::saved::{Saved, SavedJob};
use netsum_core::{Action, Controller};
use netsum_dataplane::pins::{Found, Pins};
use netsum_dataplane::{BpfDataPlane, DataPlane as _, LoadOptions, XdpMode};

use super::netlink::Interface;
use crate::config::Config;

/// The state file. It holds the jobs' tokens and is readable by its owner alone.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    last: String,
}

impl Store {
    /// A file that may not be there yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path, last: String::new() }
    }

    /// What it holds; `None` when it is not there.
    pub fn read(&self) -> Result<Option<Saved>> {
        let text = match fs::read_to_string(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        serde_json::from_str(&text).context("not what a netsum of this version writes")
    }

    /// Writes what has changed, all or nothing.
    pub fn write(&mut self, saved: &Saved) -> Result<()> {
        let text = serde_json::to_string(saved)?;
        if text == self.last {
            return Ok(());
        }
        let new = self.path.with_extension("new");
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(text.as_bytes())?;
        drop(file);
        fs::rename(&new, &self.path)?;
        self.last = text;
        Ok(())
    }

    pub fn remove(&self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A data plane with programs on all ports, and a controller that knows what is in it.
pub struct Begun {
    pub plane: BpfDataPlane,
    pub controller: Controller,
    /// What is still to be done before anybody asks.
    pub actions: Vec<Action>,
    /// Where changes are to be written.
    pub store: Option<Store>,
}

/// Begins anew, or goes on where a daemon was killed.
///
/// # Errors
/// If another daemon is at work, or the kernel refuses; nothing that this call has attached is left then.
pub fn begin(
    config: &Config,
    cpus: &[u32],
    interfaces: &[Interface],
    reset: bool,
    mut controller: Controller,
) -> Result<Begun> {
    let options = LoadOptions { cpus: cpus.to_vec(), cpu_queue: config.cpu_queue, inline: config.inline };
    let pins = match &config.pin {
        Some(dir) => Pins::hold(dir, &config.state.with_extension("lock"))?,
        None => None,
    };
    let Some(pins) = pins else {
        refuse_strangers(interfaces, &[])?;
        let mut plane = BpfDataPlane::load(&options)?;
        attach(&mut plane, config, interfaces, &[], &[])?;
        return Ok(Begun { plane, controller, actions: Vec::new(), store: None });
    };
    let store = Store::new(config.state.clone());
    let mut old = Vec::new();
    if reset {
        old = pins.clear()?;
    }
    let saved = match pins.find()? {
        Found::Nothing => None,
        Found::Ours => {
            let saved = store.read().unwrap_or_else(|e| {
                log::warn!("{}: {e:#}", store.path().display());
                None
            });
            if saved.is_none() {
                log::warn!("an earlier daemon has left its maps, and not its jobs: they end");
            }
            Some(saved.unwrap_or_default())
        }
    };
    let Some(saved) = saved else {
        old.extend(pins.clear()?);
        store.remove()?;
        refuse_strangers(interfaces, &old)?;
        let mut plane = BpfDataPlane::load_pinned(&options, pins)?;
        if let Err(e) = attach(&mut plane, config, interfaces, &[], &old) {
            interfaces.iter().for_each(|l| drop(plane.detach(l.ifindex)));
            plane.unpin()?;
            return Err(e);
        }
        return Ok(Begun { plane, controller, actions: Vec::new(), store: Some(store) });
    };

    refuse_strangers(interfaces, &pins.links())?;
    let mut plane = BpfDataPlane::load_pinned(&options, pins)?;
    let taken = plane.take_over_links()?;
    attach(&mut plane, config, interfaces, &taken, &[])?;
    let rings: Vec<u32> = saved.jobs.iter().flat_map(SavedJob::rings).map(|r| r.id).collect();
    let flows: Vec<_> = saved.jobs.iter().flat_map(|j| j.flows.clone()).collect();
    plane.forget_others(&rings, &flows)?;
    let mut broken = Vec::new();
    for job in &saved.jobs {
        for ring in job.rings() {
            if !plane.is_whole(&ring, job.is_active(), &job.flows)? {
                broken.push(ring.id);
            }
        }
    }
    let jobs = saved.jobs.len();
    let why = |job: &SavedJob| {
        let half = job.rings().any(|r| broken.contains(&r.id));
        half.then(|| "the one before was killed while it changed the job".to_owned())
    };
    let actions = controller.restore(saved, Instant::now(), why).map_err(|e| {
        anyhow::anyhow!("the jobs of the daemon that was killed cannot be taken over: {e}; --reset ends them")
    })?;
    let ended = plane.ended_flows()?.len();
    log::info!(
        "taken over from the daemon before: {} ports, {jobs} jobs, {ended} connections whose job has ended",
        taken.len()
    );
    Ok(Begun { plane, controller, actions, store: Some(store) })
}

/// That no port has an XDP program of somebody else.
fn refuse_strangers(interfaces: &[Interface], pinned: &[u32]) -> Result<()> {
    for interface in interfaces.iter().filter(|l| !pinned.contains(&l.ifindex)) {
        if let Some(mode) = interface.xdp {
            bail!(
                "port {}: an XDP program of somebody else is attached already ({mode}); detach it first",
                interface.name
            );
        }
    }
    Ok(())
}

/// Packets of this MTU fit a page of 4 KiB with the headroom and the administration that every driver leaves for XDP. Some manage
/// larger ones.
const ONE_PAGE_MTU: u32 = 3400;

/// Attaches to all ports but `done`. Ports in `busy` have just been detached, which the kernel carries out a moment after
/// the link's last descriptor is closed: there it tries for a second.
fn attach(
    plane: &mut BpfDataPlane,
    config: &Config,
    interfaces: &[Interface],
    done: &[u32],
    busy: &[u32],
) -> Result<()> {
    let start = Instant::now();
    for interface in interfaces.iter().filter(|l| !done.contains(&l.ifindex)) {
        let wait = |e: &anyhow::Error| {
            let is_busy = e.chain().any(|c| {
                c.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::ResourceBusy)
            });
            is_busy && busy.contains(&interface.ifindex) && start.elapsed() < Duration::from_secs(1)
        };
        let mut hint = String::from("; xdp = \"skb\" works with every driver, slowly");
        if config.xdp == XdpMode::Native && interface.mtu > ONE_PAGE_MTU {
            hint += &format!(
                "; in native mode a packet has to fit a page, and the port has an MTU of {}: {ONE_PAGE_MTU} always fits",
                interface.mtu
            );
        }
        loop {
            match plane.attach(interface.ifindex, config.xdp) {
                Ok(()) => break,
                Err(e) if wait(&e) => std::thread::sleep(Duration::from_millis(10)),
                Err(e) => {
                    return Err(e).with_context(|| format!("port {}: cannot attach{hint}", interface.name));
                }
            }
        }
    }
    Ok(())
}
