//! One loaded model: takes an Execute frame's batch through the backend and says how it went.

mod inputs;
pub(crate) mod lent;
mod steps;
mod streams;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use pharos::error::{InferError, Reason};
use pharos::infer::{Parameter, Parameters};
use pharos::model::ModelConfig;
use pharos::tensor::{DataType, byte_size};
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::{Done, Execute, Load, Loaded, OutputBlock, WireError};

use crate::backend::{Arena, Backend, Batch, Context, Registry, Requests, load_error, run_error};
use crate::clock;
use crate::metrics::{Metrics, Series};
use crate::runtime::{Collected, Loan, LoanCell, Received, Responder, Runtime, Shared, Stash, full, merge};
use crate::state::States;

use inputs::{batch_of, batch_with};
use lent::Lent;
pub use streams::Response;

/// A loaded model instance.
pub(crate) struct Instance {
    backend: Box<dyn Backend>,
    config: ModelConfig,
    runtime: Runtime,
    /// What is kept for sequences, if the model has states.
    states: Option<States>,
    /// The bytes of the states, if the definition of the metrics has it.
    state_bytes: Option<Series>,
    instance: String,
    /// What loading has added to the resident memory, bytes.
    grown: u64,
}

impl Instance {
    /// Loads the model.
    ///
    /// # Errors
    /// What the user is told about why the model cannot be loaded.
    pub(crate) fn load(load: &Load, runtime: Runtime, backends: &Registry) -> Result<Self, InferError> {
        let before = resident_memory();
        let config = ModelConfig::decode(&load.config).map_err(|error| load_error(error.to_string()))?;
        let context = Context {
            config: &config,
            directory: Path::new(&load.directory),
            threads: (load.threads as usize).max(1),
            metrics: runtime.metrics(),
            runtime: &runtime,
            instance: &load.instance,
            version: load.version,
        };
        let backend = catch_unwind(AssertUnwindSafe(|| backends.create(&context)))
            .unwrap_or_else(|panic| Err(load_error(format!("the backend panicked: {}", panic_text(&*panic)))))?;
        let read = |file: &str| {
            let path = Path::new(&load.initial_states).join(file);
            std::fs::read(&path).map_err(|error| format!("'{}' cannot be read: {error}", path.display()))
        };
        let states = States::new(&config, read).map_err(load_error)?;
        let grown = resident_memory().saturating_sub(before);
        runtime.metrics().flush();
        let (state_bytes, instance) = (None, load.instance.clone());
        let mut this = Self { backend, config, runtime, states, state_bytes, instance, grown };
        this.show_states();
        Ok(this)
    }

    /// One of a backend that a test has made.
    #[cfg(test)]
    pub(crate) fn new(backend: Box<dyn Backend>, config: ModelConfig, runtime: Runtime) -> Self {
        let (states, state_bytes, instance, grown) = (None, None, "m_0".to_owned(), 0);
        Self { backend, config, runtime, states, state_bytes, instance, grown }
    }

    /// Looks the metric of the states up, and records what they take now.
    fn show_states(&mut self) {
        let Some(states) = &self.states else { return };
        self.state_bytes = self.runtime.metrics().state_bytes(&self.instance);
        if let Some(series) = &self.state_bytes {
            series.add_or_update_for(states.bytes() as f64, Requests::None);
        }
    }

    /// Drops what is kept for sequences that are over without a last step.
    pub(crate) fn sequences_ended(&mut self, keys: &[u64]) {
        let before = self.states.as_ref().map(States::bytes);
        for key in keys {
            self.backend.sequence_ended(*key);
            if let Some(states) = &mut self.states {
                states.drop_sequence(*key);
            }
        }
        self.record_states(before);
    }

    /// Records the bytes of the states if they have changed.
    fn record_states(&self, before: Option<u64>) {
        let now = self.states.as_ref().map(States::bytes);
        if let (Some(series), Some(now)) = (&self.state_bytes, now.filter(|_| now != before)) {
            series.add_or_update_for(now as f64, Requests::None);
        }
    }

