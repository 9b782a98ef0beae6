//! The log of the server: lines on standard error or in a file. What is logged, and how, can change while it runs (the
//! logging extension), for the whole process.
//!
//! Logging never blocks: lines are queued, and threads of the log write them (`outlet`). Nothing else in the server may write
//! to standard output or standard error.

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

use pharos::service::{LogFormat as Format, LogSettings as Settings, LogUpdate as Update, REQUEST_LOG_TARGET};
use tracing::{Level, Metadata};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use lines::{Parts, formatted};
use outlet::{Form, Outlet};
use pharos_os::clock;
use sinks::Plain;
use torchserve::Journal;

/// The field of a worker's line that says which stream it came from, if not from standard output.
const STREAM: &str = "stream";

/// How long the last lines may take to be written when the server ends, all destinations together.
const LAST_LINES: Duration = Duration::from_secs(1);

/// TorchServe's log, if that is on.
static JOURNAL: OnceLock<Journal> = OnceLock::new();

/// The destinations of the log of this process.
static OUTLETS: OnceLock<Vec<Arc<Outlet>>> = OnceLock::new();

/// How to log from the start.
#[derive(Clone, Debug)]
pub struct Options {
    /// Log debug lines (1), trace lines too (2 and more), or neither (0).
    pub verbose: u32,
    /// Log information.
    pub info: bool,
    /// Log warnings.
    pub warning: bool,
    /// Log errors.
    pub error: bool,
    /// The form of a line.
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
    format: AtomicU8,
    /// The file; not set for standard error.
    path: OnceLock<String>,
}

static CURRENT: Current = Current {
    info: AtomicBool::new(true),
    warning: AtomicBool::new(true),
    error: AtomicBool::new(true),
    verbose: AtomicU32::new(0),
    format: AtomicU8::new(0),
    path: OnceLock::new(),
};

/// Starts logging as the options say, until the guard is dropped. A second call in one process changes the settings only.
///
/// # Errors
/// The file cannot be opened, or no thread is left.
pub fn start(options: &Options) -> Result<Guard, String> {
    let file = options.file.as_deref();
    let sink = Plain::new(file).map_err(|error| {
        format!("--log-file '{}': {error}", file.map(|file| file.display().to_string()).unwrap_or_default())
    })?;
    let name = if file.is_some() { "log_file" } else { "stderr" };
    let form = Form { name, collected: Duration::ZERO, notice: plain_notice };
    let outlet = Arc::new(Outlet::start(form, sink).map_err(not_started)?);
    if let Some(file) = file {
        let _ = CURRENT.path.set(file.to_string_lossy().into_owned());
    }
    let writers = Writers(outlet.clone());
    let lines = tracing_subscriber::fmt::layer().with_ansi(false).log_internal_errors(false);
    let lines = lines.event_format(lines::Lines).with_writer(writers);
    // Fails only when a subscriber exists already, which then stays.
    let _ = tracing_subscriber::registry().with(lines.with_filter(filter_fn(is_wanted))).try_init();
    Ok(Guard::new(vec![outlet], options))
}

/// Starts logging as TorchServe does: into its files in `directory` and to standard output, until the guard is dropped. A file
/// that the options name takes their place.
///
/// # Errors
/// As [`start`].
pub fn start_torchserve(options: &Options, directory: &Path) -> Result<Guard, String> {
    if options.file.is_some() {
        return start(options);
    }
    let journal = Journal::start(directory).map_err(not_started)?;
    let _ = tracing_subscriber::registry().with(journal.clone().with_filter(filter_fn(is_wanted))).try_init();
    let outlets = journal.outlets();
    let _ = JOURNAL.set(journal);
    Ok(Guard::new(outlets, options))
}

fn not_started(error: io::Error) -> String {
    format!("the log cannot be started: {error}")
}

/// The log, as long as this is held; dropping it writes the last lines, for a limited time.
pub struct Guard(Vec<Arc<Outlet>>);

