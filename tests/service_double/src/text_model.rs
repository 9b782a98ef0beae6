//! The model `text`: a language model with the tensors of Triton's vllm_backend. Its tokens are the
//! words of the prompt, which it repeats one by one.

use std::collections::VecDeque;

use pharos::error::InferError;
use pharos::infer::{InferOutput, InferRequest, InferResponse, Parameter};
use pharos::model::generation::{ADAPTER, SLEEP_OPTIONS, WAKE_UP};
use pharos::model::{Completion, Draft, ModelConfig};
use pharos::service::Streamed;
use pharos::tensor::{DataType, Tensor, bytes_elements};

use crate::responses::EchoResponses;

/// Renders the contents of the messages, one each line.
pub(crate) const CHAT_TEMPLATE: &str =
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}";

const CONFIG: &str = r#"
    backend: "python"
    model_transaction_policy { decoupled: true }
    input { name: "text_input" data_type: TYPE_STRING dims: [1] }
    input { name: "stream" data_type: TYPE_BOOL dims: [1] optional: true }
    input { name: "sampling_parameters" data_type: TYPE_STRING dims: [1] optional: true }
    input { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [1] optional: true }
    input { name: "return_finish_reason" data_type: TYPE_BOOL dims: [1] optional: true }
    input { name: "return_num_input_tokens" data_type: TYPE_BOOL dims: [1] optional: true }
    input { name: "return_num_output_tokens" data_type: TYPE_BOOL dims: [1] optional: true }
    input { name: "operation" data_type: TYPE_STRING dims: [1] optional: true }
    output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
    output { name: "finish_reason" data_type: TYPE_STRING dims: [-1] }
    output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [1] }
    output { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [1] }
    parameters { key: "sleep_mode" value: { string_value: "true" } }
"#;

/// The configuration of the other models.
const OTHER_CONFIG: &str = r#"
    backend: "python"
    input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1] }
    output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1] }
"#;

/// Returns the configuration of the model `text`, or of the others.
pub(crate) fn config(of_text: bool) -> ModelConfig {
    let directory = if of_text { "text" } else { "" };
    let completion = Completion { directory, backends: &["python"], ..Completion::default() };
    let text = if of_text { CONFIG } else { OTHER_CONFIG };
    Draft::from_text(text, "config.pbtxt")
        .and_then(|draft| draft.complete(&completion))
        .expect("the configuration is valid")
}

/// Returns a response for each word of the prompt, up to `max_tokens`. The word `fail` is an error.
pub(crate) fn responses(request: &InferRequest) -> Result<EchoResponses, InferError> {
    let text = |name: &str| -> Option<String> {
        let input = request.inputs.iter().find(|input| input.name == name)?;
        let element = bytes_elements(&input.tensor.data.as_slice()).next()?.ok()?.to_vec();
        String::from_utf8(element).ok()
    };
    let prompt =
        text("text_input").ok_or_else(|| InferError::invalid("there is no 'text_input'"))?;
    let sampling = text("sampling_parameters").unwrap_or_default();
    let limit = sampling.split_once("\"max_tokens\":").and_then(|(_, rest)| {
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<usize>().ok()
    });
    if let Some(name) = text("operation") {
        return operation(request, &name);
    }
    let words: Vec<&str> = prompt.split_whitespace().collect();
    let count = words.len().min(limit.unwrap_or(usize::MAX));
    let streamed = words.iter().take(count).enumerate().map(|(index, word)| {
        let last = index + 1 == count;
        let reason = match last {
            false => "None",
            true if count < words.len() => "length",
            true => "stop",
        };
        let answer = match *word {
            "fail" => Err(InferError::internal("asked to fail")),
            word => Ok(InferResponse {
                model_name: "text".into(),
                model_version: "1".into(),
                id: request.id.clone(),
                outputs: vec![
                    string("text_output", &format!("{word} ")),
                    string("finish_reason", reason),
                    number("num_input_tokens", words.len() as u32),
                    number("num_output_tokens", 1),
                ],
                ..InferResponse::default()
            }),
        };
        Streamed { answer, last, empty: false }
    });
    Ok(EchoResponses::Many(streamed.collect::<VecDeque<_>>(), true))
}

/// Returns the response to a load or an unload of an adapter, or to a change of the model's sleep.
/// The path `wrong` is an error.
fn operation(request: &InferRequest, operation: &str) -> Result<EchoResponses, InferError> {
    let parameter = |wanted: &str| {
        let found = request.parameters.iter().find(|(name, _)| name == wanted)?;
        let Parameter::String(text) = &found.1 else { return None };
        Some(text.as_str())
    };
    let text = match (parameter(ADAPTER), parameter(SLEEP_OPTIONS)) {
        (Some(adapter), None) if adapter.contains(r#""path":"wrong""#) => {
            return Err(InferError::invalid("the adapter cannot be loaded"));
        }
        (Some(adapter), None) => adapter.split('"').nth(3).unwrap_or_default(),
        (None, Some(_)) if operation == WAKE_UP => "awake",
        (None, Some(_)) => "sleeping",
        _ => return Err(InferError::invalid("there is neither an adapter nor a sleep")),
    };
    let response = InferResponse {
        model_name: "text".into(),
        outputs: vec![string("text_output", text)],
        ..InferResponse::default()
    };
    let only = Streamed { answer: Ok(response), last: true, empty: false };
    Ok(EchoResponses::Many(VecDeque::from([only]), true))
}

fn string(name: &str, text: &str) -> InferOutput {
    let tensor = Tensor::of_element(text.as_bytes(), vec![1]).expect("a short text");
    InferOutput { name: name.into(), tensor }
}

fn number(name: &str, number: u32) -> InferOutput {
    let data = number.to_le_bytes().to_vec().into();
    let tensor = Tensor { datatype: DataType::Uint32, shape: vec![1], data };
    InferOutput { name: name.into(), tensor }
}
