//! The metrics of Pharos: one cache of all series, which `metrics.yaml` defines, and the views of
//! it.
//!
//! [`catalog`] defines which metrics exist, [`builtin`] lists the server's own with their sources,
//! and [`cache`] holds every series. The server's own events enter only through [`record`], samples
//! of workers through [`channel`]. [`readings`] enumerates all series for the views
//! ([`exposition`], [`otlp`], [`counter_lines`]); [`statistics`] reads the same cells. Every
//! reading shows the cells at one moment, between events ([`transaction`]), so all views agree.
//!
//! No module may keep a number outside the cache, block a request, or read a clock.

#[macro_use]
extern crate pharos_base;

pub mod alias;
mod atomic;
pub mod builtin;
pub mod cache;
pub mod catalog;
mod cell;
pub mod channel;
pub mod counter_lines;
mod counts;
mod durations;
pub mod exposition;
mod family;
pub mod feed;
mod held_sum;
pub mod intake;
pub mod journal;
mod kind;
pub mod label_schema;
pub mod labels;
pub mod log_throttle;
mod native;
mod objectives;
pub mod otlp;
pub mod reading;
pub mod readings;
pub mod record;
mod responses;
mod sample_error;
pub mod series;
mod source;
pub mod statistics;
pub mod statsd;
mod streams;
mod succession;
pub mod summary;
mod tenants;
pub mod text_lines;
mod token_budget;
mod tokens;
pub mod transaction;
pub mod tslog;
pub mod unit;
pub mod worker_lines;
pub mod worker_metrics;

// `tests/loom` compiles modules of this crate with a double of it.
use pharos_base::shm;
