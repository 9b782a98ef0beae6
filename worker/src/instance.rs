//! A loaded model: executes the batches of Execute frames on the backend and reports their outcome.

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
mod test_connection;
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
use pharos::tensor::DataType;
use pharos::wire::{Done, Execute, Load, Loaded};
use pharos_backend::runtime::{BatchLoan, ClientAccess, ClientMemory, Finished, Loan, clock};
use pharos_backend::{
    Backend, Batch, Context, DeviceInputs, Outputs, Readiness, Received, Requests, Runtime, Series,
    load_error, run_error,
};

use crate::backend::Registry;
use crate::regions::ClientRegions;
use crate::resident_memory::resident_memory;
use crate::state::States;

/// A loaded model instance.
pub(crate) struct Instance {
    backend: Box<dyn Backend>,
    config: ModelConfig,
    runtime: Runtime,
    regions: Arc<ClientRegions>,
    /// The states of sequences, if the model has any.
    states: Option<States>,
    /// The metric of the states' size in bytes, if it is defined.
    state_bytes: Option<Series>,
    instance: String,
    /// Growth of the resident memory during the load, in bytes.
    grown: u64,
    readiness: Option<Readiness>,
    /// Bytes of the arenas registered with a GPU driver.
    pinned: u64,
}

impl Instance {
    /// Loads the model.
    ///
    /// # Errors
    /// Why the model cannot be loaded, for the user.
    pub(crate) fn load(
        load: &Load,
        runtime: Runtime,
        regions: Arc<ClientRegions>,
        backends: &Registry,
    ) -> Result<Self, InferError> {
        let before = resident_memory();
        let config =
            ModelConfig::decode(&load.config).map_err(|error| load_error(error.to_string()))?;
        let context = Context {
            config: &config,
            directory: Path::new(&load.directory),
            model_directory: Path::new(&load.model_directory),
            backend_settings: &load.backend_settings,
            verbose: load.verbose,
            threads: (load.threads as usize).max(1),
            metrics: runtime.metrics(),
            runtime: &runtime,
            instance: &load.instance,
            version: load.version,
            on_gpu: regions.cuda().device().is_some(),
        };
        let backend = catch_unwind(AssertUnwindSafe(|| backends.create(&context, regions.cuda())))
            .unwrap_or_else(|panic| {
                Err(load_error(format!("the backend panicked: {}", panic_text(&*panic))))
            })?;
        let states = States::new(&config, |file| {
            let path = Path::new(&load.initial_states).join(file);
            std::fs::read(&path)
                .map_err(|error| format!("'{}' cannot be read: {error}", path.display()))
        })
        .map_err(load_error)?;
        let grown = resident_memory().saturating_sub(before);
        runtime.metrics().flush();
        let readiness = backend.readiness();
        let pinned = crate::pinning::pin(runtime.session(), regions.cuda());
        let mut this = Self {
            backend,
            config,
            runtime,
            regions,
            states,
            state_bytes: None,
            instance: load.instance.clone(),
            grown,
            readiness,
            pinned,
        };
        this.show_states();
        Ok(this)
    }

    /// Creates an instance of a test's backend.
    #[cfg(test)]
    pub(crate) fn new(
        backend: Box<dyn Backend>,
        config: ModelConfig,
        runtime: Runtime,
        regions: Arc<ClientRegions>,
    ) -> Self {
        let readiness = backend.readiness();
        Self {
            backend,
            config,
            runtime,
            regions,
            states: None,
            state_bytes: None,
            instance: "m_0".to_owned(),
            grown: 0,
            readiness,
            pinned: 0,
        }
    }

    /// Looks up the metric of the states' size, and records the current size.
    fn show_states(&mut self) {
        let Some(states) = &self.states else { return };
        self.state_bytes = self.runtime.metrics().state_bytes(&self.instance);
        if let Some(series) = &self.state_bytes {
            series.add_or_update_for(states.bytes() as f64, Requests::None);
        }
    }

    /// Drops the states of sequences that ended without a last step.
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

    /// Records the size of the states if it has changed.
    fn record_states(&self, before: Option<u64>) {
        let now = self.states.as_ref().map(States::bytes);
        if let (Some(series), Some(now)) = (&self.state_bytes, now.filter(|_| now != before)) {
            series.add_or_update_for(now as f64, Requests::None);
        }
    }

    /// Returns the description of the instance for the frontend.
    pub(crate) fn loaded(&self) -> Loaded {
        Loaded {
            engine: self.backend.engine(),
            memory: self.grown,
            details: self.backend.wants_details() || has_ragged_text(&self.config),
            has_readiness_check: self.readiness.is_some(),
            pinned: self.pinned,
        }
    }

    /// Returns the model's readiness function; only once.
    pub(crate) fn take_readiness(&mut self) -> Option<Readiness> {
        self.readiness.take()
    }

