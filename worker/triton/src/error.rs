//! `TRITONSERVER_Error`: the result of a function of the interface. Null is success.

use std::ffi::{CString, c_char};
use std::ptr;

use pharos::error::{ErrorCode, InferError, Reason};

use crate::fault::{
    ALREADY_EXISTS, CANCELLED, Code, Fault, INTERNAL, INVALID_ARG, NOT_FOUND, UNAVAILABLE,
    UNSUPPORTED,
};
use crate::foreign::{c_text, text_or};
use crate::fuzzed::Source;
use crate::object::{self, Object, kinds};

/// `TRITONSERVER_Error`.
pub(crate) struct ServerError {
    code: Code,
    text: CString,
}

kinds! { ServerError = 1, "an error"; }

/// A pointer to an error, or null.
pub(crate) type ErrorPointer = *mut Object<ServerError>;

/// A function of the interface for fuzz targets: its name, and a call with arguments of a source.
pub(crate) type Fuzzed = (&'static str, fn(&mut Source<'_>) -> ErrorPointer);

impl From<Fault> for ErrorPointer {
    fn from(fault: Fault) -> Self {
        object::make(ServerError { code: fault.code, text: c_text(&fault.text) })
    }
}

/// Makes a call and returns its result in the form of the interface.
pub(crate) fn outcome(call: impl FnOnce() -> Result<(), Fault>) -> ErrorPointer {
    match call() {
        Ok(()) => ptr::null_mut(),
        Err(fault) => fault.into(),
    }
}

/// Returns what an error says, for a client; the error stays.
///
/// # Safety
/// The contract of this package.
pub(crate) unsafe fn read(error: *const Object<ServerError>) -> InferError {
    // SAFETY: the caller guarantees it.
    match unsafe { object::get(error) } {
        Ok(error) => {
            let code = u8::try_from(error.code).ok().and_then(ErrorCode::from_wire);
            let code = code.unwrap_or(ErrorCode::Unknown);
            let reason = match code {
                ErrorCode::Cancelled => Reason::Cancelled,
                _ => Reason::Backend,
            };
            InferError::new(code, reason, error.text.to_string_lossy())
        }
        Err(fault) => InferError::new(ErrorCode::Internal, Reason::Backend, fault.text),
    }
}

/// Returns what an error says, and deletes it.
///
/// # Safety
/// The contract of this package.
pub(crate) unsafe fn consume(error: ErrorPointer) -> InferError {
    // SAFETY: the caller guarantees it.
    let said = unsafe { read(error) };
    // SAFETY: as above.
    drop(unsafe { object::take(error) });
    said
}

/// Defines functions of the interface that return an error, and lists them for the fuzz target. They
/// all have the same contract. A panic in one of them ends the process.
macro_rules! interface {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        /// The functions of this module.
        pub(crate) const FUZZED: &[$crate::error::Fuzzed] = &[$(
            (concat!(module_path!(), "::", stringify!($name)), |source| {
                // SAFETY: arguments keep the contract of this package.
                unsafe { $name($(<$type as $crate::fuzzed::Argument>::take(source)),*) }
            })
        ),*];
        $(
        $(#[$attribute])*
        ///
        /// # Safety
        /// The contract of this package.
        pub(crate) unsafe extern "C" fn $name($($argument: $type),*) -> $crate::error::ErrorPointer {
            // SAFETY: the contract of this package.
            $crate::error::outcome(move || unsafe { $body })
        }
        )*
    };
}
pub(crate) use interface;

/// `TRITONSERVER_ErrorNew`.
///
/// # Safety
/// The contract of this package.
pub(crate) unsafe extern "C" fn new(code: Code, text: *const c_char) -> ErrorPointer {
    // SAFETY: the caller guarantees it.
    let text = unsafe { text_or(text, "") };
    let known = (0..=CANCELLED).contains(&code);
    object::make(ServerError { code: if known { code } else { 0 }, text: c_text(&text) })
}

/// `TRITONSERVER_ErrorDelete`.
///
/// # Safety
/// The contract of this package.
pub(crate) unsafe extern "C" fn delete(error: ErrorPointer) {
    // SAFETY: the caller guarantees it. A pointer that is not valid is ignored: the function cannot
    // report it.
    drop(unsafe { object::take(error) });
}

/// `TRITONSERVER_ErrorCode`.
///
/// # Safety
/// The contract of this package.
pub(crate) unsafe extern "C" fn code(error: ErrorPointer) -> Code {
    // SAFETY: the caller guarantees it.
    unsafe { object::get(error) }.map_or(0, |error| error.code)
}

/// `TRITONSERVER_ErrorCodeString`.
///
/// # Safety
/// The contract of this package.
pub(crate) unsafe extern "C" fn code_string(error: ErrorPointer) -> *const c_char {
    // SAFETY: the caller guarantees it.
    let name = match unsafe { code(error) } {
        INTERNAL => c"Internal",
        NOT_FOUND => c"Not found",
        INVALID_ARG => c"Invalid argument",
        UNAVAILABLE => c"Unavailable",
        UNSUPPORTED => c"Unsupported",
        ALREADY_EXISTS => c"Already exists",
        CANCELLED => c"Cancelled",
        _ => c"Unknown",
    };
    name.as_ptr()
}

/// `TRITONSERVER_ErrorMessage`.
///
/// # Safety
/// The contract of this package.
pub(crate) unsafe extern "C" fn message(error: ErrorPointer) -> *const c_char {
    // SAFETY: the caller guarantees it.
    unsafe { object::get(error) }.map_or(c"".as_ptr(), |error| error.text.as_ptr())
}
