//! The files that the controller's state outlives the daemon in, and how a daemon begins with them.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use netsum_common::abi::RingNumber;
use netsum_core::saved::{Saved, SavedJob};
use netsum_core::{Action, Controller, JobSpec, PortInfo};
use netsum_dataplane::pins::{Found, Pins};
use netsum_dataplane::{BpfDataPlane, DataPlane as _, LoadOptions};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::device;
use super::netlink::Interface;
use super::spread::Spreader;
use crate::config::Config;

/// A file. It holds the jobs' tokens and is readable by its owner alone.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    /// Who keeps it in place of the file.
    keeper: Option<watch::Sender<String>>,
    last: String,
    /// What was to be written last is not in it.
    behind: bool,
}

impl Store {
    /// A file that may not be there yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path, keeper: None, last: String::new(), behind: false }
    }

    /// Elsewhere: somebody is given what has changed, and says what fails.
    pub fn kept_by(keeper: watch::Sender<String>) -> Self {
        Self { keeper: Some(keeper), ..Self::new(PathBuf::new()) }
    }

    /// What it holds; `None` when it is not there.
    pub fn read<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        let text = match fs::read_to_string(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        serde_json::from_str(&text).context("not what a netsum of this version writes")
    }

    /// Writes what has changed. Where that fails the file stays as it was, and it is said once,
    /// with what follows from it.
    pub fn keep(&mut self, value: &impl Serialize, then: &str) {
        let before = self.behind;
        let result = self.write(value);
        self.behind = result.is_err();
        match result {
            Ok(()) if before => log::info!("{}: written again", self.path.display()),
            Err(e) if !before => {
                log::error!("{}: cannot be written: {e:#}; {then}", self.path.display())
            }
            _ => {}
        }
    }

    /// Whether it should be written again.
    pub fn is_behind(&self) -> bool {
        self.behind
    }

    /// Writes what has changed, all or nothing, also where the machine loses its power.
    fn write(&mut self, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(value)?;
        if text == self.last {
            return Ok(());
        }
        if let Some(keeper) = &self.keeper {
            keeper.send_replace(text.clone());
            self.last = text;
            return Ok(());
        }
        let new = self.path.with_extension("new");
        self.replace(&new, &text).inspect_err(|_| drop(fs::remove_file(&new)))?;
        self.last = text;
        Ok(())
    }

    fn replace(&self, new: &Path, text: &str) -> io::Result<()> {
        let folder = self.folder()?;
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(new, &self.path)?;
        folder.sync_all()
    }

    /// Its folder, which is made if it is not there.
    fn folder(&self) -> io::Result<File> {
        let folder =
            self.path.parent().filter(|path| *path != Path::new("")).unwrap_or(Path::new("."));
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        File::open(folder)
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

/// The file of the jobs that are to be there whenever a daemon starts, as they were created: all
/// but those that were deleted.
#[derive(Debug)]
pub struct Wanted {
    store: Store,
    /// Those that could not be created at this start, and stay in the file for the next one.
    missing: Vec<JobSpec>,
    /// Its folder, locked as long as the daemon lives.
    _lock: Option<File>,
}

/// What is in it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Jobs {
    jobs: Vec<JobSpec>,
}

impl Wanted {
    /// Takes hold of the file; what is in it. One that cannot be understood is put aside.
    ///
    /// # Errors
    /// If another daemon holds it.
    pub fn open(path: PathBuf) -> Result<(Self, Vec<JobSpec>)> {
        let store = Store::new(path);
        // Without a folder nothing can be written either, which is said then.
        let lock = store.folder().ok();
        if let Some(Err(TryLockError::WouldBlock)) = lock.as_ref().map(File::try_lock) {
            let path = store.path().display();
            bail!(
                "{path}: another `netsum run` keeps its jobs in this folder; give this one `restart.jobs` of its own"
            );
        }
        let read = store.read().map(Option::<Jobs>::unwrap_or_default).unwrap_or_else(|e| {
            let aside = store.path().with_extension("bad");
            let path = store.path().display();
            log::error!(
                "{path}: {e:#}; no job is created again; the file is {} now",
                aside.display()
            );
            fs::rename(store.path(), &aside).unwrap_or_else(|e| log::error!("{path}: {e}"));
            Jobs::default()
        });
        Ok((Self { store, missing: Vec::new(), _lock: lock }, read.jobs))
    }

