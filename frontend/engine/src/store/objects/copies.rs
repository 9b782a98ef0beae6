//! Local copies of a store's objects: one file for each content, and a directory of hard links for
//! each use of a model. Files in use never change, and unchanged contents are stored once.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::SystemTime;

use super::super::files::{FilesOwner, ModelFiles};
use pharos_os::directories::{self, Kind, Temporary};
use pharos_os::removal::remove_tree;

const CONTENTS: &str = "contents";
const MODELS: &str = "models";

/// The copies of one store. Temporary copies are removed on drop.
#[derive(Debug)]
pub(super) struct Copies {
    top: PathBuf,
    place: CopyDirectory,
    /// Set when the server exits; nothing is written afterwards.
    closed: AtomicBool,
    /// The number of the next file or directory.
    next: AtomicU64,
}

#[derive(Debug)]
enum CopyDirectory {
    /// The configured cache directory.
    Lasting {
        /// Excludes other processes, which would remove files in use.
        _lock: File,
    },
    Temporary(Temporary),
}

impl FilesOwner for Copies {}

impl Drop for Copies {
    fn drop(&mut self) {
        self.close();
    }
}

impl Copies {
    /// Creates the copies in a subdirectory of `cache` named by a hash of the store's address, or
    /// in a new temporary directory.
    ///
    /// # Errors
    /// The directory cannot be created, or another process uses it.
    pub(super) fn new(cache: Option<&Path>, store: &str) -> io::Result<Self> {
        let (top, place) = match cache {
            Some(cache) => {
                let top = cache.join(&*blake3::hash(store.as_bytes()).to_hex());
                directories::make(&top)?;
                let lock = directories::lock(&top).map_err(|error| unusable(&top, &error))?;
                (top, CopyDirectory::Lasting { _lock: lock })
            }
            None => {
                let temporary = Temporary::new(Kind::STORE)?;
                (temporary.path().to_owned(), CopyDirectory::Temporary(temporary))
            }
        };
        // Removes the links of a killed process.
        if let Err(error) = remove_tree(&top.join(MODELS))
            && error.kind() != ErrorKind::NotFound
        {
            return Err(unusable(&top, &error));
        }
        for directory in [MODELS, CONTENTS] {
            let created = DirBuilder::new().mode(0o700).recursive(true).create(top.join(directory));
            created.map_err(|error| unusable(&top, &error))?;
        }
        sweep(&top.join(CONTENTS));
        Ok(Self { top, place, closed: AtomicBool::new(false), next: AtomicU64::new(0) })
    }

    /// Removes temporary copies, also copies in use.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        if let CopyDirectory::Temporary(temporary) = &self.place {
            temporary.remove();
        }
    }

    /// # Errors
    /// The server exits.
    fn open(&self) -> io::Result<()> {
        match self.closed.load(Ordering::Relaxed) {
            true => Err(io::Error::other("the server is exiting")),
            false => Ok(()),
        }
    }

    /// Returns the path of the content with this name.
    pub(super) fn content(&self, model: &str, content: &str) -> PathBuf {
        self.top.join(CONTENTS).join(model).join(content)
    }

    /// Creates a file for a content that is being fetched.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(super) fn part(&self, model: &str, content: &str) -> io::Result<PartialContent> {
        self.open()?;
        let whole = self.content(model, content);
        if let Some(directory) = whole.parent() {
            fs::create_dir_all(directory).map_err(|error| unusable(directory, &error))?;
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = whole.with_extension(format!("part-{number}"));
        let created = OpenOptions::new().write(true).create_new(true).mode(0o400).open(&path);
        let file = created.map_err(|error| unusable(&path, &error))?;
        let lasting = matches!(self.place, CopyDirectory::Lasting { .. });
        Ok(PartialContent { file, path, whole, lasting, written: 0 })
    }

    /// Creates a directory with these directories and files, each file given with the name of its
    /// content.
    ///
    /// # Errors
    /// The directory cannot be created; the kind is `NotFound` if a content was removed.
    pub(super) fn link<'a>(
        self: &Arc<Self>,
        model: &str,
        directories: impl IntoIterator<Item = &'a String>,
        files: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> io::Result<ModelFiles> {
        self.open()?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.top.join(MODELS).join(number.to_string()).join(model);
        let above = path.parent().unwrap_or(&path).to_owned();
        fs::create_dir_all(&path).map_err(|error| unusable(&path, &error))?;
        // Removes the directory if an error follows.
        let local = ModelFiles::temporary(path.clone(), above, self.clone());
        for directory in directories {
            fs::create_dir_all(path.join(directory))
                .map_err(|error| unusable(&path.join(directory), &error))?;
        }
        for (file, content) in files {
            fs::hard_link(self.content(model, content), path.join(file))
                .map_err(|error| unusable(&path.join(file), &error))?;
        }
        Ok(local)
    }

    /// Removes the other contents of a model. Links of versions in use remain.
    pub(super) fn keep(&self, model: &str, contents: &BTreeSet<&str>) {
        for entry in
            fs::read_dir(self.top.join(CONTENTS).join(model)).into_iter().flatten().flatten()
        {
            let name = entry.file_name();
            let fetched = name
                .to_str()
                .is_some_and(|name| contents.contains(name) || name.contains(".part-"));
            if !fetched {
                // The next call tries again.
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Removes the contents of other models.
    pub(super) fn keep_models(&self, models: &[String]) {
        for entry in fs::read_dir(self.top.join(CONTENTS)).into_iter().flatten().flatten() {
            if !models.iter().any(|model| entry.file_name().to_str() == Some(model)) {
                let _ = remove_tree(&entry.path());
            }
        }
    }
}

/// A content that is being fetched; removed on drop unless it is finished.
#[derive(Debug)]
pub(super) struct PartialContent {
    file: File,
    path: PathBuf,
    whole: PathBuf,
    lasting: bool,
    written: u64,
}

impl PartialContent {
    /// # Errors
    /// The file cannot be written; the text contains its path and the bytes written so far.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes).map_err(|error| {
            let text = format!(
                "cannot write '{}' after {} bytes: {error}",
                self.path.display(),
                self.written
            );
            io::Error::new(error.kind(), text)
        })?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Stores the finished content. Sets its modification time to `changed`, so that fetching a
    /// content twice gives the same fingerprint.
    ///
    /// # Errors
    /// The content cannot be stored.
    pub(super) fn finish(self, changed: SystemTime) -> io::Result<()> {
        self.file.set_modified(changed).map_err(|error| unusable(&self.path, &error))?;
        if self.lasting {
            self.file.sync_data().map_err(|error| unusable(&self.path, &error))?;
        }
        fs::rename(&self.path, &self.whole).map_err(|error| unusable(&self.whole, &error))
    }
}

