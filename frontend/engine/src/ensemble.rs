//! Executes ensembles as `pharos::ensemble` decides. A step is an ordinary request of its model,
//! with that model's statistics, queue, batches and cache. Must not depend on how models are found
//! or loaded: see [`Members`].
//!
//! Everything runs in the client's task, except for a request of an ensemble for whose response
//! others wait. Concurrent steps are concurrent futures, so dropping the request, or an error of
//! one step, drops and thereby cancels the others. A tensor between two steps stays in the arena of
//! the first step's worker until it is copied, once, into the arena of the next worker.

mod request;
mod responses;
mod slots;
mod steps;
mod streams;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pharos::ensemble::{DEADLOCK_TEXT, Plan, Stages, Step, in_ensemble};
use pharos::error::{InferError, Reason};
use pharos::id::{CorrelationId, ModelVersion, TenantId};
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::cache::Cache;
use pharos::metrics::record::{self, EnsembleDone, Failed, MissTimes};
use pharos::metrics::series::ModelSeries;
use pharos::model::{Checked, ModelConfig, Scheduling};
use pharos::request_trace::Traced;
use pharos::timeline::{Instant, Timeline};
use tokio::task::JoinSet;

use crate::cache::{Found, Miss, ModelResponseCache};
use crate::scheduler::{InferResult, answer_found, record_miss, request_trace};
use pharos_os::clock;
use request::{EnsembleRequest, StepOutputs};
pub(crate) use responses::EnsembleResponses;
use slots::Slots;
pub(crate) use streams::ResponseSource;

/// A model version as ensembles see it: a member, or the ensemble itself.
pub(crate) trait Member: Send + Sync + 'static {
    fn model(&self) -> &ModelVersion;

    fn config(&self) -> &Arc<ModelConfig>;

    fn series(&self) -> &Arc<ModelSeries>;

    /// `None` if it is not an ensemble.
    fn ensemble(&self) -> Option<&Ensemble>;

    /// Accepts a request.
    ///
    /// # Errors
    /// None of its instances can execute a request soon.
    fn accept(&self) -> Result<(), InferError>;
}

/// Finds the members of ensembles and executes the requests of steps. A type parameter of this
/// module breaks the cycle between the inference verb, which executes ensembles, and the steps,
/// which call it.
pub(crate) trait Members: Send + Sync + Sized + 'static {
    type Member: Member;
    type Responses: ResponseSource + Send;

    /// The metrics cache of all series.
    fn metrics(&self) -> &Cache;

    /// Returns the model of a step as it serves now.
    ///
    /// # Errors
    /// The member is unknown or not ready.
    fn member(&self, step: &Step) -> Result<Arc<Self::Member>, InferError>;

    /// Returns a replaced version of a step's model that began the sequence with this id and still
    /// runs it.
    fn with_sequence(&self, step: &Step, id: &CorrelationId) -> Option<Arc<Self::Member>>;

    /// Ends the sequence with this id in the replaced versions of a step's model, because another
    /// one begins.
    fn begin_sequence(&self, step: &Step, id: &CorrelationId);

    /// Returns whether an ensemble, or an ensemble among its members, was loaded with members that
    /// have been replaced since, or that execute other files now.
    fn has_replaced_members(&self, version: &Self::Member) -> bool;

    /// Checks and executes a step's request.
    ///
    /// # Errors
    /// The request is invalid or its execution failed.
    fn infer(
        self: &Arc<Self>,
        member: &Arc<Self::Member>,
        request: Box<InferRequest>,
    ) -> impl Future<Output = InferResult> + Send;

    /// Checks and starts a request of a decoupled step.
    ///
    /// # Errors
    /// The request does not fit the model.
    fn stream(
        self: &Arc<Self>,
        member: &Arc<Self::Member>,
        request: InferRequest,
    ) -> Result<Self::Responses, InferError>;
}

/// A request whose steps have run, and the response.
type Ran<M> = Result<(EnsembleRequest<M>, InferResponse), InferError>;

/// As [`Ran`], with the times of the response cache that did not have the response. They are
/// recorded for clients that still wait.
type Missed<M> = Result<(EnsembleRequest<M>, InferResponse, Option<MissTimes>), InferError>;

/// An ensemble to execute, and the source of its members.
pub(crate) struct Target<'a, M: Members> {
    pub(crate) members: &'a Arc<M>,
    pub(crate) version: &'a Arc<M::Member>,
    pub(crate) ensemble: &'a Ensemble,
}

