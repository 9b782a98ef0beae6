//! One destination of log lines: a bounded queue and the thread that empties it.
//!
//! Never blocks the logging thread. A destination that accepts no lines (a pipe that is not read, a
//! disk that hangs) fills its queue; further lines are dropped and counted. A notice with their
//! number follows when the destination accepts lines again.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// The maximum number of bytes that wait for one destination. The same number may wait while they
/// are written.
const MAX_WAITING: usize = 4 << 20;

/// The buffer is reused unless it has grown larger than this.
const KEPT_BYTES: usize = 64 << 10;

/// The destination of an outlet's lines. Its methods run in the outlet's thread and may block.
pub(super) trait Sink: Send + 'static {
    /// Writes whole lines. Returns the number of lost lines.
    fn write(&mut self, lines: &str) -> u64;

    /// Reopens the file, because it may have been moved away.
    fn reopen(&mut self) {}
}

/// The properties of an outlet.
#[derive(Clone, Copy)]
pub(super) struct Form {
    /// The name of the destination in metrics.
    pub(super) name: &'static str,
    /// The time for which lines are collected before they are written.
    pub(super) collected: Duration,
    /// Returns the notice that replaces this number of dropped lines.
    pub(super) notice: fn(u64) -> String,
}

/// A destination of lines for all threads.
pub(super) struct Outlet {
    shared: Arc<Shared>,
    /// Receives a message when the thread ends. A receiver is not `Sync`: only [`Outlet::finish`]
    /// locks it.
    ended: Mutex<mpsc::Receiver<()>>,
}

struct Shared {
    form: Form,
    /// Locked while a line is appended or all are taken, never during a write.
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Lines that were dropped or could not be written, since the last [`Outlet::take_lost`].
    lost: AtomicU64,
}

#[derive(Default)]
struct Queue {
    lines: String,
    /// Lines dropped since `lines` was last taken. The dropped lines follow `lines`.
    dropped: u64,
    /// Whether the thread waits to be woken.
    asleep: bool,
    reopen: bool,
    stopped: bool,
}

impl Queue {
    fn is_idle(&self) -> bool {
        self.lines.is_empty() && self.dropped == 0 && !self.reopen && !self.stopped
    }
}

/// The work of the thread besides writing the lines it took.
struct NextWrite {
    dropped: u64,
    reopen: bool,
    stopped: bool,
}

