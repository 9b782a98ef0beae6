//! Responses of decoupled models: any number for each request of a batch, sent while the batch is
//! executed.
//!
//! The frontend limits the unread responses of each request to [`CREDITS`](pharos::wire::CREDITS).
//! When they are used up, the backend waits here, which blocks the whole batch. While it waits, the
//! socket is read: credits are counted, memory that clients have read is released, all other
//! messages are kept for later. The wait ends when the request gets credit, when it is cancelled,
//! or when the process is to stop.

use pharos::error::InferError;
use pharos::infer::{Parameter, Parameters};
use pharos::tensor::DataType;
use pharos::timeline::Instant;
use pharos::wire::OutputBlock;

use super::Outputs;
use crate::blocks::{OutputTensor, fixed_size};
use crate::clock;
use crate::error::{run_error, wire_error};
use crate::streams::ResponseContent;

/// A response to one request of a decoupled model that is being built. Dropping it without sending
/// discards it.
pub struct Response<'o, 'a> {
    outputs: &'o mut Outputs<'a>,
    request: u32,
    blocks: Vec<OutputBlock>,
    parameters: Parameters,
    output_start: Instant,
}

impl<'a> Outputs<'a> {
    /// Begins a response to the request at this position of the batch, after waiting until its
    /// client has read enough of the earlier ones. For models with the decoupled transaction
    /// policy; each request may have any number of responses.
    ///
    /// A request without a last response at the end of the batch is ended then: by the batch's
    /// error; otherwise, if it has had no response, by the outputs [allocated](Outputs::allocate)
    /// for the batch; otherwise without another response.
    ///
    /// # Errors
    /// [`InferError::cancelled`] if the request is cancelled; the backend should then continue with
    /// the others. Also fails if the model is not decoupled, there is no such request, or it has
    /// had its last response.
    pub fn response(&mut self, request: usize) -> Result<Response<'_, 'a>, InferError> {
        // Stamped before the wait, so that a slow client is not counted as compute time.
        let output_start = clock::now();
        self.wait_for_credit(request)?;
        let request = u32::try_from(request).map_err(|_| run_error("too many requests"))?;
        Ok(Response {
            outputs: self,
            request,
            blocks: Vec::new(),
            parameters: Vec::new(),
            output_start,
        })
    }

    /// Ends the responses to a request without sending another one.
    ///
    /// # Errors
    /// The model is not decoupled, there is no such request, or it has had its last response.
    pub fn finish(&mut self, request: usize) -> Result<(), InferError> {
        let now = clock::now();
        self.end_stream(request, now, None)
    }

    fn wait_for_credit(&mut self, request: usize) -> Result<(), InferError> {
        self.session.connection.wait_for_credit(self.streamed(request)?)
    }
}

impl Response<'_, '_> {
    /// Allocates memory for the output at this position of the configuration, for this request
    /// only; its content is undefined. The shape begins with the request's rows if the model
    /// batches.
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
        let (block, memory) =
            OutputTensor { output, datatype, shape, len }.allocate(self.outputs.arena)?;
        self.blocks.push(block);
        Ok(memory)
    }

    /// Like [`Response::allocate`], for a datatype of fixed size: the length is computed from the
    /// shape.
    ///
    /// # Errors
    /// As for [`Response::allocate`]; also a shape with a negative dimension, or the datatype
    /// BYTES.
    pub fn allocate_fixed(
        &mut self,
        output: usize,
        datatype: DataType,
        shape: &[i64],
    ) -> Result<&mut [u8], InferError> {
        self.allocate(output, datatype, shape, fixed_size(output, datatype, shape)?)
    }

    /// Adds a parameter.
    pub fn parameter(&mut self, name: &str, value: Parameter) {
        self.parameters.push((name.to_owned(), value));
    }

    /// Sends the response; more may follow.
    ///
    /// # Errors
    /// As for [`Outputs::response`].
    pub fn send(self) -> Result<(), InferError> {
        self.leave(None, false)
    }

    /// Sends the response as the request's last.
    ///
    /// # Errors
    /// As for [`Outputs::response`].
    pub fn send_last(self) -> Result<(), InferError> {
        self.leave(None, true)
    }

    /// Sends an error instead of the response; more may follow. Use [`Outputs::fail`] for an error
    /// that ends the request.
    ///
    /// # Errors
    /// As for [`Outputs::response`].
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
        let outputs = std::mem::take(&mut self.blocks);
        let parameters = std::mem::take(&mut self.parameters);
        let place = (self.outputs.execute.batch, self.request);
        let error = error.map(wire_error);
        let content = ResponseContent {
            outputs,
            parameters,
            error,
            last,
            empty: false,
            output_start: self.output_start,
        };
        self.outputs.session.connection.send_response(place, content)
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
