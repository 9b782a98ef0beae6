//! The steps of one request.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use pharos::ensemble::{Run, Step, fit};
use pharos::error::InferError;
use pharos::infer::{
    CorrelationId, InferInput, InferOutput, InferRequest, InferResponse, Parameter, Parameters, RequestedOutput,
};
use pharos::metrics::record;
use pharos::tensor::Tensor;
use pharos::timeline::Instant;
use pharos::traced::Traced;

use super::{Ensemble, Repository, Serving};
use crate::clock;
use crate::scheduler::Answer;

/// A tensor on its way between steps.
#[derive(Clone)]
struct Passed {
    tensor: Tensor,
    /// The batch that its first dimension is, if what made it batches.
    batch: Option<i64>,
}

impl Passed {
    fn new(tensor: Tensor, batches: bool) -> Self {
        let batch = tensor.shape.first().copied().filter(|_| batches);
        Self { tensor, batch }
    }

    /// As a model (or the ensemble's response) takes it that has these dimensions without the batch.
    fn into_tensor(self, dims: &[i64], batches: bool) -> Tensor {
        let shape = fit(dims, batches, &self.tensor.shape, self.batch);
        Tensor { shape, ..self.tensor }
    }
}

/// What has come of the steps of a request.
pub(super) struct Computed {
    /// When the first could run.
    pub(super) begun: Instant,
    pub(super) outputs: Vec<InferOutput>,
    pub(super) parameters: Parameters,
    /// Nanoseconds that the members spent on inputs, on computing, on outputs: sums over all steps.
    pub(super) sums: (u64, u64, u64),
    /// Nanoseconds in which no step was running.
    pub(super) overhead_ns: u64,
}

/// A step that is running: which one, since when, and what came of it.
type Running<'a> = Pin<Box<dyn Future<Output = (usize, Instant, Answer)> + Send + 'a>>;

/// Where the time of a request goes.
struct Times {
    begun: Instant,
    sums: (u64, u64, u64),
    /// Nanoseconds in which a step was running, until `busy_since`.
    busy_ns: u64,
    busy_since: Instant,
}

impl Times {
    fn add(&mut self, response: &InferResponse) {
        let (input, infer, output) = response.timeline.compute.durations_ns();
        self.sums = (self.sums.0 + input, self.sums.1 + infer, self.sums.2 + output);
    }
}

impl Repository {
    /// Runs the steps that the requested outputs need.
    ///
    /// # Errors
    /// A member cannot be found; or that of the first step that fails, the others are cancelled then.
    pub(super) async fn run(
        &self,
        serving: &Serving,
        ensemble: &Ensemble,
        request: &InferRequest,
    ) -> Result<Computed, InferError> {
        let begun = clock::now();
        let plan = &ensemble.plan;
        // All of them, before the first runs: the models that a request began with are those that it ends with.
        let members = plan.steps().iter().map(|step| self.member(step)).collect::<Result<Vec<_>, _>>()?;
        let of = |number: usize| plan.steps().get(number).zip(members.get(number));
        let mut run = Run::new(plan.clone(), &requested(serving, request), given(serving, request));
        let mut running: Vec<Running<'_>> = Vec::new();
        let mut times = Times { begun, sums: (0, 0, 0), busy_ns: 0, busy_since: begun };
        loop {
            if running.is_empty() {
                times.busy_since = clock::now();
            }
            while let Some((number, inputs)) = run.next_step() {
                let Some((step, member)) = of(number) else { continue };
                let own = step_request((step, member), request, inputs, &run.wanted(number));
                running.push(Box::pin(self.step(number, member, own)));
            }
            let Some((number, since, answer)) = next(&mut running).await else { break };
            let (now, response) = (clock::now(), answer?);
            if running.is_empty() {
                times.busy_ns += now.ns_since(times.busy_since);
            }
            times.add(&response);
            let Some((step, member)) = of(number) else { continue };
            record::ensemble_step(self.metrics(), &serving.series, (number, &step.model), now.ns_since(since));
            let left_out = run.done(number, made(step, member, response.outputs));
            tell_left_out(serving, step, &left_out);
        }
        computed(serving, request, run, &times)
    }

    /// The model of a step, as it is now.
    ///
    /// # Errors
    /// It is not there, or not ready.
    pub(in crate::repository) fn member(&self, step: &Step) -> Result<Arc<Serving>, InferError> {
        let version = step.version.map(|version| version.to_string()).unwrap_or_default();
        self.serving(&step.model, &version)
    }

    async fn step(&self, number: usize, member: &Serving, mut request: InferRequest) -> (usize, Instant, Answer) {
        let since = clock::now();
        request.timeline.request_start = since;
        let answer = match member.check_ready() {
            Ok(()) => self.infer(member, request).await,
            Err(error) => Err(error),
        };
        (number, since, answer)
    }
}

/// The next one that is done. All run in this task: each is a wait for an answer, and there are few of them.
async fn next<T>(running: &mut Vec<Pin<Box<dyn Future<Output = T> + Send + '_>>>) -> Option<T> {
    poll_fn(|context| {
        for position in 0..running.len() {
            let polled = running.get_mut(position).map(|future| future.as_mut().poll(context));
            if let Some(Poll::Ready(output)) = polled {
                drop(running.swap_remove(position));
                return Poll::Ready(Some(output));
            }
        }
        if running.is_empty() { Poll::Ready(None) } else { Poll::Pending }
    })
    .await
}

