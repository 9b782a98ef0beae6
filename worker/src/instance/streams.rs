//! Responses of decoupled models: any number for each request of a batch, sent while the batch is executed.
//!
//! The frontend gives each request [`CREDITS`]: so many of its responses may be unread. When they are used up, the backend
//! waits here, and with it the whole batch, for the worker has one thread. While it waits the socket is read: credits are
//! counted, memory that clients have read is taken back, everything else is kept for later. The wait ends with the
//! request's credit, when nobody wants its responses any more, or when the process is to stop.

use pharos::error::InferError;
use pharos::infer::{Parameter, Parameters};
use pharos::tensor::{DataType, byte_size};
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::{self, CREDITS, Credits, Execute, OutputBlock, Resumed, ToFrontend, ToWorker};

use super::{Outputs, new_block, wire_error};
use crate::backend::run_error;
use crate::clock;
use crate::memory::Flags;
use crate::wire::Connection;

/// The responses of a batch that is being executed.
pub(super) struct Streams<'a> {
    connection: &'a mut Connection,
    flags: Flags<'a>,
    batch: u64,
    requests: Vec<Stream>,
    /// Nobody will read any more: the process ends.
    stopping: bool,
}

/// The responses of one request.
#[derive(Clone, Default)]
struct Stream {
    /// In earlier batches too.
    sent: u64,
    /// How many of them the client has taken, as far as is known.
    taken: u64,
    ended: bool,
}

impl<'a> Streams<'a> {
    pub(super) fn new(connection: &'a mut Connection, flags: Flags<'a>, execute: &Execute) -> Self {
        let mut requests = vec![Stream::default(); execute.requests.len()];
        for &Resumed { request, sent, taken } in &execute.resumed {
            if let Some(stream) = requests.get_mut(request as usize) {
                *stream = Stream { sent, taken, ended: false };
            }
        }
        Self { connection, flags, batch: execute.batch, requests, stopping: false }
    }

    fn stream(&mut self, request: usize) -> Result<&mut Stream, InferError> {
        let count = self.requests.len();
        let stream = self.requests.get_mut(request);
        let stream = stream.ok_or_else(|| run_error(format!("there is no request {request} in a batch of {count}")))?;
        if stream.ended {
            return Err(run_error(format!("request {request} of the batch has had its last response")));
        }
        Ok(stream)
    }

    /// Counts what clients have taken of this batch.
    fn take_credits(&mut self, credits: &Credits) {
        if credits.batch == self.batch
            && let Some(stream) = self.requests.get_mut(credits.request as usize)
        {
            stream.taken = stream.taken.max(credits.taken);
        }
    }

    fn send(&mut self, response: wire::Response) {
        if self.connection.send(&ToFrontend::Response(response)).is_err() {
            // The main loop meets the broken connection too, and ends the process.
            self.stopping = true;
        }
    }
}

/// A response in the making, of one request of a decoupled model. Dropped, it is not sent.
pub struct Response<'o, 'a> {
    outputs: &'o mut Outputs<'a>,
    request: u32,
    blocks: Vec<OutputBlock>,
    parameters: Parameters,
    output_start: Instant,
}

impl<'a> Outputs<'a> {
    /// Begins a response to the request at this position of the batch, as soon as its client has read enough of the
    /// earlier ones. For models with the decoupled transaction policy; each request may have any number of them.
    ///
    /// A request that has no last response when the batch ends is ended then: by the batch's error, else by what was
    /// [allocated](Outputs::allocate) for the batch if it has had no response before, else without another response.
    ///
    /// # Errors
    /// [`InferError::cancelled`] when nobody waits for the request any more: its backend should turn to the others. The
    /// model is not decoupled, there is no such request, or it has had its last response.
    pub fn response(&mut self, request: usize) -> Result<Response<'_, 'a>, InferError> {
        // Before the wait, so that a slow reader is not counted as computing.
        let output_start = clock::now();
        self.wait_for_credit(request)?;
        let request = u32::try_from(request).map_err(|_| run_error("too many requests"))?;
        Ok(Response { outputs: self, request, blocks: Vec::new(), parameters: Vec::new(), output_start })
    }

    /// Ends the responses to a request, without another one.
    ///
    /// # Errors
    /// The model is not decoupled, there is no such request, or it has had its last response.
    pub fn finish(&mut self, request: usize) -> Result<(), InferError> {
        let now = clock::now();
        self.end(request, now, None)
    }

    /// Ends the responses to a request with an error.
    pub(super) fn fail_stream(&mut self, request: usize, error: InferError) {
        let now = clock::now();
        // One that has ended already has no place for an error.
        let _ = self.end(request, now, Some(wire_error(error)));
    }

