//! Fills in the tensors of models that an engine for text runs (the tensors of Triton's vllm_backend,
//! with additions; see `pooling` for models with other tasks), and what the files of these models say
//! about prompts, lengths and labels.

use super::config::ModelConfig;
use super::generation::{
    CONTEXT_LENGTH, FINISH_REASON, NUM_CACHED_TOKENS, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS,
    OPERATION, PROMPT_LOGPROBS, PROMPT_TOKEN_IDS, RETURN_PROMPT_TOKEN_IDS, SAMPLING_PARAMETERS,
    TEXT_INPUT, TEXT_OUTPUT,
};
use super::pooling::{
    EMBEDDING, ENTITIES, IS_MATRYOSHKA, LABEL, MATRYOSHKA_DIMENSIONS, NORMALIZE, PREDICTIONS,
    PROBABILITIES, PROMPT_NAME, PoolingTask, RAW_SCORES, SCORE, TEXT, TEXT_PAIR, TOP_K, TRUNCATE,
};
use super::proto::model_config::SchedulingChoice;
use super::proto::{self, ModelInput, ModelOutput, ModelParameter, ModelTransactionPolicy};
use super::text_files::{LABELS, TASK, TextModel};
use crate::model::gguf::{GgufMetadata, Pooling};
use crate::tensor::DataType;

/// The backend of GGUF files.
pub const LLAMACPP: &str = "llamacpp";

/// The parameter with the chat template.
pub const CHAT_TEMPLATE: &str = "chat_template";
/// The parameter with the token that begins a text, for the chat template.
pub const BOS_TOKEN: &str = "bos_token";
/// The parameter with the token that ends a text, for the chat template.
pub const EOS_TOKEN: &str = "eos_token";

/// The parameter with the number of choices or texts that the engine runs together.
const MAX_SEQUENCES: &str = "max_sequences";

/// The context of a model that was trained for a longer one, unless its configuration says
/// otherwise: memory for it is reserved for each sequence.
const DEFAULT_CONTEXT: u64 = 4096;

/// The most rows of a batch of the backend of text models, unless the configuration says otherwise:
/// enough to find texts of similar lengths among them.
const DEFAULT_ROWS: i32 = 64;

