//! Log settings as clients see and change them.

use crate::error::{Cause, InferError};

/// The target of log lines about single requests. They are logged independently of the other
/// settings.
pub const REQUEST_LOG_TARGET: &str = "access";

named_enum! {
    /// The format of a log line.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[repr(u8)]
    pub enum LogFormat {
        /// Time with microseconds, level, message, fields.
        #[default]
        Default => "default",
        /// Triton's: time to the second, a letter for the level, process, module, message, fields.
        Iso8601 => "ISO8601",
        /// A JSON object.
        Json => "json",
    }
    /// Returns the name in options and in the protocol.
    pub fn name;
}

impl LogFormat {
    /// Returns the format of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }
}

/// What the server logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// The file; empty for standard error.
    pub file: String,
    /// Whether information is logged.
    pub info: bool,
    /// Whether warnings are logged.
    pub warning: bool,
    /// Whether errors are logged.
    pub error: bool,
    /// The verbose level; 0 logs no details.
    pub verbose: u32,
    /// The format of lines.
    pub format: LogFormat,
}

/// A change of the log settings; `None` leaves a setting as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogUpdate {
    /// Whether to log information.
    pub info: Option<bool>,
    /// Whether to log warnings.
    pub warning: Option<bool>,
    /// Whether to log errors.
    pub error: Option<bool>,
    /// The verbose level.
    pub verbose: Option<u32>,
    /// The format of lines.
    pub format: Option<LogFormat>,
}

/// Parses the format that a client sets.
///
/// # Errors
/// INVALID_ARG with Triton's text, and [`Cause::UnknownLogFormat`].
pub fn log_format(name: &str) -> Result<LogFormat, InferError> {
    LogFormat::from_name(name).ok_or_else(|| {
        let allowed = LogFormat::ALL.map(LogFormat::name).join(", ");
        let text = format!("invalid argument for --log_format, got: {name}; allowed are {allowed}");
        InferError::invalid(text).with_cause(Cause::UnknownLogFormat)
    })
}

/// Returns the error for a log setting that clients cannot change: the file, or an unknown one.
pub fn unchangeable_log_setting(name: &str) -> InferError {
    match name {
        "log_file" => {
            InferError::unsupported("log file location can not be updated through network protocol")
        }
        _ => InferError::invalid(format!(
            "unknown log setting '{name}'; allowed: log_info, log_warning, log_error, \
             log_verbose_level, log_format"
        )),
    }
}
