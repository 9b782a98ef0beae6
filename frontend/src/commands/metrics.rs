//! `pharos metrics`: checks and lists the definitions of a `metrics.yaml`.

use std::io::Write;
use std::process::ExitCode;

use pharos::metrics::catalog::listing;
use pharos_telemetry::metrics::read;

use crate::cli::MetricsCommand;

/// Runs a command.
pub(crate) fn run(command: &MetricsCommand) -> ExitCode {
    let answer = match command {
        MetricsCommand::Check { file } => read(Some(file)).map(|catalog| {
            for warning in catalog.warnings() {
                eprintln!("{}: warning: {warning}", file.display());
            }
            format!("{}: {}\n", file.display(), listing::summary(&catalog))
        }),
        MetricsCommand::List { file, format } => read(file.as_deref()).map(|catalog| listing::list(&catalog, *format)),
    };
    print(answer)
}

/// Prints a text, or the reason of a failure.
pub(super) fn print(answer: Result<String, String>) -> ExitCode {
    match answer {
        Ok(text) => {
            // The reader may close the pipe early, as `head` does.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("{}", reason.trim_start_matches("--metrics-config "));
            ExitCode::FAILURE
        }
    }
}
