//! The responses to one request of a decoupled model, from its instances or from an ensemble with decoupled members.

use std::sync::Arc;
use std::task::{Context, Poll};

use super::{ModelTable, Serving};
use crate::ensemble::{self, ResponseSource};
use crate::scheduler::{self, Streamed};

/// The responses to a request. Dropping it before the last one cancels the request.
pub(crate) struct Responses {
    kind: Kind,
    serving: Arc<Serving>,
    /// The outputs to classify, each with the number of the largest elements to return.
    classified: Vec<(String, u64)>,
}

enum Kind {
    Instances(scheduler::Responses),
    Ensemble(Box<ensemble::Responses<ModelTable>>),
}

impl Responses {
    pub(super) fn of_instances(
        serving: &Arc<Serving>,
        responses: scheduler::Responses,
        classified: Vec<(String, u64)>,
    ) -> Self {
        Self { kind: Kind::Instances(responses), serving: serving.clone(), classified }
    }

    pub(super) fn of_ensemble(
        serving: &Arc<Serving>,
        responses: ensemble::Responses<ModelTable>,
        classified: Vec<(String, u64)>,
    ) -> Self {
        Self { kind: Kind::Ensemble(Box::new(responses)), serving: serving.clone(), classified }
    }

    /// Returns the next response, or `None` after the last. Polling again means that the previous one was taken.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        let next = match &mut self.kind {
            Kind::Instances(responses) => responses.poll_next(cx),
            Kind::Ensemble(responses) => responses.poll_next(cx),
        };
        next.map(|streamed| streamed.map(|streamed| self.classify(streamed)))
    }

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

impl ResponseSource for Responses {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        Self::poll_next(self, cx)
    }
}
