//! Serves requests with worker processes: implements the traits of `pharos::service`, independent
//! of any protocol.

pub mod cache;
mod calls;
pub mod engine;
mod ensemble;
pub mod fuzzing;
pub mod launch;
mod load_progress;
pub mod loader;
#[allow(unsafe_code)]
mod memory;
mod model_memory;
pub mod onnxruntime;
mod process;
mod sample_ring;
mod scheduler;
mod serving;
pub mod shared_memory;
#[cfg(test)]
mod simulation;
pub mod store;
mod supervisor;
mod wire;
mod worker_session;

pub use engine::{Engine, Settings, Unfinished};
