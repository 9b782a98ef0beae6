//! Starts processes on chosen processors.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Calls `begin` while this thread is bound to these processors; a process that it starts inherits the binding. An empty list
/// means all processors. `begin` is synchronous, so the runtime's thread runs nothing else meanwhile.
pub(super) fn on<T>(cpus: &[usize], begin: impl FnOnce() -> T) -> T {
    let own = sched_getaffinity(None).ok().filter(|_| !cpus.is_empty());
    let Some(own) = own else { return begin() };
    let mut wanted = CpuSet::new();
    cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| wanted.set(*cpu));
    if let Err(error) = sched_setaffinity(None, &wanted) {
        tracing::debug!("cannot bind a worker to its processors: {error}");
        return begin();
    }
    let begun = begin();
    if let Err(error) = sched_setaffinity(None, &own) {
        tracing::warn!("cannot restore the processor affinity of a thread: {error}");
    }
    begun
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_child_inherits_the_processors_and_the_thread_is_restored() {
        let mask = || {
            let set = sched_getaffinity(None).unwrap();
            (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect::<Vec<_>>()
        };
        let before = mask();
        let last = before[before.len() - 1];
        let child = on(&[last], || std::process::Command::new("cat").arg("/proc/self/status").output()).unwrap();
        let status = String::from_utf8(child.stdout).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        assert_eq!(line.trim(), last.to_string());
        assert_eq!(mask(), before);
        assert_eq!(on(&[], mask), before);
        // Processors that do not exist do not prevent the start.
        assert_eq!(on(&[usize::MAX], mask), before);
    }
}
