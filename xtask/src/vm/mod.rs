//! What the lab's virtual machines boot, made from Debian packages in cargo's target folder:
//! nothing is installed but QEMU.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`userland`] | programs and their libraries |
//! | [`kernel`] | the kernels and their modules |
//! | [`programs`] | programs of our own in C |
//! | [`qemu`] | a newer QEMU than the installed one |
//! | [`disk`] | the disk of a Debian with systemd |
//!
//! `tests/src/vm/image.rs` puts the parts together.

// Files of the lab's: this program is built without the lab, to be there soon.
#[path = "../../../tests/src/vm/cpio.rs"]
mod cpio;
mod disk;
mod kernel;
#[path = "../../../tests/src/vm/parts.rs"]
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
/// What cannot be had.
pub fn prepare(kernels: &[Kernel]) -> Result<()> {
    let folder = paths::target_dir()?.join(FOLDER);
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    userland::prepare(&folder).context("the programs for VMs")?;
    programs::prepare(&folder).context("the programs in tests/verbs")?;
    qemu::prepare(&folder).context("QEMU")?;
    disk::prepare(&folder).context("the disk of a Debian for VMs")?;
    for &kernel in kernels {
        kernel::prepare(&folder, kernel).with_context(|| format!("kernel {kernel} for VMs"))?;
    }
    Ok(())
}

/// Makes what is in `folder` from `key`, unless it was made from that before. A note beside it is
/// written at the end, so what was interrupted is made again.
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
    found.with_context(|| format!("no package has {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_made_again_when_their_key_changes_or_making_was_interrupted() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("part");
        let mut made = 0;
        let mut make = |key: &str, ends_well: bool| {
            let result = cached(&folder, key, || {
                made += 1;
                assert!(!folder.join("x").exists(), "what was there is gone");
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
