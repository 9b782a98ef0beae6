//! The steps that the handlers of OpenAI's API share.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, StatusCode, Uri};
use pharos::error::InferError;
use pharos::infer::{InferInput, InferRequest, Parameter};
use pharos::metrics::cache::TokenBudget;
use pharos::service::{Responses, SharedService};
use pharos_edge::Call;
use pharos_edge::headers::check_encoding;
use pharos_edge::http_settings::HttpSettings;
use pharos_edge::routing::Routed;
use pharos_listener::receiving::body;
use pharos_os::{blocking, clock};

use crate::answer::Failure;
use crate::contract::Prompt;
use crate::error::ApiError;
use crate::models::{Models, TextModel, check_is_served};
use crate::options::{MAX_ID_BYTES, RequestOptions};
use crate::response::Head;

/// Work on more bytes than this runs on a blocking thread, because it would delay the other
/// connections of the event loop.
pub(crate) const LONG: usize = 128 << 10;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What all handlers share.
#[derive(Clone)]
pub(crate) struct Edge {
    pub(crate) service: SharedService,
    pub(crate) settings: Arc<HttpSettings>,
    pub(crate) models: Arc<Models>,
}

impl Edge {
    pub(crate) fn new(
        service: SharedService,
        settings: Arc<HttpSettings>,
        models: Arc<Models>,
    ) -> Self {
        Self { service, settings, models }
    }
}

/// A request that was received, until its response.
pub(crate) struct Received {
    pub(crate) edge: Edge,
    pub(crate) call: Call,
    pub(crate) id: RequestId,
    pub(crate) headers: HeaderMap,
    pub(crate) uri: Uri,
    /// The named segments of the path: a model, and a version.
    pub(crate) segments: Option<Vec<String>>,
    pub(crate) body: Bytes,
}

impl Received {
    /// Receives a request with its whole body. Returns the response if the body cannot be received.
    pub(crate) async fn receive(
        edge: Edge,
        mut call: Call,
        routed: Routed,
    ) -> Result<Self, Response> {
        let Routed { parameters: segments, request } = routed;
        let (Parts { headers, uri, .. }, body) = request.into_parts();
        let id = RequestId::of(&headers);
        call.read_headers(&headers);
        match edge.read(&headers, body).await {
            Ok(body) => Ok(Self { edge, call, id, headers, uri, segments, body }),
            Err(error) => Err(finish_failed(call, &id, &error.into())),
        }
    }

