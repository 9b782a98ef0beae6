//! Chooses the program that runs a model: the ordinary worker, a Python interpreter, or something in the backend directory.
//! Looks at files, unpacks environments, and starts no worker itself.
//!
//! In this order: `builtin`, `onnxruntime` and `tract` are the ordinary worker's; `python`, `pytorch`, `sklearn`, `xgboost` and
//! [`Program::deployment_backends`] need the Python package; any other name is looked up as `backends` says.

mod activation;
mod archive;
pub(crate) mod backends;
mod conda;
mod interpreter;
mod settings;
mod unpack;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) use archive::Environment;
pub(crate) use interpreter::Interpreter;
pub use settings::Program;

use backends::Found;

/// The backends of the ordinary worker.
pub(crate) const ORDINARY: [&str; 3] = ["builtin", "onnxruntime", "tract"];

/// The backends of the Python package.
const PYTHON: [&str; 4] = ["python", "pytorch", "sklearn", "xgboost"];

/// Triton's parameter that names a model's environment.
pub(crate) const ENVIRONMENT: &str = "EXECUTION_ENV_PATH";

/// What stands for the model's directory in [`ENVIRONMENT`].
const MODEL_DIRECTORY: &str = "$$TRITON_MODEL_DIRECTORY";

/// What is asked to be run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model<'a> {
    /// For messages.
    pub(crate) name: &'a str,
    pub(crate) backend: &'a str,
    /// Its parameter [`ENVIRONMENT`].
    pub(crate) environment: Option<&'a str>,
    /// The model's directory.
    pub(crate) directory: &'a Path,
    /// The directory of the version.
    pub(crate) version: &'a Path,
}

