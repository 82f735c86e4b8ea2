//! Reads `deploy/GUIDE.md` for tests that follow it, and makes the packages that it begins with.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cluster::program;
use crate::netns::output;

/// A block of commands, and for whom they are.
#[derive(Clone, Debug)]
pub struct Block {
    pub who: String,
    pub commands: String,
}

/// The guide's blocks.
///
/// # Errors
/// If a block does not end or does not say for whom it is.
pub fn blocks() -> Result<Vec<Block>> {
    let guide =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/GUIDE.md"))?;
    let fences: Vec<&str> = guide.split("```").collect();
    ensure!(fences.len() % 2 == 1, "a block does not end");
    let inside = fences.into_iter().skip(1).step_by(2);
    inside
        .map(|block| {
            let (info, commands) = block.split_once('\n').context("a block without a line")?;
            let who = info
                .strip_prefix("sh ")
                .with_context(|| format!("nobody is to run `{commands}`"))?;
            Ok(Block { who: who.to_owned(), commands: commands.to_owned() })
        })
        .collect()
}

/// Makes the box's Debian package from the programs beside the test's.
///
/// # Errors
/// As [`packages`].
pub fn package(folder: &Path) -> Result<PathBuf> {
    packages(folder)?.into_iter().next().context("no package")
}

/// Makes the Debian packages of the box and of the hosts from the programs beside the test's.
///
/// # Errors
/// If the programs are not built, or dpkg is missing.
pub fn packages(folder: &Path) -> Result<Vec<PathBuf>> {
    let programs = program("netsum")?;
    let mut dist = Command::new(program("netsum-dist")?);
    dist.args(["--deb", "--out"])
        .arg(folder)
        .arg("--programs")
        .arg(programs.parent().context("no folder")?);
    Ok(output(&mut dist)?.lines().map(PathBuf::from).collect())
}
