//! `GET` and `POST /v2[/models/M]/trace/setting` (spec 2.7).

use std::fmt::Write;

use axum::body::Body;
use axum::response::Response;
use pharos::error::InferError;
use pharos::service::{TraceSettings, unchangeable_trace_setting};
use pharos::trace::settings::{Change, Update, count, levels, unsigned};
use serde_json::value::RawValue;

use super::answer::HandlerResult;
use super::json::{Members, as_string, from_body, parse_error, type_error};
use super::model::ModelPath;
use super::{Edge, answer};
use pharos_edge::routing::Routed;

pub(super) async fn get(edge: Edge, _: Routed) -> HandlerResult {
    Ok(shown(edge.service.trace_settings("")?))
}

pub(super) async fn get_of(edge: Edge, mut routed: Routed) -> HandlerResult {
    let path = ModelPath::of(&mut routed)?;
    Ok(shown(edge.service.trace_settings(&path.model)?))
}

pub(super) async fn post(edge: Edge, routed: Routed) -> HandlerResult {
    change(&edge, "", routed.request.into_body()).await
}

pub(super) async fn post_of(edge: Edge, mut routed: Routed) -> HandlerResult {
    let path = ModelPath::of(&mut routed)?;
    change(&edge, &path.model, routed.request.into_body()).await
}

async fn change(edge: &Edge, model: &str, body: Body) -> HandlerResult {
    // Report an unknown model before errors in the body, as Triton does.
    edge.service.trace_settings(model)?;
    let body = edge.read_short(body, "a trace settings update").await?;
    let mut update = Update::default();
    if !body.iter().all(u8::is_ascii_whitespace) {
        let members: Members<'_> = from_body(&body).map_err(parse_error)?;
        for (name, value) in members.0 {
            member(&name, value, &mut update)?;
        }
    }
    Ok(shown(edge.service.update_trace_settings(model, &update)?))
}

fn member(name: &str, value: &RawValue, update: &mut Update) -> Result<(), InferError> {
    let clear = value.get() == "null";
    match name {
        "trace_level" if clear => update.levels = Change::Clear,
        "trace_rate" if clear => update.rate = Change::Clear,
        "trace_count" if clear => update.count = Change::Clear,
        "log_frequency" if clear => update.log_frequency = Change::Clear,
        "trace_level" => {
            let names = names(value)?;
            if !names.is_empty() {
                update.levels = Change::Set(levels(names.iter().map(String::as_str))?);
            }
        }
        "trace_rate" => update.rate = Change::Set(unsigned(name, &text(name, value)?)?),
        "trace_count" => update.count = Change::Set(count(&text(name, value)?)?),
        "log_frequency" => update.log_frequency = Change::Set(unsigned(name, &text(name, value)?)?),
        _ => return Err(unchangeable_trace_setting(name)),
    }
    Ok(())
}

/// Returns the text of a setting; a number becomes its digits.
fn text(name: &str, value: &RawValue) -> Result<String, InferError> {
    match value.get().as_bytes() {
        [b'-' | b'0'..=b'9', ..] => Ok(value.get().to_owned()),
        _ => match as_string(value, &format!("Unable to parse '{name}'")) {
            Ok(text) => Ok(text.into_owned()),
            Err(error) => Err(wrong_type(error, value, "a string or a number")),
        },
    }
}

fn names(value: &RawValue) -> Result<Vec<String>, InferError> {
    let prefix = "Unable to parse 'trace_level'";
    let wrong = |error| wrong_type(error, value, "an array of strings");
    let all: Vec<&RawValue> = serde_json::from_str(value.get())
        .map_err(|_| wrong(type_error(prefix, "attempt to access JSON non-array as array")))?;
    all.into_iter().map(|name| Ok(as_string(name, prefix).map_err(wrong)?.into_owned())).collect()
}

/// Appends the value and the allowed ones to Triton's text for a value of the wrong type.
fn wrong_type(error: InferError, value: &RawValue, allowed: &str) -> InferError {
    let value: String = value.get().chars().take(100).collect();
    let message = format!("{}, got: {value}; allowed is {allowed}", error.message);
    error.with_message(message)
}

fn shown(settings: TraceSettings) -> Response {
    // The settings are in the order that clients see.
    let mut out = String::new();
    for (name, values) in settings {
        let value = if name == "trace_level" {
            serde_json::json!(values)
        } else {
            serde_json::json!(values.concat())
        };
        let comma = if out.is_empty() { "{" } else { "," };
        let _ = write!(out, "{comma}\"{name}\":{value}");
    }
    out.push('}');
    answer::json(out)
}
