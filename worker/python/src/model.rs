//! What the requests of a model share: its configuration, where its outputs stand in it, the runtime.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pharos::model::ModelConfig;
use pharos_backend::{Context, Runtime};
use pyo3::PyResult;

use crate::error::TritonModelException;

/// The model of this process: it runs one. Python's classes are made by users, who have no handle to pass along.
static MODEL: OnceLock<Arc<Model>> = OnceLock::new();

/// The model of this process.
///
/// # Errors
/// The process runs no model: the package was imported elsewhere.
pub(crate) fn model() -> PyResult<&'static Arc<Model>> {
    let text = "this works only in a model that a server runs";
    MODEL.get().ok_or_else(|| TritonModelException::new_err(text))
}

/// Makes a model that of this process, unless it has one; gives the process's.
pub(crate) fn install(model: Arc<Model>) -> Arc<Model> {
    Arc::clone(MODEL.get_or_init(|| model))
}

/// What counters and gauges have come to, by name and labels, as the bits of doubles.
type Values = HashMap<(String, Vec<String>), Arc<AtomicU64>>;

/// A loaded model, as its requests see it.
pub(crate) struct Model {
    /// The configuration.
    pub(crate) config: ModelConfig,
    /// The instance's name.
    pub(crate) instance: String,
    /// The version.
    pub(crate) version: i64,
    /// Where memory and other models are.
    pub(crate) runtime: Runtime,
    outputs: HashMap<String, usize>,
    /// Whether requests may be made: between `initialize` and `finalize`.
    open: AtomicBool,
    /// The values of the model's own metrics, by name and labels. Held while a handle is made.
    values: Mutex<Values>,
}

impl Model {
    pub(crate) fn new(context: &Context<'_>) -> Self {
        let (config, runtime) = (context.config.clone(), context.runtime.clone());
        let outputs = config.outputs.iter().enumerate().map(|(at, output)| (output.name.clone(), at)).collect();
        let (instance, version) = (context.instance.to_owned(), i64::try_from(context.version).unwrap_or(i64::MAX));
        Self { config, instance, version, runtime, outputs, open: AtomicBool::new(false), values: Mutex::default() }
    }

    /// The place of an output in the configuration.
    pub(crate) fn output(&self, name: &str) -> Option<usize> {
        self.outputs.get(name).copied()
    }

    /// The value of the series of a metric that the model describes: the bits of a double, 0 at first.
    pub(crate) fn value(&self, name: String, labels: Vec<String>) -> Arc<AtomicU64> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(values.entry((name, labels)).or_default())
    }

    /// Says whether the model serves.
    pub(crate) fn set_open(&self, open: bool) {
        self.open.store(open, Ordering::Relaxed);
    }

    /// Whether it does.
    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// An error of the whole batch as a client reads it.
    pub(crate) fn failed(&self, message: &str) -> String {
        format!("Failed to process the request(s) for model '{}', message: {message}", self.instance)
    }
}
