//! Maps and attachments that outlive the daemon, as files in bpffs.
//!
//! ```text
//! <dir>/abi-<VERSION>/maps/<name>      the maps; inner maps and programs live with them
//! <dir>/abi-<VERSION>/links/<ifindex>  the attachment of `ingress` to a port
//! <dir>/abi-<VERSION>/guards/<ifindex> that of `guard`
//! <dir>/abi-<VERSION>/spread/<ifindex> that of `spread`, if flows are spread over uplinks
//! ```
//! The ABI's version is in the path: a daemon of another version finds nothing that it could
//! misread, but sees that pins exist.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use netsum_common::abi::{VERSION, maps};

/// The folder of pins, locked for this daemon.
#[derive(Debug)]
pub struct Pins {
    dir: PathBuf,
    /// Locked until the daemon ends in any way: the state's lock file, and `dir`.
    _locks: [File; 2],
}

/// The content of the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinnedState {
    Nothing,
    /// Pins of an earlier daemon with the same ABI.
    Ours,
}

impl Pins {
    /// Locks a folder in bpffs, and creates it if necessary. `lock` is another file that each
    /// daemon locks.
    ///
    /// # Errors
    /// If another daemon has the lock. `None`, with a warning, if there is no bpffs.
    pub fn hold(dir: &Path, lock: &Path) -> Result<Option<Self>> {
        if let Some(folder) = lock.parent() {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let file = File::create(lock).with_context(|| format!("cannot make {}", lock.display()))?;
        take(&file, lock)?;
        let parent = dir.parent().unwrap_or(dir);
        if !is_bpffs(parent) {
            log::warn!(
                "pin = {dir:?}: {} is not a bpffs (mount -t bpf bpf /sys/fs/bpf), so the jobs end \
                 with this daemon",
                parent.display()
            );
            return Ok(None);
        }
        fs::create_dir_all(dir).with_context(|| format!("pin = {dir:?}: cannot be made"))?;
        let folder = File::open(dir).with_context(|| format!("pin = {dir:?}"))?;
        take(&folder, dir)?;
        Ok(Some(Self { dir: dir.to_owned(), _locks: [file, folder] }))
    }

    /// Looks for pins of an earlier daemon.
    ///
    /// # Errors
    /// If they have another ABI version.
    pub fn find(&self) -> Result<PinnedState> {
        let own = self.versioned();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path != own {
                bail!(
                    "{} has the programs of another version of netsum, which still sum; this one \
                     (ABI {VERSION}) cannot take them over. Run that version, or start with \
                     --reset: this detaches them and ends their jobs, and the ranks fall back to \
                     the hosts' ring",
                    path.display()
                );
            }
        }
        let complete = maps::ALL.iter().all(|name| self.map(name).exists());
        Ok(if complete && self.links_dir().exists() {
            PinnedState::Ours
        } else {
            PinnedState::Nothing
        })
    }

    /// Creates the folders for pins.
    pub fn make(&self) -> Result<()> {
        fs::create_dir_all(self.maps_dir())?;
        fs::create_dir_all(self.guards_dir())?;
        Ok(fs::create_dir_all(self.links_dir())?)
    }

    /// Removes all pins, of any version; returns the interfaces that had an attachment. The kernel
    /// detaches them a moment later.
    pub fn clear(&self) -> Result<Vec<u32>> {
        let mut attached = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            attached.extend(numbers(&path.join("links")));
            fs::remove_dir_all(&path)
                .with_context(|| format!("cannot remove {}", path.display()))?;
        }
        Ok(attached)
    }

    /// Removes all pins, and the folder.
    pub fn remove(&self) -> Result<()> {
        self.clear()?;
        Ok(fs::remove_dir(&self.dir)?)
    }

    /// Interfaces with a pinned attachment.
    pub fn links(&self) -> Vec<u32> {
        numbers(&self.links_dir())
    }

    /// Interfaces with a pinned attachment of `guard`.
    pub fn guards(&self) -> Vec<u32> {
        numbers(&self.guards_dir())
    }

    /// The file of a map.
    pub fn map(&self, name: &str) -> PathBuf {
        self.maps_dir().join(name)
    }

    /// The file of a port's attachment.
    pub fn link(&self, ifindex: u32) -> PathBuf {
        self.links_dir().join(ifindex.to_string())
    }

    /// The file of the attachment of `guard` to a port.
    pub fn guard(&self, ifindex: u32) -> PathBuf {
        self.guards_dir().join(ifindex.to_string())
    }

    /// The folder of the attachments of `spread`.
    pub fn spread_dir(&self) -> PathBuf {
        self.versioned().join("spread")
    }

    /// Removes the pins of spread flows.
    ///
    /// # Errors
    /// If they cannot be removed.
    pub fn remove_spread(&self) -> Result<()> {
        let files = [maps::SPREAD, maps::SPREAD_UPLINKS].map(|name| self.map(name));
        let links =
            numbers(&self.spread_dir()).into_iter().map(|n| self.spread_dir().join(n.to_string()));
        for path in files.into_iter().chain(links).filter(|path| path.exists()) {
            fs::remove_file(&path).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    fn versioned(&self) -> PathBuf {
        self.dir.join(format!("abi-{VERSION}"))
    }

    fn maps_dir(&self) -> PathBuf {
        self.versioned().join("maps")
    }

    fn guards_dir(&self) -> PathBuf {
        self.versioned().join("guards")
    }

    fn links_dir(&self) -> PathBuf {
        self.versioned().join("links")
    }
}

/// Locks a file or folder that only one daemon may use.
fn take(file: &File, path: &Path) -> Result<()> {
    file.try_lock().map_err(|e| match e {
        TryLockError::WouldBlock => anyhow!(
            "{} is in use by another `netsum run`: set other paths for `pin`, `state` and `jobs`",
            path.display()
        ),
        TryLockError::Error(e) => anyhow!("cannot lock {}: {e}", path.display()),
    })
}

/// The names in a folder that are numbers.
pub(super) fn numbers(folder: &Path) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect()
}

fn is_bpffs(dir: &Path) -> bool {
    nix::sys::statfs::statfs(dir)
        .is_ok_and(|s| s.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC)
}
