//! The processor time of a process, from `/proc`.

use std::fs;
use std::time::Duration;

/// Clock ticks per second in `/proc/PID/stat`: `USER_HZ`, which is 100 on all architectures of today.
const TICKS: u32 = 100;

/// Returns the processor time that all threads of a process have used, in steps of 10 ms; `None` if it has ended.
pub(crate) fn processor_time(pid: u32) -> Option<Duration> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Adds the times in user mode and in the kernel: the fields 14 and 15 (proc_pid_stat(5)).
fn parse(stat: &str) -> Option<Duration> {
    // The name, in parentheses, may contain spaces and parentheses; the third field follows the last one.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace().skip(11);
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
