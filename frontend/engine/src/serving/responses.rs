//! The responses to one request of a decoupled model, from its instances or from an ensemble with
//! decoupled members.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::{ModelTable, Serving};
use crate::calls::BoxFuture;
use crate::ensemble::{self, ResponseSource};
use crate::scheduler::{self, Streamed};

/// The responses to a request. Dropping it before the last one cancels the request.
pub(crate) struct ServedResponses {
    kind: Kind,
    serving: Arc<Serving>,
    /// The outputs to classify, each with the number of the largest elements to return.
    classified: Vec<(String, u64)>,
    /// The response whose outputs are being classified.
    classifying: Option<BoxFuture<Streamed>>,
}

enum Kind {
    Instances(scheduler::InstanceResponses),
    Ensemble(Box<ensemble::EnsembleResponses<ModelTable>>),
}

impl ServedResponses {
    pub(super) fn of_instances(
        serving: &Arc<Serving>,
        responses: scheduler::InstanceResponses,
        classified: Vec<(String, u64)>,
    ) -> Self {
        Self {
            kind: Kind::Instances(responses),
            serving: serving.clone(),
            classified,
            classifying: None,
        }
    }

    pub(super) fn of_ensemble(
        serving: &Arc<Serving>,
        responses: ensemble::EnsembleResponses<ModelTable>,
        classified: Vec<(String, u64)>,
    ) -> Self {
        Self {
            kind: Kind::Ensemble(Box::new(responses)),
            serving: serving.clone(),
            classified,
            classifying: None,
        }
    }

    /// Returns the next response, or `None` after the last. Polling again means that the previous
    /// one was taken.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        if self.classifying.is_none() {
            let next = match &mut self.kind {
                Kind::Instances(responses) => responses.poll_next(cx),
                Kind::Ensemble(responses) => responses.poll_next(cx),
            };
            match ready!(next) {
                Some(streamed) if !self.classified.is_empty() && !streamed.empty => {
                    self.classify(streamed)
                }
                next => return Poll::Ready(next),
            }
        }
        let Some(classifying) = &mut self.classifying else { return Poll::Ready(None) };
        let streamed = ready!(classifying.as_mut().poll(cx));
        self.classifying = None;
        Poll::Ready(Some(streamed))
    }

    fn classify(&mut self, streamed: Streamed) {
        let Streamed { answer, last, empty } = streamed;
        let serving = self.serving.clone();
        let classified = self.classified.clone();
        self.classifying = Some(Box::pin(async move {
            let answer = match answer {
                Ok(response) => serving.classified(response, classified).await,
                Err(error) => Err(error),
            };
            Streamed { answer, last, empty }
        }));
    }
}

impl ResponseSource for ServedResponses {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        Self::poll_next(self, cx)
    }
}
