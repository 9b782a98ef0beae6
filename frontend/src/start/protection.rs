//! What models can do to the server and to the machine: rights of the server's process that it never needs, the environment
//! variables that workers inherit, their sandboxes and their limits.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use regex::Regex;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::set_no_new_privs;

use crate::cli;
use pharos_engine::launch::{WorkerLimits, sandbox};
use pharos_os::control_groups::ControlGroups;
use pharos_os::{service_manager, variables};
use pharos_telemetry::system::Roots;

/// Restricts this process and all that it will start. Call it before there are other threads.
///
/// Programs with the set-user-ID bit gain no rights (`prctl(2)`, `PR_SET_NO_NEW_PRIVS`). Other processes of the same user, such
/// as workers, cannot read the memory and the environment of this process, which contain tokens (`PR_SET_DUMPABLE`). Neither can
/// debuggers of that user, and the process leaves no core dump; both remain possible for workers, and for root.
pub(super) fn apply() {
    // A kernel without these functions is no reason not to serve.
    let _ = set_no_new_privs(true);
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}

/// Logs what sandboxes cannot restrict here.
///
/// # Errors
/// Sandboxes are required, and cannot be made here.
pub(super) fn report_sandbox(worker: &Path, workers: &cli::Workers) -> Result<(), String> {
    for gap in sandbox::check(worker, &workers.sandboxes())? {
        tracing::warn!("sandboxes of workers: {gap}");
    }
    Ok(())
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
            format!("--worker-memory-limit, --worker-task-limit or --worker-cpu-limit cannot be enforced: {reason}")
        })?;
    }
    Ok(WorkerLimits { limits, groups })
}

/// Returns the environment variables that workers do not inherit: those of systemd, those that match the one pattern, and those
/// that neither are usual nor match the other pattern.
pub(super) fn hidden_variables(workers: &cli::Workers) -> Vec<OsString> {
    let matches = |pattern: &Option<Regex>, name: &str| pattern.as_ref().is_some_and(|pattern| pattern.is_match(name));
    let hidden = |name: &str| {
        service_manager::VARIABLES.contains(&name)
            || matches(&workers.worker_hidden_variables, name)
            || !(variables::is_inherited(name) || matches(&workers.worker_variables, name))
    };
    // A name that is not text matches no pattern.
    let names = std::env::vars_os().map(|(name, _)| name);
    let mut hidden: Vec<OsString> = names.filter(|name| name.to_str().is_none_or(hidden)).collect();
    hidden.sort();
    if !hidden.is_empty() {
        let names: Vec<_> = hidden.iter().map(|name| name.to_string_lossy()).collect();
        tracing::info!(
            "environment variables that workers do not inherit: {} (--worker-variables passes them)",
            names.len()
        );
        tracing::debug!("workers do not inherit {}", names.join(", "));
    }
    hidden
}
