//! The frontend: protocols in, worker processes out.

pub mod cli;
mod clock;
pub mod engine;
#[cfg(test)]
#[allow(missing_docs)]
pub mod fake_engine;
pub mod grpc;
pub mod http;
pub mod listener;
mod log;
#[allow(unsafe_code)]
mod memory;
mod metrics;
mod onnxruntime;
mod process;
mod repository;
mod scheduler;
pub mod start;
mod supervisor;
mod wire;
