//! The worker: a process that runs one instance of one model version for the frontend that started
//! it.
//!
//! Deliberately synchronous: reads the frame of one batch at a time from a ring in shared memory,
//! computes the batch in place in the arenas, and answers. A backend that needs asynchronous work
//! uses the [`Runtime`]. The worker never serves clients and never outlives its frontend.

#[allow(unsafe_code)]
mod descriptors;

mod access;
mod backend;
#[allow(unsafe_code)]
pub mod command_line;
mod device;
mod fork_server;
mod instance;
#[allow(unsafe_code)]
mod pinning;
mod regions;
mod resident_memory;
mod sandbox;
mod state;
mod watch;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use pharos::error::InferError;
use pharos::wire::access::CHECK_ACCESS;
use pharos::wire::fork_server::FORK_SERVER;
use pharos::wire::regions::PROBE;
use pharos::wire::sandbox::{CHECK, SANDBOX};
use pharos::wire::{Load, Loaded, ToFrontend, ToWorker, VERSION};
use pharos_backend::runtime::{Reader, Sender, connect, map, wire_error};
use pharos_backend::{Create, Metrics, Runtime, load_error};

pub use crate::backend::{CreateFromLibrary, GraphTensor, ReadOutput, SharedSession};
use crate::backend::{OtherLibraries, Registry};
use crate::descriptors::{Inherited, SharedDescriptors};
use crate::device::Cuda;
use crate::fork_server::Served;
use crate::instance::{Executed, Instance};
use crate::regions::ClientRegions;

/// A worker with its set of backends. A crate that adds a backend is a short program:
///
/// ```no_run
/// use std::process::ExitCode;
///
/// use pharos::error::InferError;
/// use pharos_backend::{Backend, Batch, Outputs};
/// use pharos_worker::Worker;
///
/// /// Returns each input as the output at the same position.
/// struct Echo;
///
/// impl Backend for Echo {
///     fn engine(&self) -> String {
///         concat!("echo ", env!("CARGO_PKG_VERSION")).to_owned()
///     }
///
///     fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
///         for input in batch.inputs.iter().filter(|input| batch.wants(input.index)) {
///             outputs.allocate(input.index, input.datatype, input.shape, input.data.len())?.copy_from_slice(input.data);
///         }
///         Ok(())
///     }
/// }
///
/// fn main() -> ExitCode {
///     Worker::new().backend("echo", |_context| Ok(Box::new(Echo))).run()
/// }
/// ```
#[derive(Default)]
pub struct Worker {
    backends: Registry,
    complete: Option<Complete>,
}

/// Completes the configuration of a model with the library at the first path: reads a question from
/// standard input and writes the answer to the file at the second path, as
/// [`Draft::query`](pharos::model::Draft::query) describes.
///
/// # Errors
/// The question cannot be read, or the answer cannot be written.
pub type Complete = fn(&Path, &Path) -> std::io::Result<()>;

/// The argument of a process that completes the configuration of a model.
const AUTO_COMPLETE: &str = "--auto-complete";

impl Worker {
    /// Creates a worker with the backends of this crate: `builtin`, `onnxruntime` and shared
    /// libraries.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a backend for models whose configuration has `backend: "NAME"`. Replaces an earlier
    /// backend of this name, including those of this crate.
    #[must_use]
    pub fn backend(mut self, name: &'static str, create: Create) -> Self {
        self.backends.add(name, create);
        self
    }

    /// Sets the function that creates backends for all other names, for a program that finds its
    /// code by the name.
    #[must_use]
    pub fn fallback_backend(mut self, create: Create) -> Self {
        self.backends.set_fallback(create);
        self
    }

    /// Sets the functions for backends in libraries whose names begin with a prefix, such as
    /// `libtriton_`: one creates a backend, the other completes the configuration of a model. All
    /// other libraries have the interface of `pharos_backend.h`.
    #[must_use]
    pub fn libraries(
        mut self,
        prefix: &'static str,
        create: CreateFromLibrary,
        complete: Complete,
    ) -> Self {
        self.backends.set_libraries(OtherLibraries { prefix, create });
        self.complete = Some(complete);
        self
    }

