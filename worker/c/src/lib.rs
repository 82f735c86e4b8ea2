//! The C interface of `netsum-worker`. `include/netsum.h` is generated from this file, comments
//! included.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`config`] | settings by name |
//! | [`comm`] | the communicator and its operations |
//! | [`work`] | operations in flight |
//! | [`in_band`] | the header of applications that send messages of their own |
//! | [`status`] | what functions return, and the text of the last error |
//! | [`memory`] | the caller's memory |

/// Gives the enclosing function its version. The linker's script (`netsum.map`) is not enough,
/// because rustc's own script comes first.
macro_rules! versioned {
    ($name:literal) => {
        #[cfg(versioned)]
        // SAFETY: a directive, not an instruction.
        unsafe {
            std::arch::asm!(
                concat!(".symver ", $name, ", ", $name, "@@NETSUM_1"),
                options(nomem, nostack, preserves_flags)
            );
        }
    };
}

mod comm;
mod config;
mod in_band;
mod memory;
mod status;
mod work;

use std::ffi::c_char;

/// The version of the library: "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn netsum_version() -> *const c_char {
    versioned!("netsum_version");
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
