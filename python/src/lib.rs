//! The Python module `netsum._netsum`, which the package `netsum` wraps.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`communicator`] | `Communicator` |
//! | [`work`] | `Work`: an operation in flight |
//! | [`array`] | arrays that Python passes, by the buffer protocol or [`dlpack`] |
//! | [`memory`] | its memory, while it is in use |
//! | [`errors`] | Python's exceptions |

mod array;
mod communicator;
mod dlpack;
mod errors;
mod memory;
mod work;

use pyo3::prelude::*;

#[pymodule]
mod _netsum {
    #[pymodule_export]
    use super::communicator::{Communicator, connect, own_addresses, resolve, towards};
    #[pymodule_export]
    use super::work::{Report, Work};
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
