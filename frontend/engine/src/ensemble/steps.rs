//! Converts an ensemble's request to those of its steps, and their responses to the ensemble's.

use pharos::ensemble::{Plan, Step, fit};
use pharos::error::InferError;
use pharos::infer::{
    CorrelationId, InferInput, InferOutput, InferRequest, InferResponse, Parameter, Parameters, RequestedOutput,
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

    /// Shapes the tensor for a model (or the ensemble's response) with these dimensions, which exclude the batch.
    fn into_tensor(self, dims: &[i64], batches: bool) -> Tensor {
        let shape = fit(dims, batches, &self.tensor.shape, self.batch);
        Tensor { shape, ..self.tensor }
    }
}

/// Returns the place in a sequence of a request with these tensors: the first that a step reported, or the request's own.
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
    let wanted = |name: &str| request.outputs.is_empty() || request.outputs.iter().any(|output| output.name == name);
    let outputs = version.config().outputs.iter().enumerate();
    outputs.filter(|(_, spec)| wanted(&spec.name)).map(|(position, _)| position).collect()
}

/// Takes the inputs out of a request, with their positions in the configuration.
pub(super) fn request_inputs(version: &impl Member, request: &mut InferRequest) -> Vec<(usize, StepTensor)> {
    let batches = version.config().batches();
    let given = std::mem::take(&mut request.inputs).into_iter().filter_map(|input| {
        let position = version.config().inputs.iter().position(|spec| spec.name == input.name)?;
        let shape = version.config().inputs.get(position)?.backend_shape(&input.tensor.shape, batches);
        Some((position, StepTensor::new(Tensor { shape, ..input.tensor }, batches, None)))
    });
    given.collect()
}

/// The tensors of a step's request, by their positions in the step.
pub(super) struct StepTensors<'a> {
    pub(super) inputs: Vec<(usize, StepTensor)>,
    /// The positions of the requested outputs.
    pub(super) outputs: &'a [usize],
}

/// Builds the request of a step from the ensemble's request, the step's tensors and its place in a sequence.
pub(super) fn step_request(
    (step, member): (&Step, &impl Member),
    request: &InferRequest,
    StepTensors { inputs, outputs: requested }: StepTensors<'_>,
    sequence: &InSequence,
) -> InferRequest {
    let config = member.config();
    let input = |(position, passed): (usize, StepTensor)| {
        let (name, _) = step.inputs.get(position)?;
        let dims = config.input(name).map_or(&[][..], |spec| &spec.dims);
        Some(InferInput { name: name.clone(), tensor: passed.into_tensor(dims, config.batches()) })
    };
    let outputs = requested.iter().filter_map(|position| step.outputs.get(*position));
    InferRequest {
        model_name: member.model().name.to_string(),
        model_version: member.model().version.to_string(),
        inputs: inputs.into_iter().filter_map(input).collect(),
        input_order: Vec::new(),
        outputs: outputs.map(|(name, _)| RequestedOutput { name: name.clone(), ..Default::default() }).collect(),
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
        deadline: request.deadline,
    }
}

/// Returns the client's memory for an output of a step, if it is an output of the ensemble that the client requested in shared
/// memory. The step's worker writes it there directly.
pub(super) fn region(
    version: &impl Member,
    plan: &Plan,
    (step, output): (&Step, &str),
    request: &InferRequest,
) -> Option<Slice> {
    let (_, tensor) = step.outputs.iter().find(|(name, _)| name == output)?;
    let position = plan.outputs().iter().position(|output| output == tensor)?;
    let name = &version.config().outputs.get(position)?.name;
    request.outputs.iter().find(|wanted| wanted.name == *name)?.region.clone()
}

/// Returns the outputs of a step by position. Their place in a sequence is `asked`, unless the response reports another one.
///
/// # Errors
/// A parameter of the response that gives the place has the wrong type.
pub(super) fn made(
    (step, member): (&Step, &impl Member),
    response: InferResponse,
    asked: InSequence,
) -> Result<Vec<(usize, StepTensor)>, InferError> {
    let sequence = reported_sequence(&response.parameters, asked)?;
    let made = response.outputs.into_iter().filter_map(|output| {
        let position = step.outputs.iter().position(|(name, _)| *name == output.name)?;
        Some((position, StepTensor::new(output.tensor, member.config().batches(), Some(sequence.clone()))))
    });
    Ok(made.collect())
}

