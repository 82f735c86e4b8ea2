//! Finds the library that cargo has built.

use std::path::PathBuf;

/// Next to the folder of the test programs.
pub fn path() -> PathBuf {
    let me = std::env::current_exe().expect("this program has a path");
    let folder = me.ancestors().nth(1).expect("it is in a folder");
    // `cargo build` puts it into the target folder, `cargo test` only where it links from.
    let places = [folder.to_owned(), folder.parent().expect("deps").to_owned()];
    let found = places.map(|place| place.join("libnetsum.so")).into_iter().filter_map(|path| {
        let made = path.metadata().ok()?.modified().ok()?;
        Some((made, path))
    });
    found.max().expect("cargo has built libnetsum.so").1
}
