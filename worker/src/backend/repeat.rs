//! The function `repeat` of decoupled models: one response for each element of an input, as in Triton's example
//! `repeat_int32` of its Python backend.
//!
//! | tensor | meaning |
//! |---|---|
//! | input `IN` | `[n]`, any datatype of fixed size: the elements; `[rows, n]` if the model batches |
//! | input `DELAY` | `[n]` UINT32: milliseconds before each response; optional |
//! | input `WAIT` | `[1]` UINT32: milliseconds from the last response to the end of the batch; optional |
//! | output `OUT` | `[copies]`, with the datatype of `IN`: the element of the response |
//! | output `IDX` | `[1]` UINT32: the response's number; optional in the configuration |
//!
//! | parameter | meaning |
//! |---|---|
//! | `copies` | number of copies of the element in `OUT`; default 1 |
//! | `final` | `with`: the last response is marked as the last; otherwise an empty one follows it |
//! | `parameters` | `true`: responses carry the parameter `index` |
//! | `sequence` | a number: responses are steps of this sequence, from start to end, for use in ensembles |
//! | `error_at` | the response with this number is an error; others follow |
//! | `fail_at` | the request fails instead of the response with this number |
//! | `crash_at` | the process aborts instead of the response with this number |
//!
//! The requests of a batch are answered in turn: the first response of each, the second of each, and so on.

use std::thread;
use std::time::Duration;

use pharos::error::{ErrorCode, InferError};
use pharos::infer::Parameter;
use pharos::tensor::DataType;
use pharos_backend::runtime::clock;
use pharos_backend::{Batch, Context, Input, Outputs, load_error, run_error};

use super::delay::CHECK_INTERVAL;

/// Responds once for each element.
pub(super) struct Repeat {
    out: usize,
    index: Option<usize>,
    copies: usize,
    last_alone: bool,
    parameters: bool,
    sequence: Option<i64>,
    batches: bool,
    error_at: Option<u64>,
    fail_at: Option<u64>,
    crash_at: Option<u64>,
}

impl Repeat {
    /// Finds the tensors in the configuration.
    ///
    /// # Errors
    /// A tensor is missing, or a parameter is not a number.
    pub(super) fn create(context: &Context<'_>) -> Result<Self, InferError> {
        let config = context.config;
        let output = |name: &str| config.outputs.iter().position(|output| output.name == name);
        let text = |name: &str| config.parameters.get(name).map(String::as_str);
        let number = |name: &str| {
            let wrong = |text| load_error(format!("parameter '{name}' is '{text}'; it must be a whole number"));
            text(name).map(|text| text.parse::<u64>().map_err(|_| wrong(text))).transpose()
        };
        if !config.inputs.iter().any(|input| input.name == "IN" && input.datatype != DataType::Bytes) {
            return Err(load_error("repeat needs an input 'IN' of a datatype of fixed size"));
        }
        Ok(Self {
            out: output("OUT").ok_or_else(|| load_error("repeat needs an output 'OUT'"))?,
            index: output("IDX"),
            copies: usize::try_from(number("copies")?.unwrap_or(1)).unwrap_or(1),
            last_alone: text("final") != Some("with"),
            parameters: text("parameters") == Some("true"),
            sequence: number("sequence")?.map(u64::cast_signed),
            batches: config.max_batch_size > 0,
            error_at: number("error_at")?,
            fail_at: number("fail_at")?,
            crash_at: number("crash_at")?,
        })
    }

    /// Answers the requests of a batch.
    ///
    /// # Errors
    /// There is no input to repeat, or no memory for outputs.
    pub(super) fn execute(&self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let input = |name: &str| batch.inputs.iter().find(|input| input.name == name);
        let element = input("IN").ok_or_else(|| run_error("repeat needs its input 'IN'"))?;
        let rows = usize::try_from(batch.rows()).unwrap_or(1).max(1);
        let rows = if self.batches { rows } else { 1 };
        let size = element.datatype.size().ok_or_else(|| run_error("repeat does not support BYTES"))?;
        let count = element.data.len() / size / rows;
        outputs.inputs_ready();
        let mut live: Vec<bool> = vec![true; batch.requests.len()];
        for number in 0..count {
            wait(milliseconds(input("DELAY"), number), batch);
            let mut row = 0;
            for (position, request) in batch.requests.iter().enumerate() {
                let rows_here = if self.batches { request.rows as usize } else { 1 };
                if live[position] {
                    let piece = Piece { input: element, size, count, rows: row..row + rows_here };
                    live[position] = self.answer(batch, outputs, (position, number), &piece)?;
                }
                row += rows_here;
            }
        }
        for position in (0..batch.requests.len()).filter(|position| live[*position]) {
            if self.last_alone || count == 0 {
                outputs.finish(position)?;
            }
        }
        wait(milliseconds(input("WAIT"), 0), batch);
        Ok(())
    }