    /// What the frontend is told about this instance.
    pub(crate) fn loaded(&self) -> Loaded {
        Loaded { engine: self.backend.engine(), memory: self.grown, details: self.backend.wants_details() }
    }

    /// Takes another text of `metrics.yaml`, which the frontend has checked.
    ///
    /// # Errors
    /// It is wrong after all: the processes do not understand each other.
    pub(crate) fn redefine_metrics(&mut self, text: &str) -> io::Result<()> {
        self.runtime.metrics().redefine(text)?;
        self.show_states();
        Ok(())
    }

    /// Executes a batch; responses of a decoupled model leave over the connection meanwhile.
    pub(crate) fn execute(&mut self, execute: &Execute) -> Executed {
        let arrived = clock::now();
        let Self { backend, config, states, .. } = self;
        let runtime = self.runtime.clone();
        let shared = &runtime.0;
        // Memory is handed back to the system only when there is time for it.
        shared.outputs.release(&execute.released);
        shared.metrics.batch_begins(&execute.requests);
        let start = clock::now();
        let bytes = states.as_ref().map(States::bytes);
        let uses_regions = lent::uses_regions(execute);
        let unusable = if uses_regions { lent::open(&mut shared.regions_to_change(), execute) } else { Vec::new() };
        let regions = uses_regions.then(|| shared.regions());
        let loan = LoanCell::new(shared, execute);
        let mut outputs = Outputs::new(shared, (config, execute), start);
        if config.decoupled {
            outputs.register();
        }
        let engine = Engine { backend: &mut **backend, states: states.as_mut() };
        let result = if let Some(regions) = &regions {
            // What is read again later, or not sent in the end, is not written there at once.
            let at_once = engine.states.is_none() && !config.decoupled && !outputs.iterative;
            let bears_changes = at_once && engine.backend.bears_changes();
            outputs.lent = Some(Lent::new(regions, execute, bears_changes));
            engine.execute_lent((config, &loan), execute, &mut outputs, unusable)
        } else {
            match batch_of(config, (shared, &loan), execute) {
                Ok(batch) => engine.execute(&batch, &mut outputs),
                Err(error) => Ok(Err(error)),
            }
        };
        let (error, panicked) = match result {
            Ok(result) => (result.err(), false),
            Err(panic) => (Some(run_error(format!("the backend panicked: {}", panic_text(&*panic)))), true),
        };
        let mut executed = outputs.executed(loan.into_loan(), error);
        executed.panicked = panicked;
        self.record_states(bytes);
        runtime.metrics().batch_executed(&executed.done, arrived);
        executed
    }
}

/// What has come of a batch.
pub(crate) struct Executed {
    pub(crate) done: Done,
    /// The backend panicked and must not be used again.
    pub(crate) panicked: bool,
    /// What is to be dropped when the frontend has been told, not before.
    pub(crate) kept: (Vec<Received>, Option<Arc<Loan>>),
}

/// What executes a batch.
struct Engine<'e> {
    backend: &'e mut dyn Backend,
    states: Option<&'e mut States>,
}

impl Engine<'_> {
    fn execute(self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Outcome {
        // Given up while it waited behind another batch: nobody would read what it gives. But a sequence must not miss a
        // step.
        if batch.all_cancelled() && batch.requests.iter().all(|request| request.sequence.is_none()) {
            return Ok(Err(InferError::cancelled()));
        }
        match self.states {
            Some(states) => steps::execute(states, self.backend, batch, outputs),
            None => attempt(self.backend, batch, outputs),
        }
    }

    /// Executes a batch that has inputs or outputs in memory of clients, some of which may be unusable.
    fn execute_lent<'a>(
        self,
        (config, loan): (&'a ModelConfig, &LoanCell<'a>),
        execute: &'a Execute,
        outputs: &mut Outputs<'a>,
        unusable: Vec<(u32, InferError)>,
    ) -> Outcome {
        let mut failed = Vec::new();
        for (request, error) in unusable {
            if !failed.contains(&request) {
                failed.push(request);
                outputs.fail(request as usize, error);
            }
        }
        let shared = outputs.shared;
        let gathered = match lent::gather((config, &shared.inputs), execute, outputs, &mut failed) {
            Ok(gathered) => gathered,
            Err(error) => return Ok(Err(error)),
        };
        outputs.inputs_ready();
        let inputs = lent::inputs(config, execute, &gathered);
        match inputs.map(|inputs| batch_with(config, (shared, loan), execute, inputs)) {
            Ok(batch) if lent::is_hopeless(&batch, &failed) => Ok(Ok(())),
            Ok(batch) => self.execute(&batch, outputs),
            Err(error) => Ok(Err(error)),
        }
    }
}

