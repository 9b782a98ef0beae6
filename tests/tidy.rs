//! The house rules as tests: rules for this tree that rustc, clippy and Cargo do not check.
//!
//! The rules are tables in `tidy/rules.rs`. All violations are reported at once, each with
//! file:line, the rule, and what to do. Source is searched as text, not parsed.

#[cfg(test)]
#[path = "tidy/checker_tests.rs"]
mod checker_tests;
#[path = "tidy/code.rs"]
mod code;
#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/imports.rs"]
mod imports;
#[path = "tidy/metrics.rs"]
mod metrics;
#[path = "tidy/rules.rs"]
mod rules;
#[path = "tidy/texts.rs"]
mod texts;

use std::fs;
use std::path::Path;
use std::process::Command;

/// A file of the repository; the text of one that is not UTF-8, such as a picture, is empty.
struct File {
    /// The path relative to the root.
    path: String,
    text: String,
}

#[test]
fn the_tree_keeps_the_house_rules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let files = read(&root);
    assert!(
        files.iter().any(|file| file.path == "src/lib.rs"),
        "no source found under {}",
        root.display()
    );
    let violations = violations(&files);
    assert!(
        violations.is_empty(),
        "{} violations of the house rules:\n{}",
        violations.len(),
        violations.join("\n")
    );
}

/// Reads every file that git tracks or would track.
fn read(root: &Path) -> Vec<File> {
    let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output =
        Command::new("git").arg("-C").arg(root).args(arguments).output().expect("git runs");
    let paths = String::from_utf8(output.stdout).expect("paths are UTF-8");
    let mut files = Vec::new();
    for path in paths.split_terminator('\0') {
        // Deleted files stay in the index until they are staged.
        if let Ok(bytes) = fs::read(root.join(path)) {
            files.push(File {
                path: path.to_owned(),
                text: String::from_utf8(bytes).unwrap_or_default(),
            });
        }
    }
    files
}

fn violations(files: &[File]) -> Vec<String> {
    let sources = code::sources(files);
    let mut found = imports::packages(files);
    found.extend(imports::floors(&sources));
    found.extend(imports::bans(&sources));
    found.extend(imports::cycles(&sources));
    found.extend(texts::check(files));
    found.extend(documents::check(files));
    found.extend(metrics::check(files));
    found.dedup();
    found
}

fn violation(path: &str, line: usize, rule: &str, advice: &str) -> String {
    format!("{path}:{line}: {rule}: {advice}")
}
