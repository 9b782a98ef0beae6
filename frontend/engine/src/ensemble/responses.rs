//! The responses to one request of an ensemble with decoupled members.

use std::task::{Context, Poll, Waker, ready};

use pharos::error::{ErrorCode, InferError};
use pharos::infer::{InferRequest, InferResponse, byte_size};
use pharos::metrics::record::{self, ResponseKind, StreamProgress};
use pharos::model::Checked;
use pharos::timeline::Instant;

use super::request::{EnsembleRequest, StepOutputs};
use super::{Member, Members, Target, Unanswered, ended, record_success};
use crate::scheduler::{Streamed, request_trace};
use pharos_os::clock;

/// The responses to a request. Dropping it before the last one cancels the steps.
pub(crate) struct EnsembleResponses<M: Members> {
    /// `None` after the last response.
    running: Option<EnsembleRequest<M>>,
    unanswered: Unanswered<M::Member>,
    checked: Checked,
    /// A response that was ready when the request began.
    first: Option<Streamed>,
    /// The number of responses so far.
    count: u64,
    /// The time of the previous response.
    latest: Instant,
    /// The responses with data, for the metrics.
    progress: StreamProgress,
}

impl<M: Members> EnsembleResponses<M> {
    /// Starts a checked request. Its first steps are queued on return.
    pub(crate) fn begin(
        target: &Target<'_, M>,
        mut request: InferRequest,
        checked: Checked,
    ) -> Self {
        let latest = clock::now();
        request.timeline.queue_start = latest;
        let mut unanswered = Unanswered::new(target.version, target.ensemble, &request);
        let mut running = None;
        let mut first = None;
        match EnsembleRequest::begin(target, request) {
            Ok(begun) => running = Some(begun),
            Err(error) => {
                record::stream_ended(target.version.series(), &StreamProgress::default());
                let answer = Err(unanswered.failed(error));
                first = Some(Streamed { answer, last: true, empty: false });
            }
        }
        let progress = StreamProgress::default();
        let mut responses =
            Self { running, unanswered, checked, first, count: 0, latest, progress };
        if responses.first.is_none() {
            responses.first = match responses.poll_next(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(streamed) => streamed,
                Poll::Pending => None,
            };
        }
        responses
    }

    /// Returns the next response, or `None` after the last.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(first));
        }
        let Some(running) = &mut self.running else { return Poll::Ready(None) };
        let made = ready!(running.poll_next(cx));
        Poll::Ready(Some(self.made(made)))
    }

    /// Records a response and builds it.
    fn made(&mut self, next: Option<Result<StepOutputs, InferError>>) -> Streamed {
        let empty = next.is_none();
        let made = next.unwrap_or_else(|| Ok(StepOutputs::default()));
        let last =
            empty || made.is_err() || self.running.as_ref().is_none_or(EnsembleRequest::is_over);
        let kind = match &made {
            Ok((outputs, _)) if outputs.is_empty() => ResponseKind::Empty,
            Ok(_) => ResponseKind::Success,
            Err(error) if error.code == ErrorCode::Cancelled => ResponseKind::Cancel,
            Err(_) => ResponseKind::Fail,
        };
        let now = clock::now();
        let version = self.unanswered.version.clone();
        let _transaction = version.series().begin();
        record::response_done(version.series(), self.count, kind, now.ns_since(self.latest), 0);
        if self.count == 0 && !empty {
            record::first_response(version.series(), now.ns_since(self.unanswered.started));
        }
        if let (Ok((outputs, _)), false) = (&made, empty) {
            let bytes = byte_size(outputs);
            record::stream_response(
                version.series(),
                &self.progress,
                self.unanswered.started,
                now,
                bytes,
            );
        }
        if last {
            record::stream_ended(version.series(), &self.progress);
        }
        self.count += 1;
        self.latest = now;
        let answer = match made {
            Ok(made) => self.response(&version, made, last),
            Err(error) => Err(self.unanswered.failed(error)),
        };
        if last {
            self.running = None;
        }
        Streamed { answer, last, empty }
    }

    /// Builds the response with these outputs.
    fn response(
        &mut self,
        version: &M::Member,
        made: StepOutputs,
        last: bool,
    ) -> Result<InferResponse, InferError> {
        let (outputs, parameters) = made;
        let Some(running) = &self.running else {
            return Err(InferError::internal("a request ended twice"));
        };
        request_trace::outputs(&running.request, &outputs);
        let timeline = match last {
            true => {
                self.unanswered.answered = true;
                let timeline = ended(running);
                record_success(running, &self.checked, &timeline);
                timeline
            }
            false => running.request.timeline,
        };
        Ok(InferResponse {
            model_name: version.config().name.clone(),
            model_version: version.model().version.to_string(),
            id: running.request.id.clone(),
            parameters,
            outputs,
            timeline,
        })
    }
}

impl<M: Members> Drop for EnsembleResponses<M> {
    /// Counts the end of a request whose client has gone.
    fn drop(&mut self) {
        if !self.unanswered.answered {
            record::stream_ended(self.unanswered.version.series(), &self.progress);
        }
    }
}
