//! The steps of one request, as `pharos::ensemble::Flow` decides.
//!
//! Everything runs when the next response is polled. Steps nearest to the client go first: while a
//! response is ready, no further responses of steps are taken. A client that does not read thus
//! applies back-pressure to all models of its request.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use pharos::ensemble::{Call, CallId, Flow, Plan, Step};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::id::ModelVersion;
use pharos::infer::{InferOutput, InferRequest, InferResponse, Parameters};
use pharos::metrics::cache::Cache;
use pharos::metrics::record;
use pharos::timeline::{ComputeStamps, Instant};

use super::slots::{Queued, STUCK, StepPermit};
use super::steps::{
    InSequence, StepTensor, log_left_out, made, region, request_inputs, requested, response,
    sequence_of, step_request,
};
use super::streams::{Stream, Streams};
use super::{Member, Members, Target};
use crate::scheduler::{InferResult, Streamed};
use pharos_os::clock;

/// The completion of something that a step waited for.
enum Event<R> {
    /// A step has answered.
    Answered(CallId, InferResult, StepPermit),
    /// A decoupled step has started.
    Begun(usize, Stream<R>),
}

type Waiting<R> = Pin<Box<dyn Future<Output = Event<R>> + Send>>;

/// A running step.
struct Running<V> {
    step: usize,
    /// The model that executes it.
    member: Arc<V>,
    /// Whether its stage takes any number of responses.
    decoupled: bool,
    since: Instant,
    sequence: InSequence,
}

/// The time accounting of a request.
struct Times {
    started: Instant,
    /// Nanoseconds of the members for inputs, computing and outputs, summed over all steps.
    sums: (u64, u64, u64),
    /// Nanoseconds with at least one running step, up to `busy_since`.
    busy_ns: u64,
    busy_since: Instant,
}

/// A request with its running steps. Dropping it cancels them.
pub(super) struct EnsembleRequest<M: Members> {
    models: Arc<M>,
    /// The ensemble.
    pub(super) version: Arc<M::Member>,
    /// The client's request, without its inputs.
    pub(super) request: InferRequest,
    plan: Arc<Plan>,
    /// The members in the order of the steps.
    members: Vec<Arc<M::Member>>,
    flow: Flow<StepTensor>,
    running: BTreeMap<CallId, Running<M::Member>>,
    events: FuturesUnordered<Waiting<M::Responses>>,
    /// The responses of decoupled steps, by stage.
    streams: Vec<Streams<M::Responses>>,
    /// The number of steps that wait for a permit, by stage.
    queued: Vec<Arc<AtomicUsize>>,
    /// The permit of the step that answered last, until its following steps are queued.
    before: StepPermit,
    times: Times,
}

/// The outputs and parameters of a response.
pub(super) type StepOutputs = (Vec<InferOutput>, Parameters);

impl<M: Members> EnsembleRequest<M> {
    /// Starts a request.
    ///
    /// # Errors
    /// A member is not available.
    pub(super) fn begin(
        target: &Target<'_, M>,
        mut request: InferRequest,
    ) -> Result<Self, InferError> {
        let started = clock::now();
        let Target { members: models, version, ensemble } = target;
        let plan = &ensemble.plan;
        // Resolves all members before the first step runs, so that a request ends with the models
        // it began with.
        let members =
            plan.steps().iter().map(|step| models.member(step)).collect::<Result<Vec<_>, _>>()?;
        // A replaced member serves before its ensembles are loaded again. A stage without an end
        // takes one response only.
        for (number, member) in members.iter().enumerate() {
            if member.config().decoupled && ensemble.stages.ended_by(number).is_none() {
                return Err(replaced(&**member));
            }
        }
        let requested = requested(&***version, &request);
        let inputs = request_inputs(&***version, &mut request);
        let stages = ensemble.stages.count();
        Ok(Self {
            models: Arc::clone(models),
            version: Arc::clone(version),
            request,
            plan: plan.clone(),
            members,
            flow: Flow::new(plan.clone(), ensemble.stages.clone(), &requested, inputs),
            running: BTreeMap::new(),
            events: FuturesUnordered::new(),
            streams: (1..stages).map(|_| Streams::default()).collect(),
            queued: (0..stages).map(|_| Arc::default()).collect(),
            before: None,
            times: Times { started, sums: (0, 0, 0), busy_ns: 0, busy_since: started },
        })
    }

