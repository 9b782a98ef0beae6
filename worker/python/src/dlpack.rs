//! Tensors of other libraries, and ours to them, by DLPack (dlpack.h, `DLManagedTensor` without a version).
//!
//! # Contract
//! A capsule named `dltensor` holds a `DLManagedTensor` that nobody has taken. Who takes it renames it to `used_dltensor` and
//! calls the deleter once; so does [`Foreign`]. Until then its memory stays. A capsule that this module makes owns its
//! tensor until a consumer has renamed it; its deleter gives back the object that keeps the elements alive, holding the
//! interpreter. Memory of foreign tensors is only copied, never looked at: another thread may write there.

use std::ffi::{CStr, c_void};

use pharos::tensor::{DataType, byte_size};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::datatype;
use crate::device::{CPU, CUDA};
use crate::error::TritonModelException;

const FRESH: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";

/// From how many bytes on a copy is made without the interpreter.
const LARGE: usize = 1 << 20;

#[repr(C)]
struct Managed {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// A tensor that another library has lent, in the processor's memory or in that of a CUDA device.
pub(crate) struct Foreign {
    managed: *mut Managed,
    datatype: DataType,
    shape: Vec<i64>,
}

// SAFETY: the tensor may be used and given back on any thread (DLPack); nothing here changes it.
unsafe impl Send for Foreign {}
// SAFETY: as above.
unsafe impl Sync for Foreign {}

/// Where foreign elements are.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) address: usize,
    len: usize,
}

impl Place {
    pub(crate) fn len(self) -> usize {
        self.len
    }
}

impl Foreign {
    /// Takes the tensor of a capsule.
    ///
    /// # Errors
    /// The capsule is of another kind or used up; the tensor is on a device of another kind, not contiguous, or of a type
    /// that the protocol does not have.
    pub(crate) fn take(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let managed = managed(capsule)?;
        // SAFETY: `managed` is the capsule's tensor, valid until the deleter is called, which nobody has done.
        let (datatype, shape) = unsafe { read(managed)? };
        // SAFETY: as above; the capsule is held by the caller.
        unsafe {
            let kind = (*managed).device_type;
            if kind != CPU && kind != CUDA {
                let text = format!("DLDevice type {kind} is not support by Python backend.");
                return Err(TritonModelException::new_err(text));
            }
            if ffi::PyCapsule_SetName(capsule.as_ptr(), USED.as_ptr()) != 0 {
                return Err(PyErr::fetch(capsule.py()));
            }
        }
        Ok(Self { managed, datatype, shape })
    }

    pub(crate) fn datatype(&self) -> DataType {
        self.datatype
    }

    pub(crate) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// DLPack's device: its type and its number.
    pub(crate) fn device(&self) -> (i32, i32) {
        // SAFETY: the tensor is ours until it is dropped.
        let managed = unsafe { &*self.managed };
        (managed.device_type, managed.device_id)
    }

    /// The number of its CUDA device, and where the elements are there.
    pub(crate) fn on_cuda(&self) -> (u32, u64) {
        (u32::try_from(self.device().1).unwrap_or(0), self.bytes().address as u64)
    }

    /// The elements.
    pub(crate) fn bytes(&self) -> Place {
        let len = byte_size(self.datatype, &self.shape).and_then(|len| usize::try_from(len).ok()).unwrap_or(0);
        // SAFETY: the tensor is ours until it is dropped.
        let managed = unsafe { &*self.managed };
        let address = (managed.data as usize).wrapping_add(usize::try_from(managed.byte_offset).unwrap_or(0));
        Place { address, len }
    }

    /// Copies the elements to the start of `to`; without the interpreter if they are many. None if they are on a device.
    pub(crate) fn copy(&self, py: Python<'_>, to: &mut [u8]) {
        let Place { address, len } = self.bytes();
        let len = if self.device().0 == CPU { len.min(to.len()) } else { 0 };
        // SAFETY: the elements are ours to read until the tensor is dropped, and are as many as type and shape say.
        let copy = |to: &mut [u8]| unsafe { std::ptr::copy_nonoverlapping(address as *const u8, to.as_mut_ptr(), len) };
        if len < LARGE { copy(to) } else { py.detach(|| copy(to)) }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: taken by `take`, so nobody else calls it; deleters of Python libraries need the interpreter.
        let delete = || unsafe {
            if let Some(deleter) = (*self.managed).deleter {
                deleter(self.managed);
            }
        };
        Python::attach(|_| delete());
    }
}

