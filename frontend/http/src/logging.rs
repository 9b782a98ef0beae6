//! `GET` and `POST /v2/logging`: the log settings (spec 2.8).

use axum::body::Body;
use http::StatusCode;
use pharos::error::{Cause, InferError};
use pharos::service::{LogSettings, LogUpdate, log_format, unchangeable_log_setting};
use serde_json::value::RawValue;

use super::answer::HandlerResult;
use super::json::{Members, as_bool, as_string, as_u64, from_body, parse_error};
use super::{Edge, answer};
use pharos_edge::routing::Routed;

pub(super) async fn get(edge: Edge, _: Routed) -> HandlerResult {
    shown(&edge.service.log_settings())
}

pub(super) async fn post(edge: Edge, routed: Routed) -> HandlerResult {
    let update = read(&edge, routed.request.into_body()).await;
    match update {
        // Triton answers 503 to an invalid log format.
        Err(error) if error.cause == Cause::UnknownLogFormat => {
            let response = answer::error_text(StatusCode::SERVICE_UNAVAILABLE, &error.message);
            Err(answer::refused(response, error.reason))
        }
        update => shown(&edge.service.update_log_settings(update?)),
    }
}

/// Reads the change that a body requests; an empty body changes nothing.
async fn read(edge: &Edge, body: Body) -> Result<LogUpdate, InferError> {
    let body = edge.read_short(body, "a log settings update").await?;
    let mut update = LogUpdate::default();
    if !body.iter().all(u8::is_ascii_whitespace) {
        let members: Members<'_> = from_body(&body).map_err(parse_error)?;
        for (name, value) in members.0 {
            member(&name, value, &mut update)?;
        }
    }
    Ok(update)
}

fn member(name: &str, value: &RawValue, update: &mut LogUpdate) -> Result<(), InferError> {
    let prefix = format!("Unable to parse '{name}'");
    match name {
        "log_info" => update.info = Some(as_bool(value, &prefix)?),
        "log_warning" => update.warning = Some(as_bool(value, &prefix)?),
        "log_error" => update.error = Some(as_bool(value, &prefix)?),
        "log_verbose_level" => {
            update.verbose = Some(u32::try_from(as_u64(value, &prefix)?).unwrap_or(u32::MAX))
        }
        "log_format" => update.format = Some(log_format(&as_string(value, &prefix)?)?),
        _ => return Err(unchangeable_log_setting(name)),
    }
    Ok(())
}

fn shown(settings: &LogSettings) -> HandlerResult {
    let LogSettings { file, info, warning, error, verbose, format } = settings;
    answer::json_of(&serde_json::json!({
        "log_error": error,
        "log_file": file,
        "log_format": format.name(),
        "log_info": info,
        "log_verbose_level": verbose,
        "log_warning": warning,
    }))
}
