//! The progress of reading a large file, so that a load does not wait without end for a file system
//! that does not answer.

use std::io::{self, Read, Seek, SeekFrom};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What a thread reads while others watch it.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// Whether the thread is in a call that reads.
    reads: AtomicBool,
    /// The number of calls so far.
    calls: AtomicU64,
}

impl Reading {
    /// Returns the number of the call that reads now; `None` while no call reads.
    pub(crate) fn call(&self) -> Option<u64> {
        self.reads.load(Ordering::Acquire).then(|| self.calls.load(Ordering::Acquire))
    }

    /// Does what may block until a file system answers.
    pub(super) fn watch<T>(&self, work: impl FnOnce() -> T) -> T {
        self.calls.fetch_add(1, Ordering::Release);
        self.reads.store(true, Ordering::Release);
        let done = work();
        self.reads.store(false, Ordering::Release);
        done
    }

    /// Returns a reader of a file whose calls are watched.
    pub(super) fn of<R>(&self, file: R) -> Watched<'_, R> {
        Watched { file, reading: self }
    }
}

/// A reader whose calls are watched.
pub(super) struct Watched<'a, R> {
    file: R,
    reading: &'a Reading,
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.reading.watch(|| self.file.read(into))
    }
}

impl<R: Seek> Seek for Watched<'_, R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_a_call_that_has_not_returned_is_watched() {
        struct Looks<'a>(&'a Reading);
        impl Read for Looks<'_> {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                assert!(self.0.call().is_some());
                Ok(0)
            }
        }
        let reading = Reading::default();
        assert_eq!(reading.call(), None);
        let mut watched = reading.of(Looks(&reading));
        assert_eq!(watched.read(&mut []).unwrap(), 0);
        assert_eq!(reading.call(), None);
        reading.watch(|| assert_eq!(reading.call(), Some(2)));
    }
}
