//! Writes the metric logs: one thread that sleeps until a sample is recorded, then writes every few
//! milliseconds.
//!
//! Requests do not wait for their lines: passing a line to the thread and back would cost more than
//! a small request takes. Lines are written `LINGER` after the first sample if the thread slept,
//! otherwise within `TICK`.
//!
//! `pharos::metrics::journal` decides what is written, and `pharos::metrics::tslog` formats lines;
//! this module has the thread, the time and the files. Inference never waits for them: a full disk
//! only loses lines, which are counted.

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
use sink::{Folder, LogFile, Sink, Stdout};

/// The interval of writes while samples arrive. It bounds the delay between a response and its
/// lines.
const TICK: Duration = Duration::from_millis(3);
/// The time that the thread waits for further samples after the first: all samples of a request
/// arrive within one short execution.
const LINGER: Duration = Duration::from_millis(1);
/// The interval at which sums are written while the line limit leaves no lines for single requests.
const SUMS: Duration = Duration::from_millis(50);
/// The pause before a failed write is retried.
const RETRY: Duration = Duration::from_secs(1);

/// The settings of the metric logs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The directory of the files; `None` for standard output only.
    pub location: Option<PathBuf>,
    /// The size in bytes at which a file is archived; 0 for never.
    pub max_bytes: u64,
    /// The number of archived files to keep of each log.
    pub keep: usize,
    /// Whether lines are also written to standard output.
    pub stdout: bool,
    /// Whether to write JSON objects instead of lines of text.
    pub json: bool,
    /// The maximum number of lines per second; 0 for no limit.
    pub lines_per_second: u32,
}

/// The handle of the writing thread.
pub struct Writer {
    thread: Thread,
    stopping: Arc<AtomicBool>,
    ended: mpsc::Receiver<()>,
}

impl Writer {
    /// Starts the thread. It writes nothing while the mode of the metrics needs no lines.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(cache: Arc<Cache>, settings: Settings) -> std::io::Result<Self> {
        let stopping = Arc::new(AtomicBool::new(false));
        let (ending, ended) = mpsc::channel();
        let mut work = WriterThread::new(cache.clone(), settings, stopping.clone());
        let handle = thread::Builder::new().name("tslog".into()).spawn(move || {
            work.run();
            let _ = ending.send(());
        })?;
        let thread = handle.thread().clone();
        let sleeper = thread.clone();
        cache.journal().attach_writer(move || sleeper.unpark());
        Ok(Self { thread, stopping, ended })
    }

    /// Writes the waiting lines and ends the thread, at most for `limit`. Call it when no samples
    /// are recorded any more.
    pub fn stop(self, limit: Duration) {
        self.stopping.store(true, Ordering::Release);
        self.thread.unpark();
        if self.ended.recv_timeout(limit).is_err() {
            tracing::error!("the last lines of the metric logs could not be written in time");
        }
    }
}

