//! `POST /v2/models/M[/versions/V]/infer`.

use std::borrow::Cow;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};
use http::{Request, StatusCode};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::service::Endpoint;
use pharos_os::blocking;
use tokio::sync::OwnedSemaphorePermit;

use super::codec::{self, Decoded, Encoded, HEADER_LENGTH, Head, SMALL};
use super::compression::{self, Coding};
use super::model::ModelPath;
use super::pieces::Pieces;
use super::{Edge, answer};
use pharos_edge::Call;
use pharos_edge::headers::text;
use pharos_edge::routing::Routed;
use pharos_listener::receiving::Budget;
use pharos_listener::receiving::body::{self, Read};

/// Work on more bytes than this runs on a blocking thread, because it would delay the other
/// connections of the event loop.
pub(super) const LONG: usize = 128 << 10;

pub(super) async fn infer(edge: Edge, call: Call, mut routed: Routed) -> Response {
    match ModelPath::of(&mut routed) {
        Ok(path) => answer(&edge, call, path, routed.request, |_| None).await,
        Err(failure) => answer::finish(call, Err(failure)),
    }
}

/// Answers an inference request. `status_of` returns the status of errors for which a platform
/// expects another one than Triton's.
pub(super) async fn answer(
    edge: &Edge,
    mut call: Call,
    path: ModelPath,
    request: Request<Body>,
    status_of: fn(&InferError) -> Option<StatusCode>,
) -> Response {
    let (parts, body) = request.into_parts();
    let headers = &parts.headers;
    let Some(coding) = Coding::of_request(text(headers, CONTENT_ENCODING).as_deref()) else {
        return call.finish(answer::unsupported_coding(), Some(Reason::Unsupported));
    };
    let head = Head {
        model_name: path.model,
        model_version: path.version,
        header_length: text(headers, HEADER_LENGTH).map(Cow::into_owned),
    };
    let answer_coding = Coding::of_response(text(headers, ACCEPT_ENCODING).as_deref());
    call.read_headers(headers);
    call.begin_trace(&head.model_name, headers);
    let model = head.model_name.clone();
    let version = head.model_version.clone();
    let result = async {
        let received_request = receive(edge, head, body, coding).await;
        // Report an unknown model before errors in the body, as Triton does.
        let (request, form) = received_request.map_err(|error| {
            edge.service.model_metadata(&model, &version).err().unwrap_or(error)
        })?;
        call.forward(&edge.settings.forward, headers)?;
        let response = call.infer(request, Endpoint::HttpInfer).await?;
        let size: usize =
            response.outputs.iter().map(|output| output.tensor.data.bytes_here()).sum();
        let long = match answer_coding {
            // Binary outputs are sent as they are.
            Coding::Identity => size > LONG && form.bytes_in_json(&response.outputs) > LONG,
            _ => size > LONG / 2,
        };
        let permit = if long { coder(&edge.settings.budget, answer_coding).await } else { None };
        let work = move || {
            let _permit = permit;
            send(codec::encode(response, &form)?, answer_coding)
        };
        if long { on_a_thread(work).await } else { work() }
    };
    match result.await {
        Ok(response) => call.finish(response, None),
        Err(error) => {
            call.has_failed(&error);
            let mut response = answer::error(&error);
            if let Some(status) = status_of(&error) {
                *response.status_mut() = status;
            }
            call.finish(response, Some(error.reason))
        }
    }
}