    /// Completes the configuration of a model: the file of the answer is the next argument.
    fn complete(&self, out: Option<OsString>) -> ExitCode {
        let (Some(complete), Some(library), Some(out)) = (self.complete, backend::library(), out)
        else {
            eprintln!(
                "pharos-worker {AUTO_COMPLETE}: expected a file and the library of a backend"
            );
            return ExitCode::from(2);
        };
        let completed = end_with_the_frontend().and_then(|()| complete(&library, Path::new(&out)));
        match completed {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("pharos-worker {AUTO_COMPLETE}: {error}");
                ExitCode::FAILURE
            }
        }
    }

    /// Runs until the frontend closes the connection or sends Shutdown.
    ///
    /// Only the frontend can start a worker: the descriptors that [`pharos::wire::descriptors`]
    /// lists must have been inherited.
    pub fn run(self) -> ExitCode {
        let mut arguments = std::env::args_os().skip(1);
        match arguments.next().as_deref().and_then(OsStr::to_str) {
            Some(PROBE) => {
                let device = arguments.next().unwrap_or_default();
                println!("{}", regions::probe(&device.to_string_lossy()).line());
                return ExitCode::SUCCESS;
            }
            Some(SANDBOX) => return sandbox::run(arguments),
            Some(CHECK) => return sandbox::check(),
            Some(CHECK_ACCESS) => return access::check(arguments),
            Some(AUTO_COMPLETE) => return self.complete(arguments.next()),
            Some(FORK_SERVER) => {
                let modules = arguments.next().unwrap_or_default();
                match fork_server::serve(&modules.to_string_lossy()) {
                    Ok(Served::Copy) => {}
                    Ok(Served::ToTheEnd) => return ExitCode::SUCCESS,
                    Err(error) => {
                        eprintln!("pharos-worker {FORK_SERVER}: {error}");
                        return ExitCode::FAILURE;
                    }
                }
            }
            _ => {}
        }
        let inherited = match Inherited::take() {
            Ok(inherited) => inherited,
            Err(error) => {
                eprintln!("pharos-worker must be started by the pharos frontend: {error}");
                return ExitCode::from(2);
            }
        };
        match serve(inherited, &self.backends) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("pharos-worker: {error}");
                ExitCode::FAILURE
            }
        }
    }
}

/// Runs a worker with the backends of this crate.
pub fn run() -> ExitCode {
    Worker::new().run()
}

/// Ends this process when the frontend is gone. For processes that the frontend has started for
/// another purpose than to serve a model, with a socket as the descriptor
/// [`SOCKET`](pharos::wire::descriptors::SOCKET).
///
/// # Errors
/// The descriptor is not open, or a thread cannot be started.
pub fn end_with_the_frontend() -> std::io::Result<()> {
    watch::end_with_the_frontend(
        &descriptors::take(pharos::wire::descriptors::SOCKET, "socket")?.into(),
    )
}

/// Runs the process: loads the model, then answers batches.
fn serve(inherited: Inherited, backends: &Registry) -> std::io::Result<()> {
    let watched = watch::end_with_the_frontend(&inherited.socket);
    let (reader, sender) = connect(inherited.socket, &inherited.frames)?;
    load_and_run(reader, sender, inherited.memory, backends, |load| cuda_if_watched(watched, load))
}

/// Returns the CUDA driver for a process that ends with the frontend.
///
/// # Errors
/// The process does not end with the frontend; for the user.
fn cuda_if_watched(watched: std::io::Result<()>, load: &Load) -> Result<Arc<Cuda>, InferError> {
    watched
        .map_err(|error| load_error(format!("the worker cannot watch the frontend: {error}")))?;
    Ok(Cuda::new(load.device.clone()))
}

const PANICKED: &str = "the backend panicked; its state may be corrupt, so this process ends";

