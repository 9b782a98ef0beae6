//! Bounds what is read into memory of a tar archive: the name, the link target and the attributes
//! of an entry, which come before its data in headers of any length (POSIX `pax`, "pax Extended
//! Header"; GNU tar, "Basic Tar Format").

use std::cell::Cell;
use std::io::{self, Read};

/// The maximum number of bytes of the headers of one entry.
pub const MAX_ATTRIBUTES: u64 = 1 << 20;

/// Returns an error of reading an archive without its content: errors about a header quote the
/// header, and a file that is no archive may be any that this process can read.
pub fn without_content(error: io::Error) -> io::Error {
    let is_from_here = error.raw_os_error().is_some() || error.to_string() == attributes_too_long();
    let text = match error.kind() {
        _ if is_from_here => return error,
        io::ErrorKind::UnexpectedEof => "it ends too early",
        _ => "its content is not that of a valid archive",
    };
    io::Error::new(error.kind(), text)
}

/// Returns the text of the error that the headers of an entry have more bytes.
fn attributes_too_long() -> String {
    format!("the name and the attributes of an entry have more than {MAX_ATTRIBUTES} bytes")
}

/// The end of what may be read of an archive before its next entry is known.
#[derive(Debug)]
pub struct AttributeLimit(Cell<u64>);

impl Default for AttributeLimit {
    fn default() -> Self {
        Self(Cell::new(MAX_ATTRIBUTES))
    }
}

impl AttributeLimit {
    /// Returns a reader of the archive that refuses to read beyond the headers of an entry.
    /// `reader` is at its start.
    pub fn reader<R: Read>(&self, reader: R) -> impl Read {
        Bounded { reader, position: 0, end: &self.0 }
    }

    /// Allows to read the data of an entry, which has `size` bytes from `position` on, and the
    /// headers of the next entry.
    pub fn allow(&self, position: u64, size: u64) {
        self.0.set(position.saturating_add(size).saturating_add(MAX_ATTRIBUTES));
    }
}

struct Bounded<'a, R> {
    reader: R,
    position: u64,
    end: &'a Cell<u64>,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        self.position = self.position.saturating_add(read as u64);
        if self.position <= self.end.get() {
            return Ok(read);
        }
        Err(io::Error::other(attributes_too_long()))
    }
}
