//! Checks names: modules have standard terms, and only TorchServe's packages name TorchServe.

use std::collections::BTreeMap;

use crate::checks::{is_test, module_of, violation};
use crate::known::{PRIVATE_NAMES_LEFT, TORCHSERVE_LEFT};
use crate::rules::{PRIVATE_NAMES, TORCHSERVE};
use crate::source::lines_without_tests;
use crate::tree::File;

/// Returns nonstandard names and uses of TorchServe that are not listed exceptions.
pub(crate) fn check(files: &[File]) -> Vec<String> {
    [names(files, PRIVATE_NAMES_LEFT).0, torchserve(files, TORCHSERVE_LEFT).0].concat()
}

/// Returns entries of these lists that no longer apply.
pub(crate) fn stale(files: &[File]) -> Vec<String> {
    [names(files, PRIVATE_NAMES_LEFT).1, torchserve(files, TORCHSERVE_LEFT).1].concat()
}

/// Returns the unlisted modules with a nonstandard name, and listed modules that no longer exist.
pub(crate) fn names(files: &[File], known: &[&str]) -> (Vec<String>, Vec<String>) {
    let is_private = |path: &str| module_of(path).last().is_some_and(|name| PRIVATE_NAMES.contains(&name.as_str()));
    let paths = files.iter().map(|file| file.path.as_str()).filter(|path| path.ends_with(".rs") && !is_test(path));
    let left: Vec<_> = paths.filter(|path| is_private(path)).collect();
    let found = left.iter().filter(|path| !known.contains(path)).map(|path| {
        let advice = "use the standard term for its purpose, or add a term to the glossary in ARCHITECTURE.md";
        violation(path, 1, "module names must be standard terms", advice)
    });
    let stale = known.iter().filter(|path| !left.contains(path)).map(|path| {
        violation(path, 1, "no module has this name", "remove it from PRIVATE_NAMES_LEFT in tests/tidy/known.rs")
    });
    (found.collect(), stale.collect())
}

/// Returns files that name TorchServe more often than the list allows, and entries of the list that allow too much.
pub(crate) fn torchserve(files: &[File], known: &[(&str, usize)]) -> (Vec<String>, Vec<String>) {
    let has_place = |path: &str| TORCHSERVE.iter().any(|(place, _)| path.starts_with(place));
    let is_judged = |path: &str| path.ends_with(".rs") && path.contains("src/") && !is_test(path) && !has_place(path);
    let count = |file: &File| {
        let lines = file.text.lines().take(lines_without_tests(&file.text));
        lines.filter(|line| line.to_ascii_lowercase().replace(['_', ' ', '-'], "").contains("torchserve")).count()
    };
    let judged = files.iter().filter(|file| is_judged(&file.path));
    let counts: BTreeMap<_, _> = judged.map(|file| (file.path.as_str(), count(file))).collect();
    let allowed: BTreeMap<_, _> = known.iter().copied().collect();
    let (mut found, mut stale) = (Vec::new(), Vec::new());
    for (path, count) in &counts {
        let most = allowed.get(path).copied().unwrap_or_default();
        if *count > most {
            let rule = format!("{count} lines name TorchServe, at most {most} are allowed");
            found.push(violation(
                path,
                1,
                &rule,
                "pass the engine a policy or a view that TorchServe's package defines",
            ));
        }
    }
    for (path, most) in known {
        let count = counts.get(path).copied().unwrap_or_default();
        if count < *most {
            let rule = format!("{most} lines that name TorchServe are allowed, {count} exist");
            stale.push(violation(
                path,
                1,
                &rule,
                "lower the count in TORCHSERVE_LEFT in tests/tidy/known.rs, or remove the entry",
            ));
        }
    }
    (found, stale)
}
