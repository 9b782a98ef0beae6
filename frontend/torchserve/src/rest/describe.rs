//! Descriptions of models, optionally with the handler's own description.

use axum::response::Response;
use pharos::error::InferError;
use serde_json::Value;

use super::predict::{end_of, loaded};
use super::{RequestHead, Shared, answer};
use crate::handler_call::{self, HandlerCall};
use crate::registry::{ModelDescription, Version};
use crate::{Exception, Refused, failure};
use pharos_os::clock;

/// `GET /models/M[/V|/all]`.
pub(super) async fn describe(shared: &Shared, head: &RequestHead, named: (&str, &str)) -> Result<Response, Refused> {
    let customized = head.query("customized").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let headers = customized.then(|| handler_call::headers(&head.headers));
    let asked = headers.map(|headers| (head.id.as_str(), headers));
    Ok(answer::json(&descriptions(shared, named, asked).await?))
}

/// Describes a version (empty: the default one), or `all`. With an id and headers, adds the handler's own description.
pub(crate) async fn descriptions(
    shared: &Shared,
    (model, version): (&str, &str),
    asked: Option<(&str, serde_json::Map<String, Value>)>,
) -> Result<Vec<ModelDescription>, Refused> {
    let registry = &shared.registry;
    if version == "all" {
        return Ok(registry.all_of(model)?.iter().map(|version| registry.describe(version)).collect());
    }
    let found = registry.find(model, version)?;
    let mut description = registry.describe(&found);
    if let Some((id, headers)) = asked {
        description.customized_metadata = Some(handler_description(shared, (model, &found), id, headers).await?);
    }
    Ok(vec![description])
}

/// Calls the handler to describe itself.
async fn handler_description(
    shared: &Shared,
    (model, version): (&str, &Version),
    id: &str,
    mut headers: serde_json::Map<String, Value>,
) -> Result<Value, Refused> {
    if version.deployment().min_workers == 0 {
        let message = format!(
            "Model \"{model}\" has no worker to serve describe request. Please use scale workers API to add workers."
        );
        return Err(Refused::new(503, Exception::ServiceUnavailable, message));
    }
    let since = clock::now();
    loaded(shared, (model, ""), (version, since)).await?;
    headers.insert("describe".to_owned(), Value::from("True"));
    let call = HandlerCall { headers, describe: true, explain: false };
    let answered = async {
        let too_long = || InferError::internal("the request to describe is too long");
        let mut request = handler_call::request((&version.engine_name, "", id), &[], call).ok_or_else(too_long)?;
        request.timeline.received = since;
        request.timeline.request_start = since;
        let mut responses = shared.uncounted.stream(request)?;
        let first =
            responses.next_response().await.ok_or_else(|| InferError::internal("the handler returned no response"))?;
        handler_call::answer(first.answer?)
    };
    match answered.await {
        Ok(answer) => {
            let text = String::from_utf8_lossy(&answer.body);
            Ok(serde_json::from_str(&text).unwrap_or_else(|_| Value::from(text.into_owned())))
        }
        Err(error) => {
            let end = end_of(shared, &error, version, since).await;
            Err(failure::refused(&error, (model, ""), || end))
        }
    }
}
