//! The scheduling of threads: policy, nice value and slice (sched_setattr(2)).
//!
//! The kernel (EEVDF, Linux 6.12 and later) lets a thread that wakes interrupt a thread with a
//! longer slice, if it had less than its share. Threads that do little for each event, and that
//! others wait for, have short slices for this reason; their share stays the same. Earlier kernels
//! ignore the slice.

use std::{fs, io};

/// The slice of threads that others wait for, in nanoseconds: the shortest that the kernel accepts.
pub(crate) const SHORT_SLICE: u64 = 100_000;

/// The most changes of a process's threads, each of which may find threads that others have started
/// meanwhile.
const MOST_CHANGES: u32 = 10;

/// The first version of `sched_attr`, which all kernels since 3.14 have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Attributes {
    pub(crate) size: u32,
    pub(crate) policy: u32,
    pub(crate) flags: u64,
    pub(crate) nice: i32,
    pub(crate) priority: u32,
    /// The slice of a thread in nanoseconds; 0 for the usual one.
    pub(crate) runtime: u64,
    pub(crate) deadline: u64,
    pub(crate) period: u64,
}

const SIZE: u32 = size_of::<Attributes>() as u32;
pub(crate) const NORMAL: u32 = libc::SCHED_OTHER as u32;
pub(crate) const BATCH: u32 = libc::SCHED_BATCH as u32;

/// Gives a thread short slices, which threads that it starts later inherit. A process is its first
/// thread; 0 is the calling thread. Does nothing if the thread does not have the usual policy, has
/// ended, or if the kernel refuses.
pub fn shorten_slices(thread: u32) {
    let _ = change(thread, |now| {
        (now.policy == NORMAL).then_some(Attributes { runtime: SHORT_SLICE, ..now })
    });
}

/// Gives the calling thread the usual slices, if it has inherited short ones.
pub(crate) fn use_usual_slices() {
    let _ =
        change(0, |now| (now.runtime == SHORT_SLICE).then_some(Attributes { runtime: 0, ..now }));
}

/// Changes all threads of a process, until there are no others.
pub(crate) fn change_all(process: u32, to: impl Fn(Attributes) -> Option<Attributes>) {
    for _ in 0..MOST_CHANGES {
        // The process may have ended.
        let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return };
        let numbers = threads.filter_map(|thread| thread.ok()?.file_name().to_str()?.parse().ok());
        let changed = numbers.filter(|thread| change(*thread, &to).unwrap_or(false)).count();
        if changed == 0 {
            return;
        }
    }
}

/// Changes a thread, if `to` returns other attributes. Returns whether it did.
pub(crate) fn change(
    thread: u32,
    to: impl Fn(Attributes) -> Option<Attributes>,
) -> io::Result<bool> {
    let Some(attributes) = to(get(thread)?) else { return Ok(false) };
    set(thread, &attributes).map(|()| true)
}

/// Returns the attributes of a thread; 0 is the calling one.
pub(crate) fn get(thread: u32) -> io::Result<Attributes> {
    let mut attributes = Attributes::default();
    // SAFETY: the kernel writes at most `SIZE` bytes to the structure, which consists of integers.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_getattr, thread, &raw mut attributes, SIZE, 0) };
    if result == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
}

/// Sets the attributes of a thread; 0 is the calling one.
pub(crate) fn set(thread: u32, attributes: &Attributes) -> io::Result<()> {
    let sized = Attributes { size: SIZE, ..*attributes };
    // SAFETY: the kernel reads `size` bytes of the structure.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const sized, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn only_threads_of_the_usual_policy_get_short_slices() {
        let slice_of = |policy| {
            let changed = thread::spawn(move || {
                set(0, &Attributes { policy, runtime: 0, ..get(0)? })?;
                let before = get(0)?.runtime;
                shorten_slices(0);
                Ok::<_, io::Error>((before, get(0)?.runtime))
            });
            changed.join().unwrap().unwrap()
        };
        let (before, after) = slice_of(NORMAL);
        // Kernels that ignore the slice report none.
        assert!(after == SHORT_SLICE || (before, after) == (0, 0), "{before} {after}");
        let (before, after) = slice_of(BATCH);
        assert_eq!(before, after);
    }

    #[test]
    fn a_thread_can_return_to_the_usual_slices() {
        let slices = thread::spawn(|| {
            let usual = get(0).unwrap().runtime;
            shorten_slices(0);
            let inherited = thread::spawn(|| {
                use_usual_slices();
                get(0).unwrap().runtime
            });
            (usual, inherited.join().unwrap())
        });
        let (usual, after) = slices.join().unwrap();
        assert_eq!(usual, after);
    }
}
