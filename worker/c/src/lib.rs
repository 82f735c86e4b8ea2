//! The C interface of `netsum-worker`. `include/netsum.h` is made of this file, comments included.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`config`] | settings by name |
//! | [`comm`] | the communicator and its operations |
//! | [`work`] | operations in flight |
//! | [`status`] | what functions return, and the text of the last error |
//! | [`memory`] | the caller's memory |

mod comm;
mod config;
mod memory;
mod status;
mod work;

use std::ffi::c_char;

/// The version of the library: "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn netsum_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
