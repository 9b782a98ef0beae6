//! Batches of a model with states: adds the states to the inputs, and stores the new states that
//! the model returns. A batch whose states differ in shape is executed in parts, one after the
//! other, because a tensor has one shape; each part has separate outputs.

use pharos::error::InferError;
use pharos::wire::BatchRequest;
use pharos_backend::runtime::{AlignedBuffer, joined};
use pharos_backend::{Backend, Batch, Input, Outputs, run_error};

use super::{Outcome, attempt};
use crate::state::{Gathered, States, rows_of};

/// Executes a batch with the states of its sequences. Sequences that end with it are dropped
/// whatever its outcome.
pub(super) fn execute(
    states: &mut States,
    backend: &mut dyn Backend,
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Outcome {
    if batch.requests.iter().any(|request| request.sequence.is_some() && request.rows != 1) {
        return Ok(Err(run_error("a step of a sequence must have one row")));
    }
    let unknown = states.begin(batch.requests);
    for position in unknown {
        outputs.fail(
            position,
            run_error("the state of the sequence was lost; start the sequence again"),
        );
    }
    let parts = states.parts(batch.requests);
    let outcome = match parts.as_slice() {
        [] | [_] => part(states, backend, batch, outputs),
        parts => in_parts(states, backend, batch, parts, outputs),
    };
    states.end(batch.requests);
    outcome
}

/// Executes each part as a separate batch; an error of one part fails only its requests.
fn in_parts(
    states: &mut States,
    backend: &mut dyn Backend,
    batch: &Batch<'_>,
    parts: &[Vec<u32>],
    outputs: &mut Outputs<'_>,
) -> Outcome {
    for positions in parts {
        outputs.begin_part(positions);
        let requests: Vec<BatchRequest> = positions
            .iter()
            .filter_map(|position: &u32| batch.requests.get(*position as usize).cloned())
            .collect();
        outputs.metrics().batch_begins(&requests);
        let rows = batch.inputs.iter().map(|input| own_rows(input, batch.requests, positions));
        let outcome = match rows.collect::<Result<Vec<AlignedBuffer>, _>>() {
            Ok(rows) => {
                let shapes = shapes(batch, &requests);
                let mut inputs = Vec::with_capacity(rows.len());
                for ((input, data), shape) in batch.inputs.iter().zip(&rows).zip(&shapes) {
                    inputs.push(Input { shape, data: data.as_slice(), pieces: &[], ..*input });
                }
                part(states, backend, &batch.part(&requests, positions, inputs), outputs)?
            }
            Err(error) => Err(error),
        };
        if let Err(error) = outcome {
            outputs.fail_part(&error);
        }
    }
    outputs.metrics().batch_begins(batch.requests);
    outputs.begin_part(&[]);
    Ok(Ok(()))
}

/// Returns the shapes of the inputs for some of the requests.
fn shapes(batch: &Batch<'_>, requests: &[BatchRequest]) -> Vec<Vec<i64>> {
    let rows = requests.iter().map(|request| i64::from(request.rows)).sum();
    batch
        .inputs
        .iter()
        .map(|input| {
            let mut shape = input.shape.to_vec();
            if let Some(first) = shape.first_mut() {
                *first = rows;
            }
            shape
        })
        .collect()
}

/// Returns the rows of an input that belong to the requests at these positions.
fn own_rows(
    input: &Input<'_>,
    requests: &[BatchRequest],
    positions: &[u32],
) -> Result<AlignedBuffer, InferError> {
    let all: u64 = requests.iter().map(|request| u64::from(request.rows)).sum();
    let split = rows_of(input.datatype, input.data, all)
        .filter(|_| input.shape.first().copied() == i64::try_from(all).ok());
    let split = split
        .ok_or_else(|| run_error(format!("input '{}' has no row for each request", input.name)))?;
    let starts: Vec<_> = requests
        .iter()
        .scan(0, |next, request| {
            let start = *next;
            *next += request.rows as usize;
            Some(start..*next)
        })
        .collect();
    let rows =
        positions.iter().filter_map(|position| split.get(starts.get(*position as usize)?.clone()));
    Ok(joined(rows.flatten().copied()))
}

/// Executes requests whose states can share tensors.
fn part(
    states: &mut States,
    backend: &mut dyn Backend,
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Outcome {
    let requests: Vec<&BatchRequest> = batch.requests.iter().collect();
    let gathered = states.gather(&requests);
    let always: Vec<usize> = states.outputs().collect();
    let inputs = batch
        .inputs
        .iter()
        .copied()
        .chain(gathered.iter().map(|state| input(state, batch.config())))
        .collect();
    let outcome = attempt(backend, &batch.with_states(inputs, &always), outputs)?;
    drop(gathered);
    Ok(outcome.and_then(|()| {
        let kept = keep(states, outputs, &requests);
        withdraw_unwanted(states, outputs, batch);
        kept
    }))
}

fn input<'a>(state: &'a Gathered<'_>, config: &'a pharos::model::ModelConfig) -> Input<'a> {
    let name = config.input_name(state.input).unwrap_or_default();
    Input {
        index: state.input,
        name,
        datatype: state.datatype,
        shape: &state.shape,
        data: state.data(),
        pieces: &[],
    }
}

/// Stores the states that the model has produced. Requests that failed keep their previous state.
fn keep(
    states: &mut States,
    outputs: &mut Outputs<'_>,
    requests: &[&BatchRequest],
) -> Result<(), InferError> {
    // Also fails requests whose memory was truncated meanwhile.
    outputs.check_client_memory();
    let made = outputs.made(|output| states.number(output).is_some())?;
    states
        .keep(requests, &made, |position| !outputs.has_failed_in_part(position))
        .map_err(run_error)
}

/// Withdraws states that no request asks for.
fn withdraw_unwanted(states: &States, outputs: &mut Outputs<'_>, batch: &Batch<'_>) {
    for output in states.outputs() {
        if output >= batch.config().outputs.len() || !batch.is_requested(output) {
            outputs.withdraw(output);
        }
    }
}
