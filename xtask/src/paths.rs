//! Where things are.

use std::path::PathBuf;

use anyhow::{Context, Result};

/// The workspace's root.
pub fn root() -> Result<PathBuf> {
    // Set by `cargo run` and `cargo test`; a workspace may have moved since it was built.
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or(PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    Ok(xtask.parent().context("xtask's folder has no parent")?.to_owned())
}

/// Cargo's target folder, which this program itself was built into: `<target>/<profile>/xtask`.
pub fn target_dir() -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    Ok(me.ancestors().nth(2).context("xtask is in no target folder")?.to_owned())
}
