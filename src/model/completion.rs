//! The facts that complete a model configuration: the model's files and this machine's hardware and
//! backends.

use super::gguf::GgufMetadata;
use super::onnx::ModelSignature;
use super::text_files::TextModel;

/// The facts about a model that are not in its configuration's text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Completion<'a> {
    /// The name of the model's directory: the model's name.
    pub directory: &'a str,
    /// The names of the files in the model's version directories. They select the backend if the
    /// configuration does not.
    pub files: &'a [String],
    /// The backends that this server can run; empty to accept any name. ONNX models fall back from
    /// `onnxruntime` to `tract` if only the latter is listed.
    pub backends: &'a [&'a str],
    /// The numbers of this machine's usable GPUs. Instances are placed on them if the
    /// configuration names none.
    pub gpus: &'a [u32],
    /// The numbers of GPUs that cannot be used now. A configuration may name them: whether they
    /// are usable is checked when an instance starts.
    pub unusable_gpus: &'a [u32],
    /// Why `onnxruntime` cannot use GPUs on this machine, as the end of a sentence; `None` if it
    /// can.
    pub no_cuda_provider: Option<&'a str>,
    /// Whether a compiled backend of Triton runs the model: its instances are placed on GPUs by
    /// default.
    pub compiled: bool,
    /// The inputs and outputs that the model file declares, if it could be read.
    pub signature: Option<&'a ModelSignature>,
    /// What the model file says about its prompts, if it is a GGUF file.
    pub gguf: Option<&'a GgufMetadata>,
    /// What the files say about a text model with an ONNX graph, if they are one.
    pub text: Option<&'a TextModel>,
    /// Whether inputs, outputs, datatypes and the maximum batch size may be filled in from
    /// `signature`.
    pub auto_complete: bool,
    /// The maximum batch size to fill in for a model that can batch and configures none; 4 in
    /// Triton.
    pub default_max_batch_size: u32,
}
