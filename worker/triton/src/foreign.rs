//! Reads values that a library passes in, and writes results to places that it gives.
//!
//! Contract for `unsafe`: the contract of the package, see [`crate`].

use std::ffi::{CStr, CString, c_char};
use std::slice;

use crate::fault::Fault;

/// The maximum number of dimensions, labels or parameters: larger numbers are certainly wrong.
const MOST: usize = 4096;

/// Converts a string for a library; truncates it at a NUL.
pub(crate) fn c_text(text: &str) -> CString {
    let text = text.split('\0').next().unwrap_or_default();
    CString::new(text).unwrap_or_default()
}

/// Returns a string; `default` for null.
///
/// # Safety
/// The contract of this package.
pub(crate) unsafe fn text_or(pointer: *const c_char, default: &str) -> String {
    if pointer.is_null() {
        return default.to_owned();
    }
    // SAFETY: the caller guarantees it.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// Returns a required string.
///
/// # Safety
/// The contract of this package.
///
/// # Errors
/// The pointer is null, or the string is not UTF-8.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a str, Fault> {
    if pointer.is_null() {
        return Err(Fault::invalid(format!("{what} is NULL")));
    }
    // SAFETY: the caller guarantees it.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| {
        Fault::invalid(format!("{what} is '{}', which is not UTF-8", text.to_string_lossy()))
    })
}

/// Writes a result.
///
/// # Safety
/// The contract of this package.
///
/// # Errors
/// The pointer is null or not aligned.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) -> Result<(), Fault> {
    if place.is_null() || !place.is_aligned() {
        return Err(Fault::invalid(format!(
            "the destination of a result is {place:?}, which is not valid"
        )));
    }
    // SAFETY: the caller guarantees it.
    unsafe { place.write(value) };
    Ok(())
}

/// Writes a result that the library may leave out.
///
/// # Safety
/// The contract of this package.
pub(crate) unsafe fn put_if_wanted<T>(place: *mut T, value: T) {
    if !place.is_null() && place.is_aligned() {
        // SAFETY: the caller guarantees it.
        unsafe { place.write(value) };
    }
}

/// Returns an array.
///
/// # Safety
/// The contract of this package.
///
/// # Errors
/// The pointer is null or not aligned, or the array is longer than any valid one.
pub(crate) unsafe fn list<'a, T>(
    pointer: *const T,
    count: u64,
    what: &str,
) -> Result<&'a [T], Fault> {
    let count = usize::try_from(count).ok().filter(|count| *count <= MOST).ok_or_else(|| {
        Fault::invalid(format!("{what} has {count} values; at most {MOST} are allowed"))
    })?;
    if count == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(Fault::invalid(format!("{what} is {pointer:?}, which is not valid")));
    }
    // SAFETY: the caller guarantees it.
    Ok(unsafe { slice::from_raw_parts(pointer, count) })
}

/// Returns bytes.
///
/// # Safety
/// The contract of this package.
///
/// # Errors
/// The pointer is null.
pub(crate) unsafe fn bytes<'a>(
    pointer: *const c_char,
    size: usize,
    what: &str,
) -> Result<&'a [u8], Fault> {
    if size == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() || isize::try_from(size).is_err() {
        return Err(Fault::invalid(format!("{what} is {pointer:?} with {size} bytes")));
    }
    // SAFETY: the caller guarantees it.
    Ok(unsafe { slice::from_raw_parts(pointer.cast(), size) })
}