    /// Returns the next response; `None` after the last response or an error.
    pub(super) fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<StepOutputs, InferError>>> {
        loop {
            while let Some(call) = self.flow.next_step() {
                self.start(call);
            }
            self.before = None;
            if let Some(output) = self.flow.next_output() {
                return Poll::Ready(Some(
                    output.and_then(|outputs| response(&*self.version, &self.request, outputs)),
                ));
            }
            if self.flow.is_over() {
                return Poll::Ready(None);
            }
            match self.events.poll_next_unpin(cx) {
                Poll::Ready(Some(Event::Answered(id, answer, permit))) => {
                    self.answered(id, answer, permit)
                }
                Poll::Ready(Some(Event::Begun(stage, stream))) => self.stream(stage, stream),
                _ if self.poll_streams(cx) => {}
                _ => return Poll::Pending,
            }
        }
    }

    /// Returns whether the response that was returned last was the final one.
    pub(super) fn is_over(&self) -> bool {
        self.flow.is_over()
    }

    /// Returns the start of the first step and stamps whose distances are the members' summed
    /// times, as in Triton. With concurrent steps the sum exceeds the time of the request.
    pub(super) fn stamps(&self) -> ComputeStamps {
        let start = self.times.started;
        let (input_ns, infer_ns, output_ns) = self.times.sums;
        let input_end = Instant(start.0.saturating_add(input_ns));
        let output_start = Instant(input_end.0.saturating_add(infer_ns));
        let end = Instant(output_start.0.saturating_add(output_ns));
        ComputeStamps { start, input_end, output_start, end }
    }

    /// Returns the nanoseconds until `now` without a running step.
    pub(super) fn overhead_ns(&self, now: Instant) -> u64 {
        now.ns_since(self.times.started).saturating_sub(self.times.busy_ns)
    }

    /// The metrics cache of all series.
    pub(super) fn metrics(&self) -> &Cache {
        self.models.metrics()
    }

    fn start(&mut self, call: Call<StepTensor>) {
        let Call { id, step: number, stage, decoupled, inputs, outputs } = call;
        let Some(ensemble) = self.version.ensemble() else { return };
        let Some(resolved) = self.members.get(number) else { return };
        let Some(step) = self.plan.steps().get(number) else { return };
        let sequence = sequence_of(&inputs, &self.request);
        let member = self.member_for(step, resolved, &sequence);
        let mut request = step_request(step, &*member, &self.request, inputs, &outputs, &sequence);
        for output in &mut request.outputs {
            output.region = region(&*self.version, &self.plan, step, &output.name, &self.request);
        }
        let since = clock::now();
        if self.running.is_empty() {
            self.times.busy_since = since;
        }
        self.running.insert(
            id,
            Running { step: number, member: member.clone(), decoupled, since, sequence },
        );
        let slots = ensemble.slots.as_ref().zip(self.queued.get(stage));
        let queued =
            slots.and_then(|(slots, waiting)| slots.queue(number, waiting, self.before.clone()));
        let work = StepCall { id, models: self.models.clone(), member, request };
        let ensemble = self.version.model().clone();
        match queued {
            None if decoupled => match work.begin(None) {
                Ok(stream) => self.stream(stage, stream),
                Err(error) => self.answered(id, Err(error), None),
            },
            None => self.events.push(Box::pin(work.answer(None))),
            Some(queued) if decoupled => {
                self.events.push(Box::pin(work.begin_in_turn(stage, queued, ensemble)))
            }
            Some(queued) => self.events.push(Box::pin(work.answer_in_turn(queued, ensemble))),
        }
    }

    /// Returns the model that executes a step's request: the one resolved at the start of the
    /// ensemble's request, or its replaced version that began the sequence which the step
    /// continues.
    fn member_for(
        &self,
        step: &Step,
        found: &Arc<M::Member>,
        sequence: &InSequence,
    ) -> Arc<M::Member> {
        if sequence.id.is_none() {
            return found.clone();
        }
        if sequence.start {
            self.models.begin_sequence(step, &sequence.id);
            return found.clone();
        }
        match self.models.with_sequence(step, &sequence.id) {
            // The plan depends on whether the member is decoupled.
            Some(began) if began.config().decoupled == found.config().decoupled => began,
            _ => found.clone(),
        }
    }

    fn stream(&mut self, stage: usize, stream: Stream<M::Responses>) {
        if let Some(streams) = self.streams.get_mut(stage) {
            streams.push(stream);
        }
    }

    /// Handles the answer of an ordinary step, or the failed start of a decoupled one.
    fn answered(&mut self, id: CallId, answer: InferResult, permit: StepPermit) {
        self.before = permit;
        let Some(running) = self.stopped(id) else { return };
        let plan = self.plan.clone();
        let Some(step) = plan.steps().get(running.step) else { return };
        if let Ok(response) = &answer {
            self.recorded(&running, &step.model, response);
        }
        let Running { member, decoupled, sequence, .. } = running;
        let made = answer.and_then(|response| made(step, &*member, response, sequence));
        let left_out = match decoupled {
            true => self.flow.response(id, made),
            false => self.flow.done(id, made),
        };
        log_left_out(&*self.version, step, &left_out);
    }

