//! Fetches Debian packages from the machine's own mirror without installing them. apt's lists and
//! state are in a folder of their own, which leaves the machine's as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::paths::output;

/// The keyring that every Debian has.
pub const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Package lists of some suites. The folder is removed on drop.
#[derive(Debug)]
pub struct Archive {
    folder: PathBuf,
    /// The URL that packages are fetched from.
    pub mirror: String,
}

impl Archive {
    /// Fetches the package lists of these suites into a fresh folder.
    ///
    /// # Errors
    /// If the machine has no mirror configured or cannot reach it.
    pub fn open(folder: &Path, suites: &[&str]) -> Result<Self> {
        let archive = Self { folder: folder.to_owned(), mirror: mirror()? };
        // A killed run may have left the folder.
        drop(fs::remove_dir_all(folder));
        for part in ["lists/partial", "cache/archives/partial", "state", "packages"] {
            fs::create_dir_all(folder.join(part)).with_context(|| folder.display().to_string())?;
        }
        // An empty status file: apt prefers installed versions, which the mirror may not have.
        fs::write(folder.join("status"), "")?;
        let line =
            |suite: &&str| format!("deb [signed-by={KEYRING}] {} {suite} main\n", archive.mirror);
        fs::write(folder.join("sources.list"), suites.iter().map(line).collect::<String>())?;
        archive.apt_get(&["update"])?;
        Ok(archive)
    }

    /// Fetches packages, each `name` or `name/suite`; returns their files in this order.
    pub fn download(&self, packages: &[&str]) -> Result<Vec<PathBuf>> {
        let folder = self.folder.join("packages");
        let mut files = Vec::new();
        self.apt_get(&[&["download"], packages].concat())?;
        for package in packages {
            let name = package.split('/').next().unwrap_or_default();
            let prefix = format!("{name}_");
            let found =
                fs::read_dir(&folder)?.filter_map(|entry| Some(entry.ok()?.path())).find(|path| {
                    path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&prefix))
                });
            files.push(found.with_context(|| format!("apt-get download left no package {name}"))?);
        }
        Ok(files)
    }

    /// Fetches the dependencies of a package whose names have one of these prefixes.
    pub fn download_behind(&self, package: &Path, prefixes: &[&str]) -> Result<Vec<PathBuf>> {
        let depends = output(Command::new("dpkg-deb").arg("-f").arg(package).arg("Depends"))?;
        let names = dependencies(&depends)
            .filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)));
        names.map(|name| self.download(&[name])?.pop().context("no package")).collect()
    }

    fn apt_get(&self, arguments: &[&str]) -> Result<String> {
        let at = |part: &str| self.folder.join(part).display().to_string();
        let options = [
            format!("Dir::Etc::SourceList={}", at("sources.list")),
            "Dir::Etc::SourceParts=/dev/null".into(),
            format!("Dir::State::Lists={}", at("lists")),
            format!("Dir::Cache={}", at("cache")),
            format!("Dir::State={}", at("state")),
            format!("Dir::State::status={}", at("status")),
            // Do not run the machine's own hooks for updates.
            "APT::Update::Post-Invoke-Success=".into(),
            "Acquire::Languages=none".into(),
        ];
        let mut command = Command::new("apt-get");
        command.current_dir(self.folder.join("packages")).arg("-q");
        for option in options {
            command.args(["-o", &option]);
        }
        output(command.args(arguments))
    }
}

impl Drop for Archive {
    fn drop(&mut self) {
        // The next run removes whatever is left.
        drop(fs::remove_dir_all(&self.folder));
    }
}

pub fn unpack(package: &Path, to: &Path) -> Result<()> {
    output(Command::new("dpkg").arg("-x").args([package, to])).map(drop)
}

/// The names in `name (= version) | other, more`: `name` and `more`.
fn dependencies(depends: &str) -> impl Iterator<Item = &str> {
    depends.split(',').filter_map(|entry| entry.split_whitespace().next())
}

/// The machine's release, such as `bookworm` for Debian 12.
///
/// # Errors
/// If it is not a release of Debian.
pub fn codename() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
    let value = |key: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        value.map(|value| value.trim_matches('"').to_owned())
    };
    match (value("ID").as_deref(), value("VERSION_CODENAME")) {
        (Some("debian"), Some(codename)) => Ok(codename),
        _ => bail!("this machine does not run a release of Debian"),
    }
}

/// The mirror that the machine's own Debian packages come from.
///
/// # Errors
/// If a mirror is not configured.
pub fn mirror() -> Result<String> {
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

/// The first archive of the whole of Debian in a list of either format (sources.list(5)). Others,
/// including that of security updates, do not end in `/debian`.
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
        let deb822 = "Types: deb\n# http://old.example/debian\nURIs: \
                      http://m.example/debian-security\n\
                      Suites: x\n\nTypes: deb\nURIs: http://m.example/debian\n";
        assert_eq!(mirror_in(deb822).as_deref(), Some("http://m.example/debian"));
        let one_line = "# deb http://old.example/debian x main\ndeb [signed-by=/k.gpg] \
                        http://n.example/debian/ x main\n";
        assert_eq!(mirror_in(one_line).as_deref(), Some("http://n.example/debian"));
        assert_eq!(mirror_in("deb https://other.example/apt stable main\n"), None);
        assert_eq!(mirror_in(""), None);
    }

    #[test]
    fn dependencies_are_names() {
        let depends = "linux-base-7-amd64 (= 7.2.12-1), x | y, linux-image-7-amd64\n";
        let names: Vec<_> = dependencies(depends).collect();
        assert_eq!(names, ["linux-base-7-amd64", "x", "linux-image-7-amd64"]);
        assert_eq!(dependencies("\n").count(), 0);
    }
}
