//! The backend `text`: text models in Hugging Face's layout, with an ONNX graph. It makes vectors,
//! scores, probabilities of classes, spans and tokens of texts.
//!
//! A batch is computed in three steps: the texts become tokens, on several threads ([`tokens`]); texts
//! of similar lengths are computed together ([`batches`]); and the outputs of the graph become results
//! ([`results`]). The files of a model are read by [`pharos::model::text_files`], and the tensors are
//! those of [`pharos::model::pooling`].

mod batches;
mod directory;
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