/// How the worker of a model is started.
#[derive(Clone, Debug, Default)]
pub(crate) struct Launch {
    pub(crate) executable: PathBuf,
    /// What stands before the worker's own arguments.
    pub(crate) arguments: Vec<OsString>,
    /// Variables that are set or, without a value, removed.
    pub(crate) variables: Vec<(&'static str, Option<OsString>)>,
    /// Further variables that are removed.
    pub(crate) hidden: Vec<OsString>,
    /// If the executable is one.
    pub(crate) interpreter: Option<Interpreter>,
    /// What was unpacked for it stays as long as this.
    _unpacked: Option<Arc<Environment>>,
}

impl Launch {
    /// The same program in the same environment with other arguments before the worker's own.
    pub(crate) fn with_arguments(&self, arguments: Vec<OsString>) -> Self {
        Self { arguments, ..self.clone() }
    }
}

/// The program for a model. Blocks, for minutes if an environment is to be unpacked.
///
/// # Errors
/// There is none, or it cannot be used; the text names the model, what was looked at, and what to do.
pub(crate) fn choose(program: &Program, model: &Model<'_>) -> Result<Launch, String> {
    let launch = of_backend(program, model)?;
    Ok(Launch { hidden: program.hidden.clone(), ..launch })
}

fn of_backend(program: &Program, model: &Model<'_>) -> Result<Launch, String> {
    if ORDINARY.contains(&model.backend) {
        let variables = if model.backend == "onnxruntime" { with_packages(program) } else { Vec::new() };
        return Ok(native(program, program.worker.clone(), variables));
    }
    if program.is_python(model.backend) {
        return python(program, model, Vec::new());
    }
    let places = [model.version, model.directory];
    match backends::find(program, (model.name, model.backend), &places)? {
        Found::Library(path) => {
            let library = ("PHAROS_BACKEND_LIBRARY", Some(path.into_os_string()));
            Ok(native(program, program.worker.clone(), vec![library]))
        }
        Found::Worker(path) => Ok(native(program, path, Vec::new())),
        Found::Python(path) => python(program, model, vec![("PHAROS_PYTHON_BACKEND", Some(path.into_os_string()))]),
    }
}

type Variables = Vec<(&'static str, Option<OsString>)>;

fn native(program: &Program, executable: PathBuf, mut variables: Variables) -> Launch {
    let library = program.onnxruntime.as_ref().map(|path| path.clone().into_os_string());
    variables.push(("ORT_DYLIB_PATH", library));
    Launch { executable, variables, ..Launch::default() }
}

/// What ONNX Runtime's part for GPUs needs to find its libraries; nothing if there is none.
fn with_packages(program: &Program) -> Variables {
    let folders = program.onnxruntime.as_deref().map(of_packages).unwrap_or_default();
    if folders.is_empty() {
        return Vec::new();
    }
    let own = std::env::var_os(LIBRARY_PATH).filter(|own| !own.is_empty());
    let all = own.iter().flat_map(std::env::split_paths).chain(folders);
    std::env::join_paths(all).ok().map(|all| (LIBRARY_PATH, Some(all))).into_iter().collect()
}

/// Where the loader looks for libraries.
const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";

/// The folders in which Python's packages have the libraries of CUDA, cuDNN and TensorRT that ONNX Runtime's part for GPUs
/// needs, if it is one of these packages: `nvidia/cu13/lib`, `nvidia/cudnn/lib`, `tensorrt_libs` beside `onnxruntime`. It does
/// not look there itself; in Python, `import torch` or `preload_dlls()` finds them for it.
fn of_packages(library: &Path) -> Vec<PathBuf> {
    let packages = library.ancestors().nth(3).filter(|_| library.with_file_name(CUDA_PROVIDER).is_file());
    let Some(packages) = packages else { return Vec::new() };
    let parts = std::fs::read_dir(packages.join("nvidia")).into_iter().flatten();
    let mut folders: Vec<PathBuf> = parts.filter_map(|part| Some(part.ok()?.path().join("lib"))).collect();
    folders.sort();
    folders.push(packages.join("tensorrt_libs"));
    folders.retain(|folder| folder.is_dir());
    folders
}

fn python(program: &Program, model: &Model<'_>, mut variables: Variables) -> Result<Launch, String> {
    let named = interpreter::find(program, model)?;
    let (interpreter, unpacked) = (named.interpreter, named.unpacked);
    if let Some(home) = &interpreter.home {
        variables.extend(activation::variables(home));
    }
    Ok(Launch {
        executable: interpreter.path.clone(),
        arguments: vec!["-m".into(), "pharos_worker".into()],
        variables,
        hidden: Vec::new(),
        interpreter: Some(interpreter),
        _unpacked: unpacked,
    })
}

/// ONNX Runtime's part for CUDA, beside its library.
const CUDA_PROVIDER: &str = "libonnxruntime_providers_cuda.so";

/// Why models of ONNX Runtime cannot run on GPUs, as the end of a sentence; `None` if they can.
pub(crate) fn no_cuda_provider(program: &Program) -> Option<String> {
    let advice = "`pip install onnxruntime-gpu` brings it";
    let Some(library) = &program.onnxruntime else {
        return Some(format!(
            "ONNX Runtime is not here, and the embedded runtime computes on processors alone; {advice}"
        ));
    };
    let provider = library.with_file_name(CUDA_PROVIDER);
    let missing = || format!("ONNX Runtime has no part for CUDA here: '{}' is missing; {advice}", provider.display());
    (!provider.is_file()).then(missing)
}

/// The files outside the model's directory that decide how it runs: its environment, its backend.
pub(crate) fn outside(program: &Program, model: &Model<'_>) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        model.environment.map(|path| interpreter::named_path(path, model)).into_iter().collect();
    if !ORDINARY.contains(&model.backend)
        && !program.is_python(model.backend)
        && let Ok(found) = backends::find(program, (model.name, model.backend), &[model.version, model.directory])
    {
        files.push(found.path().to_owned());
    }
    files
}

#[cfg(test)]
#[path = "tests.rs"]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
