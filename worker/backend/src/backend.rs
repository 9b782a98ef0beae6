//! The backend trait, and the context that backends are created from.

use std::path::Path;

use pharos::error::InferError;
use pharos::model::ModelConfig;

use crate::batch::Batch;
use crate::device::DeviceInputs;
use crate::metrics::Metrics;
use crate::outputs::Outputs;
use crate::session::Runtime;

/// Runs one instance of a model.
pub trait Backend {
    /// The engine with its version, for logs and the served configuration; for example `tract
    /// 0.23.9`.
    fn engine(&self) -> String;

    /// Executes a batch: reads `batch`, allocates and fills the outputs that [`Batch::wants`] asks
    /// for. A decoupled model may answer each request any number of times, with
    /// [`Outputs::response`].
    ///
    /// # Errors
    /// Fails every request of the batch. To fail single requests, use [`Outputs::fail`].
    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError>;

    /// Whether inputs and output memory may change while a batch is executed: a client that shares
    /// its memory can write there at any moment. Such a backend accesses the client's memory
    /// directly, without any particular alignment. It must not make two decisions from separate
    /// reads of the same bytes, and must work correctly, not only safely, whatever bytes it reads.
    /// All other backends get copies.
    fn tolerates_concurrent_writes(&self) -> bool {
        false
    }

    /// Whether the backend reads inputs directly from a device's memory, through
    /// [`Input::pieces`](crate::Input::pieces), and allocates its outputs with
    /// [`Outputs::allocate_anywhere`]. It must tolerate concurrent writes there, as for
    /// [`Backend::tolerates_concurrent_writes`]. All other backends find all inputs in the
    /// process's memory.
    fn takes_device_memory(&self) -> DeviceInputs {
        DeviceInputs::Never
    }

    /// Called when a sequence is over without a step that has
    /// [`SequenceStep::end`](pharos::wire::SequenceStep::end): it was idle for too long, or its
    /// client has disconnected. For backends that keep data for each sequence; the runtime keeps
    /// and drops the states of the configuration.
    fn sequence_ended(&mut self, _key: u64) {}

    /// Whether the backend records the times of each batch
    /// ([`RECORDED_BY_WORKER`](pharos::metrics::catalog::RECORDED_BY_WORKER)) itself; else the
    /// runtime does.
    fn records_its_times(&self) -> bool {
        false
    }

    /// Whether batches for this backend carry everything that clients have sent with a request
    /// ([`BatchRequest::details`](pharos::wire::BatchRequest::details)).
    fn wants_details(&self) -> bool {
        false
    }

    /// Returns a function that reports whether the model is ready, if the model has one. The
    /// function is called when a client asks for the model's readiness, on a separate thread and
    /// also while a batch is executed. A model that is not ready still gets requests.
    fn readiness(&self) -> Option<Readiness> {
        None
    }
}

/// Whether a model is ready; see [`Backend::readiness`].
pub type Readiness = Box<dyn FnMut() -> bool + Send>;

/// Creates a backend for the model that the context describes.
///
/// # Errors
/// The model cannot be loaded; the message is meant for the author of the model.
pub type Create = fn(&Context<'_>) -> Result<Box<dyn Backend>, InferError>;

/// The data that a backend is created from.
pub struct Context<'a> {
    /// The model's configuration.
    pub config: &'a ModelConfig,
    /// The directory of the version, with the model's files.
    pub directory: &'a Path,
    /// The directory of the model, with its versions.
    pub model_directory: &'a Path,
    /// The settings of `--backend-config` for this backend and for all backends.
    pub backend_settings: &'a [(String, String)],
    /// Whether the server's log shows verbose lines.
    pub verbose: bool,
    /// Threads that one execution may use.
    pub threads: usize,
    /// The metrics that the model may record; clone and keep it.
    pub metrics: &'a Metrics,
    /// Runtime functions that the backend may use at any time; clone and keep it.
    pub runtime: &'a Runtime,
    /// The instance's name, for messages: `model_0_0`.
    pub instance: &'a str,
    /// The model's version.
    pub version: u64,
    /// Whether the instance is to run on a GPU.
    pub on_gpu: bool,
}
