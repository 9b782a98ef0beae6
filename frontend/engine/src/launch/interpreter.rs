//! Finds the Python interpreter of a model: from its parameter `EXECUTION_ENV_PATH`, else from a
//! `venv` or `.venv` in its directory, else from `--python`, else the `python3` of the `PATH`.
//! Links in paths are kept, because Python recognizes a virtual environment by the path of its
//! interpreter.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use pharos::model::CodeOrigin;
use pharos_os::directories::{self, Kind};

use super::archive::{self, Cache, Environment, Source};
use super::backends::absolute;
use super::reading::Reading;
use super::sandbox::{self, Sandbox};
use super::{ENVIRONMENT, Launch, MODEL_DIRECTORY, Model, Program, activation};

/// The version of the server and of the wheel that contains it.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A Python interpreter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interpreter {
    pub(crate) path: PathBuf,
    /// The setting that chose it, for messages.
    pub(crate) by: &'static str,
    /// The directory of its environment, except for the default interpreter.
    pub(crate) home: Option<PathBuf>,
    /// The archive from which its environment was unpacked.
    pub(crate) archive: Option<PathBuf>,
}

impl Interpreter {
    /// Returns what makes a model run: the command that installs the package for this interpreter,
    /// or another interpreter. `options` are further options of pip.
    pub(crate) fn remedy(&self, options: &str) -> String {
        let install = match &self.archive {
            // The unpacked environment is only a copy of the archive.
            Some(archive) => format!(
                "'python3 -m pip install {options}PACKAGE' in the environment that is packed into \
                 '{}' and pack it again",
                archive.display()
            ),
            None => format!("'{} -m pip install {options}PACKAGE'", self.path.display()),
        };
        let otherwise = match self.by {
            BY_PARAMETER => {
                "remove the parameter EXECUTION_ENV_PATH to use the interpreter of --python"
            }
            BY_FOLDER => "remove this environment to use the interpreter of --python",
            _ => "choose an interpreter that has the package with --python",
        };
        format!(
            "run {install}, where PACKAGE is the wheel of this server \
             (pharos_server-{VERSION}-*.whl) or, in its source tree, ./worker/python; or \
             {otherwise}"
        )
    }
}

impl fmt::Display for Interpreter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' ({})", self.path.display(), self.by)
    }
}

/// A Python interpreter and the environment that was unpacked for it.
pub(super) struct Named {
    pub(super) interpreter: Interpreter,
    pub(super) unpacked: Option<Arc<Environment>>,
}

const BY_PARAMETER: &str = "the model's EXECUTION_ENV_PATH";
const BY_FOLDER: &str = "in the model's directory";
const BY_FLAG: &str = "of --python";
const BY_PATH: &str = "of the PATH";

/// The folders of a model that may contain its environment, in this order.
const FOLDERS: [&str; 2] = ["venv", ".venv"];

/// Finds the interpreter of a model.
///
/// # Errors
/// The interpreter does not exist or cannot be executed, or the environment cannot be unpacked.
pub(super) fn find(
    program: &Program,
    model: &Model<'_>,
    reading: &Reading,
) -> Result<Named, String> {
    let named = match model.environment.filter(|path| !path.is_empty()) {
        Some(path) => by_parameter(program, model, path, reading)?,
        None => {
            let folder = FOLDERS
                .iter()
                .map(|name| model.directory.join(name))
                .find(|folder| folder.is_dir());
            let interpreter = match folder {
                Some(folder) => in_environment(model.name, absolute(folder), BY_FOLDER)?,
                None => by_default(program, model.name)?,
            };
            Named { interpreter, unpacked: None }
        }
    };
    check(model.name, &named.interpreter)?;
    Ok(named)
}

/// Returns the path that [`ENVIRONMENT`] names.
pub(super) fn named_path(value: &str, model: &Model<'_>) -> PathBuf {
    let directory = absolute(model.directory.to_owned());
    PathBuf::from(value.replace(MODEL_DIRECTORY, &directory.to_string_lossy()))
}

