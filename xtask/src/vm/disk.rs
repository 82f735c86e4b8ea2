//! The disk of a Debian with systemd, as its installer would leave it. Tests use it for the
//! package, the unit and the guide.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::parts::DISK;
use super::{cached, userland::RELEASE};
use crate::debian;
use crate::paths::{find_program, output};

/// Packages besides those that every Debian has. `bpftool` shows what remains in the kernel.
const PACKAGES: [&str; 9] = [
    "apparmor",
    "bpftool",
    "dbus",
    "ethtool",
    "iproute2",
    "kmod",
    "procps",
    "systemd-sysv",
    "udev",
];

/// Files that an installer would write.
const FILES: [(&str, &str); 4] = [
    ("etc/fstab", "/dev/vda / ext4 defaults 0 1\n"),
    ("etc/hostname", "box\n"),
    ("etc/hosts", "127.0.0.1 localhost\n127.0.1.1 box\n"),
    // Without it systemd takes this for a first boot, and enables all its units.
    ("etc/machine-id", "6e657473756d6e657473756d6e657473\n"),
];

/// Its size; blocks that are not written take no space here.
const SIZE: &str = "1G";

/// Makes the disk, unless it is there.
pub fn prepare(folder: &Path) -> Result<()> {
    let disk = folder.join(DISK);
    let own = disk.parent().context("the disk is in no folder")?;
    let key = format!("1 {RELEASE} {PACKAGES:?} {FILES:?} {SIZE}");
    cached(own, &key, || {
        println!("installing a Debian {RELEASE} for VMs: about 80 MB to fetch");
        let tree = own.join("tree");
        bootstrap(&tree)?;
        for (name, text) in FILES {
            fs::write(tree.join(name), text).with_context(|| name.to_owned())?;
        }
        for cache in ["var/cache/apt/archives", "var/lib/apt/lists"] {
            fs::remove_dir_all(tree.join(cache)).with_context(|| cache.to_owned())?;
            fs::create_dir_all(tree.join(cache).join("partial"))?;
        }
        let mut mke2fs = program("mke2fs")?;
        output(mke2fs.args(["-q", "-t", "ext4", "-d"]).arg(&tree).arg(&disk).arg(SIZE))?;
        Ok(fs::remove_dir_all(tree)?)
    })
}

/// Runs debootstrap in a mount namespace of its own, which ends debootstrap's mounts.
fn bootstrap(tree: &Path) -> Result<()> {
    let mut unshare = Command::new("unshare");
    unshare
        .args(["--mount", "--propagation", "private"])
        .arg(program("debootstrap")?.get_program());
    unshare.args(["--variant=minbase", &format!("--include={}", PACKAGES.join(","))]);
    unshare
        .arg(format!("--keyring={}", debian::KEYRING))
        .arg(RELEASE)
        .arg(tree)
        .arg(debian::mirror()?);
    // It needs root's programs, and its messages must be in English.
    unshare.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    output(&mut unshare).map(drop)
}

fn program(name: &str) -> Result<Command> {
    Ok(Command::new(find_program(name).with_context(|| format!("no {name}"))?))
}
