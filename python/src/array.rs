//! Arrays that Python passes.

use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::dlpack;
use crate::errors::argument;
use crate::memory::Memory;

/// The memory of anything that has the buffer protocol or DLPack.
pub fn memory(object: &Bound<'_, PyAny>, written: bool) -> PyResult<Memory> {
    let py = object.py();
    let memory = match PyMemoryView::from(object) {
        Ok(view) => Memory::of_buffer(&view)?,
        Err(_) if object.hasattr("__dlpack__")? => dlpack::memory(object)?,
        Err(_) => {
            let kind = object.get_type().name()?;
            let text = format!(
                "a {kind} has neither the buffer protocol nor DLPack: pass a numpy array or a CPU \
                 tensor"
            );
            return Err(argument(py, &text));
        }
    };
    match memory {
        (_, true) if written => Err(argument(
            py,
            "the array is read-only, but the result is written to it: pass a copy (x.copy())",
        )),
        (memory, _) => Ok(memory),
    }
}
