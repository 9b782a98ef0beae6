//! What a backend fills: the outputs of one batch, and what becomes of each of its requests.

use std::sync::Arc;
use std::time::Duration;

use pharos::error::InferError;
use pharos::infer::{Parameter, Parameters};
use pharos::model::ModelConfig;
use pharos::tensor::{DataType, byte_size};
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::{Done, Execute, OutputBlock, WireError};

use super::lent::Lent;
use super::{Executed, wire_error};
use crate::backend::{Arena, DeviceMemory, Place, run_error};
use crate::clock;
use crate::metrics::Metrics;
use crate::runtime::{Collected, Loan, Received, Responder, Shared, Stash, full, merge};

/// The outputs of one batch: memory, stamps, and requests that failed.
pub struct Outputs<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) arena: &'a Arena,
    pub(super) config: &'a ModelConfig,
    pub(super) execute: &'a Execute,
    pub(super) blocks: Vec<OutputBlock>,
    /// Offsets of blocks that are in no answer.
    pub(super) withdrawn: Vec<u64>,
    pub(super) failed: Vec<(u32, WireError)>,
    pub(super) rescheduled: Vec<u32>,
    /// The positions of the requests that are executed now; empty for all of the batch.
    pub(super) part: Vec<u32>,
    /// The first of `blocks` that is theirs.
    pub(super) part_from: usize,
    pub(super) parameters: Vec<(u32, Parameters)>,
    /// Whether requests may be rescheduled.
    pub(super) iterative: bool,
    /// Requests may be answered on their own.
    pub(super) registered: bool,
    /// For a batch that uses memory of clients.
    pub(super) lent: Option<Lent<'a>>,
    pub(super) start: Instant,
    pub(super) input_end: Option<Instant>,
    pub(super) output_start: Option<Instant>,
}

impl<'a> Outputs<'a> {
    pub(super) fn new(
        shared: &'a Arc<Shared>,
        (config, execute): (&'a ModelConfig, &'a Execute),
        start: Instant,
    ) -> Self {
        Self {
            shared,
            arena: &shared.outputs,
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
            lent: None,
            start,
            input_end: None,
            output_start: None,
        }
    }

    /// Has the requests known as such that may be answered on their own.
    pub(super) fn register(&mut self) {
        if !std::mem::replace(&mut self.registered, true) {
            self.shared.batch_begins(self.execute, self.config.decoupled, self.start);
            if let Some(at) = self.input_end {
                self.shared.inputs_ready(self.execute.batch, at);
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
        Responder::new(self.shared, (self.config, self.execute), u32::try_from(request).unwrap_or(u32::MAX))
    }

    /// The metrics of this process. What this thread records is for the requests of the batch, unless it says otherwise.
    pub fn metrics(&self) -> &'a Metrics {
        &self.shared.metrics
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
        match self.take_place((output, false), datatype, shape, len)? {
            Place::Host(memory) => Ok(memory),
            Place::Device(_) | Place::Pieces(_) => Err(run_error(format!("output {output} is on a device"))),
        }
    }

    /// As [`Outputs::allocate`], but on a device where a client wants the output there: for backends that can write to it
    /// straight away. What they write there is complete when they return.
    ///
    /// # Errors
    /// As [`Outputs::allocate`].
    pub fn allocate_anywhere(
        &mut self,
        output: usize,
        datatype: DataType,
        shape: &[i64],
        len: usize,
    ) -> Result<Place<'a>, InferError> {
        self.take_place((output, true), datatype, shape, len)
    }

