//! The paths that the user of this process may access.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::ExitCode;

use pharos::wire::access::AccessCheck;
use rustix::fs::{Access, access};

/// Prints the first path that this process may not access, as the end of a sentence: "read 'PATH':
/// REASON".
pub(crate) fn check(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let check = match AccessCheck::parse(arguments) {
        Ok(check) => check,
        Err(error) => {
            eprintln!("pharos-worker: {error}");
            return ExitCode::FAILURE;
        }
    };
    if let Some(refused) = refused(&check) {
        println!("{refused}");
    }
    ExitCode::SUCCESS
}

fn refused(check: &AccessCheck) -> Option<String> {
    let has_mode = |path: &Path, mode: Access| access(path, mode).map_err(io::Error::from);
    let read = check.read.iter().map(|path| (path, "read", can_read(path)));
    let pass =
        check.pass.iter().map(|path| (path, "pass through", has_mode(path, Access::EXEC_OK)));
    let may_create = Access::WRITE_OK | Access::EXEC_OK;
    let write =
        check.write.iter().map(|path| (path, "create files in", has_mode(path, may_create)));
    read.chain(pass).chain(write).find_map(|(path, what, result)| {
        let error = result.err()?;
        Some(format!("{what} '{}': {error}", path.display()))
    })
}

fn can_read(path: &Path) -> io::Result<()> {
    let read = match fs::metadata(path) {
        Ok(found) if found.is_dir() => {
            // The names in the directory can be read, and the files with these names reached.
            fs::read_dir(path).and_then(|_| Ok(access(path, Access::EXEC_OK)?))
        }
        Ok(_) => File::open(path).map(drop),
        Err(error) => Err(error),
    };
    read.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn says_what_cannot_be_accessed() {
        let read = vec!["/".into(), "/proc/self/exe".into(), "/nonexistent".into()];
        let mut check =
            AccessCheck { read, pass: vec!["/".into()], write: vec![std::env::temp_dir()] };
        assert_eq!(refused(&check), None);
        // Neither root nor others can create files there, and nothing is below a file.
        check.pass.push("/proc/version/x".into());
        assert_eq!(
            refused(&check).unwrap(),
            "pass through '/proc/version/x': Not a directory (os error 20)"
        );
        check.read.push("/proc/version/x".into());
        assert_eq!(
            refused(&check).unwrap(),
            "read '/proc/version/x': Not a directory (os error 20)"
        );
    }
}
