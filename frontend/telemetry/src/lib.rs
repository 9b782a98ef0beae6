//! What leaves and enters the frontend as numbers and lines: its log, metric logs, traces, StatsD, samples of workers,
//! readings of the host and of GPUs.
//!
//! It consumes the enumeration of `pharos::metrics` and serves no requests.

pub mod log;
pub mod metrics;
pub mod statsd;
pub mod system;
pub mod trace;
pub mod tslog;
