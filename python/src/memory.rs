//! Memory of Python's objects, kept alive while an operation is in flight.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use netsum_worker::Dtype;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::errors::argument;

/// The type of integers of `bytes` bytes.
pub fn integer(size: usize, is_signed: bool) -> Option<Dtype> {
    Some(match (size, is_signed) {
        (1, true) => Dtype::I8,
        (1, false) => Dtype::U8,
        (2, true) => Dtype::I16,
        (2, false) => Dtype::U16,
        (4, true) => Dtype::I32,
        (4, false) => Dtype::U32,
        (8, true) => Dtype::I64,
        (8, false) => Dtype::U64,
        _ => return None,
    })
}

/// Contiguous memory of an object, which exports it until this is dropped.
pub struct Memory {
    pub start: *mut u8,
    pub bytes: usize,
    /// `None`: bytes that can be moved, but not reduced.
    pub kind: Option<Dtype>,
    /// The dtype, for messages.
    pub dtype: String,
    /// Keeps the export. If a thread without Python's lock drops it, the next one with the lock
    /// releases it.
    pub _export: Py<PyAny>,
}

// SAFETY: the export keeps the memory where it is, and `Py` may be dropped anywhere.
unsafe impl Send for Memory {}

impl Memory {
    /// From the buffer protocol; returns also whether it is read-only.
    pub fn of_buffer(view: &Bound<'_, PyMemoryView>) -> PyResult<(Self, bool)> {
        let py = view.py();
        let buffer = PyUntypedBuffer::get(view.as_any())?;
        if !buffer.is_c_contiguous() {
            return Err(not_contiguous(py, "numpy.ascontiguousarray(x)"));
        }
        let format = buffer.format().to_string_lossy().into_owned();
        // Names of fields are between colons.
        if format.split(':').step_by(2).any(|codes| codes.contains('O')) {
            let text = "the array contains Python objects, which other processes do not have: \
                        convert it (x.astype(numpy.float32))";
            return Err(argument(py, text));
        }
        let native = format.trim_start_matches(['@', '=', '<']);
        let kind = match (native, buffer.item_size()) {
            ("e", 2) => Some(Dtype::F16),
            ("f", 4) => Some(Dtype::F32),
            ("d", 8) => Some(Dtype::F64),
            ("?", 1) => Some(Dtype::Bool),
            ("b" | "h" | "i" | "l" | "q", size) => integer(size, true),
            ("B" | "H" | "I" | "L" | "Q", size) => integer(size, false),
            _ => None,
        };
        let dtype = dtype(&format, buffer.item_size());
        let (start, bytes, readonly) =
            (buffer.buf_ptr().cast(), buffer.len_bytes(), buffer.readonly());
        let export = view.clone().into_any().unbind();
        Ok((Self { start, bytes, kind, dtype, _export: export }, readonly))
    }

    /// As elements that can be reduced.
    pub fn elements<T>(self, py: Python<'_>) -> PyResult<Elements<T>> {
        if !self.start.cast::<T>().is_aligned() {
            let text = format!(
                "the array is not aligned to {} bytes: pass a copy (x.copy())",
                align_of::<T>()
            );
            return Err(argument(py, &text));
        }
        Ok(Elements { len: self.bytes / size_of::<T>(), memory: self, elements: PhantomData })
    }

    /// As bytes.
    pub fn into_bytes(self) -> Elements<u8> {
        Elements { len: self.bytes, memory: self, elements: PhantomData }
    }

    /// The error for a type that cannot be reduced.
    pub fn no_sum(&self, py: Python<'_>) -> PyErr {
        let text = format!(
            "dtype {}: netsum reduces integers, floats of 16 to 64 bits and bool: convert it \
             (x.astype(numpy.float32), x.float())",
            self.dtype
        );
        argument(py, &text)
    }
}

/// The error for memory that is not contiguous.
pub fn not_contiguous(py: Python<'_>, copy: &str) -> PyErr {
    let text = format!(
        "the array is not contiguous in memory (a slice with steps, or transposed), but netsum \
         sums in place: sum {copy} and copy the result back"
    );
    argument(py, &text)
}

/// numpy's name of a buffer's format, if it has one.
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

/// Memory as a slice.
pub struct Elements<T> {
    memory: Memory,
    len: usize,
    elements: PhantomData<T>,
}

// SAFETY: as for `Memory`; elements are numbers.
unsafe impl<T: Send> Send for Elements<T> {}

impl<T> Deref for Elements<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the export keeps `len` aligned elements there. Python can only write numbers
        // there meanwhile.
        unsafe { std::slice::from_raw_parts(self.memory.start.cast(), self.len) }
    }
}

impl<T> DerefMut for Elements<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as above; called only if the export may be written.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start.cast(), self.len) }
    }
}

/// For objects whose DLPack method fails.
pub fn refused(py: Python<'_>, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyException>(py) {
        argument(py, &error.value(py).to_string())
    } else {
        error
    }
}
