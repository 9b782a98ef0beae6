//! The flags of the processes that run models, and of their CPU affinity.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgAction, Args};
use pharos::model::SandboxMode;
use pharos_engine::launch::{Sandboxes, limits};
use pharos_os::control_groups::Limits;
use pharos_os::worker_user::WorkerUser;
use pharos_telemetry::system::{HostPolicy, Processors, cores};
use regex::Regex;

use super::{WORKERS, boolean, positive_seconds, seconds, whole};

/// The processes that run models.
#[derive(Clone, Debug, Args)]
pub struct Workers {
    /// Worker executable [default: pharos-worker next to this executable]
    #[arg(long, value_name = "FILE", env = "PHAROS_WORKER_BINARY", help_heading = WORKERS)]
    pub worker_binary: Option<PathBuf>,
    /// ONNX Runtime library [default: ORT_DYLIB_PATH, else the library of the Python on the PATH;
    /// without one, tract executes ONNX models, if it is installed]
    #[arg(long, value_name = "FILE", env = "PHAROS_ONNXRUNTIME_LIBRARY", help_heading = WORKERS)]
    pub onnxruntime_library: Option<PathBuf>,
    /// Maximum seconds for a worker to load its model
    #[arg(
        long, value_name = "SECONDS", default_value = "300",
        env = "PHAROS_WORKER_START_TIMEOUT_SECS", value_parser = positive_seconds,
        help_heading = WORKERS
    )]
    pub worker_start_timeout_secs: Duration,
    /// Maximum seconds between restarts of a worker that fails repeatedly; the delay starts at 0.1
    /// s and doubles
    #[arg(
        long, value_name = "SECONDS", default_value = "30", env = "PHAROS_WORKER_MAX_BACKOFF_SECS",
        value_parser = positive_seconds, help_heading = WORKERS
    )]
    pub worker_max_backoff_secs: Duration,
    /// Maximum seconds that a request waits while all instances of its model restart
    #[arg(
        long, value_name = "SECONDS", default_value = "60", env = "PHAROS_WORKER_MAX_WAIT_SECS",
        value_parser = seconds, help_heading = WORKERS
    )]
    pub worker_max_wait_secs: Duration,
    /// Maximum seconds for a worker to execute one batch, including requests that it answers after
    /// the batch (streams have their timeouts); 0 for no limit
    #[arg(
        long, value_name = "SECONDS", default_value = "0",
        env = "PHAROS_WORKER_EXECUTION_TIMEOUT_SECS", value_parser = seconds,
        help_heading = WORKERS
    )]
    pub worker_execution_timeout_secs: Duration,
    /// Compute threads of one instance [default: the number of cores divided by the number of
    /// active instances of the model version]
    #[arg(
        long, value_name = "N", env = "PHAROS_WORKER_THREADS", value_parser = whole(1..=1024u32),
        help_heading = WORKERS
    )]
    pub worker_threads: Option<u32>,
    /// Maximum microseconds for which a worker polls for its next batch before it sleeps, if
    /// batches have followed each other this fast; 0 disables polling [default: 200; 0 on one
    /// processor or under a CPU quota]
    #[arg(
        long, value_name = "MICROSECONDS", env = "PHAROS_WORKER_SPIN_US",
        value_parser = whole(0..=10_000u32), help_heading = WORKERS
    )]
    pub worker_spin_us: Option<u32>,
    /// Python interpreter for models without their own; requires the package pharos-worker
    /// [default: python3 on the PATH]
    #[arg(long, value_name = "FILE", env = "PHAROS_PYTHON", help_heading = WORKERS)]
    pub python: Option<PathBuf>,
    /// Start workers as copies of a process that has loaded the runtime of their backend; false to
    /// start each one as a program
    #[arg(
        id = "worker-fork", long = "worker-fork", value_name = "BOOL", default_value = "true",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_WORKER_FORK", value_parser = boolean, help_heading = WORKERS
    )]
    pub worker_fork: bool,
    /// Modules that Python processes import before they start workers as copies of themselves
    /// (--worker-fork), separated by commas
    #[arg(
        long, value_name = "MODULES", default_value = "numpy,numpy.random",
        env = "PHAROS_PYTHON_PRELOAD", value_parser = preload, help_heading = WORKERS
    )]
    pub python_preload: Preload,
    /// Regular expression of further environment variables that workers inherit; it must match the
    /// whole name. They inherit those of the locale, Python, thread pools, GPUs and machine
    /// learning frameworks, but no credentials
    #[arg(
        long, value_name = "REGEX", env = "PHAROS_WORKER_VARIABLES", value_parser = whole_name,
        help_heading = WORKERS
    )]
    pub worker_variables: Option<Regex>,
    /// Regular expression of environment variables to hide from workers; it must match the whole
    /// name
    #[arg(
        long, value_name = "REGEX", env = "PHAROS_WORKER_HIDDEN_VARIABLES",
        value_parser = whole_name, help_heading = WORKERS
    )]
    pub worker_hidden_variables: Option<Regex>,
    /// User, and optionally group, that runs models, by name or number; the server must have the
    /// rights of root, and the user must be able to read the models [default: the user of the
    /// server]
    #[arg(
        long, value_name = "USER[:GROUP]", env = "PHAROS_WORKER_USER", value_parser = user,
        help_heading = WORKERS
    )]
    pub worker_user: Option<Arc<WorkerUser>>,
    /// Run models in a sandbox: they may read only their own files and the system's libraries,
    /// write only a temporary directory, open no network connections, and reach no other
    /// processes: off (only models with the parameter sandbox), uploads (in addition models whose
    /// code came by request, as far as the kernel supports it), auto (all, as far as the kernel
    /// supports it), or on (all)
    #[arg(
        long, value_name = "WHEN", default_value = "uploads", env = "PHAROS_WORKER_SANDBOX",
        value_parser = sandbox, help_heading = WORKERS
    )]
    pub worker_sandbox: SandboxMode,
    /// Further file or directory that models in a sandbox may read; may be repeated, and `:`
    /// separates several
    #[arg(
        long, value_name = "PATH", env = "PHAROS_WORKER_SANDBOX_READ", value_delimiter = ':',
        help_heading = WORKERS
    )]
    pub worker_sandbox_read: Vec<PathBuf>,
    /// Further file or directory that models in a sandbox may read and write; may be repeated, and
    /// `:` separates several
    #[arg(
        long, value_name = "PATH", env = "PHAROS_WORKER_SANDBOX_WRITE", value_delimiter = ':',
        help_heading = WORKERS
    )]
    pub worker_sandbox_write: Vec<PathBuf>,
    /// Maximum bytes of memory of one worker with the processes it starts; the kernel kills them
    /// if they need more. Needs a delegated control group (version 2). A model's parameter
    /// memory_limit can be lower
    #[arg(
        long, value_name = "BYTES", env = "PHAROS_WORKER_MEMORY_LIMIT", value_parser = memory,
        help_heading = WORKERS
    )]
    pub worker_memory_limit: Option<u64>,
    /// Maximum number of processes and threads of one worker; needs a delegated control group. A
    /// model's parameter task_limit can be lower
    #[arg(
        long, value_name = "N", env = "PHAROS_WORKER_TASK_LIMIT", value_parser = tasks,
        help_heading = WORKERS
    )]
    pub worker_task_limit: Option<u32>,
    /// Maximum processor time of one worker with the processes it starts, as a number of
    /// processors (1.5); needs a delegated control group. A model's parameter cpu_limit can be
    /// lower
    #[arg(
        long, value_name = "PROCESSORS", env = "PHAROS_WORKER_CPU_LIMIT", value_parser = processors,
        help_heading = WORKERS
    )]
    pub worker_cpu_limit: Option<f64>,
    /// Directory of additional backends: DIR/NAME/libpharos_NAME.so, DIR/NAME/pharos-worker-NAME,
    /// DIR/NAME/model.py or DIR/NAME/libtriton_NAME.so (a backend of Triton). The backends of the installation are available too; their directory is
    /// backends next to this executable, or ../lib/pharos/backends from there
    #[arg(long, value_name = "DIR", env = "PHAROS_BACKEND_DIRECTORY", help_heading = WORKERS)]
    pub backend_directory: Option<PathBuf>,
    /// Directory for unpacked archives of EXECUTION_ENV_PATH, one copy for all models; copies
    /// unused for two weeks are removed [default: pharos/environments in the user's cache
    /// directory; /var/cache/pharos with --worker-user]
    #[arg(
        long, value_name = "DIR", env = "PHAROS_ENVIRONMENT_CACHE_DIRECTORY",
        help_heading = WORKERS
    )]
    pub environment_cache_directory: Option<PathBuf>,
}