/// A version of an ensemble.
pub(crate) struct Ensemble {
    plan: Arc<Plan>,
    stages: Arc<Stages>,
    /// Present if `max_inflight_requests` is set.
    slots: Option<Slots>,
    /// Present if the ensemble uses the response cache.
    response_cache: Option<ModelResponseCache>,
    in_flight: Arc<AtomicUsize>,
}

impl Ensemble {
    /// Creates the ensemble of a plan, with the limit of concurrent requests of each step in its
    /// configuration.
    pub(crate) fn new(
        plan: Plan,
        stages: Stages,
        config: &ModelConfig,
        response_cache: Option<ModelResponseCache>,
    ) -> Self {
        let limit = match &config.scheduling {
            Scheduling::Ensemble { max_inflight_requests, .. } => *max_inflight_requests,
            _ => 0,
        };
        let slots = Slots::new(plan.steps().len(), limit);
        Self {
            plan: Arc::new(plan),
            stages: Arc::new(stages),
            slots,
            response_cache,
            in_flight: Arc::default(),
        }
    }

    pub(crate) fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Returns the number of requests without an answer.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns the steps with the number of their running requests; empty without a limit.
    pub(crate) fn places_taken(&self) -> impl Iterator<Item = (&Step, usize)> {
        let taken = self.slots.iter().flat_map(Slots::taken);
        self.plan.steps().iter().zip(taken)
    }
}

/// A request of an ensemble. Dropping it unanswered means that the client has gone, which is
/// counted.
struct Unanswered<V: Member> {
    version: Arc<V>,
    in_flight: Arc<AtomicUsize>,
    started: Instant,
    leaves_at: Option<Instant>,
    tenant: TenantId,
    traced: Option<Traced>,
    answered: bool,
}

impl<V: Member> Unanswered<V> {
    fn new(version: &Arc<V>, ensemble: &Ensemble, request: &InferRequest) -> Self {
        ensemble.in_flight.fetch_add(1, Ordering::Relaxed);
        request_trace::queued(version.model(), request);
        Self {
            version: version.clone(),
            in_flight: ensemble.in_flight.clone(),
            started: request.timeline.request_start,
            leaves_at: request.leaves_at,
            tenant: request.tenant,
            traced: request.traced.clone(),
            answered: false,
        }
    }

    /// Records that the request has failed. Returns the error prefixed with the ensemble's name.
    fn failed(&mut self, error: InferError) -> InferError {
        self.answered = true;
        let now = clock::now();
        request_trace::failed(self.traced.as_ref(), &error, now);
        let failed = Failed::of(&error, self.leaves_at, now);
        let _transaction = self.version.series().begin();
        record::ensemble_failed(self.version.series(), failed, now.ns_since(self.started));
        record::tenant_failed(self.version.series(), self.tenant, Reason::Internal);
        let message = in_ensemble(&self.version.config().name, &error.message);
        error.with_message(message)
    }
}

impl<V: Member> Drop for Unanswered<V> {
    fn drop(&mut self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !self.answered {
            let now = clock::now();
            let failed = Failed::abandoned(self.leaves_at, now);
            let _transaction = self.version.series().begin();
            record::ensemble_failed(self.version.series(), failed, now.ns_since(self.started));
            record::tenant_failed(self.version.series(), self.tenant, Reason::Cancelled);
            request_trace::failed(self.traced.as_ref(), &InferError::cancelled(), now);
        }
    }
}

/// Answers a checked request from the response cache or by running the steps. Dropping the future
/// cancels the request.
///
/// # Errors
/// The error of a step, prefixed with the ensemble's name.
pub(crate) fn infer<M: Members>(
    target: Target<'_, M>,
    mut request: InferRequest,
    checked: Checked,
) -> Pin<Box<dyn Future<Output = InferResult> + Send + '_>> {
    Box::pin(async move {
        let Target { version, ensemble, .. } = target;
        request.timeline.queue_start = clock::now();
        let mut unanswered = Unanswered::new(version, ensemble, &request);
        let mut miss = None;
        // The keys contain the members with which the ensemble was loaded.
        if let Some(cache) = &ensemble.response_cache
            && request.is_cacheable()
            && !target.members.has_replaced_members(version)
        {
            match cache.look_up(version.config(), &request, checked.batch_size).await {
                Found::Hit(entry, times) => {
                    unanswered.answered = true;
                    return Ok(answer_found(
                        version.config(),
                        version.series(),
                        &request,
                        &entry,
                        times,
                    ));
                }
                Found::Miss(not_found) => miss = Some(not_found),
            }
            request.timeline.queue_start = clock::now();
        }
        let run = match miss {
            None => {
                run(&target, request).await.map(|(request, response)| (request, response, None))
            }
            Some(miss) if miss.leads() => in_task(run_and_store(&target, request, miss)).await,
            Some(miss) => run_and_store(&target, request, miss).await,
        };
        let (request, mut response, missed) = run.map_err(|error| unanswered.failed(error))?;
        unanswered.answered = true;
        {
            let _transaction = version.series().begin();
            if let Some(times) = missed {
                record_miss(version.series(), times, &mut response);
            }
            record_success(&request, &checked, &response.timeline);
        }
        // An ensemble executes each request on its own.
        response.timeline.batch_size = checked.batch_size.max(1);
        Ok(response)
    })
}

