//! How one request is answered, by whomever and whenever: the batch when `execute` returns, or a response sender on any
//! thread, later.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use pharos::error::{ErrorCode, InferError, Reason};
use pharos_backend::{Reply, Responder};
use pyo3::prelude::*;

use crate::error::{TritonModelException, model_exception};
use crate::model::Model;
use crate::reply;
use crate::response::InferenceResponse;

/// The bit of a flag that says: no response follows.
pub(crate) const FINAL: u32 = 1;

/// Nothing was sent.
const OPEN: u8 = 0;
/// A response was sent, and more may follow or an end.
const ANSWERED: u8 = 1;
/// Nothing may follow.
const CLOSED: u8 = 2;
/// The request is executed once more, and answered then.
const LET_GO: u8 = 3;

/// The way back to the client of one request.
pub(crate) struct Answer {
    pub(crate) model: Arc<Model>,
    responder: Responder,
    /// The outputs that are asked for, by their places; empty for all.
    wanted: Vec<u16>,
    state: AtomicU8,
}

impl Answer {
    pub(crate) fn new(model: Arc<Model>, responder: Responder, wanted: Vec<u16>) -> Self {
        Self { model, responder, wanted, state: AtomicU8::new(OPEN) }
    }

    /// Whether nobody waits for the request any more.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.responder.is_cancelled()
    }

    /// The request's place, for what is traced with it.
    pub(crate) fn place(&self) -> (u64, u32) {
        self.responder.place()
    }

    /// Whether an error may still end it: one of a model with a single response has it already when that is sent.
    pub(crate) fn may_fail(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        if self.model.config.decoupled { state < CLOSED } else { state == OPEN }
    }

    /// Ends the request with an error, unless it has ended.
    pub(crate) fn fail(&self, error: InferError) {
        if self.state.swap(CLOSED, Ordering::AcqRel) < CLOSED {
            self.responder.fail(error);
        }
    }

    /// The request is executed once more: nothing of it is left to be done here.
    pub(crate) fn let_go(&self) {
        self.state.store(LET_GO, Ordering::Release);
    }

    /// Whether it is.
    pub(crate) fn is_let_go(&self) -> bool {
        self.state.load(Ordering::Acquire) == LET_GO
    }

    /// Answers the request of a model that gives one response to each.
    pub(crate) fn respond(&self, py: Python<'_>, response: &InferenceResponse) -> PyResult<()> {
        let reply = self.reply(py, response)?;
        self.state.store(CLOSED, Ordering::Release);
        self.responder.respond(reply, true).map_err(|error| model_exception(&error))
    }

    fn reply(&self, py: Python<'_>, response: &InferenceResponse) -> PyResult<Reply> {
        reply::of(py, (&self.model, &self.wanted), &self.responder, response)
    }

    /// What a response sender sends: a response, an end, or both.
    ///
    /// # Errors
    /// Triton's texts for a sender that is closed, flags that mean nothing, and more responses than the model may give.
    pub(crate) fn send(&self, py: Python<'_>, response: Option<&InferenceResponse>, flags: u32) -> PyResult<()> {
        let wrong = |text: &'static str| Err(TritonModelException::new_err(text));
        let state = self.state.load(Ordering::Acquire);
        if state >= CLOSED {
            return wrong("Unable to send response. Response sender has been closed.");
        }
        if flags > FINAL {
            return wrong("Unable to send response. Unsupported flag provided.");
        }
        if response.is_none() && flags == 0 {
            return wrong("Inference Response object must be provided when the response flags is set to zero.");
        }
        let last = flags & FINAL != 0;
        if !self.model.config.decoupled {
            match (response.is_some(), state) {
                (true, ANSWERED) => {
                    return wrong("Unable to send response. Non-decoupled model cannot send more than one response.");
                }
                (false, OPEN) => {
                    let text = "Unable to send response. Non-decoupled model cannot send complete final before sending a response.";
                    return wrong(text);
                }
                _ => {}
            }
        }
        let reply = response.map(|response| self.reply(py, response)).transpose()?;
        self.state.store(if last { CLOSED } else { ANSWERED }, Ordering::Release);
        let sent = match reply {
            // The client may be behind with reading.
            Some(reply) => {
                let last = last || !self.model.config.decoupled;
                py.detach(|| self.responder.respond(reply, last))
            }
            None if self.model.config.decoupled => py.detach(|| self.responder.finish()),
            // Its one response has ended it.
            None => Ok(()),
        };
        match sent {
            // Nobody waits any more: as if it had been read.
            Err(error) if error.code == ErrorCode::Cancelled => Ok(()),
            sent => sent.map_err(|error| model_exception(&error)),
        }
    }
}

/// A request that the model lets go without an answer must not wait for ever.
impl Drop for Answer {
    fn drop(&mut self) {
        if *self.state.get_mut() == OPEN && !self.model.config.decoupled {
            let text = format!("model '{}' has dropped the request without a response", self.model.config.name);
            self.responder.fail(InferError::new(ErrorCode::Internal, Reason::Backend, text));
        } else if *self.state.get_mut() < CLOSED && self.model.config.decoupled {
            // As Triton's: a sender that goes away ends its responses.
            let _ = self.responder.finish();
        }
    }
}
