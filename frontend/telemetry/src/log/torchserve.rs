//! The log in TorchServe's form: `access_log.log`, `model_log.log` (output of workers) and
//! `ts_log.log` (all lines, including lines of the metrics). Each line is also written to standard
//! output, with the name of its logger.
//!
//! Each destination has a queue and a thread: neither requests nor other destinations wait for a
//! disk or a terminal.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use jiff::tz::TimeZone;
use pharos::metrics::tslog::Stamp;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::line_file::LineFile;
use super::lines::{Parts, formatted};
use super::outlet::{Form, Outlet, Sink, count};
use super::sinks::Console;
use super::{Format, STREAM, missing};
use pharos::service::REQUEST_LOG_TARGET;
use pharos_os::clock;

/// The time for which lines are collected before they are written.
const COLLECTED: Duration = Duration::from_millis(25);
/// The size at which a file is moved aside, and the number of files that are kept.
const MAX_BYTES: u64 = 100 << 20;
const KEPT: u32 = 5;

/// The destination of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Destination {
    Access = 0,
    Model = 1,
    Server = 2,
    Console = 3,
}

/// The name of each destination in metrics, and of its file `NAME.log`.
const NAMES: [&str; 4] = ["access_log", "model_log", "ts_log", "stdout"];

/// The log; clones share it.
#[derive(Clone)]
pub(super) struct Journal(Arc<Inner>);

struct Inner {
    /// Indexed by [`Destination`].
    outlets: [Arc<Outlet>; 4],
    zone: TimeZone,
}

impl Journal {
    /// Starts the log with its files in `directory`. A file that cannot be opened is reported once
    /// and retried.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn start(directory: &Path) -> io::Result<Self> {
        let file = |name: &'static str, notice: fn(u64) -> String| {
            let sink = LogFile::new(directory.join(name).with_extension("log"));
            Outlet::start(Form { name, collected: COLLECTED, notice }, sink).map(Arc::new)
        };
        let [access, model, server, console] = NAMES;
        let outlets = [
            file(access, |lost| {
                format!("{} - {}\n", now(&TimeZone::system()).local(), missing(lost))
            })?,
            file(model, notice)?,
            file(server, notice)?,
            Arc::new(Outlet::start(Form { name: console, collected: COLLECTED, notice }, Console)?),
        ];
        Ok(Self(Arc::new(Inner { outlets, zone: TimeZone::system() })))
    }

    pub(super) fn outlets(&self) -> Vec<Arc<Outlet>> {
        self.0.outlets.to_vec()
    }

    /// Writes a line only to standard output.
    pub(super) fn announce(&self, line: &str) {
        self.append(Destination::Console, line);
    }

    /// Adds lines of the metrics, in the layout of the console, to `ts_log.log`. `tslog` writes
    /// them to their files and to the console.
    pub(super) fn push_metrics(&self, lines: &str) {
        self.append(Destination::Server, lines);
    }

    /// Adds a line to the file of `destination` and, in its layout, to the console. `ts_log.log`
    /// has every line.
    fn push(&self, destination: Destination, file: &str, console: &str) {
        self.append(destination, file);
        self.append(Destination::Console, console);
        if destination != Destination::Server {
            self.append(Destination::Server, console);
        }
    }

    fn append(&self, destination: Destination, lines: &str) {
        if let Some(outlet) = self.0.outlets.get(destination as usize) {
            outlet.push(lines);
        }
    }
}

fn now(zone: &TimeZone) -> Stamp {
    let now = clock::wall_ms();
    let time = jiff::Timestamp::from_millisecond(i64::try_from(now).unwrap_or(i64::MAX))
        .unwrap_or_default();
    Stamp::new(now, zone.to_offset(time).seconds())
}

/// Returns the notice for dropped lines.
fn notice(lost: u64) -> String {
    let parts = Parts::message(missing(lost));
    let source = Source {
        level: Level::WARN,
        target: module_path!(),
        thread: "log",
        logger: module_path!(),
    };
    let line = line(super::format(), &source, parts, &now(&TimeZone::system()));
    line.unwrap_or_default()
}

/// The origin of a line.
struct Source<'a> {
    level: Level,
    target: &'a str,
    thread: &'a str,
    logger: &'a str,
}

/// Formats a line in the console layout, or in another format. Lines in JSON have the thread and
/// the logger as fields: a worker's thread contains its instance and stream.
fn line(
    format: Format,
    source: &Source<'_>,
    mut parts: Parts,
    stamp: &Stamp,
) -> Result<String, std::fmt::Error> {
    let Source { level, target, thread, logger } = *source;
    let mut line = match format {
        Format::Default => {
            format!("{} [{level:<5}] {thread} {logger} - {}", stamp.local(), parts.text())
        }
        Format::Iso8601 => formatted(format, level, target, &parts)?,
        Format::Json => {
            parts.prepend("logger", logger);
            parts.prepend("thread", thread);
            formatted(format, level, target, &parts)?
        }
    };
    line.push('\n');
    Ok(line)
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut parts = Parts::default();
        event.record(&mut parts);
        let level = *event.metadata().level();
        let target = event.metadata().target();
        let stamp = now(&self.0.zone);
        let current = thread::current();
        let (destination, thread, logger) = match target {
            REQUEST_LOG_TARGET => {
                (Destination::Access, current.name().unwrap_or("-").to_owned(), "ACCESS_LOG")
            }
            "worker" => {
                let stream = parts.take(STREAM).unwrap_or_else(|| "stdout".to_owned());
                (
                    Destination::Model,
                    format!("{}-{stream}", parts.take("instance").unwrap_or_default()),
                    "MODEL_LOG",
                )
            }
            other => (Destination::Server, current.name().unwrap_or("-").to_owned(), other),
        };
        let source = Source { level, target, thread: &thread, logger };
        let access = (destination == Destination::Access)
            .then(|| format!("{} - {}\n", stamp.local(), parts.text()));
        let Ok(console) = line(super::format(), &source, parts, &stamp) else { return };
        self.push(destination, access.as_ref().unwrap_or(&console), &console);
    }
}

