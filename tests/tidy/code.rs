//! Code without comments, literals and tests, and the paths that it names.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use regex::{Captures, Regex};

use crate::File;
use crate::rules::CRATES_OF_THE_CORE;

/// A module as segments below its crate; empty for the crate's root.
pub(crate) type Module = Vec<String>;

/// A source file that is not a test.
pub(crate) struct Source<'a> {
    pub(crate) path: &'a str,
    /// The source folder of its crate, as `frontend/os/src/`.
    pub(crate) folder: &'a str,
    pub(crate) module: Module,
    pub(crate) paths: Vec<NamedPath>,
}

/// A path of at least two segments in code, or any path of a `use`.
pub(crate) struct NamedPath {
    pub(crate) line: usize,
    pub(crate) is_import: bool,
    /// Begins with `crate` if the path is in the same crate.
    pub(crate) segments: Vec<String>,
}

static COMMENT_OR_LITERAL: LazyLock<Regex> = LazyLock::new(|| {
    let comments = r"//[^\n]*|/\*.*?\*/";
    let raw_strings = r##"\b[bc]?r"[^"]*"|\b[bc]?r#".*?"#"##;
    let others = r#""(?:\\.|[^"\\])*"|'(?:\\u\{\w+\}|\\x\w\w|\\.|[^'\\])'"#;
    Regex::new(&format!("(?s){comments}|{raw_strings}|{others}")).expect("valid")
});

static INLINE_TESTS: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?m)^#\[cfg\(test\)\]\n(?:#\[.*\]\n)*mod \w+ \{").expect("valid")
});

static TEST_MODULE: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"#\[cfg\(test\)\]\s*(?:#\[[^\n]*\]\s*)*(?:pub(?:\(crate\))? )?mod (\w+);")
        .expect("valid")
});

static IMPORT_OR_PATH: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\buse\s+([^;]+);|\b\w+(?:::\w+)+").expect("valid"));

/// Returns the source files of every crate, without tests.
pub(crate) fn sources(files: &[File]) -> Vec<Source<'_>> {
    let mut codes = Vec::new();
    let mut tests = BTreeSet::new();
    for file in files.iter().filter(|file| file.path.ends_with(".rs")) {
        let Some(folder) = source_folder(&file.path) else { continue };
        let module = module_of(&file.path[folder.len()..]);
        let code = mask(without_tests(&file.text));
        for declaration in TEST_MODULE.captures_iter(&code) {
            tests.insert((folder, child(&module, &declaration[1])));
        }
        if !is_test(&file.path) {
            codes.push((file.path.as_str(), folder, module, code));
        }
    }
    codes.retain(|(_, folder, module, _)| {
        !ancestors(module).any(|ancestor| tests.contains(&(*folder, ancestor)))
    });
    let mut modules = BTreeSet::new();
    for (_, folder, module, _) in &codes {
        modules.extend(ancestors(module).map(|ancestor| (*folder, ancestor)));
    }
    let mut sources = Vec::new();
    for (path, folder, module, code) in codes {
        let paths = named_paths(&code, &module, |child| modules.contains(&(folder, child)));
        sources.push(Source { path, folder, module, paths });
    }
    sources
}

/// Returns whether a file contains only tests.
pub(crate) fn is_test(path: &str) -> bool {
    path.ends_with("/tests.rs")
        || path.ends_with("_tests.rs")
        || (path.contains("src/") && path.contains("/tests/"))
}

/// Returns the text before the file's module of tests.
pub(crate) fn without_tests(text: &str) -> &str {
    INLINE_TESTS.find(text).map_or(text, |tests| &text[..tests.start()])
}

/// Replaces comments and literals by spaces; lines are preserved.
pub(crate) fn mask(text: &str) -> String {
    let blank = |found: &Captures<'_>| {
        found[0].chars().map(|c| if c == '\n' { c } else { ' ' }).collect::<String>()
    };
    COMMENT_OR_LITERAL.replace_all(text, blank).into_owned()
}

pub(crate) fn child(module: &[String], name: &str) -> Module {
    let mut child = module.to_vec();
    child.push(name.to_owned());
    child
}

/// Returns the module and those that contain it, without the root.
pub(crate) fn ancestors(module: &[String]) -> impl Iterator<Item = Module> {
    (1..=module.len()).map(|length| module[..length].to_vec())
}

fn source_folder(path: &str) -> Option<&str> {
    if let Some(folder) = CRATES_OF_THE_CORE.iter().find(|folder| path.starts_with(**folder)) {
        return Some(folder);
    }
    let begin = if path.starts_with("src/") { 0 } else { path.find("/src/")? + 1 };
    Some(&path[..begin + "src/".len()])
}

fn module_of(path: &str) -> Module {
    let mut segments: Module = path.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    segments.pop_if(|last| ["mod", "lib", "main"].contains(&last.as_str()));
    segments
}

pub(crate) fn named_paths(
    code: &str,
    module: &[String],
    is_module: impl Fn(Module) -> bool,
) -> Vec<NamedPath> {
    let mut found = Vec::new();
    for captures in IMPORT_OR_PATH.captures_iter(code) {
        let import = captures.get(1);
        let begin = captures.get_match().start();
        let line = code[..begin].matches('\n').count() + 1;
        let paths =
            import.map_or_else(|| vec![captures[0].to_owned()], |tree| expand(tree.as_str()));
        for path in paths {
            let segments = absolute(path.split("::"), module, &is_module);
            found.push(NamedPath { line, is_import: import.is_some(), segments });
        }
    }
    found
}

/// Returns the paths of a `use`.
fn expand(tree: &str) -> Vec<String> {
    let Some((prefix, group)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        return vec![path.trim().trim_end_matches("::*").to_owned()];
    };
    let mut paths = Vec::new();
    let mut depth = 0;
    for branch in group.split_inclusive(|c: char| match c {
        '{' => {
            depth += 1;
            false
        }
        '}' => {
            depth -= 1;
            depth < 0
        }
        _ => c == ',' && depth == 0,
    }) {
        let branch = branch.strip_suffix([',', '}']).unwrap_or(branch).trim();
        if !branch.is_empty() {
            paths.extend(expand(branch).iter().map(|path| format!("{}{path}", prefix.trim())));
        }
    }
    paths
}

/// Resolves `self`, `super` and the names of child modules to a path that begins with `crate`.
fn absolute<'a>(
    path: impl Iterator<Item = &'a str>,
    module: &[String],
    is_module: impl Fn(Module) -> bool,
) -> Vec<String> {
    let mut path = path.peekable();
    let mut base: Option<Module> = None;
    while let Some(segment @ ("self" | "super")) = path.peek().copied() {
        let base = base.get_or_insert_with(|| module.to_vec());
        if segment == "super" {
            base.pop();
        }
        path.next();
    }
    if base.is_none() && path.peek().is_some_and(|first| is_module(child(module, first))) {
        base = Some(module.to_vec());
    }
    let root = base.iter().map(|_| "crate".to_owned());
    let rest = path.filter(|segment| *segment != "self").map(str::to_owned);
    root.chain(base.clone().unwrap_or_default()).chain(rest).collect()
}
