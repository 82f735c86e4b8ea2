//! libibverbs, loaded when the first adapter is opened, for the life of the process.

use std::sync::OnceLock;

use super::bindings::Verbs;

/// Its name on Linux since 2005; all that is used of it has been there since then (symbol version
/// IBVERBS_1.1).
const NAME: &str = "libibverbs.so.1";

/// The library.
///
/// # Errors
/// That it is not there, or not whole, in the loader's words, and what to install.
pub(super) fn library() -> Result<&'static Verbs, String> {
    static LIBRARY: OnceLock<Result<Verbs, String>> = OnceLock::new();
    let load = || {
        // SAFETY: the system's libibverbs; what its constructors do is what every program that
        // links to it has done.
        unsafe { Verbs::new(NAME) }.map_err(|e| {
            format!(
                "cannot load {NAME} ({e}); Debian's packages are libibverbs1 and ibverbs-providers"
            )
        })
    };
    LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)
}
