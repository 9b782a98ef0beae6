//! The responses to one request.

use std::future::poll_fn;
use std::task::{Context, Poll};

use crate::error::InferError;
use crate::infer::InferResponse;

/// One of any number of responses to a request.
#[derive(Debug)]
pub struct Streamed {
    /// The response, or an error; further responses may follow an error.
    pub answer: Result<InferResponse, InferError>,
    /// No response follows.
    pub last: bool,
    /// The response has no content: it only marks the end.
    pub empty: bool,
}

/// The responses to one request, in their order. Dropping them before the last one cancels the request.
pub trait Responses: Send + Unpin + 'static {
    /// Whether the model is decoupled, so that there may be any number of responses.
    fn is_decoupled(&self) -> bool;

    /// The next response; `None` after the last. Polling for the next response acknowledges the previous one: a model waits
    /// for slow readers.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>>;

    /// [`Responses::poll_next`] as a future.
    fn next(&mut self) -> impl Future<Output = Option<Streamed>> + Send {
        poll_fn(|cx| self.poll_next(cx))
    }
}
