//! Tensors by DLPack: <https://dmlc.github.io/dlpack/latest/c_api.html>, versions 0.x and 1.x.
//!
//! The capsule is never consumed. Its maker releases the tensor when the capsule is dropped.

use std::ffi::c_void;

use netsum_worker::Dtype;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::errors::argument;
use crate::memory::{Memory, integer, not_contiguous, refused};

const CPU: i32 = 1;
const CUDA_HOST: i32 = 3;
/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: Tensor,
}

/// The memory of a tensor, and whether it is read-only.
pub fn memory(object: &Bound<'_, PyAny>) -> PyResult<(Memory, bool)> {
    let py = object.py();
    let (device, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    if device != CPU && device != CUDA_HOST {
        let text = format!(
            "the tensor is in memory of device {}, but netsum sums memory of the host: sum x.cpu() \
             and copy the result back, or use the backend of netsum.torch, which does so",
            device_name(device)
        );
        return Err(argument(py, &text));
    }
    let arguments = PyDict::new(py);
    arguments.set_item("max_version", (1, 0))?;
    let capsule = match object.call_method("__dlpack__", (), Some(&arguments)) {
        // Older objects do not accept a version.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0("__dlpack__"),
        other => other,
    };
    let capsule = capsule.map_err(|error| refused(py, error))?.cast_into::<PyCapsule>()?;
    let (tensor, read_only) = if let Ok(pointer) =
        capsule.pointer_checked(Some(c"dltensor_versioned"))
    {
        // SAFETY: capsules of this name contain this type, by DLPack's specification.
        let versioned = unsafe { pointer.cast::<Versioned>().as_ref() };
        if versioned.major > 1 {
            let text = format!("DLPack {}.{} is not supported", versioned.major, versioned.minor);
            return Err(argument(py, &text));
        }
        (&versioned.tensor, versioned.flags & READ_ONLY != 0)
    } else {
        let pointer = capsule.pointer_checked(Some(c"dltensor"))?;
        // SAFETY: as above; the tensor is the first field.
        (unsafe { pointer.cast::<Tensor>().as_ref() }, false)
    };
    let dimensions = usize::try_from(tensor.ndim).unwrap_or(0);
    let shape = numbers(tensor.shape, dimensions);
    if !is_contiguous(shape, numbers(tensor.strides, dimensions)) {
        return Err(not_contiguous(py, "x.contiguous()"));
    }
    let (code, bits) = (usize::from(tensor.code), usize::from(tensor.bits));
    let kind = match (code, bits) {
        (0 | 1, bits) => integer(bits / 8, code == 0),
        (2, 16) => Some(Dtype::F16),
        (4, 16) => Some(Dtype::Bf16),
        (2, 32) => Some(Dtype::F32),
        (2, 64) => Some(Dtype::F64),
        (6, 8) => Some(Dtype::Bool),
        _ => None,
    };
    let names = ["int", "uint", "float", "opaque", "bfloat", "complex", "bool"];
    let name = names.get(code).unwrap_or(&"unknown");
    let name = if code == 6 { (*name).to_owned() } else { format!("{name}{bits}") };
    let kind = kind.filter(|_| tensor.lanes == 1);
    let elements =
        shape.iter().try_fold(1usize, |n, side| n.checked_mul(usize::try_from(*side).ok()?));
    let size = usize::from(tensor.bits) * usize::from(tensor.lanes);
    let bytes = elements.and_then(|n| n.checked_mul(size)).map(|bits| bits.div_ceil(8));
    let bytes = bytes.ok_or_else(|| argument(py, "the tensor's shape is not valid"))?;
    let start = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
    let export = capsule.into_any().unbind();
    Ok((Memory { start, bytes, kind, dtype: name, _export: export }, read_only))
}

/// DLPack's name of a type of devices.
fn device_name(device: i32) -> String {
    let name = match device {
        2 => "kDLCUDA",
        8 => "kDLMetal",
        10 => "kDLROCM",
        13 => "kDLCUDAManaged",
        14 => "kDLOneAPI",
        _ => return format!("type {device}"),
    };
    name.to_owned()
}

fn numbers<'a>(start: *const i64, count: usize) -> &'a [i64] {
    if start.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: DLPack: `ndim` numbers, for as long as the capsule lives.
    unsafe { std::slice::from_raw_parts(start, count) }
}

/// Strides count elements; without any the tensor is contiguous.
fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = 1;
    shape.iter().zip(strides).rev().all(|(side, stride)| {
        let fits = *side == 1 || *stride == expected;
        expected *= side;
        fits
    })
}
