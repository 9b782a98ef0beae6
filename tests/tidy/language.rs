//! Plain English: phrases that readers stumble over stay out of the tree. `phrases.txt` lists each with a reason and a better form.

use crate::checks::violation;
use crate::tree::File;

const PHRASES: &str = include_str!("phrases.txt");

/// Files that quote the phrases, lists of English words, and tables with names or texts that are recorded from other servers.
const EXEMPT: &[&str] = &[
    "tests/python/python_backend/python_models/measuring.py",
    "tests/python/torchserve/archives/refusing/handler.py",
    "tests/python/traces/trace_table.py",
    "tests/tidy/checker_tests.rs",
    "tests/tidy/phrases.txt",
    "worker/python/python/pharos_worker/torchserve/ts/torch_handler/contractions.py",
];

/// The extensions of files with sentences of this project.
const EXTENSIONS: &[&str] = &["rs", "py", "md", "yaml", "yml", "toml", "proto", "h", "c", "js", "html"];

/// Checks the lines of every file for the listed phrases.
pub(crate) fn check(files: &[File]) -> Vec<String> {
    let phrases = phrases();
    let judged = files.iter().filter(|file| is_judged(&file.path));
    judged.flat_map(|file| file.text.lines().enumerate().filter_map(|line| judge(&phrases, &file.path, line))).collect()
}

fn is_judged(path: &str) -> bool {
    let extension = path.rsplit_once('.').map_or("", |(_, extension)| extension);
    EXTENSIONS.contains(&extension) && !EXEMPT.contains(&path) && !path.contains("golden")
}

fn judge(phrases: &[(&str, &str)], path: &str, (index, line): (usize, &str)) -> Option<String> {
    // `is None` is Python.
    let text = line.replace(" None", " ").to_ascii_lowercase();
    let (phrase, advice) = phrases.iter().find(|(phrase, _)| contains(&text, phrase))?;
    Some(violation(path, index + 1, &format!("the phrase \"{phrase}\""), advice))
}

/// Returns each phrase with its better form.
fn phrases() -> Vec<(&'static str, &'static str)> {
    let rows = PHRASES.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    rows.filter_map(|row| row.split_once(" | ")).collect()
}

/// Returns whether the text contains the phrase as whole words.
fn contains(text: &str, phrase: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_alphabetic() || c == '_';
    text.match_indices(phrase).any(|(at, _)| {
        let before = text.get(..at).is_some_and(|before| before.ends_with(is_letter));
        let after = text.get(at + phrase.len()..).is_some_and(|after| after.starts_with(is_letter));
        !before && !after
    })
}
