//! The function `countdown` of iterative sequences: executes a request the number of times that it
//! asks for, as a language model does for each token. A decoupled model responds at each execution,
//! another model at the last.
//!
//! | tensor | meaning |
//! |---|---|
//! | input `COUNT` | `[1]` INT32: number of executions, at least one |
//! | output `DONE` | `[1]` INT32: number of executions so far |
//! | output `TOGETHER` | `[1]` INT32: number of requests executed together, including this one; optional |

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use pharos::error::{ErrorCode, InferError};
use pharos::model::{ModelConfig, TensorSpec};
use pharos::tensor::DataType;
use pharos_backend::{Backend, Batch, Outputs, load_error, run_error};

pub(crate) struct Countdown {
    /// Executions so far, by sequence key.
    done: HashMap<u64, i32>,
    delay: Duration,
    /// The position of `DONE` in the configuration.
    done_output: usize,
    /// The position of `TOGETHER` in the configuration.
    together_output: Option<usize>,
    batches: bool,
    decoupled: bool,
}

/// One execution of one request.
struct Execution {
    done: i32,
    together: i32,
    is_last: bool,
}

impl Countdown {
    /// Each batch takes `delay`.
    ///
    /// # Errors
    /// A tensor is missing or has another datatype.
    pub(crate) fn new(config: &ModelConfig, delay: Duration) -> Result<Self, InferError> {
        let find = |tensors: &[TensorSpec], name: &str| {
            tensors
                .iter()
                .position(|tensor| tensor.name == name && tensor.datatype == DataType::Int32)
        };
        if find(&config.inputs, "COUNT") != Some(0) || config.inputs.len() != 1 {
            return Err(load_error("countdown takes one input, COUNT of datatype INT32"));
        }
        let Some(done_output) = find(&config.outputs, "DONE") else {
            return Err(load_error("countdown needs the output DONE of datatype INT32"));
        };
        Ok(Self {
            done: HashMap::new(),
            delay,
            done_output,
            together_output: find(&config.outputs, "TOGETHER"),
            batches: config.batches(),
            decoupled: config.decoupled,
        })
    }
}

impl Backend for Countdown {
    fn engine(&self) -> String {
        crate::engine()
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let input =
            batch.inputs.first().ok_or_else(|| run_error("countdown needs its input COUNT"))?;
        let (counts, _) = input.data.as_chunks();
        let in_sequences =
            batch.requests.iter().filter(|request| request.sequence.is_some()).count();
        let together = i32::try_from(in_sequences).unwrap_or(i32::MAX);
        thread::sleep(self.delay);
        let mut done_by_request = Vec::with_capacity(batch.requests.len());
        for (position, (request, count)) in batch.requests.iter().zip(counts).enumerate() {
            let Some(step) = request.sequence else {
                done_by_request.push(0);
                continue;
            };
            let entry = self.done.entry(step.key).or_default();
            *entry += 1;
            let done = *entry;
            let is_last = done >= i32::from_le_bytes(*count);
            done_by_request.push(done);
            if is_last {
                self.done.remove(&step.key);
            } else {
                outputs.reschedule(position)?;
            }
            if self.decoupled {
                self.respond(batch, outputs, position, &Execution { done, together, is_last })?;
            }
        }
        if self.decoupled {
            return Ok(());
        }
        let rows = done_by_request.len();
        self.write_all(batch, outputs, self.done_output, &done_by_request)?;
        if let Some(output) = self.together_output {
            self.write_all(batch, outputs, output, &vec![together; rows])?;
        }
        Ok(())
    }

    fn sequence_ended(&mut self, key: u64) {
        self.done.remove(&key);
    }
}

impl Countdown {
    /// Writes one value for each request, if the output is wanted.
    fn write_all(
        &self,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
        output: usize,
        values: &[i32],
    ) -> Result<(), InferError> {
        if !batch.wants(output) {
            return Ok(());
        }
        let rows = i64::try_from(values.len()).unwrap_or(i64::MAX);
        let shape = if self.batches { vec![rows, 1] } else { vec![rows] };
        let out = outputs.allocate_fixed(output, DataType::Int32, &shape)?;
        for (place, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
            *place = value.to_le_bytes();
        }
        Ok(())
    }

    /// Sends one response of a decoupled model.
    fn respond(
        &self,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
        position: usize,
        execution: &Execution,
    ) -> Result<(), InferError> {
        let mut response = match outputs.response(position) {
            Ok(response) => response,
            // The request is cancelled.
            Err(error) if error.code == ErrorCode::Cancelled => return Ok(()),
            Err(error) => return Err(error),
        };
        let shape: &[i64] = if self.batches { &[1, 1] } else { &[1] };
        if batch.wants(self.done_output) {
            let out = response.allocate_fixed(self.done_output, DataType::Int32, shape)?;
            out.copy_from_slice(&execution.done.to_le_bytes());
        }
        if let Some(output) = self.together_output.filter(|output| batch.wants(*output)) {
            let out = response.allocate_fixed(output, DataType::Int32, shape)?;
            out.copy_from_slice(&execution.together.to_le_bytes());
        }
        if execution.is_last { response.send_last() } else { response.send() }
    }
}
