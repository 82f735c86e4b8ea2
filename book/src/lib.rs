//! The book in `book/text`, made into HTML by mdBook. Reference pages are generated from the
//! programs themselves, so they always agree.

pub mod links;
mod reference;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use mdbook_driver::MDBook;

/// Files of the project that pages include, by their paths from the root.
const INCLUDED: [&str; 16] = [
    "SECURITY.md",
    "CHANGELOG.md",
    "netsum/netsum.example.toml",
    "api/proto/netsum.proto",
    "deploy/GUIDE.md",
    "deploy/kubernetes/Dockerfile",
    "deploy/kubernetes/box.yaml",
    "deploy/kubernetes/job.yaml",
    "deploy/launch/mpirun.sh",
    "deploy/launch/sum.py",
    "deploy/launch/torchrun.sh",
    "deploy/slurm/netsum.env",
    "deploy/slurm/netsum.sh",
    "deploy/slurm/slurm.conf",
    "worker/c/examples/all_reduce.c",
    "worker/examples/all_reduce.rs",
];

/// Links in those files, and their replacements in the book.
const LINKS: [(&str, &str); 2] = [
    ("[deploy/netsum.service](deploy/netsum.service)", "`deploy/netsum.service`"),
    ("[deploy/netsum.apparmor](deploy/netsum.apparmor)", "`deploy/netsum.apparmor`"),
];

/// Builds the book into a folder, and checks all links in it; returns how many there are.
///
/// # Errors
/// If mdBook rejects the text, or links are broken; all of these are named.
pub fn build(out: &Path) -> Result<usize> {
    let root = root()?;
    // A copy in which pages find included files by the same relative paths as in the project, and
    // to which pages can be added.
    let copy = tempfile::tempdir()?;
    let book = copy.path().join("book");
    copy_all(&root.join("book/text"), &book.join("text"))?;
    fs::copy(root.join("book/book.toml"), book.join("book.toml"))?;
    for file in INCLUDED {
        let to = copy.path().join(file);
        fs::create_dir_all(to.parent().context("a file without a folder")?)?;
        let text = fs::read_to_string(root.join(file)).with_context(|| file.to_owned())?;
        fs::write(to, LINKS.iter().fold(text, |text, (from, to)| text.replace(from, to)))?;
    }
    for (name, page) in reference::pages() {
        fs::write(book.join("text/reference").join(name), page)?;
    }
    let mut built = MDBook::load(&book)?;
    built.config.build.build_dir = std::path::absolute(out)?;
    built.build()?;
    let links = links::check(out)?;
    ensure!(links.broken.is_empty(), "links that lead nowhere:\n{}", links.broken.join("\n"));
    Ok(links.checked)
}

/// The project's folder.
fn root() -> Result<&'static Path> {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the book's folder has no parent")
}

fn copy_all(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let to: PathBuf = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_all(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}
