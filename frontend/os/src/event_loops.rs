//! Event loops: single-threaded runtimes that serve connections, one per thread.
//!
//! A connection stays on one loop from its first byte to its last, so that its tasks never move
//! between threads. The connections of worker processes use the same loops: a reply that belongs to
//! a connection of its loop is answered without a system call to wake another thread. Replies
//! arrive through memory: a loop looks into its [`PolledSource`]s and its [`Mailbox`] before it
//! sleeps, and from time to time while it is busy. Work that computes for long, or that may block,
//! must leave for a blocking thread ([`crate::blocking`]), because it would delay all connections
//! of its loop.

mod mailbox;

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use pharos::yielding::Yielding;
use tokio::runtime::{Builder, EnterGuard, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::{clock, scheduling};
pub use mailbox::Mailbox;

/// The event loops of a process. Without any, connections are served by the runtime that accepts
/// them. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct EventLoops {
    loops: Arc<[Loop]>,
}

#[derive(Debug)]
struct Loop {
    handle: Handle,
    connections: Arc<AtomicUsize>,
    links: Arc<AtomicUsize>,
    /// Ends the thread when it is dropped.
    _stop: oneshot::Sender<()>,
}

/// The event loop of one connection or link, which counts there until this is dropped.
#[derive(Debug)]
pub struct EventLoop {
    handle: Handle,
    count: Option<Arc<AtomicUsize>>,
}

