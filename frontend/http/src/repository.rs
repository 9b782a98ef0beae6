//! The model repository: its index, and loading and unloading models.

use axum::body::Body;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use pharos::data::Data;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::repository::{self, IndexEntry, LoadParameter};
use pharos::service::Route;
use serde::Serialize;
use serde_json::value::RawValue;

use super::answer::HandlerResult;
use super::infer::{LONG, on_a_thread_if};
use super::json::{Members, as_bool, as_string, from_body, object, parse_error};
use super::{Edge, answer};
use pharos_edge::routing::Routed;
use pharos_listener::receiving::body::{self, Read};

object! {
    /// The body of an index request, which may be empty.
    Question { ready: &'a RawValue }
}

object! {
    /// The body of a load or an unload.
    Operation { parameters: &'a RawValue }
}

/// One entry of the index.
#[derive(Serialize)]
struct Entry<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

impl<'a> From<&'a IndexEntry> for Entry<'a> {
    fn from(entry: &'a IndexEntry) -> Self {
        Self {
            name: &entry.name,
            // The protocol represents the number as a string.
            version: entry.version.map(|version| version.to_string()),
            state: entry.state.map(repository::State::as_str),
            reason: Some(entry.reason.as_str()).filter(|reason| !reason.is_empty()),
        }
    }
}

pub(super) async fn index(edge: Edge, routed: Routed) -> HandlerResult {
    let body = edge.read_short(routed.request.into_body(), "an index request").await?;
    let entries = edge.service.repository_index(ready_only(&body)?).await?;
    answer::json_of(&entries.iter().map(Entry::from).collect::<Vec<_>>())
}

fn ready_only(body: &[u8]) -> Result<bool, InferError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(false);
    }
    let question: Question<'_> = from_body(body).map_err(parse_error)?;
    match question.ready.map(RawValue::get) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => Err(InferError::malformed("Invalid value for 'ready': expected a boolean")),
    }
}

/// Returns the route of a load or an unload. The verb may be percent-encoded; both need the same
/// access.
pub(super) fn route_of_operation(path: &str) -> Route {
    if path.ends_with("unload") { Route::RepositoryUnload } else { Route::RepositoryLoad }
}

/// `POST /v2/repository/models/M/load` and `/unload`. Clients do not encode slashes in a name, so
/// everything before the verb is the name; the engine then refuses an invalid one with an
/// explanation.
pub(super) async fn operate(edge: Edge, routed: Routed) -> HandlerResult {
    let operation = routed.parameters.unwrap_or_default().concat();
    let body = routed.request.into_body();
    match operation.rsplit_once('/') {
        Some((model, "load")) => load(&edge, model, body).await,
        Some((model, "unload")) => unload(&edge, model, body).await,
        _ => Err(answer::unknown_path()),
    }
}

/// `POST /v2/repository/R/models/M/load` and `/unload`. Triton has these paths and refuses the name
/// of the repository; the name in the path of an index has no effect.
pub(super) async fn operate_in(_: Edge, routed: Routed) -> HandlerResult {
    let named = routed.parameters.as_deref().and_then(|parts| parts.last()?.rsplit_once('/'));
    match named {
        Some((_, "load" | "unload")) => {
            Err(InferError::unsupported("'repository_name' specification is not supported").into())
        }
        _ => Err(answer::unknown_path()),
    }
}

async fn load(edge: &Edge, model: &str, body: Body) -> HandlerResult {
    let body = whole(edge, body).await?;
    let parameters =
        on_a_thread_if(body.len() > LONG, move || load_parameters(&body.join())).await?;
    answer::done(edge.service.load_model(model, parameters).await)
}

async fn unload(edge: &Edge, model: &str, body: Body) -> HandlerResult {
    let body = whole(edge, body).await?;
    let dependents =
        on_a_thread_if(body.len() > LONG, move || unloads_dependents(&body.join())).await?;
    answer::done(edge.service.unload_model(model, dependents).await)
}

