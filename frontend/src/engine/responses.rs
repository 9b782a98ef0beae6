//! The answers to one request, of a model of either kind: one, or any number of them.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pharos::error::InferError;
use pharos::infer::InferResponse;

use crate::repository;

pub use crate::scheduler::Streamed;

/// The one answer of an ordinary model, to come.
type Single = Pin<Box<dyn Future<Output = Result<InferResponse, InferError>> + Send>>;

/// The answers to a request, in their order. Dropped before the last of them, the request is cancelled.
pub struct Responses(Kind);

enum Kind {
    /// Of an ordinary model: it is queued when the answer is asked for.
    One(Single),
    /// Of a decoupled model: the request is on its way.
    Many(Box<repository::Responses>),
    /// Given out.
    Ended,
    #[cfg(test)]
    Fixed(std::collections::VecDeque<Streamed>),
}

impl Responses {
    /// Those of an ordinary model: one, which `answer` gives.
    pub(crate) fn one(answer: impl Future<Output = Result<InferResponse, InferError>> + Send + 'static) -> Self {
        Self(Kind::One(Box::pin(answer)))
    }

    pub(super) fn many(responses: repository::Responses) -> Self {
        Self(Kind::Many(Box::new(responses)))
    }

    #[cfg(test)]
    pub(crate) fn fixed(all: Vec<Streamed>) -> Self {
        Self(Kind::Fixed(all.into()))
    }

    /// Whether the model is decoupled, so that there may be any number of answers.
    pub fn is_decoupled(&self) -> bool {
        !matches!(self.0, Kind::One(_))
    }

    /// The next answer; `None` after the one that says that it is the last. Who asks for the next has taken the one before:
    /// a model waits for its slow readers.
    pub async fn next(&mut self) -> Option<Streamed> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// [`Responses::next`] for who is polled.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        match &mut self.0 {
            Kind::One(answer) => {
                let answer = ready!(answer.as_mut().poll(cx));
                self.0 = Kind::Ended;
                Poll::Ready(Some(Streamed { answer, last: true, empty: false }))
            }
            Kind::Many(many) => many.poll_next(cx),
            Kind::Ended => Poll::Ready(None),
            #[cfg(test)]
            Kind::Fixed(all) => Poll::Ready(all.pop_front()),
        }
    }
}
