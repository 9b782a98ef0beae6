//! `pb_utils.Tensor`: a name, a datatype, a shape, and elements, which are only copied when they
//! are needed elsewhere.

use pharos::tensor::{DataType, byte_size};
use pharos_backend::{Content, DeviceMemory, Received, ReceivedOnDevice, Runtime};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyList;

use crate::arguments::Text;
use crate::array;
use crate::datatype;
use crate::dlpack::{self, CPU, CUDA, DeviceElements, Foreign};
use crate::error::{TritonModelException, model_exception};
use crate::output;
use crate::strings::{self, Elements};

/// A tensor.
#[pyclass(frozen, subclass, module = "triton_python_backend_utils")]
pub(crate) struct Tensor {
    name: String,
    datatype: DataType,
    shape: Vec<i64>,
    stored: Stored,
    /// The result of `as_numpy`.
    array: PyOnceLock<Py<PyAny>>,
}

/// The location of the elements.
enum Stored {
    /// In shared memory: an input, or an output of another model.
    Received(Received),
    /// In a client's memory on a device.
    OnDevice(ReceivedOnDevice),
    /// In an array of the model: row-major, or of objects.
    Array(Py<PyAny>),
    /// In memory of another library, borrowed through DLPack, on the host or a device.
    Foreign(Foreign),
    /// On another device: an object whose library can copy it from there.
    Device { object: Py<PyAny>, device: (i32, i32) },
}

impl Tensor {
    /// Creates a tensor over shared memory.
    pub(crate) fn received(
        name: String,
        datatype: DataType,
        shape: Vec<i64>,
        bytes: Received,
    ) -> Self {
        Self { name, datatype, shape, stored: Stored::Received(bytes), array: PyOnceLock::new() }
    }

