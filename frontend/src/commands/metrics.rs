//! `pharos metrics`: checks, lists and prints the definitions of a `metrics.yaml`.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use pharos::metrics::catalog::{SHIPPED, listing};
use pharos::printable::printable_lines;
use pharos_telemetry::metrics::read;

use crate::cli::MetricsCommand;

pub(crate) fn run(command: &MetricsCommand) -> ExitCode {
    let answer = match command {
        MetricsCommand::Check { file } => read(Some(file)).map(|catalog| {
            for warning in catalog.warnings() {
                eprintln!(
                    "{}",
                    printable_lines(&format!("{}: warning: {warning}", file.display()))
                );
            }
            printable_lines(&format!(
                "{}: {}\n",
                file.display(),
                listing::summary_of_file(&catalog)
            ))
            .into_owned()
        }),
        MetricsCommand::Default => Ok(SHIPPED.to_owned()),
        MetricsCommand::List { file, format } => read(file.as_deref()).map(|catalog| {
            let listed = listing::list(&catalog, *format);
            // JSON escapes control characters itself.
            if *format == listing::Form::Json {
                listed
            } else {
                printable_lines(&listed).into_owned()
            }
        }),
    };
    print(answer)
}

/// Writes a text to standard output, all of it.
///
/// # Errors
/// The text cannot be written, for example to a full disk. A reader that closes the pipe early, as
/// `head` does, is no error.
pub(super) fn write_out(text: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(format!("cannot write to standard output: {error}"))
        }
        _ => Ok(()),
    }
}

/// Prints a text, or the reason of a failure.
pub(super) fn print(answer: Result<String, String>) -> ExitCode {
    match answer {
        Ok(text) => match write_out(&text) {
            Ok(()) => ExitCode::SUCCESS,
            Err(reason) => {
                eprintln!("{}", printable_lines(&reason));
                ExitCode::FAILURE
            }
        },
        Err(reason) => {
            eprintln!("{}", printable_lines(&reason.replacen("--metrics-config ", "", 1)));
            ExitCode::FAILURE
        }
    }
}
