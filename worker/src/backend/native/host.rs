//! The table of the functions that a library may call, and those that belong to nothing in particular.
//!
//! Contract for `unsafe`: a text of the library is null or ends with a NUL.

use std::ffi::c_char;
use std::io::Write;

use super::abi::Host;
use super::{foreign, load, metrics, outputs, responses, running};

/// `pharos_host`.
pub(super) static HOST: Host = Host {
    size: size_of::<Host>(),
    last_error,
    log,
    config_parameter: load::config_parameter,
    config_input: load::config_input,
    config_output: load::config_output,
    fail_load: load::fail_load,
    request_count: running::request_count,
    input_count: running::input_count,
    input: running::input,
    request: running::request,
    request_parameter: running::request_parameter,
    find_parameter: running::find_parameter,
    is_wanted: running::is_wanted,
    is_cancelled: running::is_cancelled,
    allocate: outputs::allocate,
    withdraw: outputs::withdraw,
    fail: outputs::fail,
    fail_batch: outputs::fail_batch,
    set_parameter: outputs::set_parameter,
    reschedule: outputs::reschedule,
    inputs_ready: outputs::inputs_ready,
    computed: outputs::computed,
    response_begin: responses::response_begin,
    response_allocate: responses::response_allocate,
    response_set_parameter: responses::response_set_parameter,
    response_send: responses::response_send,
    response_send_error: responses::response_send_error,
    response_drop: responses::response_drop,
    finish: outputs::finish,
    metric_add: metrics::metric_add,
    metric_get: metrics::metric_get,
    metric_series: metrics::metric_series,
    add_or_update: metrics::add_or_update,
    metrics_flush: metrics::metrics_flush,
    detach: responses::detach,
    responder_begin: responses::responder_begin,
    responder_fail: responses::responder_fail,
    responder_finish: responses::responder_finish,
    responder_is_cancelled: responses::responder_is_cancelled,
    responder_drop: responses::responder_drop,
    keep_input: running::keep_input,
    release_input: running::release_input,
};

unsafe extern "C" fn last_error() -> *const c_char {
    foreign::last_error()
}

/// Writes to standard error, each line behind the character RS and the letter of its level: the frontend takes them off.
///
/// # Safety
/// This module's contract.
unsafe extern "C" fn log(level: i32, message: *const c_char) {
    // SAFETY: the caller's promise.
    let Some(message) = (unsafe { foreign::text(message) }) else { return };
    let letter = match level {
        2 => 'W',
        3 => 'E',
        4 => 'V',
        _ => 'I',
    };
    let lines: String = message.lines().map(|line| format!("\u{1e}{letter}{line}\n")).collect();
    // Nobody is there to be told when the stream is closed.
    let _ = std::io::stderr().lock().write_all(lines.as_bytes());
}
