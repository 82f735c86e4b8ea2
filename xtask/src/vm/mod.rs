//! Makes the files that the lab's virtual machines boot from Debian packages, in cargo's target
//! folder. Only QEMU is installed.
//!
//! | module | content |
//! | --- | --- |
//! | [`userland`] | programs and their libraries |
//! | [`kernel`] | the kernels and their modules |
//! | [`programs`] | our own programs in C |
//! | [`qemu`] | a QEMU that is newer than the installed one |
//! | [`disk`] | the disk of a Debian with systemd |
//!
//! `lab/src/vm/image.rs` puts the parts together.

// Shared with the lab: this program is built without the lab, to build fast.
#[path = "../../../lab/src/vm/cpio.rs"]
mod cpio;
mod disk;
mod kernel;
#[path = "../../../lab/src/vm/parts.rs"]
mod parts;
mod programs;
mod qemu;
mod userland;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
pub use parts::Kernel;
use parts::{FOLDER, NOTE};

use crate::paths;

/// Makes all parts that are missing or were made from something else.
///
/// # Errors
/// If something cannot be fetched or built.
pub fn prepare(kernels: &[Kernel]) -> Result<()> {
    let folder = paths::target_dir()?.join(FOLDER);
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    userland::prepare(&folder).context("the programs for VMs")?;
    programs::prepare(&folder).context("the programs in lab/verbs")?;
    qemu::prepare(&folder).context("QEMU")?;
    disk::prepare(&folder).context("the disk of a Debian for VMs")?;
    for &kernel in kernels {
        kernel::prepare(&folder, kernel).with_context(|| format!("kernel {kernel} for VMs"))?;
    }
    Ok(())
}

/// Makes the content of `folder` from `key`, unless that was done before. A note next to it is
/// written at the end, so an interrupted run starts again.
fn cached(folder: &Path, key: &str, make: impl FnOnce() -> Result<()>) -> Result<()> {
    let note = folder.join(NOTE);
    if fs::read_to_string(&note).is_ok_and(|made_from| made_from == key) {
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    make()?;
    Ok(fs::write(note, key)?)
}

/// The first of these folders that has the file.
fn find(folders: &[PathBuf], name: &str) -> Result<PathBuf> {
    let found = folders.iter().map(|folder| folder.join(name)).find(|path| path.exists());
    found.with_context(|| format!("{name} is not in any of the packages"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_made_again_when_their_key_changes_or_a_run_was_interrupted() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("part");
        let mut made = 0;
        let mut make = |key: &str, ends_well: bool| {
            let result = cached(&folder, key, || {
                made += 1;
                assert!(!folder.join("x").exists(), "the old files were not removed");
                fs::write(folder.join("x"), key)?;
                anyhow::ensure!(ends_well, "interrupted");
                Ok(())
            });
            (result.is_ok(), made)
        };
        assert_eq!(make("a", false), (false, 1));
        assert_eq!(make("a", true), (true, 2));
        assert_eq!(make("a", true), (true, 2));
        assert_eq!(make("b", true), (true, 3));
    }
}
