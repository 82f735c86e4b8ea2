//! Python's exceptions, defined in `netsum/errors.py`.

use netsum_worker::Error;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// The exception for an error.
pub fn raised(py: Python<'_>, error: &Error) -> PyErr {
    let (class, rank) = match error {
        Error::Config(_) => ("ConfigError", None),
        Error::Argument(_) | Error::InFlight(_) | Error::MessageSize { .. } => {
            ("ArgumentError", None)
        }
        Error::Controller { .. } => ("ControllerError", None),
        Error::Unreachable { rank, .. } => ("UnreachableError", Some(*rank)),
        Error::RankDied { rank, .. } => ("RankDiedError", Some(*rank)),
        Error::RankLeft { rank } => ("RankLeftError", Some(*rank)),
        Error::Mismatch(_) => ("MismatchError", None),
        Error::NonFinite { .. } | Error::NonFiniteTensors { .. } => ("NonFiniteError", None),
        Error::Closed => ("ClosedError", None),
        Error::Forked => ("ForkedError", None),
        _ => ("Error", None),
    };
    named(py, class, &error.to_string(), rank)
}

/// An ArgumentError.
pub fn argument(py: Python<'_>, text: &str) -> PyErr {
    named(py, "ArgumentError", text, None)
}

fn named(py: Python<'_>, class: &str, text: &str, rank: Option<u32>) -> PyErr {
    let made = || {
        let class = py.import("netsum.errors")?.getattr(class)?;
        match rank {
            Some(rank) => class.call1((text, rank)),
            None => class.call1((text,)),
        }
    };
    match made() {
        Ok(exception) => PyErr::from_value(exception),
        Err(_) => PyRuntimeError::new_err(text.to_owned()),
    }
}
