//! The dynamic loader.
//!
//! Contract for `unsafe`: loading a library runs its initialization code, which the user has chosen
//! to trust. It is never unloaded, as in Triton, so its symbols stay valid. A symbol that is searched
//! is a function of the type that Triton's interface specifies for its name.

use std::ffi::{CStr, c_void};

/// Loads a library; returns its handle.
///
/// # Errors
/// The loader's message.
pub(crate) fn open_library(path: &CStr, flags: i32) -> Result<*mut c_void, String> {
    // SAFETY: this module's contract; the name ends with a NUL.
    let handle = unsafe { libc::dlopen(path.as_ptr(), flags) };
    if handle.is_null() { Err(loader_error()) } else { Ok(handle) }
}

/// Returns the loader's last message.
pub(crate) fn loader_error() -> String {
    // SAFETY: null, or a string that stays valid until this thread's next call of these functions.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown reason".to_owned();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Returns the function of this name; `F` is a function pointer of its type.
pub(crate) fn find<F: Copy>(handle: *mut c_void, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the library is loaded; the name ends with a NUL.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    // SAFETY: not null, of a function pointer's size, and of this type (this module's contract).
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}
