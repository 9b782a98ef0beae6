//! The table of functions that a library may call, and those functions that belong to no other
//! module.
//!
//! Contract for `unsafe`: a string from the library is null or ends with a NUL.

use std::ffi::{c_char, c_void};

use pharos_backend::Received;

use super::abi::{Code, Input, MetricSpec, Output, Parameter, Request, Tensor};
use super::load::Load;
use super::metrics::{MetricHandle, MetricsHandle, SeriesHandle};
use super::running::Handle;
use super::slots::{Detached, Responding, Slot};
use super::{foreign, load, metrics, outputs, responses, running};

/// A function that a library calls.
macro_rules! host_fn {
    (($($argument:ty),*) $(-> $result:ty)?) => { unsafe extern "C" fn($($argument),*) $(-> $result)? };
}

/// `pharos_host`.
#[repr(C)]
pub(super) struct Host {
    size: usize,
    last_error: host_fn!(() -> *const c_char),
    log: host_fn!((i32, *const c_char)),
    config_parameter: host_fn!((*const Load<'static>, *const c_char) -> *const c_char),
    config_input: host_fn!((*const Load<'static>, usize) -> *const Tensor),
    config_output: host_fn!((*const Load<'static>, usize) -> *const Tensor),
    fail_load: host_fn!((*const Load<'static>, *const c_char) -> Code),
    request_count: host_fn!((*const Handle) -> usize),
    input_count: host_fn!((*const Handle) -> usize),
    input: host_fn!((*const Handle, usize) -> *const Input),
    request: host_fn!((*const Handle, usize) -> *const Request),
    request_parameter: host_fn!((*const Handle, usize, usize) -> *const Parameter),
    find_parameter: host_fn!((*const Handle, usize, *const c_char) -> *const Parameter),
    is_wanted: host_fn!((*const Handle, usize) -> i32),
    is_cancelled: host_fn!((*const Handle, usize) -> i32),
    allocate: host_fn!((*const Handle, *const Output, *mut *mut c_void) -> Code),
    withdraw: host_fn!((*const Handle, usize) -> Code),
    fail: host_fn!((*const Handle, usize, Code, *const c_char) -> Code),
    fail_batch: host_fn!((*const Handle, Code, *const c_char) -> Code),
    set_parameter: host_fn!((*const Handle, usize, *const Parameter) -> Code),
    reschedule: host_fn!((*const Handle, usize) -> Code),
    inputs_ready: host_fn!((*const Handle)),
    computed: host_fn!((*const Handle)),
    response_begin: host_fn!((*const Handle, usize, *mut *const Responding) -> Code),
    response_allocate: host_fn!((*const Responding, *const Output, *mut *mut c_void) -> Code),
    response_set_parameter: host_fn!((*const Responding, *const Parameter) -> Code),
    response_send: host_fn!((*const Responding, i32) -> Code),
    response_send_error: host_fn!((*const Responding, Code, *const c_char) -> Code),
    response_drop: host_fn!((*const Responding)),
    finish: host_fn!((*const Handle, usize) -> Code),
    metric_add: host_fn!((*const MetricsHandle, *const MetricSpec, *mut *const MetricHandle) -> Code),
    metric_get: host_fn!((*const MetricsHandle, i32, *const c_char, *mut *const MetricHandle) -> Code),
    metric_series: host_fn!((*const MetricHandle, *const *const c_char, usize, *mut *const SeriesHandle) -> Code),
    add_or_update: host_fn!((*const SeriesHandle, f64, i64) -> Code),
    metrics_flush: host_fn!((*const MetricsHandle) -> Code),
    detach: host_fn!((*const Handle, usize, *mut *const Detached) -> Code),
    responder_begin: host_fn!((*const Detached, *mut *const Responding) -> Code),
    responder_fail: host_fn!((*const Detached, Code, *const c_char) -> Code),
    responder_finish: host_fn!((*const Detached) -> Code),
    responder_is_cancelled: host_fn!((*const Detached) -> i32),
    responder_drop: host_fn!((*const Detached)),
    keep_input: host_fn!((*const Handle, usize, *mut *const c_void, *mut *const Slot<Received>) -> Code),
    release_input: host_fn!((*const Slot<Received>)),
    responder_ready: host_fn!((*const Detached) -> i32),
    responder_hold: host_fn!((*const Detached, i32)),
    report_load_progress: host_fn!((*const Load<'static>, f64) -> Code),
}

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
    responder_ready: responses::responder_ready,
    responder_hold: responses::responder_hold,
    report_load_progress: load::report_load_progress,
};

unsafe extern "C" fn last_error() -> *const c_char {
    foreign::last_error()
}

/// # Safety
/// This module's contract.
unsafe extern "C" fn log(level: i32, message: *const c_char) {
    // SAFETY: the caller guarantees it.
    let Some(message) = (unsafe { foreign::text(message) }) else { return };
    let letter = match level {
        2 => 'W',
        3 => 'E',
        4 => 'V',
        _ => 'I',
    };
    pharos_backend::log(letter, &message);
}
