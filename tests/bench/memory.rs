//! Resident memory of a server and of its workers, from `/proc`.

use std::fs;

use crate::processor_time::fields_after_name;
use crate::server::Server;

/// The resident memory of a process, MiB.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Resident {
    /// The total.
    pub(crate) total: f64,
    /// The part in shared mappings: arenas and rings, counted in every process that maps them.
    pub(crate) shared: f64,
}

/// The memory of a server and of the largest of its workers for built-in models.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) frontend: Resident,
    pub(crate) worker: Option<Resident>,
}

/// Reads the memory of a server.
pub(crate) fn memory(server: &Server) -> Memory {
    let frontend = resident(server.pid()).unwrap_or_default();
    let workers = children(server.pid())
        .into_iter()
        .filter(|pid| name(*pid) != INTERPRETER)
        .filter_map(resident);
    Memory { frontend, worker: workers.max_by(|left, right| left.total.total_cmp(&right.total)) }
}

/// The program name of workers for Python models.
const INTERPRETER: &str = "python";

/// Returns the name of a process's program without a version suffix; empty for an ended process.
fn name(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().trim_end_matches(|end: char| end.is_ascii_digit() || end == '.').to_owned()
}

fn resident(pid: u32) -> Option<Resident> {
    parse_status(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

fn parse_status(status: &str) -> Option<Resident> {
    let mebibytes = |name: &str| -> Option<f64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<f64>()
            .ok()
            .map(|kibibytes| kibibytes / 1024.0)
    };
    Some(Resident { total: mebibytes("VmRSS:")?, shared: mebibytes("RssShmem:").unwrap_or(0.0) })
}

/// Returns the process ids of the direct children.
fn children(parent: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| parent_of(*pid) == Some(parent)).collect()
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The state and the parent follow the name.
    fields_after_name(&stat)?.nth(1)?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn parses_status_files() {
        let status = "Name:\tx\nVmRSS:\t   2048 kB\nRssAnon:\t 512 kB\nRssShmem:\t    1024 kB\n";
        assert_eq!(parse_status(status), Some(Resident { total: 2.0, shared: 1.0 }));
        assert_eq!(parse_status("Name:\tzombie\n"), None);
    }

    #[test]
    fn finds_a_child() {
        let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();
        let found = children(std::process::id());
        let called = name(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found.contains(&child.id()), "{found:?} lacks {}", child.id());
        assert_eq!(called, "sleep");
    }
}
