//! The Debian packages: `cargo xtask dist --deb`.
//!
//! dpkg-deb makes the archives, from trees that are laid out here. cargo-deb would do the same from
//! a table in Cargo.toml, but takes minutes to build wherever a package is made or tested.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use object::Object as _;

use crate::{dist, root};

/// A package's content.
struct Package {
    name: &'static str,
    program: &'static str,
    /// Files: path in the sources, path on the machine.
    files: &'static [(&'static str, &'static str)],
    /// Those that an administrator changes; dpkg keeps the changes.
    conffiles: &'static [&'static str],
    /// Scripts: name in `deploy/debian`, name in the package.
    scripts: &'static [(&'static str, &'static str)],
    fields: &'static str,
}

/// The package for boxes: daemon and command line.
const BOX: Package = Package {
    name: "netsum",
    program: "netsum",
    files: &[
        ("netsum/netsum.example.toml", "etc/netsum/netsum.toml"),
        ("deploy/netsum.apparmor", "etc/apparmor.d/netsum"),
        ("deploy/netsum.sysctl", "etc/sysctl.d/50-netsum.conf"),
        ("deploy/netsum.service", "usr/lib/systemd/system/netsum.service"),
        ("deploy/grafana-dashboard.json", "usr/share/netsum/grafana-dashboard.json"),
        ("deploy/prometheus-rules.yml", "usr/share/netsum/prometheus-rules.yml"),
        ("deploy/GUIDE.md", "usr/share/doc/netsum/GUIDE.md"),
        ("README.md", "usr/share/doc/netsum/README.md"),
        ("SECURITY.md", "usr/share/doc/netsum/SECURITY.md"),
        ("CHANGELOG.md", "usr/share/doc/netsum/CHANGELOG.md"),
        ("LICENSE", "usr/share/doc/netsum/copyright"),
    ],
    conffiles: &[
        "/etc/apparmor.d/netsum",
        "/etc/netsum/netsum.toml",
        "/etc/sysctl.d/50-netsum.conf",
    ],
    scripts: &[("postinst", "postinst"), ("prerm", "prerm"), ("postrm", "postrm")],
    fields: "Recommends: iproute2, ethtool\nSuggests: netsum-hosts\nDescription: all-reduce inside \
        the network: the box\n XDP programs on a bridge add up the gradients that hosts send each \
        other over\n RoCEv2. This package has the daemon of the box and its command line \
        (netsum).\n",
};

/// The package for hosts, without a daemon.
const HOSTS: Package = Package {
    name: "netsum-hosts",
    program: "netsum-perf",
    files: &[
        ("deploy/netsum-hosts.sysctl", "etc/sysctl.d/50-netsum-hosts.conf"),
        ("worker/c/include/netsum.h", "usr/include/netsum.h"),
        ("worker/c/examples/all_reduce.c", "usr/share/doc/netsum-hosts/all_reduce.c"),
        ("book/text/howto/c.md", "usr/share/doc/netsum-hosts/c.md"),
        ("book/text/howto/library.md", "usr/share/doc/netsum-hosts/library.md"),
        ("book/text/howto/transports.md", "usr/share/doc/netsum-hosts/transports.md"),
        ("CHANGELOG.md", "usr/share/doc/netsum-hosts/CHANGELOG.md"),
        ("LICENSE", "usr/share/doc/netsum-hosts/copyright"),
    ],
    conffiles: &["/etc/sysctl.d/50-netsum-hosts.conf"],
    scripts: &[("hosts-postinst", "postinst"), ("hosts-triggers", "triggers")],
    fields: "Suggests: libibverbs1, ibverbs-providers\nDescription: all-reduce inside the network: \
        its hosts\n Hosts send each other gradients over RoCEv2, and a box with netsum adds them \
        up on\n the way. This package has what a host needs: its kernel's settings, the library \
        for C\n (libnetsum), and a benchmark that shows whether the box sums (netsum-perf).\n",
};

/// The hosts' library, under the name that programs load.
const LIBRARY: &str = "usr/lib/libnetsum.so.1";

/// Makes the packages from the programs in `programs`, or from a release build; returns their
/// paths.
pub fn build(programs: Option<&Path>, out: &Path) -> Result<Vec<PathBuf>> {
    let programs = match programs {
        Some(folder) => folder.to_owned(),
        None => {
            let status = Command::new("cargo")
                .current_dir(root()?)
                .args([
                    "build",
                    "--release",
                    "-p",
                    "netsum",
                    "-p",
                    "netsum-worker",
                    "-p",
                    "netsum-c",
                ])
                .status()?;
            ensure!(status.success(), "the release build has failed");
            root()?.join("target/release")
        }
    };
    [BOX, HOSTS].iter().map(|package| package.build(&programs, out)).collect()
}

impl Package {
    fn build(&self, programs: &Path, out: &Path) -> Result<PathBuf> {
        let tree = tempfile::tempdir()?;
        self.lay_out(programs, tree.path())?;
        let (version, arch) =
            (env!("CARGO_PKG_VERSION"), output("dpkg", &["--print-architecture"])?);
        self.control(tree.path(), version, arch.trim())?;
        fs::create_dir_all(out)?;
        let package = out.join(format!("{}_{version}_{}.deb", self.name, arch.trim()));
        let [from, to] =
            [tree.path(), &package].map(|path| path.to_str().context("a path that is not UTF-8"));
        output("dpkg-deb", &["--root-owner-group", "-Zxz", "-z1", "--build", from?, to?])?;
        Ok(package)
    }

