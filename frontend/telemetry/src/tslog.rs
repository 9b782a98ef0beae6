//! Writes the metric logs: one thread that sleeps until something is recorded, then writes every few milliseconds.
//!
//! No request waits for its lines: handing one over to the thread and back would cost more than a small request takes.
//! They are written `LINGER` after the first sample if the thread slept, otherwise within `TICK`.
//!
//! What is written decides `pharos::metrics::journal`, how a line looks `pharos::metrics::tslog`; here are the thread, the
//! time and the files. Inference never waits for any of it: a full disk costs lines, which are counted.

mod archive;
mod sink;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, Thread};
use std::time::Duration;

use jiff::tz::TimeZone;
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::Cache;
use pharos::metrics::counter_lines::Counters;
use pharos::metrics::journal::{Batch, MAX_WAITING};
use pharos::metrics::tslog::{self, File, Layout, Stamp, Text};
use pharos::timeline::Instant;

use crate::log;
use pharos_os::clock;
use sink::{LogFile, Sink, Stdout};

/// How often lines are written while there are any. The bound of the delay between an answer and its lines.
const TICK: Duration = Duration::from_millis(3);
/// How long the thread waits for further samples after the first one: a request's samples come within one short execution.
const LINGER: Duration = Duration::from_millis(1);
/// How often sums are written while the bound on lines leaves no lines to single requests.
const SUMS: Duration = Duration::from_millis(50);
/// How long after a failure a write is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Where and how metrics are logged.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The directory of the files; `None` for standard output alone.
    pub location: Option<PathBuf>,
    /// The size at which a file is put into the archive; 0 for never.
    pub max_bytes: u64,
    /// How many archived files are kept of each.
    pub keep: usize,
    /// Whether lines go to standard output too.
    pub stdout: bool,
    /// JSON objects instead of lines of text.
    pub json: bool,
    /// The most lines in a second; 0 for no bound.
    pub lines_per_second: u32,
}

/// The thread that writes.
pub struct Writer {
    thread: Thread,
    stopping: Arc<AtomicBool>,
    ended: mpsc::Receiver<()>,
}

impl Writer {
    /// Starts the thread. It writes nothing while the definition of the metrics wants no lines.
    ///
    /// # Errors
    /// No thread is left.
    pub fn start(cache: Arc<Cache>, settings: Settings) -> std::io::Result<Self> {
        let stopping = Arc::new(AtomicBool::new(false));
        let (ending, ended) = mpsc::channel();
        let mut work = WriterThread::new(cache.clone(), settings, stopping.clone());
        let thread = thread::Builder::new().name("tslog".into()).spawn(move || {
            work.run();
            let _ = ending.send(());
        })?;
        let thread = thread.thread().clone();
        let sleeper = thread.clone();
        cache.journal().attach(move || sleeper.unpark());
        Ok(Self { thread, stopping, ended })
    }

    /// Writes what waits and ends the thread, for at most `patience`. To be called when nothing is recorded any more.
    pub fn stop(self, patience: Duration) {
        self.stopping.store(true, Ordering::Release);
        self.thread.unpark();
        if self.ended.recv_timeout(patience).is_err() {
            tracing::error!("the last lines of the metric logs could not be written in time");
        }
    }
}

/// What the thread has.
struct WriterThread {
    cache: Arc<Cache>,
    settings: Settings,
    stopping: Arc<AtomicBool>,
    zone: TimeZone,
    batch: Batch,
    counters: Counters,
    /// Lines are wanted.
    open: bool,
    /// While lines are wanted: one for each of [`File::ALL`], unless there is standard output alone.
    files: Vec<LogFile>,
    stdout: Option<Stdout>,
    allowance: Allowance,
    /// When all counters were last told, whatever the bound.
    told_all: Instant,
    /// When sums were last written.
    told_sums: Instant,
}

