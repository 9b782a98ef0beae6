//! `TraceSetting` (spec 2.7).

use pharos::error::InferError;
use pharos::service::{Service, unchangeable_trace_setting};
use pharos::trace::settings::{Change, Update, count, levels, unsigned};

use super::proto::trace_setting_response::SettingValue;
use super::proto::{TraceSettingRequest, TraceSettingResponse};

/// Applies the changes in the request and returns all settings.
///
/// # Errors
/// INVALID_ARG with the name of the setting, UNIMPLEMENTED for the trace file; on an error nothing
/// changes.
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
    let settings =
        settings.into_iter().map(|(name, value)| (name.to_owned(), SettingValue { value }));
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

fn change<T>(
    text: Option<&str>,
    read: impl Fn(&str) -> Result<T, InferError>,
) -> Result<Change<T>, InferError> {
    text.map_or(Ok(Change::Clear), |text| read(text).map(Change::Set))
}
