//! The checks. Each reads files and returns one line per violation: position, rule, and what to do.

use std::collections::BTreeSet;

use crate::rules::{
    BANS, CRATES_OF_THE_CORE, Floor, LAYERINGS, Layering, METRIC_PREFIXES, NO_METRIC_NAMES, PACKAGES, PRIVATE_FOLDERS,
    TOP_LEVEL, UNSAFE,
};
use crate::source::{lines_without_tests, mask, paths, words};
use crate::tree::File;
use crate::{cycles, documents, language, metrics, vocabulary};

/// Returns every violation in these files.
pub(crate) fn all(files: &[File]) -> Vec<String> {
    let mut found = top_level(files);
    for file in files {
        found.extend(private_folders(file));
        found.extend(manifest(file));
        if file.path.ends_with(".proto") && !file.path.starts_with("proto/") {
            found.push(violation(&file.path, 1, "protobuf definitions live in proto/", "move the file there"));
        }
        found.extend(documents::check(file));
        if file.path.ends_with(".rs") {
            found.extend(rust(file));
        }
    }
    found.extend(documents::links(files));
    found.extend(stale_unsafe(files));
    found.extend(language::check(files));
    found.extend(metrics::check(files));
    found.extend(cycles::check(files));
    found.extend(vocabulary::check(files));
    found
}

/// Returns every entry of the exception lists that no longer applies.
pub(crate) fn stale(files: &[File]) -> Vec<String> {
    [cycles::stale(files), vocabulary::stale(files)].concat()
}

pub(crate) fn violation(path: &str, line: usize, rule: &str, advice: &str) -> String {
    format!("{path}:{line}: {rule}: {advice}")
}

/// Runs all checks of one Rust file.
fn rust(file: &File) -> Vec<String> {
    let code = mask(&file.text, false);
    let own = lines_without_tests(&file.text);
    let named: Vec<_> = paths(&code).into_iter().filter(|(line, _)| *line <= own && !is_test(&file.path)).collect();
    let mut found = Vec::new();
    found.extend(forms(file, &code));
    found.extend(metric_names(file, own));
    found.extend(swapped_in_tests(file, &code));
    found.extend(bans(&file.path, &named));
    for layering in LAYERINGS.iter().filter(|layering| source_of(&file.path) == Some(layering.source)) {
        found.extend(floors(layering, &file.path, &named));
    }
    found
}

/// Returns whether a source file contains only tests.
pub(crate) fn is_test(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.ends_with("_tests.rs") || (path.contains("src/") && path.contains("/tests/"))
}

/// Checks module heads and `unsafe`.
fn forms(file: &File, code: &str) -> Vec<String> {
    let mut found = Vec::new();
    if !file.text.starts_with("//!") {
        let advice = "say what the module is for and what it must never do";
        found.push(violation(&file.path, 1, "a Rust file begins with `//!`", advice));
    }
    let line = |at: usize| crate::source::line_of(code, at);
    for (at, word) in words(code) {
        if word == "unsafe" && !UNSAFE.iter().any(|(path, _)| *path == file.path) {
            let advice = "avoid it, or add the file to UNSAFE in tests/tidy/rules.rs with the reason";
            found.push(violation(&file.path, line(at), "`unsafe` only in the listed files", advice));
        }
    }
    found
}

/// Checks that the list of files with `unsafe` is current.
fn stale_unsafe(files: &[File]) -> Vec<String> {
    let mut found = Vec::new();
    for (path, reason) in UNSAFE {
        let Some(file) = files.iter().find(|file| file.path == *path) else { continue };
        if !words(&mask(&file.text, false)).any(|(_, word)| word == "unsafe") {
            let rule = format!("listed as unsafe for '{reason}', but has no unsafe code");
            found.push(violation(path, 1, &rule, "remove it from UNSAFE in tests/tidy/rules.rs"));
        } else if !file.text.contains("Contract") && !file.text.contains("SAFETY") {
            let advice = "write `// SAFETY:` at each use, or a `Contract` above them";
            found.push(violation(path, 1, "unsafe code states its contract", advice));
        }
    }
    found
}

/// Finds frontend code that unit tests do not compile, without a comment that states the reason.
fn swapped_in_tests(file: &File, code: &str) -> Vec<String> {
    if !file.path.starts_with("frontend/") {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut before = "";
    for (number, (line, text)) in (1..).zip(code.lines().zip(file.text.lines())) {
        let hides = line.contains("cfg(not(test))") || line.contains("cfg_attr(test, allow(dead_code))");
        if hides && !before.trim_start().starts_with("// ") {
            let advice =
                "make it generic over a trait of the core and test it with a double, or state the reason in a comment";
            found.push(violation(&file.path, number, "unit tests compile all code", advice));
        }
        before = text;
    }
    found
}

fn metric_names(file: &File, own: usize) -> Vec<String> {
    if !NO_METRIC_NAMES.iter().any(|folder| file.path.starts_with(folder)) || is_test(&file.path) {
        return Vec::new();
    }
    let code = mask(&file.text, true);
    let mut found = Vec::new();
    for (index, line) in code.lines().enumerate().take(own) {
        if METRIC_PREFIXES.iter().any(|prefix| line.contains(&format!("\"{prefix}"))) {
            let rule = "a metric is named once, in metrics.yaml";
            found.push(violation(&file.path, index + 1, rule, "refer to it by the catalog's enum of built-ins"));
        }
    }
    found
}

fn bans(path: &str, named: &[(usize, String)]) -> Vec<String> {
    let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| path.starts_with(prefix));
    let mut found = BTreeSet::new();
    for ban in BANS.iter().filter(|ban| begins(ban.within) && !begins(ban.except)) {
        for (line, name) in named {
            let name = absolute(path, name);
            if ban.paths.iter().any(|banned| is_within(&name, banned)) {
                found.insert((*line, format!("`{name}` is not allowed here"), ban.advice));
            }
        }
    }
    found.into_iter().map(|(line, rule, advice)| violation(path, line, &rule, advice)).collect()
}

