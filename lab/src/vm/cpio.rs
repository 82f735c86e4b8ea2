//! Writes archives that the kernel unpacks as its first file system.
//!
//! Format "newc": a header of hexadecimal fields, the name, the contents, each padded to four bytes
//! (Documentation/driver-api/early-userspace/buffer-format.rst). The kernel accepts several
//! concatenated archives.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

/// An archive to which entries are added. Missing parent folders are added, too.
#[derive(Debug)]
pub struct Cpio<W> {
    out: W,
    inode: u32,
    directories: BTreeSet<PathBuf>,
}

impl<W: Write> Cpio<W> {
    /// An empty archive.
    pub fn new(out: W) -> Self {
        Self { out, inode: 0, directories: BTreeSet::new() }
    }

    pub fn directory(&mut self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        self.parents(path)?;
        // The same folder with and without a leading slash.
        if self.directories.insert(path.strip_prefix("/").unwrap_or(path).to_owned()) {
            self.entry(path, DIRECTORY | 0o755, &[])?;
        }
        Ok(())
    }

    /// Adds a file with these permissions.
    pub fn file(
        &mut self,
        path: impl AsRef<Path>,
        permissions: u32,
        contents: &[u8],
    ) -> io::Result<()> {
        self.parents(path.as_ref())?;
        self.entry(path.as_ref(), FILE | permissions & 0o7777, contents)
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: impl AsRef<Path>, target: impl AsRef<Path>) -> io::Result<()> {
        self.parents(path.as_ref())?;
        self.entry(path.as_ref(), LINK | 0o777, target.as_ref().as_os_str().as_bytes())
    }

    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry(Path::new("TRAILER!!!"), 0, &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn parents(&mut self, path: &Path) -> io::Result<()> {
        match path.parent() {
            Some(parent) if parent.file_name().is_some() => self.directory(parent),
            _ => Ok(()),
        }
    }

    fn entry(&mut self, path: &Path, mode: u32, contents: &[u8]) -> io::Result<()> {
        let name = path.strip_prefix("/").unwrap_or(path).as_os_str().as_bytes();
        let size = u32::try_from(contents.len()).map_err(io::Error::other)?;
        let links = if mode & DIRECTORY == DIRECTORY && mode & FILE != FILE { 2 } else { 1 };
        // Inode, mode, user, group, links, time, size, device (2), special device (2), length of
        // the name, checksum.
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        self.inode += 1;
        let mut header = b"070701".to_vec();
        for field in fields {
            write!(header, "{field:08x}")?;
        }
        header.extend(name);
        header.push(0);
        self.padded(&header)?;
        self.padded(contents)
    }

    fn padded(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.out.write_all(&[0; 3][..bytes.len().wrapping_neg() & 3])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_parents_before_children_and_ends_with_the_trailer() {
        let mut cpio = Cpio::new(Vec::new());
        cpio.file("/usr/bin/x", 0o755, b"12345").unwrap();
        cpio.file("usr/bin/y", 0o644, b"").unwrap();
        cpio.link("/bin", "usr/bin").unwrap();
        let bytes = cpio.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        // Parses the archive as cpio(5) describes.
        let (mut at, mut found) = (0, Vec::new());
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |i: usize| {
                let from = at + 6 + 8 * i;
                usize::from_str_radix(std::str::from_utf8(&bytes[from..from + 8]).unwrap(), 16)
                    .unwrap()
            };
            let (mode, size, name) = (field(1), field(6), field(11));
            let data = (at + 110 + name).next_multiple_of(4);
            let text =
                |range: std::ops::Range<usize>| String::from_utf8(bytes[range].to_vec()).unwrap();
            found.push((text(at + 110..at + 109 + name), mode, text(data..data + size)));
            at = (data + size).next_multiple_of(4);
        }
        let expected = [
            ("usr", 0o040_755, ""),
            ("usr/bin", 0o040_755, ""),
            ("usr/bin/x", 0o100_755, "12345"),
            ("usr/bin/y", 0o100_644, ""),
            ("bin", 0o120_777, "usr/bin"),
            ("TRAILER!!!", 0, ""),
        ];
        assert_eq!(found, expected.map(|(name, mode, data)| (name.into(), mode, data.into())));
    }
}
