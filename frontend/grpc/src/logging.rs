//! `LogSettings`: the log settings (spec 2.8).

use std::collections::BTreeMap;

use pharos::error::InferError;
use pharos::service::{LogSettings, LogUpdate, Service, log_format, unchangeable_log_setting};

use super::proto::log_settings_request::SettingValue as Asked;
use super::proto::log_settings_request::setting_value::ParameterChoice as AskedChoice;
use super::proto::log_settings_response::SettingValue as Shown;
use super::proto::log_settings_response::setting_value::ParameterChoice as ShownChoice;
use super::proto::{LogSettingsRequest, LogSettingsResponse};

/// Applies the changes in the request and returns all settings.
///
/// # Errors
/// INVALID_ARG with the name of the setting, UNIMPLEMENTED for the log file; on an error nothing
/// changes.
pub(super) fn settings(
    service: &dyn Service,
    request: LogSettingsRequest,
) -> Result<LogSettingsResponse, InferError> {
    let mut update = LogUpdate::default();
    for (name, Asked { parameter_choice }) in request.settings {
        if let Some(choice) = parameter_choice {
            setting(&name, choice, &mut update)?;
        }
    }
    let settings = if update == LogUpdate::default() {
        service.log_settings()
    } else {
        service.update_log_settings(update)
    };
    Ok(LogSettingsResponse { settings: shown(settings) })
}

fn setting(name: &str, choice: AskedChoice, update: &mut LogUpdate) -> Result<(), InferError> {
    let boolean = || match choice {
        AskedChoice::BoolParam(value) => Ok(Some(value)),
        _ => Err(InferError::invalid(format!("expect boolean for '{name}'"))),
    };
    match name {
        "log_info" => update.info = boolean()?,
        "log_warning" => update.warning = boolean()?,
        "log_error" => update.error = boolean()?,
        "log_verbose_level" => match choice {
            AskedChoice::Uint32Param(level) => update.verbose = Some(level),
            _ => return Err(InferError::invalid(format!("expect unsigned integer for '{name}'"))),
        },
        "log_format" => match choice {
            AskedChoice::StringParam(format) => update.format = Some(log_format(&format)?),
            _ => return Err(InferError::invalid(format!("expect string for '{name}'"))),
        },
        _ => return Err(unchangeable_log_setting(name)),
    }
    Ok(())
}

fn shown(settings: LogSettings) -> BTreeMap<String, Shown> {
    let LogSettings { file, info, warning, error, verbose, format } = settings;
    let all = [
        ("log_file", ShownChoice::StringParam(file)),
        ("log_info", ShownChoice::BoolParam(info)),
        ("log_warning", ShownChoice::BoolParam(warning)),
        ("log_error", ShownChoice::BoolParam(error)),
        ("log_verbose_level", ShownChoice::Uint32Param(verbose)),
        ("log_format", ShownChoice::StringParam(format.name().to_owned())),
    ];
    all.map(|(name, choice)| (name.to_owned(), Shown { parameter_choice: Some(choice) })).into()
}
