//! Finds ONNX Runtime's library, so that `pip install onnxruntime` is sufficient.
//!
//! The order is: the flag, `ORT_DYLIB_PATH`, the `onnxruntime` package of the `python3` on the
//! PATH. Without any of them ONNX models run on tract, if it is installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use pharos_os::children::wait_within;

/// Prints the package's directory without importing it.
const FIND_PACKAGE: &str = "import importlib.util as u; s = u.find_spec('onnxruntime'); \
                            print(s.submodule_search_locations[0] if s else '')";

/// The time limit of running Python.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the path of the library if it is installed.
///
/// # Errors
/// The flag or variable names a file that does not exist.
pub fn find(flag: Option<&Path>) -> Result<Option<PathBuf>, String> {
    let named = match flag {
        Some(path) => Some(("--onnxruntime-library", path.to_owned())),
        None => {
            let variable = std::env::var_os("ORT_DYLIB_PATH").filter(|value| !value.is_empty());
            variable.map(|value| ("ORT_DYLIB_PATH", PathBuf::from(value)))
        }
    };
    match named {
        Some((_, path)) if path.is_file() => Ok(Some(path)),
        Some((source, path)) => Err(format!("invalid {source} '{}': not a file", path.display())),
        None => Ok(package_directory().and_then(|directory| in_package(&directory))),
    }
}

/// Returns `capi/libonnxruntime.so.VERSION` of the Python package.
fn in_package(directory: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory.join("capi")).ok()?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| is_library(path))
        .collect();
    found.sort();
    found.pop()
}

fn is_library(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with("libonnxruntime.so")
        || (name.starts_with("libonnxruntime.") && name.ends_with(".dylib"))
}

/// Returns the directory of the package for the `python3` on the PATH.
fn package_directory() -> Option<PathBuf> {
    let mut command = Command::new("python3");
    command
        .args(["-c", FIND_PACKAGE])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    wait_within(&mut child, TIMEOUT)?;
    let output = child.wait_with_output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    path.is_dir().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_a_flag_that_names_no_file() {
        let error = find(Some(Path::new("/nonexistent/libonnxruntime.so")))
            .expect_err("the file does not exist");
        assert!(
            error.contains("--onnxruntime-library") && error.contains("/nonexistent"),
            "{error}"
        );
    }

    #[test]
    fn recognizes_library_file_names() {
        assert!(is_library(Path::new("capi/libonnxruntime.so.1.31.1")));
        assert!(!is_library(Path::new("capi/libonnxruntime_providers_shared.so")));
    }
}
