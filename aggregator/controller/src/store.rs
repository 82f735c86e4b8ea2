//! The files in which the controller's state outlives the daemon.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use netsum_core::{Controller, JobSpec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// A file. It holds the jobs' tokens, so only its owner can read it.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    /// Receives the text instead of the file.
    forwarded_to: Option<watch::Sender<String>>,
    last: String,
    /// Whether the last write failed.
    unsaved: bool,
}

impl Store {
    /// A file, which may not exist yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path, forwarded_to: None, last: String::new(), unsaved: false }
    }

    /// A store without a file: `forwarded_to` receives each change, and reports failures itself.
    pub fn forwarding_to(forwarded_to: watch::Sender<String>) -> Self {
        Self { forwarded_to: Some(forwarded_to), ..Self::new(PathBuf::new()) }
    }

    /// Its content; `None` if it does not exist.
    pub fn read<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        let text = match fs::read_to_string(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        serde_json::from_str(&text).context("not what a netsum of this version writes")
    }

    /// Writes changes. If that fails, the file stays as it was, and the failure is logged once,
    /// with its consequence `then`.
    pub fn save(&mut self, value: &impl Serialize, then: &str) {
        let before = self.unsaved;
        let result = self.write(value);
        self.unsaved = result.is_err();
        match result {
            Ok(()) if before => log::info!("{}: written again", self.path.display()),
            Err(e) if !before => {
                log::error!("{}: cannot write: {e:#}; {then}", self.path.display())
            }
            _ => {}
        }
    }

    /// Whether the last write has to be repeated.
    pub fn has_unsaved(&self) -> bool {
        self.unsaved
    }

    /// Writes changes atomically, even across a power failure.
    fn write(&mut self, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(value)?;
        if text == self.last {
            return Ok(());
        }
        if let Some(forwarded_to) = &self.forwarded_to {
            forwarded_to.send_replace(text.clone());
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

    /// Its folder, which is created if missing.
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

/// The file of the jobs that every daemon creates at its start, as they were created first: all
/// except deleted ones.
#[derive(Debug)]
pub struct JobFile {
    store: Store,
    /// Jobs that could not be created at this start, and stay in the file for the next one.
    missing: Vec<JobSpec>,
    /// Its folder, locked as long as the daemon lives.
    _lock: Option<File>,
}

/// The file's content.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Jobs {
    jobs: Vec<JobSpec>,
}

impl JobFile {
    /// Opens and locks the file, and returns its jobs. An invalid file is renamed and kept.
    ///
    /// # Errors
    /// If another daemon has it locked.
    pub fn open(path: PathBuf) -> Result<(Self, Vec<JobSpec>)> {
        let store = Store::new(path);
        // Without the folder, the first write fails too, and logs that.
        let lock = store.folder().ok();
        if let Some(Err(TryLockError::WouldBlock)) = lock.as_ref().map(File::try_lock) {
            let path = store.path().display();
            bail!(
                "{path}: another `netsum run` keeps its jobs in this folder; give this one \
                 `restart.jobs` of its own"
            );
        }
        let read = store.read().map(Option::<Jobs>::unwrap_or_default).unwrap_or_else(|e| {
            let aside = store.path().with_extension("bad");
            let path = store.path().display();
            log::error!(
                "{path}: {e:#}; its jobs are not created again; it is renamed to {}",
                aside.display()
            );
            fs::rename(store.path(), &aside)
                .unwrap_or_else(|e| log::error!("{path}: cannot rename: {e}"));
            Jobs::default()
        });
        Ok((Self { store, missing: Vec::new(), _lock: lock }, read.jobs))
    }

    /// Records that a job could not be created, and logs why.
    pub fn add_missing(&mut self, spec: JobSpec, why: &str) {
        let (name, path) = (&spec.name, self.store.path().display());
        log::error!(NETSUM_JOB = name; "cannot recreate job {name}: {why}; it stays in {path}");
        self.missing.push(spec);
    }

    /// Writes the current jobs.
    pub fn save(&mut self, controller: &Controller) {
        self.missing.retain(|spec| controller.job(&spec.name).is_err());
        let jobs = controller.specs().chain(&self.missing).cloned().collect();
        self.store.save(&Jobs { jobs }, "a reboot now would restore an outdated list of jobs");
    }

    pub fn has_unsaved(&self) -> bool {
        self.store.has_unsaved()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::*;

    fn spec(name: &str, window: u32) -> JobSpec {
        serde_json::from_value(serde_json::json!({
            "name": name, "ranks": 2, "mtu": 1024, "message_size": 16384, "window": window, "rings": 1,
            "verify_icrc": true, "in_band": false, "token": "secret", "tenant": "default",
            "members": { "groups": [], "order": [] }, "host_ring_fallback": false, "is_group": false
        }))
        .unwrap()
    }

    fn controller(jobs: &[JobSpec]) -> Controller {
        let mut controller = Controller::new(1 << 20, 1, Duration::from_secs(1));
        jobs.iter().for_each(|spec| drop(controller.recreate_job(spec.clone()).unwrap()));
        controller
    }

    #[test]
    fn saved_jobs_are_their_owners_alone_and_outlive_failed_writes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("of/its/own/jobs.json");
        let (mut job_file, jobs) = JobFile::open(path.clone()).unwrap();
        assert_eq!(jobs, []);
        job_file.save(&controller(&[spec("a", 2)]));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let error = JobFile::open(path.clone()).unwrap_err().to_string();
        assert!(error.contains("another `netsum run` keeps its jobs"), "{error}");

        // The temporary file cannot be created, because a folder has its name.
        let new = path.with_extension("new");
        fs::create_dir(&new).unwrap();
        job_file.save(&controller(&[]));
        assert!(job_file.has_unsaved());
        drop(job_file);
        let (mut job_file, jobs) = JobFile::open(path.clone()).unwrap();
        assert_eq!(jobs, [spec("a", 2)]);
        job_file.save(&controller(&[]));
        fs::remove_dir(&new).unwrap();
        job_file.save(&controller(&[spec("b", 2)]));
        assert!(!job_file.has_unsaved() && !new.exists());
        assert!(fs::read_to_string(&path).unwrap().contains("\"b\""));
    }

    #[test]
    fn an_unplaced_job_stays_saved_until_its_name_is_reused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.json");
        let (mut job_file, _) = JobFile::open(path.clone()).unwrap();
        job_file.add_missing(spec("large", 100), "not enough memory");
        job_file.save(&controller(&[spec("a", 2)]));
        assert_eq!(names(&path), ["a", "large"]);
        job_file.save(&controller(&[spec("large", 2)]));
        assert_eq!(names(&path), ["large"]);
        job_file.save(&controller(&[]));
        assert_eq!(names(&path), [""; 0]);
    }

    fn names(path: &Path) -> Vec<String> {
        let file: Jobs = Store::new(path.to_owned()).read().unwrap().unwrap();
        file.jobs.into_iter().map(|spec| spec.name).collect()
    }

    #[test]
    fn an_invalid_jobs_file_is_renamed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.json");
        fs::write(&path, "{\"jobs\": [").unwrap();
        let (_, jobs) = JobFile::open(path.clone()).unwrap();
        assert_eq!(jobs, []);
        assert!(!path.exists() && path.with_extension("bad").exists());
    }
}
