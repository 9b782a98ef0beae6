//! Checks texts: the patterns of `TEXTS` in code, the phrases of `phrases.txt`, paths of one
//! machine, heads of modules.

use regex::Regex;

use crate::code::{is_test, without_tests};
use crate::rules::TEXTS;
use crate::{File, violation};

/// Phrases that readers stumble over, each with a reason and a better form.
const PHRASES: &str = include_str!("phrases.txt");

/// Files that quote the phrases, lists of English words, and tables with names or texts that are
/// recorded from other servers.
const QUOTES: &[&str] = &[
    "tests/python/python_backend/python_models/measuring.py",
    "tests/python/torchserve/archives/refusing/handler.py",
    "tests/python/traces/trace_table.py",
    "tests/tidy/checker_tests.rs",
    "tests/tidy/phrases.txt",
    "worker/python/python/pharos_worker/torchserve/ts/torch_handler/contractions.py",
];

/// The extensions of files with sentences of this project.
const SENTENCES: &[&str] =
    &["rs", "py", "md", "yaml", "yml", "toml", "proto", "h", "c", "js", "html"];

pub(crate) fn check(files: &[File]) -> Vec<String> {
    let mut found = phrases(files);
    found.extend(private_folders(files));
    for file in
        files.iter().filter(|file| file.path.ends_with(".rs") && !file.text.starts_with("//!"))
    {
        let advice = "say what the module is for and what it must never do";
        found.push(violation(&file.path, 1, "a Rust file begins with `//!`", advice));
    }
    for text in TEXTS {
        let pattern = Regex::new(text.pattern).expect("valid");
        let is_in =
            |file: &&File, places: &[&str]| places.iter().any(|place| file.path.starts_with(place));
        let code = files.iter().filter(|file| file.path.ends_with(".rs") && !is_test(&file.path));
        for file in code.filter(|file| is_in(file, text.within) && !is_in(file, text.except)) {
            for (line, content) in (1..).zip(without_tests(&file.text).lines()) {
                if let Some(banned) = pattern.find(content) {
                    let rule = format!("the text `{}`", banned.as_str());
                    found.push(violation(&file.path, line, &rule, text.advice));
                }
            }
        }
    }
    found
}

fn phrases(files: &[File]) -> Vec<String> {
    let rows = PHRASES.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let rows: Vec<_> = rows.filter_map(|row| row.split_once(" | ")).collect();
    let phrases: Vec<_> = rows.iter().map(|(phrase, _)| regex::escape(phrase)).collect();
    let pattern = Regex::new(&format!(r"\b(?:{})\b", phrases.join("|"))).expect("valid");
    let mut found = Vec::new();
    for file in files {
        let extension = file.path.rsplit_once('.').map_or("", |(_, extension)| extension);
        if !SENTENCES.contains(&extension)
            || QUOTES.contains(&file.path.as_str())
            || file.path.contains("golden")
        {
            continue;
        }
        for (line, text) in (1..).zip(file.text.lines()) {
            // `is None` is Python.
            let text = text.replace(" None", " ").to_ascii_lowercase();
            if let Some(phrase) = pattern.find(&text) {
                let phrase = phrase.as_str();
                let advice = rows.iter().find(|row| row.0 == phrase).map_or("", |row| row.1);
                found.push(violation(
                    &file.path,
                    line,
                    &format!("the phrase \"{phrase}\""),
                    advice,
                ));
            }
        }
    }
    found
}

/// Finds paths that exist on one machine only, but not parts of longer paths and of addresses.
fn private_folders(files: &[File]) -> Vec<String> {
    let pattern = Regex::new(r"(?:^|[^\w._~/})-])(/(?:home|root|work|Users)/)").expect("valid");
    let mut found = Vec::new();
    for file in files {
        for (line, text) in (1..).zip(file.text.lines()) {
            // Paths in TorchServe's image are the same on every machine.
            let text = text.replace("/home/model-server", "");
            if let Some(folder) = pattern.captures(&text) {
                let rule = format!("`{}…` exists on one machine only", &folder[1]);
                found.push(violation(
                    &file.path,
                    line,
                    &rule,
                    "use a path relative to the repository, or a variable",
                ));
            }
        }
    }
    found
}
