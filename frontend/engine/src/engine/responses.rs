//! The responses to one request: one of an ordinary model, any number of a decoupled model.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pharos::error::InferError;
use pharos::infer::InferResponse;
use pharos::service::{self, Responses as _, Streamed};

use super::exchange::Exchange;
use crate::serving;

/// The future of the one response of an ordinary model.
type Single = Pin<Box<dyn Future<Output = Result<InferResponse, InferError>> + Send>>;

/// The responses to a request, in order. Dropping it before the last one cancels the request.
pub(super) struct Responses {
    kind: Kind,
    /// Present if responses are translated for the client.
    exchange: Option<Box<Exchange>>,
}

enum Kind {
    /// An ordinary model: the request is queued when the response is polled.
    One(Single),
    /// A decoupled model: the request was sent.
    Many(Box<serving::Responses>),
    /// The only response was returned.
    Ended,
}

impl Responses {
    /// Wraps the future of an ordinary model's response.
    pub(super) fn one(answer: impl Future<Output = Result<InferResponse, InferError>> + Send + 'static) -> Self {
        Kind::One(Box::pin(answer)).into()
    }

    pub(super) fn many(responses: serving::Responses) -> Self {
        Kind::Many(Box::new(responses)).into()
    }

    /// Translates each response for the client.
    pub(super) fn seen_as(self, exchange: Exchange) -> Self {
        Self { exchange: Some(Box::new(exchange)), ..self }
    }

    /// Returns the only non-empty response; `None` if there are several or none.
    ///
    /// # Errors
    /// The first error among the responses.
    pub(super) async fn only(mut self) -> Result<Option<InferResponse>, InferError> {
        let mut found = None;
        while let Some(Streamed { answer, empty, .. }) = poll_fn(|cx| self.poll_next(cx)).await {
            let answer = answer?;
            if !empty && found.replace(answer).is_some() {
                return Ok(None);
            }
        }
        Ok(found)
    }
}

impl service::Responses for Responses {
    fn is_decoupled(&self) -> bool {
        !matches!(self.kind, Kind::One(_))
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        let next = ready!(self.kind.poll_next(cx));
        Poll::Ready(match &self.exchange {
            Some(exchange) => next.map(|streamed| exchange.translate(streamed)),
            None => next,
        })
    }
}

impl From<Kind> for Responses {
    fn from(kind: Kind) -> Self {
        Self { kind, exchange: None }
    }
}

impl Kind {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        match self {
            Self::One(answer) => {
                let answer = ready!(answer.as_mut().poll(cx));
                *self = Self::Ended;
                Poll::Ready(Some(Streamed { answer, last: true, empty: false }))
            }
            Self::Many(many) => many.poll_next(cx),
            Self::Ended => Poll::Ready(None),
        }
    }
}
