//! Reads this process and the workers from `/proc/PID/stat` (proc_pid_stat(5)): one small file
//! each; sysinfo reads four.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::param::{clock_ticks_per_second, page_size};

use super::{Worker, WorkerReading};

pub(crate) struct Processes {
    proc: PathBuf,
    /// The boot time in seconds since 1970, if known.
    boot: Option<u64>,
    /// The processor time of each instance's process at the last reading.
    last: BTreeMap<Worker, KnownProcess>,
}

/// A worker process with its processor time.
struct KnownProcess {
    pid: u32,
    start: u64,
    ticks: u64,
}

/// The reading of this process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ProcessReading {
    pub(crate) cpu_seconds: f64,
    pub(crate) resident_bytes: u64,
    pub(crate) open_files: Option<u64>,
    /// Seconds since 1970.
    pub(crate) start_seconds: Option<f64>,
}

impl Processes {
    /// Creates a reader of the processes under `proc`, for a machine that booted at `boot`.
    pub(crate) fn new(proc: &Path, boot: Option<u64>) -> Self {
        Self { proc: proc.to_owned(), boot, last: BTreeMap::new() }
    }

    /// Reads this process; `None` without `/proc`.
    pub(crate) fn own(&self) -> Option<ProcessReading> {
        let stat = Stat::read(&self.proc.join("self/stat"))?;
        Some(ProcessReading {
            cpu_seconds: seconds(stat.ticks),
            resident_bytes: stat.resident_bytes,
            open_files: open_files(&self.proc.join("self/fd")),
            start_seconds: self.boot.map(|boot| boot as f64 + seconds(stat.start)),
        })
    }

    /// Reads the workers, each with the processor time since its last reading; a new process counts
    /// from its start.
    pub(crate) fn workers(&mut self, workers: &[(Worker, Option<u32>)]) -> Vec<WorkerReading> {
        let mut known = BTreeMap::new();
        let mut readings = Vec::with_capacity(workers.len());
        for (worker, pid) in workers {
            let mut reading = WorkerReading {
                worker: worker.clone(),
                pid: None,
                cpu_seconds: 0.0,
                resident_bytes: 0,
            };
            let last = self.last.remove(worker);
            let read = pid
                .and_then(|pid| Some((pid, Stat::read(&self.proc.join(format!("{pid}/stat")))?)));
            match read {
                // An ended worker has no reading, nor has a process that reuses its id: a worker
                // leads its process group.
                Some((pid, stat)) if stat.group == pid => {
                    let same = last.filter(|last| last.pid == pid && last.start == stat.start);
                    let before = same.map_or(0, |last| last.ticks);
                    known.insert(
                        worker.clone(),
                        KnownProcess { pid, start: stat.start, ticks: stat.ticks },
                    );
                    reading.pid = Some(pid);
                    reading.cpu_seconds = seconds(stat.ticks.saturating_sub(before));
                    reading.resident_bytes = stat.resident_bytes;
                }
                _ => known.extend(last.map(|last| (worker.clone(), last))),
            }
            readings.push(reading);
        }
        self.last = known;
        readings
    }
}

/// Returns the resident memory of a process in bytes, and its start in seconds since 1970, if
/// known.
pub fn process_of(proc: &Path, pid: u32) -> Option<(u64, Option<f64>)> {
    let stat = Stat::read(&proc.join(format!("{pid}/stat")))?;
    let boot = sysinfo::System::boot_time().ok();
    Some((stat.resident_bytes, boot.map(|boot| boot as f64 + seconds(stat.start))))
}

/// Returns the bytes that would become free if a worker ended: memory that only the worker has
/// written, also if it was swapped out, and memory that the worker shares with this process
/// (proc_pid_smaps(5)). Unchanged pages of files, which the kernel can drop, and memory that the
/// worker still shares with its fork server are not included. `None` if the file cannot be read.
pub fn written_memory(proc: &Path, pid: u32) -> Option<u64> {
    let text = fs::read_to_string(proc.join(format!("{pid}/smaps_rollup"))).ok()?;
    let kilobytes = |key: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        value.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    // This process has most pages of shared memory too, so the worker's proportional share is half
    // of them.
    let shared =
        kilobytes("Pss_Shmem").map(|share| 2 * share).or_else(|| kilobytes("Shared_Dirty"))?;
    Some((kilobytes("Private_Dirty")? + shared + kilobytes("SwapPss")?) * 1024)
}

/// The needed fields of a `stat` file. Times are in clock ticks.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    /// The id of its process group.
    group: u32,
    /// In user and kernel mode, of all threads.
    ticks: u64,
    /// Since the machine started.
    start: u64,
    resident_bytes: u64,
}

impl Stat {
    fn read(file: &Path) -> Option<Self> {
        Self::parse(&fs::read_to_string(file).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The program's name, in parentheses, may contain anything, including parentheses and
        // spaces.
        let rest = text.rsplit_once(')')?.1;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // Fields are counted from 1 in proc_pid_stat(5); the state, the first after the name, is 3.
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self {
            group: u32::try_from(field(5)?).ok()?,
            ticks: field(14)? + field(15)?,
            start: field(22)?,
            resident_bytes: field(24)? * page_size() as u64,
        })
    }
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 / clock_ticks_per_second() as f64
}

