//! Answers: made of the replies of workers, stored in the response cache, recorded, and sent to the
//! clients, in order if the model keeps one. Answers are recorded before they are sent, so that
//! clients find them in the statistics.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pharos::error::{ErrorCode, InferError};
use pharos::id::RequestId;
use pharos::infer::InferResponse;
use pharos::metrics::record::{
    self, EstimatedTokens, Failed, FinishReason, MissTimes, TokenCounts, TokenProgress,
};
use pharos::model::generation;
use pharos::timeline::{Instant, Timeline};
use pharos::wire::{Done, OutputBlock, Response};

use super::queue::record_miss;
use super::{Driver, InferResult, Request, State, request_trace};
use crate::wire::{BatchedRequest, Scattered, SharedLink};
use pharos_os::clock;

impl Driver {
    /// Records a batch that ran from `since` to `now`, and answers its requests.
    pub(super) fn answer_batch(
        &self,
        mut requests: Vec<(RequestId, Request)>,
        link: &SharedLink,
        done: &Done,
        since: Instant,
        now: Instant,
    ) {
        if self.config.decoupled {
            return self.finish_streams(requests, link, done, now.ns_since(since));
        }
        let batched_requests: Vec<Arc<BatchedRequest>> =
            requests.iter().map(|(_, request)| request.batched.clone()).collect();
        let mut answers = self.answers(&batched_requests, link, done);
        let misses = self.store_all(&mut requests, &answers);
        {
            // One event: readings see the batch together with all of its requests.
            let _transaction = self.series.begin();
            let batch_size = self.record_batch(&batched_requests, done);
            for (position, ((_, request), answer)) in requests.iter().zip(&mut answers).enumerate()
            {
                if request.batched.padding {
                    // Padding has no reader and is not counted.
                    *answer = Err(InferError::cancelled());
                    continue;
                }
                let received = request.batched.request.timeline;
                let timeline =
                    Timeline { compute: done.stamps, request_end: now, batch_size, ..received };
                self.record(&request.batched, answer, timeline, request.sender.is_closed());
                if let Ok(response) = &answer {
                    self.count_whole(response, &request.batched);
                }
                if let (Some(times), Ok(response)) =
                    (misses.get(position).copied().flatten(), answer)
                {
                    record_miss(&self.series, times, response);
                }
            }
            self.record_times(&answers, done, now.ns_since(since));
        }
        self.leave(requests.into_iter().zip(answers));
        link.send_released_if_many();
    }

    /// Answers a request of an ordinary model after its batch.
    pub(super) fn answer_deferred(
        &self,
        id: RequestId,
        mut request: Request,
        link: &SharedLink,
        frame: Response,
    ) {
        let batched = request.batched.clone();
        let mut answer = self.answer_of(&batched, link, &frame.outputs);
        if let Some(error) = frame.error {
            answer = Err(error.into());
        }
        let mut timeline = batched.request.timeline;
        timeline.compute = frame.stamps;
        timeline.request_end = clock::now();
        if let Ok(response) = &mut answer {
            response.timeline = timeline;
            response.parameters = frame.parameters;
        }
        request_trace::answered(&batched.request, &answer, Some(&timeline));
        let missed = self.store(&mut request, &answer);
        {
            let _transaction = self.series.begin();
            if let (Some(times), Ok(response)) = (missed, &mut answer) {
                record_miss(&self.series, times, response);
                timeline = response.timeline;
            }
            if let Ok(response) = &answer {
                self.count_whole(response, &batched);
            }
            self.record_one(&batched, &answer, &timeline, request.sender.is_closed());
        }
        self.turn(clock::now(), |state| self.finish(state, id, request, answer));
        link.send_released_if_many();
    }