    /// This one is not there, and why.
    pub fn is_missing(&mut self, spec: JobSpec, why: &str) {
        let (name, path) = (&spec.name, self.store.path().display());
        log::error!(NETSUM_JOB = name; "job {name} of {path} cannot be created again, and stays there: {why}");
        self.missing.push(spec);
    }

    /// Writes which jobs there are now.
    pub fn keep(&mut self, controller: &Controller) {
        self.missing.retain(|spec| controller.job(&spec.name).is_err());
        let jobs = controller.specs().chain(&self.missing).cloned().collect();
        self.store.keep(
            &Jobs { jobs },
            "if the machine boots now, jobs are missing, or others are there",
        );
    }

    pub fn is_behind(&self) -> bool {
        self.store.is_behind()
    }
}

/// A data plane with programs on all ports that can have them, and a controller that knows what is
/// in it.
pub struct Begun {
    pub plane: BpfDataPlane,
    pub spread: Option<Spreader>,
    pub controller: Controller,
    /// What is still to be done before anybody asks.
    pub actions: Vec<Action>,
    /// Where changes are to be written.
    pub store: Option<Store>,
    /// The highest of a manager that has called.
    pub election: u64,
    /// What one CPU adds, if it has been measured.
    pub adds: Option<u64>,
}

/// Takes hold of what outlives a daemon; `None` where nothing does.
///
/// # Errors
/// If another daemon is at work.
pub fn hold(config: &Config) -> Result<Option<Pins>> {
    let pins = config.pin.as_ref().map(|dir| Pins::hold(dir, &config.state.with_extension("lock")));
    Ok(pins.transpose()?.flatten())
}

/// Begins anew, or goes on where a daemon was killed.
///
/// # Errors
/// If the kernel refuses; nothing that this call has attached is left then.
pub fn begin(
    config: &Config,
    pins: Option<Pins>,
    cpus: &[u32],
    interfaces: &[Interface],
    reset: bool,
    mut controller: Controller,
) -> Result<Begun> {
    let options =
        LoadOptions { cpus: cpus.to_vec(), cpu_queue: config.cpu_queue, inline: config.inline };
    let Some(pins) = pins else {
        let mut plane = BpfDataPlane::load(&options)?;
        controller.set_ports(attach(&mut plane, interfaces, &[], &[])?);
        let spread = Spreader::begin(&config.spread, None)?;
        return Ok(Begun {
            plane,
            spread,
            controller,
            actions: Vec::new(),
            store: None,
            election: 0,
            adds: None,
        });
    };
    let store = Store::new(config.state.clone());
    let mut old = Vec::new();
    if reset {
        old = pins.clear()?;
    }
    let saved = match pins.find()? {
        Found::Nothing => None,
        // One that was stopped may have left connections that have ended, and no jobs.
        Found::Ours => {
            Some(store.read::<Saved>().map(Option::unwrap_or_default).unwrap_or_else(|e| {
                log::warn!("{}: {e:#}", store.path().display());
                Saved::default()
            }))
        }
    };
    let Some(saved) = saved else {
        old.extend(pins.clear()?);
        store.remove()?;
        let spread = Spreader::begin(&config.spread, Some(&pins))?;
        let mut plane = BpfDataPlane::load_pinned(&options, pins)?;
        match attach(&mut plane, interfaces, &[], &old) {
            Ok(ports) => controller.set_ports(ports),
            Err(e) => {
                plane.unpin()?;
                return Err(e);
            }
        }
        return Ok(Begun {
            plane,
            spread,
            controller,
            actions: Vec::new(),
            store: Some(store),
            election: 0,
            adds: None,
        });
    };

    let spread = Spreader::begin(&config.spread, Some(&pins))?;
    let mut plane = BpfDataPlane::load_pinned(&options, pins)?;
    let taken = plane.take_over_links()?;
    controller.set_ports(attach(&mut plane, interfaces, &taken, &[])?);
    let rings: Vec<RingNumber> =
        saved.jobs.iter().flat_map(SavedJob::rings).map(|r| r.id).collect();
    let flows: Vec<_> = saved.jobs.iter().flat_map(|j| j.flows.clone()).collect();
    if plane.forget_others(&rings, &flows)? > 0 {
        log::warn!("an earlier daemon has left rings of jobs that it has not told of: they end");
    }
    let mut broken = Vec::new();
    for job in &saved.jobs {
        for ring in job.rings() {
            if !plane.is_whole(&ring, job.is_active(), &job.flows)? {
                broken.push(ring.id);
            } else if !job.is_active() {
                // The state may be older than the maps, and a ring that begins must be empty.
                plane.empty_ring(&ring, 0)?;
            }
        }
    }
    let (jobs, election, adds) = (saved.jobs.len(), saved.election, saved.adds);
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
        "taken over from the daemon before: {} ports, {jobs} jobs, {ended} connections whose job has ended",
        taken.len()
    );
    Ok(Begun { plane, spread, controller, actions, store: Some(store), election, adds })
}

