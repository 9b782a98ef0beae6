//! Runs the fuzz checks on the corpora and on past findings.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

#[path = "../../tests/fuzz/checks.rs"]
#[allow(dead_code, clippy::expect_used)]
mod checks;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz")
}

#[test]
fn every_file_of_every_corpus_passes_its_check() {
    for (target, check) in checks::CHECKS {
        let mut files = 0;
        for folder in ["corpus", "findings"] {
            // A target without findings has no directory for them.
            for entry in fs::read_dir(fuzz().join(folder).join(target)).into_iter().flatten() {
                let path = entry.expect("a folder that can be listed").path();
                println!("{}", path.display());
                check(&fs::read(&path).expect("a file that can be read"));
                files += 1;
            }
        }
        assert!(files > 0, "the corpus of {target} is empty");
    }
}

/// `make fuzz` runs the programs in `fuzz_targets`.
#[test]
fn every_target_has_a_check_a_program_and_a_place_in_the_package() {
    let checks: BTreeSet<String> =
        checks::CHECKS.iter().map(|(target, _)| (*target).to_owned()).collect();
    let programs = fs::read_dir(fuzz().join("fuzz_targets")).expect("the programs");
    let programs = programs.map(|entry| entry.expect("a program").path());
    let programs: BTreeSet<String> = programs
        .filter_map(|path| Some(path.file_stem()?.to_string_lossy().into_owned()))
        .collect();
    assert_eq!(programs, checks);
    let package = fs::read_to_string(fuzz().join("Cargo.toml")).expect("the package");
    let named = package.split("[[bin]]").skip(1).filter_map(|table| table.split('"').nth(1));
    assert_eq!(named.map(str::to_owned).collect::<BTreeSet<_>>(), checks);
    let script = fs::read_to_string(fuzz().join("run")).expect("the script of `make fuzz`");
    assert!(
        script.contains("tests/fuzz/fuzz_targets/*.rs") && script.contains(r#"for target in "$@""#)
    );
}

#[test]
fn files_above_the_target_of_an_archive_are_found() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let inner = folder.path().join("above/inner");
    fs::create_dir_all(&inner).expect("directories");
    let known = inner.join("known");
    let strangers = [inner.join("a"), folder.path().join("above/b"), folder.path().join("c")];
    fs::write(&known, "").expect("a file");
    assert!(checks::outside(folder.path(), &inner, &[&known]).is_empty());
    strangers.iter().for_each(|path| fs::write(path, "").expect("a file"));
    assert_eq!(checks::outside(folder.path(), &inner, &[&known]), strangers);
}
