//! The command line with which a frontend asks the worker's executable what its user may access:
//! `pharos-worker --check-access [OPTION PATH]...`. It prints the first path that it may not
//! access, as the end of a sentence.

use std::ffi::OsString;
use std::path::PathBuf;

/// The first argument of the command line.
pub const CHECK_ACCESS: &str = "--check-access";

const READ: &str = "--read";
const PASS: &str = "--pass";
const WRITE: &str = "--write";

/// The paths to check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessCheck {
    /// Files, and directories with the names in them, to read. Missing ones are ignored.
    pub read: Vec<PathBuf>,
    /// Directories that lead to files.
    pub pass: Vec<PathBuf>,
    /// Directories in which to create files.
    pub write: Vec<PathBuf>,
}

impl AccessCheck {
    /// Returns the arguments of the worker's executable.
    pub fn arguments(&self) -> Vec<OsString> {
        let mut all = vec![CHECK_ACCESS.into()];
        for (option, paths) in [(READ, &self.read), (PASS, &self.pass), (WRITE, &self.write)] {
            all.extend(
                paths.iter().flat_map(|path| [option.into(), path.clone().into_os_string()]),
            );
        }
        all
    }

    /// Parses the arguments after [`CHECK_ACCESS`].
    ///
    /// # Errors
    /// An argument is unknown or has no value.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, String> {
        let mut check = Self::default();
        let mut arguments = arguments.into_iter();
        while let Some(option) = arguments.next() {
            let paths = match option.to_str() {
                Some(READ) => &mut check.read,
                Some(PASS) => &mut check.pass,
                Some(WRITE) => &mut check.write,
                _ => return Err(format!("unknown argument '{}'", option.display())),
            };
            paths.push(
                arguments
                    .next()
                    .ok_or_else(|| format!("'{}' has no value", option.display()))?
                    .into(),
            );
        }
        Ok(check)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_parsed_again() {
        let check = AccessCheck {
            read: vec!["/models".into(), "--write".into()],
            pass: vec!["/cache".into()],
            write: vec!["/tmp".into()],
        };
        for check in [check, AccessCheck::default()] {
            let mut arguments = check.arguments().into_iter();
            assert_eq!(arguments.next().unwrap(), CHECK_ACCESS);
            assert_eq!(AccessCheck::parse(arguments).unwrap(), check);
        }
        for (arguments, expected) in
            [(["--read"], "'--read' has no value"), (["x"], "unknown argument 'x'")]
        {
            assert_eq!(AccessCheck::parse(arguments.map(OsString::from)).unwrap_err(), expected);
        }
    }
}
