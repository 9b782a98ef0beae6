//! Decides whether a configuration that a client sent with a load is accepted for a model, by the model's own configuration: whether
//! it brings code, how much it asks for, and which files it names.

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::model::{Completion, Draft, VersionPolicy};
use pharos::repository::{self, LoadScope};

use super::Settings;
use crate::store::Overrides;
use crate::store::scan::Contents;

/// Why a configuration is not accepted.
pub(super) enum Refusal {
    /// It brings code that the client may not bring.
    Restricted(InferError),
    /// It asks for more than a request may, or names files that the client may not read.
    Excessive(String),
    /// The model's own configuration cannot be read.
    Unreadable(String),
}

/// How the operator permits loads that bring code.
const REMEDY: &str = "Start the server with '--allow-model-upload=true' or '--management-token-file' to permit it.";

/// Returns the error of a load that brings code without permission.
pub(crate) fn brings_code(model: &str, what: &str) -> InferError {
    let text = format!("failed to load '{model}', {what}. {REMEDY}");
    InferError::new(ErrorCode::Unsupported, Reason::Restricted, text)
}

/// Checks the configuration of a client. `contents` are the files of the model; `model` is its name without a namespace.
///
/// # Errors
/// The configuration brings code and the client may not, asks for more than a request may, or names label files that are neither the
/// operator's nor sent with it.
pub(super) fn check(
    settings: &Settings,
    model: &str,
    contents: &Contents,
    overrides: &Overrides,
    sent: &Draft,
) -> Result<(), Refusal> {
    // Sent files have replaced the model's own configuration.
    let own = match (&overrides.files, &contents.config) {
        (None, Some(text)) => Draft::from_text(text, &contents.config_path.to_string_lossy())
            .map_err(|error| Refusal::Unreadable(error.to_string()))?,
        _ => Draft::empty(),
    };
    if overrides.scope == LoadScope::Settings {
        let completion = Completion { directory: model, files: &contents.files, ..Completion::default() };
        let brought = sent.code_beyond(&own, &completion);
        if !brought.is_empty() {
            let fields = brought.join(", ");
            let what = format!(
                "the configuration in the request differs from the model's own in {fields}, which can bring code or files. \
                 Without permission, a load may change all other settings"
            );
            return Err(Refusal::Restricted(brings_code(model, &what)));
        }
    }
    let present: Vec<u64> = contents.versions.keys().copied().collect();
    let versions = |policy: &VersionPolicy| repository::select(policy, &present).len();
    settings
        .load_limits
        .check(sent, &own, versions, settings.devices.usable().len())
        .map_err(|what| Refusal::Excessive(format!("the configuration in the request is refused: {what}")))?;
    match overrides.files {
        Some(_) => Ok(()),
        None => check_labels(sent, &own),
    }
}

/// Checks that the label files are among those of the model's own configuration: any other file of the model, such as its code, would
/// be sent to clients with classifications.
fn check_labels(sent: &Draft, own: &Draft) -> Result<(), Refusal> {
    let known: Vec<&str> = own.label_files().map(|(_, file)| file).collect();
    let Some((output, file)) = sent.label_files().find(|(_, file)| !known.contains(file)) else { return Ok(()) };
    let named = match known.as_slice() {
        [] => "names none".to_owned(),
        known => format!("names {}", known.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")),
    };
    Err(Refusal::Excessive(format!(
        "the configuration in the request is refused: label file '{}' of output '{}' must be one that the model's configuration in \
         the repository names, which {named}, or be sent with the load",
        file.escape_debug(),
        output.escape_debug()
    )))
}
