//! The edge of OpenAI's API. [`add_to`] adds its paths to the table of a port.
//!
//! Most modules are pure: requests, chat templates, parsers of what models write, and responses
//! have no sockets, threads, clocks or async code. Everything that reads bytes of a client is
//! linear in their number and allocates nothing by a length that the client wrote. The others run
//! requests: `routes` has the paths, `models` the chat templates, `renderer` their processes,
//! `chat_inference` begins chats, `contract`, `pooling`, `operation` and `tokenizer` translate between
//! requests and tensors, `generation` runs inferences, and `events` streams. `adapters` and `sleep`
//! change what is loaded. A request of `responses` is a chat in another form. `passthrough` answers
//! requests to models that implement the API themselves. `tei` has the paths of
//! text-embeddings-inference, which share the models that read texts.
//!
//! Sources of the formats: OpenAI's API reference, vLLM 0.32 (extensions, golden answers) and
//! `transformers` (chat templates).

mod adapters;
mod answer;
pub mod chat;
mod chat_completions;
mod chat_inference;
mod choice;
pub mod classes;
pub mod completion;
mod completions;
mod contract;
mod edge;
pub mod embeddings;
pub mod error;
mod events;
mod generation;
mod json;
mod marker;
pub mod media;
pub mod message;
mod models;
mod operation;
pub mod options;
mod passthrough;
mod pooling;
mod prompt;
pub mod reasoning;
pub mod renderer;
mod respond;
pub mod response;
pub mod responses;
mod routes;
pub mod sampling;
pub mod scores;
mod sleep;
pub mod stop;
pub mod structured;
pub mod tei;
pub mod template;
mod tensors;
pub mod tokenize;
mod tokenizer;
pub mod tools;

pub use answer::not_found;
pub use chat::ChatRequest;
pub use completion::CompletionRequest;
pub use error::ApiError;
pub use json::{MAX_DEPTH, MAX_VALUES};
pub use models::{Adapter, Models};
pub use prompt::Prompt;
pub use responses::request::ResponsesRequest;
pub use routes::{add_management_to, add_to, route_of_prediction};

#[cfg(test)]
mod tests;
