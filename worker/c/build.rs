//! The library's name and the versions of its symbols, for the linker.

use std::env::{self, var};

fn main() {
    println!("cargo::rerun-if-changed=netsum.map");
    println!("cargo::rustc-check-cfg=cfg(versioned)");
    if var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnetsum.so.1");
    }
    // There rustc links with LLD. GNU's linker does not accept a second script in addition to
    // rustc's.
    if var("TARGET").is_ok_and(|target| target == "x86_64-unknown-linux-gnu") {
        let map =
            env::current_dir().expect("cargo runs this in the package's folder").join("netsum.map");
        println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={}", map.display());
        println!("cargo::rustc-cfg=versioned");
    }
}
