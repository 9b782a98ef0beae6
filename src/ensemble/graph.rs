//! The graph of an ensemble: the steps, and the tensors that they pass to each other.

/// A tensor of a plan: its index in [`Plan::tensors`](super::Plan::tensors).
pub type TensorId = usize;

/// A tensor that steps pass to each other, or an input or output of the ensemble.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in the ensemble.
    pub name: String,
    /// The step that produces it; `None` for an input of the ensemble.
    pub producer: Option<usize>,
    /// The steps that consume it, ascending, each once.
    pub consumers: Vec<usize>,
}

/// A step with its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The model to run.
    pub model: String,
    /// The repository that is searched first; empty for the repository of the ensemble.
    pub namespace: String,
    /// The model's version; `None` for the latest.
    pub version: Option<u64>,
    /// The model's inputs with their tensors, by name.
    pub inputs: Vec<(String, TensorId)>,
    /// The model's outputs with their tensors, by name.
    pub outputs: Vec<(String, TensorId)>,
}
