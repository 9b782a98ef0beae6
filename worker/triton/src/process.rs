//! What a process shares: several functions of the interface have no argument that leads to the
//! backend, so these are statics. A process loads one library for one instance of one model.

use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pharos_backend::Runtime;

/// The connection to the server. Empty in a process that only completes a configuration.
static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// Whether the log shows verbose lines.
static VERBOSE: AtomicBool = AtomicBool::new(false);

/// Functions that were reported as not supported. Locked to add a name only.
static REPORTED: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// Sets the connection of the process.
pub(crate) fn connect(runtime: &Runtime) {
    // A second instance in one process exists in tests only.
    let _ = RUNTIME.set(runtime.clone());
}

/// Returns the connection of the process, if it has one.
pub(crate) fn runtime() -> Option<&'static Runtime> {
    RUNTIME.get()
}

/// Sets whether the log shows verbose lines.
pub(crate) fn set_verbose(verbose: bool) {
    VERBOSE.store(verbose, Ordering::Relaxed);
}

/// Whether the log shows verbose lines.
pub(crate) fn is_verbose() -> bool {
    VERBOSE.load(Ordering::Relaxed)
}

/// Whether this is the first use of a function that is not supported.
pub(crate) fn first_use_of(name: &'static str) -> bool {
    REPORTED.lock().insert(name)
}
