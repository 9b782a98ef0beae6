//! The endpoints of Amazon SageMaker and Google Vertex AI, with Triton's paths, headers and
//! environment variables.
//!
//! Each request is first rewritten to the equivalent v2 request, so the tokens, restrictions,
//! limits and metrics of v2 apply.

mod models;
mod sagemaker;
mod vertex_ai;

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use http::header::{ACCEPT_ENCODING, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Method, Request, StatusCode, Uri};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use pharos::error::InferError;
use pharos::service::{Route, SharedService};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::codec::HEADER_LENGTH;
use super::dispatch::Dispatch;
use super::{Edge, Models, Settings, answer, metrics};
use pharos_edge::Incoming;
use pharos_edge::http_service::{self, Handle};
use pharos_edge::request_log::FIELDS;
use pharos_edge::routing::Routes;
use pharos_listener as listener;
use pharos_listener::PhaseReceiver;

pub use sagemaker::SageMaker;
pub use vertex_ai::VertexAi;

/// The characters that are percent-encoded in a path segment.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// The platform of a listener.
#[derive(Clone, Debug)]
pub enum Platform {
    /// Amazon SageMaker's.
    SageMaker(SageMaker),
    /// Google Vertex AI's.
    VertexAi(VertexAi),
}

/// The endpoints of a platform.
#[derive(Clone)]
pub struct Endpoints {
    dispatch: Dispatch,
    /// The routes of a request that is redirected to the metrics.
    metrics: Routes<SharedService>,
    platform: Platform,
}

impl Endpoints {
    /// Creates the endpoints, which answer requests with `service`.
    pub fn new(
        service: SharedService,
        settings: Settings,
        models: Arc<Models>,
        platform: Platform,
    ) -> Self {
        Self {
            metrics: metrics::router(service.clone()),
            dispatch: Dispatch::new(service, settings, models),
            platform,
        }
    }

    /// Spawns a task that serves the endpoints on `listener` until `phases` signals shutdown and
    /// all requests in flight are answered.
    #[must_use]
    pub fn serve(
        self,
        listener: TcpListener,
        connections: listener::Settings,
        phases: PhaseReceiver,
    ) -> JoinHandle<()> {
        let Edge { service, settings, .. } = self.dispatch.edge().clone();
        let body_timeout = settings.body_timeout;
        http_service::serve(listener, self, service, body_timeout, connections, phases)
    }
}

impl Handle for Endpoints {
    async fn handle(self, request: Request<Body>) -> Result<Response, Infallible> {
        let incoming = Incoming::over_http(request, &FIELDS);
        Ok(match self.platform {
            Platform::SageMaker(sagemaker) => sagemaker.answer(self.dispatch, incoming).await,
            Platform::VertexAi(vertex_ai) => {
                vertex_ai.answer(self.dispatch, &self.metrics, incoming).await
            }
        })
    }

    fn refuse(&self, request: Request<Body>, response: Response) -> Response {
        self.dispatch.refuse(request, response)
    }
}

/// The content type that carries the length of the JSON in a body with binary data.
struct BinaryForm {
    /// The part before the length.
    media_type: &'static str,
    /// Whether responses use it too, in place of the header of v2.
    in_answers: bool,
}

/// Returns the path of a model's verb in v2.
fn model_path(model: &str, verb: &str) -> String {
    format!("/v2/models/{}/{verb}", utf8_percent_encode(model, SEGMENT))
}

/// Answers a request as the v2 request with this method and path.
async fn forward_as_v2(
    dispatch: Dispatch,
    mut incoming: Incoming<Body>,
    method: Method,
    path: &str,
    form: &BinaryForm,
) -> Response {
    if let Err(error) = take_header_length(incoming.request.headers_mut(), form) {
        let route = dispatch.routes.route_of(path);
        return fail(&dispatch, route, incoming, error);
    }
    let Ok(uri) = Uri::try_from(path) else { return unknown(&dispatch, incoming) };
    *incoming.request.uri_mut() = uri;
    *incoming.request.method_mut() = method;
    let Ok(response) = dispatch.answer(incoming).await;
    in_form(response, form)
}