    fn end(&mut self, request: usize, now: Instant, error: Option<wire::WireError>) -> Result<(), InferError> {
        let stamps = self.response_stamps(now, now);
        let streams = self.streams.as_mut().ok_or_else(not_decoupled)?;
        streams.stream(request)?.ended = true;
        let (batch, empty) = (streams.batch, error.is_none());
        let request = u32::try_from(request).unwrap_or(u32::MAX);
        let (outputs, parameters) = (Vec::new(), Vec::new());
        streams.send(wire::Response { batch, request, outputs, parameters, error, last: true, empty, stamps });
        Ok(())
    }

    fn response_stamps(&self, output_start: Instant, end: Instant) -> ComputeStamps {
        let input_end = self.input_end.unwrap_or(self.start);
        ComputeStamps { start: self.start, input_end, output_start: output_start.max(input_end), end }
    }

    fn wait_for_credit(&mut self, request: usize) -> Result<(), InferError> {
        let streams = self.streams.as_mut().ok_or_else(not_decoupled)?;
        loop {
            let &mut Stream { sent, taken, .. } = streams.stream(request)?;
            if streams.stopping || streams.flags.is_set(request) {
                return Err(InferError::cancelled());
            }
            if sent.saturating_sub(taken) < CREDITS.into() {
                return Ok(());
            }
            match streams.connection.read() {
                Ok(Some(ToWorker::Credits(credits))) => {
                    self.arena.release(&credits.released);
                    streams.take_credits(&credits);
                }
                Ok(Some(ToWorker::Release(offsets))) => self.arena.release(&offsets),
                Ok(Some(frame)) => {
                    streams.stopping |= frame == ToWorker::Shutdown;
                    streams.connection.keep(frame);
                }
                Ok(None) | Err(_) => streams.stopping = true,
            }
        }
    }
}

fn not_decoupled() -> InferError {
    run_error("the model answers each request once: its model_transaction_policy is not decoupled")
}

impl Response<'_, '_> {
    /// Memory for the output at this position of the configuration, for this request alone; its content is undefined. The
    /// shape begins with the request's rows if the model batches.
    ///
    /// # Errors
    /// The output arena is full.
    pub fn allocate(
        &mut self,
        output: usize,
        datatype: DataType,
        shape: &[i64],
        len: usize,
    ) -> Result<&mut [u8], InferError> {
        let (block, memory) = new_block(self.outputs.arena, (output, datatype), shape, len)?;
        self.blocks.push(block);
        Ok(memory)
    }

    /// [`Response::allocate`] for a datatype of fixed size: the length follows from the shape.
    ///
    /// # Errors
    /// As [`Response::allocate`]; also a shape with a negative dimension, or the datatype BYTES.
    pub fn allocate_fixed(
        &mut self,
        output: usize,
        datatype: DataType,
        shape: &[i64],
    ) -> Result<&mut [u8], InferError> {
        let len = byte_size(datatype, shape).and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or_else(|| run_error(format!("output {output} has no size: {datatype} {shape:?}")))?;
        self.allocate(output, datatype, shape, len)
    }

    /// Adds a parameter.
    pub fn parameter(&mut self, name: &str, value: Parameter) {
        self.parameters.push((name.to_owned(), value));
    }

    /// Sends it; more may follow.
    ///
    /// # Errors
    /// As [`Outputs::response`].
    pub fn send(self) -> Result<(), InferError> {
        self.leave(None, false)
    }

    /// Sends it as the request's last.
    ///
    /// # Errors
    /// As [`Outputs::response`].
    pub fn send_last(self) -> Result<(), InferError> {
        self.leave(None, true)
    }

    /// Sends an error in its place; more may follow. The error that ends a request is [`Outputs::fail`].
    ///
    /// # Errors
    /// As [`Outputs::response`].
    pub fn send_error(mut self, error: InferError) -> Result<(), InferError> {
        self.withdraw();
        self.leave(Some(error), false)
    }

    fn leave(mut self, mut error: Option<InferError>, last: bool) -> Result<(), InferError> {
        if error.is_none()
            && let Err(unplaced) = self.outputs.place_response(self.request, &self.blocks)
        {
            self.withdraw();
            error = Some(unplaced);
        }
        let stamps = self.outputs.response_stamps(self.output_start, clock::now());
        let streams = self.outputs.streams.as_mut().ok_or_else(not_decoupled)?;
        let stream = streams.stream(self.request as usize)?;
        stream.sent += 1;
        stream.ended = last;
        let (outputs, parameters) = (std::mem::take(&mut self.blocks), std::mem::take(&mut self.parameters));
        let (batch, request, error) = (streams.batch, self.request, error.map(wire_error));
        streams.send(wire::Response { batch, request, outputs, parameters, error, last, empty: false, stamps });
        Ok(())
    }

    fn withdraw(&mut self) {
        let offsets: Vec<u64> = self.blocks.drain(..).map(|block| block.offset).collect();
        self.outputs.arena.release(&offsets);
    }
}

impl Drop for Response<'_, '_> {
    fn drop(&mut self) {
        self.withdraw();
    }
}

#[cfg(test)]
#[path = "streams_tests.rs"]
mod tests;
