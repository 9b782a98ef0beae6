//! Archives logs at their size limit: renames them at once, compresses them in a separate thread
//! and keeps only the newest.
//!
//! `NAME.log` becomes `NAME.DATE.N.log`, then `NAME.DATE.N.log.gz`; N counts the files of a day
//! from 1.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use flate2::Compression;
use flate2::write::GzEncoder;
use parking_lot::Mutex;

const PLAIN: &str = ".log";
const COMPRESSED: &str = ".log.gz";

/// The archived files of one log.
pub(super) struct Archive {
    directory: PathBuf,
    name: String,
    keep: usize,
    /// Locked while files are compressed, so that only one thread does so at a time.
    compressing: Arc<Mutex<()>>,
    running: Option<JoinHandle<()>>,
}

/// The date and number of a rotated file.
type RotationKey = (String, u32);

impl Archive {
    /// Creates the archive of `NAME.log` in `directory`, which keeps `keep` files.
    pub(super) fn new(directory: &Path, name: &str, keep: usize) -> Self {
        Self {
            directory: directory.to_owned(),
            name: name.to_owned(),
            keep,
            compressing: Arc::default(),
            running: None,
        }
    }

    /// Renames the log and starts its compression.
    ///
    /// # Errors
    /// The log cannot be renamed.
    pub(super) fn take(&mut self, log: &Path, date: &str) -> io::Result<()> {
        let all = [PLAIN, COMPRESSED]
            .into_iter()
            .flat_map(|ending| list(&self.directory, &self.name, ending));
        let last = all.filter(|((day, _), _)| day == date).map(|((_, number), _)| number).max();
        let number = last.unwrap_or(0) + 1;
        fs::rename(log, self.directory.join(format!("{}.{date}.{number}{PLAIN}", self.name)))?;
        self.start();
        Ok(())
    }

    /// Compresses files that an earlier server left behind.
    pub(super) fn tidy(&mut self) {
        if !list(&self.directory, &self.name, PLAIN).is_empty() {
            self.start();
        }
    }

    /// Waits until all files are compressed.
    pub(super) fn finish(&mut self) {
        if let Some(running) = self.running.take() {
            let _ = running.join();
        }
    }

    fn start(&mut self) {
        let directory = self.directory.clone();
        let name = self.name.clone();
        let keep = self.keep;
        let compressing = self.compressing.clone();
        let thread = thread::Builder::new().name("tslog-archive".into()).spawn(move || {
            let _compressing = compressing.lock();
            if let Err(error) = compress_all(&directory, &name, keep) {
                tracing::error!(
                    "cannot compress the archived metric logs of '{name}' in '{}': {error}",
                    directory.display()
                );
            }
        });
        match thread {
            // The lock makes this thread end after an earlier one that still runs.
            Ok(thread) => self.running = Some(thread),
            Err(error) => tracing::error!("cannot start compressing archived metric logs: {error}"),
        }
    }
}

/// Returns the archived files with this ending, oldest first.
fn list(directory: &Path, name: &str, ending: &str) -> Vec<(RotationKey, PathBuf)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            Some((rotation_key(entry.file_name().to_str()?, name, ending)?, entry.path()))
        })
        .collect();
    found.sort();
    found
}

/// Parses the date and number in a file's name: `NAME.DATE.N` and the ending.
fn rotation_key(file: &str, name: &str, ending: &str) -> Option<RotationKey> {
    let middle = file.strip_prefix(name)?.strip_prefix('.')?.strip_suffix(ending)?;
    let (date, number) = middle.split_once('.')?;
    let is_date =
        date.len() == 10 && date.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-');
    Some((date.to_owned(), number.parse().ok()?)).filter(|_| is_date)
}

/// Compresses all files and removes the oldest. An error of one file does not stop the others.
fn compress_all(directory: &Path, name: &str, keep: usize) -> io::Result<()> {
    let mut result = Ok(());
    for (_, path) in list(directory, name, PLAIN) {
        let compressed = if keep > 0 { compress(&path) } else { Ok(()) };
        result = result.and(compressed.and_then(|()| fs::remove_file(&path)));
    }
    let archived = list(directory, name, COMPRESSED);
    let too_many = archived.len().saturating_sub(keep);
    archived
        .iter()
        .take(too_many)
        .fold(result, |result, (_, path)| result.and(fs::remove_file(path)))
}

/// Compresses into a temporary file and renames it when it is complete.
fn compress(path: &Path) -> io::Result<()> {
    let part = path.with_extension("log.gz.part");
    // A killed server may have left a part; a link of this name is removed, not followed.
    match fs::remove_file(&part) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut encoder = GzEncoder::new(fs::File::create_new(&part)?, Compression::fast());
    io::copy(&mut fs::File::open(path)?, &mut encoder)?;
    encoder.finish()?.sync_all()?;
    fs::rename(&part, path.with_extension("log.gz"))
}
