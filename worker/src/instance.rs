//! One loaded model: takes an Execute frame's batch through the backend and says how it went.

mod client_memory;
mod inputs;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]
mod responder_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod response_tests;
mod steps;
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
use pharos::wire::{Done, Execute, Load, Loaded};
use pharos_backend::runtime::{BatchLoan, ClientAccess, ClientMemory, Finished, Loan, clock};
use pharos_backend::{
    Backend, Batch, Context, DeviceInputs, Outputs, Readiness, Received, Requests, Runtime, Series, load_error,
    run_error,
};

use crate::backend::Registry;
use crate::regions::ClientRegions;
use crate::state::States;

use inputs::batch_of;

/// A loaded model instance.
pub(crate) struct Instance {
    backend: Box<dyn Backend>,
    config: ModelConfig,
    runtime: Runtime,
    regions: Arc<ClientRegions>,
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
    /// For the user: why the model cannot be loaded.
    pub(crate) fn load(
        load: &Load,
        runtime: Runtime,
        regions: Arc<ClientRegions>,
        backends: &Registry,
    ) -> Result<Self, InferError> {
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
            on_gpu: regions.cuda().device().is_some(),
        };
        let backend = catch_unwind(AssertUnwindSafe(|| backends.create(&context, regions.cuda())))
            .unwrap_or_else(|panic| Err(load_error(format!("the backend panicked: {}", panic_text(&*panic)))))?;
        let read = |file: &str| {
            let path = Path::new(&load.initial_states).join(file);
            std::fs::read(&path).map_err(|error| format!("'{}' cannot be read: {error}", path.display()))
        };
        let states = States::new(&config, read).map_err(load_error)?;
        let grown = resident_memory().saturating_sub(before);
        runtime.metrics().flush();
        let (state_bytes, instance, readiness) = (None, load.instance.clone(), backend.readiness());
        let pinned = crate::pinning::pin(runtime.session(), regions.cuda());
        let mut this =
            Self { backend, config, runtime, regions, states, state_bytes, instance, grown, readiness, pinned };
        this.show_states();
        Ok(this)
    }

    /// One of a backend that a test has made.
    #[cfg(test)]
    pub(crate) fn new(
        backend: Box<dyn Backend>,
        config: ModelConfig,
        runtime: Runtime,
        regions: Arc<ClientRegions>,
    ) -> Self {
        let (states, state_bytes, instance, grown, readiness) = (None, None, "m_0".to_owned(), 0, backend.readiness());
        let pinned = 0;
        Self { backend, config, runtime, regions, states, state_bytes, instance, grown, readiness, pinned }
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

    /// The instance, as the frontend needs to know it.
    pub(crate) fn loaded(&self) -> Loaded {
        Loaded {
            engine: self.backend.engine(),
            memory: self.grown,
            details: self.backend.wants_details(),
            asked: self.readiness.is_some(),
            pinned: self.pinned,
        }
    }

    /// The model's own answer to whether it is ready; returned once.
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
        let (runtime, regions) = (self.runtime.clone(), self.regions.clone());
        let session = runtime.session();
        // Memory is handed back to the system only when there is time for it.
        session.arenas.outputs.release(&execute.released);
        session.metrics.batch_begins(&execute.requests);
        let start = clock::now();
        let bytes = states.as_ref().map(States::bytes);
        let uses_regions = client_memory::uses_regions(execute);
        let unusable = if uses_regions { client_memory::open(&mut regions.table_mut(), execute) } else { Vec::new() };
        let table = uses_regions.then(|| regions.table());
        let loan = BatchLoan::new(&session.arenas, &*regions, execute);
        let mut outputs = Outputs::new(session, config, execute, start);
        if config.decoupled {
            outputs.register();
        }
        let engine = Engine { backend: &mut **backend, states: states.as_mut() };
        let result = if let Some(table) = &table {
            let access = engine.access(config);
            outputs.use_client_memory(ClientMemory::new(&**table, execute, access));
            engine.execute_with_client_memory(config, (&loan, execute), &mut outputs, unusable)
        } else {
            match batch_of(config, &session.arenas.inputs, &loan, execute) {
                Ok(batch) => engine.execute(&batch, &mut outputs),
                Err(error) => Ok(Err(error)),
            }
        };
        let (error, panicked) = match result {
            Ok(result) => (result.err(), false),
            Err(panic) => (Some(run_error(format!("the backend panicked: {}", panic_text(&*panic)))), true),
        };
        let Finished { done, kept } = outputs.finish_batch(loan.into_loan(), error);
        self.record_states(bytes);
        runtime.metrics().batch_executed(&done, timed);
        Executed { done, panicked, kept }
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
        // Cancelled while it waited behind another batch: its outputs would be discarded. But a sequence must not miss a step.
        if batch.all_cancelled() && batch.requests.iter().all(|request| request.sequence.is_none()) {
            return Ok(Err(InferError::cancelled()));
        }
        match self.states {
            Some(states) => steps::execute(states, self.backend, batch, outputs),
            None => attempt(self.backend, batch, outputs),
        }
    }

    /// What the backend accesses itself in memory of clients. Outputs that are read again later, or not sent in the end, are
    /// not written there at once.
    fn access(&self, config: &ModelConfig) -> ClientAccess {
        if self.states.is_some() || config.decoupled || config.has_iterative_sequences() {
            return ClientAccess { in_place: false, on_device: DeviceInputs::Never };
        }
        let in_place = self.backend.tolerates_concurrent_writes();
        ClientAccess { in_place, on_device: self.backend.takes_device_memory() }
    }

    /// Executes a batch that has inputs or outputs in memory of clients, some of which may be unusable.
    fn execute_with_client_memory<'a>(
        self,
        config: &'a ModelConfig,
        (loan, execute): (&BatchLoan<'a>, &'a Execute),
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
        let gathered = match client_memory::gather(config, outputs.input_arena(), execute, outputs, &mut failed) {
            Ok(gathered) => gathered,
            Err(error) => return Ok(Err(error)),
        };
        outputs.inputs_ready();
        let inputs = client_memory::inputs(config, execute, &gathered);
        match inputs.map(|inputs| Batch::new(config, loan, inputs)) {
            Ok(batch) if client_memory::is_hopeless(&batch, &failed) => Ok(Ok(())),
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
