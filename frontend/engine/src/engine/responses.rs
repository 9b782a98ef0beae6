//! The answers to one request, of a model of either kind: one, or any number of them.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pharos::error::InferError;
use pharos::infer::InferResponse;
use pharos::service::{self, Responses as _, Streamed};

use super::exchange::Exchange;
use crate::serving;

/// The one answer of an ordinary model, to come.
type Single = Pin<Box<dyn Future<Output = Result<InferResponse, InferError>> + Send>>;

/// The answers to a request, in their order. Dropped before the last of them, the request is cancelled.
pub struct Responses {
    kind: Kind,
    /// What clients see is not what the model says.
    exchange: Option<Box<Exchange>>,
}

enum Kind {
    /// Of an ordinary model: it is queued when the answer is asked for.
    One(Single),
    /// Of a decoupled model: the request is on its way.
    Many(Box<serving::Responses>),
    /// Given out.
    Ended,
}

impl Responses {
    /// Those of an ordinary model: one, which `answer` gives.
    pub(super) fn one(answer: impl Future<Output = Result<InferResponse, InferError>> + Send + 'static) -> Self {
        Kind::One(Box::pin(answer)).into()
    }

    pub(super) fn many(responses: serving::Responses) -> Self {
        Kind::Many(Box::new(responses)).into()
    }

    /// The same for a client to whom each of them has to be changed.
    pub(super) fn seen_as(self, exchange: Exchange) -> Self {
        Self { exchange: Some(Box::new(exchange)), ..self }
    }

    /// The one answer that says something; `None` if there are more of them, or none.
    ///
    /// # Errors
    /// The first of an answer.
    pub(super) async fn only(mut self) -> Result<Option<InferResponse>, InferError> {
        let mut found = None;
        while let Some(Streamed { answer, empty, .. }) = self.next().await {
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
            Some(exchange) => next.map(|streamed| exchange.pass(streamed)),
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