/// Makes all interfaces ports but `done`, which are, and those that cannot be: these are named.
/// Ports in `busy` have just been detached, which the kernel carries out a moment after the link's
/// last descriptor is closed: there it tries for a second.
///
/// # Errors
/// If none can be.
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
    unfit.iter().for_each(|(interface, e)| device::tell_unfit(interface, e));
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn spec(name: &str, window: u32) -> JobSpec {
        serde_json::from_value(serde_json::json!({
            "name": name, "ranks": 2, "dtype": "i32", "mtu": 1024, "message_size": 16384, "window": window, "rings": 1,
            "verify_icrc": true, "in_band": false, "token": "secret"
        }))
        .unwrap()
    }

    fn controller(jobs: &[JobSpec]) -> Controller {
        let mut controller = Controller::new(1 << 20, 1, Duration::from_secs(1));
        jobs.iter().for_each(|spec| drop(controller.create_again(spec.clone()).unwrap()));
        controller
    }

    #[test]
    fn what_is_wanted_is_its_owners_alone_and_outlives_what_cannot_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("of/its/own/jobs.json");
        let (mut wanted, jobs) = Wanted::open(path.clone()).unwrap();
        assert_eq!(jobs, []);
        wanted.keep(&controller(&[spec("a", 2)]));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let error = Wanted::open(path.clone()).unwrap_err().to_string();
        assert!(error.contains("another `netsum run` keeps its jobs"), "{error}");

        // What is written first cannot be made.
        let new = path.with_extension("new");
        fs::create_dir(&new).unwrap();
        wanted.keep(&controller(&[]));
        assert!(wanted.is_behind());
        drop(wanted);
        let (mut wanted, jobs) = Wanted::open(path.clone()).unwrap();
        assert_eq!(jobs, [spec("a", 2)]);
        wanted.keep(&controller(&[]));
        fs::remove_dir(&new).unwrap();
        wanted.keep(&controller(&[spec("b", 2)]));
        assert!(!wanted.is_behind() && !new.exists());
        assert!(fs::read_to_string(&path).unwrap().contains("\"b\""));
    }

    #[test]
    fn a_job_that_does_not_fit_stays_in_the_file_until_there_is_another_of_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.json");
        let (mut wanted, _) = Wanted::open(path.clone()).unwrap();
        wanted.is_missing(spec("large", 100), "not enough memory");
        wanted.keep(&controller(&[spec("a", 2)]));
        assert_eq!(names(&path), ["a", "large"]);
        wanted.keep(&controller(&[spec("large", 2)]));
        assert_eq!(names(&path), ["large"]);
        wanted.keep(&controller(&[]));
        assert_eq!(names(&path), [""; 0]);
    }

    fn names(path: &Path) -> Vec<String> {
        let file: Jobs = Store::new(path.to_owned()).read().unwrap().unwrap();
        file.jobs.into_iter().map(|spec| spec.name).collect()
    }

    #[test]
    fn a_file_that_is_none_is_put_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.json");
        fs::write(&path, "{\"jobs\": [").unwrap();
        let (_, jobs) = Wanted::open(path.clone()).unwrap();
        assert_eq!(jobs, []);
        assert!(!path.exists() && path.with_extension("bad").exists());
    }
}
