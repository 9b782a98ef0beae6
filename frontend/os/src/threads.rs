//! Whether the threads of the server can be started. Libraries abort or panic where a thread cannot be started, without naming the
//! limit.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Builder};

/// Checks that a number of threads can run at the same time, by starting and ending them.
///
/// # Errors
/// One of them cannot be started.
pub fn check(count: usize) -> io::Result<()> {
    let gate = Mutex::new(());
    thread::scope(|scope| {
        let held = gate.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = || drop(gate.lock());
        let started = (0..count).try_for_each(|_| Builder::new().spawn_scoped(scope, wait).map(drop));
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
