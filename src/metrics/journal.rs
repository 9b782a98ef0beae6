//! What waits to be written into the metric logs: a bounded queue between those who record and the one who writes.
//!
//! Gauges, observations, what models send and the latencies of requests are pushed, sample by sample. The server's other
//! counters are not: the writer logs by how much their cells have grown ([`Counters`](super::counter_lines::Counters)).
//! Either way the sum over lines is what the other views show.
//!
//! Between two visits of the writer only so many lines are taken as it allows. What counters grow by beyond that is summed
//! and becomes one line later: their sums stay exact. Samples of other types are skipped, and counted; the server's
//! counters, of which nothing is lost, make room for them before that.
//!
//! Recording never waits for the writer. A journal that nobody writes costs one relaxed load for each sample.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::atomic;
use super::catalog::{Kind, MetricSpec};
use super::tslog::{File, Text};

/// The most samples that wait, whatever the writer allows: some 8 MiB.
pub const MAX_WAITING: usize = 1 << 18;
/// The most bytes of request ids that wait.
const MAX_REQUEST_IDS: usize = 16 << 20;

/// Nobody writes.
const OFF: u8 = 0;
/// The writer sleeps: who records wakes it.
const ASLEEP: u8 = 1;
/// The writer comes by itself.
const AWAKE: u8 = 2;

/// One series in the journal.
#[derive(Debug)]
pub struct Line {
    text: Text,
    counter: bool,
    /// Whether it leaves the last places to others; see [`Journal::take`].
    yields: bool,
    /// How much of a sample's value makes one of the metric's unit.
    scale: f64,
    /// Of a counter: what no line tells yet, as the bits of an f64.
    held: AtomicU64,
    /// Whether the journal knows that there is something held.
    owed: AtomicBool,
}

impl Line {
    /// Of the series of `spec` with these label values; `hostname` is the server's.
    pub(super) fn new(spec: &MetricSpec, labels: &[String], hostname: &str) -> Self {
        Self {
            text: Text::new(spec, spec.labelled(labels), hostname),
            counter: spec.kind == Kind::Counter,
            yields: false,
            scale: 1.0,
            held: AtomicU64::new(0),
            owed: AtomicBool::new(false),
        }
    }

    /// Of a counter of the server itself, whose samples are whole numbers of which `scale` make one of the metric's unit:
    /// sums of them are exact. `labels` are as in [`Text::of_server`].
    pub(super) fn of_server(spec: &MetricSpec, labels: &[(&str, &str)], hostname: &str, scale: f64) -> Self {
        let text = Text::of_server(spec, labels, hostname);
        Self { text, counter: true, yields: true, scale, held: AtomicU64::new(0), owed: AtomicBool::new(false) }
    }

    /// How it is written.
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// A sample's value in the metric's unit.
    pub fn shown(&self, value: f64) -> f64 {
        value / self.scale
    }

    /// Keeps a counter's sample for later. Returns whether the journal has to be told of it.
    fn hold(&self, value: f64) -> bool {
        atomic::add(&self.held, value);
        // Whoever finds it not owed yet says so. The writer first forgets that it is, then takes what is held: whatever
        // comes in between is taken now or owed again.
        !self.owed.swap(true, Ordering::AcqRel)
    }
}

/// Samples for the writer, and the text of their request ids.
#[derive(Debug, Default)]
pub struct Batch {
    entries: Vec<Entry>,
    request_ids: String,
    owing: Vec<Arc<Line>>,
}

#[derive(Debug)]
struct Entry {
    line: Arc<Line>,
    value: f64,
    /// Where its request ids end in the batch's text; they begin where those of the entry before end.
    ids_end: usize,
}

