//! The graph of a model, which an engine for ONNX computes.

use pharos::error::InferError;

/// A tensor of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// The number of its dimensions; `None` if the file does not say it.
    pub rank: Option<usize>,
}

/// Numbers that a graph has computed: their shape, and the numbers in row-major order.
pub struct Computed<'a> {
    /// The shape.
    pub shape: &'a [usize],
    /// The numbers.
    pub values: &'a [f32],
}

/// A graph whose inputs are integers of the shape `[rows, length]`.
pub trait Graph {
    /// The engine with its version.
    fn engine(&self) -> String;

    /// The inputs of the graph.
    fn inputs(&self) -> &[Port];

    /// The outputs of the graph.
    fn outputs(&self) -> &[Port];

    /// Computes one output from inputs in the order of [`Graph::inputs`], each of `rows` times
    /// `length` numbers, and calls `read` with it.
    ///
    /// # Errors
    /// The engine cannot compute the graph with this shape, the output is not of floating-point
    /// numbers, or `read` fails.
    fn run(
        &mut self,
        rows: usize,
        length: usize,
        inputs: &[Vec<i64>],
        output: usize,
        read: &mut dyn FnMut(Computed<'_>) -> Result<(), InferError>,
    ) -> Result<(), InferError>;
}
