//! Ensembles at work: performs what `pharos::ensemble` decides. A step is an ordinary request of its model, with that
//! model's own statistics, queue, batches and cache.
//!
//! Everything happens in the client's own task: steps that can run at the same time are futures side by side, so that
//! dropping the request, or an error of one step, drops and thereby cancels the others. A tensor between two steps is the
//! bytes that the first step's worker has written, in its arena; they are copied once, into the next worker's.

mod load;
mod steps;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pharos::ensemble::{Plan, in_ensemble};
use pharos::error::{InferError, Reason};
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::cache::Cache;
use pharos::metrics::record::{self, EnsembleDone};
use pharos::model::Checked;
use pharos::timeline::{ComputeStamps, Instant, Timeline};

use super::{Repository, Serving};
use crate::cache::{Found, Miss, ModelCache};
use crate::clock;
use crate::scheduler::{Answer, answer_found, traced};
pub(super) use load::hopeless;
use steps::Computed;

/// A version of an ensemble.
pub(crate) struct Ensemble {
    plan: Arc<Plan>,
    /// If it uses the response cache.
    cache: Option<ModelCache>,
    in_flight: AtomicUsize,
}

impl Ensemble {
    pub(crate) fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Requests that have not been answered.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }
}

/// A request of an ensemble. If it is dropped before it is answered, its client has gone away, and that is counted.
struct Unanswered<'a> {
    serving: &'a Serving,
    ensemble: &'a Ensemble,
    begun: Instant,
    answered: bool,
}

impl<'a> Unanswered<'a> {
    fn new((serving, ensemble): (&'a Serving, &'a Ensemble), request: &InferRequest) -> Self {
        ensemble.in_flight.fetch_add(1, Ordering::Relaxed);
        Self { serving, ensemble, begun: request.timeline.request_start, answered: false }
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.ensemble.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !self.answered {
            record::ensemble_failed(&self.serving.series, Reason::Cancelled, clock::now().ns_since(self.begun));
        }
    }
}

impl Repository {
    /// Answers a checked request from the response cache or by running the steps. Dropping the future cancels the request.
    ///
    /// # Errors
    /// That of a step, with the ensemble's name in front.
    pub(super) fn infer_ensemble<'a>(
        &'a self,
        (serving, ensemble): (&'a Serving, &'a Ensemble),
        mut request: InferRequest,
        checked: Checked,
    ) -> Pin<Box<dyn Future<Output = Answer> + Send + 'a>> {
        Box::pin(async move {
            request.timeline.queue_start = clock::now();
            traced::queued(&serving.model, &request);
            let mut unanswered = Unanswered::new((serving, ensemble), &request);
            let mut miss = None;
            if let Some(cache) = &ensemble.cache {
                match cache.look_up(&serving.config, &request, checked.batch_size).await {
                    Found::Hit(entry, times) => {
                        unanswered.answered = true;
                        return Ok(answer_found((&serving.config, &serving.series), &request, &entry, times));
                    }
                    Found::Miss(not_found) => miss = Some(not_found),
                }
            }
            let computed = self.run(serving, ensemble, &request).await;
            unanswered.answered = true;
            match computed {
                Ok(computed) => {
                    Ok(succeeded(self.metrics(), (serving, ensemble), (&request, &checked), (computed, miss)))
                }
                Err(error) => {
                    let since = clock::now().ns_since(request.timeline.request_start);
                    traced::failed(&request, &error, clock::now());
                    record::ensemble_failed(&serving.series, error.reason, since);
                    let message = in_ensemble(&serving.model.name, &error.message);
                    Err(InferError { message, ..error })
                }
            }
        })
    }
}

/// Records what has been computed, stores it if it was looked up in vain, and makes the response of it. What the members
/// took is summed up, as Triton does: with steps side by side that is more than the request took.
fn succeeded(
    metrics: &Cache,
    (serving, ensemble): (&Serving, &Ensemble),
    (request, checked): (&InferRequest, &Checked),
    (computed, miss): (Computed, Option<Miss>),
) -> InferResponse {
    let Computed { begun, outputs, parameters, sums: (input, infer, output), overhead_ns } = computed;
    let after = |start: Instant, ns: u64| Instant(start.0.saturating_add(ns));
    let input_end = after(begun, input);
    let output_start = after(input_end, infer);
    let compute = ComputeStamps { start: begun, input_end, output_start, end: after(output_start, output) };
    let timeline = Timeline { compute, request_end: clock::now(), ..request.timeline };
    traced::found(request, &outputs, timeline.request_end);
    let series = &serving.series;
    let done = EnsembleDone { batch_size: checked.batch_size, overhead_ns, now_ms: clock::wall_ms() };
    record::ensemble_done(metrics, series, &timeline, done);
    if let Some(trace) = request.trace {
        record::inference_traced(series, &timeline, trace, clock::wall_ms());
    }
    let response = InferResponse {
        model_name: serving.config.name.clone(),
        model_version: serving.model.version.to_string(),
        id: request.id.clone(),
        parameters,
        outputs,
        timeline,
    };
    if let (Some(cache), Some(miss)) = (&ensemble.cache, miss) {
        record::cache_miss(series, cache.store(miss, &response));
    }
    response
}
