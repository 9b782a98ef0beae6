//! Models that generate text: which models they are, and how they count tokens.
//!
//! The tensors are defined by Triton's vllm_backend, by TensorRT-LLM's models in Triton, or by
//! [`openai`] for models that implement OpenAI's API themselves.

use pharos_metrics::record::{FinishReason, TokenCounts};

use super::config::{ModelConfig, TensorSpec};
use super::openai::{self, OPENAI_REQUEST, OPENAI_RESPONSE, implements_openai};
use super::pooling::{PoolingTask, TEXT, TEXT_PAIR};
use crate::infer::{InferInput, InferOutput};
use crate::request_trace::SamplingLimits;
use crate::tensor::{DataType, Tensor, bytes_elements, element_count};

/// The input with the prompt.
pub const TEXT_INPUT: &str = "text_input";
/// The output with the generated text.
pub const TEXT_OUTPUT: &str = "text_output";
/// The input with the parameters of sampling as JSON.
pub const SAMPLING_PARAMETERS: &str = "sampling_parameters";
/// The input with the most tokens to generate.
pub const MAX_TOKENS: &str = "max_tokens";
/// The input with the temperature of sampling, of TensorRT-LLM's models.
const TEMPERATURE: &str = "temperature";
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
/// The value of [`OPERATION`] of a request that loads the adapter of its parameter [`ADAPTER`]. The
/// text of the response is the name of the adapter.
pub const LOAD_ADAPTER: &str = "load_adapter";
/// The value of [`OPERATION`] of a request that frees the memory of the adapter of its parameter
/// [`ADAPTER`] when no request uses the adapter any more. The text of the response is its name.
pub const UNLOAD_ADAPTER: &str = "unload_adapter";
/// The parameter of a request to a model with an adapter that was loaded by request: a JSON object
/// with its `name`, its `path`, and the number of its `load`. Clients cannot set it, because names
/// that begin with `triton_` are reserved.
pub const ADAPTER: &str = "triton_adapter";
/// The parameter of a model's configuration that is `true` if the model has the operations
/// [`SLEEP`], [`WAKE_UP`] and [`IS_SLEEPING`].
pub const SLEEP_MODE: &str = "sleep_mode";
/// The value of [`OPERATION`] of a request that frees the memory of the model's GPUs. Its parameter
/// [`SLEEP_OPTIONS`] has the `level` (1: the weights are kept in the memory of the host, 2: they are
/// dropped) and the `mode` (`abort` or `wait`: what happens to running requests). The text of the
/// response, as for the other two operations, is `sleeping` or `awake`: the state after it.
pub const SLEEP: &str = "sleep";
/// The value of [`OPERATION`] of a request that ends the sleep of a model. Its parameter
/// [`SLEEP_OPTIONS`] has the `tags` of the parts that wake up: `weights`, `kv_cache`, or null for
/// all.
pub const WAKE_UP: &str = "wake_up";
/// The value of [`OPERATION`] of a request for the state of a model.
pub const IS_SLEEPING: &str = "is_sleeping";
/// The parameter of a request for [`SLEEP`], [`WAKE_UP`] or [`IS_SLEEPING`]: a JSON object. Clients
/// cannot set it, as [`ADAPTER`].
pub const SLEEP_OPTIONS: &str = "triton_sleep";
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
    /// Returns the form of a model; `None` if the model does not take prompts.
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

/// The longest parameters of sampling that are read for a trace, in bytes.
const MAX_TRACED_PARAMETERS: usize = 64 << 10;

/// Returns the parameters of a request that its trace has, as far as they can be read.
pub fn sampling_limits(inputs: &[InferInput]) -> SamplingLimits {
    let mut limits = SamplingLimits::default();
    for input in inputs {
        let tensor = &input.tensor;
        match input.name.as_str() {
            SAMPLING_PARAMETERS | OPENAI_REQUEST if tensor.data.len() <= MAX_TRACED_PARAMETERS => {
                let bytes = tensor.data.as_slice();
                let json = bytes_elements(&bytes).flatten().next();
                let parsed = json.and_then(|json| serde_json::from_slice::<Sampling>(json).ok());
                if let Some(Sampling { max_tokens, temperature }) = parsed {
                    limits = SamplingLimits { max_tokens, temperature };
                }
            }
            MAX_TOKENS => {
                limits.max_tokens = integers(tensor).and_then(|list| list.first().copied());
            }
            TEMPERATURE if tensor.datatype == DataType::Fp32 => {
                let bytes = tensor.data.as_slice();
                let first = bytes.first_chunk().map(|bytes| f32::from_le_bytes(*bytes).into());
                limits.temperature = first;
            }
            _ => {}
        }
    }
    limits
}

/// The members of the parameters of sampling that a trace has.
#[derive(serde::Deserialize)]
struct Sampling {
    max_tokens: Option<u64>,
    temperature: Option<f64>,
}

/// The parameter with the most tokens of a request.
pub(super) const CONTEXT_LENGTH: &str = "context_length";

