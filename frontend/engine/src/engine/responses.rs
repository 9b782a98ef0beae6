//! The responses to one request: one of an ordinary model, any number of a decoupled model.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pharos::error::InferError;
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::alias::AliasCounts;
use pharos::metrics::record;
use pharos::model::envelope;
use pharos::service::{self, Resolved, Responses as _, Streamed};

use super::Engine;
use crate::serving::{self, Serving};

/// The future of the one response of an ordinary model.
type Single = Pin<Box<dyn Future<Output = Result<InferResponse, InferError>> + Send>>;

/// The responses to a request, in order. Dropping it before the last one cancels the request.
pub(super) struct ClientResponses {
    kind: Kind,
    /// Present if responses are translated for the client.
    exchange: Option<Box<Exchange>>,
}

enum Kind {
    /// An ordinary model: the request is queued when the response is polled.
    One(Single),
    /// A decoupled model: the request was sent.
    Many(Box<serving::ServedResponses>),
    /// The only response was returned.
    Ended,
}

impl ClientResponses {
    /// Wraps the future of an ordinary model's response.
    pub(super) fn one(
        answer: impl Future<Output = Result<InferResponse, InferError>> + Send + 'static,
    ) -> Self {
        Kind::One(Box::pin(answer)).into()
    }

    pub(super) fn many(responses: serving::ServedResponses) -> Self {
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

impl service::Responses for ClientResponses {
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

impl From<Kind> for ClientResponses {
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

/// The name and version by which a client addressed a model.
struct ClientModelName {
    name: String,
    /// The version that the client requested; may be empty.
    requested_version: String,
    /// The version that it resolved to.
    version: String,
}

/// The client's view of a request, kept to translate the responses back.
#[derive(Default)]
pub(super) struct Exchange {
    /// The name and version that the client used, if they differ from the repository's.
    client_name: Option<ClientModelName>,
    /// The counters of the client's name.
    named: Option<(Engine, Arc<AliasCounts>)>,
    /// The requested outputs, if the tensors were converted to a document.
    requested: Option<envelope::RequestedOutputs>,
}

impl Exchange {
    /// Replaces the client's name and version by the repository's.
    ///
    /// # Errors
    /// There is no such model.
    pub(super) fn begin(engine: &Engine, request: &mut InferRequest) -> Result<Self, InferError> {
        let mut exchange = Self::default();
        if let Some(naming) = &engine.naming
            && let Some(Resolved { model, version }) =
                naming.resolve(&request.model_name, &request.model_version)?
        {
            let name = std::mem::replace(&mut request.model_name, model);
            let requested_version = std::mem::take(&mut request.model_version);
            exchange.client_name = Some(ClientModelName { name, requested_version, version });
        }
        Ok(exchange)
    }

    /// Counts the request now that its model is resolved, and converts it to the form that the
    /// model takes.
    ///
    /// # Errors
    /// The tensors cannot be converted to a document.
    pub(super) fn found(
        &mut self,
        engine: &Engine,
        serving: &Serving,
        request: &mut InferRequest,
    ) -> Result<(), InferError> {
        // Clients can write a number in many forms, each of which would have series.
        let number = if request.model_version.is_empty() { "" } else { serving.series.version() };
        let (name, version) = match &self.client_name {
            Some(ClientModelName { name, requested_version, .. }) => {
                (name.as_str(), requested_version.as_str())
            }
            None => (request.model_name.as_str(), number),
        };
        let counts = engine.naming.as_ref().is_none_or(|naming| naming.counts());
        if let Some(named) = engine.inner.cache.alias(name, version).filter(|_| counts) {
            record::alias_requested(&engine.inner.cache, &named);
            self.named = Some((engine.clone(), named));
        }
        if serving.config.backend == envelope::BACKEND {
            self.requested = envelope::to_document(request)?;
        }
        Ok(())
    }

    /// Returns whether responses pass unchanged.
    pub(super) fn is_plain(&self) -> bool {
        self.client_name.is_none() && self.named.is_none() && self.requested.is_none()
    }

    /// Translates the only or last response for the client.
    ///
    /// # Errors
    /// The model failed, or its response is not a document.
    pub(super) fn end(
        &self,
        answer: Result<InferResponse, InferError>,
    ) -> Result<InferResponse, InferError> {
        let response = answer?;
        if let Some((engine, named)) = &self.named {
            record::alias_done(&engine.inner.cache, named, &response.timeline);
        }
        self.shown(response)
    }

    /// Translates one of several responses for the client.
    pub(super) fn translate(&self, streamed: Streamed) -> Streamed {
        let Streamed { answer, last, empty } = streamed;
        let answer = match (last, empty) {
            (true, _) => self.end(answer),
            (false, _) => answer.and_then(|response| self.shown(response)),
        };
        Streamed { answer, last, empty }
    }

    fn shown(&self, mut response: InferResponse) -> Result<InferResponse, InferError> {
        if let Some(ClientModelName { name, version, .. }) = &self.client_name {
            response.model_name.clone_from(name);
            response.model_version.clone_from(version);
        }
        if let Some(requested) = &self.requested {
            envelope::from_document(&mut response, requested)?;
        }
        Ok(response)
    }
}
