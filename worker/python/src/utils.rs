//! The functions of `pb_utils` on the request path, the functions that call the server, and the
//! report of a load's progress.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::call;
use crate::error::TritonModelException;
use crate::metrics::is_forked;
use crate::model::model;
use crate::parameters;
use crate::request::InferenceRequest;

/// Adds the functions of this module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(get_input_tensor_by_name, module)?)?;
    module.add_function(wrap_pyfunction!(load_model, module)?)?;
    module.add_function(wrap_pyfunction!(unload_model, module)?)?;
    module.add_function(wrap_pyfunction!(is_model_ready, module)?)?;
    module.add_function(wrap_pyfunction!(report_load_progress, module)?)
}

/// Returns the input of this name, or None.
#[pyfunction]
fn get_input_tensor_by_name(
    inference_request: &Bound<'_, PyAny>,
    name: &str,
) -> PyResult<Option<Py<PyAny>>> {
    let py = inference_request.py();
    if let Ok(request) = inference_request.cast::<InferenceRequest>() {
        return Ok(request.get().input(py, name).map(Py::into_any));
    }
    // An object of the user with the interface of a request.
    for tensor in inference_request.call_method0(intern!(py, "inputs"))?.try_iter()? {
        let tensor = tensor?;
        if tensor.call_method0(intern!(py, "name"))?.eq(name)? {
            return Ok(Some(tensor.unbind()));
        }
    }
    Ok(None)
}

/// Loads or reloads a model. `config` is a JSON configuration that replaces the model's own;
/// `files` replace the model's files: `{"file:1/model.onnx": b"..."}`.
#[pyfunction]
#[pyo3(signature = (model_name, config = "", files = None))]
fn load_model(
    py: Python<'_>,
    model_name: &str,
    config: &str,
    files: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let mut files = parameters::files(files)?;
    if !config.is_empty() {
        files.push(("config".to_owned(), config.as_bytes().to_vec()));
    }
    call::load(py, model_name, files)
}

/// Unloads a model.
#[pyfunction]
#[pyo3(signature = (model_name, unload_dependents = false))]
fn unload_model(py: Python<'_>, model_name: &str, unload_dependents: bool) -> PyResult<()> {
    call::unload(py, model_name, unload_dependents)
}

/// Whether a model, or one of its versions, can infer.
#[pyfunction]
#[pyo3(signature = (model_name, model_version = ""))]
fn is_model_ready(py: Python<'_>, model_name: &str, model_version: &str) -> PyResult<bool> {
    call::is_ready(py, model_name, model_version)
}

/// Reports how much of the model is loaded, a number from 0 to 1, in `initialize`: the server shows
/// it in the repository index, the log and the metrics. Only a percentage above all earlier ones is
/// sent.
#[pyfunction]
fn report_load_progress(py: Python<'_>, fraction: f64) -> PyResult<()> {
    let model = model()?;
    if is_forked() || model.is_open() {
        return Err(TritonModelException::new_err(
            "the progress of a load can be reported only in initialize, by the process of the model",
        ));
    }
    py.detach(|| model.runtime.report_load_progress(fraction))
        .map_err(|error| PyValueError::new_err(error.message))
}
