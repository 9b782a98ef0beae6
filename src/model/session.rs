//! The options of an ONNX Runtime session, with the names of Triton's ONNX Runtime backend:
//! `optimization { graph }`, `optimization { execution_accelerators }`, `model_operations` and
//! parameters of the model.
//!
//! Source: the section "Other Optimization Options with ONNX Runtime" of that backend's README.

use super::config::accelerator;
use super::{ConfigError, ModelConfig};

/// How much ONNX Runtime optimizes a graph before it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GraphLevel {
    /// No optimization.
    Disabled,
    /// Constant folding and removal of redundant nodes.
    Basic,
    /// Also node fusions.
    Extended,
    /// Also layout optimizations.
    #[default]
    All,
}

/// The options of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionOptions {
    /// How much the graph is optimized.
    pub level: GraphLevel,
    /// Whether independent nodes run concurrently.
    pub parallel: bool,
    /// The number of threads within a node; `None` lets the server choose.
    pub intra_threads: Option<usize>,
    /// The number of threads across nodes, for concurrent nodes only; `None` lets the server
    /// choose.
    pub inter_threads: Option<usize>,
    /// Entries of the session's configuration: keys (with the prefix `session.`) and values.
    pub entries: Vec<(String, String)>,
    /// Whether the arena of host memory is used; `None` for the runtime's default.
    pub arena: Option<bool>,
    /// Whether allocations of one shape are planned together; `None` for the runtime's default.
    pub pattern: Option<bool>,
    /// Libraries with custom operators.
    pub libraries: Vec<String>,
}

/// The model parameters that are session options, except those with the prefix `session.`.
pub(super) const PARAMETERS: [&str; 6] = [
    "execution_mode",
    "graph_optimization_level",
    "intra_op_thread_count",
    "inter_op_thread_count",
    "enable_mem_arena",
    "enable_mem_pattern",
];

/// The maximum number of threads of a session.
const MAX_THREADS: usize = 1024;

impl ModelConfig {
    /// Returns the options of this model's session.
    ///
    /// # Errors
    /// An option has an invalid value; such configurations of `onnxruntime` are refused.
    pub fn session_options(&self) -> Result<SessionOptions, ConfigError> {
        let parameter = |key: &str| self.parameters.get(key).map(|value| value.trim());
        let wrong = |key: &str, value: &str, allowed: &str| {
            ConfigError::new(format!(
                "parameter '{key}' of model {} is '{value}'; allowed are {allowed}",
                self.name
            ))
        };
        let threads = |key: &str| match parameter(key).map(|value| (value, value.parse::<usize>()))
        {
            None | Some((_, Ok(0))) => Ok(None),
            Some((_, Ok(threads))) if threads <= MAX_THREADS => Ok(Some(threads)),
            Some((value, _)) => {
                Err(wrong(key, value, "whole numbers from 0 (the server chooses) to 1024"))
            }
        };
        let switch = |key: &str| match parameter(key)
            .map(|value| (value, value.to_ascii_lowercase()))
        {
            None => Ok(None),
            Some((_, word)) if ["1", "true", "on"].contains(&word.as_str()) => Ok(Some(true)),
            Some((_, word)) if ["0", "false", "off"].contains(&word.as_str()) => Ok(Some(false)),
            Some((value, _)) => Err(wrong(key, value, "0, 1, true, false, on and off")),
        };
        let parallel = match parameter("execution_mode") {
            None | Some("0") => false,
            Some("1") => true,
            Some(value) => {
                return Err(wrong("execution_mode", value, "0 (sequential) and 1 (parallel)"));
            }
        };
        let level = match parameter("graph_optimization_level") {
            None => self.graph_level()?,
            Some("0") => GraphLevel::Disabled,
            Some("1") => GraphLevel::Basic,
            Some("2") => GraphLevel::Extended,
            Some("99") => GraphLevel::All,
            Some(value) => {
                let allowed = "0 (none), 1 (basic), 2 (extended) and 99 (all)";
                return Err(wrong("graph_optimization_level", value, allowed));
            }
        };
        let entries = self.parameters.iter().filter(|(key, _)| key.starts_with("session."));
        let libraries = self
            .proto
            .model_operations
            .as_ref()
            .map(|operations| operations.op_library_filename.clone());
        Ok(SessionOptions {
            level,
            parallel,
            intra_threads: threads("intra_op_thread_count")?,
            inter_threads: threads("inter_op_thread_count")?,
            entries: entries.map(|(key, value)| (key.clone(), value.clone())).collect(),
            arena: switch("enable_mem_arena")?,
            pattern: switch("enable_mem_pattern")?,
            libraries: libraries.unwrap_or_default(),
        })
    }

    /// Converts Triton's number of the level, which differs from ONNX Runtime's.
    fn graph_level(&self) -> Result<GraphLevel, ConfigError> {
        let graph =
            self.proto.optimization.as_ref().and_then(|optimization| optimization.graph.as_ref());
        match graph.map_or(0, |graph| graph.level) {
            0 => Ok(GraphLevel::All),
            -1 => Ok(GraphLevel::Basic),
            1 => Ok(GraphLevel::Extended),
            2 => Ok(GraphLevel::Disabled),
            other => Err(ConfigError::new(format!(
                "optimization.graph.level of model {} is {other}; allowed are -1 (basic), 0 \
                 (all), 1 (extended) and 2 (none)",
                self.name
            ))),
        }
    }

    /// Returns the accelerators of `optimization.execution_accelerators.cpu_execution_accelerator`
    /// in their order: names, and parameters sorted by name.
    pub fn cpu_accelerators(&self) -> impl Iterator<Item = (&str, Vec<(&str, &str)>)> {
        let optimization = self.proto.optimization.as_ref();
        let named = optimization.and_then(|all| all.execution_accelerators.as_ref());
        named.into_iter().flat_map(|named| &named.cpu_execution_accelerator).map(accelerator)
    }
}

/// Checks the session options and the names of the CPU accelerators.
///
/// # Errors
/// A session option is invalid, or an accelerator does not exist.
pub(super) fn check(config: &ModelConfig) -> Result<(), ConfigError> {
    config.session_options()?;
    match config.cpu_accelerators().find(|(name, _)| *name != "openvino") {
        None => Ok(()),
        Some((name, _)) => Err(ConfigError::new(format!(
            "the cpu_execution_accelerator '{name}' of model {} is not known; allowed is openvino",
            config.name
        ))),
    }
}
