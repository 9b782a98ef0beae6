//! The initial trace settings.

use std::path::PathBuf;
use std::time::Duration;

use pharos::trace::settings::{Mode, Values};

/// The initial trace settings and the destination of traces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tracing {
    /// Files or a collector.
    pub mode: Mode,
    /// The settings of what is traced.
    pub values: Values,
    /// The trace file; empty for none.
    pub file: PathBuf,
    /// The collector.
    pub collector: Collector,
    /// Given flags that Triton has deprecated and that another flag overrides.
    pub overridden: Vec<&'static str>,
    /// Given settings that belong to another mode.
    pub of_other_mode: Vec<String>,
}

/// The settings for sending spans to a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// The URL that clients see.
    pub url: String,
    /// The host.
    pub host: String,
    /// The port.
    pub port: u16,
    /// Path and query of the URL; gRPC uses a fixed path.
    pub path: String,
    /// Whether to use gRPC instead of HTTP.
    pub grpc: bool,
    /// Headers of every export.
    pub headers: Vec<(String, String)>,
    /// The time limit of one export.
    pub timeout: Duration,
    /// Resource attributes of this server, in addition to those of every server.
    pub resource: Vec<(String, String)>,
    /// `resource` as given on the command line.
    pub given_resource: String,
    /// The maximum number of waiting spans.
    pub max_queue_size: u32,
    /// The delay in milliseconds after which fewer spans than a full batch are exported.
    pub schedule_delay_ms: u32,
    /// The maximum number of spans in one export.
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
