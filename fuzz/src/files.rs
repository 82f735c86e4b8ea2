//! Committed inputs.

use std::path::{Path, PathBuf};

/// A target's committed inputs with their names: corpus, then past findings.
///
/// # Panics
/// If a folder cannot be read.
pub fn committed(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    // Set by `cargo run` and `cargo test`; a workspace may have moved since it was built.
    let here = std::env::var("CARGO_MANIFEST_DIR").unwrap_or(env!("CARGO_MANIFEST_DIR").into());
    let mut all = Vec::new();
    for kind in ["corpus", "regressions"] {
        let folder = Path::new(&here).join("../fuzz").join(kind).join(target);
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        let mut paths: Vec<PathBuf> =
            entries.map(|e| e.expect("a folder's entry").path()).collect();
        paths.sort();
        for path in paths {
            let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            all.push((path, bytes));
        }
    }
    all
}
