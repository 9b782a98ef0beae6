//! Writes trace files: one thread, which receives traces through a bounded queue.
//!
//! A file is a complete JSON array after each write: one write puts the new records and the end of
//! the array over the old end. A crash therefore leaves valid JSON, unless it truncates the last
//! write (a full disk, a power failure, a kill during a long write): `pharos trace` reads such a
//! file up to the last complete record. A file that another program moves, deletes or truncates
//! is begun again.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use pharos::metrics::log_throttle::Throttle;
use pharos::request_trace::{Finished, PartIds, Sink};
use pharos::trace::file::{BETWEEN, CLOSE, OPEN, append};
use rustix::fs::{Access, access};

use super::{Counts, Destination, add};
use pharos_os::clock;

/// The maximum number of waiting traces.
const WAITING: usize = 8192;
/// The maximum size of waiting traces in bytes.
const WAITING_BYTES: usize = 64 << 20;
/// The size of text that is written at once, bytes.
const AT_ONCE: usize = 1 << 20;
/// The number of settings whose indexed files stay open: after a change, traces with the old
/// settings still finish.
const OPEN_GROUPS: usize = 8;

enum Message {
    Trace(Box<Finished>),
    Stop,
}

/// The thread's queue.
pub(super) struct Files {
    sender: SyncSender<Message>,
    bytes: Arc<AtomicUsize>,
    ended: Mutex<Receiver<()>>,
    ids: PartIds,
    counts: Counts,
}

impl Files {
    /// Starts the thread; the file is created with the first trace.
    ///
    /// # Errors
    /// The file cannot be created or written, or the thread cannot be started.
    pub(super) fn start(path: PathBuf, counts: Counts) -> io::Result<Arc<Self>> {
        writable(&path).map_err(|error| {
            let path = path.display();
            let text = format!(
                "cannot write the trace file '{path}': {error}; expected a writable file in an \
                 existing folder"
            );
            io::Error::new(error.kind(), text)
        })?;
        let (sender, receiver) = mpsc::sync_channel(WAITING);
        let (ending, ended) = mpsc::channel();
        let bytes = Arc::new(AtomicUsize::new(0));
        let mut writer = Writer::new(path, counts.clone());
        let taken = bytes.clone();
        thread::Builder::new().name("trace-files".into()).spawn(move || {
            writer.run(&receiver, &taken);
            let _ = ending.send(());
        })?;
        Ok(Arc::new(Self {
            sender,
            bytes,
            ended: Mutex::new(ended),
            ids: PartIds::default(),
            counts,
        }))
    }
}

impl Sink for Files {
    fn finished(&self, trace: Finished) {
        let bytes = trace.bytes();
        let before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let fits = before + bytes <= WAITING_BYTES || before == 0;
        if !fits || self.sender.try_send(Message::Trace(Box::new(trace))).is_err() {
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            add(self.counts.dropped.as_ref(), 1);
        }
    }

    fn next_id(&self) -> u64 {
        self.ids.next()
    }
}

impl Destination for Files {
    fn stop(&self, limit: Duration) {
        // The thread drains a full queue; a thread that hangs in a write must not delay the exit.
        let deadline = clock::now() + limit;
        while matches!(self.sender.try_send(Message::Stop), Err(mpsc::TrySendError::Full(_)))
            && clock::now() < deadline
        {
            thread::sleep(Duration::from_millis(5));
        }
        let ended = self.ended.lock();
        if ended.recv_timeout(deadline - clock::now()).is_err() {
            tracing::error!("the last traces could not be written in time");
        }
    }
}

/// One file.
struct Target {
    path: PathBuf,
    file: File,
    /// The position of the end of the array, which the next trace overwrites; 0 for a file without
    /// an array.
    end: u64,
    /// The records to write, without the text that separates them from the records in the file.
    pending: String,
    /// Traces in `pending`.
    count: usize,
    /// Traces in the file.
    written: u64,
}