impl EventLoops {
    /// Starts `count` loops, at least one.
    ///
    /// # Errors
    /// A thread or its descriptors cannot be created.
    pub fn start(count: usize) -> io::Result<Self> {
        let loops = (0..count.max(1)).map(start).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { loops: loops.into() })
    }

    /// Returns the loop for a connection of a client: the first one with the fewest.
    ///
    /// # Panics
    /// There are no loops, and the caller is outside a runtime.
    pub fn of_connection(&self) -> EventLoop {
        self.assign(|one| &one.connections)
    }

    /// Returns the loop for a link to a worker: the first one with the fewest. Counted apart from
    /// connections, so that a single client and a single worker share a loop.
    ///
    /// # Panics
    /// As [`EventLoops::of_connection`].
    pub fn of_link(&self) -> EventLoop {
        self.assign(|one| &one.links)
    }

    /// Waits until each loop has ended its present turn. Every task that ran at the time of the
    /// call has then ended or is waiting.
    pub async fn go_on(&self) {
        let passed: Vec<_> = self.loops.iter().map(|one| one.handle.spawn(async {})).collect();
        for one in passed {
            // An error if the loop has ended.
            let _ = one.await;
        }
    }

    fn assign(&self, count: impl Fn(&Loop) -> &Arc<AtomicUsize>) -> EventLoop {
        let Some(chosen) = self.loops.iter().min_by_key(|one| count(one).load(Ordering::Relaxed))
        else {
            return EventLoop { handle: Handle::current(), count: None };
        };
        let load = count(chosen).clone();
        load.fetch_add(1, Ordering::Relaxed);
        EventLoop { handle: chosen.handle.clone(), count: Some(load) }
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

/// Events that reach a loop through memory instead of a descriptor.
pub trait PolledSource: Send + Sync {
    /// Handles the waiting events. Returns whether there were any.
    fn poll(&self) -> bool;

    /// Asks for a wake-up through a descriptor when the next event arrives. Returns `false` if
    /// events wait already.
    fn request_wakeup(&self) -> bool;

    /// Withdraws the request of [`PolledSource::request_wakeup`].
    fn withdraw_wakeup(&self);
}

/// The number of sleeps without events after which a loop no longer polls a source.
const IDLE_SLEEPS: u32 = 64;
/// How often a loop polls its sources in a row before it serves its connections again.
const ROUNDS: u32 = 4;
/// The number of reads from connections, without a sleep in between, after which a busy loop looks
/// for replies.
const READS: u32 = 64;

struct Polled {
    source: Arc<dyn PolledSource>,
    /// The number of sleeps since its last event.
    idle: u32,
}

thread_local! {
    /// The sources of this thread's loop; `None` on other threads.
    static SOURCES: RefCell<Option<Vec<Polled>>> = const { RefCell::new(None) };
    /// The yields of this thread before it sleeps.
    static YIELDING: Cell<Yielding> = Cell::default();
    /// The reads since this thread's loop has looked for replies.
    static READS_SINCE: Cell<u32> = const { Cell::new(0) };
}

/// Counts a read from a connection of this thread's loop. A loop that always has tasks to run never
/// sleeps, so from time to time this looks for replies; otherwise requests would have precedence
/// for as long as they come.
pub fn count_read() {
    let reads = READS_SINCE.get() + 1;
    READS_SINCE.set(reads);
    if reads >= READS {
        READS_SINCE.set(0);
        look_for_replies();
    }
}

/// Polls the sources and the mailbox of this thread's loop.
fn look_for_replies() {
    if let Some(mailbox) = Mailbox::of_this_thread() {
        mailbox.empty();
    }
    let sources = SOURCES.with_borrow(|sources| {
        sources.iter().flatten().map(|one| one.source.clone()).collect::<Vec<_>>()
    });
    for source in sources {
        source.poll();
    }
}

/// Polls a source each time before the loop of this thread sleeps, while it has events. As long as
/// the loop is awake, the source needs no wake-ups. Without events for some time, the source is
/// dropped, asleep. Returns `false`, and does nothing, if this thread has no loop.
pub fn poll_before_sleep(source: &Arc<dyn PolledSource>) -> bool {
    SOURCES.with_borrow_mut(|sources| {
        let Some(sources) = sources else { return false };
        if !sources.iter().any(|known| Arc::ptr_eq(&known.source, source)) {
            source.withdraw_wakeup();
            sources.push(Polled { source: source.clone(), idle: 0 });
        }
        true
    })
}

/// Ends the polling of a source by the loop of this thread, so that it can be dropped.
pub fn forget(source: &Arc<dyn PolledSource>) {
    SOURCES.with_borrow_mut(|sources| {
        if let Some(sources) = sources {
            sources.retain(|known| !Arc::ptr_eq(&known.source, source));
        }
    });
}

/// Lets other threads run, which may bring the loop work. Several events are then handled in one
/// turn, and their threads need not wake the loop.
fn yield_processor() {
    let mut yielding = YIELDING.get();
    let now = clock::now();
    if yielding.is_allowed(now) {
        thread::yield_now();
        yielding.yielded(now, clock::now());
        YIELDING.set(yielding);
    }
}

/// Polls the sources of this thread's loop, and lets them sleep.
fn before_sleep() {
    // Taken out, because a source may add another one.
    let Some(mut polled) = SOURCES.with_borrow_mut(|sources| sources.as_mut().map(std::mem::take))
    else {
        return;
    };
    let Some(mailbox) = Mailbox::of_this_thread() else { return };
    READS_SINCE.set(0);
    yield_processor();
    let mut all_quiet = false;
    for _ in 0..ROUNDS {
        mailbox.empty();
        for one in &mut polled {
            one.idle = if one.source.poll() { 0 } else { one.idle + 1 };
        }
        all_quiet = mailbox.request_wakeup();
        for one in &polled {
            all_quiet &= one.source.request_wakeup();
        }
        if all_quiet {
            break;
        }
    }
    if !all_quiet {
        // A task to run keeps the loop from sleeping.
        tokio::spawn(async {});
    }
    polled.retain(|one| one.idle < IDLE_SLEEPS);
    SOURCES.with_borrow_mut(|sources| {
        if let Some(sources) = sources {
            polled.append(sources);
            *sources = polled;
        }
    });
}

/// Withdraws the requests for wake-ups.
fn after_sleep() {
    if let Some(mailbox) = Mailbox::of_this_thread() {
        mailbox.withdraw_wakeup();
    }
    SOURCES.with_borrow(|sources| {
        sources.iter().flatten().for_each(|one| one.source.withdraw_wakeup())
    });
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        if let Some(count) = &self.count {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn start(number: usize) -> io::Result<Loop> {
    let mut builder = Builder::new_current_thread();
    builder.on_thread_park(before_sleep).on_thread_unpark(after_sleep);
    // Blocking threads, which the loop starts, work for longer.
    builder.on_thread_start(scheduling::use_usual_slices);
    let runtime = builder.enable_all().thread_name(format!("blocking-{number}")).build()?;
    let handle = runtime.handle().clone();
    let (stop, stopped) = oneshot::channel();
    let mailbox = Mailbox::new(handle.clone());
    thread::Builder::new().name(format!("loop-{number}")).spawn(move || {
        scheduling::shorten_slices(0);
        SOURCES.with_borrow_mut(|sources| *sources = Some(Vec::new()));
        mailbox.belongs_to_this_thread();
        // Ends with an error when the sender is dropped.
        let _ = runtime.block_on(stopped);
        runtime.shutdown_background();
    })?;
    Ok(Loop { handle, connections: Arc::default(), links: Arc::default(), _stop: stop })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;

    fn thread_of(event_loop: &EventLoop) -> String {
        let name =
            event_loop.spawn(async { thread::current().name().unwrap_or_default().to_owned() });
        Builder::new_current_thread().build().unwrap().block_on(name).unwrap()
    }

    #[test]
    fn connections_are_spread_evenly_and_links_apart() {
        let loops = EventLoops::start(2).unwrap();
        let a = loops.of_connection();
        let b = loops.of_connection();
        assert_ne!(thread_of(&a), thread_of(&b));
        let link = loops.of_link();
        assert_eq!(
            thread_of(&link),
            thread_of(&a),
            "a single client and a single worker share a loop"
        );
        drop(b);
        let c = loops.of_connection();
        assert_ne!(thread_of(&c), thread_of(&a));
        drop(a);
        assert_eq!(thread_of(&loops.of_connection()), thread_of(&link));
    }

    #[test]
    fn a_loop_goes_on_when_its_task_waits() {
        let loops = EventLoops::start(2).unwrap();
        let (begun, begins) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel();
        let ended = Arc::new(AtomicBool::new(false));
        let task = ended.clone();
        loops.of_connection().spawn(async move {
            begun.send(()).unwrap();
            // Computes, as far as the loop can see.
            ends.recv().unwrap();
            task.store(true, Ordering::SeqCst);
            std::future::pending::<()>().await;
        });
        begins.recv().unwrap();
        let runtime = Builder::new_current_thread().build().unwrap();
        let mut passed = Box::pin(loops.go_on());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        for _ in 0..1000 {
            assert!(passed.as_mut().poll(&mut context).is_pending());
        }
        end.send(()).unwrap();
        runtime.block_on(passed);
        assert!(ended.load(Ordering::SeqCst));
        runtime.block_on(EventLoops::default().go_on());
    }

    /// Counts events, and the wake-ups that its sleep asks for.
    #[derive(Default)]
    struct Events {
        events: AtomicUsize,
        handled: AtomicUsize,
        asleep: AtomicBool,
        handled_one: tokio::sync::Notify,
    }

    impl PolledSource for Events {
        fn poll(&self) -> bool {
            let count = self.events.swap(0, Ordering::SeqCst);
            self.handled.fetch_add(count, Ordering::SeqCst);
            if count > 0 {
                self.handled_one.notify_one();
            }
            count > 0
        }

        fn request_wakeup(&self) -> bool {
            self.asleep.store(true, Ordering::SeqCst);
            self.events.load(Ordering::SeqCst) == 0
        }

        fn withdraw_wakeup(&self) {
            self.asleep.store(false, Ordering::SeqCst);
        }
    }

    #[test]
    fn sources_are_polled_before_the_loop_sleeps() {
        let loops = EventLoops::start(1).unwrap();
        let events = Arc::new(Events::default());
        let source: Arc<dyn PolledSource> = events.clone();
        assert!(!poll_before_sleep(&source), "this thread has no loop");
        let here = events.clone();
        let event_loop = loops.of_connection();
        let task = event_loop.spawn(async move {
            assert!(poll_before_sleep(&source) && poll_before_sleep(&source));
            for _ in 0..100 {
                assert!(!here.asleep.load(Ordering::SeqCst), "the loop is awake");
                here.events.fetch_add(1, Ordering::SeqCst);
                here.handled_one.notified().await;
            }
        });
        Builder::new_current_thread().build().unwrap().block_on(task).unwrap();
        assert_eq!(events.handled.load(Ordering::SeqCst), 100);
        // Without events, the loop drops the source after some sleeps; `forget` drops it at once.
        // A task may come before the loop sleeps, so the number of sleeps is unknown.
        let end = clock::now() + Duration::from_secs(60);
        while Arc::strong_count(&events) > 1 && clock::now() < end {
            thread_of(&event_loop);
        }
        assert!(events.asleep.load(Ordering::SeqCst) && Arc::strong_count(&events) == 1);
        let source: Arc<dyn PolledSource> = events.clone();
        let task = event_loop.spawn(async move {
            poll_before_sleep(&source);
            forget(&source);
        });
        Builder::new_current_thread().build().unwrap().block_on(task).unwrap();
        assert_eq!(Arc::strong_count(&events), 1);
    }

    #[test]
    fn a_busy_loop_looks_for_replies_after_some_reads() {
        let loops = EventLoops::start(1).unwrap();
        let events = Arc::new(Events::default());
        let source: Arc<dyn PolledSource> = events.clone();
        let here = events.clone();
        let task = loops.of_connection().spawn(async move {
            poll_before_sleep(&source);
            here.events.fetch_add(1, Ordering::SeqCst);
            let handled = Arc::new(AtomicUsize::new(0));
            let counted = handled.clone();
            Mailbox::of_this_thread().unwrap().give(move || {
                counted.fetch_add(1, Ordering::SeqCst);
            });
            // No sleep: the task does not wait.
            (0..READS - 1).for_each(|_| count_read());
            let early = (here.handled.load(Ordering::SeqCst), handled.load(Ordering::SeqCst));
            count_read();
            (early, (here.handled.load(Ordering::SeqCst), handled.load(Ordering::SeqCst)))
        });
        let (early, late) = Builder::new_current_thread().build().unwrap().block_on(task).unwrap();
        assert_eq!((early, late), ((0, 0), (1, 1)));
    }

    #[tokio::test]
    async fn without_loops_tasks_run_here() {
        let here = thread::current().id();
        let there = EventLoops::default()
            .of_connection()
            .spawn(async { thread::current().id() })
            .await
            .unwrap();
        assert_eq!(here, there);
    }
}
