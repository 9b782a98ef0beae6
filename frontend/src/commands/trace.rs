//! `pharos trace`: summarizes and converts trace files.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use pharos::printable::printable;
use pharos::trace::read::{Trace, read};
use pharos::trace::{chrome, summary};

use super::metrics::write_out;
use crate::cli::TraceCommand;

pub(crate) fn run(command: &TraceCommand) -> ExitCode {
    match text(command) {
        Ok((text, output)) => match write(&text, output) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(&error),
        },
        Err(error) => failed(&error),
    }
}

fn failed(reason: &str) -> ExitCode {
    eprintln!("pharos trace: {}", printable(reason));
    ExitCode::FAILURE
}

/// Returns the output, and the file to write it to; `None` for standard output.
fn text(command: &TraceCommand) -> Result<(String, Option<&Path>), String> {
    match command {
        TraceCommand::Summary { files, json } => {
            let traces = read_all(files)?;
            let models = summary::summarize(traces.iter());
            Ok((if *json { summary::json(&models) } else { summary::table(&models) }, None))
        }
        TraceCommand::Chrome { files, output } => {
            Ok((chrome::render(read_all(files)?.iter()), output.as_deref()))
        }
    }
}

/// Reads the traces of all files. Ids are only unique within one file, so the ids of later files
/// are offset.
fn read_all(files: &[PathBuf]) -> Result<Vec<Trace>, String> {
    let mut all: Vec<Trace> = Vec::new();
    for path in files {
        let wrong = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
        let bytes = std::fs::read(path).map_err(|error| wrong(&error))?;
        let found = read(&bytes).map_err(|error| wrong(&error))?;
        if found.truncated {
            eprintln!(
                "{}",
                printable(&wrong(&"the file is cut off; only its complete records are read"))
            );
        }
        if found.broken > 0 {
            eprintln!(
                "{}",
                printable(&wrong(&format!(
                    "skipped {} records that are not valid JSON",
                    found.broken
                )))
            );
        }
        let base = all.iter().map(|trace| trace.id).max().unwrap_or(0);
        all.extend(found.traces.into_iter().map(|mut trace| {
            trace.id = trace.id.saturating_add(base);
            trace.parent = if trace.parent == 0 { 0 } else { trace.parent.saturating_add(base) };
            trace
        }));
    }
    Ok(all)
}

fn write(text: &str, output: Option<&Path>) -> Result<(), String> {
    match output {
        Some(path) => {
            std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
        }
        None => write_out(text),
    }
}
