//! Ensembles at work: performs what `pharos::ensemble` decides. A step is an ordinary request of its model, with that
//! model's own statistics, queue, batches and cache.
//!
//! Everything happens in the client's own task: steps that can run at the same time are futures side by side, so that
//! dropping the request, or an error of one step, drops and thereby cancels the others. A tensor between two steps is the
//! bytes that the first step's worker has written, in its arena; they are copied once, into the next worker's.

mod load;
mod responses;
mod slots;
mod steps;
mod streams;
mod under_way;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use pharos::ensemble::{DEADLOCK_TEXT, Plan, Stages, Step};
use pharos::error::{InferError, Reason};
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::record::{self, EnsembleDone};
use pharos::model::Checked;
use pharos::request_trace::Traced;
use pharos::timeline::{Instant, Timeline};

use super::serving::Executor;
use super::{Repository, Serving};
use crate::cache::{Found, ModelCache};
use crate::clock;
use crate::scheduler::{Answer, answer_found, record_miss, traced};
pub(super) use load::hopeless;
pub(crate) use responses::Responses;
use slots::Slots;
use steps::InSequence;
use under_way::{Made, UnderWay};

/// A version of an ensemble.
pub(crate) struct Ensemble {
    plan: Arc<Plan>,
    stages: Arc<Stages>,
    /// With `max_inflight_requests`.
    slots: Option<Slots>,
    /// If it uses the response cache.
    cache: Option<ModelCache>,
    /// What its members were when it was loaded, in the order of the steps.
    members: Vec<Weak<Executor>>,
    in_flight: Arc<AtomicUsize>,
}

impl Ensemble {
    pub(crate) fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Requests that have not been answered.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// The steps with how many requests of each are under way; nothing without a limit.
    pub(crate) fn places_taken(&self) -> impl Iterator<Item = (&Step, usize)> {
        let taken = self.slots.iter().flat_map(Slots::taken);
        self.plan.steps().iter().zip(taken)
    }
}

/// A request of an ensemble. If it is dropped before it is answered, its client has gone away, and that is counted.
struct Unanswered {
    serving: Arc<Serving>,
    in_flight: Arc<AtomicUsize>,
    begun: Instant,
    traced: Option<Traced>,
    answered: bool,
}

impl Unanswered {
    fn new((serving, ensemble): (&Arc<Serving>, &Ensemble), request: &InferRequest) -> Self {
        ensemble.in_flight.fetch_add(1, Ordering::Relaxed);
        traced::queued(&serving.model, request);
        let (in_flight, traced) = (ensemble.in_flight.clone(), request.traced.clone());
        let begun = request.timeline.request_start;
        Self { serving: serving.clone(), in_flight, begun, traced, answered: false }
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !self.answered {
            let now = clock::now();
            record::ensemble_failed(&self.serving.series, Reason::Cancelled, now.ns_since(self.begun));
            traced::failed(self.traced.as_ref(), &InferError::cancelled(), now);
        }
    }
}

