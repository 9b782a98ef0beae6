//! The core of Pharos: makes the decisions and keeps the state of the server, without I/O.
//!
//! Nothing here opens a socket, starts a thread or reads a clock: callers pass bytes and the time
//! in and get decisions back. `frontend/` and `worker/` perform them. ARCHITECTURE.md has the map.

#[macro_use]
extern crate pharos_base;

pub mod access;
pub mod arena;
pub mod batch_split;
pub mod cache;
pub mod classification;
pub mod data;
pub mod ensemble;
pub mod fuzzing;
pub mod infer;
pub mod load_report;
pub mod model;
pub mod printable;
pub mod region;
pub mod repository;
pub mod request_trace;
pub mod scheduler;
pub mod service;
pub mod shared_memory;
pub mod supervisor;
pub mod tensor;
pub mod trace;
pub mod wire;
pub mod yielding;

pub use pharos_base::{error, id, otlp, shm, timeline};
pub use pharos_metrics as metrics;