    /// Creates a tensor over a client's memory on a device.
    pub(crate) fn on_device(
        name: String,
        datatype: DataType,
        shape: Vec<i64>,
        kept: ReceivedOnDevice,
    ) -> Self {
        Self { name, datatype, shape, stored: Stored::OnDevice(kept), array: PyOnceLock::new() }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn datatype(&self) -> DataType {
        self.datatype
    }

    pub(crate) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Returns the bytes of a tensor received from the server.
    pub(crate) fn received_bytes(&self) -> Option<&[u8]> {
        match &self.stored {
            Stored::Received(bytes) => Some(bytes),
            _ => None,
        }
    }

    fn of_array(name: String, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        if !array::is_array(given)? {
            let kind = given.get_type();
            return Err(PyTypeError::new_err(format!(
                "Tensor('{name}', ...) takes a numpy.ndarray, not {kind}"
            )));
        }
        if name.is_empty() {
            return Err(TritonModelException::new_err("Tensor name cannot be an empty string."));
        }
        let given = given.clone();
        let view = array::view(&given)?;
        let datatype = datatype::of_numpy(view.kind, view.size)
            .ok_or_else(|| TritonModelException::new_err("NumPy dtype is not supported."))?;
        let plain = view.plain || datatype == DataType::Bytes;
        let own = if plain { given } else { array::to_plain(&given)? };
        Ok(Self {
            name,
            datatype,
            shape: view.shape,
            stored: Stored::Array(own.unbind()),
            array: PyOnceLock::new(),
        })
    }

    /// Returns DLPack's device: its type and its id.
    fn device(&self) -> (i32, i32) {
        match &self.stored {
            Stored::Received(_) | Stored::Array(_) => (CPU, 0),
            Stored::OnDevice(kept) => (CUDA, i32::try_from(kept.memory().device()).unwrap_or(0)),
            Stored::Foreign(foreign) => foreign.device(),
            Stored::Device { device, .. } => *device,
        }
    }

    /// Returns the elements in shared memory: by reference if they are already there, else copied
    /// once.
    ///
    /// # Errors
    /// Memory allocation failed, or the elements cannot be read.
    pub(crate) fn content(&self, py: Python<'_>, runtime: &Runtime) -> PyResult<Content> {
        match &self.stored {
            Stored::Received(bytes) => Ok(Content::Received(bytes.clone())),
            Stored::OnDevice(kept) => {
                let memory = kept.memory();
                output::downloaded(py, (memory.device(), memory.address()), memory.len(), runtime)
            }
            Stored::Array(array) if self.datatype == DataType::Bytes => {
                let elements = Elements::of(array.bind(py))?;
                let mut memory = output::allocate(runtime, elements.len())?;
                elements.write(&mut memory);
                Ok(Content::Memory(memory))
            }
            Stored::Array(array) => output::copied(array.bind(py), runtime),
            Stored::Foreign(foreign) => output::copy_foreign(py, foreign, runtime),
            Stored::Device { object, .. } => {
                output::fetched(object.bind(py), self.datatype, &self.shape, runtime)
            }
        }
    }

    /// Copies elements on a CUDA device to the device memory that `place` returns for their size.
    /// `None` if they are not on a CUDA device, or `place` returns `None`.
    ///
    /// # Errors
    /// The copy failed.
    pub(crate) fn placed(
        &self,
        py: Python<'_>,
        runtime: &Runtime,
        place: impl FnOnce(usize) -> Option<ReceivedOnDevice>,
    ) -> PyResult<Option<Content>> {
        let len = byte_size(self.datatype, &self.shape).and_then(|len| usize::try_from(len).ok());
        let Some(len) = len.filter(|_| self.device().0 == CUDA) else { return Ok(None) };
        let Some(to) = place(len) else { return Ok(None) };
        let at = |(device, address)| DeviceMemory::new(device, address, len);
        let lent;
        let from = match &self.stored {
            Stored::OnDevice(kept) => kept.memory(),
            Stored::Foreign(foreign) => at(foreign.on_cuda()),
            Stored::Device { object, .. } => {
                match output::behind_the_default_stream(object.bind(py)) {
                    // Check again: the model may have changed the object since.
                    Some(foreign)
                        if (foreign.datatype(), foreign.shape())
                            == (self.datatype, &self.shape) =>
                    {
                        lent = foreign;
                        at(lent.on_cuda())
                    }
                    _ => return Ok(None),
                }
            }
            Stored::Received(_) | Stored::Array(_) => return Ok(None),
        };
        py.detach(|| runtime.copy_on_device(from, &to)).map_err(|error| model_exception(&error))?;
        Ok(Some(Content::Placed(len)))
    }

    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let this = slf.get();
        match &this.stored {
            Stored::Array(array) => Ok(array.bind(py).clone()),
            _ if this.device().0 != CPU => Err(TritonModelException::new_err(
                "Tensor is stored in GPU and cannot be converted to NumPy.",
            )),
            _ if this.datatype == DataType::Bf16 => Err(TritonModelException::new_err(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and \
                 from_dlpack() instead.",
            )),
            Stored::Received(bytes) if this.datatype == DataType::Bytes => {
                strings::to_array(py, bytes, &this.shape)
            }
            Stored::Received(bytes) => array::over(py, bytes, this.datatype, &this.shape),
            Stored::Foreign(_) | Stored::OnDevice(_) | Stored::Device { .. } => {
                array::numpy(py, "from_dlpack")?.call1((slf,))
            }
        }
    }
}

#[pymethods]
impl Tensor {
    #[new]
    #[pyo3(signature = (name, numpy_array))]
    fn new(name: Text, numpy_array: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::of_array(name.0, numpy_array)
    }

    /// The name.
    #[pyo3(name = "name")]
    fn py_name(&self) -> &str {
        &self.name
    }

    /// Returns the elements as a numpy array, without copying if the datatype allows it; for BYTES,
    /// as `bytes` objects.
    fn as_numpy(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        let py = slf.py();
        let array = slf.get().array.get_or_try_init(py, || Self::numpy(slf).map(Bound::unbind))?;
        Ok(array.clone_ref(py))
    }

    /// Returns Triton's number of the datatype, for example 11 for FP32.
    fn triton_dtype(&self) -> u8 {
        self.datatype.number()
    }