    fn take_place(
        &mut self,
        (output, may_be_on_device): (usize, bool),
        datatype: DataType,
        shape: &[i64],
        len: usize,
    ) -> Result<Place<'a>, InferError> {
        let own = self.blocks.get(self.part_from..).unwrap_or_default();
        if own.iter().any(|block| usize::from(block.output) == output) {
            return Err(run_error(format!("output {output} is allocated already")));
        }
        if let Some(memory) = self.lent.as_mut().and_then(|lent| lent.take(output, len, may_be_on_device)) {
            self.blocks.push(placed_block((output, self.part.clone()), datatype, shape.to_vec(), len)?);
            return Ok(memory);
        }
        if let Some(pieces) = self.take_pieces((output, may_be_on_device), datatype, shape, len)? {
            return Ok(Place::Pieces(pieces));
        }
        let (mut block, memory) = new_block(self.arena, (output, datatype), shape, len)?;
        block.requests.clone_from(&self.part);
        self.blocks.push(block);
        Ok(Place::Host(memory))
    }

    /// The places of each request's rows, if a client wants its own on a device; the rows of others are together in the arena.
    fn take_pieces(
        &mut self,
        (output, may_be_on_device): (usize, bool),
        datatype: DataType,
        shape: &[i64],
        len: usize,
    ) -> Result<Option<Vec<Place<'a>>>, InferError> {
        if !may_be_on_device || !self.lent.as_ref().is_some_and(Lent::may_be_apart) {
            return Ok(None);
        }
        let Some(sizes) = sizes((self.config, self.execute), (output, datatype), shape, len) else { return Ok(None) };
        let on_device = (0..).zip(&sizes).map(|(request, (_, size))| match self.has_failed(request) {
            true => None,
            false => self.lent.as_mut()?.take_rows((request, output), *size as u64),
        });
        let on_device: Vec<Option<DeviceMemory>> = on_device.collect();
        if on_device.iter().all(Option::is_none) {
            return Ok(None);
        }
        let of_rows = |rows: u64| [&[rows.cast_signed()], shape.get(1..).unwrap_or_default()].concat();
        let others = || (0u32..).zip(sizes.iter().zip(&on_device)).filter(|(_, (_, place))| place.is_none());
        let (rows, size) = others().fold((0, 0), |(rows, size), (_, (own, _))| (rows + own.0, size + own.1));
        let requests: Vec<u32> = others().map(|(request, _)| request).collect();
        let mut rest: &mut [u8] = &mut [];
        if !requests.is_empty() {
            let (mut block, memory) = new_block(self.arena, (output, datatype), &of_rows(rows), size)?;
            (block.requests, rest) = (requests, memory);
            self.blocks.push(block);
        }
        let mut places = Vec::with_capacity(sizes.len());
        for (request, ((rows, size), memory)) in (0..).zip(sizes.into_iter().zip(on_device)) {
            let Some(memory) = memory else {
                let (own, after) = std::mem::take(&mut rest).split_at_mut_checked(size).unwrap_or_default();
                rest = after;
                places.push(Place::Host(own));
                continue;
            };
            self.blocks.push(placed_block((output, vec![request]), datatype, of_rows(rows), size)?);
            places.push(Place::Device(memory));
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
    pub(super) fn position(&self, request: usize) -> u32 {
        let whole = u32::try_from(request).unwrap_or(u32::MAX);
        if self.part.is_empty() { whole } else { self.part.get(request).copied().unwrap_or(u32::MAX) }
    }

    /// Stamps that the inputs are where the model wants them. Not called: at once.
    pub fn inputs_ready(&mut self) {
        if self.input_end.is_none() {
            let now = clock::now();
            self.input_end = Some(now);
            if self.registered {
                self.shared.inputs_ready(self.execute.batch, now);
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
    pub(crate) fn measured(&mut self, began: Instant, (inputs, computing): (Duration, Duration)) {
        let now = clock::now();
        let input_end = (began + inputs).min(now);
        self.input_end = Some(input_end);
        self.output_start = Some((input_end + computing).min(now));
        if self.registered {
            self.shared.inputs_ready(self.execute.batch, input_end);
        }
    }

    /// The number of the batch.
    pub(crate) fn batch(&self) -> u64 {
        self.execute.batch
    }

    /// The number of the batch that comes next, if it is here already, and those of its inputs that are in the arena.
    pub(crate) fn next_inputs(&self) -> Option<(u64, Vec<Received>)> {
        self.shared.next_inputs()
    }

    /// What has come of the batch, whose inputs this is the loan of.
    pub(super) fn executed(mut self, loan: Option<Arc<Loan>>, error: Option<InferError>) -> Executed {
        let batch = self.execute.batch;
        let Collected { stash, open } = match self.registered {
            true => self.shared.batch_ends(batch, error.is_none(), &self.rescheduled),
            false => Collected::default(),
        };
        let kept = self.take(stash, loan.as_ref());
        let error = self.place(self.config, error);
        let mut done = self.done(batch, error);
        let own = |bytes: &&Received| bytes.loan().zip(loan.as_ref()).is_some_and(|(one, own)| Arc::ptr_eq(one, own));
        let ours = 1 + kept.iter().filter(own).count();
        if let Some(loan) = loan.as_ref().filter(|loan| Arc::strong_count(loan) > ours) {
            loan.hold();
            done.held = true;
        }
        done.open = open;
        Executed { done, panicked: false, kept: (kept, loan) }
    }

    /// Adds what requests were answered with on their own. Gives what the outputs are lent from.
    fn take(&mut self, stash: Stash, loan: Option<&Arc<Loan>>) -> Vec<Received> {
        let Stash { outputs, parameters, failed } = stash;
        self.failed.extend(failed);
        for (request, parameters) in parameters {
            merge(&mut self.parameters, request, parameters);
        }
        if outputs.is_empty() {
            return Vec::new();
        }
        let requests: Vec<u32> = outputs.iter().map(|(request, _)| *request).collect();
        let may_lend = self.lent.is_none();
        match Stash::into_blocks(outputs, self.shared, (loan, may_lend)) {
            Ok((blocks, kept)) => {
                self.blocks.extend(blocks);
                kept
            }
            Err(error) => {
                self.failed.extend(requests.into_iter().map(|request| (request, wire_error(error.clone()))));
                Vec::new()
            }
        }
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
            let made = self.blocks.iter().filter(|block| !block.placed && block.lent.is_none());
            self.withdrawn.extend(made.map(|block| block.offset));
        }
        self.arena.release(&self.withdrawn);
        let (open, held) = (Vec::new(), false);
        let Some(error) = error else {
            let Self { failed, parameters, rescheduled, blocks: outputs, .. } = self;
            return Done { batch, stamps, error: None, failed, outputs, parameters, rescheduled, open, held };
        };
        let (failed, outputs, parameters, rescheduled) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let error = Some(wire_error(error));
        Done { batch, stamps, error, failed, outputs, parameters, rescheduled, open, held }
    }
}

/// The bytes of an output of a fixed size.
///
/// # Errors
/// The shape has a negative dimension, or the datatype is BYTES.
pub(super) fn fixed_size(output: usize, datatype: DataType, shape: &[i64]) -> Result<usize, InferError> {
    let len = byte_size(datatype, shape).and_then(|len| usize::try_from(len).ok());
    len.ok_or_else(|| run_error(format!("output {output} has no size: {datatype} {shape:?}")))
}

/// The rows and the bytes that each request of a batch has of an output; `None` if it is not cut by rows.
fn sizes(
    (config, execute): (&ModelConfig, &Execute),
    (output, datatype): (usize, DataType),
    shape: &[i64],
    len: usize,
) -> Option<Vec<(u64, usize)>> {
    let by_rows = !execute.elements.iter().any(|(other, _)| usize::from(*other) == output);
    let all = shape.first().filter(|_| by_rows && config.batches() && datatype != DataType::Bytes)?;
    let rows: Vec<u64> = execute.requests.iter().map(|request| u64::from(request.rows)).collect();
    if u64::try_from(*all).ok()? != rows.iter().sum::<u64>() || fixed_size(output, datatype, shape).ok()? != len {
        return None;
    }
    let row = byte_size(datatype, shape.get(1..)?).and_then(|row| usize::try_from(row).ok())?;
    rows.into_iter().map(|rows| Some((rows, usize::try_from(rows).ok()?.checked_mul(row)?))).collect()
}

/// A block for an output that is where its client wants it.
pub(crate) fn placed_block(
    (output, requests): (usize, Vec<u32>),
    datatype: DataType,
    shape: Vec<i64>,
    len: usize,
) -> Result<OutputBlock, InferError> {
    let output = u16::try_from(output).map_err(|_| run_error("too many outputs"))?;
    let len = len as u64;
    Ok(OutputBlock { output, requests, datatype, shape, offset: 0, len, placed: true, lent: None })
}

/// A new block of the arena for an output, and its memory.
pub(super) fn new_block<'m>(
    arena: &'m Arena,
    (output, datatype): (usize, DataType),
    shape: &[i64],
    len: usize,
) -> Result<(OutputBlock, &'m mut [u8]), InferError> {
    let output = u16::try_from(output).map_err(|_| run_error("too many outputs"))?;
    let (block, memory) = arena.allocate(len as u64).ok_or_else(|| full(len, arena.capacity()))?;
    Ok((
        OutputBlock {
            output,
            requests: Vec::new(),
            datatype,
            shape: shape.to_vec(),
            offset: block.offset,
            len: block.len,
            placed: false,
            lent: None,
        },
        memory,
    ))
}
