//! Numpy arrays: creates arrays over memory of this process, and reads the memory of existing
//! arrays.
//!
//! Both directions use the C form of numpy's array interface, the capsule `__array_struct__`
//! (numpy.org, "The array interface protocol"). It needs neither Python lists and dictionaries nor
//! numpy's C API table.
//!
//! # Contract
//! A capsule created here describes memory that its [`Shared`] keeps alive, and numpy keeps that
//! object alive as long as the array. A capsule read here was just created by numpy from an array
//! that the caller holds; its contents are copied before any other code runs. [`Source`] reads an
//! array's memory while the array is held. Another thread of the model may write to it at
//! the same time, as with numpy itself, so the memory is only copied, never interpreted in place.
//! [`filled`] lends output memory in the same way. It returns the memory as exclusively owned only
//! if no Python object refers to it any more; otherwise the memory may only be copied.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use pharos::tensor::DataType;
use pharos_backend::{Memory, Received};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;
use pyo3::{ffi, intern};

use crate::datatype::{self, NumpyType};

const C_CONTIGUOUS: c_int = 0x1;
const ALIGNED: c_int = 0x100;
const NATIVE: c_int = 0x200;
const WRITEABLE: c_int = 0x400;

/// The size in bytes from which a copy releases the interpreter.
const LARGE: usize = 1 << 20;

/// numpy's `PyArrayInterface`.
#[repr(C)]
struct Interface {
    two: c_int,
    nd: c_int,
    typekind: c_char,
    itemsize: c_int,
    flags: c_int,
    shape: *mut isize,
    strides: *mut isize,
    data: *mut c_void,
    descr: *mut ffi::PyObject,
}

/// The data that a capsule owns.
#[repr(C)]
struct Owned {
    interface: Interface,
    shape: Vec<isize>,
    strides: Vec<isize>,
}

/// Bytes that arrays are created over.
#[pyclass(frozen, module = "pharos_worker._native")]
pub(crate) struct Shared {
    address: usize,
    element: NumpyType,
    shape: Vec<isize>,
    /// Keeps the memory alive.
    _owner: Owner,
}

/// The owner of the bytes.
#[allow(dead_code)]
enum Owner {
    Received(Received),
    Memory(Arc<Memory>),
}

#[pymethods]
impl Shared {
    #[getter]
    fn __array_struct__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let mut strides = vec![0; self.shape.len()];
        let mut step = isize::try_from(self.element.size).unwrap_or(isize::MAX);
        for (stride, dim) in strides.iter_mut().zip(&self.shape).rev() {
            *stride = step;
            step = step.saturating_mul(*dim);
        }
        let mut owned = Box::new(Owned {
            interface: Interface {
                two: 2,
                nd: c_int::try_from(self.shape.len()).unwrap_or(0),
                typekind: self.element.kind.cast_signed() as c_char,
                itemsize: c_int::try_from(self.element.size).unwrap_or(0),
                flags: C_CONTIGUOUS | ALIGNED | NATIVE | WRITEABLE,
                shape: std::ptr::null_mut(),
                strides: std::ptr::null_mut(),
                data: self.address as *mut c_void,
                descr: std::ptr::null_mut(),
            },
            shape: self.shape.clone(),
            strides,
        });
        owned.interface.shape = owned.shape.as_mut_ptr();
        owned.interface.strides = owned.strides.as_mut_ptr();
        let pointer = Box::into_raw(owned);
        // SAFETY: a new capsule over the box, which its destructor takes back; the interface is the
        // box's first field.
        unsafe {
            let capsule = ffi::PyCapsule_New(pointer.cast(), std::ptr::null(), Some(drop_owned));
            if capsule.is_null() {
                drop(Box::from_raw(pointer));
            }
            Bound::from_owned_ptr_or_err(py, capsule)
        }
    }
}

unsafe extern "C" fn drop_owned(capsule: *mut ffi::PyObject) {
    // SAFETY: called once, by the capsule that `__array_struct__` made, with the pointer that it
    // was given.
    unsafe {
        let pointer = ffi::PyCapsule_GetPointer(capsule, std::ptr::null());
        if !pointer.is_null() {
            drop(Box::from_raw(pointer.cast::<Owned>()));
        }
    }
}

/// Returns a function of numpy.
pub(crate) fn numpy<'py>(py: Python<'py>, name: &'static str) -> PyResult<Bound<'py, PyAny>> {
    py.import(intern!(py, "numpy"))?.getattr(name)
}

/// Whether an object is a numpy array.
pub(crate) fn is_array(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    static NDARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = object.py();
    let ndarray = NDARRAY.get_or_try_init(py, || numpy(py, "ndarray").map(Bound::unbind))?;
    object.is_instance(ndarray.bind(py))
}

/// Creates a writable array over these bytes, for a datatype that numpy has.
pub(crate) fn over<'py>(
    py: Python<'py>,
    bytes: &Received,
    datatype: DataType,
    shape: &[i64],
) -> PyResult<Bound<'py, PyAny>> {
    let element = datatype::to_numpy(datatype)
        .ok_or_else(|| PyTypeError::new_err(format!("numpy has no type for {datatype}")))?;
    let address = bytes.as_ptr() as usize;
    let owner = Owner::Received(bytes.clone());
    new_array(py, address, owner, element, shape)
}