impl Workers {
    /// Returns the sandboxes of models.
    pub fn sandboxes(&self) -> Sandboxes {
        Sandboxes {
            mode: self.worker_sandbox,
            read: self.worker_sandbox_read.clone(),
            write: self.worker_sandbox_write.clone(),
        }
    }

    /// Returns the limits of each worker.
    pub fn limits(&self) -> Limits {
        Limits {
            memory: self.worker_memory_limit,
            tasks: self.worker_task_limit,
            processors: self.worker_cpu_limit,
        }
    }
}

/// The CPU affinity of instances.
#[derive(Clone, Debug, Args)]
pub struct HostPolicies {
    /// Cores for the instances of each instance_group with this host_policy: NAME,cpu-cores=LIST
    /// (for example 0-3,8) or NAME,numa-node=N (the cores of that node); cpu-cores takes
    /// precedence. Groups without host_policy have the policy cpu, gpu_N (N: the GPU) or model.
    /// May be repeated, or given as a list separated by ';'
    #[arg(
        id = "host-policy", long = "host-policy", value_name = "NAME,SETTING=VALUE",
        env = "PHAROS_HOST_POLICY", value_parser = host_policy, value_delimiter = ';',
        help_heading = WORKERS
    )]
    pub policies: Vec<HostPolicy>,
}

