//! What the server was told about the programs that run models.

use std::ffi::OsString;
use std::path::PathBuf;

use super::PYTHON;

/// How workers are started.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// The `pharos-worker` executable.
    pub worker: PathBuf,
    /// ONNX Runtime's library, if there is one.
    pub onnxruntime: Option<PathBuf>,
    /// The Python of models that bring none (`--python`); `python3` of the `PATH` if it is not given.
    pub python: Option<PathBuf>,
    /// Where further backends are, if anywhere.
    pub backends: Option<PathBuf>,
    /// Backends of the Python package that only some deployments use, beside the general ones.
    pub deployment_backends: Vec<&'static str>,
    /// Where environments are unpacked.
    pub environments: PathBuf,
    /// Variables of this process's environment that workers do not get.
    pub hidden: Vec<OsString>,
}

impl Program {
    /// The backends of the Python package, in the order of their names.
    pub(crate) fn python_backends(&self) -> Vec<&'static str> {
        let mut all: Vec<&str> = PYTHON.iter().chain(&self.deployment_backends).copied().collect();
        all.sort_unstable();
        all
    }

    /// Whether the Python package has this backend.
    pub(crate) fn is_python(&self, backend: &str) -> bool {
        PYTHON.contains(&backend) || self.deployment_backends.contains(&backend)
    }

    /// The user's cache folder, or one of this user's own among temporary files.
    pub fn default_environments() -> PathBuf {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache =
            set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache"))).filter(|path| path.is_absolute());
        let own = || std::env::temp_dir().join(format!("pharos-{}", rustix::process::geteuid().as_raw()));
        cache.map_or_else(own, |cache| cache.join("pharos")).join("environments")
    }
}