/// Returns the number of open files. Since Linux 6.2 it is the size of the folder; older kernels
/// need a listing.
fn open_files(folder: &Path) -> Option<u64> {
    let size = fs::metadata(folder).ok()?.len();
    // A folder on a disk has a size too; only a folder of /proc has the number of files as its
    // size.
    let counted = size > 0 && folder.starts_with("/proc");
    if counted { Some(size) } else { Some(fs::read_dir(folder).ok()?.count() as u64) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::Tree;
    use super::*;
    use pharos::id::ModelVersion;

    /// Formats a `stat` line: 8 fields between the process group and the times, 6 between them and
    /// the start.
    fn stat(group: u32, [user, system, start, pages]: [u64; 4]) -> String {
        format!(
            "7 (a) b (c) S 1 {group} 7 0 -1 4194304 1 0 0 0 {user} {system} 50 60 20 0 4 0 \
             {start} 99999 {pages} 0\n"
        )
    }

    fn worker(instance: &str) -> Worker {
        Worker { model: ModelVersion::new("m", 1), instance: instance.to_owned() }
    }

    #[test]
    fn parses_a_stat_file_with_any_program_name() {
        let expected =
            Stat { group: 3, ticks: 30, start: 500, resident_bytes: 2 * page_size() as u64 };
        assert_eq!(Stat::parse(&stat(3, [10, 20, 500, 2])), Some(expected));
        for broken in
            ["", "7 (x", "7 (x) S 1 2 3", "7 (x) S a b c d e f g h i j k l m n o p q r s t u v"]
        {
            assert_eq!(Stat::parse(broken), None, "{broken:?}");
        }
    }

    #[test]
    fn reads_this_process_from_a_fake_proc() {
        let tree = Tree::new();
        tree.write("proc/self/stat", &stat(1, [100, 50, 1_000, 3]));
        for file in ["0", "1", "2"] {
            tree.write(&format!("proc/self/fd/{file}"), "");
        }
        let read = Processes::new(&tree.path("proc"), Some(1_000_000)).own().unwrap();
        let ticks = clock_ticks_per_second() as f64;
        assert_eq!(read.cpu_seconds, 150.0 / ticks);
        assert_eq!(read.start_seconds, Some(1_000_000.0 + 1_000.0 / ticks));
        assert_eq!((read.resident_bytes, read.open_files), (3 * page_size() as u64, Some(3)));
    }

    #[test]
    fn reads_this_process_from_the_real_proc() {
        let processes = Processes::new(Path::new("/proc"), sysinfo::System::boot_time().ok());
        let before = processes.own().unwrap();
        let files: Vec<_> = (0..10).map(|_| fs::File::open("/proc/self/stat").unwrap()).collect();
        let after = processes.own().unwrap();
        assert!(after.open_files.unwrap() + 5 >= before.open_files.unwrap() + files.len() as u64);
        assert!(after.resident_bytes > 1 << 20 && after.cpu_seconds >= before.cpu_seconds);
        let now = pharos_os::clock::wall_ms() as f64 / 1e3;
        let start = after.start_seconds.unwrap();
        assert!(start > now - 86_400.0 && start < now + 5.0, "{after:?}");
    }

    #[test]
    fn written_memory_is_private_or_shared_with_this_process() {
        let tree = Tree::new();
        let text = "1000-2000 ---p 00000000 00:00 0  [rollup]\nRss:  900 kB\nPss_Shmem:  7 \
                    kB\nShared_Clean:  400 kB\nShared_Dirty:  120 kB\nPrivate_Clean:  80 \
                    kB\nPrivate_Dirty:  300 kB\nSwap:  50 kB\nSwapPss:  5 kB\n";
        tree.write("proc/10/smaps_rollup", text);
        // A kernel without this field, and a broken file.
        tree.write("proc/11/smaps_rollup", &text.replace("Pss_Shmem:  7 kB\n", ""));
        tree.write("proc/12/smaps_rollup", &text.replace("300 kB", "300"));
        let read = |pid| written_memory(&tree.path("proc"), pid);
        assert_eq!(
            [read(10), read(11), read(12), read(13)],
            [Some(319 * 1024), Some(425 * 1024), None, None]
        );
    }

    #[test]
    fn counts_processor_time_across_a_restart() {
        let tree = Tree::new();
        let ticks = clock_ticks_per_second() as f64;
        let mut processes = Processes::new(&tree.path("proc"), None);
        let mut read = |pid: Option<u32>| processes.workers(&[(worker("m_0"), pid)]).remove(0);
        tree.write("proc/10/stat", &stat(10, [100, 0, 500, 1]));
        assert_eq!(read(Some(10)).cpu_seconds, 100.0 / ticks, "from its start");
        tree.write("proc/10/stat", &stat(10, [150, 10, 500, 1]));
        assert_eq!(read(Some(10)).cpu_seconds, 60.0 / ticks);
        assert_eq!(
            read(None),
            WorkerReading { worker: worker("m_0"), pid: None, cpu_seconds: 0.0, resident_bytes: 0 }
        );
        assert_eq!(read(Some(10)).cpu_seconds, 0.0, "the same process, not counted twice");
        tree.write("proc/10/stat", &stat(10, [5, 0, 900, 1]));
        assert_eq!(read(Some(10)).cpu_seconds, 5.0 / ticks, "a new process with the same id");
        tree.write("proc/11/stat", &stat(11, [3, 0, 950, 4]));
        let other = read(Some(11));
        assert_eq!(
            (other.cpu_seconds, other.resident_bytes),
            (3.0 / ticks, 4 * page_size() as u64)
        );
    }

    #[test]
    fn ignores_processes_that_lead_no_group() {
        let tree = Tree::new();
        tree.write("proc/10/stat", &stat(1, [100, 0, 500, 1]));
        let mut processes = Processes::new(&tree.path("proc"), None);
        let read = processes.workers(&[(worker("m_0"), Some(10)), (worker("m_1"), Some(11))]);
        assert!(
            read.iter().all(|reading| reading.pid.is_none() && reading.cpu_seconds == 0.0),
            "{read:?}"
        );
    }
}