/// A tensor: its name, the type and the number of its elements.
type Row = (&'static str, DataType, i64);

/// Inputs that all tasks have.
const COMMON_INPUTS: [Row; 4] = [
    (OPERATION, DataType::Bytes, 1),
    (PROMPT_TOKEN_IDS, DataType::Uint32, -1),
    ("add_special_tokens", DataType::Bool, 1),
    (RETURN_PROMPT_TOKEN_IDS, DataType::Bool, 1),
];
const COMMON_OUTPUTS: [Row; 2] =
    [(PROMPT_TOKEN_IDS, DataType::Uint32, -1), (NUM_INPUT_TOKENS, DataType::Uint32, -1)];

const GENERATE_INPUTS: [Row; 9] = [
    (TEXT_INPUT, DataType::Bytes, 1),
    ("stream", DataType::Bool, 1),
    (SAMPLING_PARAMETERS, DataType::Bytes, 1),
    ("exclude_input_in_output", DataType::Bool, 1),
    ("return_finish_reason", DataType::Bool, 1),
    ("return_logprobs", DataType::Bool, 1),
    ("return_num_input_tokens", DataType::Bool, 1),
    ("return_num_output_tokens", DataType::Bool, 1),
    ("return_token_ids", DataType::Bool, 1),
];
const GENERATE_OUTPUTS: [Row; 8] = [
    (TEXT_OUTPUT, DataType::Bytes, -1),
    (FINISH_REASON, DataType::Bytes, -1),
    ("stop_reason", DataType::Bytes, -1),
    ("logprobs", DataType::Bytes, -1),
    (PROMPT_LOGPROBS, DataType::Bytes, -1),
    ("token_ids", DataType::Uint32, -1),
    (NUM_CACHED_TOKENS, DataType::Uint32, -1),
    (NUM_OUTPUT_TOKENS, DataType::Uint32, -1),
];

const EMBED_INPUTS: [Row; 3] =
    [(TEXT, DataType::Bytes, 1), (TRUNCATE, DataType::Int32, 1), (NORMALIZE, DataType::Bool, 1)];
const EMBED_OUTPUTS: [Row; 2] =
    [(EMBEDDING, DataType::Fp32, -1), (TEXT_OUTPUT, DataType::Bytes, -1)];

const SCORE_INPUTS: [Row; 3] =
    [(TEXT, DataType::Bytes, 1), (TEXT_PAIR, DataType::Bytes, 1), (TRUNCATE, DataType::Int32, 1)];
const SCORE_OUTPUTS: [Row; 2] = [(SCORE, DataType::Fp32, 1), (TEXT_OUTPUT, DataType::Bytes, -1)];

/// More inputs of a task, which only the backend of text models has.
const PROMPT_INPUTS: [Row; 1] = [(PROMPT_NAME, DataType::Bytes, 1)];
const RAW_INPUTS: [Row; 1] = [(RAW_SCORES, DataType::Bool, 1)];
const CLASSIFY_OUTPUTS: [Row; 3] = [
    (PROBABILITIES, DataType::Fp32, -1),
    (LABEL, DataType::Bytes, 1),
    (TEXT_OUTPUT, DataType::Bytes, -1),
];
const ENTITY_INPUTS: [Row; 2] = [(TEXT, DataType::Bytes, 1), (TRUNCATE, DataType::Int32, 1)];
const ENTITY_OUTPUTS: [Row; 2] =
    [(ENTITIES, DataType::Bytes, 1), (TEXT_OUTPUT, DataType::Bytes, -1)];
const MASK_INPUTS: [Row; 3] =
    [(TEXT, DataType::Bytes, 1), (TRUNCATE, DataType::Int32, 1), (TOP_K, DataType::Int32, 1)];
const MASK_OUTPUTS: [Row; 2] =
    [(PREDICTIONS, DataType::Bytes, 1), (TEXT_OUTPUT, DataType::Bytes, -1)];

/// The tensors of a task.
struct Tensors {
    inputs: &'static [Row],
    outputs: &'static [Row],
    /// Whether a request may have several responses.
    is_decoupled: bool,
    /// The requests that the engine runs together, unless the configuration says otherwise.
    default_sequences: u32,
}

impl Tensors {
    /// Returns the tensors of the task of the configuration, or of the file. The engine refuses an
    /// unknown task.
    fn of(config: &proto::ModelConfig, file: Option<&GgufMetadata>) -> Self {
        let own = config.parameters.get(TASK).map(|parameter| parameter.string_value.as_str());
        let of_file = match file.and_then(|file| file.pooling) {
            None => "generate",
            Some(Pooling::Embedding) => "embed",
            Some(Pooling::Score) => "score",
        };
        match own.unwrap_or(of_file) {
            "embed" => Self {
                inputs: &EMBED_INPUTS,
                outputs: &EMBED_OUTPUTS,
                is_decoupled: false,
                default_sequences: 32,
            },
            "score" => Self {
                inputs: &SCORE_INPUTS,
                outputs: &SCORE_OUTPUTS,
                is_decoupled: false,
                default_sequences: 32,
            },
            _ => Self {
                inputs: &GENERATE_INPUTS,
                outputs: &GENERATE_OUTPUTS,
                is_decoupled: true,
                default_sequences: 4,
            },
        }
    }
}

/// Fills in the tensors, unless the configuration has some, and the parameters for prompts that it
/// lacks.
pub(super) fn fill(config: &mut proto::ModelConfig, file: Option<&GgufMetadata>) {
    let tensors = Tensors::of(config, file);
    if has_no_tensors(config) {
        fill_tensors(config, &[tensors.inputs], tensors.outputs);
        let decoupled = tensors.is_decoupled;
        config.model_transaction_policy.get_or_insert(ModelTransactionPolicy { decoupled });
    }
    // One more request than the engine runs, or the requests of the next step, wait in the engine.
    // The others wait in the server's queue, which has limits, priorities and metrics.
    let sequences = config.parameters.get(MAX_SEQUENCES);
    let sequences: Option<u32> =
        sequences.map_or(Some(tensors.default_sequences), |own| own.string_value.parse().ok());
    if let Some(sequences) = sequences {
        let most = match tensors.is_decoupled {
            true => sequences.saturating_add(1),
            false => sequences.saturating_mul(2),
        };
        let most = ModelParameter { string_value: most.to_string() };
        config.parameters.entry(ModelConfig::MAX_OPEN_REQUESTS.to_owned()).or_insert(most);
    }
    let Some(file) = file else { return };
    if let Some(length) = file.context_length {
        set(config, CONTEXT_LENGTH, length.min(DEFAULT_CONTEXT).to_string());
    }
    let texts = [
        (CHAT_TEMPLATE, &file.chat_template),
        (BOS_TOKEN, &file.bos_token),
        (EOS_TOKEN, &file.eos_token),
    ];
    for (name, text) in texts {
        if let Some(text) = text {
            set(config, name, text.clone());
        }
    }
}

/// Fills in what a configuration of a model of Hugging Face's files lacks: tensors, the size of its
/// batches, and the parameters that clients and edges read.
pub(super) fn fill_of_files(config: &mut proto::ModelConfig, model: &TextModel) {
    if has_no_tensors(config) {
        if config.max_batch_size == 0 {
            config.max_batch_size = DEFAULT_ROWS;
            if config.scheduling_choice.is_none() {
                config.scheduling_choice =
                    Some(SchedulingChoice::DynamicBatching(Default::default()));
            }
        }
        let inputs: &[&[Row]] = match model.task {
            PoolingTask::Embed => &[&EMBED_INPUTS, &PROMPT_INPUTS],
            PoolingTask::Score | PoolingTask::Classify => &[&SCORE_INPUTS, &RAW_INPUTS],
            PoolingTask::ClassifyTokens => &[&ENTITY_INPUTS],
            PoolingTask::FillMask => &[&MASK_INPUTS],
        };
        let outputs: &[Row] = match model.task {
            PoolingTask::Embed => &EMBED_OUTPUTS,
            PoolingTask::Score => &SCORE_OUTPUTS,
            PoolingTask::Classify => &CLASSIFY_OUTPUTS,
            PoolingTask::ClassifyTokens => &ENTITY_OUTPUTS,
            PoolingTask::FillMask => &MASK_OUTPUTS,
        };
        fill_tensors(config, inputs, outputs);
        // Texts of a batch have different numbers of tokens.
        config.input.retain(|input| input.name != RETURN_PROMPT_TOKEN_IDS);
    }
    if config.default_model_filename.is_empty() {
        config.default_model_filename.clone_from(&model.graph);
    }
    // The engine finds texts of similar lengths among so many requests. Further requests wait in the
    // server's queue.
    set(config, ModelConfig::MAX_OPEN_REQUESTS, DEFAULT_ROWS.to_string());
    set(config, TASK, model.task.name().to_owned());
    set(config, CONTEXT_LENGTH, model.max_tokens.to_string());
    let has_classes = matches!(model.task, PoolingTask::Classify | PoolingTask::ClassifyTokens);
    if has_classes && let Ok(labels) = serde_json::to_string(&model.labels) {
        set(config, LABELS, labels);
    }
    if model.is_matryoshka {
        set(config, IS_MATRYOSHKA, "true".to_owned());
    }
    if let Some(list) = &model.matryoshka_dimensions {
        set(config, MATRYOSHKA_DIMENSIONS, list.clone());
    }
}

/// Returns whether the tensors of a configuration are to be filled in.
fn has_no_tensors(config: &proto::ModelConfig) -> bool {
    config.input.is_empty() && config.output.is_empty()
}

/// Adds inputs and outputs, and those that all tasks have.
fn fill_tensors(config: &mut proto::ModelConfig, inputs: &[&[Row]], outputs: &[Row]) {
    let input = |(name, datatype, elements): &Row| ModelInput {
        name: (*name).to_owned(),
        data_type: i32::from(datatype.number()),
        dims: vec![*elements],
        optional: ![TEXT_INPUT, TEXT].contains(name),
        ..ModelInput::default()
    };
    let output = |(name, datatype, elements): &Row| ModelOutput {
        name: (*name).to_owned(),
        data_type: i32::from(datatype.number()),
        dims: vec![*elements],
        ..ModelOutput::default()
    };
    config.input = inputs.iter().copied().flatten().chain(&COMMON_INPUTS).map(input).collect();
    config.output = outputs.iter().chain(&COMMON_OUTPUTS).map(output).collect();
}

/// Sets a parameter that the configuration lacks.
fn set(config: &mut proto::ModelConfig, name: &str, value: String) {
    let value = ModelParameter { string_value: value };
    config.parameters.entry(name.to_owned()).or_insert(value);
}
