//! The queue of the lines of metric logs: bounded, between the code that records samples and the
//! writer of the logs.
//!
//! Samples of gauges, observations, metrics of models and latencies of requests are pushed one by
//! one. The server's other counters are not pushed: the writer logs the growth of their cells
//! ([`Counters`](super::counter_lines::Counters)). Either way, the sum over the lines equals the
//! value in the other views.
//!
//! Between two visits, the queue accepts as many lines as the writer allows. Beyond this limit,
//! increments of counters are summed up and become one line later, so that their sums stay exact.
//! Samples of other types are skipped and counted. The server's counters are held back first,
//! because they lose nothing.
//!
//! Recording never waits for the writer. A journal without a writer costs one relaxed load for each
//! sample.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::catalog::{Kind, MetricSpec};
use super::held_sum::HeldSum;
use super::tslog::{File, Text};

/// The number of samples that may wait, regardless of the writer's limit: some 8 MiB.
pub const MAX_WAITING: usize = 1 << 18;
/// The number of bytes of request ids that may wait.
const MAX_REQUEST_IDS: usize = 16 << 20;

/// The state of the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum WriterState {
    /// There is no writer, or nothing to write.
    Off,
    /// The writer sleeps; recording a sample wakes it.
    Asleep,
    /// The writer visits without being woken.
    Awake,
}

/// The current state of the writer.
struct CurrentState(AtomicU8);

impl CurrentState {
    fn get(&self, order: Ordering) -> WriterState {
        match self.0.load(order) {
            state if state == WriterState::Asleep as u8 => WriterState::Asleep,
            state if state == WriterState::Awake as u8 => WriterState::Awake,
            _ => WriterState::Off,
        }
    }

    fn set(&self, state: WriterState) {
        self.0.store(state as u8, Ordering::Release);
    }

