//! The house rules as tests: what the compiler and clippy do not know about this tree.
//!
//! The rules are tables in `tidy/rules.rs`; every violation is printed at once, as file:line, the rule, and what to do.
//! The checks are textual and simple on purpose: they read source as a reader does, not as a compiler does.

#[path = "tidy/checks.rs"]
mod checks;
#[path = "tidy/cycles.rs"]
mod cycles;
#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/known.rs"]
mod known;
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
#[path = "tidy/made_up.rs"]
mod made_up;

use std::path::Path;

/// The tree that holds this package; `PHAROS_TIDY_ROOT` names another one.
#[test]
fn the_tree_keeps_the_house_rules() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let root = std::env::var_os("PHAROS_TIDY_ROOT").map_or(here, Into::into);
    let files = tree::read(&root);
    assert!(files.iter().any(|file| file.path == "src/lib.rs"), "no source found under {}", root.display());
    let violations = [checks::all(&files), checks::stale(&files)].concat();
    assert!(violations.is_empty(), "{} violations of the house rules:\n{}", violations.len(), violations.join("\n"));
}
