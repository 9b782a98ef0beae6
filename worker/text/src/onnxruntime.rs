//! Graphs on ONNX Runtime.

use std::path::Path;

use pharos::error::InferError;
use pharos_backend::Context;
use pharos_worker::{GraphTensor, ReadOutput, SharedSession};

use crate::graph::Graph;

/// Opens a graph.
///
/// # Errors
/// ONNX Runtime cannot load it, or it has an input that is not of integers.
pub(crate) fn open(context: &Context<'_>, path: &Path) -> Result<Box<dyn Graph>, InferError> {
    Ok(Box::new(SharedSession::open(context, path)?))
}

impl Graph for SharedSession {
    fn engine(&self) -> String {
        SharedSession::engine(self)
    }

    fn inputs(&self) -> &[GraphTensor] {
        SharedSession::inputs(self)
    }

    fn outputs(&self) -> &[GraphTensor] {
        SharedSession::outputs(self)
    }

    fn run(
        &self,
        rows: usize,
        length: usize,
        inputs: &[Vec<i64>],
        output: usize,
        read: ReadOutput<'_>,
    ) -> Result<(), InferError> {
        SharedSession::run(self, [rows, length], inputs, output, read)
    }
}
