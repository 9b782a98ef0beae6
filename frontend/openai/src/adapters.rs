//! `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`: adapters (LoRA) that clients
//! load, in the form of vLLM 0.32.
//!
//! The names of the adapters are here. Each request to a model with such an adapter has the place of
//! its file, so that every instance loads it with the first request that needs it, also after a
//! restart. A load is one request to the model, so that a wrong file fails the load.

use axum::response::Response;
use http::header::{CONTENT_TYPE, HeaderValue};
use pharos::error::Reason;
use pharos::infer::Parameter;
use pharos::model::ModelConfig;
use pharos::model::generation::{
    ADAPTER, GenerationForm, LOAD_ADAPTER, OPERATION, TEXT_OUTPUT, UNLOAD_ADAPTER,
};
use pharos_edge::Call;

use crate::answer::Failure;
use crate::contract::strings;
use crate::edge::{Edge, Received, log_unknown};
use crate::error::{ApiError, quoted};
use crate::json::{Fields, invalid};
use crate::models::{LoadedAdapter, Origin};
use crate::operation::{Operations, only_model};
use crate::options::{MAX_MODEL_BYTES, RequestOptions};

/// The longest path of an adapter, in bytes.
const MAX_PATH_BYTES: usize = 4096;

/// A checked request of either path.
#[derive(Debug)]
struct AdapterRequest {
    name: String,
    /// The model; `None` for the only one.
    model: Option<String>,
    unknown: Vec<String>,
}

impl AdapterRequest {
    fn read(fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        let name = required(fields, "lora_name", MAX_MODEL_BYTES)?;
        let model = fields.text("model", MAX_MODEL_BYTES)?;
        Ok(Self { name, model, unknown: fields.unknown() })
    }
}

/// A checked request of `POST /v1/load_lora_adapter`.
#[derive(Debug)]
struct LoadRequest {
    adapter: AdapterRequest,
    path: String,
    /// Whether the adapter may replace one with its name.
    in_place: bool,
}

impl LoadRequest {
    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let path = required(&mut fields, "lora_path", MAX_PATH_BYTES)?;
        let in_place = fields.boolean("load_inplace")?.unwrap_or(false);
        let is_3d = "is_3d_lora_weight";
        if fields.boolean(is_3d)? == Some(true) {
            return Err(invalid(is_3d, "true", "false, because the file says its form"));
        }
        Ok(Self { adapter: AdapterRequest::read(&mut fields)?, path, in_place })
    }
}

fn required(fields: &mut Fields<'_>, name: &str, most: usize) -> Result<String, ApiError> {
    let text = fields.text(name, most)?.ok_or_else(|| fields.missing(name))?;
    match text.is_empty() {
        true => Err(invalid(name, "\"\"", "a text that is not empty")),
        false => Ok(text),
    }
}

impl LoadedAdapter {
    /// Returns the parameter of a request with the adapter.
    pub(crate) fn to_parameter(&self) -> (String, Parameter) {
        (ADAPTER.to_owned(), Parameter::String(self.to_json()))
    }

    fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Answers a request of `POST /v1/load_lora_adapter`.
pub(crate) async fn load(mut received: Received) -> Response {
    let answer = load_adapter(&mut received).await;
    finish(received, answer)
}

/// Answers a request of `POST /v1/unload_lora_adapter`.
pub(crate) async fn unload(mut received: Received) -> Response {
    let answer = unload_adapter(&mut received).await;
    finish(received, answer)
}

async fn load_adapter(received: &mut Received) -> Result<String, Failure> {
    received.edge.service.check_model_control()?;
    let LoadRequest { adapter, path, in_place } = received.parse(LoadRequest::parse).await?;
    let AdapterRequest { name, model, unknown } = adapter;
    let model = match model {
        Some(model) => model,
        None => {
            let accepts = |config: &ModelConfig| operations_of(config).is_some();
            only_model(&*received.edge.service, "load adapters", accepts).await?
        }
    };
    let options = RequestOptions { model: Some(model), ..RequestOptions::default() };
    let model = received.enter_model(&options).await?;
    log_unknown(&model, &unknown);
    let Received { edge, call, .. } = received;
    let config = edge.service.model_config(&model, "")?;
    let operations = operations_of(&config).ok_or_else(|| no_adapters(&model))?;
    let change = edge.models.change_adapters(&*edge.service, &model).await?;
    check_name(edge, &model, &name, in_place).await?;
    let new = edge.models.new_adapter(name.clone(), path);
    let loading =
        operations.run(edge, call, LOAD_ADAPTER, "", Vec::new(), Some((ADAPTER, new.to_json())));
    let outputs = loading.await.map_err(of_path)?;
    let mut texts = Vec::new();
    for output in outputs.iter().filter(|output| output.name == TEXT_OUTPUT) {
        texts = strings(&output.name, &output.tensor)?;
    }
    if texts != [name.as_str()] {
        return Err(no_adapters(&model).into());
    }
    if let Some(old) = change.insert(&*edge.service, new)? {
        free(edge, call, &operations, &old).await;
    }
    Ok(format!("Success: LoRA adapter '{name}' added successfully."))
}

async fn unload_adapter(received: &mut Received) -> Result<String, Failure> {
    let Edge { service, models, .. } = &received.edge;
    service.check_model_control()?;
    let parse = |body: &[u8]| AdapterRequest::read(&mut Fields::of_body(body)?);
    let AdapterRequest { name, model, unknown } = received.parse(parse).await?;
    let found = models.find_adapter(&**service, &name).await;
    let found = found.filter(|(of, _)| model.as_ref().is_none_or(|model| model == of));
    let Some((model, origin)) = found else { return Err(not_found(&name).into()) };
    let options = RequestOptions { model: Some(model), ..RequestOptions::default() };
    let model = received.enter_model(&options).await?;
    log_unknown(&model, &unknown);
    let Received { edge, call, .. } = received;
    if origin == Origin::File {
        return Err(of_file(&model, &name).into());
    }
    let operations =
        operations_of(&*edge.service.model_config(&model, "")?).ok_or_else(|| not_found(&name))?;
    let change = edge.models.change_adapters(&*edge.service, &model).await?;
    let old = change.remove(&name).ok_or_else(|| not_found(&name))?;
    free(edge, call, &operations, &old).await;
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}

/// Frees the memory of an adapter that no new request has. A failure leaves it to the limit of
/// adapters of the engine.
async fn free(edge: &Edge, call: &mut Call, operations: &Operations, adapter: &LoadedAdapter) {
    let parameter = Some((ADAPTER, adapter.to_json()));
    let freeing = operations.run(edge, call, UNLOAD_ADAPTER, "", Vec::new(), parameter);
    if let Err(failure) = freeing.await {
        tracing::debug!(
            adapter = adapter.name,
            "the memory of an unloaded adapter is not free yet: {}",
            failure.error
        );
    }
}

/// Checks that an adapter may have a name.
async fn check_name(edge: &Edge, model: &str, name: &str, in_place: bool) -> Result<(), ApiError> {
    let refuse = |text: String| Err(ApiError::invalid_field("lora_name", text));
    let config = edge.service.model_config(name, "");
    if !config.is_err_and(|error| error.reason == Reason::UnknownModel) {
        return refuse(format!("the lora adapter '{}' has the name of a model", quoted(name)));
    }
    match edge.models.find_adapter(&*edge.service, name).await {
        None => Ok(()),
        Some((other, _)) if other != model => refuse(format!(
            "the lora adapter '{}' belongs to the model '{other}' already",
            quoted(name)
        )),
        Some((_, Origin::File)) => Err(of_file(model, name)),
        Some((_, Origin::Request)) if in_place => Ok(()),
        Some((_, Origin::Request)) => refuse(format!(
            "the lora adapter '{}' has already been loaded: load_inplace true replaces it",
            quoted(name)
        )),
    }
}

/// Returns the operations of a model that may load adapters.
fn operations_of(config: &ModelConfig) -> Option<Operations> {
    GenerationForm::of(config).and_then(|_| Operations::of(config))
}

fn no_adapters(model: &str) -> ApiError {
    ApiError {
        code: Some("model_not_supported"),
        ..ApiError::invalid_field(
            "model",
            format!(
                "the model '{model}' does not load adapters by request: its input '{OPERATION}' \
                 has no '{LOAD_ADAPTER}'"
            ),
        )
    }
}

fn of_file(model: &str, name: &str) -> ApiError {
    let text = format!(
        "the lora adapter '{}' is in the file multi_lora.json of the model '{model}': requests \
         neither replace nor unload it",
        quoted(name)
    );
    ApiError::invalid_field("lora_name", text)
}

fn not_found(name: &str) -> ApiError {
    ApiError {
        status: 404,
        ..ApiError::invalid_field(
            "lora_name",
            format!("the lora adapter '{}' cannot be found", quoted(name)),
        )
    }
}

/// Returns the failure of an engine that has refused to load an adapter, which names its path.
fn of_path(mut failure: Failure) -> Failure {
    if failure.error.status == 400 {
        failure.error.param = Some("lora_path".to_owned());
    }
    failure
}

fn finish(received: Received, answer: Result<String, Failure>) -> Response {
    match answer {
        Ok(text) => {
            let mut response = received.finish(Ok(text.into_bytes()));
            let plain = HeaderValue::from_static("text/plain; charset=utf-8");
            response.headers_mut().insert(CONTENT_TYPE, plain);
            response
        }
        Err(failure) => received.fail(&failure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, param: &str, part: &str) {
        let error = LoadRequest::parse(body.as_bytes()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{body}");
        assert!(error.message.contains(part), "{}", error.message);
    }

    #[test]
    fn requests_have_a_name_and_a_path() {
        let body = br#"{"lora_name":"a","lora_path":"b","load_inplace":true,"model":"m"}"#;
        let LoadRequest { adapter, path, in_place } = LoadRequest::parse(body).unwrap();
        assert_eq!((adapter.name.as_str(), path.as_str(), in_place), ("a", "b", true));
        assert_eq!(adapter.model.as_deref(), Some("m"));
        check("{}", "lora_path", "lora_path");
        check(r#"{"lora_path":"b"}"#, "lora_name", "lora_name");
        check(r#"{"lora_path":"b","lora_name":""}"#, "lora_name", "not empty");
        check(r#"{"lora_path":5,"lora_name":"a"}"#, "lora_path", "5");
        let long = format!(r#"{{"lora_path":"{}","lora_name":"a"}}"#, "x".repeat(4097));
        check(&long, "lora_path", "4096");
        let three = r#"{"lora_path":"b","lora_name":"a","is_3d_lora_weight":true}"#;
        check(three, "is_3d_lora_weight", "true");
    }
}