impl WriterThread {
    fn new(cache: Arc<Cache>, settings: Settings, stopping: Arc<AtomicBool>) -> Self {
        Self {
            cache,
            stopping,
            zone: TimeZone::system(),
            batch: Batch::default(),
            counters: Counters::new(),
            open: false,
            files: Vec::new(),
            stdout: settings.stdout.then(Stdout::new),
            allowance: Allowance::new(settings.lines_per_second),
            told_all: clock::now(),
            told_sums: clock::now(),
            settings,
        }
    }

    fn run(&mut self) {
        // Opens the files, so that they exist from the start.
        self.visit(false);
        while !self.stopping.load(Ordering::Acquire) {
            let journal = self.cache.journal().clone();
            if journal.wanted() != self.open {
                self.visit(true);
            } else if !journal.wanted() {
                thread::park();
            } else if self.visit(false) {
                self.sleep(TICK);
            } else {
                journal.rest();
                // Whoever recorded something at this moment may have seen us awake: one more look.
                self.sleep(TICK);
                if journal.resting() && !self.visit(false) {
                    self.rest();
                }
            }
        }
        self.visit(true);
        self.files.iter_mut().for_each(LogFile::finish);
    }

    /// Waits until something is recorded, or until what could not be written is tried again.
    fn rest(&self) {
        let waits = self.files.iter().any(|file| file.waits()) || self.stdout.as_ref().is_some_and(Sink::waits);
        while self.cache.journal().resting() && self.cache.journal().wanted() && !self.stopping.load(Ordering::Acquire)
        {
            if waits {
                return thread::park_timeout(RETRY);
            }
            thread::park();
        }
        // The first of many: the others come with it.
        self.sleep(LINGER);
    }

    /// Sleeps, but not past the order to stop.
    fn sleep(&self, time: Duration) {
        let until = clock::now() + time;
        loop {
            let left = until - clock::now();
            if left.is_zero() || self.stopping.load(Ordering::Acquire) {
                return;
            }
            thread::park_timeout(left);
        }
    }

    /// Writes what there is; `all`: whatever the bound. Returns whether to come again soon.
    fn visit(&mut self, all: bool) -> bool {
        let wanted = self.cache.journal().wanted();
        if wanted && !self.open {
            let Settings { location, max_bytes, keep, .. } = &self.settings;
            let open = |file| location.as_ref().map(|location| LogFile::open(file, location, (*max_bytes, *keep)));
            self.files = File::ALL.into_iter().filter_map(open).collect();
            self.open = true;
        }
        let now = clock::now();
        let stamp = self.stamp();
        let busy = self.gather(&stamp, now, all);
        self.files.iter_mut().for_each(|file| file.write(now, stamp.date()));
        if let Some(stdout) = &mut self.stdout {
            stdout.write();
        }
        self.count();
        if !wanted {
            self.files.iter_mut().for_each(LogFile::finish);
            self.files.clear();
            self.open = false;
        }
        busy
    }

    /// Formats everything that waits. Returns whether there was anything, or is something left for the next time.
    fn gather(&mut self, stamp: &Stamp, now: Instant, all: bool) -> bool {
        let all = all || now - self.told_all >= RETRY;
        self.told_all = if all { now } else { self.told_all };
        let (room, kept) = (self.allowance.refill(now), self.allowance.kept());
        // Sums at every visit would use up the bound when there are many series.
        let sums = all || room > kept || now - self.told_sums >= SUMS;
        self.told_sums = if sums { now } else { self.told_sums };
        let journal = self.cache.journal().clone();
        let Self { batch, counters, files, stdout, settings, allowance, cache, open, .. } = self;
        let logged = log::takes_metrics().then(String::new);
        let mut output = Output { files, stdout, logged, json: settings.json, open: *open, stamp, lines: 0 };
        journal.take(batch, room, kept);
        batch.for_each(|line, value, ids| {
            if !output.line(line.text(), line.shown(value), ids) {
                journal.put_off(line, value);
            }
        });
        let bound = if all { u64::MAX } else { output.lines.saturating_add(room as u64) };
        let mut waits = !sums;
        let mut told = |text: &Text, value| {
            waits |= output.lines >= bound;
            output.lines < bound && output.line(text, value, "")
        };
        if sums {
            journal.settle(batch, |line, value| told(line.text(), line.shown(value)));
            counters.collect(cache, room.saturating_sub(kept) as u64, &mut told);
        }
        allowance.used = output.lines;
        log::metrics(output.logged.as_deref().unwrap_or_default());
        output.lines > 0 || waits
    }

