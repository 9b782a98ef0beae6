//! Unpacks archives into a directory: zip, tar and gzipped tar, detected by their first bytes. As
//! in TorchServe, a file of any other kind counts as an archive without files. Writes only files
//! and directories, only inside the target, each once, within limits.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use pharos_os::tar_attributes::{AttributeLimit, without_content};
use tar::EntryType;
use zip::ZipArchive;

/// Unpacks the archive in `file`, whose path is for messages.
///
/// # Errors
/// The archive is truncated or invalid, or has an entry that is not allowed; the text names the
/// entry.
pub(crate) fn unpack(
    file: &File,
    path: &Path,
    target: &Path,
    limits: &Limits,
) -> Result<(), String> {
    let unreadable = |error| format!("cannot read the archive: {error}");
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(format!("'{}' is neither a regular file nor a directory", path.display()));
    }
    let mut reader = BufReader::with_capacity(1 << 18, file);
    let mut start = Vec::new();
    reader.by_ref().take(262).read_to_end(&mut start).map_err(unreadable)?;
    reader.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    let mut pieces = Pieces::new(target, limits);
    match &*start {
        [b'P', b'K', ..] => unzip(reader, &mut pieces)?,
        [0x1f, 0x8b, ..] => untar(MultiGzDecoder::new(reader), &mut pieces)?,
        _ if start.get(257..262) == Some(b"ustar") => untar(reader, &mut pieces)?,
        _ => {
            let shown = path.display();
            tracing::warn!(
                "'{shown}' is neither a zip file (.mar) nor a .tar.gz; using it as an archive \
                 without files"
            );
            return Ok(());
        }
    }
    if pieces.count() == 0 { Err("the archive is empty".to_owned()) } else { Ok(()) }
}

fn unzip(reader: BufReader<&File>, pieces: &mut Pieces<'_>) -> Result<(), String> {
    let broken = |error: zip::result::ZipError| format!("broken zip file: {error}");
    let mut archive = ZipArchive::new(reader).map_err(broken)?;
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(broken)?;
        let name = entry.name().map_err(broken)?.into_owned();
        let size = entry.size();
        if entry.encrypted() {
            return Err(format!("'{name}' is encrypted"));
        }
        // Zip files store symbolic links as a file type in the upper bits of the mode.
        if entry
            .unix_mode()
            .is_some_and(|mode| ![0, 0o100_000, 0o040_000].contains(&(mode & 0o170_000)))
        {
            return Err(format!(
                "'{name}' is a link or a device; only files and directories are allowed"
            ));
        }
        let directory = entry.is_dir();
        drop(entry);
        if directory {
            pieces.directory(&name)?;
        } else {
            let content = archive
                .by_index(index)
                .map_err(|error| format!("cannot unpack '{name}': {error}"))?;
            pieces.file(&name, size, content)?;
        }
    }
    Ok(())
}

fn untar(reader: impl Read, pieces: &mut Pieces<'_>) -> Result<(), String> {
    let broken = |error: io::Error| format!("broken tar file: {}", without_content(error));
    let attributes = AttributeLimit::default();
    let mut archive = tar::Archive::new(attributes.reader(reader));
    for entry in archive.entries().map_err(broken)? {
        let entry = entry.map_err(broken)?;
        attributes.allow(entry.raw_file_position(), entry.size());
        let path = entry.path().map_err(broken)?.into_owned();
        let name = path.to_str().ok_or("the name of an entry is not UTF-8")?;
        match entry.header().entry_type() {
            EntryType::XGlobalHeader => {}
            EntryType::Directory if path.components().all(|part| part.as_os_str() == ".") => {}
            EntryType::Directory => pieces.directory(name)?,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let size = entry.size();
                pieces.file(name, size, entry)?;
            }
            _ => {
                return Err(format!(
                    "'{name}' is a link or a device; only files and directories are allowed"
                ));
            }
        }
    }
    Ok(())
}

/// Limits on an unpacked archive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The total size of all files, in bytes.
    pub(crate) bytes: u64,
    /// The number of files and directories.
    pub(crate) pieces: u64,
}

/// An unpacked archive may have [`GROWTH`] times the size of the archive file, and at least
/// [`MINIMUM`] bytes.
const GROWTH: u64 = 200;
const MINIMUM: u64 = 1 << 30;
const MAX_PIECES: u64 = 100_000;

impl Limits {
    /// Returns the limits for an archive file. Deflate shrinks zeros up to a thousandfold, but
    /// weights and code only a few times.
    pub(super) fn of(file: &File) -> Self {
        let size = file.metadata().map_or(0, |metadata| metadata.len());
        Self { bytes: size.saturating_mul(GROWTH).max(MINIMUM), pieces: MAX_PIECES }
    }
}

/// Writes entries into a directory.
struct Pieces<'a> {
    target: &'a Path,
    limits: Limits,
    bytes: u64,
    count: u64,
}

impl<'a> Pieces<'a> {
    fn new(target: &'a Path, limits: &Limits) -> Self {
        Self { target, limits: *limits, bytes: 0, count: 0 }
    }

    /// Returns the number of entries so far.
    fn count(&self) -> u64 {
        self.count
    }

    /// Creates a directory and its parents.
    fn directory(&mut self, name: &str) -> Result<(), String> {
        let path = self.enter(name)?;
        make(&path).map_err(|error| format!("cannot create '{name}': {error}"))
    }

    /// Writes a file. `declared` is the size stated in the archive. Never writes more than the
    /// remaining limit.
    fn file(&mut self, name: &str, declared: u64, content: impl Read) -> Result<(), String> {
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
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        let written =
            io::copy(&mut content.take(left.saturating_add(1)), &mut file).map_err(failed)?;
        if written > left {
            return Err(self.too_large(name));
        }
        self.bytes += written;
        file.flush().map_err(failed)
    }

    fn too_large(&self, name: &str) -> String {
        format!(
            "with '{name}' the unpacked size exceeds {} bytes, the limit for an archive of this \
             size",
            self.limits.bytes
        )
    }

    /// Counts an entry, checks its name and returns its path.
    fn enter(&mut self, name: &str) -> Result<PathBuf, String> {
        self.count += 1;
        if self.count > self.limits.pieces {
            return Err(format!(
                "the archive has more than {} files and directories",
                self.limits.pieces
            ));
        }
        let parts: Vec<Component<'_>> = Path::new(name).components().collect();
        let inside =
            parts.iter().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        if !inside || name.contains(['\0', '\\']) || parts.is_empty() {
            return Err(format!("'{}' is outside the archive", name.escape_debug()));
        }
        Ok(self.target.join(name))
    }
}

fn make(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}
