//! Runs the fuzz checks on the corpora and on past findings.

use std::fs;
use std::path::Path;

#[path = "../../tests/fuzz/checks.rs"]
#[allow(dead_code, clippy::expect_used)]
mod checks;

#[test]
fn every_file_of_every_corpus_passes_its_check() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz");
    let targets = [
        "http",
        "grpc",
        "wire",
        "ring",
        "config",
        "statsd",
        "legacy",
        "metrics",
        "repository",
        "regions",
        "trace",
        "archive",
        "torchserve",
        "cached",
    ];
    for target in targets {
        let check = checks::of(target).expect("a check for each target");
        let mut files = 0;
        for folder in ["corpus", "findings"] {
            // A target without findings has no directory for them.
            for entry in fs::read_dir(fuzz.join(folder).join(target)).into_iter().flatten() {
                let path = entry.expect("a folder that can be listed").path();
                println!("{}", path.display());
                check(&fs::read(&path).expect("a file that can be read"));
                files += 1;
            }
        }
        assert!(files > 0, "the corpus of {target} is empty");
    }
}
