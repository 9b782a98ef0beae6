//! The functions `accumulate` and `append`: minimal models with states.
//!
//! Each state is paired with the input and, if there is one, the output of the same number: the new
//! value of the state is computed from the state and the input, and the output returns it to the
//! client. `accumulate` adds element by element (INT64 wraps). `append` concatenates the input to
//! the state in their first dimension, so that the state contains the first value and everything
//! that its sequence has sent.

use pharos::error::InferError;
use pharos::model::ModelConfig;
use pharos::tensor::{DataType, bytes_elements};
use pharos_backend::{Backend, Batch, Input, Outputs, load_error, run_error};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Function {
    Accumulate,
    Append,
}

/// A function of states.
pub(crate) struct Stateful {
    function: Function,
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

/// A new value of a state.
struct Value {
    shape: Vec<i64>,
    data: Vec<u8>,
}

impl Stateful {
    /// # Errors
    /// The number of inputs differs from the number of states, or a datatype is not supported.
    pub(crate) fn accumulate(config: &ModelConfig) -> Result<Self, InferError> {
        Self::new(config, Function::Accumulate)
    }

    /// # Errors
    /// The number of inputs differs from the number of states, or a datatype differs.
    pub(crate) fn append(config: &ModelConfig) -> Result<Self, InferError> {
        Self::new(config, Function::Append)
    }

    fn new(config: &ModelConfig, function: Function) -> Result<Self, InferError> {
        if config.states.is_empty() || config.inputs.len() != config.states.len() {
            let states = config.states.len();
            let inputs = config.inputs.len();
            let text = "accumulate and append need one input for each state";
            return Err(load_error(format!(
                "the configuration has {states} states and {inputs} inputs; {text}"
            )));
        }
        let mut states = Vec::with_capacity(config.states.len());
        for (number, state) in config.states.iter().enumerate() {
            let output = config.outputs.get(number).filter(|_| number != state.output);
            let is_alike = |datatype: DataType| datatype == state.datatype;
            let has_alike = config.inputs.get(number).is_some_and(|input| is_alike(input.datatype))
                && output.is_none_or(|output| is_alike(output.datatype));
            let is_supported = function == Function::Append
                || matches!(state.datatype, DataType::Int64 | DataType::Fp32);
            if !has_alike || !is_supported {
                let text = "must be of the datatype of its input and output, and of INT64 or FP32 \
                            to accumulate";
                return Err(load_error(format!("state '{}' {text}", state.input_name)));
            }
            states.push(State {
                state_input: config.state_input(number),
                state_output: state.output,
                input: number,
                output: output.map(|_| number),
                datatype: state.datatype,
            });
        }
        Ok(Self { function, batches: config.batches(), states })
    }
}

impl Backend for Stateful {
    fn engine(&self) -> String {
        crate::engine()
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        for state in &self.states {
            let find = |position: usize| batch.inputs.iter().find(|input| input.index == position);
            let (Some(before), Some(input)) = (find(state.state_input), find(state.input)) else {
                return Err(run_error("an input is missing"));
            };
            let value = match self.function {
                Function::Accumulate => sum(before, input)?,
                Function::Append => concatenation(
                    before,
                    input,
                    if self.batches { Some(batch.rows()) } else { None },
                )?,
            };
            for output in [Some(state.state_output), state.output].into_iter().flatten() {
                if batch.wants(output) {
                    let out =
                        outputs.allocate(output, state.datatype, &value.shape, value.data.len())?;
                    out.copy_from_slice(&value.data);
                }
            }
        }
        outputs.sort();
        Ok(())
    }
}

fn sum(before: &Input<'_>, input: &Input<'_>) -> Result<Value, InferError> {
    if before.shape != input.shape {
        return Err(unlike(before, input));
    }
    let data = match before.datatype {
        DataType::Int64 => pairwise(before.data, input.data, |left, right| {
            i64::from_le_bytes(left).wrapping_add(i64::from_le_bytes(right)).to_le_bytes()
        }),
        DataType::Fp32 => pairwise(before.data, input.data, |left, right| {
            (f32::from_le_bytes(left) + f32::from_le_bytes(right)).to_le_bytes()
        }),
        other => return Err(run_error(format!("accumulate has no arithmetic for {other}"))),
    };
    Ok(Value { shape: before.shape.to_vec(), data })
}

fn pairwise<const N: usize>(
    left: &[u8],
    right: &[u8],
    add: impl Fn([u8; N], [u8; N]) -> [u8; N],
) -> Vec<u8> {
    let pairs = left.as_chunks().0.iter().zip(right.as_chunks().0);
    pairs.flat_map(|(left, right)| add(*left, *right)).collect()
}

/// Concatenates a state and an input: row by row if the model batches.
fn concatenation(
    before: &Input<'_>,
    input: &Input<'_>,
    rows: Option<u64>,
) -> Result<Value, InferError> {
    let dimension = usize::from(rows.is_some());
    let mut shape = before.shape.to_vec();
    match (shape.get_mut(dimension), input.shape.get(dimension)) {
        (Some(length), Some(more))
            if before.shape.get(dimension + 1..) == input.shape.get(dimension + 1..) =>
        {
            *length += more;
        }
        _ => return Err(unlike(before, input)),
    }
    let rows = usize::try_from(rows.unwrap_or(1)).unwrap_or(1);
    let old = split(before, rows)?;
    let new = split(input, rows)?;
    let mut data = Vec::with_capacity(before.data.len() + input.data.len());
    for (old, new) in old.into_iter().zip(new) {
        data.extend_from_slice(old);
        data.extend_from_slice(new);
    }
    Ok(Value { shape, data })
}

/// Splits a tensor into rows of the same number of elements.
fn split<'a>(tensor: &Input<'a>, rows: usize) -> Result<Vec<&'a [u8]>, InferError> {
    let unframed = || run_error(format!("input '{}' has no row for each request", tensor.name));
    let mut lengths = Vec::new();
    if tensor.datatype == DataType::Bytes {
        for element in bytes_elements(tensor.data) {
            lengths.push(4 + element.map_err(|_| unframed())?.len());
        }
    } else {
        let size = tensor.datatype.size().ok_or_else(unframed)?;
        lengths = vec![size; tensor.data.len() / size];
    }
    let per_row = lengths.len() / rows.max(1);
    let mut rest = tensor.data;
    let mut split = Vec::with_capacity(rows);
    for row in 0..rows {
        let length = lengths.iter().skip(row * per_row).take(per_row).sum();
        let (own, after) = rest.split_at_checked(length).ok_or_else(unframed)?;
        split.push(own);
        rest = after;
    }
    Ok(split)
}

fn unlike(before: &Input<'_>, input: &Input<'_>) -> InferError {
    let state = before.shape;
    let given = input.shape;
    InferError::invalid(format!("input '{}' has shape {given:?}, its state {state:?}", input.name))
}