fn host_policy(text: &str) -> Result<HostPolicy, String> {
    let form = "expected NAME,cpu-cores=LIST or NAME,numa-node=N, for example cpu,cpu-cores=0-3,8";
    let (name, setting) = text.split_once(',').filter(|(name, _)| !name.is_empty()).ok_or(form)?;
    let setting = match setting.split_once('=').ok_or(form)? {
        ("numa-node", node) => Processors::Node(node.parse().map_err(|_| form)?),
        ("cpu-cores", list) => Processors::Cores(cores(list).ok_or(form)?),
        (other, _) => return Err(format!("unknown setting '{other}': {form}")),
    };
    Ok(HostPolicy { name: name.to_owned(), processors: setting })
}

/// The modules that fork servers of Python workers import.
#[derive(Clone, Debug)]
pub struct Preload(pub Vec<String>);

fn preload(text: &str) -> Result<Preload, String> {
    let names: Vec<&str> = text.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    match names.iter().find(|name| !is_module(name)) {
        Some(name) => Err(format!(
            "'{name}' is not the name of a Python module; allowed are names separated by commas"
        )),
        None => Ok(Preload(names.into_iter().map(str::to_owned).collect())),
    }
}

fn is_module(name: &str) -> bool {
    name.split('.')
        .all(|word| !word.is_empty() && !word.starts_with(|first: char| first.is_ascii_digit()))
        && name.chars().all(|letter| letter.is_alphanumeric() || matches!(letter, '_' | '.'))
}

fn user(text: &str) -> Result<Arc<WorkerUser>, String> {
    WorkerUser::find(text).map(Arc::new)
}

fn memory(text: &str) -> Result<u64, String> {
    limits::parse_memory(text).map_err(expected)
}

fn tasks(text: &str) -> Result<u32, String> {
    limits::parse_tasks(text).map_err(expected)
}

fn processors(text: &str) -> Result<f64, String> {
    limits::parse_processors(text).map_err(expected)
}

fn expected(what: String) -> String {
    format!("expected {what}")
}

fn sandbox(text: &str) -> Result<SandboxMode, String> {
    let known = SandboxMode::NAMES.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
    known.map(|(_, mode)| mode).ok_or_else(|| "allowed are off, uploads, auto and on".to_owned())
}

/// Parses a regular expression that must match whole names.
fn whole_name(text: &str) -> Result<Regex, String> {
    Regex::new(&format!("^(?:{text})$"))
        .map_err(|error| format!("invalid regular expression: {error}"))
}