/// What is there when no step can run any more.
fn computed(
    serving: &Serving,
    request: &InferRequest,
    run: Run<Passed>,
    times: &Times,
) -> Result<Computed, InferError> {
    let outputs = run.finish().map_err(|text| InferError::invalid(text).with_request_id(&request.id))?;
    let outputs = response_outputs(serving, outputs);
    let parameters = if outputs.is_empty() { Parameters::new() } else { sequence_parameters(request) };
    let overhead_ns = clock::now().ns_since(times.begun).saturating_sub(times.busy_ns);
    Ok(Computed { begun: times.begun, outputs, parameters, sums: times.sums, overhead_ns })
}

/// The positions of the outputs that a request wants.
fn requested(serving: &Serving, request: &InferRequest) -> Vec<usize> {
    let wanted = |name: &str| request.outputs.is_empty() || request.outputs.iter().any(|output| output.name == name);
    let outputs = serving.config.outputs.iter().enumerate();
    outputs.filter(|(_, spec)| wanted(&spec.name)).map(|(position, _)| position).collect()
}

/// The inputs that a request brings, by their positions in the configuration.
fn given(serving: &Serving, request: &InferRequest) -> Vec<(usize, Passed)> {
    let batches = serving.config.batches();
    let given = request.inputs.iter().filter_map(|input| {
        let position = serving.config.inputs.iter().position(|spec| spec.name == input.name)?;
        let shape = serving.config.inputs.get(position)?.backend_shape(&input.tensor.shape, batches);
        Some((position, Passed::new(Tensor { shape, ..input.tensor.clone() }, batches)))
    });
    given.collect()
}

/// The request of a step: what the ensemble was asked, with the step's tensors.
fn step_request(
    (step, member): (&Step, &Serving),
    request: &InferRequest,
    inputs: Vec<(usize, Passed)>,
    wanted: &[usize],
) -> InferRequest {
    let config = &member.config;
    let input = |(position, passed): (usize, Passed)| {
        let (name, _) = step.inputs.get(position)?;
        let dims = config.input(name).map_or(&[][..], |spec| &spec.dims);
        Some(InferInput { name: name.clone(), tensor: passed.into_tensor(dims, config.batches()) })
    };
    let outputs = wanted.iter().filter_map(|position| step.outputs.get(*position));
    InferRequest {
        model_name: config.name.clone(),
        model_version: member.model.version.to_string(),
        inputs: inputs.into_iter().filter_map(input).collect(),
        outputs: outputs.map(|(name, _)| RequestedOutput { name: name.clone(), ..Default::default() }).collect(),
        id: request.id.clone(),
        parameters: request.parameters.clone(),
        priority: request.priority,
        timeout_us: request.timeout_us,
        correlation_id: request.correlation_id.clone(),
        sequence_start: request.sequence_start,
        sequence_end: request.sequence_end,
        trace: request.trace,
        traced: request.traced.as_ref().map(Traced::step),
        timeline: request.timeline,
        empty_final_response: false,
        raw_body: None,
    }
}

/// What a step has made, by position in its outputs.
fn made(step: &Step, member: &Serving, outputs: Vec<InferOutput>) -> Vec<(usize, Passed)> {
    let made = outputs.into_iter().filter_map(|output| {
        let position = step.outputs.iter().position(|(name, _)| *name == output.name)?;
        Some((position, Passed::new(output.tensor, member.config.batches())))
    });
    made.collect()
}

/// The outputs of the response.
fn response_outputs(serving: &Serving, outputs: Vec<(usize, Passed)>) -> Vec<InferOutput> {
    let config = &serving.config;
    let outputs = outputs.into_iter().filter_map(|(position, passed)| {
        let spec = config.outputs.get(position)?;
        let dims = spec.reshape.as_ref().unwrap_or(&spec.dims);
        let mut tensor = passed.into_tensor(dims, config.batches());
        tensor.shape = spec.protocol_shape(&tensor.shape, config.batches());
        Some(InferOutput { name: spec.name.clone(), tensor })
    });
    outputs.collect()
}

/// Parameters that Triton gives every response of an ensemble.
fn sequence_parameters(request: &InferRequest) -> Parameters {
    let id = match &request.correlation_id {
        CorrelationId::Uint(number) => i64::try_from(*number).map_or(Parameter::Uint(*number), Parameter::Int),
        CorrelationId::String(text) => Parameter::String(text.clone()),
    };
    vec![
        ("sequence_id".to_owned(), id),
        ("sequence_start".to_owned(), Parameter::Bool(request.sequence_start)),
        ("sequence_end".to_owned(), Parameter::Bool(request.sequence_end)),
    ]
}

fn tell_left_out(serving: &Serving, step: &Step, left_out: &[String]) {
    for output in left_out {
        let (ensemble, model) = (&serving.model, &step.model);
        tracing::debug!(%ensemble, "step '{model}' has not made its output '{output}': what takes it goes without");
    }
}
