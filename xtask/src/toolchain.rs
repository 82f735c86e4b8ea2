//! What building for BPF takes: a nightly compiler, bpf-linker, and the source of `core`. Sets up what is missing.
//!
//! Nothing of it goes further than the target folder, but for a link from the nightly's sysroot to the source of `core`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::paths;

/// Has to fit the LLVM of the nightly compiler (22); later ones want an LLVM of their own.
const BPF_LINKER: &str = "0.10.3";
/// The Debian suite whose `rust-src` is close enough to the nightly compiler for `core`.
const SUITE: &str = "forky";

/// A complete toolchain.
#[derive(Debug)]
pub struct Toolchain {
    /// The linker's executable.
    pub linker: PathBuf,
    /// The source of `core`.
    pub library: PathBuf,
    /// The compiler's version.
    pub version: String,
}

impl Toolchain {
    /// Looks for the parts and gets those that are missing.
    ///
    /// # Errors
    /// The part that cannot be had, and why.
    pub fn set_up() -> Result<Self> {
        let sysroot = output(nightly("rustc").args(["--print", "sysroot"]))
            .context("no nightly Rust (`rustup toolchain install nightly`)")?;
        let version = output(nightly("rustc").arg("--version"))?.trim().to_owned();
        let home = paths::target_dir()?.join("ebpf-toolchain");
        fs::create_dir_all(&home).with_context(|| home.display().to_string())?;
        let linker = bpf_linker(&home).with_context(|| format!("no bpf-linker {BPF_LINKER}"))?;
        let library = rust_src(&home, Path::new(sysroot.trim())).context("no source of Rust's `core`")?;
        Ok(Self { linker, library, version })
    }
}

/// A command of the nightly toolchain, free of what `cargo run` has set for us and meant for stable.
pub fn nightly(program: &str) -> Command {
    let mut command = Command::new(program);
    command.arg("+nightly");
    // A newcomer's nightly must not appear from a mere look at its version.
    command.env("RUSTUP_AUTO_INSTALL", "0");
    for name in
        ["RUSTUP_TOOLCHAIN", "LD_LIBRARY_PATH", "CARGO", "RUSTC", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"]
    {
        command.env_remove(name);
    }
    command
}

/// Runs a command to its end and returns what it printed; an error holds the command and the last lines of what it said.
pub fn output(command: &mut Command) -> Result<String> {
    let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
    let line = words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let out = command.output().with_context(|| format!("cannot start {line}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&out.stderr);
    let lines: Vec<&str> = said.trim().lines().collect();
    bail!("{line}: {}: {}", out.status, lines[lines.len().saturating_sub(30)..].join("\n"))
}

fn bpf_linker(home: &Path) -> Result<PathBuf> {
    let linker = home.join("bin/bpf-linker");
    let right = |path: &Path| {
        output(Command::new(path).arg("--version"))
            .is_ok_and(|v| v.split_whitespace().any(|w| w == BPF_LINKER))
    };
    if !right(&linker) {
        println!(
            "installing bpf-linker {BPF_LINKER} into {}: it links BPF objects (about a minute)",
            home.display()
        );
        output(
            nightly("cargo").args(["install", "--quiet", "--locked", "--force", "--root"]).arg(home).args([
                "--target-dir",
                &home.join("build").display().to_string(),
                &format!("bpf-linker@{BPF_LINKER}"),
            ]),
        )?;
    }
    Ok(linker)
}

/// The source of `core` where cargo's `build-std` looks for it.
fn rust_src(home: &Path, sysroot: &Path) -> Result<PathBuf> {
    let place = sysroot.join("lib/rustlib/src/rust/library");
    let usable = |library: &Path| library.join("core/src/lib.rs").is_file();
    if usable(&place) {
        return Ok(place);
    }
    let unpacked = home.join("rust-src");
    if unpacked_library(&unpacked).is_none() {
        download_rust_src(home, &unpacked)?;
    }
    let library = unpacked_library(&unpacked).with_context(|| {
        format!("the package rust-src has no usr/src/rustc-*/library: {}", unpacked.display())
    })?;
    println!("linking {} to {}", place.display(), library.display());
    fs::create_dir_all(place.parent().context("sysroot")?)?;
    if place.symlink_metadata().is_ok_and(|m| m.is_symlink()) {
        // To a workspace that is gone.
        fs::remove_file(&place)?;
    }
    std::os::unix::fs::symlink(&library, &place)
        .with_context(|| format!("cannot link {}", place.display()))?;
    Ok(place)
}

fn unpacked_library(unpacked: &Path) -> Option<PathBuf> {
    fs::read_dir(unpacked.join("usr/src"))
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path().join("library")))
        .find(|library| library.join("core/src/lib.rs").is_file())
}

/// Fetches Debian's package `rust-src`, with apt's lists and state in a folder of our own: the machine's stay as they are.
fn download_rust_src(home: &Path, unpacked: &Path) -> Result<()> {
    let mirror = debian_mirror()?;
    println!(
        "fetching the package rust-src of Debian {SUITE} from {mirror}: the source of `core` (about 65 MB)"
    );
    let apt = home.join("apt");
    for folder in ["lists/partial", "cache/archives/partial", "state"] {
        fs::create_dir_all(apt.join(folder))?;
    }
    let list = apt.join("sources.list");
    fs::write(
        &list,
        format!("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {mirror} {SUITE} main\n"),
    )?;
    let apt_get = |arguments: &[&str]| {
        let options = [
            format!("Dir::Etc::SourceList={}", list.display()),
            "Dir::Etc::SourceParts=/dev/null".into(),
            format!("Dir::State::Lists={}", apt.join("lists").display()),
            format!("Dir::Cache={}", apt.join("cache").display()),
            format!("Dir::State={}", apt.join("state").display()),
            "Dir::State::status=/var/lib/dpkg/status".into(),
            // What the machine does after updates of its own is no business of ours.
            "APT::Update::Post-Invoke-Success=".into(),
            "Acquire::Languages=none".into(),
        ];
        let mut command = Command::new("apt-get");
        command.current_dir(&apt).arg("-q");
        for option in options {
            command.args(["-o", &option]);
        }
        output(command.args(arguments))
    };
    apt_get(&["update"])?;
    apt_get(&["download", "rust-src"])?;
    let package = fs::read_dir(&apt)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "deb"))
        .context("apt-get download left no package")?;
    output(Command::new("dpkg").arg("-x").args([&package, unpacked]))?;
    fs::remove_dir_all(&apt).context("apt's folder")
}

