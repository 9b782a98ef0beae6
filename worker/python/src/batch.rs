//! Splits a batch into requests for a Python model. Each request gets its part of the inputs,
//! without copying.

use std::sync::Arc;

use pharos::error::InferError;
use pharos::id::CorrelationId;
use pharos::wire::Details;
use pharos_backend::{Batch, Outputs, ReceivedPart, ReceivedPiece, in_clients_order};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::answer::Answer;
use crate::model::Model;
use crate::request::{InferenceRequest, RequestFields, SEQUENCE_END, SEQUENCE_START};
use crate::tensor::Tensor;

/// Creates the response channels of a batch.
pub(crate) fn answers(
    model: &Arc<Model>,
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Result<Vec<Arc<Answer>>, InferError> {
    batch
        .requests
        .iter()
        .enumerate()
        .map(|(position, request)| {
            let wanted =
                request.details.as_ref().map(|details| details.outputs.clone()).unwrap_or_default();
            Ok(Arc::new(Answer::new(Arc::clone(model), outputs.detach(position)?, wanted)))
        })
        .collect()
}

/// Creates the requests of a batch for the model.
///
/// # Errors
/// An input contradicts its description.
pub(crate) fn requests<'py>(
    py: Python<'py>,
    model: &Model,
    batch: &Batch<'_>,
    answers: &[Arc<Answer>],
) -> Result<Bound<'py, PyList>, InferError> {
    let python =
        |error: PyErr| InferError::internal(format!("cannot pass the batch to Python: {error}"));
    let mut inputs: Vec<Vec<Py<Tensor>>> =
        batch.requests.iter().map(|_| Vec::with_capacity(batch.inputs.len())).collect();
    let given = || batch.inputs.iter().enumerate().filter(|(_, input)| batch.has_parts(input));
    for (position, input) in given() {
        let parts = batch.received_parts(position, &model.runtime)?;
        for (inputs, ReceivedPart { shape, bytes }) in inputs.iter_mut().zip(parts) {
            let name = input.name.to_owned();
            let tensor = match bytes {
                ReceivedPiece::Host(bytes) => Tensor::received(name, input.datatype, shape, bytes),
                ReceivedPiece::Device(kept) => Tensor::on_device(name, input.datatype, shape, kept),
            };
            inputs.push(Py::new(py, tensor).map_err(python)?);
        }
    }
    let positions: Vec<usize> = given().map(|(_, input)| input.index).collect();
    let list = PyList::empty(py);
    for ((request, inputs), answer) in batch.requests.iter().zip(inputs).zip(answers) {
        let none = Details::default();
        let details = request.details.as_deref().unwrap_or(&none);
        let inputs = in_clients_order(inputs, &positions, &details.input_order);
        let flags = [(details.start, SEQUENCE_START), (details.end, SEQUENCE_END)];
        let flags = flags.into_iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum();
        let request = InferenceRequest::received(
            fields_of(model, request, details),
            flags,
            inputs,
            Arc::clone(answer),
        );
        list.append(Bound::new(py, request).map_err(python)?).map_err(python)?;
    }
    Ok(list)
}

fn fields_of(
    model: &Model,
    request: &pharos::wire::BatchRequest,
    details: &Details,
) -> RequestFields {
    let outputs = match details.outputs.as_slice() {
        [] => model.config.outputs.iter().map(|output| output.name.clone()).collect(),
        some => some
            .iter()
            .filter_map(|output: &u16| {
                model.config.outputs.get(usize::from(*output)).map(|output| output.name.clone())
            })
            .collect(),
    };
    RequestFields {
        id: request.id.clone(),
        correlation: match &details.correlation {
            CorrelationId::String(text) if text.is_empty() => CorrelationId::default(),
            correlation => correlation.clone(),
        },
        model_name: model.config.name.clone(),
        model_version: model.version,
        timeout_us: details.timeout_us,
        parameters: request.parameters.clone(),
        outputs,
        trace_context: details.trace_context.as_deref().map(Arc::from),
        sequence: request.sequence.map(|step| step.key),
    }
}

/// Reschedules the requests for which the model has set the reschedule flag.
///
/// # Errors
/// The model does not use iterative sequences.
pub(crate) fn reschedule(
    requests: &Bound<'_, PyList>,
    answers: &[Arc<Answer>],
    outputs: &mut Outputs<'_>,
) -> PyResult<()> {
    for (position, (request, answer)) in requests.iter().zip(answers).enumerate() {
        if request.cast::<InferenceRequest>().is_ok_and(|request| request.get().is_rescheduled()) {
            outputs.reschedule(position).map_err(|error| crate::error::model_exception(&error))?;
            answer.mark_rescheduled();
        }
    }
    Ok(())
}
