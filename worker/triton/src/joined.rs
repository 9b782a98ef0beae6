//! Batches of a model with implicit states: the server stores the states when a batch ends, so the
//! batch waits for the answers and the new states of all its requests, and then joins them.

use std::sync::Arc;

use pharos::error::InferError;
use pharos::tensor::{DataType, element_count};
use pharos_backend::{Batch, Content, Outputs, Reply, run_error};

use crate::answer::Answer;
use crate::kept::{KeptContent, Part, Releases};

/// The error of a request that the library has released without an answer.
const UNANSWERED: &str = "the model released the request without answering it";

/// Waits until the library has answered and released all requests of a batch.
pub(crate) fn wait(answers: &[Arc<Answer>], releases: &Releases) {
    let is_done = |answer: &Arc<Answer>| {
        // Without another holder, no answer can follow.
        answer.is_released() && (answer.has_ended() || Arc::strong_count(answer) == 1)
    };
    releases.wait_until(|| answers.iter().all(is_done));
}

/// Writes the answers and the states of the requests as the outputs of their batch.
///
/// # Errors
/// There is no memory for them.
pub(crate) fn join(
    answers: &[Arc<Answer>],
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Result<(), InferError> {
    let Some(model) = answers.first().map(|answer| answer.model.clone()) else { return Ok(()) };
    // The parts of each output of the backend, by request.
    let count = model.config.backend_outputs().count();
    let mut parts: Vec<Vec<Option<Part>>> =
        (0..count).map(|_| answers.iter().map(|_| None).collect()).collect();
    for (position, answer) in answers.iter().enumerate() {
        let Some(kept) = answer.kept() else { continue };
        let KeptContent { reply, states } = kept.take();
        match reply {
            None if answer.is_rescheduled() => {}
            None => outputs.fail(position, run_error(UNANSWERED)),
            Some(Reply { error: Some(error), .. }) => {
                outputs.fail(position, error);
                continue;
            }
            Some(Reply { outputs: made, parameters, error: None }) => {
                for (name, value) in parameters {
                    outputs.parameter(position, &name, value);
                }
                for output in made {
                    let Content::Memory(memory) = output.content else { continue };
                    let part = Part { datatype: output.datatype, shape: output.shape, memory };
                    if let Some(place) =
                        parts.get_mut(output.output).and_then(|parts| parts.get_mut(position))
                    {
                        *place = Some(part);
                    }
                }
            }
        }
        for (state, part) in states {
            let output = model.config.states.get(state).map(|state| state.output);
            let place = output.and_then(|output| parts.get_mut(output)?.get_mut(position));
            if let Some(place) = place {
                *place = Some(part);
            }
        }
    }
    keep_old_states(answers, batch, &mut parts)?;
    for (output, parts) in parts.iter().enumerate() {
        join_output(output, parts, batch, outputs)?;
    }
    Ok(())
}

/// Fills in the old value of each state that a request has not updated.
fn keep_old_states(
    answers: &[Arc<Answer>],
    batch: &Batch<'_>,
    parts: &mut [Vec<Option<Part>>],
) -> Result<(), InferError> {
    let Some(model) = answers.first().map(|answer| &answer.model) else { return Ok(()) };
    let first = model.config.first_control() + model.config.controls().len();
    for (number, state) in model.config.states.iter().enumerate() {
        let input = batch.inputs.iter().find(|input| input.index == first + number);
        let (Some(input), Some(parts)) = (input, parts.get_mut(state.output)) else { continue };
        let old = batch.parts_of(input)?;
        for (place, old) in parts.iter_mut().zip(old).filter(|(place, _)| place.is_none()) {
            let bytes = input.data.get(old.bytes).unwrap_or_default();
            let mut memory = model.runtime.memory(bytes.len())?;
            memory.copy_from_slice(bytes);
            *place = Some(Part { datatype: input.datatype, shape: old.shape, memory });
        }
    }
    Ok(())
}

/// Writes one output of the batch. A request whose part does not fit to the others fails.
fn join_output(
    output: usize,
    parts: &[Option<Part>],
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Result<(), InferError> {
    let found = parts.iter().enumerate().find_map(|(at, part)| Some((at, part.as_ref()?)));
    let Some((first_position, first)) = found else { return Ok(()) };
    let batches = batch.config().batches();
    let rest = |shape: &[i64]| shape.get(usize::from(batches)..).unwrap_or_default().to_vec();
    let rows =
        |position: usize| batch.requests.get(position).map_or(0, |request| i64::from(request.rows));
    let fits = |position: usize, part: &Part| {
        part.datatype == first.datatype
            && rest(&part.shape) == rest(&first.shape)
            && (!batches || part.shape.first() == Some(&rows(position)))
    };
    let mut content: Vec<u8> = Vec::new();
    // The bytes of one row without content, which no client receives: zeros or empty elements.
    let empty_row = match first.datatype {
        DataType::Bytes => element_count(&rest(&first.shape)).unwrap_or(0) * 4,
        _ => first.memory.len() as u64 / rows(first_position).max(1).cast_unsigned(),
    };
    let empty_row = usize::try_from(empty_row).unwrap_or(0);
    for (position, part) in parts.iter().enumerate() {
        match part {
            Some(part) if fits(position, part) => content.extend_from_slice(&part.memory),
            part => {
                if part.is_some() {
                    outputs.fail(
                        position,
                        run_error(
                            "the outputs and states of requests that are executed together must \
                             have the same shape, in a model with states",
                        ),
                    );
                }
                let rows = usize::try_from(rows(position)).unwrap_or(0);
                content.resize(content.len() + rows * empty_row, 0);
            }
        }
    }
    let mut shape = first.shape.clone();
    if batches && let Some(first) = shape.first_mut() {
        *first = (0..parts.len()).map(rows).sum();
    }
    let place = outputs.allocate(output, first.datatype, &shape, content.len())?;
    place.copy_from_slice(&content);
    Ok(())
}
