//! Predictions and explanations: for every path, the body is passed to a handler and its output is
//! returned.

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
use crate::form::{self, FormPart};
use crate::handler_call::{self, HandlerCall, check_size};
use crate::registry::{InFlight, ModelReference, Version};
use crate::routes::Target;
use crate::{ErrorResponse, Exception};
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
) -> Result<Response, ErrorResponse> {
    let shared = &*port.shared;
    let named =
        target.model.clone().or_else(|| head.query("model_name").filter(|name| !name.is_empty()));
    let named = named.or_else(|| shared.registry.only_startup_model().filter(|_| target.query));
    // Fail before reading the body if the model is unknown.
    let known =
        named.as_deref().map(|name| shared.registry.find(name, &target.version)).transpose()?;
    let parts = read_parts(shared, head, &target, body).await?;
    let model = match named {
        Some(model) => model,
        None => model_of(&parts)
            .ok_or_else(|| ErrorResponse::bad_request("Parameter model_name is required."))?,
    };
    let version = known.map_or_else(|| shared.registry.find(&model, &target.version), Ok)?;
    if head.method == Method::OPTIONS {
        return Ok(answer::json(&openapi::of_model(&model)));
    }
    let reference = ModelReference { name: &model, version: &target.version };
    let in_flight = accept(shared, reference, &version)?;
    wait_until_loaded(shared, reference, &version, head.received).await?;
    let mut handler_call = handler_call_of(head, &target);
    let sequence =
        version.deployment().sequence.is_some().then(|| sequence(shared, head, &mut handler_call));
    let mut request = handler_call::request(reference, &head.id, &parts, handler_call)
        .ok_or_else(|| ErrorResponse::bad_request("The parts of the request are too long"))?;
    if let Some(sequence) = sequence {
        request.correlation_id = CorrelationId::String(sequence.id);
        request.sequence_start = sequence.starts;
        request.sequence_end = sequence.ends;
    }
    call.read_headers(&head.headers);
    call.describe_client_in(&mut request, clock::now());
    let answered = async {
        let mut responses = shared.stream(request, reference)?;
        let first = first_response(&mut *responses, &version, head.received).await?;
        let first = first.ok_or_else(|| InferError::internal("The model returned no response."))?;
        let ended = EndedSequences::of(&port.shared, &version);
        respond(first, responses, in_flight, ended, shared.settings.max_response_size)
    };
    match answered.await {
        Ok((response, timeline)) => {
            if let Some(timeline) = timeline {
                call.set_times(&timeline);
            }
            Ok(response)
        }
        Err(error) => {
            call.forget_timing();
            let end = end_of_worker(shared, &error, &version, head.received).await;
            Err(failure::refused(&error, reference, || end))
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
        reference: ModelReference<'_>,
    ) -> Result<Box<dyn Responses>, InferError> {
        self.service.stream(request).map_err(|error| {
            match self.registry.find(reference.name, reference.version) {
                Ok(_) => error,
                Err(unregistered) => {
                    InferError::new(ErrorCode::NotFound, Reason::UnknownModel, unregistered.message)
                }
            }
        })
    }
}

/// Returns the first response. The time already spent since `received` counts towards the timeout.
///
/// # Errors
/// There was no response within the model's `clientTimeoutInMills`.
pub(crate) async fn first_response(
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
pub(crate) fn accept(
    shared: &Shared,
    reference: ModelReference<'_>,
    found: &Arc<Version>,
) -> Result<InFlight, ErrorResponse> {
    let refuse = |more: &str| {
        shared.service.record_refused(reference.name, reference.version, &found.engine_name);
        failure::no_worker(reference, more)
    };
    if found.deployment().min_workers == 0 {
        return Err(refuse(""));
    }
    found
        .enter()
        .ok_or_else(|| refuse(". All workers are busy, and useJobTicket disables queueing"))
}

/// Waits for the first worker of a version while it loads the model, at most
/// `clientTimeoutInMills`. The engine reports any later error.
///
/// # Errors
/// Too many requests are waiting, or the timeout has passed.
pub(crate) async fn wait_until_loaded(
    shared: &Shared,
    reference: ModelReference<'_>,
    found: &Version,
    received: Instant,
) -> Result<(), ErrorResponse> {
    if !found.is_loading() {
        return Ok(());
    }
    let limit = Duration::from_millis(found.deployment().client_timeout.into());
    let waited = if limit.is_zero() {
        found.loaded().await
    } else {
        let left = limit.saturating_sub(clock::now() - received);
        let waited = tokio::time::timeout(left, found.loaded()).await;
        waited.map_err(|_| failure::refused(&too_late(limit), reference, || End::Died))?
    };
    waited.ok_or_else(|| {
        shared.service.record_refused(reference.name, reference.version, &found.engine_name);
        failure::no_worker(reference, ". Its queue is full: Exceeds maximum queue size")
    })
}

fn too_late(limit: Duration) -> InferError {
    let text = format!("there was no answer within {} ms", limit.as_millis());
    InferError::new(ErrorCode::DeadlineExceeded, Reason::Timeout, text)
}

/// Reads the parts of a request.
async fn read_parts(
    shared: &Shared,
    head: &RequestHead,
    target: &Target,
    body: Body,
) -> Result<Vec<FormPart>, ErrorResponse> {
    let limit = shared.settings.max_request_size;
    let whole = match body::read(&shared.budget, body, limit).await {
        Ok(Read::Whole(data)) => data.join(),
        Ok(Read::TooLarge(size)) => {
            let message =
                format!("The body has at least {size} bytes; max_request_size allows {limit}");
            return Err(ErrorResponse::new(413, Exception::BadRequest, message));
        }
        Err(error) => {
            return Err(failure::refused(&error, ModelReference::default(), || End::Died));
        }
    };
    let mut parts =
        if target.query { form::pairs(head.uri.query().unwrap_or_default()) } else { Vec::new() };
    parts.extend(form::parts(head.header("content-type"), whole).await?);
    Ok(parts)
}

/// Returns the model name in a form.
fn model_of(parts: &[FormPart]) -> Option<String> {
    let named = parts.iter().find(|part| part.name == "model_name" && !part.data.is_empty())?;
    Some(String::from_utf8_lossy(&named.data).into_owned())
}

fn handler_call_of(head: &RequestHead, target: &Target) -> HandlerCall {
    let mut headers = handler_call::headers(&head.headers);
    if let Some(explain) = target.explain {
        headers.insert("explain".to_owned(), Value::from(if explain { "True" } else { "False" }));
    }
    if let Some(url_path) = &target.url_path {
        headers.insert("url_path".to_owned(), Value::from(url_path.as_str()));
    }
    HandlerCall { headers, describe: false, explain: target.explain == Some(true) }
}

/// The position of a request in a sequence.
struct SequencePosition {
    id: String,
    starts: bool,
    ends: bool,
}

/// Returns the position of a request in its sequence. A request without an id starts a new
/// sequence, whose id the handler gets.
fn sequence(shared: &Shared, head: &RequestHead, call: &mut HandlerCall) -> SequencePosition {
    let [id, start, end] = &shared.settings.sequence_headers;
    let is_true = |name: &str| head.header(name).eq_ignore_ascii_case("true");
    let given = head.header(id);
    if !given.is_empty() {
        return SequencePosition {
            id: given.to_owned(),
            starts: is_true(start),
            ends: is_true(end),
        };
    }
    let new_id = format!("ts-seq-{}", shared.ids.next());
    call.headers.insert(id.clone(), Value::from(new_id.as_str()));
    call.headers.insert(start.clone(), Value::from("true"));
    SequencePosition { id: new_id, starts: true, ends: is_true(end) }
}

/// Builds the response to a client, with the timeline of the request: complete, or streamed if more
/// parts follow. Then the timeline is not known yet.
fn respond(
    first: Streamed,
    responses: Box<dyn Responses>,
    in_flight: InFlight,
    ended: Option<EndedSequences>,
    max_size: u64,
) -> Result<(Response, Option<Timeline>), InferError> {
    let last = first.last || !responses.is_decoupled();
    let first = first.answer?;
    let timeline = last.then_some(first.timeline);
    let answer = handler_call::answer(first)?;
    if let Some(ended) = &ended {
        ended.close(&answer.headers);
    }
    check_size(&answer.body, max_size)?;
    // An informational status would not end the response.
    let status = StatusCode::from_u16(answer.status)
        .ok()
        .filter(|status| !status.is_informational())
        .ok_or_else(|| {
            InferError::internal(format!(
                "the handler's status is {}; allowed are 200 to 999",
                answer.status
            ))
        })?;
    let body = if last {
        Body::from(answer.body)
    } else {
        Body::new(Parts {
            first: Some(answer.body),
            responses,
            has_ended: false,
            max_size,
            sequences: ended,
            _in_flight: in_flight,
        })
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = answer.headers;
    if !answer.reason.is_empty()
        && let Ok(reason) = ReasonPhrase::try_from(answer.reason)
    {
        response.extensions_mut().insert(reason);
    }
    Ok((response, timeline))
}

/// Returns how the worker of a failed request ended, if it did. The exit status is known shortly
/// after the connection is lost.
pub(crate) async fn end_of_worker(
    shared: &Shared,
    error: &InferError,
    version: &Version,
    since: Instant,
) -> End {
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
