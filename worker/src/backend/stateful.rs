//! The functions `accumulate` and `append`: minimal models with states.
//!
//! Each state is paired with the input and, if there is one, the output of the same number: the new value of the state is
//! computed from the state and the input, and the output returns it to the client. `accumulate` adds element by element (integers
//! wrap). `append` concatenates the input to the state in their first dimension, so that the state contains the first value and
//! everything that its sequence has sent.

use pharos::error::InferError;
use pharos::tensor::DataType;
use pharos_backend::{Batch, Context, Input, Outputs, load_error, run_error};

use super::elements::{self, Operation};
use crate::state::rows_of;

/// A function of states.
pub(super) struct Stateful {
    append: bool,
    /// Whether tensors have a batch dimension.
    batches: bool,
    states: Vec<State>,
}

/// The numbers that backends use for the tensors of a state.
struct State {
    state_input: usize,
    state_output: usize,
    input: usize,
    output: Option<usize>,
    datatype: DataType,
}

impl Stateful {
    /// # Errors
    /// The number of inputs differs from that of states, a datatype differs, or it has no arithmetic.
    pub(super) fn create(context: &Context<'_>, append: bool) -> Result<Self, InferError> {
        let config = context.config;
        if config.states.is_empty() || config.inputs.len() != config.states.len() {
            let (states, inputs) = (config.states.len(), config.inputs.len());
            let text = "accumulate and append need one input for each state";
            return Err(load_error(format!("the configuration has {states} states and {inputs} inputs; {text}")));
        }
        let state = |(number, state): (usize, &pharos::model::StateSpec)| {
            let output = config.outputs.get(number).filter(|_| number != state.output);
            let datatypes = [config.inputs.get(number), output].into_iter().flatten().map(|tensor| tensor.datatype);
            let alike = datatypes.into_iter().all(|datatype| datatype == state.datatype);
            if !alike || (!append && matches!(state.datatype, DataType::Bool | DataType::Bytes)) {
                let text = "must be of the datatype of its input and output, and of numbers to accumulate";
                return Err(load_error(format!("state '{}' {text}", state.input_name)));
            }
            Ok(State {
                state_input: config.state_input(number),
                state_output: state.output,
                input: number,
                output: output.map(|_| number),
                datatype: state.datatype,
            })
        };
        let states = config.states.iter().enumerate().map(state).collect::<Result<_, _>>()?;
        Ok(Self { append, batches: config.batches(), states })
    }

    /// Computes the new values.
    pub(super) fn execute(&self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        for state in &self.states {
            let find = |position: usize| batch.inputs.iter().find(|input| input.index == position);
            let (Some(before), Some(input)) = (find(state.state_input), find(state.input)) else {
                return Err(run_error("an input is missing"));
            };
            let (shape, value) = if self.append { self.append(batch, before, input)? } else { add(before, input)? };
            for output in [Some(state.state_output), state.output].into_iter().flatten() {
                if batch.wants(output) {
                    outputs.allocate(output, state.datatype, &shape, value.len())?.copy_from_slice(&value);
                }
            }
        }
        outputs.sort();
        Ok(())
    }

    fn append(
        &self,
        batch: &Batch<'_>,
        before: &Input<'_>,
        input: &Input<'_>,
    ) -> Result<(Vec<i64>, Vec<u8>), InferError> {
        let rows = if self.batches { batch.rows() } else { 1 };
        let unframed = || run_error(format!("input '{}' has no row for each request", input.name));
        let cut = |tensor: &Input<'_>| {
            rows_of(tensor.datatype, tensor.data, rows)
                .map(|rows| rows.iter().map(|row| row.to_vec()).collect::<Vec<_>>())
        };
        let (old, new) = (cut(before).ok_or_else(unframed)?, cut(input).ok_or_else(unframed)?);
        let at = usize::from(self.batches);
        let mut shape = before.shape.to_vec();
        match (shape.get_mut(at), input.shape.get(at)) {
            (Some(length), Some(more)) if before.shape.get(at + 1..) == input.shape.get(at + 1..) => *length += more,
            _ => return Err(unlike(before, input)),
        }
        let value = old.iter().zip(&new).flat_map(|(old, new)| [old.as_slice(), new.as_slice()].concat());
        Ok((shape, value.collect()))
    }
}

fn add(before: &Input<'_>, input: &Input<'_>) -> Result<(Vec<i64>, Vec<u8>), InferError> {
    if before.shape != input.shape {
        return Err(unlike(before, input));
    }
    let mut value = vec![0; before.data.len()];
    // Datatypes without arithmetic were refused when the model was loaded.
    elements::apply(before.datatype, Operation::Add, (before.data, input.data), &mut value);
    Ok((before.shape.to_vec(), value))
}

fn unlike(before: &Input<'_>, input: &Input<'_>) -> InferError {
    let (state, given) = (before.shape, input.shape);
    InferError::invalid(format!("input '{}' has shape {given:?}, its state {state:?}", input.name))
}