/// Returns the place in a sequence that the parameters of a response report. As in Triton, an omitted flag is false if any of
/// these parameters is present.
fn reported_sequence(parameters: &Parameters, asked: InSequence) -> Result<InSequence, InferError> {
    let value = |wanted: &str| parameters.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
    let flag = |name: &str| match value(name) {
        None => Ok(None),
        Some(Parameter::Bool(flag)) => Ok(Some(*flag)),
        Some(_) => Err(InferError::invalid(format!("expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL"))),
    };
    let id = match value("sequence_id") {
        None => None,
        Some(Parameter::Int(number)) => Some(CorrelationId::Uint(number.cast_unsigned())),
        Some(Parameter::Uint(number)) => Some(CorrelationId::Uint(*number)),
        Some(Parameter::String(text)) => Some(CorrelationId::from_text(text.as_str())?),
        Some(_) => {
            let types = "TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING";
            return Err(InferError::invalid(format!("expected parameter 'sequence_id' to be {types}")));
        }
    };
    let (start, end) = (flag("sequence_start")?, flag("sequence_end")?);
    if id.is_none() && start.is_none() && end.is_none() {
        return Ok(asked);
    }
    Ok(InSequence { id: id.unwrap_or(asked.id), start: start == Some(true), end: end == Some(true) })
}

/// Returns an error for outputs in client memory that no step has written there: inputs of the ensemble, and, in a decoupled
/// ensemble, tensors that other steps consume, because the next response may overwrite them too early.
fn check_regions(version: &impl Member, request: &InferRequest, outputs: &[InferOutput]) -> Result<(), InferError> {
    let place = |slice: &Slice| (slice.region().map(|region| region.id), slice.offset);
    let taken = |name: &str| {
        let position = version.config().outputs.iter().position(|spec| spec.name == name)?;
        let plan = version.ensemble()?.plan();
        plan.tensors().get(*plan.outputs().get(position)?).map(|tensor| !tensor.consumers.is_empty())
    };
    for InferOutput { name, tensor } in outputs {
        let wanted = request.outputs.iter().find(|wanted| wanted.name == *name);
        let wanted = wanted.and_then(|wanted| wanted.region.as_ref());
        let why = match () {
            () if wanted.map(place) != tensor.data.region().map(place) => "is one of its inputs",
            () if wanted.is_some() && version.config().decoupled && taken(name) == Some(true) => {
                "is an input of other steps"
            }
            () => continue,
        };
        let model = &version.config().name;
        let text = format!("output '{name}' of ensemble '{model}' {why}: it cannot be in shared memory");
        return Err(InferError::unsupported(text));
    }
    Ok(())
}

/// Builds the outputs and the parameters of a response of the ensemble.
///
/// # Errors
/// An output cannot be placed in the requested memory.
pub(super) fn response(
    version: &impl Member,
    request: &InferRequest,
    outputs: Vec<(usize, StepTensor)>,
) -> Result<(Vec<InferOutput>, Parameters), InferError> {
    let config = version.config();
    let sequence = sequence_of(&outputs, request);
    let outputs = outputs.into_iter().filter_map(|(position, passed)| {
        let spec = config.outputs.get(position)?;
        let dims = spec.reshape.as_ref().unwrap_or(&spec.dims);
        let mut tensor = passed.into_tensor(dims, config.batches());
        tensor.shape = spec.protocol_shape(&tensor.shape, config.batches()).into_owned();
        Some(InferOutput { name: spec.name.clone(), tensor })
    });
    let outputs: Vec<InferOutput> = outputs.collect();
    check_regions(version, request, &outputs)?;
    let parameters = if outputs.is_empty() { Parameters::new() } else { sequence_parameters(sequence) };
    Ok((outputs, parameters))
}

/// The parameters that Triton adds to every response of an ensemble.
fn sequence_parameters(InSequence { id, start, end }: InSequence) -> Parameters {
    let id = match id {
        CorrelationId::Uint(number) => i64::try_from(number).map_or(Parameter::Uint(number), Parameter::Int),
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
        let (ensemble, model) = (version.model(), &step.model);
        tracing::debug!(%ensemble, "step '{model}' did not produce its output '{output}'; consumers run without it");
    }
}
