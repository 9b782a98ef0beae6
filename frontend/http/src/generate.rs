//! `POST /v2/models/M[/versions/V]/generate` and `.../generate_stream`: inference with JSON whose members are the model's inputs.
//! `generate` returns the only response; `generate_stream` returns each response as a server-sent event.

pub(super) mod convert;
mod events;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::header::{CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HeaderValue, TRAILER};
use http::{HeaderMap, Request, StatusCode};
use pharos::data::Data;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::id::TraceId;
use pharos::infer::{InferRequest, InferResponse};
use pharos::request_trace::Traced;
use pharos::service::{Protocol, Responses, Route, Streamed};
use pharos::timeline::{Instant, Timeline};

use super::Edge;
use super::answer::{self, Answer, Failure};
use super::codec;
use super::headers::text;
use super::infer::{LONG, forward, on_a_thread_if};
use super::model::ModelPath;
use super::trace;
use events::Events;
use pharos_edge::answering::{Account, Outcome};
use pharos_edge::request_trace::{self, HTTP};
use pharos_edge::response_timing::{AnswerTiming, SERVER_TIMING, accepts_trailers};
use pharos_edge::tenants;
use pharos_listener::receiving::body::{self, Read};

/// The error for a model that does not send exactly one response.
const NOT_ONE: &str = "generate expects model to produce exactly 1 response, use generate stream for model that generates \
                       various number of responses";

pub(super) async fn generate(State(edge): State<Edge>, path: ModelPath, request: Request<Body>) -> Response {
    let (timing, mut times) = (edge.settings.timing.of(request.headers()), None);
    let mut traced = None;
    let result = async {
        let mut begun = begin(&edge, path, (request, &timing)).await?;
        traced = begun.traced;
        let response = only(&mut *begun.responses).await;
        request_trace::complete(traced.as_ref());
        let (response, timeline) = response?;
        times = timing.value(&timeline);
        let size: usize = response.outputs.iter().map(|output| output.tensor.data.bytes_here()).sum();
        let json = on_a_thread_if(size > LONG, move || convert::response(&response)).await?;
        Ok::<_, InferError>(answer::json(json))
    };
    let result = result.await;
    trace::answered(traced, (timing, times), result.map_err(Failure::from).into_response())
}

pub(super) async fn generate_stream(State(edge): State<Edge>, path: ModelPath, request: Request<Body>) -> Answer {
    let open = edge.service.stream_open(Protocol::Http);
    let timing = edge.settings.timing.of(request.headers());
    // The times are known at the end of the stream.
    let trailer = (timing.has_times() && accepts_trailers(request.headers())).then(|| timing.clone());
    let mut begun = match begin(&edge, path, (request, &timing)).await {
        Ok(begun) => begun,
        Err(error) => return Ok(trace::answered(None, (timing, None), Failure::from(error).into_response())),
    };
    let first = begun.responses.next_response().await;
    // The first response determines the status; later errors are sent as events.
    let status = match &first {
        Some(Streamed { answer: Err(error), .. }) => error.code.http_status(),
        _ => StatusCode::OK.as_u16(),
    };
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let account = (Account::new(edge, Route::GenerateStream), status);
    let traced = begun.traced.clone();
    let has_trailer = trailer.is_some();
    begun.trailer = trailer;
    let mut response = Response::new(Body::new(Events::new(begun, first, account, open)));
    *response.status_mut() = status;
    response.extensions_mut().insert(Outcome::CountedByHandler);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if has_trailer {
        headers.insert(TRAILER, HeaderValue::from_name(SERVER_TIMING));
    }
    Ok(trace::answered(traced, (timing, None), response))
}

/// Returns the response of a model that sends exactly one, and the timeline at the end of the request.
async fn only(responses: &mut dyn Responses) -> Result<(InferResponse, Timeline), InferError> {
    let not_one = || InferError::invalid(NOT_ONE);
    let (mut found, mut timeline) = (None, Timeline::default());
    while let Some(Streamed { answer, empty, .. }) = responses.next_response().await {
        if let Ok(response) = &answer {
            timeline = response.timeline;
        }
        match (&found, answer) {
            _ if empty => {}
            (None, Ok(response)) => found = Some(response),
            (None, Err(error)) => return Err(error),
            (Some(_), _) => return Err(not_one()),
        }
    }
    found.map(|response| (response, timeline)).ok_or_else(not_one)
}

/// The responses to come of a request, and its trace if the request is sampled.
struct TracedResponses {
    responses: Box<dyn Responses>,
    traced: Option<Traced>,
    /// Present if the times of the request are sent behind the responses.
    trailer: Option<AnswerTiming>,
}

/// Reads a request and passes it to the engine.
async fn begin(
    edge: &Edge,
    path: ModelPath,
    (request, timing): (Request<Body>, &AnswerTiming),
) -> Result<TracedResponses, InferError> {
    let received = edge.service.now();
    check_encoding(request.headers())?;
    let traced = trace::begin(edge, &path.model, request.headers());
    let reception = Reception { received, traced: traced.as_ref(), trace: timing.trace() };
    let begun = begin_traced(edge, path, request, reception).await;
    let responses = begun.inspect_err(|error| HTTP.refused(traced.as_ref(), received, error))?;
    Ok(TracedResponses { responses, traced, trailer: None })
}

/// What is known of a request before its body is read.
struct Reception<'a> {
    received: Instant,
    traced: Option<&'a Traced>,
    /// The trace that the client's `traceparent` names.
    trace: Option<TraceId>,
}

async fn begin_traced(
    edge: &Edge,
    path: ModelPath,
    request: Request<Body>,
    Reception { received, traced, trace }: Reception<'_>,
) -> Result<Box<dyn Responses>, InferError> {
    let (parts, body) = request.into_parts();
    edge.service.demand(&path.model, &path.version, 0).await?;
    // Report an unknown model before errors in the body, as Triton does.
    let metadata = edge.service.model_metadata(&path.model, &path.version);
    let body = read(edge, body).await;
    let (metadata, body) = (metadata?, body?);
    let mut request =
        InferRequest { model_name: path.model, model_version: path.version, trace, ..InferRequest::default() };
    request.timeline.received = received;
    let mut request = on_a_thread_if(body.len() > LONG, move || {
        convert::request(&body.join(), &metadata, &mut request)?;
        Ok(request)
    })
    .await?;
    forward(edge, &parts.headers, &mut request)?;
    request.tenant = tenants::of(&*edge.service, &parts.headers, &parts.extensions);
    HTTP.received(traced, edge.service.now(), &mut request);
    request.timeline.request_start = edge.service.now();
    edge.service.stream(request)
}

pub(super) fn check_encoding(headers: &HeaderMap) -> Result<(), InferError> {
    let coding = text(headers, CONTENT_ENCODING);
    if coding.is_none_or(|coding| coding.is_empty() || coding.eq_ignore_ascii_case("identity")) {
        return Ok(());
    }
    let message = "Unsupported content-encoding, only 'identity' is supported.";
    Err(InferError::new(ErrorCode::InvalidArg, Reason::Unsupported, message))
}

/// Reads the whole body, within the limits of the edge.
pub(super) async fn read(edge: &Edge, body: Body) -> Result<Data, InferError> {
    let limit = edge.settings.max_input_size;
    match body::read(&edge.settings.budget, body, limit).await? {
        Read::Whole(body) => Ok(body),
        Read::TooLarge(size) => {
            codec::check_size(size, 0, limit)?;
            Err(InferError::internal("the size of a body over the limit is unknown"))
        }
    }
}
