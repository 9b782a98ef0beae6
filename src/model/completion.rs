//! What completes a model configuration: facts about the model's files and this machine.

use super::onnx::ModelSignature;

/// The facts about a model that are not in its configuration's text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Completion<'a> {
    /// The name of the model's directory: the model's name.
    pub directory: &'a str,
    /// The names of the files in the model's version directories; they decide the backend where the configuration is
    /// silent.
    pub files: &'a [String],
    /// The backends that can run here; empty to accept any name. ONNX models fall back from `onnxruntime` to `tract`
    /// when only the latter is listed.
    pub backends: &'a [&'a str],
    /// The numbers of this machine's GPUs, which instances are put on where the configuration names none.
    pub gpus: &'a [u32],
    /// Those of further ones that cannot be used now. A configuration may name them: whether they can be used is asked when
    /// an instance is started.
    pub unusable_gpus: &'a [u32],
    /// Why `onnxruntime` cannot use GPUs here, as the end of a sentence; `None` if it can.
    pub no_cuda_provider: Option<&'a str>,
    /// What the model file says about its inputs and outputs, if it could be read.
    pub signature: Option<&'a ModelSignature>,
    /// Whether inputs, outputs, datatypes and the maximum batch size may be filled in from `signature`.
    pub auto_complete: bool,
    /// The maximum batch size to fill in for a model that can batch and says nothing; 4 in Triton.
    pub default_max_batch_size: u32,
}
