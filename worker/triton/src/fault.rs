//! An error that a function of the interface returns, before it becomes an object.

use std::borrow::Cow;
use std::ffi::c_int;

use pharos::error::{ErrorCode, InferError};

/// The code of an error in the interface. The numbers of [`ErrorCode`] are the same up to
/// CANCELLED, the last one.
pub(crate) type Code = c_int;

pub(crate) const INTERNAL: Code = 1;
pub(crate) const NOT_FOUND: Code = 2;
pub(crate) const INVALID_ARG: Code = 3;
pub(crate) const UNAVAILABLE: Code = 4;
pub(crate) const UNSUPPORTED: Code = 5;
pub(crate) const ALREADY_EXISTS: Code = 6;
pub(crate) const CANCELLED: Code = 7;

/// An error that a function of the interface returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) code: Code,
    pub(crate) text: Cow<'static, str>,
}

impl Fault {
    fn new(code: Code, text: impl Into<Cow<'static, str>>) -> Self {
        Self { code, text: text.into() }
    }

    pub(crate) fn invalid(text: impl Into<Cow<'static, str>>) -> Self {
        Self::new(INVALID_ARG, text)
    }

    pub(crate) fn internal(text: impl Into<Cow<'static, str>>) -> Self {
        Self::new(INTERNAL, text)
    }

    pub(crate) fn not_found(text: impl Into<Cow<'static, str>>) -> Self {
        Self::new(NOT_FOUND, text)
    }

    pub(crate) fn unsupported(text: impl Into<Cow<'static, str>>) -> Self {
        Self::new(UNSUPPORTED, text)
    }

    pub(crate) fn unavailable(text: impl Into<Cow<'static, str>>) -> Self {
        Self::new(UNAVAILABLE, text)
    }

    pub(crate) fn exists(text: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ALREADY_EXISTS, text)
    }
}

impl From<InferError> for Fault {
    fn from(error: InferError) -> Self {
        let code = match error.code {
            ErrorCode::DeadlineExceeded | ErrorCode::ResourceExhausted => UNAVAILABLE,
            code => Code::from(code.to_wire()),
        };
        Self::new(code, error.message)
    }
}
