//! `pb_utils.InferenceResponse`: outputs, or an error, and parameters.

use pharos::infer::Parameters;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::arguments::NotNone;
use crate::error::{TritonError, TritonModelException};
use crate::parameters::{self, Fractions};
use crate::tensor::Tensor;

/// An inference response.
#[pyclass(frozen, subclass, module = "triton_python_backend_utils")]
#[derive(Default)]
pub(crate) struct InferenceResponse {
    pub(crate) tensors: Vec<Py<Tensor>>,
    pub(crate) error: Option<Py<TritonError>>,
    pub(crate) parameters: Parameters,
}

#[pymethods]
impl InferenceResponse {
    #[new]
    #[pyo3(signature = (output_tensors = NotNone(None), error = None, parameters = None))]
    fn new(
        output_tensors: NotNone<Bound<'_, PyAny>>,
        error: Option<&Bound<'_, PyAny>>,
        parameters: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let tensors = output_tensors.0.as_ref().map(tensors).transpose()?.unwrap_or_default();
        let error = error
            .map(|error| {
                error.cast::<TritonError>().map(|error| error.clone().unbind()).map_err(|_| {
                    PyTypeError::new_err(format!(
                        "error must be a TritonError, not {}",
                        error.get_type()
                    ))
                })
            })
            .transpose()?;
        Ok(Self {
            tensors,
            error,
            parameters: parameters::from_python(parameters, Fractions::Refused)?,
        })
    }

    /// The outputs.
    fn output_tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.tensors.iter().map(|tensor| tensor.bind(py)))
    }

    /// Whether the response is an error.
    fn has_error(&self) -> bool {
        self.error.is_some()
    }

    /// The error, or None.
    fn error(&self, py: Python<'_>) -> Option<Py<TritonError>> {
        self.error.as_ref().map(|error| error.clone_ref(py))
    }

    /// The parameters as a JSON string.
    #[pyo3(name = "parameters")]
    fn py_parameters(&self) -> String {
        parameters::to_json(&self.parameters)
    }
}

/// Reads the tensors of a list or another iterable.
fn tensors(given: &Bound<'_, PyAny>) -> PyResult<Vec<Py<Tensor>>> {
    let tensor = |item: &Bound<'_, PyAny>| {
        if item.is_none() {
            return Err(TritonModelException::new_err(
                "Output tensor for inference response should not be empty.",
            ));
        }
        let wrong = |_| {
            PyTypeError::new_err(format!(
                "output_tensors must be a list of Tensor, not of {}",
                item.get_type()
            ))
        };
        item.cast::<Tensor>().map(|tensor| tensor.clone().unbind()).map_err(wrong)
    };
    match given.cast::<PyList>() {
        Ok(list) => list.iter().map(|item| tensor(&item)).collect(),
        Err(_) => given.try_iter()?.map(|item| tensor(&item?)).collect(),
    }
}
