//! Splits a batch into requests for a Python model. Each request gets its part of the inputs,
//! without copying.

use std::ops::Range;
use std::sync::Arc;

use pharos::batch_split;
use pharos::error::InferError;
use pharos::id::CorrelationId;
use pharos::tensor::{DataType, byte_size, element_count};
use pharos::wire::Details;
use pharos_backend::{Batch, Input, Outputs, ReceivedPiece};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::answer::Answer;
use crate::model::Model;
use crate::request::{InferenceRequest, RequestFields, SEQUENCE_END, SEQUENCE_START};
use crate::tensor::Tensor;

/// One request's part of an input: its shape, and its range in the bytes of the batch.
type Part = (Vec<i64>, Range<usize>);

/// The alignment that kernels may assume for a tensor, in bytes: the widest load. Client memory
/// with a smaller alignment is copied to the host, because a misaligned load would break the
/// process's CUDA context.
const ALIGNED: u64 = 16;

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
    let given = || batch.inputs.iter().enumerate().filter(|(_, input)| is_given(model, input));
    for (position, input) in given() {
        let tensors = match input.pieces {
            [] => contiguous(model, batch, position, input)?,
            _ => in_pieces(model, batch, position, input)?,
        };
        for (inputs, tensor) in inputs.iter_mut().zip(tensors) {
            inputs.push(Py::new(py, tensor).map_err(python)?);
        }
    }
    let positions: Vec<usize> = given().map(|(_, input)| input.index).collect();
    let list = PyList::empty(py);
    for ((request, inputs), answer) in batch.requests.iter().zip(inputs).zip(answers) {
        let none = Details::default();
        let details = request.details.as_deref().unwrap_or(&none);
        let inputs = in_order(inputs, &positions, &details.input_order);
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

/// Returns a request's inputs, which have these positions in the configuration, in the client's
/// order. Inputs that are not from the client follow.
fn in_order<T>(inputs: Vec<T>, positions: &[usize], order: &[u16]) -> Vec<T> {
    if order.is_empty() {
        return inputs;
    }
    let place = |position: usize| {
        order.iter().position(|at| usize::from(*at) == position).unwrap_or(order.len())
    };
    let mut placed: Vec<_> =
        positions.iter().map(|position| place(*position)).zip(inputs).collect();
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, input)| input).collect()
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

/// Creates each request's tensor of a contiguous input.
fn contiguous(
    model: &Model,
    batch: &Batch<'_>,
    position: usize,
    input: &Input<'_>,
) -> Result<Vec<Tensor>, InferError> {
    let bytes = batch.received(position).ok_or_else(|| missing(input))?;
    Ok(parts(model, batch, input)?
        .into_iter()
        .map(|(shape, range)| {
            let part = if range.len() == bytes.len() { bytes.clone() } else { bytes.slice(range) };
            Tensor::received(input.name.to_owned(), input.datatype, shape, part)
        })
        .collect())
}

/// Creates each request's tensor of an input that is partly on a device.
fn in_pieces(
    model: &Model,
    batch: &Batch<'_>,
    position: usize,
    input: &Input<'_>,
) -> Result<Vec<Tensor>, InferError> {
    let shapes = shapes(model, batch, input);
    if shapes.len() != input.pieces.len() {
        return Err(missing(input));
    }
    shapes
        .into_iter()
        .zip(input.pieces)
        .enumerate()
        .map(|(at, (shape, piece))| {
            if byte_size(input.datatype, &shape) != Some(piece.len() as u64) {
                return Err(InferError::internal(format!(
                    "input '{}' does not match its shape",
                    input.name
                )));
            }
            let name = input.name.to_owned();
            let bytes = match batch.received_piece(position, at).ok_or_else(|| missing(input))? {
                ReceivedPiece::Host(bytes) => bytes,
                ReceivedPiece::Device(kept) if kept.memory().address().is_multiple_of(ALIGNED) => {
                    return Ok(Tensor::on_device(name, input.datatype, shape, kept));
                }
                ReceivedPiece::Device(kept) => model.runtime.fetch(kept.memory())?,
            };
            Ok(Tensor::received(name, input.datatype, shape, bytes))
        })
        .collect()
}