impl Batch {
    /// Calls `each` with every sample in the order of recording: its series, its value (see [`Line::shown`]) and its request
    /// ids.
    pub fn for_each(&self, mut each: impl FnMut(&Arc<Line>, f64, &str)) {
        let mut start = 0;
        for entry in &self.entries {
            each(&entry.line, entry.value, self.request_ids.get(start..entry.ids_end).unwrap_or(""));
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
    /// How many more samples are taken until the writer comes.
    room: usize,
    /// How many places the server's counters leave to others.
    kept: usize,
}

type Waker = Box<dyn Fn() + Send + Sync>;

/// The queue.
pub struct Journal {
    hostname: String,
    state: AtomicU8,
    /// Nothing more is taken until the writer comes. A hint: the queue itself knows.
    full: AtomicBool,
    /// Held to push a sample or to swap the queue for an empty one, never while anything is written.
    queue: Mutex<Queue>,
    skipped: [AtomicU64; File::ALL.len()],
    waker: OnceLock<Waker>,
    /// Whether the definition of the metrics wants lines.
    wanted: AtomicBool,
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Journal {
    /// A journal that nobody writes yet. `hostname` stands in lines of series that name no host.
    pub(super) fn new(hostname: &str) -> Self {
        Self {
            hostname: hostname.to_owned(),
            state: AtomicU8::new(OFF),
            full: AtomicBool::new(false),
            queue: Mutex::default(),
            skipped: Default::default(),
            waker: OnceLock::new(),
            wanted: AtomicBool::new(false),
        }
    }

    /// The host's name.
    pub(super) fn hostname(&self) -> &str {
        &self.hostname
    }

    /// Somebody writes from now on: `wake` is called when there is something to do after [`Journal::rest`], from the
    /// thread that records it; it must not block. Only the first writer counts.
    pub fn attach(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.waker.set(Box::new(wake));
        self.want(self.wanted.load(Ordering::Acquire));
    }

    /// Whether the definition of the metrics has lines in it.
    pub(super) fn want(&self, wanted: bool) {
        self.wanted.store(wanted, Ordering::Release);
        let Some(wake) = self.waker.get() else { return };
        self.state.store(if wanted { AWAKE } else { OFF }, Ordering::Release);
        wake();
    }

    /// Whether lines are wanted.
    pub fn wanted(&self) -> bool {
        self.state.load(Ordering::Acquire) != OFF
    }

    /// A counter's cell has changed, or something else that the writer looks for itself.
    pub(super) fn touch(&self) {
        if self.state.load(Ordering::Relaxed) == ASLEEP {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        let woken = self.state.compare_exchange(ASLEEP, AWAKE, Ordering::AcqRel, Ordering::Relaxed);
        if let (Ok(_), Some(wake)) = (woken, self.waker.get()) {
            wake();
        }
    }

    /// Takes one sample.
    pub(super) fn push(&self, line: &Arc<Line>, value: f64, request_ids: &str) {
        self.push_all([(line, value)].into_iter(), request_ids);
    }

    /// Takes samples of one thing that happened.
    pub(super) fn push_all<'a>(&self, samples: impl Iterator<Item = (&'a Arc<Line>, f64)>, request_ids: &str) {
        if self.state.load(Ordering::Relaxed) == OFF {
            return;
        }
        let mut samples = samples.peekable();
        if samples.peek().is_none() {
            return;
        }
        if !self.full.load(Ordering::Relaxed) {
            let mut queue = self.lock();
            let Queue { batch, room, kept, .. } = &mut *queue;
            let fits = |batch: &Batch| batch.request_ids.len() + request_ids.len() <= MAX_REQUEST_IDS;
            while *room > 0 && fits(batch) {
                let Some((line, value)) = samples.next() else { break };
                if line.yields && *room <= *kept {
                    if line.hold(value) {
                        batch.owing.push(Arc::clone(line));
                    }
                    continue;
                }
                *room -= 1;
                batch.request_ids.push_str(request_ids);
                let (line, ids_end) = (Arc::clone(line), batch.request_ids.len());
                batch.entries.push(Entry { line, value, ids_end });
            }
            if samples.peek().is_some() {
                self.full.store(true, Ordering::Relaxed);
            }
        }
        samples.for_each(|(line, value)| self.put_off(line, value));
        self.touch();
    }

    /// A sample for which there is no room: a counter's is told later, another is skipped.
    pub fn put_off(&self, line: &Arc<Line>, value: f64) {
        if !line.counter {
            if let Some(skipped) = self.skipped.get(line.text.file() as usize) {
                skipped.fetch_add(1, Ordering::Relaxed);
            }
            return;
        }
        if line.hold(value) {
            self.lock().batch.owing.push(Arc::clone(line));
        }
    }

    /// For the writer: everything that waits, in place of the samples in `batch`, whose memory is used again. Until it comes the next
    /// time, `room` samples are taken; the last `kept` of these places are not for the server's counters.
    pub fn take(&self, batch: &mut Batch, room: usize, kept: usize) {
        batch.clear();
        let mut queue = self.lock();
        std::mem::swap(&mut queue.batch, batch);
        // What the last batch owed and was not settled is owed by this one.
        batch.owing.append(&mut queue.batch.owing);
        (queue.room, queue.kept) = (room.min(MAX_WAITING), kept);
        drop(queue);
        self.full.store(false, Ordering::Relaxed);
    }

    /// For the writer: what counters of `batch` have held back, once each. What `each` refuses stays held. A batch that is
    /// not settled owes it until the next one is.
    pub fn settle(&self, batch: &mut Batch, mut each: impl FnMut(&Arc<Line>, f64) -> bool) {
        for line in batch.owing.drain(..) {
            line.owed.store(false, Ordering::Release);
            let value = f64::from_bits(line.held.swap(0, Ordering::AcqRel));
            if value > 0.0 && !each(&line, value) {
                self.put_off(&line, value);
            }
        }
    }

    /// For the writer: it has nothing to do and wants to be woken. It must look once more after a while before it relies
    /// on that: who recorded something at this moment may have seen it awake.
    pub fn rest(&self) {
        let _ = self.state.compare_exchange(AWAKE, ASLEEP, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Whether nothing was recorded since [`Journal::rest`].
    pub fn resting(&self) -> bool {
        self.state.load(Ordering::Acquire) != AWAKE
    }

    /// How many samples of `file` were skipped since the last call.
    pub fn take_skipped(&self, file: File) -> u64 {
        self.skipped.get(file as usize).map_or(0, |skipped| skipped.swap(0, Ordering::Relaxed))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