/// Like [`serve`], with a given CUDA driver, or the reason why no model can be loaded.
fn load_and_run(
    mut reader: Reader,
    sender: Sender,
    memory: SharedDescriptors,
    backends: &Registry,
    cuda: impl FnOnce(&Load) -> Result<Arc<Cuda>, InferError>,
) -> std::io::Result<()> {
    let Some(ToWorker::Load(load)) = reader.read()? else {
        return Err(std::io::Error::other("the first frame was not Load"));
    };
    if load.wire_version != VERSION {
        let text = format!(
            "frontend and worker are of different builds: wire versions {} and {VERSION}",
            load.wire_version
        );
        return sender.send(&ToFrontend::LoadFailed(text));
    }
    let opened = cuda(&load).and_then(|cuda| open(&load, reader, sender.clone(), memory, cuda));
    let loaded = opened.and_then(|(runtime, regions)| {
        let (instance, description) = load_instance(&load, &runtime, &regions, backends)?;
        Ok((instance, description, runtime, regions))
    });
    let (mut instance, description, runtime, regions) = match loaded {
        Ok(loaded) => loaded,
        Err(error) => return sender.send(&ToFrontend::LoadFailed(wire_error(error).message)),
    };
    sender.send(&ToFrontend::Loaded(description))?;
    let connection = &runtime.session().connection;
    let cuda = regions.cuda();
    while let Some(frame) = connection.receive()? {
        match frame {
            ToWorker::Execute(execute) => {
                let Executed { done, panicked, kept } = instance.execute(&execute);
                let is_open = !done.open.is_empty();
                let has_failed = done.error.is_some() || !done.failed.is_empty();
                sender.send_done(done)?;
                drop(kept);
                if is_open {
                    connection.batch_announced(execute.batch);
                }
                cuda.check_after_failure(has_failed || is_open);
                if panicked {
                    return Err(std::io::Error::other(PANICKED));
                }
            }
            ToWorker::Metrics(text) => instance.redefine_metrics(&text)?,
            ToWorker::SequenceEnded(keys) => instance.sequences_ended(&keys),
            ToWorker::Unmap(ids) => regions.unmap(&ids, &runtime.session().arenas),
            ToWorker::Shutdown => break,
            ToWorker::Load(_) => return Err(std::io::Error::other("a second Load frame")),
            // Handled by the thread that read the frame.
            ToWorker::Release(_)
            | ToWorker::Credits(_)
            | ToWorker::Answer(_)
            | ToWorker::CancelRequest(..)
            | ToWorker::CheckReadiness => {}
        }
        if let Some(sentence) = cuda.broken() {
            return Err(std::io::Error::other(sentence));
        }
    }
    Ok(())
}

/// Maps the shared memory and opens the metrics.
///
/// # Errors
/// Why the model cannot be loaded, for the user.
fn open(
    load: &Load,
    mut reader: Reader,
    sender: Sender,
    descriptors: SharedDescriptors,
    cuda: Arc<Cuda>,
) -> Result<(Runtime, Arc<ClientRegions>), InferError> {
    let (inputs, outputs) = map(&descriptors.inputs, &descriptors.outputs)
        .map_err(|error| load_error(format!("cannot map the shared memory: {error}")))?;
    let metrics = Metrics::open(&descriptors.metrics, descriptors.wakeup, load)
        .map_err(|error| load_error(format!("cannot open the metrics: {error}")))?;
    let regions = Arc::new(ClientRegions::new(descriptors.regions, cuda));
    reader.set_spin(Duration::from_micros(load.spin_us.into()));
    Ok((Runtime::new(reader, sender, inputs, outputs, metrics, regions.clone()), regions))
}

/// Loads the model, and starts the thread that answers whether it is ready, if the backend can
/// tell.
///
/// # Errors
/// Why the model cannot be loaded, for the user.
fn load_instance(
    load: &Load,
    runtime: &Runtime,
    regions: &Arc<ClientRegions>,
    backends: &Registry,
) -> Result<(Instance, Loaded), InferError> {
    let mut instance = Instance::load(load, runtime.clone(), regions.clone(), backends)?;
    let description = instance.loaded();
    if let Some(readiness) = instance.take_readiness() {
        runtime
            .answer_readiness(readiness)
            .map_err(|error| load_error(format!("the worker cannot start a thread: {error}")))?;
    }
    Ok((instance, description))
}
