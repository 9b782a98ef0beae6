//! The types below the core and its metrics: ids, errors, points in time, shared memory, and the
//! messages of OpenTelemetry.
//!
//! Both `pharos` and `pharos-metrics` are built on this crate, so that neither waits for the other
//! to change. Use these modules by their names in `pharos`, which exports them. Small functions on
//! the way of a request are `#[inline]`, so that other crates inline them.

#[macro_use]
mod named_enum;

pub mod error;
pub mod id;
pub mod otlp;
#[allow(unsafe_code)]
pub mod shm;
pub mod timeline;