    /// Parses the body, on another thread if it is long.
    pub(crate) async fn parse<R: Send + 'static>(
        &self,
        parse: fn(&[u8]) -> Result<R, ApiError>,
    ) -> Result<R, Failure> {
        let body = self.body.clone();
        Ok(on_a_thread_if(body.len() > LONG, move || parse(&body)).await??)
    }

    /// Returns the model that the request names, loaded, if it generates text.
    pub(crate) async fn model_of(
        &mut self,
        options: &RequestOptions,
    ) -> Result<(String, Arc<TextModel>), Failure> {
        let base = self.enter_model(options).await?;
        let name = options.model.as_deref().unwrap_or(&base);
        let model = self.edge.models.get(&*self.edge.service, &base, name).await?;
        Ok((name.to_owned(), model))
    }

    /// Returns the name of the model that the request names, itself or by an adapter, loaded.
    pub(crate) async fn enter_model(
        &mut self,
        options: &RequestOptions,
    ) -> Result<String, Failure> {
        let Edge { service, settings, models } = &self.edge;
        let name = match &options.model {
            Some(name) => name.clone(),
            None => models.only(&**service).await.ok_or_else(|| {
                let text = "model is required, because the server has several: GET /v1/models \
                            lists them";
                ApiError::invalid_field("model", text)
            })?,
        };
        let name = models.base_of(&**service, &name).await;
        self.call.begin_trace(&name, &self.headers);
        self.call.name_model(&name, "");
        self.call.forward(&settings.forward, &self.headers)?;
        service.demand(&name, "", 0).await?;
        check_is_served(&name, &*service.model_config(&name, "")?)?;
        if let Some(version) = &options.version {
            self.edge.check_version(&name, version)?;
        }
        Ok(name)
    }

    /// Begins the inference of a prompt.
    pub(crate) fn begin(
        &mut self,
        head: &Head,
        model: &TextModel,
        options: &RequestOptions,
        prompt: &Prompt<'_>,
    ) -> Result<Box<dyn Responses>, Failure> {
        let inputs = model.contract.inputs(prompt)?;
        let adapter = model.adapter.as_ref().map(|adapter| adapter.to_parameter());
        self.infer(model.contract.model(), &head.id, options, adapter, inputs)
    }

    /// Begins an inference. `id` is the id of the request for the model.
    pub(crate) fn infer(
        &mut self,
        model: &str,
        id: &str,
        options: &RequestOptions,
        adapter: Option<(String, Parameter)>,
        inputs: Vec<InferInput>,
    ) -> Result<Box<dyn Responses>, Failure> {
        let mut request = InferRequest {
            model_name: model.to_owned(),
            id: id.to_owned(),
            inputs,
            ..InferRequest::default()
        };
        for (name, value) in
            [("session_id", &options.session_id), ("cache_salt", &options.cache_salt)]
        {
            if let Some(value) = value {
                request.parameters.push((name.to_owned(), Parameter::String(value.clone())));
            }
        }
        request.parameters.extend(adapter);
        let service = &self.edge.service;
        self.call.describe_client_in(&mut request, service.now());
        Ok(service.stream(request)?)
    }

    /// Ends the request with its failure.
    pub(crate) fn fail(self, failure: &Failure) -> Response {
        finish_failed(self.call, &self.id, failure)
    }

    /// Ends the request with its failure, with the status and the JSON of another API than OpenAI's.
    pub(crate) fn fail_as(self, failure: &Failure, status: StatusCode, body: Vec<u8>) -> Response {
        let mut response = failure.response();
        *response.status_mut() = status;
        *response.body_mut() = body.into();
        finish_failed_with(self.call, &self.id, failure, response)
    }

    /// Ends the request with its JSON, or with its failure.
    pub(crate) fn finish(self, answer: Result<Vec<u8>, Failure>) -> Response {
        match answer {
            Ok(body) => {
                self.call.has_responded();
                let mut response = json(&self.id, body);
                add_budget(&self.call, &mut response);
                self.call.finish(response, None)
            }
            Err(failure) => self.fail(&failure),
        }
    }
}

/// The id of a request, which its response, its log lines and its trace have.
pub(crate) struct RequestId(String);

impl RequestId {
    /// Returns the id in `X-Request-Id`, or a random one. The id of a client is at most 256
    /// characters of ASCII without spaces.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
        let is_valid = |id: &&str| {
            !id.is_empty() && id.len() <= MAX_ID_BYTES && id.bytes().all(|b| b.is_ascii_graphic())
        };
        Self(given.filter(is_valid).map_or_else(random_id, str::to_owned))
    }

    /// Adds the id to the headers of a response.
    pub(crate) fn add_to(&self, response: &mut Response) {
        if let Ok(value) = HeaderValue::from_str(&self.0) {
            response.headers_mut().insert(REQUEST_ID, value);
        }
    }

    /// Returns what responses begin with. `kind` is the prefix of their ids.
    pub(crate) fn head(&self, kind: &str, options: &RequestOptions, model: &str) -> Head {
        self.head_beginning(&format!("{kind}-"), options, model)
    }

    /// Returns the same with ids that begin with `prefix`.
    pub(crate) fn head_beginning(
        &self,
        prefix: &str,
        options: &RequestOptions,
        model: &str,
    ) -> Head {
        let id = options.request_id.as_deref().unwrap_or(&self.0);
        Head {
            id: format!("{prefix}{id}"),
            created: i64::try_from(clock::wall_ms() / 1000).unwrap_or(i64::MAX),
            model: model.to_owned(),
            system_fingerprint: None,
        }
    }
}

/// Returns 32 random hexadecimal digits.
pub(crate) fn random_id() -> String {
    let [first, second] = [1, 2].map(|salt| RandomState::new().hash_one(salt));
    format!("{first:016x}{second:016x}")
}

impl Edge {
    /// Reads the body of a request.
    async fn read(&self, headers: &HeaderMap, body: Body) -> Result<Bytes, InferError> {
        check_encoding(headers)?;
        let HttpSettings { budget, max_input_size, .. } = &*self.settings;
        Ok(body::read_within(budget, body, *max_input_size).await?.join())
    }

    /// Checks that the version in a path is the one that is served. A version may have a fraction of
    /// zero.
    fn check_version(&self, name: &str, version: &str) -> Result<(), Failure> {
        let number = version.strip_suffix(".0").unwrap_or(version);
        let wanted = self.service.model_config(name, number)?;
        if Arc::ptr_eq(&wanted, &self.service.model_config(name, "")?) {
            return Ok(());
        }
        let message = format!(
            "the version {version} of the model '{name}' is not the one that OpenAI's API serves: \
             that is the newest one, or the one of the version policy"
        );
        Err(ApiError::invalid_field("model", message).into())
    }
}

