//! The log as TorchServe's users know it: `access_log.log`, `model_log.log` (what workers print) and `ts_log.log`
//! (everything, lines of the metrics too), and each line on standard output too, with the names of the loggers.
//!
//! Lines are collected and written by a thread of their own: no request waits for a disk or a terminal.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use jiff::tz::TimeZone;
use pharos::metrics::tslog::Stamp;
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::lines::{Parts, formatted};
use super::{ACCESS, Format, STREAM, settings};
use crate::clock;

/// How long lines are collected before they are written.
const COLLECTED: Duration = Duration::from_millis(25);
/// The most bytes that wait for one file; lines beyond them are lost, and counted.
const MOST_WAITING: usize = 8 << 20;
/// A file that is larger is moved aside; so many are kept.
const MOST_BYTES: u64 = 100 << 20;
const KEPT: u32 = 5;
/// What a pipe takes as a whole.
const WHOLE: usize = 4096;

/// Where a line belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Access = 0,
    Model = 1,
    Server = 2,
    Console = 3,
}

const FILES: [(Place, &str); 3] =
    [(Place::Access, "access_log.log"), (Place::Model, "model_log.log"), (Place::Server, "ts_log.log")];

#[derive(Default)]
struct Waiting {
    /// By [`Place`].
    texts: [String; 4],
    lost: u64,
    /// The thread waits to be woken.
    asleep: bool,
    stopped: bool,
}

struct Shared {
    /// Held while a line is appended or all are taken.
    waiting: Mutex<Waiting>,
    wake: Condvar,
    zone: TimeZone,
}

/// Collects lines.
#[derive(Clone)]
pub(super) struct Journal(Arc<Shared>);

/// The thread that writes; when this is finished, everything is written.
pub(crate) struct Keeper {
    journal: Journal,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Opens the files in `directory`. What cannot be opened is told on standard error, once, and tried again.
    ///
    /// # Errors
    /// No thread is left.
    pub(super) fn start(directory: &Path) -> io::Result<Self> {
        let shared = Shared { waiting: Mutex::default(), wake: Condvar::new(), zone: TimeZone::system() };
        let journal = Journal(Arc::new(shared));
        let mut files = FILES.map(|(place, name)| LogFile::open(place, directory.join(name)));
        let own = journal.clone();
        let thread = thread::Builder::new().name("log".to_owned()).spawn(move || own.write(&mut files))?;
        Ok(Self { journal, thread: Some(thread) })
    }

    pub(super) fn journal(&self) -> Journal {
        self.journal.clone()
    }

    /// Writes what is left.
    pub(crate) fn finish(&mut self) {
        self.journal.lock().stopped = true;
        self.journal.0.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Journal {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A line for the file of `place`, and as the console has it. Whatever it is, `ts_log.log` has it too.
    fn push(&self, place: Place, file: &str, console: &str) {
        let server = (place != Place::Server).then_some((Place::Server, console));
        self.append([(place, file), (Place::Console, console)].into_iter().chain(server));
    }

    /// Lines of the metrics, which are in files of their own, and on the console, as the console has them.
    pub(super) fn push_metrics(&self, lines: &str) {
        self.append([(Place::Server, lines)].into_iter());
    }

    fn append<'a>(&self, lines: impl Iterator<Item = (Place, &'a str)>) {
        let mut waiting = self.lock();
        for (place, line) in lines {
            match waiting.texts.get_mut(place as usize) {
                Some(text) if text.len() + line.len() <= MOST_WAITING => text.push_str(line),
                _ => waiting.lost += 1,
            }
        }
        if std::mem::take(&mut waiting.asleep) {
            drop(waiting);
            self.0.wake.notify_one();
        }
    }

    /// The thread's life.
    fn write(&self, files: &mut [LogFile; 3]) {
        let mut texts: [String; 4] = Default::default();
        loop {
            let mut waiting = self.lock();
            while waiting.texts.iter().all(String::is_empty) && !waiting.stopped {
                waiting.asleep = true;
                waiting = self.0.wake.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            }
            if !waiting.stopped {
                drop(waiting);
                thread::sleep(COLLECTED);
                waiting = self.lock();
            }
            std::mem::swap(&mut texts, &mut waiting.texts);
            let (lost, stopped) = (std::mem::take(&mut waiting.lost), waiting.stopped);
            drop(waiting);
            let [access, model, server, console] = &texts;
            for (file, text) in files.iter_mut().zip([access, model, server]) {
                file.write(text);
            }
            print(console);
            texts.iter_mut().for_each(String::clear);
            if lost > 0 {
                tracing::warn!("{lost} lines of the log came faster than they could be written, and are lost");
            }
            if stopped {
                return;
            }
        }
    }
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut parts = Parts::default();
        event.record(&mut parts);
        let (level, target) = (*event.metadata().level(), event.metadata().target());
        let now = clock::wall_ms();
        let time = jiff::Timestamp::from_millisecond(i64::try_from(now).unwrap_or(i64::MAX)).unwrap_or_default();
        let stamp = Stamp::new(now, self.0.zone.to_offset(time).seconds());
        let current = thread::current();
        let (place, thread, logger) = match target {
            ACCESS => (Place::Access, current.name().unwrap_or("-").to_owned(), "ACCESS_LOG"),
            "worker" => {
                let stream = parts.take(STREAM).unwrap_or_else(|| "stdout".to_owned());
                (Place::Model, format!("{}-{stream}", parts.take("instance").unwrap_or_default()), "MODEL_LOG")
            }
            other => (Place::Server, current.name().unwrap_or("-").to_owned(), other),
        };
        let text = parts.text();
        let mut console = String::with_capacity(text.len() + 96);
        let line = match settings().format {
            Format::Default => Ok(write!(console, "{} [{level:<5}] {thread} {logger} - {text}", stamp.local())),
            format => formatted(format, (level, target), &parts).map(|line| write!(console, "{line}")),
        };
        if line.is_err() {
            return;
        }
        console.push('\n');
        match place {
            Place::Access => self.push(place, &format!("{} - {text}\n", stamp.local()), &console),
            _ => self.push(place, &console, &console),
        }
    }
}

