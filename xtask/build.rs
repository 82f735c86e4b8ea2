//! Does nothing: see `[build-dependencies]` in Cargo.toml.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
