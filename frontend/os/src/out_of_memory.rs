//! The order in which the kernel ends processes when memory runs out.

use std::fs;

/// How much earlier than this process a child is ended, in thousandths of the memory: as if it used
/// so much more.
const EARLIER: i32 = 300;

/// The largest value that the kernel accepts.
const MOST: i32 = 1000;

/// Makes the kernel end a child process, and its later children, before this process
/// (`oom_score_adj` in proc(5)).
pub fn end_first(child: u32) {
    let own = fs::read_to_string("/proc/self/oom_score_adj")
        .ok()
        .and_then(|text| text.trim().parse::<i32>().ok());
    let value = own.unwrap_or(0).saturating_add(EARLIER).min(MOST);
    // The child may have ended, or have other rights: it is then ended in the usual order.
    let _ = fs::write(format!("/proc/{child}/oom_score_adj"), value.to_string());
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_child_is_ended_first() {
        let value = |process: &str| -> i32 {
            fs::read_to_string(format!("/proc/{process}/oom_score_adj"))
                .unwrap()
                .trim()
                .parse()
                .unwrap()
        };
        let mut child =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        end_first(child.id());
        let own = value("self");
        let after = value(&child.id().to_string());
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(after, (own + 300).min(1000));
        // Without effect.
        end_first(u32::MAX);
    }
}
