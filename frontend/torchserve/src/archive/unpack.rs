//! Unpacks archives into a directory: zip and tar, with gzip or without, told apart by their first bytes. A file of any other
//! kind has nothing in it, as in TorchServe.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use tar::EntryType;
use zip::ZipArchive;

pub(super) use super::pieces::Limits;
use super::pieces::Pieces;

/// Unpacks the archive in `file`.
///
/// # Errors
/// It is none, is cut off, or has what an archive of a model must not have; the text says which piece.
pub(super) fn unpack(file: &Path, target: &Path, limits: &Limits) -> Result<(), String> {
    let unreadable = |error: std::io::Error| format!("it cannot be read: {error}");
    let mut reader = BufReader::with_capacity(1 << 18, File::open(file).map_err(unreadable)?);
    let mut start = Vec::new();
    reader.by_ref().take(262).read_to_end(&mut start).map_err(unreadable)?;
    reader.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    let mut pieces = Pieces::new(target, limits);
    match &*start {
        [b'P', b'K', ..] => unzip(reader, &mut pieces)?,
        [0x1f, 0x8b, ..] => untar(MultiGzDecoder::new(reader), &mut pieces)?,
        _ if start.get(257..262) == Some(b"ustar") => untar(reader, &mut pieces)?,
        _ => {
            let shown = file.display();
            tracing::warn!(
                "'{shown}' is neither a zip file (.mar) nor a .tar.gz: it is used as an archive without files"
            );
            return Ok(());
        }
    }
    if pieces.count() == 0 { Err("there is nothing in it".to_owned()) } else { Ok(()) }
}

fn unzip(reader: BufReader<File>, pieces: &mut Pieces<'_>) -> Result<(), String> {
    let broken = |error: zip::result::ZipError| format!("it is a broken zip file: {error}");
    let mut archive = ZipArchive::new(reader).map_err(broken)?;
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(broken)?;
        let name = entry.name().map_err(broken)?.into_owned();
        let size = entry.size();
        if entry.encrypted() {
            return Err(format!("'{name}' is encrypted"));
        }
        // Of a symbolic link: the kind of file in the upper bits of the mode.
        if entry.unix_mode().is_some_and(|mode| ![0, 0o100_000, 0o040_000].contains(&(mode & 0o170_000))) {
            return Err(format!("'{name}' is a link or a device; allowed are files and directories"));
        }
        let directory = entry.is_dir();
        drop(entry);
        if directory {
            pieces.directory(&name)?;
        } else {
            let content = archive.by_index(index).map_err(|error| format!("'{name}' cannot be unpacked: {error}"))?;
            pieces.file(&name, size, content)?;
        }
    }
    Ok(())
}

fn untar(reader: impl Read, pieces: &mut Pieces<'_>) -> Result<(), String> {
    let broken = |error: std::io::Error| format!("it is a broken tar file: {error}");
    let mut archive = tar::Archive::new(reader);
    for entry in archive.entries().map_err(broken)? {
        let entry = entry.map_err(broken)?;
        let name = entry.path().map_err(broken)?.to_str().map(str::to_owned);
        let name = name.ok_or("it has a name that is no UTF-8")?;
        match entry.header().entry_type() {
            EntryType::XGlobalHeader => {}
            EntryType::Directory if Path::new(&name).components().all(|part| part.as_os_str() == ".") => {}
            EntryType::Directory => pieces.directory(&name)?,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let size = entry.size();
                pieces.file(&name, size, entry)?;
            }
            _ => return Err(format!("'{name}' is a link or a device; allowed are files and directories")),
        }
    }
    Ok(())
}
