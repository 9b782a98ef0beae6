//! Unpacks archives into a directory: zip, tar and gzipped tar, detected by their first bytes. As in TorchServe, a file of any
//! other kind counts as an archive without files.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use pharos_os::tar_attributes::{AttributeLimit, without_content};
use tar::EntryType;
use zip::ZipArchive;

pub(crate) use super::pieces::Limits;
use super::pieces::Pieces;

/// Unpacks the archive in `file`, whose path is for messages.
///
/// # Errors
/// The archive is truncated or invalid, or has an entry that is not allowed; the text names the entry.
pub(crate) fn unpack(file: &File, path: &Path, target: &Path, limits: &Limits) -> Result<(), String> {
    let unreadable = |error: std::io::Error| format!("cannot read the archive: {error}");
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
                "'{shown}' is neither a zip file (.mar) nor a .tar.gz; using it as an archive without files"
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
        if entry.unix_mode().is_some_and(|mode| ![0, 0o100_000, 0o040_000].contains(&(mode & 0o170_000))) {
            return Err(format!("'{name}' is a link or a device; only files and directories are allowed"));
        }
        let directory = entry.is_dir();
        drop(entry);
        if directory {
            pieces.directory(&name)?;
        } else {
            let content = archive.by_index(index).map_err(|error| format!("cannot unpack '{name}': {error}"))?;
            pieces.file(&name, size, content)?;
        }
    }
    Ok(())
}

fn untar(reader: impl Read, pieces: &mut Pieces<'_>) -> Result<(), String> {
    let broken = |error: std::io::Error| format!("broken tar file: {}", without_content(error));
    let attributes = AttributeLimit::default();
    let mut archive = tar::Archive::new(attributes.reader(reader));
    for entry in archive.entries().map_err(broken)? {
        let entry = entry.map_err(broken)?;
        attributes.allow(entry.raw_file_position(), entry.size());
        let name = entry.path().map_err(broken)?.to_str().map(str::to_owned);
        let name = name.ok_or("the name of an entry is not UTF-8")?;
        match entry.header().entry_type() {
            EntryType::XGlobalHeader => {}
            EntryType::Directory if Path::new(&name).components().all(|part| part.as_os_str() == ".") => {}
            EntryType::Directory => pieces.directory(&name)?,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let size = entry.size();
                pieces.file(&name, size, entry)?;
            }
            _ => return Err(format!("'{name}' is a link or a device; only files and directories are allowed")),
        }
    }
    Ok(())
}
