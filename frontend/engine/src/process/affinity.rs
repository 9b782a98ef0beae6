//! Starts something on chosen processors.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Does `begin` while this thread keeps to these processors, which a process that it starts inherits, with all its threads;
/// none of them means any. A thread of the runtime is lent for that moment: nothing is awaited in between.
pub(super) fn on<T>(cpus: &[usize], begin: impl FnOnce() -> T) -> T {
    let own = sched_getaffinity(None).ok().filter(|_| !cpus.is_empty());
    let Some(own) = own else { return begin() };
    let mut wanted = CpuSet::new();
    cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| wanted.set(*cpu));
    if let Err(error) = sched_setaffinity(None, &wanted) {
        tracing::debug!("a worker cannot be bound to its processors: {error}");
        return begin();
    }
    let begun = begin();
    if let Err(error) = sched_setaffinity(None, &own) {
        tracing::warn!("a thread stays bound to the processors of a worker: {error}");
    }
    begun
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_child_inherits_the_processors_and_the_thread_gets_its_own_back() {
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
        // Processors that there are none of are no reason to start nothing.
        assert_eq!(on(&[usize::MAX], mask), before);
    }
}
