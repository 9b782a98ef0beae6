//! What a client gives with a load in place of the repository's files. Comes from outside: nothing in it may name a place
//! outside the model's directory.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;

/// What the name of a parameter with a file begins with; the path in the model's directory follows.
const FILE: &str = "file:";

/// The name of the parameter with the configuration.
const CONFIG: &str = "config";

/// The longest path in bytes, and the longest of its parts, which most file systems have.
const LONGEST_PATH: usize = 1024;
const LONGEST_NAME: usize = 255;

/// The most files of one load.
const MOST_FILES: usize = 10_000;

/// What a parameter of a load is, told by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The configuration: text.
    Config,
    /// A file: bytes.
    File,
}

impl Kind {
    /// The kind of the parameter of this name; `None` for one that there is not.
    pub fn of(parameter: &str) -> Option<Self> {
        match parameter {
            CONFIG => Some(Self::Config),
            _ => parameter.starts_with(FILE).then_some(Self::File),
        }
    }
}

/// A configuration, and perhaps files, in place of the repository's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Override {
    /// JSON of `ModelConfig`.
    pub config: String,
    /// The whole of the model's directory, by paths in it; empty for the repository's own files.
    pub files: BTreeMap<PathBuf, Bytes>,
}

impl Override {
    /// The parameters of a load, by name; `None` if there are none.
    ///
    /// # Errors
    /// One that there is not, a configuration that is no text, files without a configuration, or a path that leads out of
    /// the model's directory or is no file's: a sentence with the name and what is allowed.
    pub fn new(parameters: impl IntoIterator<Item = (String, Bytes)>) -> Result<Option<Self>, String> {
        let (mut config, mut files) = (None, BTreeMap::new());
        for (name, value) in parameters {
            if name == CONFIG {
                let text = String::from_utf8(value.to_vec()).map_err(|_| "the configuration is no UTF-8".to_owned())?;
                config = Some(text);
            } else if let Some(path) = name.strip_prefix(FILE) {
                files.insert(path_inside(path)?, value);
            } else {
                return Err(format!("unrecognized load parameter '{}'.", name.escape_debug()));
            }
            if files.len() > MOST_FILES {
                return Err(format!("more than {MOST_FILES} files are given"));
            }
        }
        match config {
            Some(config) => Ok(Some(Self { config, files })),
            None if files.is_empty() => Ok(None),
            None => Err(
                "override files are given without the parameter 'config': the files of the repository are not used \
                         then, its configuration neither"
                    .to_owned(),
            ),
        }
    }
}

/// A path of a file in a model's directory.
fn path_inside(text: &str) -> Result<PathBuf, String> {
    let shown: String = text.chars().take(100).collect();
    let refuse = |why: &str| {
        let shown = shown.escape_debug();
        Err(format!("the override file '{shown}' must be a path in the model's directory such as 1/model.onnx: {why}"))
    };
    if text.is_empty() || text.ends_with('/') {
        return refuse("it names no file");
    }
    if text.len() > LONGEST_PATH {
        return refuse(&format!("it has {} bytes, at most {LONGEST_PATH} are allowed", text.len()));
    }
    if text.chars().any(char::is_control) {
        return refuse("it has control characters");
    }
    let mut path = PathBuf::new();
    // A slash before the path means the model's directory, as in Triton.
    for part in Path::new(text.trim_start_matches('/')).components() {
        match part {
            Component::Normal(name) if name.len() > LONGEST_NAME => {
                return refuse(&format!("a part of it has {} bytes, at most {LONGEST_NAME} are allowed", name.len()));
            }
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::ParentDir => return refuse("it leads out of there with '..'"),
            Component::RootDir | Component::Prefix(_) => return refuse("it is absolute"),
        }
    }
    if path.as_os_str().is_empty() { refuse("it names no file") } else { Ok(path) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parameters(all: &[(&str, &'static str)]) -> Result<Option<Override>, String> {
        Override::new(all.iter().map(|(name, value)| ((*name).to_owned(), Bytes::from_static(value.as_bytes()))))
    }

    #[test]
    fn files_need_a_configuration() {
        assert_eq!(parameters(&[]), Ok(None));
        let config = parameters(&[("config", "{}")]).unwrap().unwrap();
        assert_eq!((config.config.as_str(), config.files.len()), ("{}", 0));
        let both =
            parameters(&[("file:1/./model.onnx", "x"), ("config", "{}"), ("file:labels.txt", "y")]).unwrap().unwrap();
        let paths: Vec<_> = both.files.keys().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(paths, ["1/model.onnx", "labels.txt"]);
        for (wrong, part) in [
            (&[("file:1/model.onnx", "x")][..], "without the parameter 'config'"),
            (&[("other", "x")], "unrecognized load parameter 'other'."),
            (&[("File:1/x", "x"), ("config", "{}")], "unrecognized load parameter"),
        ] {
            let error = parameters(wrong).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        assert!(Override::new([("config".to_owned(), Bytes::from_static(b"\xff"))]).is_err());
    }

    #[test]
    fn paths_stay_in_the_directory() {
        let long = "n".repeat(256);
        let deep = "n/".repeat(600) + "x";
        for path in
            ["", "/", "..", "../x", "1/..", "1/../../x", "a/../b", "1/", "./", ".", "x\0y", "a\nb", &long, &deep]
        {
            let error = parameters(&[("config", "{}"), (&format!("file:{path}"), "x")]).unwrap_err();
            assert!(error.contains("must be a path in the model's directory"), "{path:?}: {error}");
            assert!(error.len() < 400, "{}", error.len());
        }
        for path in ["x", "1/model.onnx", "/1/model.onnx", "///etc/passwd", "..x", "1/...", "a b/ü", "-", "1\\..\\x"] {
            assert!(parameters(&[("config", "{}"), (&format!("file:{path}"), "x")]).is_ok(), "{path:?}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_given_stays_inside(path in "[./\\\\a\\PC]{0,40}") {
            let given = [("config".to_owned(), Bytes::new()), (format!("file:{path}"), Bytes::new())];
            if let Ok(Some(Override { files, .. })) = Override::new(given) {
                for file in files.keys() {
                    prop_assert!(file.components().count() > 0);
                    prop_assert!(file.components().all(|part| matches!(part, Component::Normal(_))));
                }
            }
        }
    }
}