/// Writes whole lines to standard output, so that those of others come between lines only.
fn print(text: &str) {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let piece = rest.get(..WHOLE).unwrap_or(rest);
        let whole = piece.iter().rposition(|byte| *byte == b'\n').map_or(piece.len(), |at| at + 1);
        let (piece, more) = rest.split_at(whole);
        if io::stdout().write_all(piece).and_then(|()| io::stdout().flush()).is_err() {
            return;
        }
        rest = more;
    }
}

/// One of the files.
struct LogFile {
    path: PathBuf,
    file: Option<File>,
    /// It was told that it cannot be written.
    told: bool,
}

impl LogFile {
    fn open(_: Place, path: PathBuf) -> Self {
        let mut new = Self { path, file: None, told: false };
        if let Err(error) = new.ready() {
            new.tell(&error);
        }
        new
    }

    fn write(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let written = self.ready().and_then(|()| match &mut self.file {
            Some(file) => file.write_all(text.as_bytes()),
            None => Ok(()),
        });
        match written {
            Ok(()) => self.told = false,
            Err(error) => self.tell(&error),
        }
    }

    fn tell(&mut self, error: &io::Error) {
        if !self.told {
            eprintln!("pharos: '{}' cannot be written: {error}; it is tried again", self.path.display());
            self.told = true;
        }
    }

    /// Makes sure that the file of this name is open, and not too large.
    fn ready(&mut self) -> io::Result<()> {
        if let (Some(file), Ok(named)) = (&self.file, fs::metadata(&self.path)) {
            let own = file.metadata()?;
            if (own.dev(), own.ino()) == (named.dev(), named.ino()) {
                if own.len() < MOST_BYTES {
                    return Ok(());
                }
                self.move_aside()?;
            }
        }
        if let Some(directory) = self.path.parent() {
            fs::create_dir_all(directory)?;
        }
        self.file = Some(OpenOptions::new().create(true).append(true).open(&self.path)?);
        Ok(())
    }

    /// `NAME.log` becomes `NAME.log.1`, that `NAME.log.2`, and so on.
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn lines_end_in_their_files_in_torchserves_layouts() {
        let folder = std::env::temp_dir().join(format!("pharos-torchserve-log-{}", std::process::id()));
        let mut keeper = Keeper::start(&folder).unwrap();
        let subscriber = tracing_subscriber::registry().with(keeper.journal());
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(target: "access", "/127.0.0.1:1 \"GET /ping HTTP/1.1\" 200 3");
            tracing::warn!(target: "worker", instance = "W-9000-noop_1.0", stream = "stderr", "hello\nthere");
            tracing::error!(count = 3, "it failed");
        });
        keeper.finish();
        let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
        let line = |name: &str| {
            let text = read(name);
            assert!(text.ends_with('\n') && text.lines().count() == 1, "{text:?}");
            let (time, rest) = text.trim_end().split_at(23);
            let shape: String = time.chars().map(|c| if c.is_ascii_digit() { '9' } else { c }).collect();
            assert_eq!(shape, "9999-99-99T99:99:99,999");
            rest.to_owned()
        };
        assert_eq!(line("access_log.log"), " - /127.0.0.1:1 \"GET /ping HTTP/1.1\" 200 3");
        assert_eq!(line("model_log.log"), " [WARN ] W-9000-noop_1.0-stderr MODEL_LOG - hello\\nthere");
        let all = read("ts_log.log");
        let parts = ["ACCESS_LOG - /127.0.0.1:1", "-stderr MODEL_LOG - hello", "tests - it failed"];
        for (line, part) in all.lines().zip(parts) {
            assert!(line.contains(part), "{line}");
        }
        let (head, text) = all.lines().nth(2).and_then(|line| line.split_at(23).1.split_once(" - ")).unwrap();
        assert!(head.starts_with(" [ERROR] ") && head.ends_with("pharos_frontend::log::torchserve::tests"), "{head}");
        assert_eq!(text, "it failed count=3");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_that_is_moved_or_too_large_is_begun_anew() {
        let folder = std::env::temp_dir().join(format!("pharos-torchserve-files-{}", std::process::id()));
        let path = folder.join("ts_log.log");
        let mut file = LogFile::open(Place::Server, path.clone());
        file.write("one\n");
        fs::rename(&path, folder.join("away")).unwrap();
        file.write("two\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
        OpenOptions::new().write(true).open(&path).unwrap().set_len(MOST_BYTES).unwrap();
        file.write("three\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        assert_eq!(fs::metadata(folder.join("ts_log.log.1")).unwrap().len(), MOST_BYTES);
        fs::remove_dir_all(&folder).unwrap();
    }
}
