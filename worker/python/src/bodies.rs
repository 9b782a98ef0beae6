//! Requests for TorchServe handlers: copies each part of a body into a separate `bytearray`, and
//! distinguishes requests that are executed again.

use pharos::tensor::bytes_elements;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyList};

use crate::request::InferenceRequest;
use crate::tensor::Tensor;

/// Adds the functions of this module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(bodies, module)?)?;
    module.add_function(wrap_pyfunction!(sequence_key, module)?)
}

/// Returns the number of a request's sequence, which no other sequence has while the server runs;
/// None if the model has no sequences. A request that is rescheduled keeps the number, and no other
/// request has it, unlike the client's id.
#[pyfunction]
fn sequence_key(request: &Bound<'_, InferenceRequest>) -> Option<u64> {
    request.get().fields.sequence
}

/// Returns the elements of a received BYTES tensor. With `lengths`, splits its only element into
/// parts of these sizes.
///
/// # Errors
/// The tensor was not received from the server, is malformed, has several elements, or does not fit
/// `lengths`.
#[pyfunction]
#[pyo3(signature = (tensor, lengths = None))]
fn bodies<'py>(
    tensor: &Bound<'py, Tensor>,
    lengths: Option<Vec<usize>>,
) -> PyResult<Bound<'py, PyList>> {
    let py = tensor.py();
    let wrong = |text: String| PyValueError::new_err(text);
    let received = tensor
        .get()
        .received_bytes()
        .ok_or_else(|| wrong("the tensor was not received from the server".to_owned()))?;
    let elements: Result<Vec<&[u8]>, usize> = bytes_elements(received).collect();
    let elements = elements
        .map_err(|at| wrong(format!("the tensor is truncated in the element at byte {at}")))?;
    let Some(lengths) = lengths else {
        return PyList::new(py, elements.into_iter().map(|element| PyByteArray::new(py, element)));
    };
    let [whole] = elements.as_slice() else {
        return Err(wrong(format!(
            "a request with parts must have one element, not {}",
            elements.len()
        )));
    };
    let list = PyList::empty(py);
    let mut rest = *whole;
    for length in &lengths {
        let Some((part, after)) = rest.split_at_checked(*length) else {
            return Err(wrong(format!("the parts exceed the body of {} bytes", whole.len())));
        };
        list.append(PyByteArray::new(py, part))?;
        rest = after;
    }
    if rest.is_empty() {
        Ok(list)
    } else {
        Err(wrong(format!("{} bytes of the body belong to no part", rest.len())))
    }
}
