//! The files of a version's directory.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use pharos::model::text_files::{MAX_BYTES, TextDirectory};

/// The directory of a version.
pub(crate) struct VersionDirectory<'a>(pub(crate) &'a Path);

impl TextDirectory for VersionDirectory<'_> {
    fn entries(&self, path: &str) -> Result<Vec<(String, bool)>, String> {
        let path = self.0.join(path);
        let unreadable = |error: io::Error| format!("'{}' cannot be read: {error}", path.display());
        let entry = |entry: io::Result<fs::DirEntry>| {
            let entry = entry?;
            Ok((entry.file_name().to_string_lossy().into_owned(), entry.path().is_dir()))
        };
        let entries = fs::read_dir(&path).map_err(unreadable)?;
        entries.map(entry).collect::<io::Result<_>>().map_err(unreadable)
    }

    fn read(&self, path: &str) -> Result<String, String> {
        let path = self.0.join(path);
        let mut text = String::new();
        let read = fs::File::open(&path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text));
        match read {
            Ok(_) if text.len() as u64 > MAX_BYTES => {
                Err(format!("'{}' has more than {MAX_BYTES} bytes", path.display()))
            }
            Ok(_) => Ok(text),
            Err(error) => Err(format!("'{}' cannot be read: {error}", path.display())),
        }
    }
}
