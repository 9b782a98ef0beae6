//! What the loads of clients may bring. Files: only listeners whose clients may run code on this
//! machine accept them. Whether a configuration brings code is decided when the model's own
//! configuration is read, see `crate::loader::prepare`.

use pharos::error::InferError;
use pharos::repository::{LoadScope, Override};

use crate::loader;

/// What the loads of a listener's clients may bring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uploads {
    /// Files and configurations that run code.
    pub code: bool,
    /// Names of directories, and of archives outside of the model store, as registrations have
    /// them.
    pub registrations: bool,
}

impl Uploads {
    pub(super) fn scope(self) -> LoadScope {
        if self.code { LoadScope::Code } else { LoadScope::Settings }
    }

    pub(super) fn check_registration(self, model: &str, from: &str) -> Result<(), InferError> {
        if self.registrations {
            return Ok(());
        }
        let from = from.escape_debug();
        Err(loader::brings_code(
            model,
            &format!("'{from}' is outside of the model repositories and can contain code"),
        ))
    }
}

/// Checks that a load brings no files, which can run code on this machine.
///
/// # Errors
/// The load brings files.
pub(super) fn check(model: &str, sent: &Override) -> Result<(), InferError> {
    if sent.files.is_empty() {
        return Ok(());
    }
    Err(loader::brings_code(model, "the files of the request can contain code"))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use pharos::error::{ErrorCode, Reason};

    use super::*;

    #[test]
    fn files_need_a_permission() {
        let sent = |files: &[&str]| Override {
            config: "{}".to_owned(),
            files: files.iter().map(|path| (path.into(), Bytes::from_static(b"x"))).collect(),
        };
        assert_eq!(check("m", &sent(&[])), Ok(()));
        let Err(refusal) = check("m", &sent(&["1/model.onnx"])) else { panic!("not refused") };
        assert_eq!((refusal.code, refusal.reason), (ErrorCode::Unsupported, Reason::Restricted));
        let text = refusal.message;
        assert!(
            text.starts_with("failed to load 'm', the files of the request can contain code"),
            "{text}"
        );
    }
}
