//! The function `repeat` of decoupled models: one response for each element of an input, as in
//! Triton's example `repeat_int32` of its Python backend.
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
//! The requests of a batch are answered in turn: the first response of each, the second of each,
//! and so on.

use std::ops::Range;
use std::time::Duration;

use pharos::error::{ErrorCode, InferError};
use pharos::infer::Parameter;
use pharos::tensor::DataType;
use pharos_backend::{Backend, Batch, Context, Input, Outputs, load_error, run_error};

use crate::{number, wait};

/// Responds once for each element.
pub(crate) struct Repeat {
    /// The position of `OUT` in the configuration.
    out: usize,
    /// The position of `IDX` in the configuration.
    index: Option<usize>,
    copies: usize,
    /// Whether an empty response follows the last one.
    ends_empty: bool,
    has_parameters: bool,
    sequence: Option<i64>,
    batches: bool,
    error_at: Option<u64>,
    fail_at: Option<u64>,
    crash_at: Option<u64>,
}

/// The rows of one request in the input of the batch.
struct Part<'a> {
    input: &'a Input<'a>,
    /// The size of an element in bytes.
    size: usize,
    /// The number of elements in a row.
    count: usize,
    rows: Range<usize>,
}

impl Repeat {
    /// Finds the tensors in the configuration.
    ///
    /// # Errors
    /// A tensor is missing, or a parameter is not a number.
    pub(crate) fn new(context: &Context<'_>) -> Result<Self, InferError> {
        let config = context.config;
        let output = |name: &str| config.outputs.iter().position(|output| output.name == name);
        let parameter = |name: &str| config.parameters.get(name).map(String::as_str);
        if !config
            .inputs
            .iter()
            .any(|input| input.name == "IN" && input.datatype != DataType::Bytes)
        {
            return Err(load_error("repeat needs an input 'IN' of a datatype of fixed size"));
        }
        Ok(Self {
            out: output("OUT").ok_or_else(|| load_error("repeat needs an output 'OUT'"))?,
            index: output("IDX"),
            copies: usize::try_from(number(context, "copies")?.unwrap_or(1)).unwrap_or(1),
            ends_empty: parameter("final") != Some("with"),
            has_parameters: parameter("parameters") == Some("true"),
            sequence: number(context, "sequence")?.map(u64::cast_signed),
            batches: config.max_batch_size > 0,
            error_at: number(context, "error_at")?,
            fail_at: number(context, "fail_at")?,
            crash_at: number(context, "crash_at")?,
        })
    }
}

impl Backend for Repeat {
    fn engine(&self) -> String {
        crate::engine()
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let find = |name: &str| batch.inputs.iter().find(|input| input.name == name);
        let input = find("IN").ok_or_else(|| run_error("repeat needs its input 'IN'"))?;
        let size =
            input.datatype.size().ok_or_else(|| run_error("repeat does not support BYTES"))?;
        let rows = if self.batches { usize::try_from(batch.rows()).unwrap_or(1).max(1) } else { 1 };
        let count = input.data.len() / size / rows;
        outputs.inputs_ready();
        let mut is_open: Vec<bool> = vec![true; batch.requests.len()];
        for number in 0..count {
            wait(milliseconds(find("DELAY"), number), batch);
            let mut row = 0;
            for (position, request) in batch.requests.iter().enumerate() {
                let rows_of_request = if self.batches { request.rows as usize } else { 1 };
                if is_open[position] {
                    let part = Part { input, size, count, rows: row..row + rows_of_request };
                    is_open[position] = self.respond(batch, outputs, position, number, &part)?;
                }
                row += rows_of_request;
            }
        }
        for position in (0..batch.requests.len()).filter(|position| is_open[*position]) {
            if self.ends_empty || count == 0 {
                outputs.finish(position)?;
            }
        }
        wait(milliseconds(find("WAIT"), 0), batch);
        Ok(())
    }
}

impl Repeat {
    /// Sends the response with this number to one request. Returns whether more may follow.
    fn respond(
        &self,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
        position: usize,
        number: usize,
        part: &Part<'_>,
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
        let rows = self.batches.then_some(part.rows.len() as i64);
        let shape = |dims: i64| rows.into_iter().chain([dims]).collect::<Vec<i64>>();
        if batch.wants(self.out) {
            let copies = i64::try_from(self.copies).unwrap_or(i64::MAX);
            let out = response.allocate_fixed(self.out, part.input.datatype, &shape(copies))?;
            part.copy(number, self.copies, out);
        }
        if let Some(output) = self.index.filter(|output| batch.wants(*output)) {
            let out = response.allocate_fixed(output, DataType::Uint32, &shape(1))?;
            out.as_chunks_mut().0.fill(u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes());
        }
        if self.has_parameters {
            response.parameter("index", Parameter::Int(i64::try_from(number).unwrap_or(i64::MAX)));
        }
        let is_last = number + 1 == part.count;
        if let Some(id) = self.sequence {
            response.parameter("sequence_id", Parameter::Int(id));
            response.parameter("sequence_start", Parameter::Bool(number == 0));
            response.parameter("sequence_end", Parameter::Bool(is_last));
        }
        if is_last && !self.ends_empty {
            response.send_last()?;
            return Ok(false);
        }
        response.send()?;
        Ok(true)
    }
}

impl Part<'_> {
    /// Writes the element with this number of each row `copies` times.
    fn copy(&self, number: usize, copies: usize, out: &mut [u8]) {
        let bytes_per_row = (copies * self.size).max(1);
        for (row, out) in self.rows.clone().zip(out.chunks_mut(bytes_per_row)) {
            let start = (row * self.count + number) * self.size;
            let element = self.input.data.get(start..start + self.size).unwrap_or_default();
            out.chunks_exact_mut(self.size).for_each(|place| place.copy_from_slice(element));
        }
    }
}

/// Returns the value at this position of an input.
fn milliseconds(input: Option<&Input<'_>>, number: usize) -> Duration {
    let elements = input.map(|input| input.data.as_chunks::<4>().0).unwrap_or_default();
    Duration::from_millis(
        elements.get(number).map_or(0, |element| u64::from(u32::from_le_bytes(*element))),
    )
}
