//! The outputs of one batch, and the outcome of each of its requests.

mod response;

use std::sync::Arc;
use std::time::Duration;

use pharos::error::InferError;
use pharos::infer::{Parameter, Parameters};
use pharos::model::ModelConfig;
use pharos::tensor::{DataType, byte_size};
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::{Done, Execute, OutputBlock, Placement, WireError};

use crate::blocks::{OutputTensor, fixed_size};
use crate::client_memory::{ClientMemory, OutputMemory, used_regions};
use crate::clock;
use crate::deferred::{DeferredBlocks, DeferredReplies, PassOn, merge};
use crate::device::DeviceMemory;
use crate::error::{run_error, wire_error};
use crate::memory::{InputArena, OutputArena};
use crate::metrics::Metrics;
use crate::received::{Loan, Received};
use crate::responder::Responder;
use crate::session::Session;
use crate::streams::{Collected, RequestPlace, ResponseContent};

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

/// An output that a backend has produced.
pub struct MadeOutput<'o> {
    /// Position in the backend's outputs.
    pub output: usize,
    /// The type of its elements.
    pub datatype: DataType,
    /// Its shape.
    pub shape: &'o [i64],
    /// Its bytes.
    pub data: &'o [u8],
}

/// The outcome of a batch.
pub struct Finished {
    /// The frame for the frontend.
    pub done: Done,
    /// Inputs that outputs were passed on from, and the batch's loan: drop them after the frame is
    /// sent, not before.
    pub kept: (Vec<Received>, Option<Arc<Loan>>),
}

impl<'a> Outputs<'a> {
    /// Creates the outputs of a batch that begins at `start`. For the worker's runtime.
    #[doc(hidden)]
    pub fn new(
        session: &'a Arc<Session>,
        config: &'a ModelConfig,
        execute: &'a Execute,
        start: Instant,
    ) -> Self {
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

    /// Detaches the request at this position from the batch: the backend sends its
    /// [responses](Responder::respond) itself, from any thread, even after the batch is over.
    /// Meanwhile the instance takes its next batch. If the batch fails as a whole, its
    /// requests that have not ended fail with it.
    ///
    /// # Errors
    /// There is no such request, it already has a responder, or the model has states, which are
    /// saved when a batch is over.
    pub fn detach(&mut self, request: usize) -> Result<Responder, InferError> {
        if !self.config.states.is_empty() {
            return Err(run_error("requests of a model with states are answered with their batch"));
        }
        self.register();
        Responder::new(
            self.session,
            self.config,
            self.execute,
            u32::try_from(request).unwrap_or(u32::MAX),
        )
    }

    /// Returns the metrics of this process. Samples that this thread records belong to the requests
    /// of the batch by default.
    pub fn metrics(&self) -> &'a Metrics {
        &self.session.metrics
    }

    /// Allocates memory for the output at this position of the configuration, over the whole batch;
    /// its content is undefined.
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

    /// Like [`Outputs::allocate`], but on a device if a client wants the output there: for backends
    /// that can write to it directly. Their writes must be complete when they return.
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
        if let Some(memory) = self
            .client_memory
            .as_mut()
            .and_then(|memory| memory.take(output, len, may_be_on_device))
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

