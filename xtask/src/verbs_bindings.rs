//! `cargo xtask verbs-bindings`: generates the worker's types and functions of libibverbs from the
//! header of Debian's rdma-core.
//!
//! The result is committed, and building needs neither rdma-core nor clang. The library's interface
//! has been the same since 2005; run this only to add a function.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use crate::debian::{self, Archive};
use crate::paths;
use crate::paths::output;

const BINDGEN: &str = "0.73.2";

/// The header, and clang with those of its libraries that a machine with a compiler may lack.
const PACKAGES: [&str; 12] = [
    "libibverbs-dev",
    "libclang1-14",
    "libclang-common-14-dev",
    "libllvm14",
    "libbsd0",
    "libedit2",
    "libffi8",
    "libicu72",
    "liblzma5",
    "libmd0",
    "libxml2",
    "libz3-4",
];
const SUITE: &str = "bookworm";

const HEADER: &str = "usr/include/infiniband/verbs.h";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const CLANG_HEADERS: &str = "usr/lib/llvm-14/lib/clang/14.0.6/include";

/// The functions that the worker calls. Functions behind pointers come with the types.
const FUNCTIONS: [&str; 21] = [
    "ibv_ack_cq_events",
    "ibv_alloc_pd",
    "ibv_close_device",
    "ibv_create_comp_channel",
    "ibv_create_cq",
    "ibv_create_qp",
    "ibv_dealloc_pd",
    "ibv_dereg_mr",
    "ibv_destroy_comp_channel",
    "ibv_destroy_cq",
    "ibv_destroy_qp",
    "ibv_free_device_list",
    "ibv_get_cq_event",
    "ibv_get_device_list",
    "ibv_get_device_name",
    "ibv_modify_qp",
    "ibv_open_device",
    "ibv_query_device",
    "ibv_query_port",
    "ibv_reg_mr",
    "ibv_wc_status_str",
];
/// Types that no function mentions.
const TYPES: &str = "ibv_port_attr|ibv_qp_attr_mask|ibv_access_flags|ibv_wr_opcode";
/// Types without visible fields.
const OPAQUE: &str = "ibv_device|ibv_srq|ibv_ah|ibv_mw.*";

/// Regenerates the bindings.
///
/// # Errors
/// If something is missing and cannot be fetched, or bindgen fails.
pub fn run() -> Result<()> {
    let home = paths::target_dir()?.join("verbs-bindings");
    fs::create_dir_all(&home).with_context(|| home.display().to_string())?;
    let root = home.join("root");
    let bindgen = home.join("bin/bindgen");
    println!("installing bindgen {BINDGEN} into {} (some minutes)", home.display());
    let mut install = Command::new("cargo");
    install.args(["install", "--quiet", "--locked", "--root"]).arg(&home).arg("--target-dir");
    output(install.arg(home.join("build")).arg(format!("bindgen-cli@{BINDGEN}")))?;
    println!("fetching {} packages of Debian {SUITE}", PACKAGES.len());
    for package in Archive::open(&home.join("apt"), &[SUITE])?.download(&PACKAGES)? {
        debian::unpack(&package, &root)?;
    }
    let header = root.join(HEADER);
    let made = output(
        Command::new(bindgen)
            .arg(&header)
            .args(["--allowlist-function", &FUNCTIONS.join("|"), "--allowlist-type", TYPES])
            .args(["--opaque-type", OPAQUE, "--blocklist-type", "_*(pthread|atomic)_.*"])
            .args(["--raw-line", "use libc::{pthread_cond_t, pthread_mutex_t};"])
            .args(["--dynamic-loading", "Verbs", "--dynamic-link-require-all"])
            .args([
                "--rust-target",
                "1.85",
                "--rust-edition",
                "2024",
                "--formatter",
                "prettyplease",
            ])
            .args(["--no-prepend-enum-name", "--no-derive-debug", "--no-doc-comments"])
            .arg("--no-layout-tests")
            .args(["--disable-header-comment", "--", "-I"])
            .arg(root.join("usr/include"))
            .arg("-isystem")
            .arg(root.join(CLANG_HEADERS))
            .env("LIBCLANG_PATH", root.join(LIBRARIES))
            .env("LD_LIBRARY_PATH", root.join(LIBRARIES)),
    )?;
    let notice =
        notice(&fs::read_to_string(&header)?).context("no notice at the head of verbs.h")?;
    let path = paths::root()?.join("worker/src/verbs/bindings.rs");
    fs::write(&path, format!("{}{notice}{ATTRIBUTES}\n{made}", head()))
        .with_context(|| path.display().to_string())?;
    println!("{}", path.display());
    Ok(())
}

fn head() -> String {
    format!(
        "//! Types and functions of libibverbs. Made by `cargo xtask verbs-bindings` with bindgen \
         {BINDGEN} from\n\
         //! infiniband/verbs.h of Debian {SUITE}'s rdma-core, under the second of the licenses that its notice names:\n//!\n"
    )
}

const ATTRIBUTES: &str = "#![allow(dead_code, missing_docs, non_camel_case_types, \
                          unsafe_op_in_unsafe_fn)]\n\
                          #![allow(clippy::all, clippy::undocumented_unsafe_blocks, reason = \
                          \"generated\")]\n";

/// A C file's first comment, as Rust's.
fn notice(text: &str) -> Option<String> {
    let inside = text.split_once("/*")?.1.split_once("*/")?.0;
    let lines: Vec<&str> =
        inside.lines().map(|line| line.trim_start().trim_start_matches('*').trim()).collect();
    Some(
        lines
            .join("\n")
            .trim()
            .lines()
            .map(|line| format!("//! {line}").trim_end().to_owned() + "\n")
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_notice_is_the_first_comment() {
        let text =
            "/*\n * Copyright (c) somebody.\n *\n *   Redistribution\n */\n\n#ifndef X /* y */\n";
        assert_eq!(
            notice(text).as_deref(),
            Some("//! Copyright (c) somebody.\n//!\n//! Redistribution\n")
        );
        assert_eq!(notice("int x;"), None);
    }
}
