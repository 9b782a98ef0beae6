//! The environment variables of an activated Python environment.

use std::env;
use std::ffi::OsString;
use std::path::Path;

/// Returns the variables that the `activate` script of an environment sets; `None` removes a
/// variable.
pub(super) fn variables(home: &Path) -> Vec<(&'static str, Option<OsString>)> {
    let before = |directory: &str, name: &str| {
        let mut all = home.join(directory).into_os_string();
        if let Some(rest) = env::var_os(name).filter(|rest| !rest.is_empty()) {
            all.push(":");
            all.push(rest);
        }
        Some(all)
    };
    let own = Some(home.as_os_str().to_owned());
    let conda = home.join("conda-meta").is_dir();
    vec![
        ("PATH", before("bin", "PATH")),
        ("LD_LIBRARY_PATH", before("lib", "LD_LIBRARY_PATH")),
        ("VIRTUAL_ENV", own.clone().filter(|_| !conda)),
        ("CONDA_PREFIX", own.filter(|_| conda)),
        ("PYTHONHOME", None),
    ]
}
