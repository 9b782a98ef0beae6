//! Unpacks tar archives of Python environments. No entry can leave the target directory.

use std::fs::{DirBuilder, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path};

use flate2::bufread::MultiGzDecoder;
use tar::{Archive, EntryType};

/// The size limits of an environment; PyTorch with CUDA has about 8 GB.
const MAX_BYTES: u64 = 64 << 30;
const MAX_FILES: u64 = 4_000_000;

/// The size limits of an environment.
pub(super) struct Limits {
    pub(super) bytes: u64,
    pub(super) files: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: MAX_BYTES, files: MAX_FILES }
    }
}

/// Unpacks a tar file, compressed with gzip or not, into a new directory.
pub(super) fn unpack(file: File, target: &Path, limits: &Limits) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(target)?;
    let mut reader = BufReader::with_capacity(1 << 18, file);
    if reader.fill_buf()?.starts_with(&[0x1f, 0x8b]) {
        unpack_tar(MultiGzDecoder::new(reader), target, limits)
    } else {
        unpack_tar(reader, target, limits)
    }
}

fn unpack_tar(reader: impl Read, target: &Path, limits: &Limits) -> io::Result<()> {
    let mut archive = Archive::new(reader);
    archive.set_preserve_mtime(true);
    let (mut bytes, mut files) = (0u64, 0u64);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.into_owned();
        let refuse = |why: &str| Err(io::Error::other(format!("'{}' {why}", name.display())));
        bytes = bytes.saturating_add(entry.size());
        files += 1;
        if bytes > limits.bytes {
            return refuse(&format!("exceeds the total limit of {} bytes", limits.bytes));
        }
        if files > limits.files {
            return refuse(&format!("exceeds the total limit of {} files", limits.files));
        }
        match entry.header().entry_type() {
            EntryType::Regular
            | EntryType::Continuous
            | EntryType::Directory
            | EntryType::Symlink
            | EntryType::Link
            | EntryType::XGlobalHeader => {}
            other => return refuse(&format!("has the type {other:?}; allowed are files, directories and links")),
        }
        if !name.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
            return refuse("is outside the environment");
        }
        if entry.header().entry_type() != EntryType::XGlobalHeader && !entry.unpack_in(target)? {
            return refuse("is outside the environment");
        }
    }
    if files == 0 { Err(io::Error::other("the archive is empty")) } else { Ok(()) }
}
