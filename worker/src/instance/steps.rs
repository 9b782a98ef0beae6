//! Batches of a model with states: the states join the inputs, and what the model gives for them is kept. A batch whose
//! states differ in shape is executed in parts, one after the other, because a tensor has one shape; each part gives
//! outputs of its own.

use pharos::error::InferError;
use pharos::wire::{BatchRequest, WireError};

use super::{Outcome, Outputs, attempt};
use crate::backend::{Backend, Batch, Input, run_error};
use crate::state::{Buffer, Gathered, States, joined, rows_of};

/// Executes a batch with the states of its sequences. Sequences that end with it are dropped, however it goes.
pub(super) fn execute(
    states: &mut States,
    backend: &mut dyn Backend,
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Outcome {
    if batch.requests.iter().any(|request| request.sequence.is_some() && request.rows != 1) {
        return Ok(Err(run_error("a step of a sequence must have one row")));
    }
    let strangers = states.begin(batch.requests);
    for position in strangers {
        outputs.fail(position, run_error("the state of its sequence is not here; the sequence has to start again"));
    }
    let parts = states.parts(batch.requests);
    let outcome = match parts.as_slice() {
        [] | [_] => part(states, backend, batch, outputs),
        parts => in_parts(states, backend, batch, (parts, outputs)),
    };
    states.end(batch.requests);
    outcome
}

/// Executes each part as a batch of its own; the error of one fails its requests alone.
fn in_parts(
    states: &mut States,
    backend: &mut dyn Backend,
    batch: &Batch<'_>,
    (parts, outputs): (&[Vec<u32>], &mut Outputs<'_>),
) -> Outcome {
    for positions in parts {
        outputs.part_begins(positions);
        let at = |position: &u32| batch.requests.get(*position as usize).cloned();
        let requests: Vec<BatchRequest> = positions.iter().filter_map(at).collect();
        outputs.metrics().batch_begins(&requests);
        let rows = batch.inputs.iter().map(|input| own_rows(input, batch.requests, positions));
        let outcome = match rows.collect::<Result<Vec<Buffer>, _>>() {
            Ok(rows) => {
                let inputs = batch.inputs.iter().zip(&rows).zip(shapes(batch, &requests));
                let inputs =
                    inputs.map(|((input, data), shape)| (input.index, input.name, input.datatype, shape, data));
                let inputs: Vec<_> = inputs.collect();
                let inputs = inputs.iter().map(|(index, name, datatype, shape, data)| Input {
                    index: *index,
                    name,
                    datatype: *datatype,
                    shape,
                    data: data.as_slice(),
                    pieces: &[],
                });
                let inputs = inputs.collect();
                part(states, backend, &Batch { requests: &requests, inputs, positions, ..*batch }, outputs)?
            }
            Err(error) => Err(error),
        };
        if let Err(error) = outcome {
            outputs.fail_part(&error);
        }
    }
    outputs.metrics().batch_begins(batch.requests);
    outputs.part_begins(&[]);
    Ok(Ok(()))
}

/// The shapes of the inputs for some of the requests.
fn shapes(batch: &Batch<'_>, requests: &[BatchRequest]) -> Vec<Vec<i64>> {
    let rows = requests.iter().map(|request| i64::from(request.rows)).sum();
    let shape = |input: &Input<'_>| {
        let mut shape = input.shape.to_vec();
        if let Some(first) = shape.first_mut() {
            *first = rows;
        }
        shape
    };
    batch.inputs.iter().map(shape).collect()
}

/// The rows of an input that belong to the requests at these positions.
fn own_rows(input: &Input<'_>, requests: &[BatchRequest], positions: &[u32]) -> Result<Buffer, InferError> {
    let all: u64 = requests.iter().map(|request| u64::from(request.rows)).sum();
    let cut =
        rows_of(input.datatype, input.data, all).filter(|_| input.shape.first().copied() == i64::try_from(all).ok());
    let cut = cut.ok_or_else(|| run_error(format!("input '{}' has no row for each request", input.name)))?;
    let starts = requests.iter().scan(0, |next, request| {
        let start = *next;
        *next += request.rows as usize;
        Some(start..*next)
    });
    let starts: Vec<_> = starts.collect();
    let rows = positions.iter().filter_map(|position| cut.get(starts.get(*position as usize)?.clone()));
    Ok(joined(rows.flatten().copied()))
}

/// Executes requests whose states can share tensors.
fn part(states: &mut States, backend: &mut dyn Backend, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Outcome {
    let requests: Vec<&BatchRequest> = batch.requests.iter().collect();
    let gathered = states.gather(&requests);
    let always: Vec<usize> = states.outputs().collect();
    let inputs = batch.inputs.iter().copied().chain(gathered.iter().map(|state| input(state, batch.config))).collect();
    let outcome = attempt(backend, &Batch { inputs, always: &always, ..*batch }, outputs)?;
    drop(gathered);
    Ok(outcome.and_then(|()| {
        let kept = outputs.keep(states, &requests);
        outputs.withdraw_unwanted(states, batch);
        kept
    }))
}

fn input<'a>(state: &'a Gathered<'_>, config: &'a pharos::model::ModelConfig) -> Input<'a> {
    let name = config.input_name(state.input).unwrap_or_default();
    Input { index: state.input, name, datatype: state.datatype, shape: &state.shape, data: state.data(), pieces: &[] }
}

impl Outputs<'_> {
    /// What comes now is for the requests at these positions of the batch; none for all.
    fn part_begins(&mut self, positions: &[u32]) {
        self.part = positions.to_vec();
        self.part_from = self.blocks.len();
    }

    /// Fails the requests of this part, and gives back what it has made.
    fn fail_part(&mut self, error: &InferError) {
        let made = self.blocks.split_off(self.part_from.min(self.blocks.len()));
        self.withdrawn.extend(made.iter().filter(|block| !block.placed).map(|block| block.offset));
        for position in 0..self.part.len() {
            self.fail(position, error.clone());
        }
    }

    /// Gives the states what the model has made for them. Requests that failed keep the state from before.
    fn keep(&mut self, states: &mut States, requests: &[&BatchRequest]) -> Result<(), InferError> {
        // A request whose memory has vanished meanwhile has failed, too.
        self.check_lent();
        let made = self.blocks.get(self.part_from..).unwrap_or_default();
        let of_states = made.iter().filter_map(|block| Some((states.number(usize::from(block.output))?, block)));
        let given = of_states.map(|(state, block)| {
            let data = self.arena.bytes(block.offset, block.len)?;
            Some(crate::state::Given { state, datatype: block.datatype, shape: &block.shape, data })
        });
        let given: Vec<_> = given.collect::<Option<_>>().ok_or_else(|| run_error("an output is not in the arena"))?;
        let went_well = |position: usize| {
            let failed = |failed: &(u32, WireError)| failed.0 == self.position(position);
            !self.failed.iter().any(failed)
        };
        states.keep(requests, &given, went_well).map_err(run_error)
    }

    /// Takes back the states that no client wants to see.
    fn withdraw_unwanted(&mut self, states: &States, batch: &Batch<'_>) {
        for output in states.outputs() {
            if output >= batch.config.outputs.len() || !batch.is_asked_for(output) {
                self.withdraw(output);
            }
        }
    }
}
