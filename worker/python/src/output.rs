//! Copies the elements of outputs into shared memory, once, from wherever they are.

use pharos::tensor::{DataType, byte_size};
use pharos_backend::{Content, DeviceMemory, Memory, Runtime};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::array::{self, Source};
use crate::datatype::{self, NumpyType};
use crate::dlpack::{CPU, CUDA, Foreign};
use crate::error::{TritonModelException, model_exception};

/// The numpy type for the bits of BF16, for which numpy has no type. No computation uses it.
const BITS: NumpyType = NumpyType { kind: b'i', size: 2 };

/// Allocates shared memory for an output.
pub(crate) fn allocate(runtime: &Runtime, len: usize) -> PyResult<Memory> {
    runtime.memory(len).map_err(|error| model_exception(&error))
}

/// Returns the bytes of an array: by reference if they belong to an input of this model, else
/// copied.
pub(crate) fn copied(array: &Bound<'_, PyAny>, runtime: &Runtime) -> PyResult<Content> {
    let view = array::view(array)?;
    if !view.plain {
        return copied(&array::to_plain(array)?, runtime);
    }
    if let Some(received) = runtime.locate(view.address(), view.len()) {
        return Ok(Content::Received(received));
    }
    let mut memory = allocate(runtime, view.len())?;
    Source::of(array, &view).copy(&mut memory);
    Ok(Content::Memory(memory))
}

/// Copies the bytes of a tensor of another library.
pub(crate) fn copy_foreign(
    py: Python<'_>,
    foreign: &Foreign,
    runtime: &Runtime,
) -> PyResult<Content> {
    let place = foreign.bytes();
    if foreign.device().0 != CPU {
        return downloaded(py, foreign.on_cuda(), place.len(), runtime);
    }
    let mut memory = allocate(runtime, place.len())?;
    foreign.copy(py, &mut memory);
    Ok(Content::Memory(memory))
}

/// Copies bytes from a device address, after the work in the device's default stream.
pub(crate) fn downloaded(
    py: Python<'_>,
    place: (u32, u64),
    len: usize,
    runtime: &Runtime,
) -> PyResult<Content> {
    let mut memory = allocate(runtime, len)?;
    py.detach(|| runtime.read_device(DeviceMemory::new(place.0, place.1, len), &mut memory))
        .map_err(|error| model_exception(&error))?;
    Ok(Content::Memory(memory))
}

/// Returns the elements of an object on a CUDA device through DLPack, ordered after the library's
/// work in the device's default stream; `None` if the library does not support this.
pub(crate) fn behind_the_default_stream(object: &Bound<'_, PyAny>) -> Option<Foreign> {
    let named = PyDict::new(object.py());
    // The value for the default stream in Python's array API.
    named.set_item(intern!(object.py(), "stream"), 1).ok()?;
    let capsule = object.call_method(intern!(object.py(), "__dlpack__"), (), Some(&named)).ok()?;
    Foreign::take(&capsule).ok().filter(|foreign| foreign.device().0 == CUDA)
}

/// Copies the elements of an object with the library's own copy function, in the order of the
/// library's work on the device. PyTorch and CuPy write directly into the output's memory, which
/// may be pinned; other libraries create an intermediate array.
pub(crate) fn fetched(
    object: &Bound<'_, PyAny>,
    datatype: DataType,
    shape: &[i64],
    runtime: &Runtime,
) -> PyResult<Content> {
    let len =
        byte_size(datatype, shape).and_then(|len| usize::try_from(len).ok()).ok_or_else(|| {
            TritonModelException::new_err("the shape of a tensor on a device has no valid size")
        })?;
    let element = datatype::to_numpy(datatype).unwrap_or(BITS);
    let fill: Option<Fill<'_>> = match torch(object) {
        Some(torch) => Some(Box::new(move |view| by_torch(&torch, object, datatype, &view))),
        None if !object.hasattr("cpu")? => Some(Box::new(|view| by_cupy(object, &view))),
        None => None,
    };
    if let Some(fill) = fill {
        match array::filled(object.py(), allocate(runtime, len)?, element, shape, fill) {
            Ok(Ok(memory)) => return Ok(Content::Memory(memory)),
            Ok(Err(kept)) => {
                let mut memory = allocate(runtime, len)?;
                memory.copy_from_slice(&kept);
                return Ok(Content::Memory(memory));
            }
            // An older version without this function. The fallback reports any real error.
            Err(_) => {}
        }
    }
    by_host(object, runtime)
}

/// Writes elements to an array.
type Fill<'py> = Box<dyn FnOnce(Bound<'py, PyAny>) -> PyResult<()> + 'py>;

/// Returns the module of PyTorch if the object is a PyTorch tensor.
fn torch<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let py = object.py();
    let modules = py.import(intern!(py, "sys")).ok()?.getattr(intern!(py, "modules")).ok()?;
    let torch = modules.cast::<PyDict>().ok()?.get_item(intern!(py, "torch")).ok()??;
    let tensor = torch.getattr(intern!(py, "Tensor")).ok()?;
    object.is_instance(&tensor).ok()?.then_some(torch)
}

/// Copies with PyTorch: waits for the work of the current stream, then for the copy.
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
    torch
        .call_method1(intern!(py, "from_numpy"), (view,))?
        .call_method1(intern!(py, "copy_"), (from,))?;
    Ok(())
}

/// Copies with CuPy, in the same order as [`by_torch`].
fn by_cupy<'py>(object: &Bound<'py, PyAny>, view: &Bound<'py, PyAny>) -> PyResult<()> {
    let py = object.py();
    let named = PyDict::new(py);
    named.set_item(intern!(py, "out"), view)?;
    object.call_method(intern!(py, "get"), (), Some(&named))?;
    Ok(())
}

/// Copies through a host array of the library: `cpu()` or `get()`.
fn by_host(object: &Bound<'_, PyAny>, runtime: &Runtime) -> PyResult<Content> {
    if !object.hasattr("cpu")? {
        return copied(&object.call_method0("get")?, runtime);
    }
    let host =
        object.call_method0("detach").unwrap_or_else(|_| object.clone()).call_method0("cpu")?;
    match host.call_method0("numpy").and_then(|array| Ok((array::is_array(&array)?, array))) {
        Ok((true, array)) => copied(&array, runtime),
        // The elements have a type that numpy lacks.
        _ if host.hasattr("__dlpack__")? => {
            copy_foreign(object.py(), &Foreign::take(&host.call_method0("__dlpack__")?)?, runtime)
        }
        _ => Err(PyTypeError::new_err(format!(
            "cannot copy a '{}' from its device: the result of its cpu() has neither numpy() nor \
             __dlpack__()",
            object.get_type().name()?
        ))),
    }
}
