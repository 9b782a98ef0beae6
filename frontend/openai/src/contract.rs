//! The contract of models that generate text: which models they are, how requests become tensors,
//! and how tensors become text.
//!
//! A model has one of two forms, which follows from its tensors:
//!
//! - that of Triton's vllm_backend: `text_input` and `sampling_parameters` (JSON) to `text_output`,
//!   `finish_reason`, `num_input_tokens`, `num_output_tokens` and `logprobs`. Optional additions are
//!   `token_ids`, `stop_reason` (JSON), `num_cached_tokens`, `prompt_token_ids` (also an input),
//!   `prompt_logprobs`, and the inputs `image` and `audio` (files as base64);
//! - that of TensorRT-LLM's models in Triton: `text_input`, `max_tokens` and a tensor for each
//!   further parameter.
//!
//! In both forms a response of a decoupled model has the text that follows the previous response.

use std::collections::{BTreeMap, BTreeSet};

use pharos::error::InferError;
use pharos::infer::{InferInput, InferResponse};
use pharos::metrics::record::TokenCounts;
use pharos::model::generation::{
    FINISH_REASON, GenerationForm, MAX_TOKENS, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS,
    PROMPT_LOGPROBS, PROMPT_TOKEN_IDS, RETURN_PROMPT_TOKEN_IDS, SAMPLING_PARAMETERS, TEXT_INPUT,
    TEXT_OUTPUT, integers, token_counts,
};
use pharos::model::{ModelConfig, TensorSpec};
use pharos::tensor::{DataType, Tensor, bytes_elements};
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::media::{MAX_MEDIA, Media, MediaKind};
use crate::response::logprobs::{Position, parse_vllm};
use crate::response::{FinishReason, StopReason};
use crate::sampling::Sampling;
use crate::tensors::{self, no_tensor};

const LOGPROBS: &str = "logprobs";
const TOKEN_IDS: &str = "token_ids";
/// The input that says whether the model adds the special tokens that it expects to a text.
pub(crate) const ADD_SPECIAL_TOKENS: &str = "add_special_tokens";

/// The limit of tokens of a request that sets none, where the engine knows the context.
const UNLIMITED: u64 = i32::MAX as u64;

/// Inputs that make a model of the form of vllm_backend return an output, and the output.
const FLAGS: [Flag; 5] = [
    Flag { input: "return_finish_reason", output: FINISH_REASON },
    Flag { input: "return_num_input_tokens", output: NUM_INPUT_TOKENS },
    Flag { input: "return_num_output_tokens", output: NUM_OUTPUT_TOKENS },
    Flag { input: "return_token_ids", output: TOKEN_IDS },
    Flag { input: RETURN_PROMPT_TOKEN_IDS, output: PROMPT_TOKEN_IDS },
];

struct Flag {
    input: &'static str,
    output: &'static str,
}

/// The tensors of a model that generates text.
#[derive(Clone, Debug)]
pub(crate) struct Contract {
    model: String,
    /// The name of the adapter (LoRA) of the requests.
    adapter: Option<String>,
    form: GenerationForm,
    inputs: BTreeMap<String, Input>,
    outputs: BTreeSet<String>,
    /// Whether shapes begin with the batch.
    has_batch: bool,
    is_decoupled: bool,
}

#[derive(Clone, Copy, Debug)]
struct Input {
    datatype: DataType,
    /// The number of dimensions without the batch.
    rank: usize,
}

/// What a request asks of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompt<'a> {
    pub(crate) text: &'a str,
    /// The prompt as tokens; the text is then empty.
    pub(crate) tokens: Option<&'a [u32]>,
    /// The images and audio, in the order of their places in the text.
    pub(crate) media: &'a [&'a Media],
    /// Whether the model adds the special tokens that it expects to a text; `None` for its default.
    pub(crate) add_special_tokens: Option<bool>,
    pub(crate) sampling: &'a Sampling,
    /// The limit of tokens if the client sets none; `None` for the rest of the context.
    pub(crate) default_max_tokens: Option<u64>,
    /// Whether responses may arrive one by one.
    pub(crate) stream: bool,
    /// Whether the tokens of prompt and output are wanted.
    pub(crate) token_ids: bool,
}