/// Returns whether a model generates text.
pub fn generates_text(config: &ModelConfig) -> bool {
    GenerationForm::of(config).is_some() || implements_openai(config)
}

/// Returns whether the tokens of a model are counted: it generates text, or makes vectors or scores
/// of texts.
pub fn counts_tokens(config: &ModelConfig) -> bool {
    generates_text(config) || PoolingTask::of(config).is_some()
}

/// Returns the most tokens of a request to a model; `None` if its configuration does not say it.
pub fn context_length(config: &ModelConfig) -> Option<u64> {
    config.parameters.get(CONTEXT_LENGTH)?.parse().ok()
}

/// Returns the number of texts of a request: of prompts, or of texts that get a vector or a score.
pub fn texts(inputs: &[InferInput]) -> usize {
    let input = inputs.iter().find(|input| [TEXT_INPUT, TEXT].contains(&input.name.as_str()));
    let elements = input.and_then(|input| element_count(&input.tensor.shape));
    elements.and_then(|elements| usize::try_from(elements).ok()).unwrap_or(1)
}

/// Returns the numbers of tokens in a response. A number that is not an integer counts as unknown.
///
/// The request has this number of `texts`. An output with the tokens of its texts has one or several
/// elements for each of them: several choices of a text have the same prompt, which counts once.
pub fn token_counts(outputs: &[InferOutput], texts: usize) -> TokenCounts {
    let mut counts = TokenCounts::default();
    let of_texts = |list: Vec<u64>| {
        let step = list.len().checked_div(texts).unwrap_or(1).max(1);
        list.into_iter().step_by(step).reduce(u64::saturating_add)
    };
    for output in outputs {
        let numbers = || integers(&output.tensor);
        match output.name.as_str() {
            NUM_INPUT_TOKENS => counts.prompt = numbers().and_then(of_texts),
            FINISH_REASON if output.tensor.datatype == DataType::Bytes => {
                let bytes = output.tensor.data.as_slice();
                for name in bytes_elements(&bytes).flatten() {
                    let name = std::str::from_utf8(name).unwrap_or("other");
                    if let Some(reason) = FinishReason::named(name) {
                        counts.finished.add(reason);
                    }
                }
            }
            NUM_CACHED_TOKENS => counts.cached = numbers().and_then(of_texts),
            NUM_OUTPUT_TOKENS => {
                counts.generated =
                    numbers().map(|list| list.into_iter().fold(0, u64::saturating_add));
            }
            OPENAI_RESPONSE => openai::add_counts(&output.tensor, &mut counts),
            _ => {}
        }
    }
    if counts.generated.is_some() {
        counts.arrived = None;
    }
    counts
}

/// The inputs that say whether a client wants a stream: of Triton's vllm_backend and of
/// TensorRT-LLM's models.
const STREAM_INPUTS: [&str; 2] = ["stream", "streaming"];

/// Returns whether a request to a decoupled model wants its tokens one by one.
pub fn wants_stream(inputs: &[InferInput]) -> bool {
    inputs.iter().any(|input| {
        STREAM_INPUTS.contains(&&*input.name)
            && input.tensor.datatype == DataType::Bool
            && input.tensor.data.as_slice().iter().any(|byte| *byte != 0)
    })
}

/// The bytes of text that are taken for one token where a model does not count.
const BYTES_PER_TOKEN: usize = 4;

/// Returns an estimate of the tokens of a prompt.
pub fn estimated_prompt(inputs: &[InferInput]) -> u64 {
    let is_text =
        |input: &&InferInput| [TEXT_INPUT, TEXT, TEXT_PAIR].contains(&input.name.as_str());
    let texts = estimated(inputs.iter().filter(is_text).map(|input| &input.tensor));
    let given = inputs.iter().filter(|input| input.name == PROMPT_TOKEN_IDS);
    let given = given.map(|input| integers(&input.tensor).map_or(0, |ids| ids.len() as u64));
    given.fold(texts, u64::saturating_add)
}

/// Returns an estimate of the tokens of a response, at least one.
pub fn estimated_output(outputs: &[InferOutput]) -> u64 {
    let texts = outputs.iter().filter(|output| output.name == TEXT_OUTPUT);
    estimated(texts.map(|output| &output.tensor)).max(1)
}

