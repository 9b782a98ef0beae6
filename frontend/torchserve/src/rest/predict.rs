//! Predictions and explanations: for every path, the body is passed to a handler and its output is returned.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::{Method, StatusCode};
use hyper::ext::ReasonPhrase;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::id::CorrelationId;
use pharos::infer::InferRequest;
use pharos::service::{Responses, Streamed};
use pharos::timeline::{Instant, Timeline};
use serde_json::Value;

use super::ended::EndedSequences;
use super::streaming::Parts;
use super::{Port, RequestHead, Shared, answer, openapi};
use crate::failure::{self, End};
use crate::form::{self, Part};
use crate::handler_call::{self, HandlerCall, check_size};
use crate::registry::{InFlight, Version};
use crate::routes::Target;
use crate::{Exception, Refused};
use pharos_edge::Call;
use pharos_listener::receiving::body::{self, Read};
use pharos_os::clock;

/// How long to wait for the exit status of a worker whose connection was lost.
const END_KNOWN: Duration = Duration::from_millis(100);

/// Handles a prediction.
pub(super) async fn predict(
    port: &Port,
    head: &RequestHead,
    call: &mut Call,
    target: Target,
    body: Body,
) -> Result<Response, Refused> {
    let shared = &*port.shared;
    let named = target.model.clone().or_else(|| head.query("model_name").filter(|name| !name.is_empty()));
    let named = named.or_else(|| shared.registry.only_startup_model().filter(|_| target.query));
    // Fail before reading the body if the model is unknown.
    let known = named.as_deref().map(|name| shared.registry.find(name, &target.version)).transpose()?;
    let parts = parts(shared, head, (&target, body)).await?;
    let model = match named {
        Some(model) => model,
        None => model_of(&parts).ok_or_else(|| Refused::bad_request("Parameter model_name is required."))?,
    };
    let version = known.map_or_else(|| shared.registry.find(&model, &target.version), Ok)?;
    if head.method == Method::OPTIONS {
        return Ok(answer::json(&openapi::of_model(&model)));
    }
    let called = (model.as_str(), target.version.as_str());
    let entered = enter(shared, called, &version)?;
    loaded(shared, called, (&version, head.received)).await?;
    let mut handler_call = call_of(head, &target);
    let sequence = version.deployment().sequence.is_some().then(|| sequence(shared, head, &mut handler_call));
    let too_long = || Refused::bad_request("The parts of the request are too long");
    let request = handler_call::request((called.0, called.1, &head.id), &parts, handler_call);
    let mut request = request.ok_or_else(too_long)?;
    if let Some((id, start, end)) = sequence {
        request.correlation_id = CorrelationId::String(id);
        (request.sequence_start, request.sequence_end) = (start, end);
    }
    call.begin(&head.headers);
    call.complete(&mut request, clock::now());
    request.timeline.request_start = clock::now();
    let answered = async {
        let mut responses = shared.stream(request, called)?;
        let first = first_of(&mut *responses, &version, head.received).await?;
        let first = first.ok_or_else(|| InferError::internal("The model returned no response."))?;
        let ended = EndedSequences::of(&port.shared, &version);
        respond(first, (responses, entered), (ended, shared.settings.max_response_size))
    };
    match answered.await {
        Ok((response, timeline)) => {
            if let Some(timeline) = timeline {
                call.set_times(&timeline);
            }
            Ok(response)
        }
        Err(error) => {
            call.drop_times();
            let end = end_of(shared, &error, &version, head.received).await;
            Err(failure::refused(&error, called, || end))
        }
    }
}

impl Shared {
    /// Passes a request to the engine, with the model and the version that the client named.
    ///
    /// # Errors
    /// As [`pharos::service::Service::stream`], or the version was unregistered since it was found.
    pub(crate) fn stream(
        &self,
        request: InferRequest,
        (model, version): (&str, &str),
    ) -> Result<Box<dyn Responses>, InferError> {
        self.service.stream(request).map_err(|error| match self.registry.find(model, version) {
            Ok(_) => error,
            Err(unregistered) => InferError::new(ErrorCode::NotFound, Reason::UnknownModel, unregistered.message),
        })
    }
}

/// Returns the first response. The time already spent since `received` counts towards the timeout.
///
/// # Errors
/// There was no response within the model's `clientTimeoutInMills`.
pub(crate) async fn first_of(
    responses: &mut dyn Responses,
    version: &Version,
    received: Instant,
) -> Result<Option<Streamed>, InferError> {
    let limit = Duration::from_millis(version.deployment().client_timeout.into());
    if limit.is_zero() {
        return Ok(responses.next_response().await);
    }
    let left = limit.saturating_sub(clock::now() - received);
    tokio::time::timeout(left, responses.next_response()).await.map_err(|_| too_late(limit))
}

/// Accepts a request if the version has workers, or is going to have some.
///
/// # Errors
/// The version has no workers configured, or all are busy and the model does not queue requests.
pub(crate) fn enter(
    shared: &Shared,
    (model, version): (&str, &str),
    found: &Arc<Version>,
) -> Result<InFlight, Refused> {
    let refuse = |more: &str| {
        shared.service.record_refused(model, version, &found.engine_name);
        failure::no_worker(model, version, more)
    };
    if found.deployment().min_workers == 0 {
        return Err(refuse(""));
    }
    found.enter().ok_or_else(|| refuse(". All workers are busy, and useJobTicket disables queueing"))
}