/// Refuses fields of a request that no model here can honour.
pub(crate) fn refuse_unsupported(
    options: &RequestOptions,
    sampling: &crate::sampling::Sampling,
) -> Result<(), ApiError> {
    let refused = [
        ("stream_interval", options.stream_interval.is_some_and(|tokens| tokens > 1)),
        ("priority", sampling.priority.is_some_and(|priority| priority != 0)),
    ];
    match refused.iter().find(|(_, is_set)| *is_set) {
        None => Ok(()),
        Some((name, _)) => {
            Err(ApiError::invalid_field(*name, format!("{name} is not supported by this server")))
        }
    }
}

/// Logs the unknown fields of a request.
pub(crate) fn log_unknown(model: &str, unknown: &[String]) {
    if !unknown.is_empty() {
        tracing::debug!(model, "unknown fields of a request are ignored: {}", unknown.join(", "));
    }
}

/// Adds what is left of the budget of the tenant to a response, in OpenAI's headers.
pub(crate) fn add_budget(call: &Call, response: &mut Response) {
    let Some(TokenBudget { limit, remaining, until_full, .. }) = call.token_budget() else {
        return;
    };
    let headers = response.headers_mut();
    headers.insert("x-ratelimit-limit-tokens", HeaderValue::from(limit));
    headers.insert("x-ratelimit-remaining-tokens", HeaderValue::from(remaining));
    if let Ok(reset) = HeaderValue::from_str(&reset_text(until_full)) {
        headers.insert("x-ratelimit-reset-tokens", reset);
    }
}

/// Returns a time as OpenAI writes it: `17ms`, `1.5s`, `6m0s`. Rounds up to milliseconds.
fn reset_text(time: Duration) -> String {
    let ms = time.as_nanos().div_ceil(1_000_000);
    let minutes = ms / 60_000;
    let seconds = ms % 60_000 / 1000;
    let rest = ms % 1000;
    let seconds = match rest {
        0 => format!("{seconds}s"),
        _ => format!("{seconds}.{}s", format!("{rest:03}").trim_end_matches('0')),
    };
    match minutes {
        0 if (1..1000).contains(&ms) => format!("{ms}ms"),
        0 => seconds,
        _ => format!("{minutes}m{seconds}"),
    }
}

/// Ends a failed request.
pub(crate) fn finish_failed(call: Call, id: &RequestId, failure: &Failure) -> Response {
    finish_failed_with(call, id, failure, failure.response())
}

/// Ends a failed request with this response, whose status is counted and logged.
fn finish_failed_with(
    call: Call,
    id: &RequestId,
    failure: &Failure,
    mut response: Response,
) -> Response {
    call.has_failed(&failure.to_infer_error());
    id.add_to(&mut response);
    add_budget(&call, &mut response);
    call.finish(response, Some(failure.reason))
}

/// Returns JSON with status 200.
fn json(id: &RequestId, body: Vec<u8>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::OK;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(http::header::CONTENT_TYPE, json);
    id.add_to(&mut response);
    response
}

/// Returns the head of a stream of events.
pub(crate) fn event_stream(id: &RequestId) -> Response {
    let mut response = Response::default();
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static(crate::response::EVENT_STREAM);
    headers.insert(http::header::CONTENT_TYPE, kind);
    headers.insert(http::header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies of nginx's kind hold events back without it.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    id.add_to(&mut response);
    response
}

/// Runs work in place, or on a blocking thread if it is long.
pub(crate) async fn on_a_thread_if<T: Send + 'static>(
    is_long: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, InferError> {
    if !is_long {
        return Ok(work());
    }
    let done = blocking::run(work).await;
    done.map_err(|error| InferError::internal(format!("processing a body failed: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_form_of_openai() {
        for (ns, expected) in [
            (0, "0s"),
            (1, "1ms"),
            (17_000_000, "17ms"),
            (999_000_001, "1s"),
            (1_500_000_000, "1.5s"),
            (59_999_000_000, "59.999s"),
            (60_000_000_000, "1m0s"),
            (360_010_000_000, "6m0.01s"),
        ] {
            assert_eq!(reset_text(Duration::from_nanos(ns)), expected);
        }
    }
}