impl Contract {
    /// Returns the contract of a model; `None` if the model does not generate text.
    pub(crate) fn of(config: &ModelConfig) -> Option<Self> {
        let form = GenerationForm::of(config)?;
        let inputs = config.inputs.iter();
        let input = |spec: &TensorSpec| Input { datatype: spec.datatype, rank: spec.dims.len() };
        Some(Self {
            model: config.name.clone(),
            adapter: None,
            form,
            inputs: inputs.map(|spec| (spec.name.clone(), input(spec))).collect(),
            outputs: config.outputs.iter().map(|spec| spec.name.clone()).collect(),
            has_batch: config.max_batch_size > 0,
            is_decoupled: config.decoupled,
        })
    }

    /// Returns the name of the model.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// Returns the contract of the model with an adapter.
    pub(crate) fn with_adapter(&self, name: &str) -> Self {
        Self { adapter: Some(name.to_owned()), ..self.clone() }
    }

    /// Checks that the model takes the images and audio of a request.
    ///
    /// # Errors
    /// The model has no tensor for them, or there are too many.
    pub(crate) fn check_media<'m>(
        &self,
        media: impl Iterator<Item = &'m Media>,
    ) -> Result<(), ApiError> {
        for (index, one) in media.enumerate() {
            let tensor = one.kind.as_str();
            if self.inputs.get(tensor).is_none_or(|input| input.datatype != DataType::Bytes) {
                return Err(self.refuse(&one.path, tensor));
            }
            if index >= MAX_MEDIA {
                let path = one.path.as_str();
                let allowed = format!("at most {MAX_MEDIA} images and clips of audio are allowed");
                return Err(ApiError::invalid_field(
                    path,
                    format!("{path} is one too many: {allowed}"),
                ));
            }
        }
        Ok(())
    }

    /// Returns the inputs of a request.
    ///
    /// # Errors
    /// The model has no tensor for something that the client set.
    pub(crate) fn inputs(&self, prompt: &Prompt<'_>) -> Result<Vec<InferInput>, ApiError> {
        let mut inputs = Vec::with_capacity(8);
        inputs.push(self.strings(TEXT_INPUT, &[prompt.text])?);
        if let Some(tokens) = prompt.tokens {
            if !self.inputs.contains_key(PROMPT_TOKEN_IDS) {
                return Err(self.refuse("prompt as token ids", PROMPT_TOKEN_IDS));
            }
            inputs.push(self.tokens(tokens));
        }
        for kind in MediaKind::ALL {
            let of_kind = prompt.media.iter().filter(|one| one.kind == kind);
            let files: Vec<&str> = of_kind.map(|one| one.base64.as_str()).collect();
            if !files.is_empty() {
                inputs.push(self.strings(kind.as_str(), &files)?);
            }
        }
        if let Some(flag) = prompt.add_special_tokens {
            if self.inputs.contains_key(ADD_SPECIAL_TOKENS) {
                inputs.push(self.boolean(ADD_SPECIAL_TOKENS, flag));
            } else if !flag {
                return Err(self.refuse(ADD_SPECIAL_TOKENS, ADD_SPECIAL_TOKENS));
            }
        }
        if self.inputs.contains_key("stream") {
            inputs.push(self.boolean("stream", prompt.stream && self.is_decoupled));
        }
        if self.inputs.contains_key("exclude_input_in_output") {
            inputs.push(self.boolean("exclude_input_in_output", true));
        }
        if prompt.token_ids && !self.outputs.contains(TOKEN_IDS) {
            return Err(self.refuse("return_token_ids", TOKEN_IDS));
        }
        match self.form {
            GenerationForm::Vllm => self.add_vllm(prompt, &mut inputs)?,
            GenerationForm::TensorRtLlm => self.add_tensor_rt_llm(prompt, &mut inputs)?,
        }
        Ok(inputs)
    }

    /// Adds the inputs of a model with the tensors of vllm_backend.
    fn add_vllm(&self, prompt: &Prompt<'_>, inputs: &mut Vec<InferInput>) -> Result<(), ApiError> {
        let limit = prompt.default_max_tokens.unwrap_or(UNLIMITED);
        let sampling = prompt.sampling.to_vllm(Some(limit), self.adapter.as_deref());
        inputs.push(self.strings(SAMPLING_PARAMETERS, &[&sampling])?);
        for flag in &FLAGS {
            let is_of_tokens = [TOKEN_IDS, PROMPT_TOKEN_IDS].contains(&flag.output);
            let is_wanted = !is_of_tokens || prompt.token_ids;
            if is_wanted
                && self.inputs.contains_key(flag.input)
                && self.outputs.contains(flag.output)
            {
                inputs.push(self.boolean(flag.input, true));
            }
        }
        if prompt.sampling.prompt_logprobs.is_some() && !self.outputs.contains(PROMPT_LOGPROBS) {
            return Err(self.refuse(PROMPT_LOGPROBS, PROMPT_LOGPROBS));
        }
        if prompt.sampling.logprobs.is_some() {
            if !self.outputs.contains(LOGPROBS) {
                return Err(self.refuse(LOGPROBS, LOGPROBS));
            }
            if self.inputs.contains_key("return_logprobs") {
                inputs.push(self.boolean("return_logprobs", true));
            }
        }
        Ok(())
    }

    /// Adds the inputs of a model with a tensor for each parameter.
    fn add_tensor_rt_llm(
        &self,
        prompt: &Prompt<'_>,
        inputs: &mut Vec<InferInput>,
    ) -> Result<(), ApiError> {
        let set: Map<String, Value> = serde_json::from_str(
            &prompt.sampling.to_vllm(prompt.default_max_tokens, self.adapter.as_deref()),
        )
        .unwrap_or_default();
        if !set.contains_key(MAX_TOKENS) {
            return Err(ApiError::invalid_field(
                "max_tokens",
                format!(
                    "max_tokens is required: the model '{}' does not report its context, and its \
                     configuration has no parameter 'default_max_tokens'",
                    self.model
                ),
            ));
        }
        for (name, value) in &set {
            // Neutral values need no tensor. The edge itself ends the text at stop strings.
            let is_neutral = matches!(name.as_str(), "n" if value == &Value::from(1));
            let tensor = match name.as_str() {
                "stop" => "stop_words",
                "seed" => ["random_seed", "seed"][usize::from(self.inputs.contains_key("seed"))],
                "min_tokens" if self.inputs.contains_key("min_length") => "min_length",
                name => name,
            };
            let Some(input) = self.inputs.get(tensor) else {
                if is_neutral || name == "stop" {
                    continue;
                }
                return Err(self.refuse(name, tensor));
            };
            inputs.push(self.value(name, tensor, *input, value)?);
        }
        Ok(())
    }

    /// Returns the value of a parameter as a tensor.
    fn value(
        &self,
        parameter: &str,
        name: &str,
        input: Input,
        value: &Value,
    ) -> Result<InferInput, ApiError> {
        if input.datatype == DataType::Bytes {
            let texts = match value {
                Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
                Value::String(text) => vec![text.as_str()],
                _ => return Err(self.refuse(parameter, name)),
            };
            return self.strings(name, &texts);
        }
        let integer = value.as_i64();
        let bytes = match input.datatype {
            DataType::Bool => value.as_bool().map(|flag| vec![u8::from(flag)]),
            DataType::Int32 => integer
                .and_then(|number| i32::try_from(number).ok())
                .map(|number| number.to_le_bytes().to_vec()),
            DataType::Uint32 => integer
                .and_then(|number| u32::try_from(number).ok())
                .map(|number| number.to_le_bytes().to_vec()),
            DataType::Int64 => integer.map(|number| number.to_le_bytes().to_vec()),
            DataType::Uint64 => integer
                .and_then(|number| u64::try_from(number).ok())
                .map(|number| number.to_le_bytes().to_vec()),
            DataType::Fp32 => value.as_f64().map(|number| (number as f32).to_le_bytes().to_vec()),
            DataType::Fp64 => value.as_f64().map(|number| number.to_le_bytes().to_vec()),
            _ => None,
        };
        let data = bytes.ok_or_else(|| {
            ApiError::invalid_field(
                parameter,
                format!(
                    "{parameter} {value} does not fit the input '{name}' of the model '{}', which \
                     has the datatype {}",
                    self.model, input.datatype
                ),
            )
        })?;
        Ok(self.input(name, input.datatype, input.rank, 1, data))
    }

    fn refuse(&self, parameter: &str, tensor: &str) -> ApiError {
        no_tensor(&self.model, parameter, tensor)
    }

    fn strings(&self, name: &str, texts: &[&str]) -> Result<InferInput, ApiError> {
        let data = tensors::texts(texts.iter().copied())?;
        let rank = self.inputs.get(name).map_or(1, |input| input.rank);
        Ok(self.input(name, DataType::Bytes, rank, texts.len(), data))
    }

    fn tokens(&self, tokens: &[u32]) -> InferInput {
        let name = PROMPT_TOKEN_IDS;
        let Input { datatype, rank } =
            self.inputs.get(name).copied().unwrap_or(Input { datatype: DataType::Uint32, rank: 1 });
        let data = tensors::tokens(datatype, tokens);
        self.input(name, datatype, rank, tokens.len(), data)
    }

    fn boolean(&self, name: &str, flag: bool) -> InferInput {
        let rank = self.inputs.get(name).map_or(1, |input| input.rank);
        self.input(name, DataType::Bool, rank, 1, vec![u8::from(flag)])
    }

    /// Returns an input of this many elements, which lie in its last dimension.
    fn input(
        &self,
        name: &str,
        datatype: DataType,
        rank: usize,
        elements: usize,
        data: Vec<u8>,
    ) -> InferInput {
        tensors::input(name, datatype, rank + usize::from(self.has_batch), elements, data)
    }
}