    fn lay_out(&self, programs: &Path, tree: &Path) -> Result<()> {
        let root = root()?;
        let program = tree.join("usr/bin").join(self.program);
        install(&programs.join(self.program), &program, 0o755)?;
        strip(&program)?;
        for (from, to) in self.files {
            install(&root.join(from), &tree.join(to), 0o644)?;
        }
        if self.has_library() {
            let library = tree.join(LIBRARY);
            install(&programs.join("libnetsum.so"), &library, 0o644)?;
            strip(&library)?;
            std::os::unix::fs::symlink("libnetsum.so.1", tree.join("usr/lib/libnetsum.so"))?;
            let text = "Name: netsum\nDescription: all-reduce inside the network\nLibs: \
                -lnetsum\nVersion: ";
            let text = format!("{text}{}\n", env!("CARGO_PKG_VERSION"));
            write(&tree.join("usr/lib/pkgconfig/netsum.pc"), text.as_bytes(), 0o644)?;
        } else {
            for (name, page) in dist::man_pages()? {
                write(&tree.join("usr/share/man/man8").join(name), &page, 0o644)?;
            }
            for (path, text) in dist::completions()? {
                write(&tree.join("usr/share").join(path), &text, 0o644)?;
            }
        }
        Ok(())
    }

    fn has_library(&self) -> bool {
        self.program == "netsum-perf"
    }

    fn newest_glibc(&self, tree: &Path) -> Result<[u32; 2]> {
        let program = newest_glibc(&fs::read(tree.join("usr/bin").join(self.program))?)?;
        if !self.has_library() {
            return Ok(program);
        }
        Ok(program.max(newest_glibc(&fs::read(tree.join(LIBRARY))?)?))
    }

    fn control(&self, tree: &Path, version: &str, arch: &str) -> Result<()> {
        let folder = tree.join("DEBIAN");
        let [major, minor] = self.newest_glibc(tree)?;
        let text = format!(
            "Package: {}\nVersion: {version}\nArchitecture: {arch}\nSection: net\nPriority: \
             optional\n\
             Maintainer: the netsum authors <netsum@localhost>\nDepends: libc6 (>= \
             {major}.{minor}), libgcc-s1\n{}",
            self.name, self.fields
        );
        write(&folder.join("control"), text.as_bytes(), 0o644)?;
        write(&folder.join("conffiles"), (self.conffiles.join("\n") + "\n").as_bytes(), 0o644)?;
        for (from, name) in self.scripts {
            let mode = if *name == "triggers" { 0o644 } else { 0o755 };
            install(&root()?.join("deploy/debian").join(from), &folder.join(name), mode)?;
        }
        Ok(())
    }
}

/// The newest version of the C library whose symbols a program uses, as dpkg-shlibdeps would
/// determine: by the names of versions in `.dynstr`.
fn newest_glibc(program: &[u8]) -> Result<[u32; 2]> {
    use object::ObjectSection as _;
    let file = object::File::parse(program)?;
    let names = file.section_by_name(".dynstr").context("a program that is linked statically")?;
    let version = |name: &[u8]| {
        let (major, minor) =
            std::str::from_utf8(name).ok()?.strip_prefix("GLIBC_")?.split_once('.')?;
        // Some have a third number, which package versions do not use.
        Some([major.parse().ok()?, minor.split('.').next()?.parse().ok()?])
    };
    names
        .data()?
        .split(|byte| *byte == 0)
        .filter_map(version)
        .max()
        .context("no symbol of the C library")
}

fn strip(file: &Path) -> Result<String> {
    output("strip", &["--strip-unneeded", file.to_str().context("a path that is not UTF-8")?])
}

fn install(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let content = fs::read(from).with_context(|| format!("{}: build it first?", from.display()))?;
    write(to, &content, mode)
}

fn write(to: &Path, content: &[u8], mode: u32) -> Result<()> {
    let folder = to.parent().context("a path without a folder")?;
    fs::create_dir_all(folder)?;
    // All users must be able to read these, regardless of the umask.
    for folder in folder
        .ancestors()
        .take_while(|f| f.metadata().is_ok_and(|m| m.permissions().mode() & 0o777 != 0o755))
    {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    }
    fs::write(to, content).with_context(|| to.display().to_string())?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).map_err(Into::into)
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let out = Command::new(program).args(arguments).output().with_context(|| {
        format!("cannot start {program}: it is part of Debian's dpkg and binutils")
    })?;
    if !out.status.success() {
        bail!("{program} {arguments:?}: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(String::from_utf8(out.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_the_c_library_is_found() {
        let me = fs::read(std::env::current_exe().unwrap()).unwrap();
        let [major, minor] = newest_glibc(&me).unwrap();
        assert!(major == 2 && (17..100).contains(&minor), "{major}.{minor}");
        assert!(newest_glibc(b"no program").is_err());
    }

    #[test]
    fn conffiles_are_in_their_package_and_no_file_is_in_two() {
        let programs = tempfile::tempdir().unwrap();
        let mut files = Vec::<&str>::new();
        for package in [BOX, HOSTS] {
            // Any program will do.
            for file in [package.program, "libnetsum.so"] {
                fs::copy(std::env::current_exe().unwrap(), programs.path().join(file)).unwrap();
            }
            let tree = tempfile::tempdir().unwrap();
            package.lay_out(programs.path(), tree.path()).unwrap();
            for file in package.conffiles {
                assert!(tree.path().join(&file[1..]).is_file(), "{file}");
            }
            files.extend(package.files.iter().map(|(_, to)| *to));
        }
        let all = files.len();
        files.sort_unstable();
        files.dedup();
        assert_eq!(files.len(), all);
    }
}