/// Reads the body of a load or an unload, which may contain files in base64.
async fn whole(edge: &Edge, body: Body) -> Result<Data, InferError> {
    let most = edge.settings.max_input_size;
    match body::read(&edge.settings.budget, body, most).await? {
        Read::Whole(body) => Ok(body),
        Read::TooLarge(size) => {
            let message = format!(
                "request JSON size of {size} bytes exceeds the maximum allowed input size of \
                 {most} bytes. Use --http-max-input-size to increase the limit."
            );
            Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, message))
        }
    }
}

/// Returns the members of `parameters`; empty if there is no body or no such member.
fn parameters(body: &[u8]) -> Result<Members<'_>, InferError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(Members(Vec::new()));
    }
    let operation: Operation<'_> = from_body(body).map_err(parse_error)?;
    let Some(parameters) = operation.parameters else { return Ok(Members(Vec::new())) };
    let wrong = || internal("attempt to get members for non-object".to_owned());
    if !parameters.get().starts_with('{') {
        return Err(wrong());
    }
    serde_json::from_str(parameters.get()).map_err(parse_error)
}

/// Returns the parameters of a load by name; files are decoded from base64.
///
/// # Errors
/// Fails with Triton's texts where they exist.
pub(super) fn load_parameters(body: &[u8]) -> Result<Vec<(String, Bytes)>, InferError> {
    let parameter = |(name, value): (std::borrow::Cow<'_, str>, &RawValue)| {
        let text = as_string(value, &format!("parameter '{}'", name.escape_debug()))?;
        let value = match LoadParameter::of(&name) {
            None => {
                let name = name.escape_debug();
                return Err(internal(format!(
                    "unexpected error on creating Triton parameter: '{name}' is not known; \
                     allowed are 'config' and 'file:PATH'"
                )));
            }
            Some(LoadParameter::Config) => Bytes::from(text.into_owned()),
            Some(LoadParameter::File) => {
                BASE64_STANDARD.decode(text.as_bytes()).map(Bytes::from).map_err(|error| {
                    InferError::malformed(format!(
                        "the value of '{}' is not base64: {error}",
                        name.escape_debug()
                    ))
                })?
            }
        };
        Ok((name.into_owned(), value))
    };
    parameters(body)?.0.into_iter().map(parameter).collect()
}

/// Returns whether an unload includes the dependents. Unknown parameters are ignored, as by Triton.
fn unloads_dependents(body: &[u8]) -> Result<bool, InferError> {
    let parameters = parameters(body)?.0;
    let given = parameters.iter().find(|(name, _)| name == "unload_dependents");
    given.map_or(Ok(false), |(name, value)| as_bool(value, &format!("parameter '{name}'")))
}

fn internal(message: String) -> InferError {
    InferError::new(ErrorCode::Internal, Reason::Malformed, message)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::mpsc;
    use std::task::Poll;

    use pharos_os::blocking;
    use pharos_service_double::EchoService;

    use super::*;
    use crate::Settings;

    #[test]
    fn large_bodies_are_decoded_on_another_thread() {
        let runtime =
            tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            // While the only other thread is occupied, nothing that needs it can be ready.
            let (release, released) = mpsc::channel::<()>();
            let occupied = blocking::run(move || released.recv());
            let edge = Edge::new(
                EchoService::default().shared(),
                Settings::default(),
                crate::tests::models(),
            );
            for (size, at_once) in [(1000, true), (LONG, false)] {
                let body = || {
                    Body::from(format!(r#"{{"parameters":{{"config":"{}"}}}}"#, "x".repeat(size)))
                };
                let mut load = pin!(load(&edge, "m", body()));
                let mut unload = pin!(unload(&edge, "m", body()));
                let ready = poll_fn(|cx| {
                    Poll::Ready([
                        load.as_mut().poll(cx).is_ready(),
                        unload.as_mut().poll(cx).is_ready(),
                    ])
                });
                assert_eq!(ready.await, [at_once; 2], "{size} bytes");
            }
            drop(release);
            assert!(occupied.await.unwrap().is_err());
        });
    }
}
