//! Fills in the tensors of models that an engine for text runs (the tensors of Triton's vllm_backend,
//! with additions), and what the files of these models say about prompts.

use super::config::ModelConfig;
use super::generation::{
    FINISH_REASON, NUM_CACHED_TOKENS, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS, SAMPLING_PARAMETERS,
    TEXT_INPUT, TEXT_OUTPUT,
};
use super::proto::{self, ModelInput, ModelOutput, ModelParameter, ModelTransactionPolicy};
use crate::model::gguf::GgufMetadata;
use crate::tensor::DataType;

/// The backend of GGUF files.
pub const LLAMACPP: &str = "llamacpp";

/// The parameter with the chat template.
pub const CHAT_TEMPLATE: &str = "chat_template";
/// The parameter with the token that begins a text, for the chat template.
pub const BOS_TOKEN: &str = "bos_token";
/// The parameter with the token that ends a text, for the chat template.
pub const EOS_TOKEN: &str = "eos_token";

/// The parameter with the number of choices that the engine generates together.
const MAX_SEQUENCES: &str = "max_sequences";
const DEFAULT_SEQUENCES: u32 = 4;

const INPUTS: [(&str, DataType); 9] = [
    (TEXT_INPUT, DataType::Bytes),
    ("stream", DataType::Bool),
    (SAMPLING_PARAMETERS, DataType::Bytes),
    ("exclude_input_in_output", DataType::Bool),
    ("return_finish_reason", DataType::Bool),
    ("return_logprobs", DataType::Bool),
    ("return_num_input_tokens", DataType::Bool),
    ("return_num_output_tokens", DataType::Bool),
    ("return_token_ids", DataType::Bool),
];

const OUTPUTS: [(&str, DataType); 8] = [
    (TEXT_OUTPUT, DataType::Bytes),
    (FINISH_REASON, DataType::Bytes),
    ("stop_reason", DataType::Bytes),
    ("logprobs", DataType::Bytes),
    ("token_ids", DataType::Uint32),
    (NUM_INPUT_TOKENS, DataType::Uint32),
    (NUM_CACHED_TOKENS, DataType::Uint32),
    (NUM_OUTPUT_TOKENS, DataType::Uint32),
];

/// Fills in the tensors, unless the configuration has some, and the parameters for prompts that it
/// lacks.
pub(super) fn fill(config: &mut proto::ModelConfig, file: Option<&GgufMetadata>) {
    if config.input.is_empty() && config.output.is_empty() {
        let input = |(name, datatype): &(&str, DataType)| ModelInput {
            name: (*name).to_owned(),
            data_type: i32::from(datatype.number()),
            dims: vec![1],
            optional: *name != TEXT_INPUT,
            ..ModelInput::default()
        };
        let output = |(name, datatype): &(&str, DataType)| ModelOutput {
            name: (*name).to_owned(),
            data_type: i32::from(datatype.number()),
            dims: vec![-1],
            ..ModelOutput::default()
        };
        config.input = INPUTS.iter().map(input).collect();
        config.output = OUTPUTS.iter().map(output).collect();
        config.model_transaction_policy.get_or_insert(ModelTransactionPolicy { decoupled: true });
    }
    // One more request than the engine runs: it waits there, and the others in the server's queue,
    // which has limits, priorities and metrics.
    let sequences = config.parameters.get(MAX_SEQUENCES);
    let sequences: Option<u32> =
        sequences.map_or(Some(DEFAULT_SEQUENCES), |own| own.string_value.parse().ok());
    if let Some(sequences) = sequences {
        let most = ModelParameter { string_value: sequences.saturating_add(1).to_string() };
        config.parameters.entry(ModelConfig::MAX_OPEN_REQUESTS.to_owned()).or_insert(most);
    }
    let Some(file) = file else { return };
    let texts = [
        (CHAT_TEMPLATE, &file.chat_template),
        (BOS_TOKEN, &file.bos_token),
        (EOS_TOKEN, &file.eos_token),
    ];
    for (name, text) in texts {
        if let Some(text) = text {
            let value = || ModelParameter { string_value: text.clone() };
            config.parameters.entry(name.to_owned()).or_insert_with(value);
        }
    }
}
