//! Models inside the executable, for `--example`: a first request needs no files beside the server.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use pharos_os::directories::{Kind, Temporary};

/// A model, with its files by their paths in the model's directory.
struct Example {
    name: &'static str,
    files: &'static [(&'static str, &'static [u8])],
}

/// The names of the examples, for the command line.
pub(crate) const NAMES: [&str; 2] = [DIGITS.name, SIMPLE.name];

/// Classifies handwritten digits of 8 x 8 pixels; an ONNX model.
const DIGITS: Example = Example {
    name: "digits",
    files: &[
        ("config.pbtxt", include_bytes!("../../examples/models/digits/config.pbtxt")),
        ("labels.txt", include_bytes!("../../examples/models/digits/labels.txt")),
        ("1/model.onnx", include_bytes!("../../examples/models/digits/1/model.onnx")),
    ],
};

/// Adds and subtracts two tensors, as in Triton's examples; needs no engine.
const SIMPLE: Example = Example {
    name: "simple",
    files: &[("config.pbtxt", include_bytes!("../../examples/models/simple/config.pbtxt"))],
};

/// A model repository of examples, in a private directory that is removed when this is dropped.
pub(crate) struct Examples(Temporary);

impl Examples {
    /// Writes the examples with these names. Returns nothing without names.
    ///
    /// # Errors
    /// A file cannot be written; the text names it.
    pub(crate) fn write(names: &[String]) -> io::Result<Option<Self>> {
        if names.is_empty() {
            return Ok(None);
        }
        let examples = Self(Temporary::new(Kind::EXAMPLE)?);
        for example in [DIGITS, SIMPLE] {
            if names.iter().any(|name| name == example.name) {
                examples.write_model(&example)?;
            }
        }
        Ok(Some(examples))
    }

    fn write_model(&self, example: &Example) -> io::Result<()> {
        let model = self.repository().join(example.name);
        // A model without files of a version still has a directory for it.
        let version = model.join("1");
        fs::create_dir_all(&version).map_err(|error| named(&version, &error))?;
        for (path, content) in example.files {
            let path = model.join(path);
            fs::write(&path, content).map_err(|error| named(&path, &error))?;
        }
        Ok(())
    }

    /// Returns the directory of the models.
    pub(crate) fn repository(&self) -> PathBuf {
        self.0.path().join("models")
    }
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot create '{}': {error}", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_example_has_the_files_of_the_repository() {
        let examples =
            Examples::write(&["digits".to_owned(), "simple".to_owned()]).unwrap().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models");
        for name in NAMES {
            let mut expected = files_in(&source.join(name));
            // Keeps the empty directory of the version in git.
            expected.retain(|(path, _)| !path.ends_with(".gitkeep"));
            assert_eq!(files_in(&examples.repository().join(name)), expected, "{name}");
        }
        let directory = examples.0.path().to_owned();
        drop(examples);
        assert!(!directory.exists());
    }

    #[test]
    fn only_the_named_examples_are_written() {
        assert!(Examples::write(&[]).unwrap().is_none());
        let examples = Examples::write(&["simple".to_owned()]).unwrap().unwrap();
        let names: Vec<_> =
            fs::read_dir(examples.repository()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["simple"]);
    }

    /// Returns the files below a directory, sorted by their paths in it, with their contents.
    fn files_in(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
        let mut found = Vec::new();
        let mut open = vec![directory.to_owned()];
        while let Some(next) = open.pop() {
            for entry in fs::read_dir(next).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    open.push(path);
                } else {
                    let name = path.strip_prefix(directory).unwrap().to_owned();
                    found.push((name, fs::read(&path).unwrap()));
                }
            }
        }
        found.sort();
        found
    }
}
