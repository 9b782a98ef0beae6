//! The command line with which a frontend starts a program in a sandbox: `pharos-worker --sandbox
//! [OPTION...] -- PROGRAM [ARGUMENT...]`. The worker's executable restricts itself and becomes the
//! program, so that the restrictions apply before any code of a model or of its Python environment
//! runs.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// The first argument of a command line that starts a program in a sandbox.
pub const SANDBOX: &str = "--sandbox";

/// The first argument of a command line that restricts the process, and prints each protection that
/// the kernel does not have on a line of standard output.
pub const CHECK: &str = "--check-sandbox";

/// The start of a line of [`CHECK`] about files or system calls, which a sandbox must restrict.
pub const ESSENTIAL: &str = "not available: ";

const REQUIRED: &str = "--required";
const NETWORK: &str = "--network";
const CUDA: &str = "--cuda";
const READ: &str = "--read";
const BENEATH: &str = "--beneath";
const WRITE: &str = "--write";
const SET: &str = "--set";
const UNSET: &str = "--unset";
const END: &str = "--";

/// What a program in a sandbox may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permissions {
    /// Whether the program must not start where the kernel cannot restrict files and system calls.
    pub required: bool,
    /// Whether it may create sockets.
    pub network: bool,
    /// Whether it may use CUDA, which creates a Unix socket of the type `SOCK_SEQPACKET` and fails
    /// if it cannot.
    pub cuda: bool,
    /// Files and directories that it may read and execute, with all that is in them. Missing ones
    /// are ignored.
    pub read: Vec<PathBuf>,
    /// Directories, each with a path beneath it that the program may read and execute with all
    /// that is in it. For directories whose content is a model's: neither the directory nor a part
    /// of its path is a link, and a link on the way from it may not lead out of it. Paths that do
    /// are ignored, as are missing ones.
    pub beneath: Vec<(PathBuf, PathBuf)>,
    /// Files and directories that it may also write, with all that is in them. Missing ones are
    /// ignored.
    pub write: Vec<PathBuf>,
    /// Environment variables that the program gets or, without a value, does not get. The process
    /// that restricts itself must not have them: a search path of libraries would lead it into the
    /// files of the model.
    pub variables: Vec<(OsString, Option<OsString>)>,
}

impl Permissions {
    /// Returns the arguments of the worker's executable; the arguments of the program follow.
    pub fn arguments(&self, program: &OsStr) -> Vec<OsString> {
        let mut all = vec![SANDBOX.into()];
        for (option, is_set) in
            [(REQUIRED, self.required), (NETWORK, self.network), (CUDA, self.cuda)]
        {
            all.extend(is_set.then(|| option.into()));
        }
        for (option, paths) in [(READ, &self.read), (WRITE, &self.write)] {
            all.extend(
                paths.iter().flat_map(|path| [option.into(), path.clone().into_os_string()]),
            );
        }
        for (root, path) in &self.beneath {
            all.extend([
                BENEATH.into(),
                root.clone().into_os_string(),
                path.clone().into_os_string(),
            ]);
        }
        for (name, value) in &self.variables {
            match value {
                Some(value) => all.extend([SET.into(), name.clone(), value.clone()]),
                None => all.extend([UNSET.into(), name.clone()]),
            }
        }
        all.extend([END.into(), program.to_owned()]);
        all
    }

    /// Parses the arguments after [`SANDBOX`]. Returns also the program and its arguments.
    ///
    /// # Errors
    /// An argument is unknown, or a value or the program is missing.
    pub fn parse(
        arguments: impl IntoIterator<Item = OsString>,
    ) -> Result<(Self, OsString, Vec<OsString>), String> {
        let mut permissions = Self::default();
        let mut arguments = arguments.into_iter();
        loop {
            let option = arguments.next().ok_or_else(|| format!("'{END}' is missing"))?;
            let mut value =
                || arguments.next().ok_or_else(|| format!("'{}' has no value", option.display()));
            match option.to_str() {
                Some(END) => break,
                Some(REQUIRED) => permissions.required = true,
                Some(NETWORK) => permissions.network = true,
                Some(CUDA) => permissions.cuda = true,
                Some(READ) => permissions.read.push(value()?.into()),
                Some(BENEATH) => permissions.beneath.push((value()?.into(), value()?.into())),
                Some(WRITE) => permissions.write.push(value()?.into()),
                Some(SET) => permissions.variables.push((value()?, Some(value()?))),
                Some(UNSET) => permissions.variables.push((value()?, None)),
                _ => return Err(format!("unknown argument '{}'", option.display())),
            }
        }
        let program = arguments.next().ok_or("the program is missing")?;
        Ok((permissions, program, arguments.collect()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_parsed_again() {
        let permissions = Permissions {
            required: true,
            network: true,
            cuda: true,
            read: vec!["/usr".into(), "--".into()],
            beneath: vec![("/env".into(), "lib".into())],
            write: vec!["--write".into()],
            variables: vec![("A".into(), Some("=1".into())), ("B".into(), None)],
        };
        for permissions in [permissions, Permissions::default()] {
            let mut arguments = permissions.arguments(OsStr::new("python3")).into_iter();
            assert_eq!(arguments.next().unwrap(), SANDBOX);
            let arguments = arguments.chain(["-m".into(), "--".into()]);
            let expected = (permissions, "python3".into(), vec!["-m".into(), "--".into()]);
            assert_eq!(Permissions::parse(arguments).unwrap(), expected);
        }
    }

    #[test]
    fn invalid_arguments_are_refused() {
        for (arguments, expected) in [
            (&[][..], "'--' is missing"),
            (&["--"], "the program is missing"),
            (&["--read"], "'--read' has no value"),
            (&["--beneath", "/env"], "'--beneath' has no value"),
            (&["--set", "A"], "'--set' has no value"),
            (&["--all", "--", "sh"], "unknown argument '--all'"),
        ] {
            assert_eq!(
                Permissions::parse(arguments.iter().map(OsString::from)).unwrap_err(),
                expected
            );
        }
    }
}
