//! What a VM boots: Debian's kernel, and a first file system of Debian's programs, the agent, and what tests add.
//!
//! `cargo xtask lab vm --prepare` fetches and unpacks packages; here the parts are put together.

use std::fmt;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::SystemTime;

use anyhow::{Context, Result};

use super::cpio::Cpio;
use crate::cluster::program;

/// The kernels that VMs can run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// That of Debian 12.
    #[default]
    V6_1,
    /// The last that was made for Debian 12, from its backports.
    V6_12,
}

impl Kernel {
    /// All.
    pub const ALL: [Self; 2] = [Self::V6_1, Self::V6_12];
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        })
    }
}

impl FromStr for Kernel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kernel| kernel.to_string() == text);
        found.ok_or_else(|| "6.1 and 6.12 are possible".into())
    }
}

/// The folder below cargo's target folder with all that VMs boot from.
pub const FOLDER: &str = "vm";
/// In that folder: archive of Debian's programs.
pub const USERLAND: &str = "userland.cpio";
/// In that folder: programs of the project in C, by name.
pub const PROGRAMS: &str = "programs";
/// In each of the folders: what it was made from.
pub const NOTE: &str = "made-from";
/// In a kernel's folder therein: archive of its modules.
pub const MODULES: &str = "modules.cpio";
/// In a kernel's folder: itself.
pub const KERNEL: &str = "kernel";
/// In the VM: the modules in the order in which they are loaded.
pub const MODULE_LIST: &str = "/lib/modules/list";

/// Files for QEMU.
#[derive(Clone, Debug)]
pub struct Image {
    /// The kernel.
    pub kernel: PathBuf,
    /// The first file system.
    pub initramfs: PathBuf,
}

impl Image {
    /// The image with this kernel, put together anew if a part of it has changed.
    ///
    /// # Errors
    /// If its parts have not been prepared.
    pub fn of(kernel: Kernel) -> Result<Self> {
        let agent = program("lab-agent")?;
        let near = agent.parent().context("the agent is in no folder")?;
        let folder = near.ancestors().map(|folder| folder.join(FOLDER)).find(|folder| folder.is_dir());
        let missing = || format!("no image with kernel {kernel} for VMs: cargo xtask lab vm --prepare");
        let folder = folder.with_context(missing)?;
        let own = folder.join(kernel.to_string());
        let parts = [folder.join(USERLAND), own.join(MODULES)];
        let mut programs = vec![agent.clone()];
        if let Ok(entries) = fs::read_dir(folder.join(PROGRAMS)) {
            let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
            programs.extend(paths.filter(|path| path.file_name() != Some(NOTE.as_ref())));
        }
        let mut newest = SystemTime::UNIX_EPOCH;
        for part in parts.iter().chain(&programs) {
            newest = newest.max(changed(part).with_context(missing)?);
        }
        let initramfs = near.join(format!("lab-initramfs-{kernel}.cpio"));
        if changed(&initramfs).map_or(true, |made| made <= newest) {
            put_together(&initramfs, &parts, &programs)?;
        }
        Ok(Self { kernel: own.join(KERNEL), initramfs })
    }
}

fn changed(path: &Path) -> Result<SystemTime> {
    fs::metadata(path).and_then(|m| m.modified()).with_context(|| path.display().to_string())
}

fn put_together(to: &Path, parts: &[PathBuf], programs: &[PathBuf]) -> Result<()> {
    let mut out = tempfile::NamedTempFile::new_in(to.parent().context("no folder")?)?;
    for part in parts {
        out.write_all(&fs::read(part)?)?;
    }
    let mut cpio = Cpio::new(&mut out);
    for program in programs {
        let name = program.file_name().context("no name")?;
        cpio.file(Path::new("/usr/bin").join(name), 0o755, &fs::read(program)?)?;
    }
    cpio.link("/init", "/usr/bin/lab-agent")?;
    cpio.finish()?;
    // Other processes may be reading the old one.
    out.persist(to)?;
    Ok(())
}
