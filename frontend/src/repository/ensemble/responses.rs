//! The responses to one request of an ensemble with decoupled members.

use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use pharos::ensemble::in_ensemble;
use pharos::error::{ErrorCode, InferError};
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::record::{self, ResponseKind};
use pharos::model::Checked;
use pharos::timeline::Instant;

use super::under_way::{Made, UnderWay};
use super::{Ensemble, Repository, Serving, Unanswered, ended, record_success};
use crate::clock;
use crate::scheduler::{Streamed, traced};

/// Any number of responses. Dropped before the last of them, they cancel the steps.
pub(crate) struct Responses {
    /// `None` when the last response was given.
    under_way: Option<UnderWay>,
    unanswered: Unanswered,
    checked: Checked,
    /// What was there when the request began.
    first: Option<Streamed>,
    /// How many there were.
    count: u64,
    /// When the one before came.
    latest: Instant,
}

impl Responses {
    /// Begins a checked request: its first steps are on their way when this returns.
    pub(in crate::repository) fn begin(
        repository: &Arc<Repository>,
        (serving, ensemble): (&Arc<Serving>, &Ensemble),
        mut request: InferRequest,
        checked: Checked,
    ) -> Self {
        let latest = clock::now();
        request.timeline.queue_start = latest;
        let mut unanswered = Unanswered::new((serving, ensemble), &request);
        let (mut under_way, mut first) = (None, None);
        match UnderWay::begin(repository, (serving, ensemble), request) {
            Ok(begun) => under_way = Some(begun),
            Err(error) => {
                let answer = Err(unanswered.failed(error));
                first = Some(Streamed { answer, last: true, empty: false });
            }
        }
        let mut responses = Self { under_way, unanswered, checked, first, count: 0, latest };
        if responses.first.is_none() {
            responses.first = match responses.poll_next(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(streamed) => streamed,
                Poll::Pending => None,
            };
        }
        responses
    }

    /// The next response; `None` after the last.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(first));
        }
        let Some(under_way) = &mut self.under_way else { return Poll::Ready(None) };
        let made = ready!(under_way.poll_next(cx));
        Poll::Ready(Some(self.made(made)))
    }

    /// A response, recorded.
    fn made(&mut self, made: Option<Result<Made, InferError>>) -> Streamed {
        let empty = made.is_none();
        let made = made.unwrap_or_else(|| Ok(Made::default()));
        let last = empty || made.is_err() || self.under_way.as_ref().is_none_or(UnderWay::is_over);
        let kind = match &made {
            Ok((outputs, _)) if outputs.is_empty() => ResponseKind::Empty,
            Ok(_) => ResponseKind::Success,
            Err(error) if error.code == ErrorCode::Cancelled => ResponseKind::Cancel,
            Err(_) => ResponseKind::Fail,
        };
        let now = clock::now();
        let serving = self.unanswered.serving.clone();
        record::response_done(&serving.series, self.count, kind, (now.ns_since(self.latest), 0));
        if self.count == 0 && !empty {
            record::first_response(&serving.series, now.ns_since(self.unanswered.begun));
        }
        (self.count, self.latest) = (self.count + 1, now);
        let answer = match made {
            Ok(made) => self.response(&serving, made, last),
            Err(error) => Err(self.unanswered.failed(error)),
        };
        if last {
            self.under_way = None;
        }
        Streamed { answer, last, empty }
    }

    /// The response that has these outputs.
    fn response(
        &mut self,
        serving: &Serving,
        (outputs, parameters): Made,
        last: bool,
    ) -> Result<InferResponse, InferError> {
        let Some(under_way) = &self.under_way else { return Err(InferError::internal("a request has ended twice")) };
        traced::outputs(&under_way.request, &outputs);
        let timeline = match last {
            true => {
                self.unanswered.answered = true;
                let timeline = ended(under_way);
                record_success(under_way, &self.checked, &timeline);
                timeline
            }
            false => under_way.request.timeline,
        };
        Ok(InferResponse {
            model_name: serving.config.name.clone(),
            model_version: serving.model.version.to_string(),
            id: under_way.request.id.clone(),
            parameters,
            outputs,
            timeline,
        })
    }
}

impl Unanswered {
    /// The request has failed: records that, and gives what is told of it.
    pub(super) fn failed(&mut self, error: InferError) -> InferError {
        self.answered = true;
        traced::failed(self.traced.as_ref(), &error, clock::now());
        record::ensemble_failed(&self.serving.series, error.reason, clock::now().ns_since(self.begun));
        let message = in_ensemble(&self.serving.config.name, &error.message);
        InferError { message, ..error }
    }
}
