//! Why a Python does not start a worker, as a sentence with the command that helps. The worker itself is started without
//! asking anything first; only when it has ended too early is its interpreter asked.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use pharos::wire::VERSION;
use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use super::command;
use crate::launch::{Interpreter, Launch};

/// The oldest Python that has the package.
const OLDEST: (u32, u32) = (3, 9);

/// How long the interpreter may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// The beginning of what a worker says that was built with another version of the wire.
const OTHER_BUILD: &str = "frontend and worker are of different builds";

/// For pip, where there is a package already.
const AGAIN: &str = "--force-reinstall ";

/// Says what is there, a line each, in words that any Python since 2.7 understands.
const ASK: &str = r#"
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

/// What has come of importing the package.
#[derive(Debug, PartialEq, Eq)]
enum Package {
    Missing,
    Error(String),
    /// With the version of the wire, if it tells it.
    Found(Option<u32>),
}

/// What a worker has said about why it cannot load `model`, with what to do if its package is of another build.
pub(crate) fn why_not_loaded(launch: &Launch, model: &str, reason: String) -> String {
    match &launch.interpreter {
        Some(interpreter) if reason.starts_with(OTHER_BUILD) => another_build(interpreter, model, &reason),
        _ => reason,
    }
}

fn another_build(interpreter: &Interpreter, model: &str, how: &str) -> String {
    format!(
        "model '{model}': the Python package 'pharos-worker' of {interpreter} is not this server's ({how}); {}",
        interpreter.remedy(AGAIN)
    )
}

/// Why the Python worker of `model` has not started, as far as its interpreter can tell; `None` if nothing is wrong with it,
/// or the worker is no Python.
pub(crate) async fn why_not_started(launch: &Launch, model: &str) -> Option<String> {
    let interpreter = launch.interpreter.as_ref()?;
    let mut command = command(&launch.with_arguments(vec!["-c".into(), ASK.into()]));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true).process_group(0);
    let asked = async {
        let mut child = command.spawn()?;
        let mut text = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            stdout.take(1 << 20).read_to_end(&mut text).await?;
        }
        Ok::<_, std::io::Error>((text, child.wait().await?))
    };
    match timeout(PATIENCE, asked).await {
        Ok(Ok((text, status))) => {
            sentence(interpreter, model, &InterpreterReport::parse(&String::from_utf8_lossy(&text)), status)
        }
        Ok(Err(error)) => {
            Some(format!("model '{model}': the Python interpreter {interpreter} cannot be started: {error}"))
        }
        Err(_) => Some(format!(
            "model '{model}': the Python interpreter {interpreter} does not import 'pharos_worker' within {} s",
            PATIENCE.as_secs()
        )),
    }
}

impl InterpreterReport {
    fn parse(text: &str) -> Self {
        let mut said = Self::default();
        // A package may print as well.
        for line in text.lines() {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                "python" if said.version.is_none() => {
                    let mut numbers = rest.split(' ').map(str::parse);
                    if let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) {
                        said.version = Some((major, minor));
                    }
                }
                "missing" => said.package = Some(Package::Missing),
                "error" => said.package = Some(Package::Error(rest.trim_end().to_owned())),
                "found" => said.package = Some(Package::Found(rest.parse().ok())),
                _ => {}
            }
        }
        said
    }
}

fn sentence(interpreter: &Interpreter, model: &str, said: &InterpreterReport, status: ExitStatus) -> Option<String> {
    let Some(version) = said.version else {
        let how = super::describe(status);
        return Some(format!("model '{model}': {interpreter} is no Python interpreter, or a broken one ({how})"));
    };
    if version < OLDEST {
        let ((major, minor), (least, at)) = (version, OLDEST);
        return Some(format!(
            "model '{model}' needs Python {least}.{at} or newer, and {interpreter} is Python {major}.{minor}: --python, a \
             'venv' in the model's directory or its parameter EXECUTION_ENV_PATH names another"
        ));
    }
    let needs = format!("model '{model}' needs the Python package 'pharos-worker', which {interpreter}");
    match &said.package {
        Some(Package::Missing) => Some(format!("{needs} does not have; {}", interpreter.remedy(""))),
        Some(Package::Error(error)) => Some(format!("{needs} cannot import: {error}; {}", interpreter.remedy(AGAIN))),
        Some(Package::Found(Some(wire))) if *wire != VERSION => {
            let how = format!("{OTHER_BUILD}: wire versions {VERSION} and {wire}");
            Some(another_build(interpreter, model, &how))
        }
        Some(Package::Found(_)) => None,
        None => Some(format!(
            "model '{model}': {interpreter} ends when it imports 'pharos_worker' ({}); {}",
            super::describe(status),
            interpreter.remedy(AGAIN)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read() {
        let said = |text| InterpreterReport::parse(text);
        let found = |package| InterpreterReport { version: Some((3, 11)), package: Some(package) };
        assert_eq!(said("python 3 11\nmissing\n"), found(Package::Missing));
        assert_eq!(said("python 3 11\nhello\nfound 9\n"), found(Package::Found(Some(9))));
        assert_eq!(said("python 3 11\nfound \n"), found(Package::Found(None)));
        let error = "ImportError: no numpy".to_owned();
        assert_eq!(said("python 3 11\nerror ImportError: no numpy\n"), found(Package::Error(error)));
        assert_eq!(said("python 2 7\n"), InterpreterReport { version: Some((2, 7)), package: None });
        assert_eq!(said("python three\n"), InterpreterReport::default());
    }
}