/// Runs the steps of a request that the response cache did not have, and stores the response,
/// unless a member was replaced.
///
/// # Errors
/// As [`run`].
fn run_and_store<M: Members>(
    target: &Target<'_, M>,
    request: InferRequest,
    miss: Miss,
) -> impl Future<Output = Missed<M>> + Send + use<M> {
    let members = Arc::clone(target.members);
    let version = Arc::clone(target.version);
    async move {
        let ensemble =
            version.ensemble().ok_or_else(|| InferError::internal("a model is not an ensemble"))?;
        let target = Target { members: &members, version: &version, ensemble };
        let (request, response) = run(&target, request).await?;
        let times = ensemble.response_cache.as_ref().map(|cache| {
            // The key contains the members with which the ensemble was loaded. A replaced member
            // serves before the ensemble is loaded again.
            match members.has_replaced_members(&version) {
                true => miss.pass_on(&response),
                false => cache.store(miss, &response),
            }
        });
        Ok((request, response, times))
    }
}

/// Runs a request for whose response others wait. They need not wait for this request's client: as
/// a step of a decoupled ensemble, its future is polled only while that client reads. Dropping the
/// returned future cancels the request.
async fn in_task<M: Members>(
    request: impl Future<Output = Missed<M>> + Send + 'static,
) -> Missed<M> {
    let mut task = JoinSet::new();
    task.spawn(request);
    let ended = task.join_next().await.and_then(Result::ok);
    ended.unwrap_or_else(|| {
        Err(InferError::internal("the request of an ensemble ended without a response"))
    })
}

/// Runs the steps that the requested outputs need. The caller records the success.
///
/// # Errors
/// A member is not available, or a step failed: the first error, after which the other steps are
/// cancelled.
async fn run<M: Members>(target: &Target<'_, M>, request: InferRequest) -> Ran<M> {
    let mut running = EnsembleRequest::begin(target, request)?;
    let made = poll_fn(|cx| running.poll_next(cx)).await;
    let id = running.request.id.clone();
    let (outputs, parameters): StepOutputs =
        made.unwrap_or_else(|| Err(InferError::invalid(DEADLOCK_TEXT).with_request_id(&id)))?;
    request_trace::outputs(&running.request, &outputs);
    let timeline = ended(&running);
    let model_version = target.version.model().version.to_string();
    let model_name = target.version.config().name.clone();
    Ok((running, InferResponse { model_name, model_version, id, parameters, outputs, timeline }))
}

/// Returns the timestamps of a request that has just succeeded.
fn ended<M: Members>(running: &EnsembleRequest<M>) -> Timeline {
    let request = &running.request;
    let timeline =
        Timeline { compute: running.stamps(), request_end: clock::now(), ..request.timeline };
    request_trace::ended(request, timeline.request_end);
    timeline
}

/// Records a successful request.
fn record_success<M: Members>(
    running: &EnsembleRequest<M>,
    checked: &Checked,
    timeline: &Timeline,
) {
    let EnsembleRequest { version, request, .. } = running;
    let _transaction = version.series().begin();
    let now_ms = clock::wall_ms();
    let overhead_ns = running.overhead_ns(timeline.request_end);
    let done = EnsembleDone { batch_size: checked.batch_size, overhead_ns, now_ms };
    record::ensemble_done(running.metrics(), version.series(), timeline, done);
    record::tenant_served(version.series(), request.tenant, timeline);
    if let Some(trace) = request.trace {
        record::inference_traced(version.series(), timeline, trace, now_ms);
    }
}
