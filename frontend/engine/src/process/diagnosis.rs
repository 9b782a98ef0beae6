//! Explains why a Python interpreter does not start a worker, in a sentence with the command that
//! helps. Starting a worker never checks the interpreter first; the check runs only after a worker
//! has exited too early.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use pharos::wire::VERSION;
use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::time::timeout;

use crate::launch::{Interpreter, Launch};

/// The oldest Python that the package supports.
const OLDEST: (u32, u32) = (3, 9);

/// The time limit of the interpreter check.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The start of the error of a worker that was built with another version of the wire.
const OTHER_BUILD: &str = "frontend and worker are of different builds";

/// The pip option for an interpreter that already has the package.
const FORCE: &str = "--force-reinstall ";

/// Prints a report, one fact a line, in syntax that every Python since 2.7 accepts.
const PROBE: &str = r#"
import sys
def say(*words):
    sys.stdout.write(' '.join(str(word).replace('\n', ' ') for word in words) + '\n')
    sys.stdout.flush()
say('python', sys.version_info[0], sys.version_info[1])
try:
    import pharos_worker
except BaseException as error:
    kind = type(error).__name__
    if isinstance(error, ImportError) and getattr(error, 'name', '') == 'pharos_worker':
        say('missing')
    else:
        say('error', kind + ':', error)
else:
    say('found', getattr(pharos_worker, 'WIRE_VERSION', ''))
"#;

/// What an interpreter reports about itself.
#[derive(Debug, Default, PartialEq, Eq)]
struct InterpreterReport {
    version: Option<(u32, u32)>,
    package: Option<Package>,
}

/// The result of importing the package.
#[derive(Debug, PartialEq, Eq)]
enum Package {
    Missing,
    Error(String),
    /// The package was imported; contains the version of its wire, if it reports one.
    Found(Option<u32>),
}

/// Returns a worker's reason for not loading `model`, with a remedy if its package is of another
/// build.
pub(crate) fn why_not_loaded(launch: &Launch, model: &str, reason: String) -> String {
    match &launch.interpreter {
        Some(interpreter) if reason.starts_with(OTHER_BUILD) => {
            another_build(interpreter, model, &reason)
        }
        _ => reason,
    }
}

fn another_build(interpreter: &Interpreter, model: &str, how: &str) -> String {
    format!(
        "model '{model}': the Python package 'pharos-worker' of {interpreter} does not match this \
         server ({how}); {}",
        interpreter.remedy(FORCE)
    )
}

/// Returns why the Python worker of `model` has not started, if the cause is its interpreter;
/// `None` if the interpreter works or the worker is not a Python worker.
pub(crate) async fn why_not_started(launch: &Launch, model: &str) -> Option<String> {
    let interpreter = launch.interpreter.as_ref()?;
    let mut command =
        Command::from(launch.with_arguments(vec!["-c".into(), PROBE.into()]).command(None));
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .process_group(0);
    let run = async {
        let mut child = command.spawn()?;
        let mut text = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            stdout.take(1 << 20).read_to_end(&mut text).await?;
        }
        Ok::<_, std::io::Error>((text, child.wait().await?))
    };
    match timeout(TIMEOUT, run).await {
        Ok(Ok((text, status))) => sentence(
            interpreter,
            model,
            &InterpreterReport::parse(&String::from_utf8_lossy(&text)),
            status,
        ),
        Ok(Err(error)) => Some(format!(
            "model '{model}': the Python interpreter {interpreter} cannot be started: {error}"
        )),
        Err(_) => Some(format!(
            "model '{model}': the Python interpreter {interpreter} did not import 'pharos_worker' \
             within {} s",
            TIMEOUT.as_secs()
        )),
    }
}

impl InterpreterReport {
    fn parse(text: &str) -> Self {
        let mut report = Self::default();
        // A package may print lines too.
        for line in text.lines() {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                "python" if report.version.is_none() => {
                    let mut numbers = rest.split(' ').map(str::parse);
                    if let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) {
                        report.version = Some((major, minor));
                    }
                }
                "missing" => report.package = Some(Package::Missing),
                "error" => report.package = Some(Package::Error(rest.trim_end().to_owned())),
                "found" => report.package = Some(Package::Found(rest.parse().ok())),
                _ => {}
            }
        }
        report
    }
}

fn sentence(
    interpreter: &Interpreter,
    model: &str,
    report: &InterpreterReport,
    status: ExitStatus,
) -> Option<String> {
    if super::killed_by_system(status) {
        // The signal does not come from the interpreter.
        return None;
    }
    let Some(version) = report.version else {
        let how = super::describe(status);
        return Some(format!(
            "model '{model}': {interpreter} is not a working Python interpreter ({how})"
        ));
    };
    if version < OLDEST {
        let (major, minor) = version;
        let (least, at) = OLDEST;
        return Some(format!(
            "model '{model}' needs Python {least}.{at} or newer, and {interpreter} is Python \
             {major}.{minor}; choose another with --python, a 'venv' in the model's directory or \
             its parameter EXECUTION_ENV_PATH"
        ));
    }
    let needs =
        format!("model '{model}' needs the Python package 'pharos-worker', which {interpreter}");
    match &report.package {
        Some(Package::Missing) => {
            Some(format!("{needs} does not have; {}", interpreter.remedy("")))
        }
        Some(Package::Error(error)) => {
            Some(format!("{needs} cannot import: {error}; {}", interpreter.remedy(FORCE)))
        }
        Some(Package::Found(Some(wire))) if *wire != VERSION => {
            let how = format!("{OTHER_BUILD}: wire versions {VERSION} and {wire}");
            Some(another_build(interpreter, model, &how))
        }
        Some(Package::Found(_)) => None,
        None => Some(format!(
            "model '{model}': {interpreter} exits when it imports 'pharos_worker' ({}); {}",
            super::describe(status),
            interpreter.remedy(FORCE)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_reports() {
        let report = |text| InterpreterReport::parse(text);
        let found = |package| InterpreterReport { version: Some((3, 11)), package: Some(package) };
        assert_eq!(report("python 3 11\nmissing\n"), found(Package::Missing));
        assert_eq!(report("python 3 11\nhello\nfound 9\n"), found(Package::Found(Some(9))));
        assert_eq!(report("python 3 11\nfound \n"), found(Package::Found(None)));
        let error = "ImportError: no numpy".to_owned();
        assert_eq!(
            report("python 3 11\nerror ImportError: no numpy\n"),
            found(Package::Error(error))
        );
        assert_eq!(
            report("python 2 7\n"),
            InterpreterReport { version: Some((2, 7)), package: None }
        );
        assert_eq!(report("python three\n"), InterpreterReport::default());
    }

    #[test]
    fn an_examination_that_was_killed_finds_nothing() {
        use std::os::unix::process::ExitStatusExt;
        let interpreter =
            Interpreter { path: "python3".into(), by: "--python", home: None, archive: None };
        let report = InterpreterReport { version: Some((3, 11)), package: None };
        let found = |status| sentence(&interpreter, "m", &report, ExitStatus::from_raw(status));
        assert_eq!(found(9), None);
        assert!(
            found(3 << 8)
                .is_some_and(|text| text.contains("exits when it imports 'pharos_worker'"))
        );
    }
}
