//! A model to serve: merges the registration, the archive and the configuration, in this order of
//! precedence, and writes the engine's configuration.

mod write;

use std::io;
use std::path::Path;
use std::sync::Arc;

use pharos::model::MAX_INSTANCES;

use super::{
    Archive, ErrorResponse, ModelParameters, ModelProperties, ModelYaml, RegistrationParameters,
    Settings,
};
use pharos_os::directories;

/// The devices that workers run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPUs.
    Cpu,
    /// These GPUs; workers are distributed over them in turn.
    Gpu(Vec<u32>),
}

/// How a model batches sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Milliseconds without requests after which a sequence ends; 0 for no limit.
    pub max_idle: u32,
    /// `sequenceTimeoutMSec`, which is only reported.
    pub timeout: u32,
    /// The most concurrent sequences.
    pub most: u32,
    /// The most queued requests of one sequence.
    pub queue: u32,
}

/// A model to serve.
#[derive(Clone, Debug)]
pub struct Deployment {
    /// The model's name in the engine.
    pub name: String,
    /// The model's name in TorchServe's endpoints.
    pub model_name: String,
    /// The model's files.
    pub archive: Arc<Archive>,
    /// `MODULE`, `MODULE:FUNCTION`, or the name of a built-in handler.
    pub handler: String,
    /// `python` or `python3`. Only reported: `--python` chooses the interpreter.
    pub runtime: String,
    /// The most requests in a batch.
    pub batch_size: u32,
    /// How long a batch waits for more requests, in milliseconds.
    pub max_batch_delay: u32,
    /// The number of workers that are kept running.
    pub min_workers: u32,
    /// The most workers.
    pub max_workers: u32,
    /// The most queued requests.
    pub queue: u32,
    /// `service_envelope`.
    pub envelope: Option<String>,
    /// The timeout of a batch, in seconds.
    pub response_timeout: u32,
    /// The timeout of loading the model, in seconds.
    pub startup_timeout: u32,
    /// The time for which a worker that dies is restarted, in seconds.
    pub max_retry_timeout: u32,
    /// The timeout of a request in milliseconds; 0 for none.
    pub client_timeout: u32,
    /// Accept requests only while a worker is idle.
    pub use_job_ticket: bool,
    /// The devices that workers run on.
    pub device: Device,
    /// How sequences are batched; `None` if the model does not use sequences.
    pub sequence: Option<Sequence>,
    /// The handler sends its response in parts.
    pub streaming: bool,
    /// Requests stay in their batch until they are complete (continuous batching).
    pub continuous: bool,
    /// The model was registered at server start.
    pub at_start: bool,
    /// See [`Settings::limit_max_image_pixels`].
    pub limit_max_image_pixels: bool,
    /// See [`Settings::decode_input_request`].
    pub decode_input_request: bool,
}

/// TorchServe's defaults.
const BATCH_DELAY: u32 = 100;
const RETRY_TIMEOUT: u32 = 300;

impl Deployment {
    /// Merges all settings of a model. `name` is its name in the engine.
    ///
    /// # Errors
    /// The settings are invalid or contradict each other.
    pub fn new(
        settings: &Settings,
        archive: Arc<Archive>,
        asked: &RegistrationParameters,
        name: String,
    ) -> Result<Self, ErrorResponse> {
        let model_name = asked.model_name.clone().unwrap_or_else(|| archive.model_name.clone());
        pharos::repository::check_model_name(&model_name).map_err(ErrorResponse::bad_request)?;
        let named = asked
            .handler
            .as_ref()
            .or(archive.handler.as_ref())
            .or(settings.default_handler.as_ref());
        let Some(handler) = named.cloned() else {
            let text = format!(
                "The archive '{}' names no handler; set the parameter handler",
                archive.url
            );
            return Err(ErrorResponse::bad_request(text));
        };
        let yaml = &archive.yaml;
        let configured = match settings.model_properties(&model_name, &archive.version) {
            Some(properties) => yaml.model.or(&properties.model),
            None => yaml.model.clone(),
        };
        let model = asked.model.or(&configured);
        let timeout = |seconds: Option<u32>, default: u32| {
            seconds.filter(|seconds| *seconds > 0).unwrap_or(default)
        };
        let (min_workers, max_workers) =
            workers(settings, asked, &configured).map_err(ErrorResponse::bad_request)?;
        Ok(Self {
            name,
            handler,
            runtime: asked.runtime.clone().unwrap_or_else(|| archive.runtime.clone()),
            batch_size: model.batch_size.unwrap_or(1).max(1),
            max_batch_delay: model.max_batch_delay.unwrap_or(BATCH_DELAY),
            min_workers,
            max_workers,
            queue: yaml.job_queue_size.filter(|size| *size > 0).unwrap_or(settings.job_queue_size),
            envelope: settings.envelope.clone(),
            response_timeout: timeout(model.response_timeout, settings.default_response_timeout),
            // As in TorchServe, a request may set 0; then no worker starts.
            startup_timeout: (asked.model.startup_timeout).unwrap_or_else(|| {
                timeout(configured.startup_timeout, settings.default_startup_timeout)
            }),
            max_retry_timeout: yaml.max_retry_timeout.unwrap_or(RETRY_TIMEOUT),
            client_timeout: yaml.client_timeout.unwrap_or(0),
            use_job_ticket: yaml.use_job_ticket.unwrap_or(false),
            device: device(settings, yaml),
            sequence: sequence(yaml),
            streaming: streaming(&archive),
            continuous: yaml.continuous_batching.unwrap_or(false),
            at_start: asked.at_start,
            limit_max_image_pixels: settings.limit_max_image_pixels,
            decode_input_request: settings.decode_input_request,
            model_name,
            archive,
        })
    }

