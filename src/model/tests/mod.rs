//! Tests of the model configuration, one file per interface.
#![allow(clippy::unwrap_used, clippy::panic)]

mod autocomplete_code;
mod complete;
mod controls;
mod fields;
mod gpus;
mod refused;
mod request;
mod state;
mod text;

use super::{Completion, Draft, ModelConfig};

/// The add/sub model of Triton's examples.
const SIMPLE: &str = r#"
backend: "builtin"
max_batch_size: 8
input [
  { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
dynamic_batching { }
"#;

/// An identity model for strings, without batching.
const IDENTITY: &str = r#"
backend: "builtin"
input [ { name: "INPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]
"#;

fn complete(name: &str, source: &str) -> Result<ModelConfig, String> {
    let completion =
        Completion { directory: name, default_max_batch_size: 4, ..Completion::default() };
    let draft = Draft::from_text(source, "config.pbtxt").map_err(|error| error.to_string())?;
    draft.complete(&completion).map_err(|error| error.to_string())
}

fn config(name: &str, source: &str) -> ModelConfig {
    complete(name, source).unwrap()
}
