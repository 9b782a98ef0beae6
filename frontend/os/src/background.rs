//! Work in the background: threads that wait longer than others if all processors are busy.
//!
//! The kernel (EEVDF) runs the thread with the earliest deadline among those that had less than
//! their share, and interrupts a running thread for such a thread that wakes with an earlier
//! deadline. The deadline of a thread is as far away as its slice is long. Threads in the
//! background have the longest slice, so all others interrupt them; the policy `SCHED_BATCH`, with
//! which they interrupt no other thread when they wake; and a higher nice value, with which others
//! are seldom beyond their share when they wake, and a third of the share of others if all
//! processors are busy.
//!
//! A process without `CAP_SYS_NICE` and with the usual limit `RLIMIT_NICE` of 0 could not lower its
//! nice value again, so it does not raise it. Linux before 6.12 ignores the slice. See sched(7) and
//! sched_setattr(2).

use std::cell::Cell;
use std::sync::OnceLock;
use std::{process, thread};

use crate::scheduling::{Attributes, BATCH, NORMAL, change, change_all, get, set};

/// The slice of threads in the background in nanoseconds: the longest that the kernel accepts.
const SLICE: u64 = 100_000_000;

/// How much higher the nice value of threads in the background is.
const NICER: i32 = 5;
const HIGHEST_NICE: i32 = 19;

thread_local! {
    static ENTERED: Cell<bool> = const { Cell::new(false) };
}

/// Puts the calling thread into the background, and all threads and processes that it starts later.
/// Does nothing if the thread does not have the usual policy, or if the kernel refuses.
pub fn enter() {
    ENTERED.set(true);
    let _ = change(0, to_background);
}

/// Returns whether the calling thread has called [`enter`].
pub fn is_entered() -> bool {
    ENTERED.get()
}

/// Puts all threads of a child process, and its later threads and children, into the background, as
/// [`enter`].
pub fn put(process: u32) {
    change_all(process, to_background);
}

/// Ends what [`put`] did, or [`enter`] in the thread that started the process. Threads to which the
/// process has given another policy or nice value keep it.
pub fn end(process: u32) {
    // With another policy of this process, that policy was inherited, and nothing was put into the
    // background.
    let Some(own) = get(process::id()).ok().filter(|own| own.policy == NORMAL) else { return };
    change_all(process, |now| {
        let nice = if now.nice == nicer(own.nice) { own.nice } else { now.nice };
        is_ours(&now).then_some(Attributes { policy: NORMAL, runtime: 0, nice, ..now })
    });
}

fn to_background(now: Attributes) -> Option<Attributes> {
    let nice = if can_return() { nicer(now.nice) } else { now.nice };
    (now.policy == NORMAL).then_some(Attributes { policy: BATCH, runtime: SLICE, nice, ..now })
}

/// Returns whether these are the attributes of a thread in the background. Kernels that ignore the
/// slice report none.
fn is_ours(attributes: &Attributes) -> bool {
    attributes.policy == BATCH && matches!(attributes.runtime, 0 | SLICE)
}

fn nicer(nice: i32) -> i32 {
    (nice + NICER).min(HIGHEST_NICE)
}

/// Returns whether this process may lower a nice value. Tried once, in a thread.
fn can_return() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let thread = thread::Builder::new().spawn(|| {
            let now = get(0)?;
            set(0, &Attributes { nice: nicer(now.nice), ..now })?;
            set(0, &now)
        });
        thread.is_ok_and(|thread| matches!(thread.join(), Ok(Ok(()))))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::thread;

    use super::*;

    fn child() -> Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn a_process_goes_to_the_background_and_comes_back() {
        let mut child = child();
        let before = get(child.id()).unwrap();
        assert_eq!(before.policy, NORMAL);
        put(child.id());
        let during = get(child.id()).unwrap();
        let nice = if can_return() { before.nice + NICER } else { before.nice };
        assert_eq!((during.policy, during.nice), (BATCH, nice));
        assert!(matches!(during.runtime, 0 | SLICE), "{during:?}");
        end(child.id());
        assert_eq!(get(child.id()).unwrap(), before);
        drop(child.stdin.take());
        child.wait().unwrap();
        // Without effect.
        put(u32::MAX);
        end(u32::MAX);
    }

    #[test]
    fn a_policy_that_a_process_has_chosen_stays() {
        let mut child = child();
        let idle = Attributes { policy: libc::SCHED_IDLE as u32, ..get(child.id()).unwrap() };
        set(child.id(), &Attributes { runtime: 0, ..idle }).unwrap();
        put(child.id());
        end(child.id());
        assert_eq!(get(child.id()).unwrap().policy, idle.policy);
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn what_a_thread_in_the_background_starts_is_there_too() {
        let own = thread::spawn(|| {
            enter();
            assert!(is_entered());
            let mut child = child();
            let policies = (get(0).unwrap().policy, get(child.id()).unwrap().policy);
            end(child.id());
            let after = get(child.id()).unwrap().policy;
            drop(child.stdin.take());
            child.wait().unwrap();
            (policies, after)
        });
        assert_eq!(own.join().unwrap(), ((BATCH, BATCH), NORMAL));
        assert_eq!((get(0).unwrap().policy, is_entered()), (NORMAL, false));
    }
}
