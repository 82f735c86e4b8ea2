//! libibverbs, loaded when the first adapter is opened, for the life of the process.

use std::sync::OnceLock;

use super::bindings::Verbs;

/// Its name on Linux since 2005; all functions used here have been there since then (symbol version
/// IBVERBS_1.1).
const NAME: &str = "libibverbs.so.1";

/// The library.
///
/// # Errors
/// If it is missing or incomplete; names the packages to install.
pub(super) fn library() -> Result<&'static Verbs, String> {
    static LIBRARY: OnceLock<Result<Verbs, String>> = OnceLock::new();
    let load = || {
        // SAFETY: this is the system's libibverbs; its constructors run in every program that links
        // to it.
        unsafe { Verbs::new(NAME) }.map_err(|e| {
            format!(
                "cannot load {NAME}: {e}: install it (Debian: libibverbs1 and ibverbs-providers)"
            )
        })
    };
    LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)
}
