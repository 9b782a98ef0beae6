//! The destinations of lines: size-limited files, which are reopened after failures, moves and
//! deletions, and standard output.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pharos::metrics::tslog::File;
use pharos::timeline::Instant;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::RETRY;
use super::archive::Archive;
use crate::log;

/// The maximum number of bytes that wait for a file that cannot be written.
const MAX_PENDING: usize = 4 << 20;
/// The maximum number of bytes that a ready pipe accepts without blocking (`PIPE_BUF`).
const PIPE_BYTES: usize = 4096;

/// A destination that may have to keep lines for later.
pub(super) trait Sink {
    /// Returns whether lines wait that could not be written.
    fn waits(&self) -> bool;
}

/// The directory of the files. One process writes there at a time: lines of two processes would be
/// mixed.
pub(super) struct Folder {
    path: PathBuf,
    /// The directory, once this process has locked it. Used by the writing thread only.
    lock: Mutex<Option<fs::File>>,
}

impl Folder {
    pub(super) fn new(path: &Path) -> Arc<Self> {
        Arc::new(Self { path: path.to_owned(), lock: Mutex::default() })
    }

    /// Creates the directory and locks it for this process.
    fn ensure_locked(&self) -> io::Result<()> {
        let mut lock = self.lock.lock();
        if lock.is_some() {
            return Ok(());
        }
        fs::create_dir_all(&self.path)?;
        let directory = fs::File::open(&self.path)?;
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => {
                let path = self.path.display();
                return Err(io::Error::other(format!(
                    "another server writes its metric logs to '{path}'; give each server its own \
                     directory"
                )));
            }
            // A file system without such locks.
            Ok(()) | Err(_) => *lock = Some(directory),
        }
        Ok(())
    }
}

pub(super) struct LogFile {
    pub(super) file: File,
    folder: Arc<Folder>,
    path: PathBuf,
    max_bytes: u64,
    archive: Archive,
    open: Option<fs::File>,
    pending: Pending,
    failed_at: Option<Instant>,
    written: u64,
    errors: u64,
    /// Lines without room since [`LogFile::begin`].
    refused: u64,
}

impl LogFile {
    /// Opens or creates the file in a directory; a failure is retried with the first lines. The
    /// file is archived at `max_bytes`; `keep` archived files are kept.
    pub(super) fn open(file: File, folder: Arc<Folder>, max_bytes: u64, keep: usize) -> Self {
        let location = folder.path.as_path();
        let archive = Archive::new(location, file.as_str(), keep);
        let path = location.join(format!("{}.log", file.as_str()));
        let mut new = Self {
            file,
            folder,
            path,
            max_bytes,
            archive,
            open: None,
            pending: Pending::default(),
            failed_at: None,
            written: 0,
            errors: 0,
            refused: 0,
        };
        match new.ensure_open() {
            Ok(_) => new.archive.tidy(),
            Err(error) => new.failed(&error),
        }
        new
    }

    /// Returns whether another line may wait.
    pub(super) fn has_room(&self) -> bool {
        self.pending.text.len() < MAX_PENDING
    }

    /// Begins to count lines that are refused for lack of room.
    pub(super) fn begin(&mut self) {
        self.refused = 0;
    }

    /// Counts a line that is refused for lack of room.
    pub(super) fn refuse(&mut self) {
        self.refused += 1;
    }

    /// Returns the buffer for lines.
    pub(super) fn pending(&mut self) -> &mut String {
        &mut self.pending.text
    }

    /// Writes the waiting lines. After an error, it retries only after a pause.
    pub(super) fn write(&mut self, now: Instant, date: &str) {
        let early = self.failed_at.is_some_and(|at| now - at < RETRY);
        if self.pending.text.is_empty() || early {
            return;
        }
        match self.try_write(date) {
            Ok(()) => {
                if self.failed_at.take().is_some() {
                    tracing::info!("logging metrics to '{}' again", self.path.display());
                }
            }
            Err(error) => {
                self.failed(&error);
                self.failed_at = Some(now);
            }
        }
    }

    /// Tries to write lines that a failure has kept, without the pause.
    pub(super) fn retry(&mut self, now: Instant, date: &str) {
        if let Some(failed_at) = &mut self.failed_at {
            *failed_at = Instant(0);
            self.write(now, date);
        }
    }

