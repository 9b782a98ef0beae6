//! The log of the server: lines on standard error or in a file. The settings apply to the whole
//! process and can be changed while it runs (the logging extension).
//!
//! Logging never blocks: lines are queued, and threads write them (`outlet`). No other code may
//! write to standard output or error.

mod line_file;
mod lines;
mod outlet;
mod sinks;
mod torchserve;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use pharos::service::{
    LogFormat as Format, LogSettings as Settings, LogUpdate as Update, REQUEST_LOG_TARGET,
};
use tracing::{Level, Metadata};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

pub(crate) use line_file::ends_within_line;
use lines::{Parts, formatted};
use outlet::{Form, Outlet};
use pharos_os::{blocking, clock};
use sinks::Plain;
use torchserve::Journal;

/// The field of a worker's line that names its stream, if that is not standard output.
const STREAM: &str = "stream";

/// The time limit for writing the last lines to all destinations at the end of the server.
const LAST_LINES: Duration = Duration::from_secs(1);

/// TorchServe's log, if enabled.
static JOURNAL: OnceLock<Journal> = OnceLock::new();

static OUTLETS: OnceLock<Vec<Arc<Outlet>>> = OnceLock::new();

/// The initial log settings.
#[derive(Clone, Debug)]
pub struct Options {
    /// 0: neither debug nor trace lines; 1: debug lines; 2 or more: trace lines too.
    pub verbose: u32,
    /// Log information.
    pub info: bool,
    /// Log warnings.
    pub warning: bool,
    /// Log errors.
    pub error: bool,
    /// The format of lines.
    pub format: Format,
    /// The file to log to; `None` for standard error.
    pub file: Option<PathBuf>,
}

/// The settings of this process.
struct Current {
    info: AtomicBool,
    warning: AtomicBool,
    error: AtomicBool,
    verbose: AtomicU32,
    format: CurrentFormat,
    /// The file; not set for standard error.
    path: OnceLock<String>,
}

/// The format of lines; at first the default.
struct CurrentFormat(AtomicU8);

impl CurrentFormat {
    const fn new() -> Self {
        Self(AtomicU8::new(Format::Default as u8))
    }

    fn get(&self) -> Format {
        let number = self.0.load(Ordering::Relaxed);
        Format::ALL.into_iter().find(|format| *format as u8 == number).unwrap_or_default()
    }

    fn set(&self, format: Format) {
        self.0.store(format as u8, Ordering::Relaxed);
    }
}

static CURRENT: Current = Current {
    info: AtomicBool::new(true),
    warning: AtomicBool::new(true),
    error: AtomicBool::new(true),
    verbose: AtomicU32::new(0),
    format: CurrentFormat::new(),
    path: OnceLock::new(),
};

/// Starts logging with these options, until the guard is dropped. A second call in one process
/// changes only the settings.
///
/// # Errors
/// The file cannot be opened, or the thread cannot be started.
pub fn start(options: &Options) -> Result<Guard, String> {
    let file = options.file.as_deref();
    let sink = Plain::new(file).map_err(|error| {
        format!(
            "--log-file '{}': {error}",
            file.map(|file| file.display().to_string()).unwrap_or_default()
        )
    })?;
    let name = if file.is_some() { "log_file" } else { "stderr" };
    let form = Form { name, collected: Duration::ZERO, notice: plain_notice };
    let outlet = Arc::new(Outlet::start(form, sink).map_err(not_started)?);
    if let Some(file) = file {
        let _ = CURRENT.path.set(file.to_string_lossy().into_owned());
    }
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .log_internal_errors(false)
        .event_format(lines::Lines)
        .with_writer(Writers(outlet.clone()));
    // Fails only if a subscriber exists already, which then remains.
    let _ = tracing_subscriber::registry().with(lines.with_filter(filter_fn(is_wanted))).try_init();
    Ok(Guard::new(vec![outlet], options))
}

/// Starts logging as TorchServe does: into its files in `directory` and to standard output, until
/// the guard is dropped. A file in the options replaces both.
///
/// # Errors
/// The same as for [`start`].
pub fn start_torchserve(options: &Options, directory: &Path) -> Result<Guard, String> {
    if options.file.is_some() {
        return start(options);
    }
    let journal = Journal::start(directory).map_err(not_started)?;
    let _ = tracing_subscriber::registry()
        .with(journal.clone().with_filter(filter_fn(is_wanted)))
        .try_init();
    let outlets = journal.outlets();
    let _ = JOURNAL.set(journal);
    Ok(Guard::new(outlets, options))
}

fn not_started(error: io::Error) -> String {
    format!("cannot start the log: {error}")
}

/// Keeps the log running; dropping it writes the last lines, for a limited time.
pub struct Guard(Vec<Arc<Outlet>>);

impl Guard {
    fn new(outlets: Vec<Arc<Outlet>>, options: &Options) -> Self {
        let _ = OUTLETS.set(outlets.clone());
        update(Update {
            info: Some(options.info),
            warning: Some(options.warning),
            error: Some(options.error),
            verbose: Some(options.verbose),
            format: Some(options.format),
        });
        std::panic::set_hook(Box::new(|panic| {
            if blocking::is_expected_panic() {
                return;
            }
            let backtrace = std::backtrace::Backtrace::capture();
            let thread = thread::current();
            tracing::error!("thread '{}' {panic}", thread.name().unwrap_or("-"));
            if backtrace.status() == std::backtrace::BacktraceStatus::Captured {
                tracing::error!("{backtrace}");
            }
        }));
        Self(outlets)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.iter().for_each(|outlet| outlet.stop());
        let deadline = clock::now() + LAST_LINES;
        self.0.iter().for_each(|outlet| outlet.finish(deadline - clock::now()));
    }
}

