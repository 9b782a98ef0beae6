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
    /// Offsets of blocks that are in no answer.
    withdrawn: Vec<u64>,
    failed: Vec<(u32, WireError)>,
    rescheduled: Vec<u32>,
    /// The positions of the requests that are executed now; empty for all of the batch.
    part: Vec<u32>,
    /// The first of `blocks` that is theirs.
    part_from: usize,
    parameters: Vec<(u32, Parameters)>,
    /// Whether requests may be rescheduled.
    iterative: bool,
    /// Requests may be answered on their own.
    registered: bool,
    /// For a batch that uses memory of clients.
    client_memory: Option<ClientMemory<'a>>,
    start: Instant,
    input_end: Option<Instant>,
    output_start: Option<Instant>,
}

impl<'a> Outputs<'a> {
    /// Of a batch that begins at `start`. For the worker's runtime.
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

    /// Registers the requests as ones that may be answered on their own. For the worker's runtime.
    #[doc(hidden)]
    pub fn register(&mut self) {
        if !std::mem::replace(&mut self.registered, true) {
            self.session.connection.batch_begins(self.execute, self.config.decoupled, self.start);
            if let Some(at) = self.input_end {
                self.session.connection.inputs_ready(self.execute.batch, at);
            }
        }
    }

    /// Takes the answers of the request at this position of the batch into the backend's own hands: what it
    /// [responds](Responder::respond) is sent, from any thread, also after the batch is over. The instance takes its next
    /// batch meanwhile. If the batch fails as a whole, its requests fail with it as far as they have not ended.
    ///
    /// # Errors
    /// There is no such request, it has a responder already, or the model has states, which are kept when a batch is over.
    pub fn detach(&mut self, request: usize) -> Result<Responder, InferError> {
        if !self.config.states.is_empty() {
            return Err(run_error("requests of a model with states are answered with their batch"));
        }
        self.register();
        Responder::new(self.session, (self.config, self.execute), u32::try_from(request).unwrap_or(u32::MAX))
    }

    /// The metrics of this process. What this thread records is for the requests of the batch, unless it says otherwise.
    pub fn metrics(&self) -> &'a Metrics {
        &self.session.metrics
    }

    /// Memory for the output at this position of the configuration, over the whole batch; its content is undefined.
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

    /// As [`Outputs::allocate`], but on a device where a client wants the output there: for backends that can write to it
    /// directly. What they write there is complete when they return.
    ///
    /// # Errors
    /// As [`Outputs::allocate`].
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

    /// The places of each request's rows, if a client wants its rows on a device; the other rows are together in the arena.
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

    /// [`Outputs::allocate`] for a datatype of fixed size: the length follows from the shape.
    ///
    /// # Errors
    /// As [`Outputs::allocate`]; also a shape with a negative dimension, or the datatype BYTES.
    pub fn allocate_fixed(
        &mut self,
        output: usize,
        datatype: DataType,
        shape: &[i64],
    ) -> Result<&'a mut [u8], InferError> {
        self.allocate(output, datatype, shape, fixed_size(output, datatype, shape)?)
    }

    /// Takes back what was allocated for the output at this position, which may be allocated anew. The memory stays
    /// valid until the batch is done, and is in use until then.
    pub fn withdraw(&mut self, output: usize) {
        for block in self.blocks.extract_if(self.part_from.., |block| usize::from(block.output) == output) {
            if !block.placed {
                self.withdrawn.push(block.offset);
            }
        }
    }

    /// Adds a parameter to the response of one request of the batch, by its position.
    pub fn parameter(&mut self, request: usize, name: &str, value: Parameter) {
        let request = u32::try_from(request).unwrap_or(u32::MAX);
        merge(&mut self.parameters, request, vec![(name.to_owned(), value)]);
    }

    /// Fails one request of the batch, by its position; the others are answered as usual. In a decoupled model this is the
    /// request's last response, and leaves at once.
    pub fn fail(&mut self, request: usize, error: InferError) {
        if self.config.decoupled {
            return self.fail_stream(request, error);
        }
        self.failed.push((self.position(request), wire_error(error)));
    }

    /// Has a request executed once more, as soon as an instance can: for the iterative sequences of
    /// `sequence_batching { iterative_sequence }`, whose state is kept meanwhile. What this batch gives as its answer is
    /// thrown away; in a decoupled model it may have had responses, but not its last.
    ///
    /// # Errors
    /// The model's sequences are not iterative; Triton's text.
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

    /// The position in the whole batch of a request of this part.
    fn position(&self, request: usize) -> u32 {
        let whole = u32::try_from(request).unwrap_or(u32::MAX);
        if self.part.is_empty() { whole } else { self.part.get(request).copied().unwrap_or(u32::MAX) }
    }

    /// Stamps that the inputs are where the model wants them. Not called: at once.
    pub fn inputs_ready(&mut self) {
        if self.input_end.is_none() {
            let now = clock::now();
            self.input_end = Some(now);
            if self.registered {
                self.session.connection.inputs_ready(self.execute.batch, now);
            }
        }
    }

    /// Moves the stamp of [`Outputs::inputs_ready`] by what a device has spent on copies of inputs that the model has begun
    /// since, at most up to [`Outputs::computed`] or now.
    pub fn inputs_took(&mut self, more: Duration) {
        let latest = self.output_start.unwrap_or_else(clock::now);
        self.input_end = Some((self.input_end.unwrap_or(self.start) + more).min(latest));
    }

    /// Stamps that the model has computed. Not called: when `execute` returns.
    pub fn computed(&mut self) {
        self.output_start = Some(clock::now());
    }

    /// Stamps both as they were measured on the device: from `began` on the inputs took so long, and then the model.
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

    /// The number of the batch that comes next, if it is here already, and those of its inputs that are in the arena.
    #[doc(hidden)]
    pub fn next_inputs(&self) -> Option<(u64, Vec<Received>)> {
        self.session.connection.next_inputs()
    }

    /// The arena of the inputs. For the worker's runtime.
    #[doc(hidden)]
    pub fn input_arena(&self) -> &'a InputArena {
        &self.session.arenas.inputs
    }

    /// Memory of clients that the batch uses. For the worker's runtime.
    #[doc(hidden)]
    pub fn use_client_memory(&mut self, memory: ClientMemory<'a>) {
        self.client_memory = Some(memory);
    }

    /// The memory of [`Outputs::use_client_memory`].
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

    /// A request of a decoupled model.
    fn streamed(&self, request: usize) -> Result<RequestPlace, InferError> {
        let request = u32::try_from(request).map_err(|_| run_error("too many requests"))?;
        self.config.decoupled.then_some((self.execute.batch, request)).ok_or_else(|| {
            run_error("the model answers each request once: its model_transaction_policy is not decoupled")
        })
    }
}

/// The rows and the bytes that each request of a batch has of an output; `None` if it is not split by rows.
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
