//! The house rules as tests: rules for this tree that the compiler and clippy do not check.
//!
//! The rules are tables in `tidy/rules.rs`. All violations are reported at once, each with file:line, the rule, and what to do.
//! The checks are deliberately simple: they treat source as text and do not parse it.

#[path = "tidy/checks.rs"]
mod checks;
#[path = "tidy/cycles.rs"]
mod cycles;
#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/known.rs"]
mod known;
#[path = "tidy/language.rs"]
mod language;
#[path = "tidy/metrics.rs"]
mod metrics;
#[path = "tidy/rules.rs"]
mod rules;
#[path = "tidy/source.rs"]
mod source;
#[path = "tidy/tree.rs"]
mod tree;
#[path = "tidy/vocabulary.rs"]
mod vocabulary;

#[cfg(test)]
#[path = "tidy/checker_tests.rs"]
mod checker_tests;

use std::path::Path;

/// Checks the tree that contains this package, or the one in `PHAROS_TIDY_ROOT`.
#[test]
fn the_tree_keeps_the_house_rules() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let root = std::env::var_os("PHAROS_TIDY_ROOT").map_or(here, Into::into);
    let files = tree::read(&root);
    assert!(files.iter().any(|file| file.path == "src/lib.rs"), "no source found under {}", root.display());
    let violations = [checks::all(&files), checks::stale(&files)].concat();
    assert!(violations.is_empty(), "{} violations of the house rules:\n{}", violations.len(), violations.join("\n"));
}