    /// Returns the model's properties for a snapshot.
    pub fn properties(&self, default_version: bool) -> ModelProperties {
        ModelProperties {
            name: self.model_name.clone(),
            version: self.archive.version.clone(),
            default_version,
            mar_name: Some(self.archive.mar_name()),
            model: self.parameters(),
            runtime_type: Some(self.runtime.clone()),
        }
    }

    /// Returns the parameters in effect.
    pub fn parameters(&self) -> ModelParameters {
        ModelParameters {
            min_workers: Some(self.min_workers),
            max_workers: Some(self.max_workers),
            batch_size: Some(self.batch_size),
            max_batch_delay: Some(self.max_batch_delay),
            response_timeout: Some(self.response_timeout),
            startup_timeout: Some(self.startup_timeout),
        }
    }

    /// Returns whether a request of a sequence may enter the batch while the previous one is still
    /// streaming its response.
    pub fn overlaps(&self) -> bool {
        self.continuous && self.sequence.is_some()
    }

    /// Writes the model into a repository: `NAME/config.pbtxt`, and `NAME/1`, a link to the
    /// archive's files. Replaces an existing model of this name.
    ///
    /// # Errors
    /// Writing failed.
    pub fn write(&self, repository: &Path) -> io::Result<()> {
        write::write(self, repository)
    }
}

/// Returns the minimum and the maximum number of workers.
///
/// # Errors
/// The minimum is larger than the engine allows.
fn workers(
    settings: &Settings,
    asked: &RegistrationParameters,
    configured: &ModelParameters,
) -> Result<(u32, u32), String> {
    // The most workers of a registration belong to its number of workers.
    let source = if asked.model.min_workers.is_some() { &asked.model } else { configured };
    let min = match source.min_workers {
        Some(min) => min,
        None if asked.at_start => settings.default_workers(),
        None => settings.configured_workers,
    };
    if min > MAX_INSTANCES {
        return Err(format!(
            "The number of workers is {min} (initial_workers, minWorkers or \
             default_workers_per_model); allowed are 0 to {MAX_INSTANCES}"
        ));
    }
    Ok((min, source.max_workers.unwrap_or(min).max(min)))
}

fn device(settings: &Settings, yaml: &ModelYaml) -> Device {
    let cpu = settings.gpus.is_empty() || yaml.device_type.as_deref() == Some("cpu");
    match (cpu, &yaml.device_ids) {
        (true, _) => Device::Cpu,
        (false, Some(ids))
            if !ids.is_empty() && ids.iter().all(|id| settings.gpus.contains(id)) =>
        {
            Device::Gpu(ids.clone())
        }
        (false, _) => Device::Gpu(settings.gpus.clone()),
    }
}

fn sequence(yaml: &ModelYaml) -> Option<Sequence> {
    let sequences = yaml.sequence_batching.unwrap_or(false);
    sequences.then(|| Sequence {
        max_idle: yaml.sequence_max_idle.unwrap_or(0),
        timeout: yaml.sequence_timeout.unwrap_or(0),
        most: yaml.max_num_sequence.unwrap_or(1).max(1),
        queue: yaml.max_sequence_job_queue_size.unwrap_or(1).max(1),
    })
}

/// Returns whether the handler streams its response: as set in `model-config.yaml`, else whether
/// its code calls the streaming function.
fn streaming(archive: &Archive) -> bool {
    const CALL: &str = "send_intermediate_predict_response";
    /// The longest part of a file that is searched.
    const MOST_SOURCE: u64 = 16 << 20;
    if let Some(streaming) = archive.yaml.streaming {
        return streaming;
    }
    let entries = std::fs::read_dir(archive.directory.path()).into_iter().flatten().flatten();
    let sources = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == "py"));
    for path in sources {
        let source = match archive.directory.is_own() {
            // Code of a package may have made something else with such a name, for example a link
            // or a pipe.
            true => directories::read_within(&path, MOST_SOURCE).ok().flatten(),
            false if path.is_file() => std::fs::read_to_string(&path).ok(),
            false => None,
        };
        if source.is_some_and(|source| source.contains(CALL)) {
            return true;
        }
    }
    false
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