impl Guard {
    fn new(outlets: Vec<Arc<Outlet>>, options: &Options) -> Self {
        let _ = OUTLETS.set(outlets.clone());
        let &Options { verbose, info, warning, error, format, .. } = options;
        let (info, warning, error) = (Some(info), Some(warning), Some(error));
        update(Update { info, warning, error, verbose: Some(verbose), format: Some(format) });
        std::panic::set_hook(Box::new(|panic| {
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

/// Lines lost since the last call, by destination.
pub fn take_lost() -> Vec<(&'static str, u64)> {
    let outlets = OUTLETS.get().map(Vec::as_slice).unwrap_or_default();
    outlets.iter().map(|outlet| (outlet.name(), outlet.take_lost())).collect()
}

/// Writes a line to standard output, where TorchServe's log also goes; waits for nothing.
pub fn announce(line: &str) {
    let line = format!("{line}\n");
    match JOURNAL.get() {
        Some(journal) => journal.announce(&line),
        None => drop(written_by_a_thread(move || sinks::write(rustix::stdio::stdout(), &line))),
    }
}

/// Writes a line to standard error even when logging is off, for the moment before the process ends. Waits for a limited time.
pub fn last_words(line: &str) {
    let line = format!("{line}\n");
    if let Some(written) = written_by_a_thread(move || sinks::write(rustix::stdio::stderr(), &line)) {
        let _ = written.recv_timeout(LAST_LINES);
    }
}

fn written_by_a_thread(write: impl FnOnce() -> u64 + Send + 'static) -> Option<mpsc::Receiver<u64>> {
    let (writing, written) = mpsc::channel();
    let work = move || {
        let _ = writing.send(write());
    };
    thread::Builder::new().name("log".to_owned()).spawn(work).ok().map(|_| written)
}

/// What a log in the plain form says where lines are missing.
fn plain_notice(lost: u64) -> String {
    let line = formatted(format(), (Level::WARN, module_path!()), &Parts::message(missing(lost))).unwrap_or_default();
    format!("{line}\n")
}

fn missing(lost: u64) -> String {
    format!("{lost} lines of the log were dropped here: they were not written as fast as they came")
}

/// Whether lines of the metrics are in the log too: in TorchServe's.
pub(crate) fn takes_metrics() -> bool {
    JOURNAL.get().is_some()
}

/// Puts lines of the metrics, as the console has them, into the log.
pub(crate) fn metrics(lines: &str) {
    if let Some(journal) = JOURNAL.get().filter(|_| !lines.is_empty()) {
        journal.push_metrics(lines);
    }
}

/// Whether a line is logged as the settings are now.
fn is_wanted(metadata: &Metadata<'_>) -> bool {
    let on = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
    let verbose = |least| CURRENT.verbose.load(Ordering::Relaxed) >= least && is_ours(metadata.target());
    match *metadata.level() {
        // The edges log a request only if that is enabled, whatever the other settings.
        Level::INFO if metadata.target() == REQUEST_LOG_TARGET => true,
        Level::ERROR => on(&CURRENT.error),
        Level::WARN => on(&CURRENT.warning),
        Level::INFO => on(&CURRENT.info),
        Level::DEBUG => verbose(1),
        Level::TRACE => verbose(2),
    }
}

/// The settings now.
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

/// How a line is written now.
fn format() -> Format {
    let format = CURRENT.format.load(Ordering::Relaxed);
    Format::ALL.into_iter().find(|known| *known as u8 == format).unwrap_or_default()
}

/// Changes the settings, and gives those that hold now.
pub fn update(update: Update) -> Settings {
    let set =
        |flag: &AtomicBool, wanted: Option<bool>| wanted.into_iter().for_each(|on| flag.store(on, Ordering::Relaxed));
    set(&CURRENT.info, update.info);
    set(&CURRENT.warning, update.warning);
    set(&CURRENT.error, update.error);
    if let Some(verbose) = update.verbose {
        CURRENT.verbose.store(verbose, Ordering::Relaxed);
    }
    if let Some(format) = update.format {
        CURRENT.format.store(format as u8, Ordering::Relaxed);
    }
    // What is logged is asked once for each place in the code, not for each line.
    tracing::callsite::rebuild_interest_cache();
    settings()
}

/// Has the files opened again, because they may have been moved away.
pub fn reopen() {
    OUTLETS.get().map(Vec::as_slice).unwrap_or_default().iter().for_each(|outlet| outlet.reopen());
}

/// What libraries say in detail is of no use to those who run a server.
fn is_ours(target: &str) -> bool {
    target.starts_with("pharos") || target == "worker"
}

/// Queues each line, whole.
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
        // The formatter makes text, one line for each call.
        self.0.push(&String::from_utf8_lossy(line));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
