//! Child processes that run for a limited time.

use std::process::{Child, ExitStatus};
use std::thread;
use std::time::Duration;

use crate::clock;

/// The pause between two looks at a child.
const PAUSE: Duration = Duration::from_millis(10);

/// Waits until a child ends, and returns its exit status. Kills the child at the time limit, or if
/// its end cannot be known, and then returns `None`. Blocks.
pub fn wait_within(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    wait_while(child, limit, || true)
}

/// Waits as [`wait_within`] does, and also kills the child when `wanted` returns `false`.
pub fn wait_while(
    child: &mut Child,
    limit: Duration,
    wanted: impl Fn() -> bool,
) -> Option<ExitStatus> {
    let begun = clock::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if clock::now() - begun < limit && wanted() => thread::sleep(PAUSE),
            _ => {
                // Fails if the child has ended.
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_child_ends_within_its_limit() {
        let start = |seconds: &str| Command::new("sleep").arg(seconds).spawn().unwrap();
        assert!(
            wait_within(&mut start("0"), Duration::from_secs(60))
                .is_some_and(|status| status.success())
        );
        let mut long = start("60");
        assert_eq!(wait_within(&mut long, Duration::from_millis(1)), None);
        assert!(!long.wait().unwrap().success());
        let mut unwanted = start("60");
        assert_eq!(wait_while(&mut unwanted, Duration::from_secs(60), || false), None);
        assert!(!unwanted.wait().unwrap().success());
    }
}