/// The mirror that the machine's own Debian packages come from.
fn debian_mirror() -> Result<String> {
    let mut texts = Vec::new();
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        let mut paths: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
        paths.sort();
        texts.extend(paths.iter().filter_map(|p| fs::read_to_string(p).ok()));
    }
    texts.extend(fs::read_to_string("/etc/apt/sources.list"));
    texts
        .iter()
        .find_map(|text| mirror_in(text))
        .context("no Debian mirror in /etc/apt/sources.list or sources.list.d")
}

/// The first archive of whole Debian in a list of either format (sources.list(5)): other archives, and that of security
/// updates, do not end in `/debian`.
fn mirror_in(text: &str) -> Option<String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let uris = lines.flat_map(|line| {
        let of_deb822 = line.strip_prefix("URIs:").or_else(|| line.strip_prefix("uris:"));
        let of_one_line = line.strip_prefix("deb ").or_else(|| line.strip_prefix("deb\t"));
        of_deb822.or(of_one_line).unwrap_or_default().split_whitespace()
    });
    uris.filter(|uri| uri.contains("://"))
        .find(|uri| uri.trim_end_matches('/').ends_with("/debian"))
        .map(|uri| uri.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirror_is_found_in_both_formats() {
        let deb822 = "Types: deb\n# http://old.example/debian\nURIs: http://m.example/debian-security\n\
                      Suites: x\n\nTypes: deb\nURIs: http://m.example/debian\n";
        assert_eq!(mirror_in(deb822).as_deref(), Some("http://m.example/debian"));
        let one_line = "# deb http://old.example/debian x main\ndeb [signed-by=/k.gpg] http://n.example/debian/ x main\n";
        assert_eq!(mirror_in(one_line).as_deref(), Some("http://n.example/debian"));
        assert_eq!(mirror_in("deb https://other.example/apt stable main\n"), None);
        assert_eq!(mirror_in(""), None);
    }
}