/// What one response of a model adds.
#[derive(Debug, Default)]
pub(crate) struct Step {
    /// The tokens of the prompt, in the first response that has them.
    pub(crate) prompt_token_ids: Vec<u32>,
    /// The log probabilities of the prompt's tokens as JSON, in the first response that has them.
    pub(crate) prompt_logprobs: Option<String>,
    /// The choices in order.
    pub(crate) choices: Vec<ChoiceStep>,
    /// The numbers of tokens, if the model counts them.
    pub(crate) tokens: TokenCounts,
}

/// What one response of a model adds to a choice.
#[derive(Debug, Default)]
pub(crate) struct ChoiceStep {
    pub(crate) text: String,
    pub(crate) finish_reason: Option<FinishReason>,
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) logprobs: Vec<Position>,
    pub(crate) token_ids: Vec<u32>,
}

impl Step {
    /// Reads a response.
    ///
    /// # Errors
    /// The model violates the contract.
    /// Log probabilities are left out unless `with_logprobs`: they are the largest part of a response.
    pub(crate) fn read(response: &InferResponse, with_logprobs: bool) -> Result<Self, InferError> {
        let mut step = Self { tokens: token_counts(&response.outputs, 1), ..Self::default() };
        for output in &response.outputs {
            let tensor = &output.tensor;
            match output.name.as_str() {
                TEXT_OUTPUT => {
                    for (index, text) in strings(&output.name, tensor)?.into_iter().enumerate() {
                        step.choice(index).text = text;
                    }
                }
                FINISH_REASON => {
                    for (index, name) in strings(&output.name, tensor)?.iter().enumerate() {
                        step.choice(index).finish_reason = FinishReason::named(name);
                    }
                }
                "stop_reason" => {
                    for (index, json) in strings(&output.name, tensor)?.iter().enumerate() {
                        step.choice(index).stop_reason = match serde_json::from_str(json) {
                            Ok(Value::String(text)) => Some(StopReason::Text(text)),
                            Ok(Value::Number(id)) => id
                                .as_u64()
                                .and_then(|id| u32::try_from(id).ok())
                                .map(StopReason::Token),
                            _ => None,
                        };
                    }
                }
                LOGPROBS if with_logprobs => {
                    for (index, json) in strings(&output.name, tensor)?.iter().enumerate() {
                        step.choice(index).logprobs =
                            parse_vllm(json).map_err(InferError::internal)?;
                    }
                }
                TOKEN_IDS => step.choice(0).token_ids = token_ids(&output.name, tensor)?,
                PROMPT_TOKEN_IDS => step.prompt_token_ids = token_ids(&output.name, tensor)?,
                PROMPT_LOGPROBS => {
                    step.prompt_logprobs = strings(&output.name, tensor)?.into_iter().next();
                }
                _ => {}
            }
        }
        Ok(step)
    }

