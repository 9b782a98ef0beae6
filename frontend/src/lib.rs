//! The frontend: protocols in, worker processes out.

mod access;
mod body_timeout;
mod cache;
mod calls;
pub mod cli;
mod client;
mod clock;
mod descriptors;
mod directories;
pub mod engine;
mod file_watch;
pub mod grpc;
pub mod http;
mod launch;
pub mod listener;
mod log;
#[allow(unsafe_code)]
mod memory;
mod metrics;
mod onnxruntime;
mod process;
pub mod receiving;
mod repository;
mod request_log;
mod request_trace;
mod scheduler;
pub mod shared_memory;
pub mod start;
mod statsd;
mod supervisor;
mod system;
pub mod torchserve;
mod trace;
pub mod tslog;
mod wire;
