//! The kernels that VMs can run, and the names of the files that they boot. `cargo xtask`, which
//! prepares those files, includes this file, too.

use std::fmt;
use std::str::FromStr;

/// The kernels that VMs can run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// The kernel of Debian 12.
    #[default]
    V6_1,
    /// The last kernel made for Debian 12, from its backports.
    V6_12,
    /// The kernel of Debian's testing suite, whose version changes: for experiments, not for tests.
    Newest,
}

impl Kernel {
    /// The kernels of tests, whose versions are fixed.
    pub const ALL: [Self; 2] = [Self::V6_1, Self::V6_12];
    pub const EVERY: [Self; 3] = [Self::V6_1, Self::V6_12, Self::Newest];
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
            Self::Newest => "newest",
        })
    }
}

impl FromStr for Kernel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::EVERY.into_iter().find(|kernel| kernel.to_string() == text);
        found.ok_or_else(|| "6.1, 6.12 and newest are possible".into())
    }
}

/// The folder below cargo's target folder with all files that VMs boot from.
pub const FOLDER: &str = "vm";
/// In [`FOLDER`]: archive of Debian's programs.
pub const USERLAND: &str = "userland.cpio";
/// In [`FOLDER`]: programs of the project in C, by name.
pub const PROGRAMS: &str = "programs";
/// In each of the folders: a note of what it was made from.
pub const NOTE: &str = "made-from";
/// In [`FOLDER`]: a newer QEMU, unpacked from its packages.
pub const QEMU: &str = "qemu";
/// In a kernel's folder below [`FOLDER`]: archive of its modules.
pub const MODULES: &str = "modules.cpio";
/// In a kernel's folder: the kernel.
pub const KERNEL: &str = "kernel";
/// In a kernel's folder: archive of the modules for a disk.
pub const DISK_MODULES: &str = "disk-modules.cpio";
/// In [`FOLDER`]: the disk of a Debian with systemd, in a folder of its own.
pub const DISK: &str = "debian/disk.img";
/// In the VM: the list of modules in load order.
pub const MODULE_LIST: &str = "/lib/modules/list";
/// In a VM with a disk: the same for the disk's modules.
pub const DISK_MODULE_LIST: &str = "/lib/modules/disk-list";
