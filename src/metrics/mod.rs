//! The metrics system: one central cache of all series, defined by `metrics.yaml`, and its views.
//!
//! [`catalog`] says which metrics exist, [`cache`] holds every series, [`record`] is the only way in for the server's own
//! events and [`channel`] the way in for the workers' samples; [`exposition`] and [`statistics`] are renderings of the
//! same cells, so that no two views can disagree.
//!
//! Nothing here may keep a number of its own beside the cache, block a request, or read a clock.

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
pub mod emitter;
pub mod exposition;
mod family;
pub mod feed;
pub mod intake;
pub mod journal;
mod kind;
pub mod labels;
pub mod reading;
pub mod readings;
pub mod record;
mod responses;
mod sample;
pub mod series;
mod source;
pub mod statistics;
pub mod statsd;
pub mod summary;
pub mod tslog;
pub mod worker_lines;