    fn choice(&mut self, index: usize) -> &mut ChoiceStep {
        while self.choices.len() <= index {
            self.choices.push(ChoiceStep::default());
        }
        &mut self.choices[index]
    }
}

/// Returns the token ids of an output.
///
/// # Errors
/// The output has no integers.
pub(crate) fn token_ids(name: &str, tensor: &Tensor) -> Result<Vec<u32>, InferError> {
    let ids = integers(tensor).ok_or_else(|| violation(name))?;
    Ok(ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect())
}

/// Returns the texts of an output.
///
/// # Errors
/// The output has no strings.
pub(crate) fn strings(name: &str, tensor: &Tensor) -> Result<Vec<String>, InferError> {
    let bytes = tensor.data.as_slice();
    let elements = bytes_elements(&bytes).map(|element| {
        element.map(|text| String::from_utf8_lossy(text).into_owned()).map_err(|_| violation(name))
    });
    elements.collect()
}

/// Returns the failure of a model that violates its contract.
pub(crate) fn violation(name: &str) -> InferError {
    InferError::internal(format!(
        "the output '{name}' of the model is not what its contract says: see the guide of language \
         models"
    ))
}

#[cfg(test)]
mod tests {
    use pharos::infer::InferOutput;
    use pharos::model::{Completion, Draft};

