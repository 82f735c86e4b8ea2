//! Debian's kernels, and the modules that VMs load.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::cpio::Cpio;
use super::parts::{DISK_MODULE_LIST, DISK_MODULES, KERNEL, Kernel, MODULE_LIST, MODULES};
use anyhow::{Context, Result, ensure};
use object::{Object, ObjectSection};

use super::{cached, userland};
use crate::debian::Archive;

/// Modules that VMs load, and with them what they depend on. `crc32_generic` is no dependency that
/// the module names, but without it Soft-RoCE cannot be set up (ENOENT).
const WANTED: [&str; 13] = [
    "virtio_pci",
    "virtio_net",
    "af_packet",
    "8021q",
    "crc32_generic",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
    // For VMs that are boxes.
    "bridge",
    "veth",
    "bonding",
    // Behind virtio_net: a machine's first interface is the lab's way in.
    "vmxnet3",
    "igb",
];

/// More modules for VMs with a disk; their dependencies are added. ext4 does not name
/// `crc32c_generic` as a dependency.
const FOR_DISK: [&str; 4] = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"];

/// Modules that newer kernels have built in.
const UNTIL_LINUX_6: [&str; 2] = ["crc32_generic", "crc32c_generic"];

/// Decompresses modules.
const XZ: &str = "xz";

/// Parts of the package where those and their dependencies are.
const PARTS: [&str; 28] = [
    "./boot/vmlinuz-*",
    "./lib/modules/*/modules.builtin",
    "./lib/modules/*/kernel/arch/x86/crypto/*",
    "./lib/modules/*/kernel/crypto/*",
    "./lib/modules/*/kernel/drivers/block/virtio_blk*",
    "./lib/modules/*/kernel/drivers/dca/*",
    "./lib/modules/*/kernel/drivers/i2c/*",
    "./lib/modules/*/kernel/drivers/infiniband/core/*",
    "./lib/modules/*/kernel/drivers/infiniband/sw/rxe/*",
    "./lib/modules/*/kernel/drivers/net/bonding/*",
    "./lib/modules/*/kernel/drivers/net/ethernet/intel/igb/*",
    "./lib/modules/*/kernel/drivers/net/net_failover*",
    "./lib/modules/*/kernel/drivers/net/veth*",
    "./lib/modules/*/kernel/drivers/net/virtio_net*",
    "./lib/modules/*/kernel/drivers/net/vmxnet3/*",
    "./lib/modules/*/kernel/drivers/pps/*",
    "./lib/modules/*/kernel/drivers/ptp/*",
    "./lib/modules/*/kernel/drivers/virtio/*",
    "./lib/modules/*/kernel/fs/configfs/*",
    "./lib/modules/*/kernel/fs/ext4/*",
    "./lib/modules/*/kernel/fs/jbd2/*",
    "./lib/modules/*/kernel/fs/mbcache*",
    "./lib/modules/*/kernel/lib/*",
    "./lib/modules/*/kernel/net/802*",
    "./lib/modules/*/kernel/net/bridge/*",
    "./lib/modules/*/kernel/net/[cilp]*",
    "./lib/modules/*/kernel/net/tls/*",
    "./usr/lib/modules/*",
];

fn suite(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::V6_1 => "bookworm",
        Kernel::V6_12 => "bookworm-backports",
        Kernel::Newest => "forky",
    }
}

/// Makes a kernel's folder, unless it exists.
pub fn prepare(folder: &Path, kernel: Kernel) -> Result<()> {
    let suite = suite(kernel);
    let own = folder.join(kernel.to_string());
    let key = format!("8 {suite} {WANTED:?} {FOR_DISK:?}");
    cached(&own, &key, || {
        println!("fetching the kernel of Debian {suite} for VMs: about 100 MB");
        let archive = Archive::open(&folder.join("apt"), &[suite])?;
        let unpacked = own.join("unpacked");
        for package in packages(&archive, suite)? {
            unpack_parts(&package, &unpacked)?;
        }
        let modules = ["lib/modules", "usr/lib/modules"].map(|folder| unpacked.join(folder));
        let modules =
            modules.iter().find(|folder| folder.is_dir()).context("no modules in the package")?;
        let release = fs::read_dir(modules)?.next().context("no modules in the package")??.path();
        let image = match fs::read_dir(unpacked.join("boot")) {
            Ok(mut boot) => boot.next().context("no kernel in the package")??.path(),
            Err(_) => release.join("vmlinuz"),
        };
        // They need libraries that apt needs too.
        let tools = folder.join(userland::UNPACKED).join("usr/bin");
        write_kernel(
            &fs::read(&image).with_context(|| image.display().to_string())?,
            &tools,
            &own.join(KERNEL),
        )?;
        for (wanted, archive, list) in
            [(&WANTED[..], MODULES, MODULE_LIST), (&FOR_DISK, DISK_MODULES, DISK_MODULE_LIST)]
        {
            write_modules(&release, &tools, wanted, &own.join(archive), list)?;
        }
        Ok(fs::remove_dir_all(unpacked)?)
    })
}