/// The tensor in a capsule that nobody has taken.
fn managed(capsule: &Bound<'_, PyAny>) -> PyResult<*mut Managed> {
    // SAFETY: only asks the capsule, which the caller holds.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), FRESH.as_ptr()) };
    if pointer.is_null() {
        let _ = PyErr::take(capsule.py());
        let text = "this is no DLPack capsule that can be taken: its name must be 'dltensor', and it is taken once";
        return Err(TritonModelException::new_err(text));
    }
    Ok(pointer.cast())
}

/// What the tensor of a capsule is; the capsule stays as it is.
///
/// # Errors
/// As [`Foreign::take`], but for the device.
pub(crate) fn describe(capsule: &Bound<'_, PyAny>) -> PyResult<(DataType, Vec<i64>)> {
    // SAFETY: the tensor is valid while the caller holds the capsule.
    unsafe { read(managed(capsule)?) }
}

/// Type and shape.
///
/// # Safety
/// The tensor is valid.
unsafe fn read(managed: *mut Managed) -> PyResult<(DataType, Vec<i64>)> {
    // SAFETY: the caller's word; shape and strides have `ndim` elements, strides may be missing.
    let (managed, shape, strides) = unsafe {
        let managed = &*managed;
        let dims = usize::try_from(managed.ndim).unwrap_or(0);
        let slice = |pointer: *mut i64| match (dims, pointer.is_null()) {
            (0, _) | (_, true) => &[][..],
            _ => std::slice::from_raw_parts(pointer, dims),
        };
        (managed, slice(managed.shape), slice(managed.strides))
    };
    if managed.lanes != 1 {
        return Err(TritonModelException::new_err("DLPack tensors of vectors are not supported: lanes must be 1"));
    }
    let datatype = datatype::of_dlpack(managed.code, managed.bits).ok_or_else(|| {
        let (code, bits) = (managed.code, managed.bits);
        TritonModelException::new_err(format!("DType code \"{code}\" with {bits} bits is not supported."))
    })?;
    let mut step = 1i64;
    for (stride, dim) in strides.iter().zip(shape).rev() {
        if *dim > 1 && *stride != step {
            return Err(TritonModelException::new_err(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported.",
            ));
        }
        step = step.saturating_mul(*dim);
    }
    Ok((datatype, shape.to_vec()))
}

/// What a capsule of ours owns.
struct Owned {
    managed: Managed,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _holder: Py<PyAny>,
}

/// Elements on a device, row-major and without gaps.
pub(crate) struct DeviceElements<'a> {
    pub(crate) address: usize,
    /// DLPack's device: its type and its number.
    pub(crate) device: (i32, i32),
    pub(crate) datatype: DataType,
    pub(crate) shape: &'a [i64],
}

/// A capsule over elements on a device that `holder` keeps alive.
///
/// # Errors
/// The datatype is BYTES, or there is no memory.
pub(crate) fn capsule<'py>(holder: Bound<'py, PyAny>, elements: &DeviceElements<'_>) -> PyResult<Bound<'py, PyAny>> {
    let DeviceElements { address, device: (device_type, device_id), datatype, shape } = *elements;
    let py = holder.py();
    let (code, bits) = datatype::to_dlpack(datatype)
        .ok_or_else(|| TritonModelException::new_err("DLPack does not have support for string tensors."))?;
    let mut strides = vec![0; shape.len()];
    let mut step = 1i64;
    for (stride, dim) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        step = step.saturating_mul((*dim).max(1));
    }
    let managed = Managed {
        data: address as *mut c_void,
        device_type,
        device_id,
        ndim: i32::try_from(shape.len()).unwrap_or(0),
        code,
        bits,
        lanes: 1,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
        context: std::ptr::null_mut(),
        deleter: Some(delete),
    };
    let mut owned = Box::new(Owned { managed, shape: shape.to_vec(), strides, _holder: holder.unbind() });
    owned.managed.shape = owned.shape.as_mut_ptr();
    owned.managed.strides = owned.strides.as_mut_ptr();
    let owned = Box::into_raw(owned);
    // SAFETY: the box is whole; it goes back in `delete`, which the consumer or the capsule's destructor calls once.
    unsafe {
        (*owned).managed.context = owned.cast();
        let managed = &raw mut (*owned).managed;
        let capsule = ffi::PyCapsule_New(managed.cast(), FRESH.as_ptr(), Some(drop_capsule));
        if capsule.is_null() {
            delete(managed);
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: `context` is the box of `capsule`, and DLPack's deleter is called once.
    Python::attach(|_| unsafe { drop(Box::from_raw((*managed).context.cast::<Owned>())) });
}

unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule is whole while its destructor runs. One that was taken has another name, and is the consumer's.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, FRESH.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, FRESH.as_ptr()).cast::<Managed>();
            delete(managed);
        }
    }
}