    use pharos::tensor::push_bytes_element;

    use super::*;
    use crate::ChatRequest;

    fn contract(tensors: &str) -> Option<Contract> {
        let completion =
            Completion { directory: "m", backends: &["python"], ..Completion::default() };
        let text = format!("name: \"m\" backend: \"python\" {tensors}");
        let draft = Draft::from_text(&text, "config.pbtxt").unwrap();
        Contract::of(&draft.complete(&completion).unwrap())
    }

    fn tensor(kind: &str, name: &str, datatype: &str) -> String {
        format!("{kind} {{ name: \"{name}\" data_type: TYPE_{datatype} dims: [-1] }} ")
    }

    fn text_model(more: &[String]) -> String {
        let mut tensors =
            tensor("input", "text_input", "STRING") + &tensor("output", "text_output", "STRING");
        more.iter().for_each(|one| tensors += one);
        tensors
    }

    fn sampling(members: &str) -> Sampling {
        let body = format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"\"}}]{members}}}");
        ChatRequest::parse(body.as_bytes()).unwrap().sampling
    }

    fn inputs(contract: &Contract, members: &str) -> Result<Vec<String>, ApiError> {
        let sampling = sampling(members);
        let prompt = Prompt {
            text: "hi",
            tokens: None,
            media: &[],
            add_special_tokens: None,
            sampling: &sampling,
            default_max_tokens: None,
            stream: true,
            token_ids: false,
        };
        let show = |input: InferInput| {
            format!(
                "{} {} {:?} {:?}",
                input.name,
                input.tensor.datatype,
                input.tensor.shape,
                String::from_utf8_lossy(&input.tensor.data.as_slice())
            )
        };
        Ok(contract.inputs(&prompt)?.into_iter().map(show).collect())
    }

    #[test]
    fn the_form_follows_from_the_tensors() {
        let sampling = tensor("input", "sampling_parameters", "STRING");
        let limit = tensor("input", "max_tokens", "INT32");
        assert_eq!(contract(&text_model(&[sampling])).unwrap().form, GenerationForm::Vllm);
        assert_eq!(contract(&text_model(&[limit])).unwrap().form, GenerationForm::TensorRtLlm);
        assert!(contract(&text_model(&[])).is_none());
        let numbers =
            tensor("input", "text_input", "INT32") + &tensor("output", "text_output", "STRING");
        assert!(contract(&numbers).is_none());
    }

    #[test]
    fn vllm_gets_parameters_as_json() {
        let contract = contract(&text_model(&[
            tensor("input", "sampling_parameters", "STRING"),
            tensor("input", "stream", "BOOL"),
            tensor("input", "return_num_output_tokens", "BOOL"),
            tensor("output", "num_output_tokens", "UINT32"),
            "model_transaction_policy { decoupled: true }".to_owned(),
        ]))
        .unwrap();
        assert_eq!(
            inputs(&contract, ",\"temperature\":0.5").unwrap(),
            [
                "text_input BYTES [1] \"\\u{2}\\0\\0\\0hi\"",
                "stream BOOL [1] \"\\u{1}\"",
                "sampling_parameters BYTES [1] \"+\\0\\0\\0{\\\"temperature\\\":0.5,\\\"max_tokens\\\":2147483647}\"",
                "return_num_output_tokens BOOL [1] \"\\u{1}\"",
            ]
        );
        let error = inputs(&contract, ",\"logprobs\":true").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("logprobs"));
    }

    #[test]
    fn tensor_rt_llm_gets_a_tensor_for_each_parameter_or_refuses() {
        let contract = contract(&text_model(&[
            tensor("input", "max_tokens", "INT32"),
            tensor("input", "temperature", "FP32"),
            tensor("input", "stop_words", "STRING"),
        ]))
        .unwrap();
        assert_eq!(
            inputs(&contract, ",\"max_tokens\":5,\"temperature\":1,\"stop\":[\"a\",\"b\"],\"n\":1")
                .unwrap(),
            [
                "text_input BYTES [1] \"\\u{2}\\0\\0\\0hi\"",
                "temperature FP32 [1] \"\\0\\0�?\"",
                "stop_words BYTES [2] \"\\u{1}\\0\\0\\0a\\u{1}\\0\\0\\0b\"",
                "max_tokens INT32 [1] \"\\u{5}\\0\\0\\0\"",
            ]
        );
        for (members, param) in [
            ("", "max_tokens"),
            (",\"max_tokens\":5,\"top_p\":0.5", "top_p"),
            (",\"max_tokens\":5,\"n\":2", "n"),
            (",\"max_tokens\":5000000000", "max_tokens"),
            (
                ",\"max_tokens\":5,\"response_format\":{\"type\":\"json_object\"}",
                "structured_outputs",
            ),
        ] {
            let error = inputs(&contract, members).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{members}");
        }
    }

    #[test]
    fn responses_are_read_by_choice() {
        let strings = |name: &str, texts: &[&str]| {
            let mut data = Vec::new();
            texts.iter().for_each(|text| assert!(push_bytes_element(&mut data, text.as_bytes())));
            let shape = vec![texts.len() as i64];
            let tensor = Tensor { datatype: DataType::Bytes, shape, data: data.into() };
            InferOutput { name: name.to_owned(), tensor }
        };
        let count = InferOutput {
            name: "num_output_tokens".to_owned(),
            tensor: Tensor {
                datatype: DataType::Uint32,
                shape: vec![2],
                data: [2_u32, 3].map(u32::to_le_bytes).concat().into(),
            },
        };
        let outputs = vec![
            strings("text_output", &["a", "b"]),
            strings("finish_reason", &["None", "length"]),
            strings("stop_reason", &["", "7"]),
            count,
        ];
        let step =
            Step::read(&InferResponse { outputs, ..InferResponse::default() }, true).unwrap();
        assert_eq!(step.tokens.generated, Some(5));
        let [first, second] = step.choices.as_slice() else { panic!("two choices") };
        assert_eq!((first.text.as_str(), first.finish_reason), ("a", None));
        assert_eq!(second.finish_reason, Some(FinishReason::Length));
        assert_eq!(second.stop_reason, Some(StopReason::Token(7)));
        let wrong = vec![strings("token_ids", &["1"])];
        assert!(
            Step::read(&InferResponse { outputs: wrong, ..InferResponse::default() }, true)
                .is_err()
        );
    }
}
