//! The responses to one request.

use std::future::poll_fn;
use std::task::{Context, Poll};

use crate::error::InferError;
use crate::infer::InferResponse;

/// One response to a request that may have any number of responses.
#[derive(Debug)]
pub struct Streamed {
    /// The response, or an error; further responses may follow an error.
    pub answer: Result<InferResponse, InferError>,
    /// Whether this is the last response.
    pub last: bool,
    /// Whether the response has no content and only marks the end.
    pub empty: bool,
}

/// The responses to one request, in their order. Dropping them before the last one cancels the
/// request.
pub trait Responses: Send + Unpin + 'static {
    /// Returns whether the model is decoupled, so that there may be any number of responses.
    fn is_decoupled(&self) -> bool;

    /// Polls for the next response; `None` after the last. Polling acknowledges the previous
    /// response, so that the model waits for slow readers.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>>;
}

impl dyn Responses {
    /// Returns the next response; [`Responses::poll_next`] as a future.
    pub fn next_response(&mut self) -> impl Future<Output = Option<Streamed>> + Send {
        poll_fn(|cx| self.poll_next(cx))
    }
}
