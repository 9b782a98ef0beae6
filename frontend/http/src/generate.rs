//! `POST /v2/models/M[/versions/V]/generate` and `.../generate_stream`: inference with JSON whose
//! members are the model's inputs. `generate` returns the only response; `generate_stream` returns
//! each response as a server-sent event.

pub(super) mod convert;
mod events;

use axum::body::Body;
use axum::response::Response;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, TRAILER};
use http::{HeaderMap, Request};
use pharos::data::Data;
use pharos::error::InferError;
use pharos::infer::{InferRequest, InferResponse};
use pharos::service::{Protocol, Responses, Streamed};
use pharos::timeline::Timeline;

use super::Edge;
use super::answer::{self, Failure};
use super::codec;
use super::infer::{LONG, on_a_thread_if};
use super::model::ModelPath;
use events::Events;
use pharos_edge::headers::check_encoding;
use pharos_edge::response_timing::{SERVER_TIMING, accepts_trailers};
use pharos_edge::routing::Routed;
use pharos_edge::{Call, status_of};
use pharos_listener::receiving::body::{self, Read};

/// The error for a model that does not send exactly one response.
const NOT_ONE: &str = "generate expects model to produce exactly 1 response, use generate stream \
                       for model that generates various number of responses";

pub(super) async fn generate(edge: Edge, mut call: Call, mut routed: Routed) -> Response {
    let path = match ModelPath::of(&mut routed) {
        Ok(path) => path,
        Err(failure) => return answer::finish(call, Err(failure)),
    };
    call.read_headers(routed.request.headers());
    let answer = async {
        let mut responses = begin(&edge, &mut call, path, routed.request).await?;
        let response = only(&mut *responses).await;
        call.has_responded();
        let (response, timeline) = response?;
        call.set_times(&timeline);
        let size: usize =
            response.outputs.iter().map(|output| output.tensor.data.bytes_here()).sum();
        let json = on_a_thread_if(size > LONG, move || convert::response(&response)).await?;
        Ok::<_, InferError>(answer::json(json))
    };
    let answer = answer.await.map_err(Failure::from);
    answer::finish(call, answer)
}

pub(super) async fn generate_stream(edge: Edge, mut call: Call, mut routed: Routed) -> Response {
    let path = match ModelPath::of(&mut routed) {
        Ok(path) => path,
        Err(failure) => return answer::finish(call, Err(failure)),
    };
    let open = edge.service.stream_open(Protocol::Http);
    let headers = routed.request.headers();
    call.read_headers(headers);
    // The times are known at the end of the stream.
    let trailer = if accepts_trailers(headers) { call.timing_of_trailer() } else { None };
    let mut responses = match begin(&edge, &mut call, path, routed.request).await {
        Ok(responses) => responses,
        Err(error) => return answer::finish(call, Err(error.into())),
    };
    let first = responses.next_response().await;
    // The first response determines the status; later errors are sent as events.
    let mut response = Response::default();
    if let Some(Streamed { answer: Err(error), .. }) = &first {
        *response.status_mut() = status_of(error);
    }
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if trailer.is_some() {
        headers.insert(TRAILER, HeaderValue::from_name(SERVER_TIMING));
    }
    let sending = call.begin_stream(&mut response);
    response.map(|_| Body::new(Events::new(responses, first, call, trailer, sending, open)))
}

/// Returns the response of a model that sends exactly one, and the timeline at the end of the
/// request.
async fn only(responses: &mut dyn Responses) -> Result<(InferResponse, Timeline), InferError> {
    let not_one = || InferError::invalid(NOT_ONE);
    let mut found = None;
    let mut timeline = Timeline::default();
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

/// Reads a request and passes it to the engine.
async fn begin(
    edge: &Edge,
    call: &mut Call,
    path: ModelPath,
    request: Request<Body>,
) -> Result<Box<dyn Responses>, InferError> {
    let (parts, body) = request.into_parts();
    check_encoding(&parts.headers)?;
    call.begin_trace(&path.model, &parts.headers);
    let begun = begin_traced(edge, call, path, &parts.headers, body).await;
    begun.inspect_err(|error| {
        call.has_failed(error);
        call.end_trace();
    })
}

async fn begin_traced(
    edge: &Edge,
    call: &mut Call,
    path: ModelPath,
    headers: &HeaderMap,
    body: Body,
) -> Result<Box<dyn Responses>, InferError> {
    edge.service.demand(&path.model, &path.version, 0).await?;
    // Report an unknown model before errors in the body, as Triton does.
    let metadata = edge.service.model_metadata(&path.model, &path.version);
    let body = read(edge, body).await;
    let metadata = metadata?;
    let body = body?;
    let mut request = InferRequest {
        model_name: path.model,
        model_version: path.version,
        ..InferRequest::default()
    };
    let mut request = on_a_thread_if(body.len() > LONG, move || {
        convert::request(&body.join(), &metadata, &mut request)?;
        Ok(request)
    })
    .await?;
    call.forward(&edge.settings.forward, headers)?;
    call.describe_client_in(&mut request, edge.service.now());
    edge.service.stream(request)
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