impl Outlet {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(form: Form, sink: impl Sink) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            form,
            queue: Mutex::default(),
            wake: Condvar::new(),
            lost: AtomicU64::new(0),
        });
        let (ending, ended) = mpsc::channel();
        let own = shared.clone();
        thread::Builder::new().name("log".to_owned()).spawn(move || {
            own.run(sink);
            let _ = ending.send(());
        })?;
        Ok(Self { shared, ended: Mutex::new(ended) })
    }

    /// Returns the name of the destination in metrics.
    pub(super) fn name(&self) -> &'static str {
        self.shared.form.name
    }

    /// Queues whole lines, or drops them if the queue is full.
    pub(super) fn push(&self, lines: &str) {
        let mut queue = self.shared.lock();
        // After a dropped line, all lines are dropped until the queue is taken, so that one notice
        // marks the place.
        if queue.dropped == 0 && queue.lines.len() + lines.len() <= MAX_WAITING {
            queue.lines.push_str(lines);
        } else {
            let count = count(lines);
            queue.dropped += count;
            self.shared.lost.fetch_add(count, Ordering::Relaxed);
        }
        self.wake(queue);
    }

    /// Makes the sink reopen its file.
    pub(super) fn reopen(&self) {
        let mut queue = self.shared.lock();
        queue.reopen = true;
        self.wake(queue);
    }

    /// Returns the number of lines lost since the last call.
    pub(super) fn take_lost(&self) -> u64 {
        self.shared.lost.swap(0, Ordering::Relaxed)
    }

    /// Makes the thread write the waiting lines and end.
    pub(super) fn stop(&self) {
        let mut queue = self.shared.lock();
        queue.stopped = true;
        self.wake(queue);
    }

    /// Waits until the thread has ended, at most for `limit`. A thread that hangs in a write ends
    /// with the process.
    pub(super) fn finish(&self, limit: Duration) {
        let ended = self.ended.lock();
        let _ = ended.recv_timeout(limit);
    }

    fn wake(&self, mut queue: MutexGuard<'_, Queue>) {
        if std::mem::take(&mut queue.asleep) {
            drop(queue);
            self.shared.wake.notify_one();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Runs the thread.
    fn run(&self, mut sink: impl Sink) {
        let mut lines = String::new();
        loop {
            let taken = self.take(&mut lines);
            if taken.reopen {
                sink.reopen();
            }
            if !lines.is_empty() {
                self.lost.fetch_add(sink.write(&lines), Ordering::Relaxed);
            }
            if taken.dropped > 0 {
                // A notice that cannot be written is not counted: the dropped lines are.
                sink.write(&(self.form.notice)(taken.dropped));
            }
            lines.clear();
            lines.shrink_to(KEPT_BYTES);
            if taken.stopped {
                return;
            }
        }
    }

    /// Waits for lines and moves them into `lines`, which is empty.
    fn take(&self, lines: &mut String) -> NextWrite {
        let mut queue = self.lock();
        while queue.is_idle() {
            queue.asleep = true;
            self.wake.wait(&mut queue);
        }
        if !self.form.collected.is_zero() && !queue.stopped {
            drop(queue);
            thread::sleep(self.form.collected);
            queue = self.lock();
        }
        std::mem::swap(lines, &mut queue.lines);
        NextWrite {
            dropped: std::mem::take(&mut queue.dropped),
            reopen: std::mem::take(&mut queue.reopen),
            stopped: queue.stopped,
        }
    }
}

/// Returns the number of lines in a text of whole lines.
pub(super) fn count(lines: &str) -> u64 {
    lines.bytes().filter(|byte| *byte == b'\n').count() as u64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A sink that accepts a text only after a permit.
    struct Gated {
        permits: mpsc::Receiver<()>,
        written: mpsc::Sender<String>,
    }

    impl Sink for Gated {
        fn write(&mut self, lines: &str) -> u64 {
            let _ = self.permits.recv();
            let _ = self.written.send(lines.to_owned());
            0
        }
    }

    fn gated() -> (Outlet, mpsc::Sender<()>, mpsc::Receiver<String>) {
        let (permit, permits) = mpsc::channel();
        let (writing, written) = mpsc::channel();
        let notice = |lost: u64| format!("{lost} lost\n");
        let form = Form { name: "test", collected: Duration::ZERO, notice };
        (Outlet::start(form, Gated { permits, written: writing }).unwrap(), permit, written)
    }

    #[test]
    fn a_stalled_destination_drops_lines_and_reports_their_number() {
        let (outlet, permit, written) = gated();
        let line = "x".repeat(1023) + "\n";
        // The thread has taken at most one full queue when the first write hangs.
        let pushed = 2 * MAX_WAITING / line.len() + 100;
        (0..pushed).for_each(|_| outlet.push(&line));
        let lost = outlet.take_lost();
        assert!(lost >= 100, "{lost}");
        drop(permit);
        outlet.push("later\n");
        outlet.stop();
        outlet.finish(Duration::from_secs(60));
        let all: String = written.try_iter().collect();
        // The thread may take lines before, while and after some are dropped, and writes a notice
        // each time.
        let noticed = all
            .lines()
            .filter_map(|line| line.strip_suffix(" lost")?.parse::<u64>().ok())
            .sum::<u64>();
        let lost = lost + outlet.take_lost();
        assert_eq!(noticed, lost);
        let whole =
            all.lines().filter(|found| *found == line.trim_end() || *found == "later").count();
        assert_eq!(whole + usize::try_from(lost).unwrap(), pushed + 1);
    }

    #[test]
    fn finish_does_not_wait_for_a_stalled_destination() {
        let (outlet, permit, written) = gated();
        outlet.push("one\n");
        outlet.stop();
        outlet.finish(Duration::from_millis(1));
        assert!(written.try_recv().is_err());
        permit.send(()).unwrap();
        outlet.finish(Duration::from_secs(60));
        assert_eq!(written.try_iter().collect::<String>(), "one\n");
    }
}