/// Returns whether a path is `prefix` or below it.
fn is_within(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

fn floors(layering: &Layering, path: &str, named: &[(usize, String)]) -> Vec<String> {
    let Some(own) = module_of(path).first().cloned() else { return Vec::new() };
    let Some(height) = floor_of(layering, &own) else {
        let advice = "add it to a floor in tests/tidy/rules.rs, and to ARCHITECTURE.md";
        return vec![violation(path, 1, &format!("the module `{own}` has no floor"), advice)];
    };
    let mut found = BTreeSet::new();
    for (line, name) in named {
        let name = absolute(path, name);
        let Some(other) = name.strip_prefix("crate::").and_then(|rest| rest.split("::").next()) else { continue };
        let Some(target) = floor_of(layering, other).filter(|_| other != own) else { continue };
        let sibling = target == height;
        if target < height || (sibling && !layering.floors[height].among_themselves) {
            let place = if sibling { "beside" } else { "above" };
            found.insert((*line, format!("`{own}` uses `{other}`, which is {place} it")));
        }
    }
    let advice = "imports point down only: move what is shared below both, or pass it in";
    found.into_iter().map(|(line, rule)| violation(path, line, &rule, advice)).collect()
}

fn floor_of(layering: &Layering, module: &str) -> Option<usize> {
    layering.floors.iter().position(|floor: &Floor| floor.modules.contains(&module))
}

/// Returns the source folder of the crate that a file belongs to; `None` for other files.
pub(crate) fn source_of(path: &str) -> Option<&str> {
    if let Some(folder) = CRATES_OF_THE_CORE.iter().find(|folder| path.starts_with(**folder)) {
        return Some(folder);
    }
    let begins = |at: &usize| *at == 0 || path.as_bytes()[at - 1] == b'/';
    let at = path.match_indices("src/").map(|(at, _)| at).find(begins)?;
    Some(&path[..at + 4])
}

/// Returns the module of a file as segments below its crate; empty for the crate's root.
pub(crate) fn module_of(path: &str) -> Vec<String> {
    let inside = source_of(path).map_or("", |source| &path[source.len()..]);
    let mut segments: Vec<_> = inside.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if segments.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        segments.pop();
    }
    segments
}

/// Resolves `self` and `super` in a path to `crate::…`.
pub(crate) fn absolute(file: &str, path: &str) -> String {
    let mut module = module_of(file);
    let mut rest: Vec<_> = path.split("::").collect();
    if !matches!(rest.first(), Some(&"self" | &"super")) {
        return path.to_owned();
    }
    while let Some(first @ ("self" | "super")) = rest.first().copied() {
        if first == "super" {
            module.pop();
        }
        rest.remove(0);
    }
    let segments = std::iter::once("crate").chain(module.iter().map(String::as_str)).chain(rest);
    segments.collect::<Vec<_>>().join("::")
}

/// Finds dependencies that a package may not have.
fn manifest(file: &File) -> Vec<String> {
    if !file.path.ends_with("Cargo.toml") || !file.text.contains("[package]") {
        return Vec::new();
    }
    let package = PACKAGES.iter().find(|package| package.manifest == file.path);
    let (mut found, mut table) = (Vec::new(), "");
    for (index, line) in file.text.lines().enumerate() {
        if line.starts_with('[') {
            table = line.trim_matches(['[', ']']);
        }
        let dependency = line.split(['=', '.', ' ']).next().unwrap_or_default();
        // The workspace's table only declares dependencies.
        if !table.ends_with("dependencies") || table.starts_with("workspace") {
            continue;
        }
        let own = dependency.starts_with("pharos") && table == "dependencies";
        let may = match package {
            Some(package) => !package.without.contains(&dependency) && (!own || package.uses.contains(&dependency)),
            // Examples and fuzzers may use any package.
            None => !own || !file.path.starts_with("frontend/") && !file.path.starts_with("worker/"),
        };
        if !may {
            let rule = format!("this package may not depend on `{dependency}`");
            found.push(violation(&file.path, index + 1, &rule, "see PACKAGES in tests/tidy/rules.rs"));
        }
    }
    found
}

fn top_level(files: &[File]) -> Vec<String> {
    let names: BTreeSet<_> = files.iter().filter_map(|file| file.path.split('/').next()).collect();
    let strangers = names.into_iter().filter(|name| !TOP_LEVEL.contains(name));
    let advice = "move it below one of the folders there";
    strangers.map(|name| violation(name, 1, "the top level holds only the agreed names", advice)).collect()
}

/// Finds paths that exist on one machine only.
fn private_folders(file: &File) -> Vec<String> {
    let mut found = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        for folder in PRIVATE_FOLDERS {
            let begins = |at: usize| {
                let before = line[..at].chars().next_back();
                // Ignore parts of longer paths and of addresses.
                !before.is_some_and(|before| before.is_alphanumeric() || "._-~/}$)".contains(before))
            };
            if line.match_indices(folder).any(|(at, _)| begins(at)) {
                let rule = format!("`{folder}…` exists on one machine only");
                found.push(violation(
                    &file.path,
                    index + 1,
                    &rule,
                    "use a path relative to the repository, or a variable",
                ));
            }
        }
    }
    found
}
