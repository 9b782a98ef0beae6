//! The metrics system: one central cache of all series, defined by `metrics.yaml`, and its views.
//!
//! [`catalog`] says which metrics exist, [`builtin`] which cells those of the server show, [`cache`] holds every series,
//! [`record`] is the only way in for the server's own events and [`channel`] the way in for the workers' samples.
//! [`readings`] enumerates all series; the views ([`exposition`], [`counter_lines`]) consume it, and [`statistics`] reads the
//! same cells, so that no two views can disagree.
//!
//! No module may keep a number beside the cache, block a request, or read a clock.

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
mod sample_error;
pub mod series;
mod source;
pub mod statistics;
pub mod statsd;
pub mod summary;
pub mod tslog;
pub mod worker_lines;
