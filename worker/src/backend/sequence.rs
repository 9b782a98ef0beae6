//! The builtin function `sequence_sum`: a model that keeps its state internally and reports the controls of its sequences. Its
//! input is one INT32 for each item; its outputs are optional and found by name:
//!
//! | output | content |
//! |---|---|
//! | `SUM` | INT32: the sum of the sequence's inputs so far, 0 for padding |
//! | `BATCH` | BYTES: the control inputs of the whole batch, `START,READY` of each slot in the configuration's order |
//! | `OPEN` | INT32: the number of sequences for which the instance keeps a sum |

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use pharos::error::InferError;
use pharos::model::ModelConfig;
use pharos::tensor::{DataType, bytes_elements, push_bytes_element};
use pharos::wire::{BatchRequest, SequenceStep};
use pharos_backend::{Backend, Batch, Input, Outputs, load_error, run_error};

struct SequenceSum {
    /// By sequence key.
    sums: HashMap<u64, i32>,
    delay: Duration,
    /// Position of the first control; all inputs from there are controls.
    first_control: usize,
    batching: bool,
    outputs: Vec<(usize, Output)>,
}

#[derive(Clone, Copy)]
enum Output {
    Sum,
    Batch,
    Open,
}

/// Creates the function for a configuration; each batch takes `delay`.
pub(super) fn create(config: &ModelConfig, delay: Duration) -> Result<Box<dyn Backend>, InferError> {
    let is_number = |input: &pharos::model::TensorSpec| input.datatype == DataType::Int32;
    if config.inputs.len() != 1 || !config.inputs.iter().all(is_number) {
        return Err(load_error("sequence_sum takes one input of datatype INT32"));
    }
    let output = |(position, spec): (usize, &pharos::model::TensorSpec)| match (spec.name.as_str(), spec.datatype) {
        ("SUM", DataType::Int32) => Ok((position, Output::Sum)),
        ("BATCH", DataType::Bytes) => Ok((position, Output::Batch)),
        ("OPEN", DataType::Int32) => Ok((position, Output::Open)),
        (name, datatype) => Err(load_error(format!(
            "sequence_sum has outputs SUM and OPEN of INT32 and BATCH of BYTES, not {name} of {datatype}"
        ))),
    };
    Ok(Box::new(SequenceSum {
        sums: HashMap::new(),
        delay,
        first_control: config.first_control(),
        batching: config.batches(),
        outputs: config.outputs.iter().enumerate().map(output).collect::<Result<_, _>>()?,
    }))
}

impl Backend for SequenceSum {
    fn engine(&self) -> String {
        concat!("builtin ", env!("CARGO_PKG_VERSION")).to_owned()
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let input = batch.inputs.first().ok_or_else(|| run_error("sequence_sum needs its input"))?;
        let values: Vec<i32> = input.data.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
        let mut sums = Vec::with_capacity(batch.requests.len());
        let per_request = values.len() / batch.requests.len().max(1);
        for (position, request) in batch.requests.iter().enumerate() {
            let own = values.iter().skip(position * per_request).take(per_request);
            let value = own.fold(0i32, |sum, value| sum.wrapping_add(*value));
            let sum = self.step(request, value).unwrap_or_else(|error| {
                outputs.fail(position, error);
                0
            });
            sums.push(sum);
        }
        thread::sleep(self.delay);
        let open = i32::try_from(self.sums.len()).unwrap_or(i32::MAX);
        for (position, output) in self.outputs.iter().filter(|(position, _)| batch.wants(*position)) {
            match output {
                Output::Sum => self.numbers(*position, &sums, outputs)?,
                Output::Open => self.numbers(*position, &vec![open; sums.len()], outputs)?,
                Output::Batch => self.texts(*position, &controls(batch, self.first_control), sums.len(), outputs)?,
            }
        }
        Ok(())
    }

    fn sequence_ended(&mut self, key: u64) {
        self.sums.remove(&key);
    }
}

impl SequenceSum {
    /// Adds the value of a request; 0 for padding.
    fn step(&mut self, request: &BatchRequest, value: i32) -> Result<i32, InferError> {
        let Some(SequenceStep { key, start, end }) = request.sequence else { return Ok(0) };
        if start {
            self.sums.insert(key, 0);
        }
        let sum =
            self.sums.get_mut(&key).ok_or_else(|| run_error(format!("sequence {key} has no sum in this process")))?;
        *sum = sum.wrapping_add(value);
        let now = *sum;
        if end {
            self.sums.remove(&key);
        }
        Ok(now)
    }

    fn shape(&self, requests: usize) -> Vec<i64> {
        let rows = i64::try_from(requests).unwrap_or(i64::MAX);
        if self.batching { vec![rows, 1] } else { vec![rows] }
    }

    fn numbers(&self, output: usize, values: &[i32], outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let out = outputs.allocate_fixed(output, DataType::Int32, &self.shape(values.len()))?;
        for (place, value) in out.chunks_exact_mut(4).zip(values) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    /// Writes the same string for each request.
    fn texts(&self, output: usize, text: &str, count: usize, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let mut bytes = Vec::new();
        for _ in 0..count {
            push_bytes_element(&mut bytes, text.as_bytes());
        }
        outputs.allocate(output, DataType::Bytes, &self.shape(count), bytes.len())?.copy_from_slice(&bytes);
        Ok(())
    }
}

/// Returns the controls of each slot, separated by spaces.
fn controls(batch: &Batch<'_>, first: usize) -> String {
    let tensors: Vec<Vec<String>> = batch.inputs.iter().filter(|input| input.index >= first).map(elements).collect();
    let place = |place: usize| {
        let values: Vec<&str> = tensors.iter().filter_map(|values| values.get(place)).map(String::as_str).collect();
        values.join(",")
    };
    let places: Vec<String> = (0..batch.requests.len()).map(place).collect();
    places.join(" ")
}

/// Returns the elements of a control as strings.
fn elements(input: &Input<'_>) -> Vec<String> {
    macro_rules! numbers {
        ($number:ty) => {
            input.data.as_chunks().0.iter().map(|bytes| <$number>::from_le_bytes(*bytes).to_string()).collect()
        };
    }
    match input.datatype {
        DataType::Bool => input.data.iter().map(u8::to_string).collect(),
        DataType::Fp32 => numbers!(f32),
        DataType::Int32 => numbers!(i32),
        DataType::Uint32 => numbers!(u32),
        DataType::Int64 => numbers!(i64),
        DataType::Uint64 => numbers!(u64),
        DataType::Bytes => bytes_elements(input.data)
            .map_while(Result::ok)
            .map(|text| String::from_utf8_lossy(text).into_owned())
            .collect(),
        other => vec![format!("({other})")],
    }
}
