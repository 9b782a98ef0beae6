//! `GET` and `POST /v2/logging`: what the server logs (spec 2.8).

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::{Request, StatusCode};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::service::{LogSettings, LogUpdate, Route, Service, WRONG_LOG_FORMAT, log_format, unchangeable_log_setting};
use serde_json::value::RawValue;

use super::json::{Members, as_bool, as_string, as_u64, parse_error};
use super::{Edge, answer};
use pharos_listener::receiving::body::{self, Read};

/// The most bytes of a change: it has a handful of members.
const MAX_BODY: u64 = 64 << 10;

pub(super) async fn get<S: Service>(State(edge): State<Edge<S>>) -> Response {
    edge.pending(Route::LogSettings).finish(shown(&edge.service.log_settings()))
}

pub(super) async fn post<S: Service>(State(edge): State<Edge<S>>, request: Request<Body>) -> Response {
    let pending = edge.pending(Route::LogSettings);
    match change(&edge, request.into_body()).await {
        // Triton answers a wrong format as if the server could not do it now.
        Err(error) if error.message.starts_with(WRONG_LOG_FORMAT) => {
            let response = answer::error_text(StatusCode::SERVICE_UNAVAILABLE, &error.message);
            pending.finish_as(response, Some(error.reason))
        }
        result => pending.finish(result),
    }
}

async fn change<S: Service>(edge: &Edge<S>, body: Body) -> Result<Response, InferError> {
    let body = match body::read(&edge.settings.budget, body, MAX_BODY, false).await? {
        Read::Whole(body) => body.join(),
        Read::TooLarge(size) => {
            let text = format!("the body has {size} bytes; a change of the log settings has at most {MAX_BODY}");
            return Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, text));
        }
    };
    if body.iter().all(u8::is_ascii_whitespace) {
        return shown(&edge.service.log_settings());
    }
    let members: Members<'_> = serde_json::from_slice(&body).map_err(parse_error)?;
    let mut update = LogUpdate::default();
    for (name, value) in members.0 {
        member(&name, value, &mut update)?;
    }
    shown(&edge.service.update_log_settings(update))
}

fn member(name: &str, value: &RawValue, update: &mut LogUpdate) -> Result<(), InferError> {
    let prefix = format!("Unable to parse '{name}'");
    match name {
        "log_info" => update.info = Some(as_bool(value, &prefix)?),
        "log_warning" => update.warning = Some(as_bool(value, &prefix)?),
        "log_error" => update.error = Some(as_bool(value, &prefix)?),
        "log_verbose_level" => update.verbose = Some(u32::try_from(as_u64(value, &prefix)?).unwrap_or(u32::MAX)),
        "log_format" => update.format = Some(log_format(&as_string(value, &prefix)?)?),
        _ => return Err(unchangeable_log_setting(name)),
    }
    Ok(())
}

fn shown(settings: &LogSettings) -> Result<Response, InferError> {
    let LogSettings { file, info, warning, error, verbose, format } = settings;
    answer::json_of(&serde_json::json!({
        "log_file": file,
        "log_info": info,
        "log_warning": warning,
        "log_error": error,
        "log_verbose_level": verbose,
        "log_format": format.name(),
    }))
}
