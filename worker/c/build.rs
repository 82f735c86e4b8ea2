//! The library's name and the versions of its symbols, for the linker.

fn main() {
    println!("cargo::rerun-if-changed=netsum.map");
    let map = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("netsum.map");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnetsum.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={}", map.display());
}
