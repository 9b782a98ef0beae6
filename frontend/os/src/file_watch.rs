//! Reloads files when they change: certificates and tokens, which are replaced while the server
//! runs.
//!
//! Polls the files: this works on every file system and for links into a directory that is replaced
//! as a whole (Kubernetes).

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pharos::metrics::cache::Cache;
use pharos::metrics::labels::Credentials;
use pharos::metrics::record;
use tokio::sync::Notify;

use crate::blocking::{self, Failed};

/// The polling interval.
const LOOK: Duration = Duration::from_secs(1);

/// A set of files, and the function that reads them.
pub struct WatchedFiles {
    /// The kind of credentials, for the metrics.
    pub what: Credentials,
    /// The files.
    pub paths: Vec<PathBuf>,
    /// Reloads the files and returns a description of their content. After an error, nothing has
    /// changed.
    pub read: Box<dyn Fn() -> Result<String, String> + Send + Sync>,
}

/// Identifies the content of a file: inode, size, time of the last change in nanoseconds.
type Stamp = Option<(u64, u64, i64, i64)>;

fn stamps(paths: &[PathBuf]) -> Vec<Stamp> {
    let files = paths.iter().map(|path| std::fs::metadata(path).ok());
    files
        .map(|data| data.map(|data| (data.ino(), data.len(), data.mtime(), data.mtime_nsec())))
        .collect()
}

/// Reloads files when they have changed and when `now` is notified; runs until the runtime ends. A
/// change counts after it has persisted between two polls, because a certificate and its key are
/// two files that are replaced one after the other.
pub async fn watch(files: WatchedFiles, now: Arc<Notify>, cache: Arc<Cache>) {
    record::credentials_watched(&cache, files.what);
    let files = Arc::new(files);
    let mut known = read_stamps(&files).await.unwrap_or_default();
    let mut last = known.clone();
    loop {
        let asked = tokio::select! {
            () = now.notified() => true,
            () = tokio::time::sleep(LOOK) => false,
        };
        // Stamps that cannot be read are no change.
        let seen = read_stamps(&files).await.unwrap_or_else(|_| last.clone());
        if asked || (seen != known && seen == last) {
            known = seen.clone();
            read(&files, &cache).await;
        }
        last = seen;
    }
}

/// Reads the stamps on a blocking thread: a slow disk must not delay requests.
async fn read_stamps(files: &Arc<WatchedFiles>) -> Result<Vec<Stamp>, Failed> {
    let files = files.clone();
    blocking::run(move || stamps(&files.paths)).await
}

async fn read(files: &Arc<WatchedFiles>, cache: &Cache) {
    let reading = files.clone();
    let joined = blocking::run(move || (reading.read)()).await;
    let result = joined.unwrap_or_else(|error| Err(error.to_string()));
    record::credentials_reloaded(cache, files.what, result.is_ok());
    match result {
        Ok(what) => tracing::info!("{} reloaded: {what}", files.what.as_str()),
        Err(reason) => tracing::error!(
            "{} reload failed, keeping the previous ones: {reason}",
            files.what.as_str()
        ),
    }
}