/// Passes a writable array over output memory, with elements of this type, to `fill`. Returns the
/// memory, or a shared handle if Python code has kept a reference and may still write to it.
///
/// # Errors
/// The error of `fill`.
pub(crate) fn filled<'py>(
    py: Python<'py>,
    mut memory: Memory,
    element: NumpyType,
    shape: &[i64],
    fill: impl FnOnce(Bound<'py, PyAny>) -> PyResult<()>,
) -> PyResult<Result<Memory, Arc<Memory>>> {
    let address = memory.as_mut_ptr() as usize;
    let memory = Arc::new(memory);
    fill(new_array(py, address, Owner::Memory(Arc::clone(&memory)), element, shape)?)?;
    Ok(Arc::try_unwrap(memory))
}

fn new_array<'py>(
    py: Python<'py>,
    address: usize,
    owner: Owner,
    element: NumpyType,
    shape: &[i64],
) -> PyResult<Bound<'py, PyAny>> {
    let shape = shape.iter().map(|dim| isize::try_from(*dim)).collect::<Result<_, _>>()?;
    let shared = Bound::new(py, Shared { address, element, shape, _owner: owner })?;
    static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let asarray = ASARRAY.get_or_try_init(py, || numpy(py, "asarray").map(Bound::unbind))?;
    asarray.bind(py).call1((shared,))
}

/// numpy's description of an array.
pub(crate) struct View {
    /// The type letter: `f`, `i`, ...
    pub(crate) kind: u8,
    /// The size of an element in bytes.
    pub(crate) size: usize,
    /// Whether the array is row-major, contiguous and in native byte order.
    pub(crate) plain: bool,
    pub(crate) shape: Vec<i64>,
    address: usize,
}

impl View {
    /// Returns the size of all elements in bytes.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().map(|dim| usize::try_from(*dim).unwrap_or(0)).product::<usize>()
            * self.size
    }

    /// Returns the address of the first element.
    pub(crate) fn address(&self) -> usize {
        self.address
    }
}

/// Reads the description of an array.
///
/// # Errors
/// The object is not an array.
pub(crate) fn view(array: &Bound<'_, PyAny>) -> PyResult<View> {
    let capsule = array.getattr(intern!(array.py(), "__array_struct__"))?;
    // SAFETY: the pointer is checked; numpy's interface is valid while capsule and array are held,
    // which they are here.
    unsafe {
        let pointer =
            ffi::PyCapsule_GetPointer(capsule.as_ptr(), std::ptr::null()).cast::<Interface>();
        let Some(interface) = pointer.as_ref().filter(|interface| interface.two == 2) else {
            let _ = PyErr::take(array.py());
            return Err(PyTypeError::new_err(
                "not a numpy array: the object has no array interface",
            ));
        };
        let dims = usize::try_from(interface.nd).unwrap_or(0);
        let shape = if dims == 0 { &[] } else { std::slice::from_raw_parts(interface.shape, dims) };
        let flags = C_CONTIGUOUS | NATIVE;
        Ok(View {
            kind: interface.typekind as u8,
            size: usize::try_from(interface.itemsize).unwrap_or(0),
            plain: interface.flags & flags == flags,
            shape: shape.iter().map(|dim| *dim as i64).collect(),
            address: interface.data as usize,
        })
    }
}

/// The memory of an array that is held, to copy from.
pub(crate) struct Source<'a> {
    address: usize,
    len: usize,
    _array: &'a Bound<'a, PyAny>,
}

impl<'a> Source<'a> {
    /// Returns the memory of a plain array.
    pub(crate) fn of(array: &'a Bound<'a, PyAny>, view: &View) -> Self {
        Self { address: view.address, len: if view.plain { view.len() } else { 0 }, _array: array }
    }

    /// Copies all bytes to the start of `to`; releases the interpreter if there are many.
    pub(crate) fn copy(&self, to: &mut [u8]) {
        let from = self.address;
        let len = self.len.min(to.len());
        // SAFETY: `from` is the memory of an array that this value keeps alive, with at least `len`
        // bytes; `to` is exclusively borrowed.
        let copy = |to: &mut [u8]| unsafe {
            std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), len)
        };
        if len < LARGE { copy(to) } else { self._array.py().detach(|| copy(to)) }
    }
}

/// Converts an array to row-major order and native byte order; returns it unchanged if it already
/// has them.
pub(crate) fn to_plain<'py>(array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = array.py();
    let native =
        array.getattr(intern!(py, "dtype"))?.call_method1(intern!(py, "newbyteorder"), ("=",))?;
    let array = numpy(py, "asarray")?.call1((array, native, "C"))?;
    Ok(array)
}

/// Creates a tuple of dimensions.
pub(crate) fn dimensions<'py>(py: Python<'py>, shape: &[i64]) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, shape)
}
