//! A QEMU that is newer than Debian 12's (`qemu` in `lab/src/vm/mod.rs` says why). It runs from
//! its folder, with the libraries of the installed one.

use std::path::Path;

use anyhow::Result;

use super::cached;
use super::parts::QEMU;
use crate::debian::{self, Archive};

const SUITE: &str = "bookworm-backports";
/// The emulator, its modules, and the BIOSes.
const PACKAGES: [&str; 4] =
    ["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"];

/// Unpacks it, unless it exists.
pub fn prepare(folder: &Path) -> Result<()> {
    let own = folder.join(QEMU);
    cached(&own, &format!("1 {SUITE} {PACKAGES:?}"), || {
        println!("fetching QEMU of Debian {SUITE} for VMs: about 15 MB");
        let archive = Archive::open(&folder.join("apt"), &[SUITE])?;
        let packages = PACKAGES.map(|name| format!("{name}/{SUITE}"));
        let files = archive.download(&packages.each_ref().map(String::as_str))?;
        files.iter().try_for_each(|package| debian::unpack(package, &own))
    })
}
