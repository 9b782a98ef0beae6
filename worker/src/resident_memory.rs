//! The resident memory of this process, see proc_pid_statm(5) and proc_pid_smaps(5).

use std::fs;

use rustix::param::page_size;
use rustix::system::uname;

/// The first Linux that reads the exact number in `statm` (its commit 82241a83cd15). Before, the
/// error could reach some hundred kilobytes per processor, which is more than a small model needs.
const EXACT: (u32, u32) = (6, 16);

/// Returns the resident memory in bytes; 0 if /proc is not mounted.
///
/// `smaps_rollup`, for an older kernel, takes 0.3 ms and more: it walks all pages, and other
/// threads may not map memory meanwhile.
pub(crate) fn resident_memory() -> u64 {
    let statm = || of_statm(&fs::read_to_string("/proc/self/statm").ok()?, page_size() as u64);
    let is_exact =
        version(&uname().release().to_string_lossy()).is_some_and(|version| version >= EXACT);
    if is_exact {
        return statm().unwrap_or(0);
    }
    let rollup =
        fs::read_to_string("/proc/self/smaps_rollup").ok().and_then(|text| of_rollup(&text));
    rollup.or_else(statm).unwrap_or(0)
}

/// Returns the first two numbers of a release, for example of `6.18.4-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers =
        release.split(|other: char| !other.is_ascii_digit()).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Returns the resident bytes in the text of `statm`: the second number, in pages.
fn of_statm(text: &str, page_size: u64) -> Option<u64> {
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * page_size)
}

/// Returns the resident bytes in the text of `smaps_rollup`.
fn of_rollup(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("Rss:"))?;
    let kilobytes: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_both_files() {
        assert_eq!(of_statm("5000 300 20 10 0 400 0\n", 4096), Some(300 * 4096));
        assert_eq!(
            of_rollup("1000-2000 ---p 0 00:00 0 [rollup]\nRss:     900 kB\nPss:   7 kB\n"),
            Some(900 << 10)
        );
        assert!(["", "5", "a b"].iter().all(|broken| of_statm(broken, 4096).is_none()));
        assert!(
            ["", "Rss: 9", "Rss: x kB", "Pss: 7 kB"]
                .iter()
                .all(|broken| of_rollup(broken).is_none())
        );
    }

    #[test]
    fn the_version_is_the_first_two_numbers_of_the_release() {
        assert_eq!(version("6.18.44-fc"), Some((6, 18)));
        assert_eq!(version("7.0-rc1"), Some((7, 0)));
        assert!(version("6.9.1") < Some(EXACT) && version("10.0") > Some(EXACT));
        assert_eq!((version(""), version("rolling")), (None, None));
    }

    #[test]
    fn grows_with_written_memory() {
        let before = resident_memory();
        let mut written = vec![0u8; 32 << 20];
        written.iter_mut().step_by(page_size()).for_each(|byte| *byte = 1);
        let grown = resident_memory().saturating_sub(before);
        assert!(grown >= 30 << 20, "{grown} of {} bytes", std::hint::black_box(&written).len());
    }
}
