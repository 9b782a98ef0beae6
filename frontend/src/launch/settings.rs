//! What the server was told about the programs that run models.

use std::ffi::OsString;
use std::path::PathBuf;

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
    /// Where environments are unpacked.
    pub environments: PathBuf,
    /// Variables of this process's environment that workers do not get.
    pub hidden: Vec<OsString>,
}

impl Program {
    /// The user's cache folder, or one of this user's own among temporary files.
    pub fn default_environments() -> PathBuf {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache =
            set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache"))).filter(|path| path.is_absolute());
        let own = || std::env::temp_dir().join(format!("pharos-{}", rustix::process::geteuid().as_raw()));
        cache.map_or_else(own, |cache| cache.join("pharos")).join("environments")
    }
}
