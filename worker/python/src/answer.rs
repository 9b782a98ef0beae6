//! Responses to one request: sent by the batch when `execute` returns, or later by a response
//! sender on any thread.

use std::mem;
use std::sync::Arc;

use parking_lot::Mutex;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos_backend::{Reply, Responder};
use pyo3::prelude::*;

use crate::error::{TritonModelException, model_exception};
use crate::model::Model;
use crate::reply;
use crate::response::InferenceResponse;

/// The flag that marks the final response.
pub(crate) const FINAL: u32 = 1;

/// How far a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Nothing has been sent.
    Open,
    /// A response has been sent; more, or the end, may follow.
    Answered,
    /// The request is complete.
    Closed,
    /// The request has been rescheduled: it is executed again and answered then.
    Rescheduled,
}

impl Progress {
    /// Returns whether nothing more can be sent for this execution of the request.
    fn is_over(self) -> bool {
        matches!(self, Self::Closed | Self::Rescheduled)
    }
}

/// The response channel of one request.
pub(crate) struct Answer {
    pub(crate) model: Arc<Model>,
    responder: Responder,
    /// The positions of the requested outputs; empty for all.
    wanted: Vec<u16>,
    // Locked to read or write it only.
    progress: Mutex<Progress>,
}

impl Answer {
    pub(crate) fn new(model: Arc<Model>, responder: Responder, wanted: Vec<u16>) -> Self {
        Self { model, responder, wanted, progress: Mutex::new(Progress::Open) }
    }

    /// Whether the request is cancelled.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.responder.is_cancelled()
    }

    /// Returns the position of the request, for tracing of nested requests.
    pub(crate) fn place(&self) -> (u64, u32) {
        self.responder.place()
    }

    /// Whether an error can still be sent. A model with a single response cannot fail a request
    /// after sending it.
    pub(crate) fn may_fail(&self) -> bool {
        let progress = *self.progress.lock();
        if self.model.config.decoupled { !progress.is_over() } else { progress == Progress::Open }
    }

    /// Fails the request, unless it is complete.
    pub(crate) fn fail(&self, error: InferError) {
        let before = mem::replace(&mut *self.progress.lock(), Progress::Closed);
        if !before.is_over() {
            self.responder.fail(error);
        }
    }

    /// Marks the request as rescheduled: it is answered by a later execution.
    pub(crate) fn mark_rescheduled(&self) {
        *self.progress.lock() = Progress::Rescheduled;
    }

    /// Whether the request is rescheduled.
    pub(crate) fn is_rescheduled(&self) -> bool {
        *self.progress.lock() == Progress::Rescheduled
    }

    /// Sends the only response of a request to a model that is not decoupled.
    pub(crate) fn respond(&self, py: Python<'_>, response: &InferenceResponse) -> PyResult<()> {
        let reply = self.reply(py, response)?;
        self.responder.respond(reply, true).map_err(|error| model_exception(&error))?;
        *self.progress.lock() = Progress::Closed;
        Ok(())
    }

    fn reply(&self, py: Python<'_>, response: &InferenceResponse) -> PyResult<Reply> {
        reply::of(py, &self.model, &self.wanted, &self.responder, response)
    }

    /// Sends a response, the end of the responses, or both, for a response sender.
    ///
    /// # Errors
    /// The sender is closed, the flags are invalid, or the model may not send more responses; the
    /// texts are Triton's.
    pub(crate) fn send(
        &self,
        py: Python<'_>,
        response: Option<&InferenceResponse>,
        flags: u32,
    ) -> PyResult<()> {
        let wrong = |text: &'static str| Err(TritonModelException::new_err(text));
        let progress = *self.progress.lock();
        if progress.is_over() {
            return wrong("Unable to send response. Response sender has been closed.");
        }
        if flags > FINAL {
            return wrong("Unable to send response. Unsupported flag provided.");
        }
        if response.is_none() && flags == 0 {
            return wrong(
                "Inference Response object must be provided when the response flags is set to \
                 zero.",
            );
        }
        let last = flags & FINAL != 0;
        if !self.model.config.decoupled {
            match (response.is_some(), progress) {
                (true, Progress::Answered) => {
                    return wrong(
                        "Unable to send response. Non-decoupled model cannot send more than one \
                         response.",
                    );
                }
                (false, Progress::Open) => {
                    let text = "Unable to send response. Non-decoupled model cannot send complete \
                                final before sending a response.";
                    return wrong(text);
                }
                _ => {}
            }
        }
        let mut reply = response.map(|response| self.reply(py, response)).transpose()?;
        if let Some(reply) = reply.as_mut().filter(|_| !self.model.config.decoupled) {
            // It is sent at the end of the batch.
            reply::copy_inputs(py, reply, &self.model.runtime)?;
        }
        *self.progress.lock() = if last { Progress::Closed } else { Progress::Answered };
        let sent = match reply {
            // Without the interpreter: the call blocks if the client reads slowly.
            Some(reply) => {
                let last = last || !self.model.config.decoupled;
                py.detach(|| self.responder.respond(reply, last))
            }
            None if self.model.config.decoupled => py.detach(|| self.responder.finish()),
            // The only response has already completed the request.
            None => Ok(()),
        };
        match sent {
            // The request was cancelled: treat the response as sent.
            Err(error) if error.code == ErrorCode::Cancelled => Ok(()),
            sent => sent.map_err(|error| model_exception(&error)),
        }
    }
}

/// Completes a request that the model has dropped without a response, so that its client does not
/// wait forever.
impl Drop for Answer {
    fn drop(&mut self) {
        let progress = *self.progress.get_mut();
        if progress == Progress::Open && !self.model.config.decoupled {
            let text = format!(
                "model '{}' has dropped the request without a response",
                self.model.config.name
            );
            self.responder.fail(InferError::new(ErrorCode::Internal, Reason::Backend, text));
        } else if !progress.is_over() && self.model.config.decoupled {
            // As in Triton, dropping the sender ends the responses.
            let _ = self.responder.finish();
        }
    }
}

/// `pb_utils.InferenceResponseSender`: responds to a request on any thread, also after `execute`
/// has returned.
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
    /// Sends a response. With `flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL`, it is the last one;
    /// without a response, only ends the request. Blocks while the client is far behind in reading.
    #[pyo3(signature = (response = None, flags = 0))]
    fn send(
        &self,
        py: Python<'_>,
        response: Option<Bound<'_, InferenceResponse>>,
        flags: u32,
    ) -> PyResult<()> {
        self.answer.send(py, response.as_ref().map(|response| response.get()), flags)
    }

    /// Whether the request is cancelled.
    fn is_cancelled(&self) -> bool {
        self.answer.is_cancelled()
    }

    /// Whether `send` would return at once. A model that answers many requests on one thread asks
    /// first, and collects what a client that reads slowly has not read yet.
    fn is_ready(&self) -> bool {
        self.answer.responder.is_ready()
    }
}
