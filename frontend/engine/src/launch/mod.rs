//! Chooses the program that runs a model: the ordinary worker, a Python interpreter, or a file of
//! the backend directory. Reads files and unpacks environments; never starts a worker.
//!
//! The ordinary worker runs `builtin` and `onnxruntime`. The Python package runs `python`, `pytorch`,
//! `sklearn`, `xgboost` and [`Program::deployment_backends`]. Any other name is searched as described
//! in `backends`.

mod activation;
mod archive;
pub(crate) mod backends;
mod conda;
mod interpreter;
pub mod limits;
mod reading;
pub mod sandbox;
mod settings;
pub(crate) mod unpack;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

pub(crate) use archive::Environment;
pub(crate) use interpreter::Interpreter;
pub(crate) use reading::Reading;
pub use settings::{Program, Sandboxes, WorkerLimits};

use backends::Found;
use limits::{Limited, Parameters};
use pharos::model::Provenance;
use pharos::model::text_files::TEXT_BACKEND;
use pharos::wire::fork_server::ONNX_RUNTIME;
use pharos::wire::sandbox::Permissions;
use pharos_os::worker_user::WorkerUser;
use sandbox::Sandbox;

/// The backends of the ordinary worker.
pub(crate) const ORDINARY: [&str; 2] = ["builtin", "onnxruntime"];

/// The backends of the Python package.
const PYTHON: [&str; 6] = ["onnxruntime_genai", "python", "pytorch", "sklearn", "vllm", "xgboost"];

/// Triton's parameter that names a model's environment.
pub(crate) const ENVIRONMENT: &str = "EXECUTION_ENV_PATH";

/// The placeholder for the model's directory in [`ENVIRONMENT`].
const MODEL_DIRECTORY: &str = "$$TRITON_MODEL_DIRECTORY";

/// Returns what a program may use that installs packages for a model whose code came by request, in
/// addition to the directories that it reads and writes; `None` without sandboxes. `python` is the
/// path of its interpreter, or a name on the PATH.
pub fn installer_permissions(
    sandboxes: &Sandboxes,
    user: Option<&WorkerUser>,
    python: &Path,
) -> Option<Permissions> {
    sandbox::of_installer(sandboxes, user, interpreter::resolve(python).as_deref())
}

/// Returns whether there is tract, which runs ONNX models without ONNX Runtime.
pub fn has_tract(program: &Program) -> bool {
    backends::find(program, "", backends::TRACT, &[]).is_ok()
}

/// The model to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model<'a> {
    /// The name for messages.
    pub(crate) name: &'a str,
    pub(crate) backend: &'a str,
    /// The library of a backend of Triton that its configuration names in place of the backend.
    pub(crate) library: Option<&'a str>,
    /// The value of its parameter [`ENVIRONMENT`].
    pub(crate) environment: Option<&'a str>,
    /// The value of its parameter [`pharos::model::SANDBOX`].
    pub(crate) sandbox: Option<&'a str>,
    /// The sources of it and of its code.
    pub(crate) provenance: Provenance,
    /// The values of its parameters for limits.
    pub(crate) limits: Parameters<'a>,
    /// The model's directory.
    pub(crate) directory: &'a Path,
    /// The directory of the version.
    pub(crate) version: &'a Path,
}

/// The command that starts the worker of a model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Launch {
    pub(crate) executable: PathBuf,
    /// Arguments before the worker's own.
    pub(crate) arguments: Vec<OsString>,
    /// Variables to set or, without a value, to remove.
    pub(crate) variables: Vec<(&'static str, Option<OsString>)>,
    /// Further variables to remove.
    pub(crate) hidden: Vec<OsString>,
    /// The interpreter, if the executable is one.
    pub(crate) interpreter: Option<Interpreter>,
    /// The modules that a fork server loads for it; `None` if it is not started by one.
    pub(crate) preload: Option<Vec<String>>,
    /// The user of the process; `None` for the user of this process.
    pub(crate) user: Option<Arc<WorkerUser>>,
    /// The restrictions of the process.
    pub(crate) sandbox: Option<Sandbox>,
    /// The limits of the process.
    pub(crate) limits: Option<Limited>,
    /// Keeps the unpacked environment on disk.
    _unpacked: Option<Arc<Environment>>,
}

impl Launch {
    /// Returns the same program and environment with other arguments before the worker's own.
    pub(crate) fn with_arguments(&self, arguments: Vec<OsString>) -> Self {
        Self { arguments, ..self.clone() }
    }