/// Reads, decompresses and decodes a request.
async fn receive(
    edge: &Edge,
    head: Head,
    body: Body,
    coding: Coding,
) -> Result<Decoded, InferError> {
    let limit = edge.settings.max_input_size;
    let declared: Option<u64> =
        head.header_length.as_deref().and_then(|length| length.trim().parse().ok());
    // The limit applies to the JSON and the binary data separately; the client declares the length
    // of the JSON.
    let json = declared.unwrap_or(0).min(limit);
    let most = match coding {
        Coding::Identity => json.saturating_add(limit),
        // Compressed data can be longer than its content: allow for incompressible noise.
        _ => limit.saturating_mul(2),
    };
    let body = match body::read(&edge.settings.budget, body, most).await? {
        Read::Whole(body) => body,
        Read::TooLarge(size) => return Err(too_large(declared, size, limit)),
    };
    let long = body.len() > LONG || coding != Coding::Identity;
    let binary_follows =
        declared.is_some_and(|length| length <= LONG as u64) && coding == Coding::Identity;
    let budget = &edge.settings.budget;
    let permit = coder(budget, coding).await;
    let mut reservation = budget.reserve();
    let work = move || {
        let body = match compression::decompress(
            body,
            coding,
            json.saturating_add(limit),
            &mut reservation,
        )? {
            Some(body) => body,
            None => return Err(inflates_too_far(json.saturating_add(limit))),
        };
        drop(permit);
        codec::decode(head, body, limit)
    };
    if long && !binary_follows { on_a_thread(work).await } else { work() }
}

/// Waits for a permit to compress or decompress; returns `None` for identity, which needs none.
async fn coder(budget: &Budget, coding: Coding) -> Option<OwnedSemaphorePermit> {
    if coding == Coding::Identity { None } else { budget.coder().await }
}

/// Returns the error for a body that exceeds `most` bytes when decompressed.
fn inflates_too_far(most: u64) -> InferError {
    let text = format!(
        "decompressed request size exceeds the maximum allowed value of {most} bytes. Use \
         --http-max-input-size to increase the limit."
    );
    InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, text)
}

/// Returns the error for a body of `size` bytes. The JSON is the part that is too large unless the
/// client declared a smaller one.
fn too_large(declared: Option<u64>, size: u64, limit: u64) -> InferError {
    let (json, binary) = match declared {
        None => (size, 0),
        Some(json) if json > limit => (json, 0),
        Some(json) => (0, size.saturating_sub(json)),
    };
    match codec::check_size(json, binary, limit) {
        Err(error) => error,
        // Compressed data beyond twice the limit, whose decompressed size is unknown.
        Ok(()) => {
            codec::check_size(0, size.max(limit.saturating_add(1)), limit).err().unwrap_or_else(
                || InferError::internal("the size of a body over the limit is unknown"),
            )
        }
    }
}

fn send(encoded: Encoded, coding: Coding) -> Result<Response, InferError> {
    let binary = encoded.is_binary();
    let json_length = encoded.head.len();
    let (head, blobs) = match coding {
        Coding::Identity => (encoded.head, encoded.blobs),
        _ => {
            let head = Bytes::from(encoded.head);
            let compressed =
                compression::compress(std::iter::once(&head).chain(&encoded.blobs), coding)?;
            (compressed.into(), Vec::new())
        }
    };
    let mut response = Response::new(one_or_many(head, blobs));
    let content_type = if binary { "application/octet-stream" } else { "application/json" };
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    if binary {
        answer::number_header(&mut response, HEADER_LENGTH, json_length);
    }
    if let Some(name) = coding.name() {
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(name));
    }
    Ok(response)
}

/// Copies small tensors behind the JSON: one piece costs less than several, and the worker's memory
/// is released at once.
fn one_or_many(mut head: Vec<u8>, blobs: Vec<Bytes>) -> Body {
    let size: usize = blobs.iter().map(Bytes::len).sum();
    if size > SMALL {
        return Body::new(Pieces::new(head.into(), blobs));
    }
    blobs.iter().for_each(|blob| head.extend_from_slice(blob));
    Body::from(head)
}

/// Runs `work` in place, or on a blocking thread if it is long.
pub(super) async fn on_a_thread_if<T: Send + 'static>(
    long: bool,
    work: impl FnOnce() -> Result<T, InferError> + Send + 'static,
) -> Result<T, InferError> {
    if long { on_a_thread(work).await } else { work() }
}

/// Runs long work on a blocking thread, so that other connections are served meanwhile.
///
/// Not an async function: its future would hold the work, and moving the future would copy it.
pub(super) fn on_a_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, InferError> + Send + 'static,
) -> impl Future<Output = Result<T, InferError>> + Send {
    let done = blocking::run(work);
    async move {
        let done = done.await;
        done.unwrap_or_else(|error| {
            Err(InferError::internal(format!("processing a body failed: {error}")))
        })
    }
}
