//! Tests with real files that are moved, deleted, full or too large.

use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::Path;

use flate2::read::GzDecoder;
use pharos::metrics::catalog::Catalog;
use tempfile::TempDir;

use super::*;

const DATE: &str = "2026-11-20";

/// A log directory inside a temporary one; it does not exist yet.
struct Logs(TempDir);

impl Logs {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("logs")
    }

    fn open(&self, max_bytes: u64, keep: usize) -> LogFile {
        LogFile::open(File::Ts, Folder::new(&self.path()), max_bytes, keep)
    }

    fn log(&self) -> PathBuf {
        self.path().join("ts_metrics.log")
    }

    fn model_log(&self) -> PathBuf {
        self.path().join("model_metrics.log")
    }

    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(self.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }
}

fn write(log: &mut LogFile, line: &str, second: u64) {
    log.pending().push_str(line);
    log.write(Instant(second * 1_000_000_000), DATE);
}

fn gunzip(path: &Path) -> String {
    let mut text = String::new();
    GzDecoder::new(fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    text
}

#[test]
fn one_writer_has_a_directory() {
    let folder = Logs::new();
    let mut first = folder.open(0, 2);
    write(&mut first, "cut", 1);
    let mut second = folder.open(0, 2);
    write(&mut second, "b\n", 1);
    write(&mut second, "c\n", 10);
    assert_eq!(
        fs::read_to_string(folder.log()).unwrap(),
        "cut",
        "the second writes nothing, and completes no line"
    );
    assert!(second.waits() && second.take_counts().1 > 0);
    drop(first);
    write(&mut second, "d\n", 20);
    assert_eq!(fs::read_to_string(folder.log()).unwrap(), "cut\nb\nc\nd\n");
}

#[test]
fn archives_a_large_file_and_keeps_the_newest() {
    let folder = Logs::new();
    fs::create_dir_all(folder.path()).unwrap();
    // An earlier server was killed while it compressed.
    fs::write(folder.path().join("ts_metrics.2026-11-19.7.log"), "old\n").unwrap();
    fs::write(folder.path().join("ts_metrics.2026-11-19.7.log.gz.part"), "half").unwrap();
    let mut log = folder.open(20, 2);
    log.finish();
    assert_eq!(gunzip(&folder.path().join("ts_metrics.2026-11-19.7.log.gz")), "old\n");
    for line in 0..12 {
        write(&mut log, &format!("line {line:2}\n"), line);
        log.finish();
    }
    let archived = ["ts_metrics.2026-11-20.4.log.gz", "ts_metrics.2026-11-20.5.log.gz"];
    assert_eq!(folder.names(), [archived[0], archived[1], "ts_metrics.log"]);
    assert_eq!(gunzip(&folder.path().join(archived[1])), "line  8\nline  9\n");
    assert_eq!(fs::read_to_string(folder.log()).unwrap(), "line 10\nline 11\n");
    assert_eq!(log.take_counts(), (12, 0));
}

#[test]
fn a_file_that_cannot_be_compressed_does_not_keep_the_others_from_it() {
    let folder = Logs::new();
    // A directory cannot be read as a file.
    fs::create_dir_all(folder.path().join("ts_metrics.2026-11-19.1.log")).unwrap();
    let mut log = folder.open(1, 2);
    for line in 0..5 {
        write(&mut log, "x\n", line);
        log.finish();
    }
    let names = folder.names();
    let archived: Vec<&String> = names.iter().filter(|name| name.ends_with(".log.gz")).collect();
    assert_eq!(
        archived,
        ["ts_metrics.2026-11-20.3.log.gz", "ts_metrics.2026-11-20.4.log.gz"],
        "{names:?}"
    );
}

#[test]
fn continues_the_numbers_of_a_day() {
    let folder = Logs::new();
    let mut log = folder.open(1, 20);
    for line in 0..12 {
        write(&mut log, "x\n", line);
    }
    log.finish();
    let expected: Vec<_> =
        (1..12).map(|number| format!("ts_metrics.{DATE}.{number}.log.gz")).collect();
    let names = folder.names();
    assert!(expected.iter().all(|name| names.contains(name)), "{names:?}");
}

#[test]
fn recreates_a_file_that_was_moved_or_deleted() {
    let folder = Logs::new();
    let mut log = folder.open(0, 2);
    write(&mut log, "1\n", 0);
    fs::rename(folder.log(), folder.path().join("elsewhere")).unwrap();
    write(&mut log, "2\n", 1);
    assert_eq!(fs::read_to_string(folder.path().join("elsewhere")).unwrap(), "1\n");
    fs::remove_dir_all(folder.path()).unwrap();
    write(&mut log, "3\n", 2);
    assert_eq!(fs::read_to_string(folder.log()).unwrap(), "3\n");
    assert_eq!(log.take_counts(), (3, 0));
}

#[test]
fn counts_errors_of_a_full_disk_and_retries_each_second() {
    let folder = Logs::new();
    fs::create_dir_all(folder.path()).unwrap();
    symlink("/dev/full", folder.log()).unwrap();
    let mut log = folder.open(0, 2);
    write(&mut log, "1\n", 10);
    write(&mut log, "2\n", 10);
    assert_eq!((log.take_counts(), log.waits()), ((0, 1), true));
    write(&mut log, "3\n", 11);
    assert_eq!(log.take_counts(), (0, 1));
    log.pending().push_str(&"4\n".repeat(2 << 20));
    assert!(!log.has_room());
    fs::remove_file(folder.log()).unwrap();
    log.write(Instant(12_000_000_000), DATE);
    assert!(fs::read_to_string(folder.log()).unwrap().starts_with("1\n2\n3\n4\n"));
    assert_eq!((log.take_counts(), log.waits()), ((3 + (2 << 20), 0), false));
}

/// A writer of metrics whose log of models is full, as is the memory for its waiting lines.
fn full(folder: &Logs) -> (WriterThread, Arc<Cache>) {
    const METRICS: &str = "
mode: both
model_metrics:
  counter:
    - {name: Orders, unit: Count, dimensions: [shop]}
  gauge:
    - {name: Level, unit: m}
";
    fs::create_dir_all(folder.path()).unwrap();
    symlink("/dev/full", folder.model_log()).unwrap();
    let catalog = Catalog::parse(METRICS, "m.yaml").unwrap();
    let cache = Arc::new(Cache::new(catalog, pharos::metrics::cache::Settings::new("here")));
    cache.journal().attach_writer(|| {});
    let max_bytes = 0;
    let keep = 0;
    let stdout = false;
    let json = false;
    let lines_per_second = 0;
    let settings =
        Settings { location: Some(folder.path()), max_bytes, keep, stdout, json, lines_per_second };
    let mut writer = WriterThread::new(cache.clone(), settings, Arc::default());
    writer.visit(false);
    model_log(&mut writer).pending().push_str(&"x\n".repeat(WAITING));
    writer.visit(false);
    assert!(!model_log(&mut writer).has_room());
    for _ in 0..2 {
        cache.counter("Orders", &["a"]).unwrap().add_or_update(1.0).unwrap();
        cache.gauge("Level", &[]).unwrap().add_or_update(5.0).unwrap();
    }
    (writer, cache)
}

/// The number of lines that [`full`] leaves waiting.
const WAITING: usize = 2 << 20;

fn model_log(writer: &mut WriterThread) -> &mut LogFile {
    writer.files.iter_mut().find(|file| file.file == File::Model).unwrap()
}

#[test]
fn lines_without_room_are_counted_at_the_end() {
    let folder = Logs::new();
    let (mut writer, _cache) = full(&folder);
    writer.visit_last();
    assert_eq!(model_log(&mut writer).lost(), WAITING as u64 + 4);
}

#[test]
fn the_last_visit_does_not_wait_for_a_retry() {
    let folder = Logs::new();
    let (mut writer, _cache) = full(&folder);
    fs::remove_file(folder.model_log()).unwrap();
    writer.visit_last();
    assert_eq!(model_log(&mut writer).lost(), 0);
    assert_eq!(fs::read_to_string(folder.model_log()).unwrap().lines().count(), WAITING + 4);
}

#[test]
fn the_last_line_of_an_earlier_server_is_not_continued() {
    let folder = Logs::new();
    fs::create_dir_all(folder.path()).unwrap();
    fs::write(folder.log(), "old\ncut").unwrap();
    let mut log = folder.open(0, 2);
    write(&mut log, "new\n", 1);
    assert_eq!(fs::read_to_string(folder.log()).unwrap(), "old\ncut\nnew\n");
    assert_eq!(log.take_counts(), (1, 0));
}

#[test]
fn retries_a_directory_that_cannot_be_created() {
    let folder = Logs::new();
    fs::write(folder.path(), "a file").unwrap();
    let mut log = folder.open(0, 2);
    write(&mut log, "1\n", 1);
    assert_eq!(log.take_counts(), (0, 2));
    fs::remove_file(folder.path()).unwrap();
    write(&mut log, "2\n", 3);
    assert_eq!(fs::read_to_string(folder.log()).unwrap(), "1\n2\n");
}

#[test]
fn the_allowance_refills_with_time() {
    let second = 1_000_000_000;
    let mut allowance = Allowance { per_second: 100, tokens: 100.0, filled: Instant(0), used: 0 };
    assert_eq!(allowance.refill(Instant(0)), 100);
    allowance.used = 70;
    assert_eq!(allowance.refill(Instant(second / 10)), 40);
    allowance.used = 40;
    assert_eq!(allowance.refill(Instant(second / 10)), 0);
    assert_eq!(allowance.refill(Instant(10 * second)), 100);
    allowance.per_second = 0;
    assert_eq!(allowance.refill(Instant(10 * second)), MAX_WAITING);
}
