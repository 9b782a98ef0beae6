//! Reads values that a library passes in, and stores the text of the last error.
//!
//! Contract for `unsafe`: a pointer from the library is null or valid as the header specifies, for
//! the duration of the call.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::slice;

use pharos::error::{ErrorCode, InferError};
use pharos::infer::Parameter;

use super::abi;

/// The maximum number of dimensions of a shape or labels of a metric: larger numbers are certainly
/// wrong.
const MAX_DIMENSIONS: usize = 64;
/// The maximum length of a parameter's string, in bytes.
const LONGEST_TEXT: usize = 1 << 20;

thread_local! {
    /// The value of `last_error`: like errno, the last failure of this thread's calls.
    static LAST_ERROR: RefCell<(abi::Code, CString)> = RefCell::default();
}

/// Makes a call, returns the code of its outcome and stores the text of an error for `last_error`.
pub(super) fn outcome_of(call: impl FnOnce() -> Result<(), InferError>) -> abi::Code {
    outcome(call())
}

/// Returns the code of a call's outcome and stores the text of an error for `last_error`.
pub(super) fn outcome(result: Result<(), InferError>) -> abi::Code {
    let Err(error) = result else { return abi::OK };
    let code = abi::code_of(&error);
    let text = match error.message.as_str() {
        "" if error.code == ErrorCode::Cancelled => c_text("the request is cancelled"),
        text => c_text(text),
    };
    LAST_ERROR.set((code, text));
    code
}

/// Returns the text of the last failure; valid until the next failure of this thread.
pub(super) fn last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|(_, text)| text.as_ptr())
}

/// Returns the text of the last failure, if it had this code.
pub(super) fn last_error_of(code: abi::Code) -> Option<String> {
    LAST_ERROR
        .with_borrow(|(last, text)| (*last == code).then(|| text.to_string_lossy().into_owned()))
}

/// Clears the stored error before a call of the library.
pub(super) fn forget_error() {
    LAST_ERROR.take();
}

/// Converts a string for the library; truncates it at a NUL.
pub(super) fn c_text(text: &str) -> CString {
    let text = text.split('\0').next().unwrap_or_default();
    CString::new(text).unwrap_or_default()
}

/// Returns an error for a wrong use of the interface.
pub(super) fn misuse(text: impl Into<String>) -> InferError {
    InferError::invalid(text)
}

/// Returns a reference to the pointer's target.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// The pointer is null, or not aligned.
pub(super) unsafe fn reference<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, InferError> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(misuse(format!("{what} is {pointer:?}, which is not a valid pointer")));
    }
    // SAFETY: the caller guarantees it.
    Ok(unsafe { &*pointer })
}

/// Returns a structure that begins with its size. A structure that grows in later versions is read
/// with its length in version 1.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// The pointer is null, or the structure is smaller than in any version of the interface.
pub(super) unsafe fn sized<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, InferError> {
    // SAFETY: the caller guarantees it; the size is the first field of all structures.
    let size = *unsafe { reference(pointer.cast::<usize>(), what) }?;
    if size < size_of::<T>() {
        return Err(misuse(format!(
            "{what} has size {size}; expected at least {}",
            size_of::<T>()
        )));
    }
    // SAFETY: as above, and the size is sufficient.
    unsafe { reference(pointer, what) }
}

/// Writes a result to a location given by the library.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// The pointer is null, or not aligned.
pub(super) unsafe fn put<T>(place: *mut T, value: T) -> Result<(), InferError> {
    if place.is_null() || !place.is_aligned() {
        return Err(misuse(format!(
            "the destination of the result is {place:?}, which is not a valid pointer"
        )));
    }
    // SAFETY: the caller guarantees it.
    unsafe { place.write(value) };
    Ok(())
}

/// Returns a string; `None` for null.
///
/// # Safety
/// This module's contract: it ends with a NUL.
pub(super) unsafe fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: the caller guarantees it.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

/// Returns a required string.
///
/// # Safety
/// As for [`text`].
///
/// # Errors
/// The pointer is null.
pub(super) unsafe fn needed_text(pointer: *const c_char, what: &str) -> Result<String, InferError> {
    // SAFETY: the caller guarantees it.
    unsafe { text(pointer) }.ok_or_else(|| misuse(format!("{what} is NULL")))
}

/// Returns a slice of `count` values.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// The pointer is null or not aligned, or there are more than [`MAX_DIMENSIONS`].
pub(super) unsafe fn list<'a, T>(
    pointer: *const T,
    count: usize,
    what: &str,
) -> Result<&'a [T], InferError> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > MAX_DIMENSIONS {
        return Err(misuse(format!(
            "{what} has {count} values; at most {MAX_DIMENSIONS} are allowed"
        )));
    }
    // SAFETY: the caller guarantees it.
    unsafe { reference(pointer, what) }?;
    // SAFETY: as above; the pointer is not null, and the caller guarantees the count.
    Ok(unsafe { slice::from_raw_parts(pointer, count) })
}

/// Returns `count` strings.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// As for [`list`]; also if one of the strings is null.
pub(super) unsafe fn texts(
    pointer: *const *const c_char,
    count: usize,
    what: &str,
) -> Result<Vec<String>, InferError> {
    // SAFETY: the caller guarantees it.
    let pointers = unsafe { list(pointer, count, what) }?;
    // SAFETY: as above.
    pointers.iter().map(|pointer| unsafe { needed_text(*pointer, what) }).collect()
}

/// Returns a parameter that the library sets on a response.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// The parameter has no name, or its kind is unknown.
pub(super) unsafe fn parameter(
    pointer: *const abi::Parameter,
) -> Result<(String, Parameter), InferError> {
    // SAFETY: the caller guarantees it.
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
                "parameter '{name}' has a string of {} bytes; at most {LONGEST_TEXT} are allowed",
                given.text_length
            );
            return Err(misuse(text));
        }
        5 => {
            // SAFETY: as above.
            let first = unsafe { reference(given.text.cast::<u8>(), "parameter.text") }?;
            // SAFETY: as above; the caller guarantees the length.
            let bytes = unsafe { slice::from_raw_parts(first, given.text_length) };
            Parameter::String(String::from_utf8_lossy(bytes).into_owned())
        }
        kind => {
            return Err(misuse(format!("parameter '{name}' has kind {kind}; 1 to 5 are allowed")));
        }
    };
    Ok((name, value))
}
