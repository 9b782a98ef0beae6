//! Telemetry of the frontend: its log, metric logs, traces, OTLP, StatsD, samples of workers, and
//! readings of the host and of GPUs.
//!
//! It works with the metrics of `pharos::metrics` and serves no requests.

pub mod log;
pub mod metrics;
pub mod otlp;
pub mod statsd;
pub mod system;
pub mod trace;
pub mod tslog;
