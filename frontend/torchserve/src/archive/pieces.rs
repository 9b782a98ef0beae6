//! Writes entries of an archive: only files and directories, only inside the target, each once, within limits.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

/// Limits on an unpacked archive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The total size of all files, in bytes.
    pub(crate) bytes: u64,
    /// The number of files and directories.
    pub(crate) pieces: u64,
}

/// An unpacked archive may have [`GROWTH`] times the size of the archive file, and at least [`MINIMUM`] bytes.
const GROWTH: u64 = 200;
const MINIMUM: u64 = 1 << 30;
const MAX_PIECES: u64 = 100_000;

impl Limits {
    /// Returns the limits for an archive file. Deflate shrinks zeros up to a thousandfold, but weights and code only a few times.
    pub(super) fn of(file: &File) -> Self {
        let size = file.metadata().map_or(0, |metadata| metadata.len());
        Self { bytes: size.saturating_mul(GROWTH).max(MINIMUM), pieces: MAX_PIECES }
    }
}

/// Writes entries into a directory.
pub(super) struct Pieces<'a> {
    target: &'a Path,
    limits: Limits,
    bytes: u64,
    count: u64,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(target: &'a Path, limits: &Limits) -> Self {
        Self { target, limits: *limits, bytes: 0, count: 0 }
    }

    /// Returns the number of entries so far.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Creates a directory and its parents.
    pub(super) fn directory(&mut self, name: &str) -> Result<(), String> {
        let path = self.enter(name)?;
        make(&path).map_err(|error| format!("cannot create '{name}': {error}"))
    }

    /// Writes a file. `declared` is the size stated in the archive. Never writes more than the remaining limit.
    pub(super) fn file(&mut self, name: &str, declared: u64, content: impl Read) -> Result<(), String> {
        let path = self.enter(name)?;
        let left = self.limits.bytes - self.bytes;
        if declared > left {
            return Err(self.too_large(name));
        }
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::AlreadyExists => format!("the archive contains '{name}' twice"),
            _ => format!("cannot unpack '{name}': {error}"),
        };
        if let Some(above) = path.parent() {
            make(above).map_err(failed)?;
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
        let written = io::copy(&mut content.take(left.saturating_add(1)), &mut file).map_err(failed)?;
        if written > left {
            return Err(self.too_large(name));
        }
        self.bytes += written;
        file.flush().map_err(failed)
    }

    fn too_large(&self, name: &str) -> String {
        format!(
            "with '{name}' the unpacked size exceeds {} bytes, the limit for an archive of this size",
            self.limits.bytes
        )
    }

    /// Counts an entry, checks its name and returns its path.
    fn enter(&mut self, name: &str) -> Result<PathBuf, String> {
        self.count += 1;
        if self.count > self.limits.pieces {
            return Err(format!("the archive has more than {} files and directories", self.limits.pieces));
        }
        let parts: Vec<Component<'_>> = Path::new(name).components().collect();
        let inside = parts.iter().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        if !inside || name.contains(['\0', '\\']) || parts.is_empty() {
            return Err(format!("'{}' is outside the archive", name.escape_debug()));
        }
        Ok(self.target.join(name))
    }
}

fn make(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}