/// How a backend has executed a batch, unless it panicked.
type Outcome = Result<Result<(), InferError>, Box<dyn Any + Send>>;

fn attempt(backend: &mut dyn Backend, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Outcome {
    catch_unwind(AssertUnwindSafe(|| backend.execute(batch, outputs)))
}

/// The outputs of one batch: memory, stamps, and requests that failed.
pub struct Outputs<'a> {
    shared: &'a Arc<Shared>,
    arena: &'a Arena,
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
    lent: Option<Lent<'a>>,
    start: Instant,
    input_end: Option<Instant>,
    output_start: Option<Instant>,
}

impl<'a> Outputs<'a> {
    fn new(shared: &'a Arc<Shared>, (config, execute): (&'a ModelConfig, &'a Execute), start: Instant) -> Self {
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
    fn register(&mut self) {
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
    /// The output arena is full.
    pub fn allocate(
        &mut self,
        output: usize,
        datatype: DataType,
        shape: &[i64],
        len: usize,
    ) -> Result<&'a mut [u8], InferError> {
        if let Some(memory) = self.lent.as_mut().and_then(|lent| lent.take(output, len)) {
            let output = u16::try_from(output).map_err(|_| run_error("too many outputs"))?;
            let (requests, shape, len) = (self.part.clone(), shape.to_vec(), len as u64);
            self.blocks.push(OutputBlock {
                output,
                requests,
                datatype,
                shape,
                offset: 0,
                len,
                placed: true,
                lent: None,
            });
            return Ok(memory);
        }
        let (mut block, memory) = new_block(self.arena, (output, datatype), shape, len)?;
        block.requests.clone_from(&self.part);
        self.blocks.push(block);
        Ok(memory)
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
        let len = byte_size(datatype, shape).and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or_else(|| run_error(format!("output {output} has no size: {datatype} {shape:?}")))?;
        self.allocate(output, datatype, shape, len)
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
                self.shared.inputs_ready(self.execute.batch, now);
            }
        }
    }

    /// Stamps that the model has computed. Not called: when `execute` returns.
    pub fn computed(&mut self) {
        self.output_start = Some(clock::now());
    }

    /// What has come of the batch, whose inputs this is the loan of.
    fn executed(mut self, loan: Option<Arc<Loan>>, error: Option<InferError>) -> Executed {
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

/// A new block of the arena for an output, and its memory.
fn new_block<'m>(
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

/// The longest message that travels to the frontend, in bytes: an error may quote what a client sent.
const MAX_MESSAGE: usize = 4 << 10;

pub(crate) fn wire_error(error: InferError) -> WireError {
    let InferError { code, reason, mut message, .. } = error;
    if message.len() > MAX_MESSAGE {
        message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        message.push_str("...");
    }
    WireError { code, message, of_region: reason == Reason::SharedMemory }
}

/// What a panic said.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// Resident memory of this process, bytes; 0 where /proc is not mounted.
///
/// `smaps_rollup` counts the pages; the cheaper `statm` may be wrong by some hundred kilobytes for each processor, more
/// than a small model has.
fn resident_memory() -> u64 {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let kilobytes = |line: &str| line.strip_prefix("Rss:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok();
    if let Some(kilobytes) = rollup.lines().find_map(kilobytes) {
        return kilobytes << 10;
    }
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}