impl Drop for PartialContent {
    fn drop(&mut self) {
        // A finished file was renamed.
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes incomplete contents of a killed process.
fn sweep(contents: &Path) {
    for model in fs::read_dir(contents).into_iter().flatten().flatten() {
        for content in fs::read_dir(model.path()).into_iter().flatten().flatten() {
            if content.path().extension().is_some() {
                let _ = fs::remove_file(content.path());
            }
        }
    }
}

fn unusable(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("'{}': {error}", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn put(files: &Copies, content: &str, text: &str) {
        let mut part = files.part("m", content).unwrap();
        part.write(text.as_bytes()).unwrap();
        part.finish(SystemTime::UNIX_EPOCH).unwrap();
    }

    fn link(files: &Arc<Copies>, content: &str) -> io::Result<ModelFiles> {
        let path = "1/model.onnx".to_owned();
        let content = content.to_owned();
        files.link("m", &["1".to_owned()], [(&path, &content)])
    }

    #[test]
    fn files_in_use_do_not_change_and_are_removed_with_their_last_user() {
        let files = Arc::new(Copies::new(None, "s3://b").unwrap());
        let top = files.top.clone();
        put(&files, "a", "first");
        let first = link(&files, "a").unwrap();
        put(&files, "b", "second");
        let second = link(&files, "b").unwrap();
        files.keep("m", &BTreeSet::from(["b"]));
        assert!(!files.content("m", "a").exists() && files.content("m", "b").exists());
        let read =
            |local: &ModelFiles| fs::read_to_string(local.path().join("1/model.onnx")).unwrap();
        assert_eq!((read(&first), read(&second)), ("first".to_owned(), "second".to_owned()));
        assert_eq!(link(&files, "a").unwrap_err().kind(), ErrorKind::NotFound);
        let path = first.path().to_owned();
        drop((first, files));
        assert!(!path.exists() && top.exists(), "the other model is still used");
        drop(second);
        assert!(!top.exists());
    }

    #[test]
    fn incomplete_contents_are_removed() {
        let files = Copies::new(None, "s3://b").unwrap();
        let mut part = files.part("m", "a").unwrap();
        part.write(b"half").unwrap();
        drop(part);
        assert!(!files.content("m", "a").exists());
        assert_eq!(fs::read_dir(files.top.join(CONTENTS).join("m")).unwrap().count(), 0);
    }

    #[test]
    fn a_cache_directory_has_one_user_and_is_reused() {
        let temporary = Temporary::new(Kind::STORE).unwrap();
        let cache = temporary.path().join("cache");
        let files = Arc::new(Copies::new(Some(&cache), "s3://b").unwrap());
        put(&files, "a", "text");
        std::mem::forget(link(&files, "a").unwrap());
        let error = Copies::new(Some(&cache), "s3://b").unwrap_err();
        assert!(error.to_string().contains("another server uses it"), "{error}");
        assert!(Copies::new(Some(&cache), "s3://other").is_ok());
        let content = files.content("m", "a");
        assert!(content.exists());
    }
}
