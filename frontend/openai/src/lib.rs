//! The pure parts of an OpenAI-compatible API: requests, chat templates, parsers of what models
//! write, and responses.
//!
//! This crate has no sockets, threads, clocks or async code. Callers pass bytes, text and the time
//! in. Everything that reads bytes of a client is linear in their number and allocates nothing by a
//! length that the client wrote.
//!
//! Sources of the formats: OpenAI's API reference, vLLM 0.32 (extensions, golden answers) and
//! `transformers` (chat templates).

pub mod chat;
pub mod completion;
pub mod error;
mod json;
mod marker;
pub mod message;
pub mod options;
pub mod reasoning;
pub mod response;
pub mod sampling;
pub mod stop;
pub mod structured;
pub mod template;
pub mod tools;

pub use chat::ChatRequest;
pub use completion::CompletionRequest;
pub use error::ApiError;
pub use json::{MAX_DEPTH, MAX_VALUES};
