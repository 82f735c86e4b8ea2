//! Builds what a VM boots: Debian's kernel, and a first file system of Debian's programs, the
//! agent, and tests' additions.
//!
//! `cargo xtask lab vm --prepare` fetches and unpacks packages; this module combines the parts.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};

use super::cpio::Cpio;
use super::parts::{
    DISK, DISK_MODULES, FOLDER, KERNEL, Kernel, MODULES, NOTE, PROGRAMS, QEMU, USERLAND,
};
use crate::process::program;

/// Files for QEMU.
#[derive(Clone, Debug)]
pub struct Image {
    pub kernel: PathBuf,
    /// The first file system.
    pub initramfs: PathBuf,
    /// The disk from which it boots further.
    pub disk: Option<PathBuf>,
}

impl Image {
    /// The image with this kernel, built again if one of its parts has changed; optionally with a
    /// Debian disk.
    ///
    /// # Errors
    /// If its parts have not been prepared.
    pub fn of(kernel: Kernel, disk: bool) -> Result<Self> {
        let agent = program("lab-agent")?;
        let near = agent.parent().context("the agent is in no folder")?;
        let missing =
            || format!("no image with kernel {kernel} for VMs: cargo xtask lab vm --prepare");
        let folder = folder(near).with_context(missing)?;
        let own = folder.join(kernel.to_string());
        let mut parts = vec![folder.join(USERLAND), own.join(MODULES)];
        parts.extend(disk.then(|| own.join(DISK_MODULES)));
        let mut programs = vec![agent.clone()];
        if let Ok(entries) = fs::read_dir(folder.join(PROGRAMS)) {
            let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
            programs.extend(paths.filter(|path| path.file_name() != Some(NOTE.as_ref())));
        }
        let mut newest = SystemTime::UNIX_EPOCH;
        for part in parts.iter().chain(&programs) {
            newest = newest.max(changed(part).with_context(missing)?);
        }
        let with = if disk { "-disk" } else { "" };
        let initramfs = near.join(format!("lab-initramfs-{kernel}{with}.cpio"));
        if changed(&initramfs).map_or(true, |made| made <= newest) {
            put_together(&initramfs, &parts, &programs)?;
        }
        let disk = disk.then(|| folder.join(DISK));
        ensure!(disk.iter().all(|disk| disk.is_file()), missing());
        Ok(Self { kernel: own.join(KERNEL), initramfs, disk })
    }
}

/// The folder of the newer QEMU.
///
/// # Errors
/// If it has not been prepared.
pub fn qemu() -> Result<PathBuf> {
    let agent = program("lab-agent")?;
    let folder = folder(agent.parent().context("the agent is in no folder")?)
        .map(|folder| folder.join(QEMU));
    folder.filter(|folder| folder.is_dir()).context("no QEMU for VMs: cargo xtask lab vm --prepare")
}

/// Finds the folder of what VMs boot from, starting at the programs' folder.
fn folder(near: &Path) -> Option<PathBuf> {
    near.ancestors().map(|folder| folder.join(FOLDER)).find(|folder| folder.is_dir())
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
    // Other processes may be reading the old file.
    out.persist(to)?;
    Ok(())
}
