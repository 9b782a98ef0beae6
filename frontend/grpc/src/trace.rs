//! `TraceSetting` (spec 2.7), and the request traces of the gRPC edge.

use http::HeaderValue;
use pharos::error::InferError;
use pharos::request_trace::Traced;
use pharos::service::{Service, unchangeable_trace_setting};
use pharos::trace::settings::{Change, Update, count, levels, unsigned};
use tonic::body::Body;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Response, Status};

use super::proto::trace_setting_response::SettingValue;
use super::proto::{TraceSettingRequest, TraceSettingResponse};
use pharos_edge::request_trace::GRPC;
use pharos_edge::response_timing::AnswerTiming;

/// Applies the changes in the request and returns all settings.
///
/// # Errors
/// INVALID_ARG with the name of the setting, UNIMPLEMENTED for the trace file; on an error nothing changes.
pub(super) fn settings(
    service: &dyn Service,
    request: TraceSettingRequest,
) -> Result<TraceSettingResponse, InferError> {
    service.trace_settings(&request.model_name)?;
    let mut update = Update::default();
    for (name, setting) in &request.settings {
        set(name, &setting.value, &mut update)?;
    }
    let settings = service.update_trace_settings(&request.model_name, &update)?;
    let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), SettingValue { value }));
    Ok(TraceSettingResponse { settings: settings.collect() })
}

fn set(name: &str, values: &[String], update: &mut Update) -> Result<(), InferError> {
    if name == "trace_level" {
        let named = || levels(values.iter().map(String::as_str));
        update.levels = if values.is_empty() { Change::Clear } else { Change::Set(named()?) };
        return Ok(());
    }
    let one = || match values {
        [] => Ok(None),
        [value] => Ok(Some(value.as_str())),
        _ => Err(InferError::invalid(format!("expect only 1 value for '{name}'"))),
    };
    match name {
        "trace_rate" => update.rate = change(one()?, |text| unsigned(name, text))?,
        "trace_count" => update.count = change(one()?, count)?,
        "log_frequency" => update.log_frequency = change(one()?, |text| unsigned(name, text))?,
        _ => return Err(unchangeable_trace_setting(name)),
    }
    Ok(())
}

fn change<T>(text: Option<&str>, read: impl Fn(&str) -> Result<T, InferError>) -> Result<Change<T>, InferError> {
    text.map_or(Ok(Change::Clear), |text| read(text).map(Change::Set))
}

/// Starts the trace of a request if it is sampled.
pub(super) fn begin(service: &dyn Service, model: &str, metadata: &MetadataMap) -> Option<Traced> {
    service.trace(model, &|name| metadata.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned))
}

/// Adds the times with this value, and the client's `traceparent`, to the metadata of an answer.
pub(super) fn timed<T>(
    timing: AnswerTiming,
    answer: Result<(Option<HeaderValue>, Response<T>), Status>,
) -> Result<Response<T>, Status> {
    match answer {
        Ok((times, mut response)) => {
            timing.add_to(response.metadata_mut().as_mut(), times);
            Ok(response)
        }
        Err(mut status) => {
            timing.add_to(status.metadata_mut().as_mut(), None);
            Err(status)
        }
    }
}

/// Attaches the trace to an answer; [`sent`] detaches it.
pub(super) fn carry<T>(traced: Option<Traced>, answer: Result<Response<T>, Status>) -> Result<Response<T>, Status> {
    let Some(traced) = traced else { return answer };
    GRPC.send_starts(&traced);
    let parent = traced.traceparent().and_then(|parent| MetadataValue::try_from(parent.to_string()).ok());
    match answer {
        Ok(mut response) => {
            if let Some(parent) = parent {
                response.metadata_mut().insert("traceparent", parent);
            }
            response.extensions_mut().insert(traced);
            Ok(response)
        }
        Err(mut status) => {
            if let Some(parent) = parent {
                status.metadata_mut().insert("traceparent", parent);
            }
            // A status is sent at once and has no body to observe.
            drop(GRPC.sending(traced));
            Err(status)
        }
    }
}

/// Returns the answer to a call; if the call is traced, its body stamps when it is sent.
pub(super) fn sent(mut response: http::Response<Body>) -> http::Response<Body> {
    match response.extensions_mut().remove::<Traced>() {
        Some(traced) => response.map(|body| Body::new(GRPC.sending_body(traced, body))),
        None => response,
    }
}
