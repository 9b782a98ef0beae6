//! Unpacks tar archives of Python environments. No entry can leave the target directory, use much
//! memory, or prevent that the next ones are unpacked.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Component, Path};

use flate2::bufread::MultiGzDecoder;
use pharos_os::tar_attributes::{AttributeLimit, without_content};
use tar::{Archive, EntryType};

/// The size limits of an environment; PyTorch with CUDA has about 8 GB.
const MAX_BYTES: u64 = 64 << 30;
const MAX_FILES: u64 = 4_000_000;

/// The permissions of the owner of a directory, without which nothing can be unpacked there or
/// removed from there.
const USABLE: u32 = 0o700;

/// The size limits of an environment.
pub(crate) struct Limits {
    pub(crate) bytes: u64,
    pub(crate) files: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: MAX_BYTES, files: MAX_FILES }
    }
}

/// Unpacks a tar file, compressed with gzip or not, into a new directory.
///
/// # Errors
/// The file is no such archive, or the directory cannot be written. The text has names of entries,
/// but nothing of a file that is no archive: it can be any that this process may read.
pub(crate) fn unpack(file: impl Read, target: &Path, limits: &Limits) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(target)?;
    let mut reader = BufReader::with_capacity(1 << 18, file);
    if reader.fill_buf()?.starts_with(&[0x1f, 0x8b]) {
        unpack_tar(MultiGzDecoder::new(reader), target, limits)
    } else {
        unpack_tar(reader, target, limits)
    }
}

/// The position of the magic of a tar file in its first block, and the size of a block (POSIX
/// `ustar`, and GNU tar).
const MAGIC_AT: usize = 257;
const MAGIC: &[u8] = b"ustar";
const BLOCK: u64 = 512;

fn unpack_tar(mut reader: impl Read, target: &Path, limits: &Limits) -> io::Result<()> {
    let mut start = Vec::new();
    reader.by_ref().take(BLOCK).read_to_end(&mut start).map_err(without_content)?;
    let is_end = start.iter().all(|byte| *byte == 0);
    if start.get(MAGIC_AT..).is_none_or(|magic| !magic.starts_with(MAGIC)) && !is_end {
        return Err(io::Error::other(
            "it is neither a tar file nor one that is compressed with gzip",
        ));
    }
    let attributes = AttributeLimit::default();
    let mut archive = Archive::new(attributes.reader(Cursor::new(start).chain(reader)));
    archive.set_preserve_mtime(true);
    let mut bytes = 0u64;
    let mut files = 0u64;
    for entry in archive.entries()? {
        let mut entry = entry.map_err(without_content)?;
        attributes.allow(entry.raw_file_position(), entry.size());
        let name = entry.path()?.into_owned();
        let kind = entry.header().entry_type();
        let refuse = |why: &str| Err(io::Error::other(format!("'{}' {why}", name.display())));
        bytes = bytes.saturating_add(entry.size());
        files += 1;
        if bytes > limits.bytes {
            return refuse(&format!("exceeds the total limit of {} bytes", limits.bytes));
        }
        if files > limits.files {
            return refuse(&format!("exceeds the total limit of {} files", limits.files));
        }
        match kind {
            EntryType::Regular
            | EntryType::Continuous
            | EntryType::Directory
            | EntryType::Symlink
            | EntryType::Link
            | EntryType::XGlobalHeader => {}
            other => {
                return refuse(&format!(
                    "has the type {other:?}; allowed are files, directories and links"
                ));
            }
        }
        if !name.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
            return refuse("is outside the environment");
        }
        if kind != EntryType::XGlobalHeader && !entry.unpack_in(target)? {
            return refuse("is outside the environment");
        }
        if kind == EntryType::Directory {
            make_usable(&target.join(&name))?;
        }
    }
    if files == 0 { Err(io::Error::other("the archive is empty")) } else { Ok(()) }
}

/// Gives the owner all permissions of a directory that was just unpacked, so it is not a link.
fn make_usable(directory: &Path) -> io::Result<()> {
    let mode = fs::symlink_metadata(directory)?.permissions().mode();
    if mode & USABLE == USABLE {
        Ok(())
    } else {
        fs::set_permissions(directory, Permissions::from_mode(mode | USABLE))
    }
}