    /// Records a warm-up batch, which counts like any other, but neither for objectives nor for a
    /// tenant: no client sent it.
    ///
    /// # Errors
    /// The error of the first request that failed.
    pub(crate) fn warmed_up(
        &self,
        batched_requests: &[Arc<BatchedRequest>],
        link: &SharedLink,
        done: &Done,
        since: Instant,
    ) -> Result<(), InferError> {
        let now = clock::now();
        let mut answers = self.answers(batched_requests, link, done);
        let _transaction = self.series.begin();
        let batch_size = self.record_batch(batched_requests, done);
        for (batched, answer) in batched_requests.iter().zip(&mut answers) {
            let timeline = Timeline {
                compute: done.stamps,
                request_end: now,
                batch_size,
                ..batched.request.timeline
            };
            match answer {
                Ok(response) => {
                    response.timeline = timeline;
                    record::warmup_done(&self.series, &timeline, batched.checked.batch_size);
                }
                Err(error) => {
                    record::warmup_failed(&self.series, error.reason, timeline.request_ns())
                }
            }
        }
        self.record_times(&[], done, now.ns_since(since));
        answers.into_iter().try_for_each(|answer| answer.map(drop))
    }

    /// Returns one answer for each request, in batch order.
    pub(super) fn answers(
        &self,
        batched_requests: &[Arc<BatchedRequest>],
        link: &SharedLink,
        done: &Done,
    ) -> Vec<InferResult> {
        // Errors of a backend reach the client unchanged, without the request's id as prefix, as in
        // Triton.
        let outputs = match &done.error {
            Some(error) => Err(error.clone().into()),
            None => self.scattered(batched_requests, link, &done.outputs),
        };
        let mut answers: Vec<InferResult> = match outputs {
            Ok(responses) => responses.into_iter().map(Ok).collect(),
            Err(error) => return batched_requests.iter().map(|_| Err(error.clone())).collect(),
        };
        for (position, error) in &done.failed {
            if let Some(answer) = answers.get_mut(*position as usize) {
                *answer = Err(error.clone().into());
            }
        }
        for (position, parameters) in &done.parameters {
            if let Some(Ok(response)) = answers.get_mut(*position as usize) {
                response.parameters.clone_from(parameters);
            }
        }
        answers
    }

    /// Returns the response of a frame to one request.
    pub(super) fn answer_of(
        &self,
        batched: &Arc<BatchedRequest>,
        link: &SharedLink,
        blocks: &[OutputBlock],
    ) -> InferResult {
        let mut responses = self.scattered(std::slice::from_ref(batched), link, blocks)?;
        responses.pop().ok_or_else(|| InferError::internal("no response"))
    }

    /// Returns the responses made of a worker's outputs. Counts outputs that differ from the
    /// configuration, and logs the first mismatch of each output.
    ///
    /// # Errors
    /// As [`Link::scatter`](crate::wire::Link::scatter).
    pub(super) fn scattered(
        &self,
        batched_requests: &[Arc<BatchedRequest>],
        link: &SharedLink,
        blocks: &[OutputBlock],
    ) -> Result<Vec<InferResponse>, InferError> {
        let Scattered { responses, mismatches } =
            link.scatter(&self.config, self.model.version, batched_requests, blocks)?;
        for mismatch in mismatches {
            record::output_mismatched(&self.series);
            let mut warned = self.mismatches_warned.lock();
            if warned.insert(mismatch.output.clone()) {
                tracing::warn!(
                    model = %self.model,
                    output = mismatch.output,
                    "the output {mismatch}; clients receive it as the model gave it. To fix this, {}. The parameter \
                     strict_output_types refuses such outputs",
                    mismatch.fix()
                );
            }
        }
        Ok(responses)
    }

    /// Counts the tokens of the only response to a request, and the end of the request.
    fn count_whole(&self, response: &InferResponse, batched: &BatchedRequest) {
        let progress = TokenProgress::default();
        self.count_tokens(response, batched, &progress, true);
        self.count_finished(&progress, &response.timeline);
    }

