//! Requests to a model for something else than its task, which the input `operation` names.

use pharos::infer::{InferInput, InferOutput, InferRequest, Parameter};
use pharos::model::ModelConfig;
use pharos::model::generation::{OPERATION, TEXT_INPUT, TEXT_OUTPUT};
use pharos::model::pooling::TEXT;
use pharos::service::{Service, Streamed};
use pharos::tensor::DataType;
use pharos_edge::Call;

use crate::answer::Failure;
use crate::edge::Edge;
use crate::error::ApiError;
use crate::tensors;

/// The most names of models in an error.
const MAX_NAMES: usize = 16;

/// Returns the name of the only ready model that a condition accepts; `ability` is what such models
/// can do.
pub(crate) async fn only_model(
    service: &dyn Service,
    ability: &str,
    accepts: impl Fn(&ModelConfig) -> bool,
) -> Result<String, Failure> {
    let index = service.repository_index(true).await?;
    let mut names: Vec<String> = index.into_iter().map(|entry| entry.name).collect();
    names.dedup();
    names.retain(|name| service.model_config(name, "").is_ok_and(|config| accepts(&config)));
    match names.as_slice() {
        [only] => Ok(only.clone()),
        [] => {
            let text = format!("no model here can {ability}");
            Err(ApiError::invalid_field("model", text).into())
        }
        names => {
            let listed: Vec<&str> = names.iter().take(MAX_NAMES).map(String::as_str).collect();
            let more = if names.len() > MAX_NAMES { ", ..." } else { "" };
            let text = format!(
                "model is required, because several models may {ability}: {}{more}",
                listed.join(", ")
            );
            Err(ApiError::invalid_field("model", text).into())
        }
    }
}

/// The operations of a model.
#[derive(Clone, Debug)]
pub(crate) struct Operations {
    model: String,
    /// The input with the text.
    text: &'static str,
    has_batch: bool,
}

impl Operations {
    /// Returns the operations of a model; `None` if it has no tensors for them.
    pub(crate) fn of(config: &ModelConfig) -> Option<Self> {
        let has = |name: &str| config.inputs.iter().any(|spec| spec.name == name);
        let returns_text = config.outputs.iter().any(|spec| spec.name == TEXT_OUTPUT);
        let text = [TEXT_INPUT, TEXT].into_iter().find(|name| has(name))?;
        (has(OPERATION) && returns_text).then(|| Self {
            model: config.name.clone(),
            text,
            has_batch: config.max_batch_size > 0,
        })
    }

    /// Runs an operation with a text and further inputs. Returns the outputs of the last response
    /// that has some.
    pub(crate) async fn run(
        &self,
        edge: &Edge,
        call: &mut Call,
        operation: &str,
        text: &str,
        more: Vec<InferInput>,
        parameter: Option<(&str, String)>,
    ) -> Result<Vec<InferOutput>, Failure> {
        let mut inputs = vec![self.string(OPERATION, operation)?, self.string(self.text, text)?];
        inputs.extend(more);
        let parameters = parameter
            .map(|(name, value)| (name.to_owned(), Parameter::String(value)))
            .into_iter()
            .collect();
        let mut request = InferRequest {
            model_name: self.model.clone(),
            inputs,
            parameters,
            ..InferRequest::default()
        };
        call.describe_client_in(&mut request, edge.service.now());
        let mut responses = edge.service.stream(request)?;
        let mut outputs = Vec::new();
        while let Some(Streamed { answer, empty, last, .. }) = responses.next_response().await {
            let response = answer?;
            if !empty {
                outputs = response.outputs;
            }
            if last {
                break;
            }
        }
        Ok(outputs)
    }

    fn string(&self, name: &str, text: &str) -> Result<InferInput, ApiError> {
        Ok(self.input(name, DataType::Bytes, 1, tensors::texts([text])?))
    }

    /// Returns an input of this many elements.
    pub(crate) fn input(
        &self,
        name: &str,
        datatype: DataType,
        elements: usize,
        data: Vec<u8>,
    ) -> InferInput {
        tensors::input(name, datatype, 1 + usize::from(self.has_batch), elements, data)
    }
}