fn missing(input: &Input<'_>) -> InferError {
    InferError::internal(format!("input '{}' is missing in the batch", input.name))
}

/// Whether the model gets this input: an input of the configuration, or a sequence control.
fn is_given(model: &Model, input: &Input<'_>) -> bool {
    input.index < model.config.inputs.len() || input.index >= model.config.first_control()
}

/// Returns the shape and the byte range of each request's part of an input.
fn parts(model: &Model, batch: &Batch<'_>, input: &Input<'_>) -> Result<Vec<Part>, InferError> {
    let whole = || (input.shape.to_vec(), 0..input.data.len());
    if let Some(shapes) = ragged(model, batch, input) {
        return cut_ragged(input, shapes);
    }
    let rows: Vec<u64> = batch.requests.iter().map(|request| u64::from(request.rows)).collect();
    let all = rows.iter().sum::<u64>();
    if !model.config.batches()
        || input.shape.first().is_none_or(|first| u64::try_from(*first) != Ok(all))
    {
        return Ok(batch.requests.iter().map(|_| whole()).collect());
    }
    if rows.len() == 1 {
        return Ok(vec![whole()]);
    }
    let ends = match input.datatype {
        DataType::Bytes => {
            batch_split::text_ends(input.data, element_count(input.shape).unwrap_or(0), &rows)
        }
        _ => Some(batch_split::fixed_ends(input.data.len(), &rows)),
    };
    let ends = ends.ok_or_else(|| {
        InferError::internal(format!("input '{}' does not match its shape", input.name))
    })?;
    let starts = std::iter::once(0).chain(ends.iter().copied());
    Ok(starts
        .zip(ends.iter().copied())
        .zip(&rows)
        .map(|((start, end), rows)| {
            let shape = std::iter::once(rows.cast_signed())
                .chain(input.shape.iter().skip(1).copied())
                .collect();
            (shape, start..end)
        })
        .collect())
}

/// Returns the shape of each request's part of an input.
fn shapes(model: &Model, batch: &Batch<'_>, input: &Input<'_>) -> Vec<Vec<i64>> {
    if let Some(shapes) = ragged(model, batch, input) {
        return shapes;
    }
    batch
        .requests
        .iter()
        .map(|request| match input.shape {
            [_, rest @ ..] if model.config.batches() => {
                std::iter::once(i64::from(request.rows)).chain(rest.iter().copied()).collect()
            }
            shape => shape.to_vec(),
        })
        .collect()
}

/// Returns the shapes of each request's part of a ragged input; `None` for other inputs.
fn ragged(model: &Model, batch: &Batch<'_>, input: &Input<'_>) -> Option<Vec<Vec<i64>>> {
    let spec = model.config.inputs.get(input.index)?;
    if !model.config.batches() || !spec.allow_ragged_batch {
        return None;
    }
    batch
        .requests
        .iter()
        .map(|request| {
            let mut ragged = request.details.as_ref()?.ragged.iter();
            ragged
                .find(|(position, _)| usize::from(*position) == input.index)
                .map(|(_, shape)| shape.clone())
        })
        .collect()
}

/// Returns the parts of an input whose requests have these shapes.
fn cut_ragged(input: &Input<'_>, shapes: Vec<Vec<i64>>) -> Result<Vec<Part>, InferError> {
    let counts: Vec<u64> = shapes.iter().map(|shape| element_count(shape).unwrap_or(0)).collect();
    let ends = match input.datatype {
        DataType::Bytes => batch_split::text_ends(input.data, counts.iter().sum(), &counts),
        _ => Some(batch_split::fixed_ends(input.data.len(), &counts)),
    };
    let ends = ends.ok_or_else(|| {
        InferError::internal(format!("input '{}' does not match its shapes", input.name))
    })?;
    let starts = std::iter::once(0).chain(ends.iter().copied());
    Ok(shapes
        .into_iter()
        .zip(starts.zip(ends.iter().copied()).map(|(start, end)| start..end))
        .collect())
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
