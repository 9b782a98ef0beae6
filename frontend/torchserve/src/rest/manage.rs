//! Model management: each endpoint calls one operation of the registry.

use std::io;

use axum::body::Body;
use axum::response::Response;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::{RequestHead, Shared, answer};
use crate::failure::{self, End};
use crate::registry::{ModelReference, Scale};
use crate::{ErrorResponse, Exception, ModelParameters, RegistrationParameters};
use pharos_listener::receiving::body::{self, Read};
use pharos_os::blocking;

/// The largest JSON body of a request, in bytes.
const MAX_JSON: u64 = 1 << 20;

/// `GET /models`.
pub(super) fn list(shared: &Shared, head: &RequestHead) -> Response {
    let limit = head.number("limit").unwrap_or(100);
    let page = head.number("next_page_token").unwrap_or(0);
    answer::json(&shared.registry.list(limit, page))
}

/// The parameters of a registration request, in JSON or in the query.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Registration {
    pub(crate) url: Option<String>,
    pub(crate) model_name: Option<String>,
    pub(crate) handler: Option<String>,
    pub(crate) runtime: Option<String>,
    #[serde(deserialize_with = "number")]
    pub(crate) batch_size: Option<i64>,
    #[serde(deserialize_with = "number")]
    pub(crate) max_batch_delay: Option<i64>,
    #[serde(deserialize_with = "number")]
    pub(crate) initial_workers: Option<i64>,
    #[serde(deserialize_with = "number")]
    pub(crate) response_timeout: Option<i64>,
    #[serde(deserialize_with = "number")]
    pub(crate) startup_timeout: Option<i64>,
    #[serde(deserialize_with = "flag")]
    pub(crate) synchronous: Option<bool>,
    #[serde(deserialize_with = "flag")]
    pub(crate) s3_sse_kms: Option<bool>,
}

impl Registration {
    fn of_query(head: &RequestHead) -> Self {
        let flag = |name: &str| head.query(name).map(|value| value.eq_ignore_ascii_case("true"));
        Self {
            url: head.query("url"),
            model_name: head.query("model_name"),
            handler: head.query("handler"),
            runtime: head.query("runtime"),
            batch_size: head.number("batch_size"),
            max_batch_delay: head.number("max_batch_delay"),
            initial_workers: head.number("initial_workers"),
            response_timeout: head.number("response_timeout"),
            startup_timeout: head.number("startup_timeout"),
            synchronous: flag("synchronous"),
            s3_sse_kms: flag("s3_sse_kms"),
        }
    }

    /// Returns the archive's URL and the parameters. As in TorchServe, numbers out of range count
    /// as absent.
    ///
    /// # Errors
    /// The URL is missing, or a parameter is not supported.
    pub(crate) fn into_parts(self) -> Result<(String, RegistrationParameters), ErrorResponse> {
        let url =
            self.url.ok_or_else(|| ErrorResponse::bad_request("Parameter url is required."))?;
        let runtime = self.runtime.filter(|runtime| !runtime.is_empty());
        if let Some(runtime) =
            runtime.as_ref().filter(|runtime| !matches!(runtime.as_str(), "python" | "python3"))
        {
            return Err(ErrorResponse::bad_request(format!(
                "Invalid RuntimeType value: {runtime}"
            )));
        }
        if self.s3_sse_kms == Some(true) {
            return Err(ErrorResponse::bad_request(
                "s3_sse_kms is not supported; download the archive and register the file",
            ));
        }
        let number = |said: Option<i64>, least: i64| {
            said.filter(|number| *number >= least)
                .map(|number| u32::try_from(number).unwrap_or(u32::MAX))
        };
        let text = |said: Option<String>| said.filter(|text| !text.is_empty());
        let wanted = RegistrationParameters {
            model_name: text(self.model_name),
            handler: text(self.handler),
            runtime,
            model: ModelParameters {
                batch_size: number(self.batch_size, 1),
                max_batch_delay: number(self.max_batch_delay, 0),
                min_workers: number(self.initial_workers.map(|workers| workers.max(0)), 0),
                max_workers: None,
                response_timeout: number(self.response_timeout, 1),
                // -1 stands for the default; other values that are not positive count as 0.
                startup_timeout: number(
                    self.startup_timeout
                        .filter(|seconds| *seconds != -1)
                        .map(|seconds| seconds.max(0)),
                    0,
                ),
            },
            at_start: false,
        };
        Ok((url, wanted))
    }
}