    /// Returns the same program, started as a process and not as the copy of another one.
    pub(crate) fn without_fork_server(&self) -> Self {
        Self { preload: None, ..self.clone() }
    }

    /// Returns whether the process inherits this variable from the environment of this one.
    pub(crate) fn inherits(&self, name: &str) -> bool {
        !self.hidden.iter().any(|hidden| hidden == name) && std::env::var_os(name).is_some()
    }

    /// Returns the command with its environment. In a sandbox, it may write its directory for
    /// temporary files, which it finds in the usual variable.
    pub(crate) fn command(&self, temporary: Option<&Path>) -> Command {
        let mut command =
            Command::new(self.sandbox.as_ref().map_or(&self.executable, |sandbox| &sandbox.worker));
        // First: the program gets its variables also if they have hidden names.
        for name in &self.hidden {
            command.env_remove(name);
        }
        if let Some(user) = &self.user {
            user.run(&mut command);
        }
        match &self.sandbox {
            Some(sandbox) => {
                let mut variables = self.variables.clone();
                variables
                    .extend(temporary.into_iter().flat_map(|directory| self.temporary(directory)));
                command.args(sandbox.arguments(&self.executable, temporary, variables));
            }
            None => {
                for (name, value) in &self.variables {
                    match value {
                        Some(value) => command.env(name, value),
                        None => command.env_remove(name),
                    };
                }
            }
        }
        command.args(&self.arguments);
        command
    }

    /// Returns the variables of a process that may write only this directory: the directory of
    /// temporary files, and the directories of caches that the process would not inherit.
    fn temporary(&self, directory: &Path) -> Vec<(&'static str, Option<OsString>)> {
        let mut variables = vec![(TEMPORARY, Some(directory.as_os_str().to_owned()))];
        for (name, folder) in CACHES {
            let is_inherited = std::env::var_os(name).is_some()
                && !self.hidden.iter().any(|hidden| hidden == name);
            if !is_inherited {
                variables.push((name, Some(directory.join(folder).into_os_string())));
            }
        }
        variables
    }
}

/// Chooses the program for a model. Blocks, for minutes if it unpacks an environment.
///
/// # Errors
/// The program is missing or cannot be used. The text names the model, the paths that were checked,
/// and a remedy.
pub(crate) fn choose(
    program: &Program,
    model: &Model<'_>,
    reading: &Reading,
) -> Result<Launch, String> {
    if let Some(user) = &program.user {
        grant_files(user, model)?;
    }
    let mut launch = of_backend(program, model, reading)?;
    launch.variables.push(without_telemetry(std::env::var_os(TELEMETRY)));
    let sandbox = sandbox::of(program, model)?
        .map(|sandbox| permitted(sandbox, program, model, &launch))
        .transpose()?;
    let hidden = program.hidden.clone();
    let user = program.user.clone();
    Ok(Launch { hidden, user, sandbox, limits: limits::of(program, model)?, ..launch })
}

/// Lets the user of a model's programs read its files, if this server has made them: files of a
/// load request, and copies from an object store.
fn grant_files(user: &WorkerUser, model: &Model<'_>) -> Result<(), String> {
    for path in [model.directory, model.version] {
        user.grant_read(path).map_err(|error| {
            format!(
                "model '{}': the user '{}' cannot be given its files: {error}",
                model.name,
                user.name()
            )
        })?;
    }
    Ok(())
}

/// Adds what the program itself consists of. What the model has chosen gets no rights that its own
/// files do not have.
///
/// # Errors
/// The model's Python is in a place that it may not read.
fn permitted(
    mut sandbox: Sandbox,
    program: &Program,
    model: &Model<'_>,
    launch: &Launch,
) -> Result<Sandbox, String> {
    let backends: Vec<PathBuf> = program.backends.iter().cloned().map(backends::absolute).collect();
    for (name, value) in &launch.variables {
        let value = value.clone().unwrap_or_default();
        match *name {
            // The libraries of an environment are the model's.
            LIBRARY_PATH if launch.interpreter.is_none() => {
                sandbox.permit(std::env::split_paths(&value))
            }
            LIBRARY | PYTHON_BACKEND => {
                if let Some(directory) = Path::new(&value).parent()
                    && backends.iter().any(|of_operator| directory.starts_with(of_operator))
                {
                    sandbox.permit([directory.to_owned()]);
                }
            }
            _ => {}
        }
    }
    match &launch.interpreter {
        Some(interpreter) => interpreter::permit(&mut sandbox, program, model, interpreter)?,
        None => {
            // Beside an executable of a backend, its libraries.
            let is_backend = launch.executable != sandbox.worker;
            let beside = launch.executable.parent().filter(|_| is_backend).map(Path::to_owned);
            sandbox.permit(beside.into_iter().chain([launch.executable.clone()]));
        }
    }
    Ok(sandbox)
}

