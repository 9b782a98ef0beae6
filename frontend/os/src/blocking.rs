//! Work that waits or computes for long, on a separate thread. The only caller of tokio's `spawn_blocking`, which panics if no
//! thread can be started: the limit of processes would end the task that needs a thread, for example the one that watches a limit.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinHandle};

use crate::clock::virtual_time;

/// Why work has no result.
#[derive(Debug)]
pub enum Failed {
    /// No thread could be started; the log has the error of the system.
    NoThread,
    /// It panicked, or the runtime ended before it began.
    Ended(JoinError),
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoThread => f.write_str(
                "no thread can be started. Raise the limit of processes and threads of this user (ulimit -u), service (TasksMax) \
                 or container (pids)",
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
            Work::Done(result) => result.take().map_or(Poll::Pending, |result| Poll::Ready(Ok(*result))),
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
/// If no thread can be started, the work is done later, when the runtime can start one, although its result is [`Failed::NoThread`].
/// A thread with a virtual time does the work itself.
#[allow(clippy::disallowed_methods)]
pub fn run_on<T: Send + 'static>(runtime: &Handle, work: impl FnOnce() -> T + Send + 'static) -> Blocking<T> {
    if virtual_time::now().is_some() {
        return Blocking(Work::Done(Some(Box::new(work()))));
    }
    let begun = catch_unwind(AssertUnwindSafe(|| runtime.spawn_blocking(work)));
    Blocking(begun.map_or(Work::NotBegun, Work::Begun))
}

/// Does work on a blocking thread of the current runtime, and does not wait for it. Outside a runtime, does it at once. For
/// destructors.
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
            matches!(&panicked, Failed::Ended(error) if error.is_panic()) && panicked.to_string().contains("panic")
        );
        let none = Blocking::<u32>(Work::NotBegun).await.unwrap_err();
        assert!(none.to_string().contains("ulimit -u"), "{none}");
    }

    #[tokio::test]
    async fn work_begins_and_ends_without_its_future() {
        let (sender, receiver) = std::sync::mpsc::channel();
        drop(run_on(&Handle::current(), move || sender.send(1)));
        assert_eq!(run(move || receiver.recv()).await.unwrap(), Ok(1));
    }
}
