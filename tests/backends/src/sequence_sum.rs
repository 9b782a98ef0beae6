//! The function `sequence_sum`: a model that keeps its state internally and reports the controls of
//! its sequences. Its input is one INT32 for each item; its outputs are optional and found by name:
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

pub(crate) struct SequenceSum {
    /// By sequence key.
    sums: HashMap<u64, i32>,
    delay: Duration,
    /// The position of the first control; all inputs from there are controls.
    first_control: usize,
    batching: bool,
    /// The outputs at their positions in the configuration.
    outputs: Vec<Output>,
}

#[derive(Clone, Copy)]
enum Output {
    Sum,
    Batch,
    Open,
}

impl SequenceSum {
    /// Each batch takes `delay`.
    ///
    /// # Errors
    /// A tensor has another name or datatype.
    pub(crate) fn new(config: &ModelConfig, delay: Duration) -> Result<Self, InferError> {
        match config.inputs.as_slice() {
            [input] if input.datatype == DataType::Int32 => {}
            _ => return Err(load_error("sequence_sum takes one input of datatype INT32")),
        }
        let mut outputs = Vec::with_capacity(config.outputs.len());
        for spec in &config.outputs {
            outputs.push(match (spec.name.as_str(), spec.datatype) {
                ("SUM", DataType::Int32) => Output::Sum,
                ("BATCH", DataType::Bytes) => Output::Batch,
                ("OPEN", DataType::Int32) => Output::Open,
                (name, datatype) => {
                    let text = "sequence_sum has outputs SUM and OPEN of INT32 and BATCH of BYTES";
                    return Err(load_error(format!("{text}, not {name} of {datatype}")));
                }
            });
        }
        Ok(Self {
            sums: HashMap::new(),
            delay,
            first_control: config.first_control(),
            batching: config.batches(),
            outputs,
        })
    }
}

impl Backend for SequenceSum {
    fn engine(&self) -> String {
        crate::engine()
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let input =
            batch.inputs.first().ok_or_else(|| run_error("sequence_sum needs its input"))?;
        let values: Vec<i32> =
            input.data.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
        let per_request = values.len() / batch.requests.len().max(1);
        let mut sums = Vec::with_capacity(batch.requests.len());
        for (position, request) in batch.requests.iter().enumerate() {
            let own = values.iter().skip(position * per_request).take(per_request);
            let value = own.fold(0i32, |sum, value| sum.wrapping_add(*value));
            match self.step(request, value) {
                Ok(sum) => sums.push(sum),
                Err(error) => {
                    outputs.fail(position, error);
                    sums.push(0);
                }
            }
        }
        thread::sleep(self.delay);
        let open = i32::try_from(self.sums.len()).unwrap_or(i32::MAX);
        for (position, output) in
            self.outputs.iter().enumerate().filter(|(position, _)| batch.wants(*position))
        {
            match output {
                Output::Sum => self.write_numbers(position, &sums, outputs)?,
                Output::Open => self.write_numbers(position, &vec![open; sums.len()], outputs)?,
                Output::Batch => self.write_text(
                    position,
                    &controls(batch, self.first_control),
                    sums.len(),
                    outputs,
                )?,
            }
        }
        Ok(())
    }

    fn sequence_ended(&mut self, key: u64) {
        self.sums.remove(&key);
    }
}

impl SequenceSum {
    /// Adds the value of a request and returns the sum; 0 for padding.
    fn step(&mut self, request: &BatchRequest, value: i32) -> Result<i32, InferError> {
        let Some(SequenceStep { key, start, end }) = request.sequence else { return Ok(0) };
        if start {
            self.sums.insert(key, 0);
        }
        let Some(entry) = self.sums.get_mut(&key) else {
            return Err(run_error(format!("sequence {key} has no sum in this process")));
        };
        *entry = entry.wrapping_add(value);
        let sum = *entry;
        if end {
            self.sums.remove(&key);
        }
        Ok(sum)
    }

    fn shape(&self, requests: usize) -> Vec<i64> {
        let rows = i64::try_from(requests).unwrap_or(i64::MAX);
        if self.batching { vec![rows, 1] } else { vec![rows] }
    }

    fn write_numbers(
        &self,
        output: usize,
        values: &[i32],
        outputs: &mut Outputs<'_>,
    ) -> Result<(), InferError> {
        let out = outputs.allocate_fixed(output, DataType::Int32, &self.shape(values.len()))?;
        for (place, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
            *place = value.to_le_bytes();
        }
        Ok(())
    }

    /// Writes the same string for each request.
    fn write_text(
        &self,
        output: usize,
        text: &str,
        count: usize,
        outputs: &mut Outputs<'_>,
    ) -> Result<(), InferError> {
        let mut bytes = Vec::new();
        for _ in 0..count {
            push_bytes_element(&mut bytes, text.as_bytes());
        }
        outputs
            .allocate(output, DataType::Bytes, &self.shape(count), bytes.len())?
            .copy_from_slice(&bytes);
        Ok(())
    }
}

/// Returns the controls of each slot, separated by spaces.
fn controls(batch: &Batch<'_>, first: usize) -> String {
    let tensors: Vec<Vec<String>> =
        batch.inputs.iter().filter(|input| input.index >= first).map(elements).collect();
    let mut slots = Vec::with_capacity(batch.requests.len());
    for slot in 0..batch.requests.len() {
        let values: Vec<&str> =
            tensors.iter().filter_map(|values| values.get(slot)).map(String::as_str).collect();
        slots.push(values.join(","));
    }
    slots.join(" ")
}

/// Returns the elements of a control as strings.
fn elements(input: &Input<'_>) -> Vec<String> {
    macro_rules! numbers {
        ($number:ty) => {
            input
                .data
                .as_chunks()
                .0
                .iter()
                .map(|bytes| <$number>::from_le_bytes(*bytes).to_string())
                .collect()
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
