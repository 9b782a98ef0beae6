//! The configuration and files that a load request brings to replace the repository's. They are
//! untrusted: no path may lead out of the directory.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;

/// The prefix of the name of a parameter with a file; the path in the model's directory follows.
const FILE: &str = "file:";

/// The name of the parameter with the configuration.
const CONFIG: &str = "config";

/// The maximum length in bytes of a path and of each of its parts; most file systems have these
/// limits.
const LONGEST_PATH: usize = 1024;
const LONGEST_NAME: usize = 255;

/// The maximum number of files in one load.
const MAX_FILES: usize = 10_000;

/// The kind of a load parameter, derived from its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The configuration: text.
    Config,
    /// A file: bytes.
    File,
}

impl Kind {
    /// Returns the kind of the parameter of this name; `None` for an unknown name.
    pub fn of(parameter: &str) -> Option<Self> {
        match parameter {
            CONFIG => Some(Self::Config),
            _ => parameter.starts_with(FILE).then_some(Self::File),
        }
    }
}

/// What a client's load may bring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadScope {
    /// Files and configurations that run code.
    Code,
    /// Settings of a model of the repositories.
    Settings,
}

/// A configuration and optional files that replace the repository's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Override {
    /// JSON of `ModelConfig`.
    pub config: String,
    /// All files of the model's directory by relative path; empty to use the repository's files.
    pub files: BTreeMap<PathBuf, Bytes>,
}

impl Override {
    /// Parses the parameters of a load; `None` if there are no parameters.
    ///
    /// # Errors
    /// A parameter is unknown, the configuration is not UTF-8, files come without a configuration,
    /// or a path leads out of the model's directory or does not name a file. The text has the name
    /// and what is allowed.
    pub fn new(
        parameters: impl IntoIterator<Item = (String, Bytes)>,
    ) -> Result<Option<Self>, String> {
        let mut config = None;
        let mut files = BTreeMap::new();
        for (name, value) in parameters {
            if name == CONFIG {
                let text = String::from_utf8(value.to_vec())
                    .map_err(|_| "the configuration is not UTF-8".to_owned())?;
                config = Some(text);
            } else if let Some(path) = name.strip_prefix(FILE) {
                files.insert(path_inside(path)?, value);
            } else {
                return Err(format!("unrecognized load parameter '{}'.", name.escape_debug()));
            }
            if files.len() > MAX_FILES {
                return Err(format!("too many override files: at most {MAX_FILES} are allowed"));
            }
        }
        match config {
            Some(config) => Ok(Some(Self { config, files })),
            None if files.is_empty() => Ok(None),
            None => Err("override files require the parameter 'config': they replace all files \
                         of the repository, its configuration included"
                .to_owned()),
        }
    }
}

/// Parses the path of a file in a model's directory.
fn path_inside(text: &str) -> Result<PathBuf, String> {
    let shown: String = text.chars().take(100).collect();
    let refuse = |why: &str| {
        let shown = shown.escape_debug();
        Err(format!(
            "the override file '{shown}' must be a path in the model's directory such as \
             1/model.onnx: {why}"
        ))
    };
    if text.is_empty() || text.ends_with('/') {
        return refuse("it does not name a file");
    }
    if text.len() > LONGEST_PATH {
        return refuse(&format!("it has {} bytes; at most {LONGEST_PATH} are allowed", text.len()));
    }
    if text.chars().any(char::is_control) {
        return refuse("it contains control characters");
    }
    let mut path = PathBuf::new();
    // As in Triton, a leading slash means the model's directory.
    for part in Path::new(text.trim_start_matches('/')).components() {
        match part {
            Component::Normal(name) if name.len() > LONGEST_NAME => {
                return refuse(&format!(
                    "a component has {} bytes; at most {LONGEST_NAME} are allowed",
                    name.len()
                ));
            }
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::ParentDir => return refuse("it leads out of the directory with '..'"),
            Component::RootDir | Component::Prefix(_) => return refuse("it is absolute"),
        }
    }
    if path.as_os_str().is_empty() { refuse("it does not name a file") } else { Ok(path) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parameters(all: &[(&str, &'static str)]) -> Result<Option<Override>, String> {
        Override::new(
            all.iter()
                .map(|(name, value)| ((*name).to_owned(), Bytes::from_static(value.as_bytes()))),
        )
    }

    #[test]
    fn refuses_files_without_a_configuration() {
        assert_eq!(parameters(&[]), Ok(None));
        let config = parameters(&[("config", "{}")]).unwrap().unwrap();
        assert_eq!((config.config.as_str(), config.files.len()), ("{}", 0));
        let both =
            parameters(&[("file:1/./model.onnx", "x"), ("config", "{}"), ("file:labels.txt", "y")])
                .unwrap()
                .unwrap();
        let paths: Vec<_> = both.files.keys().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(paths, ["1/model.onnx", "labels.txt"]);
        for (wrong, part) in [
            (&[("file:1/model.onnx", "x")][..], "require the parameter 'config'"),
            (&[("other", "x")], "unrecognized load parameter 'other'."),
            (&[("File:1/x", "x"), ("config", "{}")], "unrecognized load parameter"),
        ] {
            let error = parameters(wrong).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        assert!(Override::new([("config".to_owned(), Bytes::from_static(b"\xff"))]).is_err());
    }

    #[test]
    fn refuses_paths_outside_the_directory() {
        let long = "n".repeat(256);
        let deep = "n/".repeat(600) + "x";
        for path in [
            "",
            "/",
            "..",
            "../x",
            "1/..",
            "1/../../x",
            "a/../b",
            "1/",
            "./",
            ".",
            "x\0y",
            "a\nb",
            &long,
            &deep,
        ] {
            let error =
                parameters(&[("config", "{}"), (&format!("file:{path}"), "x")]).unwrap_err();
            assert!(error.contains("must be a path in the model's directory"), "{path:?}: {error}");
            assert!(error.len() < 400, "{}", error.len());
        }
        for path in [
            "x",
            "1/model.onnx",
            "/1/model.onnx",
            "///etc/passwd",
            "..x",
            "1/...",
            "a b/ü",
            "-",
            "1\\..\\x",
        ] {
            assert!(
                parameters(&[("config", "{}"), (&format!("file:{path}"), "x")]).is_ok(),
                "{path:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn accepted_paths_stay_inside_the_directory(path in "[./\\\\a\\PC]{0,40}") {
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
