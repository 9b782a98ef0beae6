//! The outputs of one batch, and the outcome of each of its requests.

mod finish;
mod parts;
mod placement;
mod response;

use std::sync::Arc;
use std::time::Duration;

use pharos::error::InferError;
use pharos::infer::{Parameter, Parameters};
use pharos::model::ModelConfig;
use pharos::tensor::{DataType, byte_size};
use pharos::timeline::Instant;
use pharos::wire::{Execute, OutputBlock, WireError};

use crate::blocks::{OutputTensor, fixed_size};
use crate::client_memory::{ClientMemory, OutputMemory};
use crate::clock;
use crate::deferred::merge;
use crate::device::DeviceMemory;
use crate::error::{run_error, wire_error};
use crate::memory::{InputArena, OutputArena};
use crate::metrics::Metrics;
use crate::received::Received;
use crate::responder::Responder;
use crate::session::Session;
use crate::streams::{RequestPlace, ResponseContent};

pub use finish::Finished;
pub use parts::MadeOutput;
pub use response::Response;

/// The outputs of one batch: memory, stamps, and requests that failed.
pub struct Outputs<'a> {
    session: &'a Arc<Session>,
    arena: &'a OutputArena,
    config: &'a ModelConfig,
    execute: &'a Execute,
    blocks: Vec<OutputBlock>,
    /// Offsets of blocks that belong to no answer.
    withdrawn: Vec<u64>,
    failed: Vec<(u32, WireError)>,
    rescheduled: Vec<u32>,
    /// The positions of the requests being executed; empty for the whole batch.
    part: Vec<u32>,
    /// The first of `blocks` that belongs to this part.
    part_from: usize,
    parameters: Vec<(u32, Parameters)>,
    /// Whether requests may be rescheduled.
    iterative: bool,
    /// Requests may be answered individually.
    registered: bool,
    /// Client memory, for a batch that uses it.
    client_memory: Option<ClientMemory<'a>>,
    start: Instant,
    input_end: Option<Instant>,
    output_start: Option<Instant>,
}

impl<'a> Outputs<'a> {
    /// Creates the outputs of a batch that begins at `start`. For the worker's runtime.
    #[doc(hidden)]
    pub fn new(session: &'a Arc<Session>, config: &'a ModelConfig, execute: &'a Execute, start: Instant) -> Self {
        Self {
            session,
            arena: &session.arenas.outputs,
            config,
            execute,
            blocks: Vec::new(),
            withdrawn: Vec::new(),
            failed: Vec::new(),
            rescheduled: Vec::new(),
            part: Vec::new(),
            part_from: 0,
            parameters: Vec::new(),
            iterative: config.has_iterative_sequences(),
            registered: false,
            client_memory: None,
            start,
            input_end: None,
            output_start: None,
        }
    }

    /// Registers the requests for individual answers. For the worker's runtime.
    #[doc(hidden)]
    pub fn register(&mut self) {
        if !std::mem::replace(&mut self.registered, true) {
            self.session.connection.batch_begins(self.execute, self.config.decoupled, self.start);
            if let Some(at) = self.input_end {
                self.session.connection.inputs_ready(self.execute.batch, at);
            }
        }
    }

    /// Detaches the request at this position from the batch: the backend sends its [responses](Responder::respond) itself, from
    /// any thread, even after the batch is over. Meanwhile the instance takes its next batch. If the batch fails as a whole, its
    /// requests that have not ended fail with it.
    ///
    /// # Errors
    /// There is no such request, it already has a responder, or the model has states, which are saved when a batch is over.
    pub fn detach(&mut self, request: usize) -> Result<Responder, InferError> {
        if !self.config.states.is_empty() {
            return Err(run_error("requests of a model with states are answered with their batch"));
        }
        self.register();
        Responder::new(self.session, (self.config, self.execute), u32::try_from(request).unwrap_or(u32::MAX))
    }

