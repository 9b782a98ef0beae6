//! The graph of a model, which an engine for ONNX computes.

use pharos::error::InferError;
use pharos_worker::{GraphTensor, ReadOutput};

/// A graph whose inputs are integers of the shape `[rows, length]`. Several threads may run it.
pub trait Graph: Send + Sync {
    /// The engine with its version.
    fn engine(&self) -> String;

    /// The inputs of the graph.
    fn inputs(&self) -> &[GraphTensor];

    /// The outputs of the graph.
    fn outputs(&self) -> &[GraphTensor];

    /// Computes one output from inputs in the order of [`Graph::inputs`], each of `rows` times
    /// `length` numbers, and calls `read` with its shape and its numbers in row-major order.
    ///
    /// # Errors
    /// The engine cannot compute the graph with this shape, the output is not of floating-point
    /// numbers, or `read` fails.
    fn run(
        &self,
        rows: usize,
        length: usize,
        inputs: &[Vec<i64>],
        output: usize,
        read: ReadOutput<'_>,
    ) -> Result<(), InferError>;
}
