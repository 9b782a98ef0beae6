//! The elements of outputs, in the server's memory: copied there once, from wherever they are.

use pharos::tensor::{DataType, byte_size};
use pharos_backend::{Content, DeviceMemory, Memory, Runtime};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::array::{self, Source};
use crate::datatype::{self, NumpyType};
use crate::device::{CPU, CUDA};
use crate::dlpack::Foreign;
use crate::error::{TritonModelException, model_exception};

/// Numpy's letter and size for the elements of BF16, which it has no type for: as many bytes, and nobody computes with them.
const BITS: NumpyType = NumpyType { kind: b'i', size: 2 };

/// Memory of the server's for an output.
pub(crate) fn room(runtime: &Runtime, len: usize) -> PyResult<Memory> {
    runtime.memory(len).map_err(|error| model_exception(&error))
}

/// The bytes of an array: where they are if that is an input of this model, else copied.
pub(crate) fn copied(array: &Bound<'_, PyAny>, runtime: &Runtime) -> PyResult<Content> {
    let view = array::view(array)?;
    if !view.plain {
        return copied(&array::made_plain(array)?, runtime);
    }
    if let Some(received) = runtime.locate(view.address(), view.len()) {
        return Ok(Content::Received(received));
    }
    let mut memory = room(runtime, view.len())?;
    Source::of(array, &view).copy(&mut memory);
    Ok(Content::Memory(memory))
}

/// The bytes of a tensor that another library has lent.
pub(crate) fn lent(py: Python<'_>, foreign: &Foreign, runtime: &Runtime) -> PyResult<Content> {
    let place = foreign.bytes();
    if foreign.device().0 != CPU {
        return downloaded(py, foreign.on_cuda(), place.len(), runtime);
    }
    let mut memory = room(runtime, place.len())?;
    foreign.copy(py, &mut memory);
    Ok(Content::Memory(memory))
}

/// Bytes at an address of a device, behind the work of its default stream.
pub(crate) fn downloaded(py: Python<'_>, place: (u32, u64), len: usize, runtime: &Runtime) -> PyResult<Content> {
    let mut memory = room(runtime, len)?;
    py.detach(|| runtime.read_device(DeviceMemory::new(place.0, place.1, len), &mut memory))
        .map_err(|error| model_exception(&error))?;
    Ok(Content::Memory(memory))
}

/// The elements of an object of a library on a CUDA device, which that library has put behind its work in the device's default
/// stream; nothing if the library does not lend them so.
pub(crate) fn behind_the_default_stream(object: &Bound<'_, PyAny>) -> Option<Foreign> {
    let named = PyDict::new(object.py());
    // The number of that stream, in Python's array API.
    named.set_item(intern!(object.py(), "stream"), 1).ok()?;
    let capsule = object.call_method(intern!(object.py(), "__dlpack__"), (), Some(&named)).ok()?;
    Foreign::take(&capsule).ok().filter(|foreign| foreign.device().0 == CUDA)
}

/// The elements of an object of a library that has its own way to copy them from a device, in the order of its own work
/// there: PyTorch and CuPy write them straight into the output's memory, which may be pinned; others by an array of theirs.
pub(crate) fn fetched(
    object: &Bound<'_, PyAny>,
    (datatype, shape): (DataType, &[i64]),
    runtime: &Runtime,
) -> PyResult<Content> {
    let len = byte_size(datatype, shape).and_then(|len| usize::try_from(len).ok());
    let len = len.ok_or_else(|| TritonModelException::new_err("a tensor on a device has no size"))?;
    let element = datatype::to_numpy(datatype).unwrap_or(BITS);
    let fill: Option<Fill<'_>> = match torch(object) {
        Some(torch) => Some(Box::new(move |view| by_torch(&torch, object, datatype, &view))),
        None if !object.hasattr("cpu")? => Some(Box::new(|view| by_cupy(object, &view))),
        None => None,
    };
    if let Some(fill) = fill {
        match array::filled(object.py(), room(runtime, len)?, (element, shape), fill) {
            Ok(Ok(memory)) => return Ok(Content::Memory(memory)),
            Ok(Err(kept)) => {
                let mut memory = room(runtime, len)?;
                memory.copy_from_slice(&kept);
                return Ok(Content::Memory(memory));
            }
            // An older version, which cannot do that. What is really wrong is found out again.
            Err(_) => {}
        }
    }
    by_host(object, runtime)
}

/// Writes elements to an array.
type Fill<'py> = Box<dyn FnOnce(Bound<'py, PyAny>) -> PyResult<()> + 'py>;

/// PyTorch, if the object is one of its tensors.
fn torch<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let py = object.py();
    let modules = py.import(intern!(py, "sys")).ok()?.getattr(intern!(py, "modules")).ok()?;
    let torch = modules.cast::<PyDict>().ok()?.get_item(intern!(py, "torch")).ok()??;
    let tensor = torch.getattr(intern!(py, "Tensor")).ok()?;
    object.is_instance(&tensor).ok()?.then_some(torch)
}

/// Waits for the work of the current stream, and then for the copy.
fn by_torch<'py>(
    torch: &Bound<'py, PyAny>,
    object: &Bound<'py, PyAny>,
    datatype: DataType,
    view: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let py = object.py();
    let mut from = object.call_method0(intern!(py, "detach"))?;
    if datatype == DataType::Bf16 {
        from = from.call_method1(intern!(py, "view"), (torch.getattr(intern!(py, "int16"))?,))?;
    }
    torch.call_method1(intern!(py, "from_numpy"), (view,))?.call_method1(intern!(py, "copy_"), (from,))?;
    Ok(())
}

/// As [`by_torch`].
fn by_cupy<'py>(object: &Bound<'py, PyAny>, view: &Bound<'py, PyAny>) -> PyResult<()> {
    let py = object.py();
    let named = PyDict::new(py);
    named.set_item(intern!(py, "out"), view)?;
    object.call_method(intern!(py, "get"), (), Some(&named))?;
    Ok(())
}

/// By an array in the process's memory that the library makes: `cpu()` or `get()`.
fn by_host(object: &Bound<'_, PyAny>, runtime: &Runtime) -> PyResult<Content> {
    if !object.hasattr("cpu")? {
        return copied(&object.call_method0("get")?, runtime);
    }
    let host = object.call_method0("detach").unwrap_or_else(|_| object.clone()).call_method0("cpu")?;
    match host.call_method0("numpy").and_then(|array| Ok((array::is_array(&array)?, array))) {
        Ok((true, array)) => copied(&array, runtime),
        // Elements that numpy has no type for.
        _ if host.hasattr("__dlpack__")? => {
            lent(object.py(), &Foreign::take(&host.call_method0("__dlpack__")?)?, runtime)
        }
        _ => Err(PyTypeError::new_err(format!(
            "a '{}' on another device cannot be copied to the server: what its cpu() gives has neither numpy() nor __dlpack__()",
            object.get_type().name()?
        ))),
    }
}
