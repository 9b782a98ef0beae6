//! What is unpacked of an archive, piece by piece: only files and directories, only inside, each once, within bounds.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

/// How much an archive may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Of all files together.
    pub(super) bytes: u64,
    /// Files and directories.
    pub(super) pieces: u64,
}

/// An archive may become so many times its size, and in any case [`ALWAYS`].
const GROWTH: u64 = 200;
const ALWAYS: u64 = 1 << 30;
const MOST_PIECES: u64 = 100_000;

impl Limits {
    /// For an archive in a file: deflate makes a thousandfold of nothing, weights and sources a few times.
    pub(super) fn of(file: &Path) -> Self {
        let size = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
        Self { bytes: size.saturating_mul(GROWTH).max(ALWAYS), pieces: MOST_PIECES }
    }
}

/// Writes pieces into a directory.
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

    /// How many there were.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// A directory, and those above it.
    pub(super) fn directory(&mut self, name: &str) -> Result<(), String> {
        let path = self.enter(name)?;
        make(&path).map_err(|error| format!("'{name}' cannot be made: {error}"))
    }

    /// A file. `declared` is the size that the archive states; more than that is not read.
    pub(super) fn file(&mut self, name: &str, declared: u64, content: impl Read) -> Result<(), String> {
        let path = self.enter(name)?;
        let left = self.limits.bytes - self.bytes;
        if declared > left {
            return Err(self.too_large(name));
        }
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::AlreadyExists => format!("'{name}' is in it twice"),
            _ => format!("'{name}' cannot be unpacked: {error}"),
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
            "with '{name}' it becomes larger than {} bytes, the most that an archive of its size may",
            self.limits.bytes
        )
    }

    /// Counts a piece, and says where it goes.
    fn enter(&mut self, name: &str) -> Result<PathBuf, String> {
        self.count += 1;
        if self.count > self.limits.pieces {
            return Err(format!("it has more than {} files and directories", self.limits.pieces));
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
