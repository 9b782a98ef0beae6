//! The model repositories: the same models for this server and for Triton's Python backend. Two of
//! them are built in here; the others are Python models for both.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::compiled::BACKEND;
use crate::workload::{COMPILED, OPEN_SEQUENCES, Workload};

const SIMPLE_TENSORS: &str = r#"max_batch_size: 8
input [
  { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
dynamic_batching { }
"#;

const IDENTITY_TENSORS: &str = r#"max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] } ]
"#;

/// Returns the same configuration with sequences that never end.
fn sequence_tensors() -> String {
    let batching = format!(
        "sequence_batching {{ max_sequence_idle_microseconds: 600000000 oldest {{ \
         max_candidate_sequences: {OPEN_SEQUENCES} }} }}"
    );
    SIMPLE_TENSORS.replace("dynamic_batching { }", &batching)
}

/// The minimal Python model.
const SIMPLE_PYTHON: &str = r#"import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            outputs = [pb_utils.Tensor("OUTPUT0", left + right), pb_utils.Tensor("OUTPUT1", left - right)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"#;

const IDENTITY_PYTHON: &str = r#"import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
        return responses
"#;

/// The model of the Python cases, the same for both servers. A batch may combine requests of
/// several clients.
const PYTHON_IDENTITY: &str = r#"backend: "python"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
dynamic_batching { }
instance_group [ { count: 1 kind: KIND_CPU } ]
"#;

/// The model that measures the cost of an increment.
pub(crate) const COUNTER: &str = "python_counter";

const PYTHON_COUNTER: &str = r#"backend: "python"
max_batch_size: 0
input [ { name: "COUNT" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "NS" data_type: TYPE_FP64 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"#;

const COUNTER_PYTHON: &str = r#"import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        kind = pb_utils.MetricFamily.COUNTER
        self.family = pb_utils.MetricFamily(name="bench_increments", description="Increments", kind=kind)
        self.metric = self.family.Metric(labels={"model": "counter"})

    def execute(self, requests):
        responses = []
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            increment, rounds = self.metric.increment, range(count)
            begin = time.perf_counter_ns()
            for _ in rounds:
                increment(1)
            took = (time.perf_counter_ns() - begin) / count
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("NS", np.array([took]))]))
        return responses
"#;

/// The temporary folder of the benchmark, removed when dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Creates the folder.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub(crate) fn new() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("pharos-bench-{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    /// Returns a path in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Writes the built-in models for this server.
///
/// # Errors
/// The folder cannot be written.
pub(crate) fn write_builtin(repository: &Path) -> io::Result<()> {
    for workload in Workload::ALL {
        let (tensors, function) = match workload {
            Workload::Simple => (SIMPLE_TENSORS.to_owned(), "add_sub"),
            Workload::Identity => (IDENTITY_TENSORS.to_owned(), "identity"),
            Workload::Sequences => (sequence_tensors(), "add_sub"),
            Workload::Python(_)
            | Workload::Handler
            | Workload::Compiled(_)
            | Workload::Growth(_) => continue,
        };
        let parameter = format!(
            "parameters {{ key: \"function\" value {{ string_value: \"{function}\" }} }}\n"
        );
        write_model(
            repository,
            workload.model(),
            &format!("backend: \"builtin\"\n{tensors}{parameter}"),
        )?;
    }
    Ok(())
}

/// Writes the model of the compiled backends.
///
/// # Errors
/// The folder cannot be written.
pub(crate) fn write_compiled(repository: &Path) -> io::Result<()> {
    let config = format!("backend: \"{BACKEND}\"\n{IDENTITY_TENSORS}");
    write_model(repository, COMPILED, &config).map(drop)
}

/// Writes the Python models for both servers.
///
/// # Errors
/// The folder cannot be written.
pub(crate) fn write_common(repository: &Path) -> io::Result<()> {
    let models = [
        ("python_identity", PYTHON_IDENTITY, IDENTITY_PYTHON),
        (COUNTER, PYTHON_COUNTER, COUNTER_PYTHON),
    ];
    for (name, config, program) in models {
        fs::write(write_model(repository, name, config)?.join("model.py"), program)?;
    }
    Ok(())
}

/// Writes Python versions of the built-in models for Triton.
///
/// # Errors
/// The folder cannot be written.
pub(crate) fn write_python(repository: &Path) -> io::Result<()> {
    for workload in Workload::ALL {
        let (tensors, program) = match workload {
            Workload::Simple => (SIMPLE_TENSORS, SIMPLE_PYTHON),
            Workload::Identity => (IDENTITY_TENSORS, IDENTITY_PYTHON),
            _ => continue,
        };
        let config = format!(
            "backend: \"python\"\n{tensors}instance_group [ {{ count: 1 kind: KIND_CPU }} ]\n"
        );
        let version = write_model(repository, workload.model(), &config)?;
        fs::write(version.join("model.py"), program)?;
    }
    Ok(())
}

/// Writes the configuration and returns the folder of version 1.
fn write_model(repository: &Path, name: &str, config: &str) -> io::Result<PathBuf> {
    let version = repository.join(name).join("1");
    fs::create_dir_all(&version)?;
    fs::write(repository.join(name).join("config.pbtxt"), format!("name: \"{name}\"\n{config}"))?;
    Ok(version)
}