    /// Replaces the definitions of metrics.
    ///
    /// # Errors
    /// The text is invalid: the two processes disagree on the format.
    pub(crate) fn redefine_metrics(&mut self, text: &str) -> io::Result<()> {
        self.runtime.metrics().redefine(text)?;
        self.show_states();
        Ok(())
    }

    /// Executes a batch; responses of a decoupled model are sent over the connection meanwhile.
    pub(crate) fn execute(&mut self, execute: &Execute) -> Executed {
        let arrived = clock::now();
        let Self { backend, config, states, .. } = self;
        let timed = (!backend.records_its_times()).then_some(arrived);
        let runtime = self.runtime.clone();
        let regions = self.regions.clone();
        let session = runtime.session();
        // Memory is returned to the system only when the process is idle.
        session.arenas.outputs.release(&execute.released);
        session.metrics.batch_begins(&execute.requests);
        let start = clock::now();
        let bytes = states.as_ref().map(States::bytes);
        let uses_regions = inputs::uses_regions(execute);
        let unusable = if uses_regions {
            inputs::open(&mut regions.table_mut(), execute, &session.arenas)
        } else {
            Vec::new()
        };
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
            engine.execute_with_client_memory(config, &loan, execute, &mut outputs, unusable)
        } else {
            match inputs::batch_of(config, &session.arenas.inputs, &loan, execute) {
                Ok(batch) => engine.execute(&batch, &mut outputs),
                Err(error) => Ok(Err(error)),
            }
        };
        let (error, panicked) = match result {
            Ok(result) => (result.err(), false),
            Err(panic) => {
                (Some(run_error(format!("the backend panicked: {}", panic_text(&*panic)))), true)
            }
        };
        let Finished { done, kept } = outputs.finish_batch(loan.into_loan(), error);
        self.record_states(bytes);
        runtime.metrics().batch_executed(&done, timed);
        Executed { done, panicked, kept }
    }
}

/// Returns whether a batch can have requests with different numbers of strings, which only their
/// details contain.
fn has_ragged_text(config: &ModelConfig) -> bool {
    config.inputs.iter().any(|input| input.allow_ragged_batch && input.datatype == DataType::Bytes)
}

/// The outcome of a batch.
pub(crate) struct Executed {
    pub(crate) done: Done,
    /// The backend panicked and must not be used again.
    pub(crate) panicked: bool,
    /// Values to drop after the frontend has been informed, not before.
    pub(crate) kept: (Vec<Received>, Option<Arc<Loan>>),
}

/// The backend and states that execute a batch.
struct Engine<'e> {
    backend: &'e mut dyn Backend,
    states: Option<&'e mut States>,
}

impl Engine<'_> {
    fn execute(self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Outcome {
        // Cancelled while it waited behind another batch: its outputs would be discarded. But a
        // sequence must not skip a step.
        if batch.all_cancelled() && batch.requests.iter().all(|request| request.sequence.is_none())
        {
            return Ok(Err(InferError::cancelled()));
        }
        match self.states {
            Some(states) => steps::execute(states, self.backend, batch, outputs),
            None => attempt(self.backend, batch, outputs),
        }
    }

    /// Returns the kinds of client memory that the backend accesses directly. Outputs that are read
    /// again later, or may be discarded, are not written there directly.
    fn access(&self, config: &ModelConfig) -> ClientAccess {
        if self.states.is_some() || config.decoupled || config.has_iterative_sequences() {
            return ClientAccess { in_place: false, on_device: DeviceInputs::Never };
        }
        let in_place = self.backend.tolerates_concurrent_writes();
        ClientAccess { in_place, on_device: self.backend.takes_device_memory() }
    }

    /// Executes a batch with inputs or outputs in client memory, some of which may be unusable.
    fn execute_with_client_memory<'a>(
        self,
        config: &'a ModelConfig,
        loan: &BatchLoan<'a>,
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
        let gathered =
            match inputs::gather(config, outputs.input_arena(), execute, outputs, &mut failed) {
                Ok(gathered) => gathered,
                Err(error) => return Ok(Err(error)),
            };
        outputs.inputs_ready();
        let inputs = inputs::inputs(config, execute, &gathered);
        match inputs.map(|inputs| Batch::new(config, loan, inputs)) {
            Ok(batch) if inputs::all_failed(&batch, &failed) => Ok(Ok(())),
            Ok(batch) => self.execute(&batch, outputs),
            Err(error) => Ok(Err(error)),
        }
    }
}

/// The result of a backend's execution, or its panic.
type Outcome = Result<Result<(), InferError>, Box<dyn Any + Send>>;

fn attempt(backend: &mut dyn Backend, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Outcome {
    catch_unwind(AssertUnwindSafe(|| backend.execute(batch, outputs)))
}

/// Returns the message of a panic.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    match panic.downcast_ref::<&str>() {
        Some(text) => (*text).to_owned(),
        None => panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "no message".to_owned()),
    }
}