    /// The shape, including the batch dimension if the model batches.
    #[pyo3(name = "shape")]
    fn py_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.shape)
    }

    /// Whether the elements are in host memory.
    fn is_cpu(&self) -> bool {
        self.device().0 == CPU
    }

    /// Returns a DLPack capsule over the elements, without copying.
    fn to_dlpack<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self::__dlpack__(slf, None, None, None, None)
    }

    #[pyo3(signature = (stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<Bound<'py, PyAny>>,
        dl_device: Option<Bound<'py, PyAny>>,
        copy: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // All consumers support the unversioned form.
        let py = slf.py();
        let _ = max_version;
        let _ = dl_device;
        let _ = copy;
        let this = slf.get();
        let (address, holder) = match &this.stored {
            Stored::Device { object, .. } => {
                let kwargs = pyo3::types::PyDict::new(py);
                if let Some(stream) = stream {
                    kwargs.set_item("stream", stream)?;
                }
                return object.bind(py).call_method("__dlpack__", (), Some(&kwargs));
            }
            _ if this.datatype == DataType::Bytes => {
                return Err(TritonModelException::new_err(
                    "DLPack does not have support for string tensors.",
                ));
            }
            Stored::Received(bytes) => (bytes.as_ptr() as usize, slf.clone().into_any()),
            // The server has no pending work on this memory, so no stream has to wait.
            Stored::OnDevice(kept) => (kept.memory().address() as usize, slf.clone().into_any()),
            Stored::Array(array) => {
                let array = array.bind(py);
                (array::view(array)?.address(), array.clone())
            }
            Stored::Foreign(foreign) => (foreign.bytes().address, slf.clone().into_any()),
        };
        let device = this.device();
        dlpack::capsule(
            holder,
            &DeviceElements { address, device, datatype: this.datatype, shape: &this.shape },
        )
    }

    /// Returns DLPack's device: its type and its id.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.device()
    }

    /// Creates a tensor from an object with `__dlpack__` and `__dlpack_device__`, or from a DLPack
    /// capsule. The elements must be contiguous and row-major. They are not copied until they are
    /// sent.
    #[staticmethod]
    fn from_dlpack(name: String, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        if name.is_empty() {
            return Err(TritonModelException::new_err("Tensor name cannot be an empty string."));
        }
        let capsule = if tensor.is_instance_of::<pyo3::types::PyCapsule>() {
            tensor.clone()
        } else if tensor.hasattr("__dlpack__")? && tensor.hasattr("__dlpack_device__")? {
            let device: (i32, i32) =
                tensor.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
            if device.0 != CPU && (tensor.hasattr("cpu")? || tensor.hasattr("get")?) {
                return Self::of_object(name, tensor, device);
            }
            tensor.call_method0(intern!(py, "__dlpack__"))?
        } else {
            return Err(TritonModelException::new_err(
                "Provided tensor is not supported. Tensor must be a DLPack capsule or have \
                 `__dlpack__` and `__dlpack_device__` attributes",
            ));
        };
        let foreign = Foreign::take(&capsule)?;
        let datatype = foreign.datatype();
        let shape = foreign.shape().to_vec();
        Ok(Self {
            name,
            datatype,
            shape,
            stored: Stored::Foreign(foreign),
            array: PyOnceLock::new(),
        })
    }

    fn __repr__(&self) -> String {
        format!("<Tensor '{}' {} {:?}>", self.name, self.datatype, self.shape)
    }
}

impl Tensor {
    fn of_object(name: String, object: &Bound<'_, PyAny>, device: (i32, i32)) -> PyResult<Self> {
        // Read from a DLPack capsule, which describes the objects of all libraries uniformly, and
        // is released at once.
        let described = dlpack::describe(&object.call_method0("__dlpack__")?)?;
        let object = object.clone().unbind();
        let array = PyOnceLock::new();
        let (datatype, shape) = described;
        Ok(Self { name, datatype, shape, stored: Stored::Device { object, device }, array })
    }
}
