//! What a VM boots: Debian's kernel, and a first file system of Debian's programs, the agent, and what tests add.
//!
//! `cargo xtask lab vm --prepare` fetches and unpacks packages; here the parts are put together.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};

use super::cpio::Cpio;
use super::parts::{FOLDER, KERNEL, Kernel, MODULES, NOTE, PROGRAMS, USERLAND};
use crate::cluster::program;

/// Files for QEMU.
#[derive(Clone, Debug)]
pub struct Image {
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