/// `POST /models`.
pub(super) async fn register(
    shared: &Shared,
    head: &RequestHead,
    body: Body,
) -> Result<Response, ErrorResponse> {
    if !shared.settings.model_api {
        return Err(answer::wrong_method());
    }
    let media = head.header("content-type").split(';').next().unwrap_or_default().trim();
    let is_json = media.eq_ignore_ascii_case("application/json");
    let said = if is_json { from_json(shared, body).await? } else { Registration::of_query(head) };
    let wait = said.synchronous.unwrap_or(true);
    let (url, wanted) = said.into_parts()?;
    Ok(answer::done(shared.registry.register(&url, wanted, wait).await?))
}

async fn from_json(shared: &Shared, body: Body) -> Result<Registration, ErrorResponse> {
    let read = body::read(&shared.budget, body, MAX_JSON).await;
    let whole = match read
        .map_err(|error| failure::refused(&error, ModelReference::default(), || End::Died))?
    {
        Read::Whole(data) => data.join(),
        Read::TooLarge(size) => {
            let message =
                format!("The JSON body has at least {size} bytes; at most {MAX_JSON} are allowed");
            return Err(ErrorResponse::new(413, Exception::BadRequest, message));
        }
    };
    let wrong = |error| ErrorResponse::bad_request(format!("The body cannot be used: {error}"));
    // Parse an object first: serde would also accept an array for a struct.
    let said: Map<String, Value> = serde_json::from_slice(&whole).map_err(wrong)?;
    serde_json::from_value(Value::Object(said)).map_err(wrong)
}

/// Deserializes an integer. As in TorchServe, it may be a string or have a fraction of zero.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let number = match &value {
        Value::Null => return Ok(None),
        Value::Number(number) => number.as_i64().or_else(|| {
            let fraction = number.as_f64()?;
            (fraction.fract() == 0.0 && fraction.abs() < 2f64.powi(53)).then_some(fraction as i64)
        }),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    number.map(Some).ok_or_else(|| D::Error::custom(format!("{value} is not a whole number")))
}

/// Deserializes a flag, which may be a string.
fn flag<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<bool>, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(None),
        Value::Bool(flag) => Ok(Some(flag)),
        Value::String(text) => Ok(Some(text.trim().eq_ignore_ascii_case("true"))),
        value => Err(D::Error::custom(format!("{value} is neither true nor false"))),
    }
}

/// `PUT /models/M[/V]`.
pub(super) async fn scale(
    shared: &Shared,
    head: &RequestHead,
    reference: ModelReference<'_>,
) -> Result<Response, ErrorResponse> {
    let min = head.number("min_worker").unwrap_or(1);
    let max = head.number("max_worker").unwrap_or(min);
    let wait = head.query("synchronous").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let of_query = head.query("model_version").unwrap_or_default();
    let model = reference.name;
    let version = if reference.version.is_empty() { &of_query } else { reference.version };
    if min < 0 && max >= min {
        shared.registry.find(model, version)?;
        let message = format!("min_worker is {min}; allowed are whole numbers from 0");
        return Err(ErrorResponse::new(500, Exception::IndexOutOfBounds, message));
    }
    let number = |number: i64| u32::try_from(number.max(0)).unwrap_or(u32::MAX);
    let scale = Scale { min: number(min), max: number(max), wait };
    Ok(answer::done(shared.registry.scale(model, version, scale).await?))
}

/// `DELETE /models/M[/V]`.
pub(super) async fn unregister(
    shared: &Shared,
    model: &str,
    version: &str,
) -> Result<Response, ErrorResponse> {
    if !shared.settings.model_api {
        return Err(answer::wrong_method());
    }
    Ok(answer::done(shared.registry.unregister(model, version).await?))
}

#[derive(Serialize)]
struct Readiness<'a> {
    name: &'a str,
    ready: bool,
}

/// `GET /v1/models/M`.
pub(super) fn ready(shared: &Shared, model: &str) -> Result<Response, ErrorResponse> {
    let version = shared.registry.find(model, "")?;
    let ready = !shared.service.exiting()
        && !shared.uncounted.worker_health(&version.engine_name).is_empty();
    Ok(answer::json(&Readiness { name: model, ready }))
}

/// `GET /token`.
pub(super) async fn token(shared: &Shared, head: &RequestHead) -> Result<Response, ErrorResponse> {
    let Some(tokens) = &shared.guard.tokens else { return Err(answer::not_found()) };
    let kind = head.query("type").unwrap_or_default();
    let tokens = tokens.clone();
    let name = kind.clone();
    let renewed = blocking::run(move || tokens.renew(&name)).await;
    match renewed.unwrap_or_else(|error| Err(io::Error::other(error))) {
        Ok(Some(())) => Ok(Response::new(Body::from("\n"))),
        Ok(None) => {
            let message = format!("type is '{kind}'; allowed are management and inference");
            Err(ErrorResponse::bad_request(message))
        }
        Err(error) => Err(ErrorResponse::internal(format!("Cannot write the key file: {error}"))),
    }
}
