//! The number of processors, and a check that the threads of the server can be started. Libraries
//! abort or panic where a thread cannot be started, without naming the limit.

use std::io;
use std::num::NonZero;
use std::sync::LazyLock;
use std::thread::{self, Builder};

use parking_lot::Mutex;

static PROCESSORS: LazyLock<usize> =
    LazyLock::new(|| thread::available_parallelism().map_or(1, NonZero::get));

/// Returns the number of processors that this process may use, at least 1. Determined once, because
/// it reads the limits of all control groups of this process.
pub fn processors() -> usize {
    *PROCESSORS
}

/// Checks that a number of threads can run at the same time, by starting and ending them.
///
/// # Errors
/// One of them cannot be started.
pub fn check(count: usize) -> io::Result<()> {
    let gate = Mutex::new(());
    thread::scope(|scope| {
        let held = gate.lock();
        let started = (0..count)
            .try_for_each(|_| Builder::new().spawn_scoped(scope, || drop(gate.lock())).map(drop));
        drop(held);
        started
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_run_at_the_same_time_and_end() {
        assert!(check(0).is_ok());
        assert!(check(50).is_ok());
    }
}