fn by_parameter(
    program: &Program,
    model: &Model<'_>,
    value: &str,
    reading: &Reading,
) -> Result<Named, String> {
    let path = absolute(named_path(value, model));
    let refused = |why: &str| {
        format!(
            "model '{}': {ENVIRONMENT} is '{}', which {why}; allowed are the directory of a \
             virtual or conda environment, and a .tar.gz of one made by conda-pack or venv-pack",
            model.name,
            path.display()
        )
    };
    let kind = reading.watch(|| path.metadata()).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => refused("does not exist"),
        _ => refused(&format!("cannot be read ({error})")),
    })?;
    if kind.is_dir() {
        return Ok(Named {
            interpreter: in_environment(model.name, path, BY_PARAMETER)?,
            unpacked: None,
        });
    }
    if !kind.is_file() {
        return Err(refused("is neither a directory nor a file"));
    }
    let unusable = |error: String| {
        format!(
            "model '{}': the environment '{}' cannot be used: {error}",
            model.name,
            path.display()
        )
    };
    let archive = Source::open(&path, program.user.as_deref(), reading).map_err(unusable)?;
    if let Some(sandbox) = sandbox::of(program, model)? {
        let real = archive.real_path().map_err(|error| unusable(error.to_string()))?;
        if !sandbox.permits(&real) {
            may_name(model, &path, &real)?;
        }
    }
    // The variables of the environment contain its path, and models change their working directory.
    let folder = absolute(program.environments.clone());
    let cache = Cache { folder: &folder, user: program.user.as_deref() };
    let unpacked = archive::unpacked(&cache, &archive, |home: &Path| {
        let mut interpreter = in_environment(model.name, home.to_owned(), BY_PARAMETER)?;
        interpreter.archive = Some(path.clone());
        check(model.name, &interpreter)?;
        let mut sandbox = sandbox::of(program, model)?;
        sandbox.iter_mut().try_for_each(|sandbox| permit(sandbox, program, model, &interpreter))?;
        let variables = activation::variables(home);
        let hidden = program.hidden.clone();
        let user = program.user.clone();
        let launch = Launch {
            executable: interpreter.path,
            variables,
            hidden,
            user,
            sandbox,
            ..Launch::default()
        };
        Ok(launch.command(Some(home)))
    })
    .map_err(unusable)?;
    let mut interpreter = in_environment(model.name, unpacked.path().to_owned(), BY_PARAMETER)?;
    interpreter.archive = Some(path);
    Ok(Named { interpreter, unpacked: Some(Arc::new(unpacked)) })
}

/// Permits a model in a sandbox to read its Python: the operator's, and the environment that it has
/// chosen, of which links do not lead elsewhere.
///
/// # Errors
/// The environment or its interpreter is in a place that the model may not read.
pub(super) fn permit(
    sandbox: &mut Sandbox,
    program: &Program,
    model: &Model<'_>,
    interpreter: &Interpreter,
) -> Result<(), String> {
    if let Ok(default) = by_default(program, model.name) {
        sandbox.permit(sandbox::of_interpreter(&default.path));
    }
    let Some(home) = &interpreter.home else { return Ok(()) };
    let unusable =
        |error: std::io::Error| format!("model '{}': '{}': {error}", model.name, home.display());
    let real = fs::canonicalize(home).map_err(unusable)?;
    if interpreter.archive.is_some() {
        // Unpacked by this server.
        sandbox.permit_beneath(&real, ".");
    } else if !sandbox.permits(&real) {
        may_name(model, home, &real)?;
        for part in sandbox::parts_of_environment(&real) {
            sandbox.permit_beneath(&real, part);
        }
    }
    let executable = fs::canonicalize(&interpreter.path).map_err(unusable)?;
    if sandbox.permits(&executable) {
        return Ok(());
    }
    let name = model.name;
    let place = executable.display();
    Err(format!(
        "model '{name}': the Python interpreter {interpreter} is '{place}', which the model may \
         not read in its sandbox. {PERMITTED} its interpreter",
    ))
}

/// The end of an error about a path that a model in a sandbox may not read.
const PERMITTED: &str = "A model in a sandbox may read its own files, the system's and the Python \
                         of the server (--python). --worker-sandbox-read=PATH permits further \
                         ones: the directory of";

/// Checks that the configuration of a model in a sandbox may name an environment that the model may
/// not read otherwise: an operator's configuration may, with a path outside of the model's
/// directory.
///
/// # Errors
/// The configuration may not name the environment.
fn may_name(model: &Model<'_>, named: &Path, real: &Path) -> Result<(), String> {
    let directory = absolute(model.directory.to_owned());
    let why = if model.provenance.origin == CodeOrigin::Request {
        "code that came by request cannot choose it"
    } else if normalized(named).starts_with(normalized(&directory)) {
        "a link leads there from the model's directory"
    } else if directories::is_in_temporary(real, Kind::WORKER) {
        "a model can change it"
    } else {
        return Ok(());
    };
    let name = model.name;
    let real = real.display();
    Err(format!(
        "model '{name}': its environment '{real}' cannot be used in a sandbox: {why}. {PERMITTED} \
         the environment"
    ))
}

