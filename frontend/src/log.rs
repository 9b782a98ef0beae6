//! The log of the server: lines on standard error or in a file. What is logged, and how, can change while it runs (the
//! logging extension), for the whole process.

mod lines;
mod torchserve;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use pharos::error::InferError;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli::Log;

/// The target of the lines about single requests.
const ACCESS: &str = "access";

/// The field of a worker's line that says which stream it came from, if not from standard output.
const STREAM: &str = "stream";

pub(crate) use crate::cli::LogFormat as Format;
pub(crate) use torchserve::Keeper;

/// TorchServe's log, if that is on.
static JOURNAL: OnceLock<torchserve::Journal> = OnceLock::new();

/// What is logged, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The file; empty for standard error.
    pub(crate) file: String,
    /// Whether information is logged.
    pub(crate) info: bool,
    /// Whether warnings are.
    pub(crate) warning: bool,
    /// Whether errors are.
    pub(crate) error: bool,
    /// How much is told beyond the ordinary.
    pub(crate) verbose: u32,
    /// How a line is written.
    pub(crate) format: Format,
}

/// A change; `None` leaves a setting as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Update {
    /// See [`Settings`], here and below.
    pub(crate) info: Option<bool>,
    /// Warnings.
    pub(crate) warning: Option<bool>,
    /// Errors.
    pub(crate) error: Option<bool>,
    /// Beyond the ordinary.
    pub(crate) verbose: Option<u32>,
    /// How a line is written.
    pub(crate) format: Option<Format>,
}

/// The settings of this process.
struct Current {
    info: AtomicBool,
    warning: AtomicBool,
    error: AtomicBool,
    access: AtomicBool,
    verbose: AtomicU32,
    format: AtomicU8,
    output: Mutex<Output>,
}

#[derive(Default)]
struct Output {
    path: PathBuf,
    /// `None`: standard error.
    file: Option<File>,
}

static CURRENT: Current = Current {
    info: AtomicBool::new(true),
    warning: AtomicBool::new(true),
    error: AtomicBool::new(true),
    access: AtomicBool::new(false),
    verbose: AtomicU32::new(0),
    format: AtomicU8::new(0),
    output: Mutex::new(Output { path: PathBuf::new(), file: None }),
};

/// Starts logging as the options say. A second call in one process changes the settings only.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn start(options: &Log) -> Result<(), String> {
    CURRENT.access.store(options.access, Ordering::Relaxed);
    if let Some(path) = &options.file {
        let mut output = output();
        output.file = Some(open(path).map_err(|error| format!("--log-file '{}': {error}", path.display()))?);
        output.path.clone_from(path);
    }
    let lines = tracing_subscriber::fmt::layer().with_ansi(false).event_format(lines::Lines).with_writer(Writers);
    // Fails only when a subscriber exists already, which then stays.
    let _ = tracing_subscriber::registry().with(lines.with_filter(filter_fn(is_wanted))).try_init();
    take(options);
    Ok(())
}