/// Returns the number of lines lost since the last call, by destination.
pub fn take_lost() -> Vec<(&'static str, u64)> {
    let outlets = OUTLETS.get().map(Vec::as_slice).unwrap_or_default();
    outlets.iter().map(|outlet| (outlet.name(), outlet.take_lost())).collect()
}

/// Writes a line to standard output, which TorchServe's log also uses. Does not wait.
pub fn announce(line: &str) {
    let line = format!("{line}\n");
    match JOURNAL.get() {
        Some(journal) => journal.announce(&line),
        None => drop(written_by_a_thread(move || sinks::write(rustix::stdio::stdout(), &line))),
    }
}

/// Writes a line to standard error even if logging is off, before the process exits. Waits for a
/// limited time.
pub fn write_final_line(line: &str) {
    let line: Arc<str> = format!("{line}\n").into();
    let shared = line.clone();
    match written_by_a_thread(move || sinks::write(rustix::stdio::stderr(), &shared)) {
        Some(written) => drop(written.recv_timeout(LAST_LINES)),
        None => drop(sinks::write(rustix::stdio::stderr(), &line)),
    }
}

fn written_by_a_thread(
    write: impl FnOnce() -> u64 + Send + 'static,
) -> Option<mpsc::Receiver<u64>> {
    let (writing, written) = mpsc::channel();
    let thread = thread::Builder::new().name("log".to_owned()).spawn(move || {
        let _ = writing.send(write());
    });
    thread.ok().map(|_| written)
}

/// Returns the line that replaces dropped lines in a plain log.
fn plain_notice(lost: u64) -> String {
    let line = formatted(format(), Level::WARN, module_path!(), &Parts::message(missing(lost)))
        .unwrap_or_default();
    format!("{line}\n")
}

fn missing(lost: u64) -> String {
    format!("{lost} log lines were dropped here because the destination was too slow")
}

/// Returns whether the log includes lines of the metrics, as the log of TorchServe does.
pub(crate) fn includes_metrics() -> bool {
    JOURNAL.get().is_some()
}

/// Adds lines of the metrics, in the layout of standard output, to the log.
pub(crate) fn metrics(lines: &str) {
    if let Some(journal) = JOURNAL.get().filter(|_| !lines.is_empty()) {
        journal.push_metrics(lines);
    }
}

/// Returns whether the current settings log a line.
fn is_wanted(metadata: &Metadata<'_>) -> bool {
    let is_request = metadata.target() == REQUEST_LOG_TARGET;
    let verbose = if is_request || is_ours(metadata.target()) {
        CURRENT.verbose.load(Ordering::Relaxed)
    } else {
        0
    };
    match *metadata.level() {
        // The edges log a request only if that is enabled, or if lines of the level DEBUG are
        // wanted.
        Level::INFO if is_request => true,
        Level::ERROR => CURRENT.error.load(Ordering::Relaxed),
        Level::WARN => CURRENT.warning.load(Ordering::Relaxed),
        Level::INFO => CURRENT.info.load(Ordering::Relaxed),
        Level::DEBUG => verbose >= 1,
        Level::TRACE => verbose >= 2,
    }
}

/// Returns the settings of this process.
pub fn settings() -> Settings {
    Settings {
        file: CURRENT.path.get().cloned().unwrap_or_default(),
        info: CURRENT.info.load(Ordering::Relaxed),
        warning: CURRENT.warning.load(Ordering::Relaxed),
        error: CURRENT.error.load(Ordering::Relaxed),
        verbose: CURRENT.verbose.load(Ordering::Relaxed),
        format: format(),
    }
}

fn format() -> Format {
    CURRENT.format.get()
}

/// Changes the settings and returns the result.
pub fn update(update: Update) -> Settings {
    let set = |flag: &AtomicBool, wanted: Option<bool>| {
        wanted.into_iter().for_each(|on| flag.store(on, Ordering::Relaxed))
    };
    set(&CURRENT.info, update.info);
    set(&CURRENT.warning, update.warning);
    set(&CURRENT.error, update.error);
    if let Some(verbose) = update.verbose {
        CURRENT.verbose.store(verbose, Ordering::Relaxed);
    }
    if let Some(format) = update.format {
        CURRENT.format.set(format);
    }
    // `tracing` caches the decision for each call site.
    tracing::callsite::rebuild_interest_cache();
    settings()
}

/// Reopens the files, because they may have been moved away.
pub fn reopen() {
    OUTLETS.get().map(Vec::as_slice).unwrap_or_default().iter().for_each(|outlet| outlet.reopen());
}

/// Returns whether the server or a worker logs with this target: the details of libraries are of no
/// use to operators.
fn is_ours(target: &str) -> bool {
    target.starts_with("pharos") || target == "worker"
}

/// Queues whole lines.
struct Writers(Arc<Outlet>);

struct LineWriter<'a>(&'a Outlet);

impl<'a> MakeWriter<'a> for Writers {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter(&self.0)
    }
}

impl Write for LineWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // The formatter writes text, one line per call.
        self.0.push(&String::from_utf8_lossy(line));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