fn of_backend(program: &Program, model: &Model<'_>, reading: &Reading) -> Result<Launch, String> {
    let places = [model.version, model.directory];
    if let Some(library) = model.library {
        let found = backends::named_library(program, model.name, model.backend, library, &places)?;
        return Ok(with_library(program, found.path()));
    }
    if ORDINARY.contains(&model.backend) {
        if model.backend != "onnxruntime" {
            return Ok(native(program, program.worker.clone(), Vec::new()));
        }
        if program.onnxruntime.is_none() {
            return Err(format!("model '{}': {NO_ONNX_RUNTIME}", model.name));
        }
        let launch = native(program, program.worker.clone(), with_packages(program));
        let modules = vec![ONNX_RUNTIME.to_owned()];
        return Ok(Launch { preload: launch.preload.map(|_| modules), ..launch });
    }
    if program.is_python(model.backend) {
        return python(program, model, reading, Vec::new());
    }
    match backends::find(program, model.name, model.backend, &places)? {
        Found::Library(path) | Found::Triton(path) => Ok(with_library(program, &path)),
        // tract computes the graphs of text models too.
        Found::Worker(_) if model.backend == TEXT_BACKEND && program.onnxruntime.is_none() => {
            match backends::find(program, model.name, backends::TRACT, &[]) {
                Ok(Found::Worker(path)) => Ok(native(program, path, Vec::new())),
                _ => Err(format!("model '{}': {NO_ONNX_RUNTIME}", model.name)),
            }
        }
        Found::Worker(path) if model.backend == TEXT_BACKEND => {
            Ok(native(program, path, with_packages(program)))
        }
        Found::Worker(path) => Ok(native(program, path, Vec::new())),
        Found::Python(path) => {
            python(program, model, reading, vec![(PYTHON_BACKEND, Some(path.into_os_string()))])
        }
    }
}

/// Why ONNX models cannot run, and what to do.
pub const NO_ONNX_RUNTIME: &str = "ONNX models need ONNX Runtime: `pip install onnxruntime` for the \
                                   `python3` on the server's PATH, or --onnxruntime-library; or, in \
                                   the sources of the server, `make tract`";

/// Returns the ordinary worker with the library of a backend.
fn with_library(program: &Program, path: &Path) -> Launch {
    let library = (LIBRARY, Some(path.as_os_str().to_owned()));
    native(program, program.worker.clone(), vec![library])
}

