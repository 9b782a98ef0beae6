//! The sinks of outlets: standard error or a file of the user, and standard output.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::line_file::LineFile;
use super::outlet::Sink;

/// The maximum number of bytes that a pipe accepts atomically (`PIPE_BUF`).
const WHOLE: usize = 4096;

/// The plain log.
pub(super) struct Plain {
    file: Option<(PathBuf, LineFile)>,
    /// Whether the last write to the file failed.
    failed: bool,
}

impl Plain {
    /// Creates a sink for this file, or for standard error.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(super) fn new(path: Option<&Path>) -> io::Result<Self> {
        let file = path
            .map(|path| LineFile::open(path).map(|file| (path.to_owned(), file)))
            .transpose()?;
        Ok(Self { file, failed: false })
    }
}

impl Sink for Plain {
    fn write(&mut self, lines: &str) -> u64 {
        let Some((path, file)) = &mut self.file else {
            return write(rustix::stdio::stderr(), lines);
        };
        let Err((error, rest)) = file.append(lines) else {
            self.failed = false;
            return 0;
        };
        if !std::mem::replace(&mut self.failed, true) {
            let path = path.display();
            tracing::error!(
                "cannot write --log-file '{path}': {error}; writing to standard error instead"
            );
        }
        write(rustix::stdio::stderr(), rest)
    }

    fn reopen(&mut self) {
        let Some((path, file)) = &mut self.file else { return };
        match LineFile::open(path) {
            Ok(new) => *file = new,
            Err(error) => {
                let path = path.display();
                tracing::error!(
                    "cannot reopen --log-file '{path}', continuing with the old file: {error}"
                );
            }
        }
    }
}

/// Standard output.
pub(super) struct Console;

impl Sink for Console {
    fn write(&mut self, lines: &str) -> u64 {
        write(rustix::stdio::stdout(), lines)
    }
}

/// Writes whole lines in pieces; lines of other writers to the same pipe may come between them.
/// Returns the number of lost lines. Blocks while the stream accepts nothing.
pub(super) fn write(stream: BorrowedFd<'_>, lines: &str) -> u64 {
    write_pieces(lines, |piece| {
        rustix::io::write(stream, piece).map_err(|error| {
            // Another process that shares the stream has made it non-blocking.
            if error == Errno::AGAIN {
                let _ = poll(&mut [PollFd::new(&stream, PollFlags::OUT)], None);
                return Errno::INTR;
            }
            error
        })
    })
}

/// Passes whole lines to `write` in pieces, again after [`Errno::INTR`]. Returns the number of lost
/// lines.
fn write_pieces(lines: &str, mut write: impl FnMut(&[u8]) -> Result<usize, Errno>) -> u64 {
    let mut rest = lines.as_bytes();
    while !rest.is_empty() {
        let piece = rest.get(..WHOLE).unwrap_or(rest);
        let whole = piece.iter().rposition(|byte| *byte == b'\n').map_or(piece.len(), |at| at + 1);
        match write(piece.get(..whole).unwrap_or(piece)) {
            Ok(written) if written > 0 => rest = rest.get(written..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            // A write of 0 bytes is a failure too: a second attempt could give the same.
            Ok(_) | Err(_) => return rest.iter().filter(|byte| **byte == b'\n').count() as u64,
        }
    }
    0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::super::outlet::count;
    use super::*;

    #[test]
    fn counts_the_lines_lost_on_a_closed_stream() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(write(writer.as_fd(), "one\ntwo\n"), 0);
        let mut text = [0; 8];
        assert_eq!(rustix::io::read(&reader, &mut text).unwrap(), 8);
        assert_eq!(&text, b"one\ntwo\n");
        drop(reader);
        assert_eq!(write(writer.as_fd(), "three\nfour\n"), count("three\nfour\n"));
    }

    #[test]
    fn counts_the_lines_that_a_stream_does_not_accept() {
        for accepted in [0, 4, 6] {
            let mut left = accepted;
            let lost = write_pieces("one\ntwo\nthree\n", |piece| {
                Ok(std::mem::take(&mut left).min(piece.len()))
            });
            assert_eq!(lost, if accepted == 0 { 3 } else { 2 }, "{accepted}");
        }
    }

    #[test]
    fn waits_for_a_nonblocking_stream() {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        rustix::io::ioctl_fionbio(&reader, false).unwrap();
        let line = "y".repeat(5000) + "\n";
        let lines = line.repeat(100);
        let expected = lines.clone();
        let thread = std::thread::spawn(move || write(writer.as_fd(), &lines));
        let mut read = String::new();
        File::from(reader).read_to_string(&mut read).unwrap();
        assert_eq!((thread.join().unwrap(), read == expected), (0, true));
    }
}
