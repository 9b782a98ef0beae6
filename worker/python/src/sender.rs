//! `pb_utils.InferenceResponseSender`: responds to a request on any thread, also after `execute` has returned.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::answer::Answer;
use crate::response::InferenceResponse;

/// A sender of the responses to one request.
#[pyclass(frozen, module = "triton_python_backend_utils")]
pub(crate) struct InferenceResponseSender {
    answer: Arc<Answer>,
}

impl InferenceResponseSender {
    pub(crate) fn new(answer: Arc<Answer>) -> Self {
        Self { answer }
    }
}

#[pymethods]
impl InferenceResponseSender {
    /// Sends a response. With `flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL`, it is the last one; without a response, only ends the
    /// request. Blocks while the client is far behind in reading.
    #[pyo3(signature = (response = None, flags = 0))]
    fn send(&self, py: Python<'_>, response: Option<Bound<'_, InferenceResponse>>, flags: u32) -> PyResult<()> {
        self.answer.send(py, response.as_ref().map(|response| response.get()), flags)
    }

    /// Whether the request is cancelled.
    fn is_cancelled(&self) -> bool {
        self.answer.is_cancelled()
    }
}