/// The package of a kernel, which a metapackage names, and those with its parts if they are
/// separate (Linux 7 of Debian).
fn packages(archive: &Archive, suite: &str) -> Result<Vec<PathBuf>> {
    let meta =
        archive.download(&[&format!("linux-image-amd64/{suite}")])?.pop().context("no package")?;
    let mut packages = archive.download_behind(&meta, &["linux-image-"])?;
    let image = packages.first().context("linux-image-amd64 depends on no kernel")?;
    packages.extend(
        archive.download_behind(image, &["linux-base-", "linux-binary-", "linux-modules-"])?,
    );
    Ok(packages)
}

/// Unpacks only the needed parts: all modules are 400 MB.
fn unpack_parts(package: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let mut archive = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut tar = Command::new("tar");
    tar.args(["-x", "--wildcards", "-C"]).arg(to).args(PARTS);
    // Some kernels have some parts built in, of which tar complains; a part that is really missing
    // is found below.
    tar.stdin(archive.stdout.take().context("stdout")?).stderr(Stdio::null());
    tar.status().context("cannot start tar")?;
    let status = archive.wait()?;
    ensure!(status.success(), "dpkg-deb {}: {status}", package.display());
    Ok(())
}

/// Writes a kernel, uncompressed if possible: decompressing takes up to half of a VM's boot time.
/// QEMU starts either (PVH).
fn write_kernel(image: &[u8], tools: &Path, to: &Path) -> Result<()> {
    match payload(image) {
        Some((program, payload)) => fs::write(to, decompressed(&tools.join(program), payload)?)?,
        None => fs::write(to, image)?,
    }
    Ok(())
}

/// Formats of compressed kernels: the first bytes, and the program that decompresses them.
const FORMATS: [(&[u8], &str); 2] = [(b"\xfd7zXZ\0", XZ), (b"\x28\xb5\x2f\xfd", "zstd")];

/// The compressed kernel in an image (Documentation/arch/x86/boot.rst), without the size at its
/// end, and the program for it.
fn payload(image: &[u8]) -> Option<(&'static str, &[u8])> {
    let word =
        |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    let sectors = usize::from(*image.get(0x1f1)?);
    let from = (sectors + 1) * 512 + word(0x248)?;
    let payload = image.get(from..from.checked_add(word(0x24c)?.checked_sub(4)?)?)?;
    let (_, program) = FORMATS.into_iter().find(|(magic, _)| payload.starts_with(magic))?;
    (&image[0x202..0x206] == b"HdrS").then_some((program, payload))
}

fn write_modules(
    release: &Path,
    tools: &Path,
    wanted: &[&str],
    to: &Path,
    list: &str,
) -> Result<()> {
    let built_in = fs::read_to_string(release.join("modules.builtin"))?;
    let built_in: Vec<String> = built_in.lines().filter_map(|line| name(Path::new(line))).collect();
    let mut files = BTreeMap::new();
    collect(&release.join("kernel"), &mut files)?;
    let mut read = BTreeMap::new();
    let is_there = |module: &&str| !UNTIL_LINUX_6.contains(module) || files.contains_key(*module);
    let wanted: Vec<_> = wanted.iter().copied().filter(is_there).collect();
    let order = load_order(&wanted, &built_in, |module| {
        let path =
            files.get(module).with_context(|| format!("no module {module} in the package"))?;
        let bytes = contents(path, tools)?;
        let depends = depends(&bytes).with_context(|| module.to_owned())?;
        read.insert(module.to_owned(), bytes);
        Ok(depends)
    })?;
    let mut cpio = Cpio::new(BufWriter::new(File::create(to)?));
    let mut paths = String::new();
    for module in order {
        let path = format!("/lib/modules/{module}.ko");
        paths += &format!("{path}\n");
        cpio.file(path, 0o644, &read[&module])?;
    }
    cpio.file(list, 0o644, paths.as_bytes())?;
    cpio.finish()?;
    Ok(())
}

