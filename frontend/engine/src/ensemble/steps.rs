//! Converts an ensemble's request to requests of the steps, and the responses of the steps to the
//! ensemble's responses.

use pharos::ensemble::{Plan, Step, fit};
use pharos::error::InferError;
use pharos::infer::{
    CorrelationId, InferInput, InferOutput, InferRequest, InferResponse, Parameter, Parameters,
    RequestedOutput,
};
use pharos::region::Slice;
use pharos::request_trace::Traced;
use pharos::tensor::Tensor;

use super::Member;

/// A tensor between steps.
#[derive(Clone)]
pub(super) struct StepTensor {
    tensor: Tensor,
    /// The size of the first dimension if it is the batch dimension of the producing model.
    batch: Option<i64>,
    /// The place in a sequence that the producing step reported; `None` for the request's own.
    sequence: Option<InSequence>,
}

/// The place of a step's request in a sequence.
#[derive(Clone, Debug)]
pub(super) struct InSequence {
    pub(super) id: CorrelationId,
    pub(super) start: bool,
    pub(super) end: bool,
}

impl StepTensor {
    fn new(tensor: Tensor, batches: bool, sequence: Option<InSequence>) -> Self {
        let batch = tensor.shape.first().copied().filter(|_| batches);
        Self { tensor, batch, sequence }
    }

    /// Shapes the tensor for a model (or the ensemble's response) with these dimensions, which
    /// exclude the batch.
    fn into_tensor(self, dims: &[i64], batches: bool) -> Tensor {
        let shape = fit(dims, batches, &self.tensor.shape, self.batch);
        Tensor { shape, ..self.tensor }
    }
}

/// Returns the place in a sequence of a request with these tensors: the first that a step reported,
/// or the request's own.
pub(super) fn sequence_of(tensors: &[(usize, StepTensor)], request: &InferRequest) -> InSequence {
    let reported = tensors.iter().find_map(|(_, passed)| passed.sequence.clone());
    reported.unwrap_or_else(|| InSequence {
        id: request.correlation_id.clone(),
        start: request.sequence_start,
        end: request.sequence_end,
    })
}

/// Returns the positions of the outputs that a request asks for.
pub(super) fn requested(version: &impl Member, request: &InferRequest) -> Vec<usize> {
    let mut positions = Vec::new();
    for (position, spec) in version.config().outputs.iter().enumerate() {
        if request.outputs.is_empty()
            || request.outputs.iter().any(|output| output.name == spec.name)
        {
            positions.push(position);
        }
    }
    positions
}

/// Takes the inputs out of a request, with their positions in the configuration.
pub(super) fn request_inputs(
    version: &impl Member,
    request: &mut InferRequest,
) -> Vec<(usize, StepTensor)> {
    let batches = version.config().batches();
    let given = std::mem::take(&mut request.inputs).into_iter().filter_map(|input| {
        let position = version.config().inputs.iter().position(|spec| spec.name == input.name)?;
        let shape =
            version.config().inputs.get(position)?.backend_shape(&input.tensor.shape, batches);
        Some((position, StepTensor::new(Tensor { shape, ..input.tensor }, batches, None)))
    });
    given.collect()
}

/// Builds the request of a step from the ensemble's request, the step's inputs and requested
/// outputs, by their positions in the step, and its place in a sequence.
pub(super) fn step_request(
    step: &Step,
    member: &impl Member,
    request: &InferRequest,
    passed: Vec<(usize, StepTensor)>,
    requested: &[usize],
    sequence: &InSequence,
) -> InferRequest {
    let config = member.config();
    let mut inputs = Vec::with_capacity(passed.len());
    for (position, tensor) in passed {
        if let Some((name, _)) = step.inputs.get(position) {
            let dims = config.input(name).map_or(&[][..], |spec| &spec.dims);
            inputs.push(InferInput {
                name: name.clone(),
                tensor: tensor.into_tensor(dims, config.batches()),
            });
        }
    }
    let outputs = requested.iter().filter_map(|position| step.outputs.get(*position));
    InferRequest {
        model_name: member.model().name.to_string(),
        model_version: member.model().version.to_string(),
        inputs,
        input_order: Vec::new(),
        outputs: outputs
            .map(|(name, _)| RequestedOutput { name: name.clone(), ..Default::default() })
            .collect(),
        id: request.id.clone(),
        parameters: request.parameters.clone(),
        priority: request.priority,
        timeout_us: request.timeout_us,
        correlation_id: sequence.id.clone(),
        sequence_start: sequence.start,
        sequence_end: sequence.end,
        tenant: request.tenant,
        trace: request.trace,
        traced: request.traced.as_ref().map(Traced::step),
        timeline: request.timeline,
        empty_final_response: false,
        raw_body: None,
        leaves_at: request.leaves_at,
    }
}

/// Returns the client's memory for an output of a step, if it is an output of the ensemble that the
/// client requested in shared memory. The step's worker writes it there directly.
pub(super) fn region(
    version: &impl Member,
    plan: &Plan,
    step: &Step,
    output: &str,
    request: &InferRequest,
) -> Option<Slice> {
    let (_, tensor) = step.outputs.iter().find(|(name, _)| name == output)?;
    let position = plan.outputs().iter().position(|output| output == tensor)?;
    let name = &version.config().outputs.get(position)?.name;
    request.outputs.iter().find(|wanted| wanted.name == *name)?.region.clone()
}

