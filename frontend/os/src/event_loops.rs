//! Event loops: single-threaded runtimes that serve connections, one per thread.
//!
//! A connection stays on one loop from its first byte to its last, so that its tasks never move between threads. The
//! connections of worker processes use the same loops: a reply that belongs to a connection of its loop is answered without a
//! system call to wake another thread. Work that computes for long, or that may block, must leave for a blocking thread
//! ([`tokio::task::spawn_blocking`]), because it would delay all connections of its loop.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use tokio::runtime::{Builder, EnterGuard, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// The event loops of a process. Without any, connections are served by the runtime that accepts them. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct EventLoops {
    loops: Arc<[Loop]>,
    next: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Loop {
    handle: Handle,
    /// The number of connections.
    connections: Arc<AtomicUsize>,
    /// Ends the thread when it is dropped.
    _stop: oneshot::Sender<()>,
}

/// The event loop of one connection, which counts there until this is dropped.
#[derive(Debug)]
pub struct EventLoop {
    handle: Handle,
    connections: Option<Arc<AtomicUsize>>,
}

impl EventLoops {
    /// Starts `count` loops, at least one.
    ///
    /// # Errors
    /// A thread or its descriptors cannot be created.
    pub fn start(count: usize) -> io::Result<Self> {
        let loops = (0..count.max(1)).map(start).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { loops: loops.into(), next: Arc::default() })
    }

    /// Returns the loop with the fewest connections. Loops with equally many take turns.
    ///
    /// # Panics
    /// There are no loops, and the caller is outside a runtime.
    pub fn assign(&self) -> EventLoop {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let count = self.loops.len();
        let from_first = (0..count).filter_map(|at| self.loops.get(first.wrapping_add(at) % count));
        let Some(chosen) = from_first.min_by_key(|one| one.connections.load(Ordering::Relaxed)) else {
            return EventLoop { handle: Handle::current(), connections: None };
        };
        chosen.connections.fetch_add(1, Ordering::Relaxed);
        EventLoop { handle: chosen.handle.clone(), connections: Some(chosen.connections.clone()) }
    }
}

impl EventLoop {
    /// Runs a task on the loop.
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        self.handle.spawn(task)
    }

    /// Sockets that are created while the guard lives report their events to the loop.
    pub fn enter(&self) -> EnterGuard<'_> {
        self.handle.enter()
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        if let Some(connections) = &self.connections {
            connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn start(number: usize) -> io::Result<Loop> {
    let runtime = Builder::new_current_thread().enable_all().thread_name(format!("blocking-{number}")).build()?;
    let (handle, (stop, stopped)) = (runtime.handle().clone(), oneshot::channel());
    thread::Builder::new().name(format!("loop-{number}")).spawn(move || {
        // Ends with an error when the sender is dropped.
        let _ = runtime.block_on(stopped);
        runtime.shutdown_background();
    })?;
    Ok(Loop { handle, connections: Arc::default(), _stop: stop })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn thread_of(event_loop: &EventLoop) -> String {
        let name = event_loop.spawn(async { thread::current().name().unwrap_or_default().to_owned() });
        Builder::new_current_thread().build().unwrap().block_on(name).unwrap()
    }

    #[test]
    fn connections_are_spread_evenly() {
        let loops = EventLoops::start(2).unwrap();
        let (a, b, c) = (loops.assign(), loops.assign(), loops.assign());
        assert_ne!(thread_of(&a), thread_of(&b));
        let (one, other) = if thread_of(&a) == thread_of(&c) { (a, b) } else { (b, a) };
        // `one` and `c` share a loop: the next connection joins `other`.
        assert_eq!(thread_of(&loops.assign()), thread_of(&other));
        drop((one, c));
        assert_ne!(thread_of(&loops.assign()), thread_of(&other));
    }

    #[tokio::test]
    async fn without_loops_tasks_run_here() {
        let here = thread::current().id();
        let there = EventLoops::default().assign().spawn(async { thread::current().id() }).await.unwrap();
        assert_eq!(here, there);
    }
}