fn estimated<'a>(texts: impl Iterator<Item = &'a Tensor>) -> u64 {
    // Each text begins with its length.
    let bytes: usize = texts.map(|text| text.data.len().saturating_sub(BYTES_PER_TOKEN)).sum();
    u64::try_from(bytes.div_ceil(BYTES_PER_TOKEN)).unwrap_or(u64::MAX)
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
    fn texts_without_counts_are_estimated() {
        let mut text = Vec::new();
        assert!(push_bytes_element(&mut text, b"nine bytes"));
        let outputs = [output(TEXT_OUTPUT, DataType::Bytes, text)];
        assert_eq!(estimated_output(&outputs), 3);
        assert_eq!(estimated_output(&[]), 1);
        assert_eq!(estimated_prompt(&[]), 0);
    }

    #[test]
    fn traces_have_the_parameters_of_all_forms() {
        let input = |name: &str, datatype, data: Vec<u8>| {
            let tensor = Tensor { datatype, shape: vec![1], data: data.into() };
            InferInput { name: name.to_owned(), tensor }
        };
        let json_in = |name: &str, text: &str| {
            let mut data = Vec::new();
            assert!(push_bytes_element(&mut data, text.as_bytes()));
            [input(name, DataType::Bytes, data)]
        };
        let json = |text: &str| json_in(SAMPLING_PARAMETERS, text);
        let limits = |max_tokens, temperature| SamplingLimits { max_tokens, temperature };
        let text = r#"{"max_tokens": 7, "temperature": 0.5, "stop": ["x"]}"#;
        assert_eq!(sampling_limits(&json(text)), limits(Some(7), Some(0.5)));
        assert_eq!(sampling_limits(&json_in(OPENAI_REQUEST, text)), limits(Some(7), Some(0.5)));
        assert_eq!(sampling_limits(&json("{\"max_tokens\": -1}")), limits(None, None));
        assert_eq!(sampling_limits(&json("no JSON")), limits(None, None));
        let tensors = [
            input(MAX_TOKENS, DataType::Int32, 9_i32.to_le_bytes().to_vec()),
            input(TEMPERATURE, DataType::Fp32, 0.25_f32.to_le_bytes().to_vec()),
        ];
        assert_eq!(sampling_limits(&tensors), limits(Some(9), Some(0.25)));
        assert_eq!(
            sampling_limits(&[input(MAX_TOKENS, DataType::Int32, vec![])]),
            limits(None, None)
        );
    }

    #[test]
    fn clients_ask_for_streams() {
        let input = |name: &str, byte: u8| {
            let tensor =
                Tensor { datatype: DataType::Bool, shape: vec![1], data: vec![byte].into() };
            [InferInput { name: name.to_owned(), tensor }]
        };
        assert!(wants_stream(&input("stream", 1)) && wants_stream(&input("streaming", 1)));
        assert!(!wants_stream(&input("stream", 0)) && !wants_stream(&input("other", 1)));
    }

    #[test]
    fn the_texts_of_a_request() {
        let input = |name: &str, shape: &[i64]| {
            let tensor = Tensor {
                datatype: DataType::Bytes,
                shape: shape.to_vec(),
                data: Vec::<u8>::new().into(),
            };
            InferInput { name: name.to_owned(), tensor }
        };
        assert_eq!(texts(&[input("other", &[9]), input(TEXT_INPUT, &[2, 1])]), 2);
        assert_eq!(texts(&[input(TEXT_PAIR, &[9]), input(TEXT, &[3])]), 3);
        assert_eq!(texts(&[input(PROMPT_TOKEN_IDS, &[1, 9])]), 1);
    }

    #[test]
    fn prompts_count_once_for_each_text() {
        let prompt = |tokens: &[u32], texts| {
            let bytes = tokens.iter().flat_map(|tokens| tokens.to_le_bytes()).collect();
            token_counts(&[output(NUM_INPUT_TOKENS, DataType::Uint32, bytes)], texts).prompt
        };
        assert_eq!(prompt(&[3], 1), Some(3));
        // Three choices of one text, and two of each of two texts.
        assert_eq!(prompt(&[3, 3, 3], 1), Some(3));
        assert_eq!(prompt(&[3, 3, 5, 5], 2), Some(8));
        // A batch of three texts; a response with fewer numbers than texts.
        assert_eq!(prompt(&[3, 4, 5], 3), Some(12));
        assert_eq!(prompt(&[3, 4], 3), Some(7));
        assert_eq!((prompt(&[], 1), prompt(&[3], 0)), (None, Some(3)));
    }

    #[test]
    fn tokens_are_integers_of_any_size() {
        let mut reasons = Vec::new();
        for name in ["None", "stop", "stop", "tool_calls", ""] {
            assert!(push_bytes_element(&mut reasons, name.as_bytes()));
        }
        let outputs = [
            output(FINISH_REASON, DataType::Bytes, reasons),
            output(NUM_INPUT_TOKENS, DataType::Int64, 5_i64.to_le_bytes().to_vec()),
            output(NUM_CACHED_TOKENS, DataType::Int32, (-1_i32).to_le_bytes().to_vec()),
            output(NUM_OUTPUT_TOKENS, DataType::Uint32, [1_u32, 2].map(u32::to_le_bytes).concat()),
            output("text_output", DataType::Bytes, Vec::new()),
        ];
        let counts = token_counts(&outputs, 1);
        let mut expected =
            TokenCounts { prompt: Some(5), generated: Some(3), ..TokenCounts::default() };
        for reason in [FinishReason::Stop, FinishReason::Stop, FinishReason::Other] {
            expected.finished.add(reason);
        }
        assert_eq!(counts, expected);
    }
}
