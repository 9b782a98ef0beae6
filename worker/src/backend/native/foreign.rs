//! Reading what a library passes in, and the text of what went wrong last.
//!
//! Contract for `unsafe`: a pointer of the library is null or valid for what the header says, while the call lasts.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::slice;

use pharos::error::{ErrorCode, InferError};
use pharos::infer::Parameter;

use super::abi;

/// The most dimensions of a shape, labels of a metric: a larger number is rubbish.
const MOST: usize = 64;
/// The most bytes of a parameter's text.
const LONGEST_TEXT: usize = 1 << 20;

thread_local! {
    /// What `last_error` gives: as errno, the last failure of this thread's calls.
    static LAST_ERROR: RefCell<(abi::Code, CString)> = RefCell::default();
}

/// The code of a call's outcome; its text is kept for `last_error`.
pub(super) fn outcome(result: Result<(), InferError>) -> abi::Code {
    let Err(error) = result else { return abi::OK };
    let code = abi::code_of(&error);
    let text = match error.message.as_str() {
        "" if error.code == ErrorCode::Cancelled => c_text("nobody waits for the request any more"),
        text => c_text(text),
    };
    LAST_ERROR.set((code, text));
    code
}

/// The text of the last failure; valid until the next one of this thread.
pub(super) fn last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|(_, text)| text.as_ptr())
}

/// The text of the last failure, if it had this code.
pub(super) fn last_error_of(code: abi::Code) -> Option<String> {
    LAST_ERROR.with_borrow(|(last, text)| (*last == code).then(|| text.to_string_lossy().into_owned()))
}

/// A call of the library begins: what failed before is of no interest.
pub(super) fn forget_error() {
    LAST_ERROR.take();
}

/// A text for the library; a NUL in it ends it there.
pub(super) fn c_text(text: &str) -> CString {
    let text = text.split('\0').next().unwrap_or_default();
    CString::new(text).unwrap_or_default()
}

/// An error of how a library uses the interface.
pub(super) fn misuse(text: impl Into<String>) -> InferError {
    InferError::invalid(text)
}

/// The value behind a pointer.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// The pointer is null, or not aligned.
pub(super) unsafe fn reference<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, InferError> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(misuse(format!("{what} is {pointer:?}, which is no valid pointer")));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { &*pointer })
}

/// A structure that begins with its size. One that grows in later versions is taken as short as it was in version 1.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// The pointer is null, or the structure is smaller than this version of the interface has ever had it.
pub(super) unsafe fn sized<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, InferError> {
    // SAFETY: the caller's promise; the size is the first field of all structures.
    let size = *unsafe { reference(pointer.cast::<usize>(), what) }?;
    if size < size_of::<T>() {
        return Err(misuse(format!("{what} says that it has {size} bytes; it has {}", size_of::<T>())));
    }
    // SAFETY: as above, and as large as it has to be.
    unsafe { reference(pointer, what) }
}

/// Puts a result where the library wants it.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// The pointer is null, or not aligned.
pub(super) unsafe fn put<T>(place: *mut T, value: T) -> Result<(), InferError> {
    if place.is_null() || !place.is_aligned() {
        return Err(misuse(format!("the result is wanted at {place:?}, which is no valid pointer")));
    }
    // SAFETY: the caller's promise.
    unsafe { place.write(value) };
    Ok(())
}

/// A text; `None` for null.
///
/// # Safety
/// This module's contract: it ends with a NUL.
pub(super) unsafe fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

/// A text that must be there.
///
/// # Safety
/// As [`text`].
///
/// # Errors
/// The pointer is null.
pub(super) unsafe fn needed_text(pointer: *const c_char, what: &str) -> Result<String, InferError> {
    // SAFETY: the caller's promise.
    unsafe { text(pointer) }.ok_or_else(|| misuse(format!("{what} is NULL")))
}

/// So many values.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// The pointer is null or not aligned, or there are more than [`MOST`].
pub(super) unsafe fn list<'a, T>(pointer: *const T, count: usize, what: &str) -> Result<&'a [T], InferError> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > MOST {
        return Err(misuse(format!("{what} has {count} values; at most {MOST} are allowed")));
    }
    // SAFETY: the caller's promise.
    unsafe { reference(pointer, what) }?;
    // SAFETY: as above, not null, and for as many as the caller says.
    Ok(unsafe { slice::from_raw_parts(pointer, count) })
}

/// So many texts.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// As [`list`]; or one of them is null.
pub(super) unsafe fn texts(pointer: *const *const c_char, count: usize, what: &str) -> Result<Vec<String>, InferError> {
    // SAFETY: the caller's promise.
    let pointers = unsafe { list(pointer, count, what) }?;
    // SAFETY: as above.
    pointers.iter().map(|pointer| unsafe { needed_text(*pointer, what) }).collect()
}

/// A parameter that is to be given to a response.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// It has no name, or is of a kind that there is none of.
pub(super) unsafe fn parameter(pointer: *const abi::Parameter) -> Result<(String, Parameter), InferError> {
    // SAFETY: the caller's promise.
    let given = unsafe { sized(pointer, "parameter") }?;
    // SAFETY: as above.
    let name = unsafe { needed_text(given.name, "parameter.name") }?;
    let value = match given.kind {
        1 => Parameter::Bool(given.boolean != 0),
        2 => Parameter::Int(given.integer),
        3 => i64::try_from(given.natural).map_or(Parameter::Uint(given.natural), Parameter::Int),
        4 => Parameter::Double(given.real),
        5 if given.text_length == 0 => Parameter::String(String::new()),
        5 if given.text_length > LONGEST_TEXT => {
            let text = format!(
                "parameter '{name}' has a text of {} bytes; at most {LONGEST_TEXT} are allowed",
                given.text_length
            );
            return Err(misuse(text));
        }
        5 => {
            // SAFETY: as above.
            let first = unsafe { reference(given.text.cast::<u8>(), "parameter.text") }?;
            // SAFETY: as above, for as many bytes as the caller says.
            let bytes = unsafe { slice::from_raw_parts(first, given.text_length) };
            Parameter::String(String::from_utf8_lossy(bytes).into_owned())
        }
        kind => return Err(misuse(format!("parameter '{name}' has kind {kind}; 1 to 5 are allowed"))),
    };
    Ok((name, value))
}
