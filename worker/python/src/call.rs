//! Requests of a model to other models of the server (BLS).

use parking_lot::Mutex;
use pharos::error::InferError;
use pharos_backend::{Call, Called, Canceller, Pending, Runtime};
use pyo3::prelude::*;

use crate::error::{TritonError, TritonModelException, model_exception};
use crate::model::model;
use crate::response::InferenceResponse;
use crate::tensor::Tensor;

/// Executes a request to another model.
pub(crate) fn exec(
    py: Python<'_>,
    decoupled: bool,
    request: impl FnOnce(&Runtime) -> PyResult<Call>,
) -> PyResult<Py<PyAny>> {
    let model = model()?;
    if !model.is_open() {
        return Err(TritonModelException::new_err(
            "BLS is only supported during the 'execute' function.",
        ));
    }
    let call = request(&model.runtime)?;
    let pending = py.detach(|| model.runtime.call(call));
    let mut pending = match pending {
        Ok(pending) => pending,
        Err(error) => return one(py, decoupled, failed(py, &error)?),
    };
    if decoupled {
        let canceller = Some(pending.canceller());
        let iterator = ResponseIterator {
            waiting: Mutex::new(Some(pending)),
            seen: Mutex::default(),
            canceller,
        };
        return Ok(Py::new(py, iterator)?.into_any());
    }
    let response = match py.detach(|| pending.next()) {
        Some(called) => response(py, called)?,
        None => InferenceResponse::default(),
    };
    Ok(Py::new(py, response)?.into_any())
}

/// Converts a response to the form that the caller expects.
fn one(py: Python<'_>, decoupled: bool, response: InferenceResponse) -> PyResult<Py<PyAny>> {
    let response = Py::new(py, response)?;
    if !decoupled {
        return Ok(response.into_any());
    }
    let seen = Seen { responses: vec![response], next: 0, complete: true };
    let iterator =
        ResponseIterator { waiting: Mutex::new(None), seen: Mutex::new(seen), canceller: None };
    Ok(Py::new(py, iterator)?.into_any())
}

fn failed(py: Python<'_>, error: &InferError) -> PyResult<InferenceResponse> {
    let error = Some(Py::new(py, TritonError::from_server(error))?);
    Ok(InferenceResponse { error, ..InferenceResponse::default() })
}

fn response(py: Python<'_>, called: Result<Called, InferError>) -> PyResult<InferenceResponse> {
    let called = match called {
        Ok(called) => called,
        Err(error) => return failed(py, &error),
    };
    let tensors = called.outputs.into_iter().map(|output| {
        Py::new(py, Tensor::received(output.name, output.datatype, output.shape, output.data))
    });
    Ok(InferenceResponse {
        tensors: tensors.collect::<PyResult<_>>()?,
        error: None,
        parameters: called.parameters,
    })
}

/// An iterator over the responses of a decoupled model, as they arrive. Iterating again after the
/// end repeats them.
#[pyclass(frozen, module = "pharos_worker._native")]
pub(crate) struct ResponseIterator {
    /// Locked by the thread that waits for the next response; always locked before `seen`.
    waiting: Mutex<Option<Pending>>,
    seen: Mutex<Seen>,
    /// `None` if no responses are pending.
    canceller: Option<Canceller>,
}

/// The responses received so far.
#[derive(Default)]
struct Seen {
    responses: Vec<Py<InferenceResponse>>,
    /// The index of the response to return next, when iterating again.
    next: usize,
    /// Whether all responses have been received.
    complete: bool,
}

impl Seen {
    /// Returns the next response of a repeated iteration.
    fn again(&mut self, py: Python<'_>) -> Option<Py<InferenceResponse>> {
        let next = self.responses.get(self.next).map(|response| response.clone_ref(py));
        self.next += usize::from(next.is_some());
        next
    }
}

#[pymethods]
impl ResponseIterator {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        let mut seen = slf.get().seen.lock();
        if seen.complete {
            seen.next = 0;
        }
        drop(seen);
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<InferenceResponse>>> {
        let mut seen = self.seen.lock();
        if seen.complete {
            return Ok(seen.again(py));
        }
        drop(seen);
        let called = py.detach(|| {
            let mut waiting = self.waiting.lock();
            let called = waiting.as_mut().and_then(Pending::next);
            if called.is_none() {
                *waiting = None;
            }
            called
        });
        let called = called.map(|called| Py::new(py, response(py, called)?)).transpose()?;
        let mut seen = self.seen.lock();
        match &called {
            Some(response) => seen.responses.push(response.clone_ref(py)),
            None => {
                seen.complete = true;
                seen.next = seen.responses.len();
            }
        }
        Ok(called)
    }

    /// Cancels the request, from any thread. Responses that have arrived can still be read. A
    /// response with a CANCELLED error follows, unless the last response had arrived.
    fn cancel(&self, py: Python<'_>) {
        if let Some(canceller) = &self.canceller {
            py.detach(|| canceller.cancel());
        }
    }
}

/// Loads a model, with these files replacing its own.
pub(crate) fn load(py: Python<'_>, name: &str, files: Vec<(String, Vec<u8>)>) -> PyResult<()> {
    let model = model()?;
    py.detach(|| model.runtime.load_model(name, files)).map_err(|error| model_exception(&error))
}

/// Unloads a model.
pub(crate) fn unload(py: Python<'_>, name: &str, dependents: bool) -> PyResult<()> {
    let model = model()?;
    py.detach(|| model.runtime.unload_model(name, dependents))
        .map_err(|error| model_exception(&error))
}

/// Whether a model can infer.
pub(crate) fn is_ready(py: Python<'_>, name: &str, version: &str) -> PyResult<bool> {
    let model = model()?;
    py.detach(|| model.runtime.model_ready(name, version)).map_err(|error| model_exception(&error))
}
