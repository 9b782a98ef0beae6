//! Model configurations: parses text, JSON or protobuf bytes into a checked [`ModelConfig`], which
//! provides the metadata, the JSON form, and the check of requests ([`ModelConfig::check`]).
//!
//! Parse, don't validate: a [`Draft`] is a configuration as written. [`Draft::complete`] fills in
//! facts from the model file and defaults, and returns a [`ModelConfig`], which is always valid.
//! This module never touches files: callers provide the text and the bytes.

mod agents;
mod autocomplete;
mod autocomplete_code;
mod autocomplete_detection;
mod autocomplete_text;
mod backend_io;
mod check;
mod code_fields;
mod completion;
mod config;
mod controls;
mod draft;
pub mod envelope;
mod error;
pub mod generation;
pub mod gguf;
mod json;
mod lexer;
mod load_limits;
mod normalize;
pub mod onnx;
pub mod openai;
pub mod pooling;
mod proto;
mod ragged;
mod render;
mod sandbox;
mod scheduling;
mod session;
mod state;
#[cfg(test)]
mod tests;
mod text;
pub mod text_files;
mod unsupported_backends;
mod validate;
mod warmup;
mod warnings;

pub use agents::Checksum;
pub use autocomplete_code::CodeLocation;
pub use autocomplete_detection::may_auto_complete;
pub use autocomplete_text::{BOS_TOKEN, CHAT_TEMPLATE, EOS_TOKEN, LLAMACPP};
pub use check::Checked;
pub use completion::Completion;
pub use config::{
    InstanceGroup, InstanceKind, ModelConfig, ResponseTimeouts, TensorSpec, VersionPolicy, Warmup,
    WarmupData, WarmupInput,
};
pub use controls::{ControlInput, ControlKind, ControlValues, FalseTrue};
pub use draft::{Draft, SANDBOX};
pub use error::ConfigError;
pub use load_limits::LoadLimits;
pub use normalize::{MAX_INSTANCES, default_model_file, is_hugging_face};
pub use onnx::{ModelSignature, SignatureTensor};
pub use ragged::{BatchInput, BatchInputKind, BatchOutput};
pub use render::{ModelMetadata, TensorMetadata};
pub use sandbox::{CodeOrigin, Isolation, Provenance, SandboxChoice, SandboxMode, refused_sandbox};
pub use scheduling::{
    DynamicBatching, EnsembleStep, QueuePolicy, Scheduling, SequenceBatching, SequenceStrategy,
    TimeoutAction,
};
pub use session::{GraphLevel, SessionOptions};
pub use state::{InitialState, StateSpec, StateValue};
pub use unsupported_backends::{TRITON_LIBRARY, backend_advice};
pub use warmup::WarmupBatch;
