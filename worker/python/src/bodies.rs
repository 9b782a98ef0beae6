//! Bodies of requests for handlers of TorchServe: each part of a text in a `bytearray` of its own, copied once.

use pharos::tensor::bytes_elements;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyList};

use crate::tensor::Tensor;

/// Adds the function.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(bodies, module)?)
}

/// The elements of a BYTES tensor that the server gave; with `lengths` its only element in parts of so many bytes.
///
/// # Errors
/// It is no such tensor, has not one element, or one that has not as many bytes as the parts together.
#[pyfunction]
#[pyo3(signature = (tensor, lengths = None))]
fn bodies<'py>(tensor: &Bound<'py, Tensor>, lengths: Option<Vec<usize>>) -> PyResult<Bound<'py, PyList>> {
    let py = tensor.py();
    let wrong = |text: String| PyValueError::new_err(text);
    let received = tensor.get().received_bytes().ok_or_else(|| wrong("the tensor is not the server's".to_owned()))?;
    let elements: Result<Vec<&[u8]>, usize> = bytes_elements(received).collect();
    let elements = elements.map_err(|at| wrong(format!("the tensor is cut off in the element at byte {at}")))?;
    let Some(lengths) = lengths else {
        return PyList::new(py, elements.into_iter().map(|element| PyByteArray::new(py, element)));
    };
    let [whole] = elements.as_slice() else {
        return Err(wrong(format!("a request with parts has one element, not {}", elements.len())));
    };
    let list = PyList::empty(py);
    let mut rest = *whole;
    for length in &lengths {
        let Some((part, after)) = rest.split_at_checked(*length) else {
            return Err(wrong(format!("the parts have more bytes than the body, which has {}", whole.len())));
        };
        list.append(PyByteArray::new(py, part))?;
        rest = after;
    }
    if rest.is_empty() { Ok(list) } else { Err(wrong(format!("{} bytes of the body are in no part", rest.len()))) }
}