    /// Takes the next response of a decoupled step, later stages first. Returns whether there was
    /// one.
    fn poll_streams(&mut self, cx: &mut Context<'_>) -> bool {
        for stage in (0..self.streams.len()).rev() {
            // Do not take responses while steps of later stages wait for permits.
            let later = self.queued.iter().skip(stage + 1);
            if later.map(|count| count.load(Ordering::Relaxed)).sum::<usize>() > 0 {
                continue;
            }
            let flow = &self.flow;
            let Some(streams) = self.streams.get_mut(stage) else { continue };
            if let Poll::Ready((id, streamed, permit)) =
                streams.poll_next(cx, |id| flow.waiting(id))
            {
                self.before = permit;
                self.responded(stage, id, streamed);
                return true;
            }
        }
        false
    }

    /// Handles a response of a decoupled step.
    fn responded(&mut self, stage: usize, id: CallId, streamed: Streamed) {
        let Streamed { answer, last, empty } = streamed;
        let Some(running) = self.running.get(&id) else { return };
        let member = running.member.clone();
        let sequence = running.sequence.clone();
        let plan = self.plan.clone();
        let Some(step) = plan.steps().get(running.step) else { return };
        if last
            && let Some(running) = self.stopped(id)
            && let Ok(response) = &answer
        {
            self.recorded(&running, &step.model, response);
        }
        if !(empty && answer.is_ok()) {
            let made = answer.and_then(|response| made(step, &*member, response, sequence));
            let left_out = self.flow.response(id, made);
            log_left_out(&*self.version, step, &left_out);
        }
        if last {
            self.flow.ended(id);
        } else if !self.flow.is_open(id)
            && let Some(streams) = self.streams.get_mut(stage)
        {
            streams.give_up(id);
            self.stopped(id);
        }
    }

    /// Removes a step that no longer runs.
    fn stopped(&mut self, id: CallId) -> Option<Running<M::Member>> {
        let running = self.running.remove(&id)?;
        if self.running.is_empty() {
            self.times.busy_ns += clock::now().ns_since(self.times.busy_since);
        }
        Some(running)
    }

    /// Records a step that succeeded with its only or last response.
    fn recorded(&mut self, running: &Running<M::Member>, model: &str, response: &InferResponse) {
        let (input, infer, output) = response.timeline.compute.durations_ns();
        let sums = &mut self.times.sums;
        *sums = (sums.0 + input, sums.1 + infer, sums.2 + output);
        let took = clock::now().ns_since(running.since);
        record::ensemble_step(self.metrics(), self.version.series(), running.step, model, took);
    }
}

/// Returns the error of a request to an ensemble whose stages do not fit a replaced member.
fn replaced(member: &impl Member) -> InferError {
    let text = format!(
        "model '{}' was replaced and is now decoupled; the ensemble is being loaded again",
        member.model().name
    );
    InferError::new(ErrorCode::Unavailable, Reason::NotReady, text)
}

/// A step's request, ready to be sent to its model.
struct StepCall<M: Members> {
    id: CallId,
    models: Arc<M>,
    member: Arc<M::Member>,
    request: InferRequest,
}

impl<M: Members> StepCall<M> {
    async fn answer(mut self, permit: StepPermit) -> Event<M::Responses> {
        self.request.timeline.request_start = clock::now();
        let answer = match self.member.accept() {
            Ok(()) => self.models.infer(&self.member, Box::new(self.request)).await,
            Err(error) => Err(error),
        };
        Event::Answered(self.id, answer, permit)
    }

    async fn answer_in_turn(self, queued: Queued, ensemble: ModelVersion) -> Event<M::Responses> {
        let permit = queued.acquire(&ensemble, STUCK).await;
        self.answer(permit).await
    }

    fn begin(mut self, permit: StepPermit) -> Result<Stream<M::Responses>, InferError> {
        self.request.timeline.request_start = clock::now();
        self.member.accept()?;
        let responses = self.models.stream(&self.member, self.request)?;
        Ok(Stream { id: self.id, responses, permit })
    }

    async fn begin_in_turn(
        self,
        stage: usize,
        queued: Queued,
        ensemble: ModelVersion,
    ) -> Event<M::Responses> {
        let permit = queued.acquire(&ensemble, STUCK).await;
        let id = self.id;
        self.begin(permit).map_or_else(
            |error| Event::Answered(id, Err(error), None),
            |stream| Event::Begun(stage, stream),
        )
    }
}