impl Target {
    fn create(path: &Path) -> io::Result<Self> {
        let file = File::create(path)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            end: 0,
            pending: String::new(),
            count: 0,
            written: 0,
        })
    }

    fn add(&mut self, trace: &Finished) {
        let start = self.pending.len();
        self.pending.push_str(if start == 0 { "" } else { BETWEEN });
        if !append(trace, &mut self.pending) {
            self.pending.truncate(start);
            return;
        }
        self.count += 1;
    }

    /// Returns whether the file and the text to write have the traces of one file.
    fn is_full(&self, log_frequency: u32) -> bool {
        self.written + self.count as u64 >= u64::from(log_frequency)
    }

    fn write(&mut self) -> io::Result<usize> {
        let records = std::mem::take(&mut self.pending);
        let count = std::mem::take(&mut self.count);
        if records.is_empty() {
            return Ok(count);
        }
        if !self.is_intact() {
            self.file = File::create(&self.path).map_err(|error| named(&self.path, &error))?;
            self.end = 0;
            self.written = 0;
        }
        let start = if self.end == 0 { OPEN } else { BETWEEN };
        let text = [start, &records, CLOSE].concat();
        if let Err(error) = self.file.write_all_at(text.as_bytes(), self.end) {
            // Remove the partial write from the file.
            let _ = self.file.set_len(self.end);
            if self.end > 0 {
                let _ = self.file.write_all_at(CLOSE.as_bytes(), self.end);
            }
            return Err(named(&self.path, &error));
        }
        self.end += (text.len() - CLOSE.len()) as u64;
        self.written += count as u64;
        Ok(count)
    }

    /// Returns whether the file of this name is the open one and still has the records that were
    /// written.
    fn is_intact(&self) -> bool {
        let (Ok(named), Ok(own)) = (fs::metadata(&self.path), self.file.metadata()) else {
            return false;
        };
        (named.dev(), named.ino()) == (own.dev(), own.ino())
            && (!own.is_file() || own.len() >= self.end)
    }
}

/// The state of the thread.
struct Writer {
    path: PathBuf,
    next_index: u64,
    /// The file without an index.
    whole: Option<Target>,
    /// The current indexed file for each of the latest settings.
    groups: BTreeMap<u64, Target>,
    counts: Counts,
    throttle: Throttle,
}

impl Writer {
    fn new(path: PathBuf, counts: Counts) -> Self {
        Self {
            path,
            next_index: 0,
            whole: None,
            groups: BTreeMap::new(),
            counts,
            throttle: Throttle::default(),
        }
    }

    fn run(&mut self, receiver: &Receiver<Message>, bytes: &AtomicUsize) {
        while let Ok(first) = receiver.recv() {
            let mut next = Some(first);
            let mut size = 0;
            while let Some(message) = next {
                let Message::Trace(trace) = message else { return self.write_all() };
                bytes.fetch_sub(trace.bytes(), Ordering::Relaxed);
                size += self.take(&trace);
                next = if size < AT_ONCE { receiver.try_recv().ok() } else { None };
            }
            self.write_all();
        }
    }

    /// Adds a trace to its file. Returns the bytes that wait there.
    fn take(&mut self, trace: &Finished) -> usize {
        let sample = &trace.sample;
        let indexed = sample.log_frequency > 0 || sample.limited;
        let target = if indexed { self.group(sample.generation) } else { self.whole() };
        match target {
            Ok(target) => {
                target.add(trace);
                let waiting = target.pending.len();
                let full = target.is_full(sample.log_frequency);
                if sample.log_frequency > 0 && full {
                    self.complete_group(sample.generation, sample.log_frequency);
                }
                waiting
            }
            Err(error) => {
                self.failed(1, &error);
                0
            }
        }
    }

    fn whole(&mut self) -> io::Result<&mut Target> {
        if self.whole.is_none() {
            self.whole = Some(create(&self.path)?);
        }
        self.whole.as_mut().ok_or_else(|| io::Error::other("no file is open"))
    }

    fn group(&mut self, generation: u64) -> io::Result<&mut Target> {
        if !self.groups.contains_key(&generation) {
            let mut path = self.path.clone().into_os_string();
            path.push(format!(".{}", self.next_index));
            let target = create(Path::new(&path))?;
            self.next_index += 1;
            self.groups.insert(generation, target);
            if self.groups.len() > OPEN_GROUPS
                && let Some(oldest) = self.groups.keys().next().copied()
            {
                self.finish_group(oldest);
            }
        }
        self.groups.get_mut(&generation).ok_or_else(|| io::Error::other("no file is open"))
    }

    fn finish_group(&mut self, generation: u64) {
        if let Some(mut target) = self.groups.remove(&generation) {
            self.write(&mut target);
        }
    }

    /// Writes the traces of a full file. The file stays open for later traces if the write failed.
    fn complete_group(&mut self, generation: u64, log_frequency: u32) {
        let Some(mut target) = self.groups.remove(&generation) else { return };
        self.write(&mut target);
        if !target.is_full(log_frequency) {
            self.groups.insert(generation, target);
        }
    }

