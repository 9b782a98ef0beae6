//! A model as it is to be served: what was asked for, what the archive says, what the configuration says, in that order; and
//! the configuration of the engine that follows from it.

mod write;

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::{Archive, ModelProperties, ModelYaml, Refused, RegistrationParameters, Settings};

/// Where workers run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// On the processors.
    Cpu,
    /// On these GPUs, in turn.
    Gpu(Vec<u32>),
}

/// How a model treats sequences; `None` in [`Deployment::sequence`] if it does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Milliseconds after which a sequence without requests ends; 0 for ever.
    pub max_idle: u32,
    /// Milliseconds that a request may wait; 0 for ever.
    pub timeout: u32,
    /// Sequences at the same time.
    pub most: u32,
    /// Requests of one sequence that may wait.
    pub queue: u32,
}

/// A model as it is served.
#[derive(Clone, Debug)]
pub struct Deployment {
    /// Its name in the engine.
    pub name: String,
    /// Its name in TorchServe's endpoints.
    pub model_name: String,
    /// Its files.
    pub archive: Arc<Archive>,
    /// `MODULE`, `MODULE:FUNCTION` or the name of one that is built in.
    pub handler: String,
    /// `python` or `python3`, which is only reported: `--python` says which interpreter runs.
    pub runtime: String,
    /// Requests in a batch.
    pub batch_size: u32,
    /// Milliseconds.
    pub max_batch_delay: u32,
    /// Workers that are kept running.
    pub min_workers: u32,
    /// The most workers.
    pub max_workers: u32,
    /// Requests that may wait.
    pub queue: u32,
    /// `service_envelope`.
    pub envelope: Option<String>,
    /// Seconds.
    pub response_timeout: u32,
    /// Seconds.
    pub startup_timeout: u32,
    /// Seconds for which a worker that dies is started again.
    pub max_retry_timeout: u32,
    /// Milliseconds after which a client no longer waits; 0 for ever.
    pub client_timeout: u32,
    /// Requests are only accepted while a worker is idle.
    pub use_job_ticket: bool,
    /// Where workers run.
    pub device: Device,
    /// How sequences are treated.
    pub sequence: Option<Sequence>,
    /// The handler sends parts of an answer.
    pub streaming: bool,
    /// Requests stay in their batch until they are done.
    pub continuous: bool,
    /// It was registered at the start.
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
    /// What follows from all that is said. It is called `name` in the engine.
    ///
    /// # Errors
    /// It does not hold together.
    pub fn new(
        settings: &Settings,
        archive: Arc<Archive>,
        asked: &RegistrationParameters,
        name: String,
    ) -> Result<Self, Refused> {
        let model_name = asked.model_name.clone().unwrap_or_else(|| archive.model_name.clone());
        pharos::repository::check_model_name(&model_name).map_err(Refused::bad_request)?;
        let handler = asked.handler.clone().or_else(|| archive.handler.clone());
        let handler = handler.or_else(|| settings.default_handler.clone()).ok_or_else(|| {
            Refused::bad_request(format!("The archive '{}' names no handler; parameter handler does", archive.url))
        })?;
        let yaml = &archive.yaml;
        let said = settings.said(&model_name, &archive.version).cloned().unwrap_or_default();
        let timeout = |asked: Option<u32>, yaml: Option<u32>, said: Option<u32>, default: u32| {
            asked.or(yaml).or(said).filter(|seconds| *seconds > 0).unwrap_or(default)
        };
        let (min_workers, max_workers) = workers(settings, asked, yaml, (said.min_workers, said.max_workers));
        Ok(Self {
            name,
            handler,
            runtime: asked.runtime.clone().unwrap_or_else(|| archive.runtime.clone()),
            batch_size: asked.batch_size.or(yaml.batch_size).or(said.batch_size).unwrap_or(1).max(1),
            max_batch_delay: (asked.max_batch_delay.or(yaml.max_batch_delay).or(said.max_batch_delay))
                .unwrap_or(BATCH_DELAY),
            min_workers,
            max_workers,
            queue: yaml.job_queue_size.filter(|size| *size > 0).unwrap_or(settings.job_queue_size),
            envelope: settings.envelope.clone(),
            response_timeout: timeout(
                asked.response_timeout,
                yaml.response_timeout,
                said.response_timeout,
                settings.default_response_timeout,
            ),
            // As in TorchServe 0 can be asked for, with which no worker starts.
            startup_timeout: asked.startup_timeout.unwrap_or_else(|| {
                timeout(None, yaml.startup_timeout, said.startup_timeout, settings.default_startup_timeout)
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

    /// What a snapshot says about it.
    pub fn properties(&self, default_version: bool) -> ModelProperties {
        ModelProperties {
            name: self.model_name.clone(),
            version: self.archive.version.clone(),
            default_version,
            mar_name: Some(self.archive.mar_name()),
            min_workers: Some(self.min_workers),
            max_workers: Some(self.max_workers),
            batch_size: Some(self.batch_size),
            max_batch_delay: Some(self.max_batch_delay),
            response_timeout: Some(self.response_timeout),
            startup_timeout: Some(self.startup_timeout),
            runtime_type: Some(self.runtime.clone()),
        }
    }

    /// Whether a request of a sequence may enter the batch while the one before it is still streamed.
    pub fn overlaps(&self) -> bool {
        self.continuous && self.sequence.is_some()
    }

    /// Writes the model into a repository: `NAME/config.pbtxt`, and `NAME/1`, a link to the archive's files. What was there
    /// under this name is replaced.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, repository: &Path) -> io::Result<()> {
        write::write(self, repository)
    }
}

/// The fewest and the most workers.
fn workers(
    settings: &Settings,
    asked: &RegistrationParameters,
    yaml: &ModelYaml,
    (least, most): (Option<u32>, Option<u32>),
) -> (u32, u32) {
    let default = || if asked.at_start { settings.default_workers() } else { settings.configured_workers };
    let min = asked.initial_workers.or(yaml.min_workers).or(least).unwrap_or_else(default);
    let max = match asked.initial_workers {
        Some(_) => asked.max_workers,
        None => yaml.max_workers.or(most),
    };
    (min, max.unwrap_or(min).max(min))
}

fn device(settings: &Settings, yaml: &ModelYaml) -> Device {
    let cpu = settings.gpus.is_empty() || yaml.device_type.as_deref() == Some("cpu");
    match (cpu, &yaml.device_ids) {
        (true, _) => Device::Cpu,
        (false, Some(ids)) if !ids.is_empty() && ids.iter().all(|id| settings.gpus.contains(id)) => {
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

/// Whether the handler sends parts of an answer: as `model-config.yaml` says, else whether its code calls what does.
fn streaming(archive: &Archive) -> bool {
    const CALL: &str = "send_intermediate_predict_response";
    let calls = || {
        let entries = std::fs::read_dir(archive.directory.path()).into_iter().flatten().flatten();
        let mut sources = entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "py"));
        sources.any(|path| std::fs::read_to_string(path).is_ok_and(|source| source.contains(CALL)))
    };
    archive.yaml.streaming.unwrap_or_else(calls)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
