//! What a client has given in place of the repository's files: kept while the model is loaded, files in a directory of
//! their own.

use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pharos::repository::Override;

use super::source::{Keeper, Local};
use crate::directories::{Kind, Temporary};

/// Temporary directories in one directory of this server, which is made for the first of them and removed when the server ends.
#[derive(Debug, Default)]
pub(super) struct Places(Mutex<Made>);

#[derive(Debug, Default)]
struct Made {
    directory: Option<Arc<Temporary>>,
    /// Of the next directory in it.
    number: u64,
    closed: bool,
}

impl Places {
    /// A new directory, and the one that it is in.
    pub(super) fn next(&self) -> io::Result<(PathBuf, Arc<Temporary>)> {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if made.closed {
            return Err(io::Error::other("the server is exiting"));
        }
        // Something may have removed it: old temporary files are often removed.
        if made.directory.as_ref().is_none_or(|directory| !directory.path().is_dir()) {
            made.directory = Some(Arc::new(Temporary::new(Kind::Load)?));
        }
        let Some(directory) = made.directory.clone() else { return Err(io::ErrorKind::NotFound.into()) };
        let path = directory.path().join(made.number.to_string());
        made.number += 1;
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok((path, directory))
    }

    /// Removes all files, also those in use: the server ends.
    pub(super) fn close(&self) {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        made.closed = true;
        if let Some(directory) = made.directory.take() {
            directory.remove();
        }
    }
}

/// A directory's files are there as long as the directory that it is in.
impl Keeper for Temporary {}

/// What a client has given.
#[derive(Clone, Debug)]
pub(super) struct Given {
    /// JSON.
    pub(super) config: String,
    /// The model's directory, unless it is the repository's.
    pub(super) local: Option<Arc<Local>>,
}

impl Given {
    /// Writes the files, if there are some.
    ///
    /// # Errors
    /// They cannot be written.
    pub(super) fn new(given: Override, places: &Places) -> io::Result<Self> {
        let Override { config, files } = given;
        if files.is_empty() {
            return Ok(Self { config, local: None });
        }
        let (path, above) = places.next()?;
        let local = Local::kept(path.clone(), path, above);
        for (path, bytes) in files {
            let whole = local.path().join(&path);
            write(local.path(), &whole, &bytes).map_err(|error| {
                io::Error::new(error.kind(), format!("'{}' cannot be written: {error}", path.display()))
            })?;
        }
        Ok(Self { config, local: Some(Arc::new(local)) })
    }
}

/// Writes a file that is not there yet, in a directory that only this process writes to.
fn write(top: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(directory) = path.parent().filter(|directory| *directory != top) {
        fs::create_dir_all(directory)?;
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn given(files: &[(&str, &'static str)], places: &Places) -> io::Result<Given> {
        let files = files.iter().map(|(path, text)| (PathBuf::from(path), Bytes::from_static(text.as_bytes())));
        Given::new(Override { config: "{}".to_owned(), files: files.collect() }, places)
    }

    #[test]
    fn the_directory_goes_with_the_last_who_holds_it() {
        let places = Places::default();
        assert!(given(&[], &places).unwrap().local.is_none());
        let first = given(&[("1/model.onnx", "x"), ("labels.txt", "y")], &places).unwrap();
        let path = first.local.as_ref().unwrap().path().to_owned();
        assert_eq!(fs::read_to_string(path.join("1/model.onnx")).unwrap(), "x");
        let second = given(&[("1/other", "z")], &places).unwrap();
        assert_ne!(second.local.as_ref().unwrap().path(), path);
        let held = first.clone();
        drop(first);
        assert!(path.is_dir());
        drop(held);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_cannot_be_a_directory_too() {
        let places = Places::default();
        let error = given(&[("1/model", "x"), ("1/model/x", "y")], &places).unwrap_err();
        assert!(error.to_string().contains("'1/model/x' cannot be written"), "{error}");
        let above = places.0.lock().unwrap().directory.clone().unwrap();
        assert!(!above.path().join("0").exists(), "nothing stays of what failed");
    }

    #[test]
    fn the_end_of_the_server_removes_what_is_in_use() {
        let places = Places::default();
        let used = given(&[("1/model", "x")], &places).unwrap();
        let above = used.local.as_ref().unwrap().path().parent().unwrap().to_owned();
        places.close();
        assert!(!above.exists());
        assert!(given(&[("1/model", "x")], &places).is_err(), "the server is exiting");
        drop(used);
    }

    #[test]
    fn a_directory_that_was_removed_is_made_again() {
        let places = Places::default();
        let first = given(&[("1/model", "x")], &places).unwrap();
        fs::remove_dir_all(first.local.as_ref().unwrap().path().parent().unwrap()).unwrap();
        let second = given(&[("1/model", "x")], &places).unwrap();
        assert!(second.local.as_ref().unwrap().path().join("1/model").is_file());
    }
}