    /// Changes one state to another. Returns whether the writer was in the first one.
    fn change(&self, from: WriterState, to: WriterState) -> bool {
        self.0.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// One series in the journal.
#[derive(Debug)]
pub struct Line {
    text: Text,
    counter: bool,
    /// Whether it leaves the last free places to other series; see [`Journal::take`].
    low_priority: bool,
    /// The factor between a sample's value and the metric's unit.
    scale: f64,
    /// The increments of a counter that no line contains yet.
    held: HeldSum,
}

impl Line {
    /// Creates the line of the series of `spec` with these label values; `hostname` is the
    /// server's.
    pub(super) fn new(spec: &MetricSpec, labels: &[String], hostname: &str) -> Self {
        Self {
            text: Text::new(spec, spec.labelled(labels), hostname),
            counter: spec.kind == Kind::Counter,
            low_priority: false,
            scale: 1.0,
            held: HeldSum::new(),
        }
    }

    /// Creates the line of a counter of the server itself. Its samples are whole numbers, so that
    /// sums are exact; `scale` of them are one of the metric's unit. `labels` are as in
    /// [`Text::of_server`].
    pub(super) fn of_server(
        spec: &MetricSpec,
        labels: &[(&str, &str)],
        hostname: &str,
        scale: f64,
    ) -> Self {
        let text = Text::of_server(spec, labels, hostname);
        Self { text, counter: true, low_priority: true, scale, held: HeldSum::new() }
    }

    /// Returns its text.
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// Converts a sample's value to the metric's unit.
    pub fn shown(&self, value: f64) -> f64 {
        value / self.scale
    }
}

/// Samples for the writer, and the text of their request ids.
#[derive(Debug, Default)]
pub struct Batch {
    entries: Vec<Entry>,
    request_ids: String,
    held_lines: Vec<Arc<Line>>,
}

#[derive(Debug)]
struct Entry {
    line: Arc<Line>,
    value: f64,
    /// Where its request ids end in the batch's text; they begin at the end of the previous
    /// entry's.
    ids_end: usize,
}

impl Batch {
    /// Calls `each` with every sample in the order of recording: its series, its value (see
    /// [`Line::shown`]) and its request ids.
    pub fn for_each(&self, mut each: impl FnMut(&Arc<Line>, f64, &str)) {
        let mut start = 0;
        for entry in &self.entries {
            each(
                &entry.line,
                entry.value,
                self.request_ids.get(start..entry.ids_end).unwrap_or(""),
            );
            start = entry.ids_end;
        }
    }

    fn clear(&mut self) {
        self.entries.clear();
        self.request_ids.clear();
    }
}

#[derive(Debug, Default)]
struct Queue {
    batch: Batch,
    /// The number of samples that are accepted until the writer's next visit.
    room: usize,
    /// The number of places that the server's counters leave to others.
    kept: usize,
}

type Waker = Box<dyn Fn() + Send + Sync>;

/// The journal; see the head of the module.
pub struct Journal {
    hostname: String,
    state: CurrentState,
    /// Whether no sample is accepted until the next visit. A hint, to skip the lock; the queue
    /// decides.
    full: AtomicBool,
    /// Locked to push samples or to replace the queue by an empty one, never during I/O.
    queue: Mutex<Queue>,
    skipped: [AtomicU64; File::ALL.len()],
    waker: OnceLock<Waker>,
    /// Whether the definition of the metrics contains logged metrics.
    enabled: AtomicBool,
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal")
            .field("state", &self.state.get(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

impl Journal {
    /// Creates a journal without a writer. `hostname` is used for series without a host label.
    pub(super) fn new(hostname: &str) -> Self {
        Self {
            hostname: hostname.to_owned(),
            state: CurrentState(AtomicU8::new(WriterState::Off as u8)),
            full: AtomicBool::new(false),
            queue: Mutex::default(),
            skipped: Default::default(),
            waker: OnceLock::new(),
            enabled: AtomicBool::new(false),
        }
    }

    /// Returns the host's name.
    pub(super) fn hostname(&self) -> &str {
        &self.hostname
    }

    /// Attaches the writer. `wake` is called if there is work after [`Journal::sleep`], from the
    /// thread that records a sample; it must not block. Only the first call has an effect.
    pub fn attach_writer(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.waker.set(Box::new(wake));
        self.set_enabled(self.enabled.load(Ordering::Acquire));
    }

    /// Sets whether the definition of the metrics contains logged metrics.
    pub(super) fn set_enabled(&self, enabled: bool) {
        self.enabled.store(enabled, Ordering::Release);
        let Some(wake) = self.waker.get() else { return };
        self.state.set(if enabled { WriterState::Awake } else { WriterState::Off });
        wake();
    }

    /// Returns whether a writer is attached and the definition contains logged metrics.
    pub fn is_enabled(&self) -> bool {
        self.state.get(Ordering::Acquire) != WriterState::Off
    }

    /// Wakes the writer because the cell of a counter has changed, or other data that the writer
    /// reads itself.
    pub(super) fn notify(&self) {
        if self.state.get(Ordering::Relaxed) == WriterState::Asleep {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if self.state.change(WriterState::Asleep, WriterState::Awake)
            && let Some(wake) = self.waker.get()
        {
            wake();
        }
    }

    /// Pushes one sample.
    pub(super) fn push(&self, line: &Arc<Line>, value: f64, request_ids: &str) {
        self.push_all([(line, value)].into_iter(), request_ids);
    }

    /// Pushes the samples of one event.
    pub(super) fn push_all<'a>(
        &self,
        samples: impl Iterator<Item = (&'a Arc<Line>, f64)>,
        request_ids: &str,
    ) {
        if self.state.get(Ordering::Relaxed) == WriterState::Off {
            return;
        }
        let mut samples = samples.peekable();
        if samples.peek().is_none() {
            return;
        }
        if !self.full.load(Ordering::Relaxed) {
            let mut queue = self.queue.lock();
            let Queue { batch, room, kept, .. } = &mut *queue;
            while *room > 0 && batch.request_ids.len() + request_ids.len() <= MAX_REQUEST_IDS {
                let Some((line, value)) = samples.next() else { break };
                if line.low_priority && *room <= *kept {
                    if line.held.add(value) {
                        batch.held_lines.push(Arc::clone(line));
                    }
                    continue;
                }
                *room -= 1;
                batch.request_ids.push_str(request_ids);
                let line = Arc::clone(line);
                batch.entries.push(Entry { line, value, ids_end: batch.request_ids.len() });
            }
            if samples.peek().is_some() {
                self.full.store(true, Ordering::Relaxed);
            }
        }
        samples.for_each(|(line, value)| self.hold_back(line, value));
        self.notify();
    }

    /// Handles a sample without a place in the queue: holds a counter's increment for later, and
    /// skips any other sample.
    pub fn hold_back(&self, line: &Arc<Line>, value: f64) {
        if !line.counter {
            if let Some(skipped) = self.skipped.get(line.text.file() as usize) {
                skipped.fetch_add(1, Ordering::Relaxed);
            }
            return;
        }
        if line.held.add(value) {
            self.queue.lock().batch.held_lines.push(Arc::clone(line));
        }
    }

    /// For the writer: takes all waiting samples and reuses the memory of `batch`. Until the next
    /// call, accepts `room` samples, but the server's counters leave the last `kept` places to
    /// others.
    pub fn take(&self, batch: &mut Batch, room: usize, kept: usize) {
        batch.clear();
        let mut queue = self.queue.lock();
        std::mem::swap(&mut queue.batch, batch);
        // Held increments that the previous batch did not flush move to this one.
        batch.held_lines.append(&mut queue.batch.held_lines);
        queue.room = room.min(MAX_WAITING);
        queue.kept = kept;
        drop(queue);
        self.full.store(false, Ordering::Relaxed);
    }

    /// For the writer: passes the held increments of each listed counter to `each`, once. Keeps
    /// those that `each` refuses. If a batch is not flushed, its increments move to the next batch.
    pub fn flush_held(&self, batch: &mut Batch, mut each: impl FnMut(&Arc<Line>, f64) -> bool) {
        for line in batch.held_lines.drain(..) {
            let value = line.held.take();
            if value > 0.0 && !each(&line, value) {
                self.hold_back(&line, value);
            }
        }
    }

    /// For the writer: it has no work and must be woken. It must check once more after a while
    /// before it relies on that, because a thread that recorded a sample just before may have seen
    /// it awake.
    pub fn sleep(&self) {
        self.state.change(WriterState::Awake, WriterState::Asleep);
    }

    /// Returns whether nothing was recorded since [`Journal::sleep`].
    pub fn is_asleep(&self) -> bool {
        self.state.get(Ordering::Acquire) != WriterState::Awake
    }

    /// Returns the number of samples of `file` that were skipped since the last call.
    pub fn take_skipped(&self, file: File) -> u64 {
        self.skipped.get(file as usize).map_or(0, |skipped| skipped.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
