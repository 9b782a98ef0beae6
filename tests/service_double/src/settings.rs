//! Settings of the double that clients can change.

use pharos::error::InferError;
use pharos::service::{LogFormat, LogSettings, LogUpdate, TraceSettings};
use pharos::trace::settings::{self, Mode, Update, Values, level_names};

/// The settings.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) log: LogSettings,
    trace: settings::Settings,
}

impl Default for Settings {
    fn default() -> Self {
        let format = LogFormat::Default;
        let log = LogSettings {
            file: String::new(),
            info: true,
            warning: true,
            error: true,
            verbose: 0,
            format,
        };
        Self { log, trace: settings::Settings::new(Mode::Triton, Values::default(), true) }
    }
}

impl Settings {
    /// Changes the log settings and returns them.
    pub(crate) fn update_log(&mut self, update: &LogUpdate) -> LogSettings {
        let LogSettings { info, warning, error, verbose, format, .. } = &mut self.log;
        set(info, update.info);
        set(warning, update.warning);
        set(error, update.error);
        set(verbose, update.verbose);
        set(format, update.format);
        self.log.clone()
    }

    /// Changes the trace settings of a model, or (empty) of the server, and returns them.
    pub(crate) fn update_trace(
        &mut self,
        model: &str,
        update: &Update,
    ) -> Result<TraceSettings, InferError> {
        self.trace.update(model, update)?;
        let values = self.trace.of(model);
        let one = |value: String| vec![value];
        Ok(vec![
            ("trace_level", level_names(values.levels).into_iter().map(str::to_owned).collect()),
            ("trace_rate", one(values.rate.to_string())),
            ("trace_count", one(values.count.to_string())),
            ("log_frequency", one(values.log_frequency.to_string())),
            ("trace_file", one("f".to_owned())),
            ("trace_mode", one(Mode::Triton.name().to_owned())),
        ])
    }
}

fn set<T>(value: &mut T, update: Option<T>) {
    if let Some(update) = update {
        *value = update;
    }
}
