//! Exchange of tensors with other libraries through DLPack (dlpack.h, unversioned
//! `DLManagedTensor`).
//!
//! # Contract
//! A capsule named `dltensor` holds a `DLManagedTensor` that has not been consumed. The consumer
//! renames the capsule to `used_dltensor` and calls the deleter once; so does [`Foreign`]. The
//! memory stays valid until then. A capsule created here owns its tensor until a consumer renames
//! it; its deleter acquires the interpreter and releases the object that keeps the elements alive.
//! Memory of foreign tensors is only copied, never interpreted in place, because another thread may
//! write to it.

use std::ffi::{CStr, c_void};

use pharos::tensor::{DataType, byte_size};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::datatype;
use crate::error::TritonModelException;

/// DLPack's device type of the CPU.
pub(crate) const CPU: i32 = 1;
/// DLPack's device type of CUDA devices.
pub(crate) const CUDA: i32 = 2;

const FRESH: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";

/// The size in bytes from which a copy releases the interpreter.
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

/// A tensor of another library, in host memory or on a CUDA device.
pub(crate) struct Foreign {
    managed: *mut Managed,
    datatype: DataType,
    shape: Vec<i64>,
}

// SAFETY: DLPack allows using and deleting the tensor on any thread; this type never changes it.
unsafe impl Send for Foreign {}
// SAFETY: as above.
unsafe impl Sync for Foreign {}

/// The location of foreign elements.
#[derive(Clone, Copy)]
pub(crate) struct AddressRange {
    pub(crate) address: usize,
    len: usize,
}

impl AddressRange {
    pub(crate) fn len(self) -> usize {
        self.len
    }
}

impl Foreign {
    /// Consumes the tensor of a capsule.
    ///
    /// # Errors
    /// The capsule is not a DLPack capsule or already consumed; or the tensor is on an unsupported
    /// device, not contiguous, or of a type that the protocol lacks.
    pub(crate) fn take(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let managed = managed(capsule)?;
        // SAFETY: `managed` is the capsule's tensor, valid until the deleter is called; the capsule
        // has not been consumed.
        let (datatype, shape) = unsafe { read(managed)? };
        // SAFETY: as above; the caller holds the capsule.
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

    /// Returns DLPack's device: its type and its id.
    pub(crate) fn device(&self) -> (i32, i32) {
        // SAFETY: `self` owns the tensor.
        let managed = unsafe { &*self.managed };
        (managed.device_type, managed.device_id)
    }

    /// Returns the CUDA device id and the address of the elements there.
    pub(crate) fn on_cuda(&self) -> (u32, u64) {
        (u32::try_from(self.device().1).unwrap_or(0), self.bytes().address as u64)
    }

    /// Returns the location of the elements.
    pub(crate) fn bytes(&self) -> AddressRange {
        let len = byte_size(self.datatype, &self.shape)
            .and_then(|len| usize::try_from(len).ok())
            .unwrap_or(0);
        // SAFETY: `self` owns the tensor.
        let managed = unsafe { &*self.managed };
        let address =
            (managed.data as usize).wrapping_add(usize::try_from(managed.byte_offset).unwrap_or(0));
        AddressRange { address, len }
    }

    /// Copies host elements to the start of `to`; releases the interpreter if there are many.
    /// Ignores elements on a device.
    pub(crate) fn copy(&self, py: Python<'_>, to: &mut [u8]) {
        let AddressRange { address, len } = self.bytes();
        let len = if self.device().0 == CPU { len.min(to.len()) } else { 0 };
        // SAFETY: the elements stay readable while `self` owns the tensor; their number follows
        // from type and shape.
        let copy = |to: &mut [u8]| unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, to.as_mut_ptr(), len)
        };
        if len < LARGE { copy(to) } else { py.detach(|| copy(to)) }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: `take` made `self` the only owner, so the deleter runs once; deleters of Python
        // libraries need the interpreter.
        Python::attach(|_| unsafe {
            if let Some(deleter) = (*self.managed).deleter {
                deleter(self.managed);
            }
        });
    }
}

