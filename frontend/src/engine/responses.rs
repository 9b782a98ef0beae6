//! The answers to one request, of a model of either kind: one, or any number of them.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pharos::error::InferError;
use pharos::infer::InferResponse;

use crate::repository::Serving;
use crate::scheduler;

pub use crate::scheduler::Streamed;

/// The one answer of an ordinary model, to come.
type Single = Pin<Box<dyn Future<Output = Result<InferResponse, InferError>> + Send>>;

/// The answers to a request, in their order. Dropped before the last of them, the request is cancelled.
pub struct Responses(Kind);

enum Kind {
    /// Of an ordinary model: nothing happens before it is asked for.
    One(Single),
    /// Of a decoupled model: the request is on its way.
    Many(Box<Many>),
    /// Given out.
    Ended,
    #[cfg(test)]
    Fixed(std::collections::VecDeque<Streamed>),
}

struct Many {
    responses: scheduler::Responses,
    serving: Arc<Serving>,
    /// Outputs of which the client wants the largest elements, and how many of them.
    classified: Vec<(String, u64)>,
}

impl Responses {
    /// Those of an ordinary model: one, which `answer` gives.
    pub(crate) fn one(answer: impl Future<Output = Result<InferResponse, InferError>> + Send + 'static) -> Self {
        Self(Kind::One(Box::pin(answer)))
    }

    pub(super) fn many(responses: scheduler::Responses, serving: Arc<Serving>, classified: Vec<(String, u64)>) -> Self {
        Self(Kind::Many(Box::new(Many { responses, serving, classified })))
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
            Kind::Many(many) => {
                let next = ready!(many.responses.poll_next(cx));
                Poll::Ready(next.map(|streamed| many.classify(streamed)))
            }
            Kind::Ended => Poll::Ready(None),
            #[cfg(test)]
            Kind::Fixed(all) => Poll::Ready(all.pop_front()),
        }
    }
}

impl Many {
    fn classify(&self, streamed: Streamed) -> Streamed {
        if self.classified.is_empty() || streamed.empty {
            return streamed;
        }
        let Streamed { answer, last, empty } = streamed;
        let answer = answer.and_then(|mut response| {
            for (name, count) in &self.classified {
                self.serving.classify(&mut response, name, *count)?;
            }
            Ok(response)
        });
        Streamed { answer, last, empty }
    }
}
