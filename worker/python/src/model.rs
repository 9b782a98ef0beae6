//! The state that all requests of a model share: its configuration, the positions of its outputs,
//! the runtime.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use pharos::model::ModelConfig;
use pharos_backend::{Context, Runtime};
use pyo3::PyResult;

use crate::error::TritonModelException;

/// The model of this process, which runs only one. Static because users create Python objects
/// without passing a handle.
static MODEL: OnceLock<Arc<Model>> = OnceLock::new();

/// Returns the model of this process.
///
/// # Errors
/// The process runs no model: the package was imported outside of a worker.
pub(crate) fn model() -> PyResult<&'static Arc<Model>> {
    let text = "this works only in a model run by the server";
    MODEL.get().ok_or_else(|| TritonModelException::new_err(text))
}

/// Sets the model of this process unless one is set. Returns the process's model.
pub(crate) fn install(model: Arc<Model>) -> Arc<Model> {
    Arc::clone(MODEL.get_or_init(|| model))
}

/// The values of counters and gauges by name and labels, as the bits of doubles.
type Values = HashMap<(String, Vec<String>), Arc<AtomicU64>>;

/// A loaded model, as used by its requests.
pub(crate) struct Model {
    /// The configuration.
    pub(crate) config: ModelConfig,
    /// The instance's name.
    pub(crate) instance: String,
    /// The version.
    pub(crate) version: i64,
    /// Access to shared memory and to other models.
    pub(crate) runtime: Runtime,
    outputs: HashMap<String, usize>,
    /// Whether requests to other models are allowed: between `initialize` and `finalize`.
    open: AtomicBool,
    /// The values of the model's own metrics, by name and labels. Locked while a handle is
    /// created.
    values: Mutex<Values>,
}

impl Model {
    pub(crate) fn new(context: &Context<'_>) -> Self {
        let config = context.config.clone();
        let outputs = config
            .outputs
            .iter()
            .enumerate()
            .map(|(at, output)| (output.name.clone(), at))
            .collect();
        let instance = context.instance.to_owned();
        let version = i64::try_from(context.version).unwrap_or(i64::MAX);
        Self {
            config,
            instance,
            version,
            runtime: context.runtime.clone(),
            outputs,
            open: AtomicBool::new(false),
            values: Mutex::default(),
        }
    }

    /// Returns the position of an output in the configuration.
    pub(crate) fn output(&self, name: &str) -> Option<usize> {
        self.outputs.get(name).copied()
    }

    /// Returns the value of a series that the model declares: the bits of a double, initially 0.
    pub(crate) fn value(&self, name: String, labels: Vec<String>) -> Arc<AtomicU64> {
        let mut values = self.values.lock();
        Arc::clone(values.entry((name, labels)).or_default())
    }

    /// Sets whether the model is serving.
    pub(crate) fn set_open(&self, open: bool) {
        self.open.store(open, Ordering::Relaxed);
    }

    /// Whether the model is serving.
    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Formats the message for clients of a failed batch.
    pub(crate) fn failed(&self, message: &str) -> String {
        format!(
            "Failed to process the request(s) for model '{}', message: {message}",
            self.instance
        )
    }
}