    /// Sends one response to one request. Returns whether more may follow.
    fn answer(
        &self,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
        (position, number): (usize, usize),
        piece: &Piece<'_>,
    ) -> Result<bool, InferError> {
        let index = Some(number as u64);
        if index == self.crash_at {
            std::process::abort();
        }
        if index == self.fail_at {
            outputs.fail(position, run_error(format!("requested failure at response {number}")));
            return Ok(false);
        }
        let mut response = match outputs.response(position) {
            Ok(response) => response,
            // The request is cancelled; the others of the batch continue.
            Err(error) if error.code == ErrorCode::Cancelled => return Ok(false),
            Err(error) => return Err(error),
        };
        if index == self.error_at {
            response.send_error(run_error(format!("requested error at response {number}")))?;
            return Ok(true);
        }
        let rows = self.batches.then_some(piece.rows.len() as i64);
        let shape = |dims: i64| rows.into_iter().chain([dims]).collect::<Vec<i64>>();
        if batch.wants(self.out) {
            let shape = shape(i64::try_from(self.copies).unwrap_or(i64::MAX));
            let out = response.allocate_fixed(self.out, piece.input.datatype, &shape)?;
            piece.copy(number, self.copies, out);
        }
        if let Some(output) = self.index.filter(|output| batch.wants(*output)) {
            let out = response.allocate_fixed(output, DataType::Uint32, &shape(1))?;
            let (elements, _) = out.as_chunks_mut();
            elements.fill(u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes());
        }
        if self.parameters {
            response.parameter("index", Parameter::Int(i64::try_from(number).unwrap_or(i64::MAX)));
        }
        if let Some(id) = self.sequence {
            response.parameter("sequence_id", Parameter::Int(id));
            response.parameter("sequence_start", Parameter::Bool(number == 0));
            response.parameter("sequence_end", Parameter::Bool(number + 1 == piece.count));
        }
        if !self.last_alone && number + 1 == piece.count {
            response.send_last()?;
            return Ok(false);
        }
        response.send().map(|()| true)
    }
}

/// The rows of one request in the input of the batch.
struct Piece<'a> {
    input: &'a Input<'a>,
    /// The size of an element in bytes.
    size: usize,
    /// The number of elements in a row.
    count: usize,
    rows: std::ops::Range<usize>,
}

impl Piece<'_> {
    /// Writes the element with this number of each row `copies` times.
    fn copy(&self, number: usize, copies: usize, out: &mut [u8]) {
        let per_row = (copies * self.size).max(1);
        for (row, out) in self.rows.clone().zip(out.chunks_mut(per_row)) {
            let start = (row * self.count + number) * self.size;
            let element = self.input.data.get(start..start + self.size).unwrap_or_default();
            out.chunks_exact_mut(self.size).for_each(|place| place.copy_from_slice(element));
        }
    }
}

/// Returns the value at this position of an input.
fn milliseconds(input: Option<&Input<'_>>, number: usize) -> Duration {
    let elements = input.map(|input| input.data.as_chunks::<4>().0).unwrap_or_default();
    Duration::from_millis(elements.get(number).map_or(0, |element| u64::from(u32::from_le_bytes(*element))))
}

/// Waits for this duration, or until the batch is cancelled.
fn wait(duration: Duration, batch: &Batch<'_>) {
    let end = clock::now() + duration;
    loop {
        let left = end - clock::now();
        if left.is_zero() || batch.all_cancelled() {
            return;
        }
        thread::sleep(left.min(CHECK_INTERVAL));
    }
}