/// Moves the length of the JSON in the content type of a request to the header of v2.
///
/// # Errors
/// As [`header_length`].
fn take_header_length(headers: &mut HeaderMap, form: &BinaryForm) -> Result<(), InferError> {
    let length = header_length(headers, form.media_type)?;
    headers.remove(HEADER_LENGTH);
    // Triton does not compress responses of these endpoints.
    headers.remove(ACCEPT_ENCODING);
    if let Some(length) = length {
        headers.insert(HEADER_LENGTH, length);
    }
    Ok(())
}

/// Moves the length of the JSON in the header of v2 to the content type of a response, in forms
/// that have it there.
fn in_form(mut response: Response, form: &BinaryForm) -> Response {
    if form.in_answers
        && let Some(length) = response.headers_mut().remove(HEADER_LENGTH)
    {
        let content_type = format!("{}{}", form.media_type, length.to_str().unwrap_or_default());
        if let Ok(content_type) = HeaderValue::from_str(&content_type) {
            response.headers_mut().insert(CONTENT_TYPE, content_type);
        }
    }
    response
}

/// Returns the length of the JSON from the content type of a body with binary data.
///
/// # Errors
/// Fails if the media type is not at the beginning of the header.
fn header_length(headers: &HeaderMap, media_type: &str) -> Result<Option<HeaderValue>, InferError> {
    let Some(given) = headers.get(CONTENT_TYPE).and_then(|given| given.to_str().ok()) else {
        return Ok(None);
    };
    match given.split_once(media_type) {
        None => Ok(None),
        Some(("", rest)) => {
            let digits = rest
                .split(|c: char| !c.is_ascii_digit())
                .next()
                .filter(|digits| !digits.is_empty());
            Ok(HeaderValue::from_str(digits.unwrap_or(rest)).ok())
        }
        Some(_) => {
            let text = format!(
                "expect MIME type for binary data starts with '{media_type}', got: {given}"
            );
            Err(InferError::malformed(text))
        }
    }
}

/// Answers a request for a v2 route that fails before it reaches the route: with a refusal if
/// access is denied, else with `error`.
fn fail(
    dispatch: &Dispatch,
    route: Route,
    mut incoming: Incoming<Body>,
    error: InferError,
) -> Response {
    match dispatch.routes.admit(route, &mut incoming) {
        Ok(call) => answer::finish(call, Err(error.into())),
        Err(refused) => refused,
    }
}

/// Returns the answer for an unknown path, with Triton's status.
fn unknown(dispatch: &Dispatch, incoming: Incoming<Body>) -> Response {
    dispatch
        .routes
        .answer_unknown(incoming, answer::error_text(StatusCode::BAD_REQUEST, "Bad Request"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_json_length_from_the_content_type() {
        let media_type = "application/x;json-header-size=";
        let check = |given: &str, expected: Result<Option<&str>, ()>| {
            let headers =
                HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_str(given).unwrap())]);
            let length = header_length(&headers, media_type);
            let length =
                length.map(|length| length.map(|length| length.to_str().unwrap().to_owned()));
            assert_eq!(
                length.map_err(drop),
                expected.map(|length| length.map(str::to_owned)),
                "{given}"
            );
        };
        check("application/json", Ok(None));
        check("application/x;json-header-size=12", Ok(Some("12")));
        check("application/x;json-header-size=12; charset=utf-8", Ok(Some("12")));
        check("application/x;json-header-size=-1", Ok(Some("-1")));
        check("text/plain, application/x;json-header-size=12", Err(()));
        assert_eq!(header_length(&HeaderMap::new(), media_type).unwrap(), None);
    }

    #[test]
    fn a_model_name_is_one_segment_of_the_path() {
        assert_eq!(model_path("a/../b?c#", "infer"), "/v2/models/a%2F..%2Fb%3Fc%23/infer");
    }
}
