//! A configuration and files that a client sends with a load instead of the repository's. They are
//! kept while the model is loaded, the files in a temporary directory.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use pharos::model::SandboxChoice;
use pharos::repository::{LoadScope, Override};

use super::files::{ModelFiles, TemporaryDirectories};

/// The content of a client's load request.
#[derive(Clone, Debug)]
pub(crate) struct Overrides {
    /// The configuration in JSON.
    pub(crate) config: String,
    /// What the client may bring.
    pub(crate) scope: LoadScope,
    /// The model's files, if the client sent any.
    pub(crate) files: Option<Arc<ModelFiles>>,
    /// The sandbox of the model that has sent them; `None` if a client has.
    pub(crate) loaded_by: Option<SandboxChoice>,
}

impl Overrides {
    /// Writes the files, if there are any.
    ///
    /// # Errors
    /// The files cannot be written.
    pub(crate) fn new(
        sent: Override,
        scope: LoadScope,
        loaded_by: Option<SandboxChoice>,
        directories: &TemporaryDirectories,
    ) -> io::Result<Self> {
        let Override { config, files } = sent;
        if files.is_empty() {
            return Ok(Self { config, scope, files: None, loaded_by });
        }
        let (path, above) = directories.next()?;
        let local = ModelFiles::temporary(path.clone(), path, above).by_request();
        for (path, bytes) in files {
            let full = local.path().join(&path);
            write(local.path(), &full, &bytes).map_err(|error| {
                io::Error::new(error.kind(), format!("cannot write '{}': {error}", path.display()))
            })?;
        }
        Ok(Self { config, scope, files: Some(Arc::new(local)), loaded_by })
    }
}

/// Writes a new file in a directory that only this process writes to.
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
    use std::path::PathBuf;

    use bytes::Bytes;

    use super::*;

    fn given(
        files: &[(&str, &'static str)],
        directories: &TemporaryDirectories,
    ) -> io::Result<Overrides> {
        let files = files
            .iter()
            .map(|(path, text)| (PathBuf::from(path), Bytes::from_static(text.as_bytes())));
        let sent = Override { config: "{}".to_owned(), files: files.collect() };
        Overrides::new(sent, LoadScope::Code, None, directories)
    }

    #[test]
    fn the_directory_is_removed_with_its_last_user() {
        let directories = TemporaryDirectories::default();
        assert!(given(&[], &directories).unwrap().files.is_none());
        let first = given(&[("1/model.onnx", "x"), ("labels.txt", "y")], &directories).unwrap();
        let path = first.files.as_ref().unwrap().path().to_owned();
        assert_eq!(fs::read_to_string(path.join("1/model.onnx")).unwrap(), "x");
        let second = given(&[("1/other", "z")], &directories).unwrap();
        assert_ne!(second.files.as_ref().unwrap().path(), path);
        let held = first.clone();
        drop(first);
        assert!(path.is_dir());
        drop(held);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_cannot_be_a_directory_too() {
        let directories = TemporaryDirectories::default();
        let error = given(&[("1/model", "x"), ("1/model/x", "y")], &directories).unwrap_err();
        assert!(error.to_string().contains("cannot write '1/model/x'"), "{error}");
        let above = directories.next().unwrap().1;
        assert!(!above.path().join("0").exists(), "files of a failed load are left");
    }

    #[test]
    fn closing_removes_directories_in_use() {
        let directories = TemporaryDirectories::default();
        let used = given(&[("1/model", "x")], &directories).unwrap();
        let above = used.files.as_ref().unwrap().path().parent().unwrap().to_owned();
        directories.close();
        assert!(!above.exists());
        assert!(given(&[("1/model", "x")], &directories).is_err(), "the server is exiting");
        drop(used);
    }

    #[test]
    fn a_removed_directory_is_created_again() {
        let directories = TemporaryDirectories::default();
        let first = given(&[("1/model", "x")], &directories).unwrap();
        fs::remove_dir_all(first.files.as_ref().unwrap().path().parent().unwrap()).unwrap();
        let second = given(&[("1/model", "x")], &directories).unwrap();
        assert!(second.files.as_ref().unwrap().path().join("1/model").is_file());
    }
}
