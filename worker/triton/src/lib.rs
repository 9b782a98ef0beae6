//! Runs compiled backends of Triton, unmodified: provides the functions `TRITONBACKEND_*` and
//! `TRITONSERVER_*` to a library `libtriton_NAME.so`, and calls its entry points as Triton does. Each
//! instance of a model is a process, so a backend that crashes ends its instance and nothing else.
//!
//! The interface is Triton's: `tritonbackend.h` and `tritonserver.h` of triton-inference-server/core,
//! versions 1.19 and 1.34. The declarations here are written from its documentation; no text of these
//! files is copied.
//!
//! Contract for `unsafe`, of this package: a library calls the functions with the types of the
//! interface. A pointer to an object is null or was returned by a function of the interface; all other
//! pointers are null or valid as the interface specifies, for the duration of the call; a string ends
//! with a NUL. Objects are checked (`object`); other pointers can only be checked for null and
//! alignment. A library that breaks this contract harms only its process.

#![allow(unsafe_code)]

mod answer;
mod backend;
mod buffer;
mod calls;
mod complete;
mod computation;
mod error;
mod fault;
mod foreign;
mod functions;
mod fuzzed;
pub mod fuzzing;
mod joined;
mod kept;
mod library;
mod loader;
mod memory;
mod message;
mod metrics;
mod model;
mod needs;
mod object;
mod placeholder;
mod process;
mod request;
mod response;
mod settings;
mod states;
mod statistics;
mod traces;
mod values;

pub use backend::create;
pub use complete::complete;
