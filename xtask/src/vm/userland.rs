//! Programs for VMs and the libraries that they need, from Debian packages.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use super::cpio::Cpio;
use super::parts::USERLAND;
use anyhow::{Context, Result, ensure};
use object::elf::FileHeader64;
use object::read::elf::{Dyn, FileHeader};
use object::{Endianness, elf};

use super::{cached, find};
use crate::debian::{self, Archive};

/// Packages. Libraries are listed because a program needs them, which is checked. The compressors
/// are for this machine.
const PACKAGES: [&str; 26] = [
    "busybox-static",
    "ethtool",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "libbpf1",
    "libbsd0",
    "libc6",
    "libcap2",
    "libelf1",
    "libgcc-s1",
    "libibumad3",
    "libibverbs-dev",
    "libibverbs1",
    "libmd0",
    "libmnl0",
    "libnl-3-200",
    "libnl-route-3-200",
    "libpci3",
    "librdmacm1",
    "libudev1",
    "perftest",
    "rdmacm-utils",
    "xz-utils",
    "zlib1g",
    "zstd",
];

/// Their release of Debian, Debian 12.
pub const RELEASE: &str = "bookworm";

/// Programs in the VMs' /usr/bin.
const PROGRAMS: [&str; 16] = [
    "ethtool",
    "ib_read_bw",
    "ib_read_lat",
    "ib_send_bw",
    "ib_send_lat",
    "ib_write_bw",
    "ib_write_lat",
    "ibv_devices",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ibv_uc_pingpong",
    "ibv_ud_pingpong",
    "ip",
    "rdma",
    "rping",
    "udaddy",
];

/// Libraries that programs load by name, or that the project's own programs need.
const LIBRARIES: [&str; 5] =
    ["libc.so.6", "libgcc_s.so.1", "libibverbs.so.1", "libm.so.6", "librdmacm.so.1"];

/// The provider that libibverbs loads, and its configuration; the paths in packages and in VMs.
const PROVIDER: &str = "usr/lib/x86_64-linux-gnu/libibverbs";
const PROVIDERS: &str = "etc/libibverbs.d";

/// The folder of libraries in VMs.
const LIB: &str = "usr/lib/x86_64-linux-gnu";
/// The loader that all programs name.
const LOADER: &str = "lib64/ld-linux-x86-64.so.2";

/// The folder of the unpacked packages.
pub const UNPACKED: &str = "unpacked";

/// Makes the archive, unless it exists.
pub fn prepare(folder: &Path) -> Result<()> {
    let release = debian::codename()?;
    // Programs compiled here run there, with the packages' C library; and package names differ
    // between releases.
    ensure!(
        release == RELEASE,
        "VMs are made from packages of Debian {RELEASE}, but this machine runs {release}"
    );
    let own = folder.join(UNPACKED);
    let key = format!("1 {RELEASE} {PACKAGES:?} {PROGRAMS:?} {LIBRARIES:?}");
    cached(&own, &key, || {
        let archive = Archive::open(&folder.join("apt"), &[RELEASE])?;
        println!("fetching {} packages of Debian {RELEASE} for VMs: about 10 MB", PACKAGES.len());
        for package in archive.download(&PACKAGES)? {
            debian::unpack(&package, &own)?;
        }
        drop(fs::remove_dir_all(own.join("usr/share")));
        write(&own, &folder.join(USERLAND))
    })
}

fn write(root: &Path, to: &Path) -> Result<()> {
    let at = |folders: &[&str]| folders.iter().map(|folder| root.join(folder)).collect::<Vec<_>>();
    let bin = at(&["usr/bin", "usr/sbin", "bin", "sbin"]);
    let lib = at(&["lib/x86_64-linux-gnu", LIB]);
    let mut cpio = Cpio::new(BufWriter::new(File::create(to)?));
    let mut needed: BTreeSet<String> = LIBRARIES.map(str::to_owned).into();
    for program in PROGRAMS {
        let bytes = fs::read(find(&bin, program)?)?;
        needed.extend(needs(&bytes).with_context(|| program.to_owned())?);
        cpio.file(Path::new("usr/bin").join(program), 0o755, &bytes)?;
    }
    let provider = fs::read_dir(root.join(PROVIDER))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("librxe-"))
        })
        .context("no provider for rxe")?;
    cpio.file(provider.strip_prefix(root)?, 0o644, &fs::read(&provider)?)?;
    cpio.file(
        Path::new(PROVIDERS).join("rxe.driver"),
        0o644,
        &fs::read(root.join(PROVIDERS).join("rxe.driver"))?,
    )?;
    libraries(needed, &lib, |name, bytes| {
        Ok(cpio.file(Path::new(LIB).join(name), 0o755, bytes)?)
    })?;
    cpio.link(LOADER, Path::new("/").join(LIB).join("ld-linux-x86-64.so.2"))?;
    cpio.file("bin/busybox", 0o755, &fs::read(find(&bin, "busybox")?)?)?;
    cpio.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
    cpio.file("etc/group", 0o644, b"root:x:0:\n")?;
    cpio.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n::1 localhost\n")?;
    cpio.finish()?;
    Ok(())
}

/// These libraries, and those that they need.
fn libraries(
    mut open: BTreeSet<String>,
    folders: &[PathBuf],
    mut add: impl FnMut(&str, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut done = BTreeSet::new();
    while let Some(name) = open.pop_first() {
        if done.insert(name.clone()) {
            let bytes = fs::read(find(folders, &name)?)?;
            open.extend(needs(&bytes).with_context(|| name.clone())?);
            add(&name, &bytes)?;
        }
    }
    Ok(())
}

/// The libraries that a program or library names (DT_NEEDED).
pub fn needs(bytes: &[u8]) -> Result<Vec<String>> {
    let header = FileHeader64::<Endianness>::parse(bytes)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    let Some((dynamic, strings)) = sections.dynamic(endian, bytes)? else { return Ok(Vec::new()) };
    let strings = sections.strings(endian, bytes, strings)?;
    let needed = dynamic.iter().filter(|entry| entry.tag(endian) == elf::DT_NEEDED);
    needed.map(|entry| Ok(String::from_utf8(entry.string(endian, strings)?.to_vec())?)).collect()
}