    /// Counts the end of a request that succeeded if the model generates text.
    pub(super) fn count_finished(&self, progress: &TokenProgress, timeline: &Timeline) {
        if self.generates_text {
            record::generation_finished(&self.series, progress, timeline);
        }
    }

    /// Counts the tokens of a response if the model has tokens. `is_whole` says that it is the
    /// only response to its request.
    pub(super) fn count_tokens(
        &self,
        response: &InferResponse,
        batched: &BatchedRequest,
        progress: &TokenProgress,
        is_whole: bool,
    ) {
        if self.counts_tokens {
            let tenant = batched.request.tenant;
            let texts = generation::texts(&batched.request.inputs);
            let mut counts = generation::token_counts(&response.outputs, texts);
            if record::has_token_budget(&self.series, tenant) {
                // A client that does not ask for the numbers pays too.
                counts.estimated = EstimatedTokens {
                    prompt: generation::estimated_prompt(&batched.request.inputs),
                    generated: generation::estimated_output(&response.outputs),
                };
            }
            let arrived = response.timeline.request_end;
            let known = progress.has_prompt();
            let prompt = counts.prompt.filter(|_| !known);
            let traced = TokenCounts { prompt, ..counts };
            request_trace::generated(&batched.request, &traced, arrived);
            record::tokens(&self.series, progress, counts, tenant, &response.timeline, is_whole);
        }
    }

    /// Counts the execution of a batch. Returns its size as it is counted.
    pub(super) fn record_batch(
        &self,
        batched_requests: &[Arc<BatchedRequest>],
        done: &Done,
    ) -> u64 {
        let rows: u64 = batched_requests.iter().map(|batched| batched.checked.batch_size).sum();
        record::batch_executed(&self.series, rows, &done.stamps, clock::wall_ms());
        rows.max(1)
    }

    /// Records the end of a request that may have had several responses, and whether its client had
    /// left before.
    pub(super) fn record_one(
        &self,
        batched: &BatchedRequest,
        answer: &InferResult,
        timeline: &Timeline,
        is_abandoned: bool,
    ) {
        let _transaction = self.series.begin();
        match answer {
            Ok(_) => {
                self.record_served(batched, timeline, is_abandoned);
                record::request_times(&self.series, timeline);
            }
            Err(error) => self.record_failed(batched, error, timeline.request_ns()),
        }
    }

    /// Records that a request succeeded, and whether its client had left before.
    fn record_served(&self, batched: &BatchedRequest, timeline: &Timeline, is_abandoned: bool) {
        let batch_size = batched.checked.batch_size;
        match is_abandoned {
            true => record::inference_abandoned(
                &self.series,
                timeline,
                batch_size,
                batched.request.leaves_at,
            ),
            false => record::inference_done(&self.series, timeline, batch_size),
        }
        record::tenant_served(&self.series, batched.request.tenant, timeline);
        if let Some(trace) = batched.request.trace {
            record::inference_traced(&self.series, timeline, trace, clock::wall_ms());
        }
    }

    /// Records that a request failed after it had entered the queue.
    pub(super) fn record_failed(
        &self,
        batched: &BatchedRequest,
        error: &InferError,
        request_ns: u64,
    ) {
        self.record_failed_after(batched, error, request_ns, false);
    }

    /// As [`Driver::record_failed`], for a request that may have had a token (`had_token`).
    pub(super) fn record_failed_after(
        &self,
        batched: &BatchedRequest,
        error: &InferError,
        request_ns: u64,
        had_token: bool,
    ) {
        let _transaction = self.series.begin();
        let now = batched.request.timeline.request_start + Duration::from_nanos(request_ns);
        let failed = Failed::of(error, batched.request.leaves_at, now);
        record::inference_failed(&self.series, failed, request_ns);
        record::tenant_failed(&self.series, batched.request.tenant, error.reason);
        if self.generates_text {
            let reason = match error.code {
                ErrorCode::Cancelled => FinishReason::Abort,
                _ => FinishReason::Error,
            };
            record::generation_failed(&self.series, reason);
            let is_stream =
                self.config.decoupled && generation::wants_stream(&batched.request.inputs);
            if is_stream && !had_token {
                record::stream_without_token(&self.series, failed, request_ns);
            }
        }
    }