    fn write_all(&mut self) {
        let mut whole = self.whole.take();
        let mut groups = std::mem::take(&mut self.groups);
        whole.iter_mut().chain(groups.values_mut()).for_each(|target| self.write(target));
        self.whole = whole;
        self.groups = groups;
    }

    fn write(&mut self, target: &mut Target) {
        let waiting = target.count;
        match target.write() {
            Ok(count) => add(self.counts.written.as_ref(), count),
            Err(error) => self.failed(waiting, &error),
        }
    }

    fn failed(&mut self, count: usize, error: &io::Error) {
        add(self.counts.dropped.as_ref(), count);
        if self.throttle.admit(clock::now()).is_some() {
            tracing::error!("cannot write traces to {error}");
        }
    }
}

/// Checks that this process can write or create a file of this name. Creates nothing.
fn writable(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(_) => return Ok(access(path, Access::WRITE_OK)?),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Err(_) => {}
    }
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(access(folder, Access::WRITE_OK | Access::EXEC_OK)?)
}

fn create(path: &Path) -> io::Result<Target> {
    Target::create(path).map_err(|error| named(path, &error))
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("'{}': {error}", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::id::ModelVersion;
    use pharos::request_trace::{Levels, Sample, TracedPart};
    use pharos::timeline::Instant;

    use super::*;

    /// Returns a trace whose request has this id; two of them fill a file.
    fn trace(id: u64) -> Finished {
        let part =
            TracedPart { id, model: Some(ModelVersion::new("m", 1)), ..TracedPart::default() };
        let sample =
            Sample { generation: 7, levels: Levels::default(), log_frequency: 2, limited: false };
        Finished { sample, context: None, parts: vec![part], ended: Instant(0) }
    }

    fn writer(folder: &Path) -> Writer {
        let counts = Counts::default();
        Writer::new(folder.join("trace"), counts)
    }

    /// Makes writes to the open file fail.
    fn make_read_only(writer: &mut Writer) {
        let target = writer.groups.get_mut(&7).unwrap();
        target.file = File::open(&target.path).unwrap();
    }

    fn make_writable(writer: &mut Writer) {
        let target = writer.groups.get_mut(&7).unwrap();
        target.file = File::options().write(true).open(&target.path).unwrap();
    }

    fn ids(path: PathBuf) -> Vec<u64> {
        let records: Vec<serde_json::Value> =
            serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        records.iter().map(|record| record["id"].as_u64().unwrap()).collect()
    }

    #[test]
    fn a_file_is_full_when_its_traces_are_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = writer(folder.path());
        writer.take(&trace(1));
        make_read_only(&mut writer);
        writer.write_all();
        make_writable(&mut writer);
        for id in 2..5 {
            writer.take(&trace(id));
        }
        writer.write_all();
        assert_eq!(ids(folder.path().join("trace.0")), [2, 3]);
        assert_eq!(ids(folder.path().join("trace.1")), [4]);
    }

    #[test]
    fn a_full_file_whose_write_failed_takes_later_traces() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = writer(folder.path());
        writer.take(&trace(1));
        make_read_only(&mut writer);
        writer.take(&trace(2));
        make_writable(&mut writer);
        for id in 3..5 {
            writer.take(&trace(id));
        }
        assert_eq!(ids(folder.path().join("trace.0")), [3, 4]);
        assert!(writer.groups.is_empty());
    }

    #[test]
    fn a_moved_deleted_or_truncated_file_is_begun_again() {
        let changes: [fn(&Path); 3] = [
            |path| fs::rename(path, path.with_extension("old")).unwrap(),
            |path| fs::remove_file(path).unwrap(),
            |path| File::options().write(true).open(path).unwrap().set_len(0).unwrap(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let folder = tempfile::tempdir().unwrap();
            let mut writer = writer(folder.path());
            let path = folder.path().join("trace");
            let plain = |id| {
                let trace = trace(id);
                Finished { sample: Sample { log_frequency: 0, ..trace.sample }, ..trace }
            };
            for id in 1..4 {
                writer.take(&plain(id));
                if id > 1 {
                    writer.write_all();
                }
            }
            assert_eq!(ids(path.clone()), [1, 2, 3], "{number}");
            change(&path);
            for id in 4..6 {
                writer.take(&plain(id));
                writer.write_all();
            }
            assert_eq!(ids(path), [4, 5], "{number}");
        }
    }

    #[test]
    fn a_trace_without_records_is_not_counted() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = writer(folder.path());
        writer.take(&Finished { parts: Vec::new(), ..trace(1) });
        writer.take(&trace(2));
        writer.take(&trace(3));
        assert_eq!(ids(folder.path().join("trace.0")), [2, 3]);
    }
}
