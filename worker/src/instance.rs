//! One loaded model: takes an Execute frame's batch through the backend and says how it went.

mod inputs;
pub(crate) mod lent;
mod outputs;
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

use pharos::error::InferError;
use pharos::model::ModelConfig;
use pharos::wire::{Done, Execute, Load, Loaded, WireError};

use crate::backend::{Backend, Batch, Context, DeviceInputs, Readiness, Registry, Requests, load_error, run_error};
use crate::clock;
use crate::metrics::Series;
use crate::runtime::{Loan, LoanCell, Received, Runtime};
use crate::state::States;

use inputs::{batch_of, batch_with};
use lent::Lent;
pub use outputs::Outputs;
pub(crate) use outputs::placed_block;
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
    readiness: Option<Readiness>,
    /// Bytes of the arenas that are registered with the driver of a GPU.
    pinned: u64,
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
        let (state_bytes, instance, readiness) = (None, load.instance.clone(), backend.readiness());
        let pinned = runtime.0.pin();
        let mut this = Self { backend, config, runtime, states, state_bytes, instance, grown, readiness, pinned };
        this.show_states();
        Ok(this)
    }

    /// One of a backend that a test has made.
    #[cfg(test)]
    pub(crate) fn new(backend: Box<dyn Backend>, config: ModelConfig, runtime: Runtime) -> Self {
        let (states, state_bytes, instance, grown, readiness) = (None, None, "m_0".to_owned(), 0, backend.readiness());
        let pinned = 0;
        Self { backend, config, runtime, states, state_bytes, instance, grown, readiness, pinned }
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
        Loaded {
            engine: self.backend.engine(),
            memory: self.grown,
            details: self.backend.wants_details(),
            asked: self.readiness.is_some(),
            pinned: self.pinned,
        }
    }

    /// What is to be asked whether the model is ready; given once.
    pub(crate) fn take_readiness(&mut self) -> Option<Readiness> {
        self.readiness.take()
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
        let timed = (!backend.records_its_times()).then_some(arrived);
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
            let on_device = if at_once { engine.backend.takes_device_memory() } else { DeviceInputs::Never };
            outputs.lent = Some(Lent::new(regions, execute, (bears_changes, on_device)));
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
        runtime.metrics().batch_executed(&executed.done, timed);
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

/// The longest message that travels to the frontend, in bytes: an error may quote what a client sent.
const MAX_MESSAGE: usize = 4 << 10;

pub(crate) fn wire_error(mut error: InferError) -> WireError {
    if error.message.len() > MAX_MESSAGE {
        error.message.truncate(error.message.floor_char_boundary(MAX_MESSAGE));
        error.message.push_str("...");
    }
    error.into()
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
