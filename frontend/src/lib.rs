//! The frontend: protocols in, worker processes out.

pub mod cli;
mod clock;
pub mod engine;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod fake_engine;
pub mod grpc;
pub mod http;
pub mod listener;
#[allow(unsafe_code)]
mod memory;
mod metrics;
mod onnxruntime;
mod process;
mod repository;
mod scheduler;
mod supervisor;
mod wire;
