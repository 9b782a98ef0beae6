//! Work that threads give to an event loop without a system call while it is awake.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::runtime::Handle;

thread_local! {
    /// The mailbox of this thread's loop.
    static MAILBOX: RefCell<Option<Mailbox>> = const { RefCell::new(None) };
    /// The empty list of the mailbox's work that was done last.
    static DONE_WORK: RefCell<Vec<Work>> = const { RefCell::new(Vec::new()) };
}

/// Work that other threads give to a loop. Cheap to clone.
///
/// Waking a task of another loop costs a system call each time, also if that loop is awake. A
/// mailbox costs one only if the loop sleeps, and only one for all the work that waits.
#[derive(Clone, Debug)]
pub struct Mailbox(Arc<Inbox>);

type Work = Box<dyn FnOnce() + Send>;

struct Inbox {
    handle: Handle,
    /// Held to add or to take the work, not while it is done.
    work: Mutex<Vec<Work>>,
    /// Whether the loop must be woken.
    sleeps: AtomicBool,
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox").field("sleeps", &self.sleeps).finish_non_exhaustive()
    }
}

impl Mailbox {
    /// Creates the mailbox of a loop.
    pub(super) fn new(handle: Handle) -> Self {
        Self(Arc::new(Inbox { handle, work: Mutex::default(), sleeps: AtomicBool::new(false) }))
    }

    /// Makes it the mailbox of this thread's loop.
    pub(super) fn belongs_to_this_thread(self) {
        MAILBOX.set(Some(self));
    }

    /// Returns the mailbox of this thread's loop, if the thread has one.
    pub fn of_this_thread() -> Option<Self> {
        MAILBOX.with_borrow(Clone::clone)
    }

    /// Returns whether this thread's loop has the mailbox.
    pub fn is_of_this_thread(&self) -> bool {
        MAILBOX.with_borrow(|own| own.as_ref().is_some_and(|own| Arc::ptr_eq(&own.0, &self.0)))
    }

    /// Gives short work to the loop. Work from one thread is done in its order.
    pub fn give(&self, work: impl FnOnce() + Send + 'static) {
        self.0.work.lock().push(Box::new(work));
        // Either the loop sees the work before it sleeps, or this sees that it sleeps: both under
        // one total order.
        if self.0.sleeps.swap(false, Ordering::SeqCst) {
            self.0.handle.spawn(async {});
        }
    }

    /// Does the waiting work.
    pub(super) fn empty(&self) {
        // Exchanged for the list of the last time, so that adding work need not allocate another
        // list.
        let mut work = DONE_WORK.take();
        std::mem::swap(&mut work, &mut *self.0.work.lock());
        for one in work.drain(..) {
            // A panic must not end the loop.
            let _ = catch_unwind(AssertUnwindSafe(one));
        }
        DONE_WORK.set(work);
    }

    /// Asks to be woken. Returns `false` if work waits already.
    pub(super) fn request_wakeup(&self) -> bool {
        self.0.sleeps.store(true, Ordering::SeqCst);
        self.0.work.lock().is_empty()
    }

    /// Withdraws the request of [`Mailbox::request_wakeup`].
    pub(super) fn withdraw_wakeup(&self) {
        self.0.sleeps.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::thread;

    use tokio::runtime::Builder;

    use super::super::{EventLoop, EventLoops};
    use super::*;

    /// Runs a task on a loop to its end.
    fn run<T: Send + 'static>(
        event_loop: &EventLoop,
        task: impl Future<Output = T> + Send + 'static,
    ) -> T {
        Builder::new_current_thread().build().unwrap().block_on(event_loop.spawn(task)).unwrap()
    }

    #[test]
    fn a_mailbox_wakes_its_loop_and_keeps_the_order() {
        let loops = EventLoops::start(2).unwrap();
        let a = loops.of_connection();
        let b = loops.of_connection();
        assert!(Mailbox::of_this_thread().is_none(), "this thread has no loop");
        let mailbox = run(&b, async { Mailbox::of_this_thread() }).unwrap();
        let thread = run(&b, async { thread::current().name().unwrap_or_default().to_owned() });
        assert!(!mailbox.is_of_this_thread());
        let (done, waits) = std::sync::mpsc::channel();
        // From another loop, which does not wait in between, and from here, where the loop has
        // fallen asleep each time.
        let from_a = mailbox.clone();
        let sender = done.clone();
        a.spawn(async move {
            for number in 0..1000 {
                let sender = sender.clone();
                from_a.give(move || {
                    sender
                        .send((number, thread::current().name().unwrap_or_default().to_owned()))
                        .unwrap();
                });
            }
        });
        for number in 0..1000 {
            assert_eq!(waits.recv().unwrap(), (number, thread.clone()));
        }
        for number in 0..100 {
            let sender = done.clone();
            let same = mailbox.clone();
            mailbox.give(move || {
                assert!(same.is_of_this_thread());
                sender.send((number, String::new())).unwrap();
            });
            assert_eq!(waits.recv().unwrap().0, number);
        }
        mailbox.give(|| panic!("ends only this work"));
        mailbox.give(move || done.send((0, String::new())).unwrap());
        assert_eq!(waits.recv().unwrap().0, 0);
    }
}
