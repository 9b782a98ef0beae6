//! The function `countdown` of iterative sequences: executes a request the number of times that it asks for, as a language model
//! does for each token. A decoupled model responds at each execution, another model at the last.
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

struct Countdown {
    /// Executions so far, by sequence key.
    done: HashMap<u64, i32>,
    delay: Duration,
    /// Positions of `DONE` and `TOGETHER` in the configuration.
    outputs: (usize, Option<usize>),
    batches: bool,
    decoupled: bool,
}

/// Creates the function for a configuration; each batch takes `delay`.
///
/// # Errors
/// A tensor is missing or has another datatype.
pub(super) fn create(config: &ModelConfig, delay: Duration) -> Result<Box<dyn Backend>, InferError> {
    let find = |tensors: &[TensorSpec], name: &str| {
        tensors.iter().position(|tensor| tensor.name == name && tensor.datatype == DataType::Int32)
    };
    if find(&config.inputs, "COUNT") != Some(0) || config.inputs.len() != 1 {
        return Err(load_error("countdown takes one input, COUNT of datatype INT32"));
    }
    let done = find(&config.outputs, "DONE");
    Ok(Box::new(Countdown {
        done: HashMap::new(),
        delay,
        outputs: (
            done.ok_or_else(|| load_error("countdown needs the output DONE of datatype INT32"))?,
            find(&config.outputs, "TOGETHER"),
        ),
        batches: config.batches(),
        decoupled: config.decoupled,
    }))
}

impl Backend for Countdown {
    fn engine(&self) -> String {
        concat!("builtin ", env!("CARGO_PKG_VERSION")).to_owned()
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let input = batch.inputs.first().ok_or_else(|| run_error("countdown needs its input COUNT"))?;
        let (counts, _) = input.data.as_chunks();
        let together = batch.requests.iter().filter(|request| request.sequence.is_some()).count();
        let together = i32::try_from(together).unwrap_or(i32::MAX);
        thread::sleep(self.delay);
        let mut answers = Vec::with_capacity(batch.requests.len());
        for (position, (request, count)) in batch.requests.iter().zip(counts).enumerate() {
            let Some(step) = request.sequence else {
                answers.push(0);
                continue;
            };
            let done = self.done.entry(step.key).or_default();
            *done += 1;
            let (done, last) = (*done, *done >= i32::from_le_bytes(*count));
            answers.push(done);
            if last {
                self.done.remove(&step.key);
            } else {
                outputs.reschedule(position)?;
            }
            if self.decoupled {
                self.respond(batch, outputs, (position, [done, together], last))?;
            }
        }
        if !self.decoupled {
            for (output, values) in self.wanted(batch, [&answers, &vec![together; answers.len()]]) {
                let rows = i64::try_from(answers.len()).unwrap_or(i64::MAX);
                let shape = if self.batches { vec![rows, 1] } else { vec![rows] };
                let out = outputs.allocate_fixed(output, DataType::Int32, &shape)?;
                out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(out, value)| *out = value.to_le_bytes());
            }
        }
        Ok(())
    }

    fn sequence_ended(&mut self, key: u64) {
        self.done.remove(&key);
    }
}

impl Countdown {
    /// Returns the wanted outputs, each with its value.
    fn wanted<T>(&self, batch: &Batch<'_>, [done, together]: [T; 2]) -> Vec<(usize, T)> {
        let both = [(Some(self.outputs.0), done), (self.outputs.1, together)];
        let wanted = |(output, value): (Option<usize>, T)| Some((output.filter(|output| batch.wants(*output))?, value));
        both.into_iter().filter_map(wanted).collect()
    }

    /// Sends one response of a decoupled model.
    fn respond(
        &self,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
        (position, values, last): (usize, [i32; 2], bool),
    ) -> Result<(), InferError> {
        let mut response = match outputs.response(position) {
            Ok(response) => response,
            // The request is cancelled.
            Err(error) if error.code == ErrorCode::Cancelled => return Ok(()),
            Err(error) => return Err(error),
        };
        let shape: &[i64] = if self.batches { &[1, 1] } else { &[1] };
        for (output, value) in self.wanted(batch, values) {
            response.allocate_fixed(output, DataType::Int32, shape)?.copy_from_slice(&value.to_le_bytes());
        }
        if last { response.send_last() } else { response.send() }
    }
}
