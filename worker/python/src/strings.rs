//! BYTES tensors: object arrays in Python, length-prefixed elements in memory.

use pharos::tensor::bytes_elements;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};

use crate::array;

/// Converts a serialized tensor to an array of `bytes` objects.
///
/// # Errors
/// The data is truncated, or the number of elements does not match the shape.
pub(crate) fn to_array<'py>(
    py: Python<'py>,
    data: &[u8],
    shape: &[i64],
) -> PyResult<Bound<'py, PyAny>> {
    let list = PyList::empty(py);
    for element in bytes_elements(data) {
        let element = element.map_err(|at| {
            PyValueError::new_err(format!(
                "the serialized BYTES tensor is truncated in the element at byte {at}"
            ))
        })?;
        list.append(PyBytes::new(py, element))?;
    }
    // Filled in a loop: a conversion by numpy would inspect each element.
    let flat = array::numpy(py, "empty")?.call1((list.len(), "O"))?;
    flat.set_item(pyo3::types::PySlice::full(py), list)?;
    flat.call_method1(intern!(py, "reshape"), (array::dimensions(py, shape)?,))
}

/// The elements of an array of objects or byte strings in row-major order, ready to be serialized.
pub(crate) struct Elements<'py> {
    elements: Vec<Bound<'py, PyBytes>>,
    len: usize,
}

impl<'py> Elements<'py> {
    /// Collects the elements of an array: `bytes` unchanged, everything else as the UTF-8 of its
    /// `str()`.
    ///
    /// # Errors
    /// An element is longer than 4 GiB, or its `str()` fails.
    pub(crate) fn of(array: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = array.py();
        let flat = array
            .call_method0(intern!(py, "ravel"))?
            .call_method0(intern!(py, "tolist"))?
            .cast_into::<PyList>()?;
        let mut elements = Vec::with_capacity(flat.len());
        let mut len = 0usize;
        for object in flat.iter() {
            let element = match object.cast_into::<PyBytes>() {
                Ok(bytes) => bytes,
                Err(error) => text(&error.into_inner())?,
            };
            let size = element.as_bytes().len();
            u32::try_from(size)
                .map_err(|_| PyValueError::new_err("an element of a BYTES tensor exceeds 4 GiB"))?;
            len += 4 + size;
            elements.push(element);
        }
        Ok(Self { elements, len })
    }

    /// Returns the size of the serialized form in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Writes the serialized form, which has [`Elements::len`] bytes.
    pub(crate) fn write(&self, mut to: &mut [u8]) {
        for element in &self.elements {
            let bytes = element.as_bytes();
            let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
            let Some((prefix, rest)) = std::mem::take(&mut to).split_at_mut_checked(4) else {
                return;
            };
            prefix.copy_from_slice(&length);
            let Some((place, rest)) = rest.split_at_mut_checked(bytes.len()) else { return };
            place.copy_from_slice(bytes);
            to = rest;
        }
    }
}

fn text<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let text: Bound<'py, PyString> = object.str()?;
    text.encode_utf8()
}