    /// Logs the first of consecutive failures and counts each.
    fn failed(&mut self, error: &io::Error) {
        self.errors += 1;
        if self.failed_at.is_none() {
            let path = self.path.display();
            tracing::error!(
                "cannot log metrics to '{path}': {error}; retrying, inference is not affected"
            );
            self.failed_at = Some(Instant(0));
        }
    }

    fn try_write(&mut self, date: &str) -> io::Result<()> {
        let size = self.ensure_open()?;
        let wanted = size.saturating_add(self.pending.rest().len() as u64);
        // Not within a line: a truncated line is completed in its file.
        if self.max_bytes > 0 && wanted > self.max_bytes && size > 0 && self.pending.done == 0 {
            self.archive.take(&self.path, date)?;
            self.ensure_open()?;
        }
        let Some(mut open) = self.open.as_ref() else { return Ok(()) };
        while !self.pending.rest().is_empty() {
            match open.write(self.pending.rest()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.written += self.pending.take(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Ensures that the open file is the one of this name, which may have been moved or deleted.
    /// Returns its size.
    fn ensure_open(&mut self) -> io::Result<u64> {
        let named = fs::metadata(&self.path).ok();
        if let (Some(open), Some(named)) = (&self.open, &named) {
            let own = open.metadata()?;
            if (own.dev(), own.ino()) == (named.dev(), named.ino()) {
                return Ok(own.len());
            }
        }
        self.folder.ensure_locked()?;
        if let Some(directory) = self.path.parent() {
            fs::create_dir_all(directory)?;
        }
        let mut open = OpenOptions::new().create(true).append(true).open(&self.path)?;
        // An earlier server could not complete its last line.
        if log::ends_within_line(&self.path) {
            open.write_all(b"\n")?;
        }
        let size = open.metadata()?.len();
        self.open = Some(open);
        // A line that was truncated in another file is written in full to this one.
        self.pending.done = 0;
        Ok(size)
    }

    /// Returns the number of lines written and of failed attempts since the last call.
    pub(super) fn take_counts(&mut self) -> (u64, u64) {
        (std::mem::take(&mut self.written), std::mem::take(&mut self.errors))
    }

    /// Returns the number of lines that are lost if the server ends now.
    pub(super) fn lost(&self) -> u64 {
        self.pending.text.lines().count() as u64 + self.refused
    }

    /// Reports lines that could not be written, and waits for the archive.
    pub(super) fn finish(&mut self) {
        let lines = self.lost();
        if lines > 0 {
            tracing::error!(
                "could not write {lines} lines of metrics to '{}'",
                self.path.display()
            );
        }
        self.archive.finish();
    }
}

impl Sink for LogFile {
    fn waits(&self) -> bool {
        !self.pending.text.is_empty()
    }
}

/// Formatted lines that are not written yet.
#[derive(Default)]
struct Pending {
    /// Starts at the start of a line.
    text: String,
    /// The number of bytes of the first line that are written.
    done: usize,
}

impl Pending {
    fn rest(&self) -> &[u8] {
        self.text.as_bytes().get(self.done..).unwrap_or(&[])
    }

    /// Marks the first `count` bytes of the rest as written. Returns the number of lines that end
    /// in them.
    fn take(&mut self, count: usize) -> u64 {
        self.done += count;
        let written = self.text.as_bytes().get(..self.done).unwrap_or(self.text.as_bytes());
        let Some(end) = written.iter().rposition(|byte| *byte == b'\n') else { return 0 };
        let lines = written.iter().filter(|byte| **byte == b'\n').count();
        self.text.drain(..=end);
        self.done -= end + 1;
        lines as u64
    }
}

/// Standard output. Its reader may be slow or gone: writes only as much as it accepts without
/// blocking.
pub(super) struct Stdout {
    /// The pipe, reopened in non-blocking mode: another writer may fill it after it was polled as
    /// ready.
    pipe: Option<fs::File>,
    lines: ConsoleLines,
}

/// The lines for standard output, and their numbers.
#[derive(Default)]
struct ConsoleLines {
    pending: Pending,
    closed: bool,
    written: u64,
    skipped: u64,
}

impl Stdout {
    pub(super) fn new() -> Self {
        let is_pipe = rustix::fs::fstat(rustix::stdio::stdout()).is_ok_and(|found| {
            rustix::fs::FileType::from_raw_mode(found.st_mode) == rustix::fs::FileType::Fifo
        });
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let pipe = match is_pipe {
            // Fails without /proc, or if the pipe belongs to another user; then polling must
            // suffice.
            true => OpenOptions::new()
                .write(true)
                .custom_flags(nonblocking)
                .open("/proc/self/fd/1")
                .ok(),
            false => None,
        };
        Self { pipe, lines: ConsoleLines::default() }
    }

    /// Returns the buffer for the next line, if there is room for it.
    pub(super) fn next_line(&mut self) -> Option<&mut String> {
        if self.lines.closed || self.lines.pending.text.len() >= MAX_PENDING {
            self.lines.skipped += 1;
            return None;
        }
        Some(&mut self.lines.pending.text)
    }

    /// Writes as much as standard output accepts now.
    pub(super) fn write(&mut self) {
        let stdout = self.pipe.as_ref().map_or(rustix::stdio::stdout(), AsFd::as_fd);
        self.lines.write(
            |part| if ready() { rustix::io::write(stdout, part) } else { Err(Errno::AGAIN) },
        );
    }

    /// Returns the number of lines written and skipped since the last call.
    pub(super) fn take_counts(&mut self) -> (u64, u64) {
        (std::mem::take(&mut self.lines.written), std::mem::take(&mut self.lines.skipped))
    }
}

impl ConsoleLines {
    /// Passes lines to `write` until it returns [`Errno::AGAIN`]. Any other failure closes the
    /// destination and skips the lines.
    fn write(&mut self, mut write: impl FnMut(&[u8]) -> Result<usize, Errno>) {
        while !self.pending.rest().is_empty() {
            let rest = self.pending.rest();
            let part = rest.get(..PIPE_BYTES).unwrap_or(rest);
            // Whole lines, because lines of the server's log may come between writes.
            let whole =
                part.iter().rposition(|byte| *byte == b'\n').map_or(part.len(), |at| at + 1);
            match write(part.get(..whole).unwrap_or(part)) {
                Ok(0) => self.close(&io::ErrorKind::WriteZero.into()),
                Ok(done) => self.written += self.pending.take(done),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(error) => self.close(&error.into()),
            }
        }
    }

    fn close(&mut self, error: &io::Error) {
        tracing::error!("stopped logging metrics to standard output: {error}");
        self.skipped += self.pending.text.lines().count() as u64;
        self.pending = Pending::default();
        self.closed = true;
    }
}

impl Sink for Stdout {
    fn waits(&self) -> bool {
        !self.lines.pending.text.is_empty()
    }
}

/// Returns whether standard output accepts data now.
fn ready() -> bool {
    let stdout = rustix::stdio::stdout();
    let mut descriptors = [PollFd::new(&stdout, PollFlags::OUT)];
    let now = Timespec::try_from(Duration::ZERO).ok();
    poll(&mut descriptors, now.as_ref()).is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standard_output_is_closed_if_it_accepts_nothing() {
        let mut stdout = Stdout { pipe: None, lines: ConsoleLines::default() };
        stdout.next_line().into_iter().for_each(|line| line.push_str("one\ntwo\nthree\n"));
        let mut left = 6;
        stdout.lines.write(|part| Ok(std::mem::take(&mut left).min(part.len())));
        assert_eq!((stdout.take_counts(), stdout.waits()), ((1, 2), false));
        assert_eq!((stdout.next_line().is_none(), stdout.take_counts()), (true, (0, 1)));
    }

    #[test]
    fn lines_wait_while_standard_output_is_full() {
        let mut lines = ConsoleLines::default();
        lines.pending.text.push_str("one\ntwo\n");
        let mut results = [Err(Errno::INTR), Ok(4), Err(Errno::AGAIN)].into_iter();
        lines.write(|_| results.next().unwrap_or(Err(Errno::IO)));
        assert_eq!(
            (lines.written, lines.skipped, lines.closed, lines.pending.text.as_str()),
            (1, 0, false, "two\n")
        );
    }
}