/// A module's name, from its file's: `kernel/crypto/crc32c-intel.ko.xz`.
fn name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let (name, _) = file.split_once(".ko")?;
    Some(name.replace('-', "_"))
}

fn collect(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if let Some(name) = name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

fn contents(path: &Path, tools: &Path) -> Result<Vec<u8>> {
    if path.extension().is_some_and(|e| e == "ko") {
        return Ok(fs::read(path)?);
    }
    decompressed(&tools.join(XZ), &fs::read(path)?).with_context(|| path.display().to_string())
}

fn decompressed(program: &Path, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut compressed = tempfile::tempfile()?;
    compressed.write_all(bytes)?;
    compressed.rewind()?;
    let out = Command::new(program).arg("-dc").stdin(compressed).output();
    let out = out.with_context(|| program.display().to_string())?;
    let printed = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "{} -dc: {}", program.display(), printed.trim());
    Ok(out.stdout)
}

/// The dependencies that a module names.
fn depends(bytes: &[u8]) -> Result<Vec<String>> {
    let file = object::File::parse(bytes)?;
    let info = file.section_by_name(".modinfo").context("no .modinfo")?.data()?;
    let depends = info.split(|&b| b == 0).find_map(|entry| entry.strip_prefix(b"depends="));
    let depends = String::from_utf8(depends.unwrap_or_default().to_vec())?;
    Ok(depends
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect())
}

/// Modules in an order that loads dependencies first.
fn load_order(
    wanted: &[&str],
    built_in: &[String],
    mut depends: impl FnMut(&str) -> Result<Vec<String>>,
) -> Result<Vec<String>> {
    fn visit(
        module: &str,
        built_in: &[String],
        depends: &mut impl FnMut(&str) -> Result<Vec<String>>,
        order: &mut Vec<String>,
    ) -> Result<()> {
        if order.iter().chain(built_in).any(|known| known == module) {
            return Ok(());
        }
        // Dependencies have no cycles: the kernel could not load such modules.
        for dependency in depends(module)? {
            visit(&dependency, built_in, depends, order)?;
        }
        order.push(module.to_owned());
        Ok(())
    }
    let mut order = Vec::new();
    for module in wanted {
        visit(module, built_in, &mut depends, &mut order)?;
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_their_dependencies_once_and_not_if_built_in() {
        let depends = |module: &str| {
            let on: &[&str] = match module {
                "rxe" => &["core", "tunnel", "crc"],
                "uverbs" => &["core"],
                "tunnel" => &["core", "ip"],
                "core" | "crc" => &[],
                other => anyhow::bail!("no module {other}"),
            };
            Ok(on.iter().map(|&name| name.to_owned()).collect())
        };
        let order = load_order(&["uverbs", "rxe"], &["ip".to_owned()], depends).unwrap();
        assert_eq!(order, ["core", "uverbs", "tunnel", "crc", "rxe"]);
        let error = load_order(&["rxe"], &[], depends).unwrap_err();
        assert_eq!(error.to_string(), "no module ip");
    }

    #[test]
    fn a_compressed_kernel_is_found_in_its_image() {
        let mut image = vec![0; 4096];
        image[0x1f1] = 3;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&100u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&14u32.to_le_bytes());
        image[2148..2162].copy_from_slice(b"\xfd7zXZ\0abcdsize");
        assert_eq!(payload(&image), Some(("xz", &b"\xfd7zXZ\0abcd"[..])));
        image[2148] = 0x1f;
        assert_eq!(payload(&image), None, "another format");
        for short in [0, 0x1f1, 0x24e, 2150] {
            assert_eq!(payload(&image[..short]), None);
        }
    }

    #[test]
    fn a_modules_name_has_no_dashes() {
        assert_eq!(name(Path::new("a/crc32c-intel.ko.xz")).as_deref(), Some("crc32c_intel"));
        assert_eq!(name(Path::new("a/b.ko")).as_deref(), Some("b"));
        assert_eq!(name(Path::new("modules.order")), None);
    }
}