    /// Adds the stamps to an answer, and records it and whether the client had left before.
    fn record(
        &self,
        batched: &BatchedRequest,
        answer: &mut InferResult,
        timeline: Timeline,
        is_abandoned: bool,
    ) {
        request_trace::answered(&batched.request, answer, Some(&timeline));
        match answer {
            Ok(response) => {
                response.timeline = timeline;
                self.record_served(batched, &timeline, is_abandoned);
            }
            Err(error) => self.record_failed(batched, error, timeline.request_ns()),
        }
    }

    /// Records the times of the successful requests, and the part of the batch's `elapsed_ns` that
    /// was not execution.
    fn record_times(&self, answers: &[InferResult], done: &Done, elapsed_ns: u64) {
        let timelines = answers.iter().flatten().map(|response| &response.timeline);
        let executed_ns = done.stamps.end.ns_since(done.stamps.start);
        record::batch_times(&self.series, timelines, elapsed_ns.saturating_sub(executed_ns));
    }

    /// Stores the responses of a batch to requests that were not found, before they are sent.
    /// Returns the times that the cache took for each request; empty if the model uses no cache.
    pub(super) fn store_all(
        &self,
        requests: &mut [(RequestId, Request)],
        answers: &[InferResult],
    ) -> Vec<Option<MissTimes>> {
        if self.response_cache.is_none() {
            return Vec::new();
        }
        requests
            .iter_mut()
            .zip(answers)
            .map(|((_, request), answer)| self.store(request, answer))
            .collect()
    }

    /// Stores the response to a request that was not found, before it is sent. Errors are not
    /// stored; the next request that waits for the same response is executed.
    pub(super) fn store(&self, request: &mut Request, answer: &InferResult) -> Option<MissTimes> {
        let cache = self.response_cache.as_ref()?;
        let miss = request.miss.take()?;
        let response = answer.as_ref().ok()?;
        Some(if self.may_cache() { cache.store(miss, response) } else { miss.pass_on(response) })
    }

    /// Returns whether responses may be found and stored in a response cache: all instances execute
    /// the loaded files.
    pub(crate) fn may_cache(&self) -> bool {
        !self.caching_stopped.load(Ordering::Acquire)
    }

    /// Ends the use of response caches, also by ensembles, because an instance is about to execute
    /// other files than the model was loaded with.
    pub(crate) fn stop_caching(&self) {
        if !self.caching_stopped.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                model = %self.model,
                "a worker has started with files that have changed since the load of the model began: responses of the model and of \
                 its ensembles are not cached until it is loaded again"
            );
        }
    }

    /// Sends answers to the clients, in order if the model keeps one.
    fn leave(&self, answers: impl Iterator<Item = ((RequestId, Request), InferResult)>) {
        if self.ordered {
            let now = clock::now();
            self.turn(now, |state| {
                for ((id, request), answer) in
                    answers.filter(|((_, request), _)| !request.batched.padding)
                {
                    self.finish(state, id, request, answer);
                }
            });
            return;
        }
        for ((_, request), answer) in answers {
            request.sender.send(answer);
        }
    }

    /// Sends an answer that was made under the lock, through the order if the model keeps one.
    /// Sending on a oneshot channel only stores the answer and wakes a task.
    pub(super) fn finish(
        &self,
        state: &mut State,
        id: RequestId,
        mut request: Request,
        answer: InferResult,
    ) {
        // Requests that wait for the same response must not also wait for this answer's turn.
        request.miss = None;
        let leaving = match &mut state.order {
            Some(order) => order.finish(id, (request, answer)),
            None => Some((request, answer)),
        };
        if let Some((request, answer)) = leaving {
            request.sender.send(answer);
        }
    }
}
