//! The files of the repository: those that git tracks or would track, or all files without git.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Folders of built or downloaded files.
const SKIPPED: &[&str] = &[".git", "target", "__pycache__", ".pytest_cache", "node_modules"];

/// A text file.
pub(crate) struct File {
    /// The path relative to the root, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Reads every text file.
pub(crate) fn read(root: &Path) -> Vec<File> {
    let mut paths = tracked(root).unwrap_or_else(|| walk(root, ""));
    paths.sort();
    let file = |path: String| fs::read_to_string(root.join(&path)).ok().map(|text| File { path, text });
    paths.into_iter().filter_map(file).collect()
}

fn tracked(root: &Path) -> Option<Vec<String>> {
    let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").arg("-C").arg(root).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok().filter(|text| output.status.success() && !text.is_empty())?;
    Some(text.split_terminator('\0').map(str::to_owned).collect())
}

fn walk(root: &Path, folder: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && !SKIPPED.contains(&name.as_str()) => paths.extend(walk(root, &path)),
            Ok(kind) if kind.is_file() => paths.push(path),
            _ => {}
        }
    }
    paths
}
