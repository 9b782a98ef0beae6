//! Descriptions of models, optionally with the handler's own description.

use axum::response::Response;
use pharos::error::InferError;
use serde_json::Value;

use super::predict::{end_of_worker, wait_until_loaded};
use super::{RequestHead, Shared, answer};
use crate::handler_call::{self, HandlerCall};
use crate::registry::{ModelDescription, ModelReference, Version};
use crate::{ErrorResponse, Exception, failure};
use pharos_os::clock;

/// `GET /models/M[/V|/all]`.
pub(super) async fn describe(
    shared: &Shared,
    head: &RequestHead,
    reference: ModelReference<'_>,
) -> Result<Response, ErrorResponse> {
    let customized =
        head.query("customized").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let description = customized
        .then(|| DescriptionCall { id: &head.id, headers: handler_call::headers(&head.headers) });
    Ok(answer::json(&descriptions(shared, reference, description).await?))
}

/// A call of a handler for its own description of its model.
pub(crate) struct DescriptionCall<'a> {
    /// The id of the request.
    pub(crate) id: &'a str,
    /// The headers of the request, as passed to the handler.
    pub(crate) headers: serde_json::Map<String, Value>,
}

/// Describes a version (empty: the default one), or `all`. With a call, adds the handler's own
/// description of a single version.
pub(crate) async fn descriptions(
    shared: &Shared,
    reference: ModelReference<'_>,
    call: Option<DescriptionCall<'_>>,
) -> Result<Vec<ModelDescription>, ErrorResponse> {
    let registry = &shared.registry;
    if reference.version == "all" {
        return Ok(registry
            .all_of(reference.name)?
            .iter()
            .map(|version| registry.describe(version))
            .collect());
    }
    let found = registry.find(reference.name, reference.version)?;
    let mut description = registry.describe(&found);
    if let Some(call) = call {
        description.customized_metadata =
            Some(handler_description(shared, reference.name, &found, call).await?);
    }
    Ok(vec![description])
}

/// Calls the handler to describe itself.
async fn handler_description(
    shared: &Shared,
    model: &str,
    version: &Version,
    call: DescriptionCall<'_>,
) -> Result<Value, ErrorResponse> {
    if version.deployment().min_workers == 0 {
        let message = format!(
            "Model \"{model}\" has no worker to serve describe request. Please use scale workers \
             API to add workers."
        );
        return Err(ErrorResponse::new(503, Exception::ServiceUnavailable, message));
    }
    let since = clock::now();
    let reference = ModelReference { name: model, version: "" };
    wait_until_loaded(shared, reference, version, since).await?;
    let DescriptionCall { id, mut headers } = call;
    headers.insert("describe".to_owned(), Value::from("True"));
    let handler_call = HandlerCall { headers, describe: true, explain: false };
    let answered = async {
        let engine_model = ModelReference { name: &version.engine_name, version: "" };
        let mut request = handler_call::request(engine_model, id, &[], handler_call)
            .ok_or_else(|| InferError::internal("the request to describe is too long"))?;
        request.timeline.received = since;
        request.timeline.request_start = since;
        let mut responses = shared.uncounted.stream(request)?;
        let first = responses
            .next_response()
            .await
            .ok_or_else(|| InferError::internal("the handler returned no response"))?;
        handler_call::answer(first.answer?)
    };
    match answered.await {
        Ok(answer) => {
            let text = String::from_utf8_lossy(&answer.body);
            Ok(serde_json::from_str(&text).unwrap_or_else(|_| Value::from(text.into_owned())))
        }
        Err(error) => {
            let end = end_of_worker(shared, &error, version, since).await;
            Err(failure::refused(&error, reference, || end))
        }
    }
}
