//! The flags of the log.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use pharos::service::LogFormat;
use pharos_telemetry::log;

use super::{LOG, boolean};

/// Logging.
#[derive(Clone, Debug, Args)]
pub struct Log {
    /// Level of verbose logging: 0 off, 1 and above each request and details
    #[arg(
        id = "log-verbose", long = "log-verbose", value_name = "LEVEL", default_missing_value = "1",
        num_args = 0..=1, default_value_t = 0, env = "PHAROS_LOG_VERBOSE", value_parser = verbosity,
        help_heading = LOG
    )]
    pub verbose: u32,
    /// Log informational messages
    #[arg(
        id = "log-info", long = "log-info", value_name = "BOOL", default_value = "true",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_LOG_INFO", value_parser = boolean, help_heading = LOG
    )]
    pub info: bool,
    /// Log warnings
    #[arg(
        id = "log-warning", long = "log-warning", value_name = "BOOL", default_value = "true",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_LOG_WARNING", value_parser = boolean, help_heading = LOG
    )]
    pub warning: bool,
    /// Log errors
    #[arg(
        id = "log-error", long = "log-error", value_name = "BOOL", default_value = "true",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_LOG_ERROR", value_parser = boolean, help_heading = LOG
    )]
    pub error: bool,
    /// Format of log lines: default, ISO8601 (Triton's) or json
    #[arg(
        id = "log-format", long = "log-format", value_name = "FORMAT", default_value = "default",
        env = "PHAROS_LOG_FORMAT", value_parser = log_format, help_heading = LOG
    )]
    pub format: LogFormat,
    /// File to log to instead of standard error; reopened on SIGHUP
    #[arg(
        id = "log-file", long = "log-file", value_name = "FILE", env = "PHAROS_LOG_FILE",
        help_heading = LOG
    )]
    pub file: Option<PathBuf>,
    /// Log a line for each request
    #[arg(
        id = "log-access", long = "log-access", value_name = "BOOL", default_value = "false",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_LOG_ACCESS", value_parser = boolean, help_heading = LOG
    )]
    pub access: bool,
}

impl Log {
    /// Returns the initial settings of the log.
    pub(crate) fn options(&self) -> log::Options {
        let Self { verbose, info, warning, error, format, ref file, access: _ } = *self;
        log::Options { verbose, info, warning, error, format, file: file.clone() }
    }
}

/// Parses a level. Triton also accepts true and false.
fn verbosity(text: &str) -> Result<u32, String> {
    let level = text.parse().ok().or_else(|| boolean(text).map(u32::from).ok());
    level.ok_or_else(|| "expected a whole number from 0, or true or false".to_owned())
}

/// Parses a format of log lines.
fn log_format(text: &str) -> Result<LogFormat, String> {
    LogFormat::from_name(text).ok_or_else(|| "allowed: default, ISO8601, json".to_owned())
}
