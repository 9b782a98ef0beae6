//! Converts TorchServe's settings to options of `pharos`. The user's options after `--` come last
//! and take precedence.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Settings;
use super::settings::{Note, PipSandbox};
use pharos_os::worker_user::WorkerUser;

/// The executable that this launcher is part of.
pub trait Executable {
    /// Parsed options of the executable.
    type Options;

    /// Parses options. The first argument is the program name.
    ///
    /// # Errors
    /// The options are invalid.
    fn parse(&self, arguments: Vec<OsString>) -> Result<Self::Options, String>;

    /// Returns the Python interpreter named in options.
    fn python(&self, options: &Self::Options) -> Option<PathBuf>;

    /// Returns the user of the programs that run models, if options name one.
    fn worker_user(&self, options: &Self::Options) -> Option<Arc<WorkerUser>>;

    /// Returns the sandbox of this pip for archives that come by request; `None` without sandboxes.
    fn pip_sandbox(&self, options: &Self::Options, python: &Path) -> Option<PipSandbox>;

    /// Returns the ids of the GPUs that are usable with these options; `None` means default
    /// options.
    fn gpus(&self, options: Option<&Self::Options>) -> Vec<u32>;
}

/// Returns options equivalent to the settings followed by `given`, and notes to log.
///
/// # Errors
/// `given` is invalid.
pub(super) fn options(
    settings: &Settings,
    given: &[OsString],
    executable: &impl Executable,
) -> Result<(Vec<OsString>, Vec<Note>), String> {
    let mut notes = Vec::new();
    let mut options: Vec<OsString> =
        vec!["--model-control-mode=explicit".into(), "--exit-on-error=false".into()];
    // KServe's own ports are only opened if the user sets them.
    for protocol in ["http", "grpc", "metrics"] {
        let flag = format!("--{protocol}-port");
        let is_given =
            given.iter().any(|option| option.to_str().is_some_and(|text| text.starts_with(&flag)));
        options.push(format!("--allow-{protocol}={is_given}").into());
        options.push(format!("--{protocol}-address=127.0.0.1").into());
    }
    options.extend(metrics(settings, &mut notes));
    if let Some(pattern) = &settings.blacklist_env_vars {
        options.push(format!("--worker-hidden-variables={pattern}").into());
    }
    options.push("--log-access=true".into());
    options.push(joined("--metrics-location=", &location("METRICS_LOCATION")));
    options.extend(given.iter().cloned());
    executable.parse(with_repository(&options))?;
    Ok((options, notes))
}

fn metrics(settings: &Settings, notes: &mut Vec<Note>) -> Vec<OsString> {
    let mut options: Vec<OsString> = Vec::new();
    // Without a mode, the file decides.
    if let Some(mode) = settings.metrics_mode.as_deref() {
        options
            .push(format!("--metrics-mode={}", if mode == "log" { "tslog" } else { mode }).into());
    }
    options.push("--tslog-stdout=true".into());
    match &settings.metrics_config {
        Some(file) if file.is_file() => options.push(joined("--metrics-config=", file)),
        // TorchServe continues without any metrics.
        Some(file) => notes.push(Note {
            warning: true,
            text: format!(
                "metrics_config={} does not exist; using the built-in metrics",
                file.display()
            ),
        }),
        None => {}
    }
    options.push(format!("--model-metrics-auto-detect={}", settings.metrics_auto_detect).into());
    let measured = !settings.disable_system_metrics;
    options.push(format!("--allow-cpu-metrics={measured}").into());
    options.push(format!("--allow-gpu-metrics={measured}").into());
    let seconds = settings.metric_time_interval.min(86_400);
    options.push(format!("--metrics-interval-ms={}", (u64::from(seconds) * 1000).min(2000)).into());
    options.push(format!("--system-metrics-log-interval-secs={seconds}").into());
    options
}

/// Returns a command line of `pharos` with these options that parses before the repository is
/// known.
pub(super) fn with_repository(options: &[OsString]) -> Vec<OsString> {
    let program = ["pharos", "--model-repository=none"].into_iter().map(OsString::from);
    program.chain(options.iter().cloned()).collect()
}

fn joined(option: &str, value: &Path) -> OsString {
    let mut whole = OsString::from(option);
    whole.push(value);
    whole
}

/// Returns the directory that a variable names, else `logs`.
fn location(variable: &str) -> PathBuf {
    std::env::var_os(variable)
        .filter(|place| !place.is_empty())
        .map_or_else(|| "logs".into(), PathBuf::from)
}

/// Returns the directory of logs other than metric logs.
pub(super) fn logs() -> PathBuf {
    location("LOG_LOCATION")
}