struct LogFile {
    path: PathBuf,
    file: Option<LineFile>,
    /// Whether the last write failed.
    failed: bool,
}

impl LogFile {
    fn new(path: PathBuf) -> Self {
        let mut new = Self { path, file: None, failed: false };
        // Creates the file early. The log is not running yet and cannot report a failure; a write
        // of the first line can.
        let _ = new.ready();
        new
    }

    /// Writes lines. An error has the number of lost lines.
    fn append(&mut self, lines: &str) -> Result<(), (io::Error, u64)> {
        self.ready().map_err(|error| (error, count(lines)))?;
        let Some(file) = &mut self.file else { return Ok(()) };
        file.append(lines).map_err(|(error, rest)| (error, count(rest)))
    }

    fn report(&mut self, error: &io::Error) {
        if !self.failed {
            let path = self.path.display();
            tracing::error!(
                "cannot write '{path}': {error}; its lines are dropped until a write succeeds"
            );
            self.failed = true;
        }
    }

    /// Ensures that the file of this name is open and not too large.
    fn ready(&mut self) -> io::Result<()> {
        if let (Some(file), Ok(named)) = (&self.file, fs::metadata(&self.path)) {
            let own = file.metadata()?;
            if (own.dev(), own.ino()) == (named.dev(), named.ino()) {
                if own.len() < MAX_BYTES {
                    return Ok(());
                }
                self.move_aside()?;
            }
        }
        if let Some(directory) = self.path.parent() {
            fs::create_dir_all(directory)?;
        }
        self.file = Some(LineFile::open(&self.path)?);
        Ok(())
    }

    /// Renames `NAME.log` to `NAME.log.1`, `NAME.log.1` to `NAME.log.2`, and so on.
    fn move_aside(&self) -> io::Result<()> {
        let numbered = |number: u32| self.path.with_extension(format!("log.{number}"));
        for number in (1..KEPT).rev() {
            if numbered(number).exists() {
                fs::rename(numbered(number), numbered(number + 1))?;
            }
        }
        fs::rename(&self.path, numbered(1))
    }
}

impl Sink for LogFile {
    fn write(&mut self, lines: &str) -> u64 {
        match self.append(lines) {
            Ok(()) => {
                self.failed = false;
                0
            }
            Err((error, lost)) => {
                self.report(&error);
                lost
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn writes_lines_to_their_files_in_torchserves_layouts() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::start(folder.path()).unwrap();
        let subscriber = tracing_subscriber::registry().with(journal.clone());
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(target: "access", "/127.0.0.1:1 \"GET /ping HTTP/1.1\" 200 3");
            tracing::warn!(target: "worker", instance = "W-9000-noop_1.0", stream = "stderr", "hello\nthere");
            tracing::error!(count = 3, "it failed");
        });
        journal.outlets().iter().for_each(|outlet| outlet.stop());
        journal.outlets().iter().for_each(|outlet| outlet.finish(Duration::from_secs(60)));
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        let line = |name: &str| {
            let text = read(name);
            assert!(text.ends_with('\n') && text.lines().count() == 1, "{text:?}");
            let (time, rest) = text.trim_end().split_at(23);
            let shape: String =
                time.chars().map(|c| if c.is_ascii_digit() { '9' } else { c }).collect();
            assert_eq!(shape, "9999-99-99T99:99:99,999");
            rest.to_owned()
        };
        assert_eq!(line("access_log.log"), " - /127.0.0.1:1 \"GET /ping HTTP/1.1\" 200 3");
        assert_eq!(
            line("model_log.log"),
            " [WARN ] W-9000-noop_1.0-stderr MODEL_LOG - hello\\nthere"
        );
        let all = read("ts_log.log");
        let parts = ["ACCESS_LOG - /127.0.0.1:1", "-stderr MODEL_LOG - hello", "tests - it failed"];
        for (line, part) in all.lines().zip(parts) {
            assert!(line.contains(part), "{line}");
        }
        let (head, text) =
            all.lines().nth(2).and_then(|line| line.split_at(23).1.split_once(" - ")).unwrap();
        assert!(head.starts_with(" [ERROR] ") && head.ends_with(module_path!()), "{head}");
        assert_eq!(text, "it failed count=3");
    }

    #[test]
    fn json_lines_have_the_thread_and_the_logger() {
        let source = Source {
            level: Level::WARN,
            target: "worker",
            thread: "W-9000-noop_1.0-stderr",
            logger: "MODEL_LOG",
        };
        let parts = Parts::message("hello\nthere".to_owned());
        let line = line(Format::Json, &source, parts, &Stamp::new(0, 0)).unwrap();
        let expected = "\"level\":\"WARN\",\"module\":\"worker\",\"message\":\"hello\\nthere\",\"\
                        thread\":\"W-9000-noop_1.0-stderr\",\"logger\":\"MODEL_LOG\"}\n";
        assert_eq!(line.split_once(',').unwrap().1, expected);
    }

    #[test]
    fn recreates_a_file_that_was_moved_or_is_too_large() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ts_log.log");
        let mut file = LogFile::new(path.clone());
        file.write("one\n");
        fs::rename(&path, folder.path().join("away")).unwrap();
        file.write("two\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(MAX_BYTES).unwrap();
        file.write("three\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        assert_eq!(fs::metadata(folder.path().join("ts_log.log.1")).unwrap().len(), MAX_BYTES);
    }
}
