//! What models can do to the server and to the machine: rights of the server's process that it
//! never needs, the environment variables that workers inherit, their user, their sandboxes and
//! their limits.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use regex::Regex;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::set_no_new_privs;

use crate::cli;
use pharos::model::SandboxMode;
use pharos::wire::access::AccessCheck;
use pharos_engine::launch::sandbox::Gap;
use pharos_engine::launch::{WorkerLimits, sandbox};
use pharos_engine::store::Location;
use pharos_os::control_groups::ControlGroups;
use pharos_os::worker_user::{WorkerUser, check_directory, check_rights, make_passable};
use pharos_os::{service_manager, variables};
use pharos_telemetry::system::{Roots, create_device_files};

/// Restricts this process and all that it will start. Call it before there are other threads.
///
/// Programs with the set-user-ID bit gain no rights (`prctl(2)`, `PR_SET_NO_NEW_PRIVS`). Other
/// processes of the same user, such as workers, cannot read the memory and the environment of this
/// process, which contain tokens (`PR_SET_DUMPABLE`). Neither can debuggers of that user, and the
/// process leaves no core dump; both remain possible for workers, and for root.
pub(super) fn apply() {
    // The last moment: NVIDIA's program for this has the set-user-ID bit.
    create_device_files();
    // A kernel without these functions is no reason not to serve.
    let _ = set_no_new_privs(true);
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}

/// Logs the gaps of sandboxes on this machine.
///
/// # Errors
/// Sandboxes are required, and cannot be made here.
pub(super) fn report_sandbox(worker: &Path, options: &cli::Options) -> Result<(), String> {
    let sandboxes = options.workers.sandboxes();
    let by_default = sandboxes.mode == SandboxMode::Uploads;
    // Otherwise no code comes by request.
    let is_used = !by_default || options.models.control_mode.by_request();
    for gap in sandbox::check(worker, &sandboxes, is_used)? {
        match gap {
            Gap::Essential(why) if by_default => {
                tracing::warn!("code that comes by request runs without a sandbox: {why}");
            }
            Gap::Essential(why) => tracing::warn!("sandboxes of workers: not available: {why}"),
            Gap::Lesser(what) if by_default => {
                tracing::info!("sandboxes of code that comes by request: {what}")
            }
            Gap::Lesser(what) => tracing::warn!("sandboxes of workers: {what}"),
        }
    }
    Ok(())
}

/// Checks that this process can start workers as another user, and that the user can read the files
/// that all workers read. Creates the directory for copies of objects if it does not exist, because
/// the user must be able to pass through the directory.
///
/// # Errors
/// Rights are missing; the text names them, or a path and the reason.
pub(super) fn check_user(
    options: &cli::Options,
    worker: &Path,
    onnxruntime: Option<&Path>,
    environments: &Path,
) -> Result<(), String> {
    let Some(user) = options.workers.worker_user.as_deref() else { return Ok(()) };
    let missing =
        check_rights().map_err(|why| format!("--worker-user needs the rights of root: {why}"))?;
    if !missing.is_empty() {
        tracing::warn!(
            "--worker-user: without {}, the memory of models is not measured, and workers that \
             start do not give way to others",
            missing.join(" and ")
        );
    }
    let cache = options.models.cache_directory.as_deref();
    let temporary = std::env::temp_dir();
    for directory in [Some(temporary.as_path()), Some(environments), cache].into_iter().flatten() {
        check_directory(directory).map_err(|why| {
            format!("--worker-user: models could replace files of this server: {why}")
        })?;
    }
    let made = cache.map_or(Ok(()), make_passable);
    made.map_err(|error| format!("--repository-cache-directory cannot be created: {error}"))?;
    let workers = &options.workers;
    let mut read = Vec::new();
    for location in options.models.locations() {
        let Location::Directory(path) = location else { continue };
        // The repository may be one that this server has made.
        user.grant_read(&path)
            .map_err(|error| format!("--worker-user: '{}': {error}", path.display()))?;
        read.push(path);
    }
    // A name without a directory is searched for in the PATH.
    let python = workers.python.as_deref().filter(|path| path.components().count() > 1);
    // A directory of Triton's backends that does not exist is ignored.
    let backends = workers.backend_directory.as_deref().filter(|directory| directory.is_dir());
    let named = [python, onnxruntime, backends];
    read.extend(named.into_iter().flatten().map(Path::to_owned));
    let pass = cache.map(Path::to_owned).into_iter().collect();
    check_access(user, worker, &AccessCheck { read, pass, write: vec![temporary] })
}

/// Runs the worker's executable as this user, to check the access that workers need.
fn check_access(user: &WorkerUser, worker: &Path, check: &AccessCheck) -> Result<(), String> {
    let mut command = Command::new(worker);
    // Other processes of the user can read the variables of the command.
    command.env_clear();
    user.run(&mut command);
    let output =
        command.args(check.arguments()).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let refused =
        |what: String| Err(format!("--worker-user: the user '{}' cannot {what}", user.name()));
    match output {
        Err(error) => refused(format!("execute '{}': {error}", worker.display())),
        Ok(output) => match String::from_utf8_lossy(&output.stdout).lines().next() {
            Some(line) => refused(line.to_owned()),
            None if output.status.success() => {
                tracing::info!("models run as the user '{}' ({})", user.name(), user.uid());
                Ok(())
            }
            None => refused(format!("execute '{}': {}", worker.display(), output.status)),
        },
    }
}

/// Returns the limits of workers, after a try to make a group with them.
///
/// # Errors
/// There are limits, and they cannot be enforced here.
pub(super) fn limits(options: &cli::Options) -> Result<WorkerLimits, String> {
    let roots = Roots::new(&options.metrics.cgroup_root);
    let limits = options.workers.limits();
    let groups = Arc::new(ControlGroups::new(&roots.proc, &roots.cgroup));
    if limits.any() {
        groups.create(&limits).map_err(|reason| {
            format!(
                "--worker-memory-limit, --worker-task-limit or --worker-cpu-limit cannot be \
                 enforced: {reason}"
            )
        })?;
    }
    Ok(WorkerLimits { limits, groups })
}

/// Returns the environment variables that workers do not inherit: variables of systemd, variables
/// that match `--worker-hidden-variables`, and variables that neither are usual nor match
/// `--worker-variables`.
pub(super) fn hidden_variables(workers: &cli::Workers) -> Vec<OsString> {
    let matches = |pattern: &Option<Regex>, name: &str| {
        pattern.as_ref().is_some_and(|pattern| pattern.is_match(name))
    };
    let is_hidden = |name: &str| {
        service_manager::VARIABLES.contains(&name)
            || matches(&workers.worker_hidden_variables, name)
            || !(variables::is_inherited(name) || matches(&workers.worker_variables, name))
    };
    let mut hidden: Vec<OsString> = std::env::vars_os().map(|(name, _)| name).collect();
    // A name that is not text matches no pattern.
    hidden.retain(|name| name.to_str().is_none_or(is_hidden));
    hidden.sort();
    if !hidden.is_empty() {
        let names: Vec<_> = hidden.iter().map(|name| name.to_string_lossy()).collect();
        tracing::info!(
            "environment variables that workers do not inherit: {} (--worker-variables passes \
             them)",
            names.len()
        );
        tracing::debug!("workers do not inherit {}", names.join(", "));
    }
    hidden
}