/// Returns the outputs of a step by position. Their place in a sequence is `asked`, unless the
/// response reports another one.
///
/// # Errors
/// A parameter of the response that gives the place has the wrong type.
pub(super) fn made(
    step: &Step,
    member: &impl Member,
    response: InferResponse,
    asked: InSequence,
) -> Result<Vec<(usize, StepTensor)>, InferError> {
    let sequence = reported_sequence(&response.parameters, asked)?;
    let made = response.outputs.into_iter().filter_map(|output| {
        let position = step.outputs.iter().position(|(name, _)| *name == output.name)?;
        Some((
            position,
            StepTensor::new(output.tensor, member.config().batches(), Some(sequence.clone())),
        ))
    });
    Ok(made.collect())
}

/// Returns the place in a sequence that the parameters of a response report. As in Triton, an
/// omitted flag is false if any of these parameters is present.
fn reported_sequence(parameters: &Parameters, asked: InSequence) -> Result<InSequence, InferError> {
    let value =
        |wanted: &str| parameters.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
    let flag = |name: &str| match value(name) {
        None => Ok(None),
        Some(Parameter::Bool(flag)) => Ok(Some(*flag)),
        Some(_) => Err(InferError::invalid(format!(
            "expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL"
        ))),
    };
    let id = match value("sequence_id") {
        None => None,
        Some(Parameter::Int(number)) => Some(CorrelationId::Uint(number.cast_unsigned())),
        Some(Parameter::Uint(number)) => Some(CorrelationId::Uint(*number)),
        Some(Parameter::String(text)) => Some(CorrelationId::from_text(text.as_str())?),
        Some(_) => {
            let types = "TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING";
            return Err(InferError::invalid(format!(
                "expected parameter 'sequence_id' to be {types}"
            )));
        }
    };
    let start = flag("sequence_start")?;
    let end = flag("sequence_end")?;
    if id.is_none() && start.is_none() && end.is_none() {
        return Ok(asked);
    }
    Ok(InSequence {
        id: id.unwrap_or(asked.id),
        start: start == Some(true),
        end: end == Some(true),
    })
}

/// Returns an error for outputs in client memory that no step has written there: inputs of the
/// ensemble, and, in a decoupled ensemble, tensors that other steps consume, because the next
/// response may overwrite them too early.
fn check_regions(
    version: &impl Member,
    request: &InferRequest,
    outputs: &[InferOutput],
) -> Result<(), InferError> {
    for InferOutput { name, tensor } in outputs {
        let wanted = request.outputs.iter().find(|wanted| wanted.name == *name);
        let region = wanted.and_then(|wanted| wanted.region.as_ref());
        let why = if region.map(place_in_region) != tensor.data.region().map(place_in_region) {
            "is one of its inputs"
        } else if region.is_some() && version.config().decoupled && is_consumed(version, name) {
            "is an input of other steps"
        } else {
            continue;
        };
        let model = &version.config().name;
        let text =
            format!("output '{name}' of ensemble '{model}' {why}: it cannot be in shared memory");
        return Err(InferError::unsupported(text));
    }
    Ok(())
}

fn place_in_region(slice: &Slice) -> (Option<u64>, u64) {
    (slice.region().map(|region| region.id), slice.offset)
}

/// Returns whether a step of an ensemble has an output of the ensemble as its input.
fn is_consumed(version: &impl Member, output: &str) -> bool {
    let position = version.config().outputs.iter().position(|spec| spec.name == output);
    let Some((position, ensemble)) = position.zip(version.ensemble()) else { return false };
    let plan = ensemble.plan();
    let tensor = plan.outputs().get(position).and_then(|tensor| plan.tensors().get(*tensor));
    tensor.is_some_and(|tensor| !tensor.consumers.is_empty())
}

/// Builds the outputs and the parameters of a response of the ensemble.
///
/// # Errors
/// An output cannot be placed in the requested memory.
pub(super) fn response(
    version: &impl Member,
    request: &InferRequest,
    made: Vec<(usize, StepTensor)>,
) -> Result<(Vec<InferOutput>, Parameters), InferError> {
    let config = version.config();
    let sequence = sequence_of(&made, request);
    let mut outputs = Vec::with_capacity(made.len());
    for (position, passed) in made {
        if let Some(spec) = config.outputs.get(position) {
            let dims = spec.reshape.as_ref().unwrap_or(&spec.dims);
            let mut tensor = passed.into_tensor(dims, config.batches());
            tensor.shape = spec.protocol_shape(&tensor.shape, config.batches()).into_owned();
            outputs.push(InferOutput { name: spec.name.clone(), tensor });
        }
    }
    check_regions(version, request, &outputs)?;
    let parameters =
        if outputs.is_empty() { Parameters::new() } else { sequence_parameters(sequence) };
    Ok((outputs, parameters))
}

/// The parameters that Triton adds to every response of an ensemble.
fn sequence_parameters(InSequence { id, start, end }: InSequence) -> Parameters {
    let id = match id {
        CorrelationId::Uint(number) => {
            i64::try_from(number).map_or(Parameter::Uint(number), Parameter::Int)
        }
        CorrelationId::String(text) => Parameter::String(text),
    };
    vec![
        ("sequence_id".to_owned(), id),
        ("sequence_start".to_owned(), Parameter::Bool(start)),
        ("sequence_end".to_owned(), Parameter::Bool(end)),
    ]
}

pub(super) fn log_left_out(version: &impl Member, step: &Step, left_out: &[String]) {
    for output in left_out {
        let ensemble = version.model();
        let model = &step.model;
        tracing::debug!(%ensemble, "step '{model}' did not produce its output '{output}'; consumers run without it");
    }
}