/// Returns the tensor of a capsule that has not been consumed.
fn managed(capsule: &Bound<'_, PyAny>) -> PyResult<*mut Managed> {
    // SAFETY: only queries the capsule, which the caller holds.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), FRESH.as_ptr()) };
    if pointer.is_null() {
        let _ = PyErr::take(capsule.py());
        let text =
            "not a DLPack capsule, or already consumed: the capsule's name must be 'dltensor'";
        return Err(TritonModelException::new_err(text));
    }
    Ok(pointer.cast())
}

/// Returns the type and shape of a capsule's tensor without consuming it.
///
/// # Errors
/// Like [`Foreign::take`], except for the device.
pub(crate) fn describe(capsule: &Bound<'_, PyAny>) -> PyResult<(DataType, Vec<i64>)> {
    // SAFETY: the tensor is valid while the caller holds the capsule.
    unsafe { read(managed(capsule)?) }
}

/// Reads type and shape.
///
/// # Safety
/// The tensor is valid.
unsafe fn read(managed: *mut Managed) -> PyResult<(DataType, Vec<i64>)> {
    // SAFETY: guaranteed by the caller; shape and strides have `ndim` elements, and strides may be
    // null.
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
        return Err(TritonModelException::new_err(
            "DLPack tensors of vectors are not supported: lanes must be 1",
        ));
    }
    let datatype = datatype::of_dlpack(managed.code, managed.bits).ok_or_else(|| {
        let code = managed.code;
        let bits = managed.bits;
        TritonModelException::new_err(format!(
            "DType code \"{code}\" with {bits} bits is not supported."
        ))
    })?;
    // Without elements, any strides are contiguous: libraries give different ones.
    let strides = if shape.contains(&0) { &[] } else { strides };
    let mut step = 1i64;
    for (stride, dim) in strides.iter().zip(shape).rev() {
        if *dim > 1 && *stride != step {
            return Err(TritonModelException::new_err(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored \
                 in C-Order are supported.",
            ));
        }
        step = step.saturating_mul(*dim);
    }
    Ok((datatype, shape.to_vec()))
}

/// The data that a capsule created here owns.
struct Owned {
    managed: Managed,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _holder: Py<PyAny>,
}

/// Row-major, contiguous elements on a device.
pub(crate) struct DeviceElements<'a> {
    pub(crate) address: usize,
    /// DLPack's device: its type and its id.
    pub(crate) device: (i32, i32),
    pub(crate) datatype: DataType,
    pub(crate) shape: &'a [i64],
}

/// Creates a capsule over elements on a device, which `holder` keeps alive.
///
/// # Errors
/// The datatype is BYTES, or memory allocation fails.
pub(crate) fn capsule<'py>(
    holder: Bound<'py, PyAny>,
    elements: &DeviceElements<'_>,
) -> PyResult<Bound<'py, PyAny>> {
    let DeviceElements { address, device: (device_type, device_id), datatype, shape } = *elements;
    let py = holder.py();
    let (code, bits) = datatype::to_dlpack(datatype).ok_or_else(|| {
        TritonModelException::new_err("DLPack does not have support for string tensors.")
    })?;
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
    let mut owned =
        Box::new(Owned { managed, shape: shape.to_vec(), strides, _holder: holder.unbind() });
    owned.managed.shape = owned.shape.as_mut_ptr();
    owned.managed.strides = owned.strides.as_mut_ptr();
    let owned = Box::into_raw(owned);
    // SAFETY: the box is fully initialized; `delete` frees it, called once by the consumer or the
    // capsule's destructor.
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
    // SAFETY: the capsule is valid during its destructor. After consumption it has another name,
    // and is left alone.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, FRESH.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, FRESH.as_ptr()).cast::<Managed>();
            delete(managed);
        }
    }
}
