//! What traces are written from the start.

use std::path::PathBuf;
use std::time::Duration;

use pharos::trace::settings::{Mode, Values};

/// What is traced from the start, and where traces go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tracing {
    /// Files or a collector.
    pub mode: Mode,
    /// What is traced.
    pub values: Values,
    /// The trace file; empty for none.
    pub file: PathBuf,
    /// The collector.
    pub collector: Collector,
    /// Flags that Triton has given up and that say what another flag says too.
    pub overridden: Vec<&'static str>,
    /// Settings that are given and belong to another mode.
    pub of_other_mode: Vec<String>,
}

/// How spans are sent to a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// As clients are shown it.
    pub url: String,
    /// Its host.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Path and query of the URL; gRPC has its own path.
    pub path: String,
    /// gRPC in place of HTTP.
    pub grpc: bool,
    /// Names and values that every export carries.
    pub headers: Vec<(String, String)>,
    /// How long one export may take.
    pub timeout: Duration,
    /// Attributes of this server, beside those that every server has.
    pub resource: Vec<(String, String)>,
    /// `resource` as it was given on the command line.
    pub given_resource: String,
    /// Spans that may wait.
    pub max_queue_size: u32,
    /// Milliseconds between two exports, when spans come slowly.
    pub schedule_delay_ms: u32,
    /// Spans in one export.
    pub max_export_batch_size: u32,
}

impl Default for Collector {
    fn default() -> Self {
        Self {
            url: "http://localhost:4318/v1/traces".to_owned(),
            host: "localhost".to_owned(),
            port: 4318,
            path: "/v1/traces".to_owned(),
            grpc: false,
            headers: Vec::new(),
            timeout: Duration::from_secs(10),
            resource: vec![("service.name".to_owned(), "triton-inference-server".to_owned())],
            given_resource: String::new(),
            max_queue_size: 2048,
            schedule_delay_ms: 5000,
            max_export_batch_size: 512,
        }
    }
}