    fn stamp(&self) -> Stamp {
        let now = clock::wall_ms();
        let time = jiff::Timestamp::from_millisecond(i64::try_from(now).unwrap_or(i64::MAX)).unwrap_or_default();
        Stamp::new(now, self.zone.to_offset(time).seconds())
    }

    /// Puts what was written, skipped and in vain into the metrics.
    fn count(&mut self) {
        let journal = self.cache.journal().clone();
        for (at, file) in File::ALL.into_iter().enumerate() {
            let sink = self.files.get_mut(at);
            let (written, errors) = sink.map_or((0, 0), |file| file.take_counts());
            add(&self.cache, Builtin::TslogLines, file.as_str(), written);
            add(&self.cache, Builtin::TslogErrors, file.as_str(), errors);
            add(&self.cache, Builtin::TslogSkipped, file.as_str(), journal.take_skipped(file));
        }
        if let Some(stdout) = &mut self.stdout {
            let (written, skipped) = stdout.take_counts();
            add(&self.cache, Builtin::TslogLines, tslog::STDOUT, written);
            add(&self.cache, Builtin::TslogSkipped, tslog::STDOUT, skipped);
        }
    }
}

fn add(cache: &Cache, counter: Builtin, file: &str, count: u64) {
    if count > 0
        && let Ok(series) = cache.counter(counter.name(), &[file])
    {
        // A counter takes every whole number.
        let _ = series.add_or_update(count as f64);
    }
}

/// Where the lines of one visit go.
struct Output<'a> {
    files: &'a mut [LogFile],
    stdout: &'a mut Option<Stdout>,
    /// Lines for the server's log.
    logged: Option<String>,
    json: bool,
    open: bool,
    stamp: &'a Stamp,
    lines: u64,
}

impl Output<'_> {
    /// Takes a line, unless its file has no room for it.
    fn line(&mut self, text: &Text, value: f64, request_ids: &str) -> bool {
        if !self.open {
            return true;
        }
        let layout = |plain| if self.json { Layout::Json } else { plain };
        if let Some(file) = self.files.iter_mut().find(|sink| sink.file == text.file()) {
            if !file.has_room() {
                return false;
            }
            text.write(file.pending(), layout(Layout::File), self.stamp, (value, request_ids));
        }
        if let Some(pending) = self.stdout.as_mut().and_then(Stdout::next_line) {
            text.write(pending, layout(Layout::Console), self.stamp, (value, request_ids));
        }
        if let Some(logged) = &mut self.logged {
            text.write(logged, Layout::Console, self.stamp, (value, request_ids));
        }
        self.lines += 1;
        true
    }
}

/// How many lines may still be written: the bound of one second, filled up with time.
struct Allowance {
    per_second: u32,
    tokens: f64,
    filled: Instant,
    /// Lines since it was last filled.
    used: u64,
}

impl Allowance {
    fn new(per_second: u32) -> Self {
        Self { per_second, tokens: f64::from(per_second), filled: clock::now(), used: 0 }
    }

    /// How many samples may be taken until the next call.
    fn refill(&mut self, now: Instant) -> usize {
        if self.per_second == 0 {
            return MAX_WAITING;
        }
        let bound = f64::from(self.per_second);
        let grown = (now - self.filled).as_secs_f64() * bound;
        // Below 0 after counters were told in full: others' lines are owed then.
        self.tokens = (self.tokens - self.used as f64 + grown).clamp(-bound, bound);
        (self.filled, self.used) = (now, 0);
        self.tokens as usize
    }

    /// How many of them are left to what is lost if it is not taken: half. Counters are told request by request only while
    /// there are more.
    fn kept(&self) -> usize {
        self.per_second as usize / 2
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
