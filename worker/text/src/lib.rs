//! The backend `text`: text models in Hugging Face's layout, with an ONNX graph. It makes vectors,
//! scores, probabilities of classes, spans and tokens of texts.
//!
//! The texts of a batch become tokens, on several threads (`tokens`). Then its requests are taken out of
//! the batch, and the instance takes the next one. The `engine` computes texts of similar lengths
//! together (`batches`), of different requests, with the graph (`computer`); its outputs become
//! results (`heads`, `pooling`), and a request is answered when its last text is computed (`results`).
//! The files of a model are read by [`pharos::model::text_files`], and the tensors are those of
//! [`pharos::model::pooling`].

mod batches;
mod computer;
mod directory;
mod engine;
pub mod graph;
mod heads;
mod metrics;
mod model;
mod onnxruntime;
mod operations;
mod pooling;
mod requests;
mod results;
mod tokens;

use pharos::error::InferError;
use pharos_backend::{Backend, Context};

/// Creates the backend with graphs on ONNX Runtime.
///
/// # Errors
/// The files are not a text model, or a part of it cannot be loaded.
pub fn on_onnx_runtime(context: &Context<'_>) -> Result<Box<dyn Backend>, InferError> {
    model::create(context, onnxruntime::open)
}

/// Opens the graph in a file.
pub type OpenGraph =
    fn(&Context<'_>, &std::path::Path) -> Result<Box<dyn graph::Graph>, InferError>;

/// Creates the backend with graphs on another engine.
///
/// # Errors
/// As for [`on_onnx_runtime`].
pub fn on(context: &Context<'_>, open: OpenGraph) -> Result<Box<dyn Backend>, InferError> {
    model::create(context, open)
}