    /// Returns the metrics of this process. Samples that this thread records belong to the requests of the batch by default.
    pub fn metrics(&self) -> &'a Metrics {
        &self.session.metrics
    }

    /// Allocates memory for the output at this position of the configuration, over the whole batch; its content is undefined.
    ///
    /// # Errors
    /// The output arena is full, or the output is allocated already.
    pub fn allocate(
        &mut self,
        output: usize,
        datatype: DataType,
        shape: &[i64],
        len: usize,
    ) -> Result<&'a mut [u8], InferError> {
        let tensor = OutputTensor { output, datatype, shape, len };
        match self.allocate_tensor(tensor, false)? {
            OutputMemory::Host(memory) => Ok(memory),
            OutputMemory::Device(_) | OutputMemory::Pieces(_) => {
                Err(run_error(format!("output {output} is on a device")))
            }
        }
    }

    /// Like [`Outputs::allocate`], but on a device if a client wants the output there: for backends that can write to it
    /// directly. Their writes must be complete when they return.
    ///
    /// # Errors
    /// As for [`Outputs::allocate`].
    pub fn allocate_anywhere(
        &mut self,
        output: usize,
        datatype: DataType,
        shape: &[i64],
        len: usize,
    ) -> Result<OutputMemory<'a>, InferError> {
        self.allocate_tensor(OutputTensor { output, datatype, shape, len }, true)
    }

    fn allocate_tensor(
        &mut self,
        tensor: OutputTensor<'_>,
        may_be_on_device: bool,
    ) -> Result<OutputMemory<'a>, InferError> {
        let OutputTensor { output, len, .. } = tensor;
        let own = self.blocks.get(self.part_from..).unwrap_or_default();
        if own.iter().any(|block| usize::from(block.output) == output) {
            return Err(run_error(format!("output {output} is allocated already")));
        }
        if let Some(memory) = self.client_memory.as_mut().and_then(|memory| memory.take(output, len, may_be_on_device))
        {
            self.blocks.push(tensor.placed(self.part.clone())?);
            return Ok(memory);
        }
        if may_be_on_device && let Some(pieces) = self.allocate_pieces(tensor)? {
            return Ok(OutputMemory::Pieces(pieces));
        }
        let (mut block, memory) = tensor.allocate(self.arena)?;
        block.requests.clone_from(&self.part);
        self.blocks.push(block);
        Ok(OutputMemory::Host(memory))
    }

    /// Returns a location for each request's rows, if a client wants its rows on a device; all other rows are together in the
    /// arena.
    fn allocate_pieces(&mut self, tensor: OutputTensor<'_>) -> Result<Option<Vec<OutputMemory<'a>>>, InferError> {
        if !self.client_memory.as_ref().is_some_and(ClientMemory::splits_rows) {
            return Ok(None);
        }
        let Some(sizes) = row_sizes(self.config, self.execute, tensor) else { return Ok(None) };
        let on_device = (0..).zip(&sizes).map(|(request, (_, size))| match self.has_failed(request) {
            true => None,
            false => self.client_memory.as_mut()?.take_rows(request, tensor.output, *size as u64),
        });
        let on_device: Vec<Option<DeviceMemory>> = on_device.collect();
        if on_device.iter().all(Option::is_none) {
            return Ok(None);
        }
        let of_rows = |rows: u64| [&[rows.cast_signed()], tensor.shape.get(1..).unwrap_or_default()].concat();
        let others = || (0u32..).zip(sizes.iter().zip(&on_device)).filter(|(_, (_, place))| place.is_none());
        let (rows, size) = others().fold((0, 0), |(rows, size), (_, (own, _))| (rows + own.0, size + own.1));
        let requests: Vec<u32> = others().map(|(request, _)| request).collect();
        let mut rest: &mut [u8] = &mut [];
        if !requests.is_empty() {
            let others = OutputTensor { shape: &of_rows(rows), len: size, ..tensor };
            let (mut block, memory) = others.allocate(self.arena)?;
            (block.requests, rest) = (requests, memory);
            self.blocks.push(block);
        }
        let mut places = Vec::with_capacity(sizes.len());
        for (request, ((rows, size), memory)) in (0..).zip(sizes.into_iter().zip(on_device)) {
            let Some(memory) = memory else {
                let (own, after) = std::mem::take(&mut rest).split_at_mut_checked(size).unwrap_or_default();
                rest = after;
                places.push(OutputMemory::Host(own));
                continue;
            };
            let own = OutputTensor { shape: &of_rows(rows), len: size, ..tensor };
            self.blocks.push(own.placed(vec![request])?);
            places.push(OutputMemory::Device(memory));
        }
        Ok(Some(places))
    }

    /// Like [`Outputs::allocate`], for a datatype of fixed size: the length is computed from the shape.
    ///
    /// # Errors
    /// As for [`Outputs::allocate`]; also a shape with a negative dimension, or the datatype BYTES.
    pub fn allocate_fixed(
        &mut self,
        output: usize,
        datatype: DataType,
        shape: &[i64],
    ) -> Result<&'a mut [u8], InferError> {
        self.allocate(output, datatype, shape, fixed_size(output, datatype, shape)?)
    }

    /// Withdraws the output allocated at this position, so that it can be allocated again. The memory stays valid and in use
    /// until the batch is done.
    pub fn withdraw(&mut self, output: usize) {
        for block in self.blocks.extract_if(self.part_from.., |block| usize::from(block.output) == output) {
            if !block.in_client_memory {
                self.withdrawn.push(block.offset);
            }
        }
    }

    /// Sorts the outputs by their positions in the configuration. Responses have the order of the allocations otherwise. For
    /// backends whose order of allocation has no meaning to clients.
    pub fn sort(&mut self) {
        if let Some(own) = self.blocks.get_mut(self.part_from..) {
            own.sort_by_key(|block| block.output);
        }
    }

    /// Adds a parameter to the response of one request, given by its position in the batch.
    pub fn parameter(&mut self, request: usize, name: &str, value: Parameter) {
        let request = u32::try_from(request).unwrap_or(u32::MAX);
        merge(&mut self.parameters, request, vec![(name.to_owned(), value)]);
    }

    /// Fails one request, given by its position in the batch; the others are answered as usual. In a decoupled model, the error
    /// is the request's last response and is sent immediately.
    pub fn fail(&mut self, request: usize, error: InferError) {
        if self.config.decoupled {
            return self.fail_stream(request, error);
        }
        self.failed.push((self.position(request), wire_error(error)));
    }

    /// Reschedules a request: it is executed again as soon as an instance is available. For the iterative sequences of
    /// `sequence_batching { iterative_sequence }`, whose state is kept meanwhile. The request's outputs in this batch are
    /// discarded; in a decoupled model it may have had responses, but not its last.
    ///
    /// # Errors
    /// The model's sequences are not iterative; the text is Triton's.
    pub fn reschedule(&mut self, request: usize) -> Result<(), InferError> {
        if !self.iterative {
            return Err(run_error(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to \
                 handle such a flag.",
            ));
        }
        let position = self.position(request);
        if let Err(place) = self.rescheduled.binary_search(&position) {
            self.rescheduled.insert(place, position);
        }
        Ok(())
    }

    /// Converts a position in this part to the position in the whole batch.
    fn position(&self, request: usize) -> u32 {
        let whole = u32::try_from(request).unwrap_or(u32::MAX);
        if self.part.is_empty() { whole } else { self.part.get(request).copied().unwrap_or(u32::MAX) }
    }

    /// Stamps the time at which the inputs are where the model needs them. Without this call, that is the start of the batch.
    pub fn inputs_ready(&mut self) {
        if self.input_end.is_none() {
            let now = clock::now();
            self.input_end = Some(now);
            if self.registered {
                self.session.connection.inputs_ready(self.execute.batch, now);
            }
        }
    }

    /// Moves the stamp of [`Outputs::inputs_ready`] later by the time that a device has spent on input copies that the model
    /// began since, limited to the time of [`Outputs::computed`] or now.
    pub fn inputs_took(&mut self, more: Duration) {
        let latest = self.output_start.unwrap_or_else(clock::now);
        self.input_end = Some((self.input_end.unwrap_or(self.start) + more).min(latest));
    }

    /// Stamps the end of the computation. Without this call, that is the return of `execute`.
    pub fn computed(&mut self) {
        self.output_start = Some(clock::now());
    }

    /// Sets both stamps from times measured on the device: from `began`, copying the inputs took `inputs`, then the model ran for
    /// `computing`.
    #[doc(hidden)]
    pub fn measured(&mut self, began: Instant, inputs: Duration, computing: Duration) {
        let now = clock::now();
        let input_end = (began + inputs).min(now);
        self.input_end = Some(input_end);
        self.output_start = Some((input_end + computing).min(now));
        if self.registered {
            self.session.connection.inputs_ready(self.execute.batch, input_end);
        }
    }

    /// The number of the batch.
    #[doc(hidden)]
    pub fn batch(&self) -> u64 {
        self.execute.batch
    }

    /// Returns the number of the next batch, if it has already arrived, and those of its inputs that are in the arena.
    #[doc(hidden)]
    pub fn next_inputs(&self) -> Option<(u64, Vec<Received>)> {
        self.session.connection.next_inputs()
    }

    /// The arena of the inputs. For the worker's runtime.
    #[doc(hidden)]
    pub fn input_arena(&self) -> &'a InputArena {
        &self.session.arenas.inputs
    }

    /// Sets the client memory that the batch uses. For the worker's runtime.
    #[doc(hidden)]
    pub fn use_client_memory(&mut self, memory: ClientMemory<'a>) {
        self.client_memory = Some(memory);
    }

    /// Returns the memory set by [`Outputs::use_client_memory`].
    #[doc(hidden)]
    pub fn client_memory(&mut self) -> Option<&mut ClientMemory<'a>> {
        self.client_memory.as_mut()
    }

    /// Ends the responses to a request with an error.
    fn fail_stream(&mut self, request: usize, error: InferError) {
        let now = clock::now();
        // A request that has ended already cannot fail any more.
        let _ = self.end_stream(request, now, Some(wire_error(error)));
    }

    fn end_stream(&mut self, request: usize, now: Instant, error: Option<WireError>) -> Result<(), InferError> {
        let place = self.streamed(request)?;
        let (empty, output_start) = (error.is_none(), now);
        let content = ResponseContent { error, last: true, empty, output_start, ..ResponseContent::default() };
        self.session.connection.send_response(place, content)
    }

    /// Returns the place of a request of a decoupled model.
    fn streamed(&self, request: usize) -> Result<RequestPlace, InferError> {
        let request = u32::try_from(request).map_err(|_| run_error("too many requests"))?;
        self.config.decoupled.then_some((self.execute.batch, request)).ok_or_else(|| {
            run_error("the model answers each request once: its model_transaction_policy is not decoupled")
        })
    }
}

/// Returns the rows and bytes of each request in an output; `None` if the output is not split by rows.
fn row_sizes(config: &ModelConfig, execute: &Execute, tensor: OutputTensor<'_>) -> Option<Vec<(u64, usize)>> {
    let OutputTensor { output, datatype, shape, len } = tensor;
    let by_rows = !execute.elements.iter().any(|(other, _)| usize::from(*other) == output);
    let all = shape.first().filter(|_| by_rows && config.batches() && datatype != DataType::Bytes)?;
    let rows: Vec<u64> = execute.requests.iter().map(|request| u64::from(request.rows)).collect();
    if u64::try_from(*all).ok()? != rows.iter().sum::<u64>() || fixed_size(output, datatype, shape).ok()? != len {
        return None;
    }
    let row = byte_size(datatype, shape.get(1..)?).and_then(|row| usize::try_from(row).ok())?;
    rows.into_iter().map(|rows| Some((rows, usize::try_from(rows).ok()?.checked_mul(row)?))).collect()
}