/// Returns a path without `..`, as it is written.
fn normalized(path: &Path) -> PathBuf {
    let mut normalized = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normalized.pop()),
            Component::CurDir => {}
            part => normalized.push(part),
        }
    }
    normalized
}

/// Returns the interpreter of a virtual or conda environment.
fn in_environment(model: &str, home: PathBuf, by: &'static str) -> Result<Interpreter, String> {
    let candidates = ["bin/python3", "bin/python"].map(|name| home.join(name));
    // Includes dangling links, and paths that cannot be reached, so that the error names them.
    let found = candidates.iter().find(|path| match path.symlink_metadata() {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::PermissionDenied,
    });
    match found {
        Some(path) => Ok(Interpreter { path: path.clone(), by, home: Some(home), archive: None }),
        None => Err(format!(
            "model '{model}': '{}' ({by}) is not a Python environment: it has neither bin/python3 \
             nor bin/python",
            home.display()
        )),
    }
}

fn by_default(program: &Program, model: &str) -> Result<Interpreter, String> {
    let (name, by) = match &program.python {
        Some(path) => (path.as_path(), BY_FLAG),
        None => (Path::new("python3"), BY_PATH),
    };
    match resolve(name) {
        Some(path) => Ok(Interpreter { path, by, home: None, archive: None }),
        None => Err(format!(
            "model '{model}' needs Python, but '{}' is not on the PATH; set --python",
            name.display()
        )),
    }
}

/// Returns the absolute path of an interpreter that is named by its path, or by a name on the PATH.
pub(super) fn resolve(name: &Path) -> Option<PathBuf> {
    if name.as_os_str().as_bytes().contains(&b'/') {
        Some(absolute(name.to_owned()))
    } else {
        on_the_path(name.as_os_str(), env::var_os("PATH").as_deref())
    }
}

/// Returns the first executable of this name on the PATH.
fn on_the_path(name: &OsStr, path: Option<&OsStr>) -> Option<PathBuf> {
    let directories = env::split_paths(path?).filter(|directory| !directory.as_os_str().is_empty());
    directories.map(|directory| absolute(directory.join(name))).find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// Returns an error if the interpreter cannot be executed.
fn check(model: &str, interpreter: &Interpreter) -> Result<(), String> {
    let path = &interpreter.path;
    if is_executable(path) {
        return Ok(());
    }
    let metadata = path.metadata();
    let why = match &metadata {
        Ok(file) if !file.is_file() => "is not a file".to_owned(),
        Ok(_) => "is not executable by this user".to_owned(),
        Err(error) => unreachable_because(error, path),
    };
    Err(format!("model '{model}': the Python interpreter {interpreter} {why}"))
}

/// Returns why a path does not lead to a file, as the end of a sentence.
fn unreachable_because(error: &std::io::Error, path: &Path) -> String {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => {
            let why = "cannot be reached: permission denied for a directory of its path or of its \
                       link target";
            why.to_owned()
        }
        std::io::ErrorKind::NotFound if path.symlink_metadata().is_ok() => {
            "is a dangling link".to_owned()
        }
        std::io::ErrorKind::NotFound => "does not exist".to_owned(),
        _ => format!("cannot be used: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explains_why_an_interpreter_cannot_be_reached() {
        let because =
            |kind: std::io::ErrorKind| unreachable_because(&kind.into(), Path::new("/nonexistent"));
        assert!(because(std::io::ErrorKind::PermissionDenied).contains("permission denied"));
        assert_eq!(because(std::io::ErrorKind::NotFound), "does not exist");
        assert_eq!(
            unreachable_because(&std::io::ErrorKind::NotFound.into(), Path::new("/proc/self/exe")),
            "is a dangling link"
        );
    }

    #[test]
    fn the_path_is_searched_for_executables() {
        let found = on_the_path(OsStr::new("sh"), Some(OsStr::new("/nonexistent::/bin:/usr/bin")));
        assert_eq!(found, Some(PathBuf::from("/bin/sh")));
        assert_eq!(
            on_the_path(OsStr::new("passwd"), Some(OsStr::new("/etc"))),
            None,
            "the file is not executable"
        );
        assert_eq!(on_the_path(OsStr::new("sh"), None), None);
    }
}