/// Starts logging as TorchServe does: into its files in `directory` and to standard output, until what is given back is
/// dropped. Who names a file with the options has that in their place.
///
/// # Errors
/// As [`start`]; or no thread is left.
pub(crate) fn start_torchserve(options: &Log, directory: &Path) -> Result<Option<Keeper>, String> {
    if options.file.is_some() {
        return start(options).map(|()| None);
    }
    CURRENT.access.store(options.access, Ordering::Relaxed);
    let keeper = Keeper::start(directory).map_err(|error| format!("the log cannot be started: {error}"))?;
    let _ = tracing_subscriber::registry().with(keeper.journal().with_filter(filter_fn(is_wanted))).try_init();
    let _ = JOURNAL.set(keeper.journal());
    take(options);
    Ok(Some(keeper))
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

fn take(options: &Log) {
    let &Log { verbose, info, warning, error, format, .. } = options;
    let (info, warning, error) = (Some(info), Some(warning), Some(error));
    update(Update { info, warning, error, verbose: Some(verbose), format: Some(format) });
}

/// Whether a line is logged as the settings are now.
fn is_wanted(metadata: &Metadata<'_>) -> bool {
    let on = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
    let verbose = |least| CURRENT.verbose.load(Ordering::Relaxed) >= least && is_ours(metadata.target());
    match *metadata.level() {
        Level::INFO if metadata.target() == ACCESS => on(&CURRENT.access),
        Level::ERROR => on(&CURRENT.error),
        Level::WARN => on(&CURRENT.warning),
        Level::INFO => on(&CURRENT.info),
        Level::DEBUG => verbose(1),
        Level::TRACE => verbose(2),
    }
}

/// The settings now.
pub(crate) fn settings() -> Settings {
    let format = CURRENT.format.load(Ordering::Relaxed);
    Settings {
        file: output().path.to_string_lossy().into_owned(),
        info: CURRENT.info.load(Ordering::Relaxed),
        warning: CURRENT.warning.load(Ordering::Relaxed),
        error: CURRENT.error.load(Ordering::Relaxed),
        verbose: CURRENT.verbose.load(Ordering::Relaxed),
        format: Format::ALL.into_iter().find(|known| *known as u8 == format).unwrap_or_default(),
    }
}

/// Changes the settings, and gives those that hold now.
pub(crate) fn update(update: Update) -> Settings {
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

/// The format that a client names.
///
/// # Errors
/// INVALID_ARG with Triton's text.
pub(crate) fn format_named(name: &str) -> Result<Format, InferError> {
    Format::from_name(name).ok_or_else(|| InferError::invalid(format!("{WRONG_FORMAT}, got: {name}")))
}

/// How the refusal of a format begins.
pub(crate) const WRONG_FORMAT: &str = "invalid argument for --log_format";

/// The refusal of a setting that a client cannot change: the file, or one that does not exist.
pub(crate) fn unchangeable(name: &str) -> InferError {
    match name {
        "log_file" => InferError::unsupported("log file location can not be updated through network protocol"),
        _ => InferError::invalid(format!(
            "unknown log setting '{name}'; there are log_info, log_warning, log_error, log_verbose_level, log_format"
        )),
    }
}

/// Opens the file anew, for who has moved it away.
pub(crate) fn reopen() {
    let mut output = output();
    if output.file.is_none() {
        return;
    }
    match open(&output.path) {
        Ok(file) => output.file = Some(file),
        Err(error) => {
            let path = output.path.display().to_string();
            drop(output);
            tracing::error!("--log-file '{path}' cannot be opened again, so the old one is written on: {error}");
        }
    }
}

/// Whether single requests are logged.
pub(crate) fn access() -> bool {
    CURRENT.access.load(Ordering::Relaxed)
}

/// One line about a request: protocol, method, path, status, and how long it took.
pub(crate) fn answered(protocol: &'static str, what: &str, status: u16, ns: u64) {
    let ms = std::time::Duration::from_nanos(ns).as_secs_f64() * 1e3;
    tracing::info!(target: ACCESS, protocol, request = what, status, ms = format_args!("{ms:.3}"), "answered");
}

/// The line of a request in TorchServe's form.
pub(crate) fn answered_line(line: &str) {
    tracing::info!(target: ACCESS, "{line}");
}

/// What libraries say in detail is of no use to those who run a server.
fn is_ours(target: &str) -> bool {
    target.starts_with("pharos") || target == "worker"
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

fn output() -> MutexGuard<'static, Output> {
    CURRENT.output.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes each line whole, to the file or to standard error.
struct Writers;

struct LineWriter;

impl<'a> MakeWriter<'a> for Writers {
    type Writer = LineWriter;

    fn make_writer(&'a self) -> LineWriter {
        LineWriter
    }
}

impl Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // A file that cannot be written any more must not silence the server.
        let written = output().file.as_mut().is_some_and(|file| file.write_all(line).is_ok());
        if !written {
            io::stderr().write_all(line)?;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
