//! Boots the system on a disk, as an initial RAM disk does, and has its systemd start the agent.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use netsum_lab::vm::parts::DISK_MODULE_LIST;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::chroot;

use crate::SERVE;
use crate::start::{load_all, wait_for};

/// Parameter on the kernel's command line with the disk's device.
pub const GIVEN: &str = "lab_disk";

const ROOT: &str = "/disk";

/// Becomes the init of the system on the disk.
pub fn boot(disk: &Path) -> Result<()> {
    load_all(DISK_MODULE_LIST)?;
    wait_for(disk)?;
    fs::create_dir_all(ROOT)?;
    mount(Some(disk), ROOT, Some("ext4"), MsFlags::empty(), None::<&str>).context("the disk")?;
    agent(Path::new(ROOT))?;
    // The init on the disk mounts these itself.
    for folder in ["/sys", "/proc", "/dev"] {
        umount2(folder, MntFlags::MNT_DETACH).context(folder)?;
    }
    std::env::set_current_dir(ROOT)?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>).context("the disk as /")?;
    chroot(".")?;
    Err(Command::new("/sbin/init").env_clear().exec()).context("/sbin/init")
}

/// Installs the agent and its unit under `/run`, and leaves the disk unchanged.
fn agent(root: &Path) -> Result<()> {
    let run = root.join("run");
    mount(
        Some("tmpfs"),
        &run,
        Some("tmpfs"),
        MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
        Some("mode=755"),
    )
    .context("/run")?;
    fs::copy("/usr/bin/lab-agent", run.join("lab-agent")).context("the agent")?;
    let units = run.join("systemd/system");
    let wanted = units.join("multi-user.target.wants");
    fs::create_dir_all(&wanted)?;
    let unit = format!(
        "[Unit]\nDescription=the lab's way in\n[Service]\nExecStart=/run/lab-agent {SERVE}\n"
    );
    fs::write(units.join("lab-agent.service"), unit)?;
    Ok(symlink("../lab-agent.service", wanted.join("lab-agent.service"))?)
}
