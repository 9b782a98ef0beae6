//! Settings of the programs that run models.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use pharos::model::SandboxMode;
use pharos_os::control_groups::{ControlGroups, Limits};
use pharos_os::worker_user::WorkerUser;

use super::PYTHON;

/// Settings of the programs that run models.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// The `pharos-worker` executable.
    pub worker: PathBuf,
    /// ONNX Runtime's library, if there is one.
    pub onnxruntime: Option<PathBuf>,
    /// The Python of models without their own (`--python`); `None` for `python3` of the `PATH`.
    pub python: Option<PathBuf>,
    /// Whether fork servers start the workers.
    pub forks: bool,
    /// The modules that fork servers of Python workers import.
    pub python_preload: Vec<String>,
    /// The directories of further backends: first the directory that the operator has set, then the
    /// directory of this installation.
    pub backends: Vec<PathBuf>,
    /// Backends of the Python package that only some deployments use, in addition to the general
    /// ones.
    pub deployment_backends: Vec<&'static str>,
    /// The folder where environments are unpacked.
    pub environments: PathBuf,
    /// Environment variables of this process that workers do not inherit.
    pub hidden: Vec<OsString>,
    /// The user of these programs; `None` for the user of this process.
    pub user: Option<Arc<WorkerUser>>,
    /// The sandboxes of these programs.
    pub sandboxes: Sandboxes,
    /// The limits of their processes.
    pub limits: WorkerLimits,
}

impl Program {
    /// Returns the backends of the Python package, sorted by name.
    pub(crate) fn python_backends(&self) -> Vec<&'static str> {
        let mut all: Vec<&str> = PYTHON.iter().chain(&self.deployment_backends).copied().collect();
        all.sort_unstable();
        all
    }

    /// Returns whether the Python package has this backend.
    pub(crate) fn is_python(&self, backend: &str) -> bool {
        PYTHON.contains(&backend) || self.deployment_backends.contains(&backend)
    }

    /// Returns the default folder of environments: for workers of another user, a folder of the
    /// system, because these workers cannot reach the folders of this process's user; else a folder
    /// in the user's cache folder, or a per-user folder of the temporary directory.
    pub fn default_environments(user: Option<&WorkerUser>) -> PathBuf {
        if user.is_some() {
            return PathBuf::from("/var/cache/pharos");
        }
        let cache = path_in("XDG_CACHE_HOME").or_else(|| Some(path_in("HOME")?.join(".cache")));
        let folder = match cache.filter(|path| path.is_absolute()) {
            Some(cache) => cache.join("pharos"),
            None => {
                std::env::temp_dir().join(format!("pharos-{}", rustix::process::geteuid().as_raw()))
            }
        };
        folder.join("environments")
    }
}

fn path_in(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The limits of a server's workers.
#[derive(Clone, Debug, Default)]
pub struct WorkerLimits {
    /// The limits of each worker with the processes that it starts. Models may have lower ones.
    pub limits: Limits,
    /// The control groups that enforce them.
    pub groups: Arc<ControlGroups>,
}

/// The sandboxes of a server.
#[derive(Clone, Debug, Default)]
pub struct Sandboxes {
    /// When there is a sandbox.
    pub mode: SandboxMode,
    /// Further paths that models may read.
    pub read: Vec<PathBuf>,
    /// Further paths that models may read and write.
    pub write: Vec<PathBuf>,
}