/// Waits for the first worker of a version while it loads the model, at most `clientTimeoutInMills`. The engine reports any later
/// error.
///
/// # Errors
/// Too many requests are waiting, or the timeout has passed.
pub(crate) async fn loaded(
    shared: &Shared,
    (model, version): (&str, &str),
    (found, received): (&Version, Instant),
) -> Result<(), Refused> {
    if !found.is_loading() {
        return Ok(());
    }
    let limit = Duration::from_millis(found.deployment().client_timeout.into());
    let waited = match limit.is_zero() {
        true => found.loaded().await,
        false => {
            let left = limit.saturating_sub(clock::now() - received);
            let waited = tokio::time::timeout(left, found.loaded()).await;
            waited.map_err(|_| failure::refused(&too_late(limit), (model, version), || End::Died))?
        }
    };
    waited.ok_or_else(|| {
        shared.service.record_refused(model, version, &found.engine_name);
        failure::no_worker(model, version, ". Its queue is full: Exceeds maximum queue size")
    })
}

fn too_late(limit: Duration) -> InferError {
    let text = format!("there was no answer within {} ms", limit.as_millis());
    InferError::new(ErrorCode::DeadlineExceeded, Reason::Timeout, text)
}

/// Reads the parts of a request.
async fn parts(shared: &Shared, head: &RequestHead, (target, body): (&Target, Body)) -> Result<Vec<Part>, Refused> {
    let limit = shared.settings.max_request_size;
    let whole = match body::read(&shared.budget, body, limit).await {
        Ok(Read::Whole(data)) => data.join(),
        Ok(Read::TooLarge(size)) => {
            let message = format!("The body has at least {size} bytes; max_request_size allows {limit}");
            return Err(Refused::new(413, Exception::BadRequest, message));
        }
        Err(error) => return Err(failure::refused(&error, ("", ""), || End::Died)),
    };
    let mut parts = if target.query { form::pairs(head.uri.query().unwrap_or_default()) } else { Vec::new() };
    parts.extend(form::parts(head.header("content-type"), whole).await?);
    Ok(parts)
}

/// Returns the model name in a form.
fn model_of(parts: &[Part]) -> Option<String> {
    let named = parts.iter().find(|part| part.name == "model_name" && !part.data.is_empty())?;
    Some(String::from_utf8_lossy(&named.data).into_owned())
}

fn call_of(head: &RequestHead, target: &Target) -> HandlerCall {
    let mut headers = handler_call::headers(&head.headers);
    if let Some(explain) = target.explain {
        headers.insert("explain".to_owned(), Value::from(if explain { "True" } else { "False" }));
    }
    if let Some(url_path) = &target.url_path {
        headers.insert("url_path".to_owned(), Value::from(url_path.as_str()));
    }
    HandlerCall { headers, describe: false, explain: target.explain == Some(true) }
}

/// Returns a request's sequence id, and whether it starts and ends the sequence. Without an id, it starts a new sequence.
fn sequence(shared: &Shared, head: &RequestHead, call: &mut HandlerCall) -> (String, bool, bool) {
    let [id, start, end] = &shared.settings.sequence_headers;
    let says = |name: &str| head.header(name).eq_ignore_ascii_case("true");
    let given = head.header(id);
    if !given.is_empty() {
        return (given.to_owned(), says(start), says(end));
    }
    let made = format!("ts-seq-{}", shared.ids.next());
    call.headers.insert(id.clone(), Value::from(made.as_str()));
    call.headers.insert(start.clone(), Value::from("true"));
    (made, true, says(end))
}

/// Builds the response to a client, with the timeline of the request: complete, or streamed if more parts follow. Then the
/// timeline is not known yet.
fn respond(
    first: Streamed,
    (responses, entered): (Box<dyn Responses>, InFlight),
    (ended, most): (Option<EndedSequences>, u64),
) -> Result<(Response, Option<Timeline>), InferError> {
    let last = first.last || !responses.is_decoupled();
    let first = first.answer?;
    let timeline = last.then_some(first.timeline);
    let answer = handler_call::answer(first)?;
    if let Some(ended) = &ended {
        ended.close(&answer.headers);
    }
    check_size(&answer.body, most)?;
    let body = match last {
        true => Body::from(answer.body),
        false => Body::new(Parts::new(answer.body, responses, (entered, ended, most))),
    };
    let mut response = Response::new(body);
    // An informational status would not end the response.
    let status = StatusCode::from_u16(answer.status).ok().filter(|status| !status.is_informational());
    *response.status_mut() = status.ok_or_else(|| {
        InferError::internal(format!("the handler's status is {}; allowed are 200 to 999", answer.status))
    })?;
    *response.headers_mut() = answer.headers;
    if let Some(reason) = Some(answer.reason).filter(|reason| !reason.is_empty())
        && let Ok(reason) = ReasonPhrase::try_from(reason)
    {
        response.extensions_mut().insert(reason);
    }
    Ok((response, timeline))
}

/// Returns how the worker of a failed request ended, if it did. The exit status is known shortly after the connection is lost.
pub(crate) async fn end_of(shared: &Shared, error: &InferError, version: &Version, since: Instant) -> End {
    if error.reason != Reason::InstanceLost {
        return End::Died;
    }
    let until = clock::now() + END_KNOWN;
    while clock::now() < until {
        if shared.uncounted.killed_since(&version.engine_name, since) {
            return End::Killed;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    End::Died
}
