//! The outputs of metrics, and the settings of system metrics.

use std::sync::Arc;

use pharos::metrics::catalog::Mode;
use pharos_telemetry::system::{self, Gpus, Roots};
use pharos_telemetry::tslog;

use crate::cli::{self, Options, Tslog};

/// Returns the default mode of metrics: scrapes, and logs if a directory or standard output for
/// them is set. With TorchServe's endpoints: only logs.
pub(super) fn usual_mode(options: &Options, torchserve: bool) -> Mode {
    if torchserve {
        return Mode::Tslog;
    }
    let named = options.tslog.named_location(|name| std::env::var_os(name)).is_some();
    if named || options.tslog.stdout { Mode::Both } else { Mode::Prometheus }
}

/// Returns the settings of metric logs. Without an explicit directory and mode, lines go only to
/// standard output, if enabled.
pub(super) fn logs(options: &Options, names_mode: bool) -> tslog::Settings {
    let Tslog { max_bytes, keep, lines_per_second, stdout, format, .. } = &options.tslog;
    let location = match options.tslog.named_location(|name| std::env::var_os(name)) {
        None if names_mode || !stdout => {
            Some(options.tslog.location(|name| std::env::var_os(name)))
        }
        named => named,
    };
    tslog::Settings {
        location,
        max_bytes: *max_bytes,
        keep: *keep as usize,
        stdout: *stdout,
        json: format == "json",
        lines_per_second: *lines_per_second,
    }
}

/// Returns the settings of system metrics; `seen` is whether any output shows them.
pub(super) fn of_system(
    options: &cli::Metrics,
    seen: bool,
    gpus: Option<Arc<Gpus>>,
) -> system::Settings {
    system::Settings {
        interval: options.interval,
        log_interval: options.system_log_interval,
        cpu: seen && options.allow_cpu,
        gpus: gpus.filter(|_| seen && options.allow_gpu),
        roots: Roots::new(&options.cgroup_root),
    }
}