/// The state of the thread.
struct WriterThread {
    cache: Arc<Cache>,
    settings: Settings,
    stopping: Arc<AtomicBool>,
    zone: TimeZone,
    batch: Batch,
    counters: Counters,
    /// Whether the files are open, because lines are written.
    open: bool,
    /// One for each of [`File::ALL`] while `open`, unless lines go only to standard output.
    files: Vec<LogFile>,
    stdout: Option<Stdout>,
    allowance: Allowance,
    /// When all counters were last written regardless of the line limit.
    all_written_at: Instant,
    /// When sums were last written.
    sums_written_at: Instant,
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
            all_written_at: clock::now(),
            sums_written_at: clock::now(),
            settings,
        }
    }

    fn run(&mut self) {
        // Opens the files, so that they exist from the start.
        self.visit(false);
        while !self.stopping.load(Ordering::Acquire) {
            let journal = self.cache.journal().clone();
            if journal.is_enabled() != self.open {
                self.visit(true);
            } else if !journal.is_enabled() {
                thread::park();
            } else if self.visit(false) {
                self.sleep(TICK);
            } else {
                journal.sleep();
                // A concurrent sample may have found the thread awake and not woken it: check once
                // more.
                self.sleep(TICK);
                if journal.is_asleep() && !self.visit(false) {
                    self.rest();
                }
            }
        }
        self.visit_last();
    }

    /// Writes the last lines, also if a failed write is not due for a retry, and reports lost
    /// lines.
    fn visit_last(&mut self) {
        let now = clock::now();
        let stamp = self.stamp();
        // A successful write makes room for the lines of the visit.
        self.files.iter_mut().for_each(|file| file.retry(now, stamp.date()));
        self.visit(true);
        self.files.iter_mut().for_each(LogFile::finish);
    }

    /// Waits until a sample is recorded, or until a failed write is due for a retry.
    fn rest(&self) {
        let waits = self.files.iter().any(|file| file.waits())
            || self.stdout.as_ref().is_some_and(Sink::waits);
        while self.cache.journal().is_asleep()
            && self.cache.journal().is_enabled()
            && !self.stopping.load(Ordering::Acquire)
        {
            if waits {
                return thread::park_timeout(RETRY);
            }
            thread::park();
        }
        // Further samples usually follow the first.
        self.sleep(LINGER);
    }

    /// Sleeps until `time` has passed or the thread is stopped.
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

    /// Writes the waiting lines; with `all`, regardless of the line limit. Returns whether to visit
    /// again soon.
    fn visit(&mut self, all: bool) -> bool {
        let wanted = self.cache.journal().is_enabled();
        if wanted && !self.open {
            if let Some(location) = &self.settings.location {
                let folder = Folder::new(location);
                let Settings { max_bytes, keep, .. } = self.settings;
                let open = |file| LogFile::open(file, folder.clone(), max_bytes, keep);
                self.files = File::ALL.into_iter().map(open).collect();
            }
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

    /// Formats the waiting lines. Returns whether there were any or some remain.
    fn gather(&mut self, stamp: &Stamp, now: Instant, all: bool) -> bool {
        let unlimited = all || now - self.all_written_at >= RETRY;
        if unlimited {
            self.all_written_at = now;
        }
        let room = self.allowance.refill(now);
        let kept = self.allowance.kept();
        // With many series, sums at every visit would use up the line limit.
        let sums = unlimited || room > kept || now - self.sums_written_at >= SUMS;
        if sums {
            self.sums_written_at = now;
        }
        let journal = self.cache.journal().clone();
        let Self { batch, counters, files, stdout, settings, allowance, cache, open, .. } = self;
        let logged = log::includes_metrics().then(String::new);
        files.iter_mut().for_each(LogFile::begin);
        let mut output =
            Output { files, stdout, logged, json: settings.json, open: *open, stamp, lines: 0 };
        journal.take(batch, room, kept);
        batch.for_each(|line, value, ids| {
            if !output.line(line.text(), line.shown(value), ids) {
                output.refuse(line.text());
                // A later visit writes the sum of a counter.
                journal.hold_back(line, value);
            }
        });
        let bound = if unlimited { u64::MAX } else { output.lines.saturating_add(room as u64) };
        let mut waits = !sums;
        let mut write = |text: &Text, value| {
            if output.lines >= bound {
                waits = true;
                return false;
            }
            let accepted = output.line(text, value, "");
            if !accepted {
                output.refuse(text);
            }
            accepted
        };
        if sums {
            journal.flush_held(batch, |line, value| write(line.text(), line.shown(value)));
            counters.collect(cache, room.saturating_sub(kept) as u64, &mut write);
        }
        allowance.used = output.lines;
        log::metrics(output.logged.as_deref().unwrap_or_default());
        output.lines > 0 || waits
    }

    fn stamp(&self) -> Stamp {
        let now = clock::wall_ms();
        let time = jiff::Timestamp::from_millisecond(i64::try_from(now).unwrap_or(i64::MAX))
            .unwrap_or_default();
        Stamp::new(now, self.zone.to_offset(time).seconds())
    }

    /// Counts written and skipped lines and errors in the metrics.
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
    if count > 0 {
        cache.count(counter, &[file], count as f64);
    }
}

/// The destinations of the lines of one visit.
struct Output<'a> {
    files: &'a mut [LogFile],
    stdout: &'a mut Option<Stdout>,
    /// Lines for the log of the server.
    logged: Option<String>,
    json: bool,
    open: bool,
    stamp: &'a Stamp,
    lines: u64,
}

impl Output<'_> {
    /// Counts a line that its file has no room for.
    fn refuse(&mut self, text: &Text) {
        if let Some(file) = self.files.iter_mut().find(|sink| sink.file == text.file()) {
            file.refuse();
        }
    }

    /// Adds a line. Returns false if its file has no room.
    fn line(&mut self, text: &Text, value: f64, request_ids: &str) -> bool {
        if !self.open {
            return true;
        }
        let (file_layout, console_layout) =
            if self.json { (Layout::Json, Layout::Json) } else { (Layout::File, Layout::Console) };
        if let Some(file) = self.files.iter_mut().find(|sink| sink.file == text.file()) {
            if !file.has_room() {
                return false;
            }
            text.write(file.pending(), file_layout, self.stamp, value, request_ids);
        }
        if let Some(pending) = self.stdout.as_mut().and_then(Stdout::next_line) {
            text.write(pending, console_layout, self.stamp, value, request_ids);
        }
        if let Some(logged) = &mut self.logged {
            text.write(logged, console_layout, self.stamp, value, request_ids);
        }
        self.lines += 1;
        true
    }
}

/// The number of lines that may still be written: a token bucket that holds one second.
struct Allowance {
    per_second: u32,
    tokens: f64,
    filled: Instant,
    /// Lines since `filled`.
    used: u64,
}

impl Allowance {
    fn new(per_second: u32) -> Self {
        Self { per_second, tokens: f64::from(per_second), filled: clock::now(), used: 0 }
    }

    /// Returns the number of samples that may be taken until the next call.
    fn refill(&mut self, now: Instant) -> usize {
        if self.per_second == 0 {
            return MAX_WAITING;
        }
        let bound = f64::from(self.per_second);
        let grown = (now - self.filled).as_secs_f64() * bound;
        // Below 0 after all counters were written: their lines exceeded the limit.
        self.tokens = (self.tokens - self.used as f64 + grown).clamp(-bound, bound);
        self.filled = now;
        self.used = 0;
        self.tokens as usize
    }

    /// Returns the number of lines reserved for samples that would otherwise be lost: half. Lines
    /// of counters use the other half.
    fn kept(&self) -> usize {
        self.per_second as usize / 2
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
