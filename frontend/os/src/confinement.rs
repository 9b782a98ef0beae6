//! Limits that a process sets for itself, before it reads input that can be hostile.

use std::fs;
use std::io;

use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::set_no_new_privs;
use rustix::time::{ClockId, clock_gettime};

use crate::out_of_memory;

/// The largest stack, in bytes: the usual limit, if this process has inherited another one.
const STACK_BYTES: u64 = 8 << 20;

/// The processor time that a process may already have used in the current second without a higher
/// limit, because the kernel counts whole seconds.
const TOLERANCE_NS: i64 = 100_000_000;

/// Restricts this process to its standard streams and to `memory` more bytes than it uses now. It
/// cannot open files and sockets any more, leaves no core dump, and gains no rights by programs
/// that it starts; other processes of its user cannot read its memory.
///
/// An allocation beyond the limit fails, which ends the process.
///
/// # Errors
/// The kernel refuses a limit.
pub fn apply(memory: u64) -> io::Result<()> {
    // Reads and writes files, as does the next line.
    out_of_memory::end_first(std::process::id());
    let used = data_bytes()?;
    lower(Resource::Data, used.saturating_add(memory))?;
    lower(Resource::Stack, STACK_BYTES)?;
    lower(Resource::Core, 0)?;
    lower(Resource::Nofile, 3)?;
    // A kernel without these functions is no reason to refuse the work.
    let _ = set_no_new_privs(true);
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    Ok(())
}

/// Ends this process (SIGXCPU) when it has used this processor time from now on, in seconds: at
/// least 0.1 s less, at most 0.9 s more. A later call replaces the limit.
///
/// # Errors
/// The kernel refuses the limit.
pub fn limit_processor_time(seconds: u64) -> io::Result<()> {
    let used = used_processor_seconds();
    let hard = getrlimit(Resource::Cpu).maximum;
    let wanted = used.saturating_add(seconds);
    let current = hard.map_or(wanted, |hard| wanted.min(hard));
    Ok(setrlimit(Resource::Cpu, Rlimit { current: Some(current), maximum: hard })?)
}

/// Returns the processor time of this process, rounded to a second.
#[allow(clippy::disallowed_methods)]
fn used_processor_seconds() -> u64 {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    let started = i64::from(used.tv_nsec > TOLERANCE_NS);
    u64::try_from(used.tv_sec + started).unwrap_or(0)
}

/// Lowers a limit permanently.
fn lower(resource: Resource, to: u64) -> io::Result<()> {
    let hard = getrlimit(resource).maximum;
    let limit = hard.map_or(to, |hard| to.min(hard));
    Ok(setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) })?)
}

/// Returns the memory that counts for the limit of data (`VmData` in proc(5)).
fn data_bytes() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let kilobytes = status.lines().find_map(|line| {
        line.strip_prefix("VmData:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    kilobytes
        .map(|kilobytes| kilobytes << 10)
        .ok_or_else(|| io::Error::other("/proc/self/status has no VmData"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_that_counts_is_known() {
        // The optimiser would remove a block that nothing reads.
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        let known = data_bytes().unwrap();
        assert!(known >= block.len() as u64, "{known}");
    }

    #[test]
    fn seconds_are_rounded() {
        let since = used_processor_seconds();
        // Other tests of this process use time too.
        assert!(since < 3600, "{since}");
    }
}
