//! Memory of Python's objects, held for as long as an operation is in flight.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::errors::argument;

/// What elements are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    I32,
    F32,
    /// Bytes that can be moved, but not summed.
    Other,
}

/// Contiguous memory of an object, which has exported it, and takes it back when this is dropped.
pub struct Memory {
    pub start: *mut u8,
    pub bytes: usize,
    pub kind: Kind,
    /// For messages.
    pub dtype: String,
    /// Holds the export. Dropped by a thread that does not have Python, it is given back by the
    /// next one that has.
    pub _export: Py<PyAny>,
}

// SAFETY: the export keeps the memory where it is, and `Py` may be dropped anywhere.
unsafe impl Send for Memory {}

impl Memory {
    /// By the buffer protocol. Whether it is read-only, too.
    pub fn of_buffer(view: &Bound<'_, PyMemoryView>) -> PyResult<(Self, bool)> {
        let py = view.py();
        let buffer = PyUntypedBuffer::get(view.as_any())?;
        if !buffer.is_c_contiguous() {
            return Err(not_contiguous(py, "numpy.ascontiguousarray(x)"));
        }
        let format = buffer.format().to_string_lossy().into_owned();
        // Between colons are the names of fields.
        if format.split(':').step_by(2).any(|codes| codes.contains('O')) {
            let text = "the array holds Python's objects, which are in this process alone: convert it (x.astype(numpy.float32))";
            return Err(argument(py, text));
        }
        let native = format.trim_start_matches(['@', '=', '<']);
        let kind = match (native, buffer.item_size()) {
            ("f", 4) => Kind::F32,
            ("i" | "I" | "l" | "L", 4) => Kind::I32,
            _ => Kind::Other,
        };
        let dtype = dtype(&format, buffer.item_size());
        let (start, bytes, readonly) =
            (buffer.buf_ptr().cast(), buffer.len_bytes(), buffer.readonly());
        let export = view.clone().into_any().unbind();
        Ok((Self { start, bytes, kind, dtype, _export: export }, readonly))
    }

    /// As elements that can be summed.
    pub fn elements<T>(self, py: Python<'_>) -> PyResult<Elements<T>> {
        if !self.start.cast::<T>().is_aligned() {
            return Err(argument(
                py,
                "the array is not aligned to 4 bytes: give a copy of it (x.copy())",
            ));
        }
        Ok(Elements { len: self.bytes / size_of::<T>(), memory: self, elements: PhantomData })
    }

    /// As bytes.
    pub fn into_bytes(self) -> Elements<u8> {
        Elements { len: self.bytes, memory: self, elements: PhantomData }
    }

    /// For what is summed.
    pub fn no_sum(&self, py: Python<'_>) -> PyErr {
        let text = format!(
            "dtype {}: netsum sums float32, int32 and uint32; convert it (x.astype(numpy.float32), x.float())",
            self.dtype
        );
        argument(py, &text)
    }
}

/// For both ways to memory.
pub fn not_contiguous(py: Python<'_>, copy: &str) -> PyErr {
    let text = format!(
        "the array is not contiguous in memory (a slice with steps, or transposed), and is summed where it is: sum {copy} and copy the result back"
    );
    argument(py, &text)
}

/// A buffer's format in numpy's words, where there are such.
fn dtype(format: &str, size: usize) -> String {
    let name = match format.trim_start_matches(['@', '=', '<']) {
        "d" => "float64",
        "e" => "float16",
        "f" => "float32",
        "?" => "bool",
        "Zf" => "complex64",
        "Zd" => "complex128",
        "b" | "h" | "i" | "l" | "q" => return format!("int{}", size * 8),
        "B" | "H" | "I" | "L" | "Q" => return format!("uint{}", size * 8),
        _ => format,
    };
    name.to_owned()
}

/// The same as a slice.
pub struct Elements<T> {
    memory: Memory,
    len: usize,
    elements: PhantomData<T>,
}

// SAFETY: as of `Memory`; elements are numbers.
unsafe impl<T: Send> Send for Elements<T> {}

impl<T> Deref for Elements<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the export keeps `len` elements there, aligned. What Python writes there
        // meanwhile is a number, too.
        unsafe { std::slice::from_raw_parts(self.memory.start.cast(), self.len) }
    }
}

impl<T> DerefMut for Elements<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as above; asked for only where the export may be written.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start.cast(), self.len) }
    }
}

/// For objects whose DLPack says no.
pub fn refused(py: Python<'_>, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyException>(py) {
        argument(py, &error.value(py).to_string())
    } else {
        error
    }
}