type Variables = Vec<(&'static str, Option<OsString>)>;

fn native(program: &Program, executable: PathBuf, mut variables: Variables) -> Launch {
    let library = program.onnxruntime.as_ref().map(|path| path.clone().into_os_string());
    variables.push(("ORT_DYLIB_PATH", library));
    Launch { executable, variables, preload: program.forks.then(Vec::new), ..Launch::default() }
}

/// Returns the library path that ONNX Runtime's GPU providers need to find their libraries; empty
/// without such libraries.
fn with_packages(program: &Program) -> Variables {
    let folders = program.onnxruntime.as_deref().map(of_packages).unwrap_or_default();
    if folders.is_empty() {
        return Vec::new();
    }
    let own = std::env::var_os(LIBRARY_PATH).filter(|own| !own.is_empty());
    let all = own.iter().flat_map(std::env::split_paths).chain(folders);
    std::env::join_paths(all).ok().map(|all| (LIBRARY_PATH, Some(all))).into_iter().collect()
}

/// The variables that name a backend's shared library or its Python code.
const LIBRARY: &str = "PHAROS_BACKEND_LIBRARY";
const PYTHON_BACKEND: &str = "PHAROS_PYTHON_BACKEND";

/// The variable with which ONNX Runtime from version 1.29 on sends nothing to its maker. Without
/// it, the library writes an identifier of the device and a database to the user's cache directory,
/// and sends events, the first before a program can forbid it by a call. See `docs/Privacy.md` of
/// ONNX Runtime.
const TELEMETRY: &str = "ORT_DISABLE_TELEMETRY";

/// Returns the variable that switches it off, unless the environment of this process sets it.
fn without_telemetry(own: Option<OsString>) -> (&'static str, Option<OsString>) {
    (TELEMETRY, Some(own.unwrap_or_else(|| "1".into())))
}

/// The variable with the directory for temporary files.
const TEMPORARY: &str = "TMPDIR";

/// The variables with the directories where libraries keep the code that they compile for a device
/// or for the processor, each with the name of a directory to use in their place. By default, these
/// directories are in the home directory, and CuPy and Numba fail if they cannot write there.
const CACHES: [(&str, &str); 4] = [
    ("CUDA_CACHE_PATH", "cuda-cache"),
    ("CUPY_CACHE_DIR", "cupy-cache"),
    ("NUMBA_CACHE_DIR", "numba-cache"),
    ("TRITON_CACHE_DIR", "triton-cache"),
];

/// The variable with the search path of the dynamic loader.
const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";

/// Returns the folders where Python packages install the libraries of CUDA, cuDNN and TensorRT for
/// ONNX Runtime's GPU providers, if the library belongs to such a package: `nvidia/cu13/lib`,
/// `nvidia/cudnn/lib`, `tensorrt_libs` beside `onnxruntime`. ONNX Runtime does not search there; in
/// Python, `import torch` or `preload_dlls()` loads them.
fn of_packages(library: &Path) -> Vec<PathBuf> {
    let packages =
        library.ancestors().nth(3).filter(|_| library.with_file_name(CUDA_PROVIDER).is_file());
    let Some(packages) = packages else { return Vec::new() };
    let parts = std::fs::read_dir(packages.join("nvidia")).into_iter().flatten();
    let mut folders: Vec<PathBuf> =
        parts.filter_map(|part| Some(part.ok()?.path().join("lib"))).collect();
    folders.sort();
    folders.push(packages.join("tensorrt_libs"));
    folders.retain(|folder| folder.is_dir());
    folders
}

fn python(
    program: &Program,
    model: &Model<'_>,
    reading: &Reading,
    mut variables: Variables,
) -> Result<Launch, String> {
    let named = interpreter::find(program, model, reading)?;
    let interpreter = named.interpreter;
    let unpacked = named.unpacked;
    if let Some(home) = &interpreter.home {
        variables.extend(activation::variables(home));
    }
    Ok(Launch {
        executable: interpreter.path.clone(),
        arguments: vec!["-m".into(), "pharos_worker".into()],
        variables,
        interpreter: Some(interpreter),
        preload: program.forks.then(|| program.python_preload.clone()),
        _unpacked: unpacked,
        ..Launch::default()
    })
}

/// The file of ONNX Runtime's CUDA provider, beside its library.
const CUDA_PROVIDER: &str = "libonnxruntime_providers_cuda.so";

/// Returns why ONNX Runtime cannot run models on GPUs, as the end of a sentence; `None` if it can.
pub(crate) fn no_cuda_provider(program: &Program) -> Option<String> {
    let advice = "`pip install onnxruntime-gpu[cuda,cudnn]` installs it";
    let Some(library) = &program.onnxruntime else {
        return Some(format!(
            "ONNX Runtime is not installed, and tract supports only processors; {advice}"
        ));
    };
    let provider = library.with_file_name(CUDA_PROVIDER);
    let is_missing = !provider.is_file();
    is_missing.then(|| {
        format!("ONNX Runtime has no CUDA provider: '{}' is missing; {advice}", provider.display())
    })
}

/// Returns the files outside the model's directory that determine how it runs: its environment and
/// its backend.
pub(crate) fn outside(program: &Program, model: &Model<'_>) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        model.environment.map(|path| interpreter::named_path(path, model)).into_iter().collect();
    let places = [model.version, model.directory];
    let found = match model.library {
        Some(library) => {
            backends::named_library(program, model.name, model.backend, library, &places)
        }
        None if ORDINARY.contains(&model.backend) || program.is_python(model.backend) => {
            return files;
        }
        None => backends::find(program, model.name, model.backend, &places),
    };
    files.extend(found.ok().map(|found| found.path().to_owned()));
    files
}

#[cfg(test)]
#[path = "tests.rs"]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
