//! The initial trace settings.

use std::path::PathBuf;

use pharos::otlp::{SERVICE_NAME, Signal};
use pharos::trace::settings::{Mode, Values};

use crate::otlp::Endpoint;

/// The initial trace settings and the destination of traces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tracing {
    /// Files or a collector.
    pub mode: Mode,
    /// The settings of levels, rates and counts.
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
    /// The collector; clients see its URL.
    pub endpoint: Endpoint,
    /// Resource attributes of this server, in addition to the attributes of every server.
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
            endpoint: Endpoint::local(Signal::Traces),
            resource: vec![("service.name".to_owned(), SERVICE_NAME.to_owned())],
            given_resource: String::new(),
            max_queue_size: 2048,
            schedule_delay_ms: 5000,
            max_export_batch_size: 512,
        }
    }
}
