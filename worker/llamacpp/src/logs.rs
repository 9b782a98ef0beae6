//! The log of llama.cpp: the server gets its lines, and a failed load its last errors.

use std::sync::{Mutex, OnceLock};

use crate::host::{Host, Level};

/// The last errors that llama.cpp has logged: the reason why a load failed.
static ERRORS: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// The functions of the server, for the log of llama.cpp.
static HOST: OnceLock<Host> = OnceLock::new();

/// Passes a line of llama.cpp's log to the server.
unsafe extern "C" fn log(
    level: llama_cpp_sys_2::ggml_log_level,
    text: *const std::ffi::c_char,
    _: *mut std::ffi::c_void,
) {
    if text.is_null() {
        return;
    }
    // SAFETY: llama.cpp passes a text that ends with a NUL.
    let text = unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy();
    let line = text.trim();
    if line.is_empty() || line.chars().all(|character| character == '.') {
        return;
    }
    let level = match level {
        llama_cpp_sys_2::GGML_LOG_LEVEL_ERROR => {
            if let Ok(mut errors) = ERRORS.lock() {
                errors.push(line.to_owned());
                let excess = errors.len().saturating_sub(3);
                errors.drain(..excess);
            }
            Level::Warning
        }
        llama_cpp_sys_2::GGML_LOG_LEVEL_WARN => Level::Warning,
        _ => Level::Verbose,
    };
    if let Some(host) = HOST.get() {
        host.log(level, line);
    }
}

/// Passes the log of llama.cpp on to the server.
pub(crate) fn pass_on_to(host: Host) {
    let _ = HOST.set(host);
    // SAFETY: the function lives as long as the process.
    unsafe { llama_cpp_sys_2::llama_log_set(Some(log), std::ptr::null_mut()) };
}

/// Returns the errors that were logged since the last call, as the end of a sentence.
pub(crate) fn logged_errors() -> String {
    let errors = ERRORS.lock().map(|mut errors| std::mem::take(&mut *errors)).unwrap_or_default();
    match errors.is_empty() {
        true => "llama.cpp gave no reason".to_owned(),
        false => errors.join("; "),
    }
}