impl Repository {
    /// Answers a checked request from the response cache or by running the steps. Dropping the future cancels the request.
    ///
    /// # Errors
    /// That of a step, with the ensemble's name in front.
    pub(super) fn infer_ensemble<'a>(
        self: &'a Arc<Self>,
        (serving, ensemble): (&'a Arc<Serving>, &'a Ensemble),
        mut request: InferRequest,
        checked: Checked,
    ) -> Pin<Box<dyn Future<Output = Answer> + Send + 'a>> {
        Box::pin(async move {
            request.timeline.queue_start = clock::now();
            let mut unanswered = Unanswered::new((serving, ensemble), &request);
            let mut miss = None;
            if let Some(cache) = ensemble.cache.as_ref().filter(|_| request.is_cacheable()) {
                match cache.look_up(&serving.config, &request, checked.batch_size).await {
                    Found::Hit(entry, times) => {
                        unanswered.answered = true;
                        return Ok(answer_found((&serving.config, &serving.series), &request, &entry, times));
                    }
                    Found::Miss(not_found) => miss = Some(not_found),
                }
            }
            let run = self.run((serving, ensemble), request).await;
            let (under_way, mut response) = run.map_err(|error| unanswered.failed(error))?;
            unanswered.answered = true;
            if let (Some(cache), Some(miss)) = (&ensemble.cache, miss) {
                record_miss(&serving.series, cache.store(miss, &response), &mut response);
            }
            record_success(&under_way, &checked, &response.timeline);
            Ok(response)
        })
    }

    /// Runs the steps that the requested outputs need. Its success is not recorded yet.
    ///
    /// # Errors
    /// A member cannot be found; or that of the first step that fails, the others are cancelled then.
    async fn run(
        self: &Arc<Self>,
        (serving, ensemble): (&Arc<Serving>, &Ensemble),
        request: InferRequest,
    ) -> Result<(UnderWay, InferResponse), InferError> {
        let mut under_way = UnderWay::begin(self, (serving, ensemble), request)?;
        let made = poll_fn(|cx| under_way.poll_next(cx)).await;
        let id = under_way.request.id.clone();
        let (outputs, parameters): Made =
            made.unwrap_or_else(|| Err(InferError::invalid(DEADLOCK_TEXT).with_request_id(&id)))?;
        traced::outputs(&under_way.request, &outputs);
        let timeline = ended(&under_way);
        let model_version = serving.model.version.to_string();
        let model_name = serving.config.name.clone();
        Ok((under_way, InferResponse { model_name, model_version, id, parameters, outputs, timeline }))
    }

    /// The model of a step, as it is now.
    ///
    /// # Errors
    /// It is not there, or not ready.
    pub(in crate::repository) fn member(&self, step: &Step) -> Result<Arc<Serving>, InferError> {
        self.serving(&step.model, &version(step))
    }

    /// The model that executes a step's request: the one that the ensemble's request began with, or the version of it that
    /// has begun the sequence which the step continues, even if that has been replaced.
    fn member_for(&self, step: &Step, found: &Arc<Serving>, sequence: &InSequence) -> Arc<Serving> {
        let going_on = (!sequence.start && !sequence.id.is_none()).then_some(&sequence.id);
        let with = going_on.and_then(|id| Self::with_sequence(&self.table(), (&step.model, &version(step)), id));
        // How its responses come is what the plan was made for.
        let with = with.filter(|with| with.config.decoupled == found.config.decoupled);
        with.unwrap_or_else(|| found.clone())
    }

    /// Whether a version of an ensemble was loaded with other members than there are now.
    pub(in crate::repository) fn has_other_members(&self, serving: &Serving) -> bool {
        let Some(ensemble) = serving.ensemble() else { return false };
        let is_other = |(step, known): (&Step, &Weak<Executor>)| {
            self.member(step).map_or(true, |now| !std::ptr::eq(known.as_ptr(), Arc::as_ptr(&now.executor)))
        };
        ensemble.plan.steps().iter().zip(&ensemble.members).any(is_other)
    }
}

/// The version that a step asks for; empty for the latest.
fn version(step: &Step) -> String {
    step.version.map(|version| version.to_string()).unwrap_or_default()
}

/// The stamps of a request that has succeeded now.
fn ended(under_way: &UnderWay) -> Timeline {
    let request = &under_way.request;
    let timeline = Timeline { compute: under_way.stamps(), request_end: clock::now(), ..request.timeline };
    traced::ended(request, timeline.request_end);
    timeline
}

/// Records a request that has succeeded.
fn record_success(under_way: &UnderWay, checked: &Checked, timeline: &Timeline) {
    let UnderWay { serving, request, .. } = under_way;
    let now_ms = clock::wall_ms();
    let overhead_ns = under_way.overhead_ns(timeline.request_end);
    let done = EnsembleDone { batch_size: checked.batch_size, overhead_ns, now_ms };
    record::ensemble_done(under_way.metrics(), &serving.series, timeline, done);
    if let Some(trace) = request.trace {
        record::inference_traced(&serving.series, timeline, trace, now_ms);
    }
}