    /// Returns a location for each request's rows, if a client wants its rows on a device; all
    /// other rows are together in the arena.
    fn allocate_pieces(
        &mut self,
        tensor: OutputTensor<'_>,
    ) -> Result<Option<Vec<OutputMemory<'a>>>, InferError> {
        if !self.client_memory.as_ref().is_some_and(ClientMemory::splits_rows) {
            return Ok(None);
        }
        let Some(sizes) = row_sizes(self.config, self.execute, tensor) else { return Ok(None) };
        let on_device =
            (0..).zip(&sizes).map(|(request, (_, size))| match self.has_failed(request) {
                true => None,
                false => {
                    self.client_memory.as_mut()?.take_rows(request, tensor.output, *size as u64)
                }
            });
        let on_device: Vec<Option<DeviceMemory>> = on_device.collect();
        if on_device.iter().all(Option::is_none) {
            return Ok(None);
        }
        let of_rows =
            |rows: u64| [&[rows.cast_signed()], tensor.shape.get(1..).unwrap_or_default()].concat();
        let others =
            || (0u32..).zip(sizes.iter().zip(&on_device)).filter(|(_, (_, place))| place.is_none());
        let (rows, size) =
            others().fold((0, 0), |(rows, size), (_, (own, _))| (rows + own.0, size + own.1));
        let requests: Vec<u32> = others().map(|(request, _)| request).collect();
        let mut rest: &mut [u8] = &mut [];
        if !requests.is_empty() {
            let others = OutputTensor { shape: &of_rows(rows), len: size, ..tensor };
            let (mut block, memory) = others.allocate(self.arena)?;
            block.requests = requests;
            rest = memory;
            self.blocks.push(block);
        }
        let mut places = Vec::with_capacity(sizes.len());
        for (request, ((rows, size), memory)) in (0..).zip(sizes.into_iter().zip(on_device)) {
            let Some(memory) = memory else {
                let (own, after) =
                    std::mem::take(&mut rest).split_at_mut_checked(size).unwrap_or_default();
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

    /// Like [`Outputs::allocate`], for a datatype of fixed size: the length is computed from the
    /// shape.
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

    /// Withdraws the output allocated at this position, so that it can be allocated again. The
    /// memory stays valid and in use until the batch is done.
    pub fn withdraw(&mut self, output: usize) {
        for block in
            self.blocks.extract_if(self.part_from.., |block| usize::from(block.output) == output)
        {
            if !block.in_client_memory {
                self.withdrawn.push(block.offset);
            }
        }
    }

    /// Sorts the outputs by their positions in the configuration. Responses have the order of the
    /// allocations otherwise. For backends whose order of allocation has no meaning to clients.
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

    /// Fails one request, given by its position in the batch; the others are answered as usual. In
    /// a decoupled model, the error is the request's last response and is sent immediately.
    pub fn fail(&mut self, request: usize, error: InferError) {
        if self.config.decoupled {
            return self.fail_stream(request, error);
        }
        self.failed.push((self.position(request), wire_error(error)));
    }

    /// Reschedules a request: it is executed again as soon as an instance is available. For the
    /// iterative sequences of `sequence_batching { iterative_sequence }`, whose state is kept
    /// meanwhile. The request's outputs in this batch are discarded; in a decoupled model it may
    /// have had responses, but not its last.
    ///
    /// # Errors
    /// The model's sequences are not iterative; the text is Triton's.
    pub fn reschedule(&mut self, request: usize) -> Result<(), InferError> {
        if !self.iterative {
            return Err(run_error(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the \
                 model is not configured to handle such a flag.",
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
        if self.part.is_empty() {
            whole
        } else {
            self.part.get(request).copied().unwrap_or(u32::MAX)
        }
    }

    /// Stamps the time at which the inputs are where the model needs them. Without this call, that
    /// is the start of the batch.
    pub fn inputs_ready(&mut self) {
        if self.input_end.is_none() {
            let now = clock::now();
            self.input_end = Some(now);
            if self.registered {
                self.session.connection.inputs_ready(self.execute.batch, now);
            }
        }
    }

    /// Moves the stamp of [`Outputs::inputs_ready`] later by the time that a device has spent on
    /// input copies that the model began since, limited to the time of [`Outputs::computed`] or
    /// now.
    pub fn inputs_took(&mut self, more: Duration) {
        let latest = self.output_start.unwrap_or_else(clock::now);
        self.input_end = Some((self.input_end.unwrap_or(self.start) + more).min(latest));
    }

    /// Stamps the end of the computation. Without this call, that is the return of `execute`.
    pub fn computed(&mut self) {
        self.output_start = Some(clock::now());
    }

    /// Sets both stamps from times measured on the device: from `began`, copying the inputs took
    /// `inputs`, then the model ran for `computing`.
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

    /// Sets both stamps from the times at which the computation began and ended, limited to the
    /// time since the start of the batch.
    #[doc(hidden)]
    pub fn computed_between(&mut self, began: Instant, ended: Instant) {
        let now = clock::now();
        let input_end = began.clamp(self.start, now);
        self.input_end = Some(input_end);
        self.output_start = Some(ended.clamp(input_end, now));
        if self.registered {
            self.session.connection.inputs_ready(self.execute.batch, input_end);
        }
    }

    /// The number of the batch.
    #[doc(hidden)]
    pub fn batch(&self) -> u64 {
        self.execute.batch
    }

    /// Returns the number of the next batch, if it has already arrived, and the inputs of that
    /// batch that are in the arena.
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

    fn end_stream(
        &mut self,
        request: usize,
        now: Instant,
        error: Option<WireError>,
    ) -> Result<(), InferError> {
        let place = self.streamed(request)?;
        let empty = error.is_none();
        let content = ResponseContent {
            error,
            last: true,
            empty,
            output_start: now,
            ..ResponseContent::default()
        };
        self.session.connection.send_response(place, content)
    }

    /// Returns the place of a request of a decoupled model.
    fn streamed(&self, request: usize) -> Result<RequestPlace, InferError> {
        let request = u32::try_from(request).map_err(|_| run_error("too many requests"))?;
        self.config.decoupled.then_some((self.execute.batch, request)).ok_or_else(|| {
            run_error(
                "the model answers each request once: its model_transaction_policy is not \
                 decoupled",
            )
        })
    }
}

/// Batches that are executed in parts, and outputs that are not sent. For the worker's runtime.
impl Outputs<'_> {
    /// Limits the following outputs to the requests at these positions of the batch; empty means
    /// all.
    #[doc(hidden)]
    pub fn begin_part(&mut self, positions: &[u32]) {
        self.part = positions.to_vec();
        self.part_from = self.blocks.len();
    }

    /// Fails the requests of this part and releases its outputs.
    #[doc(hidden)]
    pub fn fail_part(&mut self, error: &InferError) {
        let made = self.blocks.split_off(self.part_from.min(self.blocks.len()));
        self.withdrawn
            .extend(made.iter().filter(|block| !block.in_client_memory).map(|block| block.offset));
        for position in 0..self.part.len() {
            self.fail(position, error.clone());
        }
    }

    /// Whether the request at this position of the part has failed.
    #[doc(hidden)]
    pub fn has_failed_in_part(&self, position: usize) -> bool {
        self.has_failed(self.position(position))
    }

    /// Returns the wanted outputs of this part.
    ///
    /// # Errors
    /// One of them is not in the arena.
    #[doc(hidden)]
    pub fn made(&self, wanted: impl Fn(usize) -> bool) -> Result<Vec<MadeOutput<'_>>, InferError> {
        let made = self
            .blocks
            .get(self.part_from..)
            .unwrap_or_default()
            .iter()
            .filter(|block| wanted(usize::from(block.output)))
            .map(|block| {
                let data = self.arena.bytes(block.offset, block.len)?;
                Some(MadeOutput {
                    output: usize::from(block.output),
                    datatype: block.datatype,
                    shape: &block.shape,
                    data,
                })
            });
        made.collect::<Option<_>>().ok_or_else(|| run_error("an output is not in the arena"))
    }
}

/// Outputs that clients want in their memory. A request whose region cannot be used, or was
/// truncated meanwhile, fails without affecting the others.
impl Outputs<'_> {
    /// Fails the requests whose memory was truncated meanwhile. For the worker's runtime.
    #[doc(hidden)]
    pub fn check_client_memory(&mut self) {
        let Some(memory) = &self.client_memory else { return };
        let used = used_regions(self.execute).filter(|(request, _)| !self.has_failed(*request));
        let wrong: Vec<_> = used
            .filter_map(|(request, region)| Some((request, memory.regions().check(region).err()?)))
            .collect();
        for (request, error) in wrong {
            self.fail_whole(request, error);
        }
    }

    /// Copies outputs to the locations that clients want, unless the backend wrote them there. If
    /// the whole batch failed, converts its error into errors of its requests.
    fn place(&mut self, error: Option<InferError>) -> Option<InferError> {
        if self.client_memory.is_none() {
            return error;
        }
        let execute = self.execute;
        if let Some(error) = error {
            self.check_client_memory();
            for request in (0u32..).zip(&execute.requests).map(|(position, _)| position) {
                self.fail_whole(request, error.clone());
            }
            let made = std::mem::take(&mut self.blocks);
            self.withdrawn.extend(
                made.iter().filter(|block| !block.in_client_memory).map(|block| block.offset),
            );
            return None;
        }
        for placement in &execute.placements {
            // A rescheduled request has no outputs yet.
            if self.has_failed(placement.request) || self.rescheduled.contains(&placement.request) {
                continue;
            }
            if let Err(error) = self.place_one(placement) {
                self.fail_whole(placement.request, error);
            }
        }
        self.check_client_memory();
        None
    }

    fn place_one(&self, placement: &Placement) -> Result<(), InferError> {
        let Some(memory) = &self.client_memory else { return Ok(()) };
        let name = self.output_name(placement.output);
        for block in self
            .blocks
            .iter()
            .filter(|block| block.output == placement.output && !block.in_client_memory)
        {
            let bytes = self.bytes_of(block, name)?;
            if !block.requests.is_empty() && !block.requests.contains(&placement.request) {
                continue;
            }
            let part = memory
                .part(block, bytes, placement.request)
                .and_then(|part| bytes.get(part))
                .ok_or_else(|| run_error(format!("cannot split output '{name}' by request")))?;
            memory.write(placement, name, part)?;
        }
        Ok(())
    }

    /// Writes a response of a decoupled model to the location that its client wants.
    fn place_response(&self, request: u32, blocks: &[OutputBlock]) -> Result<(), InferError> {
        let Some(memory) = &self.client_memory else { return Ok(()) };
        for placement in
            self.execute.placements.iter().filter(|placement| placement.request == request)
        {
            for block in blocks.iter().filter(|block| block.output == placement.output) {
                let name = self.output_name(block.output);
                memory.write(placement, name, self.bytes_of(block, name)?)?;
            }
        }
        let mut regions = used_regions(self.execute).filter(|(user, _)| *user == request);
        regions.try_for_each(|(_, region)| memory.regions().check(region))
    }

    fn output_name(&self, output: u16) -> &str {
        self.config.outputs.get(usize::from(output)).map_or("", |output| &output.name)
    }

    fn bytes_of(&self, block: &OutputBlock, name: &str) -> Result<&[u8], InferError> {
        let bytes = self.arena.bytes(block.offset, block.len);
        bytes.ok_or_else(|| run_error(format!("output '{name}' is not in the arena")))
    }

    /// Whether a request, given by its position in the whole batch, has failed.
    fn has_failed(&self, request: u32) -> bool {
        self.failed.iter().any(|(failed, _)| *failed == request)
    }

    /// Fails a request, given by its position in the whole batch, unless it has already failed.
    fn fail_whole(&mut self, request: u32, error: InferError) {
        self.rescheduled.retain(|other| *other != request);
        if !self.has_failed(request) {
            let part = std::mem::take(&mut self.part);
            self.fail(request as usize, error);
            self.part = part;
        }
    }
}

/// The end of a batch.
impl Outputs<'_> {
    /// Returns the outcome of the batch; `loan` holds the inputs of the batch. For the worker's
    /// runtime.
    #[doc(hidden)]
    pub fn finish_batch(mut self, loan: Option<Arc<Loan>>, error: Option<InferError>) -> Finished {
        let batch = self.execute.batch;
        let Collected { deferred, open } = match self.registered {
            true => self.session.connection.batch_ends(batch, error.is_none(), &self.rescheduled),
            false => Collected::default(),
        };
        let kept = self.add_deferred(deferred, loan.as_ref());
        let error = self.place(error);
        let mut done = self.done(batch, error);
        let ours = 1 + kept
            .iter()
            .filter(|bytes| {
                bytes.loan().zip(loan.as_ref()).is_some_and(|(one, own)| Arc::ptr_eq(one, own))
            })
            .count();
        if let Some(loan) = loan.as_ref().filter(|loan| Arc::strong_count(loan) > ours) {
            loan.hold();
            done.held = true;
        }
        done.open = open;
        Finished { done, kept: (kept, loan) }
    }

    /// Adds the replies of single requests. Returns the inputs that outputs are passed on from.
    fn add_deferred(
        &mut self,
        replies: DeferredReplies,
        loan: Option<&Arc<Loan>>,
    ) -> Vec<Received> {
        let DeferredReplies { outputs, parameters, failed } = replies;
        self.failed.extend(failed);
        for (request, parameters) in parameters {
            merge(&mut self.parameters, request, parameters);
        }
        if outputs.is_empty() {
            return Vec::new();
        }
        let pass_on = PassOn { loan, allowed: self.client_memory.is_none() };
        let DeferredBlocks { blocks, failed, kept } =
            DeferredBlocks::new(outputs, &self.session.arenas, &pass_on);
        self.failed.extend(failed);
        match self.blocks.is_empty() {
            true => self.blocks = blocks,
            false => self.blocks.extend(blocks),
        }
        kept
    }

    fn done(mut self, batch: u64, error: Option<InferError>) -> Done {
        let end = clock::now();
        let input_end = self.input_end.unwrap_or(self.start);
        let stamps = ComputeStamps {
            start: self.start,
            input_end,
            output_start: self.output_start.unwrap_or(end).max(input_end),
            end,
        };
        if error.is_some() {
            let made =
                self.blocks.iter().filter(|block| !block.in_client_memory && block.loan.is_none());
            self.withdrawn.extend(made.map(|block| block.offset));
        }
        self.arena.release(&self.withdrawn);
        let open = Vec::new();
        let held = false;
        let Some(error) = error else {
            let Self { failed, parameters, rescheduled, blocks: outputs, .. } = self;
            return Done {
                batch,
                stamps,
                error: None,
                failed,
                outputs,
                parameters,
                rescheduled,
                open,
                held,
            };
        };
        let error = Some(wire_error(error));
        Done {
            batch,
            stamps,
            error,
            failed: Vec::new(),
            outputs: Vec::new(),
            parameters: Vec::new(),
            rescheduled: Vec::new(),
            open,
            held,
        }
    }
}

/// Returns the rows and bytes of each request in an output; `None` if the output is not split by
/// rows.
fn row_sizes(
    config: &ModelConfig,
    execute: &Execute,
    tensor: OutputTensor<'_>,
) -> Option<Vec<(u64, usize)>> {
    let OutputTensor { output, datatype, shape, len } = tensor;
    let by_rows = !execute.elements.iter().any(|(other, _)| usize::from(*other) == output);
    let all =
        shape.first().filter(|_| by_rows && config.batches() && datatype != DataType::Bytes)?;
    let rows: Vec<u64> = execute.requests.iter().map(|request| u64::from(request.rows)).collect();
    if u64::try_from(*all).ok()? != rows.iter().sum::<u64>()
        || fixed_size(output, datatype, shape).ok()? != len
    {
        return None;
    }
    let row = byte_size(datatype, shape.get(1..)?).and_then(|row| usize::try_from(row).ok())?;
    rows.into_iter()
        .map(|rows| Some((rows, usize::try_from(rows).ok()?.checked_mul(row)?)))
        .collect()
}
