//! Work that waits or computes for long, on a separate thread. The only caller of tokio's
//! `spawn_blocking`, which panics if no thread can be started: the limit of processes would end the
//! task that needs a thread, for example the one that watches a limit.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use pharos::timeline::Instant;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};

use crate::clock::{self, virtual_time};

/// Why work has no result.
#[derive(Debug)]
pub enum Failed {
    /// No thread could be started.
    NoThread,
    /// It panicked, or the runtime ended before it began.
    Ended(JoinError),
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoThread => f.write_str(
                "no thread can be started. Raise the limit of processes and threads of this user \
                 (ulimit -u), service (TasksMax) or container (pids)",
            ),
            Self::Ended(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Failed {}

/// The result of work on a thread. Dropping it does not end the work.
#[derive(Debug)]
pub struct Blocking<T>(Work<T>);

#[derive(Debug)]
enum Work<T> {
    Begun(JoinHandle<T>),
    /// No thread could be started.
    NotBegun,
    /// The result, until it is taken.
    Done(Option<Box<T>>),
}

impl<T> Future for Blocking<T> {
    type Output = Result<T, Failed>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Work::Begun(task) => Pin::new(task).poll(cx).map_err(Failed::Ended),
            Work::NotBegun => Poll::Ready(Err(Failed::NoThread)),
            Work::Done(result) => {
                result.take().map_or(Poll::Pending, |result| Poll::Ready(Ok(*result)))
            }
        }
    }
}

/// Starts work on a blocking thread of the current runtime, at once.
///
/// # Panics
/// Outside a runtime.
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Blocking<T> {
    run_on(&Handle::current(), work)
}

/// Starts work on a blocking thread of a runtime, at once.
///
/// If no thread can be started, the work is done later, when the runtime can start one, although
/// its result is [`Failed::NoThread`]. A thread with a virtual time does the work itself.
#[allow(clippy::disallowed_methods)]
pub fn run_on<T: Send + 'static>(
    runtime: &Handle,
    work: impl FnOnce() -> T + Send + 'static,
) -> Blocking<T> {
    if virtual_time::now().is_some() {
        return Blocking(Work::Done(Some(Box::new(work()))));
    }
    // Boxed: tokio's code for a task is then compiled once for each type of result, not for each
    // work.
    let work: Box<dyn FnOnce() -> T + Send> = Box::new(work);
    match catch_expected(|| runtime.spawn_blocking(work)) {
        Ok(task) => Blocking(Work::Begun(task)),
        Err(reason) => {
            if WARNINGS.is_due(clock::now()) {
                tracing::warn!("{}: {reason}", Failed::NoThread);
            }
            Blocking(Work::NotBegun)
        }
    }
}

/// The limit of warnings that no thread can be started. Each request may need one.
static WARNINGS: RateLimit = RateLimit(AtomicU64::new(0));

/// The time between two warnings.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// The time from which the next warning is due.
struct RateLimit(AtomicU64);

impl RateLimit {
    fn is_due(&self, now: Instant) -> bool {
        let due = self.0.load(Ordering::Relaxed);
        let next = (now + WARNING_INTERVAL).0;
        now.0 >= due
            && self.0.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

thread_local! {
    /// Whether a panic of this thread is caught by [`catch_expected`].
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether a panic of this thread, now, is caught and reported by its caller. A panic hook
/// asks this: a backtrace would stop an event loop for some 200 ms.
pub fn is_expected_panic() -> bool {
    EXPECTED.get()
}

/// Returns the result of a call, or the message of its panic.
fn catch_expected<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    EXPECTED.set(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    EXPECTED.set(false);
    result.map_err(|panic| match panic.downcast_ref::<&str>() {
        Some(message) => (*message).to_owned(),
        None => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
    })
}

/// Returns the result of work; `None` if the server exits first. The work is then dropped. For
/// threads that wait for another server: its answer may never come, and a runtime that ends while
/// they wait makes them panic.
pub async fn until_exit<T>(
    mut exiting: watch::Receiver<bool>,
    work: impl Future<Output = T>,
) -> Option<T> {
    tokio::select! {
        biased;
        Ok(_) = exiting.wait_for(|exiting| *exiting) => None,
        done = work => Some(done),
    }
}

/// Does work on a blocking thread of the current runtime, and does not wait for it. Outside a
/// runtime, does it at once. For destructors.
pub fn run_detached(work: impl FnOnce() + Send + 'static) {
    match Handle::try_current() {
        Ok(runtime) => drop(run_on(&runtime, work)),
        Err(_) => work(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_has_a_result_or_the_reason_why_it_has_none() {
        assert_eq!(run(|| 5).await.unwrap(), 5);
        let panicked = run(|| -> u32 { panic!("a fault") }).await.unwrap_err();
        assert!(
            matches!(&panicked, Failed::Ended(error) if error.is_panic())
                && panicked.to_string().contains("panic")
        );
        let none = Blocking::<u32>(Work::NotBegun).await.unwrap_err();
        assert!(none.to_string().contains("ulimit -u"), "{none}");
    }

    #[tokio::test]
    async fn the_exit_ends_work() {
        let exiting = watch::Sender::new(false);
        assert_eq!(until_exit(exiting.subscribe(), async { 5 }).await, Some(5));
        let (waiting, ()) =
            tokio::join!(until_exit(exiting.subscribe(), std::future::pending::<u8>()), async {
                exiting.send_replace(true);
            });
        assert_eq!(waiting, None);
        let begun = Cell::new(false);
        let receiver = exiting.subscribe();
        assert_eq!(until_exit(receiver, async { begun.set(true) }).await, None);
        assert!(!begun.get(), "work began after the exit");
        let receiver = watch::Sender::new(false).subscribe();
        assert_eq!(
            until_exit(receiver, async { 5 }).await,
            Some(5),
            "a sender that was dropped ends nothing"
        );
    }

    #[test]
    fn a_panic_is_expected_only_within_its_call() {
        assert_eq!(catch_expected(is_expected_panic), Ok(true));
        assert_eq!(catch_expected(|| -> u8 { panic!("no thread") }), Err("no thread".to_owned()));
        assert!(!is_expected_panic());
    }

    #[test]
    fn a_warning_is_due_once_in_an_interval() {
        let limit = RateLimit(AtomicU64::new(0));
        let at = |seconds: u64| Instant(seconds * 1_000_000_000);
        let due = [5, 6, 64, 65, 66, 500].map(|seconds| limit.is_due(at(seconds)));
        assert_eq!(due, [true, false, false, true, false, true]);
    }

    #[tokio::test]
    async fn work_begins_and_ends_without_its_future() {
        let (sender, receiver) = std::sync::mpsc::channel();
        drop(run_on(&Handle::current(), move || sender.send(1)));
        assert_eq!(run(move || receiver.recv()).await.unwrap(), Ok(1));
    }
}
