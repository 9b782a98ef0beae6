//! Models that generate text: which models they are, and how they count tokens.
//!
//! The tensors are those of Triton's vllm_backend, and of TensorRT-LLM's models in Triton.

use pharos_metrics::record::{FinishReason, TokenCounts};

use super::config::{ModelConfig, TensorSpec};
use crate::infer::InferOutput;
use crate::tensor::{DataType, Tensor, bytes_elements};

/// The input with the prompt.
pub const TEXT_INPUT: &str = "text_input";
/// The output with the generated text.
pub const TEXT_OUTPUT: &str = "text_output";
/// The input with the parameters of sampling as JSON.
pub const SAMPLING_PARAMETERS: &str = "sampling_parameters";
/// The input with the most tokens to generate.
pub const MAX_TOKENS: &str = "max_tokens";
/// The output with the number of tokens of the prompt.
pub const NUM_INPUT_TOKENS: &str = "num_input_tokens";
/// The output with the number of tokens of the prompt that were in a cache.
pub const NUM_CACHED_TOKENS: &str = "num_cached_tokens";
/// The output with the number of tokens that a response has generated.
pub const NUM_OUTPUT_TOKENS: &str = "num_output_tokens";

/// The input that says what the model does with the prompt: [`TOKENIZE`], [`DETOKENIZE`], or the
/// model's task if it is absent.
pub const OPERATION: &str = "operation";
/// The value of [`OPERATION`] of a request for the tokens of a text.
pub const TOKENIZE: &str = "tokenize";
/// The value of [`OPERATION`] of a request for the text of tokens.
pub const DETOKENIZE: &str = "detokenize";
/// The input with a prompt as tokens, in place of its text, and the output with the tokens of the
/// prompt.
pub const PROMPT_TOKEN_IDS: &str = "prompt_token_ids";
/// The input that says whether the output with the tokens of the prompt is wanted.
pub const RETURN_PROMPT_TOKEN_IDS: &str = "return_prompt_token_ids";
/// The output with the log probabilities of the prompt's tokens, as JSON.
pub const PROMPT_LOGPROBS: &str = "prompt_logprobs";

/// The output with the reason of the end of each choice; `None` or empty before it.
pub const FINISH_REASON: &str = "finish_reason";

/// How a model that generates text takes the parameters of sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenerationForm {
    /// As JSON in one tensor, as Triton's vllm_backend.
    Vllm,
    /// As a tensor each, as TensorRT-LLM's models.
    TensorRtLlm,
}

impl GenerationForm {
    /// Returns the form of a model; `None` if the model does not generate text.
    pub fn of(config: &ModelConfig) -> Option<Self> {
        let is_text = |specs: &[TensorSpec], name: &str| {
            specs.iter().any(|spec| spec.name == name && spec.datatype == DataType::Bytes)
        };
        if !is_text(&config.inputs, TEXT_INPUT) || !is_text(&config.outputs, TEXT_OUTPUT) {
            return None;
        }
        if is_text(&config.inputs, SAMPLING_PARAMETERS) {
            return Some(Self::Vllm);
        }
        let has_limit = config.inputs.iter().any(|spec| spec.name == MAX_TOKENS);
        has_limit.then_some(Self::TensorRtLlm)
    }
}

/// Returns the numbers of tokens in a response. A number that is not an integer counts as unknown.
pub fn token_counts(outputs: &[InferOutput]) -> TokenCounts {
    let mut counts = TokenCounts::default();
    for output in outputs {
        let numbers = || integers(&output.tensor);
        match output.name.as_str() {
            NUM_INPUT_TOKENS => counts.prompt = numbers().and_then(|list| list.first().copied()),
            FINISH_REASON if output.tensor.datatype == DataType::Bytes => {
                let bytes = output.tensor.data.as_slice();
                for name in bytes_elements(&bytes).flatten() {
                    let name = std::str::from_utf8(name).unwrap_or("other");
                    if let Some(reason) = FinishReason::named(name) {
                        counts.finished.add(reason);
                    }
                }
            }
            NUM_CACHED_TOKENS => counts.cached = numbers().and_then(|list| list.first().copied()),
            NUM_OUTPUT_TOKENS => {
                counts.generated =
                    numbers().map(|list| list.into_iter().fold(0, u64::saturating_add));
            }
            _ => {}
        }
    }
    counts
}

/// Returns the elements of a tensor of integers; `None` for another datatype and for negative ones.
pub fn integers(tensor: &Tensor) -> Option<Vec<u64>> {
    fn read<const N: usize>(
        tensor: &Tensor,
        convert: impl Fn([u8; N]) -> Option<u64>,
    ) -> Option<Vec<u64>> {
        tensor.data.as_slice().as_chunks::<N>().0.iter().map(|chunk| convert(*chunk)).collect()
    }
    match tensor.datatype {
        DataType::Int32 => read(tensor, |bytes| i32::from_le_bytes(bytes).try_into().ok()),
        DataType::Uint32 => read(tensor, |bytes| Some(u32::from_le_bytes(bytes).into())),
        DataType::Int64 => read(tensor, |bytes| i64::from_le_bytes(bytes).try_into().ok()),
        DataType::Uint64 => read(tensor, |bytes| Some(u64::from_le_bytes(bytes))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::push_bytes_element;

    fn output(name: &str, datatype: DataType, data: Vec<u8>) -> InferOutput {
        let tensor = Tensor { datatype, shape: vec![-1], data: data.into() };
        InferOutput { name: name.to_owned(), tensor }
    }

    #[test]
    fn tokens_are_integers_of_any_size() {
        let mut reasons = Vec::new();
        for name in ["None", "stop", "stop", "tool_calls", ""] {
            assert!(push_bytes_element(&mut reasons, name.as_bytes()));
        }
        let counts = token_counts(&[
            output(FINISH_REASON, DataType::Bytes, reasons),
            output(NUM_INPUT_TOKENS, DataType::Int64, 5_i64.to_le_bytes().to_vec()),
            output(NUM_CACHED_TOKENS, DataType::Int32, (-1_i32).to_le_bytes().to_vec()),
            output(NUM_OUTPUT_TOKENS, DataType::Uint32, [1_u32, 2].map(u32::to_le_bytes).concat()),
            output("text_output", DataType::Bytes, Vec::new()),
        ]);
        let mut expected =
            TokenCounts { prompt: Some(5), generated: Some(3), ..TokenCounts::default() };
        for reason in [FinishReason::Stop, FinishReason::Stop, FinishReason::Other] {
            expected.finished.add(reason);
        }
        assert_eq!(counts, expected);
    }
}
