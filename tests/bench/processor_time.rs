//! The processor time of a process, from `/proc`, and the other fields of its `stat`.

use std::fs;
use std::time::Duration;

/// Clock ticks per second in `/proc/PID/stat`: `USER_HZ`, which is 100 on all architectures of
/// today.
const TICKS: u32 = 100;

/// Returns the processor time that all threads of a process have used, in steps of 10 ms; `None` if
/// it has ended.
pub(crate) fn processor_time(pid: u32) -> Option<Duration> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Returns the fields of `/proc/PID/stat` from the third one on (proc_pid_stat(5)).
pub(crate) fn fields_after_name(stat: &str) -> Option<impl Iterator<Item = &str>> {
    // The name, in parentheses, may contain spaces and parentheses.
    Some(stat.get(stat.rfind(')')? + 1..)?.split_whitespace())
}

/// Adds the times in user mode and in the kernel: the fields 14 and 15.
fn parse(stat: &str) -> Option<Duration> {
    let mut fields = fields_after_name(stat)?.skip(11);
    let mut next = || fields.next()?.parse::<u32>().ok();
    Some(Duration::from_secs(1) * (next()? + next()?) / TICKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_user_and_kernel_time() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 150 25 0 0 20 0 4 0 100 1000 10";
        assert_eq!(parse(stat), Some(Duration::from_millis(1750)));
        assert_eq!(parse("7 (a) S 1"), None);
    }
}
