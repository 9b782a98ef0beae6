//! The frontend: protocols in, worker processes out.

mod access;
mod cache;
mod calls;
pub mod cli;
mod client;
mod clock;
// In unit tests nothing starts the server, which sets the limit and removes what others left.
#[cfg_attr(test, allow(dead_code))]
mod descriptors;
#[cfg_attr(test, allow(dead_code))]
mod directories;
pub mod engine;
mod ensemble;
#[cfg(test)]
#[allow(missing_docs)]
pub mod fake_engine;
pub mod grpc;
pub mod http;
mod launch;
pub mod listener;
mod loader;
// In unit tests nobody starts it.
#[cfg_attr(test, allow(dead_code))]
mod log;
#[allow(unsafe_code)]
mod memory;
mod metrics;
mod onnxruntime;
mod process;
pub mod receiving;
// In unit tests nobody starts it.
#[cfg_attr(test, allow(dead_code))]
mod reread;
mod scheduler;
mod serving;
pub mod shared_memory;
mod slow;
// Joins the edges to the real engine; in unit tests the edges have another one (`fake_engine`).
#[cfg(not(test))]
pub mod start;
mod statsd;
mod store;
mod supervisor;
mod system;
pub mod torchserve;
mod trace;
pub mod tslog;
mod wire;
mod worker_session;
